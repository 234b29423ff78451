"""What one layer holds on one rank: parameters, trained and frozen, low-rank adapters, and what it saves for its backward pass.

A frozen product W [n, k] has a forward and a dgrad but no wgrad, and its input need not be saved. Next to a target stand
A [r, k] and B [n, r]: the adapter's input x [T, k] passes a dropout, h = A x, y += s B h. A is unsharded and B cut along a
column-parallel product, A cut along a row-parallel one (arXiv:2106.09685); saved: x after dropout and its mask (one byte an
element), h. Weights stored as nf4 are written out in 16 bits before each use (arXiv:2305.14314).

Saved elements are per token. Source: the tensors our decoder saves, counted with saved_tensors_hooks
(tests/unit/runtime/test_saved_tensors.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from functools import cache, singledispatch

import numpy as np

from ...schema import Workload
from ...schema.engine_facts import MemoryFacts
from ...schema.layers import (
    Attention,
    Block,
    DenseMLP,
    Embedding,
    Head,
    LatentAttention,
    MoE,
    MTPHead,
    NoMixer,
    SoftmaxAttention,
)
from ...schema.layout import Recompute
from ...schema.layout_table import RECOMPUTES, LayoutTable
from ...schema.task import LowRank
from ...schema.units import FloatArray
from .adapters import adapter_operators, adapter_params
from .operators import CORE_ATTENTION, CostInputs, Gemm, Layer, Operator, OperatorRules, layer_operators
from .parallel import expert_params, stored_share


def tp_params(layer: Layer, hidden_dim: int, layouts: LayoutTable) -> FloatArray:
    """Return the parameters of one rank's tensor-parallel share [N]: products split, norms and routers unsharded."""
    total = layer.num_params(hidden_dim)
    if layer.counted is not None:
        return _traced_params(layer, hidden_dim, layouts)
    if isinstance(layer, Head):
        # A tied projection is the embedding's weight; under a pipeline the last stage holds a copy of its own.
        copies = np.where(layouts.pp > 1, 1, 0) if layer.tied else np.ones_like(layouts.tp)
        split = layer.vocab_size * hidden_dim
        norm_and_bias = total - (0 if layer.tied else split)
        return np.asarray(norm_and_bias + copies * split / layouts.tp, dtype=np.float64)
    products = [op for op in _operators(layer, hidden_dim) if isinstance(op, Gemm)]
    split = sum(op.num_params for op in products if op.shard in ("column", "row"))
    if isinstance(layer, Embedding):
        split = layer.vocab_size * hidden_dim
    if isinstance(layer, Block) and isinstance(attention := layer.attention, SoftmaxAttention):
        split += (attention.q_dim + attention.kv_dim) * (attention.qk_norm == "full")
    moe = layer.experts
    in_experts = moe.num_experts * moe.expert.num_params(hidden_dim) if moe else 0
    following = total - split + split / layouts.tp
    dense_split = split - sum(op.num_params for op in products if op.routed)
    own_axes = total - in_experts - dense_split + dense_split / layouts.tp + expert_params(layer, hidden_dim, layouts)
    return np.asarray(np.where(layouts.experts_follow_tp, following, own_axes), dtype=np.float64)


def _traced_params(layer: Layer, hidden_dim: int, layouts: LayoutTable) -> FloatArray:
    """Return those of a layer traced from code: what its rules split; a tied head is whole, and a copy under a pipeline."""
    traced = layer.counted
    assert traced is not None
    split = 0 if traced.split is None else traced.split.num_params
    copies = np.where(layouts.pp > 1, layer.vocab_size * hidden_dim, 0) if isinstance(layer, Head) and layer.tied else 0
    if isinstance(layer, Head):  # left whole where tp does not divide it
        return np.asarray(
            traced.num_params + copies - np.where(layer.vocab_size % layouts.tp, 0, split * (1 - 1 / layouts.tp))
        )
    return np.asarray(traced.num_params - split + split / layouts.tp, dtype=np.float64)


