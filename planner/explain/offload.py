"""What `explain` says of a plan with an offload schedule: what binds on the host, marginal values, and uniform policies.

Marginal values are differences of the count form's optimum (solvers/offload/bound.py), a bound on every schedule that is monotone
in every resource and has no rounding in it: of the plan's layout, and of the layout where it is lowest. Against the duals of the
linear program layer by layer, which the plan has too, these are full steps and not margins.

| resource | change | how the problem says it |
|---|---|---|
| host memory | 1 GiB more on every node | OffloadInstance.host_cap_bytes |
| host link | 1 GB/s more each way for every rank | Links |
| host update | processors of the host 10 % faster | OffloadInstance.host_update_s |
| the others | as in marginal_values.py | the cluster |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...cost_models.stage.contents import RecomputeCosts
from ...schema import ClusterSpec, Layout, MeshwrightError, OffloadSchedule, TrainingEstimate, TrainingPlan
from ...schema.layout_table import RECOMPUTES
from ...schema.units import GB, GIB, format_bytes
from ...solvers.offload.bound import lower_bound_s
from ...solvers.offload.instance import OffloadChoice, OffloadInstance
from ...solvers.offload.repair import ResourceSums, SimulatedChoice, excess_by_memory, with_widest_window
from ...solvers.offload.schedule import uniform_policy
from ...solvers.offload.simulation import broken_constraints
from ..plan import estimate
from ..rank_map import place_as_planned
from ..request import OffloadRequest, PlanRequest
from ..tasks.offload import UNIFORM, OffloadSpace
from ..tasks.offload_problem import (
    RECOMPUTE_OF,
    build_estimate,
    build_instances,
    choice_of_plan,
    constant_s,
    option_costs_of_plan,
    without_schedule,
)
from ..tasks.training import TOO_LARGE, search_layouts, why_slower, why_too_large
from .marginal_values import MORE_COMPUTE, Binding, ClusterChange, MarginalValue, resource_changes
from .why_not import Comparison, compare

MIN_DIFFERENCE = 1e-6
"""Of a step: below it a difference of two linear programs is their tolerance."""

Changed = Callable[[OffloadInstance], OffloadInstance]


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


@dataclass(frozen=True)
class ScheduleChange(ClusterChange):
    """A cluster and what becomes of each problem on it."""

    change: Changed = _unchanged


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

    def _bound_s(self, cluster: ClusterSpec, change: Changed = _unchanged) -> float:
        options = option_costs_of_plan(self._plan, place_as_planned(self._plan, cluster))
        fixed = self._request.fixed.get("recompute")
        problems = build_instances(options, 0, self._offload, fixed if fixed in UNIFORM else None)
        return min(lower_bound_s(change(problem)) for problem in problems) + constant_s(options, 0)

    def _gain_s(self, change: Changed) -> float:
        return self._base_s - self._bound_s(self._plan.cluster, change)

    def marginal_values(self) -> Iterator[MarginalValue]:
        """Yield what each change gains for the plan's layout, and for the one where the bound is then lowest."""
        lowest = self._lowest(ScheduleChange("memory", "", self._plan.cluster))
        for change in self.changes:
            yield self._value(change, lowest)

    @cached_property
    def changes(self) -> Sequence[ScheduleChange]:
        """What is changed, in this order."""
        cluster = self._plan.cluster
        changes = [ScheduleChange(c.resource, c.text, c.cluster, c.searched) for c in resource_changes(cluster)]
        rates, ranks = self._offload.rates(self._plan.workload, cluster), cluster.largest_node
        if math.isfinite(rates.memory_bytes):
            text = f"1 GiB more of host memory a node ({format_bytes(rates.memory_bytes * ranks)})"
            more = _with_host_memory(GIB / ranks)
            changes.insert(1, ScheduleChange("host_memory", text, cluster, change=more))
        down, up = rates.to_host_bytes_per_s / GB, rates.to_device_bytes_per_s / GB
        text = f"1 GB/s more to and from the host ({down:.3g} and {up:.3g} GB/s a rank)"
        changes.insert(-2, ScheduleChange("host_link", text, cluster, change=_with_links(1.0 * GB)))
        text, faster = "host processors that update 10 % faster", _with_updates(MORE_COMPUTE)
        changes.insert(-2, ScheduleChange("host_update", text, cluster, searched=False, change=faster))
        return changes

    def _value(self, change: ScheduleChange, lowest: tuple[Layout, float] | None) -> MarginalValue:
        planned = self._base_s - self._bound_s(change.cluster, change.change)
        best = self._lowest(change) if change.searched and lowest is not None else None
        gained, layout = None, None
        if best is not None and lowest is not None:
            gained, layout = lowest[1] - best[1], best[0] if best[0] != lowest[0] else None
            plain, step_s = self._without_schedule(change), self._plan.estimate.step_time_s
            if plain is not None and step_s - plain[1] > max(gained, 0.0):
                gained, layout = step_s - plain[1], plain[0]
        return MarginalValue(
            resource=change.resource,
            change=change.text,
            kept_s=self._visible(planned),
            best_s=None if gained is None else self._visible(gained),
            best=layout,
        )

    def _lowest(self, change: ScheduleChange) -> tuple[Layout, float] | None:
        """Return the layout whose bound is lowest, without its schedule, and the bound; None where time is over or nothing fits."""
        try:
            space = OffloadSpace(replace(self._request, cluster=change.cluster), change.change)
        except MeshwrightError:
            return None
        lowest = space.lowest_bound()
        if lowest is None:
            return None
        return without_schedule(space.options.minimum.layouts.layout(lowest[0])), lowest[1]

    def _without_schedule(self, change: ScheduleChange) -> tuple[Layout, float] | None:
        """Return the fastest layout of the changed cluster that needs no offload, where it is faster than the plan."""
        if change.cluster == self._plan.cluster:
            return None
        request = replace(self._request, cluster=change.cluster)
        try:
            result = search_layouts(request, worse_than_s=self._plan.estimate.step_time_s)
        except MeshwrightError:
            return None
        if not result.feasible:
            return None
        return result.feasible[0].layout(result.costs.layouts), result.feasible[0].estimate.step_time_s

    def _visible(self, gain_s: float) -> float:
        return gain_s if abs(gain_s) > MIN_DIFFERENCE * self._base_s else 0.0

    def bindings(self) -> list[Binding]:
        """Return what of the host binds: its memory, and what twice the rate of the link to it and of its processors saves."""
        schedule, choice = self._plan.offload, choice_of_plan(self._plan)
        assert schedule is not None
        rates = self._offload.rates(self._plan.workload, self._plan.cluster)
        moved = (
            f"{format_bytes(schedule.to_host_bytes)} down, {format_bytes(schedule.to_device_bytes)} up a step and rank"
        )
        lines = f"{rates.to_host_bytes_per_s / GB:.3g} and {rates.to_device_bytes_per_s / GB:.3g} GB/s"
        text = f"twice as fast: copies to and from the host at {lines} ({moved})   [(C3)]"
        gain_s = max(0.0, self._gain_s(_with_links(0.0, times=2.0)))
        bindings = [self._host_memory(schedule), Binding(resource="host_link", seconds=gain_s, text=text)]
        if count := int((choice.host_optimizer | choice.parameters).sum()):
            text = f"twice as fast: updates by the host's processors ({count} layers)   [(C9)]"
            gain_s = max(0.0, self._gain_s(_with_updates(2.0)))
            bindings.append(Binding(resource="host_update", seconds=gain_s, text=text))
        return bindings

    def _host_memory(self, schedule: OffloadSchedule) -> Binding:
        stored = f"{format_bytes(schedule.host_bytes)} of a node's host memory"
        if schedule.host_budget_bytes is None:
            text = f"{stored}; how much there is, is not known   [(C7)]"
            return Binding(resource="host_memory", seconds=None, text=text)
        gain_s = self._visible(self._gain_s(_with_host_memory(math.inf)))
        does = "more of it is faster" if gain_s > 0 else "it does not bind"
        text = f"{stored}, {format_bytes(schedule.host_budget_bytes)} allowed; {does}   [(C7)]"
        return Binding(resource="host_memory", seconds=gain_s, text=text)


