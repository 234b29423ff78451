"""What each rank runs: ``python -m meshwright.runtime.job.worker job.json``, started by `launch`.

Either the built-in training or a user's own script, with the plan's path in ``MESHWRIGHT_PLAN`` and torchrun's
variables (``RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT``) in the environment.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from pydantic import Field

from ...profilers.run.faults import error_payload
from ...schema import ConfigError, MeshwrightError, Plan
from ...schema.base import Document
from ..training.options import TrainOptions

_PR_SET_PDEATHSIG = 1


class Job(Document):
    """What the ranks of one node are to do.

    Attributes:
        plan: absolute path of the plan.
        options: of the built-in training; unused where there is a script.
        report: file that the reporting rank appends its metrics to.
        timeout_s: how long a collective may wait for a rank.
        hang_timeout_s: no rank of a training run is taken for hung before this time without a step; 0: never.
        grace_s: how long ranks may take for a last checkpoint after SIGTERM.
        script: a user's script and its arguments; empty for the built-in training.
    """

    plan: str
    options: TrainOptions = TrainOptions()
    report: str | None = None
    timeout_s: float = Field(default=600.0, gt=0, le=10**7)
    hang_timeout_s: float = Field(default=10.0, ge=0)
    grace_s: float = Field(default=25.0, ge=0)
    script: tuple[str, ...] = ()


def main() -> None:
    """Run the job named on the command line; every failure is recorded for the launcher and ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a rank inside a collective would not see a KeyboardInterrupt
    faulthandler.enable()
    _end_with_parent()
    try:
        run(Job.load(sys.argv[1]))
    except SystemExit as error:
        if isinstance(error.code, int) and error.code:
            _exit_failed(None, error.code)
        if isinstance(error.code, str):
            _exit_failed(error, 1)
    except BaseException as error:  # CheckpointException and others of torch's are not Exceptions
        _exit_failed(error, 1)
    _exit_well()


def run(job: Job) -> None:
    """Do the job in this process."""
    if job.script:
        _run_script(job)
        return
    from ..training.train import train

    train(Plan.load(job.plan), job.options, report=job.report, timeout_s=job.timeout_s)


def _run_script(job: Job) -> None:
    script, *arguments = job.script
    if not Path(script).is_file():
        raise ConfigError(f"no such script: {script}")
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def _end_with_parent() -> None:
    """Let the kernel kill this process if the launcher dies without a chance to do so (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _exit_well() -> NoReturn:
    """End without tearing the interpreter down, as multiprocessing's children do.

    A gloo thread that drops the last reference to a tensor while Python finalizes aborts the process ("terminate called
    without an active exception": a fifth of two-rank runs with torch 2.13, Python 3.11), and a run that had succeeded fails.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _exit_failed(error: BaseException | None, code: int) -> NoReturn:
    """Record the error and end at once: destructors of process groups would wait for peers that wait for this rank."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error is not None and path:
        Path(path).write_text(json.dumps(_error_record(error)), encoding="utf-8")
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _error_record(error: BaseException) -> dict[str, object]:
    """The form that torch.distributed.elastic reads, with two fields of ours."""
    lines = str(error).strip().splitlines() or [""]
    extra: dict[str, object] = {
        "py_callstack": "".join(traceback.format_exception(type(error), error, _below_worker(error.__traceback__))),
        "timestamp": str(int(time.time())),
        "time_s": time.time(),
    }
    if isinstance(error, MeshwrightError):
        extra["meshwright"] = error_payload(error)
    return {"message": {"message": f"{type(error).__name__}: {lines[0]}", "extraInfo": extra}}


def _below_worker(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that begins in the job's own code."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main()
