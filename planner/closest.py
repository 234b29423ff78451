"""Of the layouts that do not fit, the one that lacks the least, and what of it binds."""

from __future__ import annotations

import numpy as np

from ..cost_models import memory
from ..schema import ClusterSpec, Estimate, Layout, Workload
from ..schema.plan import MemoryBreakdown
from ..schema.units import format_bytes
from .search import Candidate, SearchResult, expand_row

TRIES = 20
"""Layouts with the least bounds on memory that are cut into stages."""


def closest(result: SearchResult) -> Candidate:
    """The layout of a search without an answer that requires the least, its stages as even as can be."""
    rows = np.argsort(result.bound_bytes, kind="stable")[:TRIES]
    tried = (expand_row(result.costs, int(row)) for row in rows)
    return min(tried, key=lambda c: (c.estimate.required_bytes, c.estimate.step_time_s, c.idx))


def required_of_stages(estimate: Estimate, workload: Workload, cluster: ClusterSpec) -> list[int]:
    """What must be within the budget on each stage (`Estimate.required_bytes` is that of the fullest)."""
    parts = (stage.memory_bytes for stage in estimate.stages)
    return [int(memory.required_bytes(p.total, p.parameters, workload, cluster)) for p in parts]


def shortfall(layout: Layout, estimate: Estimate, workload: Workload, cluster: ClusterSpec) -> tuple[str, str]:
    """Which stage needs how much more than there is, and what its memory is made of."""
    required = required_of_stages(estimate, workload, cluster)
    fullest = max(range(len(required)), key=required.__getitem__)
    budget, total = cluster.memory_budget_bytes, cluster.weakest_device.memory_bytes
    where = f"stage {fullest} of {len(required)} needs" if len(required) > 1 else "needs"
    return (
        f"{where} up to {format_bytes(required[fullest])} per device at best ({layout}); budget {format_bytes(budget)} = "
        f"{format_bytes(total)} total - {format_bytes(cluster.reserved_bytes)} reserved: "
        f"{format_bytes(required[fullest] - budget)} too much   [memory (C2)]",
        "largest: " + largest_parts(estimate.stages[fullest].memory_bytes),
    )


def largest_parts(parts: MemoryBreakdown, wanted: int = 3) -> str:
    """The largest parts of a device's memory in words."""
    largest = sorted(parts.model_dump().items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in largest[:wanted])
