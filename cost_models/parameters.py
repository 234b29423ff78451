"""Parameters of one layer on one rank, trained and frozen."""

from __future__ import annotations

import numpy as np

from ..schema import Workload
from ..schema.model import Block, Embedding, Head
from .adapters import adapter_params
from .experts import expert_params, routed_part
from .layouts import FloatArray, LayoutBatch
from .operators import Gemm, Layer, layer_operators


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


def trained_params(
    layer: Layer, hidden_dim: int, num_params: FloatArray, batch: LayoutBatch, workload: Workload
) -> FloatArray:
    """Trained parameters of one rank's tensor-parallel share [N]: all of them, or those of the adapters."""
    if workload.adapters is None:
        return num_params
    whole, cut = adapter_params(layer, hidden_dim, workload.adapters)
    return np.asarray(whole + cut / batch.tp, dtype=np.float64)


def frozen_bytes(layer: Layer, num_params: FloatArray, batch: LayoutBatch, workload: Workload) -> FloatArray:
    """Bytes of one rank's frozen parameters [N]: quantised products of blocks, everything else in 16 bits."""
    if workload.adapters is None:
        return np.zeros(len(batch))
    is_quantised = isinstance(layer, Block) or (isinstance(layer, Head) and workload.adapters.frozen == "nf4")
    return num_params * (workload.adapters.frozen_bytes if is_quantised else 2.0)
