"""Measured loads of experts in a plan, and files with placements of experts.

Loads: the imbalance of each degree of expert parallelism and the slots of the plan's experts. For every ep that the experts divide
by, they are placed on ep ranks without replicas (solvers/experts/placement.py). The mean over the layers of the fullest rank's load
over the average is what a layer's experts and its exchange of tokens take longer
(cost_models/layer/parallel.py), so that the search weighs ep, etp and the placement against one another.

Files: our placements (.npz) and those that serving engines read.

| format | form |
|---|---|
| npz | the arrays of an `ExpertPlacement` by name |
| sglang | JSON with physical_to_logical_map [L, S], for --init-expert-location |
| vllm | JSON with physical_to_logical_map, logical_to_physical_map [L, E, R] (padded with -1) and logical_replica_count [L, E] |
| vllm-ascend | JSON expert map: layer_list, in each device_list with device_expert |
| tensorrt-llm | YAML with num_slots and initial_global_assignments by layer index |

Read back: all of these, and 0/1 patterns [ranks, layers, experts] (.npy, .npz) as of OmniPlacement.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..schema import ClusterSpec, ConfigError, ModelSpec, TrainingPlan, Workload
from ..schema.base import read_json, read_text, write_atomically
from ..schema.layers import MoE
from ..schema.training_plan import LayerSlots
from ..schema.units import FloatArray, IntArray
from ..solvers.experts.instance import ExpertInstance, SlotAssignment, replica_counts, validate_loads
from ..solvers.experts.placement import ExpertPlacement, finish_placement, place_experts
from .expert_files import read_numpy


def loads_of_model(model: ModelSpec, load: Any) -> FloatArray:
    """Return loads [D, L, E] that belong to a model's blocks with experts; those of one layer stand for all.

    Raises:
        ConfigError: a model without experts, or loads of another number of layers or experts.
    """
    loads = validate_loads(load)
    num_experts = {moe.num_experts for moe in moe_blocks(model)}
    num_layers = len(moe_blocks(model))
    if len(num_experts) != 1:
        raise ConfigError(
            f"{model.name} has no experts" if not num_experts else f"{model.name}: experts differ by layer"
        )
    if loads.shape[2] != min(num_experts) or loads.shape[1] not in (1, num_layers):
        raise ConfigError(
            f"expert loads of {loads.shape[1]} layers x {loads.shape[2]} experts; {model.name} has {num_layers} layers with "
            f"{min(num_experts)} experts"
        )
    return np.asarray(np.broadcast_to(loads, (len(loads), num_layers, loads.shape[2])))


def moe_blocks(model: ModelSpec) -> list[MoE]:
    """Return the mixture-of-experts layers of a model's blocks, in order."""
    return [layer.experts for layer in model.iter_layers() if layer.is_block and layer.experts]


def with_imbalance(model: ModelSpec, cluster: ClusterSpec, workload: Workload, load: Any) -> Workload:
    """Return the workload with the imbalance of every ep up to the cluster's size.

    Raises:
        ConfigError: as `loads_of_model`.
    """
    loads = loads_of_model(model, load)
    degrees = [ep for ep in range(2, cluster.num_devices + 1) if loads.shape[2] % ep == 0]
    ratios = tuple((ep, float(place_on_ranks(loads, ep).balance.mean())) for ep in degrees)
    return workload.replace(expert_imbalance=ratios)


def place_on_ranks(loads: FloatArray, ep: int) -> ExpertPlacement:
    """Place the experts of every layer on ``ep`` ranks, without replicas."""
    return place_experts(None, scenarios=loads, num_gpus=ep, num_slots=loads.shape[2])


def with_experts_placed(plan: TrainingPlan, load: Any) -> TrainingPlan:
    """Return the plan with the slots of every layer's experts; as it is where ep is 1."""
    ep = plan.layout.ep
    if ep == 1:
        return plan
    placement = place_on_ranks(loads_of_model(plan.model, load), ep)
    slots = tuple(
        LayerSlots(experts=tuple(experts), shares=tuple(shares))
        for experts, shares in zip(placement.physical_to_logical.tolist(), placement.share.tolist(), strict=True)
    )
    note = (
        f"experts placed by their measured loads: the fullest of {ep} ranks has {placement.balance.mean():.3f} times the mean, "
        f"no placement less than {placement.lower_bound.mean():.3f}"
    )
    return plan.replace(expert_slots=slots, notes=(*plan.notes, note))


Format = Literal["npz", "sglang", "vllm", "vllm-ascend", "tensorrt-llm"]


_KIND = "meshwright-expert-placement"


_OPTIONAL = ("home", "node_part")


_ASSIGNMENT = re.compile(r"^[ \t]+[0-9]{1,9}[ \t]*:[ \t]*\[([0-9,\s]*)\][ \t]*$", re.MULTILINE)
"""The slots of a layer in YAML; a long list goes on in further lines."""


def write_placement(placement: ExpertPlacement, path: Path, form: Format, *, first_layer_idx: int = 0) -> None:
    """Write a placement in one of the formats, the entire file or nothing.

    Args:
        first_layer_idx: index in the model of the first layer that has experts (vllm-ascend and tensorrt-llm name layers).

    Raises:
        ConfigError: an unknown format or a folder that cannot be written.
    """
    if form not in get_args(Format):
        raise ConfigError(f"format {form!r} is not one of {', '.join(get_args(Format))}")
    slots = placement.physical_to_logical.tolist()
    if form == "npz":
        write_atomically(path, _npz(placement))
    elif form == "sglang":
        write_atomically(path, json.dumps({"physical_to_logical_map": slots}) + "\n")
    elif form == "vllm":
        maps = {
            "physical_to_logical_map": slots,
            "logical_to_physical_map": placement.logical_to_physical.tolist(),
            "logical_replica_count": placement.replica_count.tolist(),
        }
        write_atomically(path, json.dumps(maps) + "\n")
    elif form == "vllm-ascend":
        write_atomically(path, json.dumps(_ascend(placement, first_layer_idx)) + "\n")
    else:
        lines = [f"num_slots: {len(slots[0])}", "initial_global_assignments:"]
        lines += [f"  {first_layer_idx + layer}: {row}" for layer, row in enumerate(slots)]
        write_atomically(path, "\n".join([*lines, "layer_updates_per_iter: 0", ""]))


