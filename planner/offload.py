"""Search with offload: layouts of one pipeline stage, what each block does, and what lies on the host, as one problem.

Every layout has two bounds: its work alone (all layouts at once), and the count form of its schedule (milliseconds). The layout
with the least bound is looked at next, and its schedule is the best rounding of the count form. When the least bound is within SAME
of the incumbent the search is over; the incumbent's schedule is then solved layer by layer (solvers/offload.py).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..cost_models.layouts import FloatArray
from ..cost_models.option_costs import OptionCosts
from ..cost_models.space_costs import SpaceCosts
from ..schema import (
    ClusterSpec,
    ConfigError,
    Estimate,
    InfeasibleError,
    Layout,
    MeshwrightError,
    ModelSpec,
    OffloadSchedule,
    SearchCertificate,
    Stage,
    Workload,
)
from ..schema.layout import format_assignments
from ..schema.units import format_bytes
from ..solvers import offload, offload_count
from ..solvers.offload_instance import Instance
from .deadline import Deadline, no_incumbent
from .offload_costs import constant_s, estimate_of, instances_of, schedule_of, stage_of
from .offload_request import OffloadRequest
from .space import build_space

SAME = 0.02
"""Bounds within this of the incumbent are not solved: far below the cost model's own error, and the certificate tells the gap."""

UNIFORM = ("none", "selective", "full")


@dataclass(frozen=True)
class Offloaded:
    """What a search found: a layout with the stage, the schedule and the estimate that belong together."""

    layout: Layout
    stage: Stage
    schedule: OffloadSchedule
    estimate: Estimate
    certificate: SearchCertificate


@dataclass(frozen=True)
class _Found:
    row: int
    instance: Instance
    solution: offload.Solution
    estimate: Estimate


class _Space:
    """Layouts with mixed recompute of one stage, and the problems of each that was looked at."""

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
    ) -> None:
        self.recompute = fixed.get("recompute") if fixed.get("recompute") in UNIFORM else None
        kept = {name: value for name, value in fixed.items() if name not in ("recompute", "offload", "pp")}
        wanted = kept | {"recompute": "mixed", "pp": 1}
        batch = build_space(model, workload, cluster, wanted, runnable=runnable, deadline=deadline).batch
        costs = SpaceCosts.of(model, workload, cluster, batch)
        self.options, self.request = OptionCosts.of(costs), request
        self._problems: dict[int, list[Instance]] = {}

    def work_s(self) -> FloatArray:
        """Bound on the step [N]: passes without recompute, what communication over data adds, no update."""
        least, b = self.options.least, self.options.least.batch
        exposed = sum(
            (n * seconds for n, seconds in zip(least.counts, self.options.least_exposed_by_kind, strict=True)),
            start=np.zeros(len(b)),
        )
        return np.asarray(b.num_microbatches * least.total("busy_s") + exposed + least.dp_edges_s)

    def problems(self, row: int) -> list[Instance]:
        """Of one layout; worked out once."""
        if row not in self._problems:
            self._problems[row] = instances_of(self.options, row, self.request, self.recompute)
        return self._problems[row]

    def count_s(self, row: int) -> float:
        """Bound of the count form."""
        least = min(offload_count.lower_bound_s(problem) for problem in self.problems(row))
        return least + constant_s(self.options, row)

    def solved(self, row: int, *, quickly: bool) -> _Found | None:
        """The fastest schedule of a layout, from the count form alone or from the linear program layer by layer."""
        best: _Found | None = None
        for problem in self.problems(row):
            solution = offload.solve_quickly(problem) if quickly else offload.solve(problem)
            if solution.choice is None or solution.simulated is None:
                continue
            estimate = estimate_of(self.options, row, problem, solution.choice, solution.simulated)
            if best is None or estimate.step_time_s < best.estimate.step_time_s:
                best = _Found(row, problem, solution, estimate)
        return best


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
) -> Offloaded | None:
    """The fastest layout with an offload schedule, or the ``first`` one found; None if none is faster than ``worse_than_s``.

    Raises:
        ConfigError: no layout of one stage is left, or the cluster has nodes of several kinds.
        InfeasibleError: none fits, on the devices or on the host; the message says how much is missing.
        SolverLimitError: the time limit came before any schedule.
    """
    _require(cluster, workload, fixed)
    begun = time.perf_counter()
    space = _Space(model, cluster, workload, fixed, request=request, runnable=runnable, deadline=deadline)
    work = space.work_s()
    queue: list[tuple[float, int, int]] = [(float(bound), 0, row) for row, bound in enumerate(work)]
    heapq.heapify(queue)
    best: _Found | None = None
    bounds: dict[int, float] = {}
    tried = 0
    while queue and queue[0][0] < min(worse_than_s, _seconds(best) * (1 - SAME)) and not deadline.is_over:
        bound, level, row = heapq.heappop(queue)
        if level == 0:
            closer = max(bound, space.count_s(row))
            if np.isfinite(closer):
                heapq.heappush(queue, (closer, 1, row))
            continue
        tried += 1
        found = space.solved(row, quickly=True)
        if found is not None:
            bounds[row] = max(bound, found.solution.bound_s + constant_s(space.options, row))
            if found.estimate.step_time_s < _seconds(best):
                best = found
                if first:
                    break
    if best is None and (queue or worse_than_s < np.inf):
        if deadline.is_over:
            raise no_incumbent(deadline, f"for {model.name} with offload", f"{tried} schedules solved")
        return None
    if best is None:
        raise _explain(space, model, cluster, fixed, deadline)
    exact = None if first else space.solved(best.row, quickly=False)
    if exact is not None:
        bounds[best.row] = exact.solution.bound_s + constant_s(space.options, best.row)
        if exact.estimate.step_time_s < _seconds(best):
            best = exact
        else:  # the schedule of the search, with what the linear program says of the same problem
            told = replace(best.solution, bound_s=exact.solution.bound_s, worth=exact.solution.worth)
            best = replace(best, solution=told)
    left = queue[0][0] if queue else np.inf
    bound = min([left, _seconds(best), *bounds.values()])
    return _answer(space, best, bound, tried, begun, stopped=deadline.is_over)


