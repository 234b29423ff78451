"""Start the ranks of a measurement on this machine through torchrun's elastic agent, and hear how far they are."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...schema.base import read_json, write_atomically
from ...schema.errors import MeshwrightError, ProfileError
from ...schema.profile import Profile
from ..machine import cpu_rank_environment, environment
from .task import Progress, Task

_PROGRESS, _ERROR = "progress.json", "error.json"
_LOOK_S = 0.1


def launch_ranks(
    module: str, task: Task, num_ranks: int, *, on_progress: Callable[[Progress], None] | None = None
) -> Profile:
    """Run ``python -m module TASK`` as every rank and read the profile that the first one leaves.

    Raises:
        MeshwrightError: what a rank refused to do.
        ProfileError: a rank failed, or a signal ended them; it then does to this process what it would have done without us.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        task = replace(task, folder=folder, launcher_pid=os.getpid())
        task.save(Path(folder) / "task.json")
        with _following(Path(folder), on_progress):
            received = _launch(module, task, num_ranks)
        profile = None if received else Profile.load(Path(folder) / "profile.json")
    if received is not None:
        signal.raise_signal(received)
    if profile is None:
        raise ProfileError(f"measuring this machine was ended by {signal.Signals(received or 0).name}")
    return profile


def _launch(module: str, task: Task, num_ranks: int) -> signal.Signals | None:
    """Run one worker a rank; a signal ends the ranks and is returned."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",  # a look-up of this machine's name can take seconds, or fail
        max_restarts=0,
        monitor_interval=0.05,
        logs_specs=DefaultLogsSpecs(log_dir=task.folder, redirects=Std.ALL),
    )
    try:
        memory = cpu_rank_environment() if task.backend == "gloo" else {}
        with _signals_restored(config.signals_to_handle.split(",")), environment(memory):
            elastic_launch(config, sys.executable)("-m", module, str(Path(task.folder) / "task.json"))
    except ChildFailedError as error:
        refused = Path(task.folder) / _ERROR
        if refused.exists():
            raise _read_error(refused) from None
        rank, failure = error.get_first_failure()
        lines = str(failure.message).strip().splitlines() or ["no message"]
        details = (f"rank {rank} ended with exit code {failure.exitcode}", *(line.strip() for line in lines[-3:]))
        raise ProfileError("measuring this machine failed", details=details) from None
    except SignalException as signalled:
        return signalled.sigval
    return None


@contextmanager
def _signals_restored(names: list[str]) -> Iterator[None]:
    """Undo what the elastic agent does to a process that lives on: its signal handlers and its environment variable."""
    before = {number: signal.getsignal(number) for name in names if (number := getattr(signal, name, None)) is not None}
    variable = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE")
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)
        if variable is not None:
            os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = variable


# --- what ranks and launcher tell one another ------------------------------------------------------------------------


def tell(task: Task, progress: Progress) -> None:
    """From the first rank: how far it is."""
    write_atomically(Path(task.folder) / _PROGRESS, json.dumps(progress))


def refuse(task: Task, error: MeshwrightError) -> None:
    """From any rank: why there will be no profile, as a message for the user."""
    parts: dict[str, Any] = {"message": error.message, "details": error.details, "help": error.help}
    write_atomically(Path(task.folder) / _ERROR, json.dumps({**parts, "bad_input": isinstance(error, ProfileError)}))


def _read_error(path: Path) -> MeshwrightError:
    content = read_json(path)
    kind = ProfileError if content.pop("bad_input") else MeshwrightError
    return kind(content.pop("message"), details=tuple(content.pop("details")), help=content["help"])


@contextmanager
def _following(folder: Path, on_progress: Callable[[Progress], None] | None) -> Iterator[None]:
    """Hand on what the first rank tells while the ranks run."""
    finished = threading.Event()
    follower = threading.Thread(target=_follow, args=(folder / _PROGRESS, on_progress, finished), daemon=True)
    if on_progress is not None:
        follower.start()
    try:
        yield
    finally:
        finished.set()
        if on_progress is not None:
            follower.join()


def _follow(path: Path, on_progress: Callable[[Progress], None] | None, finished: threading.Event) -> None:
    last = ""
    while on_progress is not None and not finished.wait(_LOOK_S):
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if text != last:
            last = text
            on_progress(Progress(*json.loads(text)))
