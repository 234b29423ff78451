"""Blocks that the ranks of a pipeline may hold at most: whether all ranks of a layout may hold all of them, many layouts at once.

The bound of memory in bounds.py is about the mean of all ranks. Where the first ranks hold more micro-batches than the last ones
that mean may fit, and no split of the blocks; what is excluded here need not be cut into stages one by one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...schema.layout_table import MIXED, distinct_rows
from ...schema.units import BoolArray, FloatArray, IntArray
from ..pipeline.in_flight import holdings, in_flight_of_stage, summed_in_flight
from .contents import fullest_terms, handed_on, outputs_retained, pipeline_shape, shape_of_ranks, step_shape
from .memory import required_by_terms, stage_memory
from .passing import StageContents
from .table import CostTable

ENOUGH = 3
"""Times its share of the blocks from which on a rank counts as able to hold all: no need to know how many more."""

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
    if not len(rows) or costs.device_pools or not costs.workload.has_backward:
        return may_fit
    # Only under split backward passes the moments depend on how many micro-batches there are.
    passes = np.where(b.schedule_fact("splits_backward")[rows], b.num_microbatches[rows], 0)
    first, group = distinct_rows([b.schedule[rows], b.pp[rows], b.num_model_chunks[rows], passes])
    for number in range(len(first)):
        of_group = rows[group == number]
        may_fit[of_group] = _max_blocks(costs, of_group).sum(axis=1) >= costs.model.num_blocks
    return may_fit


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
