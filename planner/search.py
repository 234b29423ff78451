"""Pool: the layouts of a space whose turn may have come; groups of degrees wait outside, each under one bound for all its layouts.

A group's bound takes the least of every recompute option and no more than what holds under any order of passes,

    T >= m max(slowest stage, work / pp)

so no layout of the group is faster. Groups come in with increasing bounds; those whose bound is never reached are never made.
Of a mixed cluster, and where a batch is given, all layouts are in the pool from the start.

Frontier: the layouts of a space in the order of their lower bounds, each bounded only when its turn may have come.

A quick bound on time, from the work inside layers alone, orders the layouts of the pool. Blocks of layouts in this order get their
bound on memory, and those that may fit the full bound on time. A layout is given out when its full bound is no larger than the
quick bound of all that wait, in the pool or outside it (pool.py), so the order is that of the full bounds over everything.

Best-first search: expand layouts in the order of their lower bounds until no bound is below the incumbent.

Every layout has an admissible lower bound on time and memory (frontier.py, vectorised). Expanding a layout cuts its layers into
stages and costs them (expansion.py). What is left unexpanded has bounds no better than
the incumbent, so the incumbent is optimal for the cost model; a time limit leaves an honest gap.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from ..cost_models.stage import memory
from ..cost_models.stage.bounds import budget_bytes, memory_bounds, quick_time_bounds, time_bounds
from ..cost_models.stage.table import CostTable
from ..schema import Certificate, ClusterSpec, ModelSpec, Workload
from ..schema.arrays import IntArray
from ..schema.layout_table import MIXED, LayoutTable
from ..schema.schedules import SCHEDULE_NAMES
from .deadline import Deadline
from .expand import Candidate, expand_fitting, expand_row, replayed_bound
from .rank_map import best_case
from .space import Space

MIN_GROWTH = 1 << 14
"""Layouts that come in together at least."""


GROWTH_FRACTION = 0.5
"""The same as a part of those that are in: what is copied then stays proportional to what is in."""


ANY_ORDER = SCHEDULE_NAMES.index("synthesised")
"""The schedule whose bound holds under any order of passes."""


class Pool:
    """Layouts with their ``costs``, what their bounds are worked out from (``bounding``) and their ``places`` in the space [N].

    ``bound_s`` is what no layout outside is faster than, infinite once all are in.
    """

    def __init__(
        self,
        model: ModelSpec,
        workload: Workload,
        cluster: ClusterSpec,
        space: Space,
        *,
        checkpoint: Callable[[], None] = lambda: None,
    ) -> None:
        """Bound the groups and take in the most promising ones, or every layout where there are no groups."""

        def costed(batch: LayoutTable) -> tuple[CostTable, CostTable]:
            costs = CostTable.of(model, workload, cluster, batch, checkpoint=checkpoint)
            return costs, bounding_costs(costs)

        self._space = space
        self.bound_s = np.inf
        if space.groups is None or cluster.parts:
            self.costs, self.bounding = costed(space.batch)
            self.places: IntArray = np.arange(len(self.costs.batch))
            return
        recomputes = np.unique(space.groups.options["recompute"])
        recompute = int(recomputes[0]) if len(recomputes) == 1 else MIXED
        self._of_groups = costed(space.groups.relaxed(schedule=ANY_ORDER, recompute=recompute))
        bound_s = quick_time_bounds(self._of_groups[1])
        self._order = np.argsort(bound_s, kind="stable")
        self._waiting_s = bound_s[self._order]
        self._next = 0
        self.costs, self.bounding = (costs.select(np.zeros(0, dtype=np.int64)) for costs in self._of_groups)
        self.places = np.zeros(0, dtype=np.int64)
        self.grow()

    def __len__(self) -> int:
        return len(self.places)

    def grow(self) -> None:
        """Take in the next groups."""
        groups = self._space.groups
        assert groups is not None
        wanted = max(MIN_GROWTH, int(GROWTH_FRACTION * len(self)))
        sizes = np.cumsum(groups.count[self._order[self._next :]])
        some = self._order[self._next : self._next + int(np.searchsorted(sizes, wanted)) + 1]
        self._next += len(some)
        self.bound_s = float(self._waiting_s[self._next]) if self._next < len(self._order) else np.inf
        batch, of_group, places = groups.members(some)
        kept = np.flatnonzero(self._space.keeps(places))
        batch, of_group = batch.select(kept), of_group[kept]
        self.places = np.concatenate([self.places, places[kept]])
        same = self.costs is self.bounding
        self.costs = _joined(self.costs, self._of_groups[0], batch, of_group)
        self.bounding = self.costs if same else _joined(self.bounding, self._of_groups[1], batch, of_group)


def bounding_costs(costs: CostTable) -> CostTable:
    """What bounds are worked out from: the costs, or where links were measured those of the best placement there may be."""
    if costs.cluster.bandwidth_matrix is None:
        return costs
    fastest = best_case(costs.cluster, tied=costs.model.tie_embeddings)
    return CostTable.of(costs.model, costs.workload, fastest, costs.batch)


def _joined(costs: CostTable, of_groups: CostTable, batch: LayoutTable, of_group: IntArray) -> CostTable:
    """The costs with further layouts, whose layers cost what those of their group do under their own recompute."""
    like = of_groups.like[of_group]
    if of_groups.batch.is_mixed:
        like = like + (batch.recompute - MIXED) * of_groups.cases_by_option
    joined = LayoutTable.concatenate([costs.batch, batch])
    return replace(costs, batch=joined, like=np.concatenate([costs.like, like]))


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
        least = memory.lower_bound_required_bytes(self.bound_bytes[rows], costs.workload, costs.cluster)
        return np.asarray(least <= self._budget_bytes[rows])


REL_GAP = 1e-4
"""A bound within this of the incumbent is not worth expanding; far below the cost model's own error."""


