"""The processes of a job on one node: one for each local rank, started, watched and ended together.

`meshwright apply` and `meshwright profile` both start their ranks here, without importing torch. On the other side a rank's process
runs its program under `serve_rank`: it ends with its launcher, records an exception where the launcher looks for it, and ends
without tearing the interpreter down.

Each rank is a program of its own and not a function for multiprocessing: spawn imports the user's main module again (fatal where it
has no ``if __name__ == "__main__"`` or is a notebook), and a fork of a process that has used OpenMP can hang.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Protocol

from .faults import RankDeath, read_death, record_error

ERROR_FILE = "MESHWRIGHT_ERROR_FILE"
"""Names the file for a rank's error record in its environment."""

STARTS = "MESHWRIGHT_STARTS"
"""Says in a rank's environment how often its number was started in this job; 1 at first."""

_LAUNCHER = "MESHWRIGHT_LAUNCHER_PID"
_POLL_S = 0.05
_SHUTDOWN_S = 5.0
"""How long ranks may take to end after a request, before they are killed."""

_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
_PR_SET_PDEATHSIG = 1


# --- the launcher's side ---------------------------------------------------------------------------------------------


def program(module: str, *arguments: str | Path) -> tuple[str, ...]:
    """Return the command that runs a module of ours; it imports nothing from the current folder, which may be anybody's."""
    return (sys.executable, "-P", "-u", "-m", module, *map(str, arguments))


@dataclass(frozen=True, kw_only=True)
class NodeJob:
    """The part of a job that runs on this node.

    Attributes:
        command: of every rank.
        folder: for logs and error records.
        num_ranks: on this node; ``first_rank`` is the first of them among ``world_size``.
        variables: for the ranks' environment, besides this process's own and RANK, LOCAL_RANK, WORLD_SIZE and their like.
        captures_output: write output to files in ``folder``, not to this process's own streams.
        ends_at: when ranks that are not done are ended, seconds of the epoch.
        grace_s: on SIGTERM the ranks get the signal too, unless the others go on without them, and have so long to end by
            themselves; 0: they are ended at once.
        starts: how often ranks of these numbers have been started, this time included.
    """

    command: Sequence[str]
    folder: Path
    num_ranks: int
    first_rank: int = 0
    world_size: int = 0
    node_rank: int = 0
    variables: Mapping[str, str] = field(default_factory=dict)
    captures_output: bool = True
    ends_at: float = float("inf")
    grace_s: float = 0.0
    starts: int = 1

    def error_file(self, local_rank: int) -> Path:
        """Return where a rank records its error."""
        return self.folder / f"error-{local_rank}.json"

    def log_file(self, local_rank: int) -> Path:
        """Return where a rank's output goes."""
        return self.folder / f"rank-{local_rank}.log"

    def environment(self, local_rank: int, *, again: bool = False) -> dict[str, str]:
        """Return a rank's environment, with torchrun's variables."""
        numbers = {
            "RANK": self.first_rank + local_rank,
            "WORLD_SIZE": self.world_size or self.num_ranks,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": self.num_ranks,
            "GROUP_RANK": self.node_rank,
            STARTS: self.starts + again,
            _LAUNCHER: os.getpid(),
        }
        local = {name: str(number) for name, number in numbers.items()} | {ERROR_FILE: str(self.error_file(local_rank))}
        return {**os.environ, **local, **self.variables}


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """How the ranks of this node ended.

    Attributes:
        deaths: of the ranks that did not end well, those that the launcher ended included; none where all did.
        outlived: of ranks without which the others went on, and that were not started anew.
        ended_well: ranks that had ended by themselves without an error.
        received: the signal to this process that ended them, or requested their end.
        is_late: they were ended because the time was over.
    """

    deaths: tuple[RankDeath, ...] = ()
    outlived: tuple[RankDeath, ...] = ()
    ended_well: tuple[int, ...] = ()
    received: signal.Signals | None = None
    is_late: bool = False


