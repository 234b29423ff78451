"""Of the layouts that do not fit, the one that lacks the least, and what of it binds.

Whether some layout of a request fits, and how fast it is at most, without searching all of its space.

Of the bounded layouts those with the least memory are expanded, and of those with room to spare the fastest by their bounds: a
layout that is found fits for certain, one that is not found may still exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ...cost_models.stage import memory
from ...cost_models.stage.bounds import budget_bytes, memory_bounds, uniform_time_bounds
from ...cost_models.stage.table import CostTable
from ...schema import ClusterSpec, ConfigError, Estimate, Layout, Workload
from ...schema.cluster import part_label
from ...schema.layout_table import LayoutTable
from ...schema.plan import MemoryBreakdown
from ...schema.units import format_bytes
from ..deadline import Deadline
from ..expand import Candidate, expand, expand_fitting, expand_row
from ..request import PlanRequest
from ..search import SearchResult

CLOSEST_TRIES = 20
"""Layouts with the least bounds on memory that are cut into stages."""


def closest_to_fitting(result: SearchResult) -> Candidate:
    """The layout of a search without an answer that lacks the least, its stages as even as can be."""
    rows = np.argsort(result.bound_bytes, kind="stable")[:CLOSEST_TRIES]
    tried = (expand_row(result.costs, int(row)) for row in rows)
    return min(
        tried, key=lambda c: (c.estimate.required_bytes - c.estimate.budget_bytes, c.estimate.step_time_s, c.idx)
    )


class StageDemand(NamedTuple):
    """What must be within the budget on one stage, and the budget of its devices; of mixed clusters also their memory."""

    required_bytes: int
    budget_bytes: int
    total_bytes: int

    @property
    def free_bytes(self) -> int:
        """What is left; below zero where it does not fit."""
        return self.budget_bytes - self.required_bytes


def stage_demands(estimate: Estimate, workload: Workload, cluster: ClusterSpec) -> list[StageDemand]:
    """Required and allowed bytes of each stage, on the part of a mixed cluster that it lies on."""
    of_part = {part_label(cluster.parts, g): part.cluster for g, part in enumerate(cluster.parts)}
    demands = []
    for stage in estimate.stages:
        own, parts = of_part.get(stage.device, cluster), stage.memory_bytes
        required = int(memory.required_bytes(parts.total, parts.parameters, workload, own))
        demands.append(StageDemand(required, own.memory_budget_bytes, own.weakest_device.memory_bytes))
    return demands


def tightest_stage(demands: Sequence[StageDemand]) -> int:
    """The stage with the least left."""
    return min(range(len(demands)), key=lambda s: (demands[s].free_bytes, s))


def shortfall(layout: Layout, estimate: Estimate, workload: Workload, cluster: ClusterSpec) -> tuple[str, str]:
    """Which stage needs how much more than there is, and what its memory is made of."""
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


def largest_memory_terms(parts: MemoryBreakdown, wanted: int = 3) -> str:
    """The largest parts of a device's memory in words."""
    largest = sorted(parts.model_dump().items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in largest[:wanted])


FIT_TRIES = 6
"""Layouts expanded for each of the two orders."""


ROOMY_FRACTION = 0.9
"""Bounds take stages as balanced; layouts below this part of the budget mostly fit with real ones."""


LEAN: dict[str, Any] = {"micro_batch_size": 1, "recompute": "full", "num_model_chunks": 1, "etp": 1}
"""What a layout with the least memory mostly has; where these are fixed, a space is some hundred times smaller."""


def estimate_layout(request: PlanRequest, layout: Layout) -> Estimate:
    """What one layout of a request costs, whether it fits or not."""
    batch = LayoutTable.from_layouts([layout], request.workload.global_batch_size)
    return expand(CostTable.of(request.model, request.workload, request.cluster, batch), 0).estimate


@dataclass(frozen=True)
class Fit:
    """A layout that fits."""

    layout: Layout
    estimate: Estimate


def find_fit(request: PlanRequest, deadline: Deadline, *, lean: bool = False, first: bool = False) -> Fit | None:
    """A layout that fits, or None where none of those tried does.

    Args:
        lean: only among layouts that are `LEAN` in what is not fixed.
        first: the first that is found instead of the fastest of those tried.

    Raises:
        SolverLimitError: the deadline came first.
    """
    if lean:
        request = replace(request, fixed={**LEAN, **request.fixed})
    try:
        space = request.space(deadline)
    except ConfigError:
        return None

    def checkpoint() -> None:
        deadline.require("verifying a change")

    costs = CostTable.of(request.model, request.workload, request.cluster, space.batch, checkpoint=checkpoint)
    least = memory.lower_bound_required_bytes(memory_bounds(costs), request.workload, request.cluster)
    budget = budget_bytes(costs)
    smallest = np.argsort(least, kind="stable")[:FIT_TRIES]
    roomy = np.flatnonzero(least <= ROOMY_FRACTION * budget)
    fastest = roomy[np.argsort(uniform_time_bounds(costs.select(roomy)), kind="stable")[:FIT_TRIES]]
    rows = np.array(list(dict.fromkeys([*smallest[(least <= budget)[smallest]], *fastest])), dtype=np.int64)
    if not len(rows):
        return None
    some, found = costs.select(rows).compacted(), list[Candidate]()
    for idx in range(len(rows)):
        checkpoint()
        if (candidate := expand_fitting(some, idx)) is not None:
            found.append(candidate)
            if first:
                break
    if not found:
        return None
    best = min(found, key=lambda c: (c.estimate.step_time_s, rows[c.idx]))
    return Fit(best.layout(some.batch), best.estimate)
