"""Elements one layer keeps for the backward pass, per token, under each recompute choice.

Widths as in schema/model.py. Three kinds of tensors: `whole` ones have their full width on every tensor-parallel rank (the
gathered inputs of column-parallel products), `tp` ones are split by heads or feed-forward width, `tokens` ones are split along
the sequence under sequence parallelism. Source: the tensors our decoder saves, counted with saved_tensors_hooks on unique storages
(tests/unit/runtime/test_saved_activations.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ..schema.layout import Recompute
from ..schema.model import Block, DenseMLP, Embedding, Head, LatentAttention, MoE, MTPHead, SoftmaxAttention
from .operators import Layer


@dataclass(frozen=True)
class Saved:
    """Elements per token: on every rank, split over tp, split over tp with sequence parallelism; fp32 values per token."""

    whole: float = 0.0
    tp: float = 0.0
    tokens: float = 0.0
    tp_fp32: float = 0.0

    def __add__(self, other: Saved) -> Saved:
        return Saved(
            self.whole + other.whole, self.tp + other.tp, self.tokens + other.tokens, self.tp_fp32 + other.tp_fp32
        )


@cache
def saved_elements(layer: Layer, hidden_dim: int, seq_len: int, recompute: Recompute, attention_math: bool) -> Saved:
    """What ``layer`` keeps per token from its forward to its backward pass (logits are counted apart)."""
    if isinstance(layer, Embedding):
        return Saved()
    if isinstance(layer, Head):
        return Saved(whole=hidden_dim, tokens=hidden_dim)  # input of the final norm, input of the projection
    if isinstance(layer, MTPHead):
        inner = saved_elements(layer.block, hidden_dim, seq_len, recompute, attention_math)
        return inner + Saved(whole=2 * hidden_dim, tokens=2 * hidden_dim)
    if recompute == "full":
        return Saved(tokens=hidden_dim)
    saved = _attention(layer.attention, hidden_dim, recompute) + _mlp(layer.mlp, hidden_dim, recompute)
    if attention_math and recompute == "none":
        saved += Saved(tp=2 * layer.attention.num_heads * seq_len)  # scores after the mask, and after the softmax
    if recompute == "selective":
        return saved + Saved(tokens=hidden_dim)  # the block's input; the norms run again
    return saved + _norms(layer, hidden_dim)


def _norms(block: Block, hidden_dim: int) -> Saved:
    # Each norm keeps its input (residual stream) and its output, which column-parallel products gather.
    inputs = 2 if block.num_norms == 4 else block.num_norms
    extra = 2 * hidden_dim if block.num_norms == 4 else 0  # post-norms keep what they normalise
    return Saved(tokens=inputs * hidden_dim + extra, whole=inputs * hidden_dim)


def _attention(attention: SoftmaxAttention | LatentAttention, hidden_dim: int, recompute: Recompute) -> Saved:
    log_sum_exp = attention.num_heads
    if isinstance(attention, LatentAttention):
        v = attention.num_heads * attention.v_head_dim
        low_rank = (attention.q_lora_rank or 0) + attention.kv_lora_rank + attention.qk_rope_head_dim
        # q and k at their full width, v, output; the compressed vectors before and after their norms.
        return Saved(tp=2 * attention.q_dim + 2 * v, whole=2 * low_rank, tp_fp32=log_sum_exp)
    q, kv = attention.q_dim, attention.kv_dim
    qkv_and_output = Saved(tp=2 * q + 2 * kv, tp_fp32=log_sum_exp)
    if recompute == "selective":
        return qkv_and_output + Saved(whole=hidden_dim)  # and the product with the output projection
    normed = q + kv if attention.qk_norm != "none" else 0
    return qkv_and_output + Saved(tp=normed)


def _mlp(mlp: DenseMLP | MoE, hidden_dim: int, recompute: Recompute) -> Saved:
    if isinstance(mlp, DenseMLP):
        return _dense(mlp, recompute)
    routed = _dense(mlp.expert, recompute)
    rows = Saved(tp=mlp.top_k * routed.tp, whole=mlp.top_k * (2 * hidden_dim) + 2 * mlp.num_experts)
    return rows + (_dense(mlp.shared, recompute) if mlp.shared else Saved())


def _dense(mlp: DenseMLP, recompute: Recompute) -> Saved:
    # Gated: gate, up, silu(gate), product; else: before and after the activation. Selective keeps the products with weights.
    if recompute == "selective":
        return Saved(tp=(2 if mlp.gated else 1) * mlp.ffn_dim)
    return Saved(tp=(4 if mlp.gated else 2) * mlp.ffn_dim)
