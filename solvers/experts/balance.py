"""Step 4: slots that balance the GPUs, from starts and exchanges; EPLB's placement; groups of experts that stay on one node.

`balance_gpus` takes the best of several starts for each layer:
    replicas by the greedy rule, packed largest first, exchanged (packing.py); with few layers or workloads also by their mean;
    where a gap to EPLB's result or to the bound remains, other numbers of replicas that vary while slots are packed (replicas.py);
    with `BalanceSearch.restarts` those of the layers with the largest gaps again until the time is over.

`eplb_placement` is the placement of DeepSeek's EPLB from its published description: a start, and what ours is compared with. Three
steps: groups of experts onto nodes, as many groups on each, the heaviest first onto the node with the lowest load; within a node
the slots beyond one for each expert go one by one to the expert with the largest share; within a node the replicas go, heaviest
first, onto the GPU with the lowest load that has a free slot. Where groups do not divide among nodes, one group on one node. Two
replicas may meet on a GPU. Source: README of github.com/deepseek-ai/EPLB.

`place_groups` keeps groups on one node each (C4): groups onto nodes, then every node for itself. Both steps are the problem of
experts/instance.py again: groups are experts without replicas and nodes are GPUs; then the nodes of all layers are layers. EPLB's
groups are a second start, so that no layer is worse than its result.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from ...schema.errors import ConfigError
from ...schema.units import FloatArray, IntArray
from ..tolerances import SUMMED
from .bounds import lower_bound
from .instance import BestSlots, ExpertInstance, select_layers, uniform_objective
from .packing import (
    Effort,
    exchange_slots,
    greedy_counts,
    largest_first,
    list_replicas,
    slots_from_grid,
)
from .replicas import vary_replicas


def eplb_placement(
    weight: FloatArray, *, num_slots: int, num_gpus: int, num_groups: int = 1, num_nodes: int = 1
) -> IntArray:
    """Return x [L, S] for loads [L, E]."""
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    num_layers, num_experts = weight.shape
    groups = pack_evenly(weight.reshape(num_layers, num_groups, -1).sum(axis=2), num_nodes)
    members = experts_of_groups(groups, num_experts // num_groups)
    local = np.take_along_axis(weight[:, None], members, axis=2).reshape(num_layers * num_nodes, -1)
    slots = num_slots // num_nodes
    counts = greedy_counts(local, slots, slots)
    items = list_replicas(counts, slots)
    share = np.take_along_axis(local / counts, items, axis=1)
    packs = pack_evenly(share, num_gpus // num_nodes).reshape(len(local), -1)
    chosen = np.take_along_axis(items, packs, axis=1).reshape(num_layers, num_nodes, slots)
    return np.take_along_axis(members, chosen, axis=2).reshape(num_layers, num_slots)


def experts_of_groups(groups: IntArray, per_group: int) -> IntArray:
    """Return the experts on each node [L, N, E / N] of the groups [L, N, P] of neighbours on it."""
    return (groups[..., None] * per_group + np.arange(per_group)).reshape(*groups.shape[:2], -1)


def pack_evenly(weight: FloatArray, num_packs: int) -> IntArray:
    """Return the items of each pack [B, P, N / P] of weights [B, N]: heaviest first, onto the lightest pack that is not full."""
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


_SEARCH_EFFORT = Effort(rounds=60, last=200, done_ratio=1.00001)
"""Of layers that are worse than EPLB's placement, of which there are few."""

_SCENARIO_EFFORT, _FEW_LAYERS_EFFORT = Effort(rounds=24, last=16), Effort(rounds=60, last=200)
"""With several workloads, for which each exchange costs a multiple; and where layers are so few that it does not matter."""

_EPLB_TURNS = 8
"""Walks at most for layers that are still worse than EPLB's placement."""

_FAR, _NEAR = 1.01, 1.003
"""Of the bound: beyond the first the numbers of a layer's replicas vary in any case, until they reach the second."""

_FEW_LAYERS = 8
"""Up to so many a second start and walks cost little even with several workloads."""

_TOGETHER = 8
"""Layers with the largest gaps that walk together until the time is over."""


@dataclass(frozen=True)
class BalanceSearch:
    """How hard to look: with ``restarts`` until `time_limit_s`, with random numbers of `seed`."""

    restarts: bool = False
    time_limit_s: float = 10.0
    seed: int = 0


