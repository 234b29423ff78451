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

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from ...schema import ClusterSpec, Layout, MeshwrightError, TrainingPlan
from ...schema.base import Frozen
from ...schema.profile import CollectivePoint
from ...schema.units import GB, GIB, format_bytes
from ..expand import expand_layout
from ..plan import estimate
from ..planned_stages import reestimate
from ..rank_map import place_as_planned
from ..request import PlanRequest
from ..search import SearchResult, search
from ..space import Space, build_space
from ..tasks.training import plan_candidate, search_layouts

MORE_COMPUTE = 1.1

MIN_GAIN = 0.005
"""Another layout is the best of a changed cluster where it is so much faster than the old one there: less is not worth a move."""

MAX_EXPANDED = 48
"""Layouts that each search of a changed cluster cuts into stages; on the largest clusters more of them are close."""

SAME_PREDICTION = 1e-3
"""An estimate that differs by more from the plan's was made by another version of the model."""

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
        kept_s: what the plan's layout gains, seconds of a step; best_s: what the fastest gains at least over the fastest one of
            the unchanged cluster (`Fastest.with_change`); None where the time limit came before that search. Of plans with an
            offload schedule both are differences of bounds (planner/explain/offload.py).
        best: the fastest layout of the changed cluster, where it is another one.
    """

    resource: Resource
    change: str
    kept_s: float
    best_s: float | None = None
    best: Layout | None = None


@dataclass(frozen=True)
class ClusterChange:
    """A changed cluster and what to call it.

    Attributes:
        searched: whether the best layout on it is of interest.
        max_speedup: no layout gains more than this ratio, which is that of the rate.
    """

    resource: Resource
    text: str
    cluster: ClusterSpec
    searched: bool = True
    max_speedup: float = math.inf

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
                max_speedup=1 + GB / level.link.bandwidth_bytes_per_s,
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


def marginal_values(plan: TrainingPlan, request: PlanRequest, fastest: Fastest | None) -> Iterator[MarginalValue]:
    """Yield what each change gains for the plan's layout and for the fastest one, in the order in which they are searched.

    With more memory the layout is cut and ordered anew; otherwise its stages and their order are kept.
    """
    planned_s = _planned_s(plan, plan.cluster)
    for change in resource_changes(plan.cluster):
        changed_s = _same_layout_s(plan, change)
        if planned_s is None or changed_s is None:
            continue
        gain_s = planned_s - changed_s
        if change.adds_memory:  # the old stages still fit, even where the heuristic for uneven ones finds others
            gain_s = max(0.0, gain_s)
        best_s, best = None, None
        if fastest is not None and change.searched:
            old_s = changed_s if fastest.plan is plan else _same_layout_s(fastest.plan, change)
            layout, seconds = fastest.with_change(request, change, old_s) or (None, None)
            if seconds is not None:
                best_s = max(0.0, fastest.step_time_s - seconds)
                best = None if layout == fastest.layout else layout
        yield MarginalValue(resource=change.resource, change=change.text, kept_s=gain_s, best_s=best_s, best=best)


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
    """Return the step time of the plan's stages on a cluster; None where this version cannot estimate it."""
    try:
        return reestimate(plan, cluster).step_time_s
    except MeshwrightError:
        return None


def _same_layout_s(plan: TrainingPlan, change: ClusterChange) -> float | None:
    """Return the step time of the plan's layout on a changed cluster; with more memory it is cut into stages anew."""
    if not change.adds_memory:
        return _planned_s(plan, change.cluster)
    try:
        placed = place_as_planned(plan, change.cluster)
        return estimate(plan.model, placed, plan.workload, plan.layout).step_time_s
    except MeshwrightError:
        return None


@dataclass
class Fastest:
    """The fastest layout of the unchanged cluster, and the layouts among which searches of a changed one look.

    Attributes:
        plan: its stages; where the plan has a simpler layout, the same plan with the fastest one.
        bound_s: no layout of the unchanged cluster is faster.
        space: all layouts; may_fit: without those that a search with no less memory than there is found no room for.
    """

    plan: TrainingPlan
    bound_s: float
    space: Space
    may_fit: Space

    @property
    def layout(self) -> Layout:
        """Of the plan."""
        return self.plan.layout

    @property
    def step_time_s(self) -> float:
        """Of the plan."""
        return self.plan.estimate.step_time_s

    @classmethod
    def of(cls, plan: TrainingPlan, request: PlanRequest) -> Fastest | None:
        """Return what the plan's search found where it ended and this version agrees; else search again.

        None unless the search ended in time and something fits, and of plans over lengths, each search of which takes as long as
        the plan did.
        """
        if plan.workload.lengths is not None:
            return None
        try:
            space = build_space(request)
            if plan.search is not None and (known := _still_fastest(plan, request)) is not None:
                return cls(known, plan.search.bound_s, space, space)
            result = search_layouts(request, space)
        except MeshwrightError:
            return None
        if result.stopped_early or not result.feasible:
            return None
        best = result.feasible[0]
        fastest = plan_candidate(request, best.layout(result.costs.layouts), best, result.certificate())
        return cls(fastest, result.bound_s, space, _without_rejected(space, result))

    def with_change(
        self, request: PlanRequest, change: ClusterChange, old_s: float | None
    ) -> tuple[Layout, float] | None:
        """Return the fastest layout of a changed cluster and its seconds; None unless the search ended in time.

        It begins with the old one's ``old_s``, which another has to beat by MIN_GAIN, and looks at MAX_EXPANDED layouts.
        What fits in no more memory than there was is left out where memory stays as it is; only where it grows are orders of passes
        made anew.
        """
        if old_s is None:
            return None
        known_s = min(old_s, self.step_time_s)
        below_s = known_s * (1 - MIN_GAIN)
        if self.bound_s / change.max_speedup >= below_s:
            return self.layout, known_s
        try:
            run = search_layouts if change.adds_memory else search
            space = self.space if change.adds_memory else self.may_fit
            result = run(
                replace(request, cluster=change.cluster), space, worse_than_s=below_s, max_expanded=MAX_EXPANDED
            )
        except MeshwrightError:
            return None
        if result.stopped_early:
            return None
        if change.resource == "memory":
            self.may_fit = _without_rejected(self.may_fit, result)
        best = result.feasible[0] if result.feasible else None
        if best is None or best.estimate.step_time_s >= below_s:
            return self.layout, known_s
        return best.layout(result.costs.layouts), best.estimate.step_time_s


def _still_fastest(plan: TrainingPlan, request: PlanRequest) -> TrainingPlan | None:
    """Return the plan, or that of the fastest layout that it names, if its search ended and this version predicts the same."""
    if plan.search is None or plan.search.status == "stopped":
        return None
    objective_s = plan.search.objective_s
    if plan.fastest is not None:
        candidate = expand_layout(request, plan.fastest.layout)
        plan = plan_candidate(request, plan.fastest.layout, candidate, plan.search)
    again_s, same = _planned_s(plan, plan.cluster), (plan.estimate.step_time_s, objective_s)
    is_same = again_s is not None and all(math.isclose(again_s, seconds, rel_tol=SAME_PREDICTION) for seconds in same)
    return plan if is_same else None


def _without_rejected(space: Space, result: SearchResult) -> Space:
    rejected = result.problem.pool.positions[np.array(result.problem.rejected, dtype=np.int64)]
    return replace(space, without=np.union1d(space.without, rejected))


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
