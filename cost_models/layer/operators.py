"""Layers as lists of operators: the arithmetic and traffic of one layer for T tokens, before any device is known.

T tokens of one micro-batch; widths as in schema/layers.py. `shard` says how tensor parallelism cuts an operator:
column (its output width), row (its input width), none (every rank does all of it), tokens (split over tp with sequence
parallelism, else unsharded).
Source of the FLOP counts: a matrix product [T,k] x [k,n] takes 2*T*k*n, its two backward products the same each;
causal attention takes 2*T*c*(dk + dv) per head for c attended tokens on average, its backward 2.5 times that
(five products for two, FlashAttention-2, arXiv:2307.08691 section 2.2).

A kind of layer, attention or feed-forward part registers its operators with `operators_of` and what it saves with
`memory.saved_by`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, singledispatch
from typing import Literal

import numpy as np

from ...schema import ClusterSpec, Workload
from ...schema.engine_kernels import FUSED_GATED, FUSED_NORM, FUSED_ROTARY, TORCH_KERNELS, EngineKernels, KernelTraffic
from ...schema.layers import (
    Attention,
    Block,
    DenseMLP,
    Embedding,
    FeedForward,
    Head,
    LatentAttention,
    MoE,
    MTPHead,
    NoMixer,
    SoftmaxAttention,
)
from ...schema.layout_table import LayoutTable
from ...schema.traced import Traced
from ...schema.units import FloatArray, IntArray
from ..coefficients import Scenario

Shard = Literal["column", "row", "none", "tokens"]
Layer = Embedding | Block | Head | MTPHead


@dataclass(frozen=True)
class Gemm:
    """[T * rows_per_token, k] x [k, n] on ``num_matrices`` weights (experts share the rows).

    Attributes:
        routed: the weights are experts.
        frozen: no gradient of the weights is taken.
        quantized: fp8 training runs it in fp8; engines keep logits and routers in bf16.
        head_dim: of a product inside attention, one small matrix for each sequence and head; None for one with weights.
        widths: of products that run one after the other, which together are ``n`` wide; empty: one product.
    """

    name: str
    n: int
    k: int
    shard: Shard
    rows_per_token: float = 1
    num_matrices: int = 1
    routed: bool = False
    frozen: bool = False
    quantized: bool = True
    head_dim: int | None = None
    widths: tuple[int, ...] = ()

    @property
    def num_params(self) -> int:
        """Weights of all matrices."""
        return 0 if self.head_dim is not None else self.n * self.k * self.num_matrices


@dataclass(frozen=True)
class FusedAttention:
    """Causal attention of H heads with query/key width dk and value width dv.

    A query sees ``context`` tokens on average and ``longest`` at most. ``is_split``: tensor parallelism divides the heads.
    """

    name: str
    num_heads: int
    qk_dim: int
    v_dim: int
    context: float
    seq_len: int
    longest: int
    num_kv_heads: int
    is_split: bool = True

    @property
    def forward_flops_per_token(self) -> float:
        """FLOPs of the forward pass for one query token, all heads."""
        return 2 * self.num_heads * self.context * (self.qk_dim + self.v_dim)

    @property
    def kv_width(self) -> int:
        """Elements of the keys and values of one token, all heads, as the kernel reads them."""
        return self.num_kv_heads * (self.qk_dim + self.v_dim)


BACKWARD_ATTENTION_RATIO = 2.5


@dataclass(frozen=True)
class Elementwise:
    """Memory-bound kernels: elements read and written per token, and how many kernels that takes.

    Attributes:
        element_bytes: of one element; None is the compute dtype's.
        routed: works on the rows that reach experts.
        num_matrices: experts that each have these kernels of their own; 1: all together.
        over: only where that degree is more than 1.
    """

    name: str
    forward_elements: float
    backward_elements: float
    forward_kernels: int
    backward_kernels: int
    shard: Shard
    element_bytes: int | None = None
    routed: bool = False
    num_matrices: int = 1
    over: Literal["tp", "ep"] | None = None


@dataclass(frozen=True)
class Scan:
    """Kernels of a recurrence over the sequence, cut by heads or channels: FLOPs and elements read and written per token.

    Attributes:
        kernels: forward; the backward pass runs the forward one's again and two more for each.
        on_vectors: no matrix products: the vector units do it.
    """

    name: str
    forward_flops_per_token: float
    forward_elements: float
    kernels: int
    on_vectors: bool = False


Operator = Gemm | FusedAttention | Elementwise | Scan

CORE_ATTENTION = ("attention", "scores", "softmax", "context")
"""Names of the operators between query, key, value and the output projection."""


@dataclass(frozen=True, kw_only=True)
class CostInputs:
    """What the costs of all layers in one evaluation share: the layouts [N], the model's width and the scenario."""

    hidden_dim: int
    layouts: LayoutTable
    scenario: Scenario

    @property
    def workload(self) -> Workload:
        """Of the scenario."""
        return self.scenario.workload

    @property
    def cluster(self) -> ClusterSpec:
        """Of the scenario."""
        return self.scenario.cluster

    def select(self, rows: IntArray) -> CostInputs:
        """Return the inputs for a subset of the layouts."""
        return replace(self, layouts=self.layouts.select(rows))

    @property
    def tokens(self) -> IntArray:
        """Tokens of one micro-batch on one rank, before tensor parallelism cuts them [N]."""
        return self.layouts.tokens(self.workload.seq_len)

    @property
    def hidden_bytes(self) -> FloatArray:
        """Hidden states of those tokens in the compute dtype [N]."""
        return np.asarray(self.tokens * self.hidden_dim * self.workload.compute_bytes, dtype=np.float64)


