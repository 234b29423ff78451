"""Layers of a model: embedding, block, head, multi-token-prediction head; with exact parameter counts.

Shapes follow the names of style.md: D hidden_dim, V vocab_size.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .attention import Attention
from .base import Count, CountOrNone, Frozen
from .feed_forward import FeedForward
from .traced import Traced

NormKind = Literal["rmsnorm", "layernorm"]

MAX_LAYERS = 10_000
"""Of equal layers in a row: more than any model has by a factor of ten."""


class Embedding(Frozen):
    """Token embedding [V,D], with learned positions [num_positions,D] where the model has them.

    ``traced``: of a model outside the catalogue everything before its blocks; the sizes are then stand-ins.
    """

    kind: Literal["embedding"] = "embedding"
    vocab_size: Count
    num_positions: CountOrNone = 0
    traced: Traced | None = None

    def num_params(self, hidden_dim: int) -> int:
        """Parameters."""
        return self.traced.num_params if self.traced else (self.vocab_size + self.num_positions) * hidden_dim


class Block(Frozen):
    """One decoder layer: attention and feed-forward with their norms.

    Attributes:
        num_norms: norms over D in the block: 2 (before each part), 4 (before and after each part, Gemma-2), 1 (shared).
        parallel_residual: attention and feed-forward read the same input (GPT-NeoX).
        traced: what was counted of a block outside the catalogue; attention and feed-forward are then stand-ins.
    """

    kind: Literal["block"] = "block"
    attention: Attention
    mlp: FeedForward
    norm: NormKind = "rmsnorm"
    norm_bias: bool = False
    num_norms: Literal[1, 2, 4] = 2
    parallel_residual: bool = False
    traced: Traced | None = None

    def num_norm_params(self, hidden_dim: int) -> int:
        """Parameters of the norms over D."""
        return self.num_norms * (1 + self.norm_bias) * hidden_dim

    def num_params(self, hidden_dim: int) -> int:
        """Parameters."""
        if self.traced:
            return self.traced.num_params
        return (
            self.attention.num_params(hidden_dim) + self.mlp.num_params(hidden_dim) + self.num_norm_params(hidden_dim)
        )

    def num_active_params(self, hidden_dim: int) -> int:
        """Parameters one token goes through."""
        if self.traced:
            return self.traced.num_params
        attention = self.attention.num_params(hidden_dim)
        return attention + self.mlp.num_active_params(hidden_dim) + self.num_norm_params(hidden_dim)


class Head(Frozen):
    """Final norm and output projection [D,V]; a tied projection has no parameters of its own.

    ``traced``: of a model outside the catalogue everything after its blocks; the sizes are then stand-ins.
    """

    kind: Literal["head"] = "head"
    vocab_size: Count
    tied: bool = False
    norm: NormKind = "rmsnorm"
    norm_bias: bool = False
    bias: bool = False
    traced: Traced | None = None

    def num_params(self, hidden_dim: int) -> int:
        """Parameters this layer owns."""
        if self.traced:
            return self.traced.num_params
        projection = 0 if self.tied else hidden_dim * self.vocab_size
        return projection + self.bias * self.vocab_size + (1 + self.norm_bias) * hidden_dim


class MTPHead(Frozen):
    """One multi-token-prediction module (DeepSeek-V3, arXiv:2412.19437 section 2.2): two norms, a [2D,D] projection, a block.

    Embedding and output projection are shared with the main model.
    """

    kind: Literal["mtp"] = "mtp"
    block: Block

    def num_params(self, hidden_dim: int) -> int:
        """Parameters this layer owns."""
        return 2 * hidden_dim * hidden_dim + 3 * hidden_dim + self.block.num_params(hidden_dim)


Layer = Annotated[Embedding | Block | Head | MTPHead, Field(discriminator="kind")]


class LayerRun(Frozen):
    """``count`` equal layers in a row."""

    layer: Layer
    count: Annotated[int, Field(gt=0, le=MAX_LAYERS)] = 1
