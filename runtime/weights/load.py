"""Weights in Hugging Face's safetensors files into a model of any layout.

Each rank opens the files one after the other and reads of every tensor the range that is its part: nothing is sent, and no full
tensor is in memory but one of which a rank has all. The files are mapped into memory; a range that is read is copied into the
parameter in blocks, so that there is no more than one block besides the parameters.

Checked before anything is read: the index against the files, every name, shape and type against the model, and config.json, where
there is one, against the plan's model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...schema import ConfigError, ModelSpec
from ...schema.base import read_json
from ...schema.units import MIB
from ..models.decoder import Decoder, is_adapter
from ..models.layers import local_region, local_tensor
from .names import TIED_HEAD, Piece, may_be_ignored, pieces_of, pieces_of_model, without_prefix

if TYPE_CHECKING:
    from safetensors import safe_open

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
BLOCK_BYTES = 64 * MIB
"""What is copied at a time."""

_DTYPES = ("F64", "F32", "F16", "BF16")
_SHOWN = 4
_NOT_THE_MODEL = ("name", "source", "architecture", "max_seq_len")


@dataclass(frozen=True)
class StoredWeights:
    """A folder of safetensors files, looked through but not read.

    Attributes:
        file_of: file name of each tensor.
        shapes, dtypes: of each tensor, the latter as safetensors spells them.
    """

    folder: Path
    file_of: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]

    def name(self, piece: Piece) -> str:
        """Return the name under which the folder holds a piece: with or without the base model's prefix."""
        return piece.name if piece.name in self.file_of else without_prefix(piece.name)


def find_weights(folder: str | Path) -> StoredWeights:
    """Return the names, shapes and types of the tensors in a folder, from the headers of its files."""
    folder = Path(folder)
    listed = _index(folder)
    files = sorted(set(listed.values())) if listed is not None else [SINGLE_FILE]
    file_of: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for file in files:
        with open_file(folder / file) as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                part = opened.get_slice(name)
                file_of[name], shapes[name], dtypes[name] = file, tuple(part.get_shape()), part.get_dtype()
    missing = [name for name, file in (listed or {}).items() if file_of.get(name) != file]
    if missing:
        raise ConfigError(
            f"{folder / INDEX_FILE} names tensors that its files do not hold", details=_first_few(missing)
        )
    return StoredWeights(folder, file_of, shapes, dtypes)


def check_weights(spec: ModelSpec, folder: str | Path) -> StoredWeights:
    """Return the weights in a folder, after checking everything about them that can be wrong for a model."""
    stored = find_weights(folder)
    _check_config(spec, stored.folder)
    pieces = [piece for parts in pieces_of_model(decoder_shapes(spec), spec).values() for piece in parts]
    missing = [piece.name for piece in pieces if stored.name(piece) not in stored.file_of]
    if missing:
        raise ConfigError(f"{folder} lacks {len(missing)} tensors of {spec.name}", details=_first_few(missing))
    wrong = [
        f"{piece.name} is {list(stored.shapes[stored.name(piece)])}, the model's {list(piece.shape)}"
        for piece in pieces
        if stored.shapes[stored.name(piece)] != piece.shape
    ]
    if wrong:
        raise ConfigError(
            f"{folder} has {len(wrong)} tensors of another shape than {spec.name}", details=_first_few(wrong)
        )
    used = {stored.name(piece) for piece in pieces}
    odd = [f"{name} is {stored.dtypes[name]}" for name in sorted(used) if stored.dtypes[name] not in _DTYPES]
    if odd:
        raise ConfigError(
            f"{folder} holds {len(odd)} tensors in a type that cannot be trained",
            details=_first_few(odd),
            help="convert them to BF16, F16 or F32 first",
        )
    unknown = sorted(name for name in stored.file_of if name not in used and not may_be_ignored(name, spec))
    if unknown:
        raise ConfigError(
            f"{folder} holds {len(unknown)} tensors that {spec.name} does not have", details=_first_few(unknown)
        )
    return stored


def load_weights(module: nn.Module, spec: ModelSpec, folder: str | Path) -> None:
    """Fill every parameter and buffer of this rank's part of a Decoder, sharded or not.

    Raises:
        ConfigError: the weights are damaged or of another model.
    """
    stored = check_weights(spec, folder)
    requested = [(stored.name(piece), piece, tensor) for tensor, pieces in _tensors(module, spec) for piece in pieces]
    read_pieces(stored, requested)