_COMPILED = TORCH_KERNELS._replace(
    norm=FUSED_NORM, rotary=FUSED_ROTARY, gated=FUSED_GATED, loss=KernelTraffic(2.5, 3.5, 3, 3)
)
"""torch.compile: each chain of pointwise kernels and its sum is one kernel."""

_COMPOSITE_NORM = KernelTraffic(18, 36, 6, 12)
"""RMSNorm as torch ran it eagerly before 2.8: cast, square, mean, product, cast, product, and their gradients, half of it in fp32.

Compiled, Llama-3-8B on H100 (HBM2e) takes 0.39 s a step less (torchtitan benchmarks/llama3_h100_202412); counted 0.27 to 0.37 s.
"""

_NORM_ON_HOST = KernelTraffic(7, 19, 6, 13)
"""F.rms_norm on a CPU, which has no fused kernel: square, mean, product and weight; gradients of each, those over rows and over
tokens as sums. Without casts: CPUs train in fp32."""

_DROPOUT = KernelTraffic(1, 5, 0, 2)
"""What dropout before both additions of a block adds to them, fused with them forward: a mask of one byte an element is written
forward and read backward, where the gradient is read and written as well."""


def kernels_of(workload: Workload, *, on_host: bool) -> EngineKernels:
    """Return the memory-bound kernels of an engine under a workload's ``code``."""
    kernels = workload.engine_facts.kernels
    return {
        "engine": kernels._replace(norm=_NORM_ON_HOST) if on_host else kernels,
        "compiled": _COMPILED,
        "compiled_blocks": _COMPILED._replace(loss=TORCH_KERNELS.loss),  # all but the loss
        "composite_norm": TORCH_KERNELS._replace(norm=_COMPOSITE_NORM, loss=kernels.loss),
        "eager": TORCH_KERNELS._replace(norm=_COMPOSITE_NORM),
    }[workload.code]


@dataclass(frozen=True, kw_only=True)
class OperatorRules:
    """What the operators of a layer depend on besides the layer.

    Attributes:
        kernels: memory-bound kernels of the engine.
        softmax: passes over the score matrix of unfused attention, which stores all [heads, seq, seq] of it; None for fused.
        dropout: hidden states pass a dropout before both additions of a block.
        multiplies_apart: queries, keys and values, and gate and up, are products of their own (EngineFacts).
        pads_values: latent attention fills values up to the width of its keys.
    """

    hidden_dim: int
    seq_len: int = 1
    kernels: EngineKernels = TORCH_KERNELS
    softmax: KernelTraffic | None = None
    dropout: bool = False
    multiplies_apart: bool = False
    pads_values: bool = False


def operator_rules(hidden_dim: int, scenario: Scenario) -> OperatorRules:
    """Return the rules of a scenario."""
    workload, softmax = scenario.workload, None
    if workload.attention != "flash":
        # One kernel each for scale, mask and softmax, or one for all: Megatron's takes 16-bit inputs only
        # (FusedScaleMaskSoftmax.is_kernel_available).
        is_one = workload.engine_facts.is_eager_like_megatron and workload.compute_bytes == 2
        c = scenario.coefficients["attention"]
        forward, backward = c["fused_softmax_passes"] if is_one else c["separate_softmax_passes"]
        softmax = KernelTraffic(forward, backward, 2 if is_one else 5, 2 if is_one else 6)
    return OperatorRules(
        hidden_dim=hidden_dim,
        seq_len=workload.attended_len,
        kernels=kernels_of(workload, on_host=scenario.cluster.weakest_device.backend.is_host),
        softmax=softmax,
        dropout=workload.dropout,
        multiplies_apart=workload.engine_facts.multiplies_apart,
        pads_values=workload.engine_facts.is_own_runtime,  # runtime/models/attention.py: kernels take one width only
    )


