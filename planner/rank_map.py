"""Which node holds which ranks, where the bandwidth between nodes was measured.

Ranks count tp fastest, then cp, dp_shard, dp_replicate, pp; as listed, the nodes of the cluster hold them in order. Costs read the
matrix in the order of the ranks (cost_models/hardware/collectives.py), so a map is a cluster whose nodes are
listed in another order. What
each axis of a layout would gain is asked of the cost model itself, links being slow for that axis alone; solvers/rank_mapping.py
finds the order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..cost_models.hardware.collectives import Hops, NodeLinks, node_links
from ..cost_models.stage.step import estimate_step
from ..cost_models.stage.table import CostTable
from ..schema import ClusterSpec, Plan
from ..schema.arrays import FloatArray, IntArray
from ..schema.layout_table import LayoutTable
from ..solvers import rank_mapping


def best_case(cluster: ClusterSpec, *, tied: bool) -> ClusterSpec:
    """A cluster on which no layout takes longer than under any map of its ranks, for bounds.

    Where one level joins the nodes, the groups of an axis that leaves its nodes touch all of them, and a node is no faster than its
    best link. With more levels, or ``tied`` embeddings, which the first and last stage alone exchange, the fastest link of all
    stands for every one.
    """
    links = node_links(cluster)
    if links is None or cluster.num_nodes == 1:
        return cluster
    away = np.where(np.eye(cluster.num_nodes, dtype=bool), 0.0, links.bandwidth)
    best = np.max(away, axis=1)
    clusters = (cluster, *(part.cluster for part in cluster.parts))
    between = max(sum(level.domain_size > own.largest_node for level in own.levels) for own in clusters)
    if tied or between > 1:
        best = np.full_like(best, best.max())
    return cluster.replace(bandwidth_matrix=_as_tuples(np.minimum(best[:, None], best[None, :])))


def in_order(cluster: ClusterSpec, nodes: Sequence[int]) -> ClusterSpec:
    """The cluster whose k-th place in the order of ranks is filled by ``nodes[k]``, a node of the same kind."""
    links = np.array(cluster.bandwidth_matrix)
    return cluster.replace(bandwidth_matrix=_as_tuples(links[np.ix_(nodes, nodes)]))


def device_of_rank(cluster: ClusterSpec, nodes: Sequence[int]) -> tuple[int, ...]:
    """Plan.rank_map of an order of nodes; empty stands for the order in which they are listed."""
    sizes = cluster.node_sizes
    first = np.concatenate([[0], np.cumsum(sizes)])
    return tuple(int(first[n]) + i for n in nodes or range(len(sizes)) for i in range(sizes[n]))


def node_order(costs: CostTable, idx: int, boundaries: Sequence[int]) -> tuple[int, ...]:
    """The order of nodes found for layout ``idx``, whose stages begin at ``boundaries``; empty where it is as listed.

    Nodes move as wholes, among those of their group. Where a replica of a stage fills neither whole nodes nor a part of one, or
    nodes differ in size, ranks stay as listed.
    """
    cluster, row = costs.cluster, costs.layouts.select(np.array([idx]))
    links = node_links(cluster)
    block = _block_of_place(cluster, row)
    if links is None or cluster.num_nodes < 3 or block is None:
        return ()
    kind = np.repeat(np.arange(len(cluster.groups)), [group.num_nodes for group in cluster.groups])
    axes = _axes(costs, row, links, boundaries)
    found = rank_mapping.solve(rank_mapping.RankMappingInstance(links.bandwidth, axes, kind, block))
    nodes = found.choice or ()
    return () if nodes == tuple(range(cluster.num_nodes)) else nodes


def _block_of_place(cluster: ClusterSpec, row: LayoutTable) -> IntArray | None:
    """Which replica of which stage [K] each place is part of, where a place is part of one or holds some whole."""
    size = cluster.largest_node
    ranks = int(row.tp[0] * row.cp[0] * row.dp_shard[0])
    if set(cluster.node_sizes) != {size} or (ranks % size and size % ranks):
        return None
    return np.arange(cluster.num_nodes) // max(ranks // size, 1)


def axis_hops(row: LayoutTable) -> tuple[Hops, ...]:
    """Who sends to whom under one layout: the groups of every axis."""
    is_expert = ~row.experts_follow_tp
    experts = row.ep * row.expert_tp
    closed = int(row.num_model_chunks[0]) > 1
    return (
        Hops(row.tp, np.ones_like(row.tp), "ring"),
        Hops(row.cp_ulysses, row.tp, "all"),
        Hops(row.cp // row.cp_ulysses, row.tp * row.cp_ulysses, "ring"),
        Hops(row.num_shards, row.tp, "ring"),
        Hops(row.num_replicas, row.tp * row.num_shards, "ring"),
        Hops(np.where(is_expert, row.ep, 1), row.expert_tp, "all"),
        Hops(np.where(is_expert, row.expert_shards, 1), experts, "ring"),
        Hops(np.where(is_expert, row.expert_replicas, 1), experts * row.expert_shards, "ring"),
        Hops(row.pp, row.stage_ranks, "ring" if closed else "chain"),
    )


def _axes(
    costs: CostTable, row: LayoutTable, links: NodeLinks, boundaries: Sequence[int]
) -> tuple[rank_mapping.Axis, ...]:
    """WEIGHT and PAIRS of every axis that leaves its nodes: its seconds when it alone has the slowest of all links."""
    away = links.bandwidth[~np.eye(len(links.bandwidth), dtype=bool)]
    fast, slow = float(away.max()), float(away.min())
    crossed = {links.crossed(int(h.group[0]), int(h.stride[0]), h.pattern).tobytes(): h for h in axis_hops(row)}
    axes = []
    if fast <= slow:
        return ()
    everywhere = np.full(links.bandwidth.shape, fast)
    least_s = _step_s(costs, row, everywhere, boundaries)
    for hops in crossed.values():
        pairs = links.crossed(int(hops.group[0]), int(hops.stride[0]), hops.pattern)
        if not len(pairs):
            continue
        matrix = everywhere.copy()
        matrix[pairs[:, 0], pairs[:, 1]] = matrix[pairs[:, 1], pairs[:, 0]] = slow
        added_s = _step_s(costs, row, matrix, boundaries) - least_s
        if added_s > 0:
            axes.append(rank_mapping.Axis(added_s / (1 / slow - 1 / fast), pairs))
    return tuple(axes)


def _step_s(costs: CostTable, row: LayoutTable, matrix: FloatArray, boundaries: Sequence[int]) -> float:
    cluster = costs.cluster.replace(bandwidth_matrix=_as_tuples(matrix))
    return estimate_step(costs.evaluate(row, cluster), 0, boundaries).step_time_s


def _as_tuples(matrix: FloatArray) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(value) for value in row) for row in matrix)


def place_as_planned(plan: Plan, cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with its nodes in the order in which the plan's ranks lie on them, where links between nodes were measured."""
    if cluster.bandwidth_matrix is None:
        return cluster
    node_of_device = [node for node, size in enumerate(cluster.node_sizes) for _ in range(size)]
    return in_order(cluster, list(dict.fromkeys(node_of_device[device] for device in plan.rank_map)))
