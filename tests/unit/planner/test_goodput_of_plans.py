"""Goodput of plans: policies, fallbacks, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from meshwright.cli.main import app
from meshwright.planner import plan
from meshwright.planner.goodput import expected_goodput
from meshwright.schema import ClusterSpec, ConfigError, ModelSpec, TrainingPlan, Workload
from meshwright.schema.goodput import Faults
from typer.testing import CliRunner

FAULTS = Faults(mtbf_hours_per_device=2_000, save_s=10, restart_s=300, repair_hours=12)


@pytest.fixture(scope="module")
def trained() -> TrainingPlan:
    workload = Workload(seq_len=4_096, global_batch_size=64)
    return plan(ModelSpec.named("llama-3.1-8b"), ClusterSpec.parse("32xH100-SXM-80GB"), workload)


def test_fallbacks_are_slower_plans_that_beat_waiting(trained: TrainingPlan) -> None:
    report = expected_goodput(trained, FAULTS.replace(tolerate=2))
    assert [entry.lost for entry in report.fallbacks] == [1, 2]
    steps = [trained.estimate.step_time_s, *(entry.step_s for entry in report.fallbacks)]
    assert steps == sorted(steps)
    assert report.falling_back is not None
    assert report.waiting < report.falling_back < report.goodput < 1
    assert report.interval_steps == round(report.interval_s / trained.estimate.step_time_s)


def test_more_spares_fewer_faults_and_shorter_saves_are_never_worse(trained: TrainingPlan) -> None:
    waiting = [expected_goodput(trained, FAULTS.replace(spares=count)).waiting for count in (0, 1, 4)]
    assert waiting == sorted(waiting)
    goodput = [expected_goodput(trained, FAULTS.replace(mtbf_hours_per_device=h)).goodput for h in (100, 1e3, 1e5)]
    assert goodput == sorted(goodput)
    saves = [expected_goodput(trained, FAULTS.replace(save_s=seconds)).goodput for seconds in (60, 10, 1)]
    assert saves == sorted(saves)


def test_the_command_prints_the_report_and_refuses_what_leaves_nothing(trained: TrainingPlan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    trained.save(path)
    words = ["goodput", str(path), "--mtbf-hours-per-device", "2000", "--save-s", "10", "--restart-s", "300"]
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["falling_back"] is None
    assert 0 < report["goodput"] < 1
    table = CliRunner().invoke(app, [*words, "--tolerate", "1"])
    assert "goodput, on what remains" in table.output
    refused = CliRunner().invoke(app, [*words, "--tolerate", "4"])
    assert refused.exit_code == 2
    assert "at most 3" in refused.output
    with pytest.raises(ConfigError):
        FAULTS.replace(save_s=0)
