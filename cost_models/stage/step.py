"""A whole training step: layers add up to stages, stages to a step.

`CostTable` holds the cost of each kind of layer under each layout; from it come, with the same formulas, `estimate_step` (one
layout with its real stages) and `bounds.lower_bounds` (all layouts at once, every stage ideally balanced).

A training step on a mixed cluster whose stages each lie on one part of it: some device, some links.

A layout is aligned with the parts when the ranks of a stage fill every part without rest. Part g then runs
k_g = devices / stage_ranks stages, one after the other, with the costs of its own device and links; what joins stages are the links
of the whole cluster.

    T = replay of the stages' passes + max_s exposed_s + edges + max_s update_s       (cost_models/pipeline/replay.py)

with the passes, exposed_s and update_s of stage s on its part, and the edges of the part that has the most. Layouts that are not
aligned are costed as if every rank were the weakest.

Bounds hold for every order of the parts and every split of the layers. With b_gk the seconds of a layer of kind k on part g,
n_k layers of it and W_g = sum_k n_k b_gk, no slowest stage is below

    sum_k n_k min_g (b_gk / W_g) / sum_g (k_g / W_g)                      weak duality: all work over the sum of the rates
    min {z : sum_g k_g floor(z / b_gk) >= n_k}   for each kind of block   blocks are whole

How far a prediction may be off: nominal 90 % intervals whose width depends on what the time is made of.

    log(measured / predicted) is above -sum_k low_k s_k and below sum_k high_k s_k in all but 5 % of runs each,

with s the shares of the step time: kernels, tensor-parallel, data-parallel and pipeline communication, bubbles. Kernels are known
better than networks that others share. The coefficients are quantile regressions on published runs, every source with the
same weight [fitted: python -m meshwright.fitting.intervals RUNS.csv]. A calibrated cluster uses the
spread that its own runs showed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from ...schema import ClusterSpec, Estimate, ModelSpec, Workload
from ...schema.arrays import FloatArray, IntArray
from ...schema.cluster import part_label
from ...schema.errors import ConfigError
from ...schema.layout_table import MIXED
from ...schema.plan import Interval, MemoryBreakdown, StageEstimate, TimeBreakdown
from ..coefficients import coefficients
from ..hardware.device import is_measured, peak_flops_per_s
from ..layer.operators import model_flops_per_token
from ..pipeline.lower_bounds import pipelined_s
from ..pipeline.replay import PipelineShape, makespan_s
from . import contents as stage_memory
from . import memory
from .contents import StageContents, contents_between, pipeline_shape
from .memory import rank_memory_terms, stage_memory_terms
from .table import CostTable


def estimate_step(costs: CostTable, idx: int, boundaries: Sequence[int]) -> Estimate:
    """Estimate of layout ``idx`` whose stage s holds layers ``boundaries[s] .. boundaries[s+1] - 1``.

    With model chunks there are pp stages for each, or pp that stand for all the layers of a rank, its chunks equal to each other.
    """
    assert costs.batch.recompute[idx] != MIXED or costs.option_of_layer is not None, "each layer needs an option"
    first, last = np.array(boundaries[:-1]), np.array(boundaries[1:])
    contents = contents_between(costs, idx, first, last)
    shape = pipeline_shape(costs, idx)
    in_chunks = len(first) == shape.num_stages > shape.pp
    num_ranks = shape.pp if in_chunks else len(first)
    ranks = np.array(shape.rank_of_stage) if in_chunks else np.arange(num_ranks)
    if in_chunks:
        contents, parts = rank_memory_terms(costs, idx, contents)
    else:
        parts = stage_memory_terms(costs, idx, contents, ranks)
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
    return estimate_from_terms(costs, breakdown_s, stages, fullest)


class StagePasses(NamedTuple):
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


def pass_seconds(costs: CostTable, idx: int, first: IntArray, last: IntArray) -> StagePasses:
    """Passes of stages that hold layers ``first .. last - 1`` under layout ``idx``; a split vocabulary comes on top."""

    def between(values: FloatArray) -> FloatArray:
        return np.array([values[i:j].sum() for i, j in zip(first, last, strict=True)])

    def stage_sums(name: str) -> FloatArray:
        return between(costs.per_layer(name, idx))

    forward, backward, recompute = stage_sums("forward_s"), stage_sums("backward_s"), stage_sums("recompute_s")
    sent = [[stage_sums(f"{axis}_{way}_s") for way in ("forward", "backward")] for axis in ("tp", "cp", "ep")]
    parts = {"compute": forward + backward, "recompute": recompute}
    parts |= {axis: there + back for axis, (there, back) in zip(("tp", "cp", "ep"), sent, strict=True)}
    return StagePasses(
        forward + sum(there for there, _ in sent),
        backward + recompute + sum(back for _, back in sent),
        stage_sums("weight_s"),
        between(np.array([e[idx] for e in costs.dp_exposed_by_kind])[costs.kind_of_layer]),
        between(costs.copied_s(idx)),
        parts,
    )


def _time_breakdown(
    costs: CostTable, idx: int, shape: PipelineShape, passes: StagePasses, ranks: IntArray, contents: StageContents
) -> TimeBreakdown:
    """``ranks`` says which rank has each of the ``passes``."""
    m, pp = shape.num_microbatches, shape.pp
    transfer = 2 * float(costs.transfer_s[idx]) if pp > 1 else 0.0

    def on_ranks(seconds: FloatArray) -> FloatArray:
        return np.asarray(np.bincount(ranks, seconds, pp), dtype=np.float64)

    busy = on_ranks(passes.forward + passes.backward) + transfer
    slowest = int(np.argmax(busy))
    parts = {name: m * float(on_ranks(seconds)[slowest]) for name, seconds in passes.parts.items()}
    copied, exposed = copies_and_collectives(on_ranks(passes.copied), on_ranks(passes.exposed))
    return TimeBreakdown(
        **{**parts, "compute": parts["compute"] + copied},
        dp=exposed + float(costs.dp_edges_s[idx]),
        pp=m * transfer,
        bubble=bubble_s(pipeline_s(shape, passes, transfer), m * float(busy[slowest])),
        optimizer=float(np.max(costs.update_s(contents.trained, contents.expert_params, idx))),
    )


def copies_and_collectives(copied: FloatArray, exposed: FloatArray) -> tuple[float, float]:
    """Copies, which are part of compute, and collectives over data, of the rank that has most of both."""
    most = int(np.argmax(exposed))
    return float(copied[most]), float(exposed[most] - copied[most])


def bubble_s(step_s: float, busy_s: float) -> float:
    """What a step has beyond the work of its slowest rank; nothing where only rounding is between them."""
    return 0.0 if math.isclose(step_s, busy_s, rel_tol=1e-12) else max(0.0, step_s - busy_s)


def pipeline_s(shape: PipelineShape, passes: StagePasses, transfer_s: float) -> float:
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


def _with_vocabulary_s(costs: CostTable, idx: int, parts: TimeBreakdown) -> TimeBreakdown:
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


def estimate_from_terms(
    costs: CostTable, breakdown_s: TimeBreakdown, stages: tuple[StageEstimate, ...], fullest: int
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


_FIELDS_OF_TERMS = {
    "compute": ("forward_s", "backward_s"),
    "recompute": ("recompute_s",),
    "tp": ("tp_forward_s", "tp_backward_s"),
    "cp": ("cp_forward_s", "cp_backward_s"),
    "ep": ("ep_forward_s", "ep_backward_s"),
}


_FORWARD_FIELDS = ("forward_s", "tp_forward_s", "cp_forward_s", "ep_forward_s")


def values_of_stages(
    costs: CostTable, part_of_stage: IntArray, of_part: Callable[[CostTable], FloatArray]
) -> FloatArray:
    """[S, ...]: what ``of_part`` says of the part that each stage lies on."""
    values = [of_part(part) for part in costs.parts]
    return np.array([values[g] for g in part_of_stage])


def busy_of_stages(costs: CostTable, idx: int, part_of_stage: IntArray) -> FloatArray:
    """Seconds of each layer for one micro-batch on each stage [S, L]."""
    return values_of_stages(costs, part_of_stage, lambda part: part.per_layer("busy_s", idx))


def exposed_of_stages(costs: CostTable, idx: int, part_of_stage: IntArray) -> FloatArray:
    """Communication over data of each layer that nothing hides, on each stage [S, L]."""

    def exposed(part: CostTable) -> FloatArray:
        return np.array([seconds[idx] for seconds in part.dp_exposed_by_kind])[part.kind_of_layer]

    return values_of_stages(costs, part_of_stage, exposed)


def transfer_of_stages(costs: CostTable, idx: int, part_of_stage: IntArray) -> FloatArray:
    """Seconds each stage [S] sends and receives for one micro-batch, both ways."""
    return values_of_stages(costs, part_of_stage, lambda part: np.asarray(2 * part.transfer_s[idx]))


def edges_s(costs: CostTable, idx: int) -> float:
    """First gather, last reduction and tied copies, on the part where they take longest."""
    return max(float(part.dp_edges_s[idx]) for part in costs.parts)


def estimate_on_pools(costs: CostTable, idx: int, boundaries: Sequence[int], part_of_stage: IntArray) -> Estimate:
    """Estimate of aligned layout ``idx`` whose stage s holds layers ``boundaries[s] .. boundaries[s+1] - 1`` on its part."""
    first, last = np.array(boundaries[:-1]), np.array(boundaries[1:])
    breakdown_s, passes = _time_on_pools(costs, idx, boundaries, part_of_stage)
    stages, required = [], []
    for s, g in enumerate(part_of_stage):
        parts = _memory_on_pool(costs.parts[g], idx, (int(first[s]), int(last[s])), s)
        stages.append(
            StageEstimate(
                forward_s=float(passes.forward[s]),
                backward_s=float(passes.backward[s]),
                memory_bytes=memory.breakdown(parts),
                device=part_label(costs.cluster.parts, int(g)),
            )
        )
        cluster = costs.parts[g].cluster
        needs = memory.required_bytes(memory.total_bytes(parts), parts["parameters"], costs.workload, cluster)
        required.append(float(needs) / cluster.memory_budget_bytes)
    return _estimate_of_pools(costs, breakdown_s, tuple(stages), part_of_stage, int(np.argmax(required)))


def _memory_on_pool(part: CostTable, idx: int, layers: tuple[int, int], s: int) -> dict[str, FloatArray]:
    contents = stage_memory.contents_between(part, idx, np.array([layers[0]]), np.array([layers[1]]))
    parts = memory.stage_memory_terms(part, idx, contents, np.array([s]))
    return {name: np.broadcast_to(value, (1,))[0] for name, value in parts.items()}


def passes_on_pools(costs: CostTable, idx: int, boundaries: Sequence[int], part_of_stage: IntArray) -> StagePasses:
    """`step.pass_seconds` with each stage on its part; passes are not split, and transfers between stages are not in them."""
    spans = list(enumerate(pairwise(boundaries)))

    def held(values: FloatArray) -> FloatArray:
        return np.array([values[s, i:j].sum() for s, (i, j) in spans])

    def stage_sums(name: str) -> FloatArray:
        return held(values_of_stages(costs, part_of_stage, lambda part: part.per_layer(name, idx)))

    sums = {name: stage_sums(name) for names in _FIELDS_OF_TERMS.values() for name in names}
    none = np.zeros(len(spans))
    forward = sum((sums[name] for name in _FORWARD_FIELDS), start=none)
    return StagePasses(
        forward,
        sum(sums.values(), start=none) - forward,
        none,
        held(exposed_of_stages(costs, idx, part_of_stage)),
        held(values_of_stages(costs, part_of_stage, lambda part: part.copied_s(idx))),
        {part: np.asarray(sum(sums[name] for name in names)) for part, names in _FIELDS_OF_TERMS.items()},
    )


def _time_on_pools(
    costs: CostTable, idx: int, boundaries: Sequence[int], part_of_stage: IntArray
) -> tuple[TimeBreakdown, StagePasses]:
    """Parts of the step, and the passes of one micro-batch."""
    m = int(costs.batch.num_microbatches[idx])
    passes = passes_on_pools(costs, idx, boundaries, part_of_stage)
    transfer = transfer_of_stages(costs, idx, part_of_stage)
    busy = passes.forward + passes.backward + transfer
    slowest = int(np.argmax(busy))
    update = values_of_stages(
        costs,
        part_of_stage,
        lambda part: part.update_s(part.per_layer("num_trained", idx), part.per_layer("expert_params", idx), idx),
    )
    replayed_s = makespan_s(
        stage_memory.pipeline_shape(costs, idx),
        passes.forward + transfer / 2,
        passes.backward + transfer / 2,
        passes.weight,
    )
    copied, exposed = copies_and_collectives(passes.copied, passes.exposed)
    parts = {part: m * float(seconds[slowest]) for part, seconds in passes.parts.items()}
    breakdown = TimeBreakdown(
        **{**parts, "compute": parts["compute"] + copied},
        dp=exposed + edges_s(costs, idx),
        pp=m * float(transfer[slowest]),
        bubble=bubble_s(replayed_s, m * float(busy[slowest])),
        optimizer=max(float(update[s, i:j].sum()) for s, (i, j) in enumerate(pairwise(boundaries))),
    )
    return breakdown, passes


def _estimate_of_pools(
    costs: CostTable,
    breakdown_s: TimeBreakdown,
    stages: tuple[StageEstimate, ...],
    part_of_stage: IntArray,
    fullest: int,
) -> Estimate:
    """The estimate; memory is that of the stage that comes closest to the budget of its devices."""
    part = costs.parts[part_of_stage[fullest]].cluster
    found = estimate_from_terms(costs, breakdown_s, stages, fullest)
    found = with_memory(found, stages[fullest].memory_bytes, costs.workload, part)
    return found.replace(budget_bytes=part.memory_budget_bytes)


Side = Literal["low", "high"]


SIDES: tuple[Side, ...] = ("low", "high")


TAIL = 1.645
"""Standard deviations of a normal distribution beyond which 5 % lie on one side."""


MIN_LOG_WIDTH = 0.03
"""Repeats of one run differ by 1-5 % on managed clusters (MLPerf submissions of one configuration)."""


def time_shares(parts: TimeBreakdown) -> dict[str, float]:
    """Shares of a step time, summing to one; keys as in coefficients.toml."""
    total = parts.total
    kernels = parts.compute + parts.recompute + parts.optimizer + parts.offload
    return {
        "kernels": kernels / total,
        "tp": parts.tp / total,
        "dp": parts.dp / total,
        "pp": parts.pp / total,
        "bubble": parts.bubble / total,
    }


def time_interval(parts: TimeBreakdown, workload: Workload, cluster: ClusterSpec) -> Interval:
    """The interval of a step time on a cluster; it always holds the prediction."""
    low, high = (_log_width(parts, workload, cluster, side) for side in SIDES)
    return Interval(low=parts.total * math.exp(-low), high=parts.total * math.exp(high))


def _log_width(parts: TimeBreakdown, workload: Workload, cluster: ClusterSpec, side: Side) -> float:
    c, device, calibration = coefficients()["interval"], cluster.weakest_device, cluster.calibration
    if device.backend.is_host:
        return abs(math.log(float(c["time_cpu"][side == "high"])))
    widths = c["time"][workload.engine if workload.engine in c["time"] else "others"]
    width: float = sum(widths[side][name] * share for name, share in time_shares(parts).items())
    if not is_measured(device):
        width *= c["time"]["unmeasured_device"]
    if calibration.spread is not None:
        # The model's own width counts as much as a few runs; the runs' spread was found with as many as there were.
        weight = calibration.num_runs / (calibration.num_runs + c["time"]["prior_runs"])
        width = weight * TAIL * calibration.spread + (1 - weight) * width
    return max(width, MIN_LOG_WIDTH)
