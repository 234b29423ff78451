"""Runs correct a profile: what is read from parts, and that a second estimate is never worse."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from meshwright.cli.validate import calibrate
from meshwright.planner import plan
from meshwright.planner.planned_stages import reestimate
from meshwright.schema import Calibration, ConfigError, Layout, TrainingPlan, Workload
from meshwright.schema.profile import CollectivePoint, Machine, MatmulPoint, Profile
from meshwright.validation.run_calibration import PlanRun, calibrate_from_runs, read_run
from plans import cpu_cluster, make_plan, tiny_model
from tiers import drawn
from typer import Typer
from typer.testing import CliRunner

LAYOUTS = (Layout(dp_replicate=2), Layout(dp_shard=2, zero_stage=3), Layout(tp=2), Layout(pp=2))
CLUSTER = cpu_cluster(2)


def plans() -> list[TrainingPlan]:
    workload = Workload(seq_len=64, global_batch_size=8, precision="fp32")
    model = tiny_model(num_blocks=4, vocab_size=256, hidden_dim=128, ffn_dim=512)
    made = [make_plan(model, layout, workload=workload) for layout in LAYOUTS]
    return [plan.replace(cluster=CLUSTER, estimate=reestimate(plan, CLUSTER)) for plan in made]


def run_of(plan: TrainingPlan, *, kernels: float = 1.0, links: float = 1.0, memory: float = 1.0) -> PlanRun:
    """What a machine with slower kernels and links would measure."""
    parts = plan.estimate.breakdown_s
    compute, sent = kernels * (parts.compute + parts.recompute), links * (parts.tp + parts.cp + parts.ep + parts.dp)
    rest = parts.pp + parts.bubble + parts.optimizer
    measured = {"compute": compute, "communication": sent, "optimizer": parts.optimizer}
    return PlanRun(plan, measured, compute + sent + rest, memory * plan.estimate.peak_reserved_bytes)


def errors(runs: list[PlanRun], calibration: Calibration) -> np.ndarray:
    cluster = CLUSTER.replace(calibration=calibration)
    return np.abs([np.log(reestimate(run.plan, cluster).step_time_s / run.step_time_s) for run in runs])


def test_a_plan_with_an_order_of_its_own_is_estimated_by_it() -> None:
    workload = Workload(seq_len=64, global_batch_size=8, precision="fp32")
    fixed = {"pp": 2, "schedule": "synthesised"}
    made = plan(tiny_model(num_blocks=4, vocab_size=256), CLUSTER, workload, fixed=fixed)
    assert made.pipeline_order
    assert reestimate(made, CLUSTER).step_time_s == pytest.approx(made.estimate.step_time_s, rel=1e-9)
    assert calibrate_from_runs([run_of(made, kernels=1.5)], CLUSTER).num_runs == 1


def test_slower_kernels_and_links_are_told_apart() -> None:
    runs = [run_of(plan, kernels=2.0, links=1.0) for plan in plans()[:3]]
    calibration = calibrate_from_runs(runs, CLUSTER)
    assert calibration.products == pytest.approx(0.5, rel=0.1)
    assert calibration.products == calibration.attention == calibration.elementwise == calibration.host
    assert calibration.scale_up == pytest.approx(1.0, rel=0.1)
    assert errors(runs, calibration).max() < 0.1 < errors(runs, Calibration()).min()


@drawn(
    few=8,
    many=25,
    kernels=st.floats(0.4, 4.0),
    links=st.floats(0.3, 6.0),
    memory=st.floats(0.6, 2.0),
    which=st.integers(0, 3),
)
def test_second_estimate_of_the_same_plan_is_at_least_as_accurate(
    kernels: float, links: float, memory: float, which: int
) -> None:
    run = run_of(plans()[which], kernels=kernels, links=links, memory=memory)
    calibration = calibrate_from_runs([run], CLUSTER)
    assert errors([run], calibration)[0] <= errors([run], Calibration())[0] + 1e-9
    after = reestimate(run.plan, CLUSTER.replace(calibration=calibration)).peak_reserved_bytes
    assert abs(np.log(after / run.reserved_bytes)) <= abs(np.log(memory)) + 1e-9


def test_a_second_calibration_does_not_build_on_the_first() -> None:
    runs = [run_of(plan, kernels=1.7) for plan in plans()]
    first = calibrate_from_runs(runs, CLUSTER)
    assert calibrate_from_runs(runs, CLUSTER.replace(calibration=first)) == first
    assert first.error_after is not None
    assert first.error_after < first.error_before


def test_run_of_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"took 99 times its predicted step"):
        run = run_of(plans()[0])
        calibrate_from_runs([PlanRun(run.plan, run.terms_s, 99 * run.step_time_s, run.reserved_bytes)], CLUSTER)
    with pytest.raises(ConfigError, match="no run"):
        calibrate_from_runs([], CLUSTER)


def saved_run(folder: Path, plan: TrainingPlan) -> tuple[Path, Path]:
    run = run_of(plan, kernels=2.0)
    predicted = {"tokens_per_s": plan.estimate.tokens_per_s, "step_time_s": plan.estimate.step_time_s}
    measured = {"parts_s": run.terms_s, "step_time_s": run.step_time_s, "peak_reserved_bytes": run.reserved_bytes}
    paths = folder / "plan.json", folder / "metrics.jsonl"
    plan.save(paths[0])
    paths[1].write_text('{"step": 1}\n' + json.dumps({"predicted": predicted, "measured": measured}) + "\n")
    return paths


def test_command_writes_a_sealed_profile(tmp_path: Path) -> None:
    plan = plans()[0]
    machine = Machine(device="cpu", num_devices=2, host_memory_bytes=2**34, backend="gloo", torch="2", python="3.11")
    profile = Profile(
        machine=machine, created="2026-01-01", duration_s=1.0, memory_bandwidth_bytes_per_s=1e10,
        device_memory_bytes=2**33, matmuls=(MatmulPoint(dtype="fp32", m=64, n=64, k=64, time_s=1e-4),),
        collectives=(CollectivePoint(op="p2p", group_size=2, size_bytes=64, time_s=1e-4),),
    )  # fmt: skip
    files = saved_run(tmp_path, plan.replace(cluster=CLUSTER.replace(profile=profile)))
    app, out = Typer(), tmp_path / "profile.json"
    app.command()(calibrate)
    result = CliRunner().invoke(app, [*map(str, files), "--out", str(out)])
    assert result.exit_code == 0, result.stderr
    written = Profile.load(out)
    assert written.calibration.products == pytest.approx(0.5, rel=0.2)
    assert not written.is_altered
    assert written.content_sha256


def test_metrics_that_end_early_or_belong_to_another_plan_are_refused(tmp_path: Path) -> None:
    plan, metrics = saved_run(tmp_path, plans()[0])
    with pytest.raises(ConfigError, match="data sheets"):
        from meshwright.cli.options import ProfileOptions
        from meshwright.cli.validate import _profiled_cluster

        _profiled_cluster(read_run(plan, metrics).plan.cluster, ProfileOptions())
    metrics.write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="does not end with a comparison"):
        read_run(plan, metrics)
    metrics.write_text(
        '{"predicted": {"tokens_per_s": 1, "step_time_s": 1}, "measured": {"parts_s": {"compute": 1}}}\n'
    )
    with pytest.raises(ConfigError, match="of another plan"):
        read_run(plan, metrics)
