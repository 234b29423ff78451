"""What a little more of each resource is worth: the cluster is changed, then estimated and searched again.

| resource | change | how the cluster says it |
|---|---|---|
| memory | 1 GiB more on every device | Device.memory_bytes |
| unlimited memory | as if every device had a thousand times as much | the same |
| link | 1 GB/s more on one level, for whatever shares it | Link.bandwidth_bytes_per_s; measured points move with the line rate |
| compute | 10 % higher rates of matrix products and attention | Calibration.products, attention |
| elementwise | 10 % more bandwidth of memory-bound kernels and the optimizer | Calibration.elementwise |
| host | dispatch 20 times as fast, as good as none | Calibration.host |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..schema import ClusterSpec, Layout, MeshwrightError, Plan
from ..schema.cluster import Link
from ..schema.profile import CollectivePoint
from ..schema.units import GB, GIB, format_bytes
from .deadline import Deadline
from .explanation import LinkUse, Resource, Worth
from .planning import estimate
from .rank_map import in_order
from .request import Request
from .search import REL_GAP
from .space import Space

MORE_COMPUTE = 1.1
MORE_MEMORY_BYTES = GIB
MORE_BANDWIDTH_BYTES_PER_S = float(GB)

LARGEST_RATIO = 19.9
"""Calibration ratios stay below 20."""


@dataclass(frozen=True)
class Change:
    """A changed cluster and what to call it; ``searched``: whether the best layout on it is of interest."""

    resource: Resource
    text: str
    cluster: ClusterSpec
    searched: bool = True


def changes(cluster: ClusterSpec) -> tuple[Change, ...]:
    """The changes that `explain` tries, in the order in which it searches them."""
    links = tuple(
        Change(
            "link",
            f"1 GB/s more on {level.link.name} ({level.link.bandwidth_bytes_per_s / GB:g} GB/s)",
            with_bandwidth(cluster, idx, MORE_BANDWIDTH_BYTES_PER_S),
        )
        for idx, level in enumerate(cluster.levels)
        if level.domain_size > 1
    )
    device = cluster.weakest_device
    return (
        Change("memory", f"1 GiB more of memory ({format_bytes(device.memory_bytes)})", with_memory(cluster, GIB)),
        Change("unlimited_memory", "memory without limit", with_memory(cluster, 999 * device.memory_bytes)),
        Change("compute", "10 % more compute", with_ratios(cluster, products=MORE_COMPUTE, attention=MORE_COMPUTE)),
        *links,
        Change(
            "elementwise", "10 % more memory bandwidth", with_ratios(cluster, elementwise=MORE_COMPUTE), searched=False
        ),
        Change("host", "a host that dispatches in no time", with_ratios(cluster, host=LARGEST_RATIO), searched=False),
    )


def worth_of(plan: Plan, request: Request, deadline: Deadline) -> tuple[float | None, tuple[Worth, ...]]:
    """Seconds of the fastest layout, and what each change gains for the plan's layout and for the fastest one."""
    kept_s = _kept_s(plan, plan.cluster)
    fastest = _fastest(request, deadline)
    found = []
    for change in changes(plan.cluster):
        changed_s = _kept_s(plan, change.cluster)
        if kept_s is None or changed_s is None:
            continue
        best = _fastest_with(request, change, fastest, deadline) if fastest and change.searched else None
        found.append(
            Worth(
                resource=change.resource,
                change=change.text,
                kept_s=_kept_gain(change, kept_s - changed_s),
                best_s=None if fastest is None or best is None else _beyond_gap(fastest.step_time_s - best[1], best[1]),
                best=best[0] if best and fastest and best[0] != fastest.layout else None,
            )
        )
    return fastest.step_time_s if fastest else None, tuple(found)


