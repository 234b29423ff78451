"""Blocks that the ranks of a pipeline may hold at most: whether all ranks of a layout may hold all of them, many layouts at once.

The bound of memory in bounds.py is about the mean of all ranks. Where the first ranks hold more micro-batches than the last ones
that mean may fit, and no split of the blocks; what is excluded here need not be cut into stages one by one.

On device pools the same says how fast a step can be: in an order of the pools stage s may hold CAP[s] blocks of BLOCK[s] seconds
next to FIXED[s], the layers before the first block and behind the last one, and all n blocks are held only if

    (C2) memory:  sum_s min(CAP[s], floor((z - FIXED[s]) / BLOCK[s])) >= n           z being the slowest stage
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...schema.layout_table import MIXED, distinct_rows
from ...schema.units import BoolArray, FloatArray, IntArray
from ..pipeline.in_flight import holdings, in_flight_of_stage, summed_in_flight
from ..pipeline.replay import single_stages_s
from .bounds import time_bounds
from .contents import fullest_terms, handed_on, outputs_retained, pipeline_shape, shape_of_ranks, step_shape
from .memory import required_by_terms, stage_memory
from .passing import StageContents
from .pool_bounds import fullest_stage_on_pools, pipeline_bound
from .table import CostTable, is_aligned, stages_of_pools

ENOUGH = 3
"""Times its share of the blocks from which on a rank counts as able to hold all: no need to know how many more."""

MAX_POOLS, NUM_HALVINGS = 4, 20
"""Device pools whose orders are all looked at; halvings of the range of the slowest stage."""

SHORTEST_S = 1e-12
"""Of a stage, so that infinitely many times as long is infinite."""

SLOWER = (1.0, 1.03, 1.07, 1.15, 1.3, 1.6, np.inf)
"""Times the least that the slowest stage takes: ranges that are bounded apart."""

_OF_ONE_BLOCK = (
    "num_params", "num_trained", "expert_params", "frozen_bytes", "activation_bytes", "pending_bytes",
    "last_pending_bytes", "working_bytes", "split_working_bytes",
)  # fmt: skip
"""Fields of LayerCost that say what a block holds."""


def stages_may_fit(costs: CostTable) -> BoolArray:
    """Return where the ranks of a pipeline may hold all blocks within their memory [N]; True where this is not looked at.

    With n blocks a rank has floor(n / v) at least in each of its v chunks. So a rank holds at most n_r blocks, and all ranks no
    more than the sum of these. A block counts as the smallest of all kinds in everything, embedding and head as nothing.
    """
    b, may_fit = costs.layouts, np.ones(len(costs.layouts), dtype=bool)
    is_judged = (b.pp > 1) & (b.recompute < MIXED) & (b.vocabulary == 0) & ~b.schedule_fact("is_given")
    rows = np.flatnonzero(is_judged)
    if costs.device_pools:
        return np.isfinite(time_bounds_of_pools(costs))
    if not len(rows) or not costs.workload.has_backward:
        return may_fit
    # Only under split backward passes the moments depend on how many micro-batches there are.
    passes = np.where(b.schedule_fact("splits_backward")[rows], b.num_microbatches[rows], 0)
    first, group = distinct_rows([b.schedule[rows], b.pp[rows], b.num_model_chunks[rows], passes])
    for number in range(len(first)):
        of_group = rows[group == number]
        may_fit[of_group] = _max_blocks(costs, of_group).sum(axis=1) >= costs.model.num_blocks
    return may_fit


def time_bounds_of_pools(costs: CostTable) -> FloatArray:
    """Return seconds that no split of aligned layouts that is within the memory of its stages is below [N]; infinite without any.

    Zero where this is not looked at.
    """
    bound_s, rows = np.zeros(len(costs.layouts)), np.flatnonzero(is_aligned(costs))
    is_judged = len(costs.device_pools) <= MAX_POOLS and costs.cluster.bandwidth_matrix is None
    if not len(rows) or not is_judged or not costs.workload.has_backward:
        return bound_s
    aligned = costs.select(rows)
    exposed = fullest_stage_on_pools(aligned, [pool.per_step.dp_exposed_by_kind for pool in aligned.device_pools])
    rest_s = time_bounds(aligned) - pipeline_bound(aligned, transfers=True) - exposed
    for pp in np.unique(aligned.layouts.pp):
        of_group = np.flatnonzero(aligned.layouts.pp == pp)
        bound_s[rows[of_group]] = _within_memory_s(aligned.select(of_group)) + rest_s[of_group]
    return bound_s


def _within_memory_s(costs: CostTable) -> FloatArray:
    """Return the seconds of pipeline and exposed communication [N] of aligned layouts with as many stages, in no order less."""
    pools, num_stages = costs.device_pools, stages_of_pools(costs)[:, 0]
    caps = [np.maximum(_max_blocks(pool, np.arange(len(costs.layouts))), 0) for pool in pools]
    busy = [_of_stage(pool, [cost.busy_s[pool.case_idx] for cost in pool.by_case]) for pool in pools]
    exposed = [_of_stage(pool, pool.per_step.dp_exposed_by_kind) for pool in pools]
    best = np.full(len(costs.layouts), np.inf)
    for order in itertools.permutations(range(len(pools))):
        pool_of_stage = np.repeat(order, num_stages[list(order)])
        cap = np.stack([caps[g][:, s] for s, g in enumerate(pool_of_stage)], axis=1)
        best = np.minimum(best, _in_order_s(costs, cap, *(_on_pools(of, pool_of_stage) for of in (busy, exposed))))
    return best


class _Stages(NamedTuple):
    """What a block adds to each stage, and what the stage has anyway [N, S]; of one pool [N]: embedding and head apart."""

    block: FloatArray
    fixed: FloatArray


def _of_stage(costs: CostTable, by_kind: Sequence[FloatArray]) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return what the cheapest block has of something [N], the layers before the first block, and those behind the last one."""
    kinds, blocks = costs.kind_of_layer, np.flatnonzero(costs.is_block)
    none = np.zeros(len(costs.layouts))
    ends = (sum((by_kind[k] for k in of_end), none) for of_end in (kinds[: blocks[0]], kinds[blocks[-1] + 1 :]))
    before, behind = ends
    return np.min([by_kind[k] for k in set(kinds[blocks].tolist())], axis=0), before, behind


