"""Admissible bounds on the seconds and bytes of every layout of a batch at once: every stage ideally balanced."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...schema.arrays import FloatArray, IntArray
from ...schema.layers import Block, Embedding
from ...schema.layout_table import MIXED
from ...schema.schedules import SCHEDULE_NAMES
from ..pipeline.lower_bounds import PipelineWork, lower_bound_s, min_in_flight, single_stages_s
from . import memory
from .contents import StageContents, StepShape, more_in_flight, step_shape, with_vocabulary
from .recompute import RecomputeCosts, lower_bound_slowest_s, lower_bound_step_s
from .table import CostTable, is_aligned, stages_of_pools


def lower_bounds(costs: CostTable) -> tuple[FloatArray, FloatArray]:
    """Admissible bounds for every layout: seconds of a step and bytes of the fullest device, [N] each.

    Stages are taken as perfectly balanced in time and in memory at once. Both costs are convex in what a stage holds, so no
    real split does better. For pp = 1 the time is exact.
    """
    return uniform_time_bounds(costs), memory_bounds(costs)


def uniform_quick_time_bounds(costs: CostTable) -> FloatArray:
    """Admissible bound on the seconds of a step [N] from the work inside layers and the pipeline's bubble alone."""
    return np.asarray(lower_bound_s(pipeline_work(costs, slowest_stage_s(costs), np.zeros(len(costs.batch)))))


def uniform_time_bounds(costs: CostTable) -> FloatArray:
    """Admissible bound on the seconds of a step [N]."""
    mixed = costs.batch.recompute == MIXED
    if mixed.any() and not mixed.all():
        bound = np.zeros(len(mixed))
        for rows in (np.flatnonzero(mixed), np.flatnonzero(~mixed)):
            bound[rows] = uniform_time_bounds(costs.select(rows))
        return bound
    updates = [costs.update_s(cost.num_trained[costs.like], cost.expert_params[costs.like]) for cost in costs.inside]
    always = costs.dp_edges_s + fullest_stage(costs, updates) + _vocabulary_bound_s(costs)
    exposed = RecomputeCosts.of(costs).least_exposed_by_kind if mixed.any() else costs.dp_exposed_by_kind
    slowest = slowest_stage_s(costs)
    if mixed.any():
        slowest = lower_bound_slowest_s(costs, slowest)
    bound = lower_bound_s(pipeline_work(costs, slowest, 2 * costs.transfer_s)) + fullest_stage(costs, exposed) + always
    return np.asarray(np.maximum(bound, _with_recompute(costs) + always) if mixed.any() else bound)


def _with_recompute(costs: CostTable) -> FloatArray:
    """What the layers of mixed layouts and their transfers take at least once they fit [N]."""
    total, none = costs.total("busy_s"), np.zeros(len(costs.batch))
    # With one stage a rank, balanced stages take as much longer as there is more work.
    per_second = lower_bound_s(pipeline_work(costs, total / costs.batch.pp, none)) / total
    layers = lower_bound_step_s(RecomputeCosts.of(costs), per_second, _kept_by_all_stages(costs))
    return np.asarray(layers + per_second * 2 * costs.transfer_s * costs.batch.pp)


def _vocabulary_bound_s(costs: CostTable) -> FloatArray:
    """What a split vocabulary adds to a step at least [N]: the same on every stage."""
    if costs.vocabulary is None:
        return np.zeros(len(costs.batch))
    update = costs.update_s(costs.vocabulary.total("num_trained"), 0.0)
    return np.asarray(costs.vocabulary_s + costs.vocabulary_dp_s + update)


