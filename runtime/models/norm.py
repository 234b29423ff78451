"""RMSNorm, whole or over a dimension that is spread over ranks, and LayerNorm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from ...schema.model import NormKind


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dimension.

    It works on local tensors, because dispatching every activation through DTensor costs more than the norm.

    Attributes:
        weight_grad: how the gradient of a DTensor weight is spread over tp; None where it is split like the weight.
        spread: ranks over which the last dimension is split; None where each has all of it.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps
        self.weight_grad: Sequence[Placement] | None = None
        self.spread: DeviceMesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] to the same shape."""
        weight: Tensor = self.weight
        if isinstance(weight, DTensor):
            weight = weight.to_local(grad_placements=self.weight_grad)
        if self.spread is None:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        squares = x.float().square().mean(dim=-1, keepdim=True) / self.spread.size()
        # Every rank's part of the output depends on the whole sum, so the gradients of the sum are parts as well.
        parts = DTensor.from_local(squares, self.spread, [Partial()], run_check=False)
        mean = parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
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
        """[..., dim] to the same shape."""
        weight, bias = (local_weight(parameter, self.weight_grad) for parameter in (self.weight, self.bias))
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)


def build_norm(kind: NormKind, dim: int, eps: float) -> RMSNorm | LayerNorm:
    """A norm over the hidden dimension."""
    return RMSNorm(dim, eps) if kind == "rmsnorm" else LayerNorm(dim, eps)


def local_weight(weight: Tensor, weight_grad: Sequence[Placement] | None) -> Tensor:
    """What this rank holds of a weight, for arithmetic on local tensors."""
    return weight.to_local(grad_placements=weight_grad) if isinstance(weight, DTensor) else weight
