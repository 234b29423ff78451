"""Cut layers into contiguous stages and choose for each stage one of several degrees, such as its tensor-parallel ranks.

Sets
    l = 0..L-1   layers in order
    s = 0..S-1   stages in order
    d            degrees that a stage may have
Data
    SPAN[d,s,i,j]  seconds of one micro-batch of stage s with layers i..j-1 at degree d; infinite where it cannot hold them
    NEXT[d,e]      seconds that a stage of degree e adds behind one of degree d; infinite where they cannot follow one another
    ROUNDS         how often the slowest stage counts besides each stage's own time
Variables
    c[s]           boundaries 0 = c[0] < c[1] < ... < c[S] = L
    x[s]           degree of stage s
Objective
    (O)  min  ROUNDS max_s t[s] + sum_s t[s],  t[s] = SPAN[x[s],s,c[s],c[s+1]] + NEXT[x[s-1],x[s]]   (none for the first stage)
Constraints
    (C1) contiguous: every layer is on one stage, stages in order
    (C2) memory: SPAN is finite
    (C3) neighbours: NEXT is finite

Dynamic programming over (stage, boundary, degree), exact: the lowest sum under a cap on the slowest stage, and the cap lowered
below the slowest stage of the last answer until no lower cap can be better, as for stages that differ in splits.py.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...schema.units import FloatArray, IntArray
from ..backend import Solution, Status
from ..tolerances import ROUNDING


@dataclass(frozen=True)
class StageDegreesInstance:
    """SPAN [D, S, L+1, L+1], NEXT [D, D] and ROUNDS."""

    span_s: FloatArray
    next_s: FloatArray
    rounds: float


class DegreesOfStages(NamedTuple):
    """Boundaries [S+1] and an index into the degrees for each stage [S]."""

    boundaries: tuple[int, ...]
    degrees: tuple[int, ...]


def solve(instance: StageDegreesInstance) -> Solution[DegreesOfStages]:
    """Return the cut and degrees with the lowest (O)."""
    start = time.perf_counter()
    slowest, choice = _program(instance, np.maximum, np.inf)
    if choice is None:
        return Solution(status=Status.INFEASIBLE, choice=None, solve_s=time.perf_counter() - start)
    min_sum, _ = _program(instance, np.add, np.inf)
    best, rounds = check(instance, choice), instance.rounds
    cap = (best - min_sum) / rounds if rounds > 0 else np.inf
    while cap >= slowest * (1 - ROUNDING):
        total, answer = _program(instance, np.add, cap * (1 + ROUNDING))
        if answer is None or rounds * slowest + total >= best:
            break
        longest = max(stage_seconds(instance, answer))
        if rounds * longest + total < best:
            choice, best = answer, rounds * longest + total
        cap = longest * (1 - 4 * ROUNDING)  # below the longest stage of this answer, whatever ROUNDING let through
    return Solution(
        status=Status.OPTIMAL,
        choice=choice,
        objective=best,
        bound=best,
        solve_s=time.perf_counter() - start,
        backend="dynamic program",
    )


def _program(instance: StageDegreesInstance, combine: np.ufunc, cap: float) -> tuple[float, DegreesOfStages | None]:
    """Return the lowest combined seconds of stages none of which is above the cap, and an answer that has it."""
    num_degrees, num_stages, size = instance.span_s.shape[:3]
    best = np.full((num_degrees, size), np.inf)
    best[:, 0] = 0.0
    first = np.zeros_like(instance.next_s)
    came_from: list[tuple[IntArray, IntArray]] = []
    for stage in range(num_stages):
        added = instance.next_s if stage else first
        arriving = np.full((num_degrees, num_degrees, size), np.inf)  # from degree, to degree, end
        begins = np.zeros((num_degrees, num_degrees, size), dtype=np.int64)
        for d, e in itertools.product(range(num_degrees), repeat=2):
            if not np.isfinite(added[d, e]):
                continue
            seconds = instance.span_s[e, stage] + added[d, e]
            reached = combine(best[d][:, None], np.where(seconds <= cap, seconds, np.inf))
            begins[d, e] = np.argmin(reached, axis=0)
            arriving[d, e] = np.min(reached, axis=0)
        before = np.argmin(arriving, axis=0)
        best = np.min(arriving, axis=0)
        came_from.append((before, np.take_along_axis(begins, before[None], axis=0)[0]))
    last = int(np.argmin(best[:, -1]))
    if not np.isfinite(best[last, -1]):
        return np.inf, None
    value, boundaries, degrees = float(best[last, -1]), [size - 1], [last]
    for before, begin in reversed(came_from):
        degree, end = degrees[0], boundaries[0]
        boundaries.insert(0, int(begin[degree, end]))
        degrees.insert(0, int(before[degree, end]))
    return value, DegreesOfStages(tuple(boundaries), tuple(degrees[1:]))


def stage_seconds(instance: StageDegreesInstance, choice: DegreesOfStages) -> list[float]:
    """Return t of each stage."""
    boundaries, degrees = choice
    seconds = []
    for stage, (first, last) in enumerate(itertools.pairwise(boundaries)):
        added = float(instance.next_s[degrees[stage - 1], degrees[stage]]) if stage else 0.0
        seconds.append(float(instance.span_s[degrees[stage], stage, first, last]) + added)
    return seconds


def check(instance: StageDegreesInstance, choice: DegreesOfStages) -> float:
    """Recompute the objective (O) of an answer from the definition.

    Raises:
        ValueError: the answer breaks a constraint; the message names which.
    """
    boundaries, degrees = choice
    num_stages, size = instance.span_s.shape[1:3]
    is_rising = all(i < j for i, j in itertools.pairwise(boundaries))
    if len(degrees) != num_stages or (boundaries[0], boundaries[-1]) != (0, size - 1) or not is_rising:
        raise ValueError(f"contiguous (C1): boundaries {boundaries} of {num_stages} stages")
    if not np.all(np.isfinite([instance.next_s[pair] for pair in itertools.pairwise(degrees)])):
        raise ValueError(f"neighbours (C3): degrees {degrees}")
    seconds = stage_seconds(instance, choice)
    if not np.all(np.isfinite(seconds)):
        raise ValueError(f"memory (C2): stage {int(np.argmax(seconds))} cannot hold its layers")
    return instance.rounds * max(seconds) + sum(seconds)
