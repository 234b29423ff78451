"""The points of all ranks as one profile: medians over the ranks; and which ranks, nodes and links are slower than their peers.

A rank's ratio for a point is its time over the median of the other ranks' times; what is reported is the median over its points,
and the noise is the distance of the lower quartile from it. It is slow where ``ratio - noise > SLOW_RATIO``: by more than a
little, at three of four points.

Repetitions of one product that all ranks made at the same time (`measure.comparison`) are judged by the sign test: if a rank were
as its peers, it would be beyond ``SLOW_RATIO`` of them in at most half of n repetitions, and in k or more of them with the
probability ``sum_{i >= k} binom(n, i) / 2^n``, times the number of ranks of which one may be so by chance.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import comb
from statistics import median
from typing import Any, Literal, NamedTuple

from ...schema.profile import PairPoint, RankReport, SlowComponent
from ..measure.comparison import FIELD
from ..measure.timing import Points

MEASURED = ("time_s", "spread", "alone_s", "together_s")
"""Fields of points that ranks may differ in; points that agree in all others are the same one."""


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


SLOW_RATIO = 1.1
"""Less costs a synchronous job less than one part in ten, and is what equal devices differ by."""

MAX_CHANCE = 0.01
"""Of naming a rank of a job in which none is slow."""

What = Literal["compute", "memory", "link"]

_FIELDS: dict[What, tuple[str, ...]] = {
    "compute": ("matmuls", "attention", "grouped_matmuls", "layers"),
    "memory": ("elementwise",),
    "link": ("pairs",),
}


class Ratio(NamedTuple):
    """Median over points, and how far below it their lower quartile is."""

    ratio: float = 1.0
    noise: float = 0.0
    chance: float | None = None
    """Of so many slow repetitions without a cause; None where points are no repetitions."""


def rank_ratios(by_rank: Sequence[Points], fields: Sequence[str]) -> list[Ratio]:
    """Return how much slower than its peers each rank is at points that all ranks have."""
    times: dict[str, list[float | None]] = defaultdict(lambda: [None] * len(by_rank))
    for rank, points in enumerate(by_rank):
        for field in fields:
            for point in points.get(field, ()):
                times[field + point_key(point)][rank] = point["time_s"]
    known = [row for row in times.values() if None not in row]
    if len(by_rank) < 2 or not known:
        return [Ratio()] * len(by_rank)
    return [
        Ratio(*_middle([row[r] / median([*row[:r], *row[r + 1 :]]) for row in known]))  # type: ignore[operator,type-var]
        for r in range(len(by_rank))
    ]


def compared_ratios(by_rank: Sequence[Points]) -> list[Ratio] | None:
    """Return the ratios of repetitions that all ranks made at once; None where there are none."""
    rows = list(zip(*([p["time_s"] for p in points.get(FIELD, ())] for points in by_rank), strict=False))
    if len(by_rank) < 2 or not rows:
        return None
    results = []
    for rank in range(len(by_rank)):
        ratios = [row[rank] / median([*row[:rank], *row[rank + 1 :]]) for row in rows]
        count = sum(ratio > SLOW_RATIO for ratio in ratios)
        results.append(Ratio(*_middle(ratios), chance=min(1.0, len(by_rank) * sign_chance(count, len(ratios)))))
    return results


def sign_chance(count: int, number: int) -> float:
    """Return the probability of ``count`` heads or more in ``number`` throws of a coin."""
    return sum(comb(number, i) for i in range(count, number + 1)) / 2**number


def _middle(ratios: list[float]) -> tuple[float, float]:
    ordered, middle = sorted(ratios), median(ratios)
    return middle, middle - ordered[len(ordered) // 4]


def rank_reports(
    by_rank: Sequence[Points], devices: Sequence[str], nodes: Sequence[int], hosts: Sequence[str]
) -> tuple[tuple[RankReport, ...], tuple[SlowComponent, ...]]:
    """Return a report of every rank, and what is slow."""
    compute, memory = (rank_ratios(by_rank, _FIELDS[what]) for what in ("compute", "memory"))
    compute = compared_ratios(by_rank) or compute
    pairs = [PairPoint(**point) for points in by_rank for point in points.get("pairs", ()) if point["time_s"]]
    links = _link_ratios(pairs, nodes)
    links_of_rank = [[ratio for pair, ratio in links.items() if rank in pair] for rank in range(len(by_rank))]
    ranks = tuple(
        RankReport(
            rank=rank,
            node=nodes[rank],
            device=devices[rank],
            compute_ratio=compute[rank].ratio,
            memory_ratio=memory[rank].ratio,
            link_ratio=median([ratio.ratio for ratio in links_of_rank[rank]] or [1.0]),
        )
        for rank in range(len(by_rank))
    )
    slow = [*_slow_ranks("compute", compute, nodes, hosts), *_slow_ranks("memory", memory, nodes, hosts)]
    return ranks, (*slow, *_slow_links(links, nodes, hosts))


def _is_slow(ratio: Ratio) -> bool:
    if ratio.chance is not None:
        return ratio.ratio > SLOW_RATIO and ratio.chance < MAX_CHANCE
    return ratio.ratio - ratio.noise > SLOW_RATIO


def _said(ratio: Ratio) -> dict[str, float]:
    return {"ratio": ratio.ratio, "noise": ratio.noise}


def _slow_ranks(what: What, ratios: Sequence[Ratio], nodes: Sequence[int], hosts: Sequence[str]) -> list[SlowComponent]:
    """Return slow nodes, where all ranks of one are and there are others, and slow ranks of other nodes."""
    components: list[SlowComponent] = []
    slow = [rank for rank, ratio in enumerate(ratios) if _is_slow(ratio)]
    for node in sorted(set(nodes)):
        members = [rank for rank, owner in enumerate(nodes) if owner == node]
        slow_members = [rank for rank in members if rank in slow]
        if slow_members == members and len(hosts) > 1 and len(members) > 1:
            ratio, noise = (median(getattr(ratios[rank], name) for rank in members) for name in ("ratio", "noise"))
            components.append(
                SlowComponent(kind="node", name=f"node {hosts[node]}", what=what, ratio=ratio, noise=noise)
            )
            continue
        place = f" on {hosts[node]}" if len(hosts) > 1 else ""
        components += [
            SlowComponent(kind="rank", name=f"rank {rank}{place}", what=what, **_said(ratios[rank]))
            for rank in slow_members
        ]
    return components


def _link_ratios(pairs: Sequence[PairPoint], nodes: Sequence[int]) -> dict[tuple[int, int], Ratio]:
    """Return each pair's time over the median of its kind (in a node, between nodes) at the largest size; none without peers."""
    kinds: dict[tuple[bool, int], dict[tuple[int, int], list[PairPoint]]] = defaultdict(lambda: defaultdict(list))
    for point in pairs:
        inside = nodes[point.first_rank] == nodes[point.second_rank]
        kinds[inside, point.size_bytes][point.first_rank, point.second_rank].append(point)
    ratios: dict[tuple[int, int], Ratio] = {}
    for (_, _), by_pair in sorted(kinds.items(), key=lambda item: item[0][1]):
        if len(by_pair) < 3:
            continue
        usual = median(point.time_s for points in by_pair.values() for point in points)
        for pair, points in by_pair.items():
            ratio = median(point.time_s for point in points) / usual
            ratios[pair] = Ratio(ratio, ratio * max(point.spread for point in points) / 2)
    return ratios