def _npz(placement: ExpertPlacement) -> bytes:
    arrays = {name: getattr(placement, name) for name in placement.__dataclass_fields__}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, kind=_KIND, **{name: array for name, array in arrays.items() if array is not None})
    return buffer.getvalue()


def _ascend(placement: ExpertPlacement, first_layer_idx: int) -> dict[str, Any]:
    ends = np.cumsum(placement.slots_per_gpu)[:-1]
    layers = [
        {
            "layer_id": first_layer_idx + layer,
            "device_count": placement.num_gpus,
            "device_list": [
                {"device_id": gpu, "device_expert": experts.tolist()} for gpu, experts in enumerate(np.split(row, ends))
            ],
        }
        for layer, row in enumerate(placement.physical_to_logical)
    ]
    return {"moe_layer_count": len(layers), "layer_list": layers}


def read_placement(path: Path, *, num_gpus: int | None = None, num_nodes: int = 1, load: Any = None) -> ExpertPlacement:
    """Read a placement in any of the formats; loads, where given, fill in its balance, else all experts count alike.

    Args:
        num_gpus: needed where the file does not say (sglang, vllm, tensorrt-llm).

    Raises:
        ConfigError: a file that is missing, damaged or no placement; GPUs that do not divide its slots.
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
    if len(slots) % num_nodes:
        raise ConfigError(f"{len(slots)} GPUs cannot be divided among {num_nodes} nodes")
    loads = np.ones((1, len(placed), num_experts)) if load is None else load
    if loads.shape[1:] != (len(placed), num_experts):
        raise ConfigError(
            f"{path} places {len(placed)} layers x {num_experts} experts, the loads are of {loads.shape[1]} x {loads.shape[2]}"
        )
    speed = np.ones(len(slots)) if stored is None else stored.gpu_speed
    nodes = num_nodes if stored is None else stored.num_nodes
    answer = SlotAssignment(placed, share=None if stored is None else stored.share)
    return finish_placement(ExpertInstance(loads, slots, speed, nodes), answer, "uniform", None, 0.0)


def _read(path: Path) -> tuple[IntArray, IntArray | None, ExpertPlacement | None]:
    """Return x [L, S], SLOTS [G] where the file says, and the full placement if it is ours."""
    suffix = path.suffix.lower()
    if suffix in (".npz", ".npy"):
        arrays = read_numpy(path)
        if str(arrays.get("kind", "")) == _KIND:
            stored = _stored(arrays, path)
            return stored.physical_to_logical, stored.slots_per_gpu, stored
        return *_pattern(arrays, path), None
    if suffix == ".json":
        data = read_json(path)
        if isinstance(data, dict) and "layer_list" in data:
            return *_from_ascend(data, path), None
        rows = data.get("physical_to_logical_map") if isinstance(data, dict) else data
        return _matrix(rows, path), None, None
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
    values |= {
        "num_nodes": int(arrays["num_nodes"]),
        "solve_s": float(arrays["solve_s"]),
        "split": str(arrays["split"]),
    }
    placement = ExpertPlacement(**values)
    placed = placement.physical_to_logical
    if (
        placed.ndim != 2
        or placement.share.shape != placed.shape
        or int(placement.slots_per_gpu.sum()) != placed.shape[1]
    ):
        raise ConfigError(f"{path}: its arrays do not belong together")
    return placement


def _matrix(rows: Any, path: Path) -> IntArray:
    try:
        placed = np.array(rows)
    except ValueError:
        placed = np.zeros(0)
    if placed.ndim != 2 or placed.size == 0 or not np.issubdtype(placed.dtype, np.integer):
        raise ConfigError(f"{path} has no table of experts, a row of slots for each layer")
    return placed.astype(np.int64)


def _from_ascend(data: dict[str, Any], path: Path) -> tuple[IntArray, IntArray]:
    try:
        layers = [[device["device_expert"] for device in layer["device_list"]] for layer in data["layer_list"]]
        slots = np.array([len(experts) for experts in layers[0]])
        return _matrix([[e for experts in layer for e in experts] for layer in layers], path), slots
    except (KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"{path}: an expert map without {error}") from None


def _pattern(arrays: dict[str, Any], path: Path) -> tuple[IntArray, IntArray]:
    """Return x and SLOTS of 0/1 patterns [ranks, L, E]."""
    pattern: NDArray[Any] = next(iter(arrays.values()), np.zeros(0))
    if pattern.ndim != 3 or not np.all((pattern == 0) | (pattern == 1)):
        raise ConfigError(f"{path}: neither a placement of ours nor a 0/1 pattern [ranks, layers, experts]")
    by_layer = np.swapaxes(pattern, 0, 1).astype(bool)
    slots = by_layer.sum(axis=2)
    if np.any(slots != slots[0]) or np.any(slots == 0):
        raise ConfigError(
            f"{path}: the ranks hold different numbers of experts from layer to layer; no table of slots has that"
        )
    experts = np.broadcast_to(np.arange(pattern.shape[2]), by_layer.shape)[by_layer]
    return experts.reshape(len(by_layer), -1).astype(np.int64), slots[0].astype(np.int64)
