"""More of the same devices: first the rest of a node, then whole nodes on the network that joins them."""

from __future__ import annotations

import math

from ..schema import ClusterSpec, ConfigError, LinkLevel, Workload
from ..schema.catalogue import find_device
from ..schema.cluster import Link, NodeGroup
from ..schema.cluster_levels import catalogue_link

MAX_GROWTH = 256
"""Largest multiple of the cluster, or of a node of it, that is tried."""

MAX_LEFT = 64
"""Ranks that share one sequence at a time (tp x cp x pp) at least, where dp takes all that the batch allows."""


def sizes(cluster: ClusterSpec, workload: Workload) -> list[int]:
    """Numbers of devices beyond these that the batch divides over well enough, increasing."""
    now, node = cluster.num_devices, _devices_per_node(cluster)
    if cluster.num_nodes == 1:
        counts = [*range(now + 1, node + 1), *range(2 * node, MAX_GROWTH * node + 1, node)]
    else:
        step = now // _common_nodes(cluster)
        counts = list(range(now + step, MAX_GROWTH * now + 1, step))
    return [count for count in counts if count // math.gcd(count, workload.global_batch_size) <= MAX_LEFT]


def grown(cluster: ClusterSpec, num_devices: int) -> ClusterSpec | None:
    """The cluster with ``num_devices`` devices, as one of `sizes`; None where its link domains do not divide them."""
    groups = _groups(cluster, num_devices)
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


def _groups(cluster: ClusterSpec, num_devices: int) -> tuple[NodeGroup, ...]:
    """One node fills up and is then repeated; of several groups each has as many times as many nodes."""
    if cluster.num_nodes == 1:
        per_node = min(num_devices, _devices_per_node(cluster))
        return (cluster.groups[0].replace(num_nodes=num_devices // per_node, devices_per_node=per_node),)
    common = _common_nodes(cluster)
    times = num_devices * common // cluster.num_devices
    return tuple(group.resized(group.num_nodes * times // common) for group in cluster.groups)


def _common_nodes(cluster: ClusterSpec) -> int:
    return math.gcd(*(group.num_nodes for group in cluster.groups))


def _devices_per_node(cluster: ClusterSpec) -> int:
    """Devices of a full node: what the catalogue says of the device, or as many as there are."""
    group = cluster.groups[0]
    try:
        entry = find_device(group.device.name)[1]
    except ConfigError:
        return group.devices_per_node
    return max(group.devices_per_node, int(entry["devices_per_node"]))


def _network(cluster: ClusterSpec) -> Link:
    """What joins further nodes: the network that there is, else the usual one of the device, else the only link known."""
    link = cluster.levels[-1].link
    if link.kind == "scale-out":
        return link
    try:
        return catalogue_link(str(find_device(cluster.groups[0].device.name)[1]["scaleout"]))
    except ConfigError:
        return link