def _slow_links(links: dict[tuple[int, int], Ratio], nodes: Sequence[int], hosts: Sequence[str]) -> list[SlowComponent]:
    """Return slow links; a node is named instead where all links to other nodes are slow."""
    named: dict[str, list[Ratio]] = defaultdict(list)
    names_by_node: dict[int, set[str]] = defaultdict(set)
    for (first, second), ratio in links.items():
        ends = nodes[first], nodes[second]
        name = (
            f"link rank {first} - rank {second}" if ends[0] == ends[1] else f"link {hosts[ends[0]]} - {hosts[ends[1]]}"
        )
        named[name].append(ratio)
        if ends[0] != ends[1]:
            names_by_node[ends[0]].add(name)
            names_by_node[ends[1]].add(name)
    together = {
        name: Ratio(median(one.ratio for one in same_name), median(one.noise for one in same_name))
        for name, same_name in named.items()
    }
    slow = {name: ratio for name, ratio in together.items() if _is_slow(ratio)}
    components: list[SlowComponent] = []
    for node, names in sorted(names_by_node.items()):
        if len(names) > 1 and names <= slow.keys():
            worst = max((slow.pop(name) for name in names), key=lambda ratio: ratio.ratio)
            components.append(SlowComponent(kind="node", name=f"node {hosts[node]}", what="link", **_said(worst)))
    return components + [
        SlowComponent(kind="link", name=name, what="link", **_said(ratio)) for name, ratio in slow.items()
    ]
