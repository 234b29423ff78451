"""What each rank runs: ``python -m meshwright.runtime.worker job.json``, started by `launch`.

Either the built-in training or a user's own script, with the plan's path in ``MESHWRIGHT_PLAN`` and torchrun's variables
(``RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT``) in the environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pydantic import PositiveFloat

from ..schema import ConfigError, MeshwrightError, Plan
from ..schema.base import Document
from .faults import error_payload
from .options import TrainOptions

_PR_SET_PDEATHSIG = 1


class Job(Document):
    """What the ranks of one node are to do.

    Attributes:
        plan: absolute path of the plan.
        options: of the built-in training; unused where there is a script.
        report: file that the reporting rank appends its metrics to.
        timeout_s: how long a collective may wait for a rank.
        script: a user's script and its arguments; empty for the built-in training.
    """

    plan: str
    options: TrainOptions = TrainOptions()
    report: str | None = None
    timeout_s: PositiveFloat = 600.0
    script: tuple[str, ...] = ()


def main() -> None:
    """Run the job named on the command line; every failure is recorded for the launcher and ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a rank inside a collective would not see a KeyboardInterrupt
    _end_with_parent()
    try:
        run(Job.load(sys.argv[1]))
    except SystemExit as error:
        if error.code not in (None, 0):
            _exit_failed(error if isinstance(error.code, str) else None, error.code if isinstance(error.code, int) else 1)
    except BaseException as error:  # CheckpointException and others of torch's are not Exceptions
        _exit_failed(error, 1)


def run(job: Job) -> None:
    """Do the job in this process."""
    if job.script:
        _run_script(job)
        return
    from .train import train

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
        "py_callstack": "".join(traceback.format_exception(error)),
        "timestamp": str(int(time.time())),
        "time_s": time.time(),
    }
    if isinstance(error, MeshwrightError):
        extra["meshwright"] = error_payload(error)
    return {"message": {"message": f"{type(error).__name__}: {lines[0]}", "extraInfo": extra}}


if __name__ == "__main__":
    main()
