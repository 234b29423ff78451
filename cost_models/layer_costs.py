"""LayerCost: everything one layer costs under every layout of a batch, one micro-batch at a time.

Composes operators (operators.py) with device rates (compute.py), tensor-parallel and data-parallel collectives (collectives.py)
and saved activations (activations.py). Stages and steps only add layers up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..schema import ClusterSpec, Workload
from ..schema.model import Block, Embedding, Head, MTPHead
from .activations import Kernels, Saved, saved_elements
from .coefficients import device_rates, host_costs
from .collectives import collective_s
from .compute import OperatorTime, operator_time
from .context import ring
from .experts import dispatch_s, expert_params, routed_part, token_share
from .layouts import RECOMPUTES, FloatArray, IntArray, LayoutBatch
from .memory import has_copies
from .operators import FusedAttention, Gemm, Layer, Operator, layer_operators


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
        expert_params: those of them that are routed experts'.
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
    activation_bytes: FloatArray
    working_bytes: FloatArray
    cp_forward_s: FloatArray
    cp_backward_s: FloatArray
    ep_forward_s: FloatArray
    ep_backward_s: FloatArray
    expert_params: FloatArray

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
    unfused = workload.attention == "math"
    operators = layer_operators(
        layer,
        hidden_dim,
        workload.seq_len,
        unfused=unfused,
        engine=workload.engine,
        dropout=workload.dropout,
        fusion=workload.fusion,
    )
    times = _operator_times(operators, batch, workload, cluster)
    times, cp_s = _with_ring(layer, operators, times, batch, workload, cluster)
    tp_s = _tensor_parallel_s(layer, hidden_dim, batch, workload, cluster)
    ep_s = _expert_parallel_s(layer, hidden_dim, batch, workload, cluster)
    exposed_s = (tp_s[0] + cp_s[0] + ep_s[0], tp_s[1] + cp_s[1] + ep_s[1])
    compute = _compute_s(layer, operators, times, exposed_s, batch, workload, cluster)
    num_params, routed = tp_params(layer, hidden_dim, batch), expert_params(layer, hidden_dim, batch)
    gather, reduce = _data_parallel_s(num_params, routed, batch, workload, cluster)
    kept, working = _activation_bytes(layer, hidden_dim, batch, workload, cluster)
    return LayerCost(*compute, *tp_s, gather, reduce, num_params, kept, working, *cp_s, *ep_s, routed)


def _operator_times(
    operators: tuple[Operator, ...], batch: LayoutBatch, workload: Workload, cluster: ClusterSpec
) -> list[OperatorTime]:
    rates = device_rates(cluster.weakest_device, workload)
    tokens, share = batch.tokens(workload.seq_len), token_share(batch)
    dtype = workload.compute_bytes
    return [
        operator_time(
            op, tokens * share, batch.expert_tp, batch.sequence_parallel, rates=rates, compute_bytes=dtype, ep=batch.ep
        )
        if getattr(op, "routed", False)
        else operator_time(op, tokens, batch.tp, batch.sequence_parallel, rates=rates, compute_bytes=dtype)
        for op in operators
    ]


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
    rates, alone = device_rates(cluster.weakest_device, workload), times[at]
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


def _compute_s(
    layer: Layer,
    operators: tuple[Operator, ...],
    times: list[OperatorTime],
    tp_s: tuple[FloatArray, FloatArray],
    batch: LayoutBatch,
    workload: Workload,
    cluster: ClusterSpec,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Forward, backward and recompute seconds with the host's dispatch.

    On an accelerator the host runs ahead: a pass takes the longer of its dispatch and of kernels plus collectives.
    """
    host = host_costs(cluster.weakest_device, workload)
    zero = np.zeros(len(batch))
    forward = sum((time.forward_s for time in times), start=zero)
    backward = sum((time.backward_s for time in times), start=zero)
    has_block = isinstance(layer, Block | MTPHead)
    keeps_attention = workload.attention == "flash"
    recompute, repeated = _recompute(operators, times, batch, keeps_attention) if has_block else (zero, zero)
    collectives = np.where(batch.tp > 1, 4 if has_block else 1, 0)
    is_wrapped = has_copies(batch, workload) | (batch.cp > 1)
    per_pass = collectives * host.collective_s + np.where(is_wrapped, host.fsdp_unit_s / 2, 0.0)
    if routed_part(layer) is not None and not host.adds:
        per_pass = per_pass + host.routing_s / 2
    host_forward = per_pass + host.operator_s * sum(time.forward_dispatches for time in times)
    host_backward = per_pass + host.operator_s * sum(time.backward_dispatches for time in times)
    host_recompute = repeated * host.operator_s
    if host.adds:
        return forward + host_forward, backward + host_backward, recompute + host_recompute
    tp_forward, tp_backward = tp_s
    return (
        np.maximum(forward, host_forward - tp_forward),
        np.maximum(backward, host_backward + host_recompute - recompute - tp_backward),
        recompute,
    )


