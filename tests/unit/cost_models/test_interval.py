"""Intervals: they hold their prediction, and are wider for each cause of error that a prediction knows of."""

from __future__ import annotations

import math
from typing import Any

import pytest
from meshwright.cost_models.coefficients import Scenario, packaged_coefficients
from meshwright.cost_models.stage.interval import (
    CAUSES,
    MIN_LOG_WIDTH,
    Basis,
    peak_interval,
    time_interval,
    widened,
)
from meshwright.schema import Calibration, ClusterSpec, ModelSpec, Workload
from meshwright.schema.training_plan import Interval, TimeBreakdown

H100 = ClusterSpec.parse("8xH100-SXM-80GB")
MEGATRON = Workload(seq_len=4096, global_batch_size=64, engine="megatron")
KERNELS = TimeBreakdown(compute=1.0, recompute=0, tp=0, dp=0, pp=0, bubble=0, optimizer=0)
EXPOSED = TimeBreakdown(compute=0.7, recompute=0, tp=0.1, dp=0.1, pp=0.05, bubble=0.05, optimizer=0)


def basis(cluster: ClusterSpec = H100, workload: Workload = MEGATRON, **changes: Any) -> Basis:
    known = Basis(
        model=ModelSpec.named("llama-3.1-8b"),
        scenario=Scenario.build(workload, cluster),
        terms=KERNELS,
        zero_stage=1,
        offloads=False,
    )
    return known._replace(**changes)


def width(known: Basis) -> float:
    interval = time_interval(known)
    assert interval.low < known.terms.total < interval.high
    return math.log(interval.high / interval.low)


@pytest.mark.parametrize(
    ("cause", "worse"),
    [
        ("exposed", basis(terms=EXPOSED)),
        ("architecture", basis(ClusterSpec.parse("8xB200-SXM-180GB"))),
        ("own_host", basis(ClusterSpec.parse("4xGH200-96GB"))),
        ("engine", basis(workload=MEGATRON.replace(engine="nanotron"))),
        ("code", basis(workload=MEGATRON.replace(engine="fsdp2", fusion="compiled"))),
        ("hooks", basis(zero_stage=3)),
        ("experts", basis(model=ModelSpec.named("mixtral-8x7b"))),
        ("host_states", basis(offloads=True)),
    ],
)
def test_each_cause_of_error_widens_the_interval_by_its_width(cause: str, worse: Basis) -> None:
    present = {name: x(worse) for name, x in CAUSES.items() if name != "noise" and x(worse)}
    assert set(present) == {cause}
    widths = packaged_coefficients()["interval"]["time"]["width"]
    high = math.log(time_interval(worse).high / worse.terms.total)
    assert high == pytest.approx(math.hypot(widths["noise"], widths[cause] * present[cause]))
    assert width(worse) > width(basis())


def test_an_architecture_without_measured_products_is_less_certain_still() -> None:
    blackwell, cdna = (basis(ClusterSpec.parse(text)) for text in ("8xB200-SXM-180GB", "8xMI300X-192GB"))
    assert width(basis()) < width(blackwell) < width(cdna)


def test_what_is_not_known_makes_runs_slower_rather_than_faster() -> None:
    interval = time_interval(basis(zero_stage=3))
    assert math.log(interval.high) > -math.log(interval.low)


def test_measured_runs_of_the_cluster_set_the_width() -> None:
    close = H100.replace(calibration=Calibration(num_runs=20, spread=0.02))
    loose = H100.replace(calibration=Calibration(num_runs=20, spread=0.4))
    assert width(basis(close)) < width(basis()) < width(basis(loose))
    exact = H100.replace(calibration=Calibration(num_runs=10**6, spread=1e-6))
    assert width(basis(exact)) == pytest.approx(2 * MIN_LOG_WIDTH)


def test_a_peak_of_an_engine_with_few_runs_is_less_certain() -> None:
    known, rare = (
        peak_interval(1e10, Scenario.build(w, H100)) for w in (MEGATRON, MEGATRON.replace(engine="nanotron"))
    )
    assert rare.low < known.low < 1e10 < known.high < rare.high


def test_independent_causes_add_as_squares() -> None:
    interval = widened(Interval(low=math.exp(-0.3), high=math.exp(0.4)), 1.0, 0.3)
    assert interval.high == pytest.approx(math.exp(0.5))
    assert interval.low == pytest.approx(math.exp(-math.hypot(0.3, 0.3)))
