"""Two layouts of one request, line by line."""

from __future__ import annotations

from typing import TypeVar

from ..schema import Estimate, Layout, OffloadSchedule, Plan
from .explanation import Comparison


def compare(
    plan: Plan, layout: Layout, other: Estimate, *, reason: str = "", schedule: OffloadSchedule | None = None
) -> Comparison:
    """Every part of the step and of the fullest device's memory that the plan or the other layout has, and what their offload
    schedules hold and move; ``schedule`` is the other's.
    """
    mine = plan.estimate
    here, there = plan.layout.model_dump(), layout.model_dump()
    return Comparison(
        layout=layout,
        fits=other.fits,
        step_time_s=other.step_time_s,
        required_bytes=other.required_bytes,
        slower_fraction=other.step_time_s / mine.step_time_s - 1,
        fields=tuple((name, str(here[name]), str(there[name])) for name in here if here[name] != there[name]),
        time_s=_lines(mine.breakdown_s.model_dump(), other.breakdown_s.model_dump()),
        memory_bytes=_lines(mine.memory_bytes.model_dump(), other.memory_bytes.model_dump()),
        host_bytes=_lines(_of_host(plan.offload), _of_host(schedule)),
        reason=reason,
    )


def _of_host(schedule: OffloadSchedule | None) -> dict[str, int]:
    names = ("host_bytes", "storage_bytes", "to_host_bytes", "to_device_bytes")
    return {name: 0 if schedule is None else getattr(schedule, name) for name in names}


_Number = TypeVar("_Number", int, float)


def _lines(mine: dict[str, _Number], other: dict[str, _Number]) -> dict[str, tuple[_Number, _Number, _Number]]:
    """(plan, other, other - plan) of each part that is not zero in both."""
    return {name: (mine[name], other[name], other[name] - mine[name]) for name in mine if mine[name] or other[name]}
