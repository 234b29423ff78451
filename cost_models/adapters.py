"""Low-rank adapters: what they add to a layer, and what a frozen layer does without.

A frozen product W [n, k] has a forward and a dgrad but no wgrad, and its input need not be kept. Beside a target stand
A [r, k] and B [n, r]: the adapter's input x [T, k] passes a dropout, h = A x, y += s B h. A is kept whole and B cut along a
column-parallel product, A cut along a row-parallel one. Source: arXiv:2106.09685; kept tensors: x after dropout and its mask
(one byte an element), h. Weights stored as nf4 are written out in 16 bits before each use (arXiv:2305.14314).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from ..schema.workload import LowRank
from .activations import Saved
from .operators import Elementwise, Gemm, Layer, Operator, layer_operators

_TARGETS = {
    "qkv": "qkv", "q": "qkv", "q_down": "qkv", "q_up": "qkv", "kv_down": "qkv", "kv_up": "qkv", "attention_out": "out",
    "mlp_up": "mlp", "mlp_down": "mlp", "shared_up": "mlp", "shared_down": "mlp", "expert_up": "mlp", "expert_down": "mlp",
}  # fmt: skip


def targets(operators: tuple[Operator, ...], adapters: LowRank) -> tuple[Gemm, ...]:
    """The products of a layer that have an adapter."""
    return tuple(op for op in operators if isinstance(op, Gemm) and _TARGETS.get(op.name) in adapters.targets)


def with_adapters(operators: tuple[Operator, ...], adapters: LowRank) -> tuple[Operator, ...]:
    """Frozen operators of a layer, each target followed by its adapter."""
    chosen = targets(operators, adapters)
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
    for op in targets(layer_operators(layer, hidden_dim, 1), adapters):
        for part in _adapter(op, adapters):
            if isinstance(part, Gemm):
                whole, cut = (whole + part.num_params, cut) if part.shard == "none" else (whole, cut + part.num_params)
    return whole, cut


@cache
def saved_beside(layer: Layer, hidden_dim: int, adapters: LowRank) -> Saved:
    """What the adapters of a layer keep per token: the input after dropout with its mask, and the product with A."""
    saved = Saved()
    for op in targets(layer_operators(layer, hidden_dim, 1), adapters):
        width = op.rows_per_token * op.k * (1.5 if adapters.dropout else 0.0)
        rank = op.rows_per_token * adapters.rank
        saved += Saved(whole=width + rank) if op.shard == "column" else Saved(tp=width, whole=rank)
    return saved
