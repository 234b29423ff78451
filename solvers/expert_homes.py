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
"""

from __future__ import annotations

import numpy as np

from .expert_instance import FloatArray, IntArray

_OVERLOAD_PRICE = 1e3
_LEAST_GAIN = 1e-9


def together(tokens: IntArray, num_experts: int) -> FloatArray:
    """TOGETHER [E, E] of the choices [T, k] of one layer, its diagonal 0."""
    pairs = tokens[:, :, None] * num_experts + tokens[:, None, :]
    counts = np.bincount(pairs.ravel(), minlength=num_experts**2).reshape(num_experts, num_experts).astype(np.float64)
    np.fill_diagonal(counts, 0.0)
    return counts


def homes(pairs: FloatArray, load: FloatArray, num_nodes: int, limit: float) -> IntArray:
    """Home [E]: the better of two starts after exchanges; E divides by ``num_nodes``."""
    starts = (_bisected(pairs, num_nodes), _dealt(load, num_nodes))
    found = [_exchanged(start, pairs, load, num_nodes, limit) for start in starts]
    return max(found, key=lambda home: _value(home, pairs, load, num_nodes, limit))


def _dealt(load: FloatArray, num_nodes: int) -> IntArray:
    """Experts by load, dealt to and fro, as many to each node (C1)."""
    home = np.empty(len(load), dtype=np.int64)
    turn = np.concatenate([np.arange(num_nodes), np.arange(num_nodes)[::-1]])
    home[np.argsort(-load, kind="stable")] = np.resize(turn, len(load))
    return home


def _bisected(pairs: FloatArray, num_nodes: int) -> IntArray:
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
    """(O) over its total, less the price of overload (C2)."""
    same = home[:, None] == home
    used = np.bincount(home, load, num_nodes) / load.sum() * num_nodes
    over = np.maximum(used - limit, 0).sum()
    return float((pairs * same).sum() / max(pairs.sum(), 1e-300) - _OVERLOAD_PRICE * over)


def _exchanged(home: IntArray, pairs: FloatArray, load: FloatArray, num_nodes: int, limit: float) -> IntArray:
    """The best exchange of two experts at a time."""
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
        mine, theirs = used[home][:, None], used[home]
        over = np.maximum(mine - limit, 0) + np.maximum(theirs - limit, 0)
        after = np.maximum(mine - moved - limit, 0) + np.maximum(theirs + moved - limit, 0)
        gain += _OVERLOAD_PRICE * (over - after)
        gain[home[:, None] == home] = -np.inf
        e, f = divmod(int(np.argmax(gain)), len(home))
        if gain[e, f] <= _LEAST_GAIN:
            break
        a, b = home[e], home[f]
        with_node[:, a] += pairs[:, f] - pairs[:, e]
        with_node[:, b] += pairs[:, e] - pairs[:, f]
        home[e], home[f] = b, a
    return home
