"""Attention of a block: multi-head, grouped-query, or latent; with exact parameter counts.

Shapes follow the names of style.md: D hidden_dim, H num_heads, K num_kv_heads, C head_dim.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .base import Count, Frozen, PositiveFloat


class SoftmaxAttention(Frozen):
    """Multi-head (K = H) or grouped-query (K < H) attention.

    Attributes:
        window: a token sees itself and at most ``window - 1`` before it (sliding or chunked attention); None is all of them.
        chunked: the sequence is cut into chunks of ``window`` and a token sees only its own chunk (Llama-4): on average
            half of what a sliding window of that size sees.
        rope_fraction: part of each head that is rotated; 0 for none.
        qk_norm: RMSNorm of queries and keys: over each head (weights [C]), over all heads (weights [H*C], [K*C]), or without
            weights.
        sinks: one learned logit per head is added to the softmax (gpt-oss).
    """

    kind: Literal["mha", "gqa"]
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    window: Count | None = None
    chunked: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "per_head", "full", "weightless"] = "none"
    rope_fraction: float = Field(default=1.0, ge=0, le=1)
    sinks: bool = False
    logit_softcap: PositiveFloat | None = None

    @model_validator(mode="after")
    def _kv_heads_divide(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if (self.kind == "mha") != (self.num_heads == self.num_kv_heads):
            raise ValueError(f"{self.kind} with {self.num_heads} heads and {self.num_kv_heads} kv heads")
        return self

    @property
    def q_dim(self) -> int:
        """Width of the queries, H*C."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of the keys (and of the values), K*C."""
        return self.num_kv_heads * self.head_dim

    def num_params(self, hidden_dim: int) -> int:
        """Parameters: q, k, v and output projections, biases, query/key norms, sinks."""
        weights = hidden_dim * (2 * self.q_dim + 2 * self.kv_dim)
        biases = self.qkv_bias * (self.q_dim + 2 * self.kv_dim) + self.out_bias * hidden_dim
        norms = {"none": 0, "weightless": 0, "per_head": 2 * self.head_dim, "full": self.q_dim + self.kv_dim}[
            self.qk_norm
        ]
        return weights + biases + norms + self.sinks * self.num_heads


class LatentAttention(Frozen):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434 section 2.1): keys and values from one compressed vector."""

    kind: Literal["mla"] = "mla"
    num_heads: Count
    q_lora_rank: Count | None = None
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count
    bias: bool = False
    window: None = None

    @property
    def num_kv_heads(self) -> int:
        """Keys and values are expanded to one per head for training."""
        return self.num_heads

    @property
    def head_dim(self) -> int:
        """Width of one query or key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def q_dim(self) -> int:
        """Width of the queries, H*C."""
        return self.num_heads * self.head_dim

    def num_params(self, hidden_dim: int) -> int:
        """Parameters: down and up projections of queries and of keys/values, their norms, output projection."""
        rank = self.q_lora_rank
        query = hidden_dim * self.q_dim if rank is None else hidden_dim * rank + rank + rank * self.q_dim
        down = hidden_dim * (self.kv_lora_rank + self.qk_rope_head_dim)
        up = self.kv_lora_rank * self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        out = self.num_heads * self.v_head_dim * hidden_dim
        biases = self.bias * ((rank or 0) + self.kv_lora_rank + self.qk_rope_head_dim + hidden_dim)
        return query + down + self.kv_lora_rank + up + out + biases


Attention = Annotated[SoftmaxAttention | LatentAttention, Field(discriminator="kind")]
