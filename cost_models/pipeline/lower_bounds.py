"""Seconds of a pipelined step in closed form, and what no split of the work into stages can beat.

    T = m * max_s t_s + (sum_s t_s - max_s t_s) / v

with t_s the seconds stage s needs for one micro-batch, forward and backward, and v model chunks per stage (1: not interleaved).
Exact for 1f1b and gpipe with equal stages, where it is (m + pp - 1) * t, and for interleaved 1f1b, whose bubble is a v-th of that
(Narayanan et al., arXiv:2104.04473 section 2.2). With real stages a step is replayed (replay.py).

Bounds, for W seconds of work a micro-batch, of which a rank has M or more, over pp ranks, against the replay of any split:

    any order     m M
    gpipe         W + (m - 1) M
    1f1b          2 W + (m - pp - 1) M for m > pp. Rank s: the work before it, its m micro-batches, and on both sides of them the
                  way down from it and back less the pp - s passes that fill it, sum_{<s} t + 2 sum_{>s} t + (m - pp + s + 1) t_s.
                  For m <= pp: W + (m - 1) M / 2, and for m = pp the mean of two such paths, 2 pp W / (pp + 1)
    zb-h1         the same with what the drain defers: (a + (m - a - w - (pp - 1) max(f, w)) / pp) W, a the smallest share of
                  forward and input gradients in the work of a layer, f and w the largest of forward and of weight gradients
    in chunks     one of the ranks with c >= ceil(n / pp) of n blocks stands behind (pp - 1 - pp c + n) others, which make it wait
    others        m t_r and what rank r waits for first: the forward passes of the ranks before it, and behind its last pass their
                  backward ones where backward is not split. The ranks' bounds, weighted so that every block counts alike

Ways through a pipeline's order that lead past one rank: what no split of the layers makes shorter, as counts.

Every pass waits for the one before it on its rank and for its input, so a step takes as long as its longest chain of passes, and
any chain is a lower bound. Those here enter the row of rank r with the first micro-batch, at its forward or its backward pass
through one of the rank's stages s, follow the row, and leave it with the last micro-batch:

    before   F(0) .. F(s-1)                      to its forward pass
             F(0) .. F(S-1), B(S-1) .. B(s+1)    to its backward pass
    row      the passes of the rank from the one to the other, both included
    behind   B(s-1) .. B(0)                      from its backward pass
             F(s+1) .. F(S-1), B(S-1) .. B(0)    from its forward pass
             F(s+1) .. F(S-1), B(S-1) .. B(s'+1) and the row from B(s') on, back on the same rank
             nothing                             from the last pass of the row

With equal stages some of these chains is the longest of all under 1f1b in any number of chunks. Of many chunks only those are
looked at where the long chains are: they enter at a forward pass of the first ones or a backward pass of the last ones, leave at a
forward pass of the last ones or a backward pass of the first ones, and return to one of the last.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...schema.schedules import SCHEDULES, by_schedule
from .replay import PipelineShape, Row, rows_of

Array = Any


def pipelined_s(stage_s: Array, num_microbatches: Array, num_model_chunks: Array) -> Array:
    """Return the seconds of one step; ``stage_s`` has the stages on its last axis [..., pp]."""
    slowest = np.max(stage_s, axis=-1)
    return num_microbatches * slowest + (np.sum(stage_s, axis=-1) - slowest) / num_model_chunks


@dataclass(frozen=True, kw_only=True)
class PipelineWork:
    """One micro-batch's work under each layout, arrays [N]; shares are between 0 and 1.

    Attributes:
        total_s: all layers; ``blocks_s`` and ``deep_s`` those of the blocks and of all but the embedding.
        slowest_s: of the rank with the most work at least.
        num_blocks: of the model; ``block_s`` and ``block_forward_s`` the minimum work and forward pass of one.
        transfer_s: of a rank both ways, over all its chunks.
        total_forward_s: of all layers.
        num_other_blocks: that are not of the most frequent kind; ``main_s`` and ``main_forward_share`` of a block of that kind.
        block_share: cheapest over dearest block; ``block_forward_share`` cheapest forward pass over dearest block.
        path_share: forward and input gradients, the minimum of any layer in ``deep_s``.
        forward_share, weight_share: the largest of any layer in ``deep_s``.
    """

    schedule: Array
    pp: Array
    num_model_chunks: Array
    num_microbatches: Array
    total_s: Array
    blocks_s: Array
    deep_s: Array
    slowest_s: Array
    num_blocks: Array
    block_s: Array
    block_forward_s: Array
    transfer_s: Array
    total_forward_s: Array
    num_other_blocks: Array
    main_s: Array
    main_forward_share: Array
    block_share: Array
    block_forward_share: Array
    path_share: Array
    forward_share: Array
    weight_share: Array

    def has_bound(self, *bounds: str) -> Array:
        """Return where one of these bounds holds for the schedule (`Schedule.bound`)."""
        return np.isin(by_schedule("bound")[self.schedule], bounds)

    @property
    def runs_uncut(self) -> Array:
        """Backward passes are one with the gradients of weights."""
        return ~by_schedule("splits_backward")[self.schedule]


def lower_bound_s(work: PipelineWork) -> Array:
    """Return the seconds no split of the work can beat [N]; chunks of a rank have as many blocks as each other, or one more."""
    m, pp, v = work.num_microbatches, work.pp, work.num_model_chunks
    total = work.total_s + pp * work.transfer_s
    slowest = np.maximum(work.slowest_s, work.total_s / pp) + work.transfer_s
    single = v == 1
    bound = np.where(work.has_bound("any_order"), 0.0, np.maximum(_in_turn(work), _behind_others(work)))
    bound = np.where((v > 1) & work.has_bound("whole_backward"), np.maximum(bound, _both_ways(work)), bound)
    bound = np.maximum(m * slowest, bound)
    plain = single_stages_s(m, pp, by_schedule("all_forward_first")[work.schedule], total, slowest)
    bound = np.where(single & work.has_bound("whole_backward"), plain, bound)
    return np.where(single & work.has_bound("deferred_weights"), np.maximum(bound, _deferred(work)), bound)


def single_stages_s(num_microbatches: Array, pp: Array, is_gpipe: Array, total_s: Array, slowest_s: Array) -> Array:
    """Return the seconds that no split into one stage a rank is below, under gpipe or 1f1b [N], whatever the devices.

    Args:
        num_microbatches, pp: m and the number of stages.
        is_gpipe: where not, it is 1f1b.
        total_s: of one micro-batch in all stages at least, transfers included.
        slowest_s: of one micro-batch in the slowest stage at least.
    """
    m = num_microbatches
    few = np.maximum(total_s + (m - 1) / 2 * slowest_s, np.where(m == pp, 2 * pp / (pp + 1) * total_s, 0.0))
    one_f_one_b = np.maximum(np.where(m > pp, 2 * total_s + (m - pp - 1) * slowest_s, few), m * slowest_s)
    return np.where(is_gpipe, total_s + (m - 1) * slowest_s, one_f_one_b)


def _in_turn(work: PipelineWork) -> Array:
    """Return the bound by which rank r starts after the forward passes before it: T >= m t_r + (share / v) sum_{<r} blocks.

    With weights w_r in the ratio q = m / (m - share / v) from one rank to the next all blocks count alike. The share is that of the
    cheapest block, or that of the most frequent kind without the ranks that hold another one, which are no longer than T / m.
    """
    of_any = np.where(work.runs_uncut, work.block_share, work.block_forward_share) / work.num_model_chunks
    of_main = np.where(work.runs_uncut, 1.0, work.main_forward_share) / work.num_model_chunks
    without = np.minimum(work.num_other_blocks, work.pp) * of_main / work.num_microbatches
    return np.maximum(_weighted(work, of_any), _weighted(work, of_main) / (1 + without))


def _weighted(work: PipelineWork, share: Array) -> Array:
    m, pp = work.num_microbatches, work.pp
    share = np.minimum(share, m / 2)
    growth = share / (m - share)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        first = np.where(growth > 0, growth / np.expm1(pp * np.log1p(growth)), 1 / pp)
    others = work.total_s - work.blocks_s
    return (m * first + share * (1 - first)) * work.blocks_s + m * (first * others + work.transfer_s)


def _behind_others(work: PipelineWork) -> Array:
    """Return the bound of uncut blocks: T >= m c t and the wait of a rank with the most of them, c.

    If c is the most blocks of a rank, all ranks together have pp c - n fewer than that, so that of the ranks with c one has at
    least pp - 1 - (pp c - n) before it, whose first chunks have ((that number) c - (pp c - n)) / v blocks or more.
    """
    m, pp = work.num_microbatches, work.pp
    max_blocks = -(-work.num_blocks // pp)
    lacking = pp * max_blocks - work.num_blocks
    pass_s = np.where(work.runs_uncut, work.block_s, work.block_forward_s)
    waits_s = np.maximum((pp - 1 - lacking) * max_blocks - lacking, 0) / work.num_model_chunks * pass_s
    return m * (max_blocks * work.block_s + work.transfer_s) + np.minimum(waits_s, m * work.block_s)


def _both_ways(work: PipelineWork) -> Array:
    """Return the bound of chunks and few micro-batches: the way of one through all layers and back, and the work of a rank.

    On every rank the first backward pass waits for one micro-batch's way through all layers and back to its last chunk; all its
    backward passes follow, and the way back from its first chunk. The mean over the ranks:

        T >= F + m B / pp + b (n (pp - 1) / pp - (v - 1)(pp - 1) / 2) / v

    with F and B the forward and backward work of all layers and b that of a block: the last chunk of a rank has floor(n_r / v)
    blocks, of which all others than the most frequent kind are taken off. The same holds in reverse, with F for B.
    """
    m, pp, v = work.num_microbatches, work.pp, work.num_model_chunks
    blocks = work.num_blocks * (pp - 1) / pp - (v - 1) * (pp - 1) / 2
    of_main = np.maximum(blocks / v - work.num_other_blocks, 0.0)
    ways = [
        first + m * rest / pp + of_main * block_s
        for first, rest, block_s in (
            (work.total_forward_s, work.total_s - work.total_forward_s, work.main_s * (1 - work.main_forward_share)),
            (work.total_s - work.total_forward_s, work.total_forward_s, work.main_s * work.main_forward_share),
        )
    ]
    return np.maximum(*ways)


def _deferred(work: PipelineWork) -> Array:
    """Return the bound of deferred weights, weighted so that every layer counts alike; 0 where some weight would be negative."""
    m, pp = work.num_microbatches, work.pp
    remaining = m - work.path_share - work.weight_share
    remaining = remaining - (pp - 1) * np.maximum(work.forward_share, work.weight_share)
    return np.where(remaining > 0, (work.path_share + remaining / pp) * work.deep_s + m * work.transfer_s, 0.0)


def min_in_flight(schedule: Array, num_microbatches: Array, pp: Array, num_model_chunks: Array) -> Array:
    """Return the micro-batches that every rank holds at least when it holds most [N]; below `replay.in_flight`."""
    count = np.ones_like(np.asarray(pp, dtype=np.float64))
    for idx, record in enumerate(SCHEDULES.values()):
        at_least = record.min_in_flight(num_microbatches, pp, num_model_chunks)
        count = np.where(np.asarray(schedule) == idx, at_least, count)
    return np.minimum(num_microbatches, count)


IntArray = NDArray[np.int64]

MAX_CHUNKS = 8
"""Chunks at which chains enter, leave and return."""


@dataclass(frozen=True)
class Paths:
    """Chains past one rank [P].

    Attributes:
        forward_to: F of all stages before this one; ``backward_to`` the same for B (0: none).
        backward_from: B of this stage and all behind it before the row; ``forward_from`` and ``backward_again_from`` behind the
            row (S: none).
        row: forward, input and weight passes of each chunk in the row [P, 3, v].
    """

    forward_to: IntArray
    backward_from: IntArray
    row: IntArray
    forward_from: IntArray
    backward_to: IntArray
    backward_again_from: IntArray

    def select(self, rows: IntArray) -> Paths:
        """Return a subset of the chains."""
        return Paths(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


@lru_cache(maxsize=256)
def paths_past(shape: PipelineShape) -> tuple[Paths, ...]:
    """Return the chains past each rank.

    Of many micro-batches those in the middle add entire rounds to the row: the order repeats there.

    Raises:
        ConfigError: the schedule is not defined for these numbers.
    """
    few = shape.fewer_microbatches
    rows = rows_of(shape.with_microbatches(few))
    return tuple(_past(shape, rank, row, few) for rank, row in enumerate(rows))


def _past(shape: PipelineShape, rank: int, row: Row, few: int) -> Paths:
    last = shape.num_stages
    stages = [s for s, holder in enumerate(shape.rank_of_stage) if holder == rank]
    counts = _counted(row, stages)
    more = shape.num_microbatches - few
    ends = np.flatnonzero((row[0] != 2) & ((row[2] == 0) | (row[2] == few - 1)))
    position = {(min(kind, 1), s, i): n for n, (kind, s, i) in zip(ends.tolist(), row[:, ends].T.tolist(), strict=True)}
    low, high = stages[:MAX_CHUNKS], stages[-MAX_CHUNKS:]
    entries = [(s, last, position[0, s, 0]) for s in low] + [(last, s + 1, position[1, s, 0]) for s in high]
    ways_out: list[tuple[int, int, int, int, int | None]] = [
        (position[1, s, few - 1], last, s, last, None) for s in low
    ]
    ways_out += [(position[0, s, few - 1], s + 1, last, last, None) for s in high]
    ways_out.append((row.shape[1] - 1, last, 0, last, None))
    ways_out += [
        (position[0, s, few - 1], s + 1, 0, t + 1, position[1, t, few - 1])
        for s, t in itertools.product(high, high)
        if position[1, t, few - 1] > position[0, s, few - 1]
    ]
    chains = []
    for (forward_to, backward_from, enters), way in itertools.product(entries, ways_out):
        leaves, forward_from, backward_to, again_from, returns = way
        if enters > leaves:
            continue
        passes = counts[leaves + 1] - counts[enters] + more
        if returns is not None:
            passes = passes + counts[-1] - counts[returns]
        chains.append((forward_to, backward_from, passes, forward_from, backward_to, again_from))
    columns = list(zip(*chains, strict=True))
    return Paths(*(np.array(column, dtype=np.int64) for column in columns))


def _counted(row: Row, stages: list[int]) -> IntArray:
    """Return the passes before each position of a row [n + 1, 3, v]: forward, input and weight passes of the rank's stages."""
    kind, stage = row[0], row[1]
    chunk = np.searchsorted(np.array(stages), stage)
    each = np.zeros((len(kind) + 1, 3, len(stages)), dtype=np.int64)
    n = np.arange(1, len(kind) + 1)
    each[n, np.minimum(kind, 2) * (kind < 3) + (kind == 3), chunk] = 1
    both = np.flatnonzero(kind == 3)
    each[both + 1, 2, chunk[both]] = 1
    return np.asarray(np.cumsum(each, axis=0))
