"""A whole training step: layers add up to stages, stages to a step.

`SpaceCosts` holds the cost of each kind of layer under each layout; from it come, with the same formulas,
`lower_bounds` (all layouts at once, every stage ideally balanced) and `estimate_step` (one layout with its real stages).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..schema import ClusterSpec, Estimate, Workload
from ..schema.model import Block, Head
from ..schema.plan import Interval, MemoryBreakdown, StageEstimate, TimeBreakdown
from . import memory
from .coefficients import peak_flops_per_s
from .interval import time_interval
from .layouts import FloatArray, IntArray, LayoutBatch
from .operators import model_flops_per_token
from .option_costs import OptionCosts
from .pipeline import pipelined_lower_bound_s, pipelined_s
from .recompute_bounds import least_step_s
from .space_costs import SpaceCosts


def lower_bounds(costs: SpaceCosts) -> tuple[FloatArray, FloatArray]:
    """Admissible bounds for every layout: seconds of a step and bytes of the fullest device, [N] each.

    Stages are taken as perfectly balanced in time and in memory at once. Both costs are convex in what a stage holds, so no
    real split does better. For pp = 1 the time is exact.
    """
    return time_bounds(costs), memory_bounds(costs)


def quick_time_bounds(costs: SpaceCosts) -> FloatArray:
    """Admissible bound on the seconds of a step [N] from the work inside layers and the pipeline's bubble alone."""
    b = costs.batch
    return np.asarray(
        pipelined_lower_bound_s(costs.total("busy_s"), b.num_microbatches, b.pp, b.num_model_chunks) + _uneven_s(costs)
    )


def time_bounds(costs: SpaceCosts) -> FloatArray:
    """Admissible bound on the seconds of a step [N]."""
    b = costs.batch
    transfers = (b.pp > 1) * 2 * costs.transfer_s * b.pp
    updates = [costs.update_s(cost.num_trained[costs.like], cost.expert_params[costs.like]) for cost in costs.inside]
    always = costs.dp_edges_s + _fullest_stage(costs, updates)
    exposed = OptionCosts.of(costs).least_exposed_by_kind if costs.batch.is_mixed else costs.dp_exposed_by_kind
    bound = (
        pipelined_lower_bound_s(costs.total("busy_s") + transfers, b.num_microbatches, b.pp, b.num_model_chunks)
        + _uneven_s(costs)
        + _fullest_stage(costs, exposed)
        + always
    )
    if not costs.batch.is_mixed:
        return np.asarray(bound)
    moved = pipelined_lower_bound_s(transfers, b.num_microbatches, b.pp, b.num_model_chunks)
    return np.asarray(
        np.maximum(bound, least_step_s(OptionCosts.of(costs), _kept_by_all_stages(costs)) + moved + always)
    )


