"""The scripts of benchmarks/ are run by hand: each still imports what it needs and says how it is called."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = [path for path in sorted(FOLDER.rglob("*.py")) if "__main__" in path.read_text()]


@pytest.mark.long
def test_benchmarks_print_their_help(monkeypatch) -> None:
    problems = []
    for path in SCRIPTS:
        monkeypatch.setattr(sys, "argv", [str(path), "--help"])
        monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
        text = io.StringIO()
        try:
            with contextlib.redirect_stdout(text):
                runpy.run_path(str(path), run_name="__main__")
        except SystemExit as ended:
            if ended.code or not text.getvalue().startswith("usage:"):
                problems.append(f"{path.name}: exit code {ended.code}")
        except Exception as error:
            problems.append(f"{path.name}: {error!r}")
        else:
            problems.append(f"{path.name}: --help is not understood")
    assert not problems


def test_mutants_are_in_the_code_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault whose text the code no longer has is judged by nothing."""
    monkeypatch.syspath_prepend(FOLDER)
    import mutants

    assert not list(mutants.problems(mutants.read_mutants()))


def test_limits_of_published_runs_hold_the_cache_and_are_those_of_its_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded up to the tool's units, never below what the cache holds but for its own greatest values."""
    monkeypatch.syspath_prepend(FOLDER)
    import saturated

    assert saturated.tuned_limits(200, 128, 128) == (224, 2048)
    assert saturated.tuned_limits(300, 2048, 128) == (384, 5120)
    assert saturated.tuned_limits(9000, 1024, 1024) == (4096, 8192)
    for requests in (1, 31, 63, 64, 255, 256, 700, 1023, 1024, 3000, 4096):
        rows, tokens = saturated.tuned_limits(requests, 1000, 500)
        assert rows >= requests
        assert tokens >= min(requests * 3, saturated.TOKEN_LIMIT)
