"""Energy of a step: parts of the power limit by kind of work, bounded from below, refused where a limit is unknown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshwright.cost_models.stage.step import WORK, energy_j, min_energy_j, power_limit_w, step_energy_j
from meshwright.planner import estimate
from meshwright.schema import ClusterSpec, ConfigError
from meshwright.schema.training_plan import TimeBreakdown

CLUSTER = ClusterSpec.parse("16xH100-SXM-80GB")
SECONDS = st.floats(0, 1e3)
BREAKDOWNS = st.builds(TimeBreakdown, **dict.fromkeys(TimeBreakdown.model_fields, SECONDS))


def test_every_part_of_a_step_is_some_kind_of_work() -> None:
    parts = [part for parts in WORK.values() for part in parts]
    assert sorted(parts) == sorted(TimeBreakdown.model_fields)


@given(breakdown=BREAKDOWNS)
def test_energy_is_between_that_of_waiting_and_the_power_limit(breakdown: TimeBreakdown) -> None:
    joules, limit_w = energy_j(breakdown, CLUSTER), 16 * 700.0
    assert power_limit_w(CLUSTER) == limit_w
    assert joules <= limit_w * breakdown.total * (1 + 1e-12)
    assert joules >= min_energy_j(breakdown.total, breakdown.compute, CLUSTER) * (1 - 1e-12)


@given(breakdown=BREAKDOWNS, part=st.sampled_from(sorted(TimeBreakdown.model_fields)), more_s=SECONDS)
def test_more_of_any_work_takes_no_less_energy(breakdown: TimeBreakdown, part: str, more_s: float) -> None:
    longer = breakdown.replace(**{part: getattr(breakdown, part) + more_s})
    assert energy_j(longer, CLUSTER) >= energy_j(breakdown, CLUSTER)


def test_dense_training_on_h100_takes_close_to_the_boards_power() -> None:
    costs = estimate("llama-3.1-8b", CLUSTER, layout="dp_shard=16,zero=1", global_batch_size=64, seq_len=8192)
    watts = step_energy_j(costs, CLUSTER) / costs.step_time_s / CLUSTER.num_devices
    assert 0.8 * 700 < watts <= 700


def test_unknown_power_limit_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="the power limit of TPU-v5e is unknown"):
        power_limit_w(ClusterSpec.parse("16xTPU-v5e"))
