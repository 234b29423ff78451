"""Context parallelism: each sequence is shared out over cp, and attention sees all of it.

Of the cp ranks, `cp_ulysses` neighbours form an exchange group; the cp / cp_ulysses groups form a ring.

    exchange (Ulysses)   before attention each rank gives away heads and gets the group's tokens of those it keeps: one all-to-all
                         of q, k and v, and one back of the outputs
    ring                 keys and values go round, and each rank attends to one rank's after the other

Order of tokens: the ring's shares are cut so that causal work is even. A sequence of 2 R pieces gives ring position r the pieces r
and 2 R - 1 - r; within an exchange group each rank has a run of that share. Positions go with the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from ..schema.errors import RuntimeMismatchError
from ..schema.training_plan import TrainingPlan
from .data_parallel import compute_dtype
from .mesh import ParallelMesh
from .models.decoder import Decoder, DecoderBlock
from .models.ring_attention import ring_attention


@dataclass(frozen=True)
class ContextRanks:
    """Attention over the ranks that share each sequence.

    Attributes:
        exchange: ranks that swap tokens for heads; None for none.
        ring: ranks among which keys and values go round; None for none.
    """

    exchange: dist.ProcessGroup | None
    ring: dist.ProcessGroup | None

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend causally from this rank's tokens to the entire sequence; query [B, H, S, C], key and value [B, K, S, C]."""
        if self.exchange is not None:
            query, key, value = (_tokens_for_heads(x, self.exchange) for x in (query, key, value))
        groups = query.shape[1] // key.shape[1]
        if self.ring is not None:
            out = ring_attention(query, key, value, self.ring.group_name)
        else:
            key, value = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (key, value))
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return out if self.exchange is None else _heads_for_tokens(out, self.exchange)


def apply_context_parallel(stage: Decoder, mesh: ParallelMesh, plan: TrainingPlan, device: torch.device) -> None:
    """Let every block of a stage attend over cp, in place; nothing to do when cp is 1."""
    layout = plan.layout
    if layout.cp == 1:
        return
    if mesh.ring is not None and device.type == "cuda" and compute_dtype(plan) == torch.float32:
        raise RuntimeMismatchError(
            f"cp {layout.cp} in fp32: a ring needs the flash kernel, which GPUs have for bf16 and fp16",
            help="plan with --precision bf16-mixed",
        )
    positions = local_positions(mesh, plan).to(device)
    if stage.model.embed_positions is not None:
        stage.model.embed_positions.positions = positions
    for block in stage.model.layers.values():
        assert isinstance(block, DecoderBlock)
        if block.self_attn.rotary is not None:
            block.self_attn.rotary.positions = positions
        block.self_attn.context = ContextRanks(mesh.exchange, mesh.ring)


def local_positions(mesh: ParallelMesh, plan: TrainingPlan) -> Tensor:
    """Return the positions in the sequence of this rank's tokens [S / cp], ascending within each of its one or two runs."""
    layout, positions = plan.layout, torch.arange(plan.workload.seq_len)
    ring_size = layout.cp // layout.cp_ulysses
    ring_rank, exchange_rank = divmod(mesh.coordinates["cp"], layout.cp_ulysses)
    pieces = positions.chunk(2 * ring_size)
    share = torch.cat((pieces[ring_rank], pieces[2 * ring_size - 1 - ring_rank]))
    return share.chunk(layout.cp_ulysses)[exchange_rank]


def _tokens_for_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange [B, H, S, C] of this rank's tokens for [B, H / ranks, S ranks, C] of the group's."""
    batch, heads, tokens, width = x.shape
    by_rank = x.view(batch, group.size(), heads // group.size(), tokens, width).movedim(1, 0)
    return _exchanged(by_rank, group).movedim(0, 2).flatten(2, 3)


def _heads_for_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    batch, heads, tokens, width = x.shape
    by_rank = x.view(batch, heads, group.size(), tokens // group.size(), width).movedim(2, 0)
    return _exchanged(by_rank, group).movedim(0, 1).flatten(1, 2)


def _exchanged(by_rank: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send entry i of [ranks, ...] to rank i; return this rank's entry of every rank."""
    rows = by_rank.contiguous()
    ones = [1] * group.size()
    result: Tensor = all_to_all_single_autograd(rows, ones, ones, group)
    return result
