"""Hidden states on their way between stages of different tensor-parallel degrees.

A stage has as many ranks as the one before it. With tp ranks a layer, of dp groups, one of its ranks holds a micro-batch of
b tp sequences and of each a tp-th part, b of the finest stage's: [b tp, S / tp, D], as large on every stage. So each rank sends
what it has to the one rank in its place, and the receiving stage deals it out anew: of every max(tp, tp') neighbours all hold the
same sequences together, before and after.

    4 ranks, 4 sequences   tp 2, dp 2 (sequences, part)      (0 1, a) (0 1, b) (2 3, a) (2 3, b)
                           tp 1, dp 4                        (0, a b) (1, a b) (2, a b) (3, a b)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Reshard:
    """The exchange in front of a stage: from the tp of the stage before to its own, over ``group`` of max(tp, tp') neighbours."""

    group: dist.ProcessGroup
    before: int
    after: int

    def __call__(self, hidden: Tensor) -> Tensor:
        """Deal [B, S / before, D] out anew as [B after / before, S / after, D]; gradients go back the same way.

        Data parallelism averages gradients over dp ranks, dp' of the stage before: what goes back is dp' / dp of what comes.
        """
        result: Tensor = _Exchange.apply(hidden, self)  # type: ignore[no-untyped-call]
        return result

    @property
    def gradient_ratio(self) -> float:
        """dp of the stage before over that of this one."""
        return self.after / self.before


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, reshard: Reshard) -> Tensor:  # type: ignore[override]
        ctx.reshard = reshard
        return exchange(hidden, reshard.before, reshard.after, reshard.group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        reshard = ctx.reshard
        back = exchange(gradient, reshard.after, reshard.before, reshard.group)
        return back * reshard.gradient_ratio, None


def exchange(hidden: Tensor, before: int, after: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part [B after / before, S / after, D] of what ``before`` ranks share of sequences, ``after`` then."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if before > after:  # sequences part, their pieces join
        ratio = before // after
        pieces = hidden.chunk(ratio, dim=0)
        goes = [i // after if i % after == rank // ratio else None for i in range(size)]
        comes = [i for i in range(size) if i // ratio == rank % after]
        joined_dim = 1
    else:  # sequences join, their pieces part
        ratio = after // before
        pieces = hidden.chunk(ratio, dim=1)
        goes = [i % ratio if i // ratio == rank % before else None for i in range(size)]
        comes = [i for i in range(size) if i % before == rank // ratio]
        joined_dim = 0
    shape = pieces[0].shape
    count = pieces[0].numel()
    sent = [pieces[piece].reshape(-1) for piece in goes if piece is not None]
    received = hidden.new_empty(len(comes) * count)
    dist.all_to_all_single(
        received,
        torch.cat(sent),
        [count * (i in comes) for i in range(size)],
        [count * (piece is not None) for piece in goes],
        group=group,
    )
    return torch.cat([part.view(shape) for part in received.split(count)], dim=joined_dim)
