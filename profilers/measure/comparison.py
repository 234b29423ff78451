"""The same product on every rank at once, over and over between the other measurements: which rank is slower than its peers.

On a CPU each rank keeps to cores of its own meanwhile, since a scheduler that moves ranks about lets all of them pay for what
disturbs one core; a pinned process is slowed down by what else runs on its cores, and by nothing else. The repetitions lie all over
the measurement, so that what comes and goes within seconds disturbs few of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .timing import Bench


_THREADS = Path("/proc/self/task")


def local_cores(allowed: frozenset[int], local_rank: int, ranks_per_node: int) -> frozenset[int]:
    """Return an even part of the allowed cores, disjoint from those of the node's other ranks; none where ranks outnumber cores."""
    per_rank = len(allowed) // ranks_per_node
    return frozenset(sorted(allowed)[local_rank * per_rank : (local_rank + 1) * per_rank])


@contextmanager
def pinned(cores: frozenset[int]) -> Iterator[bool]:
    """Pin every thread of this process to some cores for a while; yield whether that is so.

    It is not where there are no cores to keep to, or the system has no such call.
    """
    before = _affinities() if cores else {}
    if not before:
        yield False
        return
    try:
        yield _set_affinities(dict.fromkeys(before, cores))
    finally:
        _set_affinities(before)


def allowed_cores() -> frozenset[int]:
    """Return the cores this thread may run on; none where the system does not say."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def _affinities() -> dict[int, frozenset[int]]:
    """Return the affinity of every thread of this process."""
    if not hasattr(os, "sched_getaffinity") or not _THREADS.is_dir():
        return {}
    affinities = {}
    for thread in _THREADS.iterdir():
        with suppress(ProcessLookupError):  # it has just ended
            affinities[int(thread.name)] = frozenset(os.sched_getaffinity(int(thread.name)))
    return affinities


def _set_affinities(affinities: dict[int, frozenset[int]]) -> bool:
    try:
        for thread, cores in affinities.items():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread, cores)
    except OSError:  # a container that forbids it
        return False
    return True


FIELD = "comparison"
"""Of the points of a rank: what `slow.reports` reads, and no part of a profile."""

REPETITIONS = 3
"""Between two steps."""

_CHUNK_S = 0.01
"""Of one repetition on an undisturbed rank: some turns of the scheduler, so that a rank which shares its core waits in each."""

_SIDE = 256


class Comparison:
    """The product of one rank and how long it took so far. Final.

    Args:
        local_rank, ranks_per_node: which of the node's cores are its own.
    """

    def __init__(self, bench: Bench, local_rank: int, ranks_per_node: int) -> None:
        import torch

        self._bench = bench
        self._cores = local_cores(allowed_cores(), local_rank, ranks_per_node)
        self._a, self._b = (torch.randn(_SIDE, _SIDE) for _ in range(2))
        self._out = torch.empty(_SIDE, _SIDE)
        self._products = 0
        self._times: list[float] = []

    def repeat(self) -> None:
        """Measure a few more repetitions, unless ranks share cores or the time is over."""
        bench = self._bench
        with pinned(self._cores) as is_pinned:
            if bench.agree(0.0 if is_pinned else 1.0) > 0:
                return
            if not self._products:
                self._multiply(1)
                seconds = min(bench.clocked(lambda: self._multiply(1)) for _ in range(5))
                self._products = int(max(1.0, bench.agree(_CHUNK_S / seconds)))
            for _ in range(REPETITIONS):
                bench.agree(0.0)  # the ranks begin together
                self._times.append(bench.clocked(lambda: self._multiply(self._products)))

    def points(self) -> list[dict[str, Any]]:
        """Return the seconds of each repetition."""
        return [{"repetition": i, "time_s": seconds} for i, seconds in enumerate(self._times)]

    def _multiply(self, count: int) -> None:
        import torch

        for _ in range(count):
            torch.mm(self._a, self._b, out=self._out)
