"""Elements one layer keeps for the backward pass, per token, under each recompute choice.

Widths as in schema/model.py. Three kinds of tensors: `whole` ones have their full width on every tensor-parallel rank (the
gathered inputs of column-parallel products), `tp` ones are split by heads or feed-forward width, `tokens` ones are split along
the sequence under sequence parallelism. Source: the tensors our decoder saves, counted with saved_tensors_hooks on unique storages
(tests/unit/runtime/test_saved_tensors.py).
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from functools import cache

from ..schema.layout import Recompute
from ..schema.model import Block, DenseMLP, Embedding, Head, LatentAttention, MoE, MTPHead, SoftmaxAttention
from .engine_memory import MemoryFacts
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

    def __sub__(self, other: Saved) -> Saved:
        return Saved(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Kernels:
    """What the saved tensors depend on besides the layer.

    Attributes:
        compute_bytes: of one element.
        unfused_norm: RMSNorm is several kernels (torch on a CPU).
        score_width: tokens in a row of an attention score matrix that is kept; 0 for fused attention.
        engine: whose kernels; None is our own runtime.
        every_second: selective recompute keeps every second product's output only.
        saves_fp8: what the products read is kept in fp8 (Transformer Engine).
        eager: every operation is a kernel of its own that keeps its inputs (plain model code, LitGPT's or transformers').
        frozen: the weights of norms need no gradients, so that normalised inputs are not kept.
        fp8_activation_input: what a gated activation reads is kept in fp8.
        dropout: hidden states and attention probabilities pass a dropout, which keeps a mask and its output.
    """

    compute_bytes: int
    unfused_norm: bool
    score_width: int
    engine: MemoryFacts | None = None
    saves_fp8: bool = False
    every_second: bool = False
    eager: bool = False
    frozen: bool = False
    dropout: bool = False
    fp8_activation_input: bool = False


@cache
def saved_elements(layer: Layer, hidden_dim: int, recompute: Recompute, how: Kernels) -> Saved:
    """What ``layer`` keeps per token from its forward to its backward pass (logits are counted apart)."""
    if not isinstance(layer, MTPHead) and (traced := layer.traced) is not None:
        kept = {"none": traced.saved_elements, "selective": traced.selective_elements, "full": traced.full_elements}
        elements = kept[recompute] if isinstance(layer, Block) else traced.saved_elements
        return Saved(whole=elements / traced.seq_len)
    if isinstance(layer, Embedding):
        return Saved()
    if isinstance(layer, Head):
        read = Saved(whole=hidden_dim) if how.engine is None else Saved(tokens=hidden_dim)
        return _norm(hidden_dim, how) + read
    if isinstance(layer, MTPHead):
        inner = saved_elements(layer.block, hidden_dim, recompute, how)
        return inner + Saved(whole=2 * hidden_dim, tokens=2 * hidden_dim)
    if recompute == "full":
        return Saved(tokens=hidden_dim)
    if recompute == "selective" and how.every_second and isinstance(layer.attention, SoftmaxAttention):
        return _every_second_product(layer, layer.attention, hidden_dim)
    if how.engine is not None:
        return _engine_block(layer, hidden_dim, recompute, how, how.engine)
    saved = _attention(layer.attention, hidden_dim, recompute) + _mlp(layer.mlp, hidden_dim, recompute)
    if recompute == "selective":
        return saved + Saved(tokens=hidden_dim)  # the block's input; the norms run again
    if how.score_width:
        saved += Saved(
            tp=2 * layer.attention.num_heads * how.score_width
        )  # scores after the mask, and after the softmax
    for _ in range(layer.num_norms):
        saved += _norm(hidden_dim, how)
    if how.eager:
        saved += _eager(layer, hidden_dim, how)
    # What the column-parallel products read: the outputs of the norms before attention and feed-forward, gathered over tp.
    return saved + Saved(whole=min(layer.num_norms, 2) * hidden_dim)


@cache
def saved_for_weights(layer: Layer, hidden_dim: int, recompute: Recompute) -> Saved:
    """The part of `saved_elements` that only gradients of weights need: inputs of products that nothing else reads."""
    if isinstance(layer, Head):
        return Saved(whole=hidden_dim)
    if not isinstance(layer, Block) or recompute == "full":
        return Saved()
    if recompute == "selective":
        return Saved()  # these inputs are made again
    mlp = layer.mlp
    down = mlp.ffn_dim if isinstance(mlp, DenseMLP) else mlp.top_k * mlp.ffn_dim + (mlp.shared_ffn_dim or 0)
    return Saved(tp=down, whole=min(layer.num_norms, 2) * hidden_dim)


def _every_second_product(layer: Block, attention: SoftmaxAttention, hidden_dim: int) -> Saved:
    """The block's input, q and v of (q, k, v, out), attention's output, gate and down of (gate, up, down), or up of (up, down).

    Source: torchtitan's per-operator activation checkpointing keeps the first, third, fifth... aten.mm and fused attention.
    """
    mlp = layer.mlp.expert if isinstance(layer.mlp, MoE) else layer.mlp
    rows = layer.mlp.top_k if isinstance(layer.mlp, MoE) else 1
    heads = Saved(tp=2 * attention.q_dim + attention.kv_dim, tp_fp32=attention.num_heads)
    return heads + Saved(tp=rows * mlp.ffn_dim, tokens=hidden_dim * (2 if mlp.gated else 1))


def _engine_block(layer: Block, hidden_dim: int, recompute: Recompute, how: Kernels, engine: MemoryFacts) -> Saved:
    """A block of another engine: 34 s b h bytes for a GPT in fp16 without its scores (arXiv:2205.05198 section 4.1).

    Every rank keeps its share of the sequence only, and gathers what column-parallel products read again in the backward pass.
    Selective recompute does without scores, norms' outputs and the activation's output.
    """
    drops = recompute == "selective"
    read = 0.5 if how.saves_fp8 else 1.0
    one_byte = 1.0 / how.compute_bytes
    saved = _engine_attention(layer.attention, recompute, read, engine)
    if how.fp8_activation_input:
        engine = replace(engine, glu_tensors=1 + (engine.glu_tensors - 1) * one_byte)
    saved += _engine_mlp(layer.mlp, hidden_dim, read, engine, drops=drops)
    saved += Saved(tokens=hidden_dim * (layer.num_norms + (0 if drops else min(layer.num_norms, 2) * read)), fp32=2)
    if how.dropout:  # two masks of one byte
        saved += Saved(tokens=2 * hidden_dim * one_byte)
    if engine.keeps_all_outputs and not drops:
        saved += Saved(tokens=4 * hidden_dim)  # of both output projections and both residual additions
    if layer.norm == "rmsnorm" and engine.unfused_rmsnorm and not drops:
        saved += Saved(tokens=layer.num_norms * hidden_dim * 4 * one_byte)  # fp32 copy of the input, normalised input
    if how.score_width and not drops:
        # After the softmax; with dropout its mask and its output besides.
        scores = layer.attention.num_heads * how.score_width
        inputs = 2 if engine.keeps_all_outputs else 0  # before and after the mask
        saved += Saved(tp=scores * (inputs + (2 + one_byte if how.dropout else 1)))
    return saved


def _engine_attention(
    attention: SoftmaxAttention | LatentAttention, recompute: Recompute, read: float, engine: MemoryFacts
) -> Saved:
    if isinstance(attention, LatentAttention):
        return _compressed(attention) if recompute == "selective" else _attention(attention, 0, recompute)
    q, kv = attention.q_dim, attention.kv_dim
    rotated = engine.qkv_copies if attention.rope_fraction else 0
    # Queries, keys, values and output; in fp8 what the output projection reads is a copy.
    kept = 2 * q + 2 * kv + (q * read if read < 1 else 0.0)
    packed = rotated * (q + kv) + (engine.kv_copies if attention.rope_fraction else 0) * 2 * kv
    return Saved(tp=kept + packed, tp_fp32=attention.num_heads)


def _compressed(attention: LatentAttention) -> Saved:
    """Megatron's recompute module mla_up_proj: queries, keys and values are made again from the compressed vectors."""
    low_rank = (attention.q_lora_rank or 0) + attention.kv_lora_rank + attention.qk_rope_head_dim
    output = attention.num_heads * attention.v_head_dim
    return Saved(tp=output, whole=2 * low_rank, tp_fp32=attention.num_heads)


