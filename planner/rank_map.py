"""Which node holds which ranks: nodes in an order where their bandwidth was measured, stages on device pools where nodes differ.

Ranks count tp fastest, then cp, dp_shard, dp_replicate, pp; as listed, the nodes of the cluster hold them in order. Costs read the
matrix in the order of the ranks (cost_models/hardware/collectives.py), so a map is a cluster whose nodes are listed in another
order. What each axis of a layout would gain is asked of the cost model itself, links being slow for that axis only;
solvers/rank_mapping.py finds the order.

On a mixed cluster each stage lies on one device pool, and pools are tried in every order along the pipeline: early stages hold more
micro-batches in flight, the ends hold the embedding and the head. Stages get layers by the speed and under the memory of their pool
(solvers/stages/splits.py, (O')).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..cost_models.hardware.node_links import Hops, NodeLinks, node_links
from ..cost_models.stage.step import edges_s, estimate_step, transfer_of_stages, values_of_stages
from ..cost_models.stage.table import CostTable, stages_of_pools
from ..schema import ClusterSpec, TrainingEstimate, TrainingPlan
from ..schema.device_groups import with_parts_in_order
from ..schema.layout_table import LayoutTable
from ..schema.units import FloatArray, IntArray
from ..solvers import rank_mapping
from ..solvers.stages.splits import StageSplitInstance, fastest_split, solve_stages

MAX_POOLS_IN_EVERY_ORDER = 4
"""Of more pools only the order as listed, its reverse, and both by memory are tried."""

StageFits = Callable[[CostTable, int, float], NDArray[np.bool_]]
"""FITS [S, L+1, L+1] of a layout whose devices are all equal, within so many bytes."""


def best_case(cluster: ClusterSpec) -> ClusterSpec:
    """Return a cluster on which no layout takes longer than under any map of its ranks, for bounds (`collectives.max_slowest`)."""
    return cluster if cluster.bandwidth_matrix is None else cluster.replace(any_node_order=True)


def in_order(cluster: ClusterSpec, nodes: Sequence[int]) -> ClusterSpec:
    """Return the cluster whose k-th place in the order of ranks is filled by ``nodes[k]``, a node of the same kind."""
    links = np.array(cluster.bandwidth_matrix)
    return cluster.replace(bandwidth_matrix=_as_tuples(links[np.ix_(nodes, nodes)]))


MAX_TIE = 1.05
"""Of the fastest step: layouts that take longer are not compared by simplicity (choice.MAX_PRICE)."""

STEPS_IN_SEARCH = 0
"""Swaps of annealing for each layout of a search, after local search; the one that is chosen gets all of them."""


def node_order(
    costs: CostTable, idx: int, boundaries: Sequence[int], *, annealing_steps: int = STEPS_IN_SEARCH
) -> tuple[int, ...]:
    """Return the order of nodes found for layout ``idx``, whose stages begin at ``boundaries``; empty where it is as listed.

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
    instance = rank_mapping.RankMappingInstance(links.bandwidth, axes, kind, block)
    nodes = rank_mapping.solve(instance, annealing_steps=annealing_steps).choice or ()
    return () if nodes == tuple(range(cluster.num_nodes)) else nodes


def _block_of_place(cluster: ClusterSpec, row: LayoutTable) -> IntArray | None:
    """Return which replica of which stage each place [K] is part of; None where places hold fractions of several."""
    size = cluster.largest_node
    ranks = int(row.tp[0] * row.cp[0] * row.dp_shard[0])
    if set(cluster.node_sizes) != {size} or (ranks % size and size % ranks):
        return None
    return np.arange(cluster.num_nodes) // max(ranks // size, 1)


def axis_hops(row: LayoutTable) -> tuple[Hops, ...]:
    """Return who sends to whom under one layout: the groups of every axis."""
    is_expert, experts = ~row.experts_follow_tp, row.ep * row.expert_tp
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
        Hops(row.pp, row.stage_ranks, "loop" if closed else "chain"),
    )


