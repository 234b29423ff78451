"""Start the ranks of a measurement on this machine, hear how far they are, and end them when the time is over.

This process does not import torch, which takes seconds of the budget on a busy machine: the ranks are plain processes that meet
through a store of the first one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...schema.base import read_json, write_atomically
from ...schema.errors import MeshwrightError, ProfileError
from ...schema.profile import Profile, ProfileSection
from ..machine import cpu_rank_environment
from .protocol import ProfileProgress, ProfileTask

_PROGRESS, _ERROR, _PROFILE = "progress.json", "error.json", "profile.json"
_LOOK_S = 0.05
_PATIENCE_S = 2.0
"""For ranks to end after they were asked to."""

_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")

_OUT_OF_MEMORY = (
    "MemoryError",
    "bad_alloc",
    "annot allocate memory",
    "can't allocate memory",
    "failed to map segment",
    "can't start new thread",
    "Thread creation failed",
    "pthread_create failed",
    "CUDA out of memory",
)
"""How the interpreter, the loader, torch and its libraries say that memory ran out."""


def launch_ranks(
    module: str, task: ProfileTask, num_ranks: int, *, on_progress: Callable[[ProfileProgress], None] | None = None
) -> Profile:
    """Run ``python -m module TASK`` as every rank and read the profile that the first one leaves.

    Where the task has a start and a budget, ranks that are not done shortly before its end are ended: what they have kept counts.

    Raises:
        MeshwrightError: what a rank refused to do; memory ran out; or the time was over before there was anything to keep.
        ProfileError: a rank failed, or a signal ended them; it then does to this process what it would have done without us.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        task = replace(task, folder=folder, launcher_pid=os.getpid())
        task.save(Path(folder) / "task.json")
        with _signals_noted() as received, _following(Path(folder), on_progress):
            ended = _run(module, task, num_ranks, received)
        profile = None if received else _read_profile(task, ended)
    if received:
        signal.raise_signal(received[0])
    if profile is None:
        raise ProfileError(f"measuring this machine was ended by {received[0].name}")
    return profile


@dataclass(frozen=True)
class _Ended:
    """How ranks ended: whether by the deadline, and else the exit code and last words of the one that failed."""

    is_late: bool = False
    failed_rank: int | None = None
    exit_code: int = 0
    last_words: tuple[str, ...] = ()


def _run(module: str, task: ProfileTask, num_ranks: int, received: Sequence[signal.Signals]) -> _Ended:
    """Run the ranks until all are done, one fails, the time is over or a signal came."""
    folder = Path(task.folder)
    processes = []
    try:
        for rank in range(num_ranks):
            with (folder / f"rank-{rank}.txt").open("wb") as log:
                command = [sys.executable, "-m", module, str(folder / "task.json")]
                surroundings = {**os.environ, **_rank_environment(task, rank, num_ranks)}
                processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=surroundings))
        while not received:
            codes = [process.poll() for process in processes]
            if any(codes):
                return _failure(folder, [process.poll() for process in processes])
            if None not in codes:
                return _Ended()
            if time.time() > task.ends_at:
                return _Ended(is_late=True)
            time.sleep(_LOOK_S)
        return _Ended()
    finally:
        _end(processes, at_once=time.time() > task.ends_at)


def _rank_environment(task: ProfileTask, rank: int, num_ranks: int) -> dict[str, str]:
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": num_ranks,
        "GROUP_RANK": 0,
    }
    threads = {} if num_ranks == 1 or "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
    memory = cpu_rank_environment() if task.backend == "gloo" else {}
    return {**{name: str(number) for name, number in numbers.items()}, **threads, **memory}


def _end(processes: Sequence[subprocess.Popen[bytes]], *, at_once: bool) -> None:
    """End what still runs."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.kill() if at_once else process.terminate()
    deadline = time.monotonic() + _PATIENCE_S
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _failure(folder: Path, codes: Sequence[int | None]) -> _Ended:
    """The rank that failed first: others fail because it is gone. A signal's victim leaves no note of its time."""
    failed = [rank for rank, code in enumerate(codes) if code]
    rank = min(failed, key=lambda rank: _failed_at(folder, rank))
    text = (folder / f"rank-{rank}.txt").read_text(encoding="utf-8", errors="replace")
    lines = tuple(line.strip() for line in text.splitlines() if line.strip())
    return _Ended(failed_rank=rank, exit_code=codes[rank] or 0, last_words=lines[-3:])


