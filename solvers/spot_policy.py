"""What a job holds over time of machines on demand and of a spot pool, to end by a deadline at the least expected cost.

Sets
    k = 0..K-1   periods of PERIOD seconds until the deadline
    a = 0..A     machines that the pool has
    h            holdings (s, m): up to s machines of the pool, and m on demand; no more than N together
    w = 0..W     cells of work that is left, each a W-th of TOKENS
Data
    P[a, a']     probability that the pool has a' machines a period later
    RATE[n]      tokens a second of n machines, under the fastest plan for n or fewer of them
    SPOT, DEMAND[m]   USD an hour of a machine of the pool; of m machines on demand
    LOST, JOINED, RESTART   seconds of a loss that others go on after, of machines that are taken in or let go, and of a start from
                 a checkpoint, where nothing survives
    LATE         USD of a cell that is not done by the deadline
Variables
    h[k, w, a, h']   what is held in period k with w left, while the pool has a and h' was held before
Objective
    (O)  min  E[ sum_k USD[k] + LATE w[K] ]        the last period that has work is paid for in part
Constraints
    (C1) supply: what is held of the pool is min(s, a); no more than N with m
    (C2) work:   w[k+1] = w[k] - RATE[n] (PERIOD - AWAY) / CELL, at a cell's end above or below at random, so that the mean is right
    (C3) away:   AWAY is RESTART where min(s', a) + m' = 0 < n; else LOST where a < s', and JOINED where h is not h'
    (C4) losses: the pool changes by P alone, whatever is held

Method: dynamic programming over k backwards; exact for the problem as stated. Bound: every policy does the work in expectation, and
holdings do not move the pool (C4), so that for any price L >= 0 of a token

    (B)  E[cost] >= L TOKENS + sum_k PERIOD sum_a Pr[a at k] min_h (USD[h, a] - L RATE[h, a])        or LATE in place of the work

whose largest is taken over L; with the times of a recording in place of Pr it is what hindsight cannot be below.
Sources: the problem of one machine is Can't Be Late's (NSDI 24).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..schema.units import FloatArray, IntArray

HOUR_S = 3600.0
_FEW = 4
"""Machines up to which every number of them is held; of more, quarters."""


@dataclass(frozen=True, kw_only=True)
class SpotInstance:
    """The data of the problem, checked when made.

    Attributes:
        tokens, deadline_s, period_s: as above; K is what fits of the last into the second.
        move: P [A + 1, A + 1]; rate: RATE [N + 1]; demand_usd: DEMAND [M + 1].
        num_cells: W; late_usd: of all tokens.
    """

    tokens: float
    deadline_s: float
    period_s: float
    move: FloatArray
    rate: FloatArray
    spot_usd: float
    demand_usd: FloatArray
    lost_s: float
    joined_s: float
    restart_s: float
    num_cells: int = 128
    late_usd: float

    def __post_init__(self) -> None:
        size = len(self.move)
        if self.move.shape != (size, size) or not np.allclose(self.move.sum(axis=1), 1) or np.any(self.move < 0):
            raise ValueError("(C4) the rows of P are no probabilities")
        if self.rate[0] != 0 or np.any(np.diff(self.rate) < 0) or np.any(np.diff(self.demand_usd) < 0):
            raise ValueError("more machines are neither slower nor cheaper, and none make nothing")
        if self.num_periods < 1 or self.tokens <= 0:
            raise ValueError(f"a deadline of {self.deadline_s:g} s has no period of {self.period_s:g} s, or no work")

    @property
    def num_periods(self) -> int:
        """K."""
        return int(self.deadline_s / self.period_s + 1e-9)

    @property
    def cell(self) -> float:
        """Tokens of a cell."""
        return self.tokens / self.num_cells

    @cached_property
    def holdings(self) -> tuple[tuple[int, int], ...]:
        """The pairs (s, m); nothing is the first."""
        n = len(self.rate) - 1
        levels = sorted({round(n * i / _FEW) for i in range(_FEW + 1)}) if n > _FEW else range(n + 1)
        max_demand = len(self.demand_usd) - 1
        return tuple((s, m) for s in levels for m in sorted({min(level, max_demand) for level in levels}) if s + m <= n)

    def machines(self, h: int, available: int) -> tuple[int, int]:
        """Return the machines of the pool and on demand (C1)."""
        s, m = self.holdings[h]
        return min(s, available), m

    def usd_per_hour(self, spot: int, demand: int) -> float:
        """Return what machines cost."""
        return spot * self.spot_usd + float(self.demand_usd[demand])

    def away_s(self, before: int, h: int, available: int) -> float:
        """Return AWAY (C3)."""
        (s, m), now = self.holdings[before], self.machines(h, available)
        if sum(now) == 0:
            return 0.0
        if min(s, available) + m == 0:
            return self.restart_s
        return self.lost_s * (available < s) + self.joined_s * (h != before)

    def index(self, h: int, available: int) -> int:
        """Return the holding that is remembered: one without machines is the one of nothing."""
        s, m = self.machines(h, available)
        return h if s else self.holdings.index((0, m))


@dataclass(frozen=True)
class SpotPolicy:
    """A choice of holdings, with its expected cost (O) from each state of the pool, nothing held, and (B).

    Attributes:
        choice: index of a holding [K, W + 1, A + 1, H].
        usd, bound_usd: [A + 1].
    """

    instance: SpotInstance
    choice: NDArray[np.uint8]
    usd: FloatArray
    bound_usd: FloatArray

    def decide(self, elapsed_s: float, remaining: float, available: int, before: int) -> int:
        """Return what to hold now; work is rounded up and time down, and what must be on demand for the deadline is."""
        data = self.instance
        available = min(available, len(data.move) - 1)
        max_demand = len(data.demand_usd) - 1
        needed_s = remaining / data.rate[max_demand] if data.rate[max_demand] else math.inf
        if max_demand and data.deadline_s - elapsed_s < needed_s + 2 * data.restart_s + data.joined_s:
            return data.holdings.index((0, max(m for s, m in data.holdings if s == 0)))
        period = min(math.ceil(elapsed_s / data.period_s - 1e-9), data.num_periods - 1)
        cells = min(math.ceil(remaining / data.cell - 1e-9), data.num_cells)
        return int(self.choice[period, cells, available, before])


def solve(instance: SpotInstance) -> SpotPolicy:
    """Return the policy with the least (O)."""
    num_states, cells = len(instance.move), instance.num_cells
    num_holdings, w, steps = len(instance.holdings), np.arange(cells + 1), _Steps.of(instance)
    after = np.tile((w * instance.late_usd / cells)[:, None, None], (1, num_states, num_holdings))
    choice = np.zeros((instance.num_periods, cells + 1, num_states, num_holdings), dtype=np.uint8)
    for k in reversed(range(instance.num_periods)):
        best, choice[k] = _decided(np.einsum("ab,wbh->ahw", instance.move, after), steps)
        after = np.moveaxis(best, 2, 0)
    return SpotPolicy(instance, choice, after[cells, :, 0], _bounds(instance))


def hindsight_usd(instance: SpotInstance, available: IntArray) -> float:
    """Return (O) of whoever knows what the pool has in each period [K]."""
    steps = _Steps.of(instance)
    after = np.tile(np.linspace(0, instance.late_usd, instance.num_cells + 1), (1, len(instance.holdings), 1))
    for a in reversed(np.minimum(available, len(instance.move) - 1).tolist()):
        after, _ = _decided(after, steps.of_state(a))
    return float(after[0, 0, -1])


def _decided(expected: FloatArray, steps: _Steps) -> tuple[FloatArray, NDArray[np.uint8]]:
    """Return the least cost of a period and what follows [A + 1, H, W + 1], and the holding it has [W + 1, A + 1, H].

    Args:
        expected: of what follows, by what is remembered [A + 1, H, W + 1].
    """
    best = np.full(expected.shape, np.inf)
    choice = np.zeros(expected.shape, dtype=np.uint8)
    for h in reversed(range(expected.shape[1])):  # of equal costs work that is done now
        value = steps.usd[:, :, h] + _cost_after(expected, steps, h)
        is_better = value < best - 1e-12
        best[is_better], choice[is_better] = value[is_better], h
    return best, np.moveaxis(choice, 2, 0)


@dataclass(frozen=True)
class _Steps:
    """Of every state of the pool, holding before and holding: USD by work left, the cells after, and what is remembered.

    Attributes:
        usd: [A + 1, H, H, W + 1]; low, part: cells left after it, rounded down, and the rest of a cell.
        index: [A + 1, H].
    """

    usd: FloatArray
    low: IntArray
    part: FloatArray
    index: IntArray

    @classmethod
    def of(cls, instance: SpotInstance) -> _Steps:
        """Work them out."""
        states, holdings = range(len(instance.move)), range(len(instance.holdings))
        away_s = np.array([[[instance.away_s(b, h, a) for h in holdings] for b in holdings] for a in states])
        machines = np.array([[instance.machines(h, a) for h in holdings] for a in states])
        useful_s = np.maximum(instance.period_s - away_s, 0.0)
        done = instance.rate[machines.sum(axis=2)][:, None, :] * useful_s / instance.cell
        usd = (
            np.array([[instance.usd_per_hour(*pair) for pair in row] for row in machines]) * instance.period_s / HOUR_S
        )
        w = np.arange(instance.num_cells + 1)
        after = np.maximum(w - done[..., None], 0.0)
        paid = np.minimum(w / np.maximum(done[..., None], 1e-300), 1.0)
        low = np.floor(after).astype(np.int64)
        index = np.array([[instance.index(h, a) for h in holdings] for a in states])
        return cls(usd[:, None, :, None] * paid, low, after - low, index)

    def of_state(self, a: int) -> _Steps:
        """Return those of one state of the pool."""
        one = slice(a, a + 1)
        return _Steps(self.usd[one], self.low[one], self.part[one], self.index[one])


def _cost_after(expected: FloatArray, steps: _Steps, h: int) -> FloatArray:
    """Return the expected cost after holding h [A + 1, H, W + 1] (C2)."""
    states = np.arange(len(expected))
    rows = expected[states, steps.index[:, h]]  # [A + 1, W + 1]
    low, part = steps.low[:, :, h], steps.part[:, :, h]
    high = np.minimum(low + 1, expected.shape[2] - 1)
    state = states[:, None, None]
    return np.asarray((1 - part) * rows[state, low] + part * rows[state, high])


def _bounds(instance: SpotInstance) -> FloatArray:
    """Return (B) from each state of the pool."""
    visits, now = np.zeros_like(instance.move), np.eye(len(instance.move))
    for _ in range(instance.num_periods):
        visits += now
        now = now @ instance.move
    return np.array([bound_usd(instance, row * instance.period_s) for row in visits])


def bound_usd(instance: SpotInstance, seconds: FloatArray) -> float:
    """Return (B), given the seconds in which the pool has so many machines [A + 1]."""
    pairs = [(s, m) for s in range(len(instance.rate)) for m in range(len(instance.demand_usd))]
    pairs = [(s, m) for s, m in pairs if s + m < len(instance.rate)]
    usd = np.array([instance.usd_per_hour(*pair) for pair in pairs]) / HOUR_S
    rate = np.array([instance.rate[s + m] for s, m in pairs])
    is_possible = np.arange(len(seconds))[:, None] >= np.array([s for s, _ in pairs])

    def value(price: float) -> float:
        gained = np.where(is_possible, usd - price * rate, np.inf).min(axis=1)
        return price * instance.tokens + float(seconds @ gained)

    # A concave function with a corner at each price at which another pair becomes the cheapest; LATE does any work at its price.
    low, high = 0.0, instance.late_usd / instance.tokens
    for _ in range(200):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        low, high = (a, high) if value(a) < value(b) else (low, b)
    return max(0.0, value((low + high) / 2))
