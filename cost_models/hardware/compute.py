"""Seconds of operators on a device: the calibrated roofline t = launch + max(F / (P*e_c), B / (W*e_m)), docs/method.md.

All functions are vectorised over layouts: ``tokens`` and ``tp`` are arrays [N] and so are the results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ...schema.units import FloatArray, IntArray
from ..layer.operators import BACKWARD_ATTENTION_RATIO, CostInputs, Elementwise, FusedAttention, Gemm, Operator, Scan
from ..learned.kernels import AttentionDevice, AttentionShape, GemmRates, attention_seconds, gemm_seconds

_TENSOR_CORE_ALIGNMENT_BYTES = 16
"""Rows of the small matrices of attention that do not start at multiples of this keep the tensor cores out of batched products."""


_REGULATION_S = 0.025
"""Boards average their power over so long (A100, H100: arXiv:2312.02741): shorter kernels have the clocks that products beside them
leave, longer ones their own. Fused attention alone stays below the limit: 8B with 262k tokens reaches 620 TFLOP/s on H200."""


class AttentionRates(NamedTuple):
    """Fused attention on one device.

    ``kernel`` says whose coefficients, ``arithmetic_ratio`` how much longer than the kernel's this generation's arithmetic takes,
    ``reference`` what the learned residual takes the device for (`_reference`); no calibration in it. ``isolated_ratio``: how much
    of its seconds beside products a kernel takes that has the board's power to itself.
    """

    kernel: str
    device: AttentionDevice
    arithmetic_ratio: float
    reference: AttentionDevice
    isolated_ratio: float = 1.0


class GroupedGemm(NamedTuple):
    """One pass of the products of all experts: seconds for each expert launched by itself, and a ratio to the roofline."""

    expert_s: float
    ratio: float


class DeviceRates(NamedTuple):
    """What one device achieves.

    Attributes:
        gemm: single matrix products; None where the plain roofline of the next figures is all there is (CPUs).
        full_gemm: the same for products that fp8 training keeps in bf16.
        gemm_flops_per_s: large matrix products; vector_flops_per_s: products that cannot use the matrix units.
        quantize_bytes: traffic of casting one element of an input to fp8; 0 where products take the inputs as they are.
        quantizes_weights: so are weights, in every pass; otherwise once a step.
        expert_by_expert: the engine launches a product for each expert instead of one for all.
        grouped: products of experts by pass: forward, dgrad, wgrad.
        attention: fused attention; None where it runs at the rate of products (CPUs).
        gemm_bytes_per_s, elementwise_bytes_per_s: memory-bound matrix products and everything else.
        unpack_s: of one frozen 4-bit weight, written out in the compute dtype.
        launch_s: floor of one matrix product; kernel_s: floor of one elementwise kernel.
        update_bytes_per_s: passes of the optimizer over parameters and states.
        compute_bytes: of one element of activations.
    """

    gemm: GemmRates | None
    full_gemm: GemmRates | None
    gemm_flops_per_s: float
    quantize_bytes: float
    quantizes_weights: bool
    expert_by_expert: bool
    grouped: Mapping[str, GroupedGemm]
    attention: AttentionRates | None
    gemm_bytes_per_s: float
    elementwise_bytes_per_s: float
    unpack_s: float
    launch_s: float
    kernel_s: float
    update_bytes_per_s: float
    vector_flops_per_s: float
    compute_bytes: int


class OperatorTime(NamedTuple):
    """Seconds [N] of one operator for one micro-batch, and how many operators the host dispatches for it.

    ``weight_s`` are the gradients of weights, a part of ``backward_s``.
    """

    forward_s: FloatArray
    backward_s: FloatArray
    forward_dispatches: float | FloatArray
    backward_dispatches: float | FloatArray
    weight_s: FloatArray | float = 0.0

    def take(self, rows: IntArray) -> OperatorTime:
        """Return the time under a subset of the layouts."""
        return OperatorTime(*(value[rows] if isinstance(value, np.ndarray) else value for value in self))  # type: ignore[arg-type]

    def scaled(
        self, forward: FloatArray | float, backward: FloatArray | float, *, with_dispatches: bool = False
    ) -> OperatorTime:
        """Return the time with both passes multiplied; with their dispatches where these are part of the seconds."""
        dispatches = self.forward_dispatches, self.backward_dispatches
        if with_dispatches:
            dispatches = dispatches[0] * forward, dispatches[1] * backward
        return OperatorTime(self.forward_s * forward, self.backward_s * backward, *dispatches, self.weight_s * backward)


def operator_time(
    op: Operator,
    tokens: IntArray | FloatArray,
    tp: IntArray,
    sequence_parallel: IntArray,
    *,
    rates: DeviceRates,
    ep: IntArray | FloatArray | int = 1,
) -> OperatorTime:
    """Return the time of one operator on one rank for ``tokens`` [N] tokens of a micro-batch; ``ep`` ranks share its matrices."""
    if isinstance(op, Gemm):
        if op.widths:
            each = [replace(op, n=width, widths=()) for width in op.widths]
            times = [operator_time(one, tokens, tp, sequence_parallel, rates=rates, ep=ep) for one in each]
            return OperatorTime(*(sum(parts[1:], start=parts[0]) for parts in zip(*times, strict=True)))
        n = op.n / tp if op.shard == "column" else np.full(tp.shape, float(op.n))
        k = op.k / tp if op.shard == "row" else np.full(tp.shape, float(op.k))
        return _gemm_time(op, np.asarray(tokens * op.rows_per_token, dtype=np.float64), n, k, ep, rates)
    if isinstance(op, FusedAttention):
        ranks = tp if op.is_split else np.ones_like(tp)
        forward, backward = (
            attention_s(op, tokens, ranks, rates, backward=is_backward) for is_backward in (False, True)
        )
        return OperatorTime(forward, backward, 1, 1)
    if isinstance(op, Scan):
        return _scan_time(op, tokens, tp, rates)
    return _elementwise_time(op, tokens, (tp, sequence_parallel, ep), rates)


def _scan_time(op: Scan, tokens: IntArray | FloatArray, tp: IntArray, rates: DeviceRates) -> OperatorTime:
    """Return the time of a recurrence: the larger of its FLOPs and its traffic; backward as often as attention's."""
    peak = rates.vector_flops_per_s if op.on_vectors else rates.gemm_flops_per_s
    flops_s = op.forward_flops_per_token * tokens / tp / peak
    traffic_s = op.forward_elements * rates.compute_bytes * tokens / tp / rates.elementwise_bytes_per_s
    forward = op.kernels * rates.kernel_s + np.maximum(flops_s, traffic_s)
    backward = 2 * op.kernels * rates.kernel_s + np.maximum(BACKWARD_ATTENTION_RATIO * flops_s, 2 * traffic_s)
    return OperatorTime(forward, backward, op.kernels, 2 * op.kernels)


