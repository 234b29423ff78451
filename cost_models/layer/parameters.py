"""Parameters of one layer on one rank, trained and frozen.

Low-rank adapters: what they add to a layer, and what a frozen layer does without.

A frozen product W [n, k] has a forward and a dgrad but no wgrad, and its input need not be kept. Beside a target stand
A [r, k] and B [n, r]: the adapter's input x [T, k] passes a dropout, h = A x, y += s B h. A is kept whole and B cut along a
column-parallel product, A cut along a row-parallel one. Source: arXiv:2106.09685; kept tensors: x after dropout and its mask
(one byte an element), h. Weights stored as nf4 are written out in 16 bits before each use (arXiv:2305.14314).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from ...schema import Workload
from ...schema.arrays import FloatArray
from ...schema.layers import Block, Embedding, Head
from ...schema.layout_table import LayoutTable
from ...schema.task import LowRank
from .operators import Elementwise, Gemm, Layer, Operator, layer_operators
from .parallel import expert_params, mixture_of


def tp_params(layer: Layer, hidden_dim: int, batch: LayoutTable) -> FloatArray:
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
    moe = mixture_of(layer)
    whole_experts = moe.num_experts * moe.expert.num_params(hidden_dim) if moe else 0
    follow = total - split + split / batch.tp
    routed_split = sum(op.num_params for op in operators if isinstance(op, Gemm) and op.routed) if moe else 0
    dense_split = split - routed_split
    apart = total - whole_experts - dense_split + dense_split / batch.tp + expert_params(layer, hidden_dim, batch)
    return np.asarray(np.where(batch.experts_follow_tp, follow, apart), dtype=np.float64)


def trained_params(
    layer: Layer, hidden_dim: int, num_params: FloatArray, batch: LayoutTable, workload: Workload
) -> FloatArray:
    """Trained parameters of one rank's tensor-parallel share [N]: all of them, or those of the adapters."""
    if workload.adapters is None:
        return num_params
    whole, cut = adapter_params(layer, hidden_dim, workload.adapters)
    return np.asarray(whole + cut / batch.tp, dtype=np.float64)


def frozen_bytes(layer: Layer, num_params: FloatArray, batch: LayoutTable, workload: Workload) -> FloatArray:
    """Bytes of one rank's frozen parameters [N]: quantised products of blocks, everything else in 16 bits."""
    if workload.adapters is None:
        return np.zeros(len(batch))
    is_quantised = isinstance(layer, Block) or (isinstance(layer, Head) and workload.adapters.frozen == "nf4")
    return num_params * (workload.adapters.frozen_bytes if is_quantised else 2.0)


_TARGETS = {
    "qkv": "qkv", "q": "qkv", "q_down": "qkv", "q_up": "qkv", "kv_down": "qkv", "kv_up": "qkv", "attention_out": "out",
    "mlp_up": "mlp", "mlp_down": "mlp", "shared_up": "mlp", "shared_down": "mlp", "expert_up": "mlp", "expert_down": "mlp",
}  # fmt: skip


def adapted_products(operators: tuple[Operator, ...], adapters: LowRank) -> tuple[Gemm, ...]:
    """The products of a layer that have an adapter."""
    return tuple(op for op in operators if isinstance(op, Gemm) and _TARGETS.get(op.name) in adapters.targets)


def with_adapters(operators: tuple[Operator, ...], adapters: LowRank) -> tuple[Operator, ...]:
    """Frozen operators of a layer, each target followed by its adapter."""
    chosen = adapted_products(operators, adapters)
    result: list[Operator] = []
    for op in operators:
        if isinstance(op, Gemm):
            result += [replace(op, frozen=True), *(_adapter(op, adapters) if op in chosen else ())]
        elif isinstance(op, Elementwise) and op.name == "embedding":
            result.append(replace(op, backward_elements=0, backward_kernels=0))
        else:
            result.append(op)
    return tuple(result)


def _adapter(op: Gemm, adapters: LowRank) -> tuple[Operator, ...]:
    down, up = ("none", "column") if op.shard == "column" else (op.shard, "none")
    rows, matrices = op.rows_per_token, op.num_matrices
    # Dropout reads x and writes it (and its mask); scaling and adding the adapter's output reads two and writes one.
    elements = rows * (2.5 * op.k * adapters.dropout + 4 * op.n)
    kernels = 2 + adapters.dropout
    return (
        Gemm(f"{op.name}_adapter_down", adapters.rank, op.k, down, rows, matrices),  # type: ignore[arg-type]
        Gemm(f"{op.name}_adapter_up", op.n, adapters.rank, up, rows, matrices),  # type: ignore[arg-type]
        Elementwise(f"{op.name}_adapter_sum", elements, elements, kernels, kernels, op.shard),
    )


@cache
def adapter_params(layer: Layer, hidden_dim: int, adapters: LowRank) -> tuple[int, int]:
    """Trained parameters of a layer: (whole on every tensor-parallel rank, cut over them)."""
    whole = cut = 0
    for op in adapted_products(layer_operators(layer, hidden_dim, 1), adapters):
        for part in _adapter(op, adapters):
            if isinstance(part, Gemm):
                whole, cut = (whole + part.num_params, cut) if part.shard == "none" else (whole, cut + part.num_params)
    return whole, cut