def _recompute(
    operators: tuple[Operator, ...], times: list[OperatorTime], batch: LayoutBatch, keeps_attention: bool
) -> tuple[FloatArray, FloatArray]:
    """Forward seconds and dispatches repeated: all but the last product if full, neither products nor attention if selective.

    Unfused attention is repeated by selective recompute too: its outputs are not kept (runtime/recompute.py).
    """
    last_product = max(idx for idx, op in enumerate(operators) if isinstance(op, Gemm))
    full = [time for idx, time in enumerate(times) if idx != last_product]
    kept = (Gemm, FusedAttention) if keeps_attention else (Gemm,)
    cheap = [time for op, time in zip(operators, times, strict=True) if not isinstance(op, kept)]
    is_kind = [batch.recompute == RECOMPUTES.index(kind) for kind in ("full", "selective")]
    seconds = [sum((time.forward_s for time in chosen), start=np.zeros(len(batch))) for chosen in (full, cheap)]
    dispatches = [
        sum((time.forward_dispatches for time in chosen), start=np.zeros(len(batch))) for chosen in (full, cheap)
    ]
    return np.select(is_kind, seconds, 0.0), np.select(is_kind, dispatches, 0.0)


def _tensor_parallel_s(
    layer: Layer, hidden_dim: int, batch: LayoutBatch, workload: Workload, cluster: ClusterSpec
) -> tuple[FloatArray, FloatArray]:
    """Exposed communication of a layer: two pairs of all-gather and reduce-scatter (or two all-reduces) a block and pass."""
    elements = batch.tokens(workload.seq_len) * hidden_dim
    size = np.asarray(elements * workload.compute_bytes, dtype=np.float64)
    stride = np.ones_like(batch.tp)
    gather = collective_s("all_gather", size, batch.tp, stride, cluster)
    scatter = collective_s("reduce_scatter", size, batch.tp, stride, cluster)
    reduce = collective_s("all_reduce", size, batch.tp, stride, cluster)
    pair = np.where(batch.sequence_parallel == 1, gather + scatter, reduce)
    if isinstance(layer, Embedding):
        return np.where(batch.sequence_parallel == 1, scatter, reduce), np.where(
            batch.sequence_parallel == 1, gather, 0.0
        )
    if isinstance(layer, Head):
        return np.where(batch.sequence_parallel == 1, gather, 0.0), np.where(
            batch.sequence_parallel == 1, scatter, reduce
        )
    # Both kinds of recompute repeat the forward communication but the last reduction, which nothing in the backward pass reads.
    last = np.where(batch.sequence_parallel == 1, scatter, reduce)
    # Experts with axes of their own read tokens that no tensor-parallel collective gathers; shared experts still do.
    moe = routed_part(layer)
    pairs = np.where(batch.experts_follow_tp, 2, 1) if moe is not None and moe.shared is None else 2
    repeated = np.where(batch.recompute == RECOMPUTES.index("none"), 0.0, pairs * pair - last)
    return pairs * pair, pairs * pair + repeated