def _gemm_time(
    op: Gemm, rows: FloatArray, n: FloatArray, k: FloatArray, ep: IntArray | FloatArray | int, rates: DeviceRates
) -> OperatorTime:
    if op.head_dim is not None:
        # In unfused attention: one small matrix for each sequence and head, without weights.
        aligned = op.head_dim * rates.compute_bytes % _TENSOR_CORE_ALIGNMENT_BYTES == 0
        peak = rates.gemm_flops_per_s if aligned else min(rates.vector_flops_per_s, rates.gemm_flops_per_s)
        forward = gemm_s(rows, n, k, rates._replace(gemm=None, gemm_flops_per_s=peak))
        return OperatorTime(forward, 2 * forward, 1, 2)
    rates = rates if op.quantized else rates._replace(gemm=rates.full_gemm)
    if op.num_matrices > 1:
        forward, backward, weight = grouped_gemm_s(rows, n, k, op.num_matrices / ep, rates)
    elif rates.gemm is None:
        # dgrad [rows,n]x[n,k] and wgrad [k,rows]x[rows,n]: the same three matrices, each once an output.
        forward = weight = gemm_s(rows, n, k, rates)
        backward = 2 * forward
    else:
        forward = gemm_seconds(rows, n, k, rates.gemm)
        weight = gemm_seconds(rows, n, k, rates.gemm, which="weight_gradient")
        backward = gemm_seconds(rows, n, k, rates.gemm, which="input_gradient") + weight
    if op.frozen:  # no gradient of the weights; that of the input takes as long as the product itself
        backward, weight = forward, np.zeros_like(forward)
    dispatches = (1, 1 if op.frozen else 2)
    if not (op.quantized and rates.quantize_bytes):
        return OperatorTime(forward, backward, *dispatches, weight)
    weights = n * k * op.num_matrices / ep if rates.quantizes_weights else 0.0
    cast = (quantize_s(rows * k + weights, rates), quantize_s(rows * n + weights, rates))
    return OperatorTime(forward + cast[0], backward + cast[1], dispatches[0] + 1, dispatches[1] + 1, weight)


