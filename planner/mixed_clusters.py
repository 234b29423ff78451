"""Expanding layouts on a mixed cluster: each stage on one part, parts in every order along the pipeline.

Stages get layers by the speed and under the memory of their own part (solvers/stages/stage_split.py, (O')). Which
part comes first is a
choice: early stages hold more micro-batches in flight, the ends hold the embedding and the head.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..cost_models.stage.step import (
    edges_s,
    estimate_step,
    transfer_of_stages,
    values_of_stages,
)
from ..cost_models.stage.table import CostTable, stages_of_pools
from ..schema import Estimate
from ..schema.arrays import FloatArray, IntArray
from ..schema.cluster import with_parts_in_order
from ..solvers.stages import stage_split

MAX_PARTS_IN_EVERY_ORDER = 4
"""Of more parts only the order as listed, its reverse, and both by memory are tried."""

StageFits = Callable[[CostTable, int, float], NDArray[np.bool_]]
"""FITS [S, L+1, L+1] of a layout whose devices are all alike, within so many bytes."""


@dataclass(frozen=True)
class OnParts:
    """A layout with its stages on the parts of the cluster; no order and no split of it is faster than ``bound_s``."""

    boundaries: tuple[int, ...]
    part_of_stage: tuple[int, ...]
    estimate: Estimate
    bound_s: float


def expand_on_parts(costs: CostTable, idx: int, stage_fits: StageFits) -> OnParts | None:
    """The fastest order of the parts and split of the layers that fits; None where none does.

    For each order three splits are tried: the best for the pipeline alone by its closed form, the best with what a stage adds to
    the step once, and the one with the least bound on the replay.
    """
    if costs.cluster.bandwidth_matrix is not None:  # every order has links of its own between the stages
        costs, idx = costs.select(np.array([idx])), 0
    fits = [_fits_on(part, idx, stage_fits) for part in costs.device_pools]
    found: list[OnParts] = []
    bound_s = np.inf
    for order in orders(costs):
        placed = in_order_of_parts(costs, order)
        part_of_stage = np.repeat(np.array(order), stages_of_pools(costs)[list(order), idx])
        allowed = np.array([fits[g][s] for s, g in enumerate(part_of_stage)])
        splits, least_s = _splits(placed, idx, part_of_stage, allowed)
        bound_s = min(bound_s, least_s)
        for boundaries in splits:
            estimate = estimate_step(placed, idx, boundaries, part_of_stage)
            found.append(OnParts(boundaries, tuple(int(g) for g in part_of_stage), estimate, 0.0))
    if not found:
        return None
    best = min(found, key=lambda one: one.estimate.step_time_s)
    return replace(best, bound_s=float(bound_s))


def orders(costs: CostTable) -> list[tuple[int, ...]]:
    """Orders of the parts along the pipeline."""
    listed = tuple(range(len(costs.device_pools)))
    if len(listed) <= MAX_PARTS_IN_EVERY_ORDER:
        return list(itertools.permutations(listed))
    by_memory = tuple(sorted(listed, key=lambda g: -costs.device_pools[g].cluster.memory_budget_bytes))
    return list(dict.fromkeys((listed, listed[::-1], by_memory, by_memory[::-1])))


def nodes_of(costs: CostTable, part_of_stage: tuple[int, ...]) -> tuple[int, ...]:
    """Nodes of the cluster in the order in which the ranks of the pipeline fill them."""
    parts = costs.cluster.parts
    return tuple(n for g in dict.fromkeys(part_of_stage) for n in parts[g].nodes)


def in_order_of_parts(costs: CostTable, order: tuple[int, ...]) -> CostTable:
    """The same where the matrix of bandwidths between nodes, if there is one, joins stages in this order of the parts."""
    if costs.cluster.bandwidth_matrix is None:
        return costs
    links = with_parts_in_order(costs.cluster, [costs.cluster.parts[g] for g in order])
    return replace(costs, device_pools=tuple(replace(part, cluster_of_pools=links) for part in costs.device_pools))


def _fits_on(part: CostTable, idx: int, stage_fits: StageFits) -> NDArray[np.bool_]:
    """FITS of every stage if it lay on this part, with a block for each chunk."""
    blocks = np.concatenate([[0], np.cumsum(part.is_block)])
    has_blocks = blocks[None, :] - blocks[:, None] >= part.layouts.num_model_chunks[idx]
    return np.asarray(stage_fits(part, idx, part.cluster.memory_budget_bytes) & has_blocks)


def _splits(
    costs: CostTable, idx: int, part_of_stage: IntArray, fits: NDArray[np.bool_]
) -> tuple[list[tuple[int, ...]], float]:
    """Boundaries worth costing in this order of the parts, and what no split in it is faster than; none where none fits."""
    m = int(costs.layouts.num_microbatches[idx])

    def of_stages(of_pool: Callable[[CostTable], FloatArray]) -> FloatArray:
        return values_of_stages(costs, part_of_stage, of_pool)

    busy, exposed = of_stages(lambda pool: pool.per_layer("busy_s", idx)), of_stages(lambda pool: pool.exposed_s(idx))
    update, transfer = of_stages(lambda pool: pool.layer_updates_s(idx)), transfer_of_stages(costs, idx, part_of_stage)
    even = stage_split.solve(stage_split.StageSplitInstance(busy, fits, transfer, m - 1.0))
    if even.choice is None:
        return [], np.inf
    once = stage_split.solve(stage_split.StageSplitInstance(busy + (exposed + update) / m, fits, transfer, m - 1.0))
    replayed_s, balanced = _least_replay(costs, idx, stage_split.StageSplitInstance(busy, fits, transfer, m - 1.0))
    least = (stage_split.min_slowest_s(stage_split.StageSplitInstance(values, fits)) for values in (exposed, update))
    bound_s = replayed_s + edges_s(costs, idx, part_of_stage) + sum(least)
    return [split for split in dict.fromkeys((even.choice, once.choice, *balanced)) if split], bound_s


def _least_replay(
    costs: CostTable, idx: int, instance: stage_split.StageSplitInstance
) -> tuple[float, list[tuple[int, ...]]]:
    """Seconds that the replay of no split is below (`pipeline.single_stages_s`, with the least of its terms), and the splits."""
    m, pp = int(costs.layouts.num_microbatches[idx]), instance.num_stages
    if costs.layouts.schedule_of_row(idx).all_forward_first:
        return stage_split.solve(instance).objective, []
    times, rounds = (2.0, (m - pp - 1) / 2) if m > pp else (1.0, (m - 1) / 2)
    balanced = stage_split.solve(replace(instance, rounds=rounds))
    shortest = stage_split.solve(replace(instance, rounds=0.0))
    least_s = max(times * balanced.objective, m * stage_split.min_slowest_s(instance))
    if m == pp:
        least_s = max(least_s, 2 * pp / (pp + 1) * shortest.objective)
    return least_s, [balanced.choice or ()]
