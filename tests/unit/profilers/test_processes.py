"""A rank ends with its launcher, whatever it is doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

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
