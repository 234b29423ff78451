"""The stage split against brute force, against an integer program in PuLP, and its laws."""

from __future__ import annotations

import itertools

import numpy as np
import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.solvers.backend import Status
from meshwright.solvers.stages.splits import StageSplitInstance, check_stages, solve_stages


def random_instance(seed: int, *, num_layers: int, num_stages: int, density: float) -> StageSplitInstance:
    rng = np.random.default_rng(seed)
    size = num_layers + 1
    return StageSplitInstance(rng.uniform(0.1, 2.0, num_layers), rng.random((num_stages, size, size)) < density)


def brute_force(instance: StageSplitInstance) -> tuple[float, float] | None:
    """Least (slowest stage, sum of squares) over every split."""
    best = None
    for cuts in itertools.combinations(range(1, instance.num_layers), instance.num_stages - 1):
        boundaries = (0, *cuts, instance.num_layers)
        spans = list(itertools.pairwise(boundaries))
        if all(instance.fits[s, i, j] for s, (i, j) in enumerate(spans)):
            times = [float(instance.busy_s[i:j].sum()) for i, j in spans]
            key = (round(max(times), 9), round(sum(t * t for t in times), 9))
            best = key if best is None else min(best, key)
    return best


def integer_program(instance: StageSplitInstance) -> float | None:
    """The same problem as a set-partition program: one binary per (stage, span)."""
    n, stages = instance.num_layers, range(instance.num_stages)
    problem = pulp.LpProblem("stage_split", pulp.LpMinimize)
    spans = [(s, i, j) for s in stages for i in range(n) for j in range(i + 1, n + 1) if instance.fits[s, i, j]]
    x = {span: problem.add_variable("x_{}_{}_{}".format(*span), cat="Binary") for span in spans}
    slowest = problem.add_variable("slowest", lowBound=0)
    problem += slowest
    for s in stages:
        problem += pulp.lpSum(x[span] for span in spans if span[0] == s) == 1
        problem += slowest >= pulp.lpSum(instance.busy_s[i:j].sum() * x[k, i, j] for k, i, j in spans if k == s)
    for layer in range(n):
        problem += pulp.lpSum(x[s, i, j] for s, i, j in spans if i <= layer < j) == 1
    for s in stages:
        # Stages in order: stage s ends where stage s + 1 begins.
        if s + 1 < instance.num_stages:
            ends = pulp.lpSum(j * x[k, i, j] for k, i, j in spans if k == s)
            problem += ends == pulp.lpSum(i * x[k, i, j] for k, i, j in spans if k == s + 1)
    problem.solve(pulp.HiGHS(msg=False))
    return float(slowest.value()) if problem.sol_status == pulp.LpSolutionOptimal else None


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_layers=st.integers(2, 9),
    num_stages=st.integers(1, 5),
    density=st.sampled_from([0.5, 0.8, 1.0]),
)
def test_random_instance_equals_brute_force(seed: int, num_layers: int, num_stages: int, density: float) -> None:
    instance = random_instance(seed, num_layers=num_layers, num_stages=num_stages, density=density)
    expected, solution = brute_force(instance), solve_stages(instance)
    if expected is None:
        assert solution.status is Status.INFEASIBLE
        return
    assert solution.status is Status.OPTIMAL
    assert check_stages(instance, solution.choice) == pytest.approx(solution.objective, rel=1e-9)
    times = [instance.busy_s[i:j].sum() for i, j in itertools.pairwise(solution.choice)]
    assert (max(times), sum(t * t for t in times)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_random_instance_equals_integer_program(seed: int) -> None:
    instance = random_instance(seed, num_layers=10, num_stages=3, density=0.7)
    expected, solution = integer_program(instance), solve_stages(instance)
    if expected is None:
        assert solution.status is Status.INFEASIBLE
    else:
        assert solution.objective == pytest.approx(expected, rel=1e-6)


def test_equal_layers_split_evenly() -> None:
    instance = StageSplitInstance(np.ones(12), np.ones((4, 13, 13), dtype=bool))
    assert solve_stages(instance).choice == (0, 3, 6, 9, 12)


def test_more_stages_than_layers_is_infeasible() -> None:
    assert solve_stages(StageSplitInstance(np.ones(2), np.ones((3, 3, 3), dtype=bool))).status is Status.INFEASIBLE


@pytest.mark.parametrize(
    ("boundaries", "tag"), [((0, 2), "(C1)"), ((0, 3, 2, 4), "(C1)"), ((0, 1, 3), "(C1)"), ((0, 1, 4), "(C2)")]
)
def test_check_names_the_broken_constraint(boundaries: tuple[int, ...], tag: str) -> None:
    fits = np.ones((2, 5, 5), dtype=bool)
    fits[0, 0, 1] = False
    with pytest.raises(ValueError, match=tag.replace("(", r"\(").replace(")", r"\)")):
        check_stages(StageSplitInstance(np.ones(4), fits), boundaries)


def test_140_layers_on_70_stages_is_exact() -> None:
    """The largest size in use; the pigeonhole bound is reached."""
    solution = solve_stages(StageSplitInstance(np.ones(140), np.ones((70, 141, 141), dtype=bool)))
    assert solution.objective == 2.0


def stages_that_differ(seed: int) -> StageSplitInstance:
    rng = np.random.default_rng(seed)
    num_layers, num_stages = int(rng.integers(4, 9)), int(rng.integers(2, 5))
    size = num_layers + 1
    return StageSplitInstance(
        rng.uniform(0.1, 2.0, (num_stages, num_layers)),
        rng.random((num_stages, size, size)) < rng.choice([0.6, 1.0]),
        base_s=rng.uniform(0.0, 0.5, num_stages),
        rounds=float(rng.choice([0.0, 0.5, 1.0, 3.0, 31.0])),
    )


@pytest.mark.parametrize("seed", range(150))
def test_stages_that_differ_get_the_split_of_brute_force(seed: int) -> None:
    instance = stages_that_differ(seed)
    objectives = []
    for cuts in itertools.combinations(range(1, instance.num_layers), instance.num_stages - 1):
        try:
            objectives.append(check_stages(instance, (0, *cuts, instance.num_layers)))
        except ValueError:
            continue
    found = solve_stages(instance)
    assert (found.status is Status.INFEASIBLE) == (not objectives)
    if objectives:
        assert found.objective == pytest.approx(min(objectives), rel=1e-9)
        assert check_stages(instance, found.choice) == pytest.approx(found.objective, rel=1e-9)


@given(seed=st.integers(0, 10**6), rounds=st.sampled_from([0.0, 1.0, 15.0]))
@settings(deadline=None, max_examples=40)
def test_equal_stages_have_the_same_split_either_way(seed: int, rounds: float) -> None:
    """Where every stage is as fast as the others the sum is the same for every split, and (O') is least where (O) is."""
    alike = random_instance(seed, num_layers=9, num_stages=3, density=0.8)
    differ = StageSplitInstance(np.tile(alike.busy_s, (3, 1)), alike.fits, np.zeros(3), rounds)
    one, other = solve_stages(alike), solve_stages(differ)
    assert one.status == other.status
    if one.choice:
        assert other.objective == pytest.approx(rounds * one.objective + alike.busy_s.sum(), rel=1e-9)
