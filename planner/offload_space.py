"""Layouts of one pipeline stage with mixed recompute, as problems of solvers/offload.py: their bounds and their schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cost_models.layouts import FloatArray
from ..cost_models.option_costs import OptionCosts
from ..cost_models.space_costs import SpaceCosts
from ..schema import ClusterSpec, Estimate, Layout, ModelSpec, Stage, Workload
from ..solvers import offload, offload_count
from ..solvers.offload_instance import Instance
from .deadline import Deadline
from .offload_costs import constant_s, estimate_of, instances_of, stage_of
from .offload_request import OffloadRequest
from .space import build_space

UNIFORM = ("none", "selective", "full")


@dataclass(frozen=True)
class Found:
    """A layout (row of the space) with one of its problems, its schedule and what that costs."""

    row: int
    instance: Instance
    solution: offload.Solution
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
        change: Callable[[Instance], Instance] = lambda problem: problem,
    ) -> None:
        self.recompute = fixed.get("recompute") if fixed.get("recompute") in UNIFORM else None
        kept = {name: value for name, value in fixed.items() if name not in ("recompute", "offload", "pp")}
        wanted = kept | {"recompute": "mixed", "pp": 1}
        batch = build_space(model, workload, cluster, wanted, runnable=runnable, deadline=deadline).batch
        costs = SpaceCosts.of(model, workload, cluster, batch)
        self.options, self.request, self._change = OptionCosts.of(costs), request, change
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
            problems = instances_of(self.options, row, self.request, self.recompute)
            self._problems[row] = [self._change(problem) for problem in problems]
        return self._problems[row]

    def count_s(self, row: int) -> float:
        """Bound of the count form."""
        least = min(offload_count.lower_bound_s(problem) for problem in self.problems(row))
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

    def solved(self, row: int, *, quickly: bool) -> Found | None:
        """The fastest schedule of a layout, from the count form alone or from the linear program layer by layer."""
        best: Found | None = None
        for problem in self.problems(row):
            solution = offload.solve_quickly(problem) if quickly else offload.solve(problem)
            if solution.choice is None or solution.simulated is None:
                continue
            estimate = estimate_of(self.options, row, problem, solution.choice, solution.simulated)
            if best is None or estimate.step_time_s < best.estimate.step_time_s:
                best = Found(row, problem, solution, estimate)
        return best

    def layout(self, found: Found) -> tuple[Layout, Stage]:
        """A layout as its schedule makes it, and its stage."""
        choice = found.solution.choice
        assert choice is not None
        stage = stage_of(choice, self.options.least.model)
        recompute = "mixed" if stage.layer_recompute else stage.recompute
        return self.options.least.batch.layout(found.row).replace(offload="scheduled", recompute=recompute), stage
