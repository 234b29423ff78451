"""`explain`: what binds a plan, what a little more of each resource is worth, how the runner-ups differ, and why not another one.

Nothing is guessed: every figure is a part of an estimate, or the difference of two estimates or of two searches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..schema import MeshwrightError, Plan
from ..schema.common_rules import ENGINE_RULES
from ..schema.layout import check_fields
from ..schema.rules import require_valid
from ..schema.units import GB, format_bytes
from .closest import demand_of_stages, tightest
from .compare import compare
from .deadline import Deadline
from .explanation import Binding, Comparison, Explanation, LinkUse, StageHeadroom, Worth
from .planning import estimate, estimate_with_schedule
from .request import Request
from .why_not import why_not as answer_why_not
from .worth import as_placed, links_of, worth_of

if TYPE_CHECKING:
    from .offload_worth import ScheduleWorth

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
    request = Request.of(plan)
    answer = answer_why_not(plan, request, wanted, deadline) if wanted else None
    schedule = _schedule_worth(plan, request)
    links = links_of(plan, None if schedule is None else schedule.kept_s)
    fastest_s: float | None = None
    worth: tuple[Worth, ...] = ()
    if schedule is not None:
        worth = () if wanted else schedule.worth(deadline)
    elif not wanted:
        fastest_s, worth = worth_of(plan, request, deadline)
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


def _schedule_worth(plan: Plan, request: Request) -> ScheduleWorth | None:
    """What changes are worth to an offload schedule, where the plan has one."""
    if plan.offload is None:
        return None
    from .offload_worth import ScheduleWorth  # its solver is not needed without

    return ScheduleWorth(plan, request)


def _under_policies(plan: Plan) -> tuple[Comparison, ...]:
    from .offload_policies import under_policies

    return tuple(under_policies(plan))


def _stages(plan: Plan) -> tuple[StageHeadroom, ...]:
    """What each stage requires and has left."""
    found = plan.estimate
    rows = []
    for idx, demand in enumerate(demand_of_stages(found, plan.workload, plan.cluster)):
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


def _bindings(plan: Plan, links: Sequence[LinkUse], worth: Sequence[Worth]) -> tuple[Binding, ...]:
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


def _memory_binding(plan: Plan, worth: Sequence[Worth]) -> Binding:
    demands = demand_of_stages(plan.estimate, plan.workload, plan.cluster)
    fullest = tightest(demands)
    free, budget = demands[fullest].free_bytes, demands[fullest].budget_bytes
    where = f"stage {fullest} has " if len(demands) > 1 else ""
    text = f"{where}{format_bytes(free)} free of {format_bytes(budget)}"
    unlimited = next((gain.best_s for gain in worth if gain.resource == "unlimited_memory"), None)
    if unlimited is None:
        return Binding(resource="memory", seconds=None, text=text + "; not searched whether more of it would help")
    binds = "; a faster layout needs more" if unlimited > 0 else "; it does not bind: nothing is faster with more"
    return Binding(resource="memory", seconds=max(0.0, unlimited), text=text + binds)


def _runner_ups(plan: Plan, request: Request, deadline: Deadline) -> Iterable[Comparison]:
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
        return estimate(plan.model, as_placed(plan, plan.cluster), plan.workload, plan.layout).step_time_s
    from .offload_plan import scheduled

    return scheduled(plan).estimate.step_time_s


def _largest_first(parts: dict[str, float]) -> dict[str, float]:
    return dict(sorted(((name, seconds) for name, seconds in parts.items() if seconds), key=lambda item: -item[1]))
