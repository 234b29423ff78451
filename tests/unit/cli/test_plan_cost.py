"""`meshwright plan --objective cost` and `--pareto`, as a user types them."""

from __future__ import annotations

import json

import pytest
from meshwright.cli.main import app
from meshwright.schema import TrainingPlan
from typer.testing import CliRunner

PLAN = ["plan", "llama-3.2-1b", "--global-batch-size", "64", "--seq-len", "2048"]
CLUSTER = ["--cluster", "3x8xA100-SXM-80GB"]
COST = ["--objective", "cost"]


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_cost_of_a_cluster_is_shown_with_every_size(tmp_path) -> None:
    result = CliRunner().invoke(app, [*PLAN, *CLUSTER, *COST, "--tokens", "1e11", "--deadline-h", "100"])
    assert result.exit_code == 0, result.output
    for expected in ("cheapest:", "chosen", "1e9 tokens", "whole run", "too slow"):
        assert expected in result.stdout
    cost = TrainingPlan.load(tmp_path / "plan.json").cost
    assert cost.hours <= 100
    assert f"{cost.total:,.0f}" in result.stdout
    assert len(cost.sizes) == 3


def test_offers_are_compared_and_the_json_has_the_money(tmp_path) -> None:
    (tmp_path / "offers.toml").write_text(
        '[[offers]]\nname = "here"\ndevice = "A100-SXM-80GB"\nnum_nodes = 2\nprice_per_device_hour = 2.0\n'
        '[[offers]]\nname = "there"\ndevice = "A100-SXM-80GB"\nnum_nodes = 2\nprice_per_device_hour = 1.0\n'
        '[[offers]]\nname = "old"\ndevice = "V100-SXM2-16GB"\nnum_nodes = 1\n'
    )
    result = CliRunner().invoke(app, [*PLAN, *COST, "--offers", "offers.toml", "--pareto", "--json"])
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["cost"]["offer"] == "there"
    assert plan["cost"]["usd_per_billion_tokens"] == pytest.approx(1000 * plan["cost"]["usd_per_million_tokens"])
    assert plan["workload"]["precision"] == "fp16-mixed"  # what all of them have
    assert {"chosen", "on the front"} & {size["outcome"] for size in plan["cost"]["sizes"]}


@pytest.mark.long
def test_a_mixture_of_spot_and_on_demand_is_rented_where_neither_is_enough(tmp_path) -> None:
    (tmp_path / "pool.csv").write_text("time_s,available\n0,4\n43200,3\n86400,4\n")
    offer = '[[offers]]\nname = "{}"\ndevice = "A100-SXM-80GB"\ndevices_per_node = 2\nnum_nodes = 2\nprice_per_device_hour = {}\n'
    (tmp_path / "offers.toml").write_text(
        offer.format("sure", 2.0) + offer.format("spot", 1.0) + 'trace = "pool.csv"\n'
    )
    arguments = [*PLAN, *COST, "--offers", "offers.toml", "--mix", "2", "--tokens", "1e10", "--deadline-h"]
    assert CliRunner().invoke(app, [*arguments, "70"]).exit_code == 0
    alone = TrainingPlan.load(tmp_path / "plan.json").cost
    assert alone.offer == "spot"
    assert 0.9 < alone.goodput < 1
    hours = alone.hours * alone.num_nodes / 3.5  # more than two nodes
    result = CliRunner().invoke(app, [*arguments, str(hours)])
    assert result.exit_code == 0, result.output
    plan = TrainingPlan.load(tmp_path / "plan.json")
    assert plan.cost.offer == "2 sure + 2 spot"
    assert plan.cost.hours <= hours
    assert not plan.cluster.is_mixed
    assert "mixtures bounded" in result.stdout


@pytest.mark.long
def test_pareto_front_is_part_of_the_plan(tmp_path) -> None:
    result = CliRunner().invoke(app, [*PLAN, "--cluster", "4xA100-SXM-80GB", "--pareto"])
    assert result.exit_code == 0, result.output
    points = TrainingPlan.load(tmp_path / "plan.json").pareto
    assert len(points) >= 3
    shown = " ".join(result.stdout.split())
    assert all(str(point.layout) in shown for point in points)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (COST, "neither is given"),
        ([], "no cluster is given"),
        ([*CLUSTER, "--tokens", "1e12"], "--tokens without --objective cost"),
        ([*CLUSTER, "--min-tokens-per-s", "5"], "--min-tokens-per-s without --objective cost"),
        ([*CLUSTER, *COST, "--deadline-h", "5"], "--deadline-h without --tokens"),
        ([*CLUSTER, *COST, "--offers", "offers.toml"], "both are given"),
        ([*COST, "--offers", "missing.toml"], "cannot read missing.toml"),
        ([*COST, "--cluster", "8xRTX-PRO-6000-Server-96GB"], "has no price"),
    ],
)
def test_requests_that_cannot_be_meant_exit_with_2(tmp_path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, [*PLAN, *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "plan.json").exists()


def test_floor_out_of_reach_exits_with_1(tmp_path) -> None:
    result = CliRunner().invoke(app, [*PLAN, *CLUSTER, *COST, "--min-tokens-per-s", "1e9"])
    assert result.exit_code == 1
    assert "floor (C1)" in result.stderr
    assert not (tmp_path / "plan.json").exists()
