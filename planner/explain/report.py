"""`explain`: what binds a plan, what a little more of each resource is worth, how the runner-ups differ, and why not another one.

Nothing is guessed: every figure is a part of an estimate, or the difference of two estimates or of two searches.

The layout of a plan with an offload schedule under uniform policies: what switches for all layers alike would have given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...cost_models.stage.recompute import RecomputeCosts
from ...schema import Estimate, MeshwrightError, OffloadSchedule, Plan
from ...schema.layout import check_fields
from ...schema.layout_rules import ENGINE_RULES
from ...schema.layout_table import RECOMPUTES
from ...schema.runnable import require_valid
from ...schema.units import GB, format_bytes
from ...solvers.offload import starts
from ...solvers.offload.instance import OffloadChoice, OffloadInstance
from ...solvers.offload.repair import ResourceSums, SimulatedChoice, excess_bytes, with_widest_window
from ...solvers.offload.simulation import broken_constraints
from ..deadline import Deadline
from ..plan import estimate, estimate_with_schedule
from ..rank_map import place_as_planned
from ..request import OffloadRequest, PlanRequest
from ..tasks.offload_problem import RECOMPUTE_OF, build_estimate, build_instances, option_costs_of_plan
from ..tasks.training import TOO_LARGE, why_slower, why_too_large
from .explanation import Binding, Comparison, Explanation, LinkUse, MarginalValue, StageHeadroom, compare
from .feasibility import stage_demands, tightest_stage
from .marginal_values import link_uses, marginal_values
from .why_not import why_not as answer_why_not

if TYPE_CHECKING:
    from .marginal_values import ScheduleMarginalValues


LEAST_SHARE = 0.005
"""Parts of the step below this are not named among what binds."""


SAME_PREDICTION = 1e-3
"""An estimate that differs by more from the plan's was made by another version of the model."""


def explain(
    plan: Plan,
    *,
    why_not: Mapping[str, Any] | None = None,
    time_limit_s: float = 60.0,
    deadline: Deadline | None = None,
) -> Explanation:
    """What binds a plan, from the plan alone.

    Args:
        plan: as `plan` made it, or read from a file.
        why_not: fields of Layout that the plan does not have; the best layout with them is compared with the plan, and ``worth`` is
            left empty.
        time_limit_s: for all searches together; what was not reached is left out.
        deadline: stands in for ``time_limit_s``.

    Raises:
        ConfigError: a field of ``why_not`` is unknown or out of range, or the plan breaks a rule that holds for any engine.
    """
    wanted = check_fields(why_not or {})
    require_valid(
        plan.model,
        plan.workload,
        plan.layout,
        world_size=plan.cluster.num_devices,
        scaleup_domain=plan.cluster.scaleup_domain,
        rules=ENGINE_RULES,
    )
    deadline = deadline or Deadline(time_limit_s)
    request = PlanRequest.of(plan)
    answer = answer_why_not(plan, request, wanted, deadline) if wanted else None
    schedule = _schedule_worth(plan, request)
    links = link_uses(plan, None if schedule is None else schedule.kept_s)
    fastest_s: float | None = None
    worth: tuple[MarginalValue, ...] = ()
    if schedule is not None:
        worth = () if wanted else schedule.worth(deadline)
    elif not wanted:
        fastest_s, worth = marginal_values(plan, request, deadline)
    binds = [*_bindings(plan, links, worth), *(schedule.bindings() if schedule else ())]
    in_time = all(gain.best_s is not None for gain in worth if gain.resource == "memory") if schedule else fastest_s
    return Explanation(
        layout=plan.layout,
        binds=tuple(sorted(binds, key=lambda binding: -(binding.seconds or 0.0))),
        step_time_s=plan.estimate.step_time_s,
        fastest_s=fastest_s,
        time_s=_largest_first(plan.estimate.breakdown_s.model_dump()),
        budget_bytes=plan.estimate.budget_bytes,
        stages=_stages(plan),
        links=links,
        worth=worth,
        runner_ups=() if wanted and schedule else tuple(_runner_ups(plan, request, deadline)),
        policies=() if wanted or not schedule else _under_policies(plan),
        offload=plan.offload,
        why_not=answer,
        notes=_notes(plan, in_time=bool(wanted) or bool(in_time)),
    )


