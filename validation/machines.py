"""A row's cluster: the device by name or class, the network between nodes from what the table says about it."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

from ..schema import ClusterSpec, ConfigError, LinkLevel
from ..schema.catalogue import find_device
from ..schema.cluster_files import catalogue_device, derived_levels
from ..schema.devices import NodeGroup
from ..schema.units import GIB
from .device_names import device_named
from .networks import network
from .rows import RunRow

MEMORY_TOLERANCE = 0.1
"""A stated memory this far from the catalogue's is another variant of the device; nearer, the catalogue is more exact."""

DEVICES = {
    "a800-sxm-80gb": "A100-SXM-80GB",  # an A100 with fewer NVLinks, see SCALE_UP
    "a800": "A100-SXM-80GB",
    "a100": "A100-SXM-80GB",
    "a100-80gb": "A100-SXM-80GB",
    "a100-40gb": "A100-SXM-40GB",
    "h100": "H100-SXM-80GB",
    "h100-80gb": "H100-SXM-80GB",
    "h800": "H800-SXM-80GB",
    "gh200": "GH200-96GB",
    "b200": "B200-SXM-180GB",
    "b200-180gb": "B200-SXM-180GB",
    "gb200": "GB200-186GB",
    "rtx-4090-24gb": "RTX4090-24GB",
    "mi250x-gcd-64gb": "MI250X-GCD",
}
"""Names of tables that are neither names nor aliases of the catalogue."""

SCALE_UP = {"a800-sxm-80gb": "nvlink4-h800", "a800": "nvlink4-h800"}
"""Eight NVLinks, 200 GB/s each way, as on the H800."""


class RowCluster(NamedTuple):
    """A row's cluster and where it only comes close."""

    spec: ClusterSpec
    approximated: tuple[str, ...]


def cluster_of(row: RunRow) -> RowCluster | str:
    """The cluster of a row, or why it cannot be built."""
    if row.n_gpus is None:
        return "cluster: number of devices not stated"
    try:
        return _cluster(
            row.gpu_type, row.gpu_class, row.n_gpus, row.gpus_per_node, row.inter_interconnect, row.gpu_mem_gib
        )
    except ConfigError as error:
        return f"cluster: {error.message}"


@cache
def _cluster(
    gpu_type: str, gpu_class: str, n_gpus: int, per_node: int | None, inter: str, memory_gib: float | None
) -> RowCluster | str:
    found = _device_name(gpu_type) or _device_name(gpu_class)
    if found is None:
        return "cluster: device not in the catalogue"
    name, entry = find_device(found)
    device = catalogue_device(name, entry)
    if memory_gib and abs(memory_gib * GIB / device.memory_bytes - 1) > MEMORY_TOLERANCE:
        device = device.replace(memory_bytes=int(memory_gib * GIB))
    node = math.gcd(n_gpus, min(per_node or entry["devices_per_node"], n_gpus))
    host_link = entry.get("host_link_bytes_per_s")
    group = NodeGroup(device=device, num_nodes=n_gpus // node, devices_per_node=node, host_link_bytes_per_s=host_link)
    scale_up = SCALE_UP.get(gpu_type.lower(), entry["scaleup"])
    levels = derived_levels([(group, {**entry, "scaleup": scale_up})])
    if levels[-1].link.kind == "scale-out":
        link = network(inter, devices_per_node=per_node or entry["devices_per_node"], default=entry["scaleout"])
        levels = (*levels[:-1], LinkLevel(link=link, domain_size=n_gpus))
    return RowCluster(ClusterSpec(name=f"{n_gpus}x{name}", groups=(group,), levels=levels), ())


@cache
def with_drives(spec: ClusterSpec, rate_bytes_per_s: float) -> ClusterSpec:
    """The cluster with storage of this rate in every node."""
    return spec.replace(groups=tuple(group.replace(storage_bytes_per_s=rate_bytes_per_s) for group in spec.groups))


def _device_name(text: str) -> str | None:
    key = text.lower()
    try:
        return find_device(DEVICES.get(key, text))[0]
    except ConfigError:
        return device_named(text)
