"""`plan --serve` and `explain` of its plan: what is shown, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from meshwright.cli.main import app
from meshwright.schema import ServingPlan
from typer.testing import CliRunner

SERVE = [
    "plan", "llama-3.1-8b", "--cluster", "2xH100-SXM-80GB", "--serve", "--requests", "isl=1024,osl=64,rate=10",
    "--tpot", "20ms@p90",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")


def test_a_plan_is_shown_written_and_explained(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*SERVE, "--ttft", "500ms@p90", "--out", "serve.json"])
    assert result.exit_code == 0, result.output
    for words in (
        "throughput",
        "devices",
        "within 20 ms at p90",
        "binds",
        "none of this space needs fewer than",
        "runner-ups",
    ):
        assert words in result.stdout
    answer = ServingPlan.load(tmp_path / "serve.json")
    assert answer.num_devices == 1 and len(answer.estimate.limits) == 2
    explained = CliRunner().invoke(app, ["explain", "serve.json", "--json"])
    assert explained.exit_code == 0, explained.output
    changes = json.loads(explained.stdout)["changes"]
    assert any(change["change"].startswith("tpot 25 ms") for change in changes)
    more = next(change for change in changes if change["change"].startswith("one more agg"))
    now = next(change for change in changes if change["change"].startswith("as it is"))
    assert more["requests_per_s"] > now["requests_per_s"] >= 10
    other = CliRunner().invoke(app, ["explain", "serve.json", "--why-not", "disaggregated"])
    assert other.exit_code == 0 and "device more" in other.stdout
    wrong = CliRunner().invoke(app, ["explain", "serve.json", "--why-not", "cp=2"])
    assert wrong.exit_code == 2


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        (["--tpot", "20"], 2, ("--tpot", "30ms@p90")),
        (["--requests", "isl=5"], 2, ("osl missing",)),
        (["--requests", "none.csv"], 2, ("cannot read none.csv",)),
        (["--rate", "5", "--concurrency", "5"], 2, ("exclude each other",)),
        (["--modes", "mixed"], 2, ("agg,disagg",)),
        (["--engine", "megatron"], 2, ("does not serve", "sglang")),
        (["--fix", "cp=2"], 2, ("cp",)),
        (["--global-batch-size", "8"], 2, ("--global-batch-size with --serve",)),
        (["--prefix-cache", "maybe"], 2, ("--prefix-cache", "'on', 'off'")),
        (["--objective", "energy"], 2, ("--objective energy",)),
        (["--weights", "fp7"], 2, ("--weights",)),
    ],
)
def test_what_means_nothing_is_refused(changes: list[str], code: int, words: tuple[str, ...], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*SERVE, *changes])
    assert result.exit_code == code, result.output
    assert all(word in result.stderr for word in words), result.stderr
    assert not (tmp_path / "plan.json").exists()


def test_options_of_serving_need_serve() -> None:
    result = CliRunner().invoke(app, ["plan", "gpt2", "--cluster", "1xT4-16GB", "--requests", "isl=5,osl=5"])
    assert result.exit_code == 2 and "--requests without --serve" in result.stderr
    lacking = CliRunner().invoke(app, ["plan", "gpt2", "--cluster", "1xT4-16GB", "--serve"])
    assert lacking.exit_code == 2 and "--serve without --requests" in lacking.stderr
