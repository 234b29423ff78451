"""Attention of a pack: every document causally to itself, over the ranks of the group that the micro-batch has chosen.

On one rank it is a loop of SDPA over documents, exact and faster than a mask over all of them (2,048 tokens in 8 documents take 287
ms on two cores, dense attention 994); on CUDA one call of `varlen_attn`, where the dtype has it. Over more ranks tokens are
exchanged for heads, and keys and values go round a ring, as in context_parallel.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...schema.errors import RuntimeMismatchError
from ...schema.training_plan import TrainingPlan
from ..context_parallel import heads_for_tokens, repeated_heads, ring_attention, tokens_for_heads
from ..mesh import ParallelMesh
from ..models.attention import Rotary
from ..models.decoder import Decoder, DecoderBlock
from ..models.layers import PositionEmbedding
from .packs import Pack


@dataclass(frozen=True)
class GroupRanks:
    """The ranks of a group that swap tokens for heads, and those of a ring; None for none."""

    exchange: dist.ProcessGroup | None = None
    ring: dist.ProcessGroup | None = None


class DocumentAttention:
    """Attention of all blocks of a rank over the documents of the pack that was entered last.

    The groups of every size are made once, by those ranks that are in them: about 2 log2(R) a rank.
    """

    def __init__(self, ranks: Sequence[int], num_kv_heads: int) -> None:
        """Make the groups.

        Args:
            ranks: data ranks that share a batch, in order, as ranks of the default group: those with this one's place in tp.
            num_kv_heads: on each rank; an exchange group has a divisor of it.
        """
        if list(ranks) != sorted(ranks):
            raise RuntimeMismatchError(
                f"data-parallel ranks lie on the devices {list(ranks)}; groups of documents need them ascending",
                help="sort the devices of the plan's rank_map",
            )
        self.num_ranks, self.rank = len(ranks), list(ranks).index(dist.get_rank())
        self._num_kv_heads = num_kv_heads
        self._groups = {1: GroupRanks()}
        self._lengths: list[int] = []
        self._entered = self._groups[1]
        self.positions = torch.zeros(0, dtype=torch.long)
        self._learned, self._rotaries = list[PositionEmbedding](), set[Rotary]()
        size = 2
        while size <= self.num_ranks:
            self._groups[size] = self._made(size, ranks)
            size *= 2

    @classmethod
    def of_plan(cls, plan: TrainingPlan, mesh: ParallelMesh, num_kv_heads: int) -> DocumentAttention:
        """Make the groups of this rank's stage; ``num_kv_heads`` of the model."""
        layout = plan.layout
        first = mesh.rank // layout.stage_ranks * layout.stage_ranks
        ranks = [plan.rank_map[rank] for rank in range(first + mesh.tp_rank, first + layout.stage_ranks, layout.tp)]
        return cls(ranks, max(num_kv_heads // layout.tp, 1))

    def attach(self, decoders: Sequence[Decoder]) -> None:
        """Let all blocks of decoders attend so."""
        self._learned += [decoder.model.embed_positions for decoder in decoders if decoder.model.embed_positions]
        for block in (block for decoder in decoders for block in decoder.model.layers.values()):
            assert isinstance(block, DecoderBlock)
            if block.self_attn is None:
                continue
            block.self_attn.context = self
            if block.self_attn.rotary is not None:
                self._rotaries.add(block.self_attn.rotary)

    def ulysses_of(self, size: int) -> int:
        """Return the ranks of an exchange group in a group of a size: as many as the heads of keys and values allow (C5)."""
        return math.gcd(size, self._num_kv_heads)

    def _made(self, size: int, ranks: Sequence[int]) -> GroupRanks:
        first = self.rank // size * size
        if first + size > self.num_ranks:
            return GroupRanks()  # no such group holds this rank
        members, ulysses = ranks[first : first + size], self.ulysses_of(size)
        place = self.rank - first
        begin = place // ulysses * ulysses
        exchange, ring = members[begin : begin + ulysses], members[place % ulysses :: ulysses]
        return GroupRanks(_group(exchange), _group(ring))

    def enter(self, pack: Pack) -> None:
        """Let the next passes be over a pack."""
        self._lengths, self._entered, self.positions = list(pack.lengths), self._groups[pack.size], pack.positions
        for rotary in self._rotaries:
            rotary.move(pack.positions)
        for learned in self._learned:
            learned.positions = pack.positions

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend: query [1, H, S, C] of this rank's tokens, key and value [1, K, S, C] to [1, H, S, C]."""
        ranks, lengths = self._entered, self._lengths
        if ranks.exchange is not None:
            query, key, value = (tokens_for_heads(x, ranks.exchange) for x in (query, key, value))
        if ranks.ring is not None:
            out = ring_attention(query, key, value, lengths, ranks.ring.group_name)[0]
        else:
            out = attend_to_documents(query, key, value, lengths)
        return out if ranks.exchange is None else heads_for_tokens(out, ranks.exchange)


def attend_to_documents(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
    """Attend causally within each document of S tokens: query [1, H, S, C], key and value [1, K, S, C] to [1, H, S, C]."""
    groups = query.shape[1] // key.shape[1]
    if query.device.type == "cuda" and query.dtype in (torch.float16, torch.bfloat16):
        from torch.nn.attention.varlen import varlen_attn

        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=query.device)
        rows = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        out = varlen_attn(*rows, ends, ends, max(lengths), max(lengths), window_size=(-1, 0), enable_gqa=groups > 1)
        assert isinstance(out, Tensor)
        return out.transpose(0, 1)[None]
    if query.device.type != "cpu":  # only the CPU's kernel for fp32 reads grouped heads
        key, value = (repeated_heads(x, query.shape[1], dim=1) for x in (key, value))
    parts = (x.split(list(lengths), dim=2) for x in (query, key, value))
    outs = [
        F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=rows[0].shape[1] != rows[1].shape[1])
        for rows in zip(*parts, strict=True)
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def _group(members: Sequence[int]) -> dist.ProcessGroup | None:
    """Return the group of ranks, which only they make; None for one."""
    return dist.new_group(list(members), use_local_synchronization=True) if len(members) > 1 else None