def _schedule_worth(plan: Plan, request: PlanRequest) -> ScheduleMarginalValues | None:
    """What changes are worth to an offload schedule, where the plan has one."""
    if plan.offload is None:
        return None
    from .marginal_values import ScheduleMarginalValues  # its solver is not needed without

    return ScheduleMarginalValues(plan, request)


def _under_policies(plan: Plan) -> tuple[Comparison, ...]:

    return tuple(under_policies(plan))


def _stages(plan: Plan) -> tuple[StageHeadroom, ...]:
    """What each stage requires and has left."""
    found = plan.estimate
    rows = []
    for idx, demand in enumerate(stage_demands(found, plan.workload, plan.cluster)):
        stage = found.stages[idx]
        parts = stage.memory_bytes.model_dump()
        largest = max(parts, key=parts.__getitem__)
        rows.append(
            StageHeadroom(
                stage_idx=idx,
                busy_s=stage.forward_s + stage.backward_s,
                device=stage.device,
                required_bytes=demand.required_bytes,
                free_bytes=demand.free_bytes,
                largest=largest,
                largest_bytes=parts[largest],
            )
        )
    return tuple(rows)


def _bindings(plan: Plan, links: Sequence[LinkUse], worth: Sequence[MarginalValue]) -> tuple[Binding, ...]:
    """Everything that costs a noticeable share of the step, and the memory, the most expensive first."""
    found, parts = plan.estimate, plan.estimate.breakdown_s
    total = found.step_time_s
    bindings = [
        Binding(resource="compute", seconds=parts.compute, text="compute of the busiest stage" + _mfu(plan)),
        Binding(resource="recompute", seconds=parts.recompute, text=f"recompute ({plan.layout.recompute})"),
        Binding(resource="optimizer", seconds=parts.optimizer, text="optimizer update" + _updated(plan)),
        Binding(resource="bubble", seconds=parts.bubble, text="pipeline bubble" + _evenness(plan)),
        Binding(
            resource="offload", seconds=parts.offload, text="waiting for the host, and what kernels lose beside copies"
        ),
    ]
    for link in links:
        axes = " + ".join(link.axes) or "no axis"
        text = f"twice as fast: {link.name} at {link.bandwidth_bytes_per_s / GB:g} GB/s ({axes})"
        bindings.append(Binding(resource="link", seconds=link.seconds, text=text))
    host = (gain for gain in worth if gain.resource == "host")
    bindings += [Binding(resource="host", seconds=max(0.0, g.kept_s), text="dispatch by the host") for g in host]
    named = [binding for binding in bindings if (binding.seconds or 0.0) >= LEAST_SHARE * total]
    named.append(_memory_binding(plan, worth))
    return tuple(sorted(named, key=lambda binding: -(binding.seconds or 0.0)))


def _updated(plan: Plan) -> str:
    """Where the states of an offload schedule are updated."""
    schedule = plan.offload
    if schedule is None or not schedule.off_device_layers:
        return ""
    on_host = len(schedule.host_optimizer_layers + schedule.streamed_parameter_layers)
    return f": {on_host} layers by the host, {len(schedule.streamed_optimizer_layers)} streamed to the device   [(C9)]"


def _mfu(plan: Plan) -> str:
    return f" (MFU {100 * plan.estimate.mfu:.1f} %)"


def _evenness(plan: Plan) -> str:
    busy = [stage.forward_s + stage.backward_s for stage in plan.estimate.stages]
    return f" (slowest stage / mean of {len(busy)}: {max(busy) * len(busy) / sum(busy):.3f})"