def links_of(plan: Plan, kept: Callable[[ClusterSpec], float | None] | None = None) -> tuple[LinkUse, ...]:
    """Each link level, the axes that reach it, and what the plan's layout gains where it is twice as fast.

    A link that takes no time is beyond what the model of overlap describes: its traffic would slow down all compute beside it.
    Seconds of the layout on a cluster are ``kept``'s, unset those of its estimate.
    """

    def seconds_of(cluster: ClusterSpec) -> float | None:
        return _kept_s(plan, cluster) if kept is None else kept(cluster)

    cluster, base_s, uses = plan.cluster, seconds_of(plan.cluster), []
    for idx, level in enumerate(cluster.levels):
        if level.domain_size == 1:
            continue
        faster_s = seconds_of(twice_as_fast(cluster, idx))
        uses.append(
            LinkUse(
                level_idx=idx,
                name=level.link.name,
                domain_size=level.domain_size,
                bandwidth_bytes_per_s=level.link.bandwidth_bytes_per_s,
                axes=_axes_on(plan.layout, cluster, idx),
                seconds=0.0 if base_s is None or faster_s is None else max(0.0, base_s - faster_s),
            )
        )
    return tuple(uses)


def _kept_s(plan: Plan, cluster: ClusterSpec) -> float | None:
    """Step time of the plan's layout; None where this version cannot estimate it."""
    try:
        return estimate(plan.model, as_placed(plan, cluster), plan.workload, plan.layout).step_time_s
    except MeshwrightError:
        return None


