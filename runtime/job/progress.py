"""How far each rank is, for the launcher to see: a line of a few numbers in a mapped file, written without a system call.

A rank that hangs keeps its peers waiting inside a collective; all of them stop making progress at once. Which one is at fault
the launcher learns from their stacks (watch.py): each rank also lets it dump them, by a signal that works whatever it is doing.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import struct
import time
from pathlib import Path
from typing import NamedTuple, TextIO

FOLDER_VARIABLE = "MESHWRIGHT_PROGRESS"
"""Names the folder of the progress files in the environment of the ranks."""

STACK_SIGNAL = signal.SIGUSR1

_RECORD = struct.Struct("<qdd")


class Beat(NamedTuple):
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
        self._beat = Beat(0, 0.0, 0.0)
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
        self._write(Beat(before.steps + 1, now, longest_s))

    def rest(self) -> None:
        """What comes next may take any time (a checkpoint, the end of the run); until the next `beat` nobody is waited for."""
        self._write(self._beat._replace(at_s=0.0))

    def _write(self, beat: Beat) -> None:
        self._beat = beat
        if self._map is not None:
            _RECORD.pack_into(self._map, 0, *beat)


def read_beat(folder: Path, local_rank: int) -> Beat | None:
    """What a rank last said; None where it has not begun."""
    try:
        data = (folder / str(local_rank)).read_bytes()
    except OSError:
        return None
    return Beat(*_RECORD.unpack(data)) if len(data) == _RECORD.size else None
