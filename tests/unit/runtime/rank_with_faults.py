"""A rank of the built-in training that dies or waits at steps that files in a folder (``FAULTS``) name:

die-STEP-RANK   it kills itself in that step, once; die-STEP-RANK-NUMBER by that signal
die-0-RANK      it kills itself before it has built its part of the model
stuck-STEP-RANK a named pipe, for which its main thread waits in that step until another has taken its place, two steps later
stop-STEP       it waits at the beginning of the step until the file is gone
takes-in        the first rank waits in the next step until others are to be taken in after it, unless all that are back were
at-STEP-RANK    written by the rank at the beginning of a step
wrong-RANK      with a robust sum: it sends -10 times its gradients
waits-RANK      written by a rank that was started anew and waits to be taken in
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from meshwright.profilers.run.processes import serve_rank
from meshwright.runtime import robust_sum
from meshwright.runtime.job import launch, worker
from meshwright.runtime.supervision.generations import Board
from meshwright.runtime.supervision.membership import Membership
from meshwright.runtime.supervision.survivor import Survivor
from meshwright.runtime.training.train import TrainingRun


def serve() -> None:
    """Do the worker's job, with faults."""
    folder, rank, step, arrive = Path(os.environ["FAULTS"]), os.environ["RANK"], TrainingRun.step, Board.arrive

    def faulty_step(run: TrainingRun, tokens: Any) -> None:
        name = f"{run.steps + 1}-{rank}"
        (folder / f"at-{name}").touch()
        is_main = threading.current_thread() is threading.main_thread()
        for pipe in folder.glob(f"stuck-{run.steps + 1 if is_main else run.steps - 1}-{rank}"):
            os.close(os.open(pipe, os.O_RDONLY if is_main else os.O_WRONLY))
            time.sleep(0.0 if is_main else 0.5)
        while (folder / f"stop-{run.steps + 1}").exists():
            time.sleep(0.01)
        die(name)
        step(run, tokens)

    def die(name: str) -> None:
        for file in [*folder.glob(f"die-{name}"), *folder.glob(f"die-{name}-*")]:
            file.unlink()
            os.kill(os.getpid(), int(file.name.removeprefix(f"die-{name}").strip("-") or signal.SIGKILL))

    def faulty_build(survivor: Survivor, *args: Any) -> None:
        die(f"0-{rank}")
        build(survivor, *args)

    def arrive_noted(board: Board, process: int) -> None:
        arrive(board, process)
        (folder / f"waits-{rank}").touch()

    def is_invited_in_time(membership: Membership, **looks: bool) -> bool:
        if membership.position or not (folder / "takes-in").exists():
            return is_invited(membership, **looks)
        back = {int(path.name.removeprefix("waits-")) for path in folder.glob("waits-*")}
        awaits = not back or not back <= set(membership.generation.members)
        while awaits and not membership._board.is_marked("invited", membership.generation.number):
            time.sleep(0.01)
        (folder / "takes-in").unlink()
        return awaits

    def wrong_mean(parts: torch.Tensor, kind: Any, group: Any) -> torch.Tensor:
        return mean(-10 * parts if (folder / f"wrong-{rank}").exists() else parts, kind, group)

    mean, robust_sum.scattered_mean = robust_sum.scattered_mean, wrong_mean
    is_invited, Membership.is_invited = Membership.is_invited, is_invited_in_time  # type: ignore[method-assign]
    TrainingRun.step = faulty_step  # type: ignore[method-assign]
    build, Survivor._build = Survivor._build, faulty_build  # type: ignore[method-assign]
    Board.arrive = arrive_noted  # type: ignore[method-assign]
    worker.main()


def use(folder: Path, patch: Any) -> None:
    """Let `launch` start such ranks."""
    here = str(Path(__file__).parent)
    patch.setenv("FAULTS", str(folder))
    patch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
    patch.setattr(launch, "worker", SimpleNamespace(__name__=Path(__file__).stem))


if __name__ == "__main__":
    serve_rank(serve)
