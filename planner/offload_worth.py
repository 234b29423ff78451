"""What a little more of each resource is worth to a plan with an offload schedule.

Figures are differences of the count form's optimum (solvers/offload_count.py), a bound on every schedule that is monotone in every
resource and has no rounding in it: of the plan's layout, and of the layout where it is least. Against the duals of the linear
program layer by layer, which the plan has too, these are whole steps and not margins.

| resource | change | how the problem says it |
|---|---|---|
| host memory | 1 GiB more on every node | Instance.host_cap_bytes |
| host link | 1 GB/s more each way for every rank | Links |
| host update | processors of the host 10 % faster | Instance.host_update_s |
| the others | worth.changes | the cluster |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..schema import ClusterSpec, Layout, MeshwrightError, Plan
from ..schema.units import GB, GIB, format_bytes
from ..solvers import offload_count
from ..solvers.offload_instance import Instance
from .deadline import Deadline
from .explanation import Binding, Resource, Worth
from .offload_costs import constant_s, instances_of
from .offload_plan import free_of_schedule, options_of, scheduled
from .offload_space import UNIFORM, OffloadSpace
from .request import Request
from .worth import MORE_COMPUTE, Change, as_placed, changes

_Changed = Callable[[Instance], Instance]


@dataclass(frozen=True)
class _Case:
    """A cluster and what becomes of each problem on it."""

    resource: Resource
    text: str
    cluster: ClusterSpec
    problem: _Changed
    searched: bool = True


class ScheduleWorth:
    """What changes are worth to one plan with a schedule."""

    def __init__(self, plan: Plan, request: Request) -> None:
        assert request.offload is not None
        self._plan, self._request, self._offload = plan, request, request.offload
        self._base_s = self._bound_s(plan.cluster, _same)

    def kept_s(self, cluster: ClusterSpec) -> float | None:
        """Bound of the plan's layout on a cluster; None where nothing of it fits."""
        bound_s = self._bound_s(cluster, _same)
        return bound_s if math.isfinite(bound_s) else None

    def _bound_s(self, cluster: ClusterSpec, change: _Changed) -> float:
        options = options_of(self._plan, as_placed(self._plan, cluster))
        fixed = self._request.fixed.get("recompute")
        problems = instances_of(options, 0, self._offload, fixed if fixed in UNIFORM else None)
        return min(offload_count.lower_bound_s(change(problem)) for problem in problems) + constant_s(options, 0)

    def worth(self, deadline: Deadline) -> tuple[Worth, ...]:
        """What each change gains for the plan's layout, and for the one where the bound is then least."""
        least = self._least(_Case("memory", "", self._plan.cluster, _same), deadline)
        return tuple(self._of(case, least, deadline) for case in self._cases())

    def _cases(self) -> Sequence[_Case]:
        cluster = self._plan.cluster
        cases = [_of_cluster(change) for change in changes(cluster)]
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

    def _of(self, case: _Case, least: tuple[Layout, float] | None, deadline: Deadline) -> Worth:
        kept = self._base_s - self._bound_s(case.cluster, case.problem)
        best = None
        if case.searched and least is not None:
            best = self._least(case, deadline)
        gained, layout = None, None
        if best is not None and least is not None:
            gained, layout = least[1] - best[1], best[0] if best[0] != least[0] else None
            plain = self._without_schedule(case, deadline)
            if plain is not None and self._plan.estimate.step_time_s - plain[1] > max(gained, 0.0):
                gained, layout = self._plan.estimate.step_time_s - plain[1], plain[0]
        return Worth(
            resource=case.resource,
            change=case.text,
            kept_s=_visible(kept, self._base_s),
            best_s=None if gained is None else _visible(gained, self._base_s),
            best=layout,
        )

    def _least(self, case: _Case, deadline: Deadline) -> tuple[Layout, float] | None:
        """The layout whose bound is least, without its schedule, and the bound; None where time is over or nothing fits."""
        request = self._request
        try:
            space = OffloadSpace(
                request.model,
                case.cluster,
                request.workload,
                request.fixed,
                request=self._offload,
                runnable=request.runnable,
                deadline=deadline,
                change=case.problem,
            )
        except MeshwrightError:
            return None
        found = space.least(deadline)
        return None if found is None else (free_of_schedule(space.options.least.batch.layout(found[0])), found[1])

    def _without_schedule(self, case: _Case, deadline: Deadline) -> tuple[Layout, float] | None:
        """The fastest layout of the changed cluster that needs no offload, where it is faster than the plan."""
        if case.cluster == self._plan.cluster:
            return None
        changed = replace(self._request, cluster=case.cluster)
        try:
            result = changed.search(deadline, worse_than_s=self._plan.estimate.step_time_s)
        except MeshwrightError:
            return None
        if not result.fitting:
            return None
        return result.fitting[0].layout(result.costs.batch), result.fitting[0].estimate.step_time_s

    def bindings(self) -> tuple[Binding, ...]:
        """What of the host binds: its memory, the link to it, its processors."""
        return (self._host_memory(), *self._rates())

    def _host_memory(self) -> Binding:
        schedule = self._plan.offload
        assert schedule is not None
        held = f"{format_bytes(schedule.host_bytes)} of a node's host memory"
        if schedule.host_budget_bytes is None:
            return Binding(
                resource="host_memory", seconds=None, text=f"{held}; how much there is, is not known   [(C7)]"
            )
        of = f"{held}, {format_bytes(schedule.host_budget_bytes)} allowed"
        free = self._base_s - self._bound_s(self._plan.cluster, _with_host_memory(math.inf))
        does = "more of it is faster" if _visible(free, self._base_s) > 0 else "it does not bind"
        return Binding(resource="host_memory", seconds=_visible(free, self._base_s), text=f"{of}; {does}   [(C7)]")

    def _rates(self) -> tuple[Binding, ...]:
        """What twice the rate saves."""
        schedule, cluster = self._plan.offload, self._plan.cluster
        assert schedule is not None
        rates = self._offload.rates(self._plan.workload, cluster)
        link = self._base_s - self._bound_s(cluster, _with_links(0.0, times=2.0))
        moved = (
            f"{format_bytes(schedule.to_host_bytes)} down, {format_bytes(schedule.to_device_bytes)} up a step and rank"
        )
        lines = f"{rates.to_host_bytes_per_s / GB:.3g} and {rates.to_device_bytes_per_s / GB:.3g} GB/s"
        text = f"twice as fast: copies to and from the host at {lines} ({moved})   [(C3)]"
        bindings = [Binding(resource="host_link", seconds=max(0.0, link), text=text)]
        choice = scheduled(self._plan).choice
        if (choice.host_optimizer | choice.parameters).any():
            updates = self._base_s - self._bound_s(cluster, _with_updates(2.0))
            count = int((choice.host_optimizer | choice.parameters).sum())
            text = f"twice as fast: updates by the host's processors ({count} layers)   [(C9)]"
            bindings.append(Binding(resource="host_update", seconds=max(0.0, updates), text=text))
        return tuple(bindings)


def _of_cluster(change: Change) -> _Case:
    return _Case(change.resource, change.text, change.cluster, _same, change.searched)


def _same(problem: Instance) -> Instance:
    return problem


def _with_host_memory(more_bytes: float) -> _Changed:
    return lambda problem: replace(problem, host_cap_bytes=problem.host_cap_bytes + more_bytes)


def _with_links(more_bytes_per_s: float, *, times: float = 1.0) -> _Changed:
    def changed(problem: Instance) -> Instance:
        links = problem.links
        down, up = (
            times * rate + more_bytes_per_s for rate in (links.to_host_bytes_per_s, links.to_device_bytes_per_s)
        )
        return replace(problem, links=replace(links, to_host_bytes_per_s=down, to_device_bytes_per_s=up))

    return changed


def _with_updates(times: float) -> _Changed:
    return lambda problem: replace(problem, host_update_s=problem.host_update_s / times)


LEAST_DIFFERENCE = 1e-6
"""Of a step: below it a difference of two linear programs is their tolerance."""


def _visible(gain_s: float, of_s: float) -> float:
    return gain_s if abs(gain_s) > LEAST_DIFFERENCE * of_s else 0.0
