"""Replicas on other nodes that balance the nodes without sending any token to more nodes.

A token visits the homes of its experts. One of its experts may instead be served by a replica on another of these nodes,
so that the visits never grow (and fall by one where nothing else of the token stays at that home).

Sets      e experts with home h(e); n nodes
Data      CAN[e,n]  tokens of expert e that visit node n anyway;  ANY[e]  that visit some other node
          LOAD[e]   tokens of expert e;  EXTRA  replicas that a node has slots for
Variables y[e,n]    1 if node n has a replica of e;  f[e,n]  tokens of e served there;  T  level
Objective (O) min T
Constraints
    (C1) replica: f[e,n] <= CAN[e,n] y[e,n]
    (C2) tokens:  sum_n f[e,n] <= ANY[e]
    (C3) slots:   sum_e y[e,n] <= EXTRA
    (C4) level:   sum_{h(e) = n} (LOAD[e] - sum_m f[e,m]) + sum_e f[e,n] <= T

First greedy replicas with the best flow (a linear program); where these leave the fullest node above the mean, the
mixed-integer program in HiGHS (through PuLP), which replaces them if it is better within its time. CAN is per expert and node; of
tokens that could go to two nodes (C2) counts each once, which is a relaxation where an expert has three replicas or more. Only the
experts with most tokens of the nodes above the mean have variables.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...schema.units import BoolArray, FloatArray, IntArray
from ..backend import Limits, solve_linear

_MAX_EXPERTS_PER_NODE = 24
"""Experts of a node above the mean that have variables, those with most tokens: the others have little to move."""

_REL_GAP = 2e-3
"""Of the level: tokens not seen yet differ by more."""

_TURNS = 5
"""Programs with CAN corrected by what the routing did, at most."""

_LINEAR_TIME_LIMIT_S = 10.0
"""A few hundred variables take milliseconds."""


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


def visited_nodes(tokens: IntArray, home: IntArray, num_nodes: int) -> BoolArray:
    """Return whether a token [T, N] visits a node, by the homes of its experts."""
    visits = np.zeros((len(tokens), num_nodes), dtype=bool)
    visits[np.arange(len(tokens))[:, None], home[tokens]] = True
    return visits


def replicate_on_nodes(
    tokens: IntArray, home: IntArray, num_nodes: int, extra: int, num_experts: int, *, time_limit_s: float, seed: int
) -> Routing:
    """Return replicas and routing of one layer for its choices [T, k] (the program above).

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
        flow = _best_flow(can, anywhere, load, home, extra, limits)
        part = np.divide(flow, can, out=none.copy(), where=can > 0)
        served = serve(tokens, Routing(home, part), seed=seed).tokens
        level = float(served.sum(axis=0).max() / used.mean())
        if level < best_level:
            best, best_level = part, level
        if best_level <= 1 + 2 * _REL_GAP:
            break
        # Tokens with a choice of nodes are counted in CAN of each of them, but came to one.
        came = np.where(home[:, None] == np.arange(num_nodes), 0.0, served)
        can = np.where(part > 0, np.minimum(can, came / np.maximum(part, 1e-12)), can)
    return Routing(home, best)


def _best_flow(
    can: FloatArray, anywhere: IntArray, load: IntArray, home: IntArray, extra: int, limits: Limits
) -> FloatArray:
    """Return f[e,n] as an array [E, N]: of the greedy replicas, or of better ones within the time."""
    used = np.bincount(home, load, can.shape[1]).astype(np.float64)
    rows = [
        int(e)
        for n in np.flatnonzero(used > used.mean())
        for e in sorted(np.flatnonzero(home == n), key=lambda e: -load[e])[:_MAX_EXPERTS_PER_NODE]
    ]
    pairs = [(e, n) for e in rows for n in range(can.shape[1]) if can[e, n] > 0 and used[n] < used[home[e]]]
    program = _NodeProgram(can, anywhere, home, used, extra)
    greedy, level = program.solve(program.greedy(), replace(limits, time_limit_s=_LINEAR_TIME_LIMIT_S), fixed=True)
    if level <= 1 + _REL_GAP or limits.time_limit_s <= 0:
        return greedy
    better, reached = program.solve(pairs, limits, fixed=False)
    return better if reached < level else greedy


