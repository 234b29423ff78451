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
from ...schema.units import BoolArray, FloatArray, IntArray
from .bounds import lower_bound
from .instance import (
    ExpertInstance,
    replica_counts,
    select_layers,
    uniform_objective,
)
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
    per_group = num_experts // num_groups
    group_load = weight.reshape(num_layers, num_groups, per_group).sum(axis=2)
    groups = pack_evenly(group_load, num_nodes)
    members = (groups[..., None] * per_group + np.arange(per_group)).reshape(num_layers * num_nodes, -1)
    layer = np.repeat(np.arange(num_layers), num_nodes)[:, None]
    local = weight[layer, members]
    slots, gpus = num_slots // num_nodes, num_gpus // num_nodes
    counts = greedy_counts(local, slots, slots)
    items = list_replicas(counts, slots)
    share = np.take_along_axis(local / counts, items, axis=1)
    packs = pack_evenly(share, gpus).reshape(len(local), -1)
    placed = np.take_along_axis(members, np.take_along_axis(items, packs, axis=1), axis=1)
    return placed.reshape(num_layers, num_slots)


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

_SEARCH_EFFORT = Effort(rounds=60, last=200, done_ratio=1.00001)
_SCENARIO_EFFORT = Effort(rounds=24, last=16)
"""With several workloads, for which each exchange costs a multiple."""

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
    clock = time.perf_counter()
    several = len(instance.load) > 1
    effort = Effort()
    if several:
        effort = _SCENARIO_EFFORT if instance.num_layers > _FEW_LAYERS else Effort(rounds=60, last=200)
    best = _pack_and_exchange(instance, _start_counts(instance, "largest"), effort)
    objective = uniform_objective(instance, best)
    if several and (search.restarts or instance.num_layers <= _FEW_LAYERS):
        _keep_better(best, objective, instance, _pack_and_exchange(instance, _start_counts(instance, "mean"), effort))
    rng = np.random.default_rng(search.seed)
    _match_eplb(instance, best, objective, rng)
    bound = lower_bound(instance, weighted=False, reached=objective)
    if not several or instance.num_layers <= _FEW_LAYERS:
        _restart_layers(instance, best, objective, np.flatnonzero(objective > bound * _FAR), rng)
    if not search.restarts:
        return best
    while time.perf_counter() - clock < search.time_limit_s:
        gap = objective / bound
        worst = np.argsort(-gap)[: max(1, _BATCH // (4 * len(instance.load)))]
        worst = worst[gap[worst] > _SEARCH_EFFORT.done_ratio]
        if not len(worst):
            break
        _restart_layers(instance, best, objective, worst, rng)
    return best


def _restart_layers(
    instance: ExpertInstance, best: IntArray, objective: FloatArray, layers: IntArray, rng: np.random.Generator
) -> None:
    if len(layers):
        part = select_layers(instance, layers)
        part_best, part_objective = best[layers], objective[layers]
        _keep_better(part_best, part_objective, part, _best_restart(part, part_best, rng))
        best[layers], objective[layers] = part_best, part_objective


def _start_counts(instance: ExpertInstance, kind: str) -> IntArray:
    weight = instance.weight.max(axis=2) if kind == "largest" else instance.weight.mean(axis=2)
    return greedy_counts(weight, instance.num_slots, instance.num_gpus)


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


def _keep_better(best: IntArray, objective: FloatArray, instance: ExpertInstance, other: IntArray) -> None:
    reached = uniform_objective(instance, other)
    better = reached < objective
    best[better], objective[better] = other[better], reached[better]


def _match_eplb(instance: ExpertInstance, best: IntArray, objective: FloatArray, rng: np.random.Generator) -> None:
    """Bring every layer to EPLB's result at least, in place: by its slots if they keep replicas apart (C2), and by restarts."""
    if np.any(instance.slots_per_gpu != instance.slots_per_gpu[0]):
        return
    start = eplb_placement(instance.weight.mean(axis=2), num_slots=instance.num_slots, num_gpus=instance.num_gpus)
    eplb_objective = uniform_objective(instance, start)
    for turn in range(_EPLB_TURNS):
        layers = np.flatnonzero(objective > eplb_objective)
        if not len(layers):
            return
        part = select_layers(instance, layers)
        part_best, part_objective = best[layers], objective[layers]
        other = exchange_slots(part, part_best, _SEARCH_EFFORT) if turn == 0 else _best_restart(part, part_best, rng)
        apart = has_distinct_experts(instance, start[layers])
        if turn == 0 and apart.any():
            other[apart] = exchange_slots(
                select_layers(part, np.flatnonzero(apart)), start[layers][apart], _SEARCH_EFFORT
            )
        _keep_better(part_best, part_objective, part, other)
        best[layers], objective[layers] = part_best, part_objective


def has_distinct_experts(instance: ExpertInstance, placed: IntArray) -> BoolArray:
    """Return whether (C2) holds [L]."""
    pairs = np.sort(placed + instance.gpu_of_slot * instance.num_experts, axis=1)
    return np.asarray(np.all(np.diff(pairs, axis=1) > 0, axis=1))


def _best_restart(instance: ExpertInstance, placed: IntArray, rng: np.random.Generator) -> IntArray:
    copies = max(1, _BATCH // (instance.num_layers * len(instance.load)))
    part = select_layers(instance, np.repeat(np.arange(instance.num_layers), copies))
    restarted = _pack_and_exchange(
        part, _perturb_counts(part, placed.repeat(copies, axis=0), rng), _RESTART_EFFORT, _order_noise(part, rng)
    )
    reached = uniform_objective(part, restarted).reshape(-1, copies)
    best = np.arange(instance.num_layers) * copies + np.argmin(reached, axis=1)
    return np.asarray(restarted[best])


def _order_noise(instance: ExpertInstance, rng: np.random.Generator) -> FloatArray:
    """Return factors [L, E] that change the order in which replicas are placed; half of the layers keep theirs."""
    shape = (instance.num_layers, instance.num_experts)
    deviation = rng.choice([0.0, _NOISE], (instance.num_layers, 1))
    return np.asarray(np.exp(deviation * rng.standard_normal(shape)))


def _perturb_counts(instance: ExpertInstance, placed: IntArray, rng: np.random.Generator) -> IntArray:
    """Return r [L, E], by chance one of three: a few replicas moved; the greedy rule on disturbed loads; few below a level."""
    weight = instance.weight.max(axis=2)
    limit, num_slots = instance.num_gpus, instance.num_slots
    counts = move_replicas_at_random(
        replica_counts(placed, instance.num_experts), rng.integers(0, 4, instance.num_layers), limit, rng
    )
    kind = rng.integers(0, 3, instance.num_layers)
    disturbed = weight * np.exp(2 * _NOISE * rng.standard_normal(weight.shape))
    counts[kind == 1] = greedy_counts(disturbed[kind == 1], num_slots, limit)
    level = rng.uniform(0.4, 1.0, instance.num_layers) * np.maximum(instance.gpu_speed.max(), 1.0)
    counts[kind == 2] = counts_up_to_level(weight[kind == 2], level[kind == 2], num_slots, limit)
    return counts


def place_groups(instance: ExpertInstance, num_groups: int, search: BalanceSearch) -> IntArray:
    """Return x [L, S] under (C4).

    Raises:
        ConfigError: groups that do not divide the experts or among the nodes, slots or GPUs that differ.
    """
    require_even(instance, num_groups)
    per_group = instance.num_experts // num_groups
    nodes = _groups_as_experts(instance, num_groups)
    groups = balance_gpus(nodes, search).reshape(instance.num_layers, instance.num_nodes, -1)
    eplb_groups = pack_evenly(nodes.weight.mean(axis=2), instance.num_nodes)
    placed = _place_within_nodes(instance, groups, per_group, search)
    other = _place_within_nodes(instance, eplb_groups, per_group, search)
    better = uniform_objective(instance, other) < uniform_objective(instance, placed)
    placed[better] = other[better]
    return placed


def _place_within_nodes(instance: ExpertInstance, groups: IntArray, per_group: int, search: BalanceSearch) -> IntArray:
    """Return x [L, S] with the groups [L, N, P] on their nodes."""
    num_layers, num_nodes = groups.shape[:2]
    members = (groups[..., None] * per_group + np.arange(per_group)).reshape(num_layers, num_nodes, -1)
    local = np.stack([np.take_along_axis(load[:, None, :], members, axis=2) for load in instance.load])
    local = local.reshape(len(instance.load), num_layers * num_nodes, -1)
    # A node without any load is placed as if all of its experts had the same.
    local = np.where(local.sum(axis=2, keepdims=True) > 0, local, 1.0)
    gpus = instance.num_gpus // num_nodes
    node = ExpertInstance(local, instance.slots_per_gpu[:gpus], instance.gpu_speed[:gpus])
    placed = balance_gpus(node, search)
    experts = np.take_along_axis(members.reshape(num_layers * num_nodes, -1), placed, axis=1)
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
    if instance.num_slots // instance.num_nodes > instance.num_experts // instance.num_nodes * (
        instance.num_gpus // instance.num_nodes
    ):
        raise ConfigError("more replicas than GPUs: the slots of a node cannot be filled with its own experts (C2)")
