"""Experts in slots: an expert may stand in several slots, each of which takes a share of its rows.

Weights stay where they are stored, sharded by expert in order, whatever the placement: optimizer and checkpoints know nothing of
it. For each pass a rank fetches the weights of its slots from the ranks that store them, and the backward pass brings the
gradients of all replicas back and adds them.

Shapes: E experts, S slots, R replicas of an expert at most, M rows; E / ep experts are stored and S / ep slots held by each rank.
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
class ExpertSlots:
    """Which expert stands in which slot of a layer, slots counted rank by rank.

    Attributes:
        experts: expert of each slot [S].
        shares: part of its expert's rows that a slot takes [S]; those of one expert add up to 1.
        num_experts: E.
    """

    experts: tuple[int, ...]
    shares: tuple[float, ...]
    num_experts: int

    @cached_property
    def of_expert(self) -> tuple[Tensor, Tensor]:
        """Slots of each expert [E, R], and the share that they and those before them take [E, R]; unused ones repeat the last."""
        slots: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.experts):
            slots[expert].append(slot)
        most = max(len(mine) for mine in slots)
        table = torch.tensor([mine + [mine[-1]] * (most - len(mine)) for mine in slots])
        taken = torch.tensor(self.shares, dtype=torch.float64)[table]
        is_unused = torch.arange(most)[None] >= torch.tensor([len(mine) for mine in slots])[:, None]
        taken = taken.masked_fill(is_unused, 0.0).cumsum(1)
        return table, taken / taken[:, -1:]

    def slot_of_rows(self, expert_of_row: Tensor, counts: Tensor) -> Tensor:
        """Slot of each row [M], rows sorted by expert with ``counts`` [E] of them each: cut into pieces by the shares."""
        table, taken = (tensor.to(counts.device) for tensor in self.of_expert)
        first = counts.cumsum(0) - counts
        position = torch.arange(len(expert_of_row), device=counts.device) - first[expert_of_row]
        middle = (position + 0.5) / counts[expert_of_row]
        replica = (middle[:, None] > taken[expert_of_row]).sum(1).clamp(max=table.shape[1] - 1)
        return table[expert_of_row, replica]

    def weights(self, stored: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Weights [S / ep, ...] of this rank's slots, from those [E / ep, ...] that each rank of the group stores."""
        ranks, rank = group.size(), group.rank()
        of_rank = [list(part) for part in torch.tensor(self.experts).view(ranks, -1).tolist()]
        num_stored = self.num_experts // ranks
        mine = range(rank * num_stored, (rank + 1) * num_stored)
        sent = [[expert - mine.start for expert in slots if expert in mine] for slots in of_rank]
        owners = [expert // num_stored for expert in of_rank[rank]]
        received = [owners.count(owner) for owner in range(ranks)]
        rows = stored.flatten(1)[torch.tensor(_joined(sent), dtype=torch.long, device=stored.device)]
        arrived: Tensor = all_to_all_single_autograd(rows, received, [len(part) for part in sent], group)
        # They arrive by owner, each owner's in the order of this rank's slots.
        by_owner = sorted(range(len(owners)), key=lambda slot: owners[slot])
        back = torch.empty(len(by_owner), dtype=torch.long)
        back[torch.tensor(by_owner)] = torch.arange(len(by_owner))
        return arrived[back.to(stored.device)].view(-1, *stored.shape[1:])


def _joined(parts: Sequence[Sequence[int]]) -> list[int]:
    return [item for part in parts for item in part]