@torch.no_grad()
def read_pieces(stored: StoredWeights, pieces: list[tuple[str, Piece, Tensor]]) -> None:
    """Copy the part that this rank holds of each tensor, given the name of a piece of it in the files; file by file."""
    for file in sorted({stored.file_of[name] for name, _, _ in pieces}):
        with open_file(stored.folder / file) as opened:
            for name, piece, tensor in pieces:
                if stored.file_of[name] == file:
                    _copy(opened.get_slice(name), piece, tensor)


def _tensors(module: nn.Module, spec: ModelSpec) -> Iterator[tuple[Tensor, tuple[Piece, ...]]]:
    """Yield the tensors of this rank with the pieces they are made of; a tied projection alone on its stage is the embedding."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_adapter(name):
            continue
        source = "model.embed_tokens.weight" if spec.tie_embeddings and name == TIED_HEAD else name
        yield tensor, pieces_of(source, tuple(tensor.shape), spec)


def _copy(source: Any, piece: Piece, tensor: Tensor) -> None:
    region, local = local_region(tensor), local_tensor(tensor)
    place = piece.place(region)
    if place is None:
        return
    target = local if piece.row is None else local[piece.row - region[0].start]
    for rows in blocks(tuple(target.shape), target.element_size()):
        outputs = 1 if piece.is_transposed else 0
        first = place[outputs].start
        part = [*place]
        part[outputs] = slice(first + rows.start, first + rows.stop)
        values = source[tuple(part)]
        target[rows].copy_(values.T if piece.is_transposed else values)


def blocks(shape: tuple[int, ...], element_bytes: int) -> Iterator[slice]:
    """Yield runs of the first dimension of at most `BLOCK_BYTES`."""
    row_bytes = element_bytes
    for size in shape[1:]:
        row_bytes *= size
    rows = max(1, BLOCK_BYTES // max(1, row_bytes))
    for start in range(0, shape[0], rows):
        yield slice(start, min(start + rows, shape[0]))


def decoder_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the full shapes of the parameters and buffers of the model's Decoder, in order."""
    with torch.device("meta"):
        decoder = Decoder(spec)
    return {name: tuple(tensor.shape) for name, tensor in (*decoder.named_parameters(), *decoder.named_buffers())}


def open_file(path: Path) -> safe_open:
    """Open one safetensors file, mapped."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ConfigError("reading Hugging Face weights needs safetensors", help="pip install safetensors") from None
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def _index(folder: Path) -> dict[str, str] | None:
    """Return the file of each tensor, as the folder's index says; None where there is one file and no index."""
    if not folder.is_dir():
        raise ConfigError(f"no such folder of weights: {folder}")
    path = folder / INDEX_FILE
    if not path.is_file():
        if not (folder / SINGLE_FILE).is_file():
            raise ConfigError(
                f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}",
                help="other formats (pytorch_model.bin) may run code when they are read; save the model as safetensors",
            )
        return None
    content = read_json(path)
    listed = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise ConfigError(f"{path} has no weight_map of names to files")
    outside = [file for file in listed.values() if PurePath(file).name != file or not file.endswith(".safetensors")]
    if outside:
        raise ConfigError(f"{path} names what is no file of its folder", details=_first_few(outside))
    return listed


def _check_config(spec: ModelSpec, folder: Path) -> None:
    """Refuse other settings that leave shapes as they are but not what the weights compute."""
    if not (folder / "config.json").is_file():
        return
    theirs = json.loads(ModelSpec.from_hf(folder).model_dump_json(exclude=set(_NOT_THE_MODEL)))
    ours = json.loads(spec.model_dump_json(exclude=set(_NOT_THE_MODEL)))
    differing = [
        f"{name}: {theirs[name]} there, {ours[name]} in the plan" for name in ours if theirs[name] != ours[name]
    ]
    if differing:
        raise ConfigError(
            f"{folder / 'config.json'} describes another model than the plan's {spec.name}",
            details=tuple(line if len(line) <= 400 else line[:397] + "..." for line in differing),
            help=f"plan with --model {folder}",
        )


def _first_few(names: list[str]) -> tuple[str, ...]:
    rest = len(names) - _SHOWN
    return (*names[:_SHOWN], *((f"and {rest} more",) if rest > 0 else ()))