def offloaded_layout(
    model: ModelSpec, cluster: ClusterSpec, workload: Workload, layout: Layout, request: OffloadRequest
) -> Offloaded:
    """One layout whose offload is scheduled, with its schedule; its recompute is kept unless it is mixed.

    Raises:
        InfeasibleError: no schedule fits.
    """
    fixed = {name: value for name, value in layout.model_dump().items() if not name.startswith("offload")}
    found = search_offload(
        model, cluster, workload, request=request, fixed=fixed, runnable=False, deadline=Deadline(60.0)
    )
    assert found is not None
    return found


def _seconds(found: _Found | None) -> float:
    return np.inf if found is None else found.estimate.step_time_s


def _require(cluster: ClusterSpec, workload: Workload, fixed: Mapping[str, Any]) -> None:
    if workload.engine != "fsdp2":
        raise ConfigError(
            f"offload schedules are planned for fsdp2, not for {workload.engine}",
            help="fix its own switches instead: --space full --fix offload=optimizer",
        )
    if not workload.has_backward:
        raise ConfigError(
            "zeroth-order training has no gradients, states or activations that could be offloaded",
            help="plan without --offload",
        )
    if cluster.is_mixed:
        raise ConfigError("offload schedules are planned for nodes of one kind; this cluster is mixed")
    if fixed.get("pp", 1) != 1:
        raise ConfigError(f"offload schedules have one pipeline stage; pp={fixed['pp']} is fixed", help="do not fix pp")


def _answer(space: _Space, best: _Found, bound: float, tried: int, begun: float, *, stopped: bool) -> Offloaded:
    options, cluster = space.options, space.options.least.cluster
    choice = best.solution.choice
    assert choice is not None
    stage = stage_of(choice, options.least.model)
    plain = options.least.batch.layout(best.row)
    recompute = "mixed" if stage.layer_recompute else stage.recompute
    layout = plain.replace(offload="scheduled", recompute=recompute)
    objective = best.estimate.step_time_s
    certificate = SearchCertificate(
        status="feasible" if stopped else "optimal",
        objective_s=objective,
        bound_s=min(bound, objective),
        gap=max(0.0, 1 - bound / objective),
        evaluated=tried,
        pruned=len(options.least.batch) - tried,
        search_s=time.perf_counter() - begun,
    )
    ranks = cluster.largest_node
    schedule = schedule_of(best.solution, best.instance, space.request, ranks, constant_s(options, best.row))
    return Offloaded(layout, stage, schedule, best.estimate, certificate)


MOST_EXPLAINED = 200
"""Layouts, by what they compute, that are asked for the host memory they need."""


def _explain(
    space: _Space, model: ModelSpec, cluster: ClusterSpec, fixed: Mapping[str, Any], deadline: Deadline
) -> MeshwrightError:
    """Nothing fits: what the host lacks, or that even with any host something on the devices does not fit."""
    rows = np.argsort(space.work_s(), kind="stable")[:MOST_EXPLAINED]
    needs = [
        offload_count.least_host_bytes(problem)
        for row in rows
        if not deadline.is_over
        for problem in space.problems(int(row))
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
    return InfeasibleError(
        f"no plan fits {model.name} even with offload ({space.request.kinds})",
        details=(f"devices have {format_bytes(cluster.memory_budget_bytes)} each   [device memory (C6)]", *details),
        help="offload more (--offload auto), use shorter sequences, or more devices",
    )
