"""Experts near their tokens: which node is home of each expert, and which other nodes have replicas, for few visits of nodes.

Homes, so that the experts of a token are on few nodes:
Data      TOGETHER[e,f]  tokens that use both experts;  LOAD[e]  tokens of an expert
Variables home[e]
Objective (O) max  sum over pairs of one node of TOGETHER[e,f]
Constraints
    (C1) even: every node is home of as many experts
    (C2) load: sum over a node of LOAD <= LIMIT times the mean, as far as exchanges of two experts find it

Method: spectral bisection (the experts in the order of the second eigenvector of TOGETHER over its degrees), again for each part;
then the best exchange of two experts, overload counting before (O), until none gains (Kernighan and Lin, Bell System Technical J.
49(2), 1970).

Replicas on other nodes, which balance the nodes without sending any token to more nodes: a token visits the homes of its experts,
and one of its experts may instead be served by a replica on another of these nodes, so that the visits never grow (and fall by one
where nothing else of the token stays at that home):
Sets      e experts with home h(e); n nodes
Data      CAN[e,n]  tokens of expert e that visit node n anyway;  ANY[e]  that visit some other node
          EXTRA  replicas that a node has slots for
Variables y[e,n]    1 if node n has a replica of e;  f[e,n]  tokens of e served there;  T  level
Objective (O') min T
Constraints
    (C3) replica: f[e,n] <= CAN[e,n] y[e,n]
    (C4) tokens:  sum_n f[e,n] <= ANY[e]
    (C5) slots:   sum_e y[e,n] <= EXTRA
    (C6) level:   sum_{h(e) = n} (LOAD[e] - sum_m f[e,m]) + sum_e f[e,n] <= T

Method: greedy replicas with the best flow (a linear program); where these leave the fullest node above the mean, the mixed-integer
program in HiGHS (through PuLP), which replaces them if it is better within its time. CAN is per expert and node; of tokens that
could go to two nodes (C4) counts each once, which is a relaxation where an expert has three replicas or more. Only the experts with
most tokens of the nodes above the mean have variables.

`place_near_tokens` makes slots of both: the groups of group-limited routing packed onto nodes, else homes as above; the slots
beyond one home each go to replicas; then every node is the problem of experts/instance.py again, with the tokens that it serves as
loads, and slots that remain replicate its experts. "traffic" lets the homes of a node have 2 % more than the mean before replicas;
"pareto" tries several limits and takes, of those whose nodes end within 2 % (tokens not seen yet spread further), the one with
fewest visits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...schema.errors import ConfigError
from ...schema.units import BoolArray, FloatArray, IntArray
from ..backend import Limits, solve_linear
from ..tolerances import ROUNDING, SOLVER, SUMMED
from .balance import BalanceSearch, balance_gpus, nodes_of_groups, require_even
from .instance import ExpertInstance, SlotAssignment

_OVERLOAD_PRICE = 1e3
"""Of a node's load over LIMIT, in parts of the mean, next to (O) in parts of its total, which is 1 at most: (C2) counts first."""

_EXCHANGES_PER_EXPERT = 20
"""At most: a guard against exchanges that go round in a circle of rounding."""

_LIMITS = {"traffic": (1.02,), "pareto": (1.02, 1.1, 1.3)}
"""LIMITs that are tried, by objective."""

_GOAL = 1.02
"""Load of the fullest node over the mean up to which the fewest visits decide."""

_MIN_TIME_S = 0.5
"""Of the programs of a layer, however many layers share the time limit."""

_MAX_EXPERTS_PER_NODE = 24
"""Experts of a node above the mean that have variables, those with most tokens: the others have little to move."""

_REL_GAP = 2e-3
"""Of the level: tokens not seen yet differ by more."""

_REPLICA_COST = 1e-6
"""Of the level in parts of the mean: of equal levels the one with fewest replicas is taken."""

_TURNS = 5
"""Programs with CAN corrected by what the routing did, at most."""

_LINEAR_TIME_LIMIT_S = 10.0
"""A few hundred variables take milliseconds."""

_TINY = 1e-300
"""In place of a sum of nothing under a fraction, whose numerator is zero too."""


@dataclass(frozen=True)
class Routing:
    """Of one layer: the home of each expert [E], and the part of its tokens visiting another node that is served there [E, N]."""

    home: IntArray
    part: FloatArray


