"""The program of placements against every choice of small graphs; its relaxation is integral."""

from __future__ import annotations

import itertools
import random

import pytest
from meshwright.solvers.placements import Choice, PlacementInstance, check, conversions, solve

FORMS = ("I", "R", "S0", "S1", "P")


def random_instance(seed: int, num_operators: int) -> PlacementInstance:
    """A graph of operators that read one or two of those before them, the last one read in form I."""
    chance = random.Random(seed)
    reads: list[list[tuple[int, int]]] = [[]]
    choices = [[Choice((), (form,), chance.random() / 4) for form in ("I", "S0")]]
    for idx in range(1, num_operators):
        read = [(chance.randrange(max(0, idx - 3), idx), 0) for _ in range(chance.choice((1, 1, 2)))]
        ways = {
            (tuple(chance.choice(FORMS) for _ in read), (chance.choice(FORMS),)): chance.random()
            for _ in range(chance.randint(1, 4))
        }
        reads.append(read)
        choices.append([Choice(ins, outs, seconds) for (ins, outs), seconds in ways.items()])
    reads.append([(num_operators - 1, 0)])
    choices.append([Choice(("I",), (), 0.0)])
    prices = {pair: chance.choice((0.05, 0.2, 0.6)) for pair in itertools.product(FORMS, FORMS)}
    return PlacementInstance(reads=reads, choices=choices, move_s=lambda value, t, u: prices[t, u] * (1 + value[0] % 3))


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_is_better(seed: int) -> None:
    instance = random_instance(seed, num_operators=6)
    solution = solve(instance)
    assert solution.choice is not None
    best = min(check(instance, choice) for choice in itertools.product(*(range(len(c)) for c in instance.choices)))
    assert solution.objective == pytest.approx(best, rel=1e-6)
    assert check(instance, solution.choice) == solution.objective
    assert solution.gap < 1e-6


def test_readers_share_a_conversion() -> None:
    choices = [[Choice((), ("S0",), 0.0)], *[[Choice(("I",), ("I",), 0.0)] for _ in range(3)]]
    instance = PlacementInstance(reads=[[], [(0, 0)], [(0, 0)], [(0, 0)]], choices=choices, move_s=lambda *_: 5.0)
    solution = solve(instance)
    assert solution.choice == [0, 0, 0, 0]
    assert conversions(instance, solution.choice) == [((0, 0), "S0", "I", 5.0)]
    assert solution.objective == solution.bound == 5.0


def test_a_choice_of_too_few_operators_is_refused() -> None:
    instance = random_instance(0, num_operators=3)
    with pytest.raises(ValueError, match=r"\(C1\)"):
        check(instance, [0])