def balance_gpus(instance: ExpertInstance, search: BalanceSearch) -> IntArray:
    """Return x [L, S] with low (O) under the uniform split."""
    clock, several, few = time.perf_counter(), len(instance.load) > 1, instance.num_layers <= _FEW_LAYERS
    effort = _SCENARIO_EFFORT if several and not few else _FEW_LAYERS_EFFORT if several else Effort()

    def start(weight: FloatArray) -> IntArray:
        return _pack_and_exchange(instance, greedy_counts(weight, instance.num_slots, instance.num_gpus), effort)

    best = BestSlots(instance, start(instance.weight.max(axis=2)))
    if several and (search.restarts or few):
        best.offer(start(instance.weight.mean(axis=2)))
    rng = np.random.default_rng(search.seed)
    eplb_objective = _offer_eplb(best)
    bound = lower_bound(instance, weighted=False, reached=best.objective)
    if not several or few:
        vary_replicas(best, bound * _NEAR, np.flatnonzero(best.objective > bound * _FAR), rng)
    target = eplb_objective * (1 + SUMMED)
    for _ in range(_EPLB_TURNS):
        vary_replicas(best, target, np.flatnonzero(best.objective > target), rng)
    while search.restarts and time.perf_counter() - clock < search.time_limit_s:
        gap = best.objective / bound
        worst = np.argsort(-gap)[: max(1, _TOGETHER // len(instance.load))]
        worst = worst[gap[worst] > _SEARCH_EFFORT.done_ratio]
        if not len(worst):
            break
        vary_replicas(best, bound * _SEARCH_EFFORT.done_ratio, worst, rng)
    return best.placed


def _pack_and_exchange(instance: ExpertInstance, counts: IntArray, effort: Effort) -> IntArray:
    """Return x [L, S] of r [L, E]: packed largest first, and exchanged."""
    return exchange_slots(instance, slots_from_grid(largest_first(instance, counts)), effort)


def _offer_eplb(best: BestSlots) -> FloatArray:
    """Offer EPLB's slots, exchanged, to layers that are worse and where they keep replicas apart (C2); return its (O) [L]."""
    instance = best.instance
    if np.any(instance.slots_per_gpu != instance.slots_per_gpu[0]):
        return np.full(instance.num_layers, np.inf)
    start = eplb_placement(instance.weight.mean(axis=2), num_slots=instance.num_slots, num_gpus=instance.num_gpus)
    reached = uniform_objective(instance, start)
    on_gpus = np.sort(start + instance.gpu_of_slot * instance.num_experts, axis=1)
    layers = np.flatnonzero((best.objective > reached) & np.all(np.diff(on_gpus, axis=1) > 0, axis=1))
    if len(layers):
        best.offer(exchange_slots(select_layers(instance, layers), start[layers], _SEARCH_EFFORT), layers)
    return reached


def place_groups(instance: ExpertInstance, num_groups: int, search: BalanceSearch) -> IntArray:
    """Return x [L, S] under (C4)."""
    require_even(instance, num_groups)
    gpus = instance.num_gpus // instance.num_nodes
    if instance.num_slots // instance.num_nodes > instance.num_experts // instance.num_nodes * gpus:
        raise ConfigError("more replicas than GPUs: the slots of a node cannot be filled with its own experts (C2)")
    nodes = _groups_as_experts(instance, num_groups)
    groups = balance_gpus(nodes, search).reshape(instance.num_layers, instance.num_nodes, -1)
    best = BestSlots(instance, _place_within_nodes(instance, groups, search))
    best.offer(_place_within_nodes(instance, pack_evenly(nodes.weight.mean(axis=2), instance.num_nodes), search))
    return best.placed


def _place_within_nodes(instance: ExpertInstance, groups: IntArray, search: BalanceSearch) -> IntArray:
    """Return x [L, S] with the groups [L, N, P] on their nodes."""
    num_layers, num_nodes, per_node = groups.shape
    members = experts_of_groups(groups, instance.num_experts // (num_nodes * per_node))
    local = np.stack([np.take_along_axis(load[:, None, :], members, axis=2) for load in instance.load])
    local = local.reshape(len(instance.load), num_layers * num_nodes, -1)
    # A node without any load is placed as if all of its experts had the same.
    local = np.where(local.sum(axis=2, keepdims=True) > 0, local, 1.0)
    gpus = instance.num_gpus // num_nodes
    placed = balance_gpus(ExpertInstance(local, instance.slots_per_gpu[:gpus], instance.gpu_speed[:gpus]), search)
    experts = np.take_along_axis(members, placed.reshape(num_layers, num_nodes, -1), axis=2)
    return experts.reshape(num_layers, instance.num_slots)


def nodes_of_groups(instance: ExpertInstance, num_groups: int, search: BalanceSearch) -> IntArray:
    """Return the node of each expert [L, E]."""
    groups = balance_gpus(_groups_as_experts(instance, num_groups), search)
    node = np.empty_like(groups)
    np.put_along_axis(node, groups, np.repeat(np.arange(instance.num_nodes), num_groups // instance.num_nodes)[None], 1)
    return node.repeat(instance.num_experts // num_groups, axis=1)


def _groups_as_experts(instance: ExpertInstance, num_groups: int) -> ExpertInstance:
    return ExpertInstance(
        instance.load.reshape(*instance.load.shape[:2], num_groups, -1).sum(axis=3),
        np.full(instance.num_nodes, num_groups // instance.num_nodes),
        np.ones(instance.num_nodes),
    )


def require_even(instance: ExpertInstance, num_groups: int) -> None:
    """Raise unless groups divide experts, nodes divide groups, and GPUs are alike."""
    if num_groups < 1 or instance.num_experts % num_groups:
        raise ConfigError(f"{instance.num_experts} experts do not divide into {num_groups} groups")
    if num_groups % instance.num_nodes:
        raise ConfigError(
            f"{num_groups} groups do not divide among {instance.num_nodes} nodes (C4)",
            help="leave num_groups out to place experts on any node",
        )
    if np.any(instance.slots_per_gpu != instance.slots_per_gpu[0]) or np.any(instance.gpu_speed != 1):
        raise ConfigError(
            "groups on nodes need GPUs that are alike: no slots_per_gpu and no gpu_speed beside num_groups"
        )
