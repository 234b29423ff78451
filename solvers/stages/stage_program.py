"""Cut ordered layers into contiguous pipeline stages and choose an option, such as what to recompute, for each of them.

Layers of one kind are interchangeable, so a stage is a span of layers and, for each kind, how many of them take each option.

Sets
    l = 0..L-1   layers in order
    s = 0..S-1   stages in order
    k            kinds of layers that have a choice
    o            options
    w            sets of options; a stage reserves the working memory of the set it stays within
    p            spans: stage s_p may hold layers i_p..j_p-1
    q            what a stage does once in a step, each with its own slowest stage
Data
    SECONDS[s,k,o], ONCE[q,s,k,o]   of one layer for each micro-batch, and once in a step
    FIXED[p], FIXEDONCE[q,p]        of the span's layers without a choice, and of what else the stage does
    COUNT[p,k]                      layers of the kind in the span
    KEPT[k,o]                       bytes one layer keeps
    ROOM[p,w]                       bytes the span's layers with a choice may keep while their options are within the set
    USES[w,o]                       whether the set has the option
    M, V                            how often the slowest stage and the sum of all stages count
Variables
    x[p,w] in {0,1}                 the stage has this span and stays within this set
    n[s,k,o] in 0, 1, ...           layers of the kind on the stage that take the option
    slowest, once[q]                seconds
Objective
    (O)  min  M slowest + V sum_s t_s + sum_q once[q]        t_s = sum_p FIXED x + sum_ko SECONDS n     (cost_models/pipeline)
Constraints
    (C1) contiguous: each stage has one span, and each starts where the one before ends, from layer 0 to L
    (C2) counted: sum_o n[s,k,o] = sum_pw COUNT[p,k] x[p,w]
    (C3) within the set: n[s,k,o] <= sum of COUNT[p,k] x[p,w] over the sets with USES[w,o]
    (C4) memory: sum_ko KEPT[k,o] n[s,k,o] <= sum_pw ROOM[p,w] x[p,w]
    (C5) slowest: slowest >= t_s
    (C6) once: once[q] >= sum_p FIXEDONCE x + sum_ko ONCE n, for every stage

Two methods. `solve` is exact in the slowest stage of SECONDS + a weight times ONCE, and then in the sum: Pareto fronts of bytes
and seconds give each span its best filling, dynamic programming the spans. `lower_bound_s` takes each term of (O) at its minimum.
Source of the counts: layers of equal kind are interchangeable; of the spans: splits.py.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from ...schema.units import BoolArray, FloatArray, IntArray
from ..backend import Solution, Status
from ..tolerances import ROUNDING
from .splits import dynamic_program

_EVENNESS = 1e-6
"""Weight of the squares of stages' seconds, over the slowest stage's, next to their sum: the most even of equally long splits."""


@dataclass(frozen=True, kw_only=True)
class StageProgramInstance:
    """Spans [P] and the choices of their layers; see the module's Data."""

    num_layers: int
    num_stages: int
    stage: IntArray
    first: IntArray
    last: IntArray
    fixed_s: FloatArray
    fixed_once_s: FloatArray
    counts: IntArray
    seconds: FloatArray
    once_s: FloatArray
    retained_bytes: FloatArray
    room_bytes: FloatArray
    uses: BoolArray
    slowest_weight: float
    sum_weight: float

    @cached_property
    def min_s(self) -> FloatArray:
        """Seconds [P] each span takes at best for one micro-batch; infinite where it does not fit."""
        return min_values(self, 0.0)

    @cached_property
    def min_once_s(self) -> FloatArray:
        """Seconds that each span [Q, P] takes once in a step at least, whatever fits."""
        total = self.fixed_once_s + (self.once_s.min(axis=3)[:, self.stage] * self.counts).sum(axis=2)
        return np.where(np.isfinite(self.min_s), total, np.inf)


class StageFilling(NamedTuple):
    """Boundaries [S+1] and the layers of each kind under each option [S, K, O]."""

    boundaries: tuple[int, ...]
    counts: IntArray