STAY, MOVE = (0, 1, 2), (3, 4)
"""Options (solvers/offload/instance.py) that move no activations: keep, selective and full recompute; and those that move all, or
under full recompute the blocks' inputs."""


@dataclass(frozen=True)
class Policy:
    """What all layers do alike: where their states lie (`uniform_policy`), and what their activations may do."""

    name: str
    text: str
    place: str
    options: tuple[int, ...]


NO_OFFLOAD = "no offload"

POLICIES = (
    Policy("activations", "all activations on the host, or the inputs of recomputed blocks", "device", MOVE),
    Policy("host updates", "all optimizer states on the host, which updates them (as ZeRO-Offload)", "host", STAY),
    Policy("states streamed", "all optimizer states on the host, streamed to the device", "streamed", STAY),
    Policy("parameters", "all parameters and states on the host (as FSDP2's CPUOffloadPolicy)", "parameters", STAY),
)


def under_policies(plan: TrainingPlan) -> Iterator[Comparison]:
    """Compare a plan with its layout without offload and under each policy, with the recompute that is best for it.

    That is the fastest that fits, or the one that lacks the least.
    """
    yield _without_offload(plan)
    request = OffloadRequest.from_plan(plan)
    assert request is not None
    anything = OffloadRequest(host_memory_bytes=request.host_memory_bytes)
    options = option_costs_of_plan(plan, plan.cluster)
    problems = build_instances(options, 0, anything)
    for policy in POLICIES:
        simulated = [
            (problem, _simulated(problem, choice)) for problem in problems for choice in _choices(problem, policy)
        ]
        if simulated:
            best = min(simulated, key=lambda each: (excess_by_memory(each[0], each[1].simulated).sum(), each[1].step_s))
            yield _compare_policy(plan, policy, options, *best)


