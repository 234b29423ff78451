"""Weights in Hugging Face's safetensors files into a model of any layout; where the files hold the tensors of a Decoder.

| family                       | feed-forward part of block N, after ``model.layers.N.``                                        |
|------------------------------|------------------------------------------------------------------------------------------------|
| Llama, Qwen2, Qwen3, Mistral | as ours                                                                                        |
| Mixtral                      | ``block_sparse_moe.gate``, ``block_sparse_moe.experts.E.{w1, w3, w2}``: gate, up, down         |
| Qwen2-MoE, Qwen3-MoE, OLMoE  | ``mlp.gate``, ``mlp.experts.E.{gate, up, down}_proj``, ``mlp.shared_expert``, its gate         |
| DeepSeek-V2, DeepSeek-V3     | the same but ``mlp.shared_experts``                                                            |
| GPT-2                        | ``transformer.h.N``: ``ln_1, attn.c_attn, attn.c_proj, ln_2, mlp.c_fc, mlp.c_proj``, [in, out] |

Ours keeps the experts of a block in one tensor [E, ...]; the files have a tensor for each. GPT-2's c_attn is q, k and v side by
side. Source: the published files, and what transformers 5.23's save_pretrained writes.

Each rank opens the files one after the other and reads of every tensor the range that is its part: nothing is sent, and no full
tensor is in memory but one of which a rank has all. Files are mapped; a range is copied into the parameter block by block. Checked
before anything is read: the index against the files, every name, shape and type against the model, and config.json, where there is
one, against the plan's model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...schema import ConfigError
from ...schema.base import read_json
from ...schema.model import ModelSpec
from ...schema.units import MIB
from ..models.decoder import Decoder, is_adapter
from ..models.layers import local_region, local_tensor

if TYPE_CHECKING:
    from safetensors import safe_open

_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp)\.experts\.(gate|up|down)_proj")
_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}
_GPT2_OUTER = {
    "model.embed_tokens.weight": "transformer.wte.weight",
    "model.embed_positions.weight": "transformer.wpe.weight",
    "model.norm.weight": "transformer.ln_f.weight",
    "model.norm.bias": "transformer.ln_f.bias",
    "lm_head.weight": "lm_head.weight",
}
_GPT2_INNER = {
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
_GPT2_FUSED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
TIED_HEAD = "lm_head.weight"

_NOT_READ = re.compile(r".*(rotary_emb\.inv_freq|\.attn\.(masked_)?bias)|model\.layers\.(\d+)\..*")
"""Tables and masks that old files hold, and layers past the last: the multi-token-prediction modules of DeepSeek-V3."""

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
BLOCK_BYTES = 64 * MIB
"""What is copied at a time."""

_DTYPES = ("F64", "F32", "F16", "BF16")
_NOT_THE_MODEL = {"name", "source", "architecture", "max_seq_len"}


@dataclass(frozen=True)
class Piece:
    """A tensor of the files of which one of ours is, or is part of.

    Attributes:
        name, shape: in the files.
        row: which entry along our first dimension it is, where the files have a tensor for each; None for all of ours.
        start: where ours starts along its output dimension, in a tensor that holds several of ours.
        is_transposed: [in, out] in the files, [out, in] here.
    """

    name: str
    shape: tuple[int, ...]
    row: int | None = None
    start: int = 0
    is_transposed: bool = False

    def place(self, region: tuple[slice, ...]) -> tuple[slice, ...] | None:
        """Return the range of the file's tensor for a region of ours; None where nothing of it is there."""
        if any(part.start >= part.stop for part in region):
            return None
        if self.row is not None:
            if not region[0].start <= self.row < region[0].stop:
                return None
            region = region[1:]
        outputs = slice(self.start + region[0].start, self.start + region[0].stop)
        return (*region[1:], outputs) if self.is_transposed else (outputs, *region[1:])

    def local(self, tensor: Tensor) -> tuple[tuple[slice, ...] | None, Tensor]:
        """Return the range of the file's tensor that this rank has of one of ours (None: nothing of it), and its part of ours."""
        region, local = local_region(tensor), local_tensor(tensor)
        place = self.place(region)
        return place, local if place is None or self.row is None else local[self.row - region[0].start]


def pieces_of(name: str, shape: tuple[int, ...], spec: ModelSpec) -> tuple[Piece, ...]:
    """Return the file's tensors that make up one of a Decoder's, given its name and full shape."""
    if spec.architecture == "GPT2LMHeadModel":
        return (_gpt2_piece(name, shape),)
    is_mixtral = spec.architecture == "MixtralForCausalLM"
    expert = _EXPERT.fullmatch(name)
    if expert is not None:
        prefix, part = expert.groups()
        prefix, part = (f"{prefix[:-3]}block_sparse_moe", _MIXTRAL[part]) if is_mixtral else (prefix, f"{part}_proj")
        rows = range(shape[0])
        return tuple(Piece(f"{prefix}.experts.{row}.{part}.weight", shape[1:], row=row) for row in rows)
    if is_mixtral:
        name = name.replace(".mlp.gate.", ".block_sparse_moe.gate.")
    elif spec.architecture.startswith("Deepseek"):
        name = name.replace(".mlp.shared_expert.", ".mlp.shared_experts.")
    return (Piece(name, shape),)


