"""What is typed at a shell: counts with suffixes, failures as JSON, one form of errors, and what <Tab> offers."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from meshwright.cli.complete import (
    complete_clusters,
    complete_engines,
    complete_layout,
    complete_models,
    complete_targets,
)
from meshwright.cli.main import app
from meshwright.engines import ENGINES, RL_TARGETS, SERVING_TARGETS, TARGETS
from meshwright.schema import TrainingPlan
from meshwright.schema.catalogue import device_entries
from meshwright.schema.layout import Layout
from meshwright.schema.units import parse_count, parse_decimal
from typer.testing import CliRunner

H100 = ["--cluster", "8xH100-SXM-80GB"]


def run(*words: str):
    return CliRunner().invoke(app, list(words))


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_counts_are_read_as_they_are_written() -> None:
    assert [parse_count(text) for text in ("8192", "8k", "128K", "4M", "1,024")] == [8192, 8192, 131072, 2**22, 1024]
    assert [parse_decimal(text) for text in ("15T", "1e12", "300B", "7")] == [15e12, 1e12, 300e9, 7]
    for text in ("8q", "", "k", "1.5k", "0x10"):
        with pytest.raises(ValueError, match="no whole number"):
            parse_count(text)


def test_a_batch_may_be_given_in_tokens() -> None:
    shown = run("plan", "llama-3.2-1b", *H100, "--seq-len", "8k", "--global-batch-size", "4M-tokens", "--top", "0")
    assert shown.exit_code == 0, shown.output
    workload = TrainingPlan.load("plan.json").workload
    assert (workload.seq_len, workload.global_batch_size) == (8192, 512)
    odd = run("plan", "llama-3.2-1b", *H100, "--seq-len", "5000", "--global-batch-size", "4M-tokens")
    assert odd.exit_code == 2
    assert "--global-batch-size 839" in odd.stderr


FAILURES = [
    (["plan"], 2, "ConfigError"),
    (["plan", "llama-3.2-1b", "--seq-ln", "8"], 2, "ConfigError"),
    (["plan", "llama-3.2-1b", *H100, "--seq-len", "x", "--global-batch-size", "8"], 2, "ConfigError"),
    (["plan", "no-such-model", *H100, "--seq-len", "8", "--global-batch-size", "8"], 2, "ConfigError"),
    (
        ["plan", "llama-3.1-8b", "--cluster", "1xT4", "--seq-len", "8k", "--global-batch-size", "8"],
        1,
        "InfeasibleError",
    ),
    (["explain", "no-such-plan.json"], 2, "ConfigError"),
    (["apply", "no-such-plan.json"], 2, "ConfigError"),
    (["no-such-command"], 2, "ConfigError"),
]


@pytest.mark.parametrize(("words", "code", "kind"), FAILURES, ids=[" ".join(words[:3]) for words, _, _ in FAILURES])
def test_failure_under_json_is_an_object_with_the_exit_code(words: list[str], code: int, kind: str) -> None:
    plain, as_json = run(*words), run(*words, "--json")
    assert (plain.exit_code, as_json.exit_code) == (code, code)
    assert plain.stdout == ""
    assert plain.stderr.startswith("error: ")
    error = json.loads(as_json.stdout)["error"]
    assert error["message"] in as_json.stderr
    assert (error["type"], error["exit_code"]) == (kind, code)
    assert "help" in error


def test_near_names_are_offered() -> None:
    assert "did you mean --seq-len?" in run("plan", "llama-3.2-1b", "--seq-ln", "8").stderr
    assert "did you mean plan?" in run("pln").stderr


def test_version_is_that_of_the_package() -> None:
    assert run("--version").stdout == f"meshwright {version('meshwright')}\n"


def test_tab_lists_what_there_is() -> None:
    assert complete_models("llama-3.1") == ["llama-3.1-405b", "llama-3.1-70b", "llama-3.1-8b"]
    assert complete_clusters("64xH100-SXM-8") == ["64xH100-SXM-80GB"]
    assert set(complete_clusters("")) >= {"local", "8xH100-SXM-80GB"}
    assert len(complete_clusters("")) == 1 + len(device_entries())
    assert tuple(complete_engines("")) == ENGINES
    assert tuple(complete_targets("")) == (*TARGETS, *SERVING_TARGETS, *RL_TARGETS)
    assert {text.rstrip("=") for text in complete_layout("")} == set(Layout.model_fields)
    assert complete_layout("tp=8,recompute=f") == ["tp=8,recompute=full"]
    assert "tp=8,tp=" not in complete_layout("tp=8,t")