def _operators(layer: Layer, hidden_dim: int) -> tuple[Operator, ...]:
    return layer_operators(layer, OperatorRules(hidden_dim=hidden_dim))


def trained_and_frozen(layer: Layer, num_params: FloatArray, inputs: CostInputs) -> tuple[FloatArray, FloatArray]:
    """Return trained parameters of one rank's tensor-parallel share, all or those of adapters, and bytes of frozen ones [N].

    Products of blocks are frozen as the adapters say, everything else in 16 bits.
    """
    adapters = inputs.workload.adapters
    if adapters is None:
        return num_params, np.zeros(len(num_params))
    unsharded, cut = adapter_params(layer, inputs.hidden_dim, adapters)
    is_quantised = layer.is_block or (layer.is_head and adapters.frozen == "nf4")
    trained = np.asarray(unsharded + cut / inputs.layouts.tp, dtype=np.float64)
    return trained, num_params * (adapters.frozen_bytes if is_quantised else 2.0)


# Saved tensors


@dataclass(frozen=True)
class SavedElements:
    """Elements per token that one layer saves.

    Attributes:
        unsharded: of their full width on every tensor-parallel rank (the gathered inputs of column-parallel products).
        tp, tp_fp32: split by heads or feed-forward width.
        tokens, fp32: split along the sequence under sequence parallelism.
        routed: unsharded vectors of the rows that reach a rank's experts.
        exchanged: split by heads, and only where cp exchanges tokens for them.
        apart: as routed, and only where what experts read is gathered by itself: over ranks of their own, or along the sequence.
    """

    unsharded: float = 0.0
    tp: float = 0.0
    tokens: float = 0.0
    tp_fp32: float = 0.0
    fp32: float = 0.0
    routed: float = 0.0
    exchanged: float = 0.0
    apart: float = 0.0

    def __add__(self, other: SavedElements) -> SavedElements:
        return SavedElements(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: SavedElements) -> SavedElements:
        return SavedElements(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class SavedTensorRules:
    """What the saved tensors depend on besides the layer: the workload, whose engine's kernels run it, and two facts.

    Attributes:
        unfused_norm: RMSNorm is several kernels (torch on a CPU).
        stores_scores: the scores of attention are a matrix that is saved, of the sequence's tokens in each row.
    """

    workload: Workload
    unfused_norm: bool = False
    stores_scores: bool = False


def activation_bytes(layer: Layer, inputs: CostInputs) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the bytes saved from forward to backward under each layout's recompute, what is made again for the backward pass, and
    about what gradients of the widest tensors take in it.
    """
    workload, layouts = inputs.workload, inputs.layouts
    on_device = inputs.cluster.weakest_device.backend
    fused = SavedTensorRules(workload, unfused_norm=not on_device.fuses_norms)
    rules = replace(fused, stores_scores=workload.attention == "math")
    choices = [_elements_under_recompute(layer, recompute, rules, inputs) for recompute in RECOMPUTES]
    is_core = not workload.recompute_modules and workload.attention == "math"
    if workload.engine_facts.is_eager_like_megatron and is_core:
        # Selective drops what lies between query, key, value and the output of attention, and nothing else.
        choices[RECOMPUTES.index("selective")] = _elements_under_recompute(layer, "none", fused, inputs)
    saved = np.stack([bytes_of(elements, inputs) for elements in choices])
    selected = np.take_along_axis(saved, layouts.recompute[None, :], axis=0)[0]
    others = saved[0]
    if workload.engine_facts.recomputes_cores_first:
        cores = saved[RECOMPUTES.index("selective")]
        others = np.where(layouts.recompute == RECOMPUTES.index("full"), cores, others)
    mean = layouts.recompute_fraction * selected + (1 - layouts.recompute_fraction) * others
    gradients = 0.5 * saved[0]
    if workload.engine_facts.memory is not None and rules.stores_scores:
        # Each gradient of the scores takes the place of a saved tensor that has been used.
        gradients = 0.5 * bytes_of(_elements_under_recompute(layer, "none", fused, inputs), inputs)
    return mean, saved[0] - selected, gradients


def _elements_under_recompute(
    layer: Layer, recompute: Recompute, rules: SavedTensorRules, inputs: CostInputs
) -> SavedElements:
    """Return what a layer saves; a frozen one without what only gradients of weights read, but with what its adapters save."""
    adapters = inputs.workload.adapters
    saved = saved_elements(layer, inputs.hidden_dim, recompute, rules)
    if adapters is None:
        return saved
    if adapters.frozen != "nf4":  # its product saves its input all the same
        saved -= _saved_for_weights(layer, inputs.hidden_dim, recompute)
    return saved if recompute == "full" else saved + _saved_by_adapters(layer, inputs.hidden_dim, adapters)


def bytes_of(saved: SavedElements, inputs: CostInputs) -> FloatArray:
    """Return the bytes of a micro-batch's tensors on one rank [N]."""
    layouts, workload = inputs.layouts, inputs.workload
    along_sequence = np.where(layouts.sequence_parallel == 1, layouts.tp, 1)
    # Our runtime gathers for each of them, also where experts follow tp.
    gathers_twice = (layouts.tp > 1) & (layouts.sequence_parallel == 1) & workload.engine_facts.is_own_runtime
    is_apart = np.where(layouts.experts_follow_tp, gathers_twice, layouts.expert_tp > 1)
    unsharded = saved.unsharded + (saved.routed + is_apart * saved.apart) * stored_share(layouts, workload)
    of_heads = saved.tp + np.where(layouts.cp_ulysses > 1, saved.exchanged, 0.0)
    elements = unsharded + of_heads / layouts.tp + saved.tokens / along_sequence
    fp32 = saved.tp_fp32 / layouts.tp + saved.fp32 / along_sequence
    return np.asarray(inputs.tokens * (workload.compute_bytes * elements + 4 * fp32), dtype=np.float64)


@cache
def _saved_by_adapters(layer: Layer, hidden_dim: int, adapters: LowRank) -> SavedElements:
    """Return what the adapters of a layer save per token: the input after dropout with its mask, and the product with A."""
    saved = SavedElements()
    for op in _operators(layer, hidden_dim):
        if isinstance(op, Gemm) and adapter_operators(op, adapters):
            width = op.rows_per_token * op.k * (1.5 if adapters.dropout else 0.0)
            rank = op.rows_per_token * adapters.rank
            is_column = op.shard == "column"
            saved += SavedElements(unsharded=width + rank) if is_column else SavedElements(tp=width, unsharded=rank)
    return saved


@cache
def _saved_for_weights(layer: Layer, hidden_dim: int, recompute: Recompute) -> SavedElements:
    """Return the part of `saved_elements` that only gradients of weights need: inputs of products that nothing else reads."""
    if isinstance(layer, Head):
        return SavedElements(unsharded=hidden_dim)
    if not isinstance(layer, Block) or recompute != "none":
        return SavedElements()  # of a block they are made again
    mlp = layer.mlp
    down = mlp.ffn_dim if isinstance(mlp, DenseMLP) else mlp.top_k * mlp.ffn_dim + (mlp.shared_ffn_dim or 0)
    return SavedElements(tp=down, unsharded=min(layer.num_norms, 2) * hidden_dim)


def read_bytes(layer: Layer, inputs: CostInputs) -> FloatArray:
    """Return the bytes that products of a layer read and only gradients of their weights need: they go as these are made [N]."""
    read = _saved_for_weights(layer, inputs.hidden_dim, "none")
    if (moe := layer.experts) is not None:
        read += SavedElements(routed=moe.top_k * inputs.hidden_dim)
    return bytes_of(read, inputs)


@cache
def saved_elements(layer: Layer, hidden_dim: int, recompute: Recompute, rules: SavedTensorRules) -> SavedElements:
    """Return what ``layer`` saves per token from its forward to its backward pass (logits are counted apart)."""
    if (traced := layer.counted) is None:
        return saved_by(layer, hidden_dim, recompute, rules)
    counted = {"none": traced.saved_elements, "selective": traced.selective_elements, "full": traced.full_elements}
    kind = recompute if layer.is_block else "none"
    if (split := traced.split) is None:
        return SavedElements(unsharded=counted[kind] / traced.seq_len)
    parts = {"none": split.saved_elements, "selective": split.selective_elements, "full": 0}[kind]
    # What products put out is kept before it is summed and scattered.
    outputs = counted[kind] - parts - traced.full_elements
    read = {"none": split.gathered_elements, "selective": max(0, outputs), "full": 0}[kind]
    each = 1 / traced.seq_len
    return SavedElements(tp=parts * each, unsharded=read * each, tokens=(counted[kind] - parts - read) * each)


@singledispatch
def saved_by(part: Layer | Attention, hidden_dim: int, recompute: Recompute, rules: SavedTensorRules) -> SavedElements:
    """Return what a kind of layer saves per token, or a kind of attention without its scores; each registers its own."""
    raise TypeError(f"no saved tensors are registered for {type(part).__name__}")


@saved_by.register
def _(part: Embedding | NoMixer, hidden_dim: int, recompute: Recompute, rules: SavedTensorRules) -> SavedElements:
    return SavedElements()


@saved_by.register
def _(layer: Head, hidden_dim: int, recompute: Recompute, rules: SavedTensorRules) -> SavedElements:
    read = (
        SavedElements(unsharded=hidden_dim)
        if rules.workload.engine_facts.memory is None
        else SavedElements(tokens=hidden_dim)
    )
    return _norm(hidden_dim, rules) + read


@saved_by.register
def _(layer: MTPHead, hidden_dim: int, recompute: Recompute, rules: SavedTensorRules) -> SavedElements:
    within = saved_elements(layer.block, hidden_dim, recompute, rules)
    return within + SavedElements(unsharded=2 * hidden_dim, tokens=2 * hidden_dim)


@saved_by.register
def _(layer: Block, hidden_dim: int, recompute: Recompute, rules: SavedTensorRules) -> SavedElements:
    if recompute == "full":
        return SavedElements(tokens=hidden_dim)
    attention, mlp, is_selective = layer.attention, layer.mlp, recompute == "selective"
    workload = rules.workload
    every_second = is_selective and workload.keeps_alternate_products
    if every_second and isinstance(attention, SoftmaxAttention):
        return _every_second_product(layer, attention, hidden_dim, workload)
    if (engine := workload.engine_facts.memory) is not None:
        return _engine_block(layer, hidden_dim, recompute, rules, engine)
    saved = saved_by(attention, hidden_dim, recompute, rules)
    # Gated: gate, up and silu(gate) * up; else before and after the activation. Selective does without the last one.
    # A norm within saves its input.
    saved += SavedElements(
        tp=_of_ffn_width(mlp, lambda dense: (2 if dense.gated else 1) + (not is_selective) + dense.inner_norm)
    )
    if isinstance(mlp, MoE):  # what the experts read and put out; selective recompute sorts the rows again
        rows = mlp.top_k * (1 if is_selective else 2) * hidden_dim
        saved += SavedElements(routed=rows + 2 * mlp.num_experts)
    if is_selective:
        # The block's input; the norms run again. Where attention is all, nothing reads what its last product put out.
        last = SavedElements(unsharded=hidden_dim * (layer.num_parts == 1 and isinstance(attention, SoftmaxAttention)))
        return saved - last + SavedElements(tokens=hidden_dim)
    if rules.stores_scores and attention.is_attention:  # after the mask, and after the softmax
        saved += SavedElements(tp=2 * attention.num_heads * workload.seq_len)
    for _ in range(layer.num_norms):
        saved += _norm(hidden_dim, rules)
    if workload.code == "eager":
        saved += _eager_code(layer, hidden_dim, workload)
    # What the column-parallel products read: the outputs of the norms before attention and feed-forward, gathered over tp;
    # where experts are alone only over the ranks that cut them. Next to shared ones the router reads a tensor of its own there.
    has_no_shared = isinstance(mlp, MoE) and mlp.shared is None and layer.num_norms > 0
    gathered = SavedElements(
        unsharded=(min(layer.num_norms, 2) - has_no_shared) * hidden_dim, routed=has_no_shared * hidden_dim,
        apart=(isinstance(mlp, MoE) and mlp.shared is not None) * hidden_dim,
    )  # fmt: skip
    return saved + gathered


def _norm(width: int, rules: SavedTensorRules) -> SavedElements:
    """Return input, 1 / rms of each token, and where the norm is not one kernel its normalised input in fp32."""
    compute_bytes = rules.workload.compute_bytes
    unfused = width * (8 - compute_bytes) / compute_bytes if rules.unfused_norm else 0.0
    return SavedElements(tokens=width + unfused, fp32=1)


def _of_ffn_width(mlp: DenseMLP | MoE, num_tensors: Callable[[DenseMLP], float]) -> float:
    """Return the elements per token of tensors as wide as the feed-forward part, in all experts that a token visits."""
    if isinstance(mlp, DenseMLP):
        return num_tensors(mlp) * mlp.ffn_dim
    shared = num_tensors(mlp.shared) * mlp.shared.ffn_dim if mlp.shared else 0
    return mlp.top_k * num_tensors(mlp.expert) * mlp.ffn_dim + shared


@saved_by.register
def _(attention: SoftmaxAttention, hidden_dim: int, recompute: Recompute, rules: SavedTensorRules) -> SavedElements:
    q, kv = attention.q_dim, attention.kv_dim
    qkv_and_output = SavedElements(tp=2 * q + 2 * kv, tp_fp32=attention.num_heads)
    if recompute == "selective":
        return qkv_and_output + SavedElements(unsharded=hidden_dim)  # and the product with the output projection
    normed = q + kv if attention.qk_norm != "none" else 0
    # The gate and what it multiplied; what a norm before the output projection read.
    gate_and_norm = attention.gate_dim + q * (attention.gate != "none") + q * attention.out_norm
    # Outputs of a kernel over other heads come back as copies, of which the last product saves one.
    exchanged = 0.0 if rules.workload.engine_facts.memory is not None else float(q)
    return qkv_and_output + SavedElements(tp=normed + gate_and_norm, exchanged=exchanged)


@saved_by.register
def _(attention: LatentAttention, hidden_dim: int, recompute: Recompute, rules: SavedTensorRules) -> SavedElements:
    # q and k at their full width, v, output; the compressed vectors before and after their norms.
    value, compressed = attention.num_heads * attention.v_head_dim, _compressed_width(attention)
    if rules.workload.engine_facts.memory is not None:
        joined = 2 * attention.q_dim + 2 * value
        return SavedElements(tp=joined, unsharded=2 * compressed, tp_fp32=attention.num_heads)
    if recompute == "selective":  # what products and attention put out
        of_products = attention.q_dim + value + attention.num_heads * attention.qk_nope_head_dim
        return SavedElements(
            tp=of_products + attention.q_dim, unsharded=compressed + hidden_dim, tp_fp32=attention.num_heads
        )
    # Values and outputs are as wide as queries, for the kernel; what the last product reads is a copy.
    normed = (attention.q_lora_rank or 0) + attention.kv_lora_rank
    return SavedElements(
        tp=4 * attention.q_dim + value, unsharded=compressed + normed, tp_fp32=attention.num_heads, fp32=0
    )


def _compressed_width(attention: LatentAttention) -> int:
    return (attention.q_lora_rank or 0) + attention.kv_lora_rank + attention.qk_rope_head_dim


def _every_second_product(
    layer: Block, attention: SoftmaxAttention, hidden_dim: int, workload: Workload
) -> SavedElements:
    """Return the block's input, q and v of (q, k, v, out), attention's output, gate and down of (gate, up, down) or up.

    Source: torchtitan's per-operator activation checkpointing saves the first, third, fifth... aten.mm and fused attention.
    Products in nvfp4 are operators of torchao, which it does not count: the input and what attention saves remain.
    """
    if workload.precision == "nvfp4":
        of_attention = 2 * attention.q_dim + 2 * attention.kv_dim
        return SavedElements(tp=of_attention, tokens=hidden_dim, tp_fp32=attention.num_heads)
    mlp = layer.mlp.expert if isinstance(layer.mlp, MoE) else layer.mlp
    rows = layer.mlp.top_k if isinstance(layer.mlp, MoE) else 1
    heads = SavedElements(tp=2 * attention.q_dim + attention.kv_dim, tp_fp32=attention.num_heads)
    return heads + SavedElements(tp=rows * mlp.ffn_dim, tokens=hidden_dim * (2 if mlp.gated else 1))


def _eager_code(layer: Block, hidden_dim: int, workload: Workload) -> SavedElements:
    """Return what plain model code (LitGPT's, transformers') saves as well, as each operation is a kernel that saves its inputs.

    Norms' inputs in fp32, and normalised ones that gradients of their weights need; unrotated q and k, keys and values repeated
    for every query head, silu(gate).
    """
    extra = SavedElements()
    if layer.norm == "rmsnorm":
        copies = (8 if workload.adapters is None else 4) / workload.compute_bytes - 1
        extra += SavedElements(tokens=layer.num_norms * copies * hidden_dim)
    attention, mlp = layer.attention, layer.mlp
    if isinstance(attention, SoftmaxAttention):
        before_rotation = attention.q_dim + attention.kv_dim if attention.rope_fraction > 0 else 0
        extra += SavedElements(tp=before_rotation + 2 * (attention.q_dim - attention.kv_dim))
    rows = 1 if isinstance(mlp, DenseMLP) else mlp.top_k
    return extra + SavedElements(tp=rows * mlp.ffn_dim if mlp.gated else 0)


# Other engines

_SHARED = ("shared_up", "shared_activation", "shared_down")
MODULES: dict[str, tuple[str, ...]] = {
    "core_attn": CORE_ATTENTION, "layernorm": ("norm_0", "norm_1"), "moe_act": ("expert_activation",),
    "mla_up_proj": ("q_norm", "q_up", "kv_norm", "kv_up", "latent_copies", "rotary"),
    "mlp": ("mlp_up", "mlp_activation", "mlp_down"), "shared_experts": _SHARED,
    "moe": ("router", "dispatch", "expert_up", "expert_activation", "expert_down", *_SHARED),
}  # fmt: skip
"""Operators of what Megatron's --recompute-modules names."""

_SELECTIVE_MODULES = ("core_attn", "layernorm", "moe_act", "activation", "mla_up_proj")
"""What selective recompute drops where a workload does not say it; activation: that of dense parts, no module of Megatron's."""


def _engine_block(
    layer: Block, hidden_dim: int, recompute: Recompute, rules: SavedTensorRules, engine: MemoryFacts
) -> SavedElements:
    """Return a block of another engine: 34 s b h bytes for a GPT in fp16 without its scores (arXiv:2205.05198 section 4.1).

    Every rank saves its share of the sequence only, and gathers what column-parallel products read again in the backward pass.
    Selective recompute does without scores, and without what its modules make again.
    """
    attention, mlp, drops = layer.attention, layer.mlp, recompute == "selective"
    workload, one_byte = rules.workload, 1.0 / rules.workload.compute_bytes
    again = frozenset(workload.recompute_modules or _SELECTIVE_MODULES) if drops else frozenset()
    read = _read_by_products(workload)
    saved = _engine_attention(attention, "mla_up_proj" in again, read, rules, engine)
    if workload.code == "compiled":  # or by a library of fused kernels (Liger): input of the norm; gate and up
        engine = replace(engine, unfused_rmsnorm=False, glu_tensors=3)
    gated = (engine.glu_tensors - 1) * (one_byte if workload.fp8_activation_input else 1.0)
    is_dense = isinstance(mlp, DenseMLP)

    def within(dense: DenseMLP, name: str, activation: str) -> float:
        if name in again or ("moe" in again and not is_dense):
            return 0.0
        return ((gated if dense.gated else 1) + read * (activation not in again) + dense.inner_norm) * dense.ffn_dim

    if isinstance(mlp, DenseMLP):
        saved += SavedElements(tp=within(mlp, "mlp", "activation"))
    else:
        shared = within(mlp.shared, "shared_experts", "activation") if mlp.shared else 0.0
        saved += SavedElements(tp=mlp.top_k * within(mlp.expert, "moe", "moe_act") + shared)
    if isinstance(mlp, MoE) and "moe" not in again:
        rows = mlp.top_k * (read + engine.keeps_expert_output) * hidden_dim
        saved += SavedElements(tokens=2 * mlp.num_experts, routed=rows)
    normed = 0 if "layernorm" in again else min(layer.num_norms, 2) * read
    saved += SavedElements(tokens=hidden_dim * (layer.num_norms + normed), fp32=2)
    if workload.dropout:  # two masks of one byte
        saved += SavedElements(tokens=2 * hidden_dim * one_byte)
    if drops and ("core_attn" in again or not rules.stores_scores):
        return saved
    if engine.keeps_all_outputs:
        saved += SavedElements(tokens=4 * hidden_dim)  # of both output projections and both residual additions
    if layer.norm == "rmsnorm" and engine.unfused_rmsnorm:  # fp32 copy of the input, normalised input
        saved += SavedElements(tokens=layer.num_norms * hidden_dim * 4 * one_byte)
    if rules.stores_scores and attention.is_attention:
        # After the softmax, with dropout also its mask and its output; before and after the mask.
        tensors = (2 + one_byte if workload.dropout else 1) + (2 if engine.keeps_all_outputs else 0)
        saved += SavedElements(tp=attention.num_heads * workload.seq_len * tensors)
    return saved


def _read_by_products(workload: Workload) -> float:
    """Return the bytes of what products read and Transformer Engine saves, as a part of the compute dtype's: in fp8 or fp4.

    Of nvfp4 it saves the copy that the gradient of the weight reads, 4 bits and a scale of 8 for each 16 (arXiv:2509.25149).
    """
    if not workload.engine_facts.saves_fp8_inputs:
        return 1.0
    return {"fp8": 0.5, "nvfp4": 4.5 / 16}.get(workload.precision, 1.0)


def _engine_attention(
    attention: Attention, projects_again: bool, read: float, rules: SavedTensorRules, engine: MemoryFacts
) -> SavedElements:
    if isinstance(attention, LatentAttention) and projects_again:
        # Megatron's recompute module mla_up_proj saves compressed vectors, of which the rest is made again.
        output = attention.num_heads * attention.v_head_dim
        return SavedElements(tp=output, unsharded=2 * _compressed_width(attention), tp_fp32=attention.num_heads)
    if not isinstance(attention, SoftmaxAttention):
        return saved_by(attention, 0, "none", rules)
    q, kv = attention.q_dim, attention.kv_dim
    # Queries, keys, values and output; in fp8 what the output projection reads is a copy.
    plain = 2 * q + 2 * kv + (q * read if read < 1 else 0.0)
    packed = engine.qkv_copies * (q + kv) + engine.kv_copies * 2 * kv if attention.rope_fraction else 0
    gate_and_norm = attention.gate_dim + q * (attention.gate != "none") + q * attention.out_norm
    return SavedElements(tp=plain + packed + gate_and_norm, tp_fp32=attention.num_heads)
