"""Elements one layer keeps for the backward pass, per token, under each recompute choice.

Widths as in schema/model.py. Three kinds of tensors: `whole` ones have their full width on every tensor-parallel rank (the
gathered inputs of column-parallel products), `tp` ones are split by heads or feed-forward width, `tokens` ones are split along
the sequence under sequence parallelism. Source: the tensors our decoder saves, counted with saved_tensors_hooks on unique storages
(tests/unit/runtime/test_saved_tensors.py).

Bytes one layer keeps for the backward pass, and its working set there, under every layout of a batch.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from functools import cache

import numpy as np

from ...schema import ClusterSpec, Workload
from ...schema.arrays import FloatArray
from ...schema.engine_facts import MemoryFacts
from ...schema.layers import Block, DenseMLP, Embedding, Head, LatentAttention, MoE, MTPHead, SoftmaxAttention
from ...schema.layout import Recompute
from ...schema.layout_table import RECOMPUTES, LayoutTable
from ...schema.task import LowRank
from .operators import Layer, layer_operators
from .parallel import token_share
from .parameters import adapted_products


@dataclass(frozen=True)
class SavedElements:
    """Elements per token: on every rank, split over tp, split over tp with sequence parallelism; fp32 ones split and not split.

    ``routed`` ones are whole vectors of the rows that reach a rank's experts.
    """

    whole: float = 0.0
    tp: float = 0.0
    tokens: float = 0.0
    tp_fp32: float = 0.0
    fp32: float = 0.0
    routed: float = 0.0

    def __add__(self, other: SavedElements) -> SavedElements:
        return SavedElements(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: SavedElements) -> SavedElements:
        return SavedElements(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class SavedTensorRules:
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
def saved_elements(layer: Layer, hidden_dim: int, recompute: Recompute, how: SavedTensorRules) -> SavedElements:
    """What ``layer`` keeps per token from its forward to its backward pass (logits are counted apart)."""
    if not isinstance(layer, MTPHead) and (traced := layer.traced) is not None:
        kept = {"none": traced.saved_elements, "selective": traced.selective_elements, "full": traced.full_elements}
        elements = kept[recompute] if isinstance(layer, Block) else traced.saved_elements
        return SavedElements(whole=elements / traced.seq_len)
    if isinstance(layer, Embedding):
        return SavedElements()
    if isinstance(layer, Head):
        read = SavedElements(whole=hidden_dim) if how.engine is None else SavedElements(tokens=hidden_dim)
        return _saved_of_norm(hidden_dim, how) + read
    if isinstance(layer, MTPHead):
        inner = saved_elements(layer.block, hidden_dim, recompute, how)
        return inner + SavedElements(whole=2 * hidden_dim, tokens=2 * hidden_dim)
    if recompute == "full":
        return SavedElements(tokens=hidden_dim)
    if recompute == "selective" and how.every_second and isinstance(layer.attention, SoftmaxAttention):
        return _every_second_product(layer, layer.attention, hidden_dim)
    if how.engine is not None:
        return _engine_block(layer, hidden_dim, recompute, how, how.engine)
    saved = _saved_of_attention(layer.attention, hidden_dim, recompute) + _saved_of_mlp(
        layer.mlp, hidden_dim, recompute
    )
    if recompute == "selective":
        return saved + SavedElements(tokens=hidden_dim)  # the block's input; the norms run again
    if how.score_width:
        saved += SavedElements(
            tp=2 * layer.attention.num_heads * how.score_width
        )  # scores after the mask, and after the softmax
    for _ in range(layer.num_norms):
        saved += _saved_of_norm(hidden_dim, how)
    if how.eager:
        saved += _saved_by_eager_code(layer, hidden_dim, how)
    # What the column-parallel products read: the outputs of the norms before attention and feed-forward, gathered over tp.
    return saved + SavedElements(whole=min(layer.num_norms, 2) * hidden_dim)


@cache
def saved_for_weights(layer: Layer, hidden_dim: int, recompute: Recompute) -> SavedElements:
    """The part of `saved_elements` that only gradients of weights need: inputs of products that nothing else reads."""
    if isinstance(layer, Head):
        return SavedElements(whole=hidden_dim)
    if not isinstance(layer, Block) or recompute == "full":
        return SavedElements()
    if recompute == "selective":
        return SavedElements()  # these inputs are made again
    mlp = layer.mlp
    down = mlp.ffn_dim if isinstance(mlp, DenseMLP) else mlp.top_k * mlp.ffn_dim + (mlp.shared_ffn_dim or 0)
    return SavedElements(tp=down, whole=min(layer.num_norms, 2) * hidden_dim)


def _every_second_product(layer: Block, attention: SoftmaxAttention, hidden_dim: int) -> SavedElements:
    """The block's input, q and v of (q, k, v, out), attention's output, gate and down of (gate, up, down), or up of (up, down).

    Source: torchtitan's per-operator activation checkpointing keeps the first, third, fifth... aten.mm and fused attention.
    """
    mlp = layer.mlp.expert if isinstance(layer.mlp, MoE) else layer.mlp
    rows = layer.mlp.top_k if isinstance(layer.mlp, MoE) else 1
    heads = SavedElements(tp=2 * attention.q_dim + attention.kv_dim, tp_fp32=attention.num_heads)
    return heads + SavedElements(tp=rows * mlp.ffn_dim, tokens=hidden_dim * (2 if mlp.gated else 1))


def _engine_block(
    layer: Block, hidden_dim: int, recompute: Recompute, how: SavedTensorRules, engine: MemoryFacts
) -> SavedElements:
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
    saved += SavedElements(
        tokens=hidden_dim * (layer.num_norms + (0 if drops else min(layer.num_norms, 2) * read)), fp32=2
    )
    if how.dropout:  # two masks of one byte
        saved += SavedElements(tokens=2 * hidden_dim * one_byte)
    if engine.keeps_all_outputs and not drops:
        saved += SavedElements(tokens=4 * hidden_dim)  # of both output projections and both residual additions
    if layer.norm == "rmsnorm" and engine.unfused_rmsnorm and not drops:
        saved += SavedElements(
            tokens=layer.num_norms * hidden_dim * 4 * one_byte
        )  # fp32 copy of the input, normalised input
    if how.score_width and not drops:
        # After the softmax; with dropout its mask and its output besides.
        scores = layer.attention.num_heads * how.score_width
        inputs = 2 if engine.keeps_all_outputs else 0  # before and after the mask
        saved += SavedElements(tp=scores * (inputs + (2 + one_byte if how.dropout else 1)))
    return saved


def _engine_attention(
    attention: SoftmaxAttention | LatentAttention, recompute: Recompute, read: float, engine: MemoryFacts
) -> SavedElements:
    if isinstance(attention, LatentAttention):
        return _compressed(attention) if recompute == "selective" else _saved_of_attention(attention, 0, recompute)
    q, kv = attention.q_dim, attention.kv_dim
    rotated = engine.qkv_copies if attention.rope_fraction else 0
    # Queries, keys, values and output; in fp8 what the output projection reads is a copy.
    kept = 2 * q + 2 * kv + (q * read if read < 1 else 0.0)
    packed = rotated * (q + kv) + (engine.kv_copies if attention.rope_fraction else 0) * 2 * kv
    return SavedElements(tp=kept + packed, tp_fp32=attention.num_heads)


def _compressed(attention: LatentAttention) -> SavedElements:
    """Megatron's recompute module mla_up_proj: queries, keys and values are made again from the compressed vectors."""
    low_rank = (attention.q_lora_rank or 0) + attention.kv_lora_rank + attention.qk_rope_head_dim
    output = attention.num_heads * attention.v_head_dim
    return SavedElements(tp=output, whole=2 * low_rank, tp_fp32=attention.num_heads)


