"""How islands with slow links between them train together: order of the ring, steps between sums, their numbers and delay.

Sets
    i = 0..n-1   islands: groups of nodes with fast links inside, each with a copy of the model
    e            directed links between two islands
Data
    STEP[i]      seconds of an inner step of island i on its share of the batch; STEP = max_i STEP[i]
    BYTES[q]     bytes of all parameters on the wire as numbers of kind q
    RATE[e], LATENCY[e]   bytes/s of a link for the entire exchange, and seconds of a small message
    MAX_STEPS, MAX_DELAY
Variables
    pi           order of the islands around a ring
    h            inner steps between two sums of the same parameters (1: a sum each step)
    p            fragments of the parameters, each of them summed once in h steps, one every h / p
    q            kind of number on the wire
    tau          steps after which a sum that has begun is taken over, while training goes on
Objective
    (O)  min  seconds a step  =  STEP + p max(0, ring - tau STEP) / h
         ring = 2 (n - 1) max_{e of pi} (LATENCY[e] + BYTES[q] / (n p RATE[e]))        reduce-scatter and all-gather of a fragment
Constraints
    (C1) memory: anchor and momentum fit into the host's memory; the caller leaves out islands where they do not
    (C2) steps:  h <= MAX_STEPS, p divides h, tau <= min(MAX_DELAY, h / p - 1): one fragment is on its way at a time
    (C3) batch:  the shares of all islands are the batch, at least a part for every rank of an island (`deal`)
    (C4) reach:  every link of pi has a rate
    (C5) speed:  shares, not steps, differ where islands are of unlike speed; the mean of a sum is weighted by samples

Method: the ring with the least slowest link, for each p and q: exact up to EXACT_ISLANDS by dynamic programming over sets of
islands (Held, Karp, J. SIAM 10(1), 1962, with the maximum in place of the sum); beyond that from nearest neighbours by 2-opt and
moves of one island. h, p, q and tau are all tried. More than one choice is often nearly as good: of those within NEARLY of the best
the plainest is taken, with the least delay, then fewest steps between sums, then widest numbers, then fewest fragments.

Bounds: an order's slowest link is at least the rate at which the islands are still strongly connected. Under any shares the slowest
step (`slowest_bound_s`), where no island i has more than R[i] sequences a second, and SHARE[i] or more take it LEAST[i], is

    (B2) STEP >= min t with sum_i CAP[i](t) >= batch,   CAP[i](t) = floor(R[i] t), and no more than SHARE[i] - 1 for t < LEAST[i]

Sources: DiLoCo (arXiv:2311.08105); fragments and delay: Streaming DiLoCo (arXiv:2501.18512); rings of int8: INTELLECT-1
(arXiv:2412.01152).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..schema.local_updates import WireBits, wire_bytes
from ..schema.units import FloatArray
from .backend import Solution, Status

EXACT_ISLANDS = 12
"""Beyond them the sets of the dynamic program take more than a second."""

NEARLY = 0.01
"""Share of the step by which a plainer choice may be slower than the best: less than what predictions are off."""

FRAGMENTS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class IslandsInstance:
    """The data of the problem, checked when made.

    Attributes:
        step_s: STEP[i]; rate, latency_s: [n, n] from row to column, diagonals not read; a rate of 0: no link.
        num_params: that an exchange sums up.
        max_steps, max_delay, bits: what may be chosen.
    """

    step_s: FloatArray
    rate: FloatArray
    latency_s: FloatArray
    num_params: float
    max_steps: int
    max_delay: int = 0
    bits: tuple[WireBits, ...] = (32, 16, 8)

    def __post_init__(self) -> None:
        n = len(self.step_s)
        if self.rate.shape != (n, n) or self.latency_s.shape != (n, n):
            raise ValueError(f"rates of {self.rate.shape} and latencies of {self.latency_s.shape} for {n} islands")
        if self.max_steps < 1 or self.max_delay < 0 or not self.bits or not np.all(self.step_s > 0):
            raise ValueError("steps of positive seconds, at least one step, one kind of number and no negative delay")

    def edge_s(self, fragments: int, bits: WireBits) -> FloatArray:
        """Return the seconds of one step of the ring on every link [n, n]; infinite where there is none."""
        part = wire_bytes(self.num_params, bits) / (len(self.step_s) * fragments)
        with np.errstate(divide="ignore"):
            seconds = self.latency_s + part / self.rate
        seconds[np.diag_indices(len(seconds))] = np.inf
        return np.asarray(seconds)


@dataclass(frozen=True)
class Exchange:
    """A choice: order of the islands, inner steps between sums, fragments, numbers on the wire, steps of delay."""

    order: tuple[int, ...]
    steps: int = 1
    fragments: int = 1
    bits: WireBits = 32
    delay: int = 0


def ring_s(instance: IslandsInstance, choice: Exchange) -> float:
    """Return the seconds in which one fragment is summed around the ring."""
    n = len(choice.order)
    edges = instance.edge_s(choice.fragments, choice.bits)
    return 2 * (n - 1) * slowest_edge_s(edges, choice.order) if n > 1 else 0.0


def step_s(instance: IslandsInstance, choice: Exchange) -> float:
    """Return (O)."""
    longest_s = float(np.max(instance.step_s))
    waited_s = max(0.0, ring_s(instance, choice) - choice.delay * longest_s)
    return longest_s + choice.fragments * waited_s / choice.steps


def check(instance: IslandsInstance, choice: Exchange) -> float:
    """Return (O) of a choice after checking it against the constraints.

    Raises:
        ValueError: it breaks one; the label says which.
    """
    if sorted(choice.order) != list(range(len(instance.step_s))):
        raise ValueError(f"(C4) {choice.order} is no order of {len(instance.step_s)} islands")
    if not 1 <= choice.steps <= instance.max_steps or choice.steps % choice.fragments:
        raise ValueError(f"(C2) {choice.steps} steps in {choice.fragments} fragments, at most {instance.max_steps}")
    if not 0 <= choice.delay <= min(instance.max_delay, choice.steps // choice.fragments - 1):
        raise ValueError(f"(C2) a delay of {choice.delay} with {choice.fragments} fragments in {choice.steps} steps")
    seconds = step_s(instance, choice)
    if not math.isfinite(seconds):
        raise ValueError("(C4) a link of the ring has no rate")
    return seconds


def solve(instance: IslandsInstance) -> Solution[Exchange]:
    """Return the plainest of the choices that are nearly the best; the bound is that of the best one.

    Islands without room for their anchors (C1) are the caller's to leave out.
    """
    start, n = time.perf_counter(), len(instance.step_s)
    longest_s = float(np.max(instance.step_s))
    if n == 1:
        return Solution(
            status=Status.OPTIMAL, choice=Exchange((0,)), objective=longest_s, bound=longest_s, backend="ring"
        )
    options: list[tuple[float, tuple[int, int, int, int], Exchange]] = []
    bound = math.inf
    for fragments in (p for p in FRAGMENTS if p <= instance.max_steps):
        for bits in instance.bits:
            edges = instance.edge_s(fragments, bits)
            order, edge_bound_s = best_ring(edges)
            if not order:
                continue
            exchange_s = ring_s(instance, Exchange(order, fragments, fragments, bits))
            bound_s = 2 * (n - 1) * edge_bound_s
            for steps in range(fragments, instance.max_steps + 1, fragments):
                max_delay = min(instance.max_delay, steps // fragments - 1)
                enough = max(0, math.ceil(exchange_s / longest_s))
                bound = min(bound, longest_s + fragments * max(0.0, bound_s - max_delay * longest_s) / steps)
                for delay in {0, *range(1, min(max_delay, enough) + 1)}:
                    seconds = longest_s + fragments * max(0.0, exchange_s - delay * longest_s) / steps
                    choice = Exchange(order, steps, fragments, bits, delay)
                    options.append((seconds, (delay, steps, -bits, fragments), choice))
    solve_s = time.perf_counter() - start
    if not options:
        return Solution(status=Status.INFEASIBLE, choice=None, solve_s=solve_s, backend="ring")
    best_s = min(seconds for seconds, _, _ in options)
    choice = min((rank, choice.order, choice) for seconds, rank, choice in options if seconds <= best_s * (1 + NEARLY))[
        2
    ]
    status = Status.OPTIMAL if n <= EXACT_ISLANDS else Status.FEASIBLE
    return Solution(
        status=status, choice=choice, objective=check(instance, choice), bound=min(bound, best_s), solve_s=solve_s,
        backend="ring",
    )  # fmt: skip


def best_ring(edges: FloatArray) -> tuple[tuple[int, ...], float]:
    """Return the ring whose slowest edge is least, of seconds [n, n], and what no ring's is below; no order where there is none."""
    exact = len(edges) <= EXACT_ISLANDS
    order = _exact_ring(edges) if exact else _improved(edges, _nearest_neighbours(edges))
    slowest_s = slowest_edge_s(edges, order) if order else math.inf
    if math.isinf(slowest_s):
        return (), math.inf
    return order, slowest_s if exact else _connecting_s(edges)


