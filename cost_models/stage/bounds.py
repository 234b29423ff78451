"""Admissible bounds on the seconds and bytes of every layout of a table at once: every stage ideally balanced.

On device pools bounds hold for every order of the pools and every split of the layers. With b_gk the seconds of a layer of kind k
on pool g, n_k layers of it, k_g stages on the pool and W_g = sum_k n_k b_gk, no slowest stage is below

    sum_k n_k min_g (b_gk / W_g) / sum_g (k_g / W_g)                      weak duality: all work over the sum of the rates
    min {z : sum_g k_g floor(z / b_gk) >= n_k}   for each kind of block   blocks are not cut
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...schema.layout_table import MIXED
from ...schema.units import FloatArray, IntArray
from ..pipeline.lower_bounds import PipelineWork, lower_bound_s, min_in_flight, single_stages_s
from . import memory
from .contents import StageContents, StepShape, more_in_flight, step_shape, with_vocabulary
from .recompute import RecomputeCosts, lower_bound_slowest_s, lower_bound_step_s
from .table import CostTable, is_aligned, stages_of_pools


def quick_time_bounds(costs: CostTable) -> FloatArray:
    """Return a bound on the seconds of a step [N] from the work within layers and the pipeline's bubble alone."""
    transfer_s = np.zeros(len(costs.layouts))
    bound, aligned = lower_bound_s(pipeline_work(costs, slowest_stage_s(costs), transfer_s)), is_aligned(costs)
    if not aligned.any():
        return np.asarray(bound)
    return _replaced(bound, aligned, _pipeline_bound(costs.select(np.flatnonzero(aligned)), transfers=False))


def time_bounds(costs: CostTable) -> FloatArray:
    """Return a bound on the seconds of a step [N], of aligned layouts on their device pools."""
    bound, aligned = uniform_time_bounds(costs), is_aligned(costs)
    if not aligned.any():
        return bound
    subset = costs.select(np.flatnonzero(aligned))
    pools = subset.device_pools
    on_pools = (
        _pipeline_bound(subset, transfers=True)
        + fullest_stage_on_pools(subset, [pool.dp_exposed_by_kind for pool in pools])
        + np.max([pool.dp_edges_s for pool in pools], axis=0)
        + fullest_stage_on_pools(subset, [_updates(pool) for pool in pools])
    )
    return _replaced(bound, aligned, on_pools)


def uniform_time_bounds(costs: CostTable) -> FloatArray:
    """Return a bound on the seconds of a step [N] with all ranks as the weakest.

    Stages are taken as perfectly balanced in time and in memory at once. Both costs are convex in what a stage holds, so no
    real split does better. For pp = 1 it is exact.
    """
    mixed = costs.layouts.recompute == MIXED
    if mixed.any() and not mixed.all():
        bound = np.zeros(len(mixed))
        for rows in (np.flatnonzero(mixed), np.flatnonzero(~mixed)):
            bound[rows] = uniform_time_bounds(costs.select(rows))
        return bound
    always = costs.dp_edges_s + fullest_stage(costs, _updates(costs)) + _vocabulary_bound_s(costs)
    exposed = RecomputeCosts.from_table(costs).min_exposed_by_kind if mixed.any() else costs.dp_exposed_by_kind
    slowest = slowest_stage_s(costs)
    if mixed.any():
        slowest = lower_bound_slowest_s(costs, slowest)
    bound = lower_bound_s(pipeline_work(costs, slowest, 2 * costs.transfer_s)) + fullest_stage(costs, exposed) + always
    return np.asarray(np.maximum(bound, _with_recompute(costs) + always) if mixed.any() else bound)


def _updates(costs: CostTable) -> list[FloatArray]:
    """Return the seconds of the optimizer for a layer of each kind [K] of [N]."""
    rows = costs.case_idx
    return [costs.update_s(cost.num_trained[rows], cost.expert_params[rows]) for cost in costs.by_case]


