"""The launcher's watch over running ranks: one that is suspended, and one that no longer makes progress.

Each rank writes how far it is, a few numbers in a mapped file, without a system call. A rank that hangs keeps its peers waiting
inside a collective; all of them stop making steps at once. After `HANG_S`, or ten times the longest step so far, every rank of this
node is asked for its stack, twice, by a signal that works whatever it is doing. Those inside a collective wait for somebody else; a
rank that is elsewhere, both times at the same place, or that cannot even answer, is the one they wait for (one that only computes
slowly has moved on). It is killed, so that the job ends, and its stack goes into the message. Where every rank is inside a
collective the one at fault is on another node, or there is none, and the collectives' own timeout ends the job.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import re
import signal
import struct
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import psutil

from ...profilers.run.faults import RankDeath

FOLDER_VARIABLE = "MESHWRIGHT_PROGRESS"
"""Names the folder of the progress files in the environment of the ranks."""

STOPPED_FILE = "stopped"
"""Written by the ranks into that folder: the step of the checkpoint with which they ended on request."""

STACK_SIGNAL = signal.SIGUSR1

SUSPENDED_S = 5.0
"""How long a rank may be suspended (SIGSTOP) before the job is ended; its peers would wait for the collectives' timeout."""

HANG_S, HANG_STEPS = 10.0, 10.0
"""No rank is taken for hung before this time without a step, nor before so many times the longest step so far."""

LOOK_S = 1.0
"""Between two looks at the ranks."""

_ANSWER_S, _BETWEEN_S, _WAITING_FRAMES = 2.0, 1.0, 3
_WAITING = re.compile(
    r'File "[^"]*torch/(distributed/(distributed_c10d|_functional_collectives|fsdp/_fully_shard/_fsdp_collectives)\.py"'
    r"|autograd/graph\.py)"
)
_FRAME = re.compile(r'\s+File "')
_RECORD = struct.Struct("<qddq")


# --- the rank's side -------------------------------------------------------------------------------------------------


class Heartbeat(NamedTuple):
    """The progress that a rank wrote last: steps of this process, and the longest time between two so far.

    ``time_s`` is by the monotonic clock of the machine; 0 where nobody should wait for it. ``done`` are the steps of the training,
    those before a checkpoint that it went on from among them.
    """

    steps: int
    time_s: float
    longest_s: float
    done: int = 0


