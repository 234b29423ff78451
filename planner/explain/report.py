"""`explain`: what binds a plan, what a little more of each resource is worth, how the runner-ups differ, and why not another one.

Nothing is guessed: every figure is a term of an estimate, or the difference of two estimates or of two searches. A plan with an
offload schedule is also compared with uniform policies: what switches for all layers alike would have given its layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from pydantic import Field

from ...schema import Layout, MeshwrightError, OffloadSchedule, TrainingPlan
from ...schema.base import Frozen
from ...schema.layout import SWITCHES, check_fields, format_assignments
from ...schema.layout_rules import ENGINE_RULES, require_valid
from ...schema.local_updates import slowest_island
from ...schema.units import GB, format_bytes
from ...solvers.branch_and_bound import OnProgress
from ..device_groups import notes_on_left_out
from ..plan import estimate_with_schedule
from ..planned_stages import reestimate
from ..request import Deadline, PlanRequest
from ..tasks.offload_problem import problem_of_plan
from .infeasible import stage_demands, tightest_stage
from .marginal_values import (
    SAME_PREDICTION,
    Binding,
    BoundBy,
    Fastest,
    LinkUse,
    MarginalValue,
    link_uses,
    marginal_values,
    resource_changes,
)
from .offload import ScheduleMarginalValues, under_policies
from .overlap import value_of_overlap
from .regions import RegionValue, region_values
from .why_not import Comparison, WhyNot, compare
from .why_not import why_not as answer_why_not

MIN_SHARE = 0.005
"""Terms of the step below this are not named among what binds."""

PartName = Literal["binds", "runner_ups", "value", "worth", "why_not"]
"""What of an explanation is complete: what binds with the headroom of the stages, runner-ups and policies, one more of the marginal
values, all of them with the notes; or the answer to a question, which is all there is then."""


class StageHeadroom(Frozen):
    """One pipeline stage of the plan: what it requires of the budget, and how long a micro-batch keeps it busy.

    Attributes:
        device: of a mixed cluster, what it lies on.
        required_bytes: what must be within the budget of these devices; free_bytes is what is left, below zero where it is not.
        largest: the largest part of its memory.
    """

    stage_idx: int
    busy_s: float
    device: str = ""
    required_bytes: int
    free_bytes: int
    largest: str
    largest_bytes: int


class Part(NamedTuple):
    """An explanation as far as it has come: ``done`` of it, with the part called ``name``."""

    name: PartName
    done: float
    explanation: Explanation


class Explanation(Frozen):
    """What binds a plan, as `meshwright explain --json` prints it.

    Attributes:
        binds: what bounds the plan, the most important first.
        step_time_s: as the plan says; fastest_s: of the fastest layout of the same space, searched again; None where not searched,
            and of plans with an offload schedule.
        time_s: parts of the step, largest first.
        regions: of a plan whose regions train by themselves, what changes between them are worth; the rest is of the slowest one.
        policies: of a plan with an offload schedule, its layout without one and under uniform policies; offload: the schedule.
        budget_bytes: what each device may be asked for; of a mixed cluster, of the stage with the fullest memory.
        notes: what the reader should know.
    """

    layout: Layout
    binds: tuple[Binding, ...]
    step_time_s: float
    fastest_s: float | None
    time_s: dict[str, float]
    budget_bytes: int
    stages: tuple[StageHeadroom, ...]
    links: tuple[LinkUse, ...]
    worth: tuple[MarginalValue, ...]
    runner_ups: tuple[Comparison, ...]
    regions: tuple[RegionValue, ...] = Field(default=(), exclude_if=lambda value: not value)
    policies: tuple[Comparison, ...] = ()
    offload: OffloadSchedule | None = None
    why_not: WhyNot | None = None
    notes: tuple[str, ...] = ()


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
    *_, last = explain_in_parts(plan, why_not=why_not, deadline=deadline or Deadline(time_limit_s))
    return last.explanation


def explain_in_parts(
    plan: TrainingPlan,
    *,
    why_not: Mapping[str, Any] | None = None,
    deadline: Deadline,
    on_progress: OnProgress | None = None,
) -> Iterator[Part]:
    """Yield what `explain` returns as it grows: cheap parts come first.

    Args:
        on_progress: called while the completion for a ``why_not`` is searched.
    """
    asked = check_fields(why_not or {})
    regions: tuple[RegionValue, ...] = ()
    if plan.local_updates is not None:
        regions = () if asked else region_values(plan, deadline)
        plan = slowest_island(plan)
    require_valid(
        plan.model,
        plan.workload,
        plan.layout,
        world_size=plan.cluster.num_devices,
        scaleup_domain=plan.cluster.scaleup_domain,
        rules=ENGINE_RULES,
    )
    request = replace(PlanRequest.from_plan(plan, deadline), on_progress=on_progress)
    schedule = None if plan.offload is None else ScheduleMarginalValues(plan, request)
    links = link_uses(plan, None if schedule is None else schedule.seconds_on)
    terms = sorted(plan.estimate.breakdown_s.model_dump().items(), key=lambda item: -item[1])
    explanation = Explanation(
        layout=plan.layout,
        binds=_sorted_bindings(plan, links, (), schedule) if asked else _sorted_bindings(plan, links, None, schedule),
        step_time_s=plan.estimate.step_time_s,
        fastest_s=None,
        time_s={name: seconds for name, seconds in terms if seconds},
        budget_bytes=plan.estimate.budget_bytes,
        stages=_stages(plan),
        links=links,
        worth=(),
        runner_ups=(),
        regions=regions,
        offload=plan.offload,
    )
    if asked:
        explanation = explanation.replace(
            why_not=answer_why_not(plan, request, asked),
            runner_ups=() if schedule else tuple(_runner_ups(plan, request)),
            notes=_notes(plan, was_searched=True),
        )
        yield Part("why_not", 1.0, explanation)
        return
    num_values = len(schedule.changes if schedule else resource_changes(plan.cluster))
    yield Part("binds", 0.5 / (num_values + 1), explanation)
    explanation = explanation.replace(
        runner_ups=tuple(_runner_ups(plan, request)), policies=tuple(under_policies(plan)) if schedule else ()
    )
    yield Part("runner_ups", 1 / (num_values + 1), explanation)
    fastest = Fastest.of(plan, request) if schedule is None else None
    was_searched = fastest is not None
    if fastest is not None:
        explanation = explanation.replace(fastest_s=fastest.step_time_s)
    for value in schedule.marginal_values() if schedule else marginal_values(plan, request, fastest):
        if schedule is not None and value.resource == "memory":
            was_searched = value.best_s is not None
        explanation = explanation.replace(worth=(*explanation.worth, value))
        yield Part("value", (1 + len(explanation.worth)) / (num_values + 1), explanation)
    yield Part(
        "worth",
        1.0,
        explanation.replace(
            binds=_sorted_bindings(plan, links, explanation.worth, schedule),
            notes=_notes(plan, was_searched=was_searched),
        ),
    )


def _sorted_bindings(
    plan: TrainingPlan,
    links: Sequence[LinkUse],
    values: Sequence[MarginalValue] | None,
    schedule: ScheduleMarginalValues | None,
) -> tuple[Binding, ...]:
    binds = [*_bindings(plan, links, values), *(schedule.bindings() if schedule else ())]
    return tuple(sorted(binds, key=lambda binding: -(binding.seconds or 0.0)))


def _stages(plan: TrainingPlan) -> tuple[StageHeadroom, ...]:
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


def _bindings(plan: TrainingPlan, links: Sequence[LinkUse], values: Sequence[MarginalValue] | None) -> list[Binding]:
    """Return what binds; without ``values`` before any is worked out."""
    terms, schedule = plan.estimate.breakdown_s, plan.offload
    busy = [stage.forward_s + stage.backward_s for stage in plan.estimate.stages]
    evenness = f"slowest stage / mean of {len(busy)}: {max(busy) * len(busy) / sum(busy):.3f}"
    updated = ""
    if schedule is not None and schedule.off_device_layers:
        by_host = len(schedule.host_optimizer_layers + schedule.streamed_parameter_layers)
        streamed = len(schedule.streamed_optimizer_layers)
        updated = f": {by_host} layers by the host, {streamed} streamed to the device   [(C9)]"
    texts: dict[BoundBy, str] = {
        "compute": f"compute of the busiest stage (MFU {100 * plan.estimate.mfu:.1f} %)",
        "recompute": f"recompute ({plan.layout.recompute})",
        "optimizer": "optimizer update" + updated,
        "bubble": f"pipeline bubble ({evenness})",
        "offload": "waiting for the host, and what kernels lose beside copies",
    }
    bindings = [Binding(resource=name, seconds=getattr(terms, name), text=text) for name, text in texts.items()]
    for link in links:
        axes = " + ".join(link.axes) or "no axis"
        text = f"twice as fast: {link.name} at {link.bandwidth_bytes_per_s / GB:g} GB/s ({axes})"
        bindings.append(Binding(resource="link", seconds=link.seconds, text=text))
    bindings += [
        Binding(resource="host", seconds=max(0.0, value.kept_s), text="dispatch by the host")
        for value in values or ()
        if value.resource == "host"
    ]
    min_s = MIN_SHARE * plan.estimate.step_time_s
    return [*(b for b in bindings if (b.seconds or 0.0) >= min_s), _memory_binding(plan, values)]


def _memory_binding(plan: TrainingPlan, values: Sequence[MarginalValue] | None) -> Binding:
    demands = stage_demands(plan.estimate, plan.workload, plan.cluster)
    fullest = tightest_stage(demands)
    free, budget = demands[fullest].free_bytes, demands[fullest].budget_bytes
    where = f"stage {fullest} has " if len(demands) > 1 else ""
    text = f"{where}{format_bytes(free)} free of {format_bytes(budget)}"
    if values is None:
        return Binding(resource="memory", seconds=None, text=text + "; below: what more of it would save")
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


def _value_of_switches(plan: TrainingPlan, with_all_s: float) -> Iterator[str]:
    """Yield what the plan's stages would take and need with each of its switches turned off."""
    for name, default in ((name, Layout.model_fields[name].default) for name in SWITCHES):
        if (value := getattr(plan.layout, name)) == default or plan.offload is not None:
            continue
        off = reestimate(plan.replace(layout=plan.layout.replace(**{name: default})), plan.cluster)
        lost = 100 * (off.step_time_s / with_all_s - 1)
        needs = f"{format_bytes(off.required_bytes)} of {format_bytes(off.budget_bytes)}"
        ends = f"needs {needs}" if off.fits else f"would not fit ({needs})"
        yield f"without {format_assignments({name: value})} the step would take {lost:.1f} % longer; it {ends}"


