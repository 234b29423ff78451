"""Operators and saved tensors of mixers with a state of fixed size: linear attention, Mamba, RG-LRU, short convolutions.

A scan is bound by its FLOPs (schema/recurrences.py has the formulas and their sources), by what it reads and writes, or by its
kernels. Chunks of linear attention run as matrix products, at the rate of products; Mamba's and RG-LRU's recurrences on the vector
units. No efficiency was fitted: we have no measured rows of such kernels, so that the times are those of a plain roofline.
"""

from __future__ import annotations

from ...schema.engine_kernels import KernelTraffic
from ...schema.layout import Recompute
from ...schema.recurrences import GatedRecurrence, LinearAttention, SelectiveScan, ShortConvolution
from .memory import SavedElements, SavedTensorRules, saved_by
from .operators import Elementwise, Gemm, Operator, OperatorRules, Scan, operators_of

_CONVOLUTION = KernelTraffic(2, 4, 1, 2)
"""A causal convolution with its activation: one kernel forward, gradients of input and weights backward."""


def _per_element(name: str, width: float, traffic: KernelTraffic) -> Elementwise:
    elements = width * traffic.forward, width * traffic.backward
    return Elementwise(name, *elements, traffic.forward_kernels, traffic.backward_kernels, "column")


@operators_of.register
def _(mixer: LinearAttention, rules: OperatorRules) -> tuple[Operator, ...]:
    kernels, hidden_dim, mixed = rules.kernels, rules.hidden_dim, mixer.keys_width + mixer.width
    shared = mixer.keys_width if mixer.num_key_heads == 1 else 0  # made by every rank
    states = 2 * 2 * mixer.width * mixer.key_dim / mixer.chunk  # of chunks, written and read in fp32
    low_rank: list[Operator] = []
    for idx, width in enumerate(mixer.low_rank_widths):
        low_rank.append(Gemm(f"state_down_{idx}", mixer.gate_rank, hidden_dim, "none"))
        low_rank.append(Gemm(f"state_up_{idx}", width, mixer.gate_rank, "column"))
    operators: tuple[tuple[object, Operator], ...] = (
        (shared, Gemm("state_keys", shared, hidden_dim, "none")),
        (True, Gemm("state_in", mixer.input_width - shared, hidden_dim, "column")),
        *((True, product) for product in low_rank),
        (mixer.conv_kernel, _per_element("convolution", mixed, _CONVOLUTION)),
        (True, Scan("scan", mixer.scan_flops_per_token, mixed + mixer.width + states, 6 if mixer.delta else 4)),
        (mixer.norm != "none", _per_element("state_norm", mixer.width, kernels.norm)),
        (mixer.gate, _per_element("state_gate", mixer.width, kernels.gated)),
        (True, Gemm("state_out", hidden_dim, mixer.width, "row")),
    )
    return tuple(op for is_present, op in operators if is_present)


@operators_of.register
def _(mixer: SelectiveScan, rules: OperatorRules) -> tuple[Operator, ...]:
    w, hidden_dim = mixer.channels, rules.hidden_dim
    norms = _per_element("step_norms", mixer.step_width, rules.kernels.norm)
    return (
        Gemm("state_in", mixer.input_width, hidden_dim, "column"),
        _per_element("convolution", w, _CONVOLUTION),
        Gemm("steps_down", mixer.step_width, w, "row"),
        *((norms,) if mixer.norms else ()),
        Gemm("steps_up", w, mixer.step_rank, "column"),
        # Input, step, gate and output of each channel.
        Scan("scan", mixer.scan_flops_per_token, 4 * w + 2 * mixer.state_dim, 1, on_vectors=True),
        Gemm("state_out", hidden_dim, w, "row"),
    )


@operators_of.register
def _(mixer: ShortConvolution, rules: OperatorRules) -> tuple[Operator, ...]:
    gates = KernelTraffic(3, 6, 1, 2)
    return (
        Gemm("state_in", mixer.input_width, rules.hidden_dim, "column"),
        _per_element("state_gate_in", mixer.channels, gates),
        _per_element("convolution", mixer.channels, _CONVOLUTION),
        _per_element("state_gate_out", mixer.channels, gates),
        Gemm("state_out", rules.hidden_dim, mixer.channels, "row"),
    )


@operators_of.register
def _(mixer: GatedRecurrence, rules: OperatorRules) -> tuple[Operator, ...]:
    w = mixer.width
    return (
        Gemm("state_in", mixer.input_width, rules.hidden_dim, "column"),
        _per_element("convolution", w, _CONVOLUTION),
        # Both gates are products within a head; the recurrence itself reads input and gates and writes its states.
        Gemm("state_gates", 2 * w, mixer.head_dim, "column"),
        Scan("scan", 10.0 * w, 4 * w, 4, on_vectors=True),
        _per_element("state_gate", w, rules.kernels.gated),
        Gemm("state_out", rules.hidden_dim, w, "row"),
    )


@saved_by.register
def _(mixer: LinearAttention, hidden_dim: int, recompute: Recompute, rules: SavedTensorRules) -> SavedElements:
    products = SavedElements(tp=mixer.input_width + sum(mixer.low_rank_widths), unsharded=mixer.gate_rank)
    if recompute == "selective":
        return products + SavedElements(unsharded=hidden_dim)
    convolved = (mixer.keys_width + mixer.width) * (mixer.conv_kernel > 0)
    inverse = mixer.delta * mixer.num_heads * mixer.chunk  # of each chunk's triangle, one row a token
    # The scan's output before its norm and gate, and what the output projection reads.
    return products + SavedElements(tp=convolved + inverse + 2 * mixer.width)


@saved_by.register
def _(mixer: SelectiveScan, hidden_dim: int, recompute: Recompute, rules: SavedTensorRules) -> SavedElements:
    products = SavedElements(tp=mixer.input_width + mixer.channels, unsharded=mixer.step_width)
    if recompute == "selective":
        return products + SavedElements(unsharded=hidden_dim)
    return products + SavedElements(tp=2 * mixer.channels)  # after the convolution, and the gated output


@saved_by.register
def _(mixer: ShortConvolution, hidden_dim: int, recompute: Recompute, rules: SavedTensorRules) -> SavedElements:
    products = SavedElements(tp=mixer.input_width)
    if recompute == "selective":
        return products + SavedElements(unsharded=hidden_dim)
    return products + SavedElements(tp=3 * mixer.channels)  # input and output of the convolution, the gated output


@saved_by.register
def _(mixer: GatedRecurrence, hidden_dim: int, recompute: Recompute, rules: SavedTensorRules) -> SavedElements:
    products = SavedElements(tp=mixer.input_width)
    if recompute == "selective":
        return products + SavedElements(unsharded=hidden_dim)
    # After the convolution, both gates, states in fp32, the gated output.
    return products + SavedElements(tp=4 * mixer.width, tp_fp32=mixer.width)
