"""The machine at hand as a cluster: measured in as many concurrent processes as training will use, and cached.

The measurement runs in as many ranks, all at once, because ranks of one machine slow one another down: they share memory bandwidth,
caches, cores and the clock. What is stored is the Profile; ``cluster_from_profile`` makes a ClusterSpec of it each time, so that a
better fit needs no new measurement.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..schema.cluster import ClusterSpec
from ..schema.errors import ConfigError, ProfileError
from ..schema.profile import Machine, Profile
from ..schema.units import format_seconds
from .machine import available_memory, busy_fraction, check_memory, identify, num_cores
from .profiled_cluster import cluster_from_profile
from .run.protocol import ProfileTask, launch_ranks
from .run.steps import brief_steps

METHOD_VERSION = 4
"""Raised when measurements of an older method must not be used any more."""

MAX_BUSY_FRACTION = 0.2

Say = Callable[[str], None]


def measure_local(
    num_ranks: int | None = None, *, refresh: bool = False, on_progress: Say | None = None
) -> ClusterSpec:
    """Return the machine at hand as a cluster of ``num_ranks`` devices.

    The first call takes about ten seconds; later ones read ``$XDG_CACHE_HOME/meshwright`` (``~/.cache/meshwright``) and
    do not import torch, as long as hardware, torch, python and the number of ranks are the same.

    Args:
        num_ranks: default one for each GPU, or for each core of a machine without GPUs.
        refresh: measure even where there is a cached measurement.
        on_progress: called with one line on what is being done.

    Raises:
        ConfigError: the machine cannot carry that many ranks.
        ProfileError: the measurement failed.
    """
    say = (
        on_progress or logging.getLogger(__name__).warning
    )  # unless it is configured otherwise, that is a line on stderr
    machine = identify(num_ranks)
    path = _cache_file(machine)
    cached = None if refresh else _cached(path, machine, say)
    if cached is not None:
        return cached
    with _measuring_lock(path, say) as has_waited:
        if has_waited and not refresh and (cached := _cached(path, machine, say)) is not None:
            return cached
        profile = measure_profile(machine, say)
        if path is not None and profile.foreign_load_fraction <= MAX_BUSY_FRACTION:
            try:
                profile.save(path)
            except ConfigError as error:
                say(f"the measurement is not cached: {error.message}")
    return cluster_from_profile(profile)


def measure_profile(machine: Machine, say: Say, **effort: Any) -> Profile:
    """Measure this machine now.

    Args:
        effort: fields of ProfileTask other than their defaults, to spend less or more time.

    Raises:
        ConfigError: too little memory is free.
        ProfileError: a rank failed.
    """
    import torch  # noqa: F401  ModuleNotFoundError here and not in a rank

    ranks, start = machine.num_devices, time.perf_counter()
    check_memory(available_memory(), ranks)
    say(f"measuring {machine.device} with {ranks} {'rank' if ranks == 1 else 'ranks'}: about ten seconds, once")
    if (busy := busy_fraction()) > MAX_BUSY_FRACTION:
        say(f"other work uses {100 * busy:.0f} % of the cores: the figures will be too low, and are not kept")
    task = ProfileTask(
        backend=machine.backend, threads=max(1, num_cores() // ranks), foreign_load_fraction=min(busy, 1.0), **effort
    )
    profile = launch_ranks(brief_steps, task, ranks)
    say(f"measured in {format_seconds(time.perf_counter() - start)}")
    return profile.replace(machine=machine)


# --- cache --------------------------------------------------------------------------------------------------------


def _cache_file(machine: Machine) -> Path | None:
    """Return where the profile of this identity is stored; None where the user has no home."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(configured) if Path(configured).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    identity = f"{METHOD_VERSION} {machine.model_dump_json()}"
    return base / "meshwright" / f"local-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"


def _cached(path: Path | None, machine: Machine, say: Say) -> ClusterSpec | None:
    """Return the cluster of a cached profile; None where there is none that can be used, which is said."""
    if path is None or not path.exists():
        return None
    try:
        profile = Profile.load(path)
        if profile.machine == machine:
            return cluster_from_profile(profile)
        say(f"{path} is of another machine; measuring again")
    except (ConfigError, ProfileError) as error:
        say(f"cached measurement cannot be used; measuring again ({error.message})")
    return None


@contextmanager
def _measuring_lock(path: Path | None, say: Say) -> Iterator[bool]:
    """Let one process measure at a time, as two would slow each other down; yields whether another one was waited for.

    The lock goes with its process. Without a cache that can be written there is none, and everybody measures.
    """
    try:
        if path is None:
            raise OSError("there is no home directory")
        import fcntl

        path.parent.mkdir(parents=True, exist_ok=True)
        lock = (path.parent / "local.lock").open("w")
    except (OSError, ImportError) as error:  # ImportError: no fcntl on Windows
        say(f"measuring without a lock: {error}")
        yield False
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            has_waited = False
        except BlockingIOError:
            say("another process measures this machine; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
            has_waited = True
        yield has_waited
