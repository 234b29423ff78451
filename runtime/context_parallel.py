"""Context parallelism: each sequence is shared out over cp, and attention sees all of it.

Of the cp ranks, `cp_ulysses` neighbours form an exchange group; the cp / cp_ulysses groups form a ring.

    exchange (Ulysses)   before attention each rank gives away heads and gets the group's tokens of those it keeps: one all-to-all
                         of q, k and v, and one back of the outputs
    ring                 keys and values go round, and each rank attends to one rank's after the other, by the flash kernels

Shapes: B micro-batch, H heads, K kv heads, S this rank's tokens, C head_dim. Order of tokens: ring position r of R has the pieces r
and 2 R - 1 - r of 2 R, one after the other; within an exchange group each rank has a run of that share. Positions go with the
tokens. So against the keys of position j it needs
    j = r   all of them, causally (its two pieces ascend)
    j < r   the first half of the keys, for all queries
    j > r   all keys, for the second half of the queries
two pieces' worth of pairs but for the first step: every rank has the same work. Of several documents in a row (documents/) each is
cut so, and attends to itself. Source: Brandon et al., Striped Attention,
arXiv:2311.09431 (the imbalance), and the head-tail order of torch's context parallelism; Liu et al., arXiv:2310.01889 (the ring).

Partial outputs o_j with log-sum-exps l_j merge as out = sum_j exp(l_j - l) o_j, l = log sum_j exp(l_j). The backward kernel takes
out and l of the full row, so each step gives its part of every gradient; those of keys and values travel on with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.distributed_c10d import _resolve_process_group

from ..schema.errors import RuntimeMismatchError
from ..schema.training_plan import TrainingPlan
from .data_parallel import compute_dtype
from .mesh import ParallelMesh
from .models.decoder import Decoder, DecoderBlock


@dataclass(frozen=True)
class ContextRanks:
    """Attention over the ranks that share each sequence: those that swap tokens for heads, and those of a ring; None for none."""

    exchange: dist.ProcessGroup | None
    ring: dist.ProcessGroup | None

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend causally from this rank's tokens to the entire sequence; query [B, H, S, C], key and value [B, K, S, C]."""
        if self.exchange is not None:
            query, key, value = (tokens_for_heads(x, self.exchange) for x in (query, key, value))
        if self.ring is not None:
            out = ring_attention(query, key, value, [query.shape[2]], self.ring.group_name)[0]
        else:
            key, value = (repeated_heads(x, query.shape[1], dim=1) for x in (key, value))
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return out if self.exchange is None else heads_for_tokens(out, self.exchange)


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
        if block.self_attn is None:
            continue
        if block.self_attn.rotary is not None:
            block.self_attn.rotary.positions = positions
        block.self_attn.context = ContextRanks(mesh.exchange, mesh.ring)


def local_positions(mesh: ParallelMesh, plan: TrainingPlan) -> Tensor:
    """Return the positions in the sequence of this rank's tokens [S / cp]."""
    layout, positions = plan.layout, torch.arange(plan.workload.seq_len)
    ring_size = layout.cp // layout.cp_ulysses
    ring_rank, exchange_rank = divmod(mesh.coordinates["cp"], layout.cp_ulysses)
    pieces = positions.chunk(2 * ring_size)
    share = torch.cat((pieces[ring_rank], pieces[2 * ring_size - 1 - ring_rank]))
    return share.chunk(layout.cp_ulysses)[exchange_rank]


def tokens_for_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange [B, H, S, C] of this rank's tokens for [B, H / ranks, S ranks, C] of the group's."""
    batch, heads, tokens, width = x.shape
    by_rank = x.view(batch, group.size(), heads // group.size(), tokens, width).movedim(1, 0)
    return _exchanged(by_rank, group).movedim(0, 2).flatten(2, 3)


def heads_for_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Undo `tokens_for_heads`."""
    batch, heads, tokens, width = x.shape
    by_rank = x.view(batch, heads, group.size(), tokens // group.size(), width).movedim(2, 0)
    return _exchanged(by_rank, group).movedim(0, 1).flatten(1, 2)


def _exchanged(by_rank: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send entry i of [ranks, ...] to rank i; return this rank's entry of every rank."""
    rows = by_rank.contiguous()
    ones = [1] * group.size()
    result: Tensor = all_to_all_single_autograd(rows, ones, ones, group)
    return result


_aten = torch.ops.aten


@torch.library.custom_op("meshwright::ring_attention", mutates_args=())
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], group_name: str
) -> tuple[Tensor, Tensor]:
    """Return out [B, H, S, C] in the query's dtype, and the log-sum-exps [B, H, S] in fp32.

    Args:
        lengths: tokens of each document on this rank, even numbers that sum to S.
    """
    group, query = _resolve_process_group(group_name), query.contiguous()
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    lse = torch.full(query.shape[:3], -torch.inf, dtype=torch.float32, device=query.device)
    for queries, keys, causal, moving in _round(torch.stack((key, value)), group, lengths):
        part, part_lse = _forward(query[:, :, queries], moving[:, :, :, keys], causal)
        merged = torch.logaddexp(lse[:, :, queries], part_lse)
        out[:, :, queries] *= (lse[:, :, queries] - merged).exp()[..., None]
        out[:, :, queries] += part * (part_lse - merged).exp()[..., None]
        lse[:, :, queries] = merged
    return out.to(query.dtype), lse


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, list[int], str], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, ctx.lengths, ctx.group_name = inputs
    ctx.save_for_backward(query, key, value, *output)
    ctx.mark_non_differentiable(output[1])


