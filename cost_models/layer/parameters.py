"""Parameters of one layer on one rank, trained and frozen; low-rank adapters, and what a frozen layer does without.

A frozen product W [n, k] has a forward and a dgrad but no wgrad, and its input need not be saved. Next to a target stand
A [r, k] and B [n, r]: the adapter's input x [T, k] passes a dropout, h = A x, y += s B h. A is unsharded and B cut along a
column-parallel product, A cut along a row-parallel one. Source: arXiv:2106.09685; saved tensors: x after dropout and its mask
(one byte an element), h. Weights stored as nf4 are written out in 16 bits before each use (arXiv:2305.14314).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from ...schema import Workload
from ...schema.arrays import FloatArray
from ...schema.layers import Embedding, Head
from ...schema.layout_table import LayoutTable
from ...schema.task import LowRank
from .operators import Elementwise, Gemm, Layer, Operator, OperatorRules, layer_operators
from .parallel import expert_params, mixture_of

_TARGETS = {
    "qkv": "qkv", "q": "qkv", "q_down": "qkv", "q_up": "qkv", "kv_down": "qkv", "kv_up": "qkv", "attention_out": "out",
    "mlp_up": "mlp", "mlp_down": "mlp", "shared_up": "mlp", "shared_down": "mlp", "expert_up": "mlp", "expert_down": "mlp",
}  # fmt: skip


def tp_params(layer: Layer, hidden_dim: int, layouts: LayoutTable) -> FloatArray:
    """Return the parameters of one rank's tensor-parallel share [N]: products split, norms and routers unsharded."""
    total, operators = layer.num_params(hidden_dim), layer_operators(layer, OperatorRules(hidden_dim=hidden_dim))
    if isinstance(layer, Head):
        # A tied projection is the embedding's weight; under a pipeline the last stage holds a copy of its own.
        copies = np.where(layouts.pp > 1, 1, 0) if layer.tied else np.ones_like(layouts.tp)
        split = layer.vocab_size * hidden_dim
        norm_and_bias = total - (0 if layer.tied else split)
        return np.asarray(norm_and_bias + copies * split / layouts.tp, dtype=np.float64)
    split = layer.vocab_size * hidden_dim if isinstance(layer, Embedding) else split_params(operators)
    moe = mixture_of(layer)
    in_experts = moe.num_experts * moe.expert.num_params(hidden_dim) if moe else 0
    following = total - split + split / layouts.tp
    dense_split = split - sum(op.num_params for op in operators if isinstance(op, Gemm) and op.routed)
    own_axes = total - in_experts - dense_split + dense_split / layouts.tp + expert_params(layer, hidden_dim, layouts)
    return np.asarray(np.where(layouts.experts_follow_tp, following, own_axes), dtype=np.float64)


def split_params(operators: tuple[Operator, ...]) -> int:
    """Return the weights of the products that tensor parallelism cuts."""
    return sum(op.num_params for op in operators if isinstance(op, Gemm) and op.shard in ("column", "row"))


def trained_params(
    layer: Layer, hidden_dim: int, num_params: FloatArray, layouts: LayoutTable, workload: Workload
) -> FloatArray:
    """Return the trained parameters of one rank's tensor-parallel share [N]: all of them, or those of the adapters."""
    if workload.adapters is None:
        return num_params
    unsharded, cut = adapter_params(layer, hidden_dim, workload.adapters)
    return np.asarray(unsharded + cut / layouts.tp, dtype=np.float64)


def frozen_bytes(layer: Layer, num_params: FloatArray, layouts: LayoutTable, workload: Workload) -> FloatArray:
    """Return the bytes of one rank's frozen parameters [N]: quantised products of blocks, everything else in 16 bits."""
    if workload.adapters is None:
        return np.zeros(len(layouts))
    is_quantised = layer.is_block or (layer.is_head and workload.adapters.frozen == "nf4")
    return num_params * (workload.adapters.frozen_bytes if is_quantised else 2.0)


def adapted_products(operators: tuple[Operator, ...], adapters: LowRank) -> tuple[Gemm, ...]:
    """Return the products of a layer that have an adapter."""
    return tuple(op for op in operators if isinstance(op, Gemm) and _TARGETS.get(op.name) in adapters.targets)


def with_adapters(operators: tuple[Operator, ...], adapters: LowRank) -> tuple[Operator, ...]:
    """Return the frozen operators of a layer, each target followed by its adapter."""
    adapted = adapted_products(operators, adapters)
    result: list[Operator] = []
    for op in operators:
        if isinstance(op, Gemm):
            result += [replace(op, frozen=True), *(_adapter(op, adapters) if op in adapted else ())]
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
    """Return the trained parameters of a layer: (unsharded on every tensor-parallel rank, cut over them)."""
    operators = layer_operators(layer, OperatorRules(hidden_dim=hidden_dim))
    added = [part for op in adapted_products(operators, adapters) for part in _adapter(op, adapters)]
    products = [op for op in added if isinstance(op, Gemm)]
    return (
        sum(op.num_params for op in products if op.shard == "none"),
        sum(op.num_params for op in products if op.shard != "none"),
    )