MAX_RUNNER_UP_TRIES = 100
"""Combinations of degrees that are expanded for comparison at most: of those most promising few may fit."""


RUNNER_UP_TRIES_A_BLOCK = 5
"""Expansions that bounding a further block of layouts counts as."""


WINDOW = 32
"""Layouts costed together before they are expanded one by one."""


OnProgress = Callable[[int, float | None, float], None]
"""Called with (layouts evaluated, incumbent seconds or None, bound seconds) after a layout or a block of bounds."""


@dataclass
class SearchResult:
    """Expanded layouts that fit, best first, and those that do not; no layout of the space is faster than ``bound_s``.

    ``pool`` has the layouts that had to be looked at one by one, indices are into its costs; ``num_layouts`` counts the space.
    ``any_order_s`` has the bound under any order of passes of each layout that was looked at; ``bound_s`` is about the named ones.
    ``bound_bytes`` [N] is a lower bound of what each layout allocates, infinite where it was not worked out. Of the layouts in
    ``rejected`` no split fits; ``nearest_misses`` are those, and others that were never expanded, that lack the least memory.
    """

    pool: Pool
    num_layouts: int
    fitting: list[Candidate] = field(default_factory=list)
    nearest_misses: list[int] = field(default_factory=list)
    bound_s: float = 0.0
    search_s: float = 0.0
    stopped_early: bool = False
    evaluated: int = 0
    bound_bytes: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    rejected: list[int] = field(default_factory=list)
    any_order_s: dict[int, float] = field(default_factory=dict)
    go_on: Callable[[int, Deadline], None] | None = field(default=None, repr=False)

    @property
    def costs(self) -> CostTable:
        """Costs of the layouts of the pool."""
        return self.pool.costs

    def add_runner_ups(self, wanted: int, deadline: Deadline) -> None:
        """Expand ``wanted`` more combinations of degrees for comparison, after the search."""
        if self.go_on is not None:
            self.go_on(wanted, deadline)
            self.fitting.sort(key=lambda c: (c.estimate.step_time_s, c.idx))

    @cached_property
    def too_large(self) -> list[Candidate]:
        """The nearest misses with the stages that they would have: expanded where somebody asks."""
        return [expand_row(self.costs, row) for row in self.nearest_misses]

    def certificate(self) -> Certificate:
        """How far from the best of the space the fastest layout that was found may be."""
        objective = self.fitting[0].estimate.step_time_s
        return Certificate(
            status="feasible" if self.stopped_early else "optimal",
            objective=objective,
            bound=self.bound_s,
            gap=max(0.0, 1 - self.bound_s / objective) if objective > self.bound_s * (1 + 1e-12) else 0.0,
            evaluated=self.evaluated,
            pruned=self.num_layouts - self.evaluated,
            pruned_in_groups=self.num_layouts - len(self.pool),
            search_s=self.search_s,
        )


def search(
    model: ModelSpec,
    workload: Workload,
    cluster: ClusterSpec,
    space: Space,
    *,
    time_limit_s: float,
    runner_ups: int = 0,
    worse_than_s: float = np.inf,
    on_progress: OnProgress | None = None,
    deadline: Deadline | None = None,
) -> SearchResult:
    """Expand layouts best first, then ``runner_ups`` more combinations of degrees for comparison.

    ``fitting`` is empty when nothing fits, when no layout is faster than ``worse_than_s`` (slower ones are of no use), or when the
    time limit came first. A ``deadline`` that runs already stands in for ``time_limit_s``.

    Raises:
        SolverLimitError: time was over before every layout had its first bound.
    """
    start, deadline = time.perf_counter(), deadline or Deadline(time_limit_s)
    costing = f"costing {len(space)} layouts"
    pool = Pool(model, workload, cluster, space, checkpoint=lambda: deadline.require(costing))
    deadline.require(f"bounding {len(space)} layouts")
    frontier, result = Frontier(pool), SearchResult(pool, len(space))
    window = Expander(pool, frontier)
    incumbent, bound = np.inf, np.inf
    while (bound := frontier.bound_s) < min(incumbent, worse_than_s) * (1 - REL_GAP):
        if deadline.is_over:
            result.stopped_early = True
            break
        if not frontier.is_ready:
            frontier.bound_block()
            if on_progress:
                on_progress(result.evaluated, None if np.isinf(incumbent) else incumbent, bound)
            continue
        if window.raise_first(min(incumbent, worse_than_s)):
            continue
        if (candidate := window.expand_next(bound)) is not None:
            result.fitting.append(candidate)
            incumbent = min(incumbent, candidate.estimate.step_time_s)
        result.evaluated += 1
        if on_progress:
            on_progress(result.evaluated, None if np.isinf(incumbent) else incumbent, bound)
    result.bound_bytes, result.rejected, result.any_order_s = frontier.bound_bytes, window.rejected, window.any_order_s
    # A split of a layout that was expanded may be faster than the one that was found, down to that layout's own bound.
    result.bound_s = min([bound, incumbent, *(candidate.bound_s for candidate in result.fitting)])
    if incumbent <= worse_than_s and result.fitting and not result.stopped_early:
        result.go_on = partial(_expand_runner_ups, result, frontier, window)
        result.go_on(runner_ups, deadline)
    if not deadline.is_over:
        result.nearest_misses = nearest_misses(window.rejected, frontier, incumbent)
    result.fitting.sort(key=lambda c: (c.estimate.step_time_s, c.idx))
    result.search_s = time.perf_counter() - start
    return result