def _axes(
    costs: CostTable, row: LayoutTable, links: NodeLinks, boundaries: Sequence[int]
) -> tuple[rank_mapping.Axis, ...]:
    """Return WEIGHT and PAIRS of every axis that leaves its nodes: its seconds when it alone has the slowest of all links."""
    away = links.bandwidth[~np.eye(len(links.bandwidth), dtype=bool)]
    fast, slow = float(away.max()), float(away.min())
    if fast <= slow:
        return ()

    def step_s(matrix: FloatArray) -> float:
        cluster = costs.cluster.replace(bandwidth_matrix=_as_tuples(matrix))
        return estimate_step(costs.evaluate(row, cluster), 0, boundaries).step_time_s

    everywhere = np.full(links.bandwidth.shape, fast)
    min_s = step_s(everywhere)
    crossed = list[IntArray]()
    for hops in axis_hops(row):
        pairs = links.crossed(int(hops.group[0]), int(hops.stride[0]), hops.pattern)
        crossed += [pairs, pairs[:, ::-1]] if hops.pattern in ("chain", "loop") else [pairs]
    axes = []
    for pairs in {pairs.tobytes(): pairs for pairs in crossed if len(pairs)}.values():
        matrix = everywhere.copy()
        matrix[pairs[:, 0], pairs[:, 1]] = slow
        added_s = step_s(matrix) - min_s
        if added_s > 0:
            axes.append(rank_mapping.Axis(added_s / (1 / slow - 1 / fast), pairs))
    return tuple(axes)


def _as_tuples(matrix: FloatArray) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, matrix.tolist()))


def place_as_planned(plan: TrainingPlan, cluster: ClusterSpec) -> ClusterSpec:
    """Return the cluster with its nodes in the order of the plan's ranks, where links between nodes were measured."""
    if cluster.bandwidth_matrix is None:
        return cluster
    node_of_device = [node for node, size in enumerate(cluster.node_sizes) for _ in range(size)]
    return in_order(cluster, list(dict.fromkeys(node_of_device[device] for device in plan.rank_map)))


@dataclass(frozen=True)
class OnPools:
    """A layout with its stages on the pools of the cluster; no order and no split of it is faster than ``bound_s``."""

    boundaries: tuple[int, ...]
    pool_of_stage: tuple[int, ...]
    estimate: TrainingEstimate
    bound_s: float


class PlacedStages(NamedTuple):
    """An order of the pools along the pipeline, splits worth costing in it, and what no split in it is faster than.

    Attributes:
        costs: with the links between the pools in this order.
    """

    bound_s: float
    costs: CostTable
    pool_of_stage: IntArray
    splits: list[tuple[int, ...]]


def placed_stages(costs: CostTable, idx: int, stage_fits: StageFits) -> list[PlacedStages]:
    """Return the orders of the pools in which some split fits, by their bounds."""
    if costs.cluster.bandwidth_matrix is not None:  # every order has links of its own between the stages
        costs, idx = costs.select(np.array([idx])), 0
    fits = []
    for pool in costs.device_pools:  # of every stage if it lay on this pool, with a block for each chunk
        blocks = np.concatenate([[0], np.cumsum(pool.is_block)])
        has_blocks = blocks[None, :] - blocks[:, None] >= pool.layouts.num_model_chunks[idx]
        fits.append(stage_fits(pool, idx, pool.cluster.memory_budget_bytes) & has_blocks)
    by_bound = []
    for order in orders(costs):
        placed = in_order_of_pools(costs, order)
        pool_of_stage = np.repeat(np.array(order), stages_of_pools(costs)[list(order), idx])
        allowed = np.array([fits[g][s] for s, g in enumerate(pool_of_stage)])
        splits, bound_s = _splits(placed, idx, pool_of_stage, allowed)
        by_bound += [PlacedStages(bound_s, placed, pool_of_stage, splits)] if splits else []
    return sorted(by_bound, key=lambda entry: entry.bound_s)


def expand_on_pools(costs: CostTable, idx: int, stage_fits: StageFits, *, below_s: float = np.inf) -> OnPools | None:
    """Return the fastest order of the pools and split of the layers that fits; None where none does.

    For each order three splits are tried: the best for the pipeline only by its closed form, the best with what a stage adds to
    the step once, and the one with the lowest bound on the replay. Orders and splits after the first are left out where they are
    bound to take MAX_TIE times ``below_s``.
    """
    by_bound = placed_stages(costs, idx, stage_fits)
    idx = 0 if costs.cluster.bandwidth_matrix is not None else idx
    best: OnPools | None = None
    below_s *= MAX_TIE
    for bound_s, placed, pool_of_stage, splits in by_bound:
        if best is not None and bound_s >= min(below_s, best.estimate.step_time_s):
            break
        for boundaries in splits[: 1 if bound_s >= below_s else None]:
            estimate = estimate_step(placed, idx, boundaries, pool_of_stage)
            if best is None or estimate.step_time_s < best.estimate.step_time_s:
                best = OnPools(boundaries, tuple(int(g) for g in pool_of_stage), estimate, 0.0)
    return None if best is None else replace(best, bound_s=by_bound[0].bound_s)


