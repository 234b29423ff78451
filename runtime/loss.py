"""Cross entropy of next tokens, in fp32, with one copy of the logits.

Shapes: N tokens of the micro-batch, V this rank's share of the vocabulary.

Written by hand because F.cross_entropy (and torch's loss_parallel) stores the logits in fp32, their log-softmax and its gradient
besides the logits themselves: 12 to 14 bytes an element with bf16 logits. Here the peak is the logits (2 bytes in bf16, 4 in fp32)
plus `CHUNK_ELEMENTS` in fp32: the backward pass turns the logits into their own gradient, in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 2**24
"""Logits in fp32 at a time: 64 MiB, enough to fill a GPU, little next to a layer."""


@dataclass(frozen=True)
class VocabShard:
    """The vocabulary entries ``offset ..`` that this rank's logits stand for, and the ranks that have the others."""

    offset: int
    group: dist.ProcessGroup

    def local_idx(self, tokens: Tensor, *, width: int) -> tuple[Tensor, Tensor]:
        """Return each token's position among this rank's ``width`` entries (0 if elsewhere), and whether it is among them."""
        idx = tokens - self.offset
        is_local = (idx >= 0) & (idx < width)
        return torch.where(is_local, idx, 0), is_local


def cross_entropy(logits: Tensor, targets: Tensor, shard: VocabShard | None = None) -> Tensor:
    """Return the mean over all tokens of ``logsumexp(logits) - logits[target]``; its backward pass overwrites ``logits``.

    Args:
        logits: [..., V], bf16, fp16 or fp32; with a shard, this rank's columns.
        targets: [...], token ids of the entire vocabulary; -1 where nothing should come next, which counts as a loss of 0.
        shard: which columns they are; the ranks of its group pass the same targets.

    Returns:
        fp32 [1], the same on all ranks of the group.
    """
    return token_losses(logits, targets, shard).mean(
        dim=0, keepdim=True
    )  # no view: FSDP puts hooks on what a stage returns


def token_losses(logits: Tensor, targets: Tensor, shard: VocabShard | None = None) -> Tensor:
    """Return ``logsumexp(logits) - logits[target]`` of each token, fp32 [N]; see `cross_entropy`."""
    flat = logits.reshape(-1, logits.shape[-1])
    losses: Tensor = _TokenLosses.apply(flat, targets.reshape(-1), shard)  # type: ignore[no-untyped-call]
    return losses


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, shard: VocabShard | None) -> Tensor:
        counts = targets >= 0
        if shard is None:
            idx, is_local = targets.clamp(min=0), counts
        else:
            idx, is_local = shard.local_idx(targets, width=logits.shape[1])
        # logsumexp and logit of the target; fp32 [2, N]
        stats = torch.empty(2, len(logits), dtype=torch.float32, device=logits.device)
        for rows in _chunks(logits):
            chunk = logits[rows].float()
            stats[0, rows] = torch.logsumexp(chunk, dim=1)
            stats[1, rows] = chunk.gather(1, idx[rows, None]).squeeze(1) * is_local[rows]
        lse, target_logit = stats if shard is None else _over_vocabulary(stats, shard.group)
        losses = (lse - target_logit).where(counts, 0)
        # No probability, and so no gradient, where nothing counts.
        ctx.save_for_backward(logits, idx, is_local, lse.where(counts, torch.inf))
        ctx.used = False
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor, None, None]:
        assert not ctx.used, "the logits were overwritten by an earlier backward pass"
        ctx.used = True
        logits, idx, is_local, lse = ctx.saved_tensors
        for rows in _chunks(logits):
            chunk = logits[rows].float()  # the logits themselves when they are fp32
            chunk.sub_(lse[rows, None]).exp_()
            chunk.scatter_add_(1, idx[rows, None], -is_local[rows, None].float())
            chunk.mul_(grad_losses[rows, None])
            if logits.dtype != chunk.dtype:
                logits[rows] = chunk
        return logits, None, None


def _chunks(logits: Tensor) -> Iterator[slice]:
    rows = max(1, CHUNK_ELEMENTS // max(1, logits.shape[1]))
    for start in range(0, len(logits), rows):
        yield slice(start, start + rows)


def _over_vocabulary(stats: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Combine [2, N] of this rank's columns to [2, N] of all columns."""
    lse, target_logit = stats
    largest = lse.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    sums = torch.stack(((lse - largest).exp(), target_logit))
    dist.all_reduce(sums, group=group)
    return torch.stack((largest + sums[0].log(), sums[1]))
