"""Layers as lists of operators: the arithmetic and traffic of one layer for T tokens, before any device is known.

T tokens of one micro-batch; widths as in schema/model.py. `shard` says how tensor parallelism cuts an operator:
column (its output width), row (its input width), none (every rank does it all), tokens (split over tp with sequence
parallelism, else whole on every rank).
Source of the FLOP counts: a matrix product [T,k] x [k,n] takes 2*T*k*n, its two backward products the same each;
causal attention takes 2*T*c*(dk + dv) per head for c attended tokens on average, its backward 2.5 times that
(five products for two, FlashAttention-2, arXiv:2307.08691 section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from ..schema.model import Block, DenseMLP, Embedding, Head, LatentAttention, MoE, MTPHead, SoftmaxAttention
from .coefficients import coefficients

Shard = Literal["column", "row", "none", "tokens"]
Layer = Embedding | Block | Head | MTPHead


@dataclass(frozen=True)
class Gemm:
    """[T * rows_per_token, k] x [k, n] on ``num_matrices`` weights (experts share the rows).

    ``head_dim`` is that of a product inside attention, one small matrix for each sequence and head; None for one with weights.
    """

    name: str
    n: int
    k: int
    shard: Shard
    rows_per_token: int = 1
    num_matrices: int = 1
    head_dim: int | None = None

    @property
    def num_params(self) -> int:
        """Weights of all matrices."""
        return 0 if self.head_dim is not None else self.n * self.k * self.num_matrices


@dataclass(frozen=True)
class FusedAttention:
    """Causal attention of H heads with query/key width dk and value width dv over ``context`` tokens on average."""

    name: str
    num_heads: int
    qk_dim: int
    v_dim: int
    context: float

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
        streams: one large tensor passes through few kernels at nearly the rate of a copy (scores of unfused attention).
    """

    name: str
    forward_elements: float
    backward_elements: float
    forward_kernels: int
    backward_kernels: int
    shard: Shard
    element_bytes: int | None = None
    streams: bool = False


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


@cache
def layer_operators(
    layer: Layer, hidden_dim: int, seq_len: int, *, unfused: Softmax | None = None
) -> tuple[Operator, ...]:
    """Operators of one layer, forward order; ``unfused`` attention computes and stores whole [heads, seq, seq] scores."""
    if isinstance(layer, Embedding):
        return (Elementwise("embedding", 2 * hidden_dim, 3 * hidden_dim, 1, 2, "tokens"),)
    if isinstance(layer, Head):
        return (_norm("final_norm", hidden_dim, "tokens"), *_logits(layer.vocab_size, hidden_dim))
    if isinstance(layer, MTPHead):
        norms = tuple(_norm(f"mtp_norm_{i}", hidden_dim, "tokens") for i in range(3))
        projection = Gemm("mtp_projection", hidden_dim, 2 * hidden_dim, "none")
        return (*norms, projection, *layer_operators(layer.block, hidden_dim, seq_len, unfused=unfused))
    norms = tuple(_norm(f"norm_{i}", hidden_dim, "tokens") for i in range(layer.num_norms))
    residuals = Elementwise("residual_adds", 6 * hidden_dim, 6 * hidden_dim, 2, 2, "tokens")
    attention = _attention(layer.attention, hidden_dim, seq_len)
    if unfused is not None:
        attention = tuple(part for op in attention for part in _unfused(op, seq_len, unfused))
    return (*norms, *attention, *_mlp(layer.mlp, hidden_dim), residuals)


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
        Elementwise("softmax", forward * width, backward * width, *kernels, "column", streams=True),
        Gemm("context", op.v_dim, width, "row", head_dim=op.v_dim),
    )


def _norm(name: str, width: int, shard: Shard) -> Elementwise:
    return Elementwise(name, 2 * width, 4 * width, 1, 2, shard)


def _logits(vocab_size: int, hidden_dim: int) -> tuple[Operator, ...]:
    # Forward: cast to fp32, log-softmax, pick; backward: softmax minus one-hot, cast back. Most of it in fp32.
    loss = Elementwise("cross_entropy", 3.5 * vocab_size, 4.5 * vocab_size, 3, 3, "column", element_bytes=4)
    return (Gemm("logits", vocab_size, hidden_dim, "column"), loss)


