"""A trained model of any layout as a folder that Hugging Face's from_pretrained reads.

Files of bounded size, an index, and config.json. Nothing is gathered: the first rank makes the files with their headers, and every
rank writes the ranges that it holds at their places in them (of copies, one rank does), block by block. The ranks need storage that
all of them share, as checkpoints do. The folder appears under its name when it is complete.

Format: 8 bytes with the length of a JSON header, the header ``{name: {dtype, shape, data_offsets}}``, the tensors row by row
(github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...schema import ConfigError, MeshwrightError, ModelSpec, RuntimeMismatchError
from ...schema.base import read_json
from ...schema.hf_export import hf_config
from ...schema.units import GB, format_bytes
from ..data_parallel import compute_dtype
from ..models.decoder import Decoder, is_adapter
from ..parallel_model import ParallelModel
from .load import INDEX_FILE, SINGLE_FILE, TIED_HEAD, blocks, pieces_of, pieces_of_model

MAX_FILE_BYTES = 5 * GB
"""Largest file, unless one tensor is larger. Source: the default of transformers before 5."""

_SPELLING = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_COPIED = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model",
)  # fmt: skip
"""What belongs to a model besides its weights."""


@dataclass(frozen=True)
class _Place:
    """The file of a tensor, its first byte in it, and its shape."""

    file: str
    offset: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Files:
    """All files of a folder: the positions of tensors, headers and sizes."""

    positions: Mapping[str, _Place]
    headers: Mapping[str, bytes]
    sizes: Mapping[str, int]


def check_weights_target(spec: ModelSpec, folder: str | Path) -> None:
    """Check that the weights of a model can be saved in a folder, before a run depends on it."""
    folder = Path(folder)
    hf_config(spec)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} already exists", help="give --save-weights a new folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder.parent) as file:
            file.write(b"weights fit")
        free = shutil.disk_usage(folder.parent).free
    except OSError as error:
        raise ConfigError(f"cannot write weights to {folder}: {error.strerror}") from None
    needed = 2 * spec.num_params
    if free < needed:
        raise ConfigError(
            f"{folder}: the weights take {format_bytes(needed)} in 16 bits, {format_bytes(free)} are free"
        )


def save_weights(
    model: ParallelModel,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    origin: str | Path | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Path:
    """Write the model's weights in Hugging Face's layout; every rank calls it.

    Args:
        dtype: of the files; unset, what the plan computes in (bf16 for bf16-mixed).
        origin: folder the weights came from, whose config.json and tokenizer go with them; unset, config.json is made from the
            plan.
        max_file_bytes: of one file, unless it holds one tensor only.

    Raises:
        ConfigError: the folder exists, or the type cannot be written.
        RuntimeMismatchError: the model is not the plan's own.
        MeshwrightError: a rank could not write its part.
    """
    folder, spec = Path(folder), model.plan.model
    if not isinstance(model.module, Decoder):
        raise RuntimeMismatchError(
            f"weights of a {type(model.module).__name__} are not saved in Hugging Face's layout by this version",
            help="gather them with torch.distributed.checkpoint.state_dict.get_model_state_dict, or train the plan's own model",
        )
    dtype = dtype or compute_dtype(model.plan)
    if dtype not in _SPELLING:
        raise ConfigError(f"weights cannot be saved as {dtype}", help=f"one of {', '.join(map(str, _SPELLING))}")
    files = _files(spec, dtype, max_file_bytes)
    partial, failed = folder.with_name(f".{folder.name}.partial"), f"cannot save the weights to {folder}"
    is_first = dist.get_rank() == 0
    try:
        with _together(failed):
            if is_first:
                _prepare(folder, partial, files)
        with _together(failed):
            _write_local(model, partial, files, dtype)
        with _together(failed):
            if is_first:
                _write_rest(partial, files, spec, dtype, Path(origin) if origin is not None else None)
                if folder.exists():
                    folder.rmdir()
                partial.rename(folder)
    except MeshwrightError:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)  # a full disk needs the room
        raise
    return folder


def _files(spec: ModelSpec, dtype: torch.dtype, max_bytes: int) -> _Files:
    """Lay out the tensors in the order of the model, one file after the other filled up."""
    shapes = {piece.name: piece.shape for piece in pieces_of_model(spec)}
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    end = 0
    for name, shape in shapes.items():
        size = prod(shape) * dtype.itemsize
        if groups[-1] and end + size > max_bytes:
            groups.append({})
            end = 0
        groups[-1][name] = shape
        end += size
    positions, headers, sizes = dict[str, _Place](), dict[str, bytes](), dict[str, int]()
    for idx, group in enumerate(groups):
        single = len(groups) == 1
        file = SINGLE_FILE if single else f"model-{idx + 1:05d}-of-{len(groups):05d}.safetensors"
        headers[file], starts = _header(group, dtype)
        *begins, sizes[file] = (len(headers[file]) + start for start in starts)
        positions |= {name: _Place(file, begin, group[name]) for name, begin in zip(group, begins, strict=True)}
    return _Files(positions, headers, sizes)


def _header(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> tuple[bytes, list[int]]:
    """Return the header of tensors that follow one another, and where each begins behind it, with the end of the last one."""
    starts = [0, *accumulate(prod(shape) * dtype.itemsize for shape in shapes.values())]
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for (name, shape), ends in zip(shapes.items(), pairwise(starts), strict=True):
        content[name] = {"dtype": _SPELLING[dtype], "shape": list(shape), "data_offsets": list(ends)}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, starts


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write full fp32 tensors as one file, under another name until it is complete."""
    shapes = {name: tuple(tensor.shape) for name, tensor in sorted(tensors.items())}
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(_header(shapes, torch.float32)[0])
            for name in shapes:
                file.write(tensors[name].contiguous().numpy().tobytes())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _prepare(folder: Path, partial: Path, files: _Files) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} already exists", help="save to a new folder")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, header in files.headers.items():
        with (partial / name).open("wb") as file:
            file.write(header)
            file.truncate(files.sizes[name])