def pipeline_work(costs: CostTable, slowest_s: FloatArray, transfer_s: FloatArray) -> PipelineWork:
    """What the bounds of pipeline.py look at, given what the slowest rank has at least and the transfers of each rank [N]."""
    b = costs.batch
    busy = [cost.busy_s for cost in costs.inside]
    forward = [cost.forward_s + cost.comm_forward_s for cost in costs.inside]
    blocks = [k for k, kind in enumerate(costs.kinds) if isinstance(kind, Block)]
    deep = [k for k, kind in enumerate(costs.kinds) if not isinstance(kind, Embedding)]

    def total(kinds: Sequence[int]) -> FloatArray:
        return np.asarray(sum(costs.counts[k] * busy[k] for k in kinds))[costs.like]

    def extreme(values: Sequence[FloatArray], largest: bool) -> FloatArray:
        return np.asarray((np.max if largest else np.min)(np.stack(values), axis=0))

    def part(values: FloatArray, of: FloatArray) -> FloatArray:
        # A head that is split over all stages is no layer of the last one.
        return np.asarray(np.divide(values, of, out=np.zeros_like(of), where=of > 0))

    def shares(values: Sequence[FloatArray]) -> list[FloatArray]:
        """Of the work of each kind in ``deep``; a layer that is not there does not count."""
        return [np.divide(values[k], busy[k], out=np.zeros_like(busy[k]), where=busy[k] > 0) for k in deep]

    weight = [cost.weight_s for cost in costs.inside]
    dearest = extreme([busy[k] for k in blocks], True)
    most = max(blocks, key=lambda k: costs.counts[k])
    return PipelineWork(
        schedule=b.schedule,
        pp=b.pp,
        num_model_chunks=b.num_model_chunks,
        num_microbatches=b.num_microbatches,
        total_s=total(range(len(busy))),
        blocks_s=total(blocks),
        deep_s=total(deep),
        slowest_s=slowest_s,
        num_blocks=costs.model.num_blocks,
        block_s=extreme([busy[k] for k in blocks], False)[costs.like],
        block_forward_s=extreme([forward[k] for k in blocks], False)[costs.like],
        transfer_s=transfer_s,
        total_forward_s=np.asarray(sum(n * seconds for n, seconds in zip(costs.counts, forward, strict=True)))[
            costs.like
        ],
        main_s=busy[most][costs.like],
        num_other_blocks=costs.model.num_blocks - int(costs.counts[most]),
        main_forward_share=(forward[most] / busy[most])[costs.like],
        block_share=(extreme([busy[k] for k in blocks], False) / dearest)[costs.like],
        block_forward_share=(extreme([forward[k] for k in blocks], False) / dearest)[costs.like],
        path_share=1 - extreme(shares(weight), True)[costs.like],
        forward_share=extreme(shares(forward), True)[costs.like],
        weight_share=extreme(shares(weight), True)[costs.like],
    )


