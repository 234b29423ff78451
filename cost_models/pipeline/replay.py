"""Seconds of a pipelined step: a named schedule replayed fast, its closed form, and what no split of the layers can beat.

A replay solves the recurrences of simulation.py as a list of sums and maxima. The order is worked out once for its numbers
(`program`), as the two passes that each pass waits for; a replay is then one loop over them. Transfers are part of the passes here:
a rank sends or receives nothing while it computes.

With many micro-batches the middle repeats. If the passes of every stage end `d` seconds after those q micro-batches before, over a
window longer than any pass looks back, then by induction all later ones do, and the step with n q more micro-batches takes n d
longer, exactly. Where the window is not yet periodic a longer one is tried, up to the entire step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from ...schema.errors import ConfigError
from ...schema.schedules import SCHEDULES, Schedule, ScheduleName, by_schedule, placement
from ...schema.units import Array, FloatArray, IntArray
from .orders import F, Order, Row, W, as_rows, order_of_schedule, rows_in_rounds

SAME = 1e-11
"""Differences within this of the step are equal: they are sums of the same numbers in different order."""


@dataclass(frozen=True, kw_only=True)
class PipelineShape:
    """A schedule and its numbers: ranks, model chunks on each, micro-batches; the synthesised one brings an ``order``."""

    schedule: ScheduleName
    pp: int
    num_model_chunks: int
    num_microbatches: int
    order: Order | None = None

    @property
    def record(self) -> Schedule:
        """The facts of the schedule."""
        return SCHEDULES[self.schedule]

    @property
    def num_stages(self) -> int:
        """S."""
        return self.pp * self.num_model_chunks

    @cached_property
    def rank_of_stage(self) -> tuple[int, ...]:
        """Rank of each stage [S]."""
        if self.order is None:
            return placement(self.pp, self.num_model_chunks, self.record.placement_of(self.num_model_chunks))
        holders = {action.stage: rank for rank, row in enumerate(self.order) for action in row}
        return tuple(holders[stage] for stage in range(self.num_stages))

    @property
    def period(self) -> int:
        """Micro-batches after which the middle of the order repeats."""
        return self.pp if self.num_model_chunks > 1 and self.record.chunks != "two" else 1

    @property
    def reach(self) -> int:
        """A pass waits for none that is this many micro-batches away, or more."""
        return (self.record.lookahead if self.num_model_chunks == 1 else 2) * self.pp + 1

    @property
    def fewer_microbatches(self) -> int:
        """So few that one window of the middle is in the order, and as many as here but for whole periods; or all of them."""
        few = 3 * self.reach + self.period
        few += (self.num_microbatches - few) % self.period
        return min(few, self.num_microbatches)

    def with_microbatches(self, num_microbatches: int) -> PipelineShape:
        """Return the shape for another number of micro-batches."""
        return replace(self, num_microbatches=num_microbatches, order=None)


def order_of(shape: PipelineShape) -> Order:
    """Return the passes of each rank: those of its own order, or under the named schedule.

    Raises:
        ConfigError: the schedule is not defined for these numbers.
    """
    if shape.order is not None:
        return shape.order
    return order_of_schedule(shape.schedule, shape.pp, shape.num_microbatches, shape.num_model_chunks)


@lru_cache(maxsize=64)
def rows_of(shape: PipelineShape) -> list[Row]:
    """Return `order_of` as arrays.

    Raises:
        ConfigError: the schedule is not defined for these numbers.
    """
    if shape.record.runs_in_rounds:
        splits_backward = shape.record.splits_backward
        return rows_in_rounds(shape.pp, shape.num_microbatches, shape.num_model_chunks, splits_backward=splits_backward)
    return as_rows(order_of(shape))


@dataclass(frozen=True)
class Program:
    """Passes in an order in which each comes after those it waits for.

    Attributes:
        before, needs: for each pass the positions, counted from one, of the two it waits for (0: for nothing).
        kinds: for each pass an index into the seconds of F, B, W and BW of every stage [4 S].
        positions: of F, backward and weight passes [3, S, M], counted from one.
    """

    before: list[int]
    needs: list[int]
    kinds: list[int]
    positions: IntArray


@lru_cache(maxsize=64)
def program(shape: PipelineShape) -> Program:
    """Return the order of a shape as a program.

    Raises:
        ConfigError: the schedule is not defined for these numbers, or never finishes.
    """
    rows, m, num_stages = rows_of(shape), shape.num_microbatches, shape.num_stages
    position = [0] * (3 * num_stages * m)  # of F, backward and weight passes of every stage and micro-batch
    before, needs, kinds = list[int](), list[int](), list[int]()
    remaining = [list(zip(*_tracked(row, num_stages, m), strict=True))[::-1] for row in rows]  # the next one last
    latest = [0] * len(rows)
    runnable, waiting = list(range(len(rows))), dict[int, int]()
    while runnable:
        rank = runnable.pop()
        track, previous = remaining[rank], latest[rank]
        while track:
            needed, cell, kind = track[-1]
            input_position = 0
            if needed >= 0:
                input_position = position[needed]
                if not input_position:
                    waiting[needed] = rank
                    break
            before.append(previous)
            needs.append(input_position)
            kinds.append(kind)
            previous = len(before)
            position[cell] = previous
            track.pop()
            if waiting and cell in waiting:
                runnable.append(waiting.pop(cell))
        latest[rank] = previous
    if any(remaining):
        raise ConfigError("the schedule deadlocks")
    forward, backward, weight = np.array(position, dtype=np.int64).reshape(3, num_stages, m)
    positions = np.stack([forward, backward, np.where(weight > 0, weight, backward)])
    return Program(before, needs, kinds, positions)


def _tracked(row: Row, num_stages: int, m: int) -> tuple[list[int], list[int], list[int]]:
    """Return for each pass the index of what it needs (-1: nothing), its own index, and its index into the seconds."""
    kind, stage, i = row
    size, cell = num_stages * m, stage * m + i
    of_backward = np.where(stage == num_stages - 1, cell, size + cell + m)
    needed = np.select([(kind == F) & (stage == 0), kind == F, kind == W], [-1, cell - m, size + cell], of_backward)
    made = np.select([kind == F, kind == W], [cell, 2 * size + cell], size + cell)
    return needed.tolist(), made.tolist(), (kind * num_stages + stage).tolist()


def ends_s(passes: Program, forward_s: FloatArray, backward_s: FloatArray, weight_s: FloatArray) -> list[float]:
    """Return the seconds at which each pass ends, behind a leading zero; arguments [S], ``backward_s`` without the weights."""
    seconds = np.concatenate([forward_s, backward_s, weight_s, backward_s + weight_s]).tolist()
    ends = [0.0]
    for before, needs, kind in zip(passes.before, passes.needs, passes.kinds, strict=True):
        one, other = ends[before], ends[needs]
        ends.append((one if one > other else other) + seconds[kind])
    return ends


def makespan_s(shape: PipelineShape, forward_s: FloatArray, backward_s: FloatArray, weight_s: FloatArray) -> float:
    """Return the seconds from the first start to the last end; arguments [S], ``backward_s`` without the weights.

    Raises:
        ConfigError: the schedule is not defined for these numbers.
    """
    m = shape.num_microbatches
    if shape.num_stages == 1:
        return m * float((forward_s + backward_s + weight_s)[0])
    if shape.record.all_forward_first and shape.num_model_chunks == 1:
        backward_s = backward_s + weight_s  # identical jobs through a line of machines, forward and back
        return float(sum(np.sum(way) + (m - 1) * np.max(way) for way in (forward_s, backward_s)))
    q, reach, few = shape.period, shape.reach, m if shape.order is not None else shape.fewer_microbatches
    while few < m:
        short = program(shape.with_microbatches(few))
        ends = np.array(ends_s(short, forward_s, backward_s, weight_s))
        window = ends[short.positions[:, :, reach : few - reach]]
        later = window[:, :, q:] - window[:, :, :-q]
        if np.ptp(later) <= SAME * ends.max():
            return float(ends.max() + (m - few) // q * np.mean(later))
        few += q * -(-few // q)
    return max(ends_s(program(shape), forward_s, backward_s, weight_s))


def pipelined_s(stage_s: Array, num_microbatches: Array, num_model_chunks: Array) -> Array:
    """Return the seconds of one step in closed form; ``stage_s`` has the stages on its last axis [..., pp].

        T = m * max_s t_s + (sum_s t_s - max_s t_s) / v

    with t_s the seconds stage s needs for one micro-batch, forward and backward. Exact for 1f1b and gpipe with equal stages, where
    it is (m + pp - 1) * t, and for interleaved 1f1b, whose bubble is a v-th of that (arXiv:2104.04473 section 2.2).
    """
    slowest = np.max(stage_s, axis=-1)
    return num_microbatches * slowest + (np.sum(stage_s, axis=-1) - slowest) / num_model_chunks


# What no split of the work can beat


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

    @property
    def runs_uncut(self) -> Array:
        """Backward passes are one with the gradients of weights."""
        return ~by_schedule("splits_backward")[self.schedule]


def lower_bound_s(work: PipelineWork) -> Array:
    """Return the seconds no split of the work can beat [N]; chunks of a rank have as many blocks as each other, or one more.

    For W seconds of work a micro-batch, of which a rank has M or more, over pp ranks, against the replay of any split:

        any order     m M
        gpipe         W + (m - 1) M
        1f1b          2 W + (m - pp - 1) M for m > pp. Rank s: the work before it, its m micro-batches, and on both sides of them
                      the way down from it and back less the pp - s passes that fill it,
                      sum_{<s} t + 2 sum_{>s} t + (m - pp + s + 1) t_s.
                      For m <= pp: W + (m - 1) M / 2, and for m = pp the mean of two such paths, 2 pp W / (pp + 1)
        zb-h1         the same with what the drain defers (`_deferred`)
        in chunks     one of the ranks with the most blocks stands behind others, which make it wait (`_behind_others`)
        others        m t_r and what rank r waits for first: the forward passes of the ranks before it, and behind its last pass
                      their backward ones where backward is not split (`_in_turn`)
    """
    m, pp, v, bounds = work.num_microbatches, work.pp, work.num_model_chunks, by_schedule("bound")[work.schedule]
    total = work.total_s + pp * work.transfer_s
    slowest = np.maximum(work.slowest_s, work.total_s / pp) + work.transfer_s
    bound = np.where(bounds == "any_order", 0.0, np.maximum(_in_turn(work), _behind_others(work)))
    bound = np.where((v > 1) & (bounds == "whole_backward"), np.maximum(bound, _both_ways(work)), bound)
    bound = np.maximum(m * slowest, bound)
    plain = single_stages_s(m, pp, by_schedule("all_forward_first")[work.schedule], total, slowest)
    bound = np.where((v == 1) & (bounds == "whole_backward"), plain, bound)
    return np.where((v == 1) & (bounds == "deferred_weights"), np.maximum(bound, _deferred(work)), bound)


def single_stages_s(num_microbatches: Array, pp: Array, is_gpipe: Array, total_s: Array, slowest_s: Array) -> Array:
    """Return the seconds that no split into one stage a rank is below, under gpipe or else 1f1b [N], whatever the devices.

    Args:
        num_microbatches, pp: m and the number of stages.
        is_gpipe: where not, it is 1f1b.
        total_s: of one micro-batch in all stages at least, transfers included; ``slowest_s`` in the slowest stage.
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
    m, pp, v = work.num_microbatches, work.pp, work.num_model_chunks

    def weighted(share: Array) -> Array:
        share = np.minimum(share, m / 2)
        growth = share / (m - share)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            first = np.where(growth > 0, growth / np.expm1(pp * np.log1p(growth)), 1 / pp)
        others = work.total_s - work.blocks_s
        return (m * first + share * (1 - first)) * work.blocks_s + m * (first * others + work.transfer_s)

    of_any = np.where(work.runs_uncut, work.block_share, work.block_forward_share) / v
    of_main = np.where(work.runs_uncut, 1.0, work.main_forward_share) / v
    without = np.minimum(work.num_other_blocks, pp) * of_main / m
    return np.maximum(weighted(of_any), weighted(of_main) / (1 + without))


