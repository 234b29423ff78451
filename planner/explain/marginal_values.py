"""What a little more of each resource is worth: the cluster is changed, then estimated and searched again.

| resource | change | how the cluster says it |
|---|---|---|
| memory | 1 GiB more on every device | Device.memory_bytes |
| unlimited memory | as if every device had a thousand times as much | the same |
| link | 1 GB/s more on one level, for whatever shares it | Link.bandwidth_bytes_per_s; measured points move with the line rate |
| compute | 10 % higher rates of matrix products and attention | Calibration.products, attention |
| elementwise | 10 % more bandwidth of memory-bound kernels and the optimizer | Calibration.elementwise |
| host | dispatch 20 times as fast, as good as none | Calibration.host |

For a plan with an offload schedule figures are differences of the count form's optimum (solvers/offload/bound.py), a bound on every
schedule that is monotone in every resource and has no rounding in it: of the plan's layout, and of the layout where it is lowest.
Against the duals of the linear program layer by layer, which the plan has too, these are full steps and not margins.

| resource | change | how the problem says it |
|---|---|---|
| host memory | 1 GiB more on every node | OffloadInstance.host_cap_bytes |
| host link | 1 GB/s more each way for every rank | Links |
| host update | processors of the host 10 % faster | OffloadInstance.host_update_s |
| the others | as above | the cluster |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ...schema import ClusterSpec, Layout, MeshwrightError, TrainingPlan
from ...schema.units import GB, GIB, format_bytes
from ...solvers.offload.bound import lower_bound_s
from ...solvers.offload.instance import OffloadInstance
from ..plan import estimate
from ..rank_map import place_as_planned
from ..request import PlanRequest
from ..search import REL_GAP
from ..space import Space, build_space
from ..tasks.offload import UNIFORM, OffloadSpace
from ..tasks.offload_problem import (
    build_instances,
    choice_of_plan,
    constant_s,
    option_costs_of_plan,
    without_schedule,
)
from ..tasks.training import search_layouts
from .cluster_changes import LARGEST_RATIO, twice_as_fast, with_bandwidth, with_memory, with_ratios
from .explanation import Binding, LinkUse, MarginalValue, Resource

MORE_COMPUTE = 1.1

MORE_BANDWIDTH_BYTES_PER_S = float(GB)

MIN_DIFFERENCE = 1e-6
"""Of a step: below it a difference of two linear programs is their tolerance."""


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
    links = tuple(
        ClusterChange(
            "link",
            f"1 GB/s more on {level.link.name} ({level.link.bandwidth_bytes_per_s / GB:g} GB/s)",
            with_bandwidth(cluster, idx, MORE_BANDWIDTH_BYTES_PER_S),
        )
        for idx, level in enumerate(cluster.levels)
        if level.domain_size > 1
    )
    device = cluster.weakest_device
    return (
        ClusterChange(
            "memory", f"1 GiB more of memory ({format_bytes(device.memory_bytes)})", with_memory(cluster, GIB)
        ),
        ClusterChange("unlimited_memory", "memory without limit", with_memory(cluster, 999 * device.memory_bytes)),
        ClusterChange(
            "compute", "10 % more compute", with_ratios(cluster, products=MORE_COMPUTE, attention=MORE_COMPUTE)
        ),
        *links,
        ClusterChange(
            "elementwise", "10 % more memory bandwidth", with_ratios(cluster, elementwise=MORE_COMPUTE), searched=False
        ),
        ClusterChange(
            "host", "a host that dispatches in no time", with_ratios(cluster, host=LARGEST_RATIO), searched=False
        ),
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
        faster_s = seconds_on(twice_as_fast(cluster, idx))
        uses.append(
            LinkUse(
                level_idx=idx,
                name=level.link.name,
                domain_size=level.domain_size,
                bandwidth_bytes_per_s=level.link.bandwidth_bytes_per_s,
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
    """Axes whose groups do not fit into a domain of the level below but into one of this level, ranks in device order."""
    sizes = [1, *(level.domain_size for level in cluster.levels)]
    inner, outer = sizes[level_idx], sizes[level_idx + 1]
    spans, span = {}, 1
    for name in ("tp", "cp", "dp_shard", "dp_replicate", "pp"):
        span *= getattr(layout, name)
        if getattr(layout, name) > 1:
            spans[name] = span
    if layout.ep * layout.etp > 1:
        spans["ep"] = layout.ep * layout.etp
    return tuple(name for name, size in spans.items() if inner < size <= outer)


Changed = Callable[[OffloadInstance], OffloadInstance]


@dataclass(frozen=True)
class _Case:
    """A cluster and what becomes of each problem on it."""

    resource: Resource
    text: str
    cluster: ClusterSpec
    change: Changed
    searched: bool = True


class ScheduleMarginalValues:
    """What changes are worth to one plan with a schedule."""

    def __init__(self, plan: TrainingPlan, request: PlanRequest) -> None:
        """Bound the plan's layout as it is."""
        assert request.offload is not None
        self._plan, self._request, self._offload = plan, request, request.offload
        self._base_s = self._bound_s(plan.cluster)

    def seconds_on(self, cluster: ClusterSpec) -> float | None:
        """Return the bound of the plan's layout on a cluster; None where nothing of it fits."""
        bound_s = self._bound_s(cluster)
        return bound_s if math.isfinite(bound_s) else None

    def _bound_s(self, cluster: ClusterSpec, change: Changed | None = None) -> float:
        options = option_costs_of_plan(self._plan, place_as_planned(self._plan, cluster))
        fixed = self._request.fixed.get("recompute")
        problems = build_instances(options, 0, self._offload, fixed if fixed in UNIFORM else None)
        changed = [change(problem) if change else problem for problem in problems]
        return min(lower_bound_s(problem) for problem in changed) + constant_s(options, 0)

    def marginal_values(self) -> tuple[MarginalValue, ...]:
        """Return what each change gains for the plan's layout, and for the one where the bound is then lowest."""
        lowest = self._lowest(_Case("memory", "", self._plan.cluster, _unchanged))
        return tuple(self._value(case, lowest) for case in self._cases())

    def _cases(self) -> Sequence[_Case]:
        cluster = self._plan.cluster
        cases = [
            _Case(change.resource, change.text, change.cluster, _unchanged, change.searched)
            for change in resource_changes(cluster)
        ]
        rates = self._offload.rates(self._plan.workload, cluster)
        ranks = cluster.largest_node
        if math.isfinite(rates.memory_bytes):
            text = f"1 GiB more of host memory a node ({format_bytes(rates.memory_bytes * ranks)})"
            cases.insert(1, _Case("host_memory", text, cluster, _with_host_memory(GIB / ranks)))
        each_way = (rates.to_host_bytes_per_s, rates.to_device_bytes_per_s)
        text = f"1 GB/s more to and from the host ({each_way[0] / GB:.3g} and {each_way[1] / GB:.3g} GB/s a rank)"
        cases.insert(-2, _Case("host_link", text, cluster, _with_links(1.0 * GB)))
        text = "host processors that update 10 % faster"
        cases.insert(-2, _Case("host_update", text, cluster, _with_updates(MORE_COMPUTE), searched=False))
        return cases

    def _value(self, case: _Case, lowest: tuple[Layout, float] | None) -> MarginalValue:
        planned = self._base_s - self._bound_s(case.cluster, case.change)
        best = self._lowest(case) if case.searched and lowest is not None else None
        gained, layout = None, None
        if best is not None and lowest is not None:
            gained, layout = lowest[1] - best[1], best[0] if best[0] != lowest[0] else None
            plain, step_s = self._without_schedule(case), self._plan.estimate.step_time_s
            if plain is not None and step_s - plain[1] > max(gained, 0.0):
                gained, layout = step_s - plain[1], plain[0]
        return MarginalValue(
            resource=case.resource,
            change=case.text,
            kept_s=self._visible(planned),
            best_s=None if gained is None else self._visible(gained),
            best=layout,
        )

    def _lowest(self, case: _Case) -> tuple[Layout, float] | None:
        """Return the layout whose bound is lowest, without its schedule, and the bound; None where time is over or nothing fits."""
        request = replace(self._request, cluster=case.cluster)
        try:
            space = OffloadSpace(request, case.change)
        except MeshwrightError:
            return None
        lowest = space.lowest_bound()
        return (
            None if lowest is None else (without_schedule(space.options.minimum.layouts.layout(lowest[0])), lowest[1])
        )

    def _without_schedule(self, case: _Case) -> tuple[Layout, float] | None:
        """Return the fastest layout of the changed cluster that needs no offload, where it is faster than the plan."""
        if case.cluster == self._plan.cluster:
            return None
        request = replace(self._request, cluster=case.cluster)
        try:
            result = search_layouts(request, worse_than_s=self._plan.estimate.step_time_s)
        except MeshwrightError:
            return None
        if not result.feasible:
            return None
        return result.feasible[0].layout(result.costs.layouts), result.feasible[0].estimate.step_time_s

    def _visible(self, gain_s: float) -> float:
        return gain_s if abs(gain_s) > MIN_DIFFERENCE * self._base_s else 0.0

    def bindings(self) -> tuple[Binding, ...]:
        """Return what of the host binds: its memory, the link to it, its processors."""
        return (self._host_memory(), *self._host_rates())

    def _host_memory(self) -> Binding:
        schedule = self._plan.offload
        assert schedule is not None
        stored = f"{format_bytes(schedule.host_bytes)} of a node's host memory"
        if schedule.host_budget_bytes is None:
            text = f"{stored}; how much there is, is not known   [(C7)]"
            return Binding(resource="host_memory", seconds=None, text=text)
        gain_s = self._visible(self._base_s - self._bound_s(self._plan.cluster, _with_host_memory(math.inf)))
        does = "more of it is faster" if gain_s > 0 else "it does not bind"
        text = f"{stored}, {format_bytes(schedule.host_budget_bytes)} allowed; {does}   [(C7)]"
        return Binding(resource="host_memory", seconds=gain_s, text=text)

    def _host_rates(self) -> tuple[Binding, ...]:
        """Return what twice the rate saves."""
        schedule, cluster = self._plan.offload, self._plan.cluster
        assert schedule is not None
        rates = self._offload.rates(self._plan.workload, cluster)
        link_s = self._base_s - self._bound_s(cluster, _with_links(0.0, times=2.0))
        moved = (
            f"{format_bytes(schedule.to_host_bytes)} down, {format_bytes(schedule.to_device_bytes)} up a step and rank"
        )
        lines = f"{rates.to_host_bytes_per_s / GB:.3g} and {rates.to_device_bytes_per_s / GB:.3g} GB/s"
        text = f"twice as fast: copies to and from the host at {lines} ({moved})   [(C3)]"
        bindings = [Binding(resource="host_link", seconds=max(0.0, link_s), text=text)]
        choice = choice_of_plan(self._plan)
        if count := int((choice.host_optimizer | choice.parameters).sum()):
            updates_s = self._base_s - self._bound_s(cluster, _with_updates(2.0))
            text = f"twice as fast: updates by the host's processors ({count} layers)   [(C9)]"
            bindings.append(Binding(resource="host_update", seconds=max(0.0, updates_s), text=text))
        return tuple(bindings)


def _unchanged(problem: OffloadInstance) -> OffloadInstance:
    return problem


def _with_host_memory(more_bytes: float) -> Changed:
    return lambda problem: replace(problem, host_cap_bytes=problem.host_cap_bytes + more_bytes)


def _with_links(more_bytes_per_s: float, *, times: float = 1.0) -> Changed:
    def changed(problem: OffloadInstance) -> OffloadInstance:
        links = problem.links
        down, up = (
            times * rate + more_bytes_per_s for rate in (links.to_host_bytes_per_s, links.to_device_bytes_per_s)
        )
        return replace(problem, links=replace(links, to_host_bytes_per_s=down, to_device_bytes_per_s=up))

    return changed


def _with_updates(times: float) -> Changed:
    return lambda problem: replace(problem, host_update_s=problem.host_update_s / times)
