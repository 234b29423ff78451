"""How much code one `plan` runs through: what a newcomer has to read to understand it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_FILES = 70
"""Files of ours in which a function runs during one `plan`, imports not counted."""


def is_importing(frame: FrameType) -> bool:
    """Return whether a frame belongs to the import of a module: its body, or what its body calls."""
    outer: FrameType | None = frame
    while outer is not None:
        if outer.f_code.co_name == "<module>" and "meshwright" in outer.f_code.co_filename:
            return True
        outer = outer.f_back
    return False


def files_run(arguments: list[str]) -> set[str]:
    """Return the files of meshwright, relative to its root, in which a function is called while the command line runs."""
    from meshwright.cli.main import app

    codes = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and not is_importing(frame):
            codes.add(frame.f_code)

    sys.setprofile(note)
    try:
        with pytest.raises(SystemExit) as ended:
            app(arguments)
    finally:
        sys.setprofile(None)
    assert ended.value.code in (0, None)
    inside = f"{os.sep}meshwright{os.sep}"
    files = (code.co_filename.rpartition(inside) for code in codes)
    return {path for _, marker, path in files if marker}


def test_plan_runs_through_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    files = files_run(
        ["plan", "llama-3.1-8b", "--cluster", "64xH100-SXM-80GB", "--global-batch-size", "256", "--seq-len", "8192"]
    )
    assert len(files) <= MAX_FILES, "\n".join(sorted(files))
