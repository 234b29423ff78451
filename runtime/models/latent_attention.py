"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434 section 2.1), as trained: keys and values expanded for every head.

Shapes: B micro-batch, S sequence, D hidden_dim, H heads (this rank's share under tensor parallelism), C = N + R width of a query
or key, of which N without and R with position, V width of a value.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...schema.model import LatentAttention
from .norm import RMSNorm
from .ring_attention import SequenceRanks
from .rotary import Rotary, rotate
from .whole_linear import WholeLinear

LATENT_NORM_EPS = 1e-6
"""Of the norms of compressed vectors. Source: DeepSeek's modeling files, whose RMSNorm defaults to it there."""


class LatentSelfAttention(nn.Module):
    """Causal attention whose queries, keys and values are made from compressed vectors.

    Attributes:
        spread: ranks that share the heads; None where this one has all. The compressed vectors are made on each of them.
        hidden: how the input is spread over them.
        context: who attends where S is only this rank's part of the sequence.
    """

    context: SequenceRanks | None = None

    def __init__(self, hidden_dim: int, spec: LatentAttention, rotary: Rotary, *, is_flash: bool) -> None:
        super().__init__()
        self.spec, self.rotary, self.is_flash = spec, rotary, is_flash
        rank, heads = spec.q_lora_rank, spec.num_heads
        if rank is None:
            self.q_proj = nn.Linear(hidden_dim, spec.q_dim, bias=False)
        else:
            self.q_a_proj = WholeLinear(hidden_dim, rank)
            self.q_a_layernorm = RMSNorm(rank, LATENT_NORM_EPS)
            self.q_b_proj = nn.Linear(rank, spec.q_dim, bias=False)
        self.kv_a_proj_with_mqa = WholeLinear(hidden_dim, spec.kv_lora_rank + spec.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(spec.kv_lora_rank, LATENT_NORM_EPS)
        self.kv_b_proj = nn.Linear(spec.kv_lora_rank, heads * (spec.qk_nope_head_dim + spec.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * spec.v_head_dim, hidden_dim, bias=False)
        self.spread: DeviceMesh | None = None
        self.hidden: Placement = Replicate()

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        hidden = self._gathered(hidden)
        query, (key, value) = self._query(hidden), self._key_value(hidden)
        # The kernels take one width only: values are filled up with zeros, whose outputs are dropped.
        width = self.spec.v_head_dim
        out = self._attend(query, key, F.pad(value, (0, query.shape[-1] - width)))[..., :width]
        result: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return result

    def _query(self, hidden: Tensor) -> Tensor:
        """[B, S, D] to [B, H, S, C]."""
        is_direct = self.spec.q_lora_rank is None
        heads = self.q_proj(hidden) if is_direct else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        still, turned = self._heads(heads).split([self.spec.qk_nope_head_dim, self.spec.qk_rope_head_dim], dim=-1)
        query = torch.cat((still, self._rotated(turned)), dim=-1)
        return query * self.rotary.softmax_factor if self.rotary.softmax_factor != 1 else query

    def _key_value(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, D] to keys [B, H, S, C] and values [B, H, S, V]."""
        spec = self.spec
        compressed, shared = self.kv_a_proj_with_mqa(hidden).split([spec.kv_lora_rank, spec.qk_rope_head_dim], dim=-1)
        expanded = self._heads(self.kv_b_proj(self.kv_a_layernorm(compressed)))
        still, value = expanded.split([spec.qk_nope_head_dim, spec.v_head_dim], dim=-1)
        turned = self._rotated(self._shared(shared)[:, None]).expand(-1, still.shape[1], -1, -1)
        return torch.cat((still, turned), dim=-1), value

    def _gathered(self, hidden: Tensor) -> Tensor:
        """The whole sequence on every rank; what is made of it is the same on all, and so is its gradient."""
        if self.spread is None or self.hidden.is_replicate():
            return hidden
        return DTensor.from_local(hidden, self.spread, [self.hidden], run_check=False).full_tensor()

    def _shared(self, x: Tensor) -> Tensor:
        """What the heads of all ranks read: each rank's gradient of it is a part."""
        if self.spread is None:
            return x
        return DTensor.from_local(x, self.spread, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])

    def _heads(self, x: Tensor) -> Tensor:
        """[B, S, H * width] to [B, H, S, width]; H of this rank."""
        heads = self.spec.num_heads // (1 if self.spread is None else self.spread.size())
        return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)

    def _rotated(self, x: Tensor) -> Tensor:
        """Pairs stand side by side in the published weights: (2 i, 2 i + 1) is turned as (i, i + R / 2) is elsewhere."""
        cos, sin = self.rotary.tables(x.shape[2], x.device, x.dtype)
        return rotate(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos, sin)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.context is not None:
            return self.context.attend(query, key, value)
        backend: AbstractContextManager[None] = nullcontext() if self.is_flash else sdpa_kernel(SDPBackend.MATH)
        with backend:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
