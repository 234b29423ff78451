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
block with those they reach fastest, and roundings of a relaxed quadratic assignment problem around the best order (random orders,
where nodes are of several kinds), built anew while that leads to a better one. What the bound does not prove is annealed: each
order swaps two nodes at a time, and every now and then the worst orders begin again as copies of the best; what comes out best is
searched locally and relaxed once more. The identity is among the starts, so that the answer is never worse. Deterministic for a
seed. (The bottleneck assignment problem with quadratic costs is NP-hard.)

Bound: each axis by itself at the rate that its slowest pair exceeds in no order (`node_links.max_slowest` of cost_models/hardware).
Source: local search by pairwise exchange for assignments (Burkard, Dell'Amico, Martello: Assignment Problems, SIAM 2009, ch. 8);
annealing: Kirkpatrick, Gelatt, Vecchi, Science 220 (1983); relaxation: Vogelstein et al., Fast approximate quadratic programming
for graph matching, PLOS ONE 10 (2015), as in scipy.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy.optimize import quadratic_assignment

from ..cost_models.hardware.node_links import max_slowest
from ..schema.units import FloatArray, IntArray
from .backend import Solution, Status
from .tolerances import SUMMED

RELAXED_POWERS = (2, 4, 8)
"""Powers p of the seconds in the relaxed problem: higher ones are nearer to the slowest pair and have more local optima."""

RANDOM_SHARES = (0.3, 0.6, 1.0, 1.0, 1.0, 1.0)
"""How far from the best order the relaxed problem begins, 1 at a random assignment; each start costs one local search."""

MAX_RELAXATIONS = 4
"""How often in a row the relaxed problem is built anew around a better order."""

MAX_RATIO = 1e6
"""A power of seconds counts at most so many times the median pair's, so that the relaxation stays well scaled."""

ALL_SWAPS_UP_TO = 24
"""Positions up to which all K (K - 1) / 2 swaps are tried; beyond it only those that move an end of a slowest pair."""


ALL_ORDERS_UP_TO = 8
"""Positions up to which every order is tried: 40,320 in some 20 ms."""

NUM_CHAINS = 48
"""Orders that are annealed at once."""

ANNEALING_STEPS = 3000
"""Swaps of each of them: with 16 to 32 nodes 0.1 to 0.2 CPU s."""

ROUND = 512
"""Swaps after which the worst chains begin again as the best ones, and sums are counted anew."""

REPLACED = 0.25
"""Share of the chains that do."""

POWERS = ((0.3, 10), (0.6, 20), (1.0, 40))
"""Chains minimise (O) with a norm over the pairs of an axis in place of the maximum, so that the second slowest pair counts too:
up to which part of the steps, and its power."""

HOT, COLD = 0.05, 0.0005
"""Temperatures over the best (O) known, first and last; falling geometrically."""


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
    rng, tried = np.random.default_rng(seed), _Tried(instance, lower_bound_s(instance))
    tried.descend([np.arange(instance.num_positions), _gather_blocks(instance)])
    tried.relax(rng)
    if not tried.is_proved and annealing_steps and len(_swaps(instance, tried.best)):
        tried.descend([_anneal(instance, np.array([tried.best, *tried.local]), tried.best_s, annealing_steps, rng)])
        tried.relax(rng)
    return Solution(
        status=Status.OPTIMAL if tried.is_proved else Status.FEASIBLE,
        choice=tuple(tried.best.tolist()),
        objective=tried.best_s,
        bound=tried.bound_s,
        solve_s=time.perf_counter() - start,
        backend="local search",
    )


class _Tried:
    """Local optima seen, the best of all and its (O); the order as listed unless another is better."""

    def __init__(self, instance: RankMappingInstance, bound_s: float) -> None:
        self.instance, self.bound_s = instance, bound_s
        self.best, self.local = np.arange(instance.num_positions), list[IntArray]()
        self.best_s = float(_objectives(instance, self.best[None])[0][0])

    @property
    def is_proved(self) -> bool:
        return self.best_s <= self.bound_s * (1 + SUMMED)

    def descend(self, orders: Iterable[IntArray]) -> bool:
        """Search locally from each order; return whether the best one has changed."""
        before_s = self.best_s
        for order in orders:
            if self.is_proved:
                break
            local, local_s = _swap_to_local_optimum(self.instance, order)
            self.local.append(local)
            if local_s < self.best_s * (1 - SUMMED):
                self.best, self.best_s = local, local_s
        return self.best_s < before_s

    def relax(self, rng: np.random.Generator) -> None:
        """Descend from where the relaxed problem around the best order leads, as long as that changes."""
        for _ in range(MAX_RELAXATIONS):
            if not self.descend(_relaxed_orders(self.instance, self.best, rng)):
                break


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


class _Pairs:
    """The pairs of all axes one after the other, and those that each position is an end of."""

    def __init__(self, instance: RankMappingInstance, scale_s: float) -> None:
        size, axes = instance.num_positions, instance.axes
        lengths = [len(axis.pairs) for axis in axes]
        # The last pair is none: it fills up the lists of positions with fewer pairs, and its table is zero.
        self.senders, self.receivers = np.concatenate([*(axis.pairs for axis in axes), [[0, 0]]]).T
        self.tables = np.repeat(np.arange(len(axes) + 1), [*lengths, 1]) * size * size
        self.first = np.cumsum([0, *lengths[:-1]])
        seconds = [(axis.weight / instance.bandwidth / scale_s).ravel() for axis in axes]
        self.seconds = np.concatenate([*seconds, np.zeros(size * size)])
        self.size = size
        lists, self.columns, width = list[IntArray](), list[int](), 0
        for axis, first in zip(axes, self.first, strict=True):
            ends = [first + np.flatnonzero(np.any(axis.pairs == k, axis=1)) for k in range(size)]
            longest = max(map(len, ends))
            lists.append(np.array([[*each, *[len(self.tables) - 1] * (longest - len(each))] for each in ends]))
            self.columns.append(width)
            width += 2 * longest
        self.of_position = lists

    def of_swap(self, i: IntArray, j: IntArray) -> IntArray:
        """Return the pairs [M, D] that end at position i or j [M], axis by axis; those that join both count twice."""
        return np.concatenate([each for pairs in self.of_position for each in (pairs[i], pairs[j])], axis=1)

    def cells(self, orders: IntArray, pairs: IntArray | slice) -> IntArray:
        """Return where the tables have those pairs of orders [M, K]."""
        senders, receivers = self.senders[pairs], self.receivers[pairs]
        if senders.ndim == 1:
            return np.asarray(orders[:, senders] * self.size + orders[:, receivers] + self.tables[pairs])
        rows = np.arange(len(orders))[:, None]
        return np.asarray(orders[rows, senders] * self.size + orders[rows, receivers] + self.tables[pairs])


def _anneal(
    instance: RankMappingInstance, starts: IntArray, scale_s: float, num_steps: int, rng: np.random.Generator
) -> IntArray:
    """Return the best order [K] of the chains that begin at `starts` [M, K]; (O) is measured against `scale_s`."""
    size, rows = instance.num_positions, np.arange(NUM_CHAINS)
    pairs, orders = _Pairs(instance, scale_s), starts[rows % len(starts)]
    every, has_blocks = slice(0, len(pairs.tables) - 1), bool(np.any(np.diff(instance.block) == 0))
    best, best_cost, num_worst = orders[0], np.inf, int(REPLACED * NUM_CHAINS)
    for step, temperature in enumerate(np.geomspace(HOT, COLD, num_steps)):
        if step % ROUND == 0:
            norm = next(power for until, power in POWERS if step < until * num_steps)
            powers = pairs.seconds**norm
            cells = pairs.cells(orders, every)
            costs = np.maximum.reduceat(pairs.seconds[cells], pairs.first, axis=1).sum(axis=1)
            sums = np.add.reduceat(powers[cells], pairs.first, axis=1)
            if costs.min() < best_cost:
                best, best_cost = orders[np.argmin(costs)].copy(), float(costs.min())
            ranked = np.argsort((sums ** (1 / norm)).sum(axis=1))
            orders[ranked[-num_worst:]], sums[ranked[-num_worst:]] = (
                orders[ranked[:num_worst]],
                sums[ranked[:num_worst]],
            )
            soft = (sums ** (1 / norm)).sum(axis=1)
            one = rng.integers(0, size, (ROUND, NUM_CHAINS))
            other = (one + rng.integers(1, size, (ROUND, NUM_CHAINS))) % size
            needed_gain = np.log(rng.random((ROUND, NUM_CHAINS)))
        i, j = one[step % ROUND], other[step % ROUND]
        moves = (instance.kind[i] == instance.kind[j]) & (instance.block[i] != instance.block[j])
        swapped = orders.copy()
        swapped[rows, i], swapped[rows, j] = orders[rows, j], orders[rows, i]
        if has_blocks:
            swapped = _sort_within_blocks(instance, swapped)
            changed = np.add.reduceat(powers[pairs.cells(swapped, every)], pairs.first, axis=1)
        else:
            touched = pairs.of_swap(i, j)
            added = powers[pairs.cells(swapped, touched)] - powers[pairs.cells(orders, touched)]
            ends = np.stack([pairs.senders[touched], pairs.receivers[touched]])
            joins = np.all((ends == i[:, None]) | (ends == j[:, None]), axis=0) & (ends[0] != ends[1])
            added = np.where(joins, added / 2, added)
            changed = np.maximum(sums + np.add.reduceat(added, pairs.columns, axis=1), np.finfo(float).tiny)
        changed_soft = (changed ** (1 / norm)).sum(axis=1)
        accepted = moves & (needed_gain[step % ROUND] < (soft - changed_soft) / temperature)
        orders[accepted], sums[accepted], soft[accepted] = swapped[accepted], changed[accepted], changed_soft[accepted]
    costs = np.maximum.reduceat(pairs.seconds[pairs.cells(orders, every)], pairs.first, axis=1).sum(axis=1)
    return orders[np.argmin(costs)] if costs.min() < best_cost else best


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


def _relaxed_orders(instance: RankMappingInstance, best: IntArray, rng: np.random.Generator) -> Iterator[IntArray]:
    """Yield orders to which the relaxed problem around the best one leads, from it and from random starts.

    In place of an axis's maximum stands its p-norm, made linear in the p-th powers at the best order: a quadratic assignment
    problem that is nowhere below the sum of the norms, and equal to it there. It knows no kinds of node: where there are several
    the orders are random.
    """
    size, off_diagonal = instance.num_positions, ~np.eye(instance.num_positions, dtype=bool)
    seconds = np.divide(1.0, instance.bandwidth, where=off_diagonal, out=np.zeros((size, size)))
    seconds /= np.median(seconds[off_diagonal])
    for power in RELAXED_POWERS:
        flows = np.zeros((size, size))
        for axis in instance.axes:
            of_pairs = seconds[best[axis.pairs[:, 0]], best[axis.pairs[:, 1]]]
            slowest = of_pairs.max()
            slope = np.sum((of_pairs / slowest) ** power) ** (1 / power - 1) * slowest ** (1 - power)
            np.add.at(flows, tuple(axis.pairs.T), axis.weight * slope)
        flows /= flows.max()
        for share in RANDOM_SHARES:
            if len(np.unique(instance.kind)) > 1:
                yield _shuffle_within_kinds(instance, rng)
                continue
            start = (1 - share) * np.eye(size)[best] + share * _random_assignment(size, rng)
            options = {"P0": start, "rng": rng}
            relaxed = quadratic_assignment(flows, np.minimum(seconds**power, MAX_RATIO), method="faq", options=options)
            yield _sort_within_blocks(instance, relaxed.col_ind)


def _random_assignment(size: int, rng: np.random.Generator) -> FloatArray:
    """Return a doubly stochastic matrix [size, size]: the mean of the even one and of `size` random permutations."""
    permutations = np.eye(size)[rng.permuted(np.tile(np.arange(size), (size, 1)), axis=1)]
    return np.asarray((permutations.mean(axis=0) + 1 / size) / 2)


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
