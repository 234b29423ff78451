"""Which chunks of a rank have one block more than its others: cuts compared by their replay.

Sets, data: of split_bound.py, with V > 1 chunks a rank, N blocks and S stages
Variables
    n[s]         blocks of stage s; those of one rank differ by one at most
Objective
    (O) min T + sum_q max_r once[q,r]      T: the schedule replayed with the seconds of n
Constraints
    (C2) blocks: those of one rank differ by one at most
    (C3) memory: every stage fits, which a function of n says

The ends of the model have an embedding and a head, so that blocks fewer there save most; which chunks of the other ranks have one
more decides how long ranks wait for each other. Where N is close to a multiple of S, few placements remain in which no stage has
more than c = ceil(N / S) blocks, and all of them are replayed. Every other split has a rank with more than c V blocks, of which the
bound of split_bound.py holds:

    seconds >= min( min over all placements, min_r cost[r][before, y > c V] )

Else blocks move one at a time between a stage that has another number of blocks than most and any other stage, as long as that is
faster: a local optimum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ...cost_models.pipeline.replays import makespans_s, waves
from ...schema.units import BoolArray, FloatArray, IntArray
from .split_bound import SplitBoundInstance, min_beyond_s

MAX_PASSES, MAX_PLACEMENTS = 8_000_000, 1 << 13
"""Passes replayed for one comparison of cuts at most, some 40 ms, and placements."""

MAX_ROUNDS, MIN_GAIN = 12, 1e-4
"""Moves of a block at most, and what a move gains at least: the search looks no closer either."""

MAX_IMPROVED = 1.06
"""Times the seconds that matter up to which blocks are moved."""

BATCH_PASSES, MIN_BATCH, MAX_BATCH = 1 << 20, 32, 256
"""Passes, and cuts at least and at most, that are replayed at once: their arrays stay in a core's cache."""

CHECK_BATCH = 32
"""Cuts whose memory is looked at together, the fastest first."""


class ChunkCut(NamedTuple):
    """Blocks of each stage [S], (O), and what no cut is faster than; 0 where that is not known."""

    sizes: IntArray
    seconds: float
    bound_s: float


Fits = Callable[[IntArray], BoolArray]
"""Blocks of each stage [C, S] -> whether memory allows them [C]."""