def _expand_runner_ups(
    result: SearchResult, frontier: Frontier, window: Expander, wanted: int, deadline: Deadline
) -> None:
    """Expand the most promising layout of each combination of degrees not seen yet, until ``wanted`` more of them fit."""

    def degrees(row: int) -> tuple[int, ...]:
        return result.costs.batch.degrees(row)

    def tried(row: int) -> tuple[int, ...]:
        # Without sequence parallelism the same degrees may not fit, and are bounded first.
        return (*degrees(row), int(result.costs.batch.sequence_parallel[row]))

    fitting = {degrees(c.idx) for c in result.fitting}
    seen = {tried(row) for row in window.rejected}
    missing, tries = wanted + 1 - len(fitting), MAX_RUNNER_UP_TRIES
    while missing > 0 and tries > 0 and np.isfinite(bound := frontier.bound_s) and not deadline.is_over:
        if not frontier.is_ready:
            frontier.bound_block()
            tries -= RUNNER_UP_TRIES_A_BLOCK
            continue
        if degrees(frontier.first) in fitting or tried(frontier.first) in seen:
            frontier.pop()
            continue
        seen.add(tried(frontier.first))
        if (candidate := window.expand_next(bound)) is not None:
            result.fitting.append(candidate)
            fitting.add(degrees(candidate.idx))
            missing -= 1
        result.evaluated += 1
        tries -= 1
    result.bound_bytes = frontier.bound_bytes


class Expander:
    """Expands the layouts of a frontier in order, costing a few of the next ones together; ``rejected`` do not fit."""

    def __init__(self, pool: Pool, frontier: Frontier) -> None:
        """Nothing is costed yet."""
        self._pool, self._frontier = pool, frontier
        self._places: dict[int, int] = {}
        self._some = pool.costs
        self.rejected: list[int] = []
        self.any_order_s: dict[int, float] = {}

    def raise_first(self, below_s: float) -> bool:
        """Whether the bound of the layout with the least one was raised, once for each: by a replay, up to ``below_s``."""
        row = self._frontier.first
        if row in self.any_order_s:
            return False
        self.any_order_s[row] = self._frontier.bound_s
        if np.isinf(below_s) or self._pool.costs.cluster.bandwidth_matrix is not None:  # ranks may lie on better nodes
            return False
        some, at = self._costed(row)
        return self._frontier.raise_first(replayed_bound(some, at, below_s=below_s).bound_s)

    def _costed(self, row: int) -> tuple[CostTable, int]:
        """Costs that hold the frontier's first layout, and where; the next few are costed with it."""
        if row not in self._places:
            rows = self._frontier.upcoming(WINDOW)
            self._some, self._places = (
                self._pool.costs.select(rows).compacted(),
                {int(row): at for at, row in enumerate(rows)},
            )
        return self._some, self._places[row]

    def expand_next(self, bound_s: float) -> Candidate | None:
        """The layout with the least bound, taken off the frontier; None if no split of it is within memory."""
        some, at = self._costed(self._frontier.first)
        row = self._frontier.pop()
        candidate = expand_fitting(some, at, bound_s=bound_s)
        any_order_s = self.any_order_s.get(row, bound_s)
        if candidate is None:
            self.rejected.append(row)
            return None
        return replace(candidate, idx=row, any_order_s=any_order_s)


def nearest_misses(rejected: list[int], frontier: Frontier, incumbent_s: float, wanted: int = 3) -> list[int]:
    """Of the layouts that would be faster and that memory excluded, those that lack the least: ``wanted`` of which no split
    fits, and as many that not even perfect balance lets in.
    """
    nearest = sorted(rejected, key=lambda row: (frontier.bound_bytes[row], row))[:wanted]
    return nearest + frontier.nearest_misses(incumbent_s, wanted)
