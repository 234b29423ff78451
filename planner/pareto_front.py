"""The Pareto front of time and memory: layouts that no other one beats in both.

Sets
    i            layouts of the space
Data
    T[i](c)      seconds of the fastest split of layout i that requires at most c bytes of a device; infinite where there is none
    R[i](c)      bytes that this split requires
    BUDGET, STEP what a device has for a plan; how much less memory the next point must need
Points
    cap[0] = BUDGET,  cap[k+1] = R[i_k](cap[k]) - STEP,  i_k = argmin_i T[i](cap[k])        until nothing fits
Certificate
    (C1) no layout that requires at most cap[k] is faster than bound[k]; bound[k] and the point's time differ by the search's gap

So whatever is faster than point k needs more than cap[k], and whatever is as fast as it needs at most STEP less. Method: the
epsilon-constraint method (Haimes, Lasdon and Wismer, IEEE Trans. SMC-1, 1971) with one queue for all caps. T[i] only grows as c
falls, so a layout keeps its place in the queue from one cap to the next: its lower bound, then the bound of its last split, which
stays the best one until it is above the cap.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..cost_models import memory
from ..cost_models.bounds import memory_bounds, time_bounds
from ..cost_models.layouts import FloatArray, IntArray
from ..cost_models.space_costs import SpaceCosts
from ..schema import ClusterSpec, ModelSpec, ParetoPoint, Workload
from ..schema.layout import check_fields
from .deadline import Deadline
from .expansion import Candidate, expand_fitting
from .finalists import ordered
from .frontier import BLOCK
from .offload_request import OffloadRequest, asked_for, require_schedulable
from .pool import bounding_costs
from .request import Request, is_runnable
from .search import REL_GAP, WINDOW, OnProgress
from .space import build_space

STEP_FRACTION = 0.01
"""STEP as a part of BUDGET: finer steps of memory decide nothing, the model's own error is larger."""


def pareto(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    *,
    fixed: Mapping[str, Any] | None = None,
    runnable: bool | None = None,
    step_fraction: float = STEP_FRACTION,
    time_limit_s: float = 60.0,
    on_progress: OnProgress | None = None,
    deadline: Deadline | None = None,
    offload: OffloadRequest | None = None,
) -> tuple[ParetoPoint, ...]:
    """Layouts that fit and that no other one beats in both step time and memory of the fullest device, fastest first.

    On a mixed cluster every rank counts as the weakest device: what one stage's device has left is of no use to another's.

    Args:
        model, cluster, workload, fixed, runnable, on_progress: as for `planner.plan`.
        step_fraction: how much less of the budget each further point must need.
        offload: what may lie on the host, as for `planner.plan`: layouts with an offload schedule are points too, in steps of
            memory that are larger (planner/offload_front.py).
        time_limit_s, deadline: stop then; the points found are those with the most memory. Empty where nothing fits.

    Raises:
        ConfigError: the input rules out every layout.
        SolverLimitError: time was over before every layout had its bounds.
    """
    deadline = deadline or Deadline(time_limit_s)
    is_ours = is_runnable(model, workload, runnable)
    kept, request = asked_for(check_fields(fixed or {}), offload)
    if request is not None:
        require_schedulable(workload, kept)
    space = build_space(model, workload, cluster, kept, runnable=is_ours, deadline=deadline)
    queue = Queue(replace(SpaceCosts.of(model, workload, cluster, space.batch), parts=()), deadline)
    budget = cluster.memory_budget_bytes
    step = max(1, int(step_fraction * budget))
    points: list[ParetoPoint] = []
    cap = budget
    while cap > 0 and not deadline.is_over and (found := queue.fastest(cap, on_progress)) is not None:
        if not points and "schedule" not in kept:
            found = queue.with_orders(found)
        points.append(_point(queue.costs, found, cap))
        cap = found.candidate.estimate.required_bytes - step
    front = tuple(
        point for k, point in enumerate(points) if all(point.step_time_s < p.step_time_s for p in points[k + 1 :])
    )
    if request is None:
        return front
    from .offload_front import Front, with_schedules  # its solver is not needed without

    nothing_below = 0 if deadline.is_over else cap
    asked = Request(model, cluster, workload, kept, is_ours, request)
    return with_schedules(Front(front, nothing_below), asked, deadline)


@dataclass(frozen=True)
class Fastest:
    """The fastest layout under a cap, and what no layout under it beats."""

    candidate: Candidate
    bound_s: float


