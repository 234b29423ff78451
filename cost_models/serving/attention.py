"""Seconds of attention of a serving engine: of rows that decode, each over its cache, and of prompts.

    decode    2 kernels + max(b t kv / (W e), 2 b t H (dk + dv) / (P e))     b rows over t tokens each
    prompts   fused causal attention of p tokens that attend to C each on average

Latent attention decodes over the compressed vectors (absorbed form); windows bound t. Layers with a state read and write it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...schema.layers import Block, LatentAttention, NoMixer, SoftmaxAttention
from ...schema.recurrences import Recurrence
from ...schema.serving import KernelEngine
from ...schema.units import FloatArray
from ..hardware.compute import DeviceRates
from ..layer.operators import OperatorRules, Scan, layer_operators
from ..learned.kernels import AttentionShape, attention_seconds
from ..learned.serving_kernels import ENGINES, DecodeShape, KernelDevice, decode_attention_s

_INDEX_KERNELS = 6
"""Of the scores and of the choice, each as long as three short ones: lengths, partial sums and a merge."""


@dataclass(frozen=True)
class AttentionHeads:
    """What the kernels of one block see on one rank: heads, key/value heads, widths, bytes of a cached token, window."""

    num_heads: float
    num_kv_heads: float
    key_dim: int
    value_dim: int
    token_bytes: float
    window: float
    chunked: bool = False
    is_latent: bool = False

    @classmethod
    def decoding(cls, block: Block, tp: int, element_bytes: float) -> AttentionHeads | None:
        """Return those of a block that decodes on one of ``tp`` ranks; None where it attends to no cache."""
        attention = block.attention
        if isinstance(attention, LatentAttention):
            width = attention.kv_lora_rank + attention.qk_rope_head_dim
            return cls(
                attention.num_heads / tp,
                1.0,
                width,
                attention.kv_lora_rank,
                width * element_bytes,
                float(attention.index_top_k or np.inf),
                is_latent=True,
            )
        if not isinstance(attention, SoftmaxAttention):
            return None
        kv_heads = max(attention.num_kv_heads / tp, 1.0)
        return cls(
            max(attention.num_heads / tp, 1.0),
            kv_heads,
            attention.head_dim,
            attention.head_dim,
            2.0 * attention.head_dim * kv_heads * element_bytes,
            float(attention.window or np.inf),
            attention.chunked,
        )

    def seen(self, tokens: FloatArray) -> FloatArray:
        """Return the tokens that a row attends to of ``tokens`` cached ones; in chunks half of one on average."""
        return np.minimum(tokens, self.window / 2 if self.chunked else self.window)


def decode_s(
    heads: AttentionHeads,
    rows: FloatArray,
    tokens: FloatArray,
    rates: DeviceRates,
    device: KernelDevice | None,
    engine: KernelEngine,
) -> FloatArray:
    """Return the seconds of ``rows`` that attend to ``tokens`` each in one block, by an engine's kernels.

    Args:
        rows, tokens: of each row's cache; heads: of the block.
        rates, device: of the accelerator; device: None for a CPU.
        engine: whose kernels they are.
    """
    seen = heads.seen(tokens)
    if device is not None:
        width = heads.key_dim if heads.is_latent else heads.key_dim + heads.value_dim
        sizes = (heads.num_heads, heads.num_kv_heads, heads.key_dim, heads.value_dim, heads.token_bytes)
        element = heads.token_bytes / (width * heads.num_kv_heads)
        of_kernel = element, float(heads.is_latent), float(ENGINES.index(engine))
        shape = DecodeShape(rows, seen, *map(np.asarray, (*sizes, *of_kernel)))
        return decode_attention_s(shape, device)
    moved = rows * seen * heads.token_bytes
    flops = 2 * rows * seen * heads.num_heads * (heads.key_dim + heads.value_dim)
    return np.asarray(
        2 * rates.kernel_s + np.maximum(moved / rates.elementwise_bytes_per_s, flops / rates.gemm_flops_per_s)
    )


def state_element_bytes(block: Block, element_bytes: float) -> float:
    """Return the bytes of an element of a block's state: engines keep those of delta rules in 32 bits (mamba_ssm_dtype)."""
    return max(element_bytes, 4.0) if getattr(block.attention, "delta", False) else element_bytes


def state_s(block: Block, tp: int, element_bytes: float, rows: FloatArray, rates: DeviceRates) -> FloatArray:
    """Return the seconds of ``rows`` that read and write the state of one block, where it has one."""
    if not isinstance(block.attention, Recurrence):
        return np.zeros_like(rows)
    moved = 2 * rows * block.attention.state_elements / tp * state_element_bytes(block, element_bytes)
    return np.asarray(2 * rates.kernel_s + moved / rates.elementwise_bytes_per_s)