def _failed_at(folder: Path, rank: int) -> float:
    path = folder / f"failed-{rank}.txt"
    return float(path.read_text()) if path.exists() else 0.0


def _read_profile(task: ProfileTask, ended: _Ended) -> Profile:
    """What the ranks have left, after everything that speaks against it."""
    folder = Path(task.folder)
    if (folder / _ERROR).exists():
        raise _read_error(folder / _ERROR)
    if ended.failed_rank is not None:
        raise _error_of(ended)
    if not (folder / _PROFILE).exists():
        raise _too_late(task)
    profile = Profile.load(folder / _PROFILE)
    if not ended.is_late:
        return profile
    profile = _cut_short(profile, task).sealed()
    if task.out:
        profile.save(task.out)
    return profile


def _cut_short(profile: Profile, task: ProfileTask) -> Profile:
    """With a record of the parts that the ranks did not come to."""
    known = {part.name for part in profile.parts}
    reason = f"the {task.budget_s:g} s were over"
    missing = tuple(
        ProfileSection(name=name, state="skipped", duration_s=0.0, num_points=0, reason=reason)
        for name in task.parts
        if name not in known
    )
    return profile.replace(parts=(*profile.parts, *missing), content_sha256="")


def _error_of(ended: _Ended) -> MeshwrightError:
    code, words = ended.exit_code, ended.last_words
    how = f"rank {ended.failed_rank} ended with exit code {code}"
    if code < 0:
        how = f"rank {ended.failed_rank} was ended by {signal.Signals(-code).name}"
    if -code == signal.SIGKILL or any(sign in line for line in words for sign in _OUT_OF_MEMORY):
        return MeshwrightError(
            "memory ran out while this machine was measured",
            details=(how, *words[-1:]),
            help="end what uses the memory or raise its limit (ulimit -v), or measure with fewer ranks (--ranks)",
        )
    return ProfileError("measuring this machine failed", details=(how, *(words or ("no message",))))


def _too_late(task: ProfileTask) -> MeshwrightError:
    path = Path(task.folder) / _PROGRESS
    reached = ProfileProgress(*read_json(path)).what if path.exists() else "the start of the ranks"
    return MeshwrightError(
        f"the {task.budget_s:g} s were over before there was anything to keep",
        details=(f"reached: {reached}; other work used {100 * (task.foreign_load_fraction or 0):.0f} % of the cores",),
        help=f"give more time (--budget-s {max(30, round(3 * task.budget_s))}), or measure when the machine is idle",
    )


@contextmanager
def _signals_noted() -> Iterator[list[signal.Signals]]:
    """Signals that would end this process are noted, so that the ranks are ended first; the handlers of before come back."""
    received: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
        yield received
        return

    def note(number: int, _: Any) -> None:
        received.append(signal.Signals(number))

    numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number, handler in before.items():
            if handler not in (signal.SIG_IGN, None):
                signal.signal(number, note)
        yield received
    finally:
        for number, handler in before.items():
            if handler not in (signal.SIG_IGN, None):
                signal.signal(number, handler)


# --- what ranks and launcher tell one another ------------------------------------------------------------------------


def tell(task: ProfileTask, progress: ProfileProgress) -> None:
    """From the first rank: how far it is."""
    write_atomically(Path(task.folder) / _PROGRESS, json.dumps(progress))


def refuse(task: ProfileTask, error: MeshwrightError) -> None:
    """From any rank: why there will be no profile, as a message for the user."""
    parts: dict[str, Any] = {"message": error.message, "details": error.details, "help": error.help}
    write_atomically(Path(task.folder) / _ERROR, json.dumps({**parts, "bad_input": isinstance(error, ProfileError)}))


def note_failure(task: ProfileTask, rank: int) -> None:
    """From any rank: that it failed now."""
    write_atomically(Path(task.folder) / f"failed-{rank}.txt", repr(time.time()))


def _read_error(path: Path) -> MeshwrightError:
    content = read_json(path)
    kind = ProfileError if content.pop("bad_input") else MeshwrightError
    return kind(content.pop("message"), details=tuple(content.pop("details")), help=content["help"])


@contextmanager
def _following(folder: Path, on_progress: Callable[[ProfileProgress], None] | None) -> Iterator[None]:
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


def _follow(path: Path, on_progress: Callable[[ProfileProgress], None] | None, finished: threading.Event) -> None:
    last = ""
    while on_progress is not None and not finished.wait(_LOOK_S):
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if text != last:
            last = text
            on_progress(ProfileProgress(*json.loads(text)))
