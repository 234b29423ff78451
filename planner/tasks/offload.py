"""Layouts of one pipeline stage with mixed recompute, as problems of solvers/offload/schedule.py: their bounds and their schedules.

Search with offload: layouts of one pipeline stage, what each block does, and what lies on the host, as one problem.

Every layout has two bounds: its work alone (all layouts at once), and the count form of its schedule (milliseconds). The layout
with the least bound is looked at next, and its schedule is the best rounding of the count form. When the least bound is within SAME
of the incumbent the search is over; the incumbent's schedule is then solved layer by layer (solvers/offload/schedule.py).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...cost_models.stage.recompute import RecomputeCosts
from ...cost_models.stage.table import CostTable
from ...schema import (
    Certificate,
    ClusterSpec,
    ConfigError,
    Estimate,
    InfeasibleError,
    Layout,
    MeshwrightError,
    ModelSpec,
    OffloadSchedule,
    Stage,
    Workload,
)
from ...schema.arrays import FloatArray
from ...schema.layout import format_assignments
from ...schema.units import format_bytes
from ...solvers.offload import bound, schedule
from ...solvers.offload.instance import OffloadInstance
from ..deadline import Deadline, no_incumbent
from ..request import OffloadRequest, require_schedulable
from ..space import build_space
from .offload_problem import build_estimate, build_instances, build_schedule, build_stage, constant_s

UNIFORM = ("none", "selective", "full")


@dataclass(frozen=True)
class SolvedLayout:
    """A layout (row of the space) with one of its problems, its schedule and what that costs."""

    row: int
    instance: OffloadInstance
    solution: schedule.OffloadSolution
    estimate: Estimate


class OffloadSpace:
    """Layouts with mixed recompute of one stage, and the problems of each that was looked at, as ``change`` leaves them."""

    def __init__(
        self,
        model: ModelSpec,
        cluster: ClusterSpec,
        workload: Workload,
        fixed: Mapping[str, Any],
        *,
        request: OffloadRequest,
        runnable: bool,
        deadline: Deadline,
        change: Callable[[OffloadInstance], OffloadInstance] = lambda problem: problem,
    ) -> None:
        self.recompute = fixed.get("recompute") if fixed.get("recompute") in UNIFORM else None
        kept = {name: value for name, value in fixed.items() if name not in ("recompute", "offload", "pp")}
        wanted = kept | {"recompute": "mixed", "pp": 1}
        batch = build_space(model, workload, cluster, wanted, runnable=runnable, deadline=deadline).batch
        costs = CostTable.of(model, workload, cluster, batch)
        self.options, self.request, self._change = RecomputeCosts.of(costs), request, change
        self._problems: dict[int, list[OffloadInstance]] = {}

    def work_s(self) -> FloatArray:
        """Bound on the step [N]: passes without recompute, what communication over data adds, no update."""
        least, b = self.options.least, self.options.least.batch
        exposed = sum(
            (n * seconds for n, seconds in zip(least.counts, self.options.least_exposed_by_kind, strict=True)),
            start=np.zeros(len(b)),
        )
        return np.asarray(b.num_microbatches * least.total("busy_s") + exposed + least.dp_edges_s)

    def problems(self, row: int) -> list[OffloadInstance]:
        """Of one layout; worked out once."""
        if row not in self._problems:
            problems = build_instances(self.options, row, self.request, self.recompute)
            self._problems[row] = [self._change(problem) for problem in problems]
        return self._problems[row]

    def count_s(self, row: int) -> float:
        """Bound of the count form."""
        least = min(bound.lower_bound_s(problem) for problem in self.problems(row))
        return least + constant_s(self.options, row)

    def least(self, deadline: Deadline, *, below_s: float = np.inf) -> tuple[int, float] | None:
        """The layout with the least bound of the count form, and that bound; None if none is below ``below_s`` or time is over."""
        best: tuple[int, float] | None = None
        work = self.work_s()
        for row in map(int, np.argsort(work, kind="stable")):
            if work[row] >= below_s or deadline.is_over:
                break
            bound_s = max(float(work[row]), self.count_s(row))
            if bound_s < below_s:
                best, below_s = (row, bound_s), bound_s
        return None if deadline.is_over else best

    def solved(self, row: int, *, quickly: bool) -> SolvedLayout | None:
        """The fastest schedule of a layout, from the count form alone or from the linear program layer by layer."""
        best: SolvedLayout | None = None
        for problem in self.problems(row):
            solution = schedule.solve_approximately(problem) if quickly else schedule.solve(problem)
            if solution.choice is None or solution.simulated is None:
                continue
            estimate = build_estimate(self.options, row, problem, solution.choice, solution.simulated)
            if best is None or estimate.step_time_s < best.estimate.step_time_s:
                best = SolvedLayout(row, problem, solution, estimate)
        return best

    def layout(self, found: SolvedLayout) -> tuple[Layout, Stage]:
        """A layout as its schedule makes it, and its stage."""
        choice = found.solution.choice
        assert choice is not None
        stage = build_stage(choice, self.options.least.model)
        recompute = "mixed" if stage.layer_recompute else stage.recompute
        return self.options.least.batch.layout(found.row).replace(offload="scheduled", recompute=recompute), stage


SAME = 0.02
"""Bounds within this of the incumbent are not solved: far below the cost model's own error, and the certificate tells the gap."""


