"""Forward and backward seconds of a layer with the host that dispatches its operators."""

from __future__ import annotations

import numpy as np

from ..schema import ClusterSpec, Workload
from ..schema.model import Block, MTPHead
from .coefficients import HostCosts, device_rates, host_costs
from .compute import OperatorTime
from .experts import routed_part
from .layouts import RECOMPUTES, FloatArray, LayoutBatch
from .memory import has_copies
from .operators import Gemm, Layer, Operator
from .recompute_costs import recompute_s
from .setting import Setting


def compute_s(
    layer: Layer,
    operators: tuple[Operator, ...],
    times: list[OperatorTime],
    comm_s: tuple[FloatArray, FloatArray],
    setting: Setting,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Forward, backward and recompute seconds [N] with the host's dispatch.

    On an accelerator the host runs ahead and waits show only where it falls behind kernels and the communication inside the
    layer, ``comm_s`` forward and backward (`waiting_s`). Collectives themselves are not included.
    """
    batch, workload, cluster = setting.batch, setting.workload, setting.cluster
    host = host_costs(cluster, workload)
    zero = np.zeros(len(batch))
    forward = sum((time.forward_s for time in times), start=zero)
    backward = sum((time.backward_s for time in times), start=zero)
    has_block = isinstance(layer, Block | MTPHead)
    recompute, repeated = recompute_s(operators, times, batch, workload) if has_block else (zero, zero)
    recompute, repeated = batch.recompute_fraction * recompute, batch.recompute_fraction * repeated
    if workload.adapters is not None and workload.adapters.frozen == "nf4":
        written_s = _dequantise_s(operators, batch, workload, cluster)
        forward, backward = forward + written_s, backward + written_s
    # Two pairs of all-gather and reduce-scatter a pass, or two all-reduces.
    collectives = np.where(batch.tp > 1, (2 if has_block else 0.5) * np.where(batch.sequence_parallel == 1, 2, 1), 0.0)
    repeats = batch.recompute_fraction * (batch.recompute == RECOMPUTES.index("full"))
    each_s = host.collective_s + batch.tp * _between_nodes_s(host, batch, cluster)
    is_wrapped = has_copies(batch, workload) | (batch.cp > 1)
    per_pass = collectives * each_s + np.where(is_wrapped, host.fsdp_unit_s / 2, 0.0)
    if routed_part(layer) is not None and not host.adds:
        per_pass = per_pass + host.routing_s / 2
    host_forward = per_pass + host.operator_s * sum(time.forward_dispatches for time in times)
    host_backward = per_pass + host.operator_s * sum(time.backward_dispatches for time in times)
    host_recompute = repeated * host.operator_s + repeats * collectives * each_s
    if workload.cuda_graphs:  # collectives and recompute are in the graph
        host_forward = host_backward = np.full(len(batch), host.operator_s)
        host_recompute = zero
    if host.adds:
        return forward + host_forward, backward + host_backward, recompute + host_recompute
    comm_forward, comm_backward = comm_s
    busy_backward = backward + recompute + comm_backward
    return (
        forward + waiting_s(forward + comm_forward, host_forward, host.overlap_norm),
        backward + waiting_s(busy_backward, host_backward + host_recompute, host.overlap_norm),
        recompute,
    )


def _dequantise_s(
    operators: tuple[Operator, ...], batch: LayoutBatch, workload: Workload, cluster: ClusterSpec
) -> FloatArray:
    """Seconds to write a layer's frozen nf4 products out in the compute dtype, before they are used."""
    weights = sum(op.num_params for op in operators if isinstance(op, Gemm) and op.frozen)
    traffic = workload.adapters.frozen_bytes + workload.compute_bytes if workload.adapters else 0.0
    rates = device_rates(cluster, workload)
    return np.asarray(weights * traffic / batch.tp / rates.elementwise_bytes_per_s)


def _between_nodes_s(host: HostCosts, batch: LayoutBatch, cluster: ClusterSpec) -> FloatArray:
    """What one rank adds to a tensor-parallel collective [N] because of traffic between nodes, where the engine is known for it."""
    node = max(group.devices_per_node for group in cluster.groups)
    over_pipeline = np.where((batch.pp > 1) & (cluster.num_nodes > 1), host.pipelined_collective_s, 0.0)
    return np.asarray(over_pipeline + np.where(batch.tp > node, host.spanning_collective_s, 0.0))


def waiting_s(device_s: FloatArray, host_s: FloatArray, norm: float) -> FloatArray:
    """How much longer than the device's own work a pass takes: (device^p + host^p)^(1/p) - device.

    Were the host always far ahead it would be the larger of the two (p without limit). Where both are alike, the host is ahead
    of the long kernels and behind the short ones.
    """
    return np.asarray((device_s**norm + host_s**norm) ** (1 / norm) - device_s)
