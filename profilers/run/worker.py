"""One rank of a brief measurement: ``python -m meshwright.profilers.run.worker TASK.json``, as `launching` starts it.

A program of its own and not a function for multiprocessing: spawn imports the user's main module again (fatal where it
has no ``if __name__ == "__main__"`` or is a notebook), and a fork of a process that has used OpenMP can hang.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING

from ...schema.errors import MeshwrightError
from .launch import note_failure, refuse, tell
from .protocol import ProfileProgress, ProfileTask
from .steps import brief_steps

if TYPE_CHECKING:
    from .rank import MakeSteps

ORPHAN_EXIT_CODE = 3
_TELL_S = 0.1


def main() -> None:
    """Measure what describes a cluster and leave the profile in the task's folder."""
    serve(ProfileTask.load(sys.argv[1]), lambda task, place, on_gpu: brief_steps(task, place, on_gpu=on_gpu))


def serve(task: ProfileTask, make_steps: MakeSteps) -> None:
    """Run one rank of a launched measurement to its end; this process ends with it."""
    threading.Thread(target=_end_with, args=(task.launcher_pid, task.folder), daemon=True).start()
    code = 0
    try:
        _run(task, make_steps)
    except BaseException:  # also Ctrl-C and exhausted memory: the launcher reads the last lines
        note_failure(task, int(os.environ["RANK"]))
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Not the interpreter's shutdown: gloo's threads were seen to abort it, "terminate called without an active exception".
    os._exit(code)


def _run(task: ProfileTask, make_steps: MakeSteps) -> None:
    from .rank import run_rank

    last_s = 0.0

    def throttled(progress: ProfileProgress) -> None:
        nonlocal last_s
        if time.perf_counter() - last_s > _TELL_S:
            last_s = time.perf_counter()
            tell(task, progress)

    try:
        run_rank(task, make_steps, throttled)
    except MeshwrightError as error:
        refuse(task, error)
        raise


def _end_with(launcher_pid: int, folder: str) -> None:
    """End this process when its launcher is gone, also when it was killed and could neither say so nor clean up."""
    while os.getppid() == launcher_pid:
        time.sleep(0.2)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(ORPHAN_EXIT_CODE)


if __name__ == "__main__":
    main()