def _behind_others(work: PipelineWork) -> Array:
    """Return the bound of uncut blocks: T >= m c t and the wait of a rank with the most of them, c >= ceil(n / pp) of n.

    All ranks together have pp c - n fewer than c each, so that of the ranks with c one has at least pp - 1 - (pp c - n) before it,
    whose first chunks have ((that number) c - (pp c - n)) / v blocks or more.
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
    forward, backward = work.total_forward_s, work.total_s - work.total_forward_s
    return np.maximum(
        forward + m * backward / pp + of_main * (work.main_s * (1 - work.main_forward_share)),
        backward + m * forward / pp + of_main * (work.main_s * work.main_forward_share),
    )


def _deferred(work: PipelineWork) -> Array:
    """Return the bound of deferred weights: (a + (m - a - w - (pp - 1) max(f, w)) / pp) W.

    a is the smallest share of forward and input gradients in the work of a layer, f and w the largest of forward and of weight
    gradients: so weighted every layer counts alike. 0 where some weight would be negative.
    """
    m, pp = work.num_microbatches, work.pp
    remaining = m - work.path_share - work.weight_share
    remaining = remaining - (pp - 1) * np.maximum(work.forward_share, work.weight_share)
    return np.where(remaining > 0, (work.path_share + remaining / pp) * work.deep_s + m * work.transfer_s, 0.0)
