"""Products of a part on the CPU: weights in the order of oneDNN's kernels, and products of one input as one.

Of few rows, as in decoding, torch's own product of fp32 takes up to 2.5 times as long: 651 against 258 us for 4 rows with 512 x
1408 weights on one core of a Xeon with AMX, 999 against 667 us for 16 rows [python benchmarks/serving_engine.py --only products].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..models.attention import SelfAttention
from ..models.decoder import Decoder, DecoderBlock
from ..models.experts import MixtureOfExperts
from ..models.layers import FeedForward

_PACKED_FOR_ROWS = 16
"""Rows for which oneDNN chooses the order of packed weights: those of decoding; other counts run as fast."""


def pack_products(part: Decoder) -> None:
    """Give a part's linear layers on the CPU packed weights; the plain ones go."""
    if part.lm_head is not None and _is_packable(part.lm_head.weight):
        _pack_one(part.lm_head, keeps_plain=part.spec.tie_embeddings)
    for block in part.model.layers.values():
        assert isinstance(block, DecoderBlock)
        attention, mlp = block.self_attn, block.mlp
        dense = mlp.shared_expert if isinstance(mlp, MixtureOfExperts) else mlp
        together: list[list[nn.Linear]] = []
        if isinstance(attention, SelfAttention):
            together += [[attention.q_proj, attention.k_proj, attention.v_proj], [attention.o_proj]]
        elif attention is not None:  # latent: it multiplies by the expansion of keys and values itself
            names = ("q_proj", "q_b_proj", "o_proj")
            together += [[getattr(attention, name)] for name in names if hasattr(attention, name)]
        if isinstance(dense, FeedForward):
            of_input = [dense.up_proj] if dense.gate_proj is None else [dense.gate_proj, dense.up_proj]
            together += [of_input, [dense.down_proj]]
        for linears in together:
            if all(_is_packable(linear.weight) for linear in linears):
                _pack_one(linears[0]) if len(linears) == 1 else _OneInput(linears)


def _is_packable(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    is_half = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return is_half or weight.dtype == torch.float32


def _packed(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _PACKED_FOR_ROWS)
    return packed


def _product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def _pack_one(linear: nn.Linear, *, keeps_plain: bool = False) -> None:
    packed = _packed(linear.weight)
    if not keeps_plain:
        _forget(linear)
    linear.forward = lambda x: _product(x, packed, linear.bias)  # type: ignore[method-assign, assignment]


def _forget(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)


class _OneInput:
    """Linear layers that a module calls one after the other with the same tensor: the first call computes all."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._sizes = [len(linear.weight) for linear in linears]
        self._packed = _packed(torch.cat([linear.weight for linear in linears]))
        biases = [linear.bias for linear in linears]
        self._bias = None if biases[0] is None else torch.cat(biases)
        self._input: Tensor | None = None
        self._rest: list[Tensor] = []
        for i, linear in enumerate(linears):
            _forget(linear)
            linear.forward = self._first if i == 0 else self._next  # type: ignore[method-assign]

    def _first(self, x: Tensor) -> Tensor:
        first, *self._rest = _product(x, self._packed, self._bias).split(self._sizes, dim=-1)
        self._input = x
        return first

    def _next(self, x: Tensor) -> Tensor:
        assert x is self._input, "called with another tensor than the first"
        part = self._rest.pop(0)
        if not self._rest:
            self._input = None
        return part
