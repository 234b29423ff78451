"""The front of time and memory with offload schedules: what they reach with less of each device than any layout without.

From the whole budget down, STEP_FRACTION of it at a time, schedules are searched that are faster than what is known to need no more
(planner/tasks/offload.py, without the last solution layer by layer except for the whole budget), until none fits any
more. A point's
bound holds for schedules and for layouts without: those of the least cap at or above its own that was looked at, as less memory
never makes anything faster.

The Pareto front of time and memory: layouts that no other one beats in both.

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
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..cost_models.stage import memory
from ..cost_models.stage.bounds import memory_bounds, uniform_time_bounds
from ..cost_models.stage.table import CostTable
from ..schema import ClusterSpec, ConfigError, InfeasibleError, ModelSpec, ParetoPoint, SolverLimitError, Workload
from ..schema.arrays import FloatArray, IntArray
from ..schema.layout import check_fields
from .deadline import Deadline
from .expand import Candidate, expand_fitting
from .plan import WORTH_MOVING
from .request import OffloadRequest, PlanRequest, is_runnable, require_schedulable, split_offload_request
from .search import BLOCK, REL_GAP, WINDOW, OnProgress, bounding_costs
from .space import build_space
from .tasks.offload import OffloadResult, search_offload
from .tasks.training import synthesise_orders

SCHEDULE_STEP_FRACTION = 0.05
"""How much less of the budget the next schedule must need: each takes a search of its own."""


@dataclass(frozen=True)
class PlainFront:
    """Points without schedules, fastest first; no layout without one fits into ``nothing_below`` bytes or fewer."""

    points: tuple[ParetoPoint, ...]
    nothing_below: int

    def fastest_s(self, cap_bytes: float) -> float:
        """Of the points that need no more."""
        return min((p.step_time_s for p in self.points if p.required_bytes <= cap_bytes), default=math.inf)

    def bound_s(self, cap_bytes: float) -> float:
        """No layout without a schedule that needs no more is faster."""
        if cap_bytes <= self.nothing_below:
            return math.inf
        return max((p.bound_s for p in self.points if p.cap_bytes >= cap_bytes), default=0.0)


def front_with_schedules(front: PlainFront, request: PlanRequest, deadline: Deadline) -> tuple[ParetoPoint, ...]:
    """The front of both, fastest first."""
    found, bounds = _schedules(front, request, deadline)

    def bound_of(cap_bytes: float) -> float:
        return max((bound for cap, bound in bounds if cap >= cap_bytes), default=0.0)

    plain = [p.replace(bound_s=min(p.bound_s, max(bound_of(p.cap_bytes), _MIN_BOUND_S))) for p in front.points]
    points = sorted([*plain, *found], key=lambda p: (p.step_time_s, p.required_bytes))
    least, kept = math.inf, []
    for point in points:
        if point.required_bytes < least:
            kept.append(point)
            least = point.required_bytes
    return tuple(kept)


_MIN_BOUND_S = 1e-12
"""Of a bound where time was over before there was any: it has to be positive."""


def _schedules(
    front: PlainFront, request: PlanRequest, deadline: Deadline
) -> tuple[list[ParetoPoint], list[tuple[float, float]]]:
    """A point of each cap that has a schedule faster than anything without, and the bound of schedules under each cap."""
    budget = request.cluster.memory_budget_bytes
    step, cap = max(1, int(SCHEDULE_STEP_FRACTION * budget)), budget
    points: list[ParetoPoint] = []
    bounds: list[tuple[float, float]] = []
    while cap > 0 and not deadline.is_over:
        known_s = front.fastest_s(cap)
        try:
            found = _fastest_schedule(request, cap, known_s, deadline, exactly=cap == budget)
        except (ConfigError, InfeasibleError, SolverLimitError):
            break
        bounds.append((cap, known_s if found is None else found.certificate.bound_s))
        if found is None:
            cap -= step
            continue
        if found.estimate.step_time_s < known_s * (1 - WORTH_MOVING):
            points.append(_point_of_schedule(found, cap, min(found.certificate.bound_s, front.bound_s(cap))))
        cap = min(cap, found.estimate.required_bytes) - step
    return points, bounds


def _fastest_schedule(
    request: PlanRequest, cap: int, known_s: float, deadline: Deadline, *, exactly: bool
) -> OffloadResult | None:
    assert request.offload is not None
    return search_offload(
        request.model,
        request.cluster.with_budget(cap),
        request.workload,
        request=request.offload,
        fixed=request.fixed,
        runnable=request.runnable,
        deadline=deadline,
        worse_than_s=known_s,
        exactly=exactly,
    )


def _point_of_schedule(found: OffloadResult, cap_bytes: int, bound_s: float) -> ParetoPoint:
    estimate = found.estimate
    return ParetoPoint(
        layout=found.layout,
        step_time_s=estimate.step_time_s,
        bound_s=max(min(bound_s, estimate.step_time_s), _MIN_BOUND_S),
        required_bytes=estimate.required_bytes,
        peak_allocated_bytes=estimate.peak_allocated_bytes,
        cap_bytes=cap_bytes,
        tokens_per_s=estimate.tokens_per_s,
        layers_of_stage=(found.stage.num_layers,),
        host_bytes=found.schedule.host_bytes,
    )


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
            memory that are larger (planner/pareto.py).
        time_limit_s, deadline: stop then; the points found are those with the most memory. Empty where nothing fits.

    Raises:
        ConfigError: the input rules out every layout.
        SolverLimitError: time was over before every layout had its bounds.
    """
    deadline = deadline or Deadline(time_limit_s)
    is_ours = is_runnable(model, workload, runnable)
    kept, request = split_offload_request(check_fields(fixed or {}), offload)
    if request is not None:
        require_schedulable(workload, kept)
    space = build_space(model, workload, cluster, kept, runnable=is_ours, deadline=deadline)
    queue = CapQueue(replace(CostTable.of(model, workload, cluster, space.batch), parts=()), deadline)
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

    nothing_below = 0 if deadline.is_over else cap
    asked = PlanRequest(model, cluster, workload, kept, is_ours, request)
    return front_with_schedules(PlainFront(front, nothing_below), asked, deadline)