@dataclass(frozen=True)
class Served:
    """Tokens of each expert on each node [E, N], and the nodes that all tokens together visit."""

    tokens: FloatArray
    visits: float

    @property
    def balance(self) -> float:
        """Load of the fullest node over the mean."""
        node = self.tokens.sum(axis=0)
        return float(node.max() / node.mean())


def validate_trace(trace: Any, num_layers: int, num_experts: int) -> IntArray:
    """Return a validated trace [tokens, L, top_k]."""
    array = np.asarray(trace.detach().cpu().numpy() if hasattr(trace, "detach") else trace)
    if array.ndim != 3 or array.shape[1] != num_layers or 0 in array.shape:
        raise ConfigError(f"a trace has shape [tokens, {num_layers} layers, top_k]; this one {array.shape}")
    if not np.issubdtype(array.dtype, np.integer) or array.min() < 0 or array.max() >= num_experts:
        raise ConfigError(f"a trace names experts 0..{num_experts - 1} by whole numbers")
    if np.any(np.diff(np.sort(array, axis=2), axis=2) == 0):
        raise ConfigError("a token of the trace uses an expert twice in one layer")
    return array.astype(np.int64)


def place_near_tokens(
    instance: ExpertInstance, trace: IntArray, objective: str, num_groups: int | None, search: BalanceSearch
) -> SlotAssignment:
    """Return slots for a trace; `search.time_limit_s` is for the programs of all layers together."""
    require_even(instance, num_groups or instance.num_nodes)
    num_experts, num_nodes = instance.num_experts, instance.num_nodes
    extra = (instance.num_slots - num_experts) // num_nodes
    limits = _LIMITS[objective]
    limit_s = max(search.time_limit_s / instance.num_layers, _MIN_TIME_S) / len(limits)
    fixed = None if num_groups is None else nodes_of_groups(instance, num_groups, search)
    layers = []
    for layer in range(instance.num_layers):
        tokens = trace[:, layer]
        if fixed is not None:
            homes = [fixed[layer]]
        else:
            pairs, load = pair_counts(tokens, num_experts), np.bincount(tokens.ravel(), minlength=num_experts)
            homes = [assign_homes(pairs, np.maximum(load, SUMMED), num_nodes, limit) for limit in limits]
        tried = []
        for home in homes:
            routing = replicate_on_nodes(
                tokens, home, num_nodes, extra, num_experts, time_limit_s=limit_s, seed=search.seed
            )
            tried.append((routing, serve(tokens, routing, seed=search.seed)))
        layers.append(min(tried, key=lambda pair: (max(pair[1].balance, _GOAL), pair[1].visits)))
    return _place_on_gpus(instance, layers, search)


