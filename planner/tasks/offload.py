"""Offload: layouts of one pipeline stage, what each block does, and what lies on the host, searched as one problem.

Every layout has two bounds: its work alone (all layouts at once), and the count form of its schedule (milliseconds). The layout
with the lowest bound is looked at next, and its schedule is the best rounding of the count form. When the lowest bound is within
SAME of the incumbent the search is over; the incumbent's schedule is then solved layer by layer (solvers/offload/).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ...cost_models.stage.contents import RecomputeCosts
from ...cost_models.stage.table import CostTable
from ...schema import (
    Certificate,
    ConfigError,
    InfeasibleError,
    Layout,
    MeshwrightError,
    OffloadSchedule,
    Stage,
    TrainingEstimate,
    TrainingPlan,
)
from ...schema.layout import format_assignments
from ...schema.units import GIB, FloatArray, format_bytes
from ...solvers.branch_and_bound import Leaf, Node, Search, Step, Stop
from ...solvers.offload.bound import lower_bound_s, min_host_bytes
from ...solvers.offload.instance import OffloadInstance
from ...solvers.offload.schedule import OffloadSolution, solve, solve_approximately
from ..request import Deadline, OffloadRequest, PlanRequest
from ..search import SearchResult
from ..space import build_space
from .offload_problem import build_estimate, build_instances, build_schedule, build_stage, constant_s
from .training import (
    alternatives_with_schedules,
    build_alternative,
    build_plan,
    notes_on_measured,
    notes_on_runtime,
)

SAME = 0.02
"""Bounds within this of the incumbent are not solved: far below the cost model's own error, and the certificate tells the gap."""

MAX_TRIES_A_RUNNER_UP = 3
"""Layouts that get a schedule for each runner-up, at most: of some no rounding fits."""

MAX_EXPLAINED = 200
"""Layouts, by what they compute, that are asked for the host memory they need."""

LAYOUT_LIMIT_S = 60.0
"""Seconds for the schedule of one layout."""

UNIFORM = ("none", "selective", "full")


def require_schedulable(request: PlanRequest) -> None:
    """Refuse what no offload schedule is planned for.

    Raises:
        ConfigError: another engine, training without a backward pass, or a pipeline.
    """
    workload, fixed = request.workload, request.fixed
    if not workload.engine_facts.is_own_runtime:
        raise ConfigError(
            f"offload schedules are planned for fsdp2, not for {workload.engine}",
            help="fix its own switches instead: --space full --fix offload=optimizer",
        )
    if not workload.has_backward:
        raise ConfigError(
            "zeroth-order training has no gradients, states or activations that could be offloaded",
            help="plan without --offload",
        )
    if fixed.get("pp", 1) != 1:
        raise ConfigError(f"offload schedules have one pipeline stage; pp={fixed['pp']} is fixed", help="do not fix pp")


@dataclass(frozen=True)
class SolvedLayout:
    """A layout (row of the space) with one of its problems, its schedule and what that costs."""

    row: int
    instance: OffloadInstance
    solution: OffloadSolution
    estimate: TrainingEstimate

    @property
    def step_time_s(self) -> float:
        """Seconds of one step."""
        return self.estimate.step_time_s


@dataclass(frozen=True)
class OffloadResult:
    """A layout with the stage, the schedule and the estimate that belong together."""

    layout: Layout
    stage: Stage
    schedule: OffloadSchedule
    estimate: TrainingEstimate
    certificate: Certificate
    runner_ups: tuple[tuple[Layout, TrainingEstimate], ...] = ()


OffloadStep = Step[tuple[int, int], SolvedLayout]
Change = Callable[[OffloadInstance], OffloadInstance]