def _engine_mlp(mlp: DenseMLP | MoE, hidden_dim: int, read: float, engine: MemoryFacts, *, drops: bool) -> Saved:
    if isinstance(mlp, DenseMLP):
        before = (engine.glu_tensors - 1 if mlp.gated else 1) * mlp.ffn_dim
        return Saved(tp=before + (0.0 if drops else read * mlp.ffn_dim))
    routed = _engine_mlp(mlp.expert, hidden_dim, read, engine, drops=drops)
    rows = Saved(
        tp=mlp.top_k * routed.tp,
        tokens=2 * mlp.num_experts,
        routed=mlp.top_k * (read + engine.keeps_expert_output) * hidden_dim,
    )
    return rows + (_engine_mlp(mlp.shared, hidden_dim, read, engine, drops=drops) if mlp.shared else Saved())


def _eager(layer: Block, hidden_dim: int, how: Kernels) -> Saved:
    """What plain model code keeps besides: norms' inputs in fp32 (and normalised ones), q and k before they are rotated, keys and
    values repeated for every query head, silu(gate).
    """
    extra = Saved()
    if layer.norm == "rmsnorm":
        copies = (4 if how.frozen else 8) / how.compute_bytes - 1
        extra += Saved(tokens=layer.num_norms * copies * hidden_dim)
    attention, mlp = layer.attention, layer.mlp
    if isinstance(attention, SoftmaxAttention):
        before_rotation = attention.q_dim + attention.kv_dim if attention.rope_fraction > 0 else 0
        extra += Saved(tp=before_rotation + 2 * (attention.q_dim - attention.kv_dim))
    rows = 1 if isinstance(mlp, DenseMLP) else mlp.top_k
    return extra + Saved(tp=rows * mlp.ffn_dim if mlp.gated else 0)


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


def _mlp(mlp: DenseMLP | MoE, hidden_dim: int, recompute: Recompute) -> Saved:
    if isinstance(mlp, DenseMLP):
        return _dense(mlp, recompute)
    routed = _dense(mlp.expert, recompute)
    rows = Saved(
        tp=mlp.top_k * routed.tp,
        whole=2 * mlp.num_experts,
        # What the experts read and put out; selective recompute sorts the rows again.
        routed=mlp.top_k * (1 if recompute == "selective" else 2) * hidden_dim,
    )
    return rows + (_dense(mlp.shared, recompute) if mlp.shared else Saved())


def _dense(mlp: DenseMLP, recompute: Recompute) -> Saved:
    # Gated: gate, up and silu(gate) * up; else before and after the activation. Selective does without the last one.
    if recompute == "selective":
        return Saved(tp=(2 if mlp.gated else 1) * mlp.ffn_dim)
    return Saved(tp=(3 if mlp.gated else 2) * mlp.ffn_dim)
