"""Entries of the catalogue as nouns, and the link levels of clusters that are made of catalogue devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .catalogue import find_link
from .cluster import CollectiveLatency, Device, GemmFit, Link, LinkEfficiency, LinkLevel, NodeGroup, PeakFlops

_DEVICE_FIELDS = (
    "vendor", "architecture", "memory_bytes", "memory_bandwidth_bytes_per_s", "num_sms", "cache_bytes",
    "power_limit_ratio", "price_per_hour", "source",
)  # fmt: skip


def catalogue_device(name: str, entry: Mapping[str, Any]) -> Device:
    """The Device of an entry of devices.toml."""
    gemm = entry.get("gemm")
    return Device(
        name=name,
        peak_flops_per_s=PeakFlops(**entry["peak_flops_per_s"]),
        gemm=GemmFit(**gemm) if gemm else None,
        **{key: entry[key] for key in _DEVICE_FIELDS if key in entry},
    )


def catalogue_link(name: str) -> Link:
    """The Link of an entry of links.toml.

    Raises:
        ConfigError: there is no such link.
    """
    key, entry = find_link(name)
    efficiency, latency = LinkEfficiency(**entry["efficiency"]), CollectiveLatency(**entry["collective_latency_s"])
    return Link(**{"name": key, **entry, "efficiency": efficiency, "collective_latency_s": latency})


def derived_levels(groups: Sequence[tuple[NodeGroup, Mapping[str, Any]]]) -> tuple[LinkLevel, ...]:
    """Scale-up inside a domain, scale-out over all devices; of a mixed cluster the weakest link of each kind.

    A domain of one device is left out (nothing can be sent in it) unless it is the whole cluster.

    Args:
        groups: each group with the catalogue entry of its device, of which scaleup, scaleup_domain, devices_per_node
            and scaleout are used.
    """
    total = sum(group.num_devices for group, _ in groups)
    domain = math.gcd(*(_domain(group, entry) for group, entry in groups))
    levels = []
    if domain > 1 or total == 1:
        levels.append(LinkLevel(link=_weakest(entry["scaleup"] for _, entry in groups), domain_size=domain))
    if domain < total:
        levels.append(LinkLevel(link=_weakest(entry["scaleout"] for _, entry in groups), domain_size=total))
    return tuple(levels)


def _domain(group: NodeGroup, entry: Mapping[str, Any]) -> int:
    """Devices of a group that the scale-up link joins: a node, or the nodes of a rack where it spans nodes (NVL72).

    Domains must nest in the cluster, so a rack's domain is the largest number of whole nodes that divides the group and
    fits the rack: 64 of 72 for 256 devices. Where an allocation is cut otherwise, a cluster file can say so.
    """
    node, total = group.devices_per_node, group.num_devices
    if entry["scaleup_domain"] <= entry["devices_per_node"]:
        return node
    whole_nodes = range(node, min(entry["scaleup_domain"], total) + 1, node)
    return max((size for size in whole_nodes if total % size == 0), default=node)


def _weakest(names: Iterable[str]) -> Link:
    return min(map(catalogue_link, names), key=lambda link: link.bandwidth_bytes_per_s * link.efficiency.all_reduce)
