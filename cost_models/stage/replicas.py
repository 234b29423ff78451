"""Replicas of unlike speed: data-parallel ranks on several kinds of device, each with as many micro-batches as it is fast.

Sets
    g            device pools; REPLICAS[g] = devices / (tp cp) data-parallel ranks on each
Data
    t[g]         seconds of one micro-batch on pool g, all layers, forward and backward
    M            micro-batches of the global batch
Variables
    m[g]         micro-batches of the busiest rank on pool g
Objective
    (O)  min max_g m[g] t[g]
Constraints
    (C1) all of them: sum_g REPLICAS[g] m[g] >= M
    (C2) every rank takes one: m[g] >= 1

A step then takes (O) and what the ranks do together at its end: collectives over data, hidden behind the backward pass of the
slowest device and over the links that join all of them, and the update on the slowest device. With z seconds pool g takes
floor(z / t[g]) micro-batches a rank: the least z is the first multiple of some t[g], from M / sum_g REPLICAS[g] / t[g] on, at
which these are enough.

Layouts of one stage, whose parameters and gradients are not sharded (ZeRO 0 and 1): above that ranks gather and reduce in every
pass, and run as many passes (schema/shares.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...schema import TrainingEstimate
from ...schema.layout_table import MIXED
from ...schema.units import BoolArray, FloatArray, IntArray
from .step import estimate_from_terms, estimate_step, pass_seconds
from .table import CostTable, KnownCosts


def has_unlike_replicas(costs: CostTable) -> BoolArray:
    """Return whether the data-parallel ranks of a layout lie each on one pool and may take unlike shares [N]."""
    b, batch_size = costs.layouts, costs.workload.global_batch_size
    known = bool(costs.device_pools) and costs.cluster.bandwidth_matrix is None
    if not (known and costs.workload.engine_facts.takes_uneven_shares and costs.workload.has_backward):
        return np.zeros(len(b), dtype=bool)
    allowed = (b.pp == 1) & (b.zero_stage <= 1) & np.asarray(b.experts_follow_tp) & (b.recompute < MIXED)
    allowed &= (b.vocabulary == 0) & (b.offload == 0) & (b.offload_activations == 0)
    allowed &= (batch_size % b.micro_batch_size == 0) & (batch_size // b.micro_batch_size >= b.dp)
    for pool in costs.device_pools:
        allowed &= pool.cluster.num_devices % (b.tp * b.cp) == 0
    return np.asarray(allowed)


def replicas_of_pools(costs: CostTable) -> IntArray:
    """Return REPLICAS [G, N]."""
    b = costs.layouts
    return np.array([pool.cluster.num_devices // (b.tp * b.cp) for pool in costs.device_pools])


def micro_batch_seconds(costs: CostTable) -> FloatArray:
    """Return t [G, N]."""
    return np.array([pool.total("busy_s") for pool in costs.device_pools])


def replicas_s(costs: CostTable) -> FloatArray:
    """Return (O) of layouts that have unlike replicas [N]."""
    seconds, replicas = micro_batch_seconds(costs), replicas_of_pools(costs)
    batches = costs.workload.global_batch_size // costs.layouts.micro_batch_size
    end_s = batches / np.sum(replicas / seconds, axis=0)
    while True:
        taken = np.floor(end_s / seconds * (1 + 1e-12))
        short = np.sum(replicas * taken, axis=0) < batches
        if not short.any():
            break
        end_s = np.where(short, np.min((taken + 1) * seconds, axis=0), end_s)
    return np.maximum(end_s, seconds.max(axis=0))


def saved_s(costs: CostTable) -> FloatArray:
    """Return how much sooner ranks of unlike shares are done with their passes than the weakest with even ones [N]."""
    saved = np.zeros(len(costs.layouts))
    rows = np.flatnonzero(has_unlike_replicas(costs))
    if len(rows):
        subset = costs.select(rows)
        even_s = subset.layouts.num_microbatches * subset.total("busy_s")
        saved[rows] = np.maximum(even_s - replicas_s(subset), 0.0)
    return saved


def micro_batches(costs: CostTable, idx: int) -> tuple[int, ...]:
    """Return the micro-batches of each data-parallel rank of layout ``idx``, pool by pool; fewer first on the slowest ranks."""
    one = costs.select(np.array([idx]))
    seconds, replicas = micro_batch_seconds(one)[:, 0], replicas_of_pools(one)[:, 0]
    batches = int(costs.workload.global_batch_size // one.layouts.micro_batch_size[0])
    each = np.maximum(np.floor(float(replicas_s(one)[0]) / seconds * (1 + 1e-9)), 1).astype(np.int64)
    taken = np.repeat(each, replicas)
    busy = taken * np.repeat(seconds, replicas)
    while (more := int(taken.sum()) - batches) > 0:  # one less on the ranks that are busy longest
        longest = np.argsort(-np.where(taken > 1, busy, -1.0), kind="stable")[:more]
        taken[longest[taken[longest] > 1]] -= 1
        busy = taken * np.repeat(seconds, replicas)
    return tuple(int(count) for count in taken)


def estimate_on_replicas(
    costs: CostTable, idx: int, boundaries: Sequence[int], counts: Sequence[int]
) -> TrainingEstimate:
    """Return the estimate of layout ``idx`` whose data-parallel ranks on pool g take ``counts[g]`` micro-batches at most."""
    even, layouts, slowest = estimate_step(costs, idx, boundaries), costs.layouts, _busiest_pool(costs, idx, counts)
    passes = pass_seconds(costs.device_pools[slowest], idx, boundaries)
    terms = {name: float(values.sum()) for name, values in passes.time_terms.items()}
    of_weakest = float(pass_seconds(costs, idx, boundaries).time_terms["compute"].sum())
    once_s = even.breakdown_s.compute - int(layouts.num_microbatches[idx]) * of_weakest  # copies of gradients
    breakdown_s = even.breakdown_s.replace(
        compute=counts[slowest] * terms["compute"] + max(once_s, 0.0),
        **{name: counts[slowest] * terms[name] for name in ("recompute", "tp", "cp")},
    )
    return estimate_from_terms(costs, idx, breakdown_s, even.stages, 0)


def _busiest_pool(costs: CostTable, idx: int, counts: Sequence[int]) -> int:
    return int(np.argmax(np.array(counts) * micro_batch_seconds(costs)[:, idx]))


def busiest_replicas(costs: CostTable, idx: int, counts: Sequence[int]) -> CostTable:
    """Return the costs of the ranks that are busy longest: their pool's, with the collectives of all ranks."""
    one = costs.select(np.array([idx]))
    slowest = _busiest_pool(one, 0, counts)
    layouts = one.layouts.replace(num_microbatches=np.array([counts[slowest]]))
    pool = one.device_pools[slowest]
    return replace(pool.with_layouts(layouts), known=KnownCosts(pool.by_kind, one.per_step.dp_exposed_by_kind))