def _memory_binding(plan: Plan, worth: Sequence[MarginalValue]) -> Binding:
    demands = stage_demands(plan.estimate, plan.workload, plan.cluster)
    fullest = tightest_stage(demands)
    free, budget = demands[fullest].free_bytes, demands[fullest].budget_bytes
    where = f"stage {fullest} has " if len(demands) > 1 else ""
    text = f"{where}{format_bytes(free)} free of {format_bytes(budget)}"
    unlimited = next((gain.best_s for gain in worth if gain.resource == "unlimited_memory"), None)
    if unlimited is None:
        return Binding(resource="memory", seconds=None, text=text + "; not searched whether more of it would help")
    binds = "; a faster layout needs more" if unlimited > 0 else "; it does not bind: nothing is faster with more"
    return Binding(resource="memory", seconds=max(0.0, unlimited), text=text + binds)


def _runner_ups(plan: Plan, request: PlanRequest, deadline: Deadline) -> Iterable[Comparison]:
    """The plan's alternatives estimated again, as far as this version can, and time allows for offload schedules."""
    for other in plan.alternatives:
        if other.layout.offload == "scheduled" and deadline.is_over:
            continue
        try:
            found, other_schedule = estimate_with_schedule(
                plan.model, plan.cluster, plan.workload, other.layout, offload=request.offload, quickly=True
            )
        except MeshwrightError:
            continue
        schedule = None if other_schedule is None else other_schedule.schedule
        yield compare(plan, other.layout, found, reason=other.reason, schedule=schedule)


def _notes(plan: Plan, *, in_time: bool) -> tuple[str, ...]:
    notes = []
    try:
        again_s = _again_s(plan)
        if abs(again_s / plan.estimate.step_time_s - 1) > SAME_PREDICTION:
            notes.append(
                f"estimated by itself the layout takes {again_s:.4g} s, in the plan {plan.estimate.step_time_s:.4g} s: its stages "
                f"were refined, or another version made it ({plan.provenance.meshwright}); gains are differences of new estimates"
            )
    except MeshwrightError as error:
        notes.append(f"this version cannot estimate the plan's layout by itself: {error.message}")
    if not in_time:
        notes.append("the time limit came before the space was searched again: gains of the best layout are left out")
    if plan.provenance.fixed:
        notes.append(f"the plan had to keep {plan.provenance.fixed}; searches keep it too")
    if plan.provenance.space is None:
        notes.append("the plan does not say in which space it was searched; the smallest that has its layout is used")
    return tuple(notes)


def _again_s(plan: Plan) -> float:
    """Step time of the plan's layout by this version, of an offload schedule with all its choices."""
    if plan.offload is None:
        return estimate(plan.model, place_as_planned(plan, plan.cluster), plan.workload, plan.layout).step_time_s
    from ..tasks.offload_problem import problem_of_plan

    return problem_of_plan(plan).estimate.step_time_s


def _largest_first(parts: dict[str, float]) -> dict[str, float]:
    return dict(sorted(((name, seconds) for name, seconds in parts.items() if seconds), key=lambda item: -item[1]))


STAY = (0, 1, 2)
"""Options (solvers/offload/instance.py) that move no activations: keep, selective and full recompute."""


MOVE = (3, 4)
"""All activations, or under full recompute the blocks' inputs."""


@dataclass(frozen=True)
class Policy:
    """What all layers do alike: where their states lie (`offload_uniform.PLACES`), and what their activations may do."""

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


def under_policies(plan: Plan) -> Iterator[Comparison]:
    """The layout of a plan without offload and under each policy, with the recompute that is best for it, against the plan."""
    yield _without_offload(plan)
    request = OffloadRequest.of(plan)
    assert request is not None
    anything = OffloadRequest(host_memory_bytes=request.host_memory_bytes)
    options = option_costs_of_plan(plan, plan.cluster)
    problems = build_instances(options, 0, anything)
    for policy in POLICIES:
        tried = [(problem, choice) for problem in problems for choice in _choices(problem, policy)]
        if tried:
            yield _compare_policy(plan, policy, options, *_best_choice(tried))


