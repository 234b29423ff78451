"""Forward and backward seconds of a layer with the host that dispatches its operators.

What the backward pass computes again under each recompute choice.
"""

from __future__ import annotations

import numpy as np

from ...schema import ClusterSpec, Workload
from ...schema.arrays import FloatArray
from ...schema.layers import Block, MTPHead
from ...schema.layout_table import RECOMPUTES, LayoutTable
from ..hardware.compute import OperatorTime
from ..hardware.device import device_rates
from ..hardware.host import HostCosts, host_costs, waiting_s
from .data import has_copies
from .operators import CORE_ATTENTION, CostInputs, FusedAttention, Gemm, Layer, Operator
from .parallel import mixture_of


def compute_s(
    layer: Layer,
    operators: tuple[Operator, ...],
    times: list[OperatorTime],
    comm_s: tuple[FloatArray, FloatArray],
    setting: CostInputs,
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
    if mixture_of(layer) is not None and not host.adds:
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
    operators: tuple[Operator, ...], batch: LayoutTable, workload: Workload, cluster: ClusterSpec
) -> FloatArray:
    """Seconds to write a layer's frozen nf4 products out in the compute dtype, before they are used."""
    weights = sum(op.num_params for op in operators if isinstance(op, Gemm) and op.frozen)
    traffic = workload.adapters.frozen_bytes + workload.compute_bytes if workload.adapters else 0.0
    rates = device_rates(cluster, workload)
    return np.asarray(weights * traffic / batch.tp / rates.elementwise_bytes_per_s)


def _between_nodes_s(host: HostCosts, batch: LayoutTable, cluster: ClusterSpec) -> FloatArray:
    """What one rank adds to a tensor-parallel collective [N] because of traffic between nodes, where the engine is known for it."""
    node = max(group.devices_per_node for group in cluster.groups)
    over_pipeline = np.where((batch.pp > 1) & (cluster.num_nodes > 1), host.pipelined_collective_s, 0.0)
    return np.asarray(over_pipeline + np.where(batch.tp > node, host.spanning_collective_s, 0.0))


def recompute_s(
    operators: tuple[Operator, ...], times: list[OperatorTime], batch: LayoutTable, workload: Workload
) -> tuple[FloatArray, FloatArray]:
    """Forward seconds and dispatches repeated under each layout's recompute.

    Ours stops once the last product has its input, and selective repeats neither products nor fused attention
    (runtime/recompute.py). Megatron repeats the whole layer, and selective is the core of unfused attention: scores, softmax,
    dropout and both products (arXiv:2205.05198 section 5).
    """
    if workload.engine_facts.is_eager_like_megatron:
        full = times
        cheap = [time for op, time in zip(operators, times, strict=True) if _is_repeated_core(op, workload)]
    else:
        last_product = max((idx for idx, op in enumerate(operators) if isinstance(op, Gemm)), default=-1)
        full = [time for idx, time in enumerate(times) if idx != last_product]
        cheap = [time for op, time in zip(operators, times, strict=True) if not _is_kept(op)]
    is_kind = [batch.recompute == RECOMPUTES.index(kind) for kind in ("full", "selective")]
    seconds = [sum((time.forward_s for time in chosen), start=np.zeros(len(batch))) for chosen in (full, cheap)]
    if workload.selective == "alternate_products":
        seconds[1] = seconds[1] + alternate_products_s(operators, times, batch)
    dispatches = [
        sum((time.forward_dispatches for time in chosen), start=np.zeros(len(batch))) for chosen in (full, cheap)
    ]
    return np.select(is_kind, seconds, 0.0), np.select(is_kind, dispatches, 0.0)


def alternate_products_s(operators: tuple[Operator, ...], times: list[OperatorTime], batch: LayoutTable) -> FloatArray:
    """Forward seconds of every second product of a block [N]: of q, k, v, out, gate, up, down these are k, out and up.

    Source: torchtitan, distributed/activation_checkpoint.py: its policy counts the products and keeps those with an odd number.
    """
    repeated = np.zeros(len(batch))
    for op, time in zip(operators, times, strict=True):
        repeated += _repeated_share(op, operators) * time.forward_s if isinstance(op, Gemm) else 0.0
    return repeated


def _repeated_share(op: Gemm, operators: tuple[Operator, ...]) -> float:
    """Part of a product's output that is repeated; gate and up, and q, k and v, are one product here."""
    if op.name == "qkv":
        q = sum(other.k for other in operators if isinstance(other, Gemm) and other.name == "attention_out")
        return (op.n - q) / 2 / op.n
    if op.name == "attention_out":
        return 1.0
    is_gated = any(isinstance(other, Gemm) and other.name == "mlp_down" and op.n == 2 * other.k for other in operators)
    return 0.5 if op.name == "mlp_up" and is_gated else 0.0


def _is_repeated_core(op: Operator, workload: Workload) -> bool:
    """Megatron's selective recompute of unfused attention; with fused attention ours stands in for the engines' own choices."""
    return op.name in CORE_ATTENTION if workload.attention == "math" else not _is_kept(op)


def _is_kept(op: Operator) -> bool:
    """Whether our selective recompute keeps the output: products with weights and fused attention, not scores."""
    return isinstance(op, Gemm | FusedAttention) and op.name not in ("scores", "context")
