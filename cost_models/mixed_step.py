"""A training step on a mixed cluster whose stages each lie on one part of it: some device, some links.

A layout is aligned with the parts when the ranks of a stage fill every part without rest. Part g then runs
k_g = devices / stage_ranks stages, one after the other, with the costs of its own device and links; what joins stages are the links
of the whole cluster.

    T = replay of the stages' passes + max_s exposed_s + edges + max_s update_s       (cost_models/pipeline_replay.py)

with the passes, exposed_s and update_s of stage s on its part, and the edges of the part that has the most. Layouts that are not
aligned are costed as if every rank were the weakest.

Bounds hold for every order of the parts and every split of the layers. With b_gk the seconds of a layer of kind k on part g,
n_k layers of it and W_g = sum_k n_k b_gk, no slowest stage is below

    sum_k n_k min_g (b_gk / W_g) / sum_g (k_g / W_g)                      weak duality: all work over the sum of the rates
    min {z : sum_g k_g floor(z / b_gk) >= n_k}   for each kind of block   blocks are whole
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..schema import Estimate
from ..schema.cluster_parts import label_of
from ..schema.layout import SCHEDULES
from ..schema.model import Block
from ..schema.plan import StageEstimate, TimeBreakdown
from . import bounds, memory, stage_memory, step
from .layouts import RECOMPUTES, FloatArray, IntArray
from .pipeline import single_stages_s
from .pipeline_replay import makespan_s
from .space_costs import SpaceCosts

_PASSES = {
    "compute": ("forward_s", "backward_s"),
    "recompute": ("recompute_s",),
    "tp": ("tp_forward_s", "tp_backward_s"),
    "cp": ("cp_forward_s", "cp_backward_s"),
    "ep": ("ep_forward_s", "ep_backward_s"),
}
_FORWARD = ("forward_s", "tp_forward_s", "cp_forward_s", "ep_forward_s")


def is_aligned(costs: SpaceCosts) -> NDArray[np.bool_]:
    """Whether every stage of a layout lies on one part of the cluster [N]; never where all nodes are alike.

    Other schedules than gpipe and 1f1b, model chunks and a vocabulary split over all stages are costed as the weakest.
    """
    b = costs.batch
    aligned = np.isin(b.schedule, [SCHEDULES.index(name) for name in ("gpipe", "1f1b")])
    aligned &= (b.recompute < len(RECOMPUTES)) & (b.vocabulary == 0) & (b.num_model_chunks == 1) & bool(costs.parts)
    for part in costs.parts:
        aligned &= part.cluster.num_devices % b.stage_ranks == 0
    return aligned


def stages_of_parts(costs: SpaceCosts) -> IntArray:
    """Stages that each part runs under every layout [G, N], rounded down where the layout is not aligned."""
    return np.array([part.cluster.num_devices // costs.batch.stage_ranks for part in costs.parts])


def quick_time_bounds(costs: SpaceCosts) -> FloatArray:
    """`bounds.quick_time_bounds`, of aligned layouts on their parts."""
    plain, aligned = bounds.quick_time_bounds(costs), is_aligned(costs)
    if not aligned.any():
        return plain
    bound = _pipeline_bound(costs.select(np.flatnonzero(aligned)), transfers=False)
    return _put(plain, aligned, bound)


def time_bounds(costs: SpaceCosts) -> FloatArray:
    """`bounds.time_bounds`, of aligned layouts on their parts."""
    plain, aligned = bounds.time_bounds(costs), is_aligned(costs)
    if not aligned.any():
        return plain
    some = costs.select(np.flatnonzero(aligned))
    updates = [
        [part.update_s(cost.num_trained[part.like], cost.expert_params[part.like]) for cost in part.inside]
        for part in some.parts
    ]
    bound = (
        _pipeline_bound(some, transfers=True)
        + least_fullest(some, [part.dp_exposed_by_kind for part in some.parts])
        + np.max([part.dp_edges_s for part in some.parts], axis=0)
        + least_fullest(some, updates)
    )
    return _put(plain, aligned, bound)


def budget_bytes(costs: SpaceCosts) -> FloatArray:
    """What the bytes of `bounds.memory_bounds` must be within for a layout to fit [N]: of aligned layouts the mean of its stages.

    The bytes of a stage are convex in what it holds, so their mean over the stages is not below those of the mean stage.
    """
    plain = np.full(len(costs.batch), float(costs.cluster.memory_budget_bytes))
    aligned = is_aligned(costs)
    if not aligned.any():
        return plain
    budgets = np.array([part.cluster.memory_budget_bytes for part in costs.parts], dtype=np.float64)
    mean = budgets @ stages_of_parts(costs) / costs.batch.pp
    return np.where(aligned, mean, plain)


def _put(plain: FloatArray, aligned: NDArray[np.bool_], values: FloatArray) -> FloatArray:
    result = plain.copy()
    result[aligned] = values
    return result


def _pipeline_bound(costs: SpaceCosts, *, transfers: bool) -> FloatArray:
    """Seconds of the pipeline alone that no order and no split is below [N]; all layouts are aligned."""
    b = costs.batch
    busy = [[cost.busy_s[part.like] for cost in part.inside] for part in costs.parts]
    transfer = np.min([2 * part.transfer_s for part in costs.parts], axis=0) if transfers else np.zeros(len(b))
    slowest = least_fullest(costs, busy) + transfer
    total = sum(n * np.min(values, axis=0) for n, values in zip(costs.counts, zip(*busy, strict=True), strict=True))
    is_gpipe = b.schedule == SCHEDULES.index("gpipe")
    return np.asarray(single_stages_s(b.num_microbatches, b.pp, is_gpipe, total + b.pp * transfer, slowest))


def least_fullest(costs: SpaceCosts, by_part: Sequence[Sequence[FloatArray]]) -> FloatArray:
    """What the stage with the most of something has at least [N], given a layer of each kind on each part [G][K] of [N]."""
    stages = stages_of_parts(costs)
    whole = np.array([sum(n * v for n, v in zip(costs.counts, values, strict=True)) for values in by_part])
    some = np.all(whole > 0, axis=0)
    weights = 1 / np.where(some, whole, 1.0)
    shares = [
        n * np.min([weights[g] * values[k] for g, values in enumerate(by_part)], axis=0)
        for k, n in enumerate(costs.counts)
    ]
    fullest = np.where(some, np.sum(shares, axis=0) / np.sum(stages * weights, axis=0), 0.0)
    for k, kind in enumerate(costs.kinds):
        if isinstance(kind, Block):
            seconds = np.array([values[k] for values in by_part])
            fullest = np.maximum(fullest, _whole_blocks(int(costs.counts[k]), seconds, stages))
    return np.asarray(fullest)


def _whole_blocks(count: int, seconds: FloatArray, stages: IntArray) -> FloatArray:
    """The least z [N] for which stages, ``stages[g]`` of which take ``seconds[g]`` a block, hold ``count`` blocks in z each."""
    some = np.all(seconds > 0, axis=0)
    each = np.where(some, seconds, 1.0)
    z = count / np.sum(stages / each, axis=0)
    for _ in range(len(seconds)):  # one more block on each stage is enough
        held = np.floor(z / each * (1 + 1e-12))
        short = np.sum(stages * held, axis=0) < count
        z = np.where(short, np.min((held + 1) * each, axis=0), z)
    return np.where(some, z * (1 - 1e-12), 0.0)


def per_stage(costs: SpaceCosts, part_of_stage: IntArray, of_part: Callable[[SpaceCosts], FloatArray]) -> FloatArray:
    """[S, ...]: what ``of_part`` says of the part that each stage lies on."""
    values = [of_part(part) for part in costs.parts]
    return np.array([values[g] for g in part_of_stage])


def busy_of_stages(costs: SpaceCosts, idx: int, part_of_stage: IntArray) -> FloatArray:
    """Seconds of each layer for one micro-batch on each stage [S, L]."""
    return per_stage(costs, part_of_stage, lambda part: part.per_layer("busy_s", idx))


def exposed_of_stages(costs: SpaceCosts, idx: int, part_of_stage: IntArray) -> FloatArray:
    """Communication over data of each layer that nothing hides, on each stage [S, L]."""

    def exposed(part: SpaceCosts) -> FloatArray:
        return np.array([seconds[idx] for seconds in part.dp_exposed_by_kind])[part.kind_of_layer]

    return per_stage(costs, part_of_stage, exposed)


def transfer_of_stages(costs: SpaceCosts, idx: int, part_of_stage: IntArray) -> FloatArray:
    """Seconds each stage [S] sends and receives for one micro-batch, both ways."""
    return per_stage(costs, part_of_stage, lambda part: np.asarray(2 * part.transfer_s[idx]))


def edges_s(costs: SpaceCosts, idx: int) -> float:
    """First gather, last reduction and tied copies, on the part where they take longest."""
    return max(float(part.dp_edges_s[idx]) for part in costs.parts)


def estimate_on_parts(costs: SpaceCosts, idx: int, boundaries: Sequence[int], part_of_stage: IntArray) -> Estimate:
    """Estimate of aligned layout ``idx`` whose stage s holds layers ``boundaries[s] .. boundaries[s+1] - 1`` on its part."""
    first, last = np.array(boundaries[:-1]), np.array(boundaries[1:])
    breakdown_s, passes = _time(costs, idx, boundaries, part_of_stage)
    stages, required = [], []
    for s, g in enumerate(part_of_stage):
        parts = _stage_memory(costs.parts[g], idx, (int(first[s]), int(last[s])), s)
        stages.append(
            StageEstimate(
                forward_s=float(passes.forward[s]),
                backward_s=float(passes.backward[s]),
                memory_bytes=memory.breakdown(parts),
                device=label_of(costs.cluster.parts, int(g)),
            )
        )
        cluster = costs.parts[g].cluster
        needs = memory.required_bytes(memory.total_bytes(parts), parts["parameters"], costs.workload, cluster)
        required.append(float(needs) / cluster.memory_budget_bytes)
    return _assembled(costs, breakdown_s, tuple(stages), part_of_stage, int(np.argmax(required)))


def _stage_memory(part: SpaceCosts, idx: int, layers: tuple[int, int], s: int) -> dict[str, FloatArray]:
    contents = stage_memory.contents_between(part, idx, np.array([layers[0]]), np.array([layers[1]]))
    parts = stage_memory.stage_memory_parts(part, idx, contents, np.array([s]))
    return {name: np.broadcast_to(value, (1,))[0] for name, value in parts.items()}


def passes_on_parts(costs: SpaceCosts, idx: int, boundaries: Sequence[int], part_of_stage: IntArray) -> step.Passes:
    """`step.pass_seconds` with each stage on its part; passes are not split, and transfers between stages are not in them."""
    spans = list(enumerate(pairwise(boundaries)))

    def held(values: FloatArray) -> FloatArray:
        return np.array([values[s, i:j].sum() for s, (i, j) in spans])

    def stage_sums(name: str) -> FloatArray:
        return held(per_stage(costs, part_of_stage, lambda part: part.per_layer(name, idx)))

    sums = {name: stage_sums(name) for names in _PASSES.values() for name in names}
    none = np.zeros(len(spans))
    forward = sum((sums[name] for name in _FORWARD), start=none)
    return step.Passes(
        forward,
        sum(sums.values(), start=none) - forward,
        none,
        held(exposed_of_stages(costs, idx, part_of_stage)),
        held(per_stage(costs, part_of_stage, lambda part: part.copied_s(idx))),
        {part: np.asarray(sum(sums[name] for name in names)) for part, names in _PASSES.items()},
    )


def _time(
    costs: SpaceCosts, idx: int, boundaries: Sequence[int], part_of_stage: IntArray
) -> tuple[TimeBreakdown, step.Passes]:
    """Parts of the step, and the passes of one micro-batch."""
    m = int(costs.batch.num_microbatches[idx])
    passes = passes_on_parts(costs, idx, boundaries, part_of_stage)
    transfer = transfer_of_stages(costs, idx, part_of_stage)
    busy = passes.forward + passes.backward + transfer
    slowest = int(np.argmax(busy))
    update = per_stage(
        costs,
        part_of_stage,
        lambda part: part.update_s(part.per_layer("num_trained", idx), part.per_layer("expert_params", idx), idx),
    )
    replayed_s = makespan_s(
        stage_memory.shape_of(costs, idx), passes.forward + transfer / 2, passes.backward + transfer / 2, passes.weight
    )
    copied, exposed = step.apart(passes.copied, passes.exposed)
    parts = {part: m * float(seconds[slowest]) for part, seconds in passes.parts.items()}
    breakdown = TimeBreakdown(
        **{**parts, "compute": parts["compute"] + copied},
        dp=exposed + edges_s(costs, idx),
        pp=m * float(transfer[slowest]),
        bubble=step.waiting_s(replayed_s, m * float(busy[slowest])),
        optimizer=max(float(update[s, i:j].sum()) for s, (i, j) in enumerate(pairwise(boundaries))),
    )
    return breakdown, passes


def _assembled(
    costs: SpaceCosts,
    breakdown_s: TimeBreakdown,
    stages: tuple[StageEstimate, ...],
    part_of_stage: IntArray,
    fullest: int,
) -> Estimate:
    """The estimate; memory is that of the stage that comes closest to the budget of its devices."""
    part = costs.parts[part_of_stage[fullest]].cluster
    found = step.assembled(costs, breakdown_s, stages, fullest)
    found = step.with_memory(found, stages[fullest].memory_bytes, costs.workload, part)
    return found.replace(budget_bytes=part.memory_budget_bytes)