def pieces_of_model(spec: ModelSpec) -> list[Piece]:
    """Return the files' tensors of all parameters and buffers of a Decoder, in order; a tied output projection is not stored."""
    with torch.device("meta"):
        decoder = Decoder(spec)
    tensors = {**dict(decoder.named_parameters()), **dict(decoder.named_buffers())}
    if spec.tie_embeddings:
        tensors.pop(TIED_HEAD, None)
    return [piece for name, tensor in tensors.items() for piece in pieces_of(name, tuple(tensor.shape), spec)]


def _may_be_ignored(name: str, spec: ModelSpec) -> bool:
    """Tell whether files may hold a name that no tensor of the model has."""
    match = _NOT_READ.fullmatch(name)
    is_old = match is not None and (match[3] is None or int(match[3]) >= spec.num_blocks)
    return is_old or (spec.tie_embeddings and name == TIED_HEAD)


def _gpt2_piece(name: str, shape: tuple[int, ...]) -> Piece:
    if name in _GPT2_OUTER:
        return Piece(_GPT2_OUTER[name], shape)
    match = _BLOCK.fullmatch(name)
    assert match is not None, name
    number, module, kind = match.groups()
    is_transposed = len(shape) > 1
    if module in _GPT2_FUSED:
        place, width = _GPT2_FUSED.index(module), shape[0]
        fused = (shape[1], 3 * width) if is_transposed else (3 * width,)
        stored = f"transformer.h.{number}.attn.c_attn.{kind}"
        return Piece(stored, fused, start=place * width, is_transposed=is_transposed)
    stored = f"transformer.h.{number}.{_GPT2_INNER[module]}.{kind}"
    return Piece(stored, shape[::-1] if is_transposed else shape, is_transposed=is_transposed)


@dataclass(frozen=True)
class StoredWeights:
    """A folder of safetensors files, looked through but not read: file, shape and type (in their spelling) of each tensor."""

    folder: Path
    file_of: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]

    def name(self, piece: Piece) -> str:
        """Return the name under which the folder holds a piece: with or without the base model's prefix, as GPT-2 is published."""
        return piece.name if piece.name in self.file_of else re.sub(r"^(model|transformer)\.", "", piece.name)


def find_weights(folder: str | Path) -> StoredWeights:
    """Return the names, shapes and types of the tensors in a folder, from the headers of its files."""
    folder = Path(folder)
    listed = _index(folder)
    files = sorted(set(listed.values())) if listed is not None else [SINGLE_FILE]
    file_of: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for file in files:
        with _open(folder / file) as opened:
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
    pieces = pieces_of_model(spec)
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
    unknown = sorted(name for name in stored.file_of if name not in used and not _may_be_ignored(name, spec))
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
    stored, requested = check_weights(spec, folder), []
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not is_adapter(name):
            # A tied projection alone on its stage is the embedding.
            source = "model.embed_tokens.weight" if spec.tie_embeddings and name == TIED_HEAD else name
            pieces = pieces_of(source, tuple(tensor.shape), spec)
            requested += [(stored.name(piece), piece, tensor) for piece in pieces]
    read_pieces(stored, requested)


@torch.no_grad()
def read_pieces(stored: StoredWeights, pieces: list[tuple[str, Piece, Tensor]]) -> None:
    """Copy the part that this rank holds of each tensor, given the name of a piece of it in the files; file by file."""
    for file in sorted({stored.file_of[name] for name, _, _ in pieces}):
        with _open(stored.folder / file) as opened:
            for name, piece, tensor in pieces:
                if stored.file_of[name] == file:
                    _copy(opened.get_slice(name), piece, tensor)


def _copy(source: Any, piece: Piece, tensor: Tensor) -> None:
    place, target = piece.local(tensor)
    if place is None:
        return
    for rows in blocks(tuple(target.shape), target.element_size()):
        outputs = int(piece.is_transposed)
        first, part = place[outputs].start, [*place]
        part[outputs] = slice(first + rows.start, first + rows.stop)
        values = source[tuple(part)]
        target[rows].copy_(values.T if piece.is_transposed else values)


def blocks(shape: tuple[int, ...], element_bytes: int) -> Iterator[slice]:
    """Yield runs of the first dimension of at most `BLOCK_BYTES`."""
    rows = max(1, BLOCK_BYTES // max(1, element_bytes * prod(shape[1:])))
    for start in range(0, shape[0], rows):
        yield slice(start, min(start + rows, shape[0]))


def _open(path: Path) -> safe_open:
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
    theirs, ours = (
        model.model_dump(mode="json", exclude=_NOT_THE_MODEL) for model in (ModelSpec.from_hf(folder), spec)
    )
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
    return (*names[:4], *([f"and {len(names) - 4} more"] if len(names) > 4 else []))
