"""Cuts and degrees of stages, against every cut and every degree."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from meshwright.solvers.backend import Status
from meshwright.solvers.stages.stage_degrees import DegreesOfStages, StageDegreesInstance, check, solve


def random_instance(seed: int) -> StageDegreesInstance:
    rng = np.random.default_rng(seed)
    num_degrees, num_stages, num_layers = int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(3, 7))
    shape = (num_degrees, num_stages, num_layers + 1, num_layers + 1)
    span = rng.uniform(1, 3, shape) * np.maximum(np.arange(num_layers + 1) - np.arange(num_layers + 1)[:, None], 0)
    span[span == 0] = np.inf
    span[rng.random(shape) < rng.choice([0.0, 0.2, 0.5])] = np.inf
    next_s = rng.uniform(0, 1, (num_degrees, num_degrees))
    np.fill_diagonal(next_s, 0.0)
    if num_degrees == 3:
        next_s[0, 2] = next_s[2, 0] = np.inf
    return StageDegreesInstance(span, next_s, float(rng.choice([0, 1, 4, 30])))


def everything(instance: StageDegreesInstance) -> list[DegreesOfStages]:
    num_degrees, num_stages, size = instance.span_s.shape[:3]
    inner = itertools.combinations(range(1, size - 1), num_stages - 1)
    degrees = list(itertools.product(range(num_degrees), repeat=num_stages))
    return [DegreesOfStages((0, *cut, size - 1), x) for cut, x in itertools.product(list(inner), degrees)]


@pytest.mark.parametrize("group", range(4))
def test_answer_equals_enumeration(group: int) -> None:
    num_solved = 0
    for seed in range(group, 240, 4):
        instance, values = random_instance(seed), []
        for choice in everything(instance):
            try:
                values.append(check(instance, choice))
            except ValueError as error:
                assert any(label in str(error) for label in ("(C2)", "(C3)"))
        solution = solve(instance)
        assert (solution.status is Status.OPTIMAL) == bool(values), seed
        if solution.choice is not None:
            num_solved += 1
            assert check(instance, solution.choice) == pytest.approx(solution.objective), seed
            assert solution.objective == pytest.approx(min(values), rel=1e-9), seed
    assert num_solved > 20


def test_check_names_what_an_answer_breaks() -> None:
    instance = StageDegreesInstance(np.ones((2, 2, 4, 4)), np.array([[0.0, np.inf], [1.0, 0.0]]), 3.0)
    assert check(instance, DegreesOfStages((0, 1, 3), (1, 0))) == 3 * 2 + 3
    for choice, label in ((DegreesOfStages((0, 0, 3), (0, 0)), "C1"), (DegreesOfStages((0, 1, 3), (0, 1)), "C3")):
        with pytest.raises(ValueError, match=label):
            check(instance, choice)
