"""LayerCost: everything one layer costs under every layout of a batch, one micro-batch at a time.

Composes operators (operators.py) with device rates (compute.py), tensor-parallel and data-parallel collectives (collectives.py)
and saved activations (activations.py). Stages and steps only add layers up.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from ..schema import ClusterSpec, Workload
from ..schema.model import Block, MTPHead
from .adapters import with_adapters
from .coefficients import device_rates
from .compute import OperatorTime, operator_time
from .context import ring
from .data_parallel import data_parallel_s
from .engines import is_megatron
from .experts import dispatch_s, expert_params, routed_part, token_share
from .host_dispatch import compute_s
from .host_memory import host_link_bytes_per_s
from .layouts import RECOMPUTES, FloatArray, IntArray, LayoutBatch
from .operators import FusedAttention, Gemm, Layer, Operator, Softmax, layer_operators
from .parameters import frozen_bytes, tp_params, trained_params
from .saved_bytes import activation_bytes
from .tensor_parallel import hidden_reduction_s, tensor_parallel_s


@dataclass(frozen=True)
class LayerCost:
    """Arrays [N], one entry per layout: seconds and bytes of one layer on one rank, for one micro-batch.

    Attributes:
        forward_s, backward_s: operators, without communication.
        recompute_s: forward work repeated in the backward pass.
        tp_forward_s, tp_backward_s: exposed tensor-parallel communication.
        cp_forward_s, cp_backward_s: exposed communication of context parallelism.
        ep_forward_s, ep_backward_s: communication of tokens with their experts.
        gather_s: all-gather of the layer's parameters over dp_shard.
        reduce_s: reduction of its gradients over dp_shard and dp_replicate.
        num_params: parameters of this rank's tensor-parallel share and of the experts it holds.
        frozen_bytes: of parameters that are not trained, as they are stored.
        num_trained: those of them, or of adapters beside them, that are trained.
        expert_params: those of the trained ones that are routed experts'.
        activation_bytes: kept from forward to backward.
        working_bytes: alive only while this layer runs backward.
    """

    forward_s: FloatArray
    backward_s: FloatArray
    recompute_s: FloatArray
    tp_forward_s: FloatArray
    tp_backward_s: FloatArray
    gather_s: FloatArray
    reduce_s: FloatArray
    num_params: FloatArray
    frozen_bytes: FloatArray
    num_trained: FloatArray
    activation_bytes: FloatArray
    working_bytes: FloatArray
    cp_forward_s: FloatArray
    cp_backward_s: FloatArray
    ep_forward_s: FloatArray
    ep_backward_s: FloatArray
    expert_params: FloatArray

    def at(self, rows: IntArray) -> LayerCost:
        """The same under some of the layouts."""
        return LayerCost(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    @property
    def busy_s(self) -> FloatArray:
        """Seconds of forward and backward with recompute and the communication inside a layer."""
        compute = self.forward_s + self.backward_s + self.recompute_s
        return compute + self.comm_forward_s + self.comm_backward_s

    @property
    def comm_forward_s(self) -> FloatArray:
        """Exposed communication inside the layer, forward."""
        return self.tp_forward_s + self.cp_forward_s + self.ep_forward_s

    @property
    def comm_backward_s(self) -> FloatArray:
        """Exposed communication inside the layer, backward."""
        return self.tp_backward_s + self.cp_backward_s + self.ep_backward_s


def layer_cost(
    layer: Layer, hidden_dim: int, batch: LayoutBatch, workload: Workload, cluster: ClusterSpec
) -> LayerCost:
    """Cost of ``layer`` under every layout of ``batch``."""
    inside = inside_cost(layer, hidden_dim, batch, workload, cluster)
    return with_data_parallel(inside, layer, hidden_dim, batch, workload, cluster)


def with_data_parallel(
    cost: LayerCost, layer: Layer, hidden_dim: int, batch: LayoutBatch, workload: Workload, cluster: ClusterSpec
) -> LayerCost:
    """The cost with its collectives over data: of many layouts that share them they are evaluated once."""
    rows, like = batch.across_data
    shared = (cost.frozen_bytes[rows], cost.num_trained[rows], cost.expert_params[rows])
    num_tensors = _num_tensors(layer, hidden_dim, workload)
    gather, reduce = data_parallel_s(*shared, num_tensors, batch.select(rows), workload, cluster)
    return replace(cost, gather_s=gather[like], reduce_s=reduce[like])


def _operators(layer: Layer, hidden_dim: int, workload: Workload) -> tuple[Operator, ...]:
    operators = layer_operators(
        layer,
        hidden_dim,
        workload.attended_len,
        unfused=softmax_kernels(workload),
        engine=workload.engine,
        dropout=workload.dropout,
        fusion=workload.fusion,
    )
    return operators if workload.adapters is None else with_adapters(operators, workload.adapters)


def _num_tensors(layer: Layer, hidden_dim: int, workload: Workload) -> int:
    products = sum(isinstance(op, Gemm) for op in _operators(layer, hidden_dim, workload))
    return products + 2 * isinstance(layer, Block | MTPHead)


def inside_cost(
    layer: Layer, hidden_dim: int, batch: LayoutBatch, workload: Workload, cluster: ClusterSpec
) -> LayerCost:
    """What a layer costs without its collectives over data, which are left at zero.

    Where experts are is nothing to a layer without them: layouts that differ in that alone are evaluated once.
    """
    rows, like = batch.inside_layers if routed_part(layer) else batch.inside_dense_layers
    return _inside(layer, hidden_dim, batch.select(rows), workload, cluster).at(like)


def _inside(layer: Layer, hidden_dim: int, batch: LayoutBatch, workload: Workload, cluster: ClusterSpec) -> LayerCost:
    operators = _operators(layer, hidden_dim, workload)
    times = _operator_times(operators, batch, workload, cluster)
    times, cp_s = _with_ring(layer, operators, times, batch, workload, cluster)
    tp_s = tensor_parallel_s(layer, hidden_dim, batch, workload, cluster)
    tp_s = (tp_s[0], tp_s[1] - hidden_reduction_s(hidden_dim, operators, times, batch, workload, cluster))
    ep_s = _expert_parallel_s(layer, hidden_dim, batch, workload, cluster)
    exposed_s = (tp_s[0] + cp_s[0] + ep_s[0], tp_s[1] + cp_s[1] + ep_s[1])
    forward, backward, recompute = compute_s(layer, operators, times, exposed_s, batch, workload, cluster)
    num_params = tp_params(layer, hidden_dim, batch)
    num_trained = trained_params(layer, hidden_dim, num_params, batch, workload)
    routed = expert_params(layer, hidden_dim, batch) if workload.adapters is None else np.zeros(len(batch))
    frozen = frozen_bytes(layer, num_params, batch, workload)
    kept, working = activation_bytes(layer, hidden_dim, batch, workload, cluster)
    # What leaves for the host during the forward pass and comes back during the backward one hides behind them.
    moved_s = batch.offload_activations * kept / host_link_bytes_per_s(batch.offload_to_storage, cluster)
    forward, backward = np.maximum(forward, moved_s), np.maximum(backward, moved_s)
    kept = kept * (1 - batch.offload_activations)
    none = np.zeros(len(batch))
    costs = (none, none, num_params, frozen, num_trained, kept, working)
    return LayerCost(forward, backward, recompute, *tp_s, *costs, *cp_s, *ep_s, routed)


def softmax_kernels(workload: Workload) -> Softmax | None:
    """How unfused attention turns scores into probabilities; None for fused attention.

    Megatron's scale-mask-softmax kernel takes 16-bit inputs only (FusedScaleMaskSoftmax.is_kernel_available).
    """
    if workload.attention == "flash":
        return None
    return "fused" if is_megatron(workload) and workload.compute_bytes == 2 else "separate"


def _operator_times(
    operators: tuple[Operator, ...], batch: LayoutBatch, workload: Workload, cluster: ClusterSpec
) -> list[OperatorTime]:
    whole = batch
    rows, like = whole.operators
    batch = whole.select(rows)
    rates = device_rates(cluster, workload)
    tokens, share = batch.tokens(workload.seq_len), token_share(batch)
    dtype = workload.compute_bytes
    times = [
        operator_time(
            op, tokens * share, batch.expert_tp, batch.sequence_parallel, rates=rates, compute_bytes=dtype, ep=batch.ep
        )
        if getattr(op, "routed", False)
        else operator_time(op, tokens, batch.tp, batch.sequence_parallel, rates=rates, compute_bytes=dtype)
        for op in operators
    ]
    return [time.at(like) for time in times]


def _with_ring(
    layer: Layer,
    operators: tuple[Operator, ...],
    times: list[OperatorTime],
    batch: LayoutBatch,
    workload: Workload,
    cluster: ClusterSpec,
) -> tuple[list[OperatorTime], tuple[FloatArray, FloatArray]]:
    """Attention's time with the further steps of the ring over cp, and the ring's exposed communication in both passes."""
    block = layer.block if isinstance(layer, MTPHead) else layer
    if not isinstance(block, Block) or np.all(batch.cp == 1):
        return times, (np.zeros(len(batch)), np.zeros(len(batch)))
    at = next(idx for idx, op in enumerate(operators) if isinstance(op, FusedAttention))
    rates, alone = device_rates(cluster, workload), times[at]
    added = ring(block.attention, (alone.forward_s, alone.backward_s), batch, workload, cluster, rates)
    with_ring = OperatorTime(
        alone.forward_s + added.forward_s,
        alone.backward_s + added.backward_s,
        alone.forward_dispatches + added.dispatches,
        alone.backward_dispatches + added.dispatches,
    )
    repeated = np.where(batch.recompute == RECOMPUTES.index("full"), added.exposed_forward_s, 0.0)
    exposed = (added.exposed_forward_s, added.exposed_backward_s + repeated)
    return [*times[:at], with_ring, *times[at + 1 :]], exposed


def _expert_parallel_s(
    layer: Layer, hidden_dim: int, batch: LayoutBatch, workload: Workload, cluster: ClusterSpec
) -> tuple[FloatArray, FloatArray]:
    """Tokens to their experts and back, forward and backward; recomputing whole blocks sends them again."""
    once = dispatch_s(layer, hidden_dim, batch, workload, cluster)
    return once, once * np.where(batch.recompute == RECOMPUTES.index("full"), 2, 1)
