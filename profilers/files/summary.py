"""What a profile comes to, in numbers that mean something, and what differs between two of them."""

from __future__ import annotations

from statistics import median
from typing import Any

from ...schema.errors import ProfileError
from ...schema.profile import Profile
from ..measure.compute import peak_flops
from ..measure.links import bus_factor
from .merge import point_identity, point_lists


def summary(profile: Profile) -> dict[str, float]:
    """Named rates: FLOP/s, bytes/s or seconds, as the name says."""
    found: dict[str, float] = {"memory_bandwidth_bytes_per_s": profile.memory_bandwidth_bytes_per_s}
    try:
        peaks = peak_flops(profile.matmuls)
    except ProfileError:  # a profile of links alone
        peaks = None
    if peaks is not None:
        rates = peaks.model_dump(exclude_none=True)
        found |= {f"{dtype}_flops_per_s": rate for dtype, rate in rates.items()}
    for op in dict.fromkeys(point.op for point in profile.collectives):
        mine = [point for point in profile.collectives if point.op == op]
        large, small = max(mine, key=lambda p: p.size_bytes), min(mine, key=lambda p: p.size_bytes)
        found[f"{op}_bus_bytes_per_s"] = bus_factor(op, large.group_size) * large.size_bytes / large.time_s
        found[f"{op}_latency_s"] = small.time_s
    for copy in profile.host_copies:
        if copy.host_memory == "pinned" and copy.devices_at_once == 1:
            found[f"{copy.direction}_bytes_per_s"] = copy.size_bytes / copy.time_s
    return found


def compare(first: Profile, second: Profile) -> dict[str, Any]:
    """``{"machine": {field: [a, b]}, "rates": {name: [a, b]}, "points": {kind: {"both", "first", "second", "ratio"}}}``.

    A ratio is the median of second over first of the seconds of points that both measured; None where there is none.
    """
    machines = first.machine.model_dump(), second.machine.model_dump()
    rates = summary(first), summary(second)
    lists = point_lists(first), point_lists(second)
    return {
        "machine": {name: [a, machines[1][name]] for name, a in machines[0].items() if a != machines[1][name]},
        "rates": {name: [rates[0].get(name), rates[1].get(name)] for name in {**rates[0], **rates[1]}},
        "points": {name: _points(lists[0].get(name, ()), lists[1].get(name, ())) for name in {**lists[0], **lists[1]}},
    }


def _points(first: tuple[Any, ...], second: tuple[Any, ...]) -> dict[str, Any]:
    a, b = ({point_identity(point): point.time_s for point in points} for points in (first, second))
    both = [b[key] / a[key] for key in a if key in b]
    return {
        "both": len(both),
        "first": len(a) - len(both),
        "second": len(b) - len(both),
        "ratio": median(both) if both else None,
    }
