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
epsilon-constraint method (Haimes, Lasdon and Wismer, IEEE Trans. SMC-1, 1971) with one search for all caps
(solvers/branch_and_bound.py). T[i] only grows as c falls, so a layout stays open from one cap to the next: under its lower bound,
then the bound of its last split, which stays the best one until it is above the cap.

With offload schedules: from the entire budget down, in larger steps, schedules are searched that are faster than what is known to
need no more (tasks/offload.py, solved layer by layer for the entire budget only), until none fits any more. A point's bound then
holds for schedules and for layouts without: those of the least cap at or above its own that was looked at, as less memory never
makes anything faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar, Unpack

import numpy as np

from ..cost_models.stage import memory
from ..cost_models.stage.bounds import memory_bounds, uniform_time_bounds
from ..cost_models.stage.table import CostTable
from ..schema import (
    ClusterSpec,
    ConfigError,
    InfeasibleError,
    Layout,
    ModelSpec,
    ParetoPoint,
    SolverLimitError,
    TrainingEstimate,
    Workload,
)
from ..schema.units import FloatArray, IntArray
from ..solvers.branch_and_bound import Leaf, Node, Search, Step, Stop
from .expand import Candidate, expand_fitting
from .request import Deadline, PlanRequest, RequestOptions
from .search import REL_GAP, WINDOW
from .space import BLOCK, bounding_costs, build_space
from .tasks.offload import require_schedulable, search_offload
from .tasks.training import WORTH_MOVING, synthesise_orders

STEP_FRACTION = 0.01
"""STEP as a part of BUDGET: finer steps of memory decide nothing, the model's own error is larger."""

SCHEDULE_STEP_FRACTION = 0.05
"""How much less of the budget the next schedule must need: each takes a search of its own."""

_MIN_BOUND_S = 1e-12
"""Of a bound where time was over before there was any: it has to be positive."""


Item = TypeVar("Item")