class OffloadSpace:
    """Layouts with mixed recompute of one stage, and the problems of each that was looked at, as ``change`` leaves them.

    As a problem of solvers/branch_and_bound.py a node is (level, row): at level 0 a layout has the bound of its work, at level 1
    that of the count form, and is opened.
    """

    def __init__(self, request: PlanRequest, change: Change = lambda instance: instance) -> None:
        """Enumerate and cost the layouts."""
        assert request.offload is not None
        fixed = request.fixed
        self.recompute = fixed.get("recompute") if fixed.get("recompute") in UNIFORM else None
        degrees = {name: value for name, value in fixed.items() if name not in ("recompute", "offload", "pp")}
        batch = build_space(replace(request, fixed=degrees | {"recompute": "mixed", "pp": 1})).batch
        costs = CostTable.from_layouts(request.model, request.workload, request.cluster, batch)
        self.request, self.offload = request, request.offload
        self.options, self._change = RecomputeCosts(costs), change
        self._problems: dict[int, list[OffloadInstance]] = {}

    def work_s(self) -> FloatArray:
        """Return a bound on the step [N]: passes without recompute, what communication over data adds, no update."""
        costs, batch = self.options.minimum, self.options.minimum.layouts
        exposed = sum(
            (n * seconds for n, seconds in zip(costs.counts, self.options.min_exposed_by_kind, strict=True)),
            start=np.zeros(len(batch)),
        )
        return np.asarray(batch.num_microbatches * costs.total("busy_s") + exposed + costs.per_step.dp_edges_s)

    def problems(self, row: int) -> list[OffloadInstance]:
        """Return the problems of one layout, built once."""
        if row not in self._problems:
            instances = build_instances(self.options, row, self.offload, self.recompute)
            self._problems[row] = [self._change(instance) for instance in instances]
        return self._problems[row]

    def count_s(self, row: int) -> float:
        """Return the bound of the count form."""
        return min(lower_bound_s(problem) for problem in self.problems(row)) + self.constant_s(row)

    def constant_s(self, row: int) -> float:
        """Return what a step has besides its schedule."""
        return constant_s(self.options, row)

    def lowest_bound(self) -> tuple[int, float] | None:
        """Return the layout with the lowest bound of the count form, and that bound; None if there is none or time is over."""
        best, below_s, work = None, np.inf, self.work_s()
        for row in map(int, np.argsort(work, kind="stable")):
            if work[row] >= below_s or self.request.deadline.is_over:
                break
            bound_s = max(float(work[row]), self.count_s(row))
            if bound_s < below_s:
                best, below_s = (row, bound_s), bound_s
        return None if self.request.deadline.is_over else best

    def roots(self) -> OffloadStep:
        """Return every layout with the bound of its work."""
        return Step([Node(float(bound), (0, row), (0, row)) for row, bound in enumerate(self.work_s())])

    def expand(self, node: Node[tuple[int, int]], incumbent: float) -> OffloadStep:
        """Bound a layout by the count form, or round its best schedule."""
        level, row = node.state
        if level == 0:
            bound_s = max(node.bound, self.count_s(row))
            return Step([Node(bound_s, (1, row), (1, row))] if np.isfinite(bound_s) else [])
        solved = self.round_schedule(row)
        if solved is None:
            return Step(evaluated=1, effort=1)
        bound_s = max(node.bound, solved.solution.bound + self.constant_s(row))
        return Step((), [Leaf(solved.step_time_s, solved, bound_s)], evaluated=1, effort=1)

    def round_schedule(self, row: int) -> SolvedLayout | None:
        """Return the fastest schedule that a rounding of the count form gives."""
        return self._fastest(row, solve_approximately)

    def solve_schedule(self, row: int) -> SolvedLayout | None:
        """Return the fastest schedule of the linear program layer by layer."""
        return self._fastest(row, solve)

    def _fastest(self, row: int, solver: Callable[[OffloadInstance], OffloadSolution]) -> SolvedLayout | None:
        best: SolvedLayout | None = None
        for problem in self.problems(row):
            solution = solver(problem)
            if solution.choice is None or solution.simulated is None:
                continue
            estimate = build_estimate(self.options, row, problem, solution.choice, solution.simulated)
            if best is None or estimate.step_time_s < best.step_time_s:
                best = SolvedLayout(row, problem, solution, estimate)
        return best

    def layout(self, solved: SolvedLayout) -> tuple[Layout, Stage]:
        """Return a layout as its schedule makes it, and its stage."""
        choice = solved.solution.choice
        assert choice is not None
        stage = build_stage(choice, self.options.minimum.model)
        recompute = "mixed" if stage.layer_recompute else stage.recompute
        return self.options.minimum.layouts.layout(solved.row).replace(offload="scheduled", recompute=recompute), stage