def _without_offload(plan: Plan) -> Comparison:
    """Everything on the device, as any layout without a schedule is costed."""
    layouts = [plan.layout.replace(offload="none", recompute=recompute) for recompute in RECOMPUTES]
    costs = [(estimate(plan.model, plan.cluster, plan.workload, layout), layout) for layout in layouts]
    found, layout = min(costs, key=lambda each: (_beyond(each[0]), each[0].step_time_s))
    why = why_slower(found, plan.estimate) if found.fits else f"{why_too_large(found)}   [device memory (C6)]"
    reason = f"the same layout with everything on the device; recompute {layout.recompute}: {why}"
    return compare(plan, layout, found, reason=reason).replace(name=NO_OFFLOAD)


def _beyond(found: Estimate) -> int:
    return max(0, found.required_bytes - found.budget_bytes)


def _choices(problem: OffloadInstance, policy: Policy) -> Iterator[OffloadChoice]:
    """What the policy says of every layer, with each recompute; parameters of a tied embedding stay."""
    if policy.place == "parameters" and not problem.may.parameters:
        return
    for option in policy.options:
        if problem.allowed[option].any():
            choice = starts.uniform_policy(problem, option, policy.place)
            yield OffloadChoice(
                option=choice.option,
                host_optimizer=choice.host_optimizer,
                streamed_optimizer=choice.streamed_optimizer,
                parameters=choice.parameters & problem.streamable,
                storage=choice.storage,
            )


def _best_choice(tried: list[tuple[OffloadInstance, OffloadChoice]]) -> tuple[OffloadInstance, SimulatedChoice]:
    """The fastest that fits, or the one that lacks the least."""

    def simulated(problem: OffloadInstance, choice: OffloadChoice) -> SimulatedChoice:
        sums = ResourceSums(problem)
        found = SimulatedChoice(choice, sums.simulate(choice), 1)
        return found if broken_constraints(problem, choice, found.simulated) else with_widest_window(sums, found)

    results = [(problem, simulated(problem, choice)) for problem, choice in tried]
    return min(results, key=lambda each: (excess_bytes(each[0], each[1].simulated), each[1].step_s))


def _compare_policy(
    plan: Plan, policy: Policy, options: RecomputeCosts, problem: OffloadInstance, found: SimulatedChoice
) -> Comparison:
    option = int(found.choice.option[problem.allowed.sum(axis=0).argmax()])
    recompute = RECOMPUTE_OF[option]
    layout = plan.layout.replace(recompute=recompute)
    estimate = build_estimate(options, 0, problem, found.choice, found.simulated)
    lacking = _lacking(plan, problem, found, estimate)
    held = found.simulated
    moved = OffloadSchedule(
        host_bytes=int(held.host_bytes * plan.cluster.largest_node),
        to_host_bytes=int(held.to_host_bytes),
        to_device_bytes=int(held.to_device_bytes),
    )
    reason = f"{policy.text}; recompute {recompute}: " + ("; ".join(lacking) or why_slower(estimate, plan.estimate))
    return compare(plan, layout, estimate, reason=reason, schedule=moved).replace(name=policy.name, fits=not lacking)


def _lacking(plan: Plan, problem: OffloadInstance, found: SimulatedChoice, estimate: Estimate) -> list[str]:
    """Which memory is too small for it, by the names of solvers/offload/instance.py."""
    ranks, needed = plan.cluster.largest_node, found.simulated.host_bytes
    lacking = []
    if found.simulated.peak_bytes > problem.cap_bytes * (1 + 1e-9):
        lacking.append(f"{why_too_large(estimate)}   [device memory (C6)]")
    if needed > problem.host_cap_bytes * (1 + 1e-9):
        lacking.append(
            f"{TOO_LARGE} into the host: needs {format_bytes(needed * ranks)} of "
            f"{format_bytes(problem.host_cap_bytes * ranks)} a node   [host memory (C7)]"
        )
    return lacking
