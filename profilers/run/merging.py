"""The points of all ranks as one profile: medians over the ranks, and how far each rank is from the others."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from ..measure.timing import Points

MEASURED = ("time_s", "spread", "alone_s", "together_s")
"""Fields of points that ranks may differ in; points that agree in all others are the same one."""


def key_of(point: Mapping[str, Any]) -> str:
    """What a point is of."""
    return json.dumps({name: value for name, value in point.items() if name not in MEASURED}, sort_keys=True)


def merged(by_rank: Iterable[Sequence[Mapping[str, Any]]]) -> tuple[dict[str, Any], ...]:
    """The same points from every rank: medians over the ranks that have a time, the largest spread; in the order of first sight."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for points in by_rank:
        for point in points:
            found.setdefault(key_of(point), []).append(point)
    together = (_merged_point(same) for same in found.values())
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


def joined(rounds: Iterable[Points]) -> dict[str, list[dict[str, Any]]]:
    """Points of several steps of one rank; of one measured twice, the quieter time.

    Other processes of the machine come and go within seconds and disturb one round more than the other; what the ranks do
    to one another is in every round, so the minimum keeps it.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for points in rounds:
        for field, new in points.items():
            known = found.setdefault(field, {})
            for point in new:
                other = known.setdefault(key_of(point), point)
                if point.get("time_s") is not None and point["time_s"] < other["time_s"]:
                    known[key_of(point)] = point
    return {field: list(points.values()) for field, points in found.items()}
