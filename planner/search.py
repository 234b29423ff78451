"""Search: expand layouts in the order of their lower bounds until no bound is below the incumbent.

    Pool      layouts whose turn may have come; groups of degrees wait outside, each under one bound for all its layouts
    Frontier  the pool in the order of its bounds, each worked out only when its turn may have come (both: space.py)
    Scouts    the few that a rough estimate promises most of: they are expanded first, so that there is an answer early
    search    the problem of solvers/branch_and_bound.py over one frontier

A group's bound takes the lowest of every recompute option and no more than what holds under any order of passes,

    T >= m max(slowest stage, work / pp)

so groups whose bound is never reached are never made. Of a mixed cluster, and where layouts are given, all are in the pool from the
start. A quick bound on time, from the work within layers only, orders the pool. Blocks of layouts in this order get their bound on
memory, and those that may fit the full bound on time. A layout is given out when its full bound is no larger than the quick bound
of all that wait, so the order is that of the full bounds over everything.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ..cost_models.stage import bounds
from ..cost_models.stage.capacity import stages_may_fit
from ..cost_models.stage.table import CostTable
from ..schema import Certificate
from ..schema.schedules import OVER_A_V
from ..schema.units import FloatArray, IntArray
from ..solvers.branch_and_bound import Leaf, Node, Search, Step, Stop
from .expand import Candidate, bound_of_stages_s, expand_fitting, expand_row, expand_with_new_order, improve_order
from .request import Deadline, PlanRequest
from .space import BLOCK, Frontier, Pool, Space, build_narrow_space

REL_GAP = 1e-4
"""A bound within this of the incumbent is not worth expanding; far below the cost model's own error."""

WINDOW = 96
"""Layouts costed together before they are expanded one by one."""

MAX_RUNNER_UP_TRIES = 100
"""Combinations of degrees that are expanded for comparison at most: of those most promising few may fit."""

NUM_SCOUTED, SCOUT_BLOCKS, MAX_CHECKED, MAX_CHOSEN, MAX_SCOUTS = 1 << 15, 6, 96, 24, 8
"""Layouts among which scouts are looked for, if there are so many; at most so many blocks of them are bounded, so many checked for
whether stages may fit, scouts chosen, and scouts expanded."""

RUNNER_UP_TRIES_A_BLOCK = 5
"""Expansions that bounding a further block of layouts counts as."""

NUM_NEAREST_MISSES = 3
"""Layouts that are named because they lack the least memory, of each of two kinds."""

MAX_SHORTENED = 1.06
"""An order of its own is made for a scout that takes at most so many times the incumbent: named ones got 2 to 8 % shorter by it."""

_OVER_A_V = frozenset(schedule.idx for schedule in OVER_A_V)

LayoutStep = Step[None, Candidate]


class Scouts:
    """Layouts to expand first, for an incumbent: by a rough estimate the fastest of each schedule and (tp, cp, pp).

    How much longer than estimated a step takes is learned for each schedule and number of chunks.
    """

    def __init__(self, pool: Pool, frontier: Frontier) -> None:
        """Choose among the layouts of the pool those that seem to fit."""
        costs, b = pool.bounding, pool.bounding.layouts
        seconds, in_flight = bounds.rough_pipeline(costs)
        order, more_s = np.argsort(seconds, kind="stable"), np.maximum(seconds - frontier.quick_s, 0.0)
        rows, bound_s = np.zeros(0, dtype=np.int64), np.zeros(0)
        for first in range(0, min(len(order), SCOUT_BLOCKS * BLOCK), BLOCK):
            block = order[first : first + BLOCK]
            if seconds[block[0]] >= np.min(bound_s + more_s[rows], initial=np.inf):
                break
            seem_to_fit = (
                bounds.rough_bytes(costs.select(block).compacted(), in_flight[block]) <= frontier.budget_bytes[block]
            )
            fits, block_s = frontier.bounds(block[seem_to_fit])
            rows, bound_s = np.concatenate([rows, block[seem_to_fit][fits]]), np.concatenate([bound_s, block_s[fits]])
        fastest = np.argsort(bound_s + more_s[rows], kind="stable")[:MAX_CHECKED]
        fastest = fastest[stages_may_fit(pool.costs.select(rows[fastest]).compacted())]
        degrees = np.stack([b.schedule, b.tp, b.cp, b.pp])[:, rows[fastest]]
        chosen = fastest[np.sort(np.unique(degrees, axis=1, return_index=True)[1])[:MAX_CHOSEN]]
        self._rows, self._bound_s = rows[chosen], bound_s[chosen]
        self._estimate_s = self._bound_s + more_s[self._rows]
        self._kind = 64 * b.schedule[self._rows] + b.num_model_chunks[self._rows]
        self._ratio, self._remaining = np.ones(len(self._rows)), MAX_SCOUTS

    @property
    def promised_s(self) -> float:
        """Seconds of the one to expand next, as estimated; infinite where none is left."""
        return float(np.min(self._estimate_s * self._ratio, initial=np.inf)) if self._remaining else np.inf

    def next(self, incumbent_s: float) -> tuple[int, float] | None:
        """Return the row to expand and its bound; None once none promises to be faster than the incumbent."""
        if self.promised_s >= incumbent_s:
            return None
        self._remaining -= 1
        first = int(np.argmin(self._estimate_s * self._ratio))
        return int(self._rows[first]), float(self._bound_s[first])

    def learn(self, row: int, step_time_s: float) -> None:
        """Take note of how long the step of a layout is; infinite where it does not fit."""
        idx = int(np.flatnonzero(self._rows == row)[0])
        if np.isfinite(step_time_s):
            self._ratio[self._kind == self._kind[idx]] = step_time_s / self._estimate_s[idx]
        self._estimate_s[idx] = np.inf