Effort = Literal["first", "rounded", "exact"]
"""Of an offload search: the first schedule, the best rounding of a count form, or that solved layer by layer at the end."""


def search_offload(
    request: PlanRequest, *, worse_than_s: float = np.inf, effort: Effort = "exact", runner_ups: int = 0
) -> OffloadResult | None:
    """Return the fastest layout with an offload schedule; None if none is faster than ``worse_than_s``.

    Args:
        effort: below ``exact`` the gap is larger, and it takes a fraction of the time.
        runner_ups: so many more layouts of other degrees or micro-batches get a schedule, for comparison.

    Raises:
        ConfigError: no layout of one stage is left, or the cluster has nodes of several kinds.
        InfeasibleError: none fits, on the devices or on the host; the message says how much is missing.
        SolverLimitError: the time limit came before any schedule.
    """
    require_schedulable(request)
    if request.cluster.is_mixed:
        raise ConfigError("offload schedules are planned for nodes of one kind; this cluster is mixed")
    start, deadline = time.perf_counter(), request.deadline
    space = OffloadSpace(request)
    tree = Search(space)
    max_leaves = 1 if effort == "first" else np.inf
    answer = tree.run(Stop(rel_gap=SAME, below=worse_than_s, max_leaves=max_leaves, deadline=deadline))
    stopped = deadline.is_over
    if answer.best is None:
        if answer.open_bound == worse_than_s == np.inf:
            raise _nothing_fits(space)
        if stopped:
            name = request.model.name
            raise deadline.error(f"for {name} with offload", f"{answer.evaluated} schedules solved")
        return None
    best, solved = answer.best.candidate, [leaf.candidate for leaf in answer.leaves]
    bounds = {leaf.candidate.row: leaf.bound for leaf in answer.leaves}
    others = _runner_ups(space, tree, best, solved, runner_ups) if effort != "first" else []
    evaluated = answer.evaluated + len({other.row for other in others} - bounds.keys())
    exact = space.solve_schedule(best.row) if effort == "exact" else None
    if exact is not None:
        bounds[best.row] = exact.solution.bound + space.constant_s(best.row)
        if exact.step_time_s < best.step_time_s:
            best = exact
        else:  # the schedule of the search, with what the linear program says of the same problem
            proved = replace(best.solution, bound=exact.solution.bound, marginal=exact.solution.marginal)
            best = replace(best, solution=proved)
    layout, stage = space.layout(best)
    bound_s = min([answer.open_bound, best.step_time_s, *bounds.values()])
    certificate = Certificate.proved(
        objective=best.step_time_s,
        bound=bound_s,
        finished=not stopped,
        evaluated=evaluated,
        pruned=len(space.options.minimum.layouts) - evaluated,
        search_s=time.perf_counter() - start,
    )
    ranks = request.cluster.largest_node
    schedule = build_schedule(best.solution, best.instance, space.offload, ranks, space.constant_s(best.row))
    named = tuple((space.layout(other)[0], other.estimate) for other in others)
    return OffloadResult(layout, stage, schedule, best.estimate, certificate, named)


def plan_schedule(request: PlanRequest, result: OffloadResult, plain: SearchResult | None, *, top: int) -> TrainingPlan:
    """Return the plan with an offload schedule; its runner-ups are those of its search and of one without schedules."""
    notes = []
    if request.offload is not None and np.isinf(request.offload.rates(request.workload, request.cluster).memory_bytes):
        stored = format_bytes(result.schedule.host_bytes)
        notes.append(
            f"the host's memory is not known: each node needs {stored} for what is offloaded (--host-memory-gib)"
        )
    others = [build_alternative(layout, estimate, result.estimate) for layout, estimate in result.runner_ups]
    return build_plan(
        request,
        result.layout,
        (result.stage,),
        result.estimate,
        result.certificate,
        alternatives=alternatives_with_schedules(others, plain, result.estimate, top),
        offload=result.schedule,
        notes=[*notes, *notes_on_measured(request), *notes_on_runtime(request)],
    )


