"""The integer program of stage_program.py, for what dynamic programming leaves open: all terms of (O) at once.

Sets, data, variables, objective and constraints (O), (C1) .. (C6) are those of stage_program.py; the names here are its labels.
Only spans of which some answer below a given objective may consist are in the model: of each part of (O) the span has at least its
own, and the stages before and after it at least what dynamic programming finds for them.

    (C7) below: (O) <= the objective to beat
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .backend import Limits, LinearSolver, solve_linear
from .stage_program import NOTHING, UNKNOWN, FloatArray, Instance, IntArray, Solution, check, dense, forward
from .status import Status

if TYPE_CHECKING:
    import pulp

MAX_SPANS = 1500
"""Spans of a model at most: PuLP writes some 1e5 coefficients a second."""


@dataclass(frozen=True)
class Improvement:
    """A better answer, if there is one, and what no answer is better than."""

    solution: Solution
    bound_s: float


def improve(instance: Instance, *, below_s: float, limits: Limits, solver: LinearSolver = "highs") -> Improvement:
    """The best answer with (O) below ``below_s``.

    Infeasible with bound ``below_s`` where there is none; unknown with bound 0 where the model is too large or time is over.
    """
    spans = promising_spans(instance, below_s)
    if not len(spans):
        return Improvement(NOTHING, below_s)
    if len(spans) > MAX_SPANS:
        return Improvement(UNKNOWN, 0.0)
    problem, x, n = build_model(instance, spans, below_s)
    outcome = solve_linear(problem, limits, solver)
    if outcome.status is Status.INFEASIBLE:
        return Improvement(NOTHING, below_s)
    if outcome.objective is None:
        return Improvement(UNKNOWN, 0.0)
    bound_s = min(below_s, _scale_s(instance) * (outcome.bound if outcome.bound is not None else 0.0))
    boundaries, counts = _read(instance, x, n)
    try:
        objective_s = check(instance, boundaries, counts)
    except ValueError:  # rows may be broken by the solver's tolerance, and then nobody knows what is best within them
        return Improvement(UNKNOWN, 0.0)
    return Improvement(Solution(outcome.status, boundaries, counts, objective_s), bound_s)


def promising_spans(instance: Instance, below_s: float) -> IntArray:
    """Spans that an answer below ``below_s`` may have [P']."""
    table = dense(instance, instance.least_s)
    slowest = float(forward(table, np.maximum)[-1, -1])
    before, after = forward(table, np.add), backward(table)
    s, i, j = instance.stage, instance.first, instance.last
    total = before[s, i] + instance.least_s + after[s + 1, j]
    least = instance.slowest_weight * np.maximum(instance.least_s, slowest) + instance.sum_weight * total
    for once in instance.least_once_s:
        least = least + np.maximum(once, float(forward(dense(instance, once), np.maximum)[-1, -1]))
    return np.flatnonzero(least < below_s)


def backward(table: FloatArray) -> FloatArray:
    """Least sum [S+1, L+1] of stages s.. that hold the layers from each boundary on."""
    best = np.full((len(table) + 1, table.shape[1]), np.inf)
    best[-1, -1] = 0.0
    for s in reversed(range(len(table))):
        best[s] = np.min(table[s] + best[s + 1][None, :], axis=1)
    return best


def _scale_s(instance: Instance) -> float:
    finite = instance.least_s[np.isfinite(instance.least_s)]
    return float(finite.max()) or 1.0


def build_model(instance: Instance, spans: IntArray, below_s: float) -> tuple[pulp.LpProblem, Any, Any]:
    """The program over some spans, in units of the slowest span's seconds and of the largest layer's bytes."""
    import pulp

    problem = pulp.LpProblem("stages", pulp.LpMinimize)
    sets = range(len(instance.uses))
    x = {
        (int(p), w): problem.add_variable(f"x_{p}_{w}", cat="Binary")
        for p in spans
        for w in sets
        if instance.room_bytes[p, w] >= 0
    }
    stages, num_kinds, num_options = range(instance.num_stages), *instance.kept_bytes.shape
    n = {
        (s, k, o): problem.add_variable(f"n_{s}_{k}_{o}", lowBound=0, cat="Integer")
        for s in stages
        for k in range(num_kinds)
        for o in range(num_options)
    }
    scale, once_names = _scale_s(instance), range(len(instance.once_s))
    slowest = problem.add_variable("slowest", lowBound=0)
    once = [problem.add_variable(f"once_{q}", lowBound=0) for q in once_names]
    of_stage: dict[int, list[tuple[int, int]]] = {s: [] for s in stages}
    for p, w in x:
        of_stage[int(instance.stage[p])].append((p, w))

    def spent(s: int, fixed: FloatArray, each: FloatArray) -> pulp.LpAffineExpression:
        chosen = [(n[s, k, o], each[k, o] / scale) for k in range(num_kinds) for o in range(num_options)]
        return pulp.LpAffineExpression([(x[p, w], fixed[p] / scale) for p, w in of_stage[s]] + chosen)

    seconds = [spent(s, instance.fixed_s, instance.seconds[s]) for s in stages]
    objective = instance.slowest_weight * slowest + instance.sum_weight * pulp.lpSum(seconds) + pulp.lpSum(once)
    problem += objective, "O"
    _contiguous(problem, instance, x, of_stage)
    _filled(problem, instance, x, n, of_stage)
    for s in stages:
        problem += slowest >= seconds[s], f"C5_{s}"
        for q in once_names:
            problem += once[q] >= spent(s, instance.fixed_once_s[q], instance.once_s[q, s]), f"C6_{q}_{s}"
    problem += objective <= below_s / scale, "C7"
    return problem, x, n


def _contiguous(problem: Any, instance: Instance, x: Any, of_stage: dict[int, list[tuple[int, int]]]) -> None:
    import pulp

    def at(s: int, ends: IntArray, boundary: int) -> list[Any]:
        return [x[p, w] for p, w in of_stage[s] if ends[p] == boundary]

    last = instance.num_stages - 1
    problem += pulp.lpSum(at(0, instance.first, 0)) == 1, "C1_first"
    problem += pulp.lpSum(at(last, instance.last, instance.num_layers)) == 1, "C1_last"
    for s in range(instance.num_stages):
        problem += pulp.lpSum(x[p, w] for p, w in of_stage[s]) == 1, f"C1_{s}"
    for s in range(last):
        ends = {int(instance.last[p]) for p, _ in of_stage[s]} | {int(instance.first[p]) for p, _ in of_stage[s + 1]}
        for boundary in sorted(ends):
            joins = pulp.lpSum(at(s, instance.last, boundary)) - pulp.lpSum(at(s + 1, instance.first, boundary))
            problem += joins == 0, f"C1_{s}_{boundary}"


def _filled(problem: Any, instance: Instance, x: Any, n: Any, of_stage: dict[int, list[tuple[int, int]]]) -> None:
    import pulp

    num_kinds, num_options = instance.kept_bytes.shape
    if not num_kinds:
        return
    unit = float(instance.kept_bytes.max()) or 1.0
    most = (instance.counts * instance.kept_bytes.max(axis=1)).sum(axis=1)
    for s, chosen in of_stage.items():
        for k in range(num_kinds):
            problem += (
                (
                    pulp.lpSum(n[s, k, o] for o in range(num_options))
                    == pulp.lpSum(int(instance.counts[p, k]) * x[p, w] for p, w in chosen)
                ),
                f"C2_{s}_{k}",
            )
            for o in np.flatnonzero(~instance.uses.all(axis=0)):
                within = [int(instance.counts[p, k]) * x[p, w] for p, w in chosen if instance.uses[w, o]]
                problem += n[s, k, int(o)] <= pulp.lpSum(within), f"C3_{s}_{k}_{o}"
        kept = pulp.lpSum(
            instance.kept_bytes[k, o] / unit * n[s, k, o] for k in range(num_kinds) for o in range(num_options)
        )
        room = pulp.lpSum(min(instance.room_bytes[p, w], most[p]) / unit * x[p, w] for p, w in chosen)
        problem += kept <= room, f"C4_{s}"


def _read(instance: Instance, x: Any, n: Any) -> tuple[tuple[int, ...], IntArray]:
    """Boundaries and counts of a solved model."""
    chosen: Iterable[int] = sorted((p for (p, _), v in x.items() if v.value() > 0.5), key=lambda p: instance.stage[p])
    boundaries = (0, *(int(instance.last[p]) for p in chosen))
    counts = np.zeros((instance.num_stages, *instance.kept_bytes.shape), dtype=np.int64)
    for (s, k, o), variable in n.items():
        counts[s, k, o] = round(variable.value())
    return boundaries, counts