def _on_pools(of_pools: Sequence[tuple[FloatArray, FloatArray, FloatArray]], pool_of_stage: IntArray) -> _Stages:
    block = np.stack([of_pools[g][0] for g in pool_of_stage], axis=1)
    fixed = np.zeros(block.shape)
    fixed[:, 0] += of_pools[pool_of_stage[0]][1]
    fixed[:, -1] += of_pools[pool_of_stage[-1]][2]
    return _Stages(block, fixed)


def _in_order_s(costs: CostTable, cap: IntArray, busy: _Stages, exposed: _Stages) -> FloatArray:
    """Return the bound in one order: the least over ranges of the slowest stage, which what it may hold in each of them limits."""
    b, n, is_gpipe = costs.layouts, costs.model.num_blocks, costs.layouts.schedule_fact("all_forward_first")
    transfer = np.min([2 * pool.transfer_s for pool in costs.device_pools], axis=0)
    slowest, best = _fullest_stage(cap, busy, n), np.full(len(b), np.inf)
    shortest = np.where(np.isfinite(slowest), slowest, 0.0)
    for ratio, next_ratio in pairwise(SLOWER):
        within = np.minimum(cap, _blocks_within(np.maximum(shortest, SHORTEST_S) * next_ratio, busy))
        total = _min_total(within, busy.block, n) + busy.fixed.sum(axis=1)
        pipeline_s = single_stages_s(
            b.num_microbatches, b.pp, is_gpipe, total + b.pp * transfer, shortest * ratio + transfer
        )
        best = np.minimum(best, pipeline_s + _fullest_stage(within, exposed, n))
    return np.where(np.isfinite(slowest), best, np.inf)


def _blocks_within(limit: FloatArray, stages: _Stages) -> FloatArray:
    """Return the blocks that each stage may hold at most within a limit [N]."""
    room = limit[:, None] * (1 + 1e-9) - stages.fixed
    return np.floor(np.divide(room, stages.block, out=np.full(room.shape, np.inf), where=stages.block > 0)).clip(min=0)


def _fullest_stage(cap: FloatArray | IntArray, stages: _Stages, n: int) -> FloatArray:
    """Return what the stage with the most has at least [N]; infinite where they cannot hold n blocks (C2)."""
    low, high = stages.fixed.max(axis=1), (stages.fixed + cap * stages.block).max(axis=1)
    low = np.minimum(low, high)
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        is_enough = np.minimum(cap, _blocks_within(middle, stages)).sum(axis=1) >= n
        low, high = np.where(is_enough, low, middle), np.where(is_enough, middle, high)
    return np.where(cap.sum(axis=1) >= n, low, np.inf)


def _min_total(cap: FloatArray, block: FloatArray, n: int) -> FloatArray:
    """Return the least seconds of n blocks on stages [N, S]: as many as they can hold on the fastest ones."""
    order = np.argsort(block, axis=1, kind="stable")
    sorted_cap = np.take_along_axis(cap, order, axis=1)
    before = np.cumsum(sorted_cap, axis=1) - sorted_cap
    blocks = np.clip(n - before, 0, sorted_cap)
    return np.asarray((blocks * np.take_along_axis(block, order, axis=1)).sum(axis=1))