class Queue:
    """Layouts by the time that they may have at best; with every smaller cap fewer of them, and slower ones."""

    def __init__(self, costs: SpaceCosts, deadline: Deadline) -> None:
        """Bound every layout that may fit."""
        self.costs, self._deadline = costs, deadline
        rows, bound_s, self._least_bytes = _bounds(costs, deadline)
        order = np.lexsort((rows, bound_s))
        self._order: IntArray = rows[order]
        self._bound_s: FloatArray = bound_s[order]
        self._next = 0
        self._again: list[tuple[float, int]] = []
        self._costed: dict[int, tuple[SpaceCosts, int]] = {}
        self._splits: dict[int, Candidate] = {}
        self._evaluated = 0

    def fastest(self, cap_bytes: int, on_progress: OnProgress | None = None) -> Fastest | None:
        """The fastest layout that requires at most ``cap_bytes``, less than at any call before; None where there is none."""
        best: Candidate | None = None
        best_s, bound_s = np.inf, np.inf
        again: list[tuple[float, int]] = []
        while (bound_s := self._first_s) < best_s * (1 - REL_GAP) and not self._deadline.is_over:
            row = self._pop()
            if self._least_bytes[row] > cap_bytes or (split := self._split(row, cap_bytes, bound_s)) is None:
                continue
            again.append((split.bound_s, row))
            if (split.estimate.step_time_s, row) < (best_s, best.idx if best else -1):
                best, best_s = split, split.estimate.step_time_s
            if on_progress:
                on_progress(self._evaluated, best_s, bound_s)
        bound_s = min([bound_s, best_s, *(bound for bound, _ in again)])
        for entry in again:
            heapq.heappush(self._again, entry)
        return None if best is None else Fastest(best, float(bound_s))

    def with_orders(self, found: Fastest) -> Fastest:
        """The same or a faster one with an order of its own; on the whole budget only, orders take longer than splits."""
        best_s = found.candidate.estimate.step_time_s
        faster = ordered(self.costs, self._splits.values(), best_s, self._deadline)
        if not faster:
            return found
        return Fastest(faster[-1], min(found.bound_s, faster[-1].estimate.step_time_s))

    @property
    def _first_s(self) -> float:
        """The least bound of all that wait: layouts not looked at yet, in order, and those that come again."""
        waiting = float(self._bound_s[self._next]) if self._next < len(self._order) else np.inf
        return min(waiting, self._again[0][0]) if self._again else waiting

    def _pop(self) -> int:
        """Take the layout with the least bound off the queue; a few that follow a new one are costed with it."""
        if self._again and self._again[0][0] <= self._first_s:
            return heapq.heappop(self._again)[1]
        row = int(self._order[self._next])
        if row not in self._costed:
            rows = self._order[self._next : self._next + WINDOW]
            some = self.costs.select(rows).compacted()
            work_out(some)
            self._costed |= {int(r): (some, place) for place, r in enumerate(rows)}
        self._next += 1
        return row

    def _split(self, row: int, cap_bytes: int, bound_s: float) -> Candidate | None:
        """The fastest split of a layout under a cap: the last one where it is still within it."""
        known = self._splits.get(row)
        if known is not None and known.estimate.required_bytes <= cap_bytes:
            return known
        costs, place = self._costed[row]
        split = expand_fitting(costs.with_budget(cap_bytes), place, bound_s=bound_s)
        self._evaluated += 1
        if split is None:
            return None
        self._splits[row] = replace(split, idx=row)
        return self._splits[row]


def work_out(costs: SpaceCosts) -> None:
    """Evaluate what does not depend on the budget once, for every cap (`SpaceCosts.with_budget` hands it on)."""
    for each in (costs, *(costs.by_option if costs.batch.is_mixed else ())):
        each.by_kind  # noqa: B018
        each.dp_exposed_by_kind  # noqa: B018


def _bounds(costs: SpaceCosts, deadline: Deadline) -> tuple[IntArray, FloatArray, FloatArray]:
    """Layouts that may fit, bounds on their time, and [N] of the space what each requires at least."""
    costs = replace(bounding_costs(costs), parts=())
    cluster, size = costs.cluster, len(costs.batch)
    least = np.full(size, np.inf)
    some_rows, some_s = [], []
    for start in range(0, size, BLOCK):
        deadline.require(f"bounding {size} layouts")
        rows = np.arange(start, min(start + BLOCK, size))
        block = costs.select(rows).compacted()
        least[rows] = memory.least_required_bytes(memory_bounds(block), costs.workload, cluster)
        fits = np.flatnonzero(least[rows] <= cluster.memory_budget_bytes)
        some_rows.append(rows[fits])
        some_s.append(time_bounds(block.select(fits)) if len(fits) else np.zeros(0))
    return np.concatenate(some_rows), np.concatenate(some_s), least


def _point(costs: SpaceCosts, found: Fastest, cap_bytes: int) -> ParetoPoint:
    estimate = found.candidate.estimate
    return ParetoPoint(
        layout=found.candidate.layout(costs.batch),
        step_time_s=estimate.step_time_s,
        bound_s=found.bound_s,
        required_bytes=estimate.required_bytes,
        peak_allocated_bytes=estimate.peak_allocated_bytes,
        cap_bytes=cap_bytes,
        tokens_per_s=estimate.tokens_per_s,
        layers_of_stage=tuple(int(n) for n in np.diff(found.candidate.boundaries)),
    )