def orders(costs: CostTable) -> list[tuple[int, ...]]:
    """Return the orders of the pools along the pipeline that are tried."""
    listed = tuple(range(len(costs.device_pools)))
    if len(listed) <= MAX_POOLS_IN_EVERY_ORDER:
        return list(itertools.permutations(listed))
    by_memory = tuple(sorted(listed, key=lambda g: -costs.device_pools[g].cluster.memory_budget_bytes))
    return list(dict.fromkeys((listed, listed[::-1], by_memory, by_memory[::-1])))


def nodes_in_order(costs: CostTable, pool_of_stage: tuple[int, ...]) -> tuple[int, ...]:
    """Return the nodes of the cluster in the order in which the ranks of the pipeline fill them."""
    pools = costs.cluster.parts
    return tuple(n for g in dict.fromkeys(pool_of_stage) for n in pools[g].nodes)


def in_order_of_pools(costs: CostTable, order: tuple[int, ...]) -> CostTable:
    """Return the costs where the matrix of bandwidths between nodes, if there is one, joins stages in this order of the pools."""
    if costs.cluster.bandwidth_matrix is None:
        return costs
    links = with_parts_in_order(costs.cluster, [costs.cluster.parts[g] for g in order])
    return replace(costs, device_pools=tuple(replace(pool, cluster_of_pools=links) for pool in costs.device_pools))


def _splits(
    costs: CostTable, idx: int, pool_of_stage: IntArray, fits: NDArray[np.bool_]
) -> tuple[list[tuple[int, ...]], float]:
    """Return boundaries worth costing in this order of the pools, none where none fits, and what no split in it is faster than."""
    m = int(costs.layouts.num_microbatches[idx])

    per_layer: tuple[Callable[[CostTable], FloatArray], ...] = (
        lambda pool: pool.per_layer("busy_s", idx),
        lambda pool: pool.per_step.exposed_s(idx),
        lambda pool: pool.per_step.layer_updates_s(idx),
    )
    busy, exposed, update = (values_of_stages(costs, pool_of_stage, of_pool) for of_pool in per_layer)
    transfer = transfer_of_stages(costs, idx, pool_of_stage)
    instance = StageSplitInstance(busy, fits, transfer, m - 1.0)
    even = solve_stages(instance)
    if even.choice is None:
        return [], np.inf
    once = solve_stages(StageSplitInstance(busy + (exposed + update) / m, fits, transfer, m - 1.0))
    replayed_s, balanced = _replay_bound(costs, idx, instance)
    slowest = (fastest_split(StageSplitInstance(values, fits))[0] for values in (exposed, update))
    bound_s = replayed_s + edges_s(costs, idx, pool_of_stage) + sum(slowest)
    return [split for split in dict.fromkeys((even.choice, once.choice, *balanced)) if split], bound_s


def _replay_bound(costs: CostTable, idx: int, instance: StageSplitInstance) -> tuple[float, list[tuple[int, ...]]]:
    """Return seconds that the replay of no split is below (the bounds of cost_models/pipeline/replay.py), and the splits."""
    m, pp = int(costs.layouts.num_microbatches[idx]), instance.num_stages
    if costs.layouts.schedule_of_row(idx).all_forward_first:
        return solve_stages(instance).objective, []
    times, rounds = (2.0, (m - pp - 1) / 2) if m > pp else (1.0, (m - 1) / 2)
    balanced = solve_stages(replace(instance, rounds=rounds))
    bound_s = max(times * balanced.objective, m * fastest_split(instance)[0])
    if m == pp:
        bound_s = max(bound_s, 2 * pp / (pp + 1) * solve_stages(replace(instance, rounds=0.0)).objective)
    return bound_s, [balanced.choice or ()]
