"""Seconds of a named schedule with real stage times, fast: the recurrences of simulation.py as a list of sums and maxima.

The order of a schedule is worked out once for its numbers (`program`), as the two passes that each pass waits for; a replay is then
one loop over them. Transfers are part of the passes here: a rank sends or receives nothing while it computes.

With many micro-batches the middle repeats. If the passes of every stage end `d` seconds after those q micro-batches before, over a
window longer than any pass looks back, then by induction all later ones do, and the step with n q more micro-batches takes n d
longer, exactly. Where the window is not yet periodic a longer one is tried, up to the entire step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from ...schema.errors import ConfigError
from ...schema.schedules import SCHEDULES, Schedule, ScheduleName, placement
from ...schema.units import Array
from .orders import order_of_schedule
from .simulation import Order

FloatArray = NDArray[np.float64]

_SAME = 1e-11
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

    @property
    def rank_of_stage(self) -> tuple[int, ...]:
        """Rank of each stage [S]."""
        if self.order is not None:
            return self._rank_of_given
        return placement(self.pp, self.num_model_chunks, self.record.placement_of(self.num_model_chunks))

    @cached_property
    def _rank_of_given(self) -> tuple[int, ...]:
        holders = {action.stage: rank for rank, row in enumerate(self.order or ()) for action in row}
        return tuple(holders[stage] for stage in range(self.num_stages))

    @property
    def splits_backward(self) -> bool:
        """Whether weight passes are apart from input passes."""
        return self.record.splits_backward

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
        return PipelineShape(
            schedule=self.schedule,
            pp=self.pp,
            num_model_chunks=self.num_model_chunks,
            num_microbatches=num_microbatches,
        )


def order_of(shape: PipelineShape) -> Order:
    """Return the passes of each rank under a named schedule; interleaved forms where a rank holds several chunks.

    Raises:
        ConfigError: the schedule is not defined for these numbers.
    """
    if shape.order is not None:
        return shape.order
    return order_of_schedule(shape.schedule, shape.pp, shape.num_microbatches, shape.num_model_chunks)


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
    positions: NDArray[np.int64]


Row = NDArray[np.int64]
"""The passes of one rank [3, n]: index of F, B, W or BW, stage, micro-batch."""

_F, _B, _W, _BW = range(4)

_KINDS = {"F": _F, "B": _B, "W": _W, "BW": _BW}


@lru_cache(maxsize=64)
def program(shape: PipelineShape) -> Program:
    """Return the named order as a program.

    Raises:
        ConfigError: the schedule is not defined for these numbers.
    """
    return program_of(rows_of(shape), shape.num_stages, shape.num_microbatches)


@lru_cache(maxsize=64)
def rows_of(shape: PipelineShape) -> list[Row]:
    """Return `order_of` as arrays.

    Raises:
        ConfigError: the schedule is not defined for these numbers.
    """
    pp, chunks, m = shape.pp, shape.num_model_chunks, shape.num_microbatches
    if not shape.record.runs_in_rounds or m < pp or (chunks > 1 and m % pp):
        return as_rows(order_of(shape))
    in_round = pp if chunks > 1 else m
    in_turn = 2 if chunks > 1 and shape.record.is_one_f_one_b else 1
    warm_up = [(chunks - 1) * in_round * (chunks > 1) + in_turn * (pp - 1 - r) for r in range(pp)]
    return [_rounds(shape, r, in_round, min(warm_up[r], chunks * m)) for r in range(pp)]


def _rounds(shape: PipelineShape, rank: int, in_round: int, warm_up: int) -> Row:
    """Return one rank of an interleaved order: forward, forward and backward in turn, backward; weights `rank` passes later."""
    pp, chunks, total = shape.pp, shape.num_model_chunks, shape.num_model_chunks * shape.num_microbatches
    step = np.arange(total)
    chunk, micro_batch = step // in_round % chunks, step // (in_round * chunks) * in_round + step % in_round
    forward = np.stack([np.full(total, _F), chunk * pp + rank, micro_batch, 3 * step])
    backward = np.stack([np.full(total, _BW), (chunks - 1 - chunk) * pp + rank, micro_batch, 3 * (step + warm_up) + 1])
    if not shape.splits_backward:
        passes = np.concatenate([forward, backward], axis=1)
    else:
        backward[0] = _B
        weight = backward + np.array([_W - _B, 0, 0, 3 * rank + 1])[:, None]
        passes = np.concatenate([forward, backward, weight], axis=1)
    return np.asarray(passes[:3, np.argsort(passes[3], kind="stable")])


def as_rows(order: Order) -> list[Row]:
    """Return any order as arrays."""
    return [np.array([[_KINDS[kind], stage, i] for stage, kind, i in actions], dtype=np.int64).T for actions in order]


def program_of(rows: list[Row], num_stages: int, num_microbatches: int) -> Program:
    """Return any order as a program.

    Raises:
        ConfigError: it never finishes.
    """
    m, size = num_microbatches, num_stages * num_microbatches
    position = [0] * (3 * size)  # of F, backward and weight passes of every stage and micro-batch
    before, needs, kinds = list[int](), list[int](), list[int]()
    tracks = [list(zip(*_tracked(row, num_stages, m), strict=True)) for row in rows]
    cursors, latest = [0] * len(rows), [0] * len(rows)
    runnable, waiting = list(range(len(rows))), dict[int, int]()
    while runnable:
        rank = runnable.pop()
        track, cursor, previous = tracks[rank], cursors[rank], latest[rank]
        for needed, cell, kind in track[cursor:]:
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
            cursor += 1
            if waiting and cell in waiting:
                runnable.append(waiting.pop(cell))
        cursors[rank], latest[rank] = cursor, previous
    if any(cursor < len(track) for cursor, track in zip(cursors, tracks, strict=True)):
        raise ConfigError("the schedule deadlocks")
    forward, backward, weight = np.array(position, dtype=np.int64).reshape(3, num_stages, m)
    positions = np.stack([forward, backward, np.where(weight > 0, weight, backward)])
    return Program(before, needs, kinds, positions)


def _tracked(row: Row, num_stages: int, m: int) -> tuple[list[int], list[int], list[int]]:
    """Return for each pass the index of what it needs (-1: nothing), its own index, and its index into the seconds."""
    kind, stage, i = row
    size, cell = num_stages * m, stage * m + i
    of_backward = np.where(stage == num_stages - 1, cell, size + cell + m)
    needed = np.select([(kind == _F) & (stage == 0), kind == _F, kind == _W], [-1, cell - m, size + cell], of_backward)
    made = np.select([kind == _F, kind == _W], [cell, 2 * size + cell], size + cell)
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
    if shape.order is not None:
        return max(ends_s(program(shape), forward_s, backward_s, weight_s))
    q, reach, few = shape.period, shape.reach, shape.fewer_microbatches
    while few < m:
        short = program(shape.with_microbatches(few))
        ends = np.array(ends_s(short, forward_s, backward_s, weight_s))
        window = ends[short.positions[:, :, reach : few - reach]]
        later = window[:, :, q:] - window[:, :, :-q]
        if np.ptp(later) <= _SAME * ends.max():
            return float(ends.max() + (m - few) // q * np.mean(later))
        few += q * -(-few // q)
    return max(ends_s(program(shape), forward_s, backward_s, weight_s))


PENDING_GRADIENTS = 0.5
"""What waits between an input pass and its weight pass next to the activations, as a part of them: gradients of products' outputs.

