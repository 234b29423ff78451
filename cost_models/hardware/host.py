"""The host next to the devices: dispatch of operators, copies over its links, updates in its memory, its storage.

Dispatch: a pass takes ``(device^p + host^p)^(1/p)`` seconds (`waiting_s`); added where both are the same cores.

Offload: a rank moves its shard over its own link, but all ranks of a node together get no more than the host's side of one and a
half links; they share the host's memory and its storage. Updating one parameter in host memory reads and writes as many bytes as
on a device:

    update_s = shard * ((g + b) / link + ranks_per_node * max(u / host_bandwidth, 2 * s / storage))

with g bytes of a gradient that goes down, b of a parameter that comes back, u of traffic of the optimizer, and s of fp32
parameter and states, read and written while the next ones are updated, only where they lie on storage.

Copies that run with kernels take ``1 + slowdown`` of their isolated seconds, kernels lose a share of theirs, and copies of both
directions at once slow each other down ([interference] of coefficients.toml: measured over PCIe and NVLink hosts).

Source: ZeRO-Offload, arXiv:2101.06840 (gradients down, parameters up, Adam on the host); ZeRO-Infinity, arXiv:2104.07857
(storage).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...schema import ClusterSpec, Workload
from ...schema.arrays import Array, FloatArray
from .. import measured
from ..coefficients import Coefficients, Scenario
from .overlap import STREAMS, Fabric, interference

USABLE_HOST_MEMORY = 0.94
"""Of a host's memory: published runs fill 94 to 96 % of it with states (SuperOffload, 25e9 parameters in 480 GB; MegaTrain, 120e9
in 1.5 TB)."""

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


def host_costs(scenario: Scenario) -> HostCosts:
    """Return the host overheads of the workload's engine."""
    shared, speed = scenario.coefficients["host"], scenario.cluster.calibration.host
    c = shared[scenario.workload.engine]
    rates = [group.host_link_bytes_per_s or 0.0 for group in scenario.cluster.groups]
    if max(rates) > scenario.coefficients["offload"]["own_host_bytes_per_s"]:
        speed = speed / shared["own_processor_ratio"]  # no other processor's link is as fast as Grace's
    return HostCosts(
        c["operator_s"] / speed,
        c["collective_s"] / speed,
        c["fsdp_unit_s"] / speed,
        c["routing_s"] / speed,
        shared["overlap_norm"],
        adds=scenario.cluster.weakest_device.backend.is_host,
        pipelined_collective_s=c.get("pipelined_collective_s", 0.0) / speed,
        spanning_collective_s=c.get("spanning_collective_s", 0.0) / speed,
    )


def waiting_s(device_s: FloatArray, host_s: FloatArray, norm: float) -> FloatArray:
    """Return how much longer than the device's own work a pass takes: (device^p + host^p)^(1/p) - device.

    Were the host always far ahead it would be the larger of the two (p without limit). Where both are alike, the host is ahead
    of the long kernels and behind the short ones.
    """
    return np.asarray((device_s**norm + host_s**norm) ** (1 / norm) - device_s)


_STEP_BYTES = {"adamw": 28.0, "muon": 20.0, "sgd": 12.0}
"""Fused update: read parameter, gradient and states, write parameter and states, fp32."""

_CLIP_BYTES = 12.0
"""Gradient clipping: read for the norm; read and write for the scale."""


def update_bytes_per_param(workload: Workload) -> float:
    """Return the bytes read and written for one parameter by the optimizer step, all passes of the engine."""
    masters = (_STEP_BYTES[workload.optimizer] + _CLIP_BYTES) * workload.master_bytes / 4
    return masters + (0.0 if workload.precision == "bf16" else workload.engine_facts.update_copy_bytes)


def host_link_bytes_per_s(to_storage: Array, scenario: Scenario) -> Array:
    """Return the rate of one rank in one direction, to the host's memory or its storage, when all ranks of a node move at once."""
    c, cluster = scenario.coefficients["offload"], scenario.cluster
    line = min(group.host_link_bytes_per_s or c["link_bytes_per_s"] for group in cluster.groups)
    is_shared = line < c["own_host_bytes_per_s"]
    link = (
        measured.copy_bytes_per_s(cluster)
        or min(c["link_efficiency"], c["host_over_link"] / cluster.largest_node if is_shared else 1.0) * line
    )
    return np.where(to_storage == 1, np.minimum(link, _storage_bytes_per_s(scenario) / cluster.largest_node), link)


