"""Offloading to the host: what moves over its link, and what its processors and storage take for the update.

A rank moves its shard over its own link, but all ranks of a node together get no more than the host's side of one and a half
links; they share the host's memory and its storage. Updating one parameter in host memory reads and writes as many bytes as
on a device:

    update_s = shard * ((g + b) / link + ranks_per_node * max(u / host_bandwidth, 2 * s / storage))

with g bytes of a gradient that goes down, b of a parameter that comes back, u of traffic of the optimizer, and s of fp32
parameter and states, read and written while the next ones are updated, only where they lie on storage.
Source: ZeRO-Offload, arXiv:2101.06840 (gradients down, parameters up, Adam on the host); ZeRO-Infinity, arXiv:2104.07857
(storage).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..schema import ClusterSpec, Workload
from .coefficients import coefficients
from .measured_streams import copy_bytes_per_s, host_update_bytes_per_s

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
    gradient_bytes = workload.compute_bytes if workload.engine == "deepspeed" else workload.master_bytes
    link = host_link_bytes_per_s(np.zeros_like(to_storage), cluster)
    moved = (gradient_bytes + workload.compute_bytes) / link
    update = update_bytes * cluster.largest_node / host_update_bytes_per_s(cluster)
    states = 2.0 * (workload.optimizer_bytes + workload.master_bytes) * cluster.largest_node / _storage(cluster)
    return moved + np.maximum(update, np.where(to_storage == 1, states, 0.0))


def _storage(cluster: ClusterSpec) -> float:
    rates = [group.storage_bytes_per_s or coefficients()["offload"]["storage_bytes_per_s"] for group in cluster.groups]
    return float(min(rates))
