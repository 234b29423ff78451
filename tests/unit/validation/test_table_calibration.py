"""Calibration: known ratios come out again, nothing is changed without need, one odd run does not decide."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from meshwright.planner import estimate
from meshwright.schema import Calibration, ClusterSpec, Layout, ModelSpec, TrainingEstimate, Workload
from meshwright.schema.profile import MAX_RATIO
from meshwright.schema.task import Precision
from meshwright.validation import RunInputs
from meshwright.validation.table_calibration import PRIORS, MeasuredRun, calibrate, estimates_with

LAYOUTS = (
    "tp=8,dp_shard=2", "tp=4,dp_shard=4,recompute=full", "tp=2,pp=2,dp_shard=4", "dp_shard=16,recompute=full",
    "dp_shard=16", "tp=2,dp_shard=8", "tp=1,pp=4,dp_shard=4", "tp=8,pp=2", "dp_shard=8,dp_replicate=2", "tp=4,pp=4",
)  # fmt: skip


def runs_at(
    truth: Calibration,
    *,
    noise: float = 0.0,
    device: str = "A100-SXM-80GB",
    precision: Precision = "bf16-mixed",
    model: str = "llama-3.1-8b",
) -> list[MeasuredRun]:
    """Runs that a machine with ``truth`` would have measured."""
    spec, cluster = ModelSpec.named(model), ClusterSpec.parse(f"2x8x{device}/ib200")
    seq_len = 2048 if precision == "bf16-mixed" and "A100" in device else 8192
    workload = Workload(seq_len=seq_len, global_batch_size=64, engine="megatron", precision=precision)
    bare = [
        MeasuredRun(RunInputs(spec, cluster, workload, Layout.parse(text), balanced_stages=True), 1.0, None, None)
        for text in LAYOUTS
    ]
    scatter = np.exp(np.random.default_rng(0).normal(0, noise, len(bare)))
    measured = [e for e in estimates_with(bare, truth) if isinstance(e, TrainingEstimate)]
    assert len(measured) == len(bare)
    return [
        replace(run, step_time_s=e.step_time_s * factor, allocated_bytes=float(e.peak_allocated_bytes))
        for run, e, factor in zip(bare, measured, scatter, strict=True)
    ]


def calibrated(runs: list[MeasuredRun]) -> Calibration:
    """The calibration of the first of some runs, which are of one model."""
    return calibrate(runs).of_run(runs[0].inputs)


def error(runs: list[MeasuredRun], calibration: Calibration) -> float:
    estimates = [e for e in estimates_with(runs, calibration) if isinstance(e, TrainingEstimate)]
    return float(np.mean([abs(e.step_time_s / run.step_time_s - 1) for e, run in zip(estimates, runs, strict=True)]))  # type: ignore[operator]


def test_runs_as_predicted_change_nothing() -> None:
    calibration = calibrated(runs_at(Calibration()))
    assert [getattr(calibration, name) for name in ("products", "host", "scale_out")] == pytest.approx(
        [1, 1, 1], abs=1e-3
    )
    assert calibration.activations == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    "truth",
    [
        Calibration(products=0.85),
        Calibration(products=0.75),
        Calibration(scale_out=0.4),
        Calibration(products=0.9, elementwise=0.8, scale_up=0.7),
    ],
)
def test_a_slower_machine_is_recognised_from_its_runs(truth: Calibration) -> None:
    runs = runs_at(truth)
    calibration = calibrated(runs)
    assert error(runs, calibration) < 0.4 * error(runs, Calibration())
    assert calibration.error_after is not None
    assert calibration.error_before is not None
    assert calibration.error_after < calibration.error_before


def test_slower_products_in_fp8_leave_those_in_bf16() -> None:
    truth = Calibration(fp8_products=0.7)
    in_fp8, in_bf16 = (
        runs_at(truth, device="H100-SXM-80GB", precision=precision) for precision in ("fp8", "bf16-mixed")
    )
    found = calibrate(in_fp8[::2] + in_bf16[::2])
    calibration = found.ratios
    assert calibration.fp8_products < 0.9
    assert calibration.products == pytest.approx(1, abs=0.05)
    assert calibration.fp4_products == 1
    assert error(in_fp8[1::2], found.of_run(in_fp8[1].inputs)) < 0.6 * error(in_fp8[1::2], Calibration())


def test_noise_alone_does_not_make_predictions_much_worse() -> None:
    calibration = calibrated(runs_at(Calibration(), noise=0.05))
    assert error(runs_at(Calibration()), calibration) < 0.04


def test_what_one_model_was_off_by_is_learned_for_it_and_less_for_others() -> None:
    small, large = runs_at(Calibration()), runs_at(Calibration(), model="llama-2-70b")
    slow = [replace(run, step_time_s=1.2 * (run.step_time_s or 0)) for run in small]
    found = calibrate(slow[::2] + large[::2])
    assert error(slow[1::2], found.of_run(slow[0].inputs)) < 0.06
    assert error(large[1::2], found.of_run(large[0].inputs)) < 0.06
    between = error(slow[1::2], found.ratios), error(large[1::2], found.ratios)
    assert min(between) > 0.03  # no ratio fits both


def test_one_odd_run_does_not_decide() -> None:
    runs = runs_at(Calibration(products=0.9))
    runs[0] = replace(runs[0], step_time_s=1.7 * (runs[0].step_time_s or 0))
    assert error(runs[1:], calibrated(runs)) < error(runs[1:], Calibration())


def test_runs_far_from_the_predicted_give_a_calibration_within_its_bounds() -> None:
    runs = [replace(run, step_time_s=40 * (run.step_time_s or 0)) for run in runs_at(Calibration())]
    calibration = calibrated(runs)
    assert error(runs, calibration) < error(runs, Calibration())
    assert all(1 / MAX_RATIO <= getattr(calibration, name) <= MAX_RATIO for name in PRIORS)


def test_measured_memory_corrects_the_activations() -> None:
    runs = runs_at(Calibration(activations=1.3))
    assert calibrated(runs).activations == pytest.approx(1.3, rel=0.1)


def test_peaks_that_agree_in_nothing_change_no_memory() -> None:
    runs = runs_at(Calibration())
    factors = np.where(np.arange(len(runs)) % 2, 1.5, 0.7)
    odd = [replace(run, allocated_bytes=f * (run.allocated_bytes or 0)) for run, f in zip(runs, factors, strict=True)]
    found = calibrated(odd)
    before, after = (
        np.mean([abs(np.log(e.peak_allocated_bytes / run.allocated_bytes)) for e, run in zip(of, odd, strict=True)])  # type: ignore[union-attr,operator]
        for of in (estimates_with(odd, Calibration()), estimates_with(odd, found))
    )
    assert after <= before


def test_an_estimate_carries_the_calibration_of_its_cluster() -> None:
    model, cluster = ModelSpec.named("llama-3.1-8b"), ClusterSpec.parse("8xH100-SXM-80GB")
    workload, layout = Workload(seq_len=4096, global_batch_size=64), Layout.parse("dp_shard=8")
    plain = estimate(model, cluster, workload, layout)
    slower = estimate(model, cluster.replace(calibration=Calibration(products=0.5)), workload, layout)
    assert slower.step_time_s > plain.step_time_s
    assert (
        ClusterSpec(**cluster.replace(calibration=Calibration(products=0.5)).model_dump()).calibration.products == 0.5
    )
