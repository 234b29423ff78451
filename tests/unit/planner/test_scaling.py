"""Machines over time: the rules replayed, the document, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from meshwright.cli.following import following
from meshwright.cli.main import app
from meshwright.planner import plan
from meshwright.planner.scaling import HOLDING_RULES, holding_rule, replay_rule, scale, solved
from meshwright.planner.spot import Costs
from meshwright.runtime.training.options import INFO_FILE
from meshwright.schema import ClusterSpec, ConfigError, InfeasibleError, Offer, TrainingPlan
from meshwright.schema.machines_file import Change
from meshwright.schema.scaling import ScalePolicy
from typer.testing import CliRunner

HOURS = 6.0
COSTS = Costs(save_s=10.0, restart_s=300.0)


@pytest.fixture(scope="module")
def trained() -> TrainingPlan:
    return plan("gpt2", "2x1xV100-SXM2-16GB", global_batch_size=16, seq_len=512, runnable=True)


def offers(trained: TrainingPlan, *, demand: int = 2) -> list[Offer]:
    spot = Offer.from_cluster(trained.cluster, name="spot", price_per_device_hour=1.0, losses_per_node_day=4.0)
    machines = ClusterSpec.parse(f"{demand}x1xV100-SXM2-16GB") if demand else None
    rest = [Offer.from_cluster(machines, name="sure", price_per_device_hour=3.0)] if machines else []
    return [spot, *rest]


def recording(seed: int, *, days: int = 4) -> list[Change]:
    """A pool of up to two machines that changes every three hours on average."""
    rng, time_s, changes = np.random.default_rng(seed), 0.0, [Change(0.0, 2)]
    while time_s < days * 86_400:
        time_s += float(rng.exponential(3 * 3600)) + 60
        changes.append(Change(time_s, int(rng.choice([n for n in (0, 1, 2) if n != changes[-1].available]))))
    return changes


def policy_of(trained: TrainingPlan, *, share: float = 0.5) -> ScalePolicy:
    tokens = share * trained.estimate.tokens_per_s * HOURS * 3600
    recorded = ("pool", recording(0))
    return scale(trained, offers(trained), tokens=tokens, deadline_s=HOURS * 3600, costs=COSTS, recording=recorded)


def test_the_policy_is_in_time_and_no_dearer_than_greedy_rules(trained: TrainingPlan) -> None:
    policy = policy_of(trained)
    assert policy.bound_usd <= policy.expected_usd
    assert policy.replay is not None
    rules = {entry.rule: entry for entry in policy.replay.rules}
    assert set(rules) == set(HOLDING_RULES)
    assert rules["policy"].met == rules["on demand"].met == 1.0
    print(rules)
    assert rules["policy"].usd <= min(rules["greedy"].usd, rules["on demand"].usd)
    assert all(entry.to_hindsight >= 0.98 for entry in rules.values())


def test_a_machine_that_is_lost_costs_what_it_says(trained: TrainingPlan) -> None:
    tokens = 0.5 * trained.estimate.tokens_per_s * HOURS * 3600
    policy = solved(scale(trained, offers(trained), tokens=tokens, deadline_s=HOURS * 3600, costs=COSTS))
    data, rule = policy.instance, holding_rule("on demand", policy)
    is_met, usd = replay_rule(data, rule, [Change(0.0, 2)])
    held = next(n for n in (1, 2) if data.rate[n] * (data.deadline_s - data.restart_s - data.period_s) >= data.tokens)
    seconds = data.restart_s + data.tokens / data.rate[held]
    assert is_met
    assert usd == pytest.approx(3.0 * held * seconds / 3600)
    lost = replay_rule(
        data, lambda _t, _left, available, _held: (available, 0), [Change(0.0, 2), Change(3600.0, 0), Change(7200.0, 2)]
    )
    straight = replay_rule(data, lambda _t, _left, available, _held: (available, 0), [Change(0.0, 2)])
    assert lost[1] == pytest.approx(straight[1] + 2 * data.restart_s / 3600)


def test_the_document_decides_as_it_did_and_the_command_writes_it(trained: TrainingPlan, tmp_path: Path) -> None:
    trained.save(tmp_path / "plan.json")
    table = 'device = "V100-SXM2-16GB"\nnum_nodes = 2\ndevices_per_node = 1\n'
    (tmp_path / "offers.toml").write_text(
        f'[[offers]]\nname = "spot"\n{table}price_per_device_hour = 1.0\nlosses_per_node_day = 4.0\n'
        f'[[offers]]\nname = "sure"\n{table}price_per_device_hour = 3.0\n'
    )
    lines = ["time_s,available", *(f"{change.time_s},{change.available}" for change in recording(0))]
    (tmp_path / "pool.csv").write_text("\n".join(lines) + "\n")
    tokens = 0.5 * trained.estimate.tokens_per_s * HOURS * 3600
    words = ["scale", str(tmp_path / "plan.json"), "--offers", str(tmp_path / "offers.toml"), "--tokens", str(tokens)]
    words += ["--deadline-h", str(HOURS), "--trace", str(tmp_path / "pool.csv"), "--save-s", "10"]
    shown = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "policy.json")])
    assert shown.exit_code == 0, shown.output
    assert "uniform progress" in shown.output
    assert "spot, 0 on demand" in shown.output
    policy = ScalePolicy.load(tmp_path / "policy.json")
    assert ScalePolicy(**json.loads(policy.model_dump_json())) == policy
    assert solved(policy).usd[policy.usual_available] == pytest.approx(policy.expected_usd)
    refused = CliRunner().invoke(app, [*words, "--pool", "other"])
    assert refused.exit_code == 2
    assert "has the pools pool" in refused.output


def test_what_cannot_be_done_or_decided_is_refused(trained: TrainingPlan) -> None:
    given = {"deadline_s": HOURS * 3600, "costs": COSTS}
    with pytest.raises(InfeasibleError, match="on demand make"):
        scale(trained, offers(trained), tokens=1e15, **given)  # type: ignore[arg-type]
    other = Offer.from_cluster(ClusterSpec.parse("2x1xA100-SXM-40GB"), name="other", price_per_device_hour=1.0)
    with pytest.raises(ConfigError, match="nodes of 1 A100"):
        scale(trained, [other], tokens=1e9, **given)  # type: ignore[arg-type]
    without = scale(trained, offers(trained, demand=0), tokens=1e8, **given)  # type: ignore[arg-type]
    assert without.demand_usd_per_hour == (0.0,)
    broken = without.model_dump() | {"rate": [0.0]}
    with pytest.raises(ConfigError, match="rates of 1"):
        ScalePolicy(**broken)


def test_a_running_training_is_told_what_to_hold_as_the_pool_changes(trained: TrainingPlan, tmp_path: Path) -> None:
    tokens = 0.5 * trained.estimate.tokens_per_s * HOURS * 3600
    policy = scale(trained, offers(trained), tokens=tokens, deadline_s=HOURS * 3600, costs=COSTS)
    policy.save(tmp_path / "policy.json")
    pool = tmp_path / "pool"
    pool.write_text("2")
    hold = following(tmp_path / "policy.json", trained, pool)
    first = hold(0, 2)
    assert first.spot in (1, 2)
    assert (first.demand, first.num_devices) == (0, first.spot)
    pool.write_text("none")  # says nothing
    assert hold(1, 2) == first
    pool.write_text("0")
    spot, demand, num_devices = hold(2, 1)
    assert (spot, num_devices) == (0, demand)
    with pytest.raises(ConfigError, match="no such file"):
        following(tmp_path / "policy.json", trained, tmp_path / "none")
    policy.replace(tokens_per_step=1).save(tmp_path / "other.json")
    with pytest.raises(ConfigError, match="and 1 tokens a step"):
        following(tmp_path / "other.json", trained, pool)


def test_a_training_that_goes_on_has_done_what_it_did_before(trained: TrainingPlan, tmp_path: Path) -> None:
    tokens = 0.5 * trained.estimate.tokens_per_s * HOURS * 3600
    policy = scale(trained, offers(trained), tokens=tokens, deadline_s=HOURS * 3600, costs=COSTS)
    policy.save(tmp_path / "policy.json")
    all_steps, folder = int(tokens / policy.tokens_per_step), tmp_path / "checkpoints"
    done = folder / f"step-{all_steps - 1:08}"

    def held(*, resumes: bool) -> tuple[int, int, int]:
        return following(tmp_path / "policy.json", trained, None, checkpoints=folder, resumes=resumes)(0, 2)

    assert sum(held(resumes=False)[:2]) > 0
    followed = ScalePolicy.load(folder / "scale.json")
    # Two thirds of the time are over, and all but one step is done.
    followed.replace(begun_unix_s=followed.begun_unix_s - HOURS * 2400).save(folder / "scale.json")
    late = held(resumes=True)
    assert late[1] == 2, "as if nothing had been done in that time"
    done.mkdir()
    (done / INFO_FILE).write_text("{}")
    assert held(resumes=True)[1] == 0
    assert ScalePolicy.load(folder / "scale.json").begun_steps == 0
    # Another policy begins where the training is.
    policy.replace(tokens=tokens / 2).save(tmp_path / "policy.json")
    held(resumes=True)
    assert ScalePolicy.load(folder / "scale.json").begun_steps == all_steps - 1
    held(resumes=False)
    assert ScalePolicy.load(folder / "scale.json").begun_steps == 0
