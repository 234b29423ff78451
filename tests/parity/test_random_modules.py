"""Random graphs: every proved signature is right with any others, wrong ones are named, two ranks compute what one does."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import random_modules
from harness import run_group
from hypothesis import given, settings
from hypothesis import strategies as st
from random_modules import MAX_STEPS, OPS, Step
from zoo_plans import differences

STEPS = st.lists(
    st.builds(Step, st.sampled_from(OPS), st.integers(0, 7), st.integers(0, 7), st.integers(0, 3)),
    min_size=1, max_size=MAX_STEPS,
)  # fmt: skip


def check(steps: list[Step], seed: int) -> None:
    """Random placements are right, and the gate names what is planted in them."""
    units, whole = random_modules.gated(*random_modules.build(steps))
    chance = random.Random(seed)
    assert not whole
    for unit in units:
        for _ in range(2):
            assert unit.why_wrong(*unit.placed(chance)) is None
            if (plant := random_modules.planted(unit, chance)) is not None:
                name, signature, wrong = plant
                assert wrong is not None, (name, signature)
                assert wrong.node == name


@settings(max_examples=2, deadline=None, derandomize=True)
@given(STEPS, st.integers(0, 100))
def test_random_graphs_are_right_in_every_placement_and_wrong_ones_are_named(steps: list[Step], seed: int) -> None:
    check(steps, seed)


@pytest.mark.nightly
@settings(max_examples=25, deadline=None, derandomize=True)
@given(STEPS, st.integers(0, 100))
def test_more_random_graphs_are_right(steps: list[Step], seed: int) -> None:
    check(steps, seed)


@pytest.mark.long
def test_random_graphs_run_on_two_ranks_as_on_one(tmp_path: Path) -> None:
    """As the program places them, and in placements of any cost."""
    cases = [case for seed in range(6) for case in random_modules.cases_of(seed)]
    outcomes = run_group(2, cases, tmp_path)
    for case in cases:
        gradients = {key: grad for outcome in outcomes[case.name] for key, grad in outcome.gradients.items()}
        assert not differences(gradients, random_modules.alone(json.loads(case.module))), case.name