def fullest_stage(costs: CostTable, by_kind: Sequence[FloatArray]) -> FloatArray:
    """What the stage with the most of it has at least [N], given a layer of each kind [K] of [N].

    The mean of all stages, or the blocks of a kind: some stage holds ceil(n / pp) of n.
    """
    pp = costs.batch.pp
    fullest = sum((n * values for n, values in zip(costs.counts, by_kind, strict=True)), start=np.zeros(len(pp))) / pp
    for n, kind, values in zip(costs.counts, costs.kinds, by_kind, strict=True):
        if isinstance(kind, Block):
            fullest = np.maximum(fullest, -(-n // pp) * values)
    return np.asarray(fullest)


def slowest_stage_s(costs: CostTable) -> FloatArray:
    """Seconds [N] of one micro-batch that the slowest stage takes at least, without transfers.

    Some stage has the mean, or ceil(n / pp) of n blocks of a kind; or the rank with the head has j blocks beside it and another one
    ceil((n - j) / (pp - 1)), at the j where the larger of both is least.
    """
    of_kinds = fullest_stage(costs, [cost.busy_s[costs.like] for cost in costs.inside])
    b, last_block = costs.batch, max(i for i, k in enumerate(costs.kind_of_layer) if isinstance(costs.kinds[k], Block))
    block = np.min(
        [c.busy_s for c, kind in zip(costs.inside, costs.kinds, strict=True) if isinstance(kind, Block)], axis=0
    )
    behind = np.bincount(costs.kind_of_layer[last_block + 1 :], minlength=len(costs.kinds))
    head = np.asarray(sum(n * cost.busy_s for n, cost in zip(behind, costs.inside, strict=True)))[costs.like]
    block, n, others = block[costs.like], costs.model.num_blocks, np.maximum(b.pp - 1, 1)
    least = np.full(len(b), np.inf)
    for more in (0, 1):
        even = np.floor((n - others * head / block) / b.pp) + more
        beside = np.clip(even, b.num_model_chunks, np.maximum(n - others * b.num_model_chunks, b.num_model_chunks))
        least = np.minimum(least, np.maximum(beside * block + head, -(-(n - beside) // others) * block))
    return np.asarray(np.where(b.pp > 1, np.maximum(of_kinds, least), of_kinds))


def memory_bounds(costs: CostTable) -> FloatArray:
    """Admissible bound on the bytes of the fullest device [N]."""
    parts = memory.stage_memory(_balanced_contents(costs), _least_shape(costs), costs.workload, costs.cluster)
    return np.asarray(memory.total_bytes(parts))


def _kept_by_all_stages(costs: CostTable) -> FloatArray:
    """Activations of one micro-batch that all stages together may keep at most [N], bytes."""
    cap_bytes = costs.cluster.memory_budget_bytes
    contents, shape = _balanced_contents(costs), _least_shape(costs)
    room = memory.activation_headroom_bytes(contents, shape, costs.workload, costs.cluster, cap_bytes=cap_bytes)
    return np.asarray(room * costs.batch.pp)


def _balanced_contents(costs: CostTable) -> StageContents:
    """The mean of all stages of every layout [N]."""
    b = costs.batch
    params, trained, expert_params = (costs.total(n) / b.pp for n in ("num_params", "num_trained", "expert_params"))
    contents = StageContents(
        params=params,
        trained=trained,
        expert_params=expert_params,
        block_trained=costs.block_trained,
        frozen_bytes=costs.total("frozen_bytes") / b.pp,
        root_params=np.where(b.pp == 1, costs.root_params, 0.0),
        block_params=costs.block_params,
        activation_bytes=_least_activations(costs) / b.pp,
        working_bytes=costs.working_bytes,
        logits=np.where(b.pp == 1, costs.logits, 0.0),
        boundary_bytes=costs.boundary_bytes,
    )
    return with_vocabulary(costs, contents)


def _least_shape(costs: CostTable) -> StepShape:
    """Of the stage with the fewest micro-batches in flight."""
    b = costs.batch
    fewest = min_in_flight(b.schedule, b.num_microbatches, b.pp, b.num_model_chunks)
    return step_shape(b, more_in_flight(costs, fewest), num_neighbours=np.minimum(b.pp - 1, 1))


def _least_activations(costs: CostTable) -> FloatArray:
    """Bytes of one micro-batch in all layers [N]; with chunks those of as many of the smallest blocks.

    A rank holds more micro-batches of its first chunk than of its last, so what is kept in the last one weighs less.
    """
    everything = costs.total("activation_bytes")
    smallest = np.min(
        [c.activation_bytes for kind, c in zip(costs.kinds, costs.inside, strict=True) if isinstance(kind, Block)],
        axis=0,
    )
    chunked = costs.model.num_blocks * smallest[costs.like]
    return np.asarray(np.where(costs.batch.num_model_chunks > 1, np.minimum(chunked, everything), everything))


def quick_time_bounds(costs: CostTable) -> FloatArray:
    """`bounds.quick_time_bounds`, of aligned layouts on their parts."""
    plain, aligned = uniform_quick_time_bounds(costs), is_aligned(costs)
    if not aligned.any():
        return plain
    bound = _pipeline_bound(costs.select(np.flatnonzero(aligned)), transfers=False)
    return _replaced(plain, aligned, bound)


def time_bounds(costs: CostTable) -> FloatArray:
    """`bounds.time_bounds`, of aligned layouts on their parts."""
    plain, aligned = uniform_time_bounds(costs), is_aligned(costs)
    if not aligned.any():
        return plain
    some = costs.select(np.flatnonzero(aligned))
    updates = [
        [part.update_s(cost.num_trained[part.like], cost.expert_params[part.like]) for cost in part.inside]
        for part in some.parts
    ]
    bound = (
        _pipeline_bound(some, transfers=True)
        + fullest_stage_on_pools(some, [part.dp_exposed_by_kind for part in some.parts])
        + np.max([part.dp_edges_s for part in some.parts], axis=0)
        + fullest_stage_on_pools(some, updates)
    )
    return _replaced(plain, aligned, bound)


def budget_bytes(costs: CostTable) -> FloatArray:
    """What the bytes of `bounds.memory_bounds` must be within for a layout to fit [N]: of aligned layouts the mean of its stages.

    The bytes of a stage are convex in what it holds, so their mean over the stages is not below those of the mean stage.
    """
    plain = np.full(len(costs.batch), float(costs.cluster.memory_budget_bytes))
    aligned = is_aligned(costs)
    if not aligned.any():
        return plain
    budgets = np.array([part.cluster.memory_budget_bytes for part in costs.parts], dtype=np.float64)
    mean = budgets @ stages_of_pools(costs) / costs.batch.pp
    return np.where(aligned, mean, plain)


def _replaced(plain: FloatArray, aligned: NDArray[np.bool_], values: FloatArray) -> FloatArray:
    result = plain.copy()
    result[aligned] = values
    return result


def _pipeline_bound(costs: CostTable, *, transfers: bool) -> FloatArray:
    """Seconds of the pipeline alone that no order and no split is below [N]; all layouts are aligned."""
    b = costs.batch
    busy = [[cost.busy_s[part.like] for cost in part.inside] for part in costs.parts]
    transfer = np.min([2 * part.transfer_s for part in costs.parts], axis=0) if transfers else np.zeros(len(b))
    slowest = fullest_stage_on_pools(costs, busy) + transfer
    total = sum(n * np.min(values, axis=0) for n, values in zip(costs.counts, zip(*busy, strict=True), strict=True))
    is_gpipe = b.schedule == SCHEDULE_NAMES.index("gpipe")
    return np.asarray(single_stages_s(b.num_microbatches, b.pp, is_gpipe, total + b.pp * transfer, slowest))


def fullest_stage_on_pools(costs: CostTable, by_part: Sequence[Sequence[FloatArray]]) -> FloatArray:
    """What the stage with the most of something has at least [N], given a layer of each kind on each part [G][K] of [N]."""
    stages = stages_of_pools(costs)
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