class LayoutProblem:
    """The problem of `search`: one node for all layouts that wait; one layout, or one block of bounds, is taken from it at a time.

    Attributes:
        expanded: rows of the pool that were cut into stages; rejected: those of which no split fits.
        any_order_s: of each layout that came first, its bound under any order of passes.
        scouted: scouts that have not come first yet, None where no split fits.
        tried_orders: a scout for which an order was tried, with that, None where none may be faster.
        new_orders: those that were the fastest when they were made.
    """

    def __init__(
        self,
        request: PlanRequest,
        space: Space,
        *,
        worse_than_s: float,
        makes_order: bool = False,
        only_scouts: bool = False,
    ) -> None:
        """Cost the layouts, or their groups, and choose what to expand first."""
        self.num_layouts, self._worse_than_s = len(space), worse_than_s
        self._makes_order, self._only_scouts = makes_order, only_scouts
        self.pool = Pool(request, space)
        request.deadline.require(f"bounding {len(space)} layouts")
        has_scouts = np.isinf(worse_than_s)
        while has_scouts and len(self.pool) < NUM_SCOUTED and np.isfinite(self.pool.bound_s):
            self.pool.grow()
        self.frontier = Frontier(self.pool)
        self._scouts = Scouts(self.pool, self.frontier) if has_scouts else None
        self.scouted: dict[int, Candidate | None] = {}
        self.tried_orders: dict[int, Candidate | None] = {}
        self.new_orders: list[Candidate] = []
        self._row_to_improve: int | None = None
        self.expanded: list[int] = []
        self.rejected: list[int] = []
        self.any_order_s: dict[int, float] = {}
        self._feasible_degrees: set[tuple[int, ...]] = set()
        self._rejected_degrees: set[tuple[int, ...]] = set()
        self._window, self._idx_in_window = self.pool.costs, dict[int, int]()
        self._may_fit = np.zeros(0, dtype=bool)

    def add_known(self, known: SearchResult) -> None:
        """Take the candidates of another search as scouts, and what it tried an order for, as far as they are in the pool."""
        columns, others = self.pool.costs.layouts.columns, known.costs.layouts.columns

        def rows_alike(idx: int) -> list[int]:
            same = np.all([column == others[name][idx] for name, column in columns.items()], axis=0)
            return [int(row) for row in np.flatnonzero(same)[:1]]

        ordered = known.problem.with_new_order
        scouts = [candidate for candidate in known.feasible if candidate is not ordered]
        self.scouted |= {row: replace(c, idx=row) for c in scouts for row in rows_alike(c.idx)}
        for idx, candidate in known.problem.tried_orders.items():
            for row in rows_alike(idx):
                self.tried_orders[row] = candidate and replace(candidate, idx=row)
        if ordered is not None:
            self.new_orders = [replace(ordered, idx=row) for row in rows_alike(ordered.idx)]

    def roots(self) -> LayoutStep:
        """Return the frontier, and what is known beforehand."""
        return self._rest([leaf for candidate in self.scouted.values() for leaf in _leaves(candidate)] + self._ordered)

    @property
    def with_new_order(self) -> Candidate | None:
        """The layout that is the fastest with an order of its own."""
        return self.new_orders[-1] if self.new_orders else None

    @property
    def _ordered(self) -> list[Leaf[Candidate]]:
        """The layout with an order of its own; the bound of that is about any order, that of the search about the named ones."""
        ordered = self.with_new_order
        return [] if ordered is None else [Leaf(ordered.step_time_s, ordered, key=ordered.idx)]

    def _rest(self, leaves: Sequence[Leaf[Candidate]] = (), *, evaluated: int = 0, effort: float = 0.0) -> LayoutStep:
        return Step([Node(self.frontier.bound_s, None)], leaves, evaluated, effort)

    def expand(self, node: Node[None], incumbent: float) -> LayoutStep:
        """Bound a block, or raise the bound of the first layout by a replay, or cut it into stages."""
        if self._scouts is not None:
            return self._expand_scout(self._scouts, incumbent)
        if not self.frontier.is_ready:
            self.frontier.bound_block()
            return self._rest()
        if (row := int(self.frontier.rows[0])) in self.scouted:
            self.any_order_s[row] = self.frontier.bound_s
            return self._expand_first(node, incumbent)
        window, idx = self._costed(row)
        is_raised = self._may_fit[idx] and self._raise_first(window, idx, min(incumbent, self._worse_than_s))
        return self._rest() if is_raised else self._expand_first(node, incumbent)

    def expand_runner_up(self, node: Node[None], incumbent: float) -> LayoutStep:
        """Bound a block, or cut the first layout into stages unless its combination of degrees was expanded already."""
        if not self.frontier.is_ready:
            self.frontier.bound_block()
            return self._rest(effort=RUNNER_UP_TRIES_A_BLOCK)
        degrees, memory_degrees = self._degrees(int(self.frontier.rows[0]))
        if degrees in self._feasible_degrees or memory_degrees in self._rejected_degrees:
            self.frontier.pop()
            return self._rest()
        return self._expand_first(node, 0.0)

    def _degrees(self, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the degrees of a layout, also with sequence parallelism: without it they may not fit, and are bounded first."""
        layouts = self.pool.costs.layouts
        degrees = layouts.degrees(row)
        return degrees, (*degrees, int(layouts.sequence_parallel[row]))

    def _raise_first(self, window: CostTable, idx: int, below_s: float) -> bool:
        """Raise the bound of the first layout, ``idx`` in ``window``, once for each by its stages, a replay up to ``below_s``."""
        row = int(self.frontier.rows[0])
        if row in self.any_order_s:
            return False
        self.any_order_s[row] = self.frontier.bound_s
        if np.isinf(below_s) or self.pool.costs.cluster.bandwidth_matrix is not None:  # ranks may lie on better nodes
            return False
        bound_s = bound_of_stages_s(window, idx, below_s=below_s)
        self._may_fit[idx] = np.isfinite(bound_s)
        return bool(self._may_fit[idx]) and self.frontier.raise_first(bound_s)

    def _expand_scout(self, scouts: Scouts, incumbent: float) -> LayoutStep:
        """Cut the most promising layout into stages; it stays on the frontier, where it is not cut again (`scouted`).

        Or make an order of passes for one of them, once none promises less than that one's bound under any order.
        """
        if self._makes_order and not self.tried_orders and (scout := self._over_a_v(incumbent)) is not None:
            if scout.any_order_s < scouts.promised_s:
                return self._make_order(scout, incumbent)
        elif self._row_to_improve is not None:
            return self._improve_order(self._row_to_improve, incumbent)
        following = scouts.next(incumbent)
        if following is None:
            self._scouts = None
            return Step() if self._only_scouts else self._rest()
        row, bound_s = following
        if (known := self.scouted.get(row)) is not None:
            scouts.learn(row, known.step_time_s)
            return self._rest()
        candidate = self._cut_scout(scouts, row, bound_s, incumbent)
        self.scouted[row] = candidate
        return self._rest(_leaves(candidate), evaluated=1, effort=1)

    def _cut_scout(self, scouts: Scouts, row: int, bound_s: float, below_s: float) -> Candidate | None:
        only = self.pool.costs.select(np.array([row])).compacted()
        candidate = expand_fitting(only, 0, bound_s=bound_s, below_s=below_s)
        scouts.learn(row, np.inf if candidate is None else candidate.step_time_s)
        return candidate and replace(candidate, idx=row, any_order_s=bound_s)

    def _over_a_v(self, incumbent: float) -> Candidate | None:
        """Return the fastest scout over a V, if an order of its own may make it the fastest of all."""
        schedule = self.pool.costs.layouts.schedule
        over_a_v = [c for c in self.scouted.values() if c is not None and int(schedule[c.idx]) in _OVER_A_V]
        scout = min(over_a_v, key=lambda c: c.step_time_s, default=None)
        if scout is None or scout.any_order_s >= incumbent or scout.step_time_s > MAX_SHORTENED * incumbent:
            return None
        return scout

    def _make_order(self, scout: Candidate, incumbent: float) -> LayoutStep:
        """Make the first order of passes that comes to hand; what is left of the scouts waits for a better one."""
        candidate = expand_with_new_order(self.pool.costs, scout.idx, bound_s=scout.any_order_s, below_s=incumbent)
        self._row_to_improve = None if candidate is None else scout.idx
        return self._with_order(scout.idx, candidate, incumbent)

    def _improve_order(self, row: int, incumbent: float) -> LayoutStep:
        first, self._row_to_improve = self.tried_orders[row], None
        assert first is not None
        return self._with_order(row, improve_order(self.pool.costs, first, below_s=incumbent), incumbent)

    def _with_order(self, row: int, candidate: Candidate | None, incumbent: float) -> LayoutStep:
        self.tried_orders[row] = candidate
        is_faster = candidate is not None and candidate.step_time_s < incumbent * (1 - REL_GAP)
        if candidate is not None and is_faster:
            self.new_orders.append(candidate)
        return self._rest(self._ordered if is_faster else [], effort=1)  # its layout is counted already

    def take_scout(self, row: int) -> None:
        """Count a scout as met in the order of the bounds."""
        if self.scouted.pop(row, None) is not None:
            self.expanded.append(row)
            self._feasible_degrees.add(self._degrees(row)[0])

    def _expand_first(self, node: Node[None], below_s: float) -> LayoutStep:
        row, evaluated, candidate = int(self.frontier.rows[0]), 0, None
        if row not in self.scouted:
            window, idx = self._costed(row)
            if self._may_fit[idx]:
                candidate, evaluated = expand_fitting(window, idx, bound_s=node.bound, below_s=below_s), 1
            any_order_s = self.any_order_s.get(row, node.bound)
            candidate = candidate and replace(candidate, idx=row, any_order_s=any_order_s)
        else:
            candidate = self.scouted.pop(row)
        self.expanded.append(self.frontier.pop())
        degrees, memory_degrees = self._degrees(row)
        if candidate is None:
            self.rejected.append(row)
            self._rejected_degrees.add(memory_degrees)
        else:
            self._feasible_degrees.add(degrees)
        return self._rest(_leaves(candidate), evaluated=evaluated, effort=1)

    def _costed(self, row: int) -> tuple[CostTable, int]:
        """Return costs that hold the first layout of the frontier, and its index there; the next few are costed with it."""
        if row not in self._idx_in_window:
            rows = self.frontier.rows[:WINDOW]
            self._window = self.pool.costs.select(rows).compacted()
            self._idx_in_window = {int(row): idx for idx, row in enumerate(rows)}
            self._may_fit = stages_may_fit(self._window)
        return self._window, self._idx_in_window[row]

    def rows_within(self, limit_s: float, *, max_growths: int) -> tuple[IntArray, FloatArray]:
        """Return rows that were not expanded and whose quick bounds are within a limit, and these."""
        rows, quick_s = self.frontier.quick_within(limit_s, max_growths=max_growths)
        waiting = ~np.isin(rows, self.expanded)
        return rows[waiting], quick_s[waiting]

    def nearest_misses(self, incumbent_s: float) -> list[int]:
        """Return the faster layouts that lack the least memory: those that no split fits, and those that their bound excludes."""
        by_bytes = sorted(self.rejected, key=lambda row: (self.frontier.bound_bytes[row], row))
        return by_bytes[:NUM_NEAREST_MISSES] + self.frontier.nearest_misses(incumbent_s, NUM_NEAREST_MISSES)


def _leaves(candidate: Candidate | None) -> list[Leaf[Candidate]]:
    return [] if candidate is None else [Leaf(candidate.step_time_s, candidate, candidate.bound_s, candidate.idx)]


@dataclass
class SearchResult:
    """Expanded layouts that fit, best first, and those that do not; no layout of the space is faster than ``bound_s``.

    Attributes:
        problem: the layouts that had to be looked at one by one; indices are into its costs.
        feasible: every layout that was expanded and fits.
        bound_s: under the named schedules.
        nearest_misses: faster layouts that lack the least memory, some of which were never expanded.
    """

    problem: LayoutProblem
    tree: Search[None, Candidate] = field(repr=False)
    feasible: list[Candidate] = field(default_factory=list)
    bound_s: float = 0.0
    search_s: float = 0.0
    stopped_early: bool = False
    evaluated: int = 0
    nearest_misses: list[int] = field(default_factory=list)

    @property
    def costs(self) -> CostTable:
        """Costs of the layouts of the pool."""
        return self.problem.pool.costs

    @cached_property
    def too_large(self) -> list[Candidate]:
        """The nearest misses with the stages that they would have, expanded on demand."""
        return [expand_row(self.costs, row) for row in self.nearest_misses]

    def add_runner_ups(self, count: int, deadline: Deadline) -> None:
        """Expand the most promising layouts of other degrees, for comparison, until ``count`` more of them fit."""
        if self.stopped_early or not self.feasible:
            return
        missing = count + 1 - len({self.costs.layouts.degrees(c.idx) for c in self.feasible})
        stop = Stop(rel_gap=None, max_leaves=missing, max_effort=MAX_RUNNER_UP_TRIES, deadline=deadline)
        answer = self.tree.run(stop, expand=self.problem.expand_runner_up)
        self.feasible += [leaf.candidate for leaf in answer.leaves]
        self.evaluated += answer.evaluated
        self.feasible.sort(key=lambda c: (c.estimate.step_time_s, c.idx))

    def certificate(self) -> Certificate:
        """Return how far from the best of the space the fastest layout may be."""
        num_layouts = self.problem.num_layouts
        return Certificate.proved(
            objective=self.feasible[0].estimate.step_time_s,
            bound=self.bound_s,
            finished=not self.stopped_early,
            evaluated=self.evaluated,
            pruned=num_layouts - self.evaluated,
            pruned_in_groups=num_layouts - len(self.problem.pool),
            search_s=self.search_s,
        )


def search(
    request: PlanRequest,
    space: Space,
    *,
    runner_ups: int = 0,
    worse_than_s: float = np.inf,
    max_expanded: float = np.inf,
    makes_order: bool = False,
    only_scouts: bool = False,
    known: SearchResult | None = None,
) -> SearchResult:
    """Expand layouts best first, ``max_expanded`` at most, then ``runner_ups`` more combinations of degrees for comparison.

    Under named schedules only, or if it ``makes_order`` also one layout early with an order of passes of its own. What a ``known``
    search of a part of the space found is known from the start. With ``only_scouts`` it ends after these.

    The result has no feasible layout when nothing fits, when none is faster than ``worse_than_s`` (slower ones are of no use), or
    when the deadline came first.

    Raises:
        SolverLimitError: time was over before every layout had its first bound.
    """
    start, deadline = time.perf_counter(), request.deadline
    problem = LayoutProblem(request, space, worse_than_s=worse_than_s, makes_order=makes_order, only_scouts=only_scouts)
    if known is not None:
        problem.add_known(known)
    tree = Search(problem)
    stop = Stop(rel_gap=REL_GAP, below=worse_than_s * (1 - REL_GAP), deadline=deadline, max_effort=max_expanded)
    answer = tree.run(stop, on_progress=request.on_progress)
    best, with_new_order = None if answer.best is None else answer.best.candidate, problem.with_new_order
    if best is not None and best is not with_new_order:
        problem.take_scout(best.idx)
    made = {id(candidate) for candidate in problem.new_orders}
    candidates = [leaf.candidate for leaf in answer.leaves if id(leaf.candidate) not in made]
    if only_scouts:
        problem.scouted.clear()
    met = {candidate.idx: candidate for candidate in candidates if candidate.idx not in problem.scouted}
    # A split of a layout that was expanded may be faster than the best one known, down to that layout's own bound.
    result = SearchResult(
        problem,
        tree,
        [*met.values(), *([with_new_order] if with_new_order is not None and best is with_new_order else [])],
        bound_s=answer.bound,
        stopped_early=answer.ended == "deadline",
        evaluated=answer.evaluated,
    )
    if answer.objective <= worse_than_s:
        result.add_runner_ups(runner_ups, deadline)
    if not deadline.is_over:
        result.nearest_misses = problem.nearest_misses(answer.objective)
    result.feasible.sort(key=lambda c: (c.estimate.step_time_s, c.idx))
    result.search_s = time.perf_counter() - start
    return result


def early_answer(request: PlanRequest) -> SearchResult | None:
    """Return the scouts of a small part of a large space (`build_narrow_space`): all that a search has that is stopped at once.

    Nothing bounds what is outside of that part.
    """
    narrow = build_narrow_space(request)
    if narrow is None:
        return None
    result = search(request, narrow, makes_order="schedule" not in request.fixed, only_scouts=True)
    result.stopped_early, result.bound_s = True, 0.0
    return result
