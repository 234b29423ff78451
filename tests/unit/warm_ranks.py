"""Ranks that are forked from a server in which torch is imported already: 0.1 s each instead of 3.

For tests of what a job does. How processes are started, what they inherit and how they end with their launcher is tested with real
ones (marker ``job``).
"""

from __future__ import annotations

import multiprocessing as mp
import multiprocessing.forkserver
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from meshwright.profilers.run import processes
from meshwright.profilers.run.processes import NodeJob

PRELOADED = [
    "pytest",
    "torch.distributed.tensor",
    "torch.profiler",
    "meshwright.cli.profile",
    "meshwright.profilers.model_steps",
    "meshwright.profilers.run.preflight",
    "meshwright.profilers.run.rank",
    "meshwright.runtime.job.worker",
    "meshwright.runtime.parallelize_model",
    "meshwright.runtime.rl.worker",
    "meshwright.runtime.training.checkpoint",
    "meshwright.runtime.training.train",
    "meshwright.runtime.weights.save",
]


script_output = ""
"""File for what users' scripts write, which goes to the launcher's own streams otherwise."""


class ForkedRank:
    """A forked process with what `run_ranks` uses of a Popen."""

    def __init__(self, process: mp.process.BaseProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_forked(job: NodeJob, local_rank: int, *, again: bool = False) -> ForkedRank:
    """In place of `processes._start`: the same module, arguments, environment and log."""
    module, *arguments = job.command[list(job.command).index("-m") + 1 :]
    environment = {**job.environment(local_rank, again=again), processes._LAUNCHER: "0"}  # its parent is the server
    log = str(job.log_file(local_rank)) if job.captures_output else script_output
    context = mp.get_context("forkserver")
    process = context.Process(target=_run, args=(module, arguments, environment, log, str(Path.cwd())), daemon=True)
    process.start()
    return ForkedRank(process)


def _run(module: str, arguments: list[str], environment: dict[str, str], log: str, folder: str) -> None:
    import torch

    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    if log:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


@contextmanager
def forked_ranks(output: Path | None = None) -> Iterator[None]:
    """Let `run_ranks` fork its ranks while inside, and users' scripts write to a file."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # what libraries read when they are loaded
        mp.forkserver.ensure_running()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "_start", start_forked)
        patch.setattr(sys.modules[__name__], "script_output", "" if output is None else str(output))
        yield


@pytest.fixture
def warm_ranks() -> Iterator[None]:
    """Ranks of this test are forked."""
    with forked_ranks():
        yield
