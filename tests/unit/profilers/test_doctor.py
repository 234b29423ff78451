"""What `meshwright doctor` finds, here and where something is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from meshwright.profilers import doctor


def test_this_installation_is_sound(tmp_path: Path) -> None:
    """The tests run here, so nothing can be broken; the exit code says so."""
    done = subprocess.run([sys.executable, "-m", "meshwright.cli", "doctor", "--json"], capture_output=True, text=True)
    found = {line["subject"]: line for line in json.loads(done.stdout)}
    assert done.returncode == 0, found
    assert found["gloo"]["found"] == "a group sums a tensor" and found["solvers"]["status"] == "ok"
    assert "cores" in found["host"]["found"]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if pip had no record of two of them."""
    known = doctor.version

    def version(name: str) -> str:
        if name in ("pulp", "tokenizers"):
            raise doctor.PackageNotFoundError(name)
        return "1.15.2" if name == "highspy" else known(name)

    monkeypatch.setattr(doctor, "version", version)
    found = {finding.subject: finding for finding in doctor._packages()}
    assert found["pulp"].status == "broken" and "pip install" in found["pulp"].help
    assert found["highspy"].status == "broken" and "<1.15" in found["highspy"].means
    assert found["tokenizers"].status == "limited" and "--tokenizer" in found["tokenizers"].means


def test_what_fails_in_a_process_is_told_by_its_last_line() -> None:
    found = doctor._tried("gloo", "raise OSError('no such interface')", "", "set the interface")
    assert (found.status, found.means, found.help) == ("broken", "OSError: no such interface", "set the interface")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = {finding.subject: finding for finding in doctor._folders()}
    assert found["cache"].status == "limited" and found["cache"].help == "set XDG_CACHE_HOME"
