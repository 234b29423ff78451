"""The placement of DeepSeek's EPLB, from its published description: a start for ours, and what ours is compared with.

Three steps: groups of experts onto nodes, as many groups on each, the heaviest first onto the node with least load; within
a node the slots left go one by one to the expert with the largest share; within a node the replicas go, heaviest first,
onto the GPU with least load that has a free slot. Where groups do not divide among nodes, one group on one node. Two
replicas may meet on a GPU. Source: README of github.com/deepseek-ai/EPLB.
"""

from __future__ import annotations

import numpy as np

from .expert_instance import FloatArray, IntArray
from .expert_replicas import greedy_counts, items_of


def eplb_placement(
    weight: FloatArray, *, num_slots: int, num_gpus: int, num_groups: int = 1, num_nodes: int = 1
) -> IntArray:
    """X [L, S] for loads [L, E]."""
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    num_layers, num_experts = weight.shape
    per_group = num_experts // num_groups
    group_load = weight.reshape(num_layers, num_groups, per_group).sum(axis=2)
    groups = pack_evenly(group_load, num_nodes)
    members = (groups[..., None] * per_group + np.arange(per_group)).reshape(num_layers * num_nodes, -1)
    layer = np.repeat(np.arange(num_layers), num_nodes)[:, None]
    local = weight[layer, members]
    slots, gpus = num_slots // num_nodes, num_gpus // num_nodes
    counts = greedy_counts(local, slots, slots)
    items = items_of(counts, slots)
    share = np.take_along_axis(local / counts, items, axis=1)
    packs = pack_evenly(share, gpus).reshape(len(local), -1)
    placed = np.take_along_axis(members, np.take_along_axis(items, packs, axis=1), axis=1)
    return placed.reshape(num_layers, num_slots)


def pack_evenly(weight: FloatArray, num_packs: int) -> IntArray:
    """Items of each pack [B, P, N / P] of weights [B, N]: heaviest first, onto the lightest pack that has room."""
    num_rows, num_items = weight.shape
    capacity = num_items // num_packs
    order = np.argsort(-weight, axis=1, kind="stable")
    packs = np.zeros((num_rows, num_packs, capacity), dtype=np.int64)
    load, filled = np.zeros((num_rows, num_packs)), np.zeros((num_rows, num_packs), dtype=np.int64)
    rows = np.arange(num_rows)
    for n in range(num_items):
        item = order[:, n]
        pack = np.argmin(np.where(filled < capacity, load, np.inf), axis=1)
        packs[rows, pack, filled[rows, pack]] = item
        load[rows, pack] += weight[rows, item]
        filled[rows, pack] += 1
    return packs
