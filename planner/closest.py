"""Of the layouts that do not fit, the one that lacks the least, and what of it binds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..cost_models import memory
from ..schema import ClusterSpec, Estimate, Layout, Workload
from ..schema.cluster_parts import label_of
from ..schema.plan import MemoryBreakdown
from ..schema.units import format_bytes
from .expansion import Candidate, expand_row
from .search import SearchResult

TRIES = 20
"""Layouts with the least bounds on memory that are cut into stages."""


def closest(result: SearchResult) -> Candidate:
    """The layout of a search without an answer that lacks the least, its stages as even as can be."""
    rows = np.argsort(result.bound_bytes, kind="stable")[:TRIES]
    tried = (expand_row(result.costs, int(row)) for row in rows)
    return min(
        tried, key=lambda c: (c.estimate.required_bytes - c.estimate.budget_bytes, c.estimate.step_time_s, c.idx)
    )


class Demand(NamedTuple):
    """What must be within the budget on one stage, and the budget of its devices; of mixed clusters also their memory."""

    required_bytes: int
    budget_bytes: int
    total_bytes: int

    @property
    def free_bytes(self) -> int:
        """What is left; below zero where it does not fit."""
        return self.budget_bytes - self.required_bytes


def demand_of_stages(estimate: Estimate, workload: Workload, cluster: ClusterSpec) -> list[Demand]:
    """Required and allowed bytes of each stage, on the part of a mixed cluster that it lies on."""
    of_part = {label_of(cluster.parts, g): part.cluster for g, part in enumerate(cluster.parts)}
    demands = []
    for stage in estimate.stages:
        own, parts = of_part.get(stage.device, cluster), stage.memory_bytes
        required = int(memory.required_bytes(parts.total, parts.parameters, workload, own))
        demands.append(Demand(required, own.memory_budget_bytes, own.weakest_device.memory_bytes))
    return demands


def tightest(demands: Sequence[Demand]) -> int:
    """The stage with the least left."""
    return min(range(len(demands)), key=lambda s: (demands[s].free_bytes, s))


def shortfall(layout: Layout, estimate: Estimate, workload: Workload, cluster: ClusterSpec) -> tuple[str, str]:
    """Which stage needs how much more than there is, and what its memory is made of."""
    demands = demand_of_stages(estimate, workload, cluster)
    fullest = tightest(demands)
    required, budget, total = demands[fullest]
    where = f"stage {fullest} of {len(demands)} needs" if len(demands) > 1 else "needs"
    return (
        f"{where} up to {format_bytes(required)} per device at best ({layout}); budget {format_bytes(budget)} = "
        f"{format_bytes(total)} total - {format_bytes(cluster.reserved_bytes)} reserved: "
        f"{format_bytes(required - budget)} too much   [memory (C2)]",
        "largest: " + largest_parts(estimate.stages[fullest].memory_bytes),
    )


def largest_parts(parts: MemoryBreakdown, wanted: int = 3) -> str:
    """The largest parts of a device's memory in words."""
    largest = sorted(parts.model_dump().items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in largest[:wanted])
