"""Goodput of plans: policies, fallbacks, and the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from meshwright.cli.main import app
from meshwright.cost_models.goodput import MTBF_HOURS_PER_DEVICE, best_interval_s
from meshwright.planner import plan
from meshwright.planner.fallbacks import check
from meshwright.planner.goodput import expected_goodput, tolerant
from meshwright.planner.rerouting import break_even_s, lost_stages, rerouted_step_s, why_not_rerouted
from meshwright.planner.spot import Costs, going_on, plans_by_units, replay_pool
from meshwright.schema import ClusterSpec, ConfigError, ModelSpec, TrainingPlan, Workload
from meshwright.schema.goodput import Faults
from meshwright.schema.machines_file import Change, read_pools
from typer.testing import CliRunner

FAULTS = Faults(mtbf_hours_per_device=2_000, save_s=10, restart_s=300, repair_hours=12)


@pytest.fixture(scope="module")
def trained() -> TrainingPlan:
    workload = Workload(seq_len=4_096, global_batch_size=64)
    return plan(ModelSpec.named("llama-3.1-8b"), ClusterSpec.parse("32xH100-SXM-80GB"), workload)


@pytest.mark.long
def test_fallbacks_are_slower_plans_that_beat_waiting(trained: TrainingPlan) -> None:
    report = expected_goodput(trained, FAULTS.replace(tolerate=2))
    assert [entry.lost for entry in report.fallbacks] == [1, 2]
    steps = [trained.estimate.step_time_s, *(entry.step_s for entry in report.fallbacks)]
    assert steps == sorted(steps)
    assert report.falling_back is not None
    assert report.waiting < report.falling_back < report.goodput < 1
    assert report.interval_steps == round(report.interval_s / trained.estimate.step_time_s)


@pytest.mark.long
def test_spares_may_outnumber_the_nodes_of_a_plan(trained: TrainingPlan) -> None:
    report = expected_goodput(trained, FAULTS.replace(tolerate=1, spares=64))
    few = expected_goodput(trained, FAULTS.replace(tolerate=1, spares=1))
    assert report.fallbacks[0].share_of_time < few.fallbacks[0].share_of_time
    assert few.waiting < report.waiting == pytest.approx(report.goodput)


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


def test_a_tolerant_plan_holds_its_states_twice_and_brings_plans_that_verify(
    trained: TrainingPlan, tmp_path: Path
) -> None:
    """One replica costs little speed and spares the copies and what they lose."""
    faults = FAULTS.replace(tolerate=1)
    chosen = tolerant([trained], faults)
    assert not check(chosen, chosen.fallbacks)
    assert [each.cluster.num_nodes for each in chosen.fallbacks] == [3]
    report = expected_goodput(chosen, faults)
    assert report.falling_back is not None
    assert report.going_on is not None
    assert report.waiting < report.falling_back < report.going_on
    other = chosen.fallbacks[0].workload.replace(global_batch_size=32)
    wrong = check(chosen, [chosen.fallbacks[0].replace(workload=other, shares=())])
    assert any("(C1)" in text for text in wrong)
    chosen.save(tmp_path / "plan.json")
    assert TrainingPlan.load(tmp_path / "plan.json") == chosen


def test_devices_that_a_plan_leaves_idle_are_no_units(tmp_path: Path) -> None:
    """On 7 devices with the full space the fuzzer had a plan for 4, whose losses were counted from 7."""
    path = tmp_path / "plan.json"
    words = ["plan", "smollm2-135m", "--cluster", "7xH100-SXM-80GB", "--global-batch-size", "8", "--seq-len", "64"]
    made = CliRunner().invoke(app, [*words, "--space", "full", "--fix", "pp=4", "--tolerate", "1", "--out", str(path)])
    assert made.exit_code == 0, made.output
    given = TrainingPlan.load(path)
    assert given.num_idle_devices > 0
    assert not check(given, given.fallbacks)
    (entry,) = expected_goodput(given, FAULTS.replace(tolerate=1)).fallbacks
    assert entry.num_devices == given.fallbacks[0].cluster.num_devices < given.cluster.num_devices


@pytest.mark.long
def test_machines_that_come_and_go(trained: TrainingPlan, tmp_path: Path) -> None:
    """Three hours of four machines, one of which is away for the second one; by hand."""
    changes = [Change(0, 4), Change(3600, 3), Change(7200, 4), Change(10_800, 4)]
    plans = plans_by_units(trained, [3, 4])
    rates = {size: each.estimate.tokens_per_s for size, each in plans.items()}
    pool = replay_pool(trained, plans, "pool", changes, Costs(save_s=30, restart_s=300, usd_per_unit_hour=2))
    kept = {entry.policy: entry for entry in pool.policies}
    assert pool.losses == 1
    assert pool.mean_units == pytest.approx(11 / 3)
    assert kept["wait"].running_s == 3600 + 3300
    less, entire = going_on(plans[3], 10_800), going_on(trained, 10_800)
    expected = (1 - entire.copies) * (7200 - entire.joined_s) * rates[4]
    expected += (1 - less.copies) * (3600 - less.lost_s) * rates[3]
    assert kept["join"].tokens == pytest.approx(expected)
    assert kept["wait"].fraction < kept["restart"].fraction < kept["continue"].fraction < kept["join"].fraction < 1
    assert kept["join"].usd_per_million_tokens == pytest.approx(2 * 11 / kept["join"].tokens * 1e6)
    for entry in pool.policies:
        assert entry.fraction + sum(entry.lost.values()) == pytest.approx(1)
    assert kept["wait"].lost["waiting"] == pytest.approx(3600 * rates[3] / (7200 * rates[4] + 3600 * rates[3]))
    assert kept["leave"] == kept["join"].replace(policy="leave")  # without a notice
    assert pool.bound == 1
    assert not kept["join"].lost["waiting"] + kept["join"].lost["restarts"] + kept["join"].lost["saves"]
    path = tmp_path / "pool.csv"
    path.write_text("time_s,available\n" + "".join(f"{change.time_s},{change.available}\n" for change in changes))
    assert read_pools(path) == {"pool": tuple(changes)}
    trained.save(tmp_path / "plan.json")
    words = ["replay", str(tmp_path / "plan.json"), "--trace", str(path), "--usd-per-hour", "2"]
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["pools"][0]["policies"][3]["fraction"] == pytest.approx(kept["join"].fraction)
    refused = CliRunner().invoke(app, ["replay", str(tmp_path / "plan.json"), "--requests", str(path)])
    assert refused.exit_code == 2
    assert "--trace" in refused.output


def test_with_a_notice_only_the_restart_after_a_loss_of_all_is_lost(trained: TrainingPlan) -> None:
    """Four machines for two hours with ten minutes of none between; by hand. No policy keeps more than the bound."""
    changes = [Change(0, 4), Change(3600, 0), Change(4200, 4), Change(7800, 4)]
    plans = plans_by_units(trained, [4])
    rate = trained.estimate.tokens_per_s
    pool = replay_pool(trained, plans, "pool", changes, Costs(save_s=30, restart_s=300, notice_s=120))
    kept = {entry.policy: entry for entry in pool.policies}
    assert pool.bound == pytest.approx(1 - 300 / 7200)
    assert all(entry.fraction <= pool.bound for entry in pool.policies)
    assert kept["leave"].fraction > kept["join"].fraction
    assert kept["leave"].lost["restarts"] == pytest.approx(300 / 7200)
    seldom = best_interval_s(mtbf_s=MTBF_HOURS_PER_DEVICE * 3600 / 32, save_s=30)
    saving, copies = 30 / (seldom + 30), going_on(trained, MTBF_HOURS_PER_DEVICE * 3600 / 32).copies
    assert kept["leave"].tokens == pytest.approx(6870 * rate * (1 - saving) * (1 - copies), rel=1e-3)
    short = replay_pool(trained, plans, "pool", changes, Costs(save_s=30, restart_s=300, notice_s=5))
    assert {entry.policy: entry.fraction for entry in short.policies}["leave"] < kept["leave"].fraction


@pytest.mark.long
def test_micro_batches_of_a_lost_stage_go_to_its_peers(trained: TrainingPlan, tmp_path: Path) -> None:
    """pp 2 x dp 2 of four nodes, each one stage of one replica: the peer of the lost one is busy twice as long."""
    fixed = {"pp": 2, "dp_replicate": 2, "tp": 8, "dp_shard": 1, "num_model_chunks": 1, "schedule": "1f1b"}
    piped = plan(trained.model, trained.cluster, trained.workload, fixed=fixed)
    assert why_not_rerouted(trained).startswith(("there is one stage", "no other replica"))
    assert not why_not_rerouted(piped)
    assert sorted(map(len, lost_stages(piped))) == [1, 1]
    step_s, passes_s = piped.estimate.step_time_s, 2 * piped.num_microbatches
    busy_s = max(stage.forward_s + stage.backward_s for stage in piped.estimate.stages)
    rerouted_s = rerouted_step_s(piped)
    assert rerouted_s is not None
    assert passes_s * busy_s <= rerouted_s < 2 * step_s
    report = expected_goodput(piped, FAULTS.replace(tolerate=1))
    assert report.fallbacks[0].rerouted_step_s == rerouted_s
    assert break_even_s(rerouted_step_s=3, fallback_step_s=2, move_s=5) == pytest.approx(30)  # 10 s without steps
    assert break_even_s(rerouted_step_s=2, fallback_step_s=2, move_s=5) == math.inf
    piped.save(tmp_path / "plan.json")
    words = [
        "goodput",
        str(tmp_path / "plan.json"),
        "--mtbf-hours-per-device",
        "2000",
        "--save-s",
        "10",
        "--tolerate",
        "1",
    ]
    table = CliRunner().invoke(app, [*words, "--restart-s", "300"])
    assert "apply does not run" in " ".join(table.output.split())


@pytest.mark.parametrize(
    "text", ["a,b\n1,2\n", "time_s,available\n", "time_s,available\n0,4\n", "time_s,available\n5,4\n1,3\n",
             "time_s,available\n0,x\n1,3\n", "time_s,available\n0,-1\n1,3\n", "time_s,available\nnan,1\n1,3\n"],
)  # fmt: skip
def test_a_recording_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "pool.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match="time_s"):
        read_pools(path)
