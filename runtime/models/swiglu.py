"""The gated feed-forward part of a block, dense. Shapes: B micro-batch, S sequence, D hidden_dim, F ffn_dim."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...schema.model import DenseMLP


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, hidden_dim: int, spec: DenseMLP) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_dim, spec.ffn_dim, bias=spec.bias)
        self.up_proj = nn.Linear(hidden_dim, spec.ffn_dim, bias=spec.bias)
        self.down_proj = nn.Linear(spec.ffn_dim, hidden_dim, bias=spec.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        result: Tensor = self.down_proj(silu_product(self.gate_proj(hidden), self.up_proj(hidden)))
        return result


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` that keeps its inputs only; autograd would also keep silu(gate), a quarter of the part's activations."""
    product: Tensor = _SiluProduct.apply(gate, up)  # type: ignore[no-untyped-call]
    return product


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad_output * up, gate), grad_output * F.silu(gate)
