"""RMSNorm, whole or over a dimension that is spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate


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
