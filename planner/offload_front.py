"""The front of time and memory with offload schedules: what they reach with less of each device than any layout without.

From the whole budget down, STEP_FRACTION of it at a time, schedules are searched that are faster than what is known to need no more
(planner/offload.py, without the last solution layer by layer except for the whole budget), until none fits any more. A point's
bound holds for schedules and for layouts without: those of the least cap at or above its own that was looked at, as less memory
never makes anything faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..schema import ConfigError, InfeasibleError, ParetoPoint, SolverLimitError
from .deadline import Deadline
from .offload import Offloaded, search_offload
from .planning import WORTH_MOVING
from .request import Request

STEP_FRACTION = 0.05
"""How much less of the budget the next schedule must need: each takes a search of its own."""


@dataclass(frozen=True)
class Front:
    """Points without schedules, fastest first; no layout without one fits into ``nothing_below`` bytes or fewer."""

    points: tuple[ParetoPoint, ...]
    nothing_below: int

    def fastest_s(self, cap_bytes: float) -> float:
        """Of the points that need no more."""
        return min((p.step_time_s for p in self.points if p.required_bytes <= cap_bytes), default=math.inf)

    def bound_s(self, cap_bytes: float) -> float:
        """No layout without a schedule that needs no more is faster."""
        if cap_bytes <= self.nothing_below:
            return math.inf
        return max((p.bound_s for p in self.points if p.cap_bytes >= cap_bytes), default=0.0)


def with_schedules(front: Front, request: Request, deadline: Deadline) -> tuple[ParetoPoint, ...]:
    """The front of both, fastest first."""
    found, bounds = _schedules(front, request, deadline)

    def bound_of(cap_bytes: float) -> float:
        return max((bound for cap, bound in bounds if cap >= cap_bytes), default=0.0)

    plain = [p.replace(bound_s=min(p.bound_s, max(bound_of(p.cap_bytes), _LEAST_S))) for p in front.points]
    points = sorted([*plain, *found], key=lambda p: (p.step_time_s, p.required_bytes))
    least, kept = math.inf, []
    for point in points:
        if point.required_bytes < least:
            kept.append(point)
            least = point.required_bytes
    return tuple(kept)


_LEAST_S = 1e-12
"""Of a bound where time was over before there was any: it has to be positive."""


def _schedules(
    front: Front, request: Request, deadline: Deadline
) -> tuple[list[ParetoPoint], list[tuple[float, float]]]:
    """A point of each cap that has a schedule faster than anything without, and the bound of schedules under each cap."""
    budget = request.cluster.memory_budget_bytes
    step, cap = max(1, int(STEP_FRACTION * budget)), budget
    points: list[ParetoPoint] = []
    bounds: list[tuple[float, float]] = []
    while cap > 0 and not deadline.is_over:
        known_s = front.fastest_s(cap)
        try:
            found = _fastest(request, cap, known_s, deadline, exactly=cap == budget)
        except (ConfigError, InfeasibleError, SolverLimitError):
            break
        bounds.append((cap, known_s if found is None else found.certificate.bound_s))
        if found is None:
            cap -= step
            continue
        if found.estimate.step_time_s < known_s * (1 - WORTH_MOVING):
            points.append(_point(found, cap, min(found.certificate.bound_s, front.bound_s(cap))))
        cap = min(cap, found.estimate.required_bytes) - step
    return points, bounds


def _fastest(request: Request, cap: int, known_s: float, deadline: Deadline, *, exactly: bool) -> Offloaded | None:
    assert request.offload is not None
    return search_offload(
        request.model,
        request.cluster.with_budget(cap),
        request.workload,
        request=request.offload,
        fixed=request.fixed,
        runnable=request.runnable,
        deadline=deadline,
        worse_than_s=known_s,
        exactly=exactly,
    )


def _point(found: Offloaded, cap_bytes: int, bound_s: float) -> ParetoPoint:
    estimate = found.estimate
    return ParetoPoint(
        layout=found.layout,
        step_time_s=estimate.step_time_s,
        bound_s=max(min(bound_s, estimate.step_time_s), _LEAST_S),
        required_bytes=estimate.required_bytes,
        peak_allocated_bytes=estimate.peak_allocated_bytes,
        cap_bytes=cap_bytes,
        tokens_per_s=estimate.tokens_per_s,
        layers_of_stage=(found.stage.num_layers,),
        host_bytes=found.schedule.host_bytes,
    )
