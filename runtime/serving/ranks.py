"""The ranks of one engine instance: stages, attention ranks and tensor ranks, and the groups that they talk in.

Ranks are counted stage by stage, in a stage attention rank by attention rank, in these by tensor rank: rank 0 drives. Experts lie
on all ranks of a stage: ``ep`` parts of them, each cut over ``moe_tp`` ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...schema.errors import RuntimeMismatchError
from ...schema.serving import ServingLayout


@dataclass(frozen=True)
class InstanceRanks:
    """Position of this process in an engine instance.

    Attributes:
        members: global rank of each of the instance's ranks.
        rank: this one's number among them.
        everyone, tp, stage, attention: groups of the instance, of the ranks that share this one's dense layers, of its stage, and
        of
            those of the stage with the same tensor rank; None where it is alone in one.
        tp_mesh, expert_mesh: for cutting weights: (tp), (ep, moe_tp); None where there is nothing to cut.
    """

    layout: ServingLayout
    members: tuple[int, ...] = (0,)
    rank: int = 0
    everyone: dist.ProcessGroup | None = None
    tp: dist.ProcessGroup | None = None
    stage: dist.ProcessGroup | None = None
    attention: dist.ProcessGroup | None = None
    tp_mesh: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None

    @property
    def stage_idx(self) -> int:
        """Return this rank's pipeline stage."""
        return self.rank // self.layout.stage_devices

    @property
    def attention_rank(self) -> int:
        """Return which of the ranks with requests of their own this one is part of."""
        return self.rank % self.layout.stage_devices // self.layout.tp

    @property
    def tp_rank(self) -> int:
        """Return this rank's part of dense layers."""
        return self.rank % self.layout.tp

    @property
    def is_first_stage(self) -> bool:
        """Tell whether this rank embeds tokens."""
        return self.stage_idx == 0

    @property
    def is_last_stage(self) -> bool:
        """Tell whether this rank computes logits."""
        return self.stage_idx == self.layout.pp - 1

    def neighbour(self, stage_offset: int) -> int:
        """Return the global rank at the same place of another stage."""
        return self.members[self.rank + stage_offset * self.layout.stage_devices]

    def samplers(self) -> tuple[int, ...]:
        """Return the global rank that samples for each attention rank: its first of the last stage."""
        first = (self.layout.pp - 1) * self.layout.stage_devices
        return tuple(self.members[first + i * self.layout.tp] for i in range(self.layout.attention_dp))


def join(layout: ServingLayout, first_ranks: Sequence[int], device_type: str) -> tuple[InstanceRanks, ...]:
    """Create the groups of all instances of a job, each with the devices of its layout from a first rank on.

    Every process of the default group calls it with the same arguments, for it takes part in creating all groups.

    Returns:
        Those of this process: one instance's ranks, or none.
    """
    return join_all([(layout, first) for first in first_ranks], device_type)


def join_all(instances: Sequence[tuple[ServingLayout, int]], device_type: str) -> tuple[InstanceRanks, ...]:
    """Create the groups of instances of any layouts; see `join`."""
    world, joined = dist.get_world_size(), []
    for layout, first in instances:
        if first + layout.num_devices > world:
            raise RuntimeMismatchError(
                f"an engine instance of {layout.num_devices} ranks from rank {first} on is more than the job's {world} ranks"
            )
        ranks = _join_one(layout, first, device_type)
        if first <= dist.get_rank() < first + layout.num_devices:
            joined.append(ranks)
    return tuple(joined)


def _join_one(layout: ServingLayout, first: int, device_type: str) -> InstanceRanks:
    members = torch.arange(first, first + layout.num_devices)
    rank = dist.get_rank() - first
    grid = members.view(layout.pp, layout.attention_dp, layout.tp)
    everyone = _group([members.tolist()])
    stage = _group(grid.flatten(1).tolist()) if layout.pp > 1 else everyone
    tp = _group(grid.flatten(0, 1).tolist()) if layout.attention_dp > 1 else stage
    attention = _group(grid.transpose(1, 2).flatten(0, 1).tolist()) if layout.tp > 1 else stage
    inside = 0 <= rank < layout.num_devices
    row = grid.flatten(0, 1)[rank // layout.tp] if inside else None
    tp_mesh, expert_mesh = None, None
    if tp is not None and row is not None and layout.tp > 1:
        tp_mesh = DeviceMesh.from_group(tp, device_type, mesh_dim_names=("tp",))
    for devices in grid.flatten(1) if layout.stage_devices > 1 else ():  # every process makes those of all stages
        mesh = DeviceMesh(device_type, devices.view(layout.ep, layout.moe_tp), mesh_dim_names=("ep", "moe_tp"))
        expert_mesh = mesh if rank + first in devices else expert_mesh
    return InstanceRanks(
        layout,
        tuple(members.tolist()),
        rank,
        everyone,
        tp if layout.tp > 1 else None,
        stage if layout.stage_devices > 1 else None,
        attention if layout.attention_dp > 1 else None,
        tp_mesh,
        expert_mesh,
    )


def _group(parts: list[list[int]]) -> dist.ProcessGroup | None:
    """Return the group of ``parts`` that this process is in, which all processes create together; None for one rank alone."""
    joined = None
    for members in parts:
        if len(members) > 1:
            group = dist.new_group(members)
            if dist.get_rank() in members:
                joined = group
    return joined