def _engine_mlp(
    mlp: DenseMLP | MoE, hidden_dim: int, read: float, engine: MemoryFacts, *, drops: bool
) -> SavedElements:
    if isinstance(mlp, DenseMLP):
        before = (engine.glu_tensors - 1 if mlp.gated else 1) * mlp.ffn_dim
        return SavedElements(tp=before + (0.0 if drops else read * mlp.ffn_dim))
    routed = _engine_mlp(mlp.expert, hidden_dim, read, engine, drops=drops)
    rows = SavedElements(
        tp=mlp.top_k * routed.tp,
        tokens=2 * mlp.num_experts,
        routed=mlp.top_k * (read + engine.keeps_expert_output) * hidden_dim,
    )
    return rows + (_engine_mlp(mlp.shared, hidden_dim, read, engine, drops=drops) if mlp.shared else SavedElements())


def _saved_by_eager_code(layer: Block, hidden_dim: int, how: SavedTensorRules) -> SavedElements:
    """What plain model code keeps besides: norms' inputs in fp32 (and normalised ones), q and k before they are rotated, keys and
    values repeated for every query head, silu(gate).
    """
    extra = SavedElements()
    if layer.norm == "rmsnorm":
        copies = (4 if how.frozen else 8) / how.compute_bytes - 1
        extra += SavedElements(tokens=layer.num_norms * copies * hidden_dim)
    attention, mlp = layer.attention, layer.mlp
    if isinstance(attention, SoftmaxAttention):
        before_rotation = attention.q_dim + attention.kv_dim if attention.rope_fraction > 0 else 0
        extra += SavedElements(tp=before_rotation + 2 * (attention.q_dim - attention.kv_dim))
    rows = 1 if isinstance(mlp, DenseMLP) else mlp.top_k
    return extra + SavedElements(tp=rows * mlp.ffn_dim if mlp.gated else 0)


