"""Files of routed experts: loads [T, L, E], token traces [tokens, L, top_k] and placements; nothing read here can run code.

| loads and traces | content |
|---|---|
| .npy | an array, loads of rank 1 to 3 |
| .npz | those that match `key` (globs, separated by commas), else the only one, else load, logical_count or routed_experts |
| .csv | one row a layer, one column an expert; or columns layer, expert, load |
| .json | nested lists, or an object with load or logical_count (SGLang's expert distribution) or routed_experts |
| .jsonl | a request a line with routed_experts [tokens, layers, top_k] (vLLM's and SGLang's routed experts) |
| .pt | a tensor, or a dict with logical_count (SGLang's dump) or routed_experts, read with weights_only |

A trace read for its loads is counted. Several arrays are several workloads.

| placements | form |
|---|---|
| npz | the arrays of an `ExpertPlacement` by name |
| sglang | JSON with physical_to_logical_map [L, S], for --init-expert-location |
| vllm | JSON with physical_to_logical_map, logical_to_physical_map [L, E, R] (padded with -1) and logical_replica_count [L, E] |
| vllm-ascend | JSON expert map: layer_list, in each device_list with device_expert |
| tensorrt-llm | YAML with num_slots and initial_global_assignments by layer index |

Read back: all of these, and 0/1 patterns [ranks, layers, experts] (.npy, .npz) as of OmniPlacement.
"""

from __future__ import annotations

import fnmatch
import io
import json
import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..schema.base import read_json, read_text, shown, write_atomically
from ..schema.errors import ConfigError
from ..schema.limits import MAX_LOADS
from ..schema.units import FloatArray, IntArray
from ..solvers.experts.instance import (
    ExpertInstance,
    SlotAssignment,
    replica_counts,
    trace_loads,
    validate_loads,
)
from ..solvers.experts.placement import ExpertPlacement, finish_placement

LOAD_KEYS = ("logical_count", "load", "loads", "expert_load", "weight", "counts")
TRACE_KEYS = ("routed_experts", "topk_ids", "trace")
MAX_UNPACKED_BYTES, MAX_UNPACKED_RATIO = 2**30, 64
"""An archive of routing data may unpack to the first, or to the second times its size."""

MAX_EXPERTS = 10**6
"""Of a layer: a larger number is no expert."""

Format = Literal["npz", "sglang", "vllm", "vllm-ascend", "tensorrt-llm"]

_KIND = "meshwright-expert-placement"
_OPTIONAL = ("home", "node_part")
_AXES = {
    "physical_to_logical": "LS", "logical_to_physical": "LER", "replica_count": "LE", "share": "LS", "expert_load": "LE",
    "gpu_load": "LG", "balance": "L", "lower_bound": "L", "gap": "L", "moves": "L", "off_node_tokens": "L", "slots_per_gpu": "G",
    "gpu_speed": "G", "home": "LE", "node_part": "LEN",
}  # fmt: skip
"""Of the arrays of a placement of ours: layers, slots, experts, replicas, GPUs, nodes."""

_ASSIGNMENT = re.compile(r"^[ \t]+[0-9]{1,9}[ \t]*:[ \t]*\[([0-9,\s]*)\][ \t]*$", re.MULTILINE)
"""The slots of a layer in YAML; a long list goes on in further lines."""


def read_loads(paths: list[Path], key: str = "") -> FloatArray:
    """Return loads [D, L, E] of the workloads in files, steps of time within a file summed."""
    loads: list[FloatArray] = []
    for path in paths:
        for name, array in _arrays(path, key).items():
            if name in TRACE_KEYS:
                trace = _as_trace(array, path)
                loads.append(trace_loads(trace, int(trace.max()) + 1))
                continue
            try:
                loads.append(validate_loads(array).sum(axis=0))
            except ConfigError as error:
                raise ConfigError(f"{path}: {error.message}", details=error.details, help=error.help) from None
    shapes = {load.shape for load in loads}
    if len(shapes) > 1:
        raise ConfigError(f"workloads of different shapes (layers, experts): {sorted(shapes)}")
    return validate_loads(np.stack(loads))


