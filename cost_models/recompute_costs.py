"""What the backward pass computes again under each recompute choice."""

from __future__ import annotations

import numpy as np

from ..schema import Workload
from .compute import OperatorTime
from .engines import is_megatron
from .layouts import RECOMPUTES, FloatArray, LayoutBatch
from .operators import CORE_ATTENTION, FusedAttention, Gemm, Operator


def recompute_s(
    operators: tuple[Operator, ...], times: list[OperatorTime], batch: LayoutBatch, workload: Workload
) -> tuple[FloatArray, FloatArray]:
    """Forward seconds and dispatches repeated under each layout's recompute.

    Ours stops once the last product has its input, and selective repeats neither products nor fused attention
    (runtime/recompute.py). Megatron repeats the whole layer, and selective is the core of unfused attention: scores, softmax,
    dropout and both products (arXiv:2205.05198 section 5).
    """
    if is_megatron(workload):
        full = times
        cheap = [time for op, time in zip(operators, times, strict=True) if _is_repeated_core(op, workload)]
    else:
        last_product = max((idx for idx, op in enumerate(operators) if isinstance(op, Gemm)), default=-1)
        full = [time for idx, time in enumerate(times) if idx != last_product]
        cheap = [time for op, time in zip(operators, times, strict=True) if not _is_kept(op)]
    is_kind = [batch.recompute == RECOMPUTES.index(kind) for kind in ("full", "selective")]
    seconds = [sum((time.forward_s for time in chosen), start=np.zeros(len(batch))) for chosen in (full, cheap)]
    if workload.selective == "alternate_products":
        seconds[1] = seconds[1] + alternate_products_s(operators, times, batch)
    dispatches = [
        sum((time.forward_dispatches for time in chosen), start=np.zeros(len(batch))) for chosen in (full, cheap)
    ]
    return np.select(is_kind, seconds, 0.0), np.select(is_kind, dispatches, 0.0)


def alternate_products_s(operators: tuple[Operator, ...], times: list[OperatorTime], batch: LayoutBatch) -> FloatArray:
    """Forward seconds of every second product of a block [N]: of q, k, v, out, gate, up, down these are k, out and up.

    Source: torchtitan, distributed/activation_checkpoint.py: its policy counts the products and keeps those with an odd number.
    """
    repeated = np.zeros(len(batch))
    for op, time in zip(operators, times, strict=True):
        repeated += _repeated_share(op, operators) * time.forward_s if isinstance(op, Gemm) else 0.0
    return repeated


def _repeated_share(op: Gemm, operators: tuple[Operator, ...]) -> float:
    """Part of a product's output that is repeated; gate and up, and q, k and v, are one product here."""
    if op.name == "qkv":
        q = sum(other.k for other in operators if isinstance(other, Gemm) and other.name == "attention_out")
        return (op.n - q) / 2 / op.n
    if op.name == "attention_out":
        return 1.0
    is_gated = any(isinstance(other, Gemm) and other.name == "mlp_down" and op.n == 2 * other.k for other in operators)
    return 0.5 if op.name == "mlp_up" and is_gated else 0.0


def _is_repeated_core(op: Operator, workload: Workload) -> bool:
    """Megatron's selective recompute of unfused attention; with fused attention ours stands in for the engines' own choices."""
    return op.name in CORE_ATTENTION if workload.attention == "math" else not _is_kept(op)


def _is_kept(op: Operator) -> bool:
    """Whether our selective recompute keeps the output: products with weights and fused attention, not scores."""
    return isinstance(op, Gemm | FusedAttention) and op.name not in ("scores", "context")