class OptionFront(NamedTuple):
    """Ways to fill one count of layers that no other way beats in both, by growing bytes [F] and falling value [F]."""

    retained_bytes: FloatArray
    value: FloatArray
    picks: IntArray

    def best_within(self, room_bytes: FloatArray) -> IntArray:
        """Return the position of the way with the lowest value in so many bytes, -1 where there is none."""
        return np.asarray(np.searchsorted(self.retained_bytes, room_bytes, side="right") - 1)


class OptionFronts:
    """Fronts of one instance, each made once; ``once_weight`` of a step's once seconds count next to each micro-batch's."""

    def __init__(self, instance: StageProgramInstance, once_weight: float) -> None:
        """Start without any front."""
        self._instance = instance
        self.values = instance.seconds + once_weight * instance.once_s.sum(axis=0)
        self._made: dict[tuple[bytes, int, tuple[int, ...]], OptionFront] = {}

    def front(self, stage: int, within: int, counts: tuple[int, ...]) -> OptionFront:
        """Return the fillings of so many layers of each kind on a stage with the options of one set."""
        key = (self.values[stage].tobytes(), within, counts)
        if key in self._made:
            return self._made[key]
        kinds = [kind for kind, count in enumerate(counts) if count]
        if len(kinds) == 1:
            return self._made.setdefault(key, self._of_one_kind(stage, within, kinds[0], counts[kinds[0]]))
        none = np.zeros((1, *self._instance.retained_bytes.shape), dtype=np.int64)
        front = OptionFront(np.zeros(1), np.zeros(1), none)
        for kind in kinds:
            other = self.front(stage, within, tuple(count * (k == kind) for k, count in enumerate(counts)))
            retained, value = (
                np.add.outer(*columns).ravel()
                for columns in ((front.retained_bytes, other.retained_bytes), (front.value, other.value))
            )
            unbeaten = _unbeaten(retained, value)
            one, two = np.divmod(unbeaten, len(other.value))
            front = OptionFront(retained[unbeaten], value[unbeaten], front.picks[one] + other.picks[two])
        return self._made.setdefault(key, front)

    def _of_one_kind(self, stage: int, within: int, kind: int, count: int) -> OptionFront:
        options = np.flatnonzero(self._instance.uses[within])
        ways = _ways(count, len(options))
        retained = ways @ self._instance.retained_bytes[kind, options]
        value = ways @ self.values[stage, kind, options]
        unbeaten = _unbeaten(retained, value)
        picks = np.zeros((len(unbeaten), *self._instance.retained_bytes.shape), dtype=np.int64)
        picks[:, kind, options] = ways[unbeaten]
        return OptionFront(retained[unbeaten], value[unbeaten], picks)


@lru_cache(maxsize=8)
def _ways(count: int, num_options: int) -> IntArray:
    """Return every way to give each of so many layers an option: layers of each option [W, O]."""
    taken, rest = np.zeros((1, 0), dtype=np.int64), np.array([count])
    for _ in range(num_options - 1):
        ends = np.cumsum(rest + 1)
        more = np.arange(ends[-1]) - np.repeat(ends - rest - 1, rest + 1)
        taken, rest = np.column_stack([np.repeat(taken, rest + 1, axis=0), more]), np.repeat(rest, rest + 1) - more
    return np.column_stack([taken, rest])


def _unbeaten(retained_bytes: FloatArray, value: FloatArray) -> IntArray:
    """Return the ways that no other way beats in both, by growing bytes."""
    order = np.lexsort((value, retained_bytes))
    best_before = np.concatenate([[np.inf], np.minimum.accumulate(value[order])[:-1]])
    return np.asarray(order[value[order] < best_before * (1 - ROUNDING)])


