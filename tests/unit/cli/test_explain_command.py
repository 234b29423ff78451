"""`meshwright explain` as a user types it: tables, JSON, and every way its inputs can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from meshwright.cli.main import app
from meshwright.planner.explain.report import Explanation
from typer.testing import CliRunner

PLAN = ["plan", "llama-3.1-8b", "--cluster", "16xA100-SXM-80GB", "--global-batch-size", "64", "--seq-len", "4096"]


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    result = CliRunner().invoke(app, [*PLAN, "--fix", "tp=4,pp=2", "--out", str(path)])
    assert result.exit_code == 0, result.output
    return path.read_text()


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch, planned) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(planned)


def explain(*arguments: str):
    return CliRunner().invoke(app, ["explain", *arguments])


def assert_refused(result, message: str) -> None:
    assert result.exit_code == 2, result.output
    assert message.lower() in result.stderr.lower(), result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_explanation_has_every_section_and_says_what_was_fixed() -> None:
    result = explain("plan.json")
    assert result.exit_code == 0, result.output
    for section in (
        "what binds",
        "compute",
        "memory of stages",
        "stage 1",
        "1 GiB more of memory",
        "1 GB/s more on",
        "runner-up 1",
    ):
        assert section in result.stdout
    assert "the plan had to keep tp=4,pp=2" in result.stdout
    assert result.stderr.strip().splitlines()[-1].startswith("next: meshwright explain plan.json --why-not")


def test_json_is_an_explanation() -> None:
    result = explain("plan.json", "--json", "--why-not", "pp=4")
    assert result.exit_code == 0, result.output
    found = Explanation(**json.loads(result.stdout))
    assert found.why_not is not None
    assert found.why_not.asked == "pp=4"
    assert found.why_not.kept == "tp=4"


def test_why_not_prints_the_difference_line_by_line() -> None:
    result = explain("plan.json", "--why-not", "pp=1")
    assert result.exit_code == 0, result.output
    assert "why not pp=1 (and tp=4, as the plan had to)" in result.stdout
    assert "pipeline bubble" in result.stdout
    assert "activations" in result.stdout


def test_why_not_of_what_cannot_run_is_an_answer() -> None:
    result = explain("plan.json", "--why-not", "tp=16,pp=1")
    assert result.exit_code == 0, result.output
    assert "nothing with it can be executed" in result.stdout
    assert "[tp_in_scaleup_domain]" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.json"], "cannot read missing.json"),
        (["."], "cannot read"),
        (["plan.json", "--why-not", "tp"], "name=value"),
        (["plan.json", "--why-not", "warp=9"], "unknown layout field"),
        (["plan.json", "--why-not", "tp=0"], "tp"),
        (["plan.json", "--why-not", "tp=many"], "whole number"),
        (["plan.json", "--why-not", "tp=2,tp=4"], "twice"),
        (["plan.json", "--why-not", "\x00"], "name=value"),
        (["plan.json", "--why-not", "pp=" + "9" * 30], "pp"),
        (["plan.json", "--time-limit-s", "0"], "time-limit-s"),
        ([], "PLAN"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_arguments_are_refused(arguments, message) -> None:
    assert_refused(explain(*arguments), message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 99}, "schema version 99"),
        ({"schema_version": None}, "schema version None"),
        ({"surprise": 1}, "surprise"),
        ({"layout": {"tp": 3}}, "stages for pp 1"),
        ({"estimate": None}, "estimate"),
        ({"provenance": {"meshwright": "1", "created": "", "inputs_sha256": "", "fixed": "tp=many"}}, "whole number"),
        ({"provenance": {"meshwright": "1", "created": "", "inputs_sha256": "", "space": "outer"}}, "space"),
    ],
)
def test_changed_plan_is_refused(change, message, planned, tmp_path: Path) -> None:
    (tmp_path / "changed.json").write_text(json.dumps({**json.loads(planned), **change}))
    assert_refused(explain("changed.json"), message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("[]", "no schema_version"),
        ("{}", "no schema_version"),
        ("\x00\x01", "not valid JSON"),
        ("[" * 100_000, "JSON"),
    ],
    ids=["empty", "list", "object", "binary", "deep"],
)
def test_what_is_no_plan_is_refused(text, message, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(text)
    assert_refused(explain("other.json"), message)


def test_half_a_plan_is_refused(planned, tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text(planned[: len(planned) // 2])
    assert_refused(explain("half.json"), "not valid JSON")


def test_plan_of_other_numbers_is_refused(planned, tmp_path: Path) -> None:
    """A batch that cannot be dealt to the ranks of the layout is no plan."""
    changed = json.loads(planned)
    changed["workload"]["global_batch_size"] = 63
    (tmp_path / "changed.json").write_text(json.dumps(changed))
    assert_refused(explain("changed.json"), "has no share for each of")
