"""The most informative products: each leaves the least variance, by the definition of a Gaussian process."""

from __future__ import annotations

import numpy as np
import pytest
from meshwright.cost_models.learned.calibration import (
    SHIPPED_COVARIANCE,
    candidate_shapes,
    covariance,
    greedy_choice,
    most_informative_shapes,
)
from meshwright.cost_models.learned.kernels import GemmDevice, GemmRates, features, known_coefficients, shipped_model


def posterior_variance(covariance, noise, chosen):
    """Variance of each candidate after those were measured, from the definition."""
    among = covariance[np.ix_(chosen, chosen)] + noise**2 * np.eye(len(chosen))
    across = covariance[:, chosen]
    return np.diag(covariance) - np.einsum("ij,ij->i", across @ np.linalg.inv(among), across)


def test_each_choice_leaves_the_least_variance():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(25, 2))
    covariance = np.exp(-0.5 * ((x[:, None] - x[None]) ** 2).sum(-1)) * np.outer(*(1 + rng.uniform(size=25),) * 2)
    chosen = greedy_choice(covariance, 0.1, 8)
    for step in range(8):
        options = [i for i in range(25) if i not in chosen[:step]]
        left = [posterior_variance(covariance, 0.1, [*chosen[:step], i]).sum() for i in options]
        assert chosen[step] == options[int(np.argmin(left))]


def test_more_are_not_chosen_than_there_are():
    assert sorted(greedy_choice(np.eye(3), 0.1, 10)) == [0, 1, 2]


@pytest.fixture
def rates() -> GemmRates:
    return GemmRates(known_coefficients("", "")[0], GemmDevice(9e14, 3.3e12, 132, 50e6), 0.0, 2.0)


def test_chosen_products_leave_less_to_be_unsure_of_than_the_same_number_at_random(rates):
    m, n, k = candidate_shapes(rates, seed=0, max_s=0.01, max_bytes=1e9)
    columns = features(m, n, k, rates)
    prior = covariance(columns, shipped_model("gemm").log_residual(columns), SHIPPED_COVARIANCE)
    chosen = most_informative_shapes(m, n, k, rates, 30)
    at_random = np.random.default_rng(0).permutation(len(m))[:30]
    noise = SHIPPED_COVARIANCE.noise
    assert posterior_variance(prior, noise, chosen).mean() < posterior_variance(prior, noise, at_random).mean()


def test_candidates_keep_to_limits_of_time_and_memory(rates):
    m, n, k = candidate_shapes(rates, seed=0, max_s=1e-4, max_bytes=1e8)
    assert len(m) > 100
    assert np.all(2 * (m * n + m * k + n * k) <= 1e8)
    assert np.all(2 * m * n * k / 9e14 <= 1e-4)
    assert not np.any(m % 8) and not np.any(n % 8) and not np.any(k % 8)