def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Compare the values of two answers under two objectives: no worse in both, and better in one."""
    return one[0] <= other[0] and one[1] <= other[1] and one != other


def pareto_front(items: Iterable[Item], values: Callable[[Item], tuple[float, float]]) -> list[Item]:
    """Return the items that no other one beats, in their order."""
    listed = [(item, values(item)) for item in items]
    return [item for item, value in listed if not any(beats(other, value) for _, other in listed)]


def pareto(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    *,
    step_fraction: float = STEP_FRACTION,
    **options: Unpack[RequestOptions],
) -> tuple[ParetoPoint, ...]:
    """Return layouts that fit and that no other one beats in both step time and memory of the fullest device, fastest first.

    On a mixed cluster every rank counts as the weakest device: what one stage's device has left is of no use to another's. Where
    the time limit comes first the points are those with the most memory; there are none where nothing fits.

    Args:
        step_fraction: how much less of the budget each next point must need.
        options: as for `planner.plan`; with ``offload`` layouts with an offload schedule are points too.

    Raises:
        ConfigError: the input rules out every layout.
        SolverLimitError: time was over before every layout had its bounds.
    """
    request = PlanRequest.create(model, cluster, workload, **options)
    request.require_one_batch("a front of time and memory")
    if request.offload is not None:
        require_schedulable(request)
    layouts = _CappedLayouts(request)
    budget = cluster.memory_budget_bytes
    step, cap = max(1, int(step_fraction * budget)), budget
    points: list[ParetoPoint] = []
    while cap > 0 and not request.deadline.is_over and (fastest := layouts.fastest_under(cap)) is not None:
        if not points and "schedule" not in request.fixed:
            fastest = layouts.with_synthesised_order(fastest)
        split = fastest.candidate
        layers = tuple(int(n) for n in np.diff(split.boundaries))
        points.append(_point(split.layout(layouts.costs.layouts), split.estimate, fastest.bound_s, cap, layers))
        cap = split.estimate.required_bytes - step
    front = pareto_front(points, _time_and_memory)
    if request.offload is None:
        return tuple(front)
    return _with_schedules(request, front, nothing_below=0 if request.deadline.is_over else cap)


def _time_and_memory(point: ParetoPoint) -> tuple[float, float]:
    return point.step_time_s, point.required_bytes


class _Fastest(NamedTuple):
    """The fastest layout under a cap, and what no layout under it beats."""

    candidate: Candidate
    bound_s: float


class _CappedLayouts:
    """Layouts under a cap that falls, as a problem of solvers/branch_and_bound.py.

    One node (state None) stands for all layouts that were not looked at yet, in the order of their bounds; a layout that has a
    split under some cap is a node (its row) for every smaller one, under the bound of that split.
    """

    def __init__(self, request: PlanRequest) -> None:
        space = build_space(request)
        costs = CostTable.from_layouts(request.model, request.workload, request.cluster, space.batch)
        self.costs, self._request = replace(costs, device_pools=()), request
        rows, bound_s, self._min_bytes = _bounds(self.costs, request.deadline)
        order = np.lexsort((rows, bound_s))
        self._rows: IntArray = rows[order]
        self._bound_s: FloatArray = bound_s[order]
        self._next = 0
        self._cap_bytes = request.cluster.memory_budget_bytes
        self._costed: dict[int, tuple[CostTable, int]] = {}
        self._splits: dict[int, Candidate] = {}
        self._evaluated = 0
        self._tree = Search(self)

    def roots(self) -> Step[int | None, Candidate]:
        return Step(self._waiting())

    def _waiting(self) -> list[Node[int | None]]:
        return [Node(float(self._bound_s[self._next]), None, (1,))] if self._next < len(self._rows) else []

    def expand(self, node: Node[int | None], incumbent: float) -> Step[int | None, Candidate]:
        """Cut a layout into stages under the cap, if that is below what its last split requires."""
        row, waiting = node.state, list[Node[int | None]]()
        if row is None:
            row = int(self._rows[self._next])
            if row not in self._costed:  # a few that follow are costed with it
                rows = self._rows[self._next : self._next + WINDOW]
                window = self.costs.select(rows).compacted()
                self._costed |= {int(r): (window, idx) for idx, r in enumerate(rows)}
            self._next += 1
            waiting = self._waiting()
        if self._min_bytes[row] > self._cap_bytes or (split := self._split(row, node.bound)) is None:
            return Step(waiting)
        return Step(waiting, [Leaf(split.estimate.step_time_s, split, split.bound_s, row)])

    def _split(self, row: int, bound_s: float) -> Candidate | None:
        """Return the fastest split of a layout under the cap: the last one where it is still within it."""
        split = self._splits.get(row)
        if split is None or split.estimate.required_bytes > self._cap_bytes:
            costs, idx = self._costed[row]
            split = expand_fitting(costs.with_budget(self._cap_bytes), idx, bound_s=bound_s)
            self._evaluated += 1
            if split is not None:
                split = self._splits[row] = replace(split, idx=row)
        return split

    def fastest_under(self, cap_bytes: int) -> _Fastest | None:
        """Return the fastest layout that requires at most ``cap_bytes``, less than at any call before; None without any."""
        self._cap_bytes, report = cap_bytes, self._request.on_progress

        def on_progress(_: int, incumbent_s: float | None, bound_s: float) -> None:
            if report is not None:
                report(self._evaluated, incumbent_s, bound_s)

        answer = self._tree.run(Stop(rel_gap=REL_GAP, deadline=self._request.deadline), on_progress=on_progress)
        self._tree.push(Node(leaf.bound, leaf.candidate.idx, (0, leaf.candidate.idx)) for leaf in answer.leaves)
        return None if answer.best is None else _Fastest(answer.best.candidate, answer.bound)

    def with_synthesised_order(self, fastest: _Fastest) -> _Fastest:
        """Return the same or a faster one with an order of its own; for the entire budget only, orders take longer than splits."""
        best_s = fastest.candidate.estimate.step_time_s
        ordered = synthesise_orders(self.costs, self._splits.values(), best_s, self._request.deadline)
        if not ordered:
            return fastest
        return _Fastest(ordered[-1], min(fastest.bound_s, ordered[-1].estimate.step_time_s))


def _bounds(costs: CostTable, deadline: Deadline) -> tuple[IntArray, FloatArray, FloatArray]:
    """Return layouts that may fit, bounds on their time, and [N] of the space what each requires at least."""
    costs = replace(bounding_costs(costs), device_pools=())
    cluster, size = costs.cluster, len(costs.layouts)
    min_bytes = np.full(size, np.inf)
    rows_that_fit, bounds_s = [], []
    for start in range(0, size, BLOCK):
        deadline.require(f"bounding {size} layouts")
        rows = np.arange(start, min(start + BLOCK, size))
        block = costs.select(rows).compacted()
        min_bytes[rows] = memory.lower_bound_required_bytes(memory_bounds(block), costs.scenario)
        fits = np.flatnonzero(min_bytes[rows] <= cluster.memory_budget_bytes)
        rows_that_fit.append(rows[fits])
        bounds_s.append(uniform_time_bounds(block.select(fits)) if len(fits) else np.zeros(0))
    return np.concatenate(rows_that_fit), np.concatenate(bounds_s), min_bytes


def _with_schedules(
    request: PlanRequest, plain: Sequence[ParetoPoint], *, nothing_below: float
) -> tuple[ParetoPoint, ...]:
    """Return the front of layouts with and without an offload schedule.

    Args:
        plain: points without schedules; no layout without one fits into ``nothing_below`` bytes or fewer.
    """

    def plain_bound_s(cap_bytes: float) -> float:
        if cap_bytes <= nothing_below:
            return math.inf
        return max((p.bound_s for p in plain if p.cap_bytes >= cap_bytes), default=0.0)

    budget = request.cluster.memory_budget_bytes
    step, cap = max(1, int(SCHEDULE_STEP_FRACTION * budget)), budget
    points: list[ParetoPoint] = []
    bounds: list[tuple[float, float]] = []
    while cap > 0 and not request.deadline.is_over:
        known_s = min((p.step_time_s for p in plain if p.required_bytes <= cap), default=math.inf)
        capped = replace(request, cluster=request.cluster.with_budget(cap))
        try:
            result = search_offload(capped, worse_than_s=known_s, effort="exact" if cap == budget else "rounded")
        except (ConfigError, InfeasibleError, SolverLimitError):
            break
        bounds.append((cap, known_s if result is None else result.certificate.bound_s))
        if result is None:
            cap -= step
            continue
        estimate = result.estimate
        if estimate.step_time_s < known_s * (1 - WORTH_MOVING):
            bound_s = min(result.certificate.bound_s, plain_bound_s(cap), estimate.step_time_s)
            host_bytes, layers = result.schedule.host_bytes, (result.stage.num_layers,)
            points.append(_point(result.layout, estimate, bound_s, cap, layers, host_bytes=host_bytes))
        cap = min(cap, estimate.required_bytes) - step

    bounded = []
    for p in plain:
        schedule_bound_s = max((bound for cap, bound in bounds if cap >= p.cap_bytes), default=_MIN_BOUND_S)
        bounded.append(p.replace(bound_s=min(p.bound_s, max(schedule_bound_s, _MIN_BOUND_S))))
    return tuple(sorted(pareto_front([*bounded, *points], _time_and_memory), key=_time_and_memory))


def _point(
    layout: Layout,
    estimate: TrainingEstimate,
    bound_s: float,
    cap_bytes: int,
    layers: tuple[int, ...],
    *,
    host_bytes: int = 0,
) -> ParetoPoint:
    return ParetoPoint(
        layout=layout,
        step_time_s=estimate.step_time_s,
        bound_s=max(bound_s, _MIN_BOUND_S),
        required_bytes=estimate.required_bytes,
        peak_allocated_bytes=estimate.peak_allocated_bytes,
        cap_bytes=cap_bytes,
        tokens_per_s=estimate.tokens_per_s,
        layers_of_stage=layers,
        host_bytes=host_bytes,
    )