def _notes(plan: TrainingPlan, *, was_searched: bool) -> tuple[str, ...]:
    notes = []
    try:
        estimate = reestimate(plan, plan.cluster) if plan.offload is None else problem_of_plan(plan).estimate
        again_s = estimate.step_time_s
        if abs(again_s / plan.estimate.step_time_s - 1) > SAME_PREDICTION:
            notes.append(
                f"this version predicts {again_s:.4g} s for the plan, which says {plan.estimate.step_time_s:.4g} s: another "
                f"version made it ({plan.provenance.meshwright}); gains are differences of new estimates"
            )
    except MeshwrightError as error:
        notes.append(f"this version cannot estimate the plan's layout: {error.message}")
    else:
        notes += _value_of_switches(plan, again_s)
        notes += value_of_overlap(plan, again_s) if plan.offload is None else ()
    if plan.workload.lengths is not None:
        notes.append("gains of the best layout are not searched over lengths: plan again for the changed cluster")
    elif not was_searched:
        notes.append("the time limit came before the space was searched again: gains of the best layout are left out")
    notes += notes_on_left_out(plan.left_out, plan.estimate)
    if plan.provenance.fixed:
        notes.append(f"the plan had to keep {plan.provenance.fixed}; searches keep it too")
    if plan.provenance.space is None:
        notes.append("the plan does not say in which space it was searched; the smallest that has its layout is used")
    return tuple(notes)