def min_values(instance: StageProgramInstance, once_weight: float, fronts: OptionFronts | None = None) -> FloatArray:
    """Return the lowest seconds + ``once_weight`` once seconds of each span [P]; infinite where nothing fits.

    First with the fastest option of each set for every layer, which most spans have the memory for; fronts only for the others.
    """
    fronts = fronts or OptionFronts(instance, once_weight)
    fixed = instance.fixed_s + once_weight * instance.fixed_once_s.sum(axis=0)
    best, floor = np.full(len(fixed), np.inf), np.full(len(fixed), np.inf)
    values, sets = fronts.values[instance.stage], range(len(instance.uses))
    for within in sets:
        allowed = np.where(instance.uses[within], values, np.inf)
        cheapest = np.argmin(allowed, axis=2)
        value = (np.take_along_axis(allowed, cheapest[:, :, None], axis=2)[:, :, 0] * instance.counts).sum(axis=1)
        layer_bytes = instance.retained_bytes[np.arange(instance.counts.shape[1]), cheapest]
        retained = (layer_bytes * instance.counts).sum(axis=1)
        best = np.where(retained <= instance.room_bytes[:, within], np.minimum(best, value), best)
        floor = np.minimum(floor, value)
    for rows in _rows_with_equal_fillings(instance, np.flatnonzero(best > floor)):
        for within in sets:
            front = fronts.front(int(instance.stage[rows[0]]), within, tuple(instance.counts[rows[0]].tolist()))
            idx = front.best_within(instance.room_bytes[rows, within])
            best[rows] = np.minimum(best[rows], np.where(idx >= 0, front.value[idx], np.inf))
    return np.asarray(best + fixed)


def _rows_with_equal_fillings(instance: StageProgramInstance, rows: IntArray) -> list[IntArray]:
    if not len(rows):
        return []
    of_stages = np.concatenate([instance.seconds, *instance.once_s], axis=2).reshape(instance.num_stages, -1)
    device = np.unique(of_stages, axis=0, return_inverse=True)[1]
    key = device.reshape(-1)[instance.stage[rows]].astype(np.int64)
    for column in instance.counts[rows].T:
        key = key * (int(column.max()) + 1) + column
    order = np.argsort(key, kind="stable")
    return np.split(rows[order], np.flatnonzero(np.diff(key[order])) + 1)


def solve(instance: StageProgramInstance, *, once_weight: float = 0.0) -> Solution[StageFilling]:
    """Return the split with the lowest slowest stage of seconds + ``once_weight`` once seconds; of these the lowest sum."""
    start = time.perf_counter()
    fronts = OptionFronts(instance, once_weight)
    values = instance.min_s if once_weight == 0 else min_values(instance, once_weight, fronts)
    table = dense_table(instance, values)
    slowest, boundaries = dynamic_program(table, np.maximum)
    if not boundaries:
        return Solution(status=Status.INFEASIBLE, choice=None, solve_s=time.perf_counter() - start)
    within = np.where(table <= slowest * (1 + ROUNDING), table * (1 + _EVENNESS * table / slowest), np.inf)
    boundaries = dynamic_program(within, np.add)[1]
    counts = np.stack(
        [filling_of_span(instance, fronts, s, i, j) for s, (i, j) in enumerate(itertools.pairwise(boundaries))]
    )
    choice = StageFilling(boundaries, counts)
    return Solution(
        status=Status.FEASIBLE,
        choice=choice,
        objective=check(instance, choice),
        solve_s=time.perf_counter() - start,
        backend="dynamic program",
    )


def lower_bound_s(instance: StageProgramInstance, weights: Sequence[tuple[float, float]] = ()) -> float:
    """Return what no answer has a lower (O) than: slowest stage, sum and what is done once each at the lowest of any answer.

    Args:
        weights: of the slowest stage and of the sum, in place of (M, V); the largest of these bounds.
    """
    table = dense_table(instance, instance.min_s)
    slowest, total = (dynamic_program(table, combine)[0] for combine in (np.maximum, np.add))
    once = sum(min_slowest_s(instance, each) for each in instance.min_once_s)
    bounds = []
    for m, v in weights or ((instance.slowest_weight, instance.sum_weight),):
        # An infinite minimum stands for no answer; times 0 it would be nothing.
        rest = v * total if v else 0.0
        bounds.append((m * slowest if m else 0.0) + rest + once)
        if m:  # the stage with the most of both together has no more than the most of each
            bounds.append(m * min_slowest_s(instance, min_values(instance, 1 / m)) + rest)
    return max(bounds)


