"""Micro-batches that a rank of a pipeline holds, and the moments of its order at which it may be fullest.

A forward pass of a chunk saves its activations until the backward pass. Where that is split, input passes free nothing: torch
keeps the graph (stage_backward_input retains it), and next to it what the weight pass starts from is pending, the gradients of
products' outputs. The first stage has no input pass: its weight pass is an entire backward pass. Gradients of a chunk add up from
its first backward or weight pass on; after its last one they are reduced, and its copies of parameters are dropped.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import numpy as np

from ...schema.schedules import SCHEDULES, by_schedule
from ...schema.units import Array, FloatArray, IntArray
from .orders import BW, B, F, Row, W
from .replay import PipelineShape, rows_of

Moment = Literal["forward", "backward", "input", "weight", "end"]
"""Where in a pass: at the end of a forward pass (over the last stage, or before a weight pass: any other is followed by more); at
the start of a backward pass; at the end of an input pass; in a weight pass that has made its gradients, from all that was pending,
before its graph goes and they are added to earlier ones; at the end of a chunk's last pass, before its gradients are reduced."""

MOMENTS: tuple[Moment, ...] = get_args(Moment)
FORWARD, BACKWARD, INPUT, WEIGHT, END = range(len(MOMENTS))


class Holding(NamedTuple):
    """What the ranks hold at moments of which none is within another one: [R, K, v] by chunk, or [R, K].

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
    """Return what each rank holds at the moments at which it may be fullest; ranks with fewer of them repeat one.

    More than 4 pp micro-batches hold no more, but under gpipe, where the middle is left out.
    """
    if shape.order is None and not shape.record.all_forward_first and shape.num_microbatches > 4 * shape.pp:
        return holdings(shape.with_microbatches(4 * shape.pp))
    of_ranks = [_of_row(row, shape) for row in rows_of(shape)]
    longest = max(len(states) for states in of_ranks)
    padded = np.stack([np.concatenate([one, np.repeat(one[:1], longest - len(one), axis=0)]) for one in of_ranks])
    v = shape.num_model_chunks
    stored, pending, summed, reduced = (padded[..., part * v : (part + 1) * v] for part in range(4))
    return Holding(stored, pending, summed, reduced, padded[..., -2], padded[..., -1])


def _of_row(row: Row, shape: PipelineShape) -> IntArray:
    """Return the moments of one rank [K, 4 v + 2], none within another of the same kind."""
    (kind, stage, _), v = row, shape.num_model_chunks
    chunk, positions = stage // shape.pp, np.arange(len(kind))
    is_undivided = (kind == BW) | ((kind == W) & (stage == 0))
    on = chunk[:, None] == np.arange(v)
    stored = np.cumsum(on * np.select([kind == F, kind == B], [1, 0], -1)[:, None], axis=0)
    change = np.select([kind == B, kind == W], [1, -1], 0) * (stage > 0)
    pending = np.cumsum(on * change[:, None], axis=0)
    makes = on & (is_undivided | (kind == W))[:, None]
    first, last = makes.argmax(axis=0), len(kind) - 1 - makes[::-1].argmax(axis=0)
    summed = (positions[:, None] >= first) & (positions[:, None] <= last)
    reduced = positions[:, None] > last
    after = np.concatenate([stored, pending, summed, reduced], axis=1).astype(np.int64)
    before = np.concatenate([np.zeros((1, 4 * v), dtype=np.int64), after[:-1]])
    has_begun = summed & (positions[:, None] > first)
    with_gradients = np.concatenate([before[:, :v], after[:, v : 2 * v], has_begun, reduced], axis=1)
    is_end = makes.any(axis=1) & (positions == last[chunk])
    frees = (kind == W) | ((kind == B) & (stage == 0))  # or makes nothing that is pending
    matters = (kind == F) & ((stage == shape.num_stages - 1) | np.append(frees[1:], True))
    moments = (
        (after, matters, FORWARD), (before, is_undivided, BACKWARD), (after, (kind == B) & (stage > 0), INPUT),
        (with_gradients, (kind == W) & (stage > 0), WEIGHT), (after, is_end, END),
    )  # fmt: skip
    return np.concatenate([
        _widest(np.column_stack([states[rows], np.full(int(rows.sum()), moment), chunk[rows]])) for states, rows, moment in moments
    ])  # fmt: skip


def _widest(states: IntArray) -> IntArray:
    """Return the distinct moments of one kind [K, 4 v + 2] that are not within another one of the same chunk."""
    distinct = np.unique(states, axis=0)
    parts, same = distinct[:, :-1], distinct[:, None, -1] == distinct[None, :, -1]
    covers = np.all(parts[None, :, :] >= parts[:, None, :], axis=2) & same
    return np.asarray(distinct[covers.sum(axis=1) == 1])


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
    """Return how many of the micro-batches in flight are so beside gradients under gpipe or 1f1b: the first pass makes those."""
    return np.minimum(in_flight, num_microbatches - 1)


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