def host_update_s_per_param(scenario: Scenario, to_storage: Array, update_bytes: float) -> Array:
    """Return the seconds per parameter of a rank's shard to update it on the host."""
    workload, ranks = scenario.workload, scenario.cluster.largest_node
    # Gradients go down in the compute dtype where the engine reduces them so (DeepSpeed), else as they were accumulated.
    gradient_bytes = (
        workload.compute_bytes if workload.engine_facts.offloads_compute_gradients else workload.master_bytes
    )
    link = host_link_bytes_per_s(np.zeros_like(to_storage), scenario)
    moved = (gradient_bytes + workload.compute_bytes) / link
    update = update_bytes * ranks / _update_bytes_per_s(scenario)
    states = 2.0 * (workload.optimizer_bytes + workload.master_bytes) * ranks / _storage_bytes_per_s(scenario)
    return moved + np.maximum(update, np.where(to_storage == 1, states, 0.0))


def _update_bytes_per_s(scenario: Scenario) -> float:
    """Return the traffic of one node's processors that update parameters: measured, or the coefficient."""
    of_node = measured.host_update_bytes_per_s(scenario.cluster)
    return float(scenario.coefficients["offload"]["host_update_bytes_per_s"]) if of_node is None else of_node


def _storage_bytes_per_s(scenario: Scenario) -> float:
    default = scenario.coefficients["offload"]["storage_bytes_per_s"]
    return float(min(group.storage_bytes_per_s or default for group in scenario.cluster.groups))


@dataclass(frozen=True, kw_only=True)
class HostRates:
    """One rank's rates, bytes per second; seconds of compute lost for each of a copy; host seconds to update one parameter.

    Attributes:
        link_bytes_per_s: of one direction alone; to_host_bytes_per_s, to_device_bytes_per_s: of copies that run with kernels.
        duplex: copies of both directions at once reach 1 + duplex of one.
        memory_bytes: of the host that the rank may use; infinite where it is not known.
    """

    link_bytes_per_s: float
    to_host_bytes_per_s: float
    to_device_bytes_per_s: float
    duplex: float
    compute_lost_to_host: float
    compute_lost_to_device: float
    update_s_per_param: float
    storage_bytes_per_s: float
    memory_bytes: float


def host_rates(
    workload: Workload,
    cluster: ClusterSpec,
    *,
    memory_bytes: float | None = None,
    coefficients: Coefficients | None = None,
) -> HostRates:
    """Return the rates of the weakest device's host; ``memory_bytes`` of a node stand in for what the cluster says."""
    scenario, ranks = Scenario.build(workload, cluster, coefficients), cluster.largest_node
    line = float(host_link_bytes_per_s(np.zeros(1), scenario)[0])
    slow = interference(_fabric(cluster), scenario.coefficients)
    if cluster.profile is not None:
        slow = measured.interference(slow, cluster.profile.overlaps)
    compute, to_device, to_host = (STREAMS.index(name) for name in ("compute", "to_device", "to_host"))
    both = 1 / (1 + slow[to_device, to_host]) + 1 / (1 + slow[to_host, to_device])
    if memory_bytes is None:
        sizes = [group.host_memory_bytes for group in cluster.groups]
        memory_bytes = USABLE_HOST_MEMORY * min(size or 0.0 for size in sizes) if all(sizes) else np.inf
    is_host = cluster.weakest_device.backend.is_host  # a copy within one memory takes cores from the compute
    return HostRates(
        link_bytes_per_s=line,
        to_host_bytes_per_s=line / (1 + float(slow[to_host, compute])),
        to_device_bytes_per_s=line / (1 + float(slow[to_device, compute])),
        duplex=0.0 if is_host else float(np.clip(both - 1, 0.0, 1.0)),
        compute_lost_to_host=min(float(slow[compute, to_host]), 0.5),
        compute_lost_to_device=min(float(slow[compute, to_device]), 0.5),
        update_s_per_param=update_bytes_per_param(workload) * ranks / _update_bytes_per_s(scenario),
        storage_bytes_per_s=_storage_bytes_per_s(scenario) / ranks,
        memory_bytes=memory_bytes / ranks,
    )


def _fabric(cluster: ClusterSpec) -> Fabric:
    """Return the measured machine that is most alike: an A100's memory has room for copies next to kernels, an L4's has not."""
    return "nvlink" if cluster.weakest_device.memory_bandwidth_bytes_per_s >= _STACKED_MEMORY_BYTES_PER_S else "pcie"
