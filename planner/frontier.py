"""Frontier: the layouts of a space in the order of their lower bounds, each bounded only when its turn may have come.

A quick bound on time, from the work inside layers alone, orders the layouts of the pool. Blocks of layouts in this order get their
bound on memory, and those that may fit the full bound on time. A layout is given out when its full bound is no larger than the
quick bound of all that wait, in the pool or outside it (pool.py), so the order is that of the full bounds over everything.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..cost_models import memory
from ..cost_models.bounds import memory_bounds
from ..cost_models.layouts import IntArray
from ..cost_models.mixed_step import budget_bytes, quick_time_bounds, time_bounds
from .pool import Pool

BLOCK = 1 << 13
"""Layouts bounded together: arrays of this size stay in a core's cache."""


class Frontier:
    """Layouts that may fit, by increasing bound on their time; ``bound_bytes`` [N] is infinite where not evaluated."""

    def __init__(self, pool: Pool) -> None:
        """Order the pool by its quick bounds."""
        self._pool = pool
        self._quick_s = np.zeros(0)
        self._order = np.zeros(0, dtype=np.int64)
        self._next = 0
        self._rows = np.zeros(0, dtype=np.int64)
        self._bound_s = np.zeros(0)
        self.bound_bytes = np.zeros(0)
        self._budget_bytes = np.zeros(0)
        self._order_new()

    def _order_new(self) -> None:
        """Put what came into the pool since the last time among what waits."""
        old, new = len(self._quick_s), len(self._pool)
        costs = self._pool.bounding if old == 0 else self._pool.bounding.select(np.arange(old, new))
        self._quick_s = np.concatenate([self._quick_s, quick_time_bounds(costs)])
        self.bound_bytes = np.concatenate([self.bound_bytes, np.full(new - old, np.inf)])
        self._budget_bytes = np.concatenate([self._budget_bytes, budget_bytes(costs)])
        waiting = np.concatenate([self._order[self._next :], np.arange(old, new)])
        self._order, self._next = waiting[np.argsort(self._quick_s[waiting], kind="stable")], 0

    @property
    def bound_s(self) -> float:
        """Seconds that no layout left can beat; infinite when none is left."""
        return min(self._first_s, self._next_quick_s)

    @property
    def is_ready(self) -> bool:
        """Whether ``first`` is known: its full bound is no larger than any quick bound that waits."""
        return np.isfinite(self._first_s) and self._first_s <= self._next_quick_s

    @property
    def _first_s(self) -> float:
        return float(self._bound_s[0]) if len(self._rows) else float("inf")

    @property
    def _next_quick_s(self) -> float:
        return min(self._pool.bound_s, self._next_in_pool_s)

    @property
    def _next_in_pool_s(self) -> float:
        return float(self._quick_s[self._order[self._next]]) if self._next < len(self._order) else float("inf")

    @property
    def first(self) -> int:
        """The layout with the least bound, once it ``is_ready``."""
        return int(self._rows[0])

    def upcoming(self, wanted: int) -> IntArray:
        """The first few layouts that are bounded already."""
        return self._rows[:wanted]

    def pop(self) -> int:
        """Take the first one off."""
        row = self.first
        self._rows, self._bound_s = self._rows[1:], self._bound_s[1:]
        return row

    def raise_first(self, bound_s: float) -> bool:
        """Whether a better bound of the first layout is larger than the one it had; it waits for its turn under the larger one."""
        if bound_s <= self._first_s:
            return False
        row = self.pop()
        at = int(np.searchsorted(self._bound_s, bound_s, side="right"))
        self._rows, self._bound_s = np.insert(self._rows, at, row), np.insert(self._bound_s, at, bound_s)
        return True

    def nearest_misses(self, incumbent_s: float, wanted: int) -> list[int]:
        """Of the layouts that would be faster and that memory alone excluded, those that lack the least."""
        faster = np.flatnonzero(
            np.isfinite(self.bound_bytes) & ~self._may_fit(slice(None)) & (self._quick_s < incumbent_s)
        )
        nearest = faster[np.argsort(self.bound_bytes[faster], kind="stable")][: 32 * wanted]
        is_faster = time_bounds(self._pool.bounding.select(nearest).compacted()) < incumbent_s
        return [int(row) for row in nearest[is_faster][:wanted]]

    def bound_block(self) -> None:
        """Bound the next layouts in the order of the quick bounds, those of groups that come first taken in before."""
        while self._pool.bound_s <= self._next_in_pool_s and np.isfinite(self._pool.bound_s):
            self._pool.grow()
            self._order_new()
        rows = self._order[self._next : self._next + BLOCK]
        self._next += len(rows)
        costs = self._pool.bounding.select(rows).compacted()
        self.bound_bytes[rows] = memory_bounds(costs)
        fits = self._may_fit(rows)
        if not fits.any():
            return
        rows = rows[fits]
        bound_s = np.concatenate([self._bound_s, time_bounds(costs.select(np.flatnonzero(fits)))])
        rows = np.concatenate([self._rows, rows])
        order = np.lexsort((rows, bound_s))
        self._rows, self._bound_s = rows[order], bound_s[order]

    def _may_fit(self, rows: IntArray | slice) -> NDArray[np.bool_]:
        """Whether what these layouts require at least is within their budget."""
        costs = self._pool.bounding
        least = memory.least_required_bytes(self.bound_bytes[rows], costs.workload, costs.cluster)
        return np.asarray(least <= self._budget_bytes[rows])
