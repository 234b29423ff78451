"""What a little more of each resource is worth: the cluster is changed, then estimated and searched again.

| resource | change | how the cluster says it |
|---|---|---|
| memory | 1 GiB more on every device | Device.memory_bytes |
| unlimited memory | as if every device had a thousand times as much | the same |
| link | 1 GB/s more on one level, for whatever shares it | Link.bandwidth_bytes_per_s; measured points move with the line rate |
| compute | 10 % higher rates of matrix products and attention | Calibration.products, attention |
| elementwise | 10 % more bandwidth of memory-bound kernels and the optimizer | Calibration.elementwise |
| host | dispatch 20 times as fast, as good as none | Calibration.host |

What they are worth to a plan with an offload schedule stands in offload.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from ...schema import ClusterSpec, Layout, MeshwrightError, TrainingPlan
from ...schema.base import Frozen
from ...schema.profile import CollectivePoint
from ...schema.units import GB, GIB, format_bytes
from ..plan import estimate
from ..rank_map import place_as_planned
from ..request import PlanRequest
from ..search import REL_GAP
from ..space import Space, build_space
from ..tasks.training import search_layouts

MORE_COMPUTE = 1.1

LARGEST_RATIO = 19.9
"""Calibration ratios stay below 20."""

Resource = Literal[
    "memory", "unlimited_memory", "link", "compute", "elementwise", "host", "host_memory", "host_link", "host_update"
]
"""What may be more: the last three of plans with an offload schedule."""


BoundBy = Literal[
    "compute", "recompute", "optimizer", "bubble", "link", "host", "memory",
    "offload", "host_memory", "host_link", "host_update",
]  # fmt: skip


class Binding(Frozen):
    """One thing that bounds the plan.

    Attributes:
        seconds: a part of the step; what it gains with twice the rate of a link (also that to the host, and of updates by the
            host's processors), or without the host's dispatch; or for memory what the fastest layout gains when memory is no limit,
            for the host's memory what this layout gains; None where that was not searched.
    """

    resource: BoundBy
    seconds: float | None
    text: str


class LinkUse(Frozen):
    """One link level.

    Attributes:
        axes: axes of the layout whose outermost link this is.
        seconds: by how much the step is shorter when this level has twice its rate, the layout kept.
    """

    level_idx: int
    name: str
    domain_size: int
    bandwidth_bytes_per_s: float
    axes: tuple[str, ...]
    seconds: float


class MarginalValue(Frozen):
    """What a changed cluster is worth, by estimating and searching again with it.

    Attributes:
        change: in words.
        kept_s: what the plan's layout gains, seconds of a step; best_s: what the fastest layout gains over the fastest one of the
            unchanged cluster; None where the time limit came before that search. Of plans with an offload schedule both are
            differences of bounds (planner/explain/offload.py).
        best: the fastest layout of the changed cluster, where it is another one.
    """

    resource: Resource
    change: str
    kept_s: float
    best_s: float | None = None
    best: Layout | None = None


@dataclass(frozen=True)
class ClusterChange:
    """A changed cluster and what to call it; ``searched``: whether the best layout on it is of interest."""

    resource: Resource
    text: str
    cluster: ClusterSpec
    searched: bool = True

    @property
    def adds_memory(self) -> bool:
        """Nothing is faster or slower, more fits."""
        return self.resource in ("memory", "unlimited_memory")


def resource_changes(cluster: ClusterSpec) -> tuple[ClusterChange, ...]:
    """Return the changes that `explain` tries, in the order in which it searches them."""
    memory_bytes = cluster.weakest_device.memory_bytes
    text = f"1 GiB more of memory ({format_bytes(memory_bytes)})"
    compute = with_ratios(cluster, products=MORE_COMPUTE, attention=MORE_COMPUTE)
    host, elementwise = with_ratios(cluster, host=LARGEST_RATIO), with_ratios(cluster, elementwise=MORE_COMPUTE)
    return (
        ClusterChange("memory", text, with_memory(cluster, GIB)),
        ClusterChange("unlimited_memory", "memory without limit", with_memory(cluster, 999 * memory_bytes)),
        ClusterChange("compute", "10 % more compute", compute),
        *(
            ClusterChange(
                "link",
                f"1 GB/s more on {level.link.name} ({level.link.bandwidth_bytes_per_s / GB:g} GB/s)",
                with_bandwidth(cluster, idx, float(GB)),
            )
            for idx, level in enumerate(cluster.levels)
            if level.domain_size > 1
        ),
        ClusterChange("elementwise", "10 % more memory bandwidth", elementwise, searched=False),
        ClusterChange("host", "a host that dispatches in no time", host, searched=False),
    )


def with_memory(cluster: ClusterSpec, more_bytes: int) -> ClusterSpec:
    """Return the cluster whose devices have ``more_bytes`` more each."""
    groups = tuple(
        group.replace(device=group.device.replace(memory_bytes=group.device.memory_bytes + more_bytes))
        for group in cluster.groups
    )
    return cluster.replace(groups=groups)


def with_ratios(cluster: ClusterSpec, **ratios: float) -> ClusterSpec:
    """Multiply rates of the calibration by ``ratios``, as far as they may go."""
    old = cluster.calibration
    changed = {name: min(LARGEST_RATIO, ratio * getattr(old, name)) for name, ratio in ratios.items()}
    return cluster.replace(calibration=old.replace(**changed))


def with_bandwidth(cluster: ClusterSpec, level_idx: int, more_bytes_per_s: float) -> ClusterSpec:
    """Raise the line rate of one link level; what was measured on it beyond its latency takes less by the same ratio.

    Measured bandwidth between nodes grows by this ratio too, if the level is the one that joins them all.
    """
    link = cluster.levels[level_idx].link
    rate = link.bandwidth_bytes_per_s + more_bytes_per_s
    ratio = rate / link.bandwidth_bytes_per_s
    faster = link.replace(bandwidth_bytes_per_s=rate, measured=_faster_points(link.measured, ratio))
    levels = tuple(level.replace(link=faster) if i == level_idx else level for i, level in enumerate(cluster.levels))
    groups = tuple(
        group.replace(
            levels=tuple(level.replace(link=faster) if level.link == link else level for level in group.levels)
        )
        for group in cluster.groups
    )
    changed = cluster.replace(levels=levels, groups=groups)
    if cluster.bandwidth_matrix is None or level_idx < len(cluster.levels) - 1:
        return changed
    matrix = tuple(tuple(ratio * between for between in row) for row in cluster.bandwidth_matrix)
    return changed.replace(bandwidth_matrix=matrix)


def _faster_points(points: Sequence[CollectivePoint], ratio: float) -> tuple[CollectivePoint, ...]:
    """Shrink by ``ratio`` what is beyond the latency, which the smallest message of each operation and group takes."""
    latency: dict[tuple[str, int], float] = {}
    for point in points:
        key = (point.op, point.group_size)
        latency[key] = min(point.time_s, latency.get(key, point.time_s))
    floors = [latency[point.op, point.group_size] for point in points]
    return tuple(
        point.replace(time_s=floor + (point.time_s - floor) / ratio)
        for point, floor in zip(points, floors, strict=True)
    )


def marginal_values(plan: TrainingPlan, request: PlanRequest) -> tuple[float | None, tuple[MarginalValue, ...]]:
    """Return seconds of the fastest layout, and what each change gains for the plan's layout and for the fastest one."""
    planned_s = _planned_s(plan, plan.cluster)
    fastest = _fastest(request)
    values = []
    for change in resource_changes(plan.cluster):
        changed_s = _planned_s(plan, change.cluster)
        if planned_s is None or changed_s is None:
            continue
        gain_s = planned_s - changed_s
        if change.adds_memory:  # the old stages still fit, even where the heuristic for uneven ones finds others
            gain_s = max(0.0, gain_s)
        best_s, best = None, None
        if fastest is not None and change.searched:
            layout, seconds = _fastest_with(request, change, fastest) or (None, None)
            if seconds is not None:
                best_s = fastest.step_time_s - seconds
                best_s = best_s if abs(best_s) > REL_GAP * seconds else 0.0  # a search does not look for less
                best = layout if layout != fastest.layout else None
        values.append(
            MarginalValue(resource=change.resource, change=change.text, kept_s=gain_s, best_s=best_s, best=best)
        )
    return None if fastest is None else fastest.step_time_s, tuple(values)


def link_uses(
    plan: TrainingPlan, seconds_on: Callable[[ClusterSpec], float | None] | None = None
) -> tuple[LinkUse, ...]:
    """Return each link level, the axes that reach it, and what the plan's layout gains where it is twice as fast.

    A link that takes no time is beyond what the model of overlap describes: its traffic would slow down all compute next to it.

    Args:
        seconds_on: of a step of the layout on a cluster; None: those of its estimate.
    """
    cluster, uses = plan.cluster, []
    seconds_on = seconds_on or partial(_planned_s, plan)
    base_s = seconds_on(cluster)
    for idx, level in enumerate(cluster.levels):
        if level.domain_size == 1:
            continue
        rate = level.link.bandwidth_bytes_per_s
        faster_s = seconds_on(with_bandwidth(cluster, idx, rate))
        uses.append(
            LinkUse(
                level_idx=idx,
                name=level.link.name,
                domain_size=level.domain_size,
                bandwidth_bytes_per_s=rate,
                axes=_axes_on(plan.layout, cluster, idx),
                seconds=0.0 if base_s is None or faster_s is None else max(0.0, base_s - faster_s),
            )
        )
    return tuple(uses)


def _planned_s(plan: TrainingPlan, cluster: ClusterSpec) -> float | None:
    """Return the step time of the plan's layout on a cluster; None where this version cannot estimate it."""
    try:
        return estimate(plan.model, place_as_planned(plan, cluster), plan.workload, plan.layout).step_time_s
    except MeshwrightError:
        return None


@dataclass(frozen=True)
class _Fastest:
    """The fastest layout of the unchanged cluster, the entire space, and what of it has a split that fits, as far as known."""

    layout: Layout
    step_time_s: float
    space: Space
    may_fit: Space


def _fastest(request: PlanRequest) -> _Fastest | None:
    """Search the unchanged cluster; None unless the search ended in time and something fits."""
    try:
        space = build_space(request)
        result = search_layouts(request, space)
    except MeshwrightError:
        return None
    if result.stopped_early or not result.feasible:
        return None
    best, problem = result.feasible[0], result.problem
    rejected = problem.pool.positions[np.array(problem.rejected, dtype=np.int64)]
    may_fit = replace(space, without=np.sort(rejected))
    return _Fastest(best.layout(result.costs.layouts), best.estimate.step_time_s, space, may_fit)


def _fastest_with(request: PlanRequest, change: ClusterChange, fastest: _Fastest) -> tuple[Layout, float] | None:
    """Return the fastest layout of a changed cluster and its seconds; None unless the search ended in time.

    It is at least as good as the old one is there, and where memory stays as it is, so does what fits.
    """
    try:
        old_s = estimate(request.model, change.cluster, request.workload, fastest.layout).step_time_s
        known_s = min(old_s, fastest.step_time_s) if change.adds_memory else old_s
        space = fastest.space if change.adds_memory else fastest.may_fit
        result = search_layouts(replace(request, cluster=change.cluster), space, worse_than_s=known_s)
    except MeshwrightError:
        return None
    if result.stopped_early:
        return None
    best = result.feasible[0] if result.feasible else None
    if best is None or best.estimate.step_time_s >= known_s:
        return fastest.layout, known_s
    return best.layout(result.costs.layouts), best.estimate.step_time_s


def _axes_on(layout: Layout, cluster: ClusterSpec, level_idx: int) -> tuple[str, ...]:
    """Return axes whose groups do not fit into a domain of the level below but into one of this level, ranks in device order."""
    sizes = [1, *(level.domain_size for level in cluster.levels)]
    spans, span = {}, 1
    for name in ("tp", "cp", "dp_shard", "dp_replicate", "pp"):
        span *= getattr(layout, name)
        if getattr(layout, name) > 1:
            spans[name] = span
    if layout.ep * layout.etp > 1:
        spans["ep"] = layout.ep * layout.etp
    return tuple(name for name, size in spans.items() if sizes[level_idx] < size <= sizes[level_idx + 1])
