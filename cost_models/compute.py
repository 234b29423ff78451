"""Seconds of operators on a device: the calibrated roofline t = launch + max(F / (P*e_c), B / (W*e_m)), docs/method.md.

All functions are vectorised over layouts: ``tokens`` and ``tp`` are arrays [N] and so are the results.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .coefficients import DeviceRates
from .layouts import FloatArray, IntArray
from .operators import BACKWARD_ATTENTION_RATIO, Elementwise, FusedAttention, Gemm, Operator

TENSOR_CORE_ALIGNMENT_BYTES = 16
"""Rows of the small matrices of attention that do not start at multiples of this keep the tensor cores out of batched products."""


@dataclass(frozen=True)
class OperatorTime:
    """Seconds [N] of one operator for one micro-batch, and how many operators the host dispatches for it."""

    forward_s: FloatArray
    backward_s: FloatArray
    forward_dispatches: int
    backward_dispatches: int


def operator_time(
    op: Operator, tokens: IntArray, tp: IntArray, sequence_parallel: IntArray, *, rates: DeviceRates, compute_bytes: int
) -> OperatorTime:
    """Time of one operator on one rank for a micro-batch of ``tokens`` [N] tokens."""
    if isinstance(op, Gemm):
        n = op.n / tp if op.shard == "column" else np.full(tp.shape, float(op.n))
        k = op.k / tp if op.shard == "row" else np.full(tp.shape, float(op.k))
        rows = tokens * op.rows_per_token
        if op.head_dim is not None and op.head_dim * compute_bytes % TENSOR_CORE_ALIGNMENT_BYTES:
            rates = rates._replace(gemm_flops_per_s=min(rates.vector_flops_per_s, rates.gemm_flops_per_s))
        forward = gemm_s(rows, n, k, op.num_matrices, rates, compute_bytes)
        # dgrad [rows,n]x[n,k] and wgrad [k,rows]x[rows,n]: the same three matrices, each once an output.
        return OperatorTime(forward, 2 * forward, 1, 2)
    if isinstance(op, FusedAttention):
        forward = attention_s(op, tokens, tp, rates, compute_bytes, backward=False)
        return OperatorTime(forward, attention_s(op, tokens, tp, rates, compute_bytes, backward=True), 1, 1)
    return _elementwise_time(op, tokens, tp, sequence_parallel, rates, compute_bytes)


def gemm_s(
    rows: FloatArray | IntArray, n: FloatArray, k: FloatArray, num_matrices: int, rates: DeviceRates, element_bytes: int
) -> FloatArray:
    """Seconds of [rows,k] x [k,n] products whose rows are spread over ``num_matrices`` weights."""
    flops = 2.0 * rows * n * k
    traffic = element_bytes * (rows * (n + k) + num_matrices * n * k)
    # Experts run as one grouped kernel where there is one; a launch for each of a few is the floor.
    roofline = np.maximum(flops / rates.gemm_flops_per_s, traffic / rates.gemm_bytes_per_s)
    return np.asarray(rates.launch_s + roofline, dtype=np.float64)


def attention_s(
    op: FusedAttention, tokens: IntArray, tp: IntArray, rates: DeviceRates, element_bytes: int, *, backward: bool
) -> FloatArray:
    """Seconds of fused causal attention; its traffic is q, k, v and the output once (twice in the backward pass)."""
    flops = op.forward_flops_per_token * tokens / tp * (BACKWARD_ATTENTION_RATIO if backward else 1.0)
    peak = rates.attention_backward_flops_per_s if backward else rates.attention_forward_flops_per_s
    traffic = (2 if backward else 1) * element_bytes * tokens * op.num_heads * (2 * op.qk_dim + 2 * op.v_dim) / tp
    return np.asarray(
        rates.launch_s + np.maximum(flops / peak, traffic / rates.elementwise_bytes_per_s), dtype=np.float64
    )


def _elementwise_time(
    op: Elementwise, tokens: IntArray, tp: IntArray, sequence_parallel: IntArray, rates: DeviceRates, element_bytes: int
) -> OperatorTime:
    split = {"column": tp, "row": tp, "none": np.ones_like(tp), "tokens": np.where(sequence_parallel == 1, tp, 1)}[
        op.shard
    ]
    bytes_per_s = rates.streaming_bytes_per_s if op.streams else rates.elementwise_bytes_per_s
    bytes_per_element = (op.element_bytes or element_bytes) * tokens / split / bytes_per_s
    return OperatorTime(
        op.forward_kernels * rates.kernel_s + op.forward_elements * bytes_per_element,
        op.backward_kernels * rates.kernel_s + op.backward_elements * bytes_per_element,
        op.forward_kernels,
        op.backward_kernels,
    )


def elementwise_update_s(num_params: FloatArray, bytes_per_param: float, rates: DeviceRates) -> FloatArray:
    """Seconds of a memory-bound pass over parameters (the optimizer update)."""
    return np.asarray(num_params * bytes_per_param / rates.elementwise_bytes_per_s, dtype=np.float64)
