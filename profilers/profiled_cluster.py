"""The cluster that a profile of any number of nodes describes: devices, links inside and between nodes, what hosts have."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import median
from typing import Any

from ..schema.catalogue import find_device
from ..schema.cluster import (
    ClusterSpec,
    CollectiveLatency,
    Device,
    Link,
    LinkEfficiency,
    LinkLevel,
    NodeGroup,
    default_reserved_bytes,
    joined_levels,
    product_rate,
)
from ..schema.errors import ConfigError, ProfileError
from ..schema.profile import CollectivePoint, Profile
from ..schema.units import GIB
from .measure.compute import fit_gemm, peak_flops
from .measure.links import OPS, fit_lines, fit_link, unused_link

_LARGE = 2**24
"""Bytes from which a copy between host and device shows its bandwidth."""


_CATALOGUE_NAMES = {
    "H100-80GB-HBM3": "H100-SXM-80GB",
    "GH200-480GB": "GH200-96GB",  # torch names the memory of the Grace processor
    "RTX-PRO-6000-Blackwell-Server-Edition": "RTX-PRO-6000-Server-96GB",
}
"""Names of torch.cuda.get_device_name that are not the catalogue's after their prefix is removed."""

CPU_RESERVED_BYTES = GIB // 2
"""Of a rank on a CPU: the interpreter and torch take about 0.3 GiB, gloo's buffers and the allocator some of the rest."""


def profiled_cluster(profile: Profile) -> ClusterSpec:
    """Return the cluster of a profile: rates, points and matrices as they were measured.

    Raises:
        ProfileError: the profile lacks a measurement that the description needs.
    """
    nodes = profile.machine.num_nodes
    ranks_per_node = profile.machine.num_devices // nodes
    isolated = tuple(point for point in profile.collectives if point.concurrent_groups == 1 and point.stride == 1)
    inside = tuple(point for point in isolated if point.num_nodes == 1)
    one_node = profile.machine.replace(num_devices=ranks_per_node, num_nodes=1)
    machine = cluster_from_profile(profile.replace(machine=one_node, collectives=_widest(inside)))
    group = machine.groups[0].replace(num_nodes=nodes, **_host_link(profile), **_storage_rate(profile))
    levels = tuple(_with_points(level, inside) for level in machine.levels)
    if nodes > 1:
        across = tuple(point for point in isolated if point.num_nodes > 1)
        if not across:
            raise ProfileError(
                f"the profile of {nodes} nodes has no collective between them", help="measure again, with more time"
            )
        outer = LinkLevel(link=_between_nodes(profile, across), domain_size=nodes * ranks_per_node)
        levels = (outer,) if ranks_per_node == 1 else (*levels, outer)
    return machine.replace(
        groups=(group,), levels=levels, bandwidth_matrix=profile.node_bandwidth_bytes_per_s, profile=profile,
        calibration=profile.calibration,
    )  # fmt: skip


def with_measured_devices(cluster: ClusterSpec, *measured: ClusterSpec) -> ClusterSpec:
    """Return a cluster of the same devices with their measured rates, given a profile's cluster of each kind of device.

    Its links are its own, and measured ones where nodes are as large. Ranks that are all treated alike count on the slowest kind.

    Raises:
        ProfileError: kinds of device of the cluster and of the profiles differ, or two profiles are of one kind.
    """
    known = {each.groups[0].device.name: each for each in measured}
    names = {group.device.name for group in cluster.groups}
    if known.keys() != names or len(known) < len(measured):
        raise ProfileError(
            f"the profiles are of {', '.join(each.groups[0].device.name for each in measured)}, the cluster has "
            f"{', '.join(sorted(names))}",
            help="give one profile of each kind of device, or a profile without --cluster to plan for what was measured",
        )
    if len(measured) == 1:
        groups = tuple(_with_measured_device(group, measured[0]) for group in cluster.groups)
        levels = _with_measured_links(cluster.levels, measured[0])
        return cluster.replace(
            groups=groups, levels=levels, profile=measured[0].profile, calibration=measured[0].calibration
        )
    of_kind = []
    for group in cluster.groups:
        measured_kind = known[group.device.name]
        levels = _with_measured_links(group.levels or joined_levels(cluster.levels, group.num_devices), measured_kind)
        of_kind.append(
            _with_measured_device(group, measured_kind).replace(levels=levels, profile=measured_kind.profile)
        )
    slowest = min(measured, key=lambda each: product_rate(each.groups[0].device))
    return cluster.replace(groups=tuple(of_kind), profile=slowest.profile, calibration=slowest.calibration)


def _with_measured_device(group: NodeGroup, measured: ClusterSpec) -> NodeGroup:
    known = measured.groups[0]
    device = known.device.replace(price_per_hour=group.device.price_per_hour)
    return group.replace(
        device=device, host_link_bytes_per_s=known.host_link_bytes_per_s or group.host_link_bytes_per_s
    )


def _with_measured_links(levels: tuple[LinkLevel, ...], measured: ClusterSpec) -> tuple[LinkLevel, ...]:
    inner = measured.levels[0]
    return tuple(
        level.model_copy(update={"link": inner.link})
        if level.domain_size == inner.domain_size and level.link.kind == inner.link.kind
        else level
        for level in levels
    )