def steps_s(instance: SplitBoundInstance, sizes: IntArray) -> FloatArray:
    """Return (O) of cuts [C], given the blocks of their stages [C, S]."""
    ends = np.cumsum(sizes, axis=1)
    begins = ends - sizes
    steps, batch = [], min(max(BATCH_PASSES // _passes(instance), MIN_BATCH), MAX_BATCH)
    for first in range(0, len(sizes), batch):
        begin, end = begins[first : first + batch].T, ends[first : first + batch].T  # [S, C]
        seconds = _sums(instance.seconds, begin, end) + instance.fixed_s[:, :, None]
        per_step_s = _sums(instance.once_s, begin, end) + instance.once_fixed_s[:, :, None]
        of_ranks = per_step_s[:, instance.stages_of_rank].sum(axis=2)  # [Q, R, C]
        steps.append(makespans_s(instance.shape, seconds) + of_ranks.max(axis=1).sum(axis=0))
    return np.concatenate(steps) if steps else np.zeros(0)


def _sums(values: FloatArray, begin: IntArray, end: IntArray) -> FloatArray:
    prefix = np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)
    return np.asarray(prefix[:, end] - prefix[:, begin])


def best_cut(
    instance: SplitBoundInstance, starts: Sequence[IntArray], fits: Fits, *, below_s: float
) -> ChunkCut | None:
    """Return the best cut found; None where none fits.

    Args:
        instance: of chunks, with a schedule that is defined for its numbers.
        starts: blocks of the stages [S] of cuts to begin with where not all are replayed.
        fits: what memory allows.
        below_s: seconds of a step that matter: what takes much longer is not improved.
    """
    placements, is_complete = _all_placements(instance)
    if not len(placements):
        return _local_optimum(instance, starts, fits, below_s=below_s)
    fastest = _fastest_that_fits(placements, steps_s(instance, placements), fits)
    if fastest is None or not is_complete:
        return fastest
    ceiling = instance.shape.num_model_chunks * int(placements.max())
    return fastest._replace(bound_s=min_beyond_s(instance, ceiling, below_s=fastest.seconds))


def _fastest_that_fits(sizes: IntArray, steps: FloatArray, fits: Fits) -> ChunkCut | None:
    """Return the fastest cut whose stages fit (C3)."""
    order = np.argsort(steps, kind="stable")
    for first in range(0, len(order), CHECK_BATCH):
        block = order[first : first + CHECK_BATCH]
        for row in block[fits(sizes[block])][:1]:
            return ChunkCut(sizes[row], float(steps[row]), 0.0)
    return None


def _passes(instance: SplitBoundInstance) -> int:
    shape = instance.shape
    return len(waves(shape.with_microbatches(shape.fewer_microbatches)).kinds)


def _all_placements(instance: SplitBoundInstance) -> tuple[IntArray, bool]:
    """Return the blocks of each stage [C, S] in which each has ceil(N / S) or one less, none of them if they are too many.

    Also whether there is no other split in which no rank has more than V ceil(N / S).
    """
    shape, n = instance.shape, instance.num_blocks
    ceiling = -(-n // shape.num_stages)
    fewer = ceiling * shape.num_stages - n
    count = math.comb(shape.num_stages, fewer)
    if ceiling == 1 or count > MAX_PLACEMENTS or count * _passes(instance) > MAX_PASSES:
        return np.zeros((0, shape.num_stages), dtype=np.int64), False
    chosen = np.array(list(itertools.combinations(range(shape.num_stages), fewer)), dtype=np.int64)
    sizes = np.full((len(chosen), shape.num_stages), ceiling)
    sizes[np.arange(len(chosen))[:, None], chosen] -= 1
    return sizes, fewer <= shape.num_model_chunks


def _local_optimum(
    instance: SplitBoundInstance, starts: Sequence[IntArray], fits: Fits, *, below_s: float
) -> ChunkCut | None:
    sizes = np.unique([_placed(instance, start, last=last) for start in starts for last in (False, True)], axis=0)
    best = _fastest_that_fits(sizes, steps_s(instance, sizes), fits)
    for _ in range(MAX_ROUNDS):
        if best is None or best.seconds > MAX_IMPROVED * below_s:
            break
        moved = _moves(instance, best.sizes)[: MAX_PASSES // _passes(instance)]
        faster = _fastest_that_fits(moved, steps_s(instance, moved), fits)
        if faster is None or faster.seconds > best.seconds * (1 - MIN_GAIN):
            break
        best = faster
    return best


def _placed(instance: SplitBoundInstance, sizes: IntArray, *, last: bool) -> IntArray:
    """Return the same blocks of each rank (C2) with its odd ones in its first chunks, or its last ones."""
    placed, of_rank = sizes.copy(), np.sort(sizes[instance.stages_of_rank], axis=1)  # [R, V]
    placed[instance.stages_of_rank] = of_rank if last else of_rank[:, ::-1]
    return placed


def _moves(instance: SplitBoundInstance, sizes: IntArray) -> IntArray:
    """Return the cuts [C, S] after one block goes to or from a stage that has another number of blocks than most."""
    usual = int(np.argmax(np.bincount(sizes)))
    other = np.flatnonzero(sizes != usual)
    one, all_stages = np.eye(len(sizes), dtype=np.int64), np.arange(len(sizes))
    moves = [sizes + int(np.sign(usual - sizes[s])) * (one[s] - one[np.delete(all_stages, s)]) for s in other]
    moved = np.concatenate([np.zeros((0, len(sizes)), dtype=np.int64), *moves])
    of_rank = moved[:, instance.stages_of_rank]
    return moved[(moved.min(axis=1) >= 1) & (np.ptp(of_rank, axis=2).max(axis=1) <= 1)]