@lru_cache(maxsize=4096)
def layer_operators(layer: Layer, rules: OperatorRules) -> tuple[Operator, ...]:
    """Return the operators of one layer, forward order; those counted of it where it was traced from code."""
    return operators_of(layer, rules) if layer.counted is None else traced_operators(layer.counted)


@singledispatch
def operators_of(part: Layer | Attention | FeedForward, rules: OperatorRules) -> tuple[Operator, ...]:
    """Return the operators of a kind of layer, of attention or of a feed-forward part, forward order; each registers its own."""
    raise TypeError(f"no operators are registered for {type(part).__name__}")


@operators_of.register
def _(layer: Embedding, rules: OperatorRules) -> tuple[Operator, ...]:
    rows = Elementwise("embedding", 2 * rules.hidden_dim, 3 * rules.hidden_dim, 1, 2, "tokens")
    norm = _elementwise("embedding_norm", rules.hidden_dim, rules.kernels.norm, "tokens")
    return (rows, norm) if layer.layernorm else (rows,)


@operators_of.register
def _(layer: Head, rules: OperatorRules) -> tuple[Operator, ...]:
    loss = _elementwise("cross_entropy", layer.vocab_size, rules.kernels.loss, "column", element_bytes=4)
    logits = Gemm("logits", layer.vocab_size, rules.hidden_dim, "column", quantized=False)
    return (_elementwise("final_norm", rules.hidden_dim, rules.kernels.norm, "tokens"), logits, loss)


@operators_of.register
def _(layer: MTPHead, rules: OperatorRules) -> tuple[Operator, ...]:
    norms = tuple(_elementwise(f"mtp_norm_{i}", rules.hidden_dim, rules.kernels.norm, "tokens") for i in range(3))
    projection = Gemm("mtp_projection", rules.hidden_dim, 2 * rules.hidden_dim, "none")
    return (*norms, projection, *layer_operators(layer.block, rules))


@operators_of.register
def _(layer: Block, rules: OperatorRules) -> tuple[Operator, ...]:
    kernels, hidden_dim = rules.kernels, rules.hidden_dim
    norms = tuple(_elementwise(f"norm_{i}", hidden_dim, kernels.norm, "tokens") for i in range(layer.num_norms))
    additions = kernels.residual
    if rules.dropout:
        additions = KernelTraffic(*map(sum, zip(additions, _DROPOUT, strict=True)))  # type: ignore[arg-type]
    attention = operators_of(layer.attention, rules)
    if rules.softmax is not None:
        attention = tuple(part for op in attention for part in _unfused(op, rules.seq_len, rules.softmax))
    additions = KernelTraffic(*(value * layer.num_parts / 2 for value in additions))  # type: ignore[arg-type]
    residuals = _elementwise("residual_adds", hidden_dim, additions, "tokens")
    return (*norms, *attention, *operators_of(layer.mlp, rules), residuals)


def traced_operators(traced: Traced) -> tuple[Operator, ...]:
    """Return the operators counted of a layer; rows are fractions of one for each token of the sequence."""
    each = 1 / traced.seq_len
    products = tuple(
        Gemm(f"product_{i}", p.n, p.k, p.shard, p.rows * each, p.matrices)
        for i, p in enumerate(traced.products)
        for _ in range(p.count)
    )
    attentions = tuple(
        FusedAttention(
            "attention", a.num_heads, a.head_dim, a.v_head_dim, a.context * a.query_len * each, traced.seq_len, a.kv_len,
            a.num_kv_heads, a.split,
        )
        for a in traced.attentions
        for _ in range(a.count)
    )  # fmt: skip
    split, kernels = traced.split, (traced.forward_kernels, traced.backward_kernels)
    elements = traced.forward_elements * each, traced.backward_elements * each
    if split is None:
        return (*products, *attentions, Elementwise("others", *elements, *kernels, "none"))
    parts = split.forward_elements * each, split.backward_elements * each
    unsplit = Elementwise("others", elements[0] - parts[0], elements[1] - parts[1], *kernels, "tokens")
    return (*products, *attentions, unsplit, Elementwise("others_split", *parts, 0, 0, "column"))