def _saved_of_norm(width: int, how: SavedTensorRules) -> SavedElements:
    """Input, 1 / rms of each token, and where the norm is not one kernel its normalised input in fp32 besides."""
    unfused = width * (8 - how.compute_bytes) / how.compute_bytes if how.unfused_norm else 0.0
    return SavedElements(tokens=width + unfused, fp32=1)


def _saved_of_attention(
    attention: SoftmaxAttention | LatentAttention, hidden_dim: int, recompute: Recompute
) -> SavedElements:
    log_sum_exp = attention.num_heads
    if isinstance(attention, LatentAttention):
        v = attention.num_heads * attention.v_head_dim
        low_rank = (attention.q_lora_rank or 0) + attention.kv_lora_rank + attention.qk_rope_head_dim
        # q and k at their full width, v, output; the compressed vectors before and after their norms.
        return SavedElements(tp=2 * attention.q_dim + 2 * v, whole=2 * low_rank, tp_fp32=log_sum_exp)
    q, kv = attention.q_dim, attention.kv_dim
    qkv_and_output = SavedElements(tp=2 * q + 2 * kv, tp_fp32=log_sum_exp)
    if recompute == "selective":
        return qkv_and_output + SavedElements(whole=hidden_dim)  # and the product with the output projection
    normed = q + kv if attention.qk_norm != "none" else 0
    return qkv_and_output + SavedElements(tp=normed)


def _saved_of_mlp(mlp: DenseMLP | MoE, hidden_dim: int, recompute: Recompute) -> SavedElements:
    if isinstance(mlp, DenseMLP):
        return _saved_of_dense(mlp, recompute)
    routed = _saved_of_dense(mlp.expert, recompute)
    rows = SavedElements(
        tp=mlp.top_k * routed.tp,
        whole=2 * mlp.num_experts,
        # What the experts read and put out; selective recompute sorts the rows again.
        routed=mlp.top_k * (1 if recompute == "selective" else 2) * hidden_dim,
    )
    return rows + (_saved_of_dense(mlp.shared, recompute) if mlp.shared else SavedElements())


def _saved_of_dense(mlp: DenseMLP, recompute: Recompute) -> SavedElements:
    # Gated: gate, up and silu(gate) * up; else before and after the activation. Selective does without the last one.
    if recompute == "selective":
        return SavedElements(tp=(2 if mlp.gated else 1) * mlp.ffn_dim)
    return SavedElements(tp=(3 if mlp.gated else 2) * mlp.ffn_dim)


