"""Micro-batches that a rank of a pipeline holds, and the moments of its order at which it may be fullest.

A forward pass of a chunk saves its activations until the backward pass. Where that is split, input passes free nothing: torch
keeps the graph (stage_backward_input retains it), and next to it what the weight pass starts from is pending, the gradients of
products' outputs. The first stage has no input pass: its weight pass is an entire backward pass. Gradients of a chunk add up from
its first backward or weight pass on; after its last one they are reduced, and its copies of parameters are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import numpy as np

from ...schema.layout_table import distinct_rows
from ...schema.schedules import SCHEDULES, by_schedule
from ...schema.units import Array, BoolArray, FloatArray, IntArray
from .orders import BW, B, F, Row, W
from .replay import PipelineShape, rows_of

Moment = Literal["forward", "backward", "input", "weight", "end"]
"""Where in a pass: at the end of a forward pass (over the last stage, or before a weight pass: any other is followed by more); at
the start of a backward pass; at the end of an input pass; in a weight pass that has made its gradients, from all that was pending,
before its graph goes and they are added to earlier ones; at the end of a chunk's last pass, before its gradients are reduced."""

MOMENTS: tuple[Moment, ...] = get_args(Moment)
FORWARD, BACKWARD, INPUT, WEIGHT, END = range(len(MOMENTS))


class Holding(NamedTuple):
    """What the ranks hold at moments of which none is within others: [R, K, v] by chunk, or [R, K].

    Attributes:
        stored, pending: micro-batches whose activations are stored, and whose gradients wait for their weight pass.
        summed: unsharded gradients add up (0 or 1); reduced: they have been reduced, and copies of parameters are gone.
        moment, chunk: where it is, index into MOMENTS, and in a pass over which chunk.
    """

    stored: IntArray
    pending: IntArray
    summed: IntArray
    reduced: IntArray
    moment: IntArray
    chunk: IntArray


@lru_cache(maxsize=1024)
def holdings(shape: PipelineShape) -> Holding:
    """Return what each rank holds at the moments at which it may be fullest, however large its chunks; short ones repeat one.

    More than 4 pp micro-batches hold no more, but under gpipe, where the middle is left out.
    """
    if shape.order is None and not shape.record.all_forward_first and shape.num_microbatches > 4 * shape.pp:
        return holdings(shape.with_microbatches(4 * shape.pp))
    v = shape.num_model_chunks
    states, rank, moment, chunk = _moments(rows_of(shape), shape)
    group = (rank * len(MOMENTS) + moment) * v + chunk
    # Reduced gradients may take more than the copies that go with them, or less.
    widest = _widest(np.hstack([states, -states[:, 3 * v :]]), group)
    distinct = widest[np.sort(distinct_rows([group[widest], *states[widest].T]).rows)]
    states, rank, moment, chunk = (column[distinct] for column in (states, rank, moment, chunk))
    count = np.bincount(rank, minlength=shape.pp)
    start = np.cumsum(count) - count
    padded = start[:, None] + np.where(np.arange(count.max()) < count[:, None], np.arange(count.max()), 0)
    stored, pending, summed, reduced = np.split(states[padded], 4, axis=-1)
    return Holding(stored, pending, summed, reduced, moment[padded], chunk[padded])


