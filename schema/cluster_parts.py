"""Parts of a mixed cluster: the nodes that are alike, in their devices and in their links, as clusters of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .cluster import ClusterSpec, LinkLevel, NodeGroup


class Part(NamedTuple):
    """Nodes that are alike: a cluster of their own, and which groups and nodes of the whole cluster they are."""

    cluster: ClusterSpec
    groups: tuple[int, ...]
    nodes: tuple[int, ...]

    @property
    def device(self) -> str:
        """Name of its device."""
        return self.cluster.groups[0].device.name


def label_of(parts: Sequence[Part], g: int) -> str:
    """How to call a part: by its device, and where another part has the same one by the link that joins its nodes too."""
    same = [part for part in parts if part.device == parts[g].device]
    return parts[g].device if len(same) == 1 else f"{parts[g].device}/{parts[g].cluster.levels[-1].link.name}"


def parts_of(cluster: ClusterSpec) -> tuple[Part, ...]:
    """The parts of a cluster in the order in which it lists them; none where all nodes are alike."""
    kinds: list[list[int]] = []
    for i, group in enumerate(cluster.groups):
        alike = next((kind for kind in kinds if _are_alike(cluster.groups[kind[0]], group)), None)
        if alike is None:
            kinds.append([i])
        else:
            alike.append(i)
    if len(kinds) == 1:
        return ()
    first = [sum(group.num_nodes for group in cluster.groups[:i]) for i in range(len(cluster.groups))]
    parts = []
    for k, members in enumerate(kinds):
        nodes = tuple(first[i] + n for i in members for n in range(cluster.groups[i].num_nodes))
        parts.append(Part(_own_cluster(cluster, k, members, nodes), tuple(members), nodes))
    return tuple(parts)


def arranged(cluster: ClusterSpec, parts: Sequence[Part]) -> ClusterSpec:
    """The cluster with its groups listed part by part, in the given order."""
    nodes = [n for part in parts for n in part.nodes]
    groups = tuple(cluster.groups[i] for part in parts for i in part.groups)
    return cluster.replace(groups=groups, bandwidth_matrix=_among(cluster.bandwidth_matrix, nodes))


def joined_levels(levels: Sequence[LinkLevel], num_devices: int) -> tuple[LinkLevel, ...]:
    """Link levels of ``num_devices`` devices that have these links: whole inner domains, and what joins them all."""
    inside = (level for level in levels[:-1] if level.domain_size < num_devices)
    inner = [level for level in inside if num_devices % level.domain_size == 0]
    outer = next((level for level in levels if level.domain_size >= num_devices), levels[-1])
    return (*inner, outer.replace(domain_size=num_devices))


def _are_alike(one: NodeGroup, other: NodeGroup) -> bool:
    """Whether nodes differ in nothing but how many they are; few of them may lack the outer links of many."""
    links = zip(one.levels, other.levels, strict=False)
    same_links = bool(one.levels) == bool(other.levels) and all(a.link == b.link for a, b in links)
    return same_links and one.replace(num_nodes=1, levels=()) == other.replace(num_nodes=1, levels=())


def _own_cluster(cluster: ClusterSpec, k: int, groups: Sequence[int], nodes: Sequence[int]) -> ClusterSpec:
    group = max((cluster.groups[i] for i in groups), key=lambda group: len(group.levels))
    members = group.replace(num_nodes=len(nodes), levels=())
    return cluster.replace(
        name=f"{cluster.name}[{k}]",
        groups=(members,),
        levels=joined_levels(group.levels or cluster.levels, members.num_devices),
        bandwidth_matrix=_among(cluster.bandwidth_matrix, nodes),
    )


def _among(matrix: tuple[tuple[float, ...], ...] | None, nodes: Sequence[int]) -> tuple[tuple[float, ...], ...] | None:
    return None if matrix is None else tuple(tuple(matrix[i][j] for j in nodes) for i in nodes)
