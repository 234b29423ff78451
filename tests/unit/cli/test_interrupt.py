"""Ctrl-C during `plan`: the best so far is shown and written; without one nothing is; the exit code is 130 either way."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from meshwright.cli.main import app
from meshwright.cli.terminal import stopping_on_interrupt
from meshwright.planner.request import Deadline
from meshwright.schema import TrainingPlan
from meshwright.schema.plan import PROVED_GAP
from typer.testing import CliRunner

PLAN = [
    "plan", "llama-3.1-8b", "--cluster", "16xH100-SXM-80GB", "--global-batch-size", "64", "--seq-len", "4096", "--engine",
    "megatron",
]  # fmt: skip


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def press(monkeypatch: pytest.MonkeyPatch, when: Callable[[float | None], bool]) -> None:
    """Press Ctrl-C once as soon as the progress bar shows an incumbent for which ``when`` holds."""

    @contextmanager
    def pressing(*, quiet: bool) -> Iterator[Callable[[int, float | None, float], None]]:
        pressed = [False]

        def update(evaluated: int, incumbent_s: float | None, bound_s: float) -> None:
            if not pressed[0] and when(incumbent_s):
                pressed[0] = True
                signal.raise_signal(signal.SIGINT)

        yield update

    monkeypatch.setattr("meshwright.cli.plan.search_progress", pressing)


def test_interrupted_search_gives_its_incumbent_with_an_honest_gap(tmp_path, monkeypatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    whole = CliRunner().invoke(app, [*PLAN, "--out", "whole.json"])
    assert whole.exit_code == 0
    press(monkeypatch, lambda incumbent_s: incumbent_s is not None)
    result = CliRunner().invoke(app, PLAN)
    assert result.exit_code == 130, result.output
    assert "step time" in result.stdout
    assert "stopping with the best so far" in result.stderr
    hurried, best = TrainingPlan.load(tmp_path / "plan.json").search, TrainingPlan.load(tmp_path / "whole.json").search
    assert (hurried.status == "stopped") == (hurried.gap >= PROVED_GAP)
    assert hurried.bound_s <= best.objective_s
    assert hurried.objective_s >= best.bound_s
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupt_before_any_answer_writes_nothing(tmp_path, monkeypatch) -> None:
    press(monkeypatch, lambda incumbent_s: incumbent_s is None)
    nothing_fits = [word.replace("16xH100", "4xH100").replace("3.1-8b", "3.1-70b") for word in PLAN]
    result = CliRunner().invoke(app, nothing_fits)
    assert result.exit_code == 130, result.output
    assert result.stdout == ""
    assert "before any layout that fits was found" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_second_interrupt_ends_at_once() -> None:
    deadline = Deadline(600)
    with pytest.raises(KeyboardInterrupt), stopping_on_interrupt(deadline):
        signal.raise_signal(signal.SIGINT)
        assert deadline.is_over
        signal.raise_signal(signal.SIGINT)


STARTING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # of a suite in the background it is ignored
sys.argv = ["meshwright", "models"]
from meshwright.cli import entry
class Pressing:
    def find_spec(self, name, path, target=None):
        if name == "meshwright.schema.catalogue":  # halfway through the imports of the command
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Pressing())
entry.main()
"""

WORKING = """
import signal, sys, typer
from meshwright.cli import interrupt, terminal
signal.signal(signal.SIGINT, interrupt.leave_now)
def work():
    with terminal.exit_on_error():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            print("ended what it had started", flush=True)
try:
    work()
except typer.Exit as end:
    signal.raise_signal(signal.SIGINT)  # once more, while the process ends
"""


@pytest.mark.parametrize(("script", "said"), [(STARTING, ""), (WORKING, "ended what it had started\n")])
def test_interrupt_leaves_no_traceback(script: str, said: str) -> None:
    """Neither while modules are imported, nor at work, nor a second time."""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 130, result.stderr
    assert result.stdout == said
    assert set(result.stderr.splitlines()) == {"interrupted"}