@dataclass(frozen=True)
class _NodeProgram:
    """Data of the program of one layer: CAN [E, N], ANY [E], homes [E], load of the homes [N], EXTRA."""

    can: FloatArray
    anywhere: IntArray
    home: IntArray
    used: FloatArray
    extra: int

    def greedy(self) -> list[tuple[int, int]]:
        """Return pairs (expert, node), each where most tokens can leave the fullest node: a start that takes no time."""
        used, free_slots = self.used.astype(np.float64), np.full(len(self.used), self.extra)
        remaining, mean = self.anywhere.astype(np.float64), self.used.mean()
        chosen: list[tuple[int, int]] = []
        taken = np.zeros(self.can.shape, dtype=bool)
        done = np.zeros(len(used), dtype=bool)
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
        """Return f [E, N] and its level over the mean (O); with ``fixed`` every pair has its replica, and the program is linear."""
        import pulp

        scale, num_nodes = float(self.used.mean()), len(self.used)
        category = "Continuous" if fixed else "Binary"
        model = pulp.LpProblem("expert_replicas", pulp.LpMinimize)
        bounds = {"lowBound": 1, "upBound": 1} if fixed else {}
        y = {pair: model.add_variable("y_{}_{}".format(*pair), cat=category, **bounds) for pair in pairs}
        f = {pair: model.add_variable("f_{}_{}".format(*pair), lowBound=0) for pair in pairs}
        level = model.add_variable("level", lowBound=1)
        model += level + 1e-6 * pulp.lpSum(y.values())
        for e, n in pairs:
            model += f[e, n] <= self.can[e, n] / scale * y[e, n], f"replica_C1_{e}_{n}"
        for e in {e for e, _ in pairs}:
            model += pulp.lpSum(f[p] for p in pairs if p[0] == e) <= self.anywhere[e] / scale, f"tokens_C2_{e}"
        for n in range(num_nodes):
            arrives = [p for p in pairs if p[1] == n]
            leaves = pulp.lpSum(f[p] for p in pairs if self.home[p[0]] == n)
            if arrives:
                model += pulp.lpSum(y[p] for p in arrives) <= self.extra, f"slots_C3_{n}"
            model += self.used[n] / scale - leaves + pulp.lpSum(f[p] for p in arrives) <= level, f"level_C4_{n}"
        outcome = solve_linear(model, limits)
        flow = np.zeros(self.can.shape)
        if not outcome.status.has_answer:
            return flow, float("inf")
        for pair in pairs:
            if (y[pair].value() or 0) > 0.5:
                flow[pair] = max(f[pair].value() or 0.0, 0.0) * scale
        return np.asarray(np.where(flow > 1e-6 * scale, flow, 0.0)), float(level.value())


def serve(tokens: IntArray, routing: Routing, *, seed: int) -> Served:
    """Serve the choices [T, k] of a layer, these or others: at a replica by chance with its part, else at home."""
    num_nodes = routing.part.shape[1]
    visits = visited_nodes(tokens, routing.home, num_nodes)
    chance = routing.part[tokens] * visits[:, None, :]
    reach = np.cumsum(chance / np.maximum(chance.sum(axis=2, keepdims=True), 1.0), axis=2)
    nth = (reach <= np.random.default_rng(seed).random(tokens.shape)[:, :, None]).sum(axis=2)
    return _count_served(tokens, np.where(nth < num_nodes, nth, routing.home[tokens]), routing.part.shape)


def serve_by_shares(tokens: IntArray, part: FloatArray, *, seed: int) -> Served:
    """Serve every choice on a node by chance, with the share [E, N] that the replicas on it have."""
    reach = np.cumsum(part, axis=1)
    reach /= reach[:, -1:]
    nth = (reach[tokens] <= np.random.default_rng(seed).random(tokens.shape)[:, :, None]).sum(axis=2)
    return _count_served(tokens, np.minimum(nth, part.shape[1] - 1), part.shape)


def _count_served(tokens: IntArray, node: IntArray, shape: tuple[int, ...]) -> Served:
    num_experts, num_nodes = shape
    served = np.bincount((tokens * num_nodes + node).ravel(), minlength=num_experts * num_nodes)
    reached = np.zeros((len(tokens), num_nodes), dtype=bool)
    reached[np.arange(len(tokens))[:, None], node] = True
    return Served(served.reshape(num_experts, num_nodes).astype(np.float64), float(reached.sum()))