class Survival(Protocol):
    """Says what becomes of a job whose ranks die one by one."""

    def goes_on(self, death: RankDeath) -> bool:
        """Tell whether the others go on without a rank."""

    def leaves(self) -> bool:
        """Tell whether the others go on without this node, which was asked to end; otherwise its ranks are asked to."""

    def returning(self) -> Collection[int]:
        """Return the local ranks that are to be started anew."""

    def stays(self) -> bool:
        """Tell whether this launcher is needed although none of its ranks runs."""


def run_ranks(
    job: NodeJob, on_poll: Callable[[Mapping[int, int]], None] | None = None, survival: Survival | None = None
) -> JobEnd:
    """Run the ranks of this node until all are done, one fails, the time is over or a signal comes; none is left behind.

    Args:
        on_poll: called twenty times a second with the process of each local rank.
        survival: asked when ranks fail. Unset, the first one ends the job.
    """
    processes: list[subprocess.Popen[bytes]] = []
    outlived: dict[int, RankDeath] = {}

    def death_of(local_rank: int, *, ended_by_launcher: bool = False) -> RankDeath:
        return read_death(
            job.first_rank + local_rank,
            processes[local_rank].returncode,
            ended_by_launcher=ended_by_launcher,
            record=job.error_file(local_rank),
            log=job.log_file(local_rank),
        )

    def outlives(local_rank: int) -> bool:
        if local_rank in outlived:
            return True
        death = death_of(local_rank)
        if survival is None or received or not survival.goes_on(death):
            return False
        outlived[local_rank] = death
        _end_session(processes[local_rank])
        return True

    def look(pids: Mapping[int, int]) -> None:
        if on_poll is not None:
            on_poll(pids)
        for local_rank in survival.returning() if survival is not None and not received else ():
            job.error_file(local_rank).unlink(missing_ok=True)
            processes[local_rank] = _start(job, local_rank, again=True)
            del outlived[local_rank]

    with _noted_signals() as received:
        try:
            for local_rank in range(job.num_ranks):
                processes.append(_start(job, local_rank))  # noqa: PERF401 - if one cannot start the others are ended
            _wait(job, processes, received, look, outlives, survival)
            codes = [process.poll() for process in processes]
        finally:
            _end(processes, at_once=time.time() > job.ends_at)
    deaths = tuple(
        death_of(i, ended_by_launcher=codes[i] is None)
        for i, process in enumerate(processes)
        if process.returncode and i not in outlived
    )
    return JobEnd(
        deaths=deaths,
        outlived=tuple(outlived.values()),
        ended_well=tuple(job.first_rank + i for i, code in enumerate(codes) if code == 0),
        received=received[0] if received else None,
        is_late=None in codes and time.time() > job.ends_at,
    )


def _start(job: NodeJob, local_rank: int, *, again: bool = False) -> subprocess.Popen[bytes]:
    # A session of its own: signals from the terminal reach the launcher only, and what a dead rank had started can be ended.
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(job.log_file(local_rank).open("wb")) if job.captures_output else None
        return subprocess.Popen(
            job.command, stdout=log, stderr=log, env=job.environment(local_rank, again=again), start_new_session=True,
            preexec_fn=_killed_with_launcher(),  # one call of the kernel, looked up before the fork
        )  # fmt: skip


def _killed_with_launcher() -> Callable[[], int] | None:
    """Return what lets the kernel kill the process that calls it when its launcher is gone, whatever it is doing.

    A rank calls it before it is a Python: one that is suspended while that starts ends as well.
    """
    if sys.platform != "linux":
        return None
    return functools.partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGKILL.value)