def activation_bytes(
    layer: Layer, hidden_dim: int, batch: LayoutTable, workload: Workload, cluster: ClusterSpec
) -> tuple[FloatArray, FloatArray]:
    """Bytes kept from forward to backward under each layout's recompute, and the working set of the backward pass."""
    how = SavedTensorRules(
        compute_bytes=workload.compute_bytes,
        unfused_norm=cluster.weakest_device.backend.is_host,
        score_width=workload.seq_len if workload.attention == "math" else 0,
        engine=workload.engine_facts.memory,
        every_second=workload.selective == "alternate_products",
        saves_fp8=workload.precision in ("fp8", "nvfp4") and workload.engine_facts.saves_fp8_inputs,
        eager=workload.fusion == "eager",
        frozen=workload.adapters is not None,
        dropout=workload.dropout,
        fp8_activation_input=workload.fp8_activation_input,
    )
    choices = [_elements_under_recompute(layer, hidden_dim, recompute, how, workload) for recompute in RECOMPUTES]
    if workload.engine_facts.is_eager_like_megatron and workload.attention == "math":
        # Selective drops what lies between query, key, value and the output of attention, and nothing else.
        choices[RECOMPUTES.index("selective")] = _elements_under_recompute(
            layer, hidden_dim, "none", replace(how, score_width=0), workload
        )
    kept = np.stack([_saved_bytes(saved, batch, workload) for saved in choices])
    chosen = np.take_along_axis(kept, batch.recompute[None, :], axis=0)[0]
    mean = batch.recompute_fraction * chosen + (1 - batch.recompute_fraction) * kept[0]
    # While one layer runs backward, what it had dropped is there again, and gradients of its widest tensors beside it.
    gradients = 0.5 * kept[0]
    if how.engine is not None and how.score_width:
        # Each gradient of the scores takes the place of a saved tensor that has been used.
        fused = _elements_under_recompute(layer, hidden_dim, "none", replace(how, score_width=0), workload)
        gradients = 0.5 * _saved_bytes(fused, batch, workload)
    return mean, kept[0] - chosen + gradients


def _elements_under_recompute(
    layer: Layer, hidden_dim: int, recompute: Recompute, how: SavedTensorRules, workload: Workload
) -> SavedElements:
    """What a layer keeps; a frozen one without what only gradients of weights read, but with what its adapters keep."""
    saved = saved_elements(layer, hidden_dim, recompute, how)
    if workload.adapters is None:
        return saved
    if workload.adapters.frozen != "nf4":  # its product keeps its input all the same
        saved -= saved_for_weights(layer, hidden_dim, recompute)
    return saved if recompute == "full" else saved + saved_by_adapters(layer, hidden_dim, workload.adapters)


def _saved_bytes(saved: SavedElements, batch: LayoutTable, workload: Workload) -> FloatArray:
    tokens = batch.tokens(workload.seq_len)
    along_sequence = np.where(batch.sequence_parallel == 1, batch.tp, 1)
    whole = saved.whole + saved.routed * token_share(batch, workload)
    elements = whole + saved.tp / batch.tp + saved.tokens / along_sequence
    fp32 = saved.tp_fp32 / batch.tp + saved.fp32 / along_sequence
    return np.asarray(tokens * (workload.compute_bytes * elements + 4 * fp32), dtype=np.float64)


@cache
def saved_by_adapters(layer: Layer, hidden_dim: int, adapters: LowRank) -> SavedElements:
    """What the adapters of a layer keep per token: the input after dropout with its mask, and the product with A."""
    saved = SavedElements()
    for op in adapted_products(layer_operators(layer, hidden_dim, 1), adapters):
        width = op.rows_per_token * op.k * (1.5 if adapters.dropout else 0.0)
        rank = op.rows_per_token * adapters.rank
        saved += SavedElements(whole=width + rank) if op.shard == "column" else SavedElements(tp=width, whole=rank)
    return saved