def _place_on_gpus(
    instance: ExpertInstance, layers: list[tuple[Routing, Served]], search: BalanceSearch
) -> SlotAssignment:
    num_layers, num_nodes = instance.num_layers, instance.num_nodes
    placed = np.zeros((num_layers, num_nodes, instance.num_slots // num_nodes), dtype=np.int64)
    share, gpus = np.zeros(placed.shape), instance.num_gpus // num_nodes
    num_distinct = -(-instance.num_slots // num_nodes // gpus)
    by_count: dict[int, list[tuple[int, int, IntArray]]] = {}
    for n, (routing, _) in enumerate(layers):
        for node in range(num_nodes):
            resident = np.flatnonzero(_residents(routing, node, layers[n][1].tokens, num_distinct))
            by_count.setdefault(len(resident), []).append((n, node, resident))
    for members in by_count.values():
        local = np.array([layers[n][1].tokens[resident, node] for n, node, resident in members])
        # A node that serves no token is placed as if all of its experts served the same.
        local = np.where(local.sum(axis=1, keepdims=True) > 0, local, 1.0)
        part = ExpertInstance(local[None], instance.slots_per_gpu[:gpus], instance.gpu_speed[:gpus])
        chosen = balance_gpus(part, BalanceSearch(seed=search.seed))
        for (n, node, resident), local_slots in zip(members, chosen, strict=True):
            experts, served = resident[local_slots], layers[n][1].tokens
            replicas = np.bincount(experts, minlength=instance.num_experts)[experts]
            total = np.maximum(served.sum(axis=1), _TINY)
            placed[n, node], share[n, node] = experts, served[experts, node] / total[experts] / replicas
    slots, shares = placed.reshape(num_layers, -1), share.reshape(num_layers, -1)
    for layer in range(num_layers):  # the slots of an expert without tokens share evenly
        total = np.bincount(slots[layer], shares[layer], instance.num_experts)
        unused = total[slots[layer]] <= 0
        shares[layer, unused] = 1.0 / np.bincount(slots[layer])[slots[layer]][unused]
    return SlotAssignment(
        slots,
        share=shares,
        home=np.array([routing.home for routing, _ in layers]),
        node_part=np.array([routing.part for routing, _ in layers]),
        visits=np.array([served.visits for _, served in layers]),
    )


def _residents(routing: Routing, node: int, served: FloatArray, num_distinct: int) -> BoolArray:
    """Return the experts [E] that a node holds: at home, with tokens that visit it, and as many of the hottest others as it takes
    to fill a GPU with different ones (C2 of instance.py), which stand by.
    """
    is_resident = (routing.home == node) | (routing.part[:, node] > 0)
    missing = num_distinct - int(is_resident.sum())
    if missing > 0:
        hottest = np.argsort(-np.where(is_resident, -np.inf, served.sum(axis=1)), kind="stable")
        is_resident[hottest[:missing]] = True
    return np.asarray(is_resident)


def pair_counts(tokens: IntArray, num_experts: int) -> FloatArray:
    """Return TOGETHER [E, E] of the choices [T, k] of one layer, its diagonal 0."""
    pairs = tokens[:, :, None] * num_experts + tokens[:, None, :]
    counts = np.bincount(pairs.ravel(), minlength=num_experts**2).reshape(num_experts, num_experts).astype(np.float64)
    np.fill_diagonal(counts, 0.0)
    return counts


def assign_homes(pairs: FloatArray, load: FloatArray, num_nodes: int, limit: float) -> IntArray:
    """Return home [E]: the better of two starts after exchanges, bisection and dealing by load; E divides by ``num_nodes`` (C1)."""
    to_and_fro = np.concatenate([np.arange(num_nodes), np.arange(num_nodes)[::-1]])
    dealt = np.empty(len(load), dtype=np.int64)
    dealt[np.argsort(-load, kind="stable")] = np.resize(to_and_fro, len(load))
    homes = [_exchange_homes(start, pairs, load, num_nodes, limit) for start in (_bisect(pairs, num_nodes), dealt)]
    return max(homes, key=lambda home: _value(home, pairs, load, num_nodes, limit))


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
        root = np.sqrt(np.maximum(inside.sum(axis=1), ROUNDING))
        _, vectors = np.linalg.eigh(inside / root[:, None] / root)
        order = members[np.argsort(vectors[:, -2] / root, kind="stable")]
        half = count // 2
        parts.append((order[: half * per_node], first, half))
        parts.append((order[half * per_node :], first + half, count - half))
    return home


def _value(home: IntArray, pairs: FloatArray, load: FloatArray, num_nodes: int, limit: float) -> float:
    """Return (O) over its total, less the price of overload (C2)."""
    used = np.bincount(home, load, num_nodes) / load.sum() * num_nodes
    over = np.maximum(used - limit, 0).sum()
    return float((pairs * (home[:, None] == home)).sum() / max(pairs.sum(), _TINY) - _OVERLOAD_PRICE * over)


def _exchange_homes(home: IntArray, pairs: FloatArray, load: FloatArray, num_nodes: int, limit: float) -> IntArray:
    home, weight, rows = home.copy(), load / load.sum() * num_nodes, np.arange(len(home))
    scale = 2.0 / max(pairs.sum(), _TINY)
    with_node = np.stack([pairs[:, home == n].sum(axis=1) for n in range(num_nodes)], axis=1)
    for _ in range(_EXCHANGES_PER_EXPERT * len(home)):
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
        if gain[e, f] <= SUMMED:
            break
        a, b = home[e], home[f]
        with_node[:, a] += pairs[:, f] - pairs[:, e]
        with_node[:, b] += pairs[:, e] - pairs[:, f]
        home[e], home[f] = b, a
    return home


def visited_nodes(tokens: IntArray, home: IntArray, num_nodes: int) -> BoolArray:
    """Return whether a token [T, N] visits a node, by the homes of its experts."""
    visits = np.zeros((len(tokens), num_nodes), dtype=bool)
    visits[np.arange(len(tokens))[:, None], home[tokens]] = True
    return visits


def replicate_on_nodes(
    tokens: IntArray, home: IntArray, num_nodes: int, extra: int, num_experts: int, *, time_limit_s: float, seed: int
) -> Routing:
    """Return replicas and routing of one layer for its choices [T, k].

    The tokens that the routing really sends correct CAN for further turns, and the best turn counts.
    """
    visits = visited_nodes(tokens, home, num_nodes)
    eligible = [np.bincount(tokens[visits[:, n]].ravel(), minlength=num_experts) for n in range(num_nodes)]
    can: FloatArray = np.stack(eligible, axis=1).astype(np.float64)
    load = np.bincount(tokens.ravel(), minlength=num_experts)
    can[np.arange(num_experts), home] = 0
    elsewhere = np.broadcast_to((visits.sum(axis=1) > 1)[:, None], tokens.shape)
    anywhere = np.bincount(tokens[elsewhere], minlength=num_experts)
    none = np.zeros((num_experts, num_nodes))
    used = np.bincount(home, load, num_nodes)
    if extra < 1 or num_nodes == 1 or used.max() <= used.mean() * (1 + _REL_GAP):
        return Routing(home, none)
    best, best_level = none, float(used.max() / used.mean())
    for turn in range(_TURNS):
        limits = Limits(time_limit_s=time_limit_s if turn == 0 else 0.0, rel_gap=_REL_GAP, seed=seed)
        flow = _ReplicaProgram(can, anywhere, home, load, used, extra).best_flow(limits)
        part = np.divide(flow, can, out=none.copy(), where=can > 0)
        served = serve(tokens, Routing(home, part), seed=seed).tokens
        level = float(served.sum(axis=0).max() / used.mean())
        if level < best_level:
            best, best_level = part, level
        if best_level <= 1 + 2 * _REL_GAP:
            break
        # Tokens with a choice of nodes are counted in CAN of each of them, but came to one.
        came = np.where(home[:, None] == np.arange(num_nodes), 0.0, served)
        can = np.where(part > 0, np.minimum(can, came / np.maximum(part, ROUNDING)), can)
    return Routing(home, best)


@dataclass(frozen=True)
class _ReplicaProgram:
    """Data of the program of one layer: CAN [E, N], ANY [E], homes [E], LOAD [E], load of the homes [N], EXTRA."""

    can: FloatArray
    anywhere: IntArray
    home: IntArray
    load: IntArray
    used: IntArray | FloatArray
    extra: int

    def best_flow(self, limits: Limits) -> FloatArray:
        """Return f [E, N] of the greedy replicas, or of better ones within the time."""
        greedy, level = self.solve(self.greedy(), replace(limits, time_limit_s=_LINEAR_TIME_LIMIT_S), fixed=True)
        if level <= 1 + _REL_GAP or limits.time_limit_s <= 0:
            return greedy
        used, home = self.used, self.home
        rows = [
            int(e)
            for n in np.flatnonzero(used > used.mean())
            for e in sorted(np.flatnonzero(home == n), key=lambda e: -self.load[e])[:_MAX_EXPERTS_PER_NODE]
        ]
        pairs = [(e, n) for e in rows for n in range(len(used)) if self.can[e, n] > 0 and used[n] < used[home[e]]]
        better, reached = self.solve(pairs, limits, fixed=False)
        return better if reached < level else greedy

    def greedy(self) -> list[tuple[int, int]]:
        """Return pairs (expert, node), each where most tokens can leave the fullest node: a start that takes no time."""
        used, free_slots = self.used.astype(np.float64), np.full(len(self.used), self.extra)
        remaining, mean = self.anywhere.astype(np.float64), self.used.mean()
        chosen: list[tuple[int, int]] = []
        taken, done = np.zeros(self.can.shape, dtype=bool), np.zeros(len(used), dtype=bool)
        while not done.all():
            fullest = int(np.argmax(np.where(done, -np.inf, used)))
            if used[fullest] <= mean:
                break
            fits = np.where(free_slots > 0, np.maximum(mean - used, 0), 0)
            amount = np.minimum(np.minimum(self.can, remaining[:, None]), fits) * ~taken
            amount[self.home != fullest] = 0
            e, n = divmod(int(np.argmax(amount)), len(used))
            moved = min(float(amount[e, n]), used[fullest] - mean)
            if moved <= 0:
                done[fullest] = True
                continue
            chosen.append((e, n))
            taken[e, n] = True
            remaining[e] -= moved
            used[fullest] -= moved
            used[n] += moved
            free_slots[n] -= 1
        return chosen

    def solve(self, pairs: list[tuple[int, int]], limits: Limits, *, fixed: bool) -> tuple[FloatArray, float]:
        """Return f [E, N] and its level over the mean (O'); with ``fixed`` every pair has a replica, and the program is linear."""
        import pulp

        scale = float(self.used.mean())
        category, bounds = ("Continuous", {"lowBound": 1, "upBound": 1}) if fixed else ("Binary", {})
        model = pulp.LpProblem("expert_replicas", pulp.LpMinimize)
        y = {pair: model.add_variable("y_{}_{}".format(*pair), cat=category, **bounds) for pair in pairs}
        f = {pair: model.add_variable("f_{}_{}".format(*pair), lowBound=0) for pair in pairs}
        level = model.add_variable("level", lowBound=1)
        model += level + _REPLICA_COST * pulp.lpSum(y.values())
        for e, n in pairs:
            model += f[e, n] <= self.can[e, n] / scale * y[e, n], f"replica_C3_{e}_{n}"
        for e in {e for e, _ in pairs}:
            model += pulp.lpSum(f[p] for p in pairs if p[0] == e) <= self.anywhere[e] / scale, f"tokens_C4_{e}"
        for n in range(len(self.used)):
            arrives = [p for p in pairs if p[1] == n]
            leaves = pulp.lpSum(f[p] for p in pairs if self.home[p[0]] == n)
            if arrives:
                model += pulp.lpSum(y[p] for p in arrives) <= self.extra, f"slots_C5_{n}"
            model += self.used[n] / scale - leaves + pulp.lpSum(f[p] for p in arrives) <= level, f"level_C6_{n}"
        outcome = solve_linear(model, limits)
        flow = np.zeros(self.can.shape)
        if not outcome.status.has_answer:
            return flow, float("inf")
        for pair in pairs:
            if (y[pair].value() or 0) > 0.5:
                flow[pair] = max(f[pair].value() or 0.0, 0.0) * scale
        return np.asarray(np.where(flow > SOLVER * scale, flow, 0.0)), float(level.value())


def serve(tokens: IntArray, routing: Routing, *, seed: int) -> Served:
    """Serve the choices [T, k] of a layer, these or others: at a replica by chance with its part, else at home."""
    visits = visited_nodes(tokens, routing.home, routing.part.shape[1])
    chance = routing.part[tokens] * visits[:, None, :]
    reach = np.cumsum(chance / np.maximum(chance.sum(axis=2, keepdims=True), 1.0), axis=2)
    return _serve_by_chance(tokens, reach, routing.home[tokens], len(routing.home), seed)


def serve_by_shares(tokens: IntArray, part: FloatArray, *, seed: int) -> Served:
    """Serve every choice on a node by chance, with the share [E, N] that the replicas on it have."""
    reach = np.cumsum(part, axis=1)
    reach /= reach[:, -1:]
    return _serve_by_chance(tokens, reach[tokens], part.shape[1] - 1, len(part), seed)


def _serve_by_chance(
    tokens: IntArray, reach: FloatArray, otherwise: IntArray | int, num_experts: int, seed: int
) -> Served:
    """Serve each choice on the first node whose cumulated chance ``reach`` [T, k, N] a random number is below, or ``otherwise``."""
    num_nodes = reach.shape[2]
    nth = (reach <= np.random.default_rng(seed).random(tokens.shape)[:, :, None]).sum(axis=2)
    node = np.where(nth < num_nodes, nth, otherwise)
    served = np.bincount((tokens * num_nodes + node).ravel(), minlength=num_experts * num_nodes)
    reached = np.zeros((len(tokens), num_nodes), dtype=bool)
    reached[np.arange(len(tokens))[:, None], node] = True
    return Served(served.reshape(num_experts, num_nodes).astype(np.float64), float(reached.sum()))
