"""Bounds of layouts whose stages lie on device pools, whatever the order of the pools and the split of the layers.

With b_gk the seconds of a layer of kind k
on pool g, n_k layers of it, k_g stages on the pool and W_g = sum_k n_k b_gk, no slowest stage is below

    sum_k n_k min_g (b_gk / W_g) / sum_g (k_g / W_g)                      weak duality: all work over the sum of the rates
    min {z : sum_g k_g floor(z / b_gk) >= n_k}   for each kind of block   blocks are not cut
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...schema.units import FloatArray, IntArray
from ..pipeline.replay import single_stages_s
from .table import CostTable, stages_of_pools


def pipeline_bound(costs: CostTable, *, transfers: bool) -> FloatArray:
    """Return the seconds of the pipeline alone that no order and no split is below [N]; all layouts are aligned."""
    b, pools = costs.layouts, costs.device_pools
    busy = [[cost.busy_s[pool.case_idx] for cost in pool.by_case] for pool in pools]
    transfer = np.min([2 * pool.transfer_s for pool in pools], axis=0) if transfers else np.zeros(len(b))
    slowest = fullest_stage_on_pools(costs, busy) + transfer
    total = sum(n * np.min(values, axis=0) for n, values in zip(costs.counts, zip(*busy, strict=True), strict=True))
    is_gpipe = b.schedule_fact("all_forward_first")
    return np.asarray(single_stages_s(b.num_microbatches, b.pp, is_gpipe, total + b.pp * transfer, slowest))


def fullest_stage_on_pools(costs: CostTable, by_pool: Sequence[Sequence[FloatArray]]) -> FloatArray:
    """Return what the stage with the most of something has at least [N], given a layer of each kind on each pool [G][K] of [N]."""
    stages = stages_of_pools(costs)
    work = np.array([sum(n * v for n, v in zip(costs.counts, values, strict=True)) for values in by_pool])
    has_work = np.all(work > 0, axis=0)
    weights = 1 / np.where(has_work, work, 1.0)
    shares = [
        n * np.min([weights[g] * values[k] for g, values in enumerate(by_pool)], axis=0)
        for k, n in enumerate(costs.counts)
    ]
    fullest = np.where(has_work, np.sum(shares, axis=0) / np.sum(stages * weights, axis=0), 0.0)
    for k, kind in enumerate(costs.kinds):
        if kind.is_block:
            seconds = np.array([values[k] for values in by_pool])
            fullest = np.maximum(fullest, _uncut_blocks_s(int(costs.counts[k]), seconds, stages))
    return np.asarray(fullest)


def _uncut_blocks_s(count: int, seconds: FloatArray, stages: IntArray) -> FloatArray:
    """Return the least z [N] in which stages, ``stages[g]`` of them at ``seconds[g]`` a block, hold ``count`` blocks."""
    has_cost = np.all(seconds > 0, axis=0)
    each = np.where(has_cost, seconds, 1.0)
    z = count / np.sum(stages / each, axis=0)
    for _ in range(len(seconds)):  # one more block on each stage is enough
        num_blocks = np.floor(z / each * (1 + 1e-12))
        short = np.sum(stages * num_blocks, axis=0) < count
        z = np.where(short, np.min((num_blocks + 1) * each, axis=0), z)
    return np.where(has_cost, z * (1 - 1e-12), 0.0)