def read_sources(path: Path, key: str = "") -> FloatArray:
    """Return loads [R, L, E] by source rank."""
    arrays = list(_arrays(path, key).values())
    if len(arrays) != 1 or np.ndim(arrays[0]) != 3:
        raise ConfigError(f"{path}: loads by source are one array [ranks, layers, experts]")
    return np.asarray(arrays[0], dtype=np.float64)


def read_trace(path: Path, key: str = "") -> IntArray:
    """Return the experts of each token [tokens, L, top_k]."""
    arrays = _arrays(path, key)
    return _as_trace(arrays[next((known for known in TRACE_KEYS if known in arrays), next(iter(arrays)))], path)


def _as_trace(array: Any, path: Path) -> IntArray:
    trace = np.asarray(array)
    is_trace = trace.ndim == 3 and np.issubdtype(trace.dtype, np.integer) and trace.size > 0
    if not is_trace or trace.min() < 0 or trace.max() >= MAX_EXPERTS:
        raise ConfigError(
            f"{path}: a trace holds the experts of each token as whole numbers [tokens, layers, top_k]; this has shape "
            f"{trace.shape} of {trace.dtype}"
        )
    return trace.astype(np.int64)


def _arrays(path: Path, key: str) -> dict[str, Any]:
    """Return the arrays of a file that match ``key``, or the one that holds the data; names of unnamed ones mean nothing."""
    readers = {
        ".npy": _numpy, ".npz": _numpy, ".csv": _csv, ".json": _json, ".jsonl": _jsonl, ".pt": _torch, ".pth": _torch,
    }  # fmt: skip
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path}: routing data comes as {', '.join(readers)}")
    arrays = reader(path)
    if not arrays:
        raise ConfigError(f"{path} has no array")
    names = sorted(arrays)
    listed = (f"it has: {', '.join(names[:8])}" + (f" and {len(names) - 8} more" if len(names) > 8 else ""),)
    if key:
        chosen = {n: array for n, array in arrays.items() if any(fnmatch.fnmatchcase(n, one) for one in key.split(","))}
        if not chosen:
            raise ConfigError(f"{path} has no array named like {key!r}", details=listed)
        return chosen
    named = next((name for name in (*LOAD_KEYS, *TRACE_KEYS) if name in arrays), None)
    if len(arrays) == 1:
        return arrays
    if named is None:
        raise ConfigError(
            f"{path} has {len(arrays)} arrays and none is called {LOAD_KEYS[0]} or {TRACE_KEYS[0]}",
            details=listed,
            help="name one with --key; several, or a pattern such as 'counts_*', are workloads of their own",
        )
    return {named: arrays[named]}