def _attention(attention: SoftmaxAttention | LatentAttention, hidden_dim: int, seq_len: int) -> tuple[Operator, ...]:
    chunked = isinstance(attention, SoftmaxAttention) and attention.chunked
    context = attended_tokens(seq_len, attention.window, chunked=chunked)
    if isinstance(attention, LatentAttention):
        return _latent_attention(attention, hidden_dim, context)
    q, kv = attention.q_dim, attention.kv_dim
    rotated = int((q + kv) * attention.rope_fraction)
    operators: list[Operator] = [Gemm("qkv", q + 2 * kv, hidden_dim, "column")]
    if attention.qk_norm != "none":
        operators.append(_norm("qk_norm", q + kv, "column"))
    if rotated:
        operators.append(Elementwise("rotary", 9 * rotated, 9 * rotated, 8, 8, "column"))
    operators.append(FusedAttention("attention", attention.num_heads, attention.head_dim, attention.head_dim, context))
    operators.append(Gemm("attention_out", hidden_dim, q, "row"))
    return tuple(operators)


def _latent_attention(attention: LatentAttention, hidden_dim: int, context: float) -> tuple[Operator, ...]:
    heads, rank = attention.num_heads, attention.q_lora_rank
    kv_up = heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    if rank is None:
        query: tuple[Operator, ...] = (Gemm("q", attention.q_dim, hidden_dim, "column"),)
    else:
        query = (Gemm("q_down", rank, hidden_dim, "none"), Gemm("q_up", attention.q_dim, rank, "column"))
    return (
        *query,
        Gemm("kv_down", attention.kv_lora_rank + attention.qk_rope_head_dim, hidden_dim, "none"),
        Gemm("kv_up", kv_up, attention.kv_lora_rank, "column"),
        Elementwise(
            "rotary", 9 * heads * attention.qk_rope_head_dim, 9 * heads * attention.qk_rope_head_dim, 8, 8, "column"
        ),
        FusedAttention("attention", heads, attention.head_dim, attention.v_head_dim, context),
        Gemm("attention_out", hidden_dim, heads * attention.v_head_dim, "row"),
    )


def _dense(mlp: DenseMLP, hidden_dim: int, prefix: str, rows: int = 1, matrices: int = 1) -> tuple[Operator, ...]:
    width = (2 if mlp.gated else 1) * mlp.ffn_dim
    # Gated: silu (2F) and product (3F) forward, 9F backward; otherwise one activation, 2F and 3F.
    forward, backward = (5, 9) if mlp.gated else (2, 3)
    kernels = (2, 3) if mlp.gated else (1, 1)
    activation = Elementwise(
        f"{prefix}activation", forward * mlp.ffn_dim * rows, backward * mlp.ffn_dim * rows, *kernels, "column"
    )
    return (
        Gemm(f"{prefix}up", width, hidden_dim, "column", rows, matrices),
        activation,
        Gemm(f"{prefix}down", hidden_dim, mlp.ffn_dim, "row", rows, matrices),
    )


def _mlp(mlp: DenseMLP | MoE, hidden_dim: int) -> tuple[Operator, ...]:
    if isinstance(mlp, DenseMLP):
        return _dense(mlp, hidden_dim, "mlp_")
    # Routing copies each token's vector to its experts and back: gather and weighted scatter, read and write.
    dispatch = Elementwise("dispatch", 5 * mlp.top_k * hidden_dim, 5 * mlp.top_k * hidden_dim, 6, 6, "none")
    shared = _dense(mlp.shared, hidden_dim, "shared_") if mlp.shared else ()
    router = Gemm("router", mlp.num_experts, hidden_dim, "none")
    return (router, dispatch, *_dense(mlp.expert, hidden_dim, "expert_", mlp.top_k, mlp.num_experts), *shared)


def model_flops_per_token(layers: tuple[tuple[Layer, int], ...], hidden_dim: int, seq_len: int) -> float:
    """FLOPs a training step needs per token: forward plus backward, no recompute, causal attention counted once."""
    total = 0.0
    for layer, count in layers:
        for op in layer_operators(layer, hidden_dim, seq_len):
            if isinstance(op, Gemm):
                total += count * 6 * op.n * op.k * op.rows_per_token
            elif isinstance(op, FusedAttention):
                total += count * 3 * op.forward_flops_per_token  # backward without the kernel's recomputed scores
    return total