def index_s(
    block: Block, queries: FloatArray, tokens: FloatArray, requests: FloatArray, rates: DeviceRates
) -> FloatArray:
    """Return the seconds of an indexer's scores of ``tokens`` for each query, and of choosing the highest; 0 without one.

    A product of 8 bits with an activation in between runs at the rate of those in 16; scores are written and read in 32 bits.
    """
    attention = block.attention
    if not isinstance(attention, LatentAttention) or not attention.index_top_k:
        return np.zeros(np.broadcast_shapes(queries.shape, tokens.shape))
    flops = 2 * queries * tokens * attention.index_heads * attention.index_dim
    traffic = requests * tokens * index_bytes(block) + 8 * queries * tokens
    return np.asarray(
        _INDEX_KERNELS * rates.kernel_s
        + np.maximum(flops / rates.gemm_flops_per_s, traffic / rates.elementwise_bytes_per_s)
    )


def index_bytes(block: Block) -> int:
    """Return the bytes of a token's key for the indexer: 8 bits an element and a scale."""
    attention = block.attention
    return attention.index_dim + 4 if isinstance(attention, LatentAttention) and attention.index_top_k else 0


def prompt_s(
    block: Block, hidden_dim: int, tp: int, tokens: FloatArray, context: FloatArray, rates: DeviceRates
) -> FloatArray:
    """Return the seconds of one block for ``tokens`` of prompts that attend to ``context`` each on average.

    Prompts are taken for equal and new where their mean context is at most half of all tokens, else for the rest of one whose
    beginning is in the cache.
    """
    attention = block.attention
    if isinstance(attention, NoMixer):
        return np.zeros(np.broadcast_shapes(tokens.shape, context.shape))
    if isinstance(attention, Recurrence):
        seconds = np.zeros(np.broadcast_shapes(tokens.shape, context.shape))
        for op in layer_operators(block, OperatorRules(hidden_dim=hidden_dim)):
            if isinstance(op, Scan):
                peak = rates.vector_flops_per_s if op.on_vectors else rates.gemm_flops_per_s
                flops = op.forward_flops_per_token * tokens / tp / peak
                traffic = op.forward_elements * rates.compute_bytes * tokens / tp / rates.elementwise_bytes_per_s
                seconds = seconds + op.kernels * rates.kernel_s + np.maximum(flops, traffic)
        return seconds
    tokens, context = np.broadcast_arrays(tokens, context)
    seq_len = np.minimum(tokens, np.maximum(2 * context - 1, 1.0))
    longest = np.maximum(context + seq_len / 2, seq_len)
    sparse, absorbed = 0, np.ones_like(longest)
    if isinstance(attention, LatentAttention) and attention.index_top_k:
        sparse = attention.index_top_k
        absorbed = np.where(longest > sparse, _absorbed_ratio(attention), 1.0)
    if attention.window is not None or sparse:
        window = float(attention.window or sparse)
        # The first tokens of a window see less than all of it.
        new = np.minimum(
            window / 2
            if getattr(attention, "chunked", False)
            else window - window * window / (2 * np.maximum(seq_len, window)),
            context,
        )
        context, longest = np.maximum(new, 1.0), np.minimum(longest, window)
    value_dim = attention.v_head_dim if isinstance(attention, LatentAttention) else attention.head_dim
    heads = max(attention.num_heads / tp, 1.0)
    group = attention.num_heads / attention.num_kv_heads
    width = (attention.head_dim + value_dim) / 2
    if rates.attention is None:
        flops = 2 * tokens * context * heads * (attention.head_dim + value_dim) / rates.gemm_flops_per_s
        traffic = rates.compute_bytes * tokens * heads * 2 * (attention.head_dim + value_dim)
        return np.asarray(rates.launch_s + np.maximum(flops, traffic / rates.elementwise_bytes_per_s))
    ones = np.ones_like(context)
    shape = AttentionShape(
        rows=heads * tokens / seq_len, group=group * ones, seq_len=seq_len, context=context, longest=longest,
        width=width * ones, element_bytes=rates.compute_bytes * ones,
    )  # fmt: skip
    flat = AttentionShape(*(np.ravel(part) for part in shape))
    kernel = rates.attention
    seconds = attention_seconds(
        kernel.kernel,
        flat,
        kernel.device,
        backward=False,
        arithmetic_ratio=kernel.arithmetic_ratio,
        reference=kernel.reference,
    )
    return np.asarray(seconds.reshape(context.shape) * absorbed)


def _absorbed_ratio(attention: LatentAttention) -> float:
    """Return the arithmetic of attention over the compressed vectors, which chosen tokens need, over that of the expanded ones."""
    absorbed = 2 * attention.kv_lora_rank + attention.qk_rope_head_dim
    return absorbed / (attention.head_dim + attention.v_head_dim)
