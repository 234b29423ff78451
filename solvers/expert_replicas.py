"""How many replicas each expert gets: the slots that are left go, one after the other, to the largest share.

With one workload this minimises max_e LOAD[e] / r[e] (each step lowers the only share that can be the largest), which is EPLB's
rule; here no expert gets more replicas than there are GPUs (C2), and the share of an expert is its largest over the workloads.
"""

from __future__ import annotations

import numpy as np

from .expert_instance import FloatArray, IntArray


def greedy_counts(weight: FloatArray, num_slots: int, limit: int) -> IntArray:
    """r [L, E] with sum ``num_slots`` and 1 <= r <= ``limit``, of weights [L, E]."""
    num_layers, num_experts = weight.shape
    counts = np.ones((num_layers, num_experts), dtype=np.int64)
    share = weight.copy()
    if limit == 1:
        share[:] = -np.inf
    rows = np.arange(num_layers)
    for _ in range(num_slots - num_experts):
        largest = np.argmax(share, axis=1)
        counts[rows, largest] += 1
        now = counts[rows, largest]
        share[rows, largest] = np.where(now < limit, weight[rows, largest] / now, -np.inf)
    return counts


def items_of(counts: IntArray, num_slots: int) -> IntArray:
    """Experts of all replicas [L, S], each as often as its count."""
    num_layers, num_experts = counts.shape
    experts = np.tile(np.arange(num_experts), num_layers)
    return np.repeat(experts, counts.ravel()).reshape(num_layers, num_slots)
