"""Groups of a mixed cluster: their names, their order, and the cluster that some of its device pools make without the others."""

from __future__ import annotations

from collections.abc import Sequence

from .cluster import ClusterPart, ClusterSpec, Link, LinkLevel, product_rate
from .regions import joining_link


def part_label(parts: Sequence[ClusterPart], g: int) -> str:
    """Name a device pool: by its device, and where another pool has the same one by its zone, or the link that joins its nodes."""
    part = parts[g]
    same = [other for other in parts if other.device == part.device]
    if len(same) == 1:
        return part.device
    zones = [other.cluster.groups[0].zone for other in same]
    by_zone = all(zones) and len({*zones}) == len(zones)
    return f"{part.device}/{part.cluster.groups[0].zone if by_zone else part.cluster.levels[-1].link.name}"


def with_parts_in_order(cluster: ClusterSpec, parts: Sequence[ClusterPart]) -> ClusterSpec:
    """Return the cluster with its groups listed pool by pool, in the given order."""
    nodes = [n for part in parts for n in part.nodes]
    groups = tuple(cluster.groups[i] for part in parts for i in part.groups)
    return cluster.replace(groups=groups, bandwidth_matrix=cluster.bandwidths_of(nodes))


def with_parts_only(cluster: ClusterSpec, used: Sequence[int]) -> ClusterSpec:
    """Return the cluster of some of a mixed cluster's device pools, joined by the best link that is known to join them all.

    Its nodes keep their order.
    """
    parts = cluster.parts
    if len(used) == len(parts):
        return cluster
    name = f"{cluster.name} without {', '.join(part_label(parts, g) for g in range(len(parts)) if g not in used)}"
    if len(used) == 1:
        return parts[used[0]].cluster.replace(name=name)
    chosen = [parts[g] for g in used]
    groups = tuple(cluster.groups[i] for i in sorted(i for part in chosen for i in part.groups))
    zones, sizes = {group.zone for group in groups}, [part.cluster.num_devices for part in chosen]
    slowest = min((part.cluster for part in chosen), key=lambda part: product_rate(part.weakest_device))
    inner = [level for level in cluster.levels[:-1] if all(size % level.domain_size == 0 for size in sizes)]
    return cluster.replace(
        name=name,
        groups=groups,
        levels=(*inner, _joining_level(cluster, zones, sum(sizes))),
        bandwidth_matrix=cluster.bandwidths_of(sorted(n for part in chosen for n in part.nodes)),
        zone_links=tuple(join for join in cluster.zone_links if zones.issuperset(join.zones)),
        profile=slowest.profile,
        calibration=slowest.calibration,
    )


def _joining_level(cluster: ClusterSpec, zones: set[str], num_devices: int) -> LinkLevel:
    """Return the level that joins devices of these zones: the fastest of what joins them all for certain."""
    if cluster.region_links and len(zones) > 1:
        return LinkLevel(link=Link(**joining_link(cluster.region_links, zones)), domain_size=num_devices)
    links = [join.link for join in cluster.zone_links if zones <= {*join.zones}]
    if len(zones) == 1:  # of one zone, or where there are none: a level as large as all of them joins them
        links += [level.link for level in cluster.levels if level.domain_size >= num_devices]
    links.append(cluster.levels[-1].link)
    fastest = max(links, key=lambda link: link.bandwidth_bytes_per_s * link.efficiency.all_reduce)
    return LinkLevel(link=fastest, domain_size=num_devices)


def cost_key(cluster: ClusterSpec) -> tuple[object, ...]:
    """Return what two clusters have in common where every layout costs the same on both: zones have no costs of their own."""
    groups = [
        (group.replace(num_nodes=1, zone="", levels=()), group.levels, group.num_nodes) for group in cluster.groups
    ]
    listed = tuple(sorted(repr(group) for group in groups))
    return listed, cluster.levels, cluster.reserved_bytes, cluster.bandwidth_matrix
