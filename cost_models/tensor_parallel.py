"""Communication of tensor parallelism in one layer: what it takes, what hides, what recompute repeats."""

from __future__ import annotations

import numpy as np

from ..schema import Workload
from ..schema.model import Embedding, Head
from .collectives import collective_s
from .compute import OperatorTime
from .engines import is_megatron
from .experts import routed_part
from .layouts import RECOMPUTES, FloatArray, LayoutBatch
from .operators import Layer, Operator
from .setting import Setting


def tensor_parallel_s(layer: Layer, setting: Setting) -> tuple[FloatArray, FloatArray]:
    """Exposed communication [N] of a layer forward and backward, what recompute repeats included in the latter.

    Two pairs of all-gather and reduce-scatter a block and pass, or two all-reduces without sequence parallelism; the embedding
    and the head have the half that faces the blocks.
    """
    batch = setting.batch
    stride, in_parts = np.ones_like(batch.tp), batch.sequence_parallel == 1
    gather = np.where(
        in_parts, collective_s("all_gather", setting.hidden_bytes, batch.tp, stride, setting.cluster), 0.0
    )
    reduce = _reduction_s(setting)
    if isinstance(layer, Embedding):
        return reduce, gather
    if isinstance(layer, Head):
        return gather, reduce
    # Experts with axes of their own read tokens that no tensor-parallel collective gathers; shared experts still do.
    moe = routed_part(layer)
    pairs = np.where(batch.experts_follow_tp, 2, 1) if moe is not None and moe.shared is None else 2
    once = pairs * (gather + reduce)
    return once, once + batch.recompute_fraction * _repeated_communication_s(once, reduce, batch, setting.workload)


def hidden_s(
    operators: tuple[Operator, ...], times: list[OperatorTime], setting: Setting
) -> tuple[FloatArray, FloatArray]:
    """What runs beside products, forward and backward [N].

    With userbuffers (``tp_overlap``) a product starts on the rank's own chunk while the others arrive, and sends finished chunks
    while it computes the next: of tp chunks one is exposed where a product's output is reduced, none of those it reads, as far
    as the product is long enough. Gathers of gradients hide behind the dgrad of the row-parallel products.
    Source: Transformer Engine, ring_exchange and pipeline methods of its communication overlap.
    """
    batch, workload = setting.batch, setting.workload
    reduced, none = _hidden_reduction_s(operators, times, setting), np.zeros(len(batch))
    if not workload.tp_overlap or workload.adapters is not None:
        return none, reduced
    size, stride = setting.hidden_bytes, np.ones_like(batch.tp)
    gather = collective_s("all_gather", size, batch.tp, stride, setting.cluster)
    scatter = collective_s("reduce_scatter", size, batch.tp, stride, setting.cluster) * (1 - 1 / batch.tp)
    forward, backward = none, none
    for op, time in zip(operators, times, strict=True):
        if op.name in ("qkv", "mlp_up"):
            forward = forward + np.minimum(gather, time.forward_s)
        elif op.name in ("attention_out", "mlp_down"):
            forward = forward + np.minimum(scatter, time.forward_s)
            backward = backward + np.minimum(gather, time.backward_s / 2)
    chunked = (batch.sequence_parallel == 1) & (batch.tp > 1)
    return np.where(chunked, forward, 0.0), reduced + np.where(chunked, backward, 0.0)


def _hidden_reduction_s(operators: tuple[Operator, ...], times: list[OperatorTime], setting: Setting) -> FloatArray:
    """Part of the backward reductions [N] that runs beside the gradient of a weight.

    Megatron reduces the gradient of a column-parallel product's input while it computes that of its weight, half of the product's
    backward time (arXiv:2205.05198 section 4.2.2 and LinearWithGradAccumulationAndAsyncCommunication). One for each of the two
    places of a block where a reduction is due.
    """
    hidden = np.zeros(len(setting.batch))
    if setting.workload.engine != "megatron" or not setting.workload.overlap:
        return hidden
    one_s = _reduction_s(setting)
    for op, time in zip(operators, times, strict=True):
        if op.name in ("qkv", "mlp_up", "logits"):
            hidden = hidden + np.minimum(one_s, time.backward_s / 2)
    return hidden


def _reduction_s(setting: Setting) -> FloatArray:
    """Seconds of one reduction of hidden states over tp [N]: scattered with sequence parallelism, else whole."""
    batch, size = setting.batch, setting.hidden_bytes
    stride = np.ones_like(batch.tp)
    scatter = collective_s("reduce_scatter", size, batch.tp, stride, setting.cluster)
    whole = collective_s("all_reduce", size, batch.tp, stride, setting.cluster)
    return np.where(batch.sequence_parallel == 1, scatter, whole)


def _repeated_communication_s(
    pairs_s: FloatArray, last: FloatArray, batch: LayoutBatch, workload: Workload
) -> FloatArray:
    """Forward communication [N] that recompute repeats.

    Megatron: all of it, and none for the core of unfused attention alone. Ours: all but the ``last`` reduction, which nothing in
    the backward pass reads.
    """
    full = selective = pairs_s - last
    if is_megatron(workload):
        full = pairs_s
        selective = np.zeros_like(pairs_s) if workload.attention == "math" else selective
    is_kind = [batch.recompute == RECOMPUTES.index(kind) for kind in ("full", "selective")]
    return np.select(is_kind, [full, selective], 0.0)
