"""Which node is home of each expert, so that the experts of a token are on few nodes.

Data      TOGETHER[e,f]  tokens that use both experts;  LOAD[e]  tokens of an expert
Variables home[e]
Objective (O) max  sum over pairs of one node of TOGETHER[e,f]
Constraints
    (C1) even: every node is home of as many experts
    (C2) load: sum over a node of LOAD <= LIMIT times the mean, as far as exchanges of two experts find it

Method: spectral bisection (the experts in the order of the second eigenvector of TOGETHER over its degrees), again for
each part; then the best exchange of two experts, overload counting before (O), until none gains (Kernighan and Lin, Bell
System Technical J. 49(2), 1970).

`place_near_tokens` makes slots of it for few visits of tokens to nodes, in three steps:
    1. homes: the groups of group-limited routing packed onto nodes, else experts that tokens use together, as above;
    2. the slots beyond one home each go to replicas that balance the nodes without any more visit (experts/nodes.py);
    3. every node is the problem of experts/instance.py again, with the tokens that it serves as loads; slots that remain replicate
       its experts.
"traffic" lets the homes of a node have 2 % more than the mean before replicas; "pareto" tries several limits and takes, of those
whose nodes end within 2 % (tokens not seen yet spread further), the one with fewest visits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...schema.errors import ConfigError
from ...schema.units import FloatArray, IntArray
from .balance import BalanceSearch, balance_gpus, nodes_of_groups, require_even
from .instance import ExpertInstance, SlotAssignment
from .nodes import Routing, Served, replicate_on_nodes, serve

_OVERLOAD_PRICE = 1e3
"""Of a node's load over LIMIT, in parts of the mean, next to (O) in parts of its total, which is 1 at most: (C2) counts first."""

_MIN_GAIN = 1e-9
"""Of (O) in parts of its total: an exchange that gains less is rounding."""

_LIMITS = {"traffic": (1.02,), "pareto": (1.02, 1.1, 1.3)}
"""LIMITs that are tried, by objective."""

_GOAL = 1.02
"""Load of the fullest node over the mean up to which the fewest visits decide."""

_MIN_TIME_S = 0.5
"""Of the programs of a layer, however many layers share the time limit."""


def pair_counts(tokens: IntArray, num_experts: int) -> FloatArray:
    """Return TOGETHER [E, E] of the choices [T, k] of one layer, its diagonal 0."""
    pairs = tokens[:, :, None] * num_experts + tokens[:, None, :]
    counts = np.bincount(pairs.ravel(), minlength=num_experts**2).reshape(num_experts, num_experts).astype(np.float64)
    np.fill_diagonal(counts, 0.0)
    return counts


def assign_homes(pairs: FloatArray, load: FloatArray, num_nodes: int, limit: float) -> IntArray:
    """Return home [E]: the better of two starts after exchanges; E divides by ``num_nodes``."""
    starts = (_bisect(pairs, num_nodes), _deal_by_load(load, num_nodes))
    homes = [_exchange_homes(start, pairs, load, num_nodes, limit) for start in starts]
    return max(homes, key=lambda home: _value(home, pairs, load, num_nodes, limit))


def _deal_by_load(load: FloatArray, num_nodes: int) -> IntArray:
    """Deal the experts by load, to and fro, as many to each node (C1)."""
    home = np.empty(len(load), dtype=np.int64)
    turn = np.concatenate([np.arange(num_nodes), np.arange(num_nodes)[::-1]])
    home[np.argsort(-load, kind="stable")] = np.resize(turn, len(load))
    return home


def _bisect(pairs: FloatArray, num_nodes: int) -> IntArray:
    home = np.zeros(len(pairs), dtype=np.int64)
    parts = [(np.arange(len(pairs)), 0, num_nodes)]
    per_node = len(pairs) // num_nodes
    while parts:
        members, first, count = parts.pop()
        if count == 1:
            home[members] = first
            continue
        inside = pairs[np.ix_(members, members)]
        root = np.sqrt(np.maximum(inside.sum(axis=1), 1e-12))
        _, vectors = np.linalg.eigh(inside / root[:, None] / root)
        order = members[np.argsort(vectors[:, -2] / root, kind="stable")]
        half = count // 2
        parts.append((order[: half * per_node], first, half))
        parts.append((order[half * per_node :], first + half, count - half))
    return home


