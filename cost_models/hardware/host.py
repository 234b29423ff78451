"""Rates of the host next to the devices: dispatch, copies over its links, updates in its memory, its storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...schema import ClusterSpec, Workload
from ...schema.arrays import FloatArray
from ..coefficients import coefficients
from ..measured import copy_bytes_per_s, host_update_bytes_per_s, measured_interference
from .overlap import STREAMS, Fabric, interference

Array = Any


def host_link_bytes_per_s(to_storage: Array, cluster: ClusterSpec) -> Array:
    """Bytes per second of one rank in one direction, to the host's memory or its storage, when all ranks of a node move at once."""
    c = coefficients()["offload"]
    measured = copy_bytes_per_s(cluster)
    links = [group.host_link_bytes_per_s for group in cluster.groups]
    line = min(rate or c["link_bytes_per_s"] for rate in links)
    is_shared = line < c["own_host_bytes_per_s"]
    link = (
        measured or min(c["link_efficiency"], c["host_over_link"] / cluster.largest_node if is_shared else 1.0) * line
    )
    return np.where(to_storage == 1, np.minimum(link, _storage(cluster) / cluster.largest_node), link)


def host_update_s_per_param(workload: Workload, cluster: ClusterSpec, to_storage: Array, update_bytes: float) -> Array:
    """Seconds per parameter of a rank's shard to update it on the host."""
    # Gradients go down in the compute dtype where the engine reduces them so (DeepSpeed), else as they were accumulated.
    gradient_bytes = (
        workload.compute_bytes if workload.engine_facts.offloads_compute_gradients else workload.master_bytes
    )
    link = host_link_bytes_per_s(np.zeros_like(to_storage), cluster)
    moved = (gradient_bytes + workload.compute_bytes) / link
    update = update_bytes * cluster.largest_node / host_update_bytes_per_s(cluster)
    states = 2.0 * (workload.optimizer_bytes + workload.master_bytes) * cluster.largest_node / _storage(cluster)
    return moved + np.maximum(update, np.where(to_storage == 1, states, 0.0))


def _storage(cluster: ClusterSpec) -> float:
    rates = [group.storage_bytes_per_s or coefficients()["offload"]["storage_bytes_per_s"] for group in cluster.groups]
    return float(min(rates))


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
    is_cpu = device.backend.is_host  # a copy within one memory takes cores from the compute and is shared by all ranks
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


class HostCosts(NamedTuple):
    """Seconds the host needs, by the workload's engine.

    Attributes:
        operator_s: dispatch of one operator.
        collective_s: one tensor-parallel collective.
        fsdp_unit_s: one fully sharded layer, forward plus backward.
        routing_s: what a mixture of experts adds to a block, forward plus backward: routing, permutation, counts read back.
        overlap_norm: p of (device^p + host^p)^(1/p), the seconds of a pass.
        adds: the host's time adds to the device's (they are the same cores) instead of hiding behind it.
        pipelined_collective_s: on top of collective_s for each rank of its group, under a pipeline that spans nodes.
        spanning_collective_s: the same for a group that spans nodes.
    """

    operator_s: float
    collective_s: float
    fsdp_unit_s: float
    routing_s: float
    overlap_norm: float
    adds: bool
    pipelined_collective_s: float = 0.0
    spanning_collective_s: float = 0.0


def host_costs(cluster: ClusterSpec, workload: Workload) -> HostCosts:
    """Host overheads of the workload's engine."""
    shared, speed = coefficients()["host"], cluster.calibration.host
    c = shared[workload.engine]
    if has_own_processor(cluster):
        speed = speed / shared["own_processor_ratio"]
    return HostCosts(
        c["operator_s"] / speed,
        c["collective_s"] / speed,
        c["fsdp_unit_s"] / speed,
        c["routing_s"] / speed,
        shared["overlap_norm"],
        adds=cluster.weakest_device.backend.is_host,
        pipelined_collective_s=c.get("pipelined_collective_s", 0.0) / speed,
        spanning_collective_s=c.get("spanning_collective_s", 0.0) / speed,
    )


def has_own_processor(cluster: ClusterSpec) -> bool:
    """Whether devices are joined to a processor of their own (Grace), by a link that no other processor's has the rate of."""
    rates = [group.host_link_bytes_per_s or 0.0 for group in cluster.groups]
    return bool(max(rates) > coefficients()["offload"]["own_host_bytes_per_s"])


def waiting_s(device_s: FloatArray, host_s: FloatArray, norm: float) -> FloatArray:
    """How much longer than the device's own work a pass takes: (device^p + host^p)^(1/p) - device.

    Were the host always far ahead it would be the larger of the two (p without limit). Where both are alike, the host is ahead
    of the long kernels and behind the short ones.
    """
    return np.asarray((device_s**norm + host_s**norm) ** (1 / norm) - device_s)


def update_bytes_per_param(workload: Workload) -> float:
    """Bytes read and written for one parameter by the optimizer step, all passes of the engine."""
    masters = (_STEP_BYTES[workload.optimizer] + _CLIP_BYTES) * workload.master_bytes / 4
    return masters + (0.0 if workload.precision == "bf16" else workload.engine_facts.update_copy_bytes)


_STEP_BYTES = {"adamw": 28.0, "muon": 20.0, "sgd": 12.0}
"""Fused update: read parameter, gradient and states, write parameter and states, fp32."""


_CLIP_BYTES = 12.0
"""Gradient clipping: read for the norm; read and write for the scale."""
