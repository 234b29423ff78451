"""What one rank has of its host: rates of copies that run beside kernels, of its processors and of its drives, and its memory.

A copy beside kernels takes ``1 + slowdown`` of its seconds alone, kernels lose a share of theirs, and copies of both directions at
once slow each other down ([interference] of coefficients.toml: measured over PCIe and NVLink hosts). All ranks of a node share its
side of the links, its memory and its drives (host_memory.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..schema import ClusterSpec, Workload
from .coefficients import coefficients
from .engines import update_bytes_per_param
from .host_memory import host_link_bytes_per_s
from .measured_streams import host_update_bytes_per_s, measured_interference
from .overlap import STREAMS, Fabric, interference

USABLE_HOST_MEMORY = 0.94
"""Of a host's memory: published runs fill 94 to 96 % of it with states (SuperOffload, 25e9 parameters in 480 GB; MegaTrain, 120e9
in 1.5 TB)."""


@dataclass(frozen=True, kw_only=True)
class HostRates:
    """One rank's rates, bytes per second; seconds of compute lost for each of a copy; host seconds to update one parameter.

    Attributes:
        duplex: copies of both directions at once reach 1 + duplex of one.
        memory_bytes: of the host that the rank may use; infinite where it is not known.
    """

    to_host_bytes_per_s: float
    to_device_bytes_per_s: float
    duplex: float
    compute_lost_to_host: float
    compute_lost_to_device: float
    update_s_per_param: float
    storage_bytes_per_s: float
    memory_bytes: float


def host_rates(workload: Workload, cluster: ClusterSpec, *, memory_bytes: float | None = None) -> HostRates:
    """Of the weakest device of a cluster; ``memory_bytes`` of a node stand in for what the cluster says."""
    c, device = coefficients()["offload"], cluster.weakest_device
    line = float(host_link_bytes_per_s(np.zeros(1), cluster)[0])
    slow = interference(_fabric(cluster))
    if cluster.profile is not None:
        slow = measured_interference(slow, cluster.profile.overlaps)
    compute, to_device, to_host = (STREAMS.index(name) for name in ("compute", "to_device", "to_host"))
    both = 1 / (1 + slow[to_device, to_host]) + 1 / (1 + slow[to_host, to_device])
    ranks = cluster.largest_node
    known = [group.host_memory_bytes for group in cluster.groups]
    whole = memory_bytes
    if whole is None:
        sizes = [size for size in known if size]
        whole = USABLE_HOST_MEMORY * min(sizes) if len(sizes) == len(known) else np.inf
    on_host = update_bytes_per_param(workload) * ranks / host_update_bytes_per_s(cluster)
    drives = [group.storage_bytes_per_s or float(c["storage_bytes_per_s"]) for group in cluster.groups]
    is_cpu = device.vendor == "cpu"  # a copy within one memory takes cores from the compute and is shared by all ranks
    return HostRates(
        to_host_bytes_per_s=line / (1 + float(slow[to_host, compute])),
        to_device_bytes_per_s=line / (1 + float(slow[to_device, compute])),
        duplex=0.0 if is_cpu else float(np.clip(both - 1, 0.0, 1.0)),
        compute_lost_to_host=min(float(slow[compute, to_host]), 0.5),
        compute_lost_to_device=min(float(slow[compute, to_device]), 0.5),
        update_s_per_param=on_host,
        storage_bytes_per_s=min(drives) / ranks,
        memory_bytes=whole / ranks,
    )


def _fabric(cluster: ClusterSpec) -> Fabric:
    """The measured machine that is most alike: an A100's memory has room for copies beside kernels, an L4's has not."""
    return "nvlink" if cluster.weakest_device.memory_bandwidth_bytes_per_s >= _STACKED_MEMORY_BYTES_PER_S else "pcie"


_STACKED_MEMORY_BYTES_PER_S = 1.2e12
"""Slowest stacked memory of the catalogue's devices that were measured; the fastest GDDR is below it."""
