"""Routing data from files: loads [T, L, E] and token traces [tokens, L, top_k]; nothing read here can run code.

| file | content |
|---|---|
| .npy | an array, loads of rank 1 to 3 |
| .npz | those that match `key` (globs, separated by commas), else the only one, else load, logical_count or routed_experts |
| .csv | one row a layer, one column an expert; or columns layer, expert, load |
| .json | nested lists, or an object with load or logical_count (SGLang's expert distribution) or routed_experts |
| .jsonl | a request a line with routed_experts [tokens, layers, top_k] (vLLM's and SGLang's routed experts) |
| .pt | a tensor, or a dict with logical_count (SGLang's dump) or routed_experts, read with weights_only |

A trace read for its loads is counted. Several arrays are several workloads.
"""

from __future__ import annotations

import fnmatch
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..schema.base import read_json, read_text
from ..schema.errors import ConfigError
from ..solvers.experts.instance import MAX_LOADS, validate_loads

LOAD_KEYS = ("logical_count", "load", "loads", "expert_load", "weight", "counts")
TRACE_KEYS = ("routed_experts", "topk_ids", "trace")
MAX_UNPACKED_BYTES, MAX_UNPACKED_RATIO = 2**30, 64
"""An archive of routing data may unpack to the first, or to the second times its size."""

MAX_EXPERTS = 10**6
"""Of a layer: a larger number is no expert."""

_SUFFIXES = (".npy", ".npz", ".csv", ".json", ".jsonl", ".pt", ".pth")


def read_loads(paths: list[Path], key: str = "") -> NDArray[np.float64]:
    """Return loads [D, L, E] of the workloads in files, steps of time within a file summed.

    Raises:
        ConfigError: a file that is missing, damaged, of another kind, or holds no loads; workloads of different shapes.
    """
    loads = [load for path in paths for load in _loads_of(path, key)]
    shapes = {load.shape for load in loads}
    if len(shapes) > 1:
        raise ConfigError(f"workloads of different shapes (layers, experts): {sorted(shapes)}")
    return validate_loads(np.stack(loads))


def _loads_of(path: Path, key: str) -> list[NDArray[np.float64]]:
    loads = []
    for name, array in _arrays(path, key).items():
        try:
            if name in TRACE_KEYS:
                loads.append(counts_of(_as_trace(array, path)))
                continue
            loads.append(validate_loads(array).sum(axis=0))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.message}", details=error.details, help=error.help) from None
    return loads


def read_trace(path: Path, key: str = "") -> NDArray[np.int64]:
    """Return the experts of each token [tokens, L, top_k].

    Raises:
        ConfigError: as `read_loads`.
    """
    arrays = _arrays(path, key)
    name = next((known for known in TRACE_KEYS if known in arrays), next(iter(arrays)))
    return _as_trace(arrays[name], path)


def _as_trace(array: Any, path: Path) -> NDArray[np.int64]:
    trace = np.asarray(array)
    is_trace = trace.ndim == 3 and np.issubdtype(trace.dtype, np.integer) and trace.size > 0
    if not is_trace or trace.min() < 0 or trace.max() >= MAX_EXPERTS:
        raise ConfigError(
            f"{path}: a trace holds the experts of each token as whole numbers [tokens, layers, top_k]; this has shape "
            f"{trace.shape} of {trace.dtype}"
        )
    return trace.astype(np.int64)


def counts_of(trace: NDArray[np.int64], num_experts: int | None = None) -> NDArray[np.float64]:
    """Return the loads [L, E] of a trace."""
    size = num_experts or int(trace.max()) + 1
    return np.array([np.bincount(layer.ravel(), minlength=size) for layer in np.moveaxis(trace, 1, 0)], dtype=float)


def _arrays(path: Path, key: str) -> dict[str, Any]:
    """Return arrays by name; the names of unnamed ones are not in TRACE_KEYS."""
    readers = {".csv": _csv, ".json": _json, ".jsonl": _jsonl, ".pt": _torch, ".pth": _torch}
    suffix = path.suffix.lower()
    if suffix not in _SUFFIXES:
        raise ConfigError(f"{path}: routing data comes as {', '.join(_SUFFIXES)}")
    arrays = read_numpy(path) if suffix in (".npy", ".npz") else readers[suffix](path)
    return _selected(arrays, path, key)


def _selected(arrays: dict[str, Any], path: Path, key: str) -> dict[str, Any]:
    """Return the arrays that match ``key``, or the one that holds the data; see the module."""
    if key:
        patterns = key.split(",")
        chosen = {n: array for n, array in arrays.items() if any(fnmatch.fnmatchcase(n, one) for one in patterns)}
        if not chosen:
            raise ConfigError(f"{path} has no array named like {key!r}", details=(f"it has: {_names(arrays)}",))
        return chosen
    if len(arrays) == 1:
        return arrays
    for name in (*LOAD_KEYS, *TRACE_KEYS):
        if name in arrays:
            return {name: arrays[name]}
    raise ConfigError(
        f"{path} has {len(arrays)} arrays and none is called {LOAD_KEYS[0]} or {TRACE_KEYS[0]}",
        details=(f"it has: {_names(arrays)}",),
        help="name one with --key; several, or a pattern such as 'counts_*', are workloads of their own",
    )