def _without_offload(plan: TrainingPlan) -> Comparison:
    """Compare with everything on the device, as any layout without a schedule is costed."""
    layouts = [plan.layout.replace(offload="none", recompute=recompute) for recompute in RECOMPUTES]
    costed = [(estimate(plan.model, plan.cluster, plan.workload, layout), layout) for layout in layouts]

    def order(each: tuple[TrainingEstimate, Layout]) -> tuple[int, float]:
        return max(0, each[0].required_bytes - each[0].budget_bytes), each[0].step_time_s

    plain, layout = min(costed, key=order)
    why = why_slower(plain, plan.estimate) if plain.fits else f"{why_too_large(plain)}   [device memory (C6)]"
    reason = f"the same layout with everything on the device; recompute {layout.recompute}: {why}"
    return compare(plan, layout, plain, reason=reason).replace(name=NO_OFFLOAD)


def _choices(problem: OffloadInstance, policy: Policy) -> Iterator[OffloadChoice]:
    """Yield what the policy says of every layer, with each recompute; parameters of a tied embedding stay."""
    if policy.place == "parameters" and not problem.may.parameters:
        return
    for option in policy.options:
        if problem.allowed[option].any():
            choice = uniform_policy(problem, option, policy.place)
            yield replace(choice, parameters=choice.parameters & problem.streamable)


def _simulated(problem: OffloadInstance, choice: OffloadChoice) -> SimulatedChoice:
    sums = ResourceSums(problem)
    result = SimulatedChoice(choice, sums.simulate(choice), 1)
    return result if broken_constraints(problem, choice, result.simulated) else with_widest_window(sums, result)


def _compare_policy(
    plan: TrainingPlan, policy: Policy, options: RecomputeCosts, problem: OffloadInstance, best: SimulatedChoice
) -> Comparison:
    recompute = RECOMPUTE_OF[int(best.choice.option[problem.allowed.sum(axis=0).argmax()])]
    costs, step, ranks = (
        build_estimate(options, 0, problem, best.choice, best.simulated),
        best.simulated,
        plan.cluster.largest_node,
    )
    lacking = []  # by the names of solvers/offload/instance.py
    if step.peak_bytes > problem.cap_bytes * (1 + 1e-9):
        lacking.append(f"{why_too_large(costs)}   [device memory (C6)]")
    if step.host_bytes > problem.host_cap_bytes * (1 + 1e-9):
        lacking.append(
            f"{TOO_LARGE} into the host: needs {format_bytes(step.host_bytes * ranks)} of "
            f"{format_bytes(problem.host_cap_bytes * ranks)} a node   [host memory (C7)]"
        )
    moved = OffloadSchedule(
        host_bytes=int(step.host_bytes * ranks),
        to_host_bytes=int(step.to_host_bytes),
        to_device_bytes=int(step.to_device_bytes),
    )
    reason = f"{policy.text}; recompute {recompute}: " + ("; ".join(lacking) or why_slower(costs, plan.estimate))
    comparison = compare(plan, plan.layout.replace(recompute=recompute), costs, reason=reason, schedule=moved)
    return comparison.replace(name=policy.name, fits=not lacking)