def slowest_edge_s(edges: FloatArray, ring: Sequence[int]) -> float:
    """Return the slowest edge of a ring."""
    return max(_edges_of(edges, ring))


def _edges_of(edges: FloatArray, ring: Sequence[int]) -> list[float]:
    return [float(edges[u, v]) for u, v in zip(ring, (*ring[1:], ring[0]), strict=True)]


def _exact_ring(edges: FloatArray) -> tuple[int, ...]:
    """Return the ring from island 0 with the least slowest edge: best[set, last], larger sets from smaller ones."""
    n = len(edges)
    best = np.full((1 << n, n), np.inf)
    before = np.full((1 << n, n), -1, dtype=np.int8)
    best[1, 0] = 0.0
    sets = np.arange(1 << n)
    counts = np.array([bin(s).count("1") for s in sets])
    for size in range(1, n):
        for last in range(n):
            rows = sets[(counts == size) & (sets >> last & 1 == 0)]
            through = np.maximum(best[rows], edges[:, last])
            chosen = np.argmin(through, axis=1)
            into = rows | 1 << last
            best[into, last] = through[np.arange(len(rows)), chosen]
            before[into, last] = chosen
    rest = (1 << n) - 1
    order = [int(np.argmin(np.maximum(best[rest], edges[:, 0])))]
    while len(order) < n:
        previous = int(before[rest, order[-1]])
        rest ^= 1 << order[-1]
        order.append(previous)
    return tuple(reversed(order))


