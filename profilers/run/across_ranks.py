"""The points of all ranks as one profile: medians over the ranks; and which ranks, nodes and links are slower than their peers.

A rank's ratio for a point is its time over the median of the other ranks' times; what is reported is the median over its points,
and the noise is the distance of the lower quartile from it. It is slow where ``ratio - noise > SLOW_RATIO``: by more than a
little, at three of four points.

On a CPU all ranks also repeat one product at the same time (`Comparison`), which the sign test judges: if a rank were as its peers,
it would be beyond ``SLOW_RATIO`` of them in at most half of n repetitions, and in k or more of them with the probability
``sum_{i >= k} binom(n, i) / 2^n``, times the number of ranks of which one may be so by chance.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import comb
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ...schema.profile import PairPoint, RankReport, SlowComponent
from ..measure.timing import Points

if TYPE_CHECKING:
    from ..measure.timing import Bench

MEASURED = ("time_s", "spread", "alone_s", "together_s")
"""Fields of points that ranks may differ in; points that agree in all others are the same one."""

COMPARISON = "comparison"
"""Field of a rank's points with the seconds of its repetitions; no part of a profile."""

SLOW_RATIO = 1.1
"""Less costs a synchronous job less than one part in ten, and is what equal devices differ by."""

MAX_CHANCE = 0.01
"""Of naming a rank of a job in which none is slow."""

REPETITIONS = 3
"""Between two steps."""

_CHUNK_S = 0.01
"""Of one repetition on an undisturbed rank: some turns of the scheduler, so that a rank which shares its core waits in each."""

_SIDE = 256
_THREADS = Path("/proc/self/task")

What = Literal["compute", "memory", "link"]

_FIELDS: dict[What, tuple[str, ...]] = {
    "compute": ("matmuls", "attention", "grouped_matmuls", "layers"),
    "memory": ("elementwise",),
}


def point_key(point: Mapping[str, Any]) -> str:
    """Return what a point is of."""
    return json.dumps({name: value for name, value in point.items() if name not in MEASURED}, sort_keys=True)


def merge_points(by_rank: Iterable[Sequence[Mapping[str, Any]]]) -> tuple[dict[str, Any], ...]:
    """Merge points of every rank: medians over the ranks that have a time, the largest spread; in the order of first sight."""
    by_key: dict[str, list[Mapping[str, Any]]] = {}
    for points in by_rank:
        for point in points:
            by_key.setdefault(point_key(point), []).append(point)
    together = (_merged_point(same) for same in by_key.values())
    return tuple(point for point in together if point.get("time_s", 0.0) is not None)


