"""What all layers of one evaluation have in common.

Layers as lists of operators: the arithmetic and traffic of one layer for T tokens, before any device is known.

T tokens of one micro-batch; widths as in schema/model.py. `shard` says how tensor parallelism cuts an operator:
column (its output width), row (its input width), none (every rank does it all), tokens (split over tp with sequence
parallelism, else whole on every rank).
Source of the FLOP counts: a matrix product [T,k] x [k,n] takes 2*T*k*n, its two backward products the same each;
causal attention takes 2*T*c*(dk + dv) per head for c attended tokens on average, its backward 2.5 times that
(five products for two, FlashAttention-2, arXiv:2307.08691 section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ...schema import ClusterSpec, Workload
from ...schema.arrays import FloatArray, IntArray
from ...schema.engine_facts import OWN_ENGINE, EngineKernels, KernelTraffic
from ...schema.layers import Block, DenseMLP, Embedding, Head, LatentAttention, MoE, MTPHead, SoftmaxAttention, Traced
from ...schema.layout_table import LayoutTable
from ...schema.task import Engine, Fusion
from ..coefficients import coefficients, remembered
from ..hardware.kernels import DROPOUT, add_traffic, kernels_of_engine


@dataclass(frozen=True, kw_only=True)
class CostInputs:
    """The layouts [N] that are evaluated at once, and the model's width, workload and cluster they share."""

    hidden_dim: int
    batch: LayoutTable
    workload: Workload
    cluster: ClusterSpec

    def select(self, rows: IntArray) -> CostInputs:
        """The same for some of the layouts."""
        return replace(self, batch=self.batch.select(rows))

    @property
    def tokens(self) -> IntArray:
        """Tokens of one micro-batch on one rank, before tensor parallelism cuts them [N]."""
        return self.batch.tokens(self.workload.seq_len)

    @property
    def hidden_bytes(self) -> FloatArray:
        """Hidden states of those tokens in the compute dtype [N]."""
        return np.asarray(self.tokens * self.hidden_dim * self.workload.compute_bytes, dtype=np.float64)


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

    @property
    def num_params(self) -> int:
        """Weights of all matrices."""
        return 0 if self.head_dim is not None else self.n * self.k * self.num_matrices


@dataclass(frozen=True)
class FusedAttention:
    """Causal attention of H heads with query/key width dk and value width dv.

    A query sees ``context`` tokens on average and ``longest`` at most.
    """

    name: str
    num_heads: int
    qk_dim: int
    v_dim: int
    context: float
    seq_len: int
    longest: int
    num_kv_heads: int

    @property
    def forward_flops_per_token(self) -> float:
        """FLOPs of the forward pass for one query token, all heads."""
        return 2 * self.num_heads * self.context * (self.qk_dim + self.v_dim)


BACKWARD_ATTENTION_RATIO = 2.5


@dataclass(frozen=True)
class Elementwise:
    """Memory-bound kernels: elements read and written per token, and how many kernels that takes.

    Attributes:
        element_bytes: of one element; None is the compute dtype's.
        routed: works on the rows that reach experts.
    """

    name: str
    forward_elements: float
    backward_elements: float
    forward_kernels: int
    backward_kernels: int
    shard: Shard
    element_bytes: int | None = None
    routed: bool = False


Operator = Gemm | FusedAttention | Elementwise


def attended_tokens(seq_len: int, window: int | None, *, chunked: bool = False) -> float:
    """Mean number of tokens a causal query sees: (s+1)/2, or with a window w < s: w - w*(w-1)/(2*s); in chunks of w: (w+1)/2.

    A last chunk that is not full counts by its own length.
    """
    w = min(window or seq_len, seq_len)
    if chunked:
        full, rest = divmod(seq_len, w)
        return (full * w * (w + 1) + rest * (rest + 1)) / (2 * seq_len)
    return w - w * (w - 1) / (2 * seq_len)


Softmax = Literal["separate", "fused"]
"""Kernels between the two products of unfused attention: one each for scale, mask and softmax, or Megatron's one for all three."""


CORE_ATTENTION = ("attention", "scores", "softmax", "context")
"""Names of the operators between query, key, value and the output projection."""


