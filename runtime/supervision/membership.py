"""A process among the members of a generation: its part of the store, its groups, and how it leaves.

A rank learns of the next generation from a thread that waits for its key. The thread cuts this process's connections to other
ranks, so that a collective that waits for the dead raises at once, and the rank unwinds to its step loop. (`abort` of torch 2.13's
gloo groups ends nothing: a collective goes on to wait for its timeout.)

A rank of an island (training/islands.py) leaves by itself, where it meets the other islands: nothing is cut, and the process group
of its island stays.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from ...profilers.run.processes import STARTS
from ...schema import MeshwrightError, TrainingPlan
from .generations import Board, Generation, GenerationOverError, key_of

STUCK_S = 1.0
"""How long a rank may take to leave a generation whose connections are cut, before another thread goes on in its place."""

INVITED_S = 1.0
"""Between two looks of the first rank at whether processes wait to be taken in."""

_POLL_S, _ABORT_S = 0.002, 0.05
_FOREVER = timedelta(days=3650)


class GenerationStore(dist.Store):
    """The part of the store that belongs to one generation; waiting ends with a later generation."""

    def __init__(self, membership: Membership, store: dist.Store, number: int) -> None:
        super().__init__()
        self._membership, self._number = membership, number
        self._inner = dist.PrefixStore(f"meshwright/ranks/{number}", store)

    def set(self, key: str, value: str) -> None:
        """Write."""
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        """Read, once the key is there."""
        self.wait([key])
        return self._inner.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read several, once they are there."""
        self.wait(keys)
        return self._inner.multi_get(keys)

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """Write several."""
        self._inner.multi_set(keys, values)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        """Wait until the keys are there.

        Raises:
            GenerationOverError: there is a later generation.
            DistStoreError: they are not there in time.
        """
        end = time.monotonic() + (timeout or self._membership.timeout).total_seconds()
        while not self._inner.check(keys):
            self._membership.check(self._number)
            if time.monotonic() > end:
                raise dist.DistStoreError(f"timeout: nobody wrote {keys[0]}")
            time.sleep(_POLL_S)

    def check(self, keys: list[str]) -> bool:
        """Tell whether the keys are there."""
        return self._inner.check(keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        return self._inner.add(key, amount)

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        return self._inner.delete_key(key)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Write where the value is the expected one."""
        return self._inner.compare_set(key, expected, value)

    def append(self, key: str, value: str) -> None:
        """Write behind what is there."""
        self._inner.append(key, value)

    def has_extended_api(self) -> bool:
        """Tell that several keys are read and written at once."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignore: the membership's holds."""


class Membership:
    """A process among the members of the generation that it has entered.

    Attributes:
        entered: number of the first generation that had this process as it was started last.
    """

    def __init__(
        self, host: str, port: int, process: int, timeout_s: float, *, is_new: bool = False, cuts: bool = True
    ) -> None:
        self.process, self.timeout, self._cuts = process, timedelta(seconds=timeout_s), cuts
        self._place, self._lock = (host, port), threading.Lock()
        self._board, self.entered = Board(self.client()), 0
        self.generation = (self._board.after(0) or [self._board.read(0)])[-1]
        self._noticed = self.generation.number
        self._groups: list[Any] = []
        self._stores: list[dist.Store] = []
        self._next_look_s = 0.0
        self.is_new = is_new
        self.is_too_late = is_new and not self._is_taken_in()
        self.store = self._enter(self.generation)

    def _is_taken_in(self) -> bool:
        """Wait for a generation that has this process, which was started anew, as a member; False where the job ends before."""
        self._board.arrive(self.process)
        while not self._board.is_finished():
            later = self._board.after(self._noticed)
            if later:
                self.generation, self._noticed = later[-1], later[-1].number
                if self.process in self.generation.members:
                    self.entered = next(each.number for each in later if self.process in each.members)
                    return True
            time.sleep(_ABORT_S)
        return False

    def begin(self, take_over: Callable[[], bool] = lambda: False) -> None:
        """Begin to watch for later generations.

        Args:
            take_over: called where this process does not leave a generation that is over; returns whether it now does.
        """
        threading.Thread(target=self._watch, args=(take_over,), daemon=True, name="generations").start()

    @classmethod
    def from_environment(cls, timeout_s: float, *, cuts: bool = True) -> Membership:
        """Return the membership of a rank that a supervisor watches over."""
        place, is_new = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), os.environ.get(STARTS, "1") != "1"
        return cls(*place, int(os.environ["RANK"]), timeout_s, is_new=is_new, cuts=cuts)

    def plan(self) -> TrainingPlan:
        """Return the plan of the generation."""
        return self._board.plan_for(self.generation.num_active)

    @property
    def position(self) -> int:
        """Position among the members; of the active ones the rank."""
        return self.generation.members.index(self.process)

    @property
    def is_active(self) -> bool:
        """The process trains in the generation; otherwise it stands by."""
        return self.position < self.generation.num_active

    def join(self, backend: str, device: torch.device) -> None:
        """Enter the default process group of the active members."""
        self.check()
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("default", self.store),
            rank=self.position,
            world_size=self.generation.num_active,
            timeout=self.timeout,
            device_id=device if device.type == "cuda" else None,
        )

    def group(self, name: str, position: int, size: int) -> Any:
        """Return a group of gloo's beside torch's own, which ends with the generation as well."""
        self.check()
        group = dist.ProcessGroupGloo(dist.PrefixStore(name, self.store), position, size, self.timeout)
        with self._lock:
            self._groups.append(group)
        return group

    def check(self, number: int | None = None) -> None:
        """Refuse to go on with a generation that is over.

        Raises:
            GenerationOverError: there is a later one.
        """
        if self._noticed > (self.generation.number if number is None else number):
            raise GenerationOverError(f"generation {self.generation.number} of the job is over")

    def lacks(self, processes: Collection[int]) -> bool:
        """Tell whether a later generation is without one of some processes."""
        if self._noticed == self.generation.number:
            return False
        return not set(processes) <= set(self._board.after(self.generation.number)[-1].members)

    def follow(self, error: BaseException) -> list[Generation]:
        """Enter the last generation and return all that have begun since this one, which explain an error.

        Raises:
            BaseException: the error, where there is none.
        """
        if self._noticed == self.generation.number and not isinstance(error, MeshwrightError):
            self._board.mark("broken", self.generation.number)
        end = time.monotonic() + self.generation.notice_s
        while self._noticed == self.generation.number:
            if time.monotonic() > end:
                raise error
            time.sleep(_POLL_S)
        later = self._board.after(self.generation.number)
        if self.process not in later[-1].members:
            threading.Event().wait()  # for the launcher, which ends this process
        self._leave(later[-1])
        return later

    def request(self) -> None:
        """Ask for another generation: the members could not meet in this one, or have ended the step before others are taken in."""
        self._board.mark("requested", self.generation.number)

    def note_met(self) -> None:
        """Note that every member has what it needs."""
        if not self.position:
            self._board.mark("met", self.generation.number)

    def is_invited(self, *, looks: bool | None = None) -> bool:
        """Tell whether this rank should have all end the step, so that others come or go; the first one looks now and then.

        Args:
            looks: in place of being the first one.
        """
        now = time.monotonic()
        if not (looks if looks is not None else self.position == 0) or now < self._next_look_s:
            return False
        self._next_look_s = now + INVITED_S
        return self._board.is_marked("invited", self.generation.number)

    def stand_by(self) -> None:
        """Wait until the job is done.

        Raises:
            GenerationOverError: there is a later generation, in which this process may have work.
        """
        while not self._board.is_finished():
            self.check()
            time.sleep(_ABORT_S)

    def finish(self) -> None:
        """Let those who stand by go."""
        self._board.finish()

    def _leave(self, generation: Generation) -> None:
        with self._lock:
            if self._cuts:
                self._cut()
            self.generation = generation
            self._noticed = max(self._noticed, generation.number)
            self._groups.clear()
        if self._cuts and dist.is_initialized():
            dist.destroy_process_group()
        self.store = self._enter(generation)

    def _enter(self, generation: Generation) -> GenerationStore:
        store = GenerationStore(self, self.client(), generation.number)
        self._stores.append(store)  # groups of C++ hold it without keeping the Python object alive
        return store

    def client(self) -> dist.TCPStore:
        """Return a connection to the store of the job."""
        host, port = self._place
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False)

    def _watch(self, take_over: Callable[[], bool]) -> None:
        store = Board(self.client()).store
        while True:
            number = self._noticed + 1
            try:
                store.wait([key_of(number)], _FOREVER)
            except dist.DistError:  # the launcher is gone, and this process with it
                return
            with self._lock:  # the driver may have entered a later one meanwhile
                self._noticed = max(self._noticed, number)
            since = time.monotonic()
            while self._cuts and self._is_behind():
                time.sleep(_ABORT_S)
                if time.monotonic() - since > STUCK_S and take_over():
                    since = time.monotonic()

    def _is_behind(self) -> bool:
        """Cut the connections of a generation that is over, until this process has left it; return whether it has not."""
        with self._lock:
            if self._noticed <= self.generation.number:
                return False
            self._cut()
        return True

    def _cut(self) -> None:
        """Cut every connection of this process but those to the store; groups of NCCL, which has others, are aborted."""
        for group in list(_world.pg_map):
            if group.name() != "gloo":
                with suppress(RuntimeError):
                    group.abort()
        for path in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                if path.readlink().name.startswith("socket:"):
                    _shut(int(path.name), keep_port=self._place[1])


def _shut(descriptor: int, *, keep_port: int) -> None:
    """End a TCP connection unless it is to a port; its descriptor stays open for those who read from it."""
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
        if is_tcp and connection.getpeername()[1] != keep_port:
            connection.shutdown(socket.SHUT_RDWR)