def _backward_ring(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
    query, key, value, out, lse = ctx.saved_tensors
    group = _resolve_process_group(ctx.group_name)
    query, grad_out = query.contiguous(), grad_out.contiguous()
    grad_query = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    key_value = torch.stack((key, value))
    grads = torch.zeros_like(key_value)
    arriving_grads: _Passing | None = None
    for number, (queries, keys, causal, moving) in enumerate(_round(key_value, group, ctx.lengths)):
        is_first, is_last = number % len(ctx.lengths) == 0, (number + 1) % len(ctx.lengths) == 0
        rows = (x[:, :, queries] for x in (grad_out, query, out, lse))
        part_query, part_grads = _backward(*rows, moving[:, :, :, keys], causal)
        grad_query[:, :, queries] += part_query
        grads = arriving_grads.wait() if is_first and arriving_grads is not None else grads
        grads[:, :, :, keys] += part_grads
        arriving_grads = _Passing(grads, group) if is_last else arriving_grads
    assert arriving_grads is not None
    grad_key, grad_value = arriving_grads.wait()
    return grad_query.to(query.dtype), grad_key, grad_value, None, None


def _round(
    moving: Tensor, group: dist.ProcessGroup, lengths: Sequence[int]
) -> Iterator[tuple[slice, slice, bool, Tensor]]:
    """Let keys and values go round; yield the queries and keys that meet, whether causally, and those that are here.

    At each place of the round every document comes once, in order.
    """
    rank, size = group.rank(), group.size()
    for step in range(size):
        arriving = _Passing(moving, group) if step + 1 < size else None
        for end, num_tokens in zip(accumulate(lengths), lengths, strict=True):
            yield *_needed(rank, (rank - step) % size, end - num_tokens, end), moving
        moving = arriving.wait() if arriving is not None else moving


def _needed(rank: int, source: int, start: int, stop: int) -> tuple[slice, slice, bool]:
    """Return the queries and keys of a document's tokens ``start .. stop - 1`` that meet, and whether causally."""
    everything, middle = slice(start, stop), (start + stop) // 2
    if source == rank:
        return everything, everything, True
    if source < rank:
        return everything, slice(start, middle), False
    return slice(middle, stop), everything, False


class _Passing:
    """A tensor on its way to the next rank of a ring, and the previous rank's on its way here."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        self._sent = tensor.contiguous()
        self._received = torch.empty_like(self._sent)
        ranks, rank = dist.get_process_group_ranks(group), group.rank()
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, ranks[(rank + 1) % len(ranks)], group),
                dist.P2POp(dist.irecv, self._received, ranks[(rank - 1) % len(ranks)], group),
            ]
        )

    def wait(self) -> Tensor:
        """Return what has arrived."""
        for work in self._works:
            work.wait()
        return self._received


def _forward(query: Tensor, key_value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return out [B, H, Sq, C] and log-sum-exps [B, H, Sq] of one block; key_value [2, B, K, Sk, C]."""
    key, value = repeated_heads(key_value, query.shape[1])
    if query.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)
    else:
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)
    return out, lse


def repeated_heads(key_value: Tensor, num_heads: int, dim: int = 2) -> Tensor:
    """Repeat each kv head as often as queries use it: [2, B, H, S, C]."""
    groups = num_heads // key_value.shape[dim]
    return key_value.repeat_interleave(groups, dim) if groups > 1 else key_value


ring_attention.register_autograd(_backward_ring, setup_context=_setup)


RING_ATTENTION = torch.ops.meshwright.ring_attention.default
"""One operator, so that recomputation may keep its output and pass nothing round again."""


def _backward(
    grad_out: Tensor, query: Tensor, out: Tensor, lse: Tensor, key_value: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the query and of key_value."""
    key, value = repeated_heads(key_value, query.shape[1])
    rows = (grad_out.contiguous(), query, key, value, out.contiguous(), lse.contiguous())
    if query.device.type == "cpu":
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(*rows, 0.0, causal)
    else:
        sizes = (None, None, query.shape[2], key.shape[2])
        seed = torch.zeros(0, dtype=torch.uint64, device=query.device)  # of a dropout that there is not
        grads = _aten._scaled_dot_product_flash_attention_backward(*rows, *sizes, 0.0, causal, seed, seed)
    batch, kv_heads = key_value.shape[1:3]
    summed = [grad.view(batch, kv_heads, -1, *grad.shape[2:]).sum(2) for grad in grads[1:]]
    return grads[0], torch.stack(summed)
