"""Best-first search: expand layouts in the order of their lower bounds until no bound is below the incumbent.

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

from ..cost_models.space_costs import SpaceCosts
from ..schema import ClusterSpec, ModelSpec, SearchCertificate, Workload
from .deadline import Deadline
from .expansion import Candidate, expand_fitting, expand_row
from .frontier import Frontier
from .pool import Pool
from .replay_bounds import replayed_bound
from .space import Space

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
    def costs(self) -> SpaceCosts:
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

    def certificate(self) -> SearchCertificate:
        """How far from the best of the space the fastest layout that was found may be."""
        objective = self.fitting[0].estimate.step_time_s
        return SearchCertificate(
            status="feasible" if self.stopped_early else "optimal",
            objective_s=objective,
            bound_s=self.bound_s,
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
    window = Window(pool, frontier)
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
    result: SearchResult, frontier: Frontier, window: Window, wanted: int, deadline: Deadline
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


class Window:
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

    def _costed(self, row: int) -> tuple[SpaceCosts, int]:
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
