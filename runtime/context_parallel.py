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
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.distributed_c10d import _resolve_process_group

from ..schema.errors import RuntimeMismatchError
from ..schema.training_plan import TrainingPlan
from .data_parallel import compute_dtype
from .mesh import ParallelMesh
from .models.attention import grouped_attention
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
            out = grouped_attention(query, key, value)
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
    out, lse = torch.empty(0), torch.empty(0)
    for meeting, moving in _round(torch.stack((key, value)), group, lengths):
        rows = meeting.queries
        part, part_lse = _forward(query[:, :, rows], moving[:, :, :, meeting.keys], meeting)
        if meeting.causal:  # the first one
            out, lse = part.float(), part_lse
            continue
        merged = torch.logaddexp(lse[:, :, rows], part_lse)
        scaled = out[:, :, rows] * (lse[:, :, rows] - merged).exp()[..., None]
        out[:, :, rows] = scaled.addcmul_(part.float(), (part_lse - merged).exp()[..., None])
        lse[:, :, rows] = merged
    # Head by head within a token, so that the product after it reads this tensor and no copy of it.
    return out.transpose(1, 2).to(query.dtype).contiguous().transpose(1, 2), lse


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
    for meeting, moving in _round(key_value, group, ctx.lengths):
        rows = (x[:, :, meeting.queries] for x in (grad_out, query, out, lse))
        part_query, part_grads = _backward(*rows, moving[:, :, :, meeting.keys], meeting)
        _add_rows(grad_query, meeting.queries, part_query)
        grads = arriving_grads.wait() if arriving_grads is not None else grads
        _add_rows(grads, meeting.keys, part_grads)
        arriving_grads = _Passing(grads, group)
    assert arriving_grads is not None
    grad_key, grad_value = arriving_grads.wait()
    return grad_query.to(query.dtype), grad_key, grad_value, None, None


@dataclass(frozen=True)
class _Meeting:
    """What of this rank's queries meets what of the keys that are here: which tokens, and how many of each document in a row."""

    queries: slice | Tensor
    keys: slice | Tensor
    num_queries: list[int]
    num_keys: list[int]
    causal: bool = False


def _round(moving: Tensor, group: dist.ProcessGroup, lengths: list[int]) -> Iterator[tuple[_Meeting, Tensor]]:
    """Let keys and values go round; yield what of this rank's queries meets those that are here."""
    rank, size, everything = group.rank(), group.size(), slice(None)
    halves = [length // 2 for length in lengths]
    for step in range(size):
        arriving = _Passing(moving, group) if step + 1 < size else None
        source = (rank - step) % size
        if source == rank:
            yield _Meeting(everything, everything, lengths, lengths, causal=True), moving
        elif source < rank:
            yield _Meeting(everything, _halves(lengths, 0, moving.device), lengths, halves), moving
        else:
            yield _Meeting(_halves(lengths, 1, moving.device), everything, halves, lengths), moving
        moving = arriving.wait() if arriving is not None else moving


def _halves(lengths: list[int], idx: int, device: torch.device) -> slice | Tensor:
    """Return the tokens in the first (0) or second (1) half of every document."""
    starts = [end - length + idx * (length // 2) for end, length in zip(accumulate(lengths), lengths, strict=True)]
    if len(lengths) == 1:
        return slice(starts[0], starts[0] + lengths[0] // 2)
    ranges = (torch.arange(start, start + length // 2) for start, length in zip(starts, lengths, strict=True))
    return torch.cat(list(ranges)).to(device)


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


def _forward(query: Tensor, key_value: Tensor, meeting: _Meeting) -> tuple[Tensor, Tensor]:
    """Return out [B, H, Sq, C] and log-sum-exps [B, H, Sq] of each document's queries; key_value [2, B, K, Sk, C]."""
    key, value = repeated_heads(key_value, query.shape[1])
    flash = _aten._scaled_dot_product_flash_attention
    flash = _aten._scaled_dot_product_flash_attention_for_cpu if query.device.type == "cpu" else flash
    outs, lses = [], []
    for rows in _by_document(meeting, (query,), (key, value)):
        out, lse, *_ = flash(*rows, 0.0, meeting.causal)
        outs.append(out)
        lses.append(lse)
    return _joined(outs), _joined(lses)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of all documents; of one document without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=2)


def _add_rows(total: Tensor, rows: slice | Tensor, part: Tensor) -> None:
    """Add to some rows [..., rows, C] in place."""
    if isinstance(rows, slice):
        total[..., rows, :].add_(part)
    else:
        total.index_add_(-2, rows, part.to(total.dtype))


def _by_document(
    meeting: _Meeting, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]
) -> Iterator[tuple[Tensor, ...]]:
    queries = (x.split(meeting.num_queries, dim=2) for x in of_queries)
    keys = (x.split(meeting.num_keys, dim=2) for x in of_keys)
    return zip(*queries, *keys, strict=True)


def repeated_heads(key_value: Tensor, num_heads: int) -> Tensor:
    """Repeat each kv head as often as queries use it: [2, B, H, S, C]."""
    groups = num_heads // key_value.shape[2]
    return key_value.repeat_interleave(groups, 2) if groups > 1 else key_value


ring_attention.register_autograd(_backward_ring, setup_context=_setup)


RING_ATTENTION = torch.ops.meshwright.ring_attention.default
"""One operator, so that recomputation may keep its output and pass nothing round again."""


def _backward(
    grad_out: Tensor, query: Tensor, out: Tensor, lse: Tensor, key_value: Tensor, meeting: _Meeting
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the query and of key_value."""
    key, value = repeated_heads(key_value, query.shape[1])
    documents = []
    for grad_rows, query_rows, out_rows, lse_rows, *rest in _by_document(
        meeting, (grad_out, query, out, lse), (key, value)
    ):
        rows = (grad_rows.contiguous(), query_rows, *rest, out_rows.contiguous(), lse_rows.contiguous())
        if query.device.type == "cpu":
            grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(*rows, 0.0, meeting.causal)
        else:
            sizes = (None, None, query_rows.shape[2], rest[0].shape[2])
            seed = torch.zeros(0, dtype=torch.uint64, device=query.device)  # of a dropout that there is not
            grads = _aten._scaled_dot_product_flash_attention_backward(*rows, *sizes, 0.0, meeting.causal, seed, seed)
        documents.append(grads[:3])
    grad_query, *grads = (_joined(parts) for parts in zip(*documents, strict=True))
    batch, kv_heads = key_value.shape[1:3]
    summed = [grad.view(batch, kv_heads, -1, *grad.shape[2:]).sum(2) for grad in grads]
    return grad_query, torch.stack(summed)
