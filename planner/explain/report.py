"""`explain`: what binds a plan, what a little more of each resource is worth, how the runner-ups differ, and why not another one.

Nothing is guessed: every figure is a term of an estimate, or the difference of two estimates or of two searches. A plan with an
offload schedule is also compared with uniform policies: what switches for all layers alike would have given its layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...cost_models.stage.contents import RecomputeCosts
from ...schema import Layout, MeshwrightError, OffloadSchedule, TrainingEstimate, TrainingPlan
from ...schema.layout import check_fields
from ...schema.layout_rules import ENGINE_RULES
from ...schema.layout_table import RECOMPUTES
from ...schema.runnable import require_valid
from ...schema.units import GB, format_bytes
from ...solvers.offload.instance import OffloadChoice, OffloadInstance
from ...solvers.offload.repair import ResourceSums, SimulatedChoice, excess_by_memory, with_widest_window
from ...solvers.offload.schedule import uniform_policy
from ...solvers.offload.simulation import broken_constraints
from ..plan import estimate, estimate_with_schedule
from ..rank_map import place_as_planned
from ..request import Deadline, OffloadRequest, PlanRequest
from ..tasks.offload_problem import (
    RECOMPUTE_OF,
    build_estimate,
    build_instances,
    option_costs_of_plan,
    problem_of_plan,
)
from ..tasks.training import TOO_LARGE, why_slower, why_too_large
from .explanation import Binding, Comparison, Explanation, LinkUse, MarginalValue, StageHeadroom, compare
from .feasibility import stage_demands, tightest_stage
from .marginal_values import ScheduleMarginalValues, link_uses, marginal_values
from .why_not import why_not as answer_why_not

MIN_SHARE = 0.005
"""Terms of the step below this are not named among what binds."""

SAME_PREDICTION = 1e-3
"""An estimate that differs by more from the plan's was made by another version of the model."""


def explain(
    plan: TrainingPlan,
    *,
    why_not: Mapping[str, Any] | None = None,
    time_limit_s: float = 60.0,
    deadline: Deadline | None = None,
) -> Explanation:
    """Say what binds a plan, from the plan alone.

    Args:
        plan: as `plan` made it, or read from a file.
        why_not: fields of Layout that the plan does not have; the best layout with them is compared with the plan, and ``worth`` is
            left empty.
        time_limit_s: for all searches together; what was not reached is left out.
        deadline: stands in for ``time_limit_s``.

    Raises:
        ConfigError: a field of ``why_not`` is unknown or out of range, or the plan breaks a rule that holds for any engine.
    """
    asked = check_fields(why_not or {})
    require_valid(
        plan.model,
        plan.workload,
        plan.layout,
        world_size=plan.cluster.num_devices,
        scaleup_domain=plan.cluster.scaleup_domain,
        rules=ENGINE_RULES,
    )
    request = PlanRequest.from_plan(plan, deadline or Deadline(time_limit_s))
    answer = answer_why_not(plan, request, asked) if asked else None
    schedule = None if plan.offload is None else ScheduleMarginalValues(plan, request)
    links = link_uses(plan, None if schedule is None else schedule.seconds_on)
    fastest_s: float | None = None
    values: tuple[MarginalValue, ...] = ()
    if not asked and schedule is not None:
        values = schedule.marginal_values()
    elif not asked:
        fastest_s, values = marginal_values(plan, request)
    binds = [*_bindings(plan, links, values), *(schedule.bindings() if schedule else ())]
    was_searched = fastest_s is not None
    if schedule is not None:
        was_searched = all(value.best_s is not None for value in values if value.resource == "memory")
    return Explanation(
        layout=plan.layout,
        binds=tuple(sorted(binds, key=lambda binding: -(binding.seconds or 0.0))),
        step_time_s=plan.estimate.step_time_s,
        fastest_s=fastest_s,
        time_s=_largest_first(plan.estimate.breakdown_s.model_dump()),
        budget_bytes=plan.estimate.budget_bytes,
        stages=_stages(plan),
        links=links,
        worth=values,
        runner_ups=() if asked and schedule else tuple(_runner_ups(plan, request)),
        policies=() if asked or not schedule else tuple(under_policies(plan)),
        offload=plan.offload,
        why_not=answer,
        notes=_notes(plan, was_searched=bool(asked) or was_searched),
    )


def _stages(plan: TrainingPlan) -> tuple[StageHeadroom, ...]:
    """Return what each stage requires and has to spare."""
    rows = []
    demands = stage_demands(plan.estimate, plan.workload, plan.cluster)
    for idx, (stage, demand) in enumerate(zip(plan.estimate.stages, demands, strict=True)):
        terms = stage.memory_bytes.model_dump()
        largest = max(terms, key=terms.__getitem__)
        rows.append(
            StageHeadroom(
                stage_idx=idx,
                busy_s=stage.forward_s + stage.backward_s,
                device=stage.device,
                required_bytes=demand.required_bytes,
                free_bytes=demand.free_bytes,
                largest=largest,
                largest_bytes=terms[largest],
            )
        )
    return tuple(rows)


