"""Small layers of a block: norms, feed-forward parts, learned positions, linear layers that tensor parallelism leaves unsharded.

Shapes: B micro-batch, S sequence, D hidden_dim, F ffn_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate

from ...schema.layers import DenseMLP, NormKind
from .sharded import local_weight, redistribute


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dimension.

    Attributes:
        weight_grad: placements over tp of the gradient of a DTensor weight; None where it is split as the weight is.
        tp: ranks over which the last dimension is split; None where each has all of it.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps
        self.weight_grad: Sequence[Placement] | None = None
        self.tp: DeviceMesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., dim] to the same shape."""
        weight = local_weight(self.weight, self.weight_grad)
        if self.tp is None:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        squares = x.float().square().mean(dim=-1, keepdim=True) / self.tp.size()
        # Every rank's part of the output depends on the full sum, so the gradients of the sum are parts as well.
        mean = redistribute(squares, self.tp, Partial(), Replicate(), gradient=Partial())
        return (x.float() * torch.rsqrt(mean + self.eps)).to(x.dtype) * weight


class LayerNorm(nn.Module):
    """``(x - mean(x)) / std(x) * weight + bias`` over the last dimension; local tensors only, as in RMSNorm."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps
        self.weight_grad: Sequence[Placement] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., dim] to the same shape."""
        weight, bias = (local_weight(parameter, self.weight_grad) for parameter in (self.weight, self.bias))
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)


def build_norm(kind: NormKind, dim: int, eps: float) -> RMSNorm | LayerNorm:
    """Build a norm over the hidden dimension."""
    return RMSNorm(dim, eps) if kind == "rmsnorm" else LayerNorm(dim, eps)


class ReplicatedLinear(nn.Module):
    """``x W'`` without bias.

    Attributes:
        weight_grad: placements over tp of the gradient of a DTensor weight, as in RMSNorm.
    """

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim))
        self.weight_grad: Sequence[Placement] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_dim] to [..., out_dim]."""
        return F.linear(x, local_weight(self.weight, self.weight_grad))


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, hidden_dim: int, spec: DenseMLP) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_dim, spec.ffn_dim, bias=spec.bias)
        self.up_proj = nn.Linear(hidden_dim, spec.ffn_dim, bias=spec.bias)
        self.down_proj = nn.Linear(spec.ffn_dim, hidden_dim, bias=spec.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, S, D] to [B, S, D]."""
        result: Tensor = self.down_proj(silu_product(self.gate_proj(hidden), self.up_proj(hidden)))
        return result


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``, keeping the inputs only; autograd would also keep silu(gate), a quarter of the activations."""
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


class GeluMLP(nn.Module):
    """``down(gelu(up(x)))``, with the exact gelu or its approximation by tanh (GPT-2)."""

    def __init__(self, hidden_dim: int, spec: DenseMLP) -> None:
        super().__init__()
        self.approximate = "tanh" if spec.activation == "gelu_tanh" else "none"
        self.up_proj = nn.Linear(hidden_dim, spec.ffn_dim, bias=spec.bias)
        self.down_proj = nn.Linear(spec.ffn_dim, hidden_dim, bias=spec.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, S, D] to [B, S, D]."""
        result: Tensor = self.down_proj(F.gelu(self.up_proj(hidden), approximate=self.approximate))
        return result


class PositionEmbedding(nn.Module):
    """Adds to each token the vector of its place in the sequence.

    Attributes:
        positions: places of the tokens of all ranks that share a sequence under sequence parallelism; None for 0, 1, 2...
        share: which part of them this rank has, of how many.
        weight_grad: placements over tp of the gradient of a DTensor weight, as in RMSNorm.
    """

    def __init__(self, num_positions: int, hidden_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_positions, hidden_dim))
        self.positions: Tensor | None = None
        self.share = (0, 1)
        self.weight_grad: Sequence[Placement] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, S, D] to the same shape."""
        idx, count = self.share
        positions = self.positions
        if positions is None:
            positions = torch.arange(hidden.shape[1] * count, device=hidden.device)
        return hidden + F.embedding(positions.chunk(count)[idx], local_weight(self.weight, self.weight_grad))