def _merged_point(same: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    timed = [point for point in same if point.get("time_s", 0.0) is not None] or same[:1]
    point = dict(timed[0])
    if point.get("time_s") is not None:
        point["time_s"] = median(other["time_s"] for other in timed)
        point["spread"] = max(other.get("spread", 0.0) for other in timed)
    if "together_s" in point:
        point["together_s"] = median(other["together_s"] for other in timed)
        point["alone_s"] = [median(times) for times in zip(*(other["alone_s"] for other in timed), strict=True)]
    return point


def merge_rounds(rounds: Iterable[Points]) -> dict[str, list[dict[str, Any]]]:
    """Merge points of several steps of one rank; of one measured twice, the quieter time.

    Other processes of the machine come and go within seconds and disturb one round more than the other; what the ranks do
    to one another is in every round, so the minimum keeps it.
    """
    by_field: dict[str, dict[str, dict[str, Any]]] = {}
    for points in rounds:
        for field, new in points.items():
            known = by_field.setdefault(field, {})
            for point in new:
                other = known.setdefault(point_key(point), point)
                if point.get("time_s") is not None and point["time_s"] < other["time_s"]:
                    known[point_key(point)] = point
    return {field: list(points.values()) for field, points in by_field.items()}


# --- one product, repeated by all ranks at once ----------------------------------------------------------------------


class Comparison:
    """The product of one rank and how long it took so far. Final.

    Each rank keeps to cores of its own meanwhile, since a scheduler that moves ranks about lets all of them pay for what disturbs
    one core. The repetitions lie all over the measurement, so that what comes and goes within seconds disturbs few of them.
    """

    def __init__(self, bench: Bench, local_rank: int, ranks_per_node: int) -> None:
        import torch

        self._bench = bench
        self._cores = local_cores(allowed_cores(), local_rank, ranks_per_node)
        self._a, self._b, self._out = (torch.randn(_SIDE, _SIDE) for _ in range(3))
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
    """Median over points, and how far below it their lower quartile is.

    Attributes:
        chance: of so many slow repetitions without a cause; None where points are no repetitions.
    """

    ratio: float = 1.0
    noise: float = 0.0
    chance: float | None = None

    @property
    def is_slow(self) -> bool:
        """Tell whether it is more than a little and no chance."""
        if self.chance is not None:
            return self.ratio > SLOW_RATIO and self.chance < MAX_CHANCE
        return self.ratio - self.noise > SLOW_RATIO

    def component(self, kind: Literal["rank", "node", "link"], name: str, what: What) -> SlowComponent:
        """Name what is slow."""
        return SlowComponent(kind=kind, name=name, what=what, ratio=self.ratio, noise=self.noise)


def rank_ratios(by_rank: Sequence[Points], fields: Sequence[str]) -> list[Ratio]:
    """Return how much slower than its peers each rank is at points that all ranks have."""
    times: dict[str, list[float | None]] = defaultdict(lambda: [None] * len(by_rank))
    for rank, points in enumerate(by_rank):
        for field in fields:
            for point in points.get(field, ()):
                times[field + point_key(point)][rank] = point["time_s"]
    return [_middle(ratios) for ratios in _peer_ratios(times.values(), len(by_rank))]


def compared_ratios(by_rank: Sequence[Points]) -> list[Ratio]:
    """Return the ratios of repetitions that all ranks made at once; no chance where there are none."""
    rows = list(zip(*([p["time_s"] for p in points.get(COMPARISON, ())] for points in by_rank), strict=False))
    results = []
    for ratios in _peer_ratios(rows, len(by_rank)):
        chance = sign_chance(sum(ratio > SLOW_RATIO for ratio in ratios), len(ratios)) if ratios else None
        results.append(_middle(ratios)._replace(chance=chance and min(1.0, len(by_rank) * chance)))
    return results


def _peer_ratios(rows: Iterable[Sequence[float | None]], num_ranks: int) -> list[list[float]]:
    """Return each rank's time over the median of the others, of the rows in which all have one; nothing without others."""
    known: list[Any] = [row for row in rows if None not in row and num_ranks > 1]
    return [[row[rank] / median([*row[:rank], *row[rank + 1 :]]) for row in known] for rank in range(num_ranks)]


def _middle(ratios: list[float]) -> Ratio:
    if not ratios:
        return Ratio()
    return Ratio(median(ratios), median(ratios) - sorted(ratios)[len(ratios) // 4])


def sign_chance(count: int, number: int) -> float:
    """Return the probability of ``count`` heads or more in ``number`` throws of a coin."""
    return sum(comb(number, i) for i in range(count, number + 1)) / 2**number


def rank_reports(
    by_rank: Sequence[Points], devices: Sequence[str], nodes: Sequence[int], hosts: Sequence[str]
) -> tuple[tuple[RankReport, ...], tuple[SlowComponent, ...]]:
    """Return a report of every rank, and what is slow."""
    compute, memory = (rank_ratios(by_rank, _FIELDS[what]) for what in ("compute", "memory"))
    compared = compared_ratios(by_rank)
    if compared[0].chance is not None:
        compute = compared
    pairs = [PairPoint(**point) for points in by_rank for point in points.get("pairs", ()) if point["time_s"]]
    links = _link_ratios(pairs, nodes)
    ranks = tuple(
        RankReport(
            rank=rank,
            node=nodes[rank],
            device=devices[rank],
            compute_ratio=compute[rank].ratio,
            memory_ratio=memory[rank].ratio,
            link_ratio=median([ratio.ratio for pair, ratio in links.items() if rank in pair] or [1.0]),
        )
        for rank in range(len(by_rank))
    )
    slow = [*_slow_ranks("compute", compute, nodes, hosts), *_slow_ranks("memory", memory, nodes, hosts)]
    return ranks, (*slow, *_slow_links(links, nodes, hosts))


def _median(ratios: Sequence[Ratio]) -> Ratio:
    return Ratio(median(one.ratio for one in ratios), median(one.noise for one in ratios))


def _slow_ranks(what: What, ratios: Sequence[Ratio], nodes: Sequence[int], hosts: Sequence[str]) -> list[SlowComponent]:
    """Return slow nodes, where all ranks of one are and there are others, and slow ranks of other nodes."""
    components: list[SlowComponent] = []
    for node in sorted(set(nodes)):
        members = [rank for rank, owner in enumerate(nodes) if owner == node]
        slow = [rank for rank in members if ratios[rank].is_slow]
        if slow == members and len(hosts) > 1 and len(members) > 1:
            together = _median([ratios[rank] for rank in members])
            components.append(together.component("node", f"node {hosts[node]}", what))
            continue
        place = f" on {hosts[node]}" if len(hosts) > 1 else ""
        components += [ratios[rank].component("rank", f"rank {rank}{place}", what) for rank in slow]
    return components


def _link_ratios(pairs: Sequence[PairPoint], nodes: Sequence[int]) -> dict[tuple[int, int], Ratio]:
    """Return each pair's time over the median of its kind (in a node, between nodes) at the largest size; none without peers."""
    kinds: dict[tuple[bool, int], dict[tuple[int, int], list[PairPoint]]] = defaultdict(lambda: defaultdict(list))
    for point in pairs:
        inside = nodes[point.first_rank] == nodes[point.second_rank]
        kinds[inside, point.size_bytes][point.first_rank, point.second_rank].append(point)
    ratios: dict[tuple[int, int], Ratio] = {}
    for _, by_pair in sorted(kinds.items(), key=lambda item: item[0][1]):
        if len(by_pair) < 3:
            continue
        usual = median(point.time_s for points in by_pair.values() for point in points)
        for pair, points in by_pair.items():
            ratio = median(point.time_s for point in points) / usual
            ratios[pair] = Ratio(ratio, ratio * max(point.spread for point in points) / 2)
    return ratios


def _slow_links(links: dict[tuple[int, int], Ratio], nodes: Sequence[int], hosts: Sequence[str]) -> list[SlowComponent]:
    """Return slow links; a node is named instead where all links to other nodes are slow."""
    by_name: dict[str, list[Ratio]] = defaultdict(list)
    names_by_node: dict[int, set[str]] = defaultdict(set)
    for (first, second), ratio in links.items():
        ends = nodes[first], nodes[second]
        if ends[0] == ends[1]:
            by_name[f"link rank {first} - rank {second}"].append(ratio)
            continue
        name = f"link {hosts[ends[0]]} - {hosts[ends[1]]}"
        by_name[name].append(ratio)
        for node in ends:
            names_by_node[node].add(name)
    together = {name: _median(ratios) for name, ratios in by_name.items()}
    slow = {name: ratio for name, ratio in together.items() if ratio.is_slow}
    components: list[SlowComponent] = []
    for node, names in sorted(names_by_node.items()):
        if len(names) > 1 and names <= slow.keys():
            worst = max((slow.pop(name) for name in names), key=lambda ratio: ratio.ratio)
            components.append(worst.component("node", f"node {hosts[node]}", "link"))
    return components + [ratio.component("link", name, "link") for name, ratio in slow.items()]