def attended_tokens(seq_len: int, window: int | None, *, chunked: bool = False) -> float:
    """Return the mean number of tokens a causal query sees.

    (s+1)/2, or with a window w < s: w - w*(w-1)/(2*s); in chunks of w: (w+1)/2, a last chunk that is not full by its own length.
    """
    w = min(window or seq_len, seq_len)
    if chunked:
        full, rest = divmod(seq_len, w)
        return (full * w * (w + 1) + rest * (rest + 1)) / (2 * seq_len)
    return w - w * (w - 1) / (2 * seq_len)


@operators_of.register
def _(attention: SoftmaxAttention, rules: OperatorRules) -> tuple[Operator, ...]:
    q, kv, kernels, seq_len = attention.q_dim, attention.kv_dim, rules.kernels, rules.seq_len
    rotated = int((q + kv) * attention.rope_fraction)
    context = attended_tokens(seq_len, attention.window, chunked=attention.chunked)
    longest = min(attention.window or seq_len, seq_len)
    heads, width = (attention.num_heads, attention.head_dim, attention.head_dim), q + 2 * kv
    apart = (q + attention.gate_dim, kv, kv) if rules.multiplies_apart else ()
    operators = (
        (True, Gemm("qkv", width + attention.gate_dim, rules.hidden_dim, "column", widths=apart)),
        (bool(apart), _summed_gradients("qkv_sums", rules.hidden_dim, len(apart))),
        (attention.qkv_bias, _elementwise("qkv_bias", width, kernels.bias, "column")),
        (True, _elementwise("qkv_copies", width, kernels.qkv, "column")),
        (attention.qk_norm != "none", _elementwise("qk_norm", q + kv, kernels.norm, "column")),
        (
            attention.qk_norm == "full",
            replace(_elementwise("qk_split_norm", q + kv, kernels.split_norm, "column"), over="tp"),
        ),
        (rotated > 0, _elementwise("rotary", rotated, kernels.rotary, "column")),
        (True, FusedAttention("attention", *heads, context, seq_len, longest, attention.num_kv_heads)),
        (attention.gate_dim > 0, _elementwise("attention_gate", q, kernels.gated, "column")),
        (attention.out_norm, _elementwise("attention_out_norm", q, kernels.norm, "column")),
        (True, Gemm("attention_out", rules.hidden_dim, q, "row")),
        (attention.out_bias, _elementwise("out_bias", rules.hidden_dim, kernels.bias, "tokens")),
    )
    return tuple(op for is_present, op in operators if is_present)


@operators_of.register
def _(attention: LatentAttention, rules: OperatorRules) -> tuple[Operator, ...]:
    # Rotary parts of queries and keys are joined to the rest, and values split off, by copies.
    heads, rank, hidden_dim, seq_len = attention.num_heads, attention.q_lora_rank, rules.hidden_dim, rules.seq_len
    joined = attention.q_dim + heads * (attention.head_dim + attention.v_head_dim)
    kv_up = heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    query: tuple[Operator, ...] = (Gemm("q", attention.q_dim, hidden_dim, "column"),)
    if rank is not None:
        norm = _elementwise("q_norm", rank, rules.kernels.norm, "none")
        query = (Gemm("q_down", rank, hidden_dim, "none"), norm, Gemm("q_up", attention.q_dim, rank, "column"))
    v_dim = attention.head_dim if rules.pads_values else attention.v_head_dim
    sums = (_summed_gradients("latent_sums", hidden_dim, 2),) if rules.multiplies_apart else ()
    return (
        *query,
        Gemm("kv_down", attention.kv_lora_rank + attention.qk_rope_head_dim, hidden_dim, "none"),
        *sums,
        _elementwise("kv_norm", attention.kv_lora_rank, rules.kernels.norm, "none"),
        Gemm("kv_up", kv_up, attention.kv_lora_rank, "column"),
        _elementwise("latent_copies", joined, KernelTraffic(2, 2, 3, 3), "column"),
        _elementwise("rotary", heads * attention.qk_rope_head_dim, rules.kernels.rotary, "column"),
        FusedAttention("attention", heads, attention.head_dim, v_dim, (seq_len + 1) / 2, seq_len, seq_len, heads),
        Gemm("attention_out", hidden_dim, heads * attention.v_head_dim, "row"),
    )


