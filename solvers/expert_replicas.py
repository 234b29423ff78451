"""How many replicas each expert gets: the slots that are left go, one after the other, to the largest share.

With one workload this minimises max_e LOAD[e] / r[e] (each step lowers the only share that can be the largest), which is
EPLB's rule; here no expert gets more replicas than there are GPUs (C2), and the share of an expert is its largest over the
workloads.
"""

from __future__ import annotations

import numpy as np

from .expert_instance import FloatArray, IntArray


def greedy_counts(weight: FloatArray, num_slots: int, limit: int) -> IntArray:
    """R [L, E] with sum ``num_slots`` and 1 <= r <= ``limit``, of weights [L, E]."""
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


def level_counts(weight: FloatArray, level: FloatArray, num_slots: int, limit: int) -> IntArray:
    """R [L, E] that brings every share to ``level`` [L] at most, as far as slots reach, what is left for the smallest loads.

    Small shares beside large ones fill GPUs better than many of middle size where GPUs have few slots or differ in speed.
    """
    num_experts = weight.shape[1]
    wanted = np.clip(np.ceil(weight / level[:, None]), 1, limit).astype(np.int64)
    counts = np.minimum(wanted, greedy_counts(weight, num_slots, limit))
    order = np.argsort(weight, axis=1)
    room = np.take_along_axis(limit - counts, order, axis=1)
    before = np.cumsum(room, axis=1) - room
    left = num_slots - counts.sum(axis=1, keepdims=True)
    added = np.clip(left - before, 0, np.minimum(room, max(1, limit // 2)))
    np.put_along_axis(counts, order, np.take_along_axis(counts, order, axis=1) + added, axis=1)
    missing = num_slots - counts.sum(axis=1)
    for layer in np.flatnonzero(missing):
        share = weight[layer] / counts[layer]
        for _ in range(missing[layer]):
            expert = int(np.argmax(np.where(counts[layer] < limit, share, -np.inf)))
            counts[layer, expert] += 1
            share[expert] = weight[layer, expert] / counts[layer, expert]
    return np.asarray(counts[:, :num_experts])


def neighbours(counts: IntArray, moves: IntArray, limit: int, rng: np.random.Generator) -> IntArray:
    """R [L, E] after some ``moves`` [L] of a replica from one expert to another, at random."""
    counts = counts.copy()
    rows = np.arange(len(counts))
    for turn in range(int(moves.max(initial=0))):
        gives = rng.random(counts.shape) * (counts > 1)
        takes = rng.random(counts.shape) * (counts < limit)
        giver, taker = np.argmax(gives, axis=1), np.argmax(takes, axis=1)
        possible = (gives[rows, giver] > 0) & (takes[rows, taker] > 0) & (giver != taker) & (turn < moves)
        counts[rows[possible], giver[possible]] -= 1
        counts[rows[possible], taker[possible]] += 1
    return counts