def _with_recompute(costs: CostTable) -> FloatArray:
    """Return what the layers of mixed layouts and their transfers take at least once they fit [N]."""
    total, none = costs.total("busy_s"), np.zeros(len(costs.layouts))
    # With one stage a rank, balanced stages take as much longer as there is more work.
    per_second = lower_bound_s(pipeline_work(costs, total / costs.layouts.pp, none)) / total
    layers = lower_bound_step_s(RecomputeCosts.from_table(costs), per_second, _saved_by_all_stages(costs))
    return np.asarray(layers + per_second * 2 * costs.transfer_s * costs.layouts.pp)


def _vocabulary_bound_s(costs: CostTable) -> FloatArray:
    """Return what a split vocabulary adds to a step at least [N]: the same on every stage."""
    if costs.vocabulary is None:
        return np.zeros(len(costs.layouts))
    update = costs.update_s(costs.vocabulary.total("num_trained"), 0.0)
    return np.asarray(costs.vocabulary_s + costs.vocabulary_dp_s + update)


def pipeline_work(costs: CostTable, slowest_s: FloatArray, transfer_s: FloatArray) -> PipelineWork:
    """Return what the bounds of a pipeline look at, given what the slowest rank has at least and the transfers of each rank [N]."""
    b, rows = costs.layouts, costs.case_idx
    busy = [cost.busy_s for cost in costs.by_case]
    forward = [cost.forward_s + cost.comm_forward_s for cost in costs.by_case]
    weight = [cost.weight_s for cost in costs.by_case]
    blocks = [k for k, kind in enumerate(costs.kinds) if kind.is_block]
    not_embedding = [k for k, kind in enumerate(costs.kinds) if not kind.is_embedding]
    main = max(blocks, key=lambda k: costs.counts[k])
    cheapest = np.min([busy[k] for k in blocks], axis=0)
    cheapest_forward = np.min([forward[k] for k in blocks], axis=0)
    dearest = np.max([busy[k] for k in blocks], axis=0)

    def total(kinds: Sequence[int]) -> FloatArray:
        return np.asarray(sum(costs.counts[k] * busy[k] for k in kinds))[rows]

    def max_share(values: Sequence[FloatArray]) -> FloatArray:
        """Return the largest share of the work of a kind; a layer that costs nothing (a split head) does not count."""
        shares = [np.divide(values[k], busy[k], out=np.zeros_like(busy[k]), where=busy[k] > 0) for k in not_embedding]
        return np.asarray(np.max(shares, axis=0)[rows])

    return PipelineWork(
        schedule=b.schedule,
        pp=b.pp,
        num_model_chunks=b.num_model_chunks,
        num_microbatches=b.num_microbatches,
        total_s=total(range(len(busy))),
        blocks_s=total(blocks),
        deep_s=total(not_embedding),
        slowest_s=slowest_s,
        num_blocks=costs.model.num_blocks,
        block_s=cheapest[rows],
        block_forward_s=cheapest_forward[rows],
        transfer_s=transfer_s,
        total_forward_s=np.asarray(sum(n * s for n, s in zip(costs.counts, forward, strict=True)))[rows],
        main_s=busy[main][rows],
        num_other_blocks=costs.model.num_blocks - int(costs.counts[main]),
        main_forward_share=(forward[main] / busy[main])[rows],
        block_share=(cheapest / dearest)[rows],
        block_forward_share=(cheapest_forward / dearest)[rows],
        path_share=1 - max_share(weight),
        forward_share=max_share(forward),
        weight_share=max_share(weight),
    )