def _unfused(op: Operator, seq_len: int, softmax: KernelTraffic) -> tuple[Operator, ...]:
    """Return attention without a fused kernel: two products of every token with all others, and passes over the score matrix.

    The products write and read the scores themselves. Dropout reads, writes and saves or reads a mask of one byte.
    """
    if not isinstance(op, FusedAttention):
        return (op,)
    width = op.num_heads * seq_len
    return (
        Gemm("scores", width, op.qk_dim, "column", head_dim=op.qk_dim),
        _elementwise("softmax", width, softmax, "column"),
        Gemm("context", op.v_dim, width, "row", head_dim=op.v_dim),
    )


@operators_of.register
def _(part: DenseMLP | NoMixer, rules: OperatorRules) -> tuple[Operator, ...]:
    return _dense(part, rules, "mlp_") if isinstance(part, DenseMLP) and part.ffn_dim else ()


@operators_of.register
def _(mlp: MoE, rules: OperatorRules) -> tuple[Operator, ...]:
    # Routing copies each token's vector to its experts and back.
    routing, rows = rules.kernels.routing, mlp.top_k * rules.hidden_dim
    dispatch = (
        _elementwise("dispatch", rows, routing.rows, "none", routed=True),
        _elementwise("dispatch_tokens", rules.hidden_dim, routing.tokens, "none", routed=True),
        replace(_elementwise("dispatch_exchanged", rows, routing.exchanged, "none", routed=True), over="ep"),
        *((_elementwise("shared_sum", rules.hidden_dim, routing.shared, "tokens"),) if mlp.shared else ()),
    )
    shared = _dense(mlp.shared, rules, "shared_") if mlp.shared else ()
    router = Gemm("router", mlp.num_experts, rules.hidden_dim, "none", quantized=False)
    experts = _dense(mlp.expert, rules, "expert_", mlp.top_k, mlp.num_experts, routed=True)
    return (router, *dispatch, *experts, *shared)


def _dense(
    mlp: DenseMLP, rules: OperatorRules, prefix: str, rows: int = 1, matrices: int = 1, *, routed: bool = False
) -> tuple[Operator, ...]:
    kernels, hidden_dim, width = rules.kernels, rules.hidden_dim, (2 if mlp.gated else 1) * mlp.ffn_dim
    traffic = kernels.gated if mlp.gated else kernels.plain
    activation = _elementwise(f"{prefix}activation", mlp.ffn_dim * rows, traffic, "column", routed=routed)
    inner_norm = (_elementwise(f"{prefix}norm", mlp.ffn_dim * rows, kernels.norm, "column", routed=routed),)
    apart = (mlp.ffn_dim, mlp.ffn_dim) if mlp.gated and rules.multiplies_apart else ()
    products = (
        Gemm(f"{prefix}up", width, hidden_dim, "column", rows, matrices, routed, widths=apart),
        *((_summed_gradients(f"{prefix}sums", hidden_dim * rows, len(apart), routed=routed),) if apart else ()),
        activation,
        *(inner_norm if mlp.inner_norm else ()),
        Gemm(f"{prefix}down", hidden_dim, mlp.ffn_dim, "row", rows, matrices, routed),
    )
    if not mlp.bias:
        return products
    up = _elementwise(f"{prefix}up_bias", width * rows, kernels.bias, "column", routed=routed)
    down = _elementwise(f"{prefix}down_bias", hidden_dim * rows, kernels.bias, "tokens", routed=routed)
    if routed and kernels.expert_bias is not None:
        each = _elementwise(f"{prefix}down_bias", hidden_dim * rows, kernels.expert_bias, "tokens", routed=True)
        down = replace(each, num_matrices=matrices)
    return (*products, up, down)


def _summed_gradients(name: str, width: float, num_products: int, *, routed: bool = False) -> Elementwise:
    """Return the sums of what several products make of their common input's gradient, unsharded over tp."""
    return Elementwise(name, 0, 3 * width * (num_products - 1), 0, num_products - 1, "none", routed=routed)


def _elementwise(
    name: str,
    width: float,
    traffic: KernelTraffic,
    shard: Shard,
    element_bytes: int | None = None,
    *,
    routed: bool = False,
) -> Elementwise:
    elements, kernels = (
        (width * traffic.forward, width * traffic.backward),
        (traffic.forward_kernels, traffic.backward_kernels),
    )
    return Elementwise(name, *elements, *kernels, shard, element_bytes, routed)