def _value(home: IntArray, pairs: FloatArray, load: FloatArray, num_nodes: int, limit: float) -> float:
    """Return (O) over its total, less the price of overload (C2)."""
    same = home[:, None] == home
    used = np.bincount(home, load, num_nodes) / load.sum() * num_nodes
    over = np.maximum(used - limit, 0).sum()
    return float((pairs * same).sum() / max(pairs.sum(), 1e-300) - _OVERLOAD_PRICE * over)


def _exchange_homes(home: IntArray, pairs: FloatArray, load: FloatArray, num_nodes: int, limit: float) -> IntArray:
    home = home.copy()
    weight = load / load.sum() * num_nodes
    scale = 2.0 / max(pairs.sum(), 1e-300)
    rows = np.arange(len(home))
    with_node = np.stack([pairs[:, home == n].sum(axis=1) for n in range(num_nodes)], axis=1)
    for _ in range(20 * len(home)):
        used = np.bincount(home, weight, num_nodes)
        # gain[e, f] of e going to f's node and f to e's.
        other = with_node[:, home] - with_node[rows, home][:, None]
        gain = scale * (other + other.T - 2 * pairs)
        moved = weight[:, None] - weight
        load_e, load_f = used[home][:, None], used[home]
        over = np.maximum(load_e - limit, 0) + np.maximum(load_f - limit, 0)
        after = np.maximum(load_e - moved - limit, 0) + np.maximum(load_f + moved - limit, 0)
        gain += _OVERLOAD_PRICE * (over - after)
        gain[home[:, None] == home] = -np.inf
        e, f = divmod(int(np.argmax(gain)), len(home))
        if gain[e, f] <= _MIN_GAIN:
            break
        a, b = home[e], home[f]
        with_node[:, a] += pairs[:, f] - pairs[:, e]
        with_node[:, b] += pairs[:, e] - pairs[:, f]
        home[e], home[f] = b, a
    return home


@dataclass(frozen=True)
class HomePolicy:
    """How homes are chosen: by groups of experts that stay together, if any, else by the limits of an objective."""

    num_groups: int | None
    objective: str


@dataclass(frozen=True)
class _ServedLayer:
    routing: Routing
    served: Served

    @property
    def balance(self) -> float:
        node = self.served.tokens.sum(axis=0)
        return float(node.max() / node.mean())


def validate_trace(trace: Any, num_layers: int, num_experts: int) -> IntArray:
    """Return a validated trace [tokens, L, top_k].

    Raises:
        ConfigError: of another shape, or with experts that do not exist or twice for one token.
    """
    array = np.asarray(trace.detach().cpu().numpy() if hasattr(trace, "detach") else trace)
    if array.ndim != 3 or array.shape[1] != num_layers or 0 in array.shape:
        raise ConfigError(f"a trace has shape [tokens, {num_layers} layers, top_k]; this one {array.shape}")
    if not np.issubdtype(array.dtype, np.integer) or array.min() < 0 or array.max() >= num_experts:
        raise ConfigError(f"a trace names experts 0..{num_experts - 1} by whole numbers")
    if np.any(np.diff(np.sort(array, axis=2), axis=2) == 0):
        raise ConfigError("a token of the trace uses an expert twice in one layer")
    return array.astype(np.int64)