def _bindings(plan: TrainingPlan, links: Sequence[LinkUse], values: Sequence[MarginalValue]) -> list[Binding]:
    """Return everything that costs a noticeable share of the step, and the memory."""
    terms, total, schedule = plan.estimate.breakdown_s, plan.estimate.step_time_s, plan.offload
    busy = [stage.forward_s + stage.backward_s for stage in plan.estimate.stages]
    evenness = f"slowest stage / mean of {len(busy)}: {max(busy) * len(busy) / sum(busy):.3f}"
    updated = ""
    if schedule is not None and schedule.off_device_layers:
        by_host = len(schedule.host_optimizer_layers + schedule.streamed_parameter_layers)
        streamed = len(schedule.streamed_optimizer_layers)
        updated = f": {by_host} layers by the host, {streamed} streamed to the device   [(C9)]"
    bindings = [
        Binding(
            resource="compute",
            seconds=terms.compute,
            text=f"compute of the busiest stage (MFU {100 * plan.estimate.mfu:.1f} %)",
        ),
        Binding(resource="recompute", seconds=terms.recompute, text=f"recompute ({plan.layout.recompute})"),
        Binding(resource="optimizer", seconds=terms.optimizer, text="optimizer update" + updated),
        Binding(resource="bubble", seconds=terms.bubble, text=f"pipeline bubble ({evenness})"),
        Binding(
            resource="offload", seconds=terms.offload, text="waiting for the host, and what kernels lose beside copies"
        ),
    ]
    for link in links:
        axes = " + ".join(link.axes) or "no axis"
        text = f"twice as fast: {link.name} at {link.bandwidth_bytes_per_s / GB:g} GB/s ({axes})"
        bindings.append(Binding(resource="link", seconds=link.seconds, text=text))
    host = (value for value in values if value.resource == "host")
    bindings += [Binding(resource="host", seconds=max(0.0, v.kept_s), text="dispatch by the host") for v in host]
    named = [binding for binding in bindings if (binding.seconds or 0.0) >= MIN_SHARE * total]
    return sorted([*named, _memory_binding(plan, values)], key=lambda binding: -(binding.seconds or 0.0))


def _memory_binding(plan: TrainingPlan, values: Sequence[MarginalValue]) -> Binding:
    demands = stage_demands(plan.estimate, plan.workload, plan.cluster)
    fullest = tightest_stage(demands)
    free, budget = demands[fullest].free_bytes, demands[fullest].budget_bytes
    where = f"stage {fullest} has " if len(demands) > 1 else ""
    text = f"{where}{format_bytes(free)} free of {format_bytes(budget)}"
    unlimited = next((value.best_s for value in values if value.resource == "unlimited_memory"), None)
    if unlimited is None:
        return Binding(resource="memory", seconds=None, text=text + "; not searched whether more of it would help")
    binds = "; a faster layout needs more" if unlimited > 0 else "; it does not bind: nothing is faster with more"
    return Binding(resource="memory", seconds=max(0.0, unlimited), text=text + binds)


def _runner_ups(plan: TrainingPlan, request: PlanRequest) -> Iterable[Comparison]:
    """Estimate the plan's alternatives again, as far as this version can, and time allows for offload schedules."""
    for other in plan.alternatives:
        if other.layout.offload == "scheduled" and request.deadline.is_over:
            continue
        try:
            again, scheduled = estimate_with_schedule(request, other.layout, effort="first")
        except MeshwrightError:
            continue
        schedule = None if scheduled is None else scheduled.schedule
        yield compare(plan, other.layout, again, reason=other.reason, schedule=schedule)


def _notes(plan: TrainingPlan, *, was_searched: bool) -> tuple[str, ...]:
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
    if not was_searched:
        notes.append("the time limit came before the space was searched again: gains of the best layout are left out")
    if plan.provenance.fixed:
        notes.append(f"the plan had to keep {plan.provenance.fixed}; searches keep it too")
    if plan.provenance.space is None:
        notes.append("the plan does not say in which space it was searched; the smallest that has its layout is used")
    return tuple(notes)


def _again_s(plan: TrainingPlan) -> float:
    """Return the step time of the plan's layout by this version, of an offload schedule with all its choices."""
    if plan.offload is None:
        return estimate(plan.model, place_as_planned(plan, plan.cluster), plan.workload, plan.layout).step_time_s
    return problem_of_plan(plan).estimate.step_time_s


def _largest_first(terms: dict[str, float]) -> dict[str, float]:
    return dict(sorted(((name, seconds) for name, seconds in terms.items() if seconds), key=lambda item: -item[1]))


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


def under_policies(plan: TrainingPlan) -> Iterator[Comparison]:
    """Compare a plan with its layout without offload and under each policy, with the recompute that is best for it."""
    yield _without_offload(plan)
    request = OffloadRequest.from_plan(plan)
    assert request is not None
    anything = OffloadRequest(host_memory_bytes=request.host_memory_bytes)
    options = option_costs_of_plan(plan, plan.cluster)
    problems = build_instances(options, 0, anything)
    for policy in POLICIES:
        tried = [(problem, choice) for problem in problems for choice in _choices(problem, policy)]
        if tried:
            yield _compare_policy(plan, policy, options, *_best_choice(tried))


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


def _best_choice(tried: list[tuple[OffloadInstance, OffloadChoice]]) -> tuple[OffloadInstance, SimulatedChoice]:
    """Return the fastest that fits, or the one that lacks the least."""

    def simulated(problem: OffloadInstance, choice: OffloadChoice) -> SimulatedChoice:
        sums = ResourceSums(problem)
        found = SimulatedChoice(choice, sums.simulate(choice), 1)
        return found if broken_constraints(problem, choice, found.simulated) else with_widest_window(sums, found)

    results = [(problem, simulated(problem, choice)) for problem, choice in tried]
    return min(results, key=lambda each: (excess_by_memory(each[0], each[1].simulated).sum(), each[1].step_s))


def _compare_policy(
    plan: TrainingPlan, policy: Policy, options: RecomputeCosts, problem: OffloadInstance, found: SimulatedChoice
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


def _lacking(
    plan: TrainingPlan, problem: OffloadInstance, found: SimulatedChoice, estimate: TrainingEstimate
) -> list[str]:
    """Say which memory is too small for it, by the names of solvers/offload/instance.py."""
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
