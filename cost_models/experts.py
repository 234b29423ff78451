"""Expert parallelism: where the experts of a block are, which rows reach them, and what it takes to send them.

Within a stage ep * expert_tp * copies = ranks. A rank holds E / ep experts, each cut over expert_tp ranks. It keeps T / tp of a
micro-batch's tokens for itself (sequence parallelism), so that with an even router its experts get

    rows = top_k * T * expert_tp / tp

however many ranks share the experts: more ep brings more tokens and fewer experts. Tokens travel by all-to-all over ep (dispatch
and combine, forward, and the same backward), each of its top_k copies by itself, and are gathered and reduced over expert_tp.
Experts that follow tp (ep = 1, expert_tp = tp) have no such traffic: their tokens are gathered like those of a dense feed-forward
part. The slowest rank decides: where loads of the experts were measured (Workload.expert_imbalance), rows and bytes are those of
the rank with most; else the router is taken as even.
Source: MoE Parallel Folding (arXiv:2504.14960), Megatron's all-to-all dispatcher.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..schema import Workload
from ..schema.model import Block, MoE, MTPHead
from .collectives import collective_s
from .layouts import RECOMPUTES, FloatArray, IntArray, LayoutBatch
from .operators import Layer
from .setting import Setting


def routed_part(layer: Layer) -> MoE | None:
    """The mixture of experts of a layer, None where it has none."""
    block = layer.block if isinstance(layer, MTPHead) else layer
    return block.mlp if isinstance(block, Block) and isinstance(block.mlp, MoE) else None


def sharded_params(params: Any, expert_params: Any, num_shards: Any, expert_shards: Any) -> Any:
    """Parameters of which one rank owns the states: of ``params``, those of experts are sharded over groups of their own."""
    return params / num_shards + expert_params * (1 / expert_shards - 1 / num_shards)


def token_share(batch: LayoutBatch, workload: Workload) -> FloatArray:
    """Routed rows of the rank with most over those of its tensor-parallel group's tokens, ``imbalance expert_tp / tp`` [N]."""
    return np.asarray(imbalance(batch, workload) * batch.expert_tp / batch.tp)


def imbalance(batch: LayoutBatch, workload: Workload) -> FloatArray:
    """Rows of the rank with most over the average [N]; 1 without measured loads, and where every rank has all experts."""
    ratio = np.ones(len(batch))
    for ep, measured in workload.expert_imbalance:
        ratio[batch.ep == ep] = measured
    return ratio


def expert_params(layer: Layer, hidden_dim: int, batch: LayoutBatch) -> FloatArray:
    """Parameters of routed experts on one rank [N]: E / ep experts, their products cut over expert_tp."""
    moe = routed_part(layer)
    if moe is None:
        return np.zeros(len(batch))
    weights = moe.expert.replace(bias=False).num_params(hidden_dim)
    biases = moe.expert.num_params(hidden_dim) - weights
    return np.asarray(moe.num_experts * (weights / batch.expert_tp + biases) / batch.ep)


def distinct(num_groups: IntArray, picks: int) -> FloatArray:
    """Expected number of different groups among ``picks`` even picks of ``num_groups``: n (1 - (1 - 1/n)^k)."""
    return np.asarray(num_groups * (1 - (1 - 1 / num_groups) ** picks))


def dispatch_s(layer: Layer, setting: Setting) -> FloatArray:
    """Seconds [N] that the tokens of one micro-batch travel to their experts and back in one pass; 0 where experts follow tp."""
    moe, batch, cluster = routed_part(layer), setting.batch, setting.cluster
    if moe is None:
        return np.zeros(len(batch))
    token_bytes = setting.tokens / batch.tp * setting.hidden_dim * float(setting.workload.compute_bytes)
    token_bytes = token_bytes * imbalance(batch, setting.workload)
    there_and_back = 2 * _exchange_s(token_bytes, moe, setting)
    gathered, stride = moe.top_k * token_bytes * batch.expert_tp, np.ones_like(batch.tp)
    gather = collective_s("all_gather", gathered, batch.expert_tp, stride, cluster)
    scatter = collective_s("reduce_scatter", gathered, batch.expert_tp, stride, cluster)
    return np.asarray(np.where(batch.experts_follow_tp, 0.0, there_and_back + gather + scatter))


def expert_parallel_s(layer: Layer, setting: Setting) -> tuple[FloatArray, FloatArray]:
    """Tokens to their experts and back, forward and backward [N]; recomputing whole blocks sends them again."""
    once = dispatch_s(layer, setting)
    return once, once * np.where(setting.batch.recompute == RECOMPUTES.index("full"), 2, 1)


def _exchange_s(token_bytes: FloatArray, moe: MoE, setting: Setting) -> FloatArray:
    """All-to-all over ep of ``token_bytes`` [N] bytes, top_k copies of them.

    Megatron's recipes for experts that span nodes use dispatchers that send a token once to each node and copy it there
    (DeepEP, HybridEP): a node gets it if any of its experts does, and of all nodes at most those of the token's groups.
    """
    top_k, batch, cluster = moe.top_k, setting.batch, setting.cluster
    plain = collective_s("all_to_all", top_k * token_bytes, batch.ep, batch.expert_tp, cluster)
    if setting.workload.engine != "megatron" or len(cluster.levels) == 1:
        return plain
    inside = np.gcd(np.maximum(cluster.scaleup_domain // batch.expert_tp, 1), batch.ep)
    domains = batch.ep // inside
    reached = np.minimum(domains, moe.top_groups * np.maximum(domains // moe.num_groups, 1))
    between_bytes = distinct(reached if moe.num_groups > 1 else domains, top_k) * token_bytes
    between = collective_s("all_to_all", between_bytes, domains, batch.expert_tp * inside, cluster)
    within = collective_s("all_to_all", top_k * token_bytes, inside, batch.expert_tp, cluster)
    return np.minimum(plain, np.maximum(between, within))
