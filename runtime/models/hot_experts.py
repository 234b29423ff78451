"""Experts that follow the load: the hottest of a layer stand on every rank for a step, the others where they are stored.

Tokens of a hot expert stay on their rank, which fetches its weights once for each pass instead; the backward pass brings the
gradients of all copies back to the rank that stores it and adds them. With all experts hot no token travels. What the choice
compares are the bytes of a layer and micro-batch on the rank with most, R ranks, rows of every rank alike:

    tokens    4 (R - 1) / R  row_bytes  max over ranks of the rows of the experts it stores that are not hot
    weights   2 expert_bytes  max over ranks of (R - 1) times the hot ones it stores, and of the hot ones it does not store

to and fro, forward and backward; weights forward, gradients backward. Of the 0, 1, 2, .. hottest the number with fewest bytes in
all is taken. Source: gathering of hot experts, Hecate (arXiv:2502.02581); all of them or none, Tutel's switch between its
parallelisms (arXiv:2206.03382, section 3.1).

Shapes: E experts, H of them hot, R ranks, S = E + R H slots: a rank has its E / R and after them one for each hot expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd


@dataclass(frozen=True)
class HotExperts:
    """The slots of a layer whose ``hot`` experts, in order, stand on every one of ``num_ranks`` ranks, as ``rank`` uses them."""

    hot: tuple[int, ...]
    num_experts: int
    num_ranks: int
    rank: int

    @cached_property
    def experts(self) -> tuple[int, ...]:
        """Return the expert of each slot [S], slots counted rank by rank."""
        stored = self.num_experts // self.num_ranks
        ranks = (range(rank * stored, (rank + 1) * stored) for rank in range(self.num_ranks))
        return tuple(expert for experts in ranks for expert in (*experts, *self.hot))

    @cached_property
    def _slot_of_expert(self) -> Tensor:
        """Return the slot that takes this rank's rows of each expert [E]: its copy here, or where it is stored."""
        stored = self.num_experts // self.num_ranks
        per_rank = stored + len(self.hot)
        slots = [expert // stored * per_rank + expert % stored for expert in range(self.num_experts)]
        for idx, expert in enumerate(self.hot):
            slots[expert] = self.rank * per_rank + stored + idx
        return torch.tensor(slots)

    def slot_of_rows(self, expert_of_row: Tensor, counts: Tensor) -> Tensor:
        """Return the slot of each row [M]."""
        return self._slot_of_expert.to(counts.device)[expert_of_row]

    def weights(self, stored: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the weights [S / R, ...] of this rank's slots, from those [E / R, ...] that each rank of the group stores."""
        num_stored = self.num_experts // self.num_ranks
        owners = [expert // num_stored for expert in self.hot]
        local = [expert % num_stored for expert, owner in zip(self.hot, owners, strict=True) if owner == self.rank]
        rows = stored.flatten(1)[torch.tensor(local * self.num_ranks, dtype=torch.long, device=stored.device)]
        received = [owners.count(rank) for rank in range(self.num_ranks)]
        # Owners ascend as experts do, so that what arrives is in the order of ``hot``.
        arrived: Tensor = all_to_all_single_autograd(rows, received, [len(local)] * self.num_ranks, group)
        return torch.cat((stored, arrived.view(-1, *stored.shape[1:])))


def choose_hot(
    load: Sequence[float], num_ranks: int, *, rows: float, row_bytes: float, expert_bytes: float, max_hot: int
) -> tuple[int, ...]:
    """Return the experts to make hot, ascending.

    Args:
        load: tokens of each expert in a step, all ranks together; only their ratios count.
        rows: rows of a micro-batch on all ranks together.
        row_bytes: of one row, expert_bytes: of the weights of one expert, both on one rank.
        max_hot: copies that a rank has memory for.
    """
    num_stored, total = len(load) // num_ranks, sum(load)
    if total <= 0:
        return ()
    travelling = [sum(load[rank * num_stored : (rank + 1) * num_stored]) / total * rows for rank in range(num_ranks)]
    num_hot = [0] * num_ranks
    order = sorted(range(len(load)), key=lambda expert: (-load[expert], expert))
    away = (num_ranks - 1) / num_ranks
    best, num_best = 4 * away * row_bytes * max(travelling), 0
    for count, expert in enumerate(order[:max_hot], start=1):
        owner = expert // num_stored
        travelling[owner] -= load[expert] / total * rows
        num_hot[owner] += 1
        copies = max(max((num_ranks - 1) * owned, count - owned) for owned in num_hot)
        moved = 4 * away * row_bytes * max(*travelling, 0.0) + 2 * expert_bytes * copies
        if moved < best:
            best, num_best = moved, count
    return tuple(sorted(order[:num_best]))
