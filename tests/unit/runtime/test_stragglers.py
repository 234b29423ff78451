"""Slow ranks are named, noise is not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.runtime.training.stragglers import stragglers


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


@given(seed=st.integers(0, 500), num_ranks=st.integers(2, 8))
@settings(max_examples=100, deadline=None)
def test_noise_alone_names_nobody(seed: int, num_ranks: int) -> None:
    assert (
        stragglers(steps(num_ranks, seed=seed, noise=0.1), np.zeros(num_ranks, dtype=np.int64), np.ones(num_ranks))
        == []
    )


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