@remembered
def layer_operators(
    layer: Layer,
    hidden_dim: int,
    seq_len: int,
    *,
    unfused: Softmax | None = None,
    engine: Engine = OWN_ENGINE,
    dropout: bool = False,
    fusion: Fusion = "engine",
    on_cpu: bool = False,
) -> tuple[Operator, ...]:
    """Operators of one layer in an engine, forward order.

    ``unfused`` attention computes and stores whole [heads, seq, seq] scores.
    """
    kernels = kernels_of_engine(engine, fusion, on_cpu=on_cpu)
    if not isinstance(layer, MTPHead) and layer.traced is not None:
        return traced_operators(layer.traced)
    if isinstance(layer, Embedding):
        return (Elementwise("embedding", 2 * hidden_dim, 3 * hidden_dim, 1, 2, "tokens"),)
    if isinstance(layer, Head):
        return (_norm("final_norm", hidden_dim, "tokens", kernels), *_logits(layer.vocab_size, hidden_dim, kernels))
    if isinstance(layer, MTPHead):
        norms = tuple(_norm(f"mtp_norm_{i}", hidden_dim, "tokens", kernels) for i in range(3))
        projection = Gemm("mtp_projection", hidden_dim, 2 * hidden_dim, "none")
        block = layer_operators(
            layer.block,
            hidden_dim,
            seq_len,
            unfused=unfused,
            engine=engine,
            dropout=dropout,
            fusion=fusion,
            on_cpu=on_cpu,
        )
        return (*norms, projection, *block)
    norms = tuple(_norm(f"norm_{i}", hidden_dim, "tokens", kernels) for i in range(layer.num_norms))
    adds = add_traffic(kernels.residual, DROPOUT) if dropout else kernels.residual
    residuals = _passes("residual_adds", hidden_dim, adds, "tokens")
    attention = _attention(layer.attention, hidden_dim, seq_len, kernels)
    if unfused is not None:
        attention = tuple(part for op in attention for part in _unfused(op, seq_len, unfused))
    return (*norms, *attention, *_mlp(layer.mlp, hidden_dim, kernels), residuals)


def traced_operators(traced: Traced) -> tuple[Operator, ...]:
    """The operators counted of a layer, none of them split; rows are fractions of one for each token of the sequence."""
    each = 1 / traced.seq_len
    products = tuple(
        Gemm(f"product_{i}", p.n, p.k, "none", p.rows * each)
        for i, p in enumerate(traced.products)
        for _ in range(p.count)
    )
    attentions = tuple(
        FusedAttention(
            "attention", a.num_heads, a.head_dim, a.v_head_dim, a.context * a.query_len * each, traced.seq_len, a.kv_len,
            a.num_kv_heads,
        )
        for a in traced.attentions
        for _ in range(a.count)
    )  # fmt: skip
    rest = Elementwise(
        "others", traced.forward_elements * each, traced.backward_elements * each, traced.forward_kernels,
        traced.backward_kernels, "none",
    )  # fmt: skip
    return (*products, *attentions, rest)


def _unfused(op: Operator, seq_len: int, softmax: Softmax) -> tuple[Operator, ...]:
    """Attention without a fused kernel: two products of every token with all others, and passes over the score matrix.

    The products write and read the scores themselves. Dropout reads, writes and keeps or reads a mask of one byte.
    """
    if not isinstance(op, FusedAttention):
        return (op,)
    c, width = coefficients()["attention"], op.num_heads * seq_len
    forward, backward = c[f"{softmax}_softmax_passes"]
    kernels = (2, 2) if softmax == "fused" else (5, 6)
    return (
        Gemm("scores", width, op.qk_dim, "column", head_dim=op.qk_dim),
        Elementwise("softmax", forward * width, backward * width, *kernels, "column"),
        Gemm("context", op.v_dim, width, "row", head_dim=op.v_dim),
    )


def _norm(name: str, width: int, shard: Shard, kernels: EngineKernels) -> Elementwise:
    return _passes(name, width, kernels.norm, shard)


def _passes(
    name: str, width: float, passes: KernelTraffic, shard: Shard, element_bytes: int | None = None
) -> Elementwise:
    elements = (width * passes.forward, width * passes.backward)
    return Elementwise(name, *elements, passes.forward_kernels, passes.backward_kernels, shard, element_bytes)


def _logits(vocab_size: int, hidden_dim: int, kernels: EngineKernels) -> tuple[Operator, ...]:
    loss = _passes("cross_entropy", vocab_size, kernels.loss, "column", element_bytes=4)
    return (Gemm("logits", vocab_size, hidden_dim, "column", quantized=False), loss)


def _attention(
    attention: SoftmaxAttention | LatentAttention, hidden_dim: int, seq_len: int, kernels: EngineKernels
) -> tuple[Operator, ...]:
    chunked = isinstance(attention, SoftmaxAttention) and attention.chunked
    context = attended_tokens(seq_len, attention.window, chunked=chunked)
    if isinstance(attention, LatentAttention):
        return _latent_attention(attention, hidden_dim, seq_len, kernels)
    q, kv = attention.q_dim, attention.kv_dim
    rotated = int((q + kv) * attention.rope_fraction)
    operators: list[Operator] = [Gemm("qkv", q + 2 * kv, hidden_dim, "column")]
    if attention.qkv_bias:
        operators.append(_passes("qkv_bias", q + 2 * kv, kernels.bias, "column"))
    operators.append(_passes("qkv_copies", q + 2 * kv, kernels.qkv, "column"))
    if attention.qk_norm != "none":
        operators.append(_norm("qk_norm", q + kv, "column", kernels))
    if rotated:
        operators.append(_passes("rotary", rotated, kernels.rotary, "column"))
    longest, width = min(attention.window or seq_len, seq_len), attention.head_dim
    operators.append(
        FusedAttention(
            "attention", attention.num_heads, width, width, context, seq_len, longest, attention.num_kv_heads
        )
    )
    operators.append(Gemm("attention_out", hidden_dim, q, "row"))
    if attention.out_bias:
        operators.append(_passes("out_bias", hidden_dim, kernels.bias, "tokens"))
    return tuple(operators)


