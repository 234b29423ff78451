"""How far each rank is, for the launcher to see: a line of a few numbers in a mapped file, written without a system call.

A rank that hangs keeps its peers waiting inside a collective; all of them stop making progress at once. Which one is at fault
the launcher learns from their stacks (watch.py): each rank also lets it dump them, by a signal that works whatever it is doing.

What the launcher sees while ranks run: one that is suspended, and one that no longer makes progress.

All ranks of a step stop together when one hangs. After `HANG_S`, or ten times the longest step so far, every rank of this node is
asked for its stack, twice. Those inside a collective wait for somebody else; a rank that is elsewhere, both times at the same
place, or that cannot even answer, is the one they wait for (one that only computes slowly has moved on). It is killed, so that the
job ends, and its stack goes into the message. Where every rank is inside a collective the one at fault is on another node, or
there is none, and the collectives' own timeout ends the job.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import re
import signal
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TextIO

import psutil

FOLDER_VARIABLE = "MESHWRIGHT_PROGRESS"
"""Names the folder of the progress files in the environment of the ranks."""


STACK_SIGNAL = signal.SIGUSR1


_RECORD = struct.Struct("<qdd")


class Heartbeat(NamedTuple):
    """What a rank last said.

    Attributes:
        steps: done by this process.
        at_s: when, by the monotonic clock of the machine; 0 where nobody should wait for it.
        longest_s: the longest time between two beats so far.
    """

    steps: int
    at_s: float
    longest_s: float


class ProgressFile:
    """File of this rank; without the environment's folder nothing is written."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._stacks: TextIO | None = None
        self._beat = Heartbeat(0, 0.0, 0.0)
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder is None:
            return
        path = Path(folder) / os.environ["LOCAL_RANK"]
        path.write_bytes(bytes(_RECORD.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _RECORD.size)
        self._stacks = path.with_suffix(".stacks").open("a")  # for the life of the process; the launcher empties it
        faulthandler.register(STACK_SIGNAL, file=self._stacks, all_threads=True)

    def beat(self) -> None:
        """A step is done."""
        now, before = time.monotonic(), self._beat
        longest_s = max(before.longest_s, now - before.at_s) if before.at_s else before.longest_s
        self._write(Heartbeat(before.steps + 1, now, longest_s))

    def rest(self) -> None:
        """What comes next may take any time (a checkpoint, the end of the run); until the next `beat` nobody is waited for."""
        self._write(self._beat._replace(at_s=0.0))

    def _write(self, beat: Heartbeat) -> None:
        self._beat = beat
        if self._map is not None:
            _RECORD.pack_into(self._map, 0, *beat)


def read_heartbeat(folder: Path, local_rank: int) -> Heartbeat | None:
    """What a rank last said; None where it has not begun."""
    try:
        data = (folder / str(local_rank)).read_bytes()
    except OSError:
        return None
    return Heartbeat(*_RECORD.unpack(data)) if len(data) == _RECORD.size else None


SUSPENDED_S = 5.0
"""How long a rank may be suspended (SIGSTOP) before the job is ended; its peers would wait for the collectives' timeout."""


HANG_S = 10.0
"""No rank is taken for hung before this time without a step."""


HANG_STEPS = 10.0
"""Nor before so many times the longest step so far."""


_ANSWER_S = 2.0


_BETWEEN_S = 1.0


_WAITING_FRAMES = 3


_WAITING = re.compile(
    r'File "[^"]*torch/(distributed/(distributed_c10d|_functional_collectives|fsdp/_fully_shard/_fsdp_collectives)\.py"'
    r"|autograd/graph\.py)"
)


_FRAME = re.compile(r'\s+File "')


@dataclass
class Watch:
    """What the watcher did; read after the job has ended.

    Attributes:
        suspended: processes that it killed because they were suspended.
        hung: processes that it killed because they kept the others waiting, with their stacks.
    """

    suspended: set[int] = field(default_factory=set)
    hung: dict[int, tuple[str, ...]] = field(default_factory=dict)


@contextlib.contextmanager
def watching(folder: Path, watch: Watch, hang_s: float = HANG_S) -> Iterator[None]:
    """Watch this process's children while a job runs; ``folder`` holds their progress files."""
    finished = threading.Event()
    watcher = threading.Thread(target=_watch, args=(folder, hang_s, watch, finished), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()


def _watch(folder: Path, hang_s: float, watch: Watch, finished: threading.Event) -> None:
    since: dict[psutil.Process, float] = {}
    while not finished.wait(1.0):
        now = time.monotonic()
        children = psutil.Process().children()
        since = {child: since.get(child, now) for child in children if _is_suspended(child)}
        for child, start in since.items():
            if now - start >= SUSPENDED_S:
                watch.suspended.add(child.pid)
                child.kill()
        ranks = _local_ranks(children)
        beats = [read_heartbeat(folder, rank) for rank in ranks]
        if hang_s and not since and not watch.hung and ranks and is_stalled(beats, now, hang_s):
            _end_hung(folder, ranks, watch)


def is_stalled(beats: Sequence[Heartbeat | None], now_s: float, hang_s: float = HANG_S) -> bool:
    """Whether ranks that were making steps have all stopped; not while any of them is resting or has yet to begin."""
    known = [beat for beat in beats if beat is not None and beat.at_s and beat.longest_s]
    if len(known) < len(beats):
        return False
    patience_s = max(hang_s, HANG_STEPS * max(beat.longest_s for beat in known))
    return now_s - max(beat.at_s for beat in known) > patience_s


def _end_hung(folder: Path, ranks: dict[int, psutil.Process], watch: Watch) -> None:
    stacks = _ask_stacks(folder, ranks)
    time.sleep(_BETWEEN_S)
    later = _ask_stacks(folder, ranks)
    for rank, process in ranks.items():
        if stacks[rank] == later[rank] and not is_waiting(stacks[rank]):
            watch.hung[process.pid] = stacks[rank]
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _ask_stacks(folder: Path, ranks: dict[int, psutil.Process]) -> dict[int, tuple[str, ...]]:
    """The main thread's stack of every rank, innermost call first; empty where it did not answer."""
    files = {rank: folder / f"{rank}.stacks" for rank in ranks}
    for file in files.values():
        with contextlib.suppress(OSError):
            file.write_text("")
    for process in ranks.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(STACK_SIGNAL)
    end = time.monotonic() + _ANSWER_S
    while time.monotonic() < end and not all(_has_main(file) for file in files.values()):
        time.sleep(0.1)
    time.sleep(0.1)  # the last lines
    return {rank: main_stack(_read_text(file)) for rank, file in files.items()}


def main_stack(dump: str) -> tuple[str, ...]:
    """The frames of the main thread in what faulthandler wrote: the last thread of all."""
    _, found, last = dump.rpartition("most recent call first):\n")
    return tuple(line.strip() for line in last.splitlines() if _FRAME.match(line)) if found else ()


def is_waiting(stack: Sequence[str]) -> bool:
    """Whether a rank is inside a collective, or in a backward pass that may be: somewhere in its innermost calls."""
    return any(_WAITING.search(frame) for frame in stack[:_WAITING_FRAMES])


def _has_main(file: Path) -> bool:
    return "worker.py" in _read_text(file)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _local_ranks(children: Sequence[psutil.Process]) -> dict[int, psutil.Process]:
    found = {}
    for child in children:
        with contextlib.suppress(psutil.Error, KeyError, ValueError):
            found[int(child.environ()["LOCAL_RANK"])] = child
    return found


def _is_suspended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


STOPPED_FILE = "stopped"
"""Written by the ranks into the launcher's folder: the step of the checkpoint with which they ended because they were asked to."""
