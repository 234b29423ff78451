"""Fitting coefficients of whole steps: a planted one is found again, ranges and priors hold, overrides leave no trace."""

from __future__ import annotations

import numpy as np
import pytest
from meshwright.cost_models.coefficients import coefficients, overridden, value_at
from meshwright.cost_models.layer.operators import layer_operators
from meshwright.fitting import coefficients as fit_coefficients
from meshwright.fitting.coefficients import PRIORS, Measured, errors, fit, loss
from meshwright.schema import ClusterSpec, ConfigError, Layout, ModelSpec, Workload
from meshwright.validation.inputs import RunInputs
from meshwright.validation.predict import estimate_runs

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
    with overridden({NAME: 0.8}):
        seconds = [estimate.step_time_s for estimate in estimate_runs(inputs) if not isinstance(estimate, str)]
    return Measured(("made",) * count, inputs, tuple(seconds))


def test_planted_coefficient_is_found_again() -> None:
    made = runs()
    found = fit({NAME: 0.95}, lambda values: loss(errors(made, values), values))
    assert found[NAME] == pytest.approx(0.8, rel=0.02)  # the last step of the search


def test_search_stays_within_the_physical_range() -> None:
    prior = PRIORS[NAME]
    assert fit({NAME: 0.9}, lambda values: values[NAME])[NAME] == prior.low
    assert fit({NAME: 0.9}, lambda values: -values[NAME])[NAME] == prior.high


def test_sources_count_alike_whatever_their_length() -> None:
    short, long = np.full(10, 0.1), np.full(1000, 0.3)
    assert loss({"short": short, "long": long}, {}) == pytest.approx(0.2)
    few = np.full(1, 0.1)
    assert loss({"few": few, "long": long}, {}) > 0.28


def test_prior_costs_nothing_at_its_value() -> None:
    prior = PRIORS[NAME]
    assert loss({"s": np.zeros(10)}, {NAME: prior.value}) == 0
    off = prior.value * np.exp(prior.width)
    assert loss({"s": np.zeros(10)}, {NAME: off}) == pytest.approx(fit_coefficients.PRIOR_WEIGHT)


@pytest.mark.parametrize("name", PRIORS)
def test_prior_names_a_coefficient_within_its_range(name: str) -> None:
    prior = PRIORS[name]
    assert prior.low <= value_at(name) <= prior.high
    assert prior.low <= prior.value <= prior.high
    assert all(value_at(path) == value_at(name) for path in prior.also)


def test_overrides_reach_remembered_results_and_leave_no_trace() -> None:
    block = ModelSpec.named("gpt2").block_runs[0][0]
    before, values = layer_operators(block, 768, 1024, unfused="fused"), coefficients()
    with overridden({"attention.fused_softmax_passes": [9.0, 9.0]}):
        assert layer_operators(block, 768, 1024, unfused="fused") != before
    assert layer_operators(block, 768, 1024, unfused="fused") == before
    assert coefficients() is values


def test_unknown_coefficient_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no coefficient host\\.none"), overridden({"host.none": 1.0}):
        pass
