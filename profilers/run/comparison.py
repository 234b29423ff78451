"""Work that all ranks repeat at the same time, and which of them take longer for it than their peers.

Products, passes over memory and messages to others are repeated in turn. What comes and goes within seconds disturbs few of the
repetitions, where they lie all over a measurement. A rank's ratio is the median over its repetitions of its time over the median
of the other ranks' times; it is slow where all three hold:

    ratio > a limit      1.1 in a profile, 1.05 before a job
    ratio > 1 + 3 MAD    of the other ranks' repetitions, about their median and over it
    chance < 0.01        if a rank were as its peers, it would be beyond the limit in at most half of n repetitions, and in k or
                         more with the probability sum_{i >= k} binom(n, i) / 2^n, times the number of ranks
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import comb
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from ...schema.profile import SlowComponent
from ...schema.units import MIB

if TYPE_CHECKING:
    from torch import Tensor

    from ..measure.timing import Bench

SLOW_RATIO = 1.1
"""Less costs a synchronous job less than one part in ten, and is what equal devices differ by."""

OUTLIER_MADS = 3.0
"""Median absolute deviations beyond which a value is none of its peers'."""

MAX_CHANCE = 0.01
"""Of naming a rank of a job in which none is slow."""

REPETITIONS = 3
"""Between two steps of a measurement."""

_CHUNK_S = 0.01
"""Of one repetition on an undisturbed rank: some turns of the scheduler, so that a rank which shares its core waits in each."""

_CPU_SIDE, _GPU_SIDE, _STREAM_BYTES, _MESSAGE_BYTES = 256, 4096, 64 * MIB, 4 * MIB
_THREADS = Path("/proc/self/task")

What = Literal["compute", "memory", "link"]
WHATS: tuple[What, ...] = get_args(What)

Work = Callable[[], float]
"""Does something and returns the seconds that it took."""


# --- the work --------------------------------------------------------------------------------------------------------


class Comparison:
    """What one rank took for its work so far. Final.

    Each rank keeps to cores of its own meanwhile, since a scheduler that moves ranks about lets all of them pay for what disturbs
    one core.

    Args:
        cores: of this rank; none where ranks share them.
    """

    def __init__(self, bench: Bench, cores: frozenset[int], works: Mapping[What, Work]) -> None:
        self._bench, self._cores, self._works = bench, cores, works
        self._times: dict[What, list[float]] = {what: [] for what in works}

    def repeat(self, count: int = REPETITIONS) -> bool:
        """Measure a few more repetitions; False, and none, where ranks have no cores of their own to keep to."""
        with pinned(self._cores) as is_pinned:
            if self._bench.agree(0.0 if is_pinned else 1.0) > 0:
                return False
            self.repeat_unpinned(count)
        return True

    def repeat_unpinned(self, count: int) -> None:
        """Measure a few more repetitions wherever the ranks are."""
        for _ in range(count):
            for what, work in self._works.items():
                self._bench.agree(0.0)  # the ranks begin together
                self._times[what].append(work())

    def points(self) -> list[dict[str, Any]]:
        """Return the seconds of each repetition."""
        return [
            {"what": what, "repetition": i, "time_s": seconds}
            for what, times in self._times.items()
            for i, seconds in enumerate(times)
        ]


def product(bench: Bench) -> Work:
    """Return the work of multiplying matrices for some time."""
    import torch

    on_gpu = bench.device.type == "cuda"
    side, dtype = (_GPU_SIDE, torch.bfloat16) if on_gpu else (_CPU_SIDE, torch.float32)
    a, b, out = (torch.ones(side, side, device=bench.device, dtype=dtype) for _ in range(3))
    return _repeated(bench, lambda: torch.mm(a, b, out=out))


