"""Intervals: they hold their prediction, and are wider where less is known."""

from __future__ import annotations

import math

import pytest
from meshwright.cost_models.coefficients import Scenario
from meshwright.cost_models.stage.step import MIN_LOG_WIDTH, time_interval, time_shares
from meshwright.schema import Calibration, ClusterSpec, Workload
from meshwright.schema.training_plan import TimeBreakdown

H100 = ClusterSpec.parse("8xH100-SXM-80GB")
MEGATRON = Workload(seq_len=4096, global_batch_size=64, engine="megatron")
KERNELS = TimeBreakdown(compute=1.0, recompute=0, tp=0, dp=0, pp=0, bubble=0, optimizer=0)
EXPOSED = TimeBreakdown(compute=0.7, recompute=0, tp=0.1, dp=0.1, pp=0.05, bubble=0.05, optimizer=0)


def width(parts: TimeBreakdown, cluster: ClusterSpec = H100, workload: Workload = MEGATRON) -> float:
    found = time_interval(parts, Scenario.build(workload, cluster))
    assert found.low < parts.total < found.high
    return math.log(found.high / found.low)


def test_shares_of_a_step_sum_to_one() -> None:
    assert sum(time_shares(EXPOSED).values()) == pytest.approx(1)


def test_communication_is_known_less_well_than_kernels() -> None:
    assert width(EXPOSED) > width(KERNELS)


def test_a_device_nobody_measured_has_a_wider_interval() -> None:
    assert width(KERNELS, ClusterSpec.parse("8xMI300X-192GB")) == pytest.approx(1.5 * width(KERNELS))


def test_measured_runs_of_the_cluster_set_the_width() -> None:
    close = H100.replace(calibration=Calibration(num_runs=20, spread=0.02))
    loose = H100.replace(calibration=Calibration(num_runs=20, spread=0.4))
    assert width(KERNELS, close) < width(KERNELS) < width(KERNELS, loose)
    exact = H100.replace(calibration=Calibration(num_runs=10**6, spread=1e-6))
    assert width(KERNELS, exact) == pytest.approx(2 * MIN_LOG_WIDTH)


def test_an_engine_that_scatters_has_widths_of_its_own() -> None:
    assert width(EXPOSED, workload=MEGATRON.replace(engine="nanotron")) > width(EXPOSED)