class ProgressFile:
    """File of this rank; without the environment's folder nothing is written."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
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

    def beat(self, done: int) -> None:
        """Note that a step is done, which is step ``done`` of the training."""
        now, before = time.monotonic(), self._beat
        longest_s = max(before.longest_s, now - before.time_s) if before.time_s else before.longest_s
        self._write(Heartbeat(before.steps + 1, now, longest_s, done))

    def rest(self) -> None:
        """Note that what comes next may take any time (a checkpoint, the end of the run), until the next `beat`."""
        self._write(self._beat._replace(time_s=0.0))

    def _write(self, beat: Heartbeat) -> None:
        self._beat = beat
        if self._map is not None:
            _RECORD.pack_into(self._map, 0, *beat)


# --- the launcher's side ---------------------------------------------------------------------------------------------


class Watch:
    """The watch over the ranks of one node, by the folder of their progress files; ``hang_s`` 0: no rank is taken for hung."""

    def __init__(self, folder: Path, hang_s: float = HANG_S) -> None:
        self.folder, self._hang_s, self._next_look_s = folder, hang_s, 0.0
        self._suspended_since: dict[int, float] = {}
        self._killed_suspended: set[int] = set()
        self._hung: dict[int, tuple[str, ...]] = {}

    @property
    def num_steps(self) -> int:
        """Steps of the training that ranks of this node have done, the one with most."""
        beats = [read_heartbeat(self.folder, int(file.name)) for file in self.folder.iterdir() if file.name.isdigit()]
        return max((beat.done for beat in beats if beat is not None), default=0)

    def look(self, pids: Mapping[int, int], standing_by: Collection[int] = ()) -> None:
        """Look at the processes of the local ranks, once in `LOOK_S`, and kill one that is at fault.

        Args:
            standing_by: ranks that make no steps.
        """
        now = time.monotonic()
        if now < self._next_look_s:
            return
        self._next_look_s = now + LOOK_S
        self._suspended_since = {
            rank: self._suspended_since.get(rank, now) for rank, pid in pids.items() if _is_suspended(pid)
        }
        for rank, since in self._suspended_since.items():
            if now - since >= SUSPENDED_S:
                self._killed_suspended.add(rank)
                _send(pids[rank], signal.SIGKILL)
        pids = {rank: pid for rank, pid in pids.items() if rank not in standing_by}
        beats = [read_heartbeat(self.folder, rank) for rank in pids]
        if self._suspended_since or self._hung or not self._hang_s or not is_stalled(beats, now, self._hang_s):
            return
        stacks = self._stacks(pids)
        time.sleep(_BETWEEN_S)
        later = self._stacks(pids)
        for rank, pid in pids.items():
            if stacks[rank] == later[rank] and not is_waiting(stacks[rank]):
                self._hung[rank] = stacks[rank]
                _send(pid, signal.SIGKILL)

    def begin_anew(self) -> None:
        """Forget the rank that was taken for hung: the others go on without it."""
        self._hung.clear()

    def forget(self, local_rank: int) -> None:
        """Forget the progress of a rank that is started anew: it has yet to begin."""
        (self.folder / str(local_rank)).unlink(missing_ok=True)
        self._killed_suspended.discard(local_rank)

    def completed(self, death: RankDeath, local_rank: int) -> RankDeath:
        """Return a death with what this watch knows of it."""
        return replace(
            death,
            was_suspended=local_rank in self._killed_suspended,
            was_hung=local_rank in self._hung,
            trace=self._hung.get(local_rank, death.trace),
        )

    def _stacks(self, pids: Mapping[int, int]) -> dict[int, tuple[str, ...]]:
        """Return the main thread's stack of every rank, innermost call first; empty where it did not answer."""
        files = {rank: self.folder / f"{rank}.stacks" for rank in pids}
        for file in files.values():
            with contextlib.suppress(OSError):
                file.write_text("")
        for pid in pids.values():
            _send(pid, STACK_SIGNAL)
        end = time.monotonic() + _ANSWER_S
        # The outermost frame of a rank is in its program's file: the dump is there to the end.
        while time.monotonic() < end and not all("worker.py" in _read_text(file) for file in files.values()):
            time.sleep(0.1)
        time.sleep(0.1)  # the last lines
        return {rank: main_stack(_read_text(file)) for rank, file in files.items()}


def read_heartbeat(folder: Path, local_rank: int) -> Heartbeat | None:
    """Return what a rank wrote last; None where it has not begun."""
    try:
        data = (folder / str(local_rank)).read_bytes()
    except OSError:
        return None
    return Heartbeat(*_RECORD.unpack(data)) if len(data) == _RECORD.size else None


def is_stalled(beats: Sequence[Heartbeat | None], now_s: float, hang_s: float = HANG_S) -> bool:
    """Tell whether ranks that were making steps have all stopped; not while any of them is resting or has yet to begin."""
    known = [beat for beat in beats if beat is not None and beat.time_s and beat.longest_s]
    if not known or len(known) < len(beats):
        return False
    patience_s = max(hang_s, HANG_STEPS * max(beat.longest_s for beat in known))
    return now_s - max(beat.time_s for beat in known) > patience_s


def main_stack(dump: str) -> tuple[str, ...]:
    """Return the frames of the main thread in what faulthandler wrote: the last thread of all."""
    _, separator, last = dump.rpartition("most recent call first):\n")
    return tuple(line.strip() for line in last.splitlines() if _FRAME.match(line)) if separator else ()


def is_waiting(stack: Sequence[str]) -> bool:
    """Tell whether a rank is inside a collective, or in a backward pass that may be: somewhere in its innermost calls."""
    return any(_WAITING.search(frame) for frame in stack[:_WAITING_FRAMES])


def _read_text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _is_suspended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False
