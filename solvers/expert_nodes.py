"""Replicas on other nodes that balance the nodes without sending any token to more nodes.

A token visits the homes of its experts. One of its experts may instead be served by a replica on another of these nodes,
so that the visits never grow (and fall by one where nothing else of the token stays at that home).

Sets      e experts with home h(e); n nodes
Data      CAN[e,n]  tokens of expert e that visit node n anyway;  ANY[e]  that visit some other node
          LOAD[e]   tokens of expert e;  EXTRA  replicas that a node has room for
Variables y[e,n]    1 if node n has a replica of e;  f[e,n]  tokens of e served there;  T  level
Objective (O) min T
Constraints
    (C1) replica: f[e,n] <= CAN[e,n] y[e,n]
    (C2) tokens:  sum_n f[e,n] <= ANY[e]
    (C3) room:    sum_e y[e,n] <= EXTRA
    (C4) level:   sum_{h(e) = n} (LOAD[e] - sum_m f[e,m]) + sum_e f[e,n] <= T

A mixed-integer program in HiGHS for each layer. CAN is per expert and node; of tokens that could go to two nodes (C2)
counts each once, which is a relaxation where an expert has three replicas or more. Only the experts with most tokens of
the nodes above the mean have variables.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .backend import Limits, solve_linear
from .expert_instance import FloatArray, IntArray
from .status import Status

_MOST_EXPERTS_OF_A_NODE = 24
_REL_GAP = 2e-3


@dataclass(frozen=True)
class Routing:
    """Of one layer: the home of each expert [E] and which part of its tokens that visit another node is served there [E,
    N].
    """

    home: IntArray
    part: FloatArray


@dataclass(frozen=True)
class Served:
    """Tokens of each expert on each node [E, N], and the nodes that all tokens together visit."""

    tokens: FloatArray
    visits: float


def visited(tokens: IntArray, home: IntArray, num_nodes: int) -> np.ndarray:
    """Whether a token [T, N] visits a node, by the homes of its experts."""
    visits = np.zeros((len(tokens), num_nodes), dtype=bool)
    visits[np.arange(len(tokens))[:, None], home[tokens]] = True
    return visits


def replicate(
    tokens: IntArray, home: IntArray, num_nodes: int, extra: int, num_experts: int, *, time_limit_s: float, seed: int
) -> Routing:
    """Replicas and routing of one layer for its choices [T, k] (the program above); no replicas where the time is too
    short.
    """
    visits = visited(tokens, home, num_nodes)
    can = np.stack([np.bincount(tokens[visits[:, n]].ravel(), minlength=num_experts) for n in range(num_nodes)], axis=1)
    load = np.bincount(tokens.ravel(), minlength=num_experts)
    can[np.arange(num_experts), home] = 0
    elsewhere = np.broadcast_to((visits.sum(axis=1) > 1)[:, None], tokens.shape)
    anywhere = np.bincount(tokens[elsewhere], minlength=num_experts)
    none = np.zeros((num_experts, num_nodes))
    used = np.bincount(home, load, num_nodes)
    if extra < 1 or num_nodes == 1 or used.max() <= used.mean() * (1 + _REL_GAP):
        return Routing(home, none)
    flow = _program(can, anywhere, load, home, extra, Limits(time_limit_s=time_limit_s, rel_gap=_REL_GAP, seed=seed))
    part = np.divide(flow, can, out=none.copy(), where=can > 0)
    return Routing(home, part)


def _program(
    can: IntArray, anywhere: IntArray, load: IntArray, home: IntArray, extra: int, limits: Limits
) -> FloatArray:
    """F [E, N]."""
    import pulp

    num_experts, num_nodes = can.shape
    used = np.bincount(home, load, num_nodes)
    scale = used.mean()
    rows = [
        int(e)
        for n in np.flatnonzero(used > scale)
        for e in sorted(np.flatnonzero(home == n), key=lambda e: -load[e])[:_MOST_EXPERTS_OF_A_NODE]
    ]
    pairs = [(e, n) for e in rows for n in range(num_nodes) if can[e, n] > 0 and used[n] < used[home[e]]]
    model = pulp.LpProblem("expert_replicas", pulp.LpMinimize)
    y = {pair: model.add_variable("y_{}_{}".format(*pair), cat="Binary") for pair in pairs}
    f = {pair: model.add_variable("f_{}_{}".format(*pair), lowBound=0) for pair in pairs}
    level = model.add_variable("level", lowBound=1)
    model += level + 1e-6 * pulp.lpSum(y.values())
    for e, n in pairs:
        model += f[e, n] <= can[e, n] / scale * y[e, n], f"replica_C1_{e}_{n}"
    for e in rows:
        model += pulp.lpSum(f[p] for p in pairs if p[0] == e) <= anywhere[e] / scale, f"tokens_C2_{e}"
    for n in range(num_nodes):
        model += pulp.lpSum(y[p] for p in pairs if p[1] == n) <= extra, f"room_C3_{n}"
        arrives = pulp.lpSum(f[p] for p in pairs if p[1] == n)
        leaves = pulp.lpSum(f[p] for p in pairs if home[p[0]] == n)
        model += used[n] / scale - leaves + arrives <= level, f"level_C4_{n}"
    outcome = solve_linear(model, limits)
    flow = np.zeros((num_experts, num_nodes))
    if outcome.status in (Status.OPTIMAL, Status.FEASIBLE):
        for pair in pairs:
            if (y[pair].value() or 0) > 0.5:
                flow[pair] = max(f[pair].value() or 0.0, 0.0) * scale
    return np.asarray(np.where(flow > 1e-6 * scale, flow, 0.0))


def serve(tokens: IntArray, routing: Routing, *, seed: int) -> Served:
    """Where the choices [T, k] of a layer, these or others, are served: at a replica by chance with its part, else at
    home.
    """
    num_nodes = routing.part.shape[1]
    visits = visited(tokens, routing.home, num_nodes)
    chance = routing.part[tokens] * visits[:, None, :]
    reach = np.cumsum(chance / np.maximum(chance.sum(axis=2, keepdims=True), 1.0), axis=2)
    nth = (reach <= np.random.default_rng(seed).random(tokens.shape)[:, :, None]).sum(axis=2)
    return _served(tokens, np.where(nth < num_nodes, nth, routing.home[tokens]), routing.part.shape)


def serve_by_shares(tokens: IntArray, part: FloatArray, *, seed: int) -> Served:
    """The same where every choice goes to a node by chance with the share [E, N] that the replicas there have."""
    reach = np.cumsum(part, axis=1)
    reach /= reach[:, -1:]
    nth = (reach[tokens] <= np.random.default_rng(seed).random(tokens.shape)[:, :, None]).sum(axis=2)
    return _served(tokens, np.minimum(nth, part.shape[1] - 1), part.shape)


def _served(tokens: IntArray, node: IntArray, shape: tuple[int, ...]) -> Served:
    num_experts, num_nodes = shape
    served = np.bincount((tokens * num_nodes + node).ravel(), minlength=num_experts * num_nodes)
    reached = np.zeros((len(tokens), num_nodes), dtype=bool)
    reached[np.arange(len(tokens))[:, None], node] = True
    return Served(served.reshape(num_experts, num_nodes).astype(np.float64), float(reached.sum()))
