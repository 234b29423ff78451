"""What a host moves and updates: rates of its links, its memory's traffic in updates of parameters, its storage."""

from __future__ import annotations

import numpy as np

from ...schema import ClusterSpec, Workload
from ...schema.units import Array
from ..coefficients import Coefficients, Scenario
from .machine import measured_rates

_STEP_BYTES = {"adamw": 28.0, "adamw-8bit": 16.0, "muon": 20.0, "sgd": 12.0}
"""Fused update: read parameter, gradient and states, write parameter and states, fp32."""

_UNSHARED_LINK_BYTES_PER_S = 4.5e11
"""One direction of a processor that one device has to itself (GH200); half of it where two devices share one (GB200)."""


def update_bytes_per_param(workload: Workload) -> float:
    """Return the bytes read and written for one parameter by the optimizer step, all passes of the engine."""
    masters = (_STEP_BYTES[workload.optimizer] + workload.engine_facts.clip_bytes) * workload.master_bytes / 4
    return masters + (0.0 if workload.precision == "bf16" else workload.engine_facts.update_copy_bytes)


def host_link_bytes_per_s(to_storage: Array, scenario: Scenario) -> Array:
    """Return the rate of one rank in one direction, to the host's memory or its storage, when all ranks of a node move at once."""
    cluster = scenario.cluster
    link = measured_rates(scenario).copy_bytes_per_s or host_copy_bytes_per_s(cluster, scenario.coefficients)
    return np.where(to_storage == 1, np.minimum(link, storage_bytes_per_s(scenario) / cluster.largest_node), link)


def host_copy_bytes_per_s(cluster: ClusterSpec, coefficients: Coefficients) -> float:
    """Return the rate of one device in one direction to the host's memory, as data sheets and coefficients have it."""
    c = coefficients["offload"]
    line = min(group.host_link_bytes_per_s or c["link_bytes_per_s"] for group in cluster.groups)
    of_host = c["host_over_link"] / cluster.largest_node if line < c["own_host_bytes_per_s"] else 1.0
    return float(min(c["link_efficiency"], of_host) * line)


def host_update_s_per_param(scenario: Scenario, to_storage: Array, comes_back: Array) -> Array:
    """Return the seconds per parameter of a rank's shard to update it on the host; ``comes_back``: to parameters on the device."""
    workload, ranks = scenario.workload, scenario.cluster.largest_node
    link = host_link_bytes_per_s(np.zeros_like(to_storage), scenario)
    down = 0.0 if workload.engine_facts.offloads_in_backward else leaving_bytes(workload)
    moved = (down + np.where(comes_back, workload.compute_bytes, 0.0)) / link
    update = host_update_bytes_per_param(workload) * ranks / host_update_bytes_per_s(scenario)
    states = 2.0 * (workload.optimizer_bytes + workload.master_bytes) * ranks / storage_bytes_per_s(scenario)
    return moved + np.maximum(update, np.where(to_storage == 1, states, 0.0))


def leaving_bytes(workload: Workload) -> float:
    """Return the bytes of a gradient that goes to the host: in the compute dtype where the engine reduces so (DeepSpeed)."""
    return workload.compute_bytes if workload.engine_facts.offloads_compute_gradients else workload.master_bytes


def host_update_bytes_per_param(workload: Workload) -> float:
    """Return the bytes that the host reads and writes for one parameter in the update, with what its engine copies there."""
    masters = _STEP_BYTES[workload.optimizer] + workload.engine_facts.host_copy_bytes
    return masters * workload.master_bytes / 4


def host_update_bytes_per_s(scenario: Scenario) -> float:
    """Return the traffic of one node's processors that update parameters.

    Processors, their memory and their links come in generations: PCIe 3 with DDR4-2666, 4 with DDR4-3200, 5 with DDR5.
    """
    if of_node := measured_rates(scenario).host_update_bytes_per_s:
        return of_node
    c, cluster = scenario.coefficients["offload"], scenario.cluster
    generation, processors = _host_of(cluster, scenario.coefficients)
    if generation is None:
        return float(c["own_update_bytes_per_s"] * processors)
    return float(c["update_bytes_per_s"][generation])


def host_weight_rates(cluster: ClusterSpec, coefficients: Coefficients) -> tuple[float, float]:
    """Return bytes/s of weights and FLOP/s of the products with them, of a device's part of its node's processors.

    As the cluster says, else as is usual for processors with such links; all devices of a node keep their host busy at once.
    """
    c = coefficients["serving"]["host_experts"]
    generation, processors = _host_of(cluster, coefficients)
    of_node = (
        (c["own_bytes_per_s"] * processors, c["own_flops_per_s"] * processors)
        if generation is None
        else (c["bytes_per_s"][generation], c["flops_per_s"][generation])
    )
    read = min(group.host_bandwidth_bytes_per_s or of_node[0] for group in cluster.groups)
    computed = min(group.host_flops_per_s or of_node[1] for group in cluster.groups)
    return float(read) / cluster.largest_node, float(computed) / cluster.largest_node


def _host_of(cluster: ClusterSpec, coefficients: Coefficients) -> tuple[int | None, float]:
    """Return the generation of a node's processors, 0 to 2 by their links; None: devices have ones of their own, so many a node."""
    c = coefficients["offload"]
    line = min(group.host_link_bytes_per_s or c["link_bytes_per_s"] for group in cluster.groups)
    if line >= c["own_host_bytes_per_s"]:
        return None, cluster.largest_node * min(line / _UNSHARED_LINK_BYTES_PER_S, 1.0)
    return sum(line > 1.2 * c["link_bytes_per_s"] * doubled for doubled in (1, 2)), 1.0


def storage_bytes_per_s(scenario: Scenario) -> float:
    """Return the rate of one node's storage."""
    return node_storage_bytes_per_s(scenario.cluster, scenario.coefficients)


def node_storage_bytes_per_s(cluster: ClusterSpec, coefficients: Coefficients) -> float:
    """Return the rate of one node's storage, as the cluster says it or as a usual drive has it."""
    default = coefficients["offload"]["storage_bytes_per_s"]
    return float(min(group.storage_bytes_per_s or default for group in cluster.groups))
