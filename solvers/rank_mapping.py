"""Place nodes in the order of the ranks, so that the busiest axes cross the fastest links.

Sets
    k = 0..K-1   positions: consecutive ranks that fill one node
    n = 0..K-1   nodes
    a            axes of the layout whose groups leave their node: collectives, stages
Data
    BANDWIDTH[n,n']   bytes/s from one node to another
    WEIGHT[a]         seconds of a step x bytes/s: what the axis adds to a step when its slowest pair has 1 byte/s
    PAIRS[a]          pairs of positions that groups of the axis cross, sender first
    KIND[k]           kind of node that the position needs; as listed, node k is of KIND[k]
    BLOCK[k]          positions whose nodes torch sorts: it orders the members of every group by rank
Variables
    node[k]           which node fills position k
Objective
    (O)  min  sum_a  WEIGHT[a] / min_{(k,k') in PAIRS[a]} BANDWIDTH[node[k], node[k']]      an axis waits for its slowest pair
Constraints
    (C1) once:  node is a permutation
    (C2) kind:  KIND[node[k]] = KIND[k]
    (C3) order: node ascends within each BLOCK

Method: every order of up to eight nodes; of more local search, then annealing of many orders at once. All nodes of a kind are
swapped in pairs, among many nodes only the ends of each axis's slowest pair with the others; the best swap is taken while it
lowers (O), or at equal (O) the mean over the pairs in place of the slowest one. Starts: the identity, nodes gathered block by
block with those they reach fastest, and random orders. What the bound does not prove is annealed: each order swaps an end of a
slowest pair, or any node, with another one at a time; what comes out best is searched locally once more. The identity is among
the starts, so that the answer is never worse. Deterministic for a seed. (The bottleneck assignment problem with quadratic costs
is NP-hard.)

Bound: each axis by itself at the rate that its slowest pair exceeds in no order (`node_links.max_slowest` of cost_models/hardware).
Source: local search by pairwise exchange for assignments (Burkard, Dell'Amico, Martello: Assignment Problems, SIAM 2009, ch. 8);
annealing: Kirkpatrick, Gelatt, Vecchi, Science 220 (1983).
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import numpy as np

from ..cost_models.hardware.node_links import max_slowest
from ..schema.units import FloatArray, IntArray
from .backend import Solution, Status
from .tolerances import SUMMED

NUM_RANDOM_STARTS = 12
"""Random orders to start from, besides the two that are made on purpose; each costs one local search."""

ALL_SWAPS_UP_TO = 24
"""Positions up to which all K (K - 1) / 2 swaps are tried; beyond it only those that move an end of a slowest pair."""


ALL_ORDERS_UP_TO = 8
"""Positions up to which every order is tried: 40,320 in some 20 ms."""

NUM_CHAINS = 40
"""Orders that are annealed at once."""

ANNEALING_STEPS = 2200
"""Swaps of each of them: with 8 to 32 nodes 0.1 to 0.4 CPU s."""

POWER = 10
"""Chains minimise (O) with this norm over the pairs of an axis in place of the maximum, so that the second slowest pair counts."""

HOT, COLD = 0.03, 0.002
"""Temperatures over the best (O) known, first and last; falling geometrically."""

ELSEWHERE = 0.7
"""Share of swaps that start from any node, not from an end of a slowest pair."""


@dataclass(frozen=True)
class Axis:
    """WEIGHT in seconds x bytes/s and PAIRS [P, 2] of positions, sender first."""

    weight: float
    pairs: IntArray


@dataclass(frozen=True)
class RankMappingInstance:
    """BANDWIDTH [K, K] (row: sender; the diagonal is not read), axes, KIND [K] and BLOCK [K] (ascending)."""

    bandwidth: FloatArray
    axes: tuple[Axis, ...]
    kind: IntArray
    block: IntArray

    @property
    def num_positions(self) -> int:
        """K."""
        return len(self.kind)


def solve(
    instance: RankMappingInstance, *, seed: int = 0, annealing_steps: int = ANNEALING_STEPS
) -> Solution[tuple[int, ...]]:
    """Return the best order tried, node [K]; optimal where it meets the bound, and then nothing further is tried."""
    start = time.perf_counter()
    if instance.num_positions <= ALL_ORDERS_UP_TO:
        order, order_s = _best_of_all(instance)
        return Solution(
            status=Status.OPTIMAL, choice=tuple(order.tolist()), objective=order_s, bound=order_s,
            solve_s=time.perf_counter() - start, backend="enumeration",
        )  # fmt: skip
    rng, bound = np.random.default_rng(seed), lower_bound_s(instance)
    starts = [np.arange(instance.num_positions), _gather_blocks(instance)]
    starts += [_shuffle_within_kinds(instance, rng) for _ in range(NUM_RANDOM_STARTS)]
    best, best_s = starts[0], float(_objectives(instance, starts[0][None])[0][0])
    locals_: list[IntArray] = [best]
    for order in starts:
        if best_s <= bound * (1 + SUMMED):
            break
        local, local_s = _swap_to_local_optimum(instance, order)
        locals_.append(local)
        if local_s < best_s * (1 - SUMMED):
            best, best_s = local, local_s
    if best_s > bound * (1 + SUMMED) and annealing_steps and len(_swaps(instance, best)):
        annealed = _anneal(instance, np.array([best, *locals_]), best_s, annealing_steps, rng)
        local, local_s = _swap_to_local_optimum(instance, annealed)
        if local_s < best_s * (1 - SUMMED):
            best, best_s = local, local_s
    return Solution(
        status=Status.OPTIMAL if best_s <= bound * (1 + SUMMED) else Status.FEASIBLE,
        choice=tuple(best.tolist()),
        objective=best_s,
        bound=bound,
        solve_s=time.perf_counter() - start,
        backend="local search",
    )


def lower_bound_s(instance: RankMappingInstance) -> float:
    """Return a lower bound: every axis has the best order for itself."""
    return float(sum(axis.weight / max_slowest(instance.bandwidth, axis.pairs) for axis in instance.axes))


def _best_of_all(instance: RankMappingInstance) -> tuple[IntArray, float]:
    """Return the best order of all [K] and its (O); of equal ones the first, and the identity before any."""
    orders = np.array(list(itertools.permutations(range(instance.num_positions))))
    allowed = np.all(instance.kind[orders] == instance.kind, axis=1)
    allowed &= np.all((np.diff(orders, axis=1) > 0) | (np.diff(instance.block) != 0), axis=1)
    orders = orders[allowed]
    objectives, _ = _objectives(instance, orders)
    best = int(np.argmin(objectives))
    best = 0 if objectives[0] <= objectives[best] * (1 + SUMMED) else best
    return orders[best], float(objectives[best])


def _anneal(
    instance: RankMappingInstance, starts: IntArray, scale_s: float, num_steps: int, rng: np.random.Generator
) -> IntArray:
    """Return the best order [K] of the chains that begin at `starts` [M, K]; (O) is measured against `scale_s`."""
    size, rows = instance.num_positions, np.arange(NUM_CHAINS)
    orders = starts[rows % len(starts)]
    tables = [(axis.weight / instance.bandwidth / scale_s).ravel() for axis in instance.axes]
    axes = [(table, table**POWER, *axis.pairs.T) for table, axis in zip(tables, instance.axes, strict=True)]
    weights = np.array([axis.weight for axis in instance.axes])

    def costs(orders: IntArray) -> tuple[FloatArray, FloatArray, list[IntArray]]:
        """Return (O) [M], the same with the norm for the maximum [M], and of each axis its slowest pair [M]; over `scale_s`."""
        total, soft, slowest = np.zeros(len(orders)), np.zeros(len(orders)), list[IntArray]()
        for seconds, powers, senders, receivers in axes:
            cells = orders[:, senders] * size + orders[:, receivers]
            each = seconds[cells]
            slowest.append(np.argmax(each, axis=1))
            total += each[rows, slowest[-1]]
            soft += powers[cells].sum(axis=1) ** (1 / POWER)
        return total, soft, slowest

    has_blocks = bool(np.any(np.diff(instance.block) == 0))
    current, current_soft, slowest = costs(orders)
    best, best_cost = orders[np.argmin(current)], float(current.min())
    for temperature in np.geomspace(HOT, COLD, num_steps):
        axis_idx = (
            rng.choice(len(axes), NUM_CHAINS, p=_shares(weights)) if len(axes) > 1 else np.zeros(NUM_CHAINS, np.int64)
        )
        pair = np.stack(slowest)[axis_idx, rows]
        ends = np.array(
            [axes[a][2 + side][p] for a, p, side in zip(axis_idx, pair, rng.integers(0, 2, NUM_CHAINS), strict=True)]
        )
        ends = np.where(rng.random(NUM_CHAINS) < ELSEWHERE, rng.integers(0, size, NUM_CHAINS), ends)
        others = rng.integers(0, size, NUM_CHAINS)
        moves = (instance.kind[ends] == instance.kind[others]) & (instance.block[ends] != instance.block[others])
        swapped = orders.copy()
        swapped[rows, ends] = np.where(moves, orders[rows, others], orders[rows, ends])
        swapped[rows, others] = np.where(moves, orders[rows, ends], orders[rows, others])
        swapped = _sort_within_blocks(instance, swapped) if has_blocks else swapped
        changed, changed_soft, swapped_slowest = costs(swapped)
        accepted = rng.random(NUM_CHAINS) < np.exp(np.minimum((current_soft - changed_soft) / temperature, 0.0))
        orders = np.where(accepted[:, None], swapped, orders)
        current = np.where(accepted, changed, current)
        current_soft = np.where(accepted, changed_soft, current_soft)
        slowest = [np.where(accepted, new, old) for new, old in zip(swapped_slowest, slowest, strict=True)]
        if current.min() < best_cost:
            best, best_cost = orders[np.argmin(current)], float(current.min())
    return best


def _shares(weights: FloatArray) -> FloatArray:
    """Return how often a swap starts from each axis: by the root of its weight."""
    return np.asarray(np.sqrt(weights) / np.sqrt(weights).sum())


def _swap_to_local_optimum(instance: RankMappingInstance, order: IntArray) -> tuple[IntArray, float]:
    """Swap until nothing improves; return the order and its (O)."""
    (objective,), (mean,) = _objectives(instance, order[None])
    while len(swapped := _swaps(instance, order)):
        objectives, means = _objectives(instance, swapped)
        best = int(np.lexsort((means, objectives))[0])
        lower = objectives[best] < objective * (1 - SUMMED)
        as_low = objectives[best] <= objective * (1 + SUMMED)
        if not lower and not (as_low and means[best] < mean * (1 - SUMMED)):
            break
        order, objective, mean = swapped[best], objectives[best], means[best]
    return order, float(objective)


def _swaps(instance: RankMappingInstance, order: IntArray) -> IntArray:
    """Return the orders [M, K] with two nodes of a kind exchanged; among many positions one of them is an end of a slowest pair."""
    ends = set(range(instance.num_positions if instance.num_positions <= ALL_SWAPS_UP_TO else 0))
    for axis in instance.axes:
        rates = instance.bandwidth[order[axis.pairs[:, 0]], order[axis.pairs[:, 1]]]
        ends |= set(axis.pairs[int(np.argmin(rates))].tolist())
    swaps = [
        (k, o)
        for k, o in itertools.product(sorted(ends), range(instance.num_positions))
        if instance.kind[k] == instance.kind[o] and instance.block[k] != instance.block[o]
    ]
    orders = np.tile(order, (len(swaps), 1))
    for row, (k, other) in enumerate(swaps):
        orders[row, [k, other]] = order[[other, k]]
    return _sort_within_blocks(instance, orders)


def _sort_within_blocks(instance: RankMappingInstance, orders: IntArray) -> IntArray:
    """Return nodes [..., K] in ascending order within each block (C3)."""
    size = instance.num_positions
    return np.asarray(np.sort(orders + size * instance.block, axis=-1) - size * instance.block)


def _objectives(instance: RankMappingInstance, orders: IntArray) -> tuple[FloatArray, FloatArray]:
    """Return (O) of orders [M, K], and the same with the mean over the pairs in place of the slowest one, [M] each."""
    slowest_s, mean_s = np.zeros(len(orders)), np.zeros(len(orders))
    for axis in instance.axes:
        seconds = axis.weight / instance.bandwidth[orders[:, axis.pairs[:, 0]], orders[:, axis.pairs[:, 1]]]
        slowest_s += np.max(seconds, axis=1)
        mean_s += np.mean(seconds, axis=1)
    return slowest_s, mean_s


def _gather_blocks(instance: RankMappingInstance) -> IntArray:
    """Fill blocks one after the other with the nodes that reach those in the block fastest; across blocks, the last node."""
    remaining, order = set(range(instance.num_positions)), list[int]()
    for k in range(instance.num_positions):
        of_kind = sorted(n for n in remaining if instance.kind[n] == instance.kind[k])
        near = [order[j] for j in range(k) if instance.block[j] == instance.block[k]] or order[-1:]
        order.append(max(of_kind, key=lambda n: min((instance.bandwidth[n, m] for m in near), default=0.0)))
        remaining.remove(order[-1])
    return _sort_within_blocks(instance, np.array(order))


def _shuffle_within_kinds(instance: RankMappingInstance, rng: np.random.Generator) -> IntArray:
    order = np.arange(instance.num_positions)
    for kind in np.unique(instance.kind):
        positions = np.flatnonzero(instance.kind == kind)
        order[positions] = rng.permutation(positions)
    return _sort_within_blocks(instance, order)


def check(instance: RankMappingInstance, node: tuple[int, ...]) -> float:
    """Recompute the objective (O) of an order from the definition.

    Raises:
        ValueError: the order breaks (C1), (C2) or (C3); the message names which.
    """
    if sorted(node) != list(range(instance.num_positions)):
        raise ValueError(f"once (C1): nodes {node}")
    for k, n in enumerate(node):
        if instance.kind[n] != instance.kind[k]:
            raise ValueError(f"kind (C2): position {k} needs kind {instance.kind[k]}, node {n} is {instance.kind[n]}")
        if k and instance.block[k] == instance.block[k - 1] and n < node[k - 1]:
            raise ValueError(f"order (C3): nodes {node[k - 1]}, {n} in positions {k - 1}, {k} of one block")
    slowest = [min(float(instance.bandwidth[node[k], node[o]]) for k, o in axis.pairs) for axis in instance.axes]
    return sum(axis.weight / rate for axis, rate in zip(instance.axes, slowest, strict=True))