def _runner_ups(
    space: OffloadSpace,
    tree: Search[tuple[int, int], SolvedLayout],
    best: SolvedLayout,
    solved: Sequence[SolvedLayout],
    count: int,
) -> list[SolvedLayout]:
    """Return the fastest layouts of other degrees or micro-batches: those that were solved, and the next ones of the search."""
    batch = space.options.minimum.layouts

    def key(row: int) -> tuple[int, ...]:
        return (*batch.degrees(row), int(batch.micro_batch_size[row]))

    others: dict[tuple[int, ...], SolvedLayout] = {key(best.row): best}
    for candidate in sorted(solved, key=lambda candidate: candidate.step_time_s):
        others.setdefault(key(candidate.row), candidate)

    def expand(node: Node[tuple[int, int]], incumbent: float) -> OffloadStep:
        level, row = node.state
        if level == 1 and key(row) in others:
            return Step()
        step = space.expand(node, incumbent)
        others.update({key(row): leaf.candidate for leaf in step.leaves})
        return step

    max_leaves, max_effort = count + 1 - len(others), MAX_TRIES_A_RUNNER_UP * count
    stop = Stop(rel_gap=None, max_leaves=max_leaves, max_effort=max_effort, deadline=space.request.deadline)
    tree.run(stop, expand=expand)
    del others[key(best.row)]
    return sorted(others.values(), key=lambda other: other.step_time_s)[:count]


def schedule_layout(request: PlanRequest, layout: Layout, *, effort: Effort = "exact") -> OffloadResult:
    """Return one layout with its offload schedule; its recompute is kept unless it is mixed.

    Raises:
        InfeasibleError: no schedule fits.
    """
    fixed = {name: value for name, value in layout.model_dump().items() if not name.startswith("offload")}
    offload = request.offload or OffloadRequest()
    only = replace(request, fixed=fixed, runnable=False, offload=offload, deadline=Deadline(LAYOUT_LIMIT_S))
    result = search_offload(only, effort=effort)
    assert result is not None
    return result


def _nothing_fits(space: OffloadSpace) -> MeshwrightError:
    """Return what the host lacks, or that even with any host something on the devices does not fit."""
    request = space.request
    cluster, name = request.cluster, request.model.name
    rows = np.argsort(space.work_s(), kind="stable")[:MAX_EXPLAINED]
    needs = [
        min_host_bytes(problem) for row in rows if not request.deadline.is_over for problem in space.problems(int(row))
    ]
    required = min(needs, default=np.inf) * cluster.largest_node
    allowed = space.offload.rates(request.workload, cluster).memory_bytes * cluster.largest_node
    details = [f"fixed: {format_assignments(request.fixed)}"] if request.fixed else []
    if np.isfinite(required) and required > allowed:
        return InfeasibleError(
            f"no plan fits {name}: the host's memory is {format_bytes(required - allowed)} a node too small",
            details=(
                f"needs {format_bytes(required)} of host memory on each node; may use {format_bytes(allowed)}   "
                "[host memory (C7)]",
                *details,
            ),
            help=f"give --host-memory-gib {int(required / GIB) + 1} if the nodes have it, --nvme PATH for the states, "
            "or more nodes",
        )
    devices = f"devices have {format_bytes(cluster.memory_budget_bytes)} each   [device memory (C6)]"
    if np.isfinite(required) and np.isfinite(allowed):
        near = (
            f"a host needs {format_bytes(required)} at least, more with whole layers; may use {format_bytes(allowed)}"
        )
        details.insert(0, f"{near}   [host memory (C7)]")
    return InfeasibleError(
        f"no plan fits {name} even with offload ({space.offload.kinds})",
        details=(devices, *details),
        help="offload more (--offload auto, --host-memory-gib), use shorter sequences, or more devices",
    )
