"""Why a plan does not have some fields: they are completed as well as can be, and the two layouts are compared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...schema import (
    ConfigError,
    InfeasibleError,
    Layout,
    OffloadSchedule,
    SolverLimitError,
    TrainingEstimate,
    TrainingPlan,
)
from ...schema.layout import format_assignments
from ..request import OffloadRequest, PlanRequest
from ..search import SearchResult
from ..space import build_space
from ..tasks.offload import OffloadResult, search_offload
from ..tasks.training import SAME_TIME_FRACTION, search_layouts, why_slower
from .explanation import WhyNot, compare
from .feasibility import closest_to_fitting, shortfall

ROUNDING = 1e-6
"""Sums in another order differ by less."""


def why_not(plan: TrainingPlan, request: PlanRequest, asked: Mapping[str, Any]) -> WhyNot:
    """Compare the best layout with the fields ``asked`` with the plan's, or say what excludes all of them.

    The fields that the plan had to keep are kept too, unless ``asked`` changes them. Where the runtime excludes the fields and the
    entire space of its engine does not, the best layout of that space is compared, after the rules.
    """
    kept = {name: value for name, value in request.fixed.items() if name not in asked}
    answer = WhyNot(status="excluded", asked=format_assignments(asked), kept=format_assignments(kept))
    if all(getattr(plan.layout, name) == value for name, value in asked.items()):
        return answer.replace(status="same", reasons=(f"the plan has these fields: {plan.layout}",))
    reasons: tuple[str, ...] = ()
    for runnable in (True, False) if request.runnable else (False,):
        completed = replace(request, fixed=kept | dict(asked), runnable=runnable)
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
    """Compare the fastest completion: of layouts that need no offload schedule, and where the plan has one or one is asked for, of
    those with one.
    """
    if asked.get("offload") == "scheduled":
        found, lacking = _search_schedules(request, None)
        if found is None:
            return WhyNot(status="too_large", asked="", reasons=lacking)
        return _compare_schedule(plan, request, found)
    result = search_layouts(request)
    if plan.offload is None or any(name.startswith("offload") for name in asked):
        return _compare_search(plan, request, result)
    found, lacking = _search_schedules(request, result)
    if found is not None:
        return _compare_schedule(plan, request, found)
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
        return WhyNot(status="stopped", asked="", reasons=("the time limit came before any layout that fits",))
    nearest = closest_to_fitting(result)
    layout, estimate = nearest.layout(batch), nearest.estimate
    lacking = shortfall(layout, estimate, request.workload, request.cluster)
    comparison = compare(plan, layout, estimate, reason="does not fit")
    return WhyNot(status="too_large", asked="", reasons=lacking, best=comparison)


def _compare_schedule(plan: TrainingPlan, request: PlanRequest, found: OffloadResult) -> WhyNot:
    bound_s = found.certificate.bound_s if found.certificate.status == "feasible" else None
    return _compare_feasible(plan, request, found.layout, found.estimate, bound_s, found.schedule)


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
    reasons = [_verdict(plan, request, comparison.slower_fraction)]
    if bound_s is not None:
        gap = max(0.0, 1 - bound_s / estimate.step_time_s)
        reasons.append(f"the time limit stopped the completion: a better one may be {100 * gap:.1f} % faster")
    is_slower = comparison.slower_fraction >= -ROUNDING
    return WhyNot(status="slower" if is_slower else "faster", asked="", reasons=tuple(reasons), best=comparison)


def _verdict(plan: TrainingPlan, request: PlanRequest, slower: float) -> str:
    if abs(slower) <= ROUNDING:
        return "the best layout with these fields takes as long"
    if slower > 0:
        return f"the best layout with these fields is {100 * slower:.2g} % slower"
    faster = f"the best layout with these fields is {-100 * slower:.2g} % faster"
    if -slower <= SAME_TIME_FRACTION:
        return f"{faster}: within the model's error, so that the simpler one was taken"
    if not request.runnable and PlanRequest.from_plan(plan).runnable:
        return f"{faster}, but `meshwright apply` does not execute it"
    if plan.search is not None and plan.search.status == "feasible":
        return f"{faster}: the plan's search was stopped with a gap of {100 * plan.search.gap:.1f} %"
    return f"{faster}: the plan's search did not cover it, or this version predicts other times; plan again with --fix"


def _excluded_by(error: ConfigError, request: PlanRequest) -> tuple[str, ...]:
    """Return the rules, and which single fields would have to go."""
    rules = error.details or (error.message,)
    free = [name for name in request.fixed if len(request.fixed) > 1 and _has_layouts(request, without=name)]
    if not free:
        return rules
    given = ", ".join(f"{name}={request.fixed[name]}" for name in free)
    which = f"without {given}" if len(free) == 1 else f"without any one of {given}"
    return (*rules, f"{which} there are layouts")


def _has_layouts(request: PlanRequest, *, without: str) -> bool:
    fixed = {name: value for name, value in request.fixed.items() if name != without}
    try:
        build_space(replace(request, fixed=fixed))
    except (ConfigError, SolverLimitError):
        return False
    return True
