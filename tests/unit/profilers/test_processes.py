"""A rank ends with its launcher, whatever it is doing, and runs nothing that lies in the folder where it was started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import meshwright
import psutil
import pytest
from meshwright.profilers.run.processes import program

LAUNCHER = """
import sys
from pathlib import Path
from meshwright.profilers.run.processes import NodeJob, run_ranks
command = (sys.executable, "-c", "import time; time.sleep(600)")
run_ranks(NodeJob(command=command, folder=Path(sys.argv[1]), num_ranks=1))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux does it")
def test_a_suspended_rank_that_has_run_nothing_of_ours_ends_with_its_launcher(tmp_path: Path) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path)])
    end = time.monotonic() + 60
    while not (ranks := psutil.Process(launcher.pid).children()) and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(ranks[0].pid, signal.SIGSTOP)
    launcher.kill()
    launcher.wait()
    assert psutil.wait_procs(ranks, timeout=10)[1] == []


def test_modules_of_the_current_folder_do_not_stand_before_the_ones_that_are_installed(tmp_path: Path) -> None:
    for name in ("pydantic", "torch", "json", "psutil"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w')")
    script = tmp_path / "elsewhere" / "meshwright_rank.py"
    script.parent.mkdir()
    script.write_text("import json, psutil, pydantic")
    paths = os.pathsep.join([str(script.parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(program("meshwright_rank"), cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0
    assert not (tmp_path / "ran").exists()


def test_every_module_of_ours_that_is_started_is_started_so() -> None:
    package = Path(meshwright.__file__).parent
    started = [path for path in package.rglob("*.py") if 'sys.executable, "-' in path.read_text(encoding="utf-8")]
    assert {path.relative_to(package).as_posix() for path in started} == {
        "profilers/doctor.py",  # in an empty folder
        "profilers/run/processes.py",  # by `program`
        "runtime/serving/text.py",  # isolated, by path
    }
