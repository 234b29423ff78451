"""Changed clusters: more of the same devices, first the rest of a node, then nodes on their network; more memory, faster links."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...schema import ClusterSpec, ConfigError, LinkLevel, Workload
from ...schema.catalogue import find_device
from ...schema.cluster import Link, NodeGroup
from ...schema.profile import CollectivePoint

MAX_GROWTH = 256
"""Largest multiple of the cluster, or of a node of it, that is tried."""


MAX_SHARED_RANKS = 64
"""Ranks that share one sequence at a time (tp x cp x pp) at least, where dp takes all that the batch allows."""

LARGEST_RATIO = 19.9
"""Calibration ratios stay below 20."""


def larger_sizes(cluster: ClusterSpec, workload: Workload) -> list[int]:
    """Return numbers of devices beyond these that the batch divides over well enough, increasing."""
    now, node = cluster.num_devices, _devices_per_node(cluster)
    if cluster.num_nodes == 1:
        counts = [*range(now + 1, node + 1), *range(2 * node, MAX_GROWTH * node + 1, node)]
    else:
        step = now // _common_nodes(cluster)
        counts = list(range(now + step, MAX_GROWTH * now + 1, step))
    return [count for count in counts if count // math.gcd(count, workload.global_batch_size) <= MAX_SHARED_RANKS]


def grow_cluster(cluster: ClusterSpec, num_devices: int) -> ClusterSpec | None:
    """Return the cluster with ``num_devices`` devices, as one of `larger_sizes`; None where its link domains do not divide them."""
    groups = _grown_groups(cluster, num_devices)
    per_node = groups[0].devices_per_node
    if cluster.num_nodes == 1:
        inner: tuple[LinkLevel, ...] = (LinkLevel(link=cluster.levels[-1].link, domain_size=per_node),)
    else:
        inner = cluster.levels[:-1] if cluster.levels[-1].link.kind == "scale-out" else cluster.levels
    inner = tuple(level for level in inner if level.domain_size > 1)
    outer = (LinkLevel(link=_network(cluster), domain_size=num_devices),)
    levels = inner if inner and inner[-1].domain_size == num_devices else inner + outer
    try:
        return cluster.replace(groups=groups, levels=levels, bandwidth_matrix=None, profile=None)
    except ConfigError:
        return None


def _grown_groups(cluster: ClusterSpec, num_devices: int) -> tuple[NodeGroup, ...]:
    if cluster.num_nodes == 1:
        per_node = min(num_devices, _devices_per_node(cluster))
        return (cluster.groups[0].replace(num_nodes=num_devices // per_node, devices_per_node=per_node),)
    common = _common_nodes(cluster)
    times = num_devices * common // cluster.num_devices
    return tuple(group.resized(group.num_nodes * times // common) for group in cluster.groups)


def _common_nodes(cluster: ClusterSpec) -> int:
    return math.gcd(*(group.num_nodes for group in cluster.groups))


def _devices_per_node(cluster: ClusterSpec) -> int:
    """Return the devices of a full node: what the catalogue says of the device, or as many as there are."""
    group = cluster.groups[0]
    try:
        entry = find_device(group.device.name)[1]
    except ConfigError:
        return group.devices_per_node
    return max(group.devices_per_node, int(entry["devices_per_node"]))


def _network(cluster: ClusterSpec) -> Link:
    """Return what joins more nodes: the network that there is, else the usual one of the device, else the only link known."""
    link = cluster.levels[-1].link
    if link.kind == "scale-out":
        return link
    try:
        return Link.named(find_device(cluster.groups[0].device.name)[1]["scaleout"])
    except ConfigError:
        return link


def with_memory(cluster: ClusterSpec, more_bytes: int) -> ClusterSpec:
    """Return the cluster whose devices have ``more_bytes`` more each."""
    groups = tuple(
        group.replace(device=group.device.replace(memory_bytes=group.device.memory_bytes + more_bytes))
        for group in cluster.groups
    )
    return cluster.replace(groups=groups)


def with_ratios(cluster: ClusterSpec, **ratios: float) -> ClusterSpec:
    """Multiply rates of the calibration by ``ratios``, as far as they may go."""
    old = cluster.calibration
    changed = {name: min(LARGEST_RATIO, ratio * getattr(old, name)) for name, ratio in ratios.items()}
    return cluster.replace(calibration=old.replace(**changed))


def with_bandwidth(cluster: ClusterSpec, level_idx: int, more_bytes_per_s: float) -> ClusterSpec:
    """Raise the line rate of one link level; what was measured on it beyond its latency takes less by the same ratio.

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
    """Double the line rate of one link level."""
    return with_bandwidth(cluster, level_idx, cluster.levels[level_idx].link.bandwidth_bytes_per_s)


def _with_link(cluster: ClusterSpec, level_idx: int, link: Link) -> ClusterSpec:
    old = cluster.levels[level_idx].link
    levels = tuple(level.replace(link=link) if i == level_idx else level for i, level in enumerate(cluster.levels))
    groups = tuple(
        group.replace(levels=tuple(level.replace(link=link) if level.link == old else level for level in group.levels))
        for group in cluster.groups
    )
    return cluster.replace(levels=levels, groups=groups)


def _faster_points(points: Sequence[CollectivePoint], ratio: float) -> tuple[CollectivePoint, ...]:
    """Shrink by ``ratio`` what is beyond the latency, which the smallest message of each operation and group takes."""
    latency: dict[tuple[str, int], float] = {}
    for point in points:
        key = (point.op, point.group_size)
        latency[key] = min(point.time_s, latency.get(key, point.time_s))
    floors = [latency[point.op, point.group_size] for point in points]
    return tuple(
        point.replace(time_s=floor + (point.time_s - floor) / ratio)
        for point, floor in zip(points, floors, strict=True)
    )
