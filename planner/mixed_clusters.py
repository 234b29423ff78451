"""Expanding layouts on a mixed cluster: each stage on one device pool, pools in every order along the pipeline.

Stages get layers by the speed and under the memory of their pool (solvers/stages/splits.py, (O')). Which pool comes first is a
choice: early stages hold more micro-batches in flight, the ends hold the embedding and the head.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..cost_models.stage.step import edges_s, estimate_step, transfer_of_stages, values_of_stages
from ..cost_models.stage.table import CostTable, stages_of_pools
from ..schema import Estimate
from ..schema.arrays import FloatArray, IntArray
from ..schema.cluster import with_parts_in_order
from ..solvers.stages.splits import StageSplitInstance, min_slowest_s, solve_stages

MAX_POOLS_IN_EVERY_ORDER = 4
"""Of more pools only the order as listed, its reverse, and both by memory are tried."""

StageFits = Callable[[CostTable, int, float], NDArray[np.bool_]]
"""FITS [S, L+1, L+1] of a layout whose devices are all equal, within so many bytes."""


@dataclass(frozen=True)
class OnPools:
    """A layout with its stages on the pools of the cluster; no order and no split of it is faster than ``bound_s``."""

    boundaries: tuple[int, ...]
    pool_of_stage: tuple[int, ...]
    estimate: Estimate
    bound_s: float


def expand_on_pools(costs: CostTable, idx: int, stage_fits: StageFits) -> OnPools | None:
    """Return the fastest order of the pools and split of the layers that fits; None where none does.

    For each order three splits are tried: the best for the pipeline only by its closed form, the best with what a stage adds to
    the step once, and the one with the lowest bound on the replay.
    """
    if costs.cluster.bandwidth_matrix is not None:  # every order has links of its own between the stages
        costs, idx = costs.select(np.array([idx])), 0
    fits = [_fits_on_pool(pool, idx, stage_fits) for pool in costs.device_pools]
    best: OnPools | None = None
    bound_s = np.inf
    for order in orders(costs):
        placed = in_order_of_pools(costs, order)
        pool_of_stage = np.repeat(np.array(order), stages_of_pools(costs)[list(order), idx])
        allowed = np.array([fits[g][s] for s, g in enumerate(pool_of_stage)])
        splits, order_bound_s = _splits(placed, idx, pool_of_stage, allowed)
        bound_s = min(bound_s, order_bound_s)
        for boundaries in splits:
            estimate = estimate_step(placed, idx, boundaries, pool_of_stage)
            if best is None or estimate.step_time_s < best.estimate.step_time_s:
                best = OnPools(boundaries, tuple(int(g) for g in pool_of_stage), estimate, 0.0)
    return None if best is None else replace(best, bound_s=float(bound_s))


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


def _fits_on_pool(pool: CostTable, idx: int, stage_fits: StageFits) -> NDArray[np.bool_]:
    """Return FITS of every stage if it lay on this pool, with a block for each chunk."""
    blocks = np.concatenate([[0], np.cumsum(pool.is_block)])
    has_blocks = blocks[None, :] - blocks[:, None] >= pool.layouts.num_model_chunks[idx]
    return np.asarray(stage_fits(pool, idx, pool.cluster.memory_budget_bytes) & has_blocks)


def _splits(
    costs: CostTable, idx: int, pool_of_stage: IntArray, fits: NDArray[np.bool_]
) -> tuple[list[tuple[int, ...]], float]:
    """Return boundaries worth costing in this order of the pools, none where none fits, and what no split in it is faster than."""
    m = int(costs.layouts.num_microbatches[idx])

    def of_stages(of_pool: Callable[[CostTable], FloatArray]) -> FloatArray:
        return values_of_stages(costs, pool_of_stage, of_pool)

    busy, exposed = of_stages(lambda pool: pool.per_layer("busy_s", idx)), of_stages(lambda pool: pool.exposed_s(idx))
    update, transfer = of_stages(lambda pool: pool.layer_updates_s(idx)), transfer_of_stages(costs, idx, pool_of_stage)
    instance = StageSplitInstance(busy, fits, transfer, m - 1.0)
    even = solve_stages(instance)
    if even.choice is None:
        return [], np.inf
    once = solve_stages(StageSplitInstance(busy + (exposed + update) / m, fits, transfer, m - 1.0))
    replayed_s, balanced = _replay_bound(costs, idx, instance)
    slowest = (min_slowest_s(StageSplitInstance(values, fits)) for values in (exposed, update))
    bound_s = replayed_s + edges_s(costs, idx, pool_of_stage) + sum(slowest)
    return [split for split in dict.fromkeys((even.choice, once.choice, *balanced)) if split], bound_s


def _replay_bound(costs: CostTable, idx: int, instance: StageSplitInstance) -> tuple[float, list[tuple[int, ...]]]:
    """Return seconds that the replay of no split is below (the bounds of cost_models/pipeline/lower_bounds.py), and the splits."""
    m, pp = int(costs.layouts.num_microbatches[idx]), instance.num_stages
    if costs.layouts.schedule_of_row(idx).all_forward_first:
        return solve_stages(instance).objective, []
    times, rounds = (2.0, (m - pp - 1) / 2) if m > pp else (1.0, (m - 1) / 2)
    balanced = solve_stages(replace(instance, rounds=rounds))
    bound_s = max(times * balanced.objective, m * min_slowest_s(instance))
    if m == pp:
        bound_s = max(bound_s, 2 * pp / (pp + 1) * solve_stages(replace(instance, rounds=0.0)).objective)
    return bound_s, [balanced.choice or ()]
