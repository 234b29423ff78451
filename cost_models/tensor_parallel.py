"""Communication of tensor parallelism in one layer: what it takes, what hides, what recompute repeats."""

from __future__ import annotations

import numpy as np

from ..schema import ClusterSpec, Workload
from ..schema.model import Embedding, Head
from .collectives import collective_s
from .compute import OperatorTime
from .engines import is_megatron
from .experts import routed_part
from .layouts import RECOMPUTES, FloatArray, LayoutBatch
from .operators import Layer, Operator


def tensor_parallel_s(
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
    # Experts with axes of their own read tokens that no tensor-parallel collective gathers; shared experts still do.
    moe = routed_part(layer)
    pairs = np.where(batch.experts_follow_tp, 2, 1) if moe is not None and moe.shared is None else 2
    last = np.where(batch.sequence_parallel == 1, scatter, reduce)
    repeated = batch.recompute_fraction * _repeated_communication_s(pairs * pair, last, batch, workload)
    return pairs * pair, pairs * pair + repeated


def hidden_s(
    hidden_dim: int,
    operators: tuple[Operator, ...],
    times: list[OperatorTime],
    batch: LayoutBatch,
    workload: Workload,
    cluster: ClusterSpec,
) -> tuple[FloatArray, FloatArray]:
    """What runs beside products, forward and backward.

    With userbuffers (``tp_overlap``) a product starts on the rank's own chunk while the others arrive, and sends finished chunks
    while it computes the next: of tp chunks one is exposed where a product's output is reduced, none of those it reads, as far
    as the product is long enough. Gathers of gradients hide behind the dgrad of the row-parallel products.
    Source: Transformer Engine, ring_exchange and pipeline methods of its communication overlap.
    """
    reduced = _hidden_reduction_s(hidden_dim, operators, times, batch, workload, cluster)
    none = np.zeros(len(batch))
    if not workload.tp_overlap or workload.adapters is not None:
        return none, reduced
    size = np.asarray(batch.tokens(workload.seq_len) * hidden_dim * float(workload.compute_bytes))
    stride = np.ones_like(batch.tp)
    gather = collective_s("all_gather", size, batch.tp, stride, cluster)
    scatter = collective_s("reduce_scatter", size, batch.tp, stride, cluster) * (1 - 1 / batch.tp)
    forward, backward = none, none
    for op, time in zip(operators, times, strict=True):
        if op.name in ("qkv", "mlp_up"):
            forward = forward + np.minimum(gather, time.forward_s)
        elif op.name in ("attention_out", "mlp_down"):
            forward = forward + np.minimum(scatter, time.forward_s)
            backward = backward + np.minimum(gather, time.backward_s / 2)
    chunked = (batch.sequence_parallel == 1) & (batch.tp > 1)
    return np.where(chunked, forward, 0.0), reduced + np.where(chunked, backward, 0.0)


def _hidden_reduction_s(
    hidden_dim: int,
    operators: tuple[Operator, ...],
    times: list[OperatorTime],
    batch: LayoutBatch,
    workload: Workload,
    cluster: ClusterSpec,
) -> FloatArray:
    """Backward reductions that run beside the gradient of a weight: Megatron reduces the gradient of a column-parallel product's
    input while it computes that of its weight, half of the product's backward time (arXiv:2205.05198 section 4.2.2 and
    LinearWithGradAccumulationAndAsyncCommunication). One for each of the two places of a block where a reduction is due.
    """
    hidden = np.zeros(len(batch))
    if workload.engine != "megatron" or not workload.overlap:
        return hidden
    size = np.asarray(batch.tokens(workload.seq_len) * hidden_dim * float(workload.compute_bytes))
    stride = np.ones_like(batch.tp)
    one_s = np.where(
        batch.sequence_parallel == 1,
        collective_s("reduce_scatter", size, batch.tp, stride, cluster),
        collective_s("all_reduce", size, batch.tp, stride, cluster),
    )
    for op, time in zip(operators, times, strict=True):
        if op.name in ("qkv", "mlp_up", "logits"):
            hidden = hidden + np.minimum(one_s, time.backward_s / 2)
    return hidden


def _repeated_communication_s(
    pairs_s: FloatArray, last: FloatArray, batch: LayoutBatch, workload: Workload
) -> FloatArray:
    """Recompute repeats the forward communication: Megatron all of it, and none for the core of unfused attention alone; ours all
    but the ``last`` reduction, which nothing in the backward pass reads.
    """
    full, selective = pairs_s - last, pairs_s - last
    if is_megatron(workload):
        full = pairs_s
        selective = np.zeros_like(pairs_s) if workload.attention == "math" else selective
    is_kind = [batch.recompute == RECOMPUTES.index(kind) for kind in ("full", "selective")]
    return np.select(is_kind, [full, selective], 0.0)
