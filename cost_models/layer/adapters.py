"""Low-rank adapters beside the frozen products of a layer: their operators and parameters.

A frozen product W [n, k] has a forward and a dgrad but no wgrad. Next to a target stand A [r, k] and B [n, r]: the adapter's input
x [T, k] passes a dropout, h = A x, y += s B h. A is unsharded and B cut along a column-parallel product, A cut along a row-parallel
one (arXiv:2106.09685). What they save: memory.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from ...schema.task import LowRank
from .operators import Elementwise, Gemm, Layer, Operator, OperatorRules, layer_operators

_TARGETS = {
    "qkv": "qkv", "q": "qkv", "q_down": "qkv", "q_up": "qkv", "kv_down": "qkv", "kv_up": "qkv", "attention_out": "out",
    "mlp_up": "mlp", "mlp_down": "mlp", "shared_up": "mlp", "shared_down": "mlp", "expert_up": "mlp", "expert_down": "mlp",
}  # fmt: skip


def with_adapters(operators: tuple[Operator, ...], adapters: LowRank) -> tuple[Operator, ...]:
    """Return the frozen operators of a layer, each target followed by its adapter."""
    result: list[Operator] = []
    for op in operators:
        if isinstance(op, Gemm):
            result += [replace(op, frozen=True), *adapter_operators(op, adapters)]
        elif isinstance(op, Elementwise) and op.name == "embedding":
            result.append(replace(op, backward_elements=0, backward_kernels=0))
        else:
            result.append(op)
    return tuple(result)


def adapter_operators(op: Gemm, adapters: LowRank) -> tuple[Operator, ...]:
    """Return the operators of a product's adapter; none for a product that is no target."""
    if _TARGETS.get(op.name) not in adapters.targets:
        return ()
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
    products = [op for op in layer_operators(layer, OperatorRules(hidden_dim=hidden_dim)) if isinstance(op, Gemm)]
    added = [part for op in products for part in adapter_operators(op, adapters) if isinstance(part, Gemm)]
    unsharded = sum(op.num_params for op in added if op.shard == "none")
    return unsharded, sum(op.num_params for op in added) - unsharded
