"""The solvers' answers under one vocabulary: optimal, feasible, infeasible and unknown, with HiGHS and CP-SAT."""

from __future__ import annotations

import random

import pulp
import pytest
from meshwright.solvers.backend import (
    Limits,
    Status,
    new_constraint_program,
    solve_constraint_program,
    solve_linear,
)


def knapsack(size: int, rows: int) -> pulp.LpProblem:
    """Choose items worth most under several weights; the objective carries a constant of 7."""
    rng = random.Random(0)
    problem = pulp.LpProblem("knapsack", pulp.LpMaximize)
    take = [problem.add_variable(f"take_{i}", cat="Binary") for i in range(size)]
    problem += pulp.lpSum(rng.randint(100, 999) * x for x in take) + 7
    for row in range(rows):
        weights = [rng.randint(100, 999) for _ in take]
        problem += pulp.lpSum(w * x for w, x in zip(weights, take, strict=True)) <= sum(weights) // 2, f"weight_{row}"
    return problem


def market_split(size: int, rows: int) -> pulp.LpProblem:
    """Equal halves in every row: known for hiding its first solution for very long (Cornuejols and Dawande, 1998)."""
    rng = random.Random(1)
    problem = pulp.LpProblem("market", pulp.LpMinimize)
    take = [problem.add_variable(f"take_{i}", cat="Binary") for i in range(size)]
    problem += pulp.lpSum(take)
    for row in range(rows):
        weights = [rng.randint(0, 99) for _ in take]
        problem += pulp.lpSum(w * x for w, x in zip(weights, take, strict=True)) == sum(weights) // 2, f"half_{row}"
    return problem


def test_proved_answer_is_optimal_and_its_bound_is_the_objective() -> None:
    outcome = solve_linear(knapsack(12, 5), Limits(time_limit_s=20))
    assert outcome.status is Status.OPTIMAL
    assert outcome.objective == pytest.approx(4359)
    assert outcome.bound == pytest.approx(4359)
    assert outcome.gap == pytest.approx(0, abs=1e-9)


def test_contradiction_is_infeasible_and_has_no_objective() -> None:
    problem = knapsack(12, 5)
    problem += pulp.lpSum(problem.variables()) >= 13, "more than there are"
    outcome = solve_linear(problem, Limits(time_limit_s=20))
    assert (outcome.status, outcome.objective, outcome.bound) == (Status.INFEASIBLE, None, None)


def test_incumbent_at_the_time_limit_is_feasible_although_pulp_says_optimal() -> None:
    problem = knapsack(200, 30)
    outcome = solve_linear(problem, Limits(time_limit_s=1))
    assert outcome.status is Status.FEASIBLE
    assert pulp.LpStatus[problem.status] == "Optimal"
    assert outcome.objective is not None
    assert outcome.bound is None or outcome.bound >= outcome.objective


def test_no_incumbent_at_the_time_limit_is_unknown_although_pulp_has_a_number() -> None:
    problem = market_split(50, 7)
    outcome = solve_linear(problem, Limits(time_limit_s=0.3))
    assert (outcome.status, outcome.objective) == (Status.UNKNOWN, None)
    assert pulp.value(problem.objective) is not None


def test_answer_within_an_allowed_gap_is_not_called_proved() -> None:
    outcome = solve_linear(knapsack(60, 10), Limits(time_limit_s=20, rel_gap=0.2))
    assert outcome.status is Status.FEASIBLE
    assert 0 < outcome.gap <= 0.2


def test_program_without_integers_has_its_objective_as_bound() -> None:
    problem = pulp.LpProblem("continuous", pulp.LpMinimize)
    x = problem.add_variable("x", lowBound=2.5)
    problem += x
    outcome = solve_linear(problem, Limits(time_limit_s=5))
    assert (outcome.status, outcome.objective, outcome.bound) == (Status.OPTIMAL, 2.5, 2.5)


def test_constraint_program_is_solved_and_gives_its_values() -> None:
    model = new_constraint_program()
    x = model.new_int_var(0, 10, "x")
    model.add(3 * x <= 20)
    model.maximize(x)
    outcome, solver = solve_constraint_program(model, Limits(time_limit_s=10))
    assert (outcome.status, outcome.objective, outcome.bound, solver.value(x)) == (Status.OPTIMAL, 6, 6, 6)


def test_impossible_constraint_program_is_infeasible() -> None:
    model = new_constraint_program()
    x = model.new_int_var(0, 10, "x")
    model.add(2 * x == 3)
    outcome, _ = solve_constraint_program(model, Limits(time_limit_s=10))
    assert (outcome.status, outcome.objective, outcome.bound) == (Status.INFEASIBLE, None, None)


@pytest.mark.parametrize("with_hint", [True, False])
def test_constraint_program_stopped_by_work_is_feasible_from_its_hint_and_unknown_without(with_hint: bool) -> None:
    rng = random.Random(1)
    size, rows = 60, 8
    hidden = [rng.randint(0, 1) for _ in range(size)]
    model = new_constraint_program()
    take = [model.new_bool_var(f"take_{i}") for i in range(size)]
    for _ in range(rows):
        weights = [rng.randint(0, 99) for _ in take]
        model.add(
            sum(w * x for w, x in zip(weights, take, strict=True))
            == sum(w * h for w, h in zip(weights, hidden, strict=True))
        )
    model.minimize(sum(take))
    for x, value in zip(take, hidden, strict=True):
        if with_hint:
            model.add_hint(x, value)
    outcome, _ = solve_constraint_program(model, Limits(time_limit_s=30, work_limit=0.2))
    assert outcome.status is (Status.FEASIBLE if with_hint else Status.UNKNOWN)
    assert (outcome.objective is not None) == with_hint