def _nearest_neighbours(edges: FloatArray) -> tuple[int, ...]:
    order = [0]
    while len(order) < len(edges):
        rest = [v for v in range(len(edges)) if v not in order]
        order.append(min(rest, key=lambda v: edges[order[-1], v]))
    return tuple(order)


def _improved(edges: FloatArray, order: tuple[int, ...]) -> tuple[int, ...]:
    """Reverse parts of a ring and move islands of its slowest edge while that makes the sorted edges lower."""

    def key(ring: tuple[int, ...]) -> list[float]:
        return sorted(_edges_of(edges, ring), reverse=True)

    best, n = key(order), len(order)
    while True:
        reversals = ((*order[:a], *reversed(order[a:b]), *order[b:]) for a in range(1, n) for b in range(a + 2, n + 1))
        without = [(order[a], order[:a] + order[a + 1 :]) for a in range(n)]
        moves = ((*rest[:b], island, *rest[b:]) for island, rest in without for b in range(1, n))
        other = min((*reversals, *moves), key=key)
        if key(other) >= best:
            return order
        order, best = other, key(other)


def _connecting_s(edges: FloatArray) -> float:
    """Return the least seconds such that the edges which take no longer reach from every island to every other."""
    levels = np.unique(edges[np.isfinite(edges)])
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        reach = (edges <= levels[middle]) | np.eye(len(edges), dtype=bool)
        for _ in range(len(edges).bit_length()):
            reach = (reach.astype(np.int64) @ reach.astype(np.int64)) > 0
        low, high = (low, middle) if reach.all() else (middle + 1, high)
    return float(levels[low])


def slowest_bound_s(batch: int, rates: Sequence[float], shares: Sequence[int], shortest_s: Sequence[float]) -> float:
    """Return (B2): the least seconds of the slowest island under any shares, given what one share takes each of them at least."""
    islands = list(zip(rates, shares, shortest_s, strict=True))

    def sequences(end_s: float) -> int:
        """Return what all islands may end within a time; rounding must not take from it."""
        slack_s = end_s * (1 + 1e-12)
        caps = (
            (math.floor(rate * slack_s), share - 1 if slack_s < shortest else batch)
            for rate, share, shortest in islands
        )
        return sum(min(cap) for cap in caps)

    low_s, high_s = batch / sum(rates), max(*shortest_s, batch / max(rates))
    if sequences(low_s) >= batch:
        return low_s
    while high_s > low_s * (1 + 1e-9):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (low_s, middle_s) if sequences(middle_s) >= batch else (middle_s, high_s)
    return low_s


def deal(
    batch: int, fixed_s: Sequence[float], pass_s: Sequence[float], unit: Sequence[int], minimum: Sequence[int]
) -> tuple[int, ...]:
    """Return the share of each island (C3) such that the longest of FIXED[i] + PASS[i] ceil(share / UNIT[i]) ends first.

    Islands of unlike speed then take as many steps, and as long (C5). Every island takes ``minimum``: one for each of its ranks;
    what is more than the batch the largest shares give back.

    Raises:
        ValueError: (C3) the batch has not so many.
    """
    if batch < sum(minimum):
        raise ValueError(f"(C3) a batch of {batch} has no {sum(minimum)} parts, one for each rank of every island")
    islands = list(zip(fixed_s, pass_s, unit, minimum, strict=True))
    ends = sorted({f + k * p for f, p, u, _ in islands for k in range(1, -(-batch // u) + 1)})

    def within(end_s: float) -> list[int]:
        slack_s = end_s * (1 + 1e-12)
        return [max(each, int((slack_s - f) / p) * u) for f, p, u, each in islands]

    low, high = 0, len(ends) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if sum(within(ends[middle])) >= batch else (middle + 1, high)
    shares = within(ends[low])
    while over := sum(shares) - batch:
        largest = max((i for i in range(len(shares)) if shares[i] > minimum[i]), key=lambda i: shares[i] / unit[i])
        shares[largest] -= min(over, shares[largest] - minimum[largest], (shares[largest] - 1) % unit[largest] + 1)
    return tuple(shares)