@dataclass(frozen=True)
class OffloadResult:
    """What a search found: a layout with the stage, the schedule and the estimate that belong together."""

    layout: Layout
    stage: Stage
    schedule: OffloadSchedule
    estimate: Estimate
    certificate: Certificate
    runner_ups: tuple[tuple[Layout, Estimate], ...] = ()


def search_offload(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    *,
    request: OffloadRequest,
    fixed: Mapping[str, Any],
    runnable: bool,
    deadline: Deadline,
    worse_than_s: float = np.inf,
    first: bool = False,
    runner_ups: int = 0,
    exactly: bool = True,
) -> OffloadResult | None:
    """The fastest layout with an offload schedule, or the ``first`` one found; None if none is faster than ``worse_than_s``.

    Of other degrees or micro-batches ``runner_ups`` more layouts get a schedule, for comparison. Unless ``exactly``, the answer is
    not solved layer by layer: its gap is larger, and it takes a fraction of the time.

    Raises:
        ConfigError: no layout of one stage is left, or the cluster has nodes of several kinds.
        InfeasibleError: none fits, on the devices or on the host; the message says how much is missing.
        SolverLimitError: the time limit came before any schedule.
    """
    require_schedulable(workload, fixed)
    if cluster.is_mixed:
        raise ConfigError("offload schedules are planned for nodes of one kind; this cluster is mixed")
    begun = time.perf_counter()
    space = OffloadSpace(model, cluster, workload, fixed, request=request, runnable=runnable, deadline=deadline)
    queue = _Queue(space)
    best: SolvedLayout | None = None
    bounds: dict[int, float] = {}
    solved: list[SolvedLayout] = []
    tried = 0
    while queue.bound_s < min(worse_than_s, _seconds(best) * (1 - SAME)) and not deadline.is_over:
        if (entry := queue.pop()) is None:
            continue
        bound, row = entry
        tried += 1
        found = space.solved(row, quickly=True)
        if found is not None:
            solved.append(found)
            bounds[row] = max(bound, found.solution.bound_s + constant_s(space.options, row))
            if found.estimate.step_time_s < _seconds(best):
                best = found
                if first:
                    break
    left, stopped = queue.bound_s, deadline.is_over
    if best is None and (left < np.inf or worse_than_s < np.inf):
        if deadline.is_over:
            raise no_incumbent(deadline, f"for {model.name} with offload", f"{tried} schedules solved")
        return None
    if best is None:
        raise _explain(space, model, cluster, fixed, deadline)
    others = [] if first else _runner_ups(space, queue, best, solved, runner_ups, deadline)
    tried += len({found.row for found in others} - bounds.keys())
    exact = space.solved(best.row, quickly=False) if exactly and not first else None
    if exact is not None:
        bounds[best.row] = exact.solution.bound_s + constant_s(space.options, best.row)
        if exact.estimate.step_time_s < _seconds(best):
            best = exact
        else:  # the schedule of the search, with what the linear program says of the same problem
            told = replace(best.solution, bound_s=exact.solution.bound_s, worth=exact.solution.worth)
            best = replace(best, solution=told)
    bound = min([left, _seconds(best), *bounds.values()])
    answer = _answer(space, best, bound, tried, begun, stopped=stopped)
    named = tuple((space.layout(found)[0], found.estimate) for found in others)
    return replace(answer, runner_ups=named)


class _Queue:
    """Layouts by their bounds: of their work, then of the count form, worked out when a layout's turn comes."""

    def __init__(self, space: OffloadSpace) -> None:
        self._space = space
        self._waiting = [(float(bound), 0, row) for row, bound in enumerate(space.work_s())]
        heapq.heapify(self._waiting)

    @property
    def bound_s(self) -> float:
        """No layout that waits is faster; infinite where none does."""
        return self._waiting[0][0] if self._waiting else np.inf

    def pop(self) -> tuple[float, int] | None:
        """The first layout and its bound, or None where it got a closer bound and waits again, unless nothing of it fits."""
        bound, level, row = heapq.heappop(self._waiting)
        if level == 1:
            return bound, row
        closer = max(bound, self._space.count_s(row))
        if np.isfinite(closer):
            heapq.heappush(self._waiting, (closer, 1, row))
        return None


