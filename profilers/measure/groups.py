"""Which ranks talk to one another in a training job, as process groups to be measured.

Ranks are numbered node by node, G on each of N nodes. A mesh axis of k ranks beside s ranks of inner axes is the ranks
``r, r + s, .., r + (k - 1) s``: inside a node where k s divides G, between counterparts of all nodes for s = G, k = N.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Axis(NamedTuple):
    """Ranks of a mesh axis: ``size`` ranks at a distance of ``stride``; alone, only the first such group speaks."""

    size: int
    stride: int
    alone: bool = False


@dataclass(frozen=True)
class Group:
    """One process group of an axis, as this rank sees it.

    Attributes:
        ranks: global ranks of the group this rank would be in; ``member``: whether it takes part.
        concurrent: how many groups do the same at once.
    """

    process_group: ProcessGroup
    ranks: tuple[int, ...]
    rank: int
    member: bool
    stride: int
    num_nodes: int
    concurrent: int
    is_world: bool

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return len(self.ranks)

    def fields(self) -> dict[str, int]:
        """As fields of a CollectivePoint."""
        shape = {"group_size": self.size, "stride": self.stride, "num_nodes": self.num_nodes}
        return {**shape, "concurrent_groups": self.concurrent}


def axes_of(num_nodes: int, ranks_per_node: int) -> list[Axis]:
    """Axes to measure beside the group of all ranks, most informative first.

    The whole node, counterparts across nodes (alone, then all at once: what a shared NIC costs), then the parts of a node as
    neighbours and at a distance, and those alone (what they cost one another).
    """
    size, found = ranks_per_node, []
    if num_nodes > 1 and size > 1:
        found += [Axis(size, 1), Axis(num_nodes, size), Axis(num_nodes, size, alone=True), Axis(size, 1, alone=True)]
    parts = [k for k in range(2, size) if size % k == 0]
    found += [Axis(k, 1) for k in reversed(parts)]
    found += [Axis(k, size // k) for k in reversed(parts)]
    found += [Axis(k, 1, alone=True) for k in reversed(parts)]
    return found


def members(axis: Axis, world_size: int) -> list[tuple[int, ...]]:
    """The ranks of every group of an axis; they are disjoint and hold all ranks."""
    block = axis.size * axis.stride
    starts = (first + inner for first in range(0, world_size, block) for inner in range(axis.stride))
    return [tuple(range(start, start + block, axis.stride)) for start in starts]


def world_group(num_nodes: int) -> Group:
    """All ranks."""
    import torch.distributed as dist

    world, size = dist.group.WORLD, dist.get_world_size()
    assert world is not None, "measured inside an initialised process group"
    return Group(world, tuple(range(size)), dist.get_rank(), True, 1, num_nodes, 1, is_world=True)


def groups_of(axes: list[Axis], num_nodes: int, ranks_per_node: int) -> Iterator[Group]:
    """The group of each axis that this rank is in; every rank iterates. Groups of the same ranks are made once."""
    import torch.distributed as dist

    made: dict[tuple[int, int], Any] = {}
    world_size, rank = num_nodes * ranks_per_node, dist.get_rank()
    for axis in axes:
        groups = members(axis, world_size)
        mine = next(ranks for ranks in groups if rank in ranks)
        if axis[:2] not in made:
            made[axis[:2]] = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups])[0]
        yield Group(
            process_group=made[axis[:2]],
            ranks=mine,
            rank=mine.index(rank),
            member=not axis.alone or mine == groups[0],
            stride=axis.stride,
            num_nodes=len({r // ranks_per_node for r in mine}),
            concurrent=1 if axis.alone else len(groups),
            is_world=False,
        )


def tournament(num_players: int) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs in which every two meet once (the circle method); with an odd number one rests in each."""
    players: list[int | None] = [*range(num_players), *([None] if num_players % 2 else [])]
    rounds = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        players = [players[0], players[-1], *players[1:-1]]
    return rounds