def gemm_s(rows: FloatArray | IntArray, n: FloatArray, k: FloatArray, rates: DeviceRates) -> FloatArray:
    """Return the seconds of one [rows,k] x [k,n] product."""
    if rates.gemm is not None:
        return gemm_seconds(np.asarray(rows, dtype=np.float64), n, k, rates.gemm)
    flops = 2.0 * rows * n * k / rates.gemm_flops_per_s
    traffic = rates.compute_bytes * (rows * (n + k) + n * k) / rates.gemm_bytes_per_s
    return np.asarray(rates.launch_s + np.maximum(flops, traffic), dtype=np.float64)


def grouped_gemm_s(
    rows: FloatArray | IntArray, n: FloatArray, k: FloatArray, num_matrices: FloatArray | float, rates: DeviceRates
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the seconds of one product for every expert, rows divided evenly over ``num_matrices``: forward, backward, weights.

        pass = experts * per_expert_s + ratio * max(one product of all rows, bytes / (W e_m))

    Sizes that leave few rows to an expert are bound by the weights and by what each expert costs by itself. The weights'
    gradients add up in fp32, read and written. Coefficients: coefficients.toml, [grouped_gemm].
    """
    together = gemm_s(rows, n, k, rates)
    one_by_one = num_matrices * 1.0 if rates.expert_by_expert else 0.0

    def pass_s(grouped: GroupedGemm, weight_bytes: int) -> FloatArray:
        traffic = (rates.compute_bytes * rows * (n + k) + weight_bytes * num_matrices * n * k) / rates.gemm_bytes_per_s
        seconds = one_by_one * grouped.expert_s + grouped.ratio * np.maximum(together, traffic)
        return np.asarray(seconds, dtype=np.float64)

    forward = pass_s(rates.grouped["forward"], rates.compute_bytes)
    to_inputs, to_weights = pass_s(rates.grouped["dgrad"], rates.compute_bytes), pass_s(rates.grouped["wgrad"], 8)
    return forward, to_inputs + to_weights, to_weights


def quantize_s(elements: FloatArray | IntArray, rates: DeviceRates) -> FloatArray:
    """Return the seconds of casting a product's input to fp8: forward its activations, backward the gradient of its output."""
    return np.asarray(
        rates.kernel_s + elements * rates.quantize_bytes / rates.elementwise_bytes_per_s, dtype=np.float64
    )


def unpacked_s(operators: tuple[Operator, ...], inputs: CostInputs, rates: DeviceRates) -> FloatArray:
    """Return what each pass takes to write frozen 4-bit products out in the compute dtype before it uses them [N]; mostly zero."""
    workload, layouts = inputs.workload, inputs.layouts
    if workload.adapters is None or workload.adapters.frozen != "nf4":
        return np.zeros(len(layouts))
    weights = sum(op.num_params for op in operators if isinstance(op, Gemm) and op.frozen)
    return np.asarray(weights / layouts.tp * rates.unpack_s)


def attention_s(
    op: FusedAttention, tokens: IntArray | FloatArray, tp: IntArray, rates: DeviceRates, *, backward: bool
) -> FloatArray:
    """Return the seconds of fused causal attention of ``tokens`` tokens on one rank."""
    if rates.attention is None:
        flops = op.forward_flops_per_token * tokens / tp * (BACKWARD_ATTENTION_RATIO if backward else 1.0)
        elements = tokens * op.num_heads * (2 * op.qk_dim + 2 * op.v_dim)
        traffic = (2 if backward else 1) * rates.compute_bytes * elements / tp
        roofline = np.maximum(flops / rates.gemm_flops_per_s, traffic / rates.elementwise_bytes_per_s)
        return np.asarray(rates.launch_s + roofline, dtype=np.float64)
    # Few sizes occur among many layouts, and the same ones in searches over many sizes of a cluster.
    rows, inverse = np.unique(np.asarray(tokens / tp, dtype=np.float64), return_inverse=True)
    known = _known_attention(op, rates.attention, rates.compute_bytes, backward)
    if new := [each for each in rows.tolist() if each not in known]:
        known.update(zip(new, _attention_of_rows(op, np.array(new), rates, backward=backward).tolist(), strict=True))
    seconds = np.array([known[each] for each in rows.tolist()])
    return np.asarray(seconds[inverse.reshape(np.shape(tokens / tp))], dtype=np.float64)


@lru_cache(maxsize=1 << 12)
def _known_attention(
    _op: FusedAttention, _rates: AttentionRates, _element_bytes: int, _backward: bool
) -> dict[float, float]:
    """Return the seconds that were worked out of an operator, by tokens; callers add to them."""
    return {}


def _attention_of_rows(op: FusedAttention, tokens: FloatArray, rates: DeviceRates, *, backward: bool) -> FloatArray:
    """Return the seconds [N] of fused causal attention of all heads for so many tokens, each worked out."""
    assert rates.attention is not None
    shape = AttentionShape(
        rows=tokens * (op.num_heads / op.seq_len),
        group=np.full(tokens.shape, op.num_heads / op.num_kv_heads),
        seq_len=np.full(tokens.shape, float(op.seq_len)),
        context=np.full(tokens.shape, op.context),
        longest=np.full(tokens.shape, float(op.longest)),
        width=np.full(tokens.shape, (op.qk_dim + op.v_dim) / 2),
        element_bytes=np.full(tokens.shape, float(rates.compute_bytes)),
    )
    seconds = attention_seconds(
        rates.attention.kernel,
        shape,
        rates.attention.device,
        backward=backward,
        arithmetic_ratio=rates.attention.arithmetic_ratio,
        reference=rates.attention.reference,
    )
    share = seconds / (seconds + _REGULATION_S)
    return np.asarray(seconds * (1 - share * (1 - rates.attention.isolated_ratio)), dtype=np.float64)


def _elementwise_time(
    op: Elementwise, tokens: IntArray | FloatArray, ranks: tuple[Any, Any, Any], rates: DeviceRates
) -> OperatorTime:
    """Return the time of memory-bound kernels over tp ranks, with or without sequence parallelism, and ep."""
    tp, sequence_parallel, ep = ranks
    split = {"column": tp, "row": tp, "none": np.ones_like(tp), "tokens": np.where(sequence_parallel == 1, tp, 1)}[
        op.shard
    ]
    bytes_per_element = (op.element_bytes or rates.compute_bytes) * tokens / split / rates.elementwise_bytes_per_s
    forward, backward = (
        kernels * op.num_matrices / ep if op.num_matrices > 1 else kernels
        for kernels in (op.forward_kernels, op.backward_kernels)
    )
    time = OperatorTime(
        forward * rates.kernel_s + op.forward_elements * bytes_per_element,
        backward * rates.kernel_s + op.backward_elements * bytes_per_element,
        forward,
        backward,
    )
    if op.over is None:
        return time
    runs = np.where(np.broadcast_to({"tp": tp, "ep": ep}[op.over], np.shape(tp)) > 1, 1.0, 0.0)
    return time.scaled(runs, runs, with_dispatches=True)