def place_near_tokens(
    instance: ExpertInstance, trace: IntArray, policy: HomePolicy, search: BalanceSearch
) -> SlotAssignment:
    """Return slots for a trace; `search.time_limit_s` is for the programs of all layers together.

    Raises:
        ConfigError: experts that do not divide among nodes, GPUs that differ.
    """
    require_even(instance, policy.num_groups or instance.num_nodes)
    extra = (instance.num_slots - instance.num_experts) // instance.num_nodes
    limit_s = max(search.time_limit_s / instance.num_layers, _MIN_TIME_S)
    fixed = None if policy.num_groups is None else nodes_of_groups(instance, policy.num_groups, search)
    layers = []
    for layer in range(instance.num_layers):
        tokens = trace[:, layer]
        tried = []
        for limit in _LIMITS[policy.objective]:
            home = fixed[layer] if fixed is not None else _assign_layer_homes(instance, tokens, limit)
            routing = replicate_on_nodes(
                tokens,
                home,
                instance.num_nodes,
                extra,
                instance.num_experts,
                time_limit_s=limit_s / len(_LIMITS[policy.objective]),
                seed=search.seed,
            )
            tried.append(_ServedLayer(routing, serve(tokens, routing, seed=search.seed)))
            if fixed is not None:
                break
        layers.append(min(tried, key=lambda layer: (max(layer.balance, _GOAL), layer.served.visits)))
    return _place_on_gpus(instance, layers, search)


def _assign_layer_homes(instance: ExpertInstance, tokens: IntArray, limit: float) -> IntArray:
    load = np.bincount(tokens.ravel(), minlength=instance.num_experts).astype(np.float64)
    return assign_homes(pair_counts(tokens, instance.num_experts), np.maximum(load, 1e-9), instance.num_nodes, limit)


def _place_on_gpus(instance: ExpertInstance, layers: list[_ServedLayer], search: BalanceSearch) -> SlotAssignment:
    num_layers, num_nodes = instance.num_layers, instance.num_nodes
    slots, gpus = instance.num_slots // num_nodes, instance.num_gpus // num_nodes
    placed = np.zeros((num_layers, num_nodes, slots), dtype=np.int64)
    share = np.zeros(placed.shape)
    by_count: dict[int, list[tuple[int, int, IntArray]]] = {}
    for n, layer in enumerate(layers):
        is_home = layer.routing.home[:, None] == np.arange(num_nodes)
        for node in range(num_nodes):
            resident = np.flatnonzero(is_home[:, node] | (layer.routing.part[:, node] > 0))
            by_count.setdefault(len(resident), []).append((n, node, resident))
    for members in by_count.values():
        local = np.array([layers[n].served.tokens[resident, node] for n, node, resident in members])
        # A node that serves no token is placed as if all of its experts served the same.
        local = np.where(local.sum(axis=1, keepdims=True) > 0, local, 1.0)
        part = ExpertInstance(local[None], instance.slots_per_gpu[:gpus], instance.gpu_speed[:gpus])
        chosen = balance_gpus(part, BalanceSearch(seed=search.seed))
        for (n, node, resident), local_slots in zip(members, chosen, strict=True):
            experts = resident[local_slots]
            replicas = np.bincount(experts, minlength=instance.num_experts)[experts]
            served = layers[n].served.tokens
            total = np.maximum(served.sum(axis=1), 1e-300)
            placed[n, node], share[n, node] = experts, served[experts, node] / total[experts] / replicas
    slots_of_layer, share_of_slot = placed.reshape(num_layers, -1), share.reshape(num_layers, -1)
    _share_unused_evenly(slots_of_layer, share_of_slot, instance.num_experts)
    return SlotAssignment(
        slots_of_layer,
        share=share_of_slot,
        home=np.array([layer.routing.home for layer in layers]),
        node_part=np.array([layer.routing.part for layer in layers]),
        visits=np.array([layer.served.visits for layer in layers]),
    )


def _share_unused_evenly(placed: IntArray, share: FloatArray, num_experts: int) -> None:
    for layer in range(len(placed)):
        total = np.bincount(placed[layer], share[layer], num_experts)
        unused = total[placed[layer]] <= 0
        counts = np.bincount(placed[layer], minlength=num_experts)
        share[layer, unused] = 1.0 / counts[placed[layer]][unused]
