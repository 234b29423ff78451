"""Fitting coefficients of entire steps: a planted one is found again, ranges and priors hold, nothing packaged changes."""

from __future__ import annotations

import numpy as np
import pytest
from meshwright.cost_models.coefficients import packaged_coefficients
from meshwright.fitting.steps import PRIOR_WEIGHT, Measured, errors, loss, priors, search_coefficients
from meshwright.schema import ClusterSpec, ConfigError, Layout, ModelSpec, Workload
from meshwright.validation.predict import RunInputs, estimate_runs

NAME = "sustained.hopper"


def runs(count: int = 3) -> Measured:
    """Runs whose times are those of a Hopper that sustains 0.8 of its short-benchmark rate."""
    model, cluster = ModelSpec.named("llama-3.1-8b"), ClusterSpec.parse("8xH100-SXM-80GB")
    inputs = tuple(
        RunInputs(
            model=model,
            cluster=cluster,
            workload=Workload(seq_len=4096, global_batch_size=8 * size, engine="megatron"),
            layout=Layout(dp_shard=8, zero_stage=1, micro_batch_size=size),
            balanced_stages=False,
        )
        for size in range(1, count + 1)
    )
    estimates = estimate_runs(inputs, packaged_coefficients().replaced({NAME: 0.8}))
    seconds = [estimate.step_time_s for estimate in estimates if not isinstance(estimate, str)]
    return Measured(("made",) * count, inputs, tuple(seconds))


def test_planted_coefficient_is_found_again() -> None:
    made = runs()
    fitted = search_coefficients({NAME: 0.95}, lambda values: loss(errors(made, values), values))
    assert fitted[NAME] == pytest.approx(0.8, rel=0.02)  # the last step of the search


def test_search_stays_within_the_physical_range() -> None:
    prior = priors()[NAME]
    assert search_coefficients({NAME: 0.9}, lambda values: values[NAME])[NAME] == prior.low
    assert search_coefficients({NAME: 0.9}, lambda values: -values[NAME])[NAME] == prior.high


def test_sources_count_alike_whatever_their_length() -> None:
    short, long = np.full(10, 0.1), np.full(1000, 0.3)
    assert loss({"short": short, "long": long}, {}) == pytest.approx(0.2)
    few = np.full(1, 0.1)
    assert loss({"few": few, "long": long}, {}) > 0.28


def test_prior_costs_nothing_at_its_value() -> None:
    prior = priors()[NAME]
    assert loss({"s": np.zeros(10)}, {NAME: prior.value}) == 0
    off = prior.value * np.exp(prior.width)
    assert loss({"s": np.zeros(10)}, {NAME: off}) == pytest.approx(PRIOR_WEIGHT)


@pytest.mark.parametrize("name", priors())
def test_prior_names_a_coefficient_within_its_range(name: str) -> None:
    prior, packaged = priors()[name], packaged_coefficients()
    assert prior.low <= packaged.value(name) <= prior.high
    assert prior.low <= prior.value <= prior.high
    assert all(packaged.value(path) == packaged.value(name) for path in prior.shared_with)


def test_other_coefficients_change_estimates_and_leave_the_packaged_ones() -> None:
    made = runs(1)
    before, packaged = errors(made, {})["made"], packaged_coefficients().value(NAME)
    assert errors(made, {NAME: 0.5 * packaged})["made"][0] > before[0]
    assert errors(made, {})["made"] == before
    assert packaged_coefficients().value(NAME) == packaged


def test_unknown_coefficient_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no coefficient host\\.none"):
        packaged_coefficients().replaced({"host.none": 1.0})
