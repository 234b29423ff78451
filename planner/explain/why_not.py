"""Why a plan does not have some fields: they are completed as well as can be, and the two layouts stand side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ...schema import ConfigError, Estimate, InfeasibleError, Layout, OffloadSchedule, Plan, SolverLimitError
from ...schema.layout import format_assignments
from ..deadline import Deadline
from ..request import OffloadRequest, PlanRequest
from ..search import SearchResult
from ..tasks.training import SAME_TIME_FRACTION, why_slower
from .explanation import WhyNot, compare
from .feasibility import closest_to_fitting, shortfall

if TYPE_CHECKING:
    from ..tasks.offload import OffloadResult

_Status = Literal["slower", "faster"]

ROUNDING = 1e-6
"""Sums in another order differ by less."""


def why_not(plan: Plan, request: PlanRequest, wanted: Mapping[str, Any], deadline: Deadline) -> WhyNot:
    """The best layout with the fields ``wanted`` against the plan's, or what excludes all of them.

    The fields that the plan had to keep are kept too, unless ``wanted`` changes them. Where the runtime excludes the fields and
    its engine's whole space does not, the best layout of that space is compared, beside the rules.
    """
    kept = {name: value for name, value in request.fixed.items() if name not in wanted}
    asked, kept_text = format_assignments(wanted), format_assignments(kept)
    if all(getattr(plan.layout, name) == value for name, value in wanted.items()):
        has = f"the plan has these fields: {plan.layout}"
        return WhyNot(status="same", asked=asked, kept=kept_text, reasons=(has,))
    reasons: tuple[str, ...] = ()
    for runnable in (True, False) if request.runnable else (False,):
        completed = replace(request, fixed=kept | dict(wanted), runnable=runnable)
        try:
            answer = _completed(plan, completed, wanted, deadline)
        except ConfigError as error:
            reasons += _excluded_by(error, completed, deadline)
            continue
        except SolverLimitError as error:
            return WhyNot(status="stopped", asked=asked, kept=kept_text, reasons=(*reasons, error.message))
        return answer.replace(asked=asked, kept=kept_text, reasons=(*reasons, *answer.reasons))
    return WhyNot(status="excluded", asked=asked, kept=kept_text, reasons=tuple(dict.fromkeys(reasons)))


def _completed(plan: Plan, request: PlanRequest, wanted: Mapping[str, Any], deadline: Deadline) -> WhyNot:
    """The fastest completion against the plan: of layouts that need no offload schedule, and where the plan has one or it is
    asked for, of those with one.
    """
    asked_for = wanted.get("offload") == "scheduled"
    result = None if asked_for else request.search(deadline)
    if not asked_for and (plan.offload is None or any(name.startswith("offload") for name in wanted)):
        assert result is not None
        return _answer(plan, request, result)
    found, lacking = _scheduled(request, result, deadline)
    if found is not None:
        bound_s = found.certificate.bound_s if found.certificate.status == "feasible" else None
        return _compared(plan, request, found.layout, found.estimate, bound_s, found.schedule)
    if result is None:
        return WhyNot(status="too_large", asked="", reasons=lacking)
    answer = _answer(plan, request, result)
    return answer.replace(reasons=(*answer.reasons, *lacking))


def _scheduled(
    request: PlanRequest, result: SearchResult | None, deadline: Deadline
) -> tuple[OffloadResult | None, tuple[str, ...]]:
    """The fastest completion with an offload schedule, where it is faster than those without; or why there is none."""
    from ..tasks.offload import search_offload  # its solver is not needed without

    try:
        found = search_offload(
            request.model,
            request.cluster,
            request.workload,
            request=request.offload or OffloadRequest(),
            fixed={name: value for name, value in request.fixed.items() if name != "offload"},
            runnable=request.runnable,
            deadline=deadline,
            worse_than_s=result.fitting[0].estimate.step_time_s if result and result.fitting else math.inf,
        )
    except InfeasibleError as error:
        return None, (error.message, *error.details)
    except ConfigError as error:
        if result is None:
            raise
        return None, (error.message,)
    return found, ()


def _answer(plan: Plan, request: PlanRequest, result: SearchResult) -> WhyNot:
    batch = result.costs.batch
    if not result.fitting:
        if result.stopped_early:
            return WhyNot(status="stopped", asked="", reasons=("the time limit came before any layout that fits",))
        nearest = closest_to_fitting(result)
        layout, estimate = nearest.layout(batch), nearest.estimate
        lacking = shortfall(layout, estimate, request.workload, request.cluster)
        comparison = compare(plan, layout, estimate, reason="does not fit")
        return WhyNot(status="too_large", asked="", reasons=lacking, best=comparison)
    best = result.fitting[0]
    return _compared(plan, request, best.layout(batch), best.estimate, result.bound_s if result.stopped_early else None)


def _compared(
    plan: Plan,
    request: PlanRequest,
    layout: Layout,
    estimate: Estimate,
    bound_s: float | None,
    schedule: OffloadSchedule | None = None,
) -> WhyNot:
    """A completion that fits against the plan; ``bound_s`` where the time limit stopped the search for it."""
    comparison = compare(plan, layout, estimate, reason=why_slower(estimate, plan.estimate), schedule=schedule)
    status: _Status = "slower" if comparison.slower_fraction >= -ROUNDING else "faster"
    reasons = [_verdict(plan, request, comparison.slower_fraction)]
    if bound_s is not None:
        gap = max(0.0, 1 - bound_s / estimate.step_time_s)
        reasons.append(f"the time limit stopped the completion: a better one may be {100 * gap:.1f} % faster")
    return WhyNot(status=status, asked="", reasons=tuple(reasons), best=comparison)


def _verdict(plan: Plan, request: PlanRequest, slower: float) -> str:
    if abs(slower) <= ROUNDING:
        return "the best layout with these fields takes as long"
    if slower > 0:
        return f"the best layout with these fields is {100 * slower:.2g} % slower"
    faster = f"the best layout with these fields is {-100 * slower:.2g} % faster"
    if -slower <= SAME_TIME_FRACTION:
        return f"{faster}: within the model's error, so that the simpler one was taken"
    if not request.runnable and PlanRequest.of(plan).runnable:
        return f"{faster}, but `meshwright apply` does not execute it"
    if plan.search is not None and plan.search.status == "feasible":
        return f"{faster}: the plan's search was stopped with a gap of {100 * plan.search.gap:.1f} %"
    return f"{faster}: the plan's search did not cover it, or this version predicts other times; plan again with --fix"


def _excluded_by(error: ConfigError, request: PlanRequest, deadline: Deadline) -> tuple[str, ...]:
    """The rules, and which single fields would have to go."""
    rules = error.details or (error.message,)
    free = [name for name in request.fixed if len(request.fixed) > 1 and _has_layouts(request, name, deadline)]
    if not free:
        return rules
    given = ", ".join(f"{name}={request.fixed[name]}" for name in free)
    return (
        *rules,
        f"without {given} there are layouts" if len(free) == 1 else f"without any one of {given} there are layouts",
    )


def _has_layouts(request: PlanRequest, without: str, deadline: Deadline) -> bool:
    fixed = {name: value for name, value in request.fixed.items() if name != without}
    try:
        replace(request, fixed=fixed).space(deadline)
    except (ConfigError, SolverLimitError):
        return False
    return True
