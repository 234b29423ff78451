"""`meshwright profile`: what it refuses before anything is started."""

from __future__ import annotations

import pytest
from meshwright.cli.main import app
from meshwright.profilers import machine
from typer.testing import CliRunner


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No rank of a job, in an empty folder."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--budget-s", "0"], "must be positive"),
        (["--model", "smollm2-135m", "--seq-len", "0"], "--seq-len"),
        (["--parts", "compute,gpu"], "no part is called 'gpu'"),
        (["--out", "no/such/folder.json"], "no such folder"),
        (["--nvme", "no-such-folder"], "no such folder"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--model", "gemma-2-9b"], "cannot be measured"),
        (["--ranks", "0"], "at least 1"),
    ],
)
def test_bad_input_is_refused_with_its_reason(arguments, said, tmp_path):
    answer = CliRunner().invoke(app, ["profile", *arguments])
    assert answer.exit_code == 2
    assert said in answer.output
    assert list(tmp_path.iterdir()) == []


def test_file_that_is_no_profile_is_not_overwritten(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    answer = CliRunner().invoke(app, ["profile", "--out", "thesis.txt"])
    assert answer.exit_code == 2
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_full_memory_is_said_before_anything_is_started(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "available_memory", lambda: 300 * 2**20)
    answer = CliRunner().invoke(app, ["profile", "--ranks", "2"])
    assert answer.exit_code == 1
    assert "memory is nearly full: 300.0 MiB" in answer.output
    assert "--ranks" in answer.output
    assert list(tmp_path.iterdir()) == []