def _wait(
    job: NodeJob,
    processes: Sequence[subprocess.Popen[bytes]],
    received: Sequence[signal.Signals],
    on_poll: Callable[[Mapping[int, int]], None],
    outlives: Callable[[int], bool],
    survival: Survival | None,
) -> None:
    """Return when all ranks have ended well and this launcher is not needed, or the others have to be ended."""
    deadline, is_requested = float("inf"), False
    while True:
        codes = [process.poll() for process in processes]
        if any(code and not outlives(rank) for rank, code in enumerate(codes)):
            return
        is_needed = survival is not None and survival.stays()
        if (None not in codes and not is_needed) or time.time() > min(deadline, job.ends_at):
            return
        if received:
            if received[0] != signal.SIGTERM or len(received) > 1 or not job.grace_s:
                return
            if deadline == float("inf"):
                deadline = time.time() + job.grace_s
            if not is_requested and not (survival is not None and survival.leaves()):
                is_requested = True
                for process in processes:
                    process.send_signal(signal.SIGTERM)  # nothing where it has ended
        on_poll({rank: process.pid for rank, process in enumerate(processes) if codes[rank] is None})
        time.sleep(_POLL_S)


def _end(processes: Sequence[subprocess.Popen[bytes]], *, at_once: bool) -> None:
    """End what still runs, and what dead ranks had started."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.kill() if at_once else process.terminate()
    deadline = time.monotonic() + _SHUTDOWN_S
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for process in processes:
        if process.returncode:
            _end_session(process)


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """End what a dead rank had started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def _noted_signals() -> Iterator[list[signal.Signals]]:
    """Note signals that would end this process, so that the ranks are ended first; the handlers of before come back."""
    received: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
        yield received
        return
    numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    handled = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for number in handled:
            signal.signal(number, lambda number, _: received.append(signal.Signals(number)))
        yield received
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)


# --- the rank's side -------------------------------------------------------------------------------------------------


def serve_rank(program: Callable[[], None]) -> NoReturn:
    """Run the program of a rank that `run_ranks` started; every failure is recorded for the launcher and ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a rank inside a collective would not see a KeyboardInterrupt
    faulthandler.enable()
    _end_with_launcher()
    try:
        program()
    except SystemExit as error:
        if error.code:
            _exit_failed(None if isinstance(error.code, int) else error, error.code, program)
    except BaseException as error:  # CheckpointException and others of torch's are not Exceptions
        _exit_failed(error, 1, program)
    exit_well()


def _end_with_launcher() -> None:
    """End this process when its launcher is gone, also where that was killed and could not end it."""
    launcher = int(os.environ.get(_LAUNCHER, "0"))
    if (die_with_launcher := _killed_with_launcher()) is not None:
        die_with_launcher()  # once more, for one that a program in between has started
        if launcher and os.getppid() != launcher:  # it was gone before the kernel knew
            os._exit(1)
    elif launcher:

        def exit_without() -> None:
            while os.getppid() == launcher:
                time.sleep(0.2)
            os._exit(1)

        threading.Thread(target=exit_without, daemon=True).start()


def exit_well() -> NoReturn:
    """End without tearing the interpreter down, as multiprocessing's children do.

    A gloo thread that drops the last reference to a tensor while Python finalizes aborts the process ("terminate called
    without an active exception": a fifth of two-rank runs with torch 2.13, Python 3.11), and a run that had succeeded fails.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    """Raise an error in another thread of this process, as soon as it runs Python code."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(error))


def exit_now(error: BaseException | None) -> NoReturn:
    """End this process from another thread than the main one, which may never come back; an error is recorded for the launcher."""
    if error is not None:
        _exit_failed(error, 1, serve_rank)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _exit_failed(error: BaseException | None, code: object, program: Callable[..., object]) -> NoReturn:
    """Record the error and end at once: destructors of process groups would wait for peers that wait for this rank."""
    path = os.environ.get(ERROR_FILE)
    if error is not None and path:
        with contextlib.suppress(OSError):  # the disk is full: the launcher says so
            record_error(Path(path), error, hidden_files=(__file__, program.__code__.co_filename, "<frozen runpy>"))
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)
