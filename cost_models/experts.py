"""Expert parallelism: where the experts of a block are, which rows reach them, and what it takes to send them.

Within a stage ep * expert_tp * copies = ranks. A rank holds E / ep experts, each cut over expert_tp ranks. It keeps T / tp of a
micro-batch's tokens for itself (sequence parallelism), so that with an even router its experts get

    rows = top_k * T * expert_tp / tp

however many ranks share the experts: more ep brings more tokens and fewer experts. Tokens travel by all-to-all over ep (dispatch
and combine, forward, and the same backward), each of its top_k copies by itself, and are gathered and reduced over expert_tp.
Experts that follow tp (ep = 1, expert_tp = tp) have no such traffic: their tokens are gathered like those of a dense feed-forward
part. No imbalance of the router is assumed. Source: MoE Parallel Folding (arXiv:2504.14960), Megatron's all-to-all dispatcher.
"""

from __future__ import annotations

import numpy as np

from ..schema import ClusterSpec, Workload
from ..schema.model import Block, MoE, MTPHead
from .collectives import collective_s
from .layouts import FloatArray, LayoutBatch
from .operators import Layer


def routed_part(layer: Layer) -> MoE | None:
    """The mixture of experts of a layer, None where it has none."""
    block = layer.block if isinstance(layer, MTPHead) else layer
    return block.mlp if isinstance(block, Block) and isinstance(block.mlp, MoE) else None


def token_share(batch: LayoutBatch) -> FloatArray:
    """Routed rows of a rank over those of its tensor-parallel group's tokens, ``expert_tp / tp`` [N]."""
    return np.asarray(batch.expert_tp / batch.tp)


def expert_params(layer: Layer, hidden_dim: int, batch: LayoutBatch) -> FloatArray:
    """Parameters of routed experts on one rank [N]: E / ep experts, their products cut over expert_tp."""
    moe = routed_part(layer)
    if moe is None:
        return np.zeros(len(batch))
    weights = moe.expert.replace(bias=False).num_params(hidden_dim)
    biases = moe.expert.num_params(hidden_dim) - weights
    return np.asarray(moe.num_experts * (weights / batch.expert_tp + biases) / batch.ep)


def dispatch_s(
    layer: Layer, hidden_dim: int, batch: LayoutBatch, workload: Workload, cluster: ClusterSpec
) -> FloatArray:
    """Seconds [N] that the tokens of one micro-batch travel to their experts and back in one pass; 0 where experts follow tp."""
    moe = routed_part(layer)
    if moe is None:
        return np.zeros(len(batch))
    row_bytes = moe.top_k * hidden_dim * float(workload.compute_bytes)
    sent = batch.tokens(workload.seq_len) / batch.tp * row_bytes
    there_and_back = 2 * collective_s("all_to_all", sent, batch.ep, batch.expert_tp, cluster)
    gathered, stride = sent * batch.expert_tp, np.ones_like(batch.tp)
    gather = collective_s("all_gather", gathered, batch.expert_tp, stride, cluster)
    scatter = collective_s("reduce_scatter", gathered, batch.expert_tp, stride, cluster)
    return np.asarray(np.where(batch.experts_follow_tp, 0.0, there_and_back + gather + scatter))