def _widest(points: Sequence[CollectivePoint]) -> tuple[CollectivePoint, ...]:
    largest = {op: max((p.group_size for p in points if p.op == op), default=0) for op in OPS}
    return tuple(point for point in points if point.group_size == largest[point.op])


def _with_points(level: LinkLevel, points: tuple[CollectivePoint, ...]) -> LinkLevel:
    return level.model_copy(update={"link": level.link.replace(measured=points)}) if points else level


def _between_nodes(profile: Profile, points: Sequence[CollectivePoint]) -> Link:
    """Return the link between nodes, for each device: in rings over all ranks every node's devices carry their part of its traffic.

    The points are of entire hierarchies and no curve of this link by itself: rates follow from them, they do not stand in for it.
    """
    link = fit_link(_widest(points), profile.machine.backend, f"measured {profile.created[:10]}").replace(measured=())
    ranks_per_node = profile.machine.num_devices // profile.machine.num_nodes
    lines = fit_lines(_widest(points))
    shared = ("all_reduce", "all_gather", "reduce_scatter")
    lines = {op: (latency, rate / ranks_per_node if op in shared else rate) for op, (latency, rate) in lines.items()}
    lines |= _concurrent_lines(profile.collectives, ranks_per_node)
    best = max(rate for _, rate in lines.values())
    return link.replace(
        name=f"{link.name}-nodes", kind="scale-out", title="between the measured nodes", bandwidth_bytes_per_s=best,
        efficiency=LinkEfficiency(**{op: rate / best for op, (_, rate) in lines.items()}),
        collective_latency_s=CollectiveLatency(base=lines["all_reduce"][0], per_hop=0.0),
    )  # fmt: skip


def _concurrent_lines(points: Sequence[CollectivePoint], ranks_per_node: int) -> dict[str, tuple[float, float]]:
    """Return latency and rate of one device between counterparts of all nodes, while its node's others send: two sizes or more."""
    concurrent = _widest([
        p for p in points
        if p.num_nodes > 1 and p.stride == ranks_per_node and p.concurrent_groups == ranks_per_node > 1
    ])  # fmt: skip
    return fit_lines([p for p in concurrent if len({q.size_bytes for q in concurrent if q.op == p.op}) > 1])


def _host_link(profile: Profile) -> dict[str, Any]:
    """Return the rate of large pinned copies of one device, the slower direction; nothing where none was measured."""
    rates: dict[str, list[float]] = {"to_device": [], "to_host": []}
    for point in profile.host_copies:
        is_plain = point.host_memory == "pinned" and point.devices_at_once == 1 and point.size_bytes >= _LARGE
        if is_plain and point.direction in rates:
            rates[point.direction].append(point.size_bytes / point.time_s)
    return {"host_link_bytes_per_s": min(map(median, rates.values()))} if all(rates.values()) else {}


def _storage_rate(profile: Profile) -> dict[str, Any]:
    """Return the rate of one node's storage with all its ranks at once, the slower of reading and writing, if measured."""
    rates: dict[str, float] = {}
    for point in sorted(profile.storage, key=lambda point: point.size_bytes):  # the largest file counts
        rates[point.operation] = point.ranks_at_once * point.size_bytes / point.time_s
    return {"storage_bytes_per_s": min(rates.values())} if len(rates) > 1 else {}


def cluster_from_profile(profile: Profile) -> ClusterSpec:
    """Return the cluster that a profile of one machine describes.

    Raises:
        ProfileError: the profile lacks a measurement that the description needs.
    """
    machine, ranks = profile.machine, profile.machine.num_devices
    on_gpu, backend = machine.backend == "nccl", machine.backend
    bandwidth, source = profile.memory_bandwidth_bytes_per_s, f"measured {profile.created[:10]} on {machine.device}"
    name, architecture = _catalogue_name(machine.device) if on_gpu else (f"{machine.device} / {ranks}", "")
    device = Device(
        name=name,
        vendor="cpu" if not on_gpu else "amd" if machine.driver.startswith("rocm") else "nvidia",
        architecture=architecture,
        memory_bytes=profile.device_memory_bytes,
        memory_bandwidth_bytes_per_s=bandwidth,
        peak_flops_per_s=peak_flops(profile.matmuls),
        gemm=fit_gemm(profile.matmuls, bandwidth, source),
        source=f"{source}, {machine.driver}",
    )
    link = unused_link(backend, bandwidth) if ranks == 1 else fit_link(profile.collectives, backend, source)
    host_memory = machine.host_memory_bytes if on_gpu else None
    levels = (LinkLevel(link=link, domain_size=ranks),)
    return ClusterSpec(
        name="local",
        groups=(NodeGroup(device=device, num_nodes=1, devices_per_node=ranks, host_memory_bytes=host_memory),),
        levels=levels,
        reserved_bytes=default_reserved_bytes(levels) if on_gpu else CPU_RESERVED_BYTES,
        profile=profile,
    )


def _catalogue_name(torch_name: str) -> tuple[str, str]:
    """Return name and architecture: the catalogue's where it has the GPU, else torch's name and nothing."""
    bare = re.sub(r"^(NVIDIA |AMD |Tesla |GeForce |Instinct )+", "", torch_name).replace(" ", "-")
    try:
        name, entry = find_device(_CATALOGUE_NAMES.get(bare, bare))
    except ConfigError:  # a GPU the catalogue does not have is fully described by its measurement
        return torch_name, ""
    return name, entry.get("architecture", "")