@torch.no_grad()
def _write_local(model: ParallelModel, folder: Path, files: _Files, dtype: torch.dtype) -> None:
    """Write the ranges of all tensors that this rank has to write."""
    spec, opened = model.plan.model, dict[str, int]()
    tensors = (*model.module.named_parameters(), *model.module.named_buffers())
    try:
        for name, tensor in tensors:
            if is_adapter(name) or (spec.tie_embeddings and name == TIED_HEAD) or not model.is_first_copy(name, tensor):
                continue
            for piece in pieces_of(name, tuple(tensor.shape), spec):
                part, values = piece.local(tensor)
                if part is None:
                    continue
                place = files.positions[piece.name]
                if place.file not in opened:
                    opened[place.file] = os.open(folder / place.file, os.O_WRONLY)
                _write_range(opened[place.file], place, part, values.T if piece.is_transposed else values, dtype)
        for descriptor in opened.values():
            os.fsync(descriptor)
    finally:
        for descriptor in opened.values():
            os.close(descriptor)


def _write_range(descriptor: int, place: _Place, part: tuple[slice, ...], values: Tensor, dtype: torch.dtype) -> None:
    """Write a range of a tensor at its place, in as few pieces as stand together in the file."""
    # Every dimension is 1 or 2: rows of elements.
    width = prod(place.shape[1:])
    columns = part[1] if len(part) > 1 else slice(0, 1)
    for rows in blocks(tuple(values.shape), dtype.itemsize):
        data = values[rows].to("cpu", dtype).contiguous().view(torch.uint8).numpy()
        first = place.offset + ((part[0].start + rows.start) * width + columns.start) * dtype.itemsize
        if columns.stop - columns.start == width:
            _write_all(descriptor, memoryview(data).cast("B"), first)
            continue
        for row in data:
            _write_all(descriptor, memoryview(row), first)
            first += width * dtype.itemsize


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while len(data):
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _write_rest(folder: Path, files: _Files, spec: ModelSpec, dtype: torch.dtype, origin: Path | None) -> None:
    """Write the index, config.json, and what belongs to the model besides."""
    if len(files.sizes) > 1:
        size = sum(prod(place.shape) for place in files.positions.values()) * dtype.itemsize
        weight_map = {name: place.file for name, place in sorted(files.positions.items())}
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    source = origin / "config.json" if origin is not None else None
    config = read_json(source) if source is not None and source.is_file() else hf_config(spec)
    if not isinstance(config, dict):
        raise ConfigError(f"{source} holds no object")
    spelled = "dtype" if "dtype" in config else "torch_dtype"
    config[spelled] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in _COPIED if origin is not None else ():
        if (origin / name).is_file():
            shutil.copyfile(origin / name, folder / name)


@contextlib.contextmanager
def _together(message: str) -> Iterator[None]:
    """Do a part of the work on all ranks; where one fails, all of them say so instead of waiting for it."""
    failure: MeshwrightError | None = None
    try:
        yield
    except OSError as error:
        failure = MeshwrightError(message, details=(f"rank {dist.get_rank()}: {error.strerror or error}",))
    except MeshwrightError as error:
        failure = error
    failures: list[MeshwrightError | None] = [failure] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    first = next((error for error in failures if error is not None), None)
    if first is not None:
        raise first