def stream(bench: Bench) -> Work:
    """Return the work of reading and writing memory, out of cache, for some time."""
    import torch

    a, b, out = (torch.ones(_STREAM_BYTES // 12, device=bench.device) for _ in range(3))
    return _repeated(bench, lambda: torch.add(a, b, out=out))


def _repeated(bench: Bench, call: Callable[[], Any]) -> Work:
    """Return the work of calling so often that it takes some time on the quickest rank; all decide that together at first."""
    calls = 0

    def work() -> float:
        nonlocal calls
        if not calls:
            call()
            seconds = min(bench.clocked(call) for _ in range(5))
            calls = int(max(1.0, bench.agree(_CHUNK_S / max(seconds, 1e-9))))
        return bench.clocked(lambda: [call() for _ in range(calls)])

    return work


def exchange(bench: Bench, rounds: Sequence[Sequence[tuple[int, int]]]) -> Work:
    """Return the work of a message there and back with another rank in each round; it took as long as the quickest of them.

    A rank that is slow is so with all others, who have a quicker partner: so it alone takes longer.
    """
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    partners = [next((sum(pair) - rank for pair in pairs if rank in pair), None) for pairs in rounds]
    buffer = torch.zeros(_MESSAGE_BYTES // 4, device=bench.device)

    def round_trip(message: Tensor, partner: int) -> None:
        for is_sender in (rank < partner, rank > partner):
            dist.send(message, partner) if is_sender else dist.recv(message, partner)
        bench.synchronize()

    def work() -> float:
        seconds = []
        for partner in partners:
            if partner is not None:
                round_trip(buffer[:1], partner)  # so that both begin at the same time
                start = time.perf_counter()  # of a processor's seconds it has few
                round_trip(buffer, partner)
                seconds.append(time.perf_counter() - start)
        return min(seconds)

    return work


def local_cores(allowed: frozenset[int], local_rank: int, ranks_per_node: int) -> frozenset[int]:
    """Return an even part of the allowed cores, disjoint from those of the node's other ranks; none where ranks outnumber cores."""
    per_rank = len(allowed) // ranks_per_node
    return frozenset(sorted(allowed)[local_rank * per_rank : (local_rank + 1) * per_rank])


def allowed_cores() -> frozenset[int]:
    """Return the cores this thread may run on; none where the system does not say."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


@contextmanager
def pinned(cores: frozenset[int]) -> Iterator[bool]:
    """Pin every thread of this process to some cores for a while; yield whether that is so.

    It is not where there are no cores to keep to, or the system has no such call.
    """
    before: dict[int, frozenset[int]] = {}
    if cores and hasattr(os, "sched_getaffinity") and _THREADS.is_dir():
        for thread in _THREADS.iterdir():
            with suppress(ProcessLookupError):  # it has just ended
                before[int(thread.name)] = frozenset(os.sched_getaffinity(int(thread.name)))
    try:
        yield bool(before) and _set_affinities(dict.fromkeys(before, cores))
    finally:
        _set_affinities(before)


def _set_affinities(affinities: dict[int, frozenset[int]]) -> bool:
    try:
        for thread, cores in affinities.items():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread, cores)
    except OSError:  # a container that forbids it
        return False
    return True


# --- who is slow -----------------------------------------------------------------------------------------------------


class Ratio(NamedTuple):
    """Median over points, and what of it may be noise.

    Attributes:
        noise: of points, how far below the median their lower quartile is; of repetitions, three MADs of the peers'.
        chance: of so many slow repetitions without a cause; None where points are no repetitions.
        limit: of what is no more than a little.
    """

    ratio: float = 1.0
    noise: float = 0.0
    chance: float | None = None
    limit: float = SLOW_RATIO

    @property
    def is_slow(self) -> bool:
        """Tell whether it is more than a little, more than noise, and no chance."""
        if self.chance is not None:
            return self.ratio > max(self.limit, 1 + self.noise) and self.chance < MAX_CHANCE
        return self.ratio - self.noise > self.limit

    def component(
        self, kind: Literal["rank", "node", "link"], name: str, what: What, ranks: Sequence[int] = ()
    ) -> SlowComponent:
        """Name what is slow."""
        numbers = {"ratio": self.ratio, "noise": self.noise}
        return SlowComponent(kind=kind, name=name, what=what, ranks=tuple(ranks), **numbers)


def compared_ratios(times: Sequence[Sequence[float]], limit: float = SLOW_RATIO) -> list[Ratio]:
    """Return the ratio of each rank; no chance where there are no repetitions, or no peers.

    Args:
        times: seconds of each rank's repetitions, all ranks' at once [R, T].
    """
    rows = list(zip(*times, strict=False))
    results = []
    for rank, ratios in enumerate(peer_ratios(rows, len(times))):
        if not ratios:
            results.append(Ratio(limit=limit))
            continue
        chance = len(times) * sign_chance(sum(ratio > limit for ratio in ratios), len(ratios))
        noise = OUTLIER_MADS * _relative_mad([row[i] for row in rows for i in range(len(row)) if i != rank])
        results.append(Ratio(median(ratios), noise, min(1.0, chance), limit))
    return results


def peer_ratios(rows: Iterable[Sequence[float | None]], num_ranks: int) -> list[list[float]]:
    """Return each rank's time over the median of the others, of the rows in which all have one; nothing without others."""
    known: list[Any] = [row for row in rows if None not in row and num_ranks > 1]
    return [[row[rank] / median([*row[:rank], *row[rank + 1 :]]) for row in known] for rank in range(num_ranks)]


def _relative_mad(values: Sequence[float]) -> float:
    middle = median(values)
    return median(abs(value - middle) for value in values) / middle


def sign_chance(count: int, number: int) -> float:
    """Return the probability of ``count`` heads or more in ``number`` throws of a coin."""
    return sum(comb(number, i) for i in range(count, number + 1)) / 2**number