def tp_params(layer: Layer, hidden_dim: int, batch: LayoutBatch) -> FloatArray:
    """Parameters of one rank's tensor-parallel share [N]: products split, norms and routers whole."""
    total = layer.num_params(hidden_dim)
    if isinstance(layer, Embedding):
        split = layer.vocab_size * hidden_dim
    elif isinstance(layer, Head):
        # A tied projection is the embedding's weight; under a pipeline the last stage holds a copy of its own.
        copies = np.where(batch.pp > 1, 1, 0) if layer.tied else np.ones_like(batch.tp)
        split = layer.vocab_size * hidden_dim
        norm_and_bias = total - (0 if layer.tied else split)
        return np.asarray(norm_and_bias + copies * split / batch.tp, dtype=np.float64)
    else:
        operators = layer_operators(layer, hidden_dim, 1)
        split = sum(op.num_params for op in operators if isinstance(op, Gemm) and op.shard in ("column", "row"))
    moe = routed_part(layer)
    whole_experts = moe.num_experts * moe.expert.num_params(hidden_dim) if moe else 0
    follow = total - split + split / batch.tp
    routed_split = sum(op.num_params for op in operators if isinstance(op, Gemm) and op.routed) if moe else 0
    dense_split = split - routed_split
    apart = total - whole_experts - dense_split + dense_split / batch.tp + expert_params(layer, hidden_dim, batch)
    return np.asarray(np.where(batch.experts_follow_tp, follow, apart), dtype=np.float64)


def _data_parallel_s(
    num_params: FloatArray, routed: FloatArray, batch: LayoutBatch, workload: Workload, cluster: ClusterSpec
) -> tuple[FloatArray, FloatArray]:
    """All-gather and reduction over the ranks that share parameters; experts with axes of their own have their own groups."""
    together = np.where(batch.experts_follow_tp, num_params, num_params - routed)
    gather, reduce = _sharded_s(together, batch.num_shards, batch.num_replicas, batch.tp, workload, cluster)
    if np.all(batch.experts_follow_tp):
        return gather, reduce
    alone = np.where(batch.experts_follow_tp, 0.0, routed)
    stride = batch.ep * batch.expert_tp
    expert_gather, expert_reduce = _sharded_s(
        alone, batch.expert_shards, batch.expert_replicas, stride, workload, cluster
    )
    has_own = alone > 0
    return gather + np.where(has_own, expert_gather, 0.0), reduce + np.where(has_own, expert_reduce, 0.0)


def _sharded_s(
    num_params: FloatArray,
    shards: IntArray,
    replicas: IntArray,
    stride: IntArray,
    workload: Workload,
    cluster: ClusterSpec,
) -> tuple[FloatArray, FloatArray]:
    """All-gather of parameters in the compute dtype; reduce-scatter (and all-reduce over replicas) of fp32 gradients."""
    gather = collective_s("all_gather", num_params * workload.compute_bytes, shards, stride, cluster)
    scatter = collective_s("reduce_scatter", num_params * 4.0, shards, stride, cluster)
    shard_bytes = num_params * 4.0 / shards
    replicate = collective_s("all_reduce", shard_bytes, replicas, stride * shards, cluster)
    return gather, scatter + replicate


def _activation_bytes(
    layer: Layer, hidden_dim: int, batch: LayoutBatch, workload: Workload, cluster: ClusterSpec
) -> tuple[FloatArray, FloatArray]:
    """Bytes kept from forward to backward under each layout's recompute, and the working set of the backward pass."""
    how = Kernels(
        compute_bytes=workload.compute_bytes,
        unfused_norm=cluster.weakest_device.vendor == "cpu",
        score_width=workload.seq_len if workload.attention == "math" else 0,
        keeps_expert_output=workload.engine != "megatron",
    )
    choices = [saved_elements(layer, hidden_dim, recompute, how) for recompute in RECOMPUTES]
    kept = np.stack([_saved_bytes(saved, batch, workload) for saved in choices])
    chosen = np.take_along_axis(kept, batch.recompute[None, :], axis=0)[0]
    # While one layer runs backward, what it had dropped is there again, and gradients of its widest tensors beside it.
    return chosen, kept[0] - chosen + 0.5 * kept[0]


def _saved_bytes(saved: Saved, batch: LayoutBatch, workload: Workload) -> FloatArray:
    tokens = batch.tokens(workload.seq_len)
    along_sequence = np.where(batch.sequence_parallel == 1, batch.tp, 1)
    whole = saved.whole + saved.routed * token_share(batch)
    elements = whole + saved.tp / batch.tp + saved.tokens / along_sequence
    fp32 = saved.tp_fp32 / batch.tp + saved.fp32 / along_sequence
    return np.asarray(tokens * (workload.compute_bytes * elements + 4 * fp32), dtype=np.float64)
