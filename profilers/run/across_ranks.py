"""The points of all ranks as one profile: medians over the ranks; and which ranks, nodes and links are slower than their peers.

A rank's ratio for a point is its time over the median of the other ranks' times; what is reported is the median over its points,
and the noise is the distance of the lower quartile from it. It is slow where ``ratio - noise > SLOW_RATIO``: by more than a
little, at three of four points.

On a CPU all ranks also repeat one product at the same time, which is judged by its repetitions (comparison.py).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from ...schema.profile import PairPoint, RankReport, SlowComponent
from ..measure.timing import Points
from .comparison import SLOW_RATIO, WHATS, Ratio, What, compared_ratios, peer_ratios

MEASURED = ("time_s", "spread", "alone_s", "together_s")
"""Fields of points that ranks may differ in; points that agree in all others are the same one."""

COMPARISON = "comparison"
"""Field of a rank's points with the seconds of its repetitions; no part of a profile."""

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


# --- who is slow -----------------------------------------------------------------------------------------------------


def _middle(ratios: list[float]) -> Ratio:
    if not ratios:
        return Ratio()
    return Ratio(median(ratios), median(ratios) - sorted(ratios)[len(ratios) // 4])


def rank_ratios(by_rank: Sequence[Points], fields: Sequence[str]) -> list[Ratio]:
    """Return how much slower than its peers each rank is at points that all ranks have."""
    times: dict[str, list[float | None]] = defaultdict(lambda: [None] * len(by_rank))
    for rank, points in enumerate(by_rank):
        for field in fields:
            for point in points.get(field, ()):
                times[field + point_key(point)][rank] = point["time_s"]
    return [_middle(ratios) for ratios in peer_ratios(times.values(), len(by_rank))]


def rank_reports(
    by_rank: Sequence[Points],
    devices: Sequence[str],
    nodes: Sequence[int],
    hosts: Sequence[str],
    *,
    limit: float = SLOW_RATIO,
) -> tuple[tuple[RankReport, ...], tuple[SlowComponent, ...]]:
    """Return a report of every rank, and what is slow: repetitions beyond a limit, where there are some, or points."""
    ratios = {what: rank_ratios(by_rank, _FIELDS.get(what, ())) for what in WHATS}
    for what in WHATS:
        times = [[p["time_s"] for p in points.get(COMPARISON, ()) if p["what"] == what] for points in by_rank]
        if all(times):
            ratios[what] = compared_ratios(times, limit)
    pairs = [PairPoint(**point) for points in by_rank for point in points.get("pairs", ()) if point["time_s"]]
    links = _link_ratios(pairs, nodes)
    ranks = tuple(
        RankReport(
            rank=rank,
            node=nodes[rank],
            device=devices[rank],
            compute_ratio=ratios["compute"][rank].ratio,
            memory_ratio=ratios["memory"][rank].ratio,
            link_ratio=median(
                [one.ratio for pair, one in links.items() if rank in pair] or [ratios["link"][rank].ratio]
            ),
        )
        for rank in range(len(by_rank))
    )
    slow = [component for what in WHATS for component in _slow_ranks(what, ratios[what], nodes, hosts)]
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
            components.append(together.component("node", f"node {hosts[node]}", what, members))
            continue
        place = f" on {hosts[node]}" if len(hosts) > 1 else ""
        components += [ratios[rank].component("rank", f"rank {rank}{place}", what, (rank,)) for rank in slow]
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
