"""The feed-forward part without a gate. Shapes: B micro-batch, S sequence, D hidden_dim, F ffn_dim."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ...schema.model import DenseMLP


class GeluMLP(nn.Module):
    """``down(gelu(up(x)))``, with the exact gelu or its approximation by tanh (GPT-2)."""

    def __init__(self, hidden_dim: int, spec: DenseMLP) -> None:
        super().__init__()
        self.approximate = "tanh" if spec.activation == "gelu_tanh" else "none"
        self.up_proj = nn.Linear(hidden_dim, spec.ffn_dim, bias=spec.bias)
        self.down_proj = nn.Linear(spec.ffn_dim, hidden_dim, bias=spec.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        result: Tensor = self.down_proj(F.gelu(self.up_proj(hidden), approximate=self.approximate))
        return result