MAX_TRIES_A_RUNNER_UP = 3
"""Layouts that get a schedule for each runner-up that is wanted, at most: of some no rounding fits."""


def _runner_ups(
    space: OffloadSpace,
    queue: _Queue,
    best: SolvedLayout,
    solved: Sequence[SolvedLayout],
    wanted: int,
    deadline: Deadline,
) -> list[SolvedLayout]:
    """The fastest layouts of other degrees or micro-batches, fastest first: those that were solved, and the next in the queue."""
    batch = space.options.least.batch

    def key(row: int) -> tuple[int, ...]:
        return (*batch.degrees(row), int(batch.micro_batch_size[row]))

    others: dict[tuple[int, ...], SolvedLayout] = {}
    for found in sorted(solved, key=lambda found: found.estimate.step_time_s):
        if key(found.row) != key(best.row):
            others.setdefault(key(found.row), found)
    tries = MAX_TRIES_A_RUNNER_UP * wanted
    while len(others) < wanted and tries and queue.bound_s < np.inf and not deadline.is_over:
        if (entry := queue.pop()) is None or key(entry[1]) in others or key(entry[1]) == key(best.row):
            continue
        tries -= 1
        found_now = space.solved(entry[1], quickly=True)
        if found_now is not None:
            others[key(entry[1])] = found_now
    return sorted(others.values(), key=lambda found: found.estimate.step_time_s)[:wanted]


def schedule_layout(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    layout: Layout,
    request: OffloadRequest,
    *,
    quickly: bool = False,
) -> OffloadResult:
    """One layout whose offload is scheduled, with its schedule, or ``quickly`` with the one that a search compares first; its
    recompute is kept unless it is mixed.

    Raises:
        InfeasibleError: no schedule fits.
    """
    fixed = {name: value for name, value in layout.model_dump().items() if not name.startswith("offload")}
    found = search_offload(
        model,
        cluster,
        workload,
        request=request,
        fixed=fixed,
        runnable=False,
        deadline=Deadline(60.0),
        first=quickly,
    )
    assert found is not None
    return found


def _seconds(found: SolvedLayout | None) -> float:
    return np.inf if found is None else found.estimate.step_time_s


def _answer(
    space: OffloadSpace, best: SolvedLayout, bound: float, tried: int, begun: float, *, stopped: bool
) -> OffloadResult:
    options, cluster = space.options, space.options.least.cluster
    layout, stage = space.layout(best)
    objective = best.estimate.step_time_s
    certificate = Certificate(
        status="feasible" if stopped else "optimal",
        objective=objective,
        bound=min(bound, objective),
        gap=max(0.0, 1 - bound / objective),
        evaluated=tried,
        pruned=len(options.least.batch) - tried,
        search_s=time.perf_counter() - begun,
    )
    ranks = cluster.largest_node
    schedule = build_schedule(best.solution, best.instance, space.request, ranks, constant_s(options, best.row))
    return OffloadResult(layout, stage, schedule, best.estimate, certificate)


MAX_EXPLAINED = 200
"""Layouts, by what they compute, that are asked for the host memory they need."""


def _explain(
    space: OffloadSpace, model: ModelSpec, cluster: ClusterSpec, fixed: Mapping[str, Any], deadline: Deadline
) -> MeshwrightError:
    """Nothing fits: what the host lacks, or that even with any host something on the devices does not fit."""
    rows = np.argsort(space.work_s(), kind="stable")[:MAX_EXPLAINED]
    needs = [
        bound.min_host_bytes(problem) for row in rows if not deadline.is_over for problem in space.problems(int(row))
    ]
    least = min(needs, default=np.inf) * cluster.largest_node
    held = space.request.rates(space.options.least.workload, cluster).memory_bytes * cluster.largest_node
    details = [f"fixed: {format_assignments(fixed)}"] if fixed else []
    if np.isfinite(least) and least > held:
        return InfeasibleError(
            f"no plan fits {model.name}: the host's memory is {format_bytes(least - held)} a node too small",
            details=(
                f"needs {format_bytes(least)} of host memory on each node; may use {format_bytes(held)}   [host memory (C7)]",
                *details,
            ),
            help=f"give --host-memory-gib {int(least / 2**30) + 1} if the nodes have it, --nvme PATH for the states, or more nodes",
        )
    devices = f"devices have {format_bytes(cluster.memory_budget_bytes)} each   [device memory (C6)]"
    if np.isfinite(least) and np.isfinite(held):
        near = f"a host needs {format_bytes(least)} at least, more with whole layers; may use {format_bytes(held)}"
        details.insert(0, f"{near}   [host memory (C7)]")
    return InfeasibleError(
        f"no plan fits {model.name} even with offload ({space.request.kinds})",
        details=(devices, *details),
        help="offload more (--offload auto, --host-memory-gib), use shorter sequences, or more devices",
    )