def _fullest_stage(costs: SpaceCosts, by_kind: Sequence[FloatArray]) -> FloatArray:
    """What the stage with the most of it has at least [N], given a layer of each kind [K] of [N].

    The mean of all stages, or the blocks of a kind: some stage holds ceil(n / pp) of n.
    """
    pp = costs.batch.pp
    fullest = sum((n * values for n, values in zip(costs.counts, by_kind, strict=True)), start=np.zeros(len(pp))) / pp
    for n, kind, values in zip(costs.counts, costs.kinds, by_kind, strict=True):
        if isinstance(kind, Block):
            fullest = np.maximum(fullest, -(-n // pp) * values)
    return np.asarray(fullest)


def slowest_stage_s(costs: SpaceCosts) -> FloatArray:
    """Seconds [N] of one micro-batch that the slowest stage takes at least, without transfers."""
    return _fullest_stage(costs, [cost.busy_s[costs.like] for cost in costs.inside])


def _uneven_s(costs: SpaceCosts) -> FloatArray:
    """What whole blocks add to perfectly balanced stages [N]: the slowest stage counts m - 1 / v times on top of the sum over all
    stages (cost_models/pipeline.py).
    """
    b = costs.batch
    more = slowest_stage_s(costs) - costs.total("busy_s") / b.pp
    return np.asarray((b.num_microbatches - 1 / b.num_model_chunks) * more)


def memory_bounds(costs: SpaceCosts) -> FloatArray:
    """Admissible bound on the bytes of the fullest device [N]."""
    parts = memory.stage_memory(_balanced_contents(costs), _least_shape(costs.batch), costs.workload, costs.cluster)
    return np.asarray(memory.total_bytes(parts))


def _kept_by_all_stages(costs: SpaceCosts) -> FloatArray:
    """Activations of one micro-batch that all stages together may keep at most [N], bytes."""
    cap_bytes = costs.cluster.memory_budget_bytes
    contents, shape = _balanced_contents(costs), _least_shape(costs.batch)
    room = memory.kept_room_bytes(contents, shape, costs.workload, costs.cluster, cap_bytes=cap_bytes)
    return np.asarray(room * costs.batch.pp)


def _balanced_contents(costs: SpaceCosts) -> memory.StageContents:
    """The mean of all stages of every layout [N]."""
    b = costs.batch
    params, trained, expert_params = (costs.total(n) / b.pp for n in ("num_params", "num_trained", "expert_params"))
    return memory.StageContents(
        params=params,
        trained=trained,
        expert_params=expert_params,
        block_trained=costs.block_trained,
        frozen_bytes=costs.total("frozen_bytes") / b.pp,
        root_params=np.where(b.pp == 1, costs.root_params, 0.0),
        block_params=costs.block_params,
        activation_bytes=costs.total("activation_bytes") / b.pp,
        working_bytes=costs.working_bytes,
        logits=np.where(b.pp == 1, costs.logits, 0.0),
        boundary_bytes=costs.boundary_bytes,
    )


def _least_shape(b: LayoutBatch) -> memory.StepShape:
    """Of the stage with the fewest micro-batches in flight."""
    fewest = memory.in_flight(b.schedule, b.num_microbatches, b.pp, b.pp - 1, b.num_model_chunks)
    return _step_shape(b, fewest, num_neighbours=np.minimum(b.pp - 1, 1))


def stage_memory_parts(
    costs: SpaceCosts, idx: int, contents: memory.StageContents, stage_idx: IntArray
) -> dict[str, FloatArray]:
    """Memory parts of stages ``stage_idx`` of layout ``idx``."""
    return memory.stage_memory(contents, _stage_shape(costs, idx, stage_idx), costs.workload, costs.cluster)


def _stage_shape(costs: SpaceCosts, idx: int, stage_idx: IntArray) -> memory.StepShape:
    b = costs.batch
    flight = memory.in_flight(b.schedule[idx], b.num_microbatches[idx], b.pp[idx], stage_idx, b.num_model_chunks[idx])
    num_neighbours = (stage_idx > 0).astype(np.int64) + (stage_idx < b.pp[idx] - 1)
    return _step_shape(b, flight, num_neighbours=num_neighbours, at=idx)


def kept_room_bytes(
    costs: SpaceCosts, idx: int, contents: memory.StageContents, stage_idx: IntArray, *, cap_bytes: float
) -> FloatArray:
    """Activations that stages ``stage_idx`` of layout ``idx`` may keep for each micro-batch, bytes; negative where none fit."""
    shape = _stage_shape(costs, idx, stage_idx)
    room = memory.kept_room_bytes(contents, shape, costs.workload, costs.cluster, cap_bytes=cap_bytes)
    without = replace(contents, activation_bytes=np.zeros_like(contents.params))
    parts = memory.stage_memory(without, shape, costs.workload, costs.cluster)
    required = memory.required_bytes(memory.total_bytes(parts), parts["parameters"], costs.workload, costs.cluster)
    return np.asarray(np.where(required <= cap_bytes, room, -np.inf))


def _step_shape(
    batch: LayoutBatch, in_flight: IntArray, *, num_neighbours: IntArray, at: int | slice = slice(None)
) -> memory.StepShape:
    return memory.StepShape(
        dp_replicate=batch.num_replicas[at],
        dp_shard=batch.num_shards[at],
        expert_shards=batch.expert_shards[at],
        zero_stage=batch.zero_stage[at],
        num_microbatches=batch.num_microbatches[at],
        in_flight=in_flight,
        num_neighbours=num_neighbours,
        offload=batch.offload[at],
        offload_fraction=batch.offload_fraction[at],
    )


def contents_between(costs: SpaceCosts, idx: int, first: IntArray, last: IntArray) -> memory.StageContents:
    """Contents of stages that hold layers ``first .. last - 1`` under layout ``idx``; arrays of any one shape."""

    def span(name: str) -> FloatArray:
        prefix = costs.prefix(name, idx)
        return np.asarray(prefix[last] - prefix[first])

    roots = np.concatenate([[0.0], np.cumsum(costs.per_layer("num_params", idx) * costs.is_root)])
    head_idx = next(i for i, layer in enumerate(costs.model.iter_layers()) if isinstance(layer, Head))
    return memory.StageContents(
        params=span("num_params"),
        trained=span("num_trained"),
        expert_params=span("expert_params"),
        block_trained=costs.block_trained[idx],
        frozen_bytes=span("frozen_bytes"),
        root_params=np.minimum(roots[last] - roots[first], costs.root_params[idx]),
        block_params=costs.block_params[idx],
        activation_bytes=span("activation_bytes"),
        working_bytes=_working_between(costs, idx, first, last),
        logits=np.where((first <= head_idx) & (head_idx < last), costs.logits[idx], 0.0),
        boundary_bytes=costs.boundary_bytes[idx],
    )


def _working_between(costs: SpaceCosts, idx: int, first: IntArray, last: IntArray) -> FloatArray:
    """Largest working set of a layer; where blocks recompute differently, under the options of those on the stage."""
    if costs.option_of_layer is None or costs.working_of_option is None:
        return np.asarray(costs.working_bytes[idx])
    largest = np.zeros(np.shape(first))
    for option, working in enumerate(costs.working_of_option):
        before = np.concatenate([[0], np.cumsum(costs.option_of_layer == option)])
        largest = np.maximum(largest, np.where(before[last] > before[first], working, 0.0))
    return largest


def estimate_step(costs: SpaceCosts, idx: int, boundaries: Sequence[int]) -> Estimate:
    """Estimate of layout ``idx`` whose stage s holds layers ``boundaries[s] .. boundaries[s+1] - 1``."""
    assert not costs.batch.is_mixed or costs.option_of_layer is not None, (
        "a mixed layout has a cost once each layer has an option"
    )
    first, last = np.array(boundaries[:-1]), np.array(boundaries[1:])
    contents = contents_between(costs, idx, first, last)
    parts = stage_memory_parts(costs, idx, contents, np.arange(len(first)))
    breakdown_s, stage_s = _time_breakdown(costs, idx, first, last, contents)
    allocated = memory.total_bytes(parts)
    fullest = int(np.argmax(allocated))
    stages = tuple(
        StageEstimate(
            forward_s=float(stage_s[0][s]),
            backward_s=float(stage_s[1][s]),
            memory_bytes=memory.breakdown({name: np.broadcast_to(v, first.shape)[s] for name, v in parts.items()}),
        )
        for s in range(len(first))
    )
    return _assemble(costs, breakdown_s, stages, fullest)


def _time_breakdown(
    costs: SpaceCosts, idx: int, first: IntArray, last: IntArray, contents: memory.StageContents
) -> tuple[TimeBreakdown, tuple[FloatArray, FloatArray]]:
    def stage_sums(name: str) -> FloatArray:
        values = costs.per_layer(name, idx)
        return np.array([values[i:j].sum() for i, j in zip(first, last, strict=True)])

    m, pp = int(costs.batch.num_microbatches[idx]), len(first)
    forward, backward, recompute = stage_sums("forward_s"), stage_sums("backward_s"), stage_sums("recompute_s")
    tp_forward, tp_backward = stage_sums("tp_forward_s"), stage_sums("tp_backward_s")
    cp_forward, cp_backward = stage_sums("cp_forward_s"), stage_sums("cp_backward_s")
    ep_forward, ep_backward = stage_sums("ep_forward_s"), stage_sums("ep_backward_s")
    transfer = 2 * float(costs.transfer_s[idx]) if pp > 1 else 0.0
    busy = forward + backward + recompute + tp_forward + tp_backward + transfer
    busy = busy + cp_forward + cp_backward + ep_forward + ep_backward
    slowest = int(np.argmax(busy))
    exposed = np.array([e[idx] for e in costs.dp_exposed_by_kind])[costs.kind_of_layer]
    dp = max(exposed[i:j].sum() for i, j in zip(first, last, strict=True)) + float(costs.dp_edges_s[idx])
    parts = TimeBreakdown(
        compute=m * float(forward[slowest] + backward[slowest]),
        recompute=m * float(recompute[slowest]),
        tp=m * float(tp_forward[slowest] + tp_backward[slowest]),
        cp=m * float(cp_forward[slowest] + cp_backward[slowest]),
        ep=m * float(ep_forward[slowest] + ep_backward[slowest]),
        dp=float(dp),
        pp=m * transfer,
        bubble=max(
            0.0, float(pipelined_s(busy, m, costs.batch.num_model_chunks[idx]) - m * busy[slowest])
        ),  # rounding can leave -1e-16 for one stage
        optimizer=float(np.max(costs.update_s(contents.trained, contents.expert_params, idx))),
    )
    inside = (tp_forward + cp_forward + ep_forward, tp_backward + cp_backward + ep_backward)
    return parts, (forward + inside[0], backward + recompute + inside[1])


def with_memory(estimate: Estimate, parts: MemoryBreakdown, workload: Workload, cluster: ClusterSpec) -> Estimate:
    """The estimate with another peak of the fullest device."""
    return estimate.replace(memory_bytes=parts, **_peaks(parts, workload, cluster))


def _peaks(parts: MemoryBreakdown, workload: Workload, cluster: ClusterSpec) -> dict[str, Any]:
    """Fields of an Estimate that follow from the parts of the allocated peak."""
    allocated = parts.total
    reserved = float(memory.reserved_bytes(allocated, parts.parameters, workload, cluster))
    required = int(memory.required_bytes(allocated, parts.parameters, workload, cluster))
    low, high = memory.interval_factors(workload, cluster)
    return {
        "peak_allocated_bytes": allocated,
        "peak_reserved_bytes": int(reserved),
        "peak_device_bytes": int(reserved + memory.context_bytes(cluster)),
        "memory_interval_bytes": Interval(low=low * allocated, high=high * allocated),
        "required_bytes": required,
        "fits": required <= cluster.memory_budget_bytes,
    }


def _assemble(
    costs: SpaceCosts, breakdown_s: TimeBreakdown, stages: tuple[StageEstimate, ...], fullest: int
) -> Estimate:
    workload, cluster, model = costs.workload, costs.cluster, costs.model
    device = cluster.weakest_device
    time = breakdown_s.total
    tokens_per_s = workload.tokens_per_step / time
    layers = tuple((run.layer, run.count) for run in model.layers)
    is_frozen = workload.adapters is not None
    flops = model_flops_per_token(layers, model.hidden_dim, workload.attended_len, frozen=is_frozen) * tokens_per_s
    return Estimate(
        step_time_s=time,
        step_time_interval_s=time_interval(breakdown_s, workload, cluster),
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_device=tokens_per_s / cluster.num_devices,
        mfu=flops / (peak_flops_per_s(device, workload.precision) * cluster.num_devices),
        budget_bytes=cluster.memory_budget_bytes,
        **_peaks(stages[fullest].memory_bytes, workload, cluster),
        breakdown_s=breakdown_s,
        memory_bytes=stages[fullest].memory_bytes,
        stages=stages,
    )
