"""What fits and what does not: the demand of each stage, the layout that lacks the least, whether any layout of a request fits.

`find_fit` does not search all of a space: of the bounded layouts those with the least memory are expanded, and of those with memory
to spare the fastest by their bounds. A layout that it returns fits for certain; where it returns none, one may still exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from ...cost_models.coefficients import Scenario
from ...cost_models.stage import memory
from ...cost_models.stage.bounds import budget_bytes, memory_bounds, uniform_time_bounds
from ...cost_models.stage.table import CostTable
from ...schema import ClusterSpec, ConfigError, Layout, TrainingEstimate, Workload
from ...schema.cluster import part_label
from ...schema.training_plan import MemoryBreakdown
from ...schema.units import format_bytes
from ..expand import Candidate, expand_fitting, expand_row
from ..request import PlanRequest
from ..search import SearchResult
from ..space import build_space

CLOSEST_TRIES = 20
"""Layouts with the least bounds on memory that are cut into stages."""

FIT_TRIES = 6
"""Layouts expanded for each of the two orders."""

ROOMY_FRACTION = 0.9
"""Bounds take stages as balanced; layouts below this part of the budget mostly fit with real ones."""

LEAN: dict[str, Any] = {"micro_batch_size": 1, "recompute": "full", "num_model_chunks": 1, "etp": 1}
"""What a layout with the least memory mostly has; where these are fixed, a space is some hundred times smaller."""


class StageDemand(NamedTuple):
    """What must be within the budget on one stage, and the budget and the memory of its devices."""

    required_bytes: int
    budget_bytes: int
    total_bytes: int

    @property
    def free_bytes(self) -> int:
        """What remains; below zero where it does not fit."""
        return self.budget_bytes - self.required_bytes


def stage_demands(estimate: TrainingEstimate, workload: Workload, cluster: ClusterSpec) -> list[StageDemand]:
    """Return required and allowed bytes of each stage, on the device pool of a mixed cluster that it lies on."""
    pools = {part_label(cluster.parts, g): part.cluster for g, part in enumerate(cluster.parts)}
    demands = []
    for stage in estimate.stages:
        pool, terms = pools.get(stage.device, cluster), stage.memory_bytes
        required = int(memory.required_bytes(terms.total, terms.parameters, Scenario.build(workload, pool)))
        demands.append(StageDemand(required, pool.memory_budget_bytes, pool.weakest_device.memory_bytes))
    return demands


def tightest_stage(demands: Sequence[StageDemand]) -> int:
    """Return the index of the stage with the least memory to spare."""
    return min(range(len(demands)), key=lambda s: (demands[s].free_bytes, s))


def shortfall(layout: Layout, estimate: TrainingEstimate, workload: Workload, cluster: ClusterSpec) -> tuple[str, str]:
    """Say which stage needs how much more than it may have, and what its memory is made of."""
    demands = stage_demands(estimate, workload, cluster)
    fullest = tightest_stage(demands)
    required, budget, total = demands[fullest]
    where = f"stage {fullest} of {len(demands)} needs" if len(demands) > 1 else "needs"
    return (
        f"{where} up to {format_bytes(required)} per device at best ({layout}); budget {format_bytes(budget)} = "
        f"{format_bytes(total)} total - {format_bytes(cluster.reserved_bytes)} reserved: "
        f"{format_bytes(required - budget)} too much   [memory (C2)]",
        "largest: " + largest_memory_terms(estimate.stages[fullest].memory_bytes),
    )


def largest_memory_terms(terms: MemoryBreakdown, count: int = 3) -> str:
    """Return the largest terms of a device's memory in words."""
    largest = sorted(terms.model_dump().items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in largest[:count])


def closest_to_fitting(result: SearchResult) -> Candidate:
    """Return the layout of a search without an answer that lacks the least, its stages as even as can be."""
    rows = np.argsort(result.problem.frontier.bound_bytes, kind="stable")[:CLOSEST_TRIES]
    candidates = (expand_row(result.costs, int(row)) for row in rows)
    return min(
        candidates, key=lambda c: (c.estimate.required_bytes - c.estimate.budget_bytes, c.estimate.step_time_s, c.idx)
    )


@dataclass(frozen=True)
class Fit:
    """A layout that fits."""

    layout: Layout
    estimate: TrainingEstimate


def find_fit(
    request: PlanRequest, *, among: Literal["all", "lean"] = "all", which: Literal["fastest", "first"] = "fastest"
) -> Fit | None:
    """Return a layout that fits, or None where none of those tried does.

    Args:
        among: all layouts, or those that are `LEAN` in what is not fixed.
        which: of those tried.

    Raises:
        SolverLimitError: the deadline came first.
    """
    if among == "lean":
        request = replace(request, fixed={**LEAN, **request.fixed})
    try:
        space = build_space(request)
    except ConfigError:
        return None

    def checkpoint() -> None:
        request.deadline.require("verifying a change")

    costs = CostTable.from_layouts(request.model, request.workload, request.cluster, space.batch, checkpoint=checkpoint)
    required = memory.lower_bound_required_bytes(memory_bounds(costs), costs.scenario)
    budget = budget_bytes(costs)
    smallest = np.argsort(required, kind="stable")[:FIT_TRIES]
    roomy = np.flatnonzero(required <= ROOMY_FRACTION * budget)
    fastest = roomy[np.argsort(uniform_time_bounds(costs.select(roomy)), kind="stable")[:FIT_TRIES]]
    rows = np.array(list(dict.fromkeys([*smallest[(required <= budget)[smallest]], *fastest])), dtype=np.int64)
    if not len(rows):
        return None
    subset, feasible = costs.select(rows).compacted(), list[Candidate]()
    for idx in range(len(rows)):
        checkpoint()
        if (candidate := expand_fitting(subset, idx)) is not None:
            feasible.append(candidate)
            if which == "first":
                break
    if not feasible:
        return None
    best = min(feasible, key=lambda c: (c.estimate.step_time_s, rows[c.idx]))
    return Fit(best.layout(subset.layouts), best.estimate)
