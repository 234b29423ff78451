"""Forward, backward and recompute seconds of one layer with the host that dispatches its operators."""

from __future__ import annotations

import numpy as np

from ...schema import Workload
from ...schema.arrays import FloatArray
from ...schema.layout_table import RECOMPUTES, LayoutTable
from ..hardware.compute import OperatorTime
from ..hardware.device import device_rates
from ..hardware.host import HostCosts, host_costs, waiting_s
from .data import has_copies
from .operators import CORE_ATTENTION, CostInputs, FusedAttention, Gemm, Layer, Operator
from .parallel import mixture_of


def passes_s(
    layer: Layer,
    operators: tuple[Operator, ...],
    times: list[OperatorTime],
    comm_s: tuple[FloatArray, FloatArray],
    inputs: CostInputs,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return forward, backward and recompute seconds [N] with the host's dispatch.

    On an accelerator the host runs ahead and waits show only where it falls behind kernels and the communication within the
    layer, ``comm_s`` forward and backward (`waiting_s`). Collectives themselves are not included.
    """
    layouts, workload = inputs.layouts, inputs.workload
    host = host_costs(inputs.scenario)
    zero = np.zeros(len(layouts))
    forward = sum((time.forward_s for time in times), start=zero)
    backward = sum((time.backward_s for time in times), start=zero)
    has_block = layer.inner_block is not None
    recompute, repeated = recompute_s(operators, times, layouts, workload) if has_block else (zero, zero)
    recompute, repeated = layouts.recompute_fraction * recompute, layouts.recompute_fraction * repeated
    if workload.adapters is not None and workload.adapters.frozen == "nf4":
        written_s = _dequantise_s(operators, inputs)
        forward, backward = forward + written_s, backward + written_s
    # Two pairs of all-gather and reduce-scatter a pass, or two all-reduces.
    per_pass = (2 if has_block else 0.5) * np.where(layouts.sequence_parallel == 1, 2, 1)
    collectives = np.where(layouts.tp > 1, per_pass, 0.0)
    repeats = layouts.recompute_fraction * (layouts.recompute == RECOMPUTES.index("full"))
    each_s = host.collective_s + layouts.tp * _between_nodes_s(host, inputs)
    is_wrapped = has_copies(layouts, workload) | (layouts.cp > 1)
    host_s = collectives * each_s + np.where(is_wrapped, host.fsdp_unit_s / 2, 0.0)
    if mixture_of(layer) is not None and not host.adds:
        host_s = host_s + host.routing_s / 2
    host_forward = host_s + host.operator_s * sum(time.forward_dispatches for time in times)
    host_backward = host_s + host.operator_s * sum(time.backward_dispatches for time in times)
    host_recompute = repeated * host.operator_s + repeats * collectives * each_s
    if workload.cuda_graphs:  # collectives and recompute are in the graph
        host_forward = host_backward = np.full(len(layouts), host.operator_s)
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


def _dequantise_s(operators: tuple[Operator, ...], inputs: CostInputs) -> FloatArray:
    """Return the seconds to write a layer's frozen nf4 products out in the compute dtype, before they are used."""
    workload = inputs.workload
    weights = sum(op.num_params for op in operators if isinstance(op, Gemm) and op.frozen)
    traffic = workload.adapters.frozen_bytes + workload.compute_bytes if workload.adapters else 0.0
    rates = device_rates(inputs.scenario)
    return np.asarray(weights * traffic / inputs.layouts.tp / rates.elementwise_bytes_per_s)


def _between_nodes_s(host: HostCosts, inputs: CostInputs) -> FloatArray:
    """Return what a rank adds to a tensor-parallel collective [N] for traffic between nodes, where the engine is known for it."""
    layouts, cluster = inputs.layouts, inputs.cluster
    node = max(group.devices_per_node for group in cluster.groups)
    over_pipeline = np.where((layouts.pp > 1) & (cluster.num_nodes > 1), host.pipelined_collective_s, 0.0)
    return np.asarray(over_pipeline + np.where(layouts.tp > node, host.spanning_collective_s, 0.0))


def recompute_s(
    operators: tuple[Operator, ...], times: list[OperatorTime], layouts: LayoutTable, workload: Workload
) -> tuple[FloatArray, FloatArray]:
    """Return the forward seconds and dispatches [N] repeated under each layout's recompute.

    Ours stops once the last product has its input, and selective repeats neither products nor fused attention
    (runtime/recompute.py). Megatron repeats the entire layer, and selective is the core of unfused attention: scores, softmax,
    dropout and both products (arXiv:2205.05198 section 5); with fused attention ours stands in for the engines' own choices.
    """
    timed = list(zip(operators, times, strict=True))
    cheap = [time for op, time in timed if not _is_saved(op)]
    if workload.engine_facts.is_eager_like_megatron:
        full = times
        if workload.attention == "math":
            cheap = [time for op, time in timed if op.name in CORE_ATTENTION]
    else:
        last_product = max((idx for idx, op in enumerate(operators) if isinstance(op, Gemm)), default=-1)
        full = [time for idx, time in enumerate(times) if idx != last_product]
    is_kind = [layouts.recompute == RECOMPUTES.index(kind) for kind in ("full", "selective")]
    none = np.zeros(len(layouts))
    seconds = [sum((time.forward_s for time in repeated), start=none) for repeated in (full, cheap)]
    if workload.selective == "alternate_products":
        seconds[1] = seconds[1] + alternate_products_s(operators, times, layouts)
    dispatches = [sum((time.forward_dispatches for time in repeated), start=none) for repeated in (full, cheap)]
    return np.select(is_kind, seconds, 0.0), np.select(is_kind, dispatches, 0.0)


def _is_saved(op: Operator) -> bool:
    """Return whether our selective recompute saves the output: products with weights and fused attention, not scores."""
    return isinstance(op, Gemm | FusedAttention) and op.name not in ("scores", "context")


def alternate_products_s(
    operators: tuple[Operator, ...], times: list[OperatorTime], layouts: LayoutTable
) -> FloatArray:
    """Return the forward seconds of every second product of a block [N]: of q, k, v, out, gate, up, down these are k, out and up.

    Source: torchtitan, distributed/activation_checkpoint.py: its policy counts the products and saves those with an odd number.
    """
    repeated = np.zeros(len(layouts))
    for op, time in zip(operators, times, strict=True):
        repeated += _repeated_share(op, operators) * time.forward_s if isinstance(op, Gemm) else 0.0
    return repeated


def _repeated_share(op: Gemm, operators: tuple[Operator, ...]) -> float:
    """Return the part of a product's output that is repeated; gate and up, and q, k and v, are one product here."""
    if op.name == "qkv":
        q = sum(other.k for other in operators if isinstance(other, Gemm) and other.name == "attention_out")
        return (op.n - q) / 2 / op.n
    if op.name == "attention_out":
        return 1.0
    is_gated = any(isinstance(other, Gemm) and other.name == "mlp_down" and op.n == 2 * other.k for other in operators)
    return 0.5 if op.name == "mlp_up" and is_gated else 0.0