@contextmanager
def _opened(path: Path, kind: str) -> Iterator[None]:
    """Turn what a library raises for a file into a ConfigError; refuse an archive that unpacks to far more than its size."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                size, packed = sum(member.file_size for member in archive.infolist()), path.stat().st_size
            if size > max(MAX_UNPACKED_BYTES, MAX_UNPACKED_RATIO * packed):
                raise ConfigError(f"{path} would unpack to {size / 2**30:.0f} GiB from {packed} bytes; refused")
        yield
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # a forged or damaged file can fail in any way
        reason = " ".join(str(error).split())[:200] or "truncated"
        if "pickle" in reason.lower() or isinstance(error, pickle.UnpicklingError):
            raise ConfigError(
                f"{path} holds Python objects, which could run code; refused", details=(reason,)
            ) from None
        raise ConfigError(f"{path} is not a usable {kind} file: {reason}") from None


def _numpy(path: Path) -> dict[str, Any]:
    with _opened(path, "numpy"):
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {"array": loaded}
        with loaded:
            return {name: array for name in loaded.files if isinstance(array := loaded[name], np.ndarray)}


def _torch(path: Path) -> dict[str, Any]:
    import torch

    def as_array(tensor: Any) -> Any:
        # Strides may make a few stored numbers as many as nobody has memory for.
        if tensor.numel() > MAX_LOADS:
            raise ConfigError(f"{path}: a tensor {list(tensor.shape)} is too large for loads")
        try:
            return (tensor.double() if tensor.is_floating_point() else tensor).numpy()
        except (RuntimeError, TypeError) as error:
            raise ConfigError(f"{path}: a tensor of loads is dense, on the CPU and of numbers: {error}") from None

    with _opened(path, "torch"):
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(loaded, torch.Tensor):
        return {"array": as_array(loaded)}
    named = loaded.items() if isinstance(loaded, dict) else ()
    return {str(name): as_array(value) for name, value in named if isinstance(value, torch.Tensor) and value.ndim > 0}


def _csv(path: Path) -> dict[str, Any]:
    lines = [line.split(",") for line in read_text(path).splitlines() if line.strip()]
    header, columns = [name.strip().lower() for name in lines[0]] if lines else [], ("layer", "expert", "load")
    try:
        if set(columns) <= set(header):
            return {"load": _dense(np.array(lines[1:], float)[:, [header.index(name) for name in columns]], path)}
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


def _dense(columns: FloatArray, path: Path) -> FloatArray:
    """Return loads [L, E] of rows (layer, expert, load)."""
    index = columns[:, :2]
    if np.any(index < 0) or np.any(index != np.floor(index)) or index.max() >= MAX_EXPERTS:
        raise ConfigError(f"{path}: layers and experts are whole numbers from 0")
    layers, experts = index.astype(np.int64).T
    shape = int(layers.max()) + 1, int(experts.max()) + 1
    if shape[0] * shape[1] > MAX_LOADS:
        raise ConfigError(f"{path}: {shape[0]} layers of {shape[1]} experts are too many")
    dense = np.zeros(shape)
    np.add.at(dense, (layers, experts), columns[:, 2])
    return dense


def _json(path: Path) -> dict[str, Any]:
    data = read_json(path)
    if not isinstance(data, dict):
        return {"array": _rectangular(data, path)}
    return {name: _rectangular(rows, path) for name, rows in data.items() if isinstance(rows, list)}


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


def write_placement(placement: ExpertPlacement, path: Path, form: Format, *, first_layer_idx: int = 0) -> None:
    """Write a placement in one of the formats, the entire file or nothing.

    Args:
        first_layer_idx: index in the model of the first layer that has experts (vllm-ascend and tensorrt-llm name layers).
    """
    if form not in get_args(Format):
        raise ConfigError(f"format {form!r} is not one of {', '.join(get_args(Format))}")
    slots = placement.physical_to_logical.tolist()
    if form == "npz":
        arrays = {name: getattr(placement, name) for name in placement.__dataclass_fields__}
        buffer = io.BytesIO()
        np.savez_compressed(buffer, kind=_KIND, **{name: array for name, array in arrays.items() if array is not None})
        write_atomically(path, buffer.getvalue())
        return
    if form == "tensorrt-llm":
        lines = [f"  {first_layer_idx + layer}: {row}" for layer, row in enumerate(slots)]
        head = [f"num_slots: {len(slots[0])}", "initial_global_assignments:"]
        write_atomically(path, "\n".join([*head, *lines, "layer_updates_per_iter: 0", ""]))
        return
    document: dict[str, Any] = {"physical_to_logical_map": slots}
    if form == "vllm":
        document["logical_to_physical_map"] = placement.logical_to_physical.tolist()
        document["logical_replica_count"] = placement.replica_count.tolist()
    elif form == "vllm-ascend":
        layers = []
        for layer, row in enumerate(placement.physical_to_logical):
            on_gpus = np.split(row, np.cumsum(placement.slots_per_gpu)[:-1])
            devices = [{"device_id": gpu, "device_expert": experts.tolist()} for gpu, experts in enumerate(on_gpus)]
            layers.append({"layer_id": first_layer_idx + layer, "device_count": len(devices), "device_list": devices})
        document = {"moe_layer_count": len(layers), "layer_list": layers}
    write_atomically(path, json.dumps(document) + "\n")


def read_placement(path: Path, *, num_gpus: int | None = None, num_nodes: int = 1, load: Any = None) -> ExpertPlacement:
    """Read a placement in any of the formats; loads, where given, fill in its balance, else all experts count alike.

    Args:
        num_gpus: needed where the file does not say (sglang, vllm, tensorrt-llm).
    """
    placed, slots, stored = _read(path)
    if stored is not None and load is None:
        return stored
    if slots is None:
        if num_gpus is None:
            raise ConfigError(
                f"{path} does not say on how many GPUs its {placed.shape[1]} slots are", help="add --num-gpus"
            )
        if num_gpus < 1 or placed.shape[1] % num_gpus:
            raise ConfigError(f"the {placed.shape[1]} slots of {path} do not divide among {num_gpus} GPUs")
        slots = np.full(num_gpus, placed.shape[1] // num_gpus)
    num_experts = int(placed.max()) + 1
    is_valid = placed.min() >= 0 and num_experts <= placed.shape[1]
    if not is_valid or np.any(replica_counts(placed, num_experts) == 0):
        raise ConfigError(f"{path}: some expert below {num_experts} has no slot in some layer (C1)")
    if num_nodes < 1 or len(slots) % num_nodes:
        raise ConfigError(f"{len(slots)} GPUs cannot be divided among {num_nodes} nodes")
    loads = np.ones((1, len(placed), num_experts)) if load is None else load
    if loads.shape[1:] != (len(placed), num_experts):
        raise ConfigError(
            f"{path} places {len(placed)} layers x {num_experts} experts, the loads are of {loads.shape[1]} x {loads.shape[2]}"
        )
    instance = (
        ExpertInstance(loads, slots, np.ones(len(slots)), num_nodes) if stored is None else stored.instance(loads)
    )
    answer = SlotAssignment(placed, share=None if stored is None else stored.share)
    return finish_placement(instance, answer, "uniform", None, 0.0)


def _read(path: Path) -> tuple[IntArray, IntArray | None, ExpertPlacement | None]:
    """Return x [L, S], SLOTS [G] where the file says, and the full placement if it is ours."""
    suffix = path.suffix.lower()
    if suffix in (".npz", ".npy"):
        arrays = _numpy(path)
        if str(arrays.get("kind", "")) == _KIND:
            stored = _stored(arrays, path)
            return stored.physical_to_logical, stored.slots_per_gpu, stored
        return *_pattern(arrays, path), None
    if suffix == ".json":
        data = read_json(path)
        if isinstance(data, dict) and "layer_list" in data:
            return *_from_ascend(data, path), None
        return _matrix(data.get("physical_to_logical_map") if isinstance(data, dict) else data, path), None, None
    if suffix in (".yaml", ".yml"):
        lists = _ASSIGNMENT.findall(read_text(path))
        rows = [[expert.strip() for expert in row.split(",") if expert.strip()] for row in lists]
        if not all(re.fullmatch("[0-9]{1,18}", expert) for row in rows for expert in row):
            raise ConfigError(f"{path}: the experts of a layer are whole numbers separated by commas")
        return _matrix([[int(expert) for expert in row] for row in rows], path), None, None
    raise ConfigError(f"{path}: a placement comes as .npz, .npy, .json or .yaml")


def _stored(arrays: dict[str, Any], path: Path) -> ExpertPlacement:
    fields = ExpertPlacement.__dataclass_fields__
    missing = [name for name in fields if name not in arrays and name not in _OPTIONAL]
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)}")
    values: dict[str, Any] = {name: arrays.get(name) for name in fields}
    for name, scalar in (("num_nodes", int), ("solve_s", float), ("split", str)):
        try:
            values[name] = scalar(arrays[name])
        except (TypeError, ValueError):
            raise ConfigError(f"{path}: {name} = {shown(arrays[name])} is not one {scalar.__name__}") from None
    placement = ExpertPlacement(**values)
    if not _belong_together(placement):
        raise ConfigError(f"{path}: its arrays do not belong together")
    return placement


def _belong_together(placement: ExpertPlacement) -> bool:
    """Return whether the arrays of a file have the axes of a placement, experts that exist and GPUs that work."""
    sizes = {"N": placement.num_nodes}
    for name, axes in _AXES.items():
        array = getattr(placement, name)
        if array is None:
            continue
        if array.dtype.kind not in "iuf" or array.ndim != len(axes) or not array.size:
            return False
        if any(sizes.setdefault(axis, size) != size for axis, size in zip(axes, array.shape, strict=True)):
            return False
    placed, slots, speed = placement.physical_to_logical, placement.slots_per_gpu, placement.gpu_speed
    return bool(
        "f" not in (placed.dtype.kind, slots.dtype.kind)
        and 0 <= placed.min() <= placed.max() < sizes["E"]
        and slots.min() >= 1
        and int(slots.sum()) == sizes["S"]
        and placement.num_nodes >= 1
        and sizes["G"] % placement.num_nodes == 0
        and np.all(np.isfinite(speed) & (speed > 0))
        and np.all(replica_counts(placed, sizes["E"]) >= 1)
    )


def _matrix(rows: Any, path: Path) -> IntArray:
    placed = _rectangular(rows, path)
    if placed.ndim != 2 or placed.size == 0 or not np.issubdtype(placed.dtype, np.integer):
        raise ConfigError(f"{path} has no table of experts, a row of slots for each layer")
    return placed.astype(np.int64)


def _from_ascend(data: dict[str, Any], path: Path) -> tuple[IntArray, IntArray]:
    try:
        layers = [[device["device_expert"] for device in layer["device_list"]] for layer in data["layer_list"]]
        slots = np.array([[len(experts) for experts in layer] for layer in layers])
        placed = _matrix([[e for experts in layer for e in experts] for layer in layers], path)
    except (KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"{path}: an expert map without {error}") from None
    except ValueError:
        raise ConfigError(f"{path}: its layers have different numbers of devices") from None
    return placed, _slots_of_all_layers(slots, path)


def _slots_of_all_layers(slots: IntArray, path: Path) -> IntArray:
    """Return SLOTS [G] of slots [L, G], which have to be the same in every layer."""
    if np.any(slots != slots[0]) or np.any(slots == 0):
        raise ConfigError(
            f"{path}: the ranks hold different numbers of experts from layer to layer, or none; no table of slots has that"
        )
    return slots[0].astype(np.int64)


def _pattern(arrays: dict[str, Any], path: Path) -> tuple[IntArray, IntArray]:
    """Return x and SLOTS of 0/1 patterns [ranks, L, E]."""
    pattern: NDArray[Any] = next(iter(arrays.values()), np.zeros(0))
    if pattern.ndim != 3 or not np.all((pattern == 0) | (pattern == 1)):
        raise ConfigError(f"{path}: neither a placement of ours nor a 0/1 pattern [ranks, layers, experts]")
    by_layer = np.swapaxes(pattern, 0, 1).astype(bool)
    slots = _slots_of_all_layers(by_layer.sum(axis=2), path)
    experts = np.broadcast_to(np.arange(pattern.shape[2]), by_layer.shape)[by_layer]
    return experts.reshape(len(by_layer), -1).astype(np.int64), slots
