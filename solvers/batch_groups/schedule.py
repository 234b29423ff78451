"""Deadlines of the micro-batches of a batch, and its schedule.

Deadlines T[1] >= T[2] >= .. are given; micro-batch after micro-batch is filled with what is left, longest first:
a sequence goes into an open group that has room in time and memory, smallest degree first, else opens a group of the least degree
that meets the deadline, else waits; one that no later deadline admits must fit. Deadlines come from shapes (even; cuts of the
sorted sequences by dynamic programming; the seconds of the longest sequence at each degree, the rest even), each scaled down until
nothing fits, the best then lowered one by one. Few sequences are solved exactly, by dynamic programming over subsets.
Sources: the problem is FlexSP's (arXiv:2412.01523); filling under a deadline is first-fit decreasing under MULTIFIT's bisection
(Coffman, Garey and Johnson, SIAM J. Comput. 7(1), 1978); deadlines that differ, so that one pass deals short sequences into the
room that long ones leave, are ours.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...schema.batch import LengthCosts
from ...schema.errors import InfeasibleError
from ..tolerances import SUMMED
from .bound import lower_bound_s
from .exact import MAX_STEPS, num_steps, solve_exactly
from .filling import Distinct, Filled, entries, fill
from .instance import BatchGroup, BatchInstance, BatchSchedule, Groups
from .meeting_once import solve_without_waits
from .pipelined import PackInstance, pack_bound_s, schedule_packs

_SPAN = 3
"""Numbers of micro-batches that are tried, from the fewest that the tokens allow."""

_TOLERANCE = 0.004
"""Of the bisection of deadlines, relative."""

_UNUSED = 1.1
"""Sum of the deadlines over the seconds of what is filled, from which on a shape is given up."""

_LOWERED = (0.97, 0.985, 0.993)
"""Steps by which one deadline is lowered at a time."""

_MAX_FILLED, _MAX_GROWN = 640, 16.0
"""Micro-batches that are filled while deadlines are lowered; factor over even deadlines from which on time is not what lacks."""

_MAX_CUTS = 256
"""Places of the sorted sequences where a micro-batch may begin, in the dynamic program."""


def instance_under(costs: LengthCosts, lengths: Sequence[int]) -> BatchInstance | PackInstance:
    """Return the problem of lengths under the costs of a plan.

    Raises:
        ConfigError: there are none, or one is not positive.
        InfeasibleError: the longest sequence fits nowhere.
    """
    return (PackInstance if costs.pipeline is not None else BatchInstance).under(costs, lengths)


def batch_bound_s(instance: BatchInstance | PackInstance) -> float:
    """Return seconds that no schedule of a batch is below."""
    return pack_bound_s(instance) if isinstance(instance, PackInstance) else lower_bound_s(instance)


def schedule_batch(instance: BatchInstance | PackInstance) -> BatchSchedule:
    """Return the micro-batches and groups of a batch.

    Raises:
        InfeasibleError: no schedule within `_SPAN` micro-batches more than the tokens need.
    """
    if isinstance(instance, PackInstance):
        return schedule_packs(instance)
    start = time.perf_counter()
    if not instance.waits:
        rounds = solve_without_waits(instance)
        return BatchSchedule(
            micro_batches=rounds,
            seconds=instance.step_s(rounds),
            bound_seconds=lower_bound_s(instance),
            solve_seconds=time.perf_counter() - start,
        )
    distinct = Distinct(instance)
    answer = (
        solve_exactly(instance)
        if num_steps(instance) <= MAX_STEPS
        else _deal(distinct, _best_filling(instance, distinct))
    )
    micro_batches = tuple(_placed(instance, groups) for groups in answer)
    return BatchSchedule(
        micro_batches=micro_batches,
        seconds=instance.step_s(micro_batches),
        bound_seconds=lower_bound_s(instance),
        solve_seconds=time.perf_counter() - start,
    )


@dataclass(frozen=True)
class _Filling:
    """Micro-batches under deadlines: their seconds and groups, longest first; ``total_s`` without what is fixed."""

    total_s: float
    micro_batches: list[tuple[float, Filled]]


def _under(d: Distinct, deadlines: Sequence[float]) -> _Filling | None:
    """Return what deadlines, longest first, come to; None where a sequence is left."""
    waiting, filled, remaining = list(d.counts), [], list(range(len(d.counts)))
    for deadline, later in zip(deadlines, [*deadlines[1:], -1.0], strict=True):
        micro_batch = fill(d, deadline, waiting, later, remaining)
        if micro_batch is None:
            return None
        remaining = [idx for idx in remaining if waiting[idx]]
        filled.append(micro_batch)
    return (
        None if remaining else _Filling(sum(seconds for seconds, _ in filled), [entry for entry in filled if entry[1]])
    )


def _best_filling(i: BatchInstance, d: Distinct) -> _Filling:
    """Return the best filling over numbers of micro-batches and shapes of their deadlines."""
    even_s = float((d.work * d.counts).sum()) / i.num_ranks
    best: tuple[float, _Filling] | None = None
    first = i.min_micro_batches
    count = first
    unlimited_s = float(np.dot(d.fastest, d.counts)) + i.num_ranks * even_s
    while best is None or (count < first + _SPAN and even_s + count * i.fixed_s < best[0]):
        if count > first + len(d.members):
            raise InfeasibleError(f"no schedule of {len(d.members)} sequences fits (C2)", help="take more ranks")
        if best is None and _under(d, [unlimited_s] * count) is None:
            count += 1  # memory is what lacks, whatever the deadlines
            continue
        for shape, low in _shapes(i, d, count, even_s):
            below_s = math.inf if best is None else best[0] - count * i.fixed_s
            filling = _scaled_down(d, shape, low, below_s)
            if filling is not None and filling.total_s < below_s:
                best = filling.total_s + count * i.fixed_s, filling
        count += 1
    return _lowered(d, best[1])


Shape = Callable[[float], list[float]]
"""Deadlines, longest first, by a factor."""


def _shapes(i: BatchInstance, d: Distinct, count: int, even_s: float) -> Iterator[tuple[Shape, float]]:
    """Yield shapes of ``count`` deadlines, each with the factor that its bisection begins at."""
    longest = max(d.fastest)

    def scaled(levels: list[float]) -> Shape:
        first, *others = sorted(levels, reverse=True)
        return lambda factor: [max(first * factor, longest), *(level * factor for level in others)]

    def around_longest(seconds: float) -> Shape:
        rest_s = max(even_s - seconds, 0.02 * even_s) / (count - 1)
        return lambda factor: sorted([seconds, *[rest_s * factor] * (count - 1)], reverse=True)

    yield scaled([even_s / count] * count), 0.98
    if count == 1:
        return
    for slack in (1.0, 0.9):
        levels = _cut_levels(d, count, slack)
        if levels is not None:
            yield scaled(levels), 0.98
    for seconds in d.seconds[0]:
        if seconds < 1.2 * even_s:
            yield around_longest(seconds), 1.0


def _cut_levels(d: Distinct, count: int, slack: float) -> list[float] | None:
    """Return the deadlines of ``count`` micro-batches that are cuts of the sorted sequences, by dynamic programming."""
    i = d.instance
    idx = np.repeat(np.arange(len(d.counts)), d.counts)
    cuts = np.unique(np.linspace(0, len(idx), min(len(idx), _MAX_CUTS) + 1).round().astype(int))
    work = np.concatenate([[0.0], np.cumsum(d.work[idx])])[cuts] / i.num_ranks
    tokens = np.concatenate([[0], np.cumsum(np.array(d.lengths)[idx])])[cuts]
    fastest = np.append(np.array(d.fastest)[idx], 0.0)[cuts]
    in_cut = tokens[None, :] - tokens[:, None]
    fits = (in_cut > 0) & (in_cut <= slack * i.num_ranks * i.tokens_per_rank)
    cost = np.where(fits, np.maximum(work[None, :] - work[:, None], fastest[:, None]), math.inf)
    best, chosen = cost[0], []
    for _ in range(count - 1):
        total = best[:, None] + cost
        chosen.append(total.argmin(axis=0))
        best = total.min(axis=0)
    if not math.isfinite(best[-1]):
        return None
    end, levels = len(cuts) - 1, []
    for back in reversed(chosen):
        levels.append(float(cost[back[end], end]))
        end = int(back[end])
    return [*levels, float(cost[0, end])]


def _scaled_down(d: Distinct, shape: Shape, low: float, below_s: float) -> _Filling | None:
    """Return the filling under the least factor of a shape that places every sequence, to `_TOLERANCE`.

    None where it takes deadlines whose sum is `_UNUSED` over ``below_s``: the seconds are rarely so much under their deadlines.
    """
    high, grow, best = low, 1.04, None
    while (best := _under(d, shape(high))) is None:
        low, high, grow = high, high * grow, min(grow * 1.1, 2.0)
        if sum(shape(high)) > _UNUSED * min(below_s, _MAX_GROWN * sum(shape(1.0))):
            return None
    while high / low - 1 > _TOLERANCE:
        middle = math.sqrt(low * high)
        filling = _under(d, shape(middle))
        if filling is None:
            low = middle
        else:
            high = middle
            best = min(best, filling, key=lambda entry: entry.total_s)
    return best


def _lowered(d: Distinct, best: _Filling) -> _Filling:
    """Lower one deadline after the other while that helps."""
    improves, longest, filled = True, max(d.fastest), 0
    while improves:
        improves = False
        for number in range(len(best.micro_batches)):
            for factor in _LOWERED:
                if filled > _MAX_FILLED:
                    return best
                deadlines = sorted((seconds for seconds, _ in best.micro_batches), reverse=True)
                if number >= len(deadlines) or (number == 0 and deadlines[0] * factor < longest):
                    continue
                deadlines[number] *= factor
                filling, filled = _under(d, sorted(deadlines, reverse=True)), filled + len(deadlines)
                if filling is not None and filling.total_s < best.total_s * (1 - SUMMED):
                    best, improves = filling, True
                    break
    return best


def _deal(d: Distinct, filling: _Filling) -> list[Groups]:
    """Return the sequences of each group of a filling."""
    waiting: list[list[int]] = [[] for _ in d.counts]
    for sequence, idx in enumerate(d.members.tolist()):
        waiting[idx].append(sequence)
    return [
        [
            (k, [waiting[idx].pop() for idx, number in entries(content) for _ in range(number)])
            for k, count, content in groups
            for _ in range(count)
        ]
        for _, groups in filling.micro_batches
    ]


def _placed(i: BatchInstance, groups: Groups) -> tuple[BatchGroup, ...]:
    """Return groups on ranks, the largest first, which aligns them (C6)."""
    placed, first = [], 0
    for k, sequences in sorted(groups, key=lambda group: -group[0]):
        seconds = float(i.seconds[sequences, k].sum())
        placed.append(BatchGroup(first, i.degrees[k], tuple(sorted(sequences)), seconds))
        first += i.degrees[k]
    return tuple(placed)