torch keeps the entire graph until the weight pass (stage_backward_input retains it). In a block of Llama they are 10.75 of 19
hidden widths a token.
"""


@lru_cache(maxsize=1024)
def peak_in_flight_by_chunk(shape: PipelineShape) -> tuple[NDArray[np.float64], ...]:
    """Return for each rank the micro-batches of each of its chunks when it holds most [K, v], no entry within another one.

    Activations of a pass are stored until its backward pass, or its weight pass with `PENDING_GRADIENTS` since the input pass.
    More than 4 pp micro-batches hold no more, but under gpipe.
    """
    saturated = 4 * shape.pp
    if shape.order is None and not shape.record.all_forward_first and shape.num_microbatches > saturated:
        return peak_in_flight_by_chunk(shape.with_microbatches(saturated))
    if shape.record.all_forward_first:
        return (np.full((1, shape.num_model_chunks), float(shape.num_microbatches)),) * shape.pp
    changes = np.array([1.0, PENDING_GRADIENTS, -1.0 - PENDING_GRADIENTS, -1.0])
    peaks = []
    for kind, stage, _ in rows_of(shape):
        counts = np.zeros((len(kind), shape.num_model_chunks))
        change = changes[kind]
        counts[np.arange(len(kind)), stage // shape.pp] = change
        is_peak = np.append((change[:-1] > 0) & (change[1:] < 0), False)
        peaks.append(_maximal(np.cumsum(counts, axis=0)[is_peak]))
    return tuple(peaks)


def _maximal(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rows that no other row covers."""
    distinct = np.unique(counts, axis=0)
    covered = np.all(distinct[None, :, :] >= distinct[:, None, :], axis=2).sum(axis=1) > 1
    return np.asarray(distinct[~covered])


def in_flight(shape: PipelineShape) -> NDArray[np.float64]:
    """Return the most micro-batches each rank [pp] holds at once, with chunks of equal size."""
    return np.array([counts.mean(axis=1).max() for counts in peak_in_flight_by_chunk(shape)])


def in_flight_of_stage(
    schedule_is_1f1b: Array, num_microbatches: Array, pp: Array, stage_idx: Array, num_model_chunks: Array = 1
) -> Array:
    """Return the micro-batches whose activations a stage holds at once.

    min(m, pp - stage) under 1f1b, m under gpipe; interleaved over v chunks the warm-up is 2 (pp - stage - 1) + (v - 1) pp + 1
    chunks, each a v-th of the stage (arXiv:2104.04473 section 2.2).
    """
    v = num_model_chunks
    warm_up = np.where(v > 1, (2 * (pp - stage_idx - 1) + (v - 1) * pp + 1) / v, pp - stage_idx)
    return np.where(schedule_is_1f1b == 1, np.minimum(num_microbatches, warm_up), num_microbatches)