def fullest_stage(costs: CostTable, by_kind: Sequence[FloatArray]) -> FloatArray:
    """Return what the stage with the most of something has at least [N], given a layer of each kind [K] of [N].

    The mean of all stages, or the blocks of a kind: some stage holds ceil(n / pp) of n.
    """
    pp = costs.layouts.pp
    fullest = sum((n * values for n, values in zip(costs.counts, by_kind, strict=True)), start=np.zeros(len(pp))) / pp
    for n, kind, values in zip(costs.counts, costs.kinds, by_kind, strict=True):
        if kind.is_block:
            fullest = np.maximum(fullest, -(-n // pp) * values)
    return np.asarray(fullest)


def slowest_stage_s(costs: CostTable) -> FloatArray:
    """Return the seconds [N] of one micro-batch that the slowest stage takes at least, without transfers.

    Some stage has the mean, or ceil(n / pp) of n blocks of a kind; or the rank with the head has j blocks and another one
    ceil((n - j) / (pp - 1)), at the j where the larger of both is least.
    """
    b, rows = costs.layouts, costs.case_idx
    of_kinds = fullest_stage(costs, [cost.busy_s[rows] for cost in costs.by_case])
    last_block = int(np.flatnonzero(costs.is_block)[-1])
    behind = np.bincount(costs.kind_of_layer[last_block + 1 :], minlength=len(costs.kinds))
    head = np.asarray(sum(n * cost.busy_s for n, cost in zip(behind, costs.by_case, strict=True)))[rows]
    block, n = np.min(costs.of_blocks("busy_s"), axis=0)[rows], costs.model.num_blocks
    num_others, chunks = np.maximum(b.pp - 1, 1), b.num_model_chunks
    lowest = np.full(len(b), np.inf)
    for more in (0, 1):
        even = np.floor((n - num_others * head / block) / b.pp) + more
        with_head = np.clip(even, chunks, np.maximum(n - num_others * chunks, chunks))
        of_others = -(-(n - with_head) // num_others) * block
        lowest = np.minimum(lowest, np.maximum(with_head * block + head, of_others))
    return np.asarray(np.where(b.pp > 1, np.maximum(of_kinds, lowest), of_kinds))


def memory_bounds(costs: CostTable) -> FloatArray:
    """Return a bound on the bytes of the fullest device [N]."""
    terms = memory.stage_memory(_balanced_contents(costs), _shape_with_min_in_flight(costs), costs.scenario)
    return np.asarray(memory.total_bytes(terms))


def _saved_by_all_stages(costs: CostTable) -> FloatArray:
    """Return the activations of one micro-batch that all stages together may save at most [N], bytes."""
    cap_bytes = costs.cluster.memory_budget_bytes
    contents, shape = _balanced_contents(costs), _shape_with_min_in_flight(costs)
    headroom = memory.activation_headroom_bytes(contents, shape, costs.scenario, cap_bytes=cap_bytes)
    return np.asarray(headroom * costs.layouts.pp)


def _balanced_contents(costs: CostTable) -> StageContents:
    """Return the mean of all stages of every layout [N]."""
    pp = costs.layouts.pp
    contents = StageContents(
        params=costs.total("num_params") / pp,
        trained=costs.total("num_trained") / pp,
        expert_params=costs.total("expert_params") / pp,
        block_trained=costs.block_trained,
        frozen_bytes=costs.total("frozen_bytes") / pp,
        root_params=np.where(pp == 1, costs.root_params, 0.0),
        block_params=costs.block_params,
        activation_bytes=_min_activations(costs) / pp,
        working_bytes=costs.working_bytes,
        logits=np.where(pp == 1, costs.logits, 0.0),
        boundary_bytes=costs.boundary_bytes,
    )
    return with_vocabulary(costs, contents)


def _shape_with_min_in_flight(costs: CostTable) -> StepShape:
    """Return the shape of the stage with the fewest micro-batches in flight."""
    b = costs.layouts
    flight = min_in_flight(b.schedule, b.num_microbatches, b.pp, b.num_model_chunks)
    return step_shape(b, more_in_flight(costs, flight), num_neighbours=np.minimum(b.pp - 1, 1))


def _min_activations(costs: CostTable) -> FloatArray:
    """Return the bytes of one micro-batch in all layers [N]; with chunks those of as many of the smallest blocks.

    A rank holds more micro-batches of its first chunk than of its last, so what is saved in the last one weighs less.
    """
    all_layers = costs.total("activation_bytes")
    smallest = np.min(costs.of_blocks("activation_bytes"), axis=0)
    chunked = costs.model.num_blocks * smallest[costs.case_idx]
    return np.asarray(np.where(costs.layouts.num_model_chunks > 1, np.minimum(chunked, all_layers), all_layers))


# Device pools


def budget_bytes(costs: CostTable) -> FloatArray:
    """Return what `memory_bounds` must be within for a layout to fit [N]: of aligned layouts the mean of its stages.

    The bytes of a stage are convex in what it holds, so their mean over the stages is not below those of the mean stage.
    """
    budget, aligned = np.full(len(costs.layouts), float(costs.cluster.memory_budget_bytes)), is_aligned(costs)
    if not aligned.any():
        return budget
    of_pools = np.array([pool.cluster.memory_budget_bytes for pool in costs.device_pools], dtype=np.float64)
    return np.where(aligned, of_pools @ stages_of_pools(costs) / costs.layouts.pp, budget)


def _replaced(bound: FloatArray, aligned: NDArray[np.bool_], values: FloatArray) -> FloatArray:
    result = bound.copy()
    result[aligned] = values
    return result


def _pipeline_bound(costs: CostTable, *, transfers: bool) -> FloatArray:
    """Return the seconds of the pipeline alone that no order and no split is below [N]; all layouts are aligned."""
    b, pools = costs.layouts, costs.device_pools
    busy = [[cost.busy_s[pool.case_idx] for cost in pool.by_case] for pool in pools]
    transfer = np.min([2 * pool.transfer_s for pool in pools], axis=0) if transfers else np.zeros(len(b))
    slowest = fullest_stage_on_pools(costs, busy) + transfer
    total = sum(n * np.min(values, axis=0) for n, values in zip(costs.counts, zip(*busy, strict=True), strict=True))
    is_gpipe = b.schedule_fact("all_forward_first")
    return np.asarray(single_stages_s(b.num_microbatches, b.pp, is_gpipe, total + b.pp * transfer, slowest))


def fullest_stage_on_pools(costs: CostTable, by_pool: Sequence[Sequence[FloatArray]]) -> FloatArray:
    """Return what the stage with the most of something has at least [N], given a layer of each kind on each pool [G][K] of [N]."""
    stages = stages_of_pools(costs)
    work = np.array([sum(n * v for n, v in zip(costs.counts, values, strict=True)) for values in by_pool])
    has_work = np.all(work > 0, axis=0)
    weights = 1 / np.where(has_work, work, 1.0)
    shares = [
        n * np.min([weights[g] * values[k] for g, values in enumerate(by_pool)], axis=0)
        for k, n in enumerate(costs.counts)
    ]
    fullest = np.where(has_work, np.sum(shares, axis=0) / np.sum(stages * weights, axis=0), 0.0)
    for k, kind in enumerate(costs.kinds):
        if kind.is_block:
            seconds = np.array([values[k] for values in by_pool])
            fullest = np.maximum(fullest, _uncut_blocks_s(int(costs.counts[k]), seconds, stages))
    return np.asarray(fullest)


def _uncut_blocks_s(count: int, seconds: FloatArray, stages: IntArray) -> FloatArray:
    """Return the least z [N] in which stages, ``stages[g]`` of them at ``seconds[g]`` a block, hold ``count`` blocks."""
    has_cost = np.all(seconds > 0, axis=0)
    each = np.where(has_cost, seconds, 1.0)
    z = count / np.sum(stages / each, axis=0)
    for _ in range(len(seconds)):  # one more block on each stage is enough
        num_blocks = np.floor(z / each * (1 + 1e-12))
        short = np.sum(stages * num_blocks, axis=0) < count
        z = np.where(short, np.min((num_blocks + 1) * each, axis=0), z)
    return np.where(has_cost, z * (1 - 1e-12), 0.0)
