"""Elements one layer keeps for the backward pass, per token, under each recompute choice.

Widths as in schema/model.py. Three kinds of tensors: `whole` ones have their full width on every tensor-parallel rank (the
gathered inputs of column-parallel products), `tp` ones are split by heads or feed-forward width, `tokens` ones are split along
the sequence under sequence parallelism. Source: the tensors our decoder saves, counted with saved_tensors_hooks on unique storages
(tests/unit/runtime/test_saved_tensors.py).
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import cache

from ..schema.layout import Recompute
from ..schema.model import DenseMLP, Embedding, Head, LatentAttention, MoE, MTPHead, SoftmaxAttention
from .operators import Layer


@dataclass(frozen=True)
class Saved:
    """Elements per token: on every rank, split over tp, split over tp with sequence parallelism; fp32 ones split and not split.

    ``routed`` ones are whole vectors of the rows that reach a rank's experts.
    """

    whole: float = 0.0
    tp: float = 0.0
    tokens: float = 0.0
    tp_fp32: float = 0.0
    fp32: float = 0.0
    routed: float = 0.0

    def __add__(self, other: Saved) -> Saved:
        return Saved(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Kernels:
    """What the saved tensors depend on besides the layer.

    Attributes:
        compute_bytes: of one element.
        unfused_norm: RMSNorm is several kernels (torch on a CPU).
        score_width: tokens in a row of an attention score matrix that is kept; 0 for fused attention.
        keeps_expert_output: experts' results are weighted by themselves, which needs them again for the gradient of the weights.
            Megatron weights inside the activation instead.
    """

    compute_bytes: int
    unfused_norm: bool
    score_width: int
    keeps_expert_output: bool = True


@cache
def saved_elements(layer: Layer, hidden_dim: int, recompute: Recompute, how: Kernels) -> Saved:
    """What ``layer`` keeps per token from its forward to its backward pass (logits are counted apart)."""
    if isinstance(layer, Embedding):
        return Saved()
    if isinstance(layer, Head):
        return _norm(hidden_dim, how) + Saved(whole=hidden_dim)
    if isinstance(layer, MTPHead):
        inner = saved_elements(layer.block, hidden_dim, recompute, how)
        return inner + Saved(whole=2 * hidden_dim, tokens=2 * hidden_dim)
    if recompute == "full":
        return Saved(tokens=hidden_dim)
    saved = _attention(layer.attention, hidden_dim, recompute) + _mlp(layer.mlp, hidden_dim, recompute, how)
    if recompute == "selective":
        return saved + Saved(tokens=hidden_dim)  # the block's input; the norms run again
    if how.score_width:
        saved += Saved(
            tp=2 * layer.attention.num_heads * how.score_width
        )  # scores after the mask, and after the softmax
    for _ in range(layer.num_norms):
        saved += _norm(hidden_dim, how)
    # What the column-parallel products read: the outputs of the norms before attention and feed-forward, gathered over tp.
    return saved + Saved(whole=min(layer.num_norms, 2) * hidden_dim)


def _norm(width: int, how: Kernels) -> Saved:
    """Input, 1 / rms of each token, and where the norm is not one kernel its normalised input in fp32 besides."""
    unfused = width * (8 - how.compute_bytes) / how.compute_bytes if how.unfused_norm else 0.0
    return Saved(tokens=width + unfused, fp32=1)


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


def _mlp(mlp: DenseMLP | MoE, hidden_dim: int, recompute: Recompute, how: Kernels) -> Saved:
    if isinstance(mlp, DenseMLP):
        return _dense(mlp, recompute)
    routed = _dense(mlp.expert, recompute)
    rows = Saved(
        tp=mlp.top_k * routed.tp,
        whole=2 * mlp.num_experts,
        routed=mlp.top_k * (1 + how.keeps_expert_output) * hidden_dim,
    )
    return rows + (_dense(mlp.shared, recompute) if mlp.shared else Saved())


def _dense(mlp: DenseMLP, recompute: Recompute) -> Saved:
    # Gated: gate, up and silu(gate) * up; else before and after the activation. Selective does without the last one.
    if recompute == "selective":
        return Saved(tp=(2 if mlp.gated else 1) * mlp.ffn_dim)
    return Saved(tp=(3 if mlp.gated else 2) * mlp.ffn_dim)
