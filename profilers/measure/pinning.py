"""The cores of a rank on a CPU: a process that keeps to its own is slowed down by what else runs on those, and by nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_THREADS = Path("/proc/self/task")


def own_cores(allowed: frozenset[int], local_rank: int, ranks_per_node: int) -> frozenset[int]:
    """An even part of the allowed cores, disjoint from those of the other ranks of the node; none where ranks outnumber cores."""
    each = len(allowed) // ranks_per_node
    return frozenset(sorted(allowed)[local_rank * each : (local_rank + 1) * each])


@contextmanager
def pinned(cores: frozenset[int]) -> Iterator[bool]:
    """Keep every thread of this process to some cores for a while; yields whether that is so.

    It is not where there are no cores to keep to, or the system has no such call.
    """
    before = _affinities() if cores else {}
    if not before:
        yield False
        return
    try:
        yield _set(dict.fromkeys(before, cores))
    finally:
        _set(before)


def allowed_cores() -> frozenset[int]:
    """Cores this thread may run on; none where the system does not say."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def _affinities() -> dict[int, frozenset[int]]:
    """Of every thread of this process."""
    if not hasattr(os, "sched_getaffinity") or not _THREADS.is_dir():
        return {}
    found = {}
    for thread in _THREADS.iterdir():
        with suppress(ProcessLookupError):  # it has just ended
            found[int(thread.name)] = frozenset(os.sched_getaffinity(int(thread.name)))
    return found


def _set(affinities: dict[int, frozenset[int]]) -> bool:
    try:
        for thread, cores in affinities.items():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread, cores)
    except OSError:  # a container that forbids it
        return False
    return True