def as_placed(plan: Plan, cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with its nodes in the order in which the plan's ranks lie on them, where links between nodes were measured."""
    if cluster.bandwidth_matrix is None:
        return cluster
    node_of_device = [node for node, size in enumerate(cluster.node_sizes) for _ in range(size)]
    return in_order(cluster, list(dict.fromkeys(node_of_device[device] for device in plan.rank_map)))


def _kept_gain(change: Change, gain_s: float) -> float:
    """With more memory the old stages still fit, even where the heuristic for uneven ones finds others."""
    return max(0.0, gain_s) if change.resource in ("memory", "unlimited_memory") else gain_s


@dataclass(frozen=True)
class _Fastest:
    """The fastest layout of the unchanged cluster, the whole space, and what of it has a split that fits, as far as known."""

    layout: Layout
    step_time_s: float
    space: Space
    may_fit: Space


def _fastest(request: Request, deadline: Deadline) -> _Fastest | None:
    """None unless the whole search ended in time and something fits."""
    try:
        space = request.space(deadline)
        result = request.search(deadline, space=space)
    except MeshwrightError:
        return None
    if result.stopped_early or not result.fitting:
        return None
    best = result.fitting[0]
    fitting = replace(space, without=np.sort(result.pool.places[np.array(result.rejected, dtype=np.int64)]))
    return _Fastest(best.layout(result.costs.batch), best.estimate.step_time_s, space, fitting)


def _fastest_with(
    request: Request, change: Change, fastest: _Fastest, deadline: Deadline
) -> tuple[Layout, float] | None:
    """The fastest layout of a changed cluster and its seconds; None unless the search ended in time.

    It is at least as good as the old one is there, and where memory stays as it is, so does what fits.
    """
    changed = replace(request, cluster=change.cluster)
    more_memory = change.resource in ("memory", "unlimited_memory")
    try:
        old_s = estimate(request.model, change.cluster, request.workload, fastest.layout).step_time_s
        known_s = min(old_s, fastest.step_time_s) if more_memory else old_s
        space = fastest.space if more_memory else fastest.may_fit
        result = changed.search(deadline, space=space, worse_than_s=known_s)
    except MeshwrightError:
        return None
    if result.stopped_early:
        return None
    best = result.fitting[0] if result.fitting else None
    if best is None or best.estimate.step_time_s >= known_s:
        return fastest.layout, known_s
    return best.layout(result.costs.batch), best.estimate.step_time_s


def _beyond_gap(gain_s: float, base_s: float) -> float:
    """Zero for differences that a search does not look for."""
    return gain_s if abs(gain_s) > REL_GAP * base_s else 0.0


def with_memory(cluster: ClusterSpec, more_bytes: int) -> ClusterSpec:
    """Every device with ``more_bytes`` more."""
    groups = tuple(
        group.replace(device=group.device.replace(memory_bytes=group.device.memory_bytes + more_bytes))
        for group in cluster.groups
    )
    return cluster.replace(groups=groups)


def with_ratios(cluster: ClusterSpec, **ratios: float) -> ClusterSpec:
    """Rates of the calibration times ``ratios``, as far as they may go."""
    old = cluster.calibration
    changed = {name: min(LARGEST_RATIO, ratio * getattr(old, name)) for name, ratio in ratios.items()}
    return cluster.replace(calibration=old.replace(**changed))


def with_bandwidth(cluster: ClusterSpec, level_idx: int, more_bytes_per_s: float) -> ClusterSpec:
    """One link level with a higher line rate; what was measured on it beyond its latency takes less by the same ratio.

    Measured bandwidth between nodes grows by this ratio too, if the level is the one that joins them all.
    """
    link = cluster.levels[level_idx].link
    rate = link.bandwidth_bytes_per_s + more_bytes_per_s
    ratio = rate / link.bandwidth_bytes_per_s
    points = _faster_points(link.measured, ratio)
    faster = _with_link(cluster, level_idx, link.replace(bandwidth_bytes_per_s=rate, measured=points))
    if cluster.bandwidth_matrix is None or level_idx < len(cluster.levels) - 1:
        return faster
    matrix = tuple(tuple(ratio * between for between in row) for row in cluster.bandwidth_matrix)
    return faster.replace(bandwidth_matrix=matrix)


def twice_as_fast(cluster: ClusterSpec, level_idx: int) -> ClusterSpec:
    """One link level with twice its line rate."""
    return with_bandwidth(cluster, level_idx, cluster.levels[level_idx].link.bandwidth_bytes_per_s)


def _with_link(cluster: ClusterSpec, level_idx: int, link: Link) -> ClusterSpec:
    """One link replaced, in the groups of a mixed cluster that have it too."""
    old = cluster.levels[level_idx].link
    levels = tuple(level.replace(link=link) if i == level_idx else level for i, level in enumerate(cluster.levels))
    groups = tuple(
        group.replace(levels=tuple(own.replace(link=link) if own.link == old else own for own in group.levels))
        for group in cluster.groups
    )
    return cluster.replace(levels=levels, groups=groups)


def _faster_points(points: Sequence[CollectivePoint], ratio: float) -> tuple[CollectivePoint, ...]:
    """The smallest message of each operation and group is latency; what is beyond it shrinks by ``ratio``."""
    latency: dict[tuple[str, int], float] = {}
    for point in points:
        key = (point.op, point.group_size)
        latency[key] = min(point.time_s, latency.get(key, point.time_s))
    floors = [latency[point.op, point.group_size] for point in points]
    return tuple(
        point.replace(time_s=floor + (point.time_s - floor) / ratio)
        for point, floor in zip(points, floors, strict=True)
    )


def _axes_on(layout: Layout, cluster: ClusterSpec, level_idx: int) -> tuple[str, ...]:
    """Axes whose groups do not fit into a domain of the level below but into one of this level, ranks in device order."""
    sizes = [1, *(level.domain_size for level in cluster.levels)]
    inner, outer = sizes[level_idx], sizes[level_idx + 1]
    spans, span = {}, 1
    for name in ("tp", "cp", "dp_shard", "dp_replicate", "pp"):
        span *= getattr(layout, name)
        if getattr(layout, name) > 1:
            spans[name] = span
    if layout.ep * layout.etp > 1:
        spans["ep"] = layout.ep * layout.etp
    return tuple(name for name, size in spans.items() if inner < size <= outer)
