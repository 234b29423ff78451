"""A whole training step: layers add up to stages, stages to a step.

`SpaceCosts` holds the cost of each kind of layer under each layout; from it come, with the same formulas, `estimate_step` (one
layout with its real stages) and `bounds.lower_bounds` (all layouts at once, every stage ideally balanced).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..schema import ClusterSpec, Estimate, ModelSpec, Workload
from ..schema.errors import ConfigError
from ..schema.plan import Interval, MemoryBreakdown, StageEstimate, TimeBreakdown
from . import memory
from .coefficients import peak_flops_per_s
from .interval import time_interval
from .layouts import MIXED, FloatArray, IntArray
from .operators import model_flops_per_token
from .pipeline import pipelined_s
from .pipeline_replay import Shape, makespan_s
from .space_costs import SpaceCosts
from .stage_contents import StageContents
from .stage_memory import contents_between, rank_memory_parts, shape_of, stage_memory_parts


def estimate_step(costs: SpaceCosts, idx: int, boundaries: Sequence[int]) -> Estimate:
    """Estimate of layout ``idx`` whose stage s holds layers ``boundaries[s] .. boundaries[s+1] - 1``.

    With model chunks there are pp stages for each, or pp that stand for all the layers of a rank, its chunks equal to each other.
    """
    assert costs.batch.recompute[idx] != MIXED or costs.option_of_layer is not None, "each layer needs an option"
    first, last = np.array(boundaries[:-1]), np.array(boundaries[1:])
    contents = contents_between(costs, idx, first, last)
    shape = shape_of(costs, idx)
    in_chunks = len(first) == shape.num_stages > shape.pp
    num_ranks = shape.pp if in_chunks else len(first)
    ranks = np.array(shape.rank_of_stage) if in_chunks else np.arange(num_ranks)
    if in_chunks:
        contents, parts = rank_memory_parts(costs, idx, contents)
    else:
        parts = stage_memory_parts(costs, idx, contents, ranks)
    passes = pass_seconds(costs, idx, first, last)
    breakdown_s = _time_breakdown(costs, idx, replace(shape, pp=num_ranks), passes, ranks, contents)
    breakdown_s = _with_vocabulary_s(costs, idx, breakdown_s)
    allocated = memory.total_bytes(parts)
    fullest = int(np.argmax(allocated))
    forward_s, backward_s = (np.bincount(ranks, seconds, num_ranks) for seconds in (passes.forward, passes.backward))
    if (share := costs.vocabulary) is not None:
        ahead_s = share.total("forward_s")[idx] + share.total("comm_forward_s")[idx]
        forward_s, backward_s = forward_s + ahead_s, backward_s + share.total("busy_s")[idx] - ahead_s
    stages = tuple(
        StageEstimate(
            forward_s=float(forward_s[s]),
            backward_s=float(backward_s[s]),
            memory_bytes=memory.breakdown({name: np.broadcast_to(v, num_ranks)[s] for name, v in parts.items()}),
        )
        for s in range(num_ranks)
    )
    return assembled(costs, breakdown_s, stages, fullest)


class Passes(NamedTuple):
    """Seconds of one micro-batch in each stage [S], communication inside layers included: forward, backward and, of that, weights.

    ``parts`` [S] are the same by the names of TimeBreakdown. ``exposed`` [S] is what data parallelism adds to a stage's step,
    the ``copied`` [S] seconds of copies and sums of parameters and gradients included.
    """

    forward: FloatArray
    backward: FloatArray
    weight: FloatArray
    exposed: FloatArray
    copied: FloatArray
    parts: dict[str, FloatArray]


def pass_seconds(costs: SpaceCosts, idx: int, first: IntArray, last: IntArray) -> Passes:
    """Passes of stages that hold layers ``first .. last - 1`` under layout ``idx``; a split vocabulary comes on top."""

    def between(values: FloatArray) -> FloatArray:
        return np.array([values[i:j].sum() for i, j in zip(first, last, strict=True)])

    def stage_sums(name: str) -> FloatArray:
        return between(costs.per_layer(name, idx))

    forward, backward, recompute = stage_sums("forward_s"), stage_sums("backward_s"), stage_sums("recompute_s")
    sent = [[stage_sums(f"{axis}_{way}_s") for way in ("forward", "backward")] for axis in ("tp", "cp", "ep")]
    parts = {"compute": forward + backward, "recompute": recompute}
    parts |= {axis: there + back for axis, (there, back) in zip(("tp", "cp", "ep"), sent, strict=True)}
    return Passes(
        forward + sum(there for there, _ in sent),
        backward + recompute + sum(back for _, back in sent),
        stage_sums("weight_s"),
        between(np.array([e[idx] for e in costs.dp_exposed_by_kind])[costs.kind_of_layer]),
        between(costs.copied_s(idx)),
        parts,
    )


def _time_breakdown(
    costs: SpaceCosts, idx: int, shape: Shape, passes: Passes, ranks: IntArray, contents: StageContents
) -> TimeBreakdown:
    """``ranks`` says which rank has each of the ``passes``."""
    m, pp = shape.num_microbatches, shape.pp
    transfer = 2 * float(costs.transfer_s[idx]) if pp > 1 else 0.0

    def on_ranks(seconds: FloatArray) -> FloatArray:
        return np.asarray(np.bincount(ranks, seconds, pp), dtype=np.float64)

    busy = on_ranks(passes.forward + passes.backward) + transfer
    slowest = int(np.argmax(busy))
    parts = {name: m * float(on_ranks(seconds)[slowest]) for name, seconds in passes.parts.items()}
    copied, exposed = apart(on_ranks(passes.copied), on_ranks(passes.exposed))
    return TimeBreakdown(
        **{**parts, "compute": parts["compute"] + copied},
        dp=exposed + float(costs.dp_edges_s[idx]),
        pp=m * transfer,
        bubble=waiting_s(step_s(shape, passes, transfer), m * float(busy[slowest])),
        optimizer=float(np.max(costs.update_s(contents.trained, contents.expert_params, idx))),
    )


def apart(copied: FloatArray, exposed: FloatArray) -> tuple[float, float]:
    """Copies, which are part of compute, and collectives over data, of the rank that has most of both."""
    most = int(np.argmax(exposed))
    return float(copied[most]), float(exposed[most] - copied[most])


def waiting_s(step_s: float, busy_s: float) -> float:
    """What a step has beyond the work of its slowest rank; nothing where only rounding is between them."""
    return 0.0 if math.isclose(step_s, busy_s, rel_tol=1e-12) else max(0.0, step_s - busy_s)


def step_s(shape: Shape, passes: Passes, transfer_s: float) -> float:
    """Seconds of all micro-batches through the pipeline: the schedule, replayed.

    Args:
        shape: schedule and numbers.
        passes: of every stage, or of all the stages of each rank, which then count as equal.
        transfer_s: of one micro-batch to and from the neighbours, over all the chunks of a rank; both ranks wait for it.

    Raises:
        ConfigError: the schedule is not defined for these numbers. Interleaved 1F1B has its closed form for any.
    """
    forward, backward, weight = passes.forward, passes.backward - passes.weight, passes.weight
    chunks = shape.num_model_chunks
    if chunks > 1 and len(forward) == shape.pp:
        of_stage = np.array(shape.rank_of_stage)
        forward, backward, weight = (seconds[of_stage] / chunks for seconds in (forward, backward, weight))
    each_way = transfer_s / 2 / chunks
    try:
        return makespan_s(shape, forward + each_way, backward + each_way, weight)
    except ConfigError:
        if shape.schedule != "1f1b":
            raise
        busy = np.bincount(shape.rank_of_stage, forward + backward + weight, shape.pp) + transfer_s
        return float(pipelined_s(busy, shape.num_microbatches, chunks))


def _with_vocabulary_s(costs: SpaceCosts, idx: int, parts: TimeBreakdown) -> TimeBreakdown:
    """The breakdown with what a split vocabulary adds to every stage."""
    if costs.vocabulary is None:
        return parts
    m, share = int(costs.batch.num_microbatches[idx]), costs.vocabulary.at(np.array([idx]))
    compute = m * float(share.total("forward_s")[0] + share.total("backward_s")[0] + share.total("recompute_s")[0])
    inside = m * float(share.total("comm_forward_s")[0] + share.total("comm_backward_s")[0])
    sent = m * float(costs.vocabulary_sent_s[idx])
    return parts.replace(
        compute=parts.compute + compute,
        tp=parts.tp + inside,
        pp=parts.pp + sent,
        bubble=parts.bubble + max(0.0, float(costs.vocabulary_s[idx]) - compute - inside - sent),
        dp=parts.dp + float(costs.vocabulary_dp_s[idx]),
    )


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


def step_flops_per_token(model: ModelSpec, workload: Workload) -> float:
    """FLOPs of a step that training needs for each token: forward and backward, or two forward passes, a third of it each."""
    layers = tuple((run.layer, run.count) for run in model.layers)
    is_frozen = workload.adapters is not None and workload.has_backward
    flops = model_flops_per_token(layers, model.hidden_dim, workload.attended_len, frozen=is_frozen)
    return float(flops if workload.has_backward else flops * 2 / 3)


def assembled(
    costs: SpaceCosts, breakdown_s: TimeBreakdown, stages: tuple[StageEstimate, ...], fullest: int
) -> Estimate:
    """The estimate that follows from the parts of a step and from what each stage holds; memory is that of stage ``fullest``."""
    workload, cluster, model = costs.workload, costs.cluster, costs.model
    peak = sum(group.num_devices * peak_flops_per_s(group.device, workload.precision) for group in cluster.groups)
    time = breakdown_s.total
    tokens_per_s = workload.tokens_per_step / time
    flops = step_flops_per_token(model, workload) * tokens_per_s
    return Estimate(
        step_time_s=time,
        step_time_interval_s=time_interval(breakdown_s, workload, cluster),
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_device=tokens_per_s / cluster.num_devices,
        mfu=flops / peak,
        budget_bytes=cluster.memory_budget_bytes,
        **_peaks(stages[fullest].memory_bytes, workload, cluster),
        breakdown_s=breakdown_s,
        memory_bytes=stages[fullest].memory_bytes,
        stages=stages,
    )
