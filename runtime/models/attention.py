"""Causal attention: multi-head or grouped-query, and multi-head latent attention (DeepSeek-V2, arXiv:2405.04434 section 2.1).

Latent attention is as trained: keys and values expanded for every head.

Shapes: B micro-batch, S sequence, D hidden_dim, H heads and K kv heads (this rank's share under tensor parallelism), C head_dim. Of
latent attention C = N + R is the width of a query or key, of which N without and R with position, V the width of a value.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...schema.errors import RuntimeMismatchError
from ...schema.layers import LatentAttention, SoftmaxAttention
from ...schema.rope import Rope
from .layers import ReplicatedLinear, RMSNorm, gathered, redistribute

AttentionKind = Literal["flash", "math"]

LATENT_NORM_EPS = 1e-6
"""Of the norms of compressed vectors. Source: DeepSeek's modeling files, whose RMSNorm defaults to it there."""


class Rotary:
    """Tables of one rope, stored for the last sequence length.

    Attributes:
        positions: places in the sequence of this rank's tokens [S]; None for 0, 1, 2...
        made_tables: as they were last requested; they live on.

    A plain object and not a module: buffers would be lost when a model that was built on the meta device is materialised.
    """

    def __init__(self, rope: Rope, head_dim: int) -> None:
        self.rope, self.head_dim = rope, head_dim
        self.positions: Tensor | None = None
        self.made_tables: tuple[Tensor, ...] = ()
        self._key: tuple[int, torch.device, torch.dtype] | None = None

    @property
    def softmax_factor(self) -> float:
        """Return the factor of latent attention on its scores where the rope says so (DeepSeek-V2's modeling file)."""
        rope = self.rope
        return 1.0 if rope.mscale_all_dim is None else _mscale(rope.factor, rope.mscale_all_dim) ** 2

    def move(self, positions: Tensor) -> None:
        """Let the next passes be over tokens at these positions [S]."""
        self.positions, self._key = positions, None

    def tables(self, seq_len: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin [S, C] in ``dtype``; the angles are computed in fp32."""
        if self._key != (seq_len, device, dtype):
            with torch.no_grad():
                positions = torch.arange(seq_len, device=device) if self.positions is None else self.positions
                angles = positions.float()[:, None] * inverse_frequencies(self.rope, self.head_dim, device)
                angles = torch.cat((angles, angles), dim=-1)
                factor = attention_factor(self.rope)
                self.made_tables = (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
            self._key = (seq_len, device, dtype)
        cos, sin = self.made_tables
        return cos, sin


class SequenceRanks(Protocol):
    """Attention over ranks that share each sequence, or over a cache of what came before (runtime/serving)."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend: query [B, H, S, C] of this rank's tokens, key and value [B, K, S, C] to [B, H, S, C]."""
        ...


class LatentSelfAttention(nn.Module):
    """Causal attention whose queries, keys and values are made from compressed vectors.

    Attributes:
        tp: ranks that share the heads; None where this one has all. The compressed vectors are made on each of them.
        hidden: placement of the input on them.
        context: who attends where S is only this rank's part of the sequence.
        absorbs: leave keys and values compressed and let queries and outputs pass through the expansion instead (section 2.1.2 of
        the
            paper); a cache then holds the compressed vectors.
    """

    context: SequenceRanks | None = None
    absorbs = False

    def __init__(self, hidden_dim: int, spec: LatentAttention, rotary: Rotary, kind: AttentionKind) -> None:
        super().__init__()
        self.spec, self.rotary, self.kind = spec, rotary, kind
        rank, heads = spec.q_lora_rank, spec.num_heads
        if rank is None:
            self.q_proj = nn.Linear(hidden_dim, spec.q_dim, bias=False)
        else:
            self.q_a_proj = ReplicatedLinear(hidden_dim, rank)
            self.q_a_layernorm = RMSNorm(rank, LATENT_NORM_EPS)
            self.q_b_proj = nn.Linear(rank, spec.q_dim, bias=False)
        self.kv_a_proj_with_mqa = ReplicatedLinear(hidden_dim, spec.kv_lora_rank + spec.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(spec.kv_lora_rank, LATENT_NORM_EPS)
        self.kv_b_proj = nn.Linear(spec.kv_lora_rank, heads * (spec.qk_nope_head_dim + spec.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * spec.v_head_dim, hidden_dim, bias=False)
        self.tp: DeviceMesh | None = None
        self.hidden: Placement = Replicate()

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, S, D] to [B, S, D]."""
        if self.tp is not None and not self.hidden.is_replicate():
            # What is made of the entire sequence is the same on all ranks, and so is its gradient.
            hidden = redistribute(hidden, self.tp, self.hidden, Replicate())
        if self.absorbs:
            return self._absorbed(hidden)
        query, (key, value) = self._query(hidden), self._key_value(hidden)
        # The kernels take one width only: values are filled up with zeros, whose outputs are dropped.
        width = self.spec.v_head_dim
        value = F.pad(value, (0, query.shape[-1] - width))
        out = _attend(query, key, value, self.kind, self.context)[..., :width]
        result: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return result

    def _absorbed(self, hidden: Tensor) -> Tensor:
        """Do the same over compressed vectors of L + R numbers, one key for all heads, whose first L are its value."""
        spec, context = self.spec, self.context
        assert context is not None
        compressed, shared = self.kv_a_proj_with_mqa(hidden).split([spec.kv_lora_rank, spec.qk_rope_head_dim], dim=-1)
        key = torch.cat((self.kv_a_layernorm(compressed)[:, None], self._rotated(shared[:, None])), dim=-1)
        expansion = self.kv_b_proj.weight.view(-1, spec.qk_nope_head_dim + spec.v_head_dim, spec.kv_lora_rank)
        of_key, of_value = expansion.split([spec.qk_nope_head_dim, spec.v_head_dim], dim=1)  # [H, N or V, L]
        still, turned = self._query(hidden).split([spec.qk_nope_head_dim, spec.qk_rope_head_dim], dim=-1)
        query = torch.cat((still @ of_key, turned), dim=-1)
        # Kernels divide by the root of the width that they see.
        query = query * math.sqrt(query.shape[-1] / (spec.qk_nope_head_dim + spec.qk_rope_head_dim))
        out = context.attend(query, key, key)[..., : spec.kv_lora_rank] @ of_value.transpose(1, 2)
        result: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return result

    def _query(self, hidden: Tensor) -> Tensor:
        """Return the queries [B, H, S, C] of [B, S, D]."""
        is_direct = self.spec.q_lora_rank is None
        heads = self.q_proj(hidden) if is_direct else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        still, turned = self._heads(heads).split([self.spec.qk_nope_head_dim, self.spec.qk_rope_head_dim], dim=-1)
        query = torch.cat((still, self._rotated(turned)), dim=-1)
        return query * self.rotary.softmax_factor if self.rotary.softmax_factor != 1 else query

    def _key_value(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys [B, H, S, C] and values [B, H, S, V] of [B, S, D]."""
        spec = self.spec
        compressed, shared = self.kv_a_proj_with_mqa(hidden).split([spec.kv_lora_rank, spec.qk_rope_head_dim], dim=-1)
        expanded = self._heads(self.kv_b_proj(self.kv_a_layernorm(compressed)))
        still, value = expanded.split([spec.qk_nope_head_dim, spec.v_head_dim], dim=-1)
        if self.tp is not None:
            shared = gathered(shared, self.tp, Replicate())  # the heads of all ranks read it
        turned = self._rotated(shared[:, None]).expand(-1, still.shape[1], -1, -1)
        return torch.cat((still, turned), dim=-1), value

    def _heads(self, x: Tensor) -> Tensor:
        """Reshape [B, S, H * width] to [B, H, S, width]; H of this rank."""
        heads = self.spec.num_heads // (1 if self.tp is None else self.tp.size())
        return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)

    def _rotated(self, x: Tensor) -> Tensor:
        """Rotate pairs that stand side by side in the published weights: (2 i, 2 i + 1) as (i, i + R / 2) elsewhere."""
        cos, sin = self.rotary.tables(x.shape[2], x.device, x.dtype)
        return rotate(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos, sin)


class SelfAttention(nn.Module):
    """Causal multi-head or grouped-query attention, with rotary positions but where the model has learned ones.

    Attributes:
        context: who attends where S is only this rank's part of the sequence.
    """

    context: SequenceRanks | None = None

    def __init__(
        self, hidden_dim: int, spec: SoftmaxAttention, rotary: Rotary | None, eps: float, kind: AttentionKind
    ) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.rotary = rotary
        self.kind = kind
        self.q_proj = nn.Linear(hidden_dim, spec.q_dim, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(hidden_dim, spec.kv_dim, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(hidden_dim, spec.kv_dim, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(spec.q_dim, hidden_dim, bias=spec.out_bias)
        self.norm_each_head = spec.qk_norm == "per_head"
        widths = {"per_head": (spec.head_dim, spec.head_dim), "full": (spec.q_dim, spec.kv_dim)}.get(spec.qk_norm)
        self.q_norm = RMSNorm(widths[0], eps) if widths else None
        self.k_norm = RMSNorm(widths[1], eps) if widths else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, S, D] to [B, S, D]."""
        query, key = self._normed(self.q_proj(hidden), self.q_norm), self._normed(self.k_proj(hidden), self.k_norm)
        query, key, value = (x.transpose(1, 2) for x in (query, key, self._heads(self.v_proj(hidden))))
        if self.rotary is not None:
            cos, sin = self.rotary.tables(query.shape[2], query.device, query.dtype)
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        out = _attend(query, key, value, self.kind, self.context)
        result: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return result

    def _normed(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """Reshape [B, S, heads * C] to [B, S, heads, C], each head normed or all of them together."""
        if norm is None or self.norm_each_head:
            x = self._heads(x)
            return x if norm is None else norm(x)
        return self._heads(norm(x))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim)


def _attend(query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind, context: SequenceRanks | None) -> Tensor:
    """Attend causally: query [B, H, S, C], key and value [B, K, S, C] to [B, H, S, C]."""
    if context is not None:
        return context.attend(query, key, value)
    backend: AbstractContextManager[None] = sdpa_kernel(SDPBackend.MATH) if kind == "math" else nullcontext()
    with backend:
        return grouped_attention(query, key, value)


def grouped_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend causally where all tokens are here, to keys and values that groups of heads share."""
    groups = query.shape[1] // key.shape[1]
    # On CUDA only the flash and cuDNN kernels read grouped heads; for fp32 they do not exist, and the fallback would hold
    # [S, S] matrices, which costs more than repeating the heads.
    native = query.device.type == "cpu" or query.dtype in (torch.float16, torch.bfloat16)
    if groups > 1 and not native:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=groups > 1 and native)


def inverse_frequencies(rope: Rope, head_dim: int, device: torch.device) -> Tensor:
    """Return the angles of one position step [C/2], fp32.

    Source: theta^(-2i/C) (arXiv:2104.09864); linear divides by the factor (arXiv:2306.15595); llama3 divides long wavelengths by
    the factor and blends between the two bounds (`_compute_llama3_parameters` of transformers).
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    frequencies: Tensor = 1.0 / rope.theta**exponents
    if rope.scaling == "none":
        return frequencies
    if rope.scaling == "linear":
        return frequencies.div(rope.factor)
    if rope.scaling == "yarn":
        return _yarn_frequencies(rope, frequencies)
    if rope.scaling != "llama3":
        raise RuntimeMismatchError(f"this version cannot run rope scaling {rope.scaling}")
    if rope.original_max_seq_len is None:
        raise RuntimeMismatchError("llama3 rope scaling needs original_max_seq_len, which the plan does not have")
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_seq_len / wavelengths
    blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    scaled: Tensor = blend * frequencies + (1 - blend) * frequencies / rope.factor
    return scaled


def _yarn_frequencies(rope: Rope, frequencies: Tensor) -> Tensor:
    """Divide slow pairs by the factor, keep fast ones, blend between (arXiv:2309.00071 section 3.2)."""
    if rope.original_max_seq_len is None:
        raise RuntimeMismatchError("yarn rope scaling needs original_max_seq_len, which the plan does not have")
    last = 2 * len(frequencies) - 1

    def pair(turns: float) -> float:
        """Return the pair that turns this often within the original length."""
        assert rope.original_max_seq_len is not None
        wavelength = rope.original_max_seq_len / (2 * math.pi * turns)
        return len(frequencies) * math.log(wavelength) / math.log(rope.theta)

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, last)
    pairs = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
    slowed = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies * (1 - slowed) + frequencies / rope.factor * slowed


def attention_factor(rope: Rope) -> float:
    """Return the factor on cos and sin (arXiv:2309.00071 section 3.4; with mscale as in DeepSeek-V2): 1 but for yarn."""
    if rope.scaling != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotate(x_BHSC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # noqa: N803
    """Each head's pairs (i, i + C/2) turned by the angle of their position; cos and sin are [S, C]."""
    first, second = x_BHSC.chunk(2, dim=-1)
    return x_BHSC * cos + torch.cat((-second, first), dim=-1) * sin