def _moments(rows: Sequence[Row], shape: PipelineShape) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return what ranks hold by chunk [K, 4 v], its rank, moment and chunk [K], sorted by these and then by time."""
    kind, stage = np.concatenate([row[0] for row in rows]), np.concatenate([row[1] for row in rows])
    length, v = np.array([len(row[0]) for row in rows]), shape.num_model_chunks
    rank, chunk, positions = np.repeat(np.arange(len(rows)), length), stage // shape.pp, np.arange(len(kind))
    before_rank = (np.cumsum(length) - length)[rank] - 1

    def counted(change: IntArray) -> IntArray:
        total = np.cumsum((chunk[:, None] == np.arange(v)) * change[:, None], axis=0)
        return np.asarray(total - np.where(before_rank[:, None] < 0, 0, total[before_rank]))

    is_undivided = (kind == BW) | ((kind == W) & (stage == 0))
    stored = counted(np.select([kind == F, kind == B], [1, 0], -1))
    pending = counted(np.select([kind == B, kind == W], [1, -1], 0) * (stage > 0))
    makes = np.flatnonzero(is_undivided | (kind == W))
    first, last = np.zeros((len(rows), v), dtype=np.int64), np.full((len(rows), v), len(kind))
    first[rank[makes[::-1]], chunk[makes[::-1]]] = makes[::-1]
    last[rank[makes], chunk[makes]] = makes
    summed = (positions[:, None] >= first[rank]) & (positions[:, None] <= last[rank])
    reduced = positions[:, None] > last[rank]
    after = np.concatenate([stored, pending, summed, reduced], axis=1).astype(np.int64)
    before = np.concatenate([np.zeros((1, 4 * v), dtype=np.int64), after[:-1]])
    before[before_rank + 1 == positions] = 0
    # Gradients of a chunk's first pass are made, and add to nothing.
    added = summed & (positions[:, None] != first[rank])
    with_gradients = np.concatenate([before[:, :v], after[:, v : 2 * v], added, after[:, 3 * v :]], axis=1)
    is_end = np.isin(positions, last)
    frees = (kind == W) | ((kind == B) & (stage == 0))  # or makes nothing that is pending
    is_last = np.append(rank[1:] != rank[:-1], True)
    matters = (kind == F) & ((stage == shape.num_stages - 1) | np.append(frees[1:], True) | is_last)
    moments = (
        (after, matters), (before, is_undivided), (after, (kind == B) & (stage > 0)), (with_gradients, (kind == W) & (stage > 0)),
        (after, is_end),
    )  # fmt: skip
    states = np.concatenate([of_all[rows] for of_all, rows in moments])
    position = np.concatenate([np.flatnonzero(rows) for _, rows in moments])
    moment = np.repeat(np.arange(len(MOMENTS)), [np.count_nonzero(rows) for _, rows in moments])
    order = np.lexsort((position, chunk[position], moment, rank[position]))
    position = position[order]
    return states[order], rank[position], moment[order], chunk[position]


def _widest(states: IntArray, group: IntArray) -> IntArray:
    """Return the indices of the states [K] none of which is within another one of its group, nor within the mean of two others.

    Bytes are linear in a state, so the most of a group are at one of these. Groups are sorted, states in them in any order.
    """
    remaining = np.arange(len(group))
    while True:
        before, size = states[remaining], len(remaining)
        remaining = remaining[_is_not_within_neighbours(before, group[remaining])]
        if len(remaining) == size:
            return remaining


def _is_not_within_neighbours(states: IntArray, group: IntArray) -> BoolArray:
    """Return False for states [K] that are within the former or the later one of their group, or within the mean of both.

    Along a run of the last kind a linear function is convex: it is largest at an end, which remains.
    """
    alike = group[1:] == group[:-1]
    within_former = alike & np.all(states[1:] <= states[:-1], axis=1)
    within_later = alike & ~within_former & np.all(states[1:] >= states[:-1], axis=1)
    remains = np.ones(len(group), dtype=bool)
    remains[1:] &= ~within_former
    remains[:-1] &= ~within_later
    if remains.all():
        remains[1:-1] &= ~(alike[1:] & alike[:-1] & np.all(2 * states[1:-1] <= states[:-2] + states[2:], axis=1))
    return remains


def in_flight(shape: PipelineShape) -> FloatArray:
    """Return the most micro-batches whose activations each rank [pp] holds at once, with chunks of equal size."""
    return np.asarray(holdings(shape).stored.mean(axis=2).max(axis=1))


def in_flight_of_stage(
    schedule: Array, num_microbatches: Array, pp: Array, stage_idx: Array, num_model_chunks: Array = 1
) -> Array:
    """Return the micro-batches whose activations a stage holds at once.

    min(m, pp - stage) under 1f1b, m under gpipe; interleaved over v chunks the warm-up is 2 (pp - stage - 1) + (v - 1) pp + 1
    chunks, each a v-th of the stage (arXiv:2104.04473 section 2.2).
    """
    v = num_model_chunks
    warm_up = np.where(v > 1, (2 * (pp - stage_idx - 1) + (v - 1) * pp + 1) / v, pp - stage_idx)
    is_1f1b = by_schedule("runs_in_rounds") & ~by_schedule("splits_backward")
    return np.where(is_1f1b[schedule], np.minimum(num_microbatches, warm_up), num_microbatches)


def summed_in_flight(num_microbatches: Array, in_flight: Array) -> Array:
    """Return how many of the micro-batches in flight are so beside gradients under gpipe or 1f1b: the first pass makes those.

    -1 where there is one pass only.
    """
    return np.where(num_microbatches > 1, np.minimum(in_flight, num_microbatches - 1), -1)


def min_in_flight(schedule: Array, num_microbatches: Array, pp: Array, num_model_chunks: Array) -> Array:
    """Return the micro-batches that every rank holds at least when it holds most [N]; not above `in_flight`."""
    count = np.ones_like(np.asarray(pp, dtype=np.float64))
    for idx, record in enumerate(SCHEDULES.values()):
        min_count = record.min_in_flight(num_microbatches, pp, num_model_chunks)
        count = np.where(np.asarray(schedule) == idx, min_count, count)
    return np.where(pp > 1, np.minimum(num_microbatches, count), 1)


def min_summed_in_flight(schedule: Array, num_microbatches: Array, pp: Array, num_model_chunks: Array) -> Array:
    """Return those that every rank holds at least at some moment at which gradients of all its chunks add up [N]; -1: none."""
    fullest = min_in_flight(schedule, num_microbatches, pp, num_model_chunks)
    count = np.full_like(fullest, -1.0)
    for idx, record in enumerate(SCHEDULES.values()):
        is_sure = record.sums_together(num_microbatches, pp, num_model_chunks)
        here = np.minimum(fullest, num_microbatches - 1) if record.all_forward_first else fullest
        count = np.where((np.asarray(schedule) == idx) & is_sure, here, count)
    return count
