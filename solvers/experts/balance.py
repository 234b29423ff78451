"""Step 4: slots that balance the GPUs, from starts and exchanges; EPLB's placement; groups of experts that stay on one node.

`balance_gpus` takes the best of several starts for each layer:
    replicas by the greedy rule, packed largest first, exchanged (packing.py); with few layers or workloads also by their mean;
    where a gap to EPLB's result or to the bound remains, restarts with other numbers of replicas and another order;
    with `BalanceSearch.restarts` the layers with the largest gaps restart until the time is over.

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
from .bounds import lower_bound
from .instance import BestSlots, ExpertInstance, replica_counts, select_layers, uniform_objective
from .packing import (
    Effort,
    counts_up_to_level,
    greedy_counts,
    grid_from_slots,
    improve_grid,
    largest_first,
    list_replicas,
    move_replicas_at_random,
    slots_from_grid,
)


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


_NOISE = 0.15
"""Standard deviation of the logarithm of the factors that disturb the order of replicas; twice that for their loads."""

_RESTART_EFFORT = Effort(rounds=24, last=30, done_ratio=1.00001)
"""Of one restart: short, since many are tried, and to the end, since one that ends at the bound is the last."""

_MAX_MOVED = 3
"""Replicas that a restart moves at most, so that it stays near the best counts so far."""

_LEVELS = (0.4, 1.0)
"""Of the mean: shares up to a level between these are small enough to fill GPUs without a gap."""

_SEARCH_EFFORT = Effort(rounds=60, last=200, done_ratio=1.00001)
"""Of layers that are worse than EPLB's placement, of which there are few."""

_SCENARIO_EFFORT, _FEW_LAYERS_EFFORT = Effort(rounds=24, last=16), Effort(rounds=60, last=200)
"""With several workloads, for which each exchange costs a multiple; and where layers are so few that it does not matter."""

_BATCH = 64
"""Layers x workloads that restart together at most."""

_EPLB_TURNS = 40
"""Restarts at most for layers that are still worse than EPLB's placement."""

_FAR = 1.01
"""Of the bound: layers beyond it get a restart in any case."""

_FEW_LAYERS = 8
"""Up to so many a second start and a restart cost little even with several workloads."""


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
    _match_eplb(best, rng)
    bound = lower_bound(instance, weighted=False, reached=best.objective)
    if not several or few:
        _restart(best, np.flatnonzero(best.objective > bound * _FAR), rng)
    while search.restarts and time.perf_counter() - clock < search.time_limit_s:
        gap = best.objective / bound
        worst = np.argsort(-gap)[: max(1, _BATCH // (4 * len(instance.load)))]
        worst = worst[gap[worst] > _SEARCH_EFFORT.done_ratio]
        if not len(worst):
            break
        _restart(best, worst, rng)
    return best.placed


def _pack_and_exchange(
    instance: ExpertInstance, counts: IntArray, effort: Effort, noise: FloatArray | None = None
) -> IntArray:
    """Return x [L, S] of r [L, E]: packed largest first, and exchanged."""
    return exchange_slots(instance, slots_from_grid(largest_first(instance, counts, order_noise=noise)), effort)


def exchange_slots(instance: ExpertInstance, placed: IntArray, effort: Effort) -> IntArray:
    """Return x [L, S] after exchanges; the numbers of replicas stay."""
    size = instance.weight / replica_counts(placed, instance.num_experts)[:, :, None]
    bound = np.maximum(1.0, size.max(axis=(1, 2)) / instance.gpu_speed.max())
    return slots_from_grid(improve_grid(instance, grid_from_slots(placed, instance.slots_per_gpu), size, bound, effort))


def _match_eplb(best: BestSlots, rng: np.random.Generator) -> None:
    """Bring every layer to EPLB's result at least: by its slots if they keep replicas apart (C2), and by restarts."""
    instance = best.instance
    if np.any(instance.slots_per_gpu != instance.slots_per_gpu[0]):
        return
    start = eplb_placement(instance.weight.mean(axis=2), num_slots=instance.num_slots, num_gpus=instance.num_gpus)
    eplb_objective = uniform_objective(instance, start)
    for turn in range(_EPLB_TURNS):
        layers = np.flatnonzero(best.objective > eplb_objective)
        if not len(layers):
            return
        if turn:
            _restart(best, layers, rng)
            continue
        on_gpus = np.sort(start[layers] + instance.gpu_of_slot * instance.num_experts, axis=1)
        apart = np.all(np.diff(on_gpus, axis=1) > 0, axis=1)
        slots = np.where(apart[:, None], start[layers], best.placed[layers])
        best.offer(exchange_slots(select_layers(instance, layers), slots, _SEARCH_EFFORT), layers)


def _restart(best: BestSlots, layers: IntArray, rng: np.random.Generator) -> None:
    """Pack layers anew, several times each, and keep what is better."""
    if not len(layers):
        return
    copies = max(1, _BATCH // (len(layers) * len(best.instance.load)))
    copied = layers.repeat(copies)
    part = select_layers(best.instance, copied)
    counts = _perturb_counts(part, best.placed[copied], rng)
    deviation = rng.choice([0.0, _NOISE], (len(copied), 1))  # half of the layers keep the order of their replicas
    noise = np.exp(deviation * rng.standard_normal(counts.shape))
    restarted = _pack_and_exchange(part, counts, _RESTART_EFFORT, noise)
    reached = uniform_objective(part, restarted).reshape(-1, copies)
    best.offer(restarted[np.arange(len(layers)) * copies + np.argmin(reached, axis=1)], layers)


def _perturb_counts(instance: ExpertInstance, placed: IntArray, rng: np.random.Generator) -> IntArray:
    """Return r [L, E], by chance one of three: a few replicas moved; the greedy rule on disturbed loads; few below a level."""
    weight, num_layers, limit, num_slots = (
        instance.weight.max(axis=2),
        instance.num_layers,
        instance.num_gpus,
        instance.num_slots,
    )
    moves = rng.integers(0, _MAX_MOVED + 1, num_layers)
    counts = move_replicas_at_random(replica_counts(placed, instance.num_experts), moves, limit, rng)
    kind = rng.integers(0, 3, num_layers)
    disturbed = weight * np.exp(2 * _NOISE * rng.standard_normal(weight.shape))
    counts[kind == 1] = greedy_counts(disturbed[kind == 1], num_slots, limit)
    level = rng.uniform(*_LEVELS, num_layers) * np.maximum(instance.gpu_speed.max(), 1.0)
    counts[kind == 2] = counts_up_to_level(weight[kind == 2], level[kind == 2], num_slots, limit)
    return counts


def place_groups(instance: ExpertInstance, num_groups: int, search: BalanceSearch) -> IntArray:
    """Return x [L, S] under (C4)."""
    require_even(instance, num_groups)
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
    """Raise unless groups divide experts and nodes divide groups, GPUs are alike and the slots of a node can be filled."""
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
    gpus = instance.num_gpus // instance.num_nodes
    if instance.num_slots // instance.num_nodes > instance.num_experts // instance.num_nodes * gpus:
        raise ConfigError("more replicas than GPUs: the slots of a node cannot be filled with its own experts (C2)")