def _max_blocks(costs: CostTable, rows: IntArray) -> IntArray:
    """Return the blocks that each rank may hold at most [N, R], no chunk being empty, of layouts with the same moments."""
    cap, required = costs.cluster.memory_budget_bytes, _required_by_blocks(costs, rows)
    pp, chunks = int(costs.layouts.pp[rows[0]]), int(costs.layouts.num_model_chunks[rows[0]])
    enough = min(ENOUGH * -(-costs.model.num_blocks // (pp * chunks)) * chunks, costs.model.num_blocks)
    low = np.zeros((len(rows), pp), dtype=np.int64)
    high = np.full_like(low, enough)
    while np.any(low < high):
        middle = (low + high + 1) // 2
        holds = required(middle) <= cap
        low, high = np.where(holds, middle, low), np.where(holds, high, middle - 1)
    max_blocks = np.where(low == enough, costs.model.num_blocks, low)
    return np.where(low >= chunks, max_blocks, -costs.model.num_blocks * pp)


def _required_by_blocks(costs: CostTable, rows: IntArray) -> Callable[[IntArray], FloatArray]:
    """Return the function that says what the ranks of layouts with the same moments require at least, given their blocks [N, R]."""
    b, shape, idx = costs.layouts, pipeline_shape(costs, int(rows[0])), rows[:, None, None]
    of_rank, chunks = shape_of_ranks(costs, int(rows[0]), np.ones(shape.pp)), shape.num_model_chunks
    by_moments = shape.record.splits_backward
    holding = holdings(shape) if by_moments else None
    flight = in_flight_of_stage(
        b.schedule[idx], b.num_microbatches[idx], shape.pp, np.arange(shape.pp)[:, None], chunks
    )
    step = step_shape(
        b, flight,
        num_neighbours=np.asarray(of_rank.num_neighbours)[:, None],
        input_gradients=np.asarray(of_rank.input_gradients)[:, None],
        summed_in_flight=np.where(b.num_microbatches[idx] > shape.pp, summed_in_flight(b.num_microbatches[idx], flight), -1),
        idx=idx,
    )  # fmt: skip
    smallest = {name: costs.of_blocks(name).min(axis=0)[costs.case_idx[rows]][:, None, None] for name in _OF_ONE_BLOCK}
    read = costs.of_blocks("read_bytes").max(axis=0)[costs.case_idx[rows]][:, None, None]
    boundary = costs.boundary_bytes[idx]
    stages = np.argsort(np.array(shape.rank_of_stage), kind="stable").reshape(shape.pp, -1)
    retained = outputs_retained(costs.workload, stages > 0, stages < shape.num_stages - 1)
    retained = retained - handed_on(costs, shape)[stages]

    def contents(blocks: IntArray, in_each: IntArray, outputs: IntArray) -> StageContents:
        """Return what [N, R, C] blocks hold, of which so many are certain to be in each chunk, and the outputs that they keep."""
        none = np.zeros(blocks.shape)
        pending = (in_each - 1) * smallest["pending_bytes"] + smallest["last_pending_bytes"]
        return StageContents(
            params=blocks * smallest["num_params"],
            trained=blocks * smallest["num_trained"],
            expert_params=blocks * smallest["expert_params"],
            frozen_bytes=blocks * smallest["frozen_bytes"],
            block_trained=smallest["num_trained"],
            block_params=smallest["num_params"],
            activation_bytes=in_each * smallest["activation_bytes"],
            pending_bytes=np.where(in_each > 0, pending, 0.0) * by_moments,
            working_bytes=smallest["working_bytes"],
            split_working_bytes=smallest["split_working_bytes"] * by_moments,
            block_activation_bytes=none,
            root_params=none,
            logits=none,
            boundary_bytes=boundary,
            read_bytes=in_each * read,
            output_bytes=outputs * boundary,
        )

    def required(blocks: IntArray) -> FloatArray:
        in_each = (blocks // chunks)[..., None]
        ranks = contents(blocks[..., None], in_each * chunks, retained.sum(axis=1, keepdims=True))
        if holding is None:
            terms = stage_memory(ranks, step, costs.scenario)
        else:
            of_chunks = np.broadcast_to(in_each, (*blocks.shape, chunks))
            terms = fullest_terms(costs, idx, ranks, contents(of_chunks, of_chunks, retained), step, holding)
        return np.asarray(required_by_terms(terms, costs.scenario)[..., 0])

    return required
