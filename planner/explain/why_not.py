"""Why a plan does not have some fields: they are completed as well as can be, and the two layouts are compared line by line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

from pydantic import Field

from ...schema import (
    ConfigError,
    InfeasibleError,
    Layout,
    OffloadSchedule,
    SolverLimitError,
    TrainingEstimate,
    TrainingPlan,
)
from ...schema.base import Frozen
from ...schema.layout import format_assignments
from ..choice import is_near_tie
from ..request import OffloadRequest, PlanRequest
from ..search import SearchResult
from ..space import build_space
from ..tasks.offload import OffloadResult, search_offload
from ..tasks.training import search_layouts, why_slower
from .infeasible import closest_to_fitting, shortfall

ROUNDING = 1e-6
"""Sums in another order differ by less."""

_HOST_TERMS = ("host_bytes", "storage_bytes", "to_host_bytes", "to_device_bytes")


class Comparison(Frozen):
    """Another layout against the plan's, line by line: (plan, other, difference) of every part that either has.

    Attributes:
        fields: fields of the layout that differ, as (name, plan, other).
        host_bytes: the same of what offload schedules hold on a node's host and storage, and what a rank moves in a step.
        name: of the policy, in `Explanation.policies`.
    """

    layout: Layout
    fits: bool
    step_time_s: float
    required_bytes: int
    slower_fraction: float
    fields: tuple[tuple[str, str, str], ...]
    time_s: dict[str, tuple[float, float, float]]
    memory_bytes: dict[str, tuple[int, int, int]]
    host_bytes: dict[str, tuple[int, int, int]] = Field(default_factory=dict)
    reason: str = ""
    name: str = ""


class WhyNot(Frozen):
    """Why the plan does not have some fields.

    Attributes:
        status: same: the plan has them; slower, faster: the best completion fits and loses, or wins; too_large: none fits;
            excluded: a rule excludes all of them; stopped: the time limit came first.
        asked: the fields asked about; kept: those that the plan itself had to keep.
        reasons: rules, bytes and searches behind the status, in words.
        best: the best completion, or of those too large the one that lacks the least.
    """

    status: Literal["same", "slower", "faster", "too_large", "excluded", "stopped"]
    asked: str = ""
    kept: str = ""
    reasons: tuple[str, ...] = ()
    best: Comparison | None = None


_Number = TypeVar("_Number", int, float)


def compare(
    plan: TrainingPlan,
    layout: Layout,
    other: TrainingEstimate,
    *,
    reason: str = "",
    schedule: OffloadSchedule | None = None,
) -> Comparison:
    """Compare every term of the step and of the fullest device's memory, and what offload schedules hold and move.

    Args:
        layout, other, schedule: the other layout with its estimate and its offload schedule.
    """

    def lines(ours: dict[str, _Number], theirs: dict[str, _Number]) -> dict[str, tuple[_Number, _Number, _Number]]:
        return {name: (n, theirs[name], theirs[name] - n) for name, n in ours.items() if n or theirs[name]}

    planned = plan.estimate
    ours, theirs = plan.layout.model_dump(), layout.model_dump()
    hosts = [{name: getattr(each, name, 0) for name in _HOST_TERMS} for each in (plan.offload, schedule)]
    return Comparison(
        layout=layout,
        fits=other.fits,
        step_time_s=other.step_time_s,
        required_bytes=other.required_bytes,
        slower_fraction=other.step_time_s / planned.step_time_s - 1,
        fields=tuple((name, str(ours[name]), str(theirs[name])) for name in ours if ours[name] != theirs[name]),
        time_s=lines(planned.breakdown_s.model_dump(), other.breakdown_s.model_dump()),
        memory_bytes=lines(planned.memory_bytes.model_dump(), other.memory_bytes.model_dump()),
        host_bytes=lines(*hosts),
        reason=reason,
    )


def why_not(plan: TrainingPlan, request: PlanRequest, asked: Mapping[str, Any]) -> WhyNot:
    """Compare the best layout with the fields ``asked`` with the plan's, or say what excludes all of them.

    The fields that the plan had to keep are kept too, unless ``asked`` changes them. Where the runtime excludes the fields and the
    entire space of its engine does not, the best layout of that space is compared, after the rules.
    """
    fixed = {name: value for name, value in request.fixed.items() if name not in asked}
    answer = WhyNot(status="excluded", asked=format_assignments(asked), kept=format_assignments(fixed))
    if all(getattr(plan.layout, name) == value for name, value in asked.items()):
        return answer.replace(status="same", reasons=(f"the plan has these fields: {plan.layout}",))
    reasons: tuple[str, ...] = ()
    for runnable in (True, False) if request.runnable else (False,):
        completed = replace(request, fixed=fixed | dict(asked), runnable=runnable)
        try:
            compared = _compare_completion(plan, completed, asked)
        except ConfigError as error:
            reasons += _excluded_by(error, completed)
            continue
        except SolverLimitError as error:
            return answer.replace(status="stopped", reasons=(*reasons, error.message))
        return compared.replace(asked=answer.asked, kept=answer.kept, reasons=(*reasons, *compared.reasons))
    return answer.replace(reasons=tuple(dict.fromkeys(reasons)))


def _compare_completion(plan: TrainingPlan, request: PlanRequest, asked: Mapping[str, Any]) -> WhyNot:
    """Compare the fastest completion: of layouts without an offload schedule, and of those with one where the plan has one or one
    is asked for.
    """
    if request.workload.lengths is not None:
        from ..lengths import plan_lengths

        try:
            best = plan_lengths(request, top=0)
        except InfeasibleError as error:
            return WhyNot(status="too_large", reasons=(error.message, *error.details))
        return _compare_feasible(plan, request, best.layout, best.estimate, None)
    result = None if asked.get("offload") == "scheduled" else search_layouts(request)
    if result is not None and (plan.offload is None or any(name.startswith("offload") for name in asked)):
        return _compare_search(plan, request, result)
    scheduled, lacking = _search_schedules(request, result)
    if scheduled is not None:
        bound_s = scheduled.certificate.bound_s if scheduled.certificate.status == "stopped" else None
        return _compare_feasible(plan, request, scheduled.layout, scheduled.estimate, bound_s, scheduled.schedule)
    if result is None:
        return WhyNot(status="too_large", reasons=lacking)
    answer = _compare_search(plan, request, result)
    return answer.replace(reasons=(*answer.reasons, *lacking))


def _search_schedules(
    request: PlanRequest, result: SearchResult | None
) -> tuple[OffloadResult | None, tuple[str, ...]]:
    """Return the fastest completion with an offload schedule, where it is faster than those without; or why there is none."""
    fixed = {name: value for name, value in request.fixed.items() if name != "offload"}
    scheduled = replace(request, fixed=fixed, offload=request.offload or OffloadRequest())
    known_s = result.feasible[0].estimate.step_time_s if result is not None and result.feasible else math.inf
    try:
        return search_offload(scheduled, worse_than_s=known_s), ()
    except InfeasibleError as error:
        return None, (error.message, *error.details)
    except ConfigError as error:
        if result is None:
            raise
        return None, (error.message,)


def _compare_search(plan: TrainingPlan, request: PlanRequest, result: SearchResult) -> WhyNot:
    batch = result.costs.layouts
    if result.feasible:
        best = result.feasible[0]
        bound_s = result.bound_s if result.stopped_early else None
        return _compare_feasible(plan, request, best.layout(batch), best.estimate, bound_s)
    if result.stopped_early:
        return WhyNot(status="stopped", reasons=("the time limit came before any layout that fits",))
    nearest = closest_to_fitting(result)
    layout, estimate = nearest.layout(batch), nearest.estimate
    lacking = shortfall(layout, estimate, request.workload, request.cluster)
    return WhyNot(status="too_large", reasons=lacking, best=compare(plan, layout, estimate, reason="does not fit"))


def _compare_feasible(
    plan: TrainingPlan,
    request: PlanRequest,
    layout: Layout,
    estimate: TrainingEstimate,
    bound_s: float | None,
    schedule: OffloadSchedule | None = None,
) -> WhyNot:
    """Compare a completion that fits; ``bound_s`` where the time limit stopped the search for it."""
    comparison = compare(plan, layout, estimate, reason=why_slower(estimate, plan.estimate), schedule=schedule)
    reasons = [_verdict(plan, request, layout, comparison.slower_fraction)]
    if bound_s is not None:
        gap = max(0.0, 1 - bound_s / estimate.step_time_s)
        reasons.append(f"the time limit stopped the completion: a better one may be {100 * gap:.1f} % faster")
    is_slower = comparison.slower_fraction >= -ROUNDING
    return WhyNot(status="slower" if is_slower else "faster", reasons=tuple(reasons), best=comparison)


def _verdict(plan: TrainingPlan, request: PlanRequest, layout: Layout, slower: float) -> str:
    if abs(slower) <= ROUNDING:
        return "the best layout with these fields takes as long"
    if slower > 0:
        return f"the best layout with these fields is {100 * slower:.2g} % slower"
    faster = f"the best layout with these fields is {-100 * slower:.2g} % faster"
    if is_near_tie(request, plan.layout, plan.estimate.step_time_s, layout, (1 + slower) * plan.estimate.step_time_s):
        return f"{faster}: within the error of the comparison, so that the simpler one was taken"
    if not request.runnable and PlanRequest.from_plan(plan).runnable:
        return f"{faster}, but `meshwright apply` does not execute it"
    if plan.search is not None and plan.search.status == "stopped":
        return f"{faster}: the plan's search was stopped with a gap of {100 * plan.search.gap:.1f} %"
    return f"{faster}: the plan's search did not cover it, or this version predicts other times; plan again with --fix"


def _excluded_by(error: ConfigError, request: PlanRequest) -> tuple[str, ...]:

    def has_layouts(without: str) -> bool:
        fixed = {name: value for name, value in request.fixed.items() if name != without}
        try:
            build_space(replace(request, fixed=fixed))
        except (ConfigError, SolverLimitError):
            return False
        return True

    rules = error.details or (error.message,)
    free = [name for name in request.fixed if len(request.fixed) > 1 and has_layouts(name)]
    if not free:
        return rules
    given = ", ".join(f"{name}={request.fixed[name]}" for name in free)
    which = f"without {given}" if len(free) == 1 else f"without any one of {given}"
    return (*rules, f"{which} there are layouts")