def _names(arrays: dict[str, Any]) -> str:
    names = sorted(arrays)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "nothing"


def read_numpy(path: Path) -> dict[str, Any]:
    """Return the arrays of an .npy or .npz file by name, never pickled ones."""
    try:
        _require_plain(path)
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {"array": loaded}
        with loaded:
            return {name: array for name in loaded.files if isinstance(array := loaded[name], np.ndarray)} or _nothing(
                path
            )
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # a damaged archive or header can fail in any way
        refused = "pickle" in str(error).lower()
        reason = "it holds Python objects, which could run code; refused" if refused else str(error) or "truncated"
        raise ConfigError(f"{path} is not a usable numpy file: {reason}") from None


def _require_plain(path: Path) -> None:
    """Raise for an archive that unpacks to far more than its size."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        size = sum(member.file_size for member in archive.infolist())
    if size > MAX_UNPACKED_BYTES and size > MAX_UNPACKED_RATIO * path.stat().st_size:
        raise ConfigError(f"{path} would unpack to {size / 2**30:.0f} GiB from {path.stat().st_size} bytes; refused")


def _csv(path: Path) -> dict[str, Any]:
    lines = [line.split(",") for line in read_text(path).splitlines() if line.strip()]
    header = [name.strip().lower() for name in lines[0]] if lines else []
    try:
        if {"layer", "expert", "load"} <= set(header):
            columns = np.array(lines[1:], dtype=float)[:, [header.index(name) for name in ("layer", "expert", "load")]]
            return {"load": _dense(columns, path)}
        return {"load": np.array(lines[1:] if header and not _is_number(header[0]) else lines, dtype=float)}
    except (ValueError, IndexError, OverflowError) as error:
        raise ConfigError(
            f"{path} is not a table of numbers: {error}", help="one row a layer, or columns layer,expert,load"
        ) from None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _dense(columns: NDArray[np.float64], path: Path) -> NDArray[np.float64]:
    index = columns[:, :2]
    if np.any(index < 0) or np.any(index != np.floor(index)) or index.max() >= MAX_EXPERTS:
        raise ConfigError(f"{path}: layers and experts are whole numbers from 0")
    layers, experts = index.astype(np.int64).T
    if (int(layers.max()) + 1) * (int(experts.max()) + 1) > MAX_LOADS:
        raise ConfigError(f"{path}: {int(layers.max()) + 1} layers of {int(experts.max()) + 1} experts are too many")
    dense = np.zeros((int(layers.max()) + 1, int(experts.max()) + 1))
    np.add.at(dense, (layers, experts), columns[:, 2])
    return dense


def _json(path: Path) -> dict[str, Any]:
    data = read_json(path)
    if isinstance(data, dict):
        return {name: _rectangular(value, path) for name, value in data.items() if isinstance(value, list)} or _nothing(
            path
        )
    return {"array": _rectangular(data, path)}


def _jsonl(path: Path) -> dict[str, Any]:
    requests = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: line {number} is not JSON: {error}") from None
        routed = entry.get("routed_experts") if isinstance(entry, dict) else None
        if routed is None:
            raise ConfigError(f"{path}: line {number} has no routed_experts")
        requests.append(_rectangular(routed, path))
    if not requests or requests[0].ndim != 3 or len({request.shape[1:] for request in requests}) != 1:
        raise ConfigError(f"{path}: requests with routed_experts [tokens, layers, top_k] of one model are needed")
    return {"routed_experts": np.concatenate(requests)}


def _rectangular(value: Any, path: Path) -> NDArray[Any]:
    try:
        array = np.array(value)
    except (ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{path}: not a rectangular array: {error}") from None
    if array.dtype == object or not np.issubdtype(array.dtype, np.number):
        raise ConfigError(f"{path}: not an array of numbers")
    return array


def _nothing(path: Path) -> dict[str, Any]:
    raise ConfigError(f"{path} has no array")


def _torch(path: Path) -> dict[str, Any]:
    """Read tensors only; a file that would need anything else to be unpickled is refused."""
    import pickle

    import torch

    try:
        _require_plain(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{path} holds more than tensors, which could run code; refused",
            details=(" ".join(str(error).split())[:200],),
        ) from None
    except Exception as error:  # a forged or damaged file can fail in any way
        raise ConfigError(f"{path} is not a usable torch file: {' '.join(str(error).split())[:200]}") from None
    if isinstance(loaded, torch.Tensor):
        return {"array": _as_array(loaded, path)}
    tensors = loaded.items() if isinstance(loaded, dict) else ()
    named = {
        str(name): _as_array(tensor, path)
        for name, tensor in tensors
        if isinstance(tensor, torch.Tensor) and tensor.ndim > 0
    }
    return named or _nothing(path)


def _as_array(tensor: Any, path: Path) -> Any:
    """Return a tensor as numpy; strides may make a few stored numbers as many as nobody has memory for."""
    if tensor.numel() > MAX_LOADS:
        raise ConfigError(f"{path}: a tensor {list(tensor.shape)} is too large for loads")
    try:
        return (tensor.double() if tensor.is_floating_point() else tensor).numpy()
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"{path}: a tensor of loads is dense, on the CPU and of numbers: {error}") from None