def _latent_attention(
    attention: LatentAttention, hidden_dim: int, seq_len: int, kernels: EngineKernels
) -> tuple[Operator, ...]:
    """Rotary parts of queries and keys are joined to the rest, and values split off, by copies."""
    heads, rank = attention.num_heads, attention.q_lora_rank
    joined = attention.q_dim + heads * (attention.head_dim + attention.v_head_dim)
    kv_up = heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    if rank is None:
        query: tuple[Operator, ...] = (Gemm("q", attention.q_dim, hidden_dim, "column"),)
    else:
        down = Gemm("q_down", rank, hidden_dim, "none")
        query = (down, _norm("q_norm", rank, "none", kernels), Gemm("q_up", attention.q_dim, rank, "column"))
    return (
        *query,
        Gemm("kv_down", attention.kv_lora_rank + attention.qk_rope_head_dim, hidden_dim, "none"),
        _norm("kv_norm", attention.kv_lora_rank, "none", kernels),
        Gemm("kv_up", kv_up, attention.kv_lora_rank, "column"),
        _passes("latent_copies", joined, KernelTraffic(2, 2, 3, 3), "column"),
        _passes("rotary", heads * attention.qk_rope_head_dim, kernels.rotary, "column"),
        FusedAttention(
            "attention", heads, attention.head_dim, attention.v_head_dim, (seq_len + 1) / 2, seq_len, seq_len, heads
        ),
        Gemm("attention_out", hidden_dim, heads * attention.v_head_dim, "row"),
    )


def _dense(
    mlp: DenseMLP,
    hidden_dim: int,
    prefix: str,
    kernels: EngineKernels,
    rows: int = 1,
    matrices: int = 1,
    *,
    routed: bool = False,
) -> tuple[Operator, ...]:
    width = (2 if mlp.gated else 1) * mlp.ffn_dim
    passes = kernels.gated if mlp.gated else kernels.plain
    activation = replace(_passes(f"{prefix}activation", mlp.ffn_dim * rows, passes, "column"), routed=routed)
    biases = (
        _passes(f"{prefix}up_bias", width * rows, kernels.bias, "column"),
        _passes(f"{prefix}down_bias", hidden_dim * rows, kernels.bias, "tokens"),
    )
    return (
        Gemm(f"{prefix}up", width, hidden_dim, "column", rows, matrices, routed),
        activation,
        Gemm(f"{prefix}down", hidden_dim, mlp.ffn_dim, "row", rows, matrices, routed),
        *(replace(bias, routed=routed) for bias in (biases if mlp.bias else ())),
    )


def _mlp(mlp: DenseMLP | MoE, hidden_dim: int, kernels: EngineKernels) -> tuple[Operator, ...]:
    if isinstance(mlp, DenseMLP):
        return _dense(mlp, hidden_dim, "mlp_", kernels)
    # Routing copies each token's vector to its experts and back: gather and weighted scatter, read and write.
    width = 5 * mlp.top_k * hidden_dim
    dispatch = Elementwise("dispatch", width, width, 6, 6, "none", routed=True)
    shared = _dense(mlp.shared, hidden_dim, "shared_", kernels) if mlp.shared else ()
    router = Gemm("router", mlp.num_experts, hidden_dim, "none", quantized=False)
    experts = _dense(mlp.expert, hidden_dim, "expert_", kernels, mlp.top_k, mlp.num_experts, routed=True)
    return (router, dispatch, *experts, *shared)


def model_flops_per_token(
    layers: tuple[tuple[Layer, int], ...], hidden_dim: int, seq_len: int, *, frozen: bool = False
) -> float:
    """FLOPs a training step needs per token: forward plus backward, no recompute, causal attention counted once.

    A frozen model needs no gradients of its weights: four FLOPs for each instead of six (its adapters are left out).
    """
    total = 0.0
    for layer, count in layers:
        for op in layer_operators(layer, hidden_dim, seq_len):
            if isinstance(op, Gemm):
                total += count * (4 if frozen else 6) * op.n * op.k * op.rows_per_token
            elif isinstance(op, FusedAttention):
                total += count * 3 * op.forward_flops_per_token  # backward without the kernel's recomputed scores
    return total
