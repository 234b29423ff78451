"""Feed-forward of a block: dense, or a mixture of experts; with exact parameter counts.

Shapes follow the names of style.md: D hidden_dim, F ffn_dim, E num_experts.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .base import Count, CountOrNone, Frozen, PositiveFloat

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]


class DenseMLP(Frozen):
    """Two projections [D,F] and [F,D], or three when gated (SwiGLU, GeGLU)."""

    kind: Literal["dense"] = "dense"
    ffn_dim: Count
    gated: bool = True
    activation: Activation = "silu"
    bias: bool = False

    def num_params(self, hidden_dim: int) -> int:
        """Parameters with biases."""
        up = 2 if self.gated else 1
        return (up + 1) * hidden_dim * self.ffn_dim + self.bias * (up * self.ffn_dim + hidden_dim)

    def num_active_params(self, hidden_dim: int) -> int:
        """Parameters one token goes through."""
        return self.num_params(hidden_dim)


class MoE(Frozen):
    """A router [D,E] and E experts of which a token visits top_k, plus shared experts that every token visits.

    Attributes:
        ffn_dim: width of one routed expert.
        shared_ffn_dim: width of all shared experts together; 0 for none.
        shared_gate: a learned scalar gate [D,1] on the shared experts (Qwen2-MoE).
        router: scores of a token's experts: softmax over all of them; top_k_softmax over the chosen ones; sigmoid of each.
        normalize: the scores of the chosen experts are divided by their sum.
        scale: factor on the sum of the routed experts.
        num_groups, top_groups: experts stand in groups, and a token visits those of at most top_groups of them (DeepSeek-V3).
    """

    kind: Literal["moe"] = "moe"
    num_experts: Count
    top_k: Count
    ffn_dim: Count
    shared_ffn_dim: CountOrNone = 0
    shared_gate: bool = False
    router_bias: bool = False
    router: Literal["softmax", "top_k_softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: PositiveFloat = 1.0
    num_groups: Count = 1
    top_groups: Count = 1
    gated: bool = True
    activation: Activation = "silu"
    bias: bool = False

    @model_validator(mode="after")
    def _top_k_in_range(self) -> Self:
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} exceeds num_experts {self.num_experts}")
        return self

    @property
    def expert(self) -> DenseMLP:
        """One routed expert."""
        return DenseMLP(ffn_dim=self.ffn_dim, gated=self.gated, activation=self.activation, bias=self.bias)

    @property
    def shared(self) -> DenseMLP | None:
        """The shared experts as one MLP."""
        if not self.shared_ffn_dim:
            return None
        return DenseMLP(ffn_dim=self.shared_ffn_dim, gated=self.gated, activation=self.activation)

    def num_dense_params(self, hidden_dim: int) -> int:
        """Router and shared experts: what every token goes through."""
        shared = self.shared.num_params(hidden_dim) if self.shared else 0
        return (
            hidden_dim * self.num_experts + self.router_bias * self.num_experts + shared + self.shared_gate * hidden_dim
        )

    def num_params(self, hidden_dim: int) -> int:
        """Parameters of router, shared and all routed experts."""
        return self.num_dense_params(hidden_dim) + self.num_experts * self.expert.num_params(hidden_dim)

    def num_active_params(self, hidden_dim: int) -> int:
        """Parameters one token goes through."""
        return self.num_dense_params(hidden_dim) + self.top_k * self.expert.num_params(hidden_dim)


FeedForward = Annotated[DenseMLP | MoE, Field(discriminator="kind")]
