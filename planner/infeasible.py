"""Why nothing fits: the layout that comes closest, what fills it, and the smallest change that was verified to fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..cost_models.step import memory_bounds
from ..schema import (
    ClusterSpec,
    ConfigError,
    InfeasibleError,
    LinkLevel,
    MeshwrightError,
    ModelSpec,
    Workload,
)
from ..schema.units import format_bytes
from .deadline import Deadline, no_incumbent
from .search import SearchResult, expand_row, search
from .space import build_space

MAX_GROWTH = 256
"""Largest multiple of the cluster that is tried for the advice."""


def explain_infeasible(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    fixed: Mapping[str, Any],
    result: SearchResult,
    *,
    runnable: bool,
    deadline: Deadline,
) -> MeshwrightError:
    """The error for a search that found nothing that fits."""
    costs = result.costs
    budget = cluster.memory_budget_bytes
    if result.stopped_early:
        done = f"{result.evaluated} of {len(costs.batch)} layouts evaluated; none is faster than {result.bound_s:.4g} s"
        return no_incumbent(deadline, f"for {model.name}", done)
    best = min(
        (expand_row(costs, int(i)) for i in np.argsort(memory_bounds(costs))[:20]),
        key=lambda c: c.estimate.peak_allocated_bytes,
    )
    layout, needs = best.layout(costs.batch), best.estimate.required_bytes
    parts = sorted(best.estimate.memory_bytes.model_dump().items(), key=lambda item: -item[1])
    device = cluster.weakest_device
    return InfeasibleError(
        f"no plan fits {model.name} on {cluster.num_devices} x {device.name}",
        details=(
            f"needs up to {format_bytes(needs)} per device at best ({layout}); budget {format_bytes(budget)} = "
            f"{format_bytes(device.memory_bytes)} total - {format_bytes(cluster.reserved_bytes)} reserved   [memory (C2)]",
            "largest: " + ", ".join(f"{name} {format_bytes(value)}" for name, value in parts[:3]),
        ),
        help=_smallest_fit(model, cluster, workload, fixed, runnable=runnable),
    )


def _smallest_fit(
    model: ModelSpec, cluster: ClusterSpec, workload: Workload, fixed: Mapping[str, Any], *, runnable: bool
) -> str | None:
    """The least number of devices (a power of two times these) for which a plan was found."""
    factor = 2
    while factor <= MAX_GROWTH:
        larger = _grown(cluster, factor)
        try:
            space = build_space(model, workload, larger, fixed, runnable=runnable)
            found = search(model, workload, larger, space, time_limit_s=2.0)
        except ConfigError:
            return None  # the batch or a fixed degree does not divide over more devices
        if found.fitting:
            return f"use {larger.num_devices} devices ({format_bytes(found.fitting[0].estimate.required_bytes)} each)"
        factor *= 2
    return None


def _grown(cluster: ClusterSpec, factor: int) -> ClusterSpec:
    """The cluster with ``factor`` times as many nodes of each group, joined by its outermost link."""
    groups = tuple(group.replace(num_nodes=group.num_nodes * factor) for group in cluster.groups)
    total = cluster.num_devices * factor
    outer = cluster.levels[-1]
    inner = cluster.levels[:-1] if len(cluster.levels) > 1 else cluster.levels
    levels = (*inner, LinkLevel(link=outer.link, domain_size=total))
    return cluster.replace(groups=groups, levels=levels, bandwidth_matrix=None, profile=None)