@dataclass(frozen=True)
class FastestUnderCap:
    """The fastest layout under a cap, and what no layout under it beats."""

    candidate: Candidate
    bound_s: float


class CapQueue:
    """Layouts by the time that they may have at best; with every smaller cap fewer of them, and slower ones."""

    def __init__(self, costs: CostTable, deadline: Deadline) -> None:
        """Bound every layout that may fit."""
        self.costs, self._deadline = costs, deadline
        rows, bound_s, self._least_bytes = _bounds(costs, deadline)
        order = np.lexsort((rows, bound_s))
        self._order: IntArray = rows[order]
        self._bound_s: FloatArray = bound_s[order]
        self._next = 0
        self._again: list[tuple[float, int]] = []
        self._costed: dict[int, tuple[CostTable, int]] = {}
        self._splits: dict[int, Candidate] = {}
        self._evaluated = 0

    def fastest(self, cap_bytes: int, on_progress: OnProgress | None = None) -> FastestUnderCap | None:
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
        return None if best is None else FastestUnderCap(best, float(bound_s))

    def with_orders(self, found: FastestUnderCap) -> FastestUnderCap:
        """The same or a faster one with an order of its own; on the whole budget only, orders take longer than splits."""
        best_s = found.candidate.estimate.step_time_s
        faster = synthesise_orders(self.costs, self._splits.values(), best_s, self._deadline)
        if not faster:
            return found
        return FastestUnderCap(faster[-1], min(found.bound_s, faster[-1].estimate.step_time_s))

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


def work_out(costs: CostTable) -> None:
    """Evaluate what does not depend on the budget once, for every cap (`CostTable.with_budget` hands it on)."""
    for each in (costs, *(costs.by_option if costs.batch.is_mixed else ())):
        each.by_kind  # noqa: B018
        each.dp_exposed_by_kind  # noqa: B018


def _bounds(costs: CostTable, deadline: Deadline) -> tuple[IntArray, FloatArray, FloatArray]:
    """Layouts that may fit, bounds on their time, and [N] of the space what each requires at least."""
    costs = replace(bounding_costs(costs), parts=())
    cluster, size = costs.cluster, len(costs.batch)
    least = np.full(size, np.inf)
    some_rows, some_s = [], []
    for start in range(0, size, BLOCK):
        deadline.require(f"bounding {size} layouts")
        rows = np.arange(start, min(start + BLOCK, size))
        block = costs.select(rows).compacted()
        least[rows] = memory.lower_bound_required_bytes(memory_bounds(block), costs.workload, cluster)
        fits = np.flatnonzero(least[rows] <= cluster.memory_budget_bytes)
        some_rows.append(rows[fits])
        some_s.append(uniform_time_bounds(block.select(fits)) if len(fits) else np.zeros(0))
    return np.concatenate(some_rows), np.concatenate(some_s), least


def _point(costs: CostTable, found: FastestUnderCap, cap_bytes: int) -> ParetoPoint:
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
