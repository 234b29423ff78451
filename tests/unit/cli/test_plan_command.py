"""The commands that need no GPU, as a user types them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from meshwright.cli.main import app
from meshwright.schema import TrainingEstimate, TrainingPlan
from typer.testing import CliRunner

README_PLAN = [
    "plan",
    "llama-3.1-70b",
    "--cluster",
    "256xH100-SXM-80GB",
    "--global-batch-size",
    "1024",
    "--seq-len",
    "8192",
]


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_plan_prints_one_table_and_writes_the_plan(tmp_path) -> None:
    result = CliRunner().invoke(app, README_PLAN)
    assert result.exit_code == 0, result.output
    for expected in (
        "layout",
        "step time",
        "throughput",
        "MFU",
        "memory per device",
        "activations",
        "search",
        "runner-ups",
    ):
        assert expected in result.stdout
    assert result.stderr.strip().splitlines()[-1] == (
        "wrote plan.json; next: meshwright explain plan.json, and on the cluster meshwright apply plan.json"
    )
    plan = TrainingPlan.load(tmp_path / "plan.json")
    assert plan.layout.world_size == 256
    assert str(plan.layout).split()[0] in result.stdout


def test_plan_json_is_the_plan(tmp_path) -> None:
    result = CliRunner().invoke(app, [*README_PLAN, "--json"])
    printed = json.loads(result.stdout)
    assert printed == json.loads((tmp_path / "plan.json").read_text())
    assert {"layout", "estimate", "search", "alternatives", "provenance"} <= printed.keys()
    assert {
        "status",
        "objective_s",
        "bound_s",
        "gap",
        "evaluated",
        "pruned",
        "pruned_in_groups",
        "search_s",
    } == printed["search"].keys()


def test_pipelined_plan_lists_its_stages() -> None:
    result = CliRunner().invoke(app, [*README_PLAN, "--fix", "tp=8,pp=4"])
    assert result.exit_code == 0, result.output
    assert all(f"stage {s}" in result.stdout for s in range(4))
    assert "embedding, " in result.stdout
    assert ", head" in result.stdout


def test_estimate_json_is_an_estimate() -> None:
    args = ["estimate", *README_PLAN[1:], "--layout", "tp=8,pp=4,dp_shard=8,micro_batch_size=1,recompute=selective"]
    result = CliRunner().invoke(app, [*args, "--json"])
    assert result.exit_code == 0, result.output
    found = TrainingEstimate(**json.loads(result.stdout))
    assert len(found.stages) == 4
    assert CliRunner().invoke(app, args).exit_code == 0


def test_estimate_costs_choices_that_are_not_executed_and_says_so() -> None:
    args = [
        "estimate",
        "mixtral-8x7b",
        "--cluster",
        "32xH100-SXM-80GB",
        "--global-batch-size",
        "64",
        "--seq-len",
        "8192",
    ]
    result = CliRunner().invoke(app, [*args, "--layout", "cp=2,ep=8,dp_shard=16,zero_stage=1,offload=optimizer"])
    assert result.exit_code == 0, result.output
    assert "tokens to experts and back" in result.stdout
    assert "[offload]" in result.stderr


@pytest.mark.parametrize("command", ["models", "devices"])
def test_catalogue_commands_list_their_entries(command) -> None:
    table = CliRunner().invoke(app, [command])
    entries = json.loads(CliRunner().invoke(app, [command, "--json"]).stdout)
    assert table.exit_code == 0
    assert len(entries) > 30
    names = [entry["name"] for entry in entries] if command == "models" else list(entries)
    assert all(name in table.stdout for name in names)


@pytest.mark.parametrize("command", [[], ["plan"], ["estimate"], ["explain"], ["apply"], ["models"], ["devices"]])
def test_help_of_every_command(command) -> None:
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.stdout


SMALL_PLAN = ["plan", "smollm2-135m", "--cluster", "8xH100-SXM-80GB", "--global-batch-size", "64", "--seq-len", "2048"]


@pytest.mark.parametrize("args", [["--help"], SMALL_PLAN, ["plan", "--help"]])
def test_planning_does_not_import_torch(args) -> None:
    code = (
        "import sys\nfrom meshwright.cli.main import app\n"
        f"try:\n    app({args!r})\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


MEGATRON_PLAN = [
    "plan", "mixtral-8x7b", "--cluster", "16xH100-SXM-80GB", "--global-batch-size", "64", "--seq-len", "4096",
    "--engine", "megatron",
]  # fmt: skip


def test_plan_for_another_engine_says_so_and_apply_refuses_it(tmp_path) -> None:
    result = CliRunner().invoke(app, MEGATRON_PLAN)
    assert result.exit_code == 0, result.output
    assert "for megatron" in result.stdout
    assert result.stderr.strip().splitlines()[-1] == "wrote plan.json; next: meshwright export plan.json --to megatron"
    assert TrainingPlan.load(tmp_path / "plan.json").workload.engine == "megatron"
    refused = CliRunner().invoke(app, ["apply", "plan.json"])
    assert refused.exit_code == 2
    assert "the plan is for megatron" in refused.stderr


def test_plan_with_chunks_lists_every_chunk() -> None:
    result = CliRunner().invoke(app, [*MEGATRON_PLAN, "--fix", "pp=2,num_model_chunks=4,cp=1"])
    assert result.exit_code == 0, result.output
    assert "stage 7" in result.stdout


def test_plan_for_an_engine_names_its_own_rule() -> None:
    result = CliRunner().invoke(app, [*MEGATRON_PLAN, "--fix", "zero_stage=3"])
    assert result.exit_code == 2
    assert "[megatron_zero_stage]" in result.stderr


def test_plan_for_an_unknown_engine_is_bad_input() -> None:
    for engine in ("nanotron", "horovod"):
        result = CliRunner().invoke(app, [*MEGATRON_PLAN[:-1], engine])
        assert result.exit_code == 2
        assert engine in result.stderr


def test_estimate_for_another_engine_costs_its_layouts() -> None:
    options = [
        *MEGATRON_PLAN[1:],
        "--layout",
        "dp_replicate=4,pp=4,ep=4,num_model_chunks=2,micro_batch_size=1",
        "--json",
    ]
    result = CliRunner().invoke(app, ["estimate", *options])
    assert result.exit_code == 0, result.output
    TrainingEstimate.model_validate_json(result.stdout)
    assert "it is costed for megatron" in result.stderr
    assert "this version" not in result.stderr


def test_stages_lie_where_the_order_of_passes_has_them(tmp_path) -> None:
    config = Path(__file__).parents[2] / "golden/inputs/tiny"
    sizes = ["--cluster", "2xA100-SXM-80GB", "--global-batch-size", "8", "--seq-len", "256"]
    result = CliRunner().invoke(
        app, ["plan", str(config), *sizes, "--fix", "pp=2,num_model_chunks=2,schedule=synthesised"]
    )
    assert result.exit_code == 0, result.output
    shown = {int(stage): int(rank) for stage, rank in re.findall(r"stage (\d+) on rank (\d+)", result.stdout)}
    order = TrainingPlan.load(tmp_path / "plan.json").pipeline_order
    assert shown == {int(stage): rank for rank, passes in enumerate(order) for stage in re.findall(r"(\d+)F", passes)}


@pytest.mark.parametrize("batch", ["16", "64"])
def test_no_layout_is_slower_by_nothing(batch: str) -> None:
    config = Path(__file__).parents[2] / "golden/inputs/tiny"
    sizes = ["--cluster", "8xA100-SXM-80GB", "--global-batch-size", batch, "--seq-len", "256"]
    plan = json.loads(CliRunner().invoke(app, ["plan", str(config), *sizes, "--json"]).stdout)
    texts = [*plan["notes"], *(alternative["reason"] for alternative in plan["alternatives"])]
    assert not [text for text in texts if re.match(r"[+-]?0\.0 %", text)]
