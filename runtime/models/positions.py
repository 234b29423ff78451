"""Learned positions. Shapes: B micro-batch, S tokens of this rank, P positions, D hidden_dim."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Placement

from .norm import local_weight


class PositionEmbedding(nn.Module):
    """Adds to each token the vector of its place in the sequence.

    Attributes:
        positions: places of the tokens of all ranks that share a sequence under sequence parallelism; None for 0, 1, 2...
        share: which part of them this rank has, of how many.
        weight_grad: how the gradient of a DTensor weight is spread over tp, as in RMSNorm.
    """

    def __init__(self, num_positions: int, hidden_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_positions, hidden_dim))
        self.positions: Tensor | None = None
        self.share = (0, 1)
        self.weight_grad: Sequence[Placement] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, S, D] to the same shape."""
        idx, count = self.share
        positions = self.positions
        if positions is None:
            positions = torch.arange(hidden.shape[1] * count, device=hidden.device)
        return hidden + F.embedding(positions.chunk(count)[idx], local_weight(self.weight, self.weight_grad))
