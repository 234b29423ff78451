"""A small linear layer that every tensor-parallel rank has whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement


class WholeLinear(nn.Module):
    """``x W'`` without bias.

    Attributes:
        weight_grad: how the gradient of a DTensor weight is spread over tp, as in RMSNorm.
    """

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim))
        self.weight_grad: Sequence[Placement] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_dim] to [..., out_dim]."""
        weight: Tensor = self.weight
        if isinstance(weight, DTensor):
            weight = weight.to_local(grad_placements=self.weight_grad)
        return F.linear(x, weight)