def min_slowest_s(instance: StageProgramInstance, values: FloatArray) -> float:
    """Return the slowest stage that any answer has at least, given the values of spans [P]; infinite where there is none."""
    return dynamic_program(dense_table(instance, values), np.maximum)[0]


def dense_table(instance: StageProgramInstance, values: FloatArray) -> FloatArray:
    """Return the values of spans [P] by stage, first and last layer [S, L+1, L+1]; infinite where there is no span."""
    size = instance.num_layers + 1
    table = np.full((instance.num_stages, size, size), np.inf)
    table[instance.stage, instance.first, instance.last] = values
    return table


def filling_of_span(
    instance: StageProgramInstance, fronts: OptionFronts, stage: int, first: int, last: int
) -> IntArray:
    """Return how many layers of each kind take each option [K, O] in the best filling of a span."""
    span = _span(instance, stage, first, last)
    best, picks = np.inf, np.zeros(instance.retained_bytes.shape, dtype=np.int64)
    for within in range(len(instance.uses)):
        front = fronts.front(stage, within, tuple(instance.counts[span].tolist()))
        idx = int(front.best_within(instance.room_bytes[span, within]))
        if idx >= 0 and front.value[idx] < best:
            best, picks = float(front.value[idx]), front.picks[idx]
    return picks


def _span(instance: StageProgramInstance, stage: int, first: int, last: int) -> int:
    """Return the index of a span.

    Raises:
        ValueError: the stage may not hold these layers (C1).
    """
    spans = np.flatnonzero((instance.stage == stage) & (instance.first == first) & (instance.last == last))
    if not len(spans):
        raise ValueError(f"contiguous (C1): stage {stage} cannot hold layers {first}..{last - 1}")
    return int(spans[0])


def check(instance: StageProgramInstance, choice: StageFilling) -> float:
    """Recompute the objective (O) of an answer from the definition.

    Raises:
        ValueError: the answer breaks a constraint; the message names which.
    """
    boundaries, counts = choice
    if len(boundaries) != instance.num_stages + 1 or (boundaries[0], boundaries[-1]) != (0, instance.num_layers):
        raise ValueError(f"contiguous (C1): boundaries {boundaries}")
    seconds, once = [], []
    for s, (i, j) in enumerate(itertools.pairwise(boundaries)):
        span, n = _span(instance, s, i, j), counts[s]
        if np.any(n < 0) or not np.array_equal(n.sum(axis=1), instance.counts[span]):
            raise ValueError(f"counted (C2): stage {s} has {instance.counts[span]} layers, {n.sum(axis=1)} chosen for")
        sets = [not np.any(n[:, ~uses]) for uses in instance.uses]
        if not any(sets):
            raise ValueError(f"within the set (C3): stage {s} uses options {np.flatnonzero(n.sum(axis=0))}")
        retained, room = float((instance.retained_bytes * n).sum()), float(instance.room_bytes[span, sets].max())
        if retained > room * (1 + ROUNDING) + 1:
            raise ValueError(f"memory (C4): stage {s} keeps {retained:.0f} bytes of {room:.0f}")
        seconds.append(float(instance.fixed_s[span] + (instance.seconds[s] * n).sum()))
        once.append(instance.fixed_once_s[:, span] + (instance.once_s[:, s] * n).sum(axis=(1, 2)))
    slowest, total = max(seconds), sum(seconds)  # (C5); the largest of each once is (C6)
    return instance.slowest_weight * slowest + instance.sum_weight * total + float(np.max(once, axis=0).sum())
