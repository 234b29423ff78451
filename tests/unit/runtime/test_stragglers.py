"""Slow ranks are named, noise is not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.runtime.training.metrics import FALSE_ALARMS, stragglers
from scipy.stats import binom


def steps(num_ranks: int, *, seed: int = 0, noise: float = 0.05, num_steps: int = 20) -> np.ndarray:
    return np.exp(np.random.default_rng(seed).normal(0, noise, (num_ranks, num_steps)))


@given(seed=st.integers(0, 200), rank=st.integers(0, 7), factor=st.floats(1.25, 4.0))
@settings(max_examples=60, deadline=None)
def test_slow_rank_among_equals_is_the_only_one_named(seed: int, rank: int, factor: float) -> None:
    compute_s = steps(8, seed=seed)
    compute_s[rank] *= factor
    found = stragglers(compute_s, np.zeros(8, dtype=np.int64), np.ones(8))
    assert [entry["rank"] for entry in found] == [rank]
    assert found[0]["slower_fraction"] == pytest.approx(factor - 1, abs=0.12 * factor)


@pytest.mark.parametrize(("num_ranks", "num_steps"), [(2, 8), (2, 20), (4, 9), (8, 20), (8, 200)])
def test_noise_alone_names_somebody_in_no_more_runs_than_stated(num_ranks: int, num_steps: int) -> None:
    """Noise as large as what is worth naming, with a heavy tail; 400 runs without a slow rank."""
    generator = np.random.default_rng(num_ranks * num_steps)
    alarms = 0
    for _ in range(400):
        compute_s = np.exp(0.1 * generator.standard_t(3, (num_ranks, num_steps)))
        alarms += bool(stragglers(compute_s, np.zeros(num_ranks, dtype=np.int64), np.ones(num_ranks)))
    assert alarms <= binom.ppf(0.999, 400, FALSE_ALARMS)


def test_fewer_steps_than_can_tell_a_slow_rank_from_chance_name_nobody() -> None:
    for num_ranks, enough in ((2, 8), (8, 10)):
        compute_s = steps(num_ranks, num_steps=enough)
        compute_s[0] *= 3
        stages = np.zeros(num_ranks, dtype=np.int64)
        assert [entry["rank"] for entry in stragglers(compute_s, stages, np.ones(num_ranks))] == [0]
        assert stragglers(compute_s[:, 1:], stages, np.ones(num_ranks)) == []


def test_few_disturbed_steps_do_not_make_a_slow_rank() -> None:
    compute_s = steps(4)
    compute_s[2, :6] *= 10
    assert stragglers(compute_s, np.zeros(4, dtype=np.int64), np.ones(4)) == []


def test_stages_of_unlike_work_are_compared_by_what_is_expected_of_them() -> None:
    compute_s = steps(4) * np.array([1.0, 3.0, 1.0, 1.0])[:, None]
    stages = np.arange(4)
    assert stragglers(compute_s, stages, np.array([1.0, 3.0, 1.0, 1.0])) == []
    assert [entry["rank"] for entry in stragglers(compute_s, stages, np.ones(4))] == [1]
    assert stragglers(compute_s, np.array([0, 1, 0, 1]), np.ones(4))[0]["rank"] == 1


@pytest.mark.parametrize("shape", [(1, 20), (4, 4), (4, 0)])
def test_too_little_to_compare_names_nobody(shape: tuple[int, int]) -> None:
    assert stragglers(np.ones(shape), np.zeros(shape[0], dtype=np.int64), np.ones(shape[0])) == []
