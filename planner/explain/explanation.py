"""What `explain` answers with, the JSON form of `meshwright explain --json`, and two layouts of one request line by line."""

from __future__ import annotations

from typing import Literal, TypeVar

from pydantic import Field

from ...schema import Layout, OffloadSchedule, TrainingEstimate, TrainingPlan
from ...schema.base import Frozen

Resource = Literal[
    "memory", "unlimited_memory", "link", "compute", "elementwise", "host", "host_memory", "host_link", "host_update"
]
"""What may be more: the last three of plans with an offload schedule."""

_HOST_TERMS = ("host_bytes", "storage_bytes", "to_host_bytes", "to_device_bytes")


class Binding(Frozen):
    """One thing that bounds the plan.

    Attributes:
        seconds: a part of the step; what it gains with twice the rate of a link (also that to the host, and of updates by the
            host's processors), or without the host's dispatch; or for memory what the fastest layout gains when memory is no limit,
            for the host's memory what this layout gains; None where that was not searched.
    """

    resource: Literal[
        "compute", "recompute", "optimizer", "bubble", "link", "host", "memory",
        "offload", "host_memory", "host_link", "host_update",
    ]  # fmt: skip
    seconds: float | None
    text: str


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


class LinkUse(Frozen):
    """One link level.

    Attributes:
        axes: axes of the layout whose outermost link this is.
        seconds: by how much the step is shorter when this level has twice its rate, the layout kept.
    """

    level_idx: int
    name: str
    domain_size: int
    bandwidth_bytes_per_s: float
    axes: tuple[str, ...]
    seconds: float


class MarginalValue(Frozen):
    """What a changed cluster is worth, by estimating and searching again with it.

    Attributes:
        change: in words.
        kept_s: what the plan's layout gains, seconds of a step; best_s: what the fastest layout gains over the fastest one of the
            unchanged cluster; None where the time limit came before that search. Of plans with an offload schedule both are
            differences of bounds (planner/explain/marginal_values.py).
        best: the fastest layout of the changed cluster, where it is another one.
    """

    resource: Resource
    change: str
    kept_s: float
    best_s: float | None = None
    best: Layout | None = None


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
    asked: str
    kept: str = ""
    reasons: tuple[str, ...] = ()
    best: Comparison | None = None


class Explanation(Frozen):
    """What binds a plan.

    Attributes:
        binds: what bounds the plan, the most important first.
        step_time_s: as the plan says; fastest_s: of the fastest layout of the same space, searched again; None where not searched,
            and of plans with an offload schedule.
        time_s: parts of the step, largest first.
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
    policies: tuple[Comparison, ...] = ()
    offload: OffloadSchedule | None = None
    why_not: WhyNot | None = None
    notes: tuple[str, ...] = ()


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
    planned = plan.estimate
    here, there = plan.layout.model_dump(), layout.model_dump()
    hosts = [
        {name: 0 if each is None else getattr(each, name) for name in _HOST_TERMS} for each in (plan.offload, schedule)
    ]
    return Comparison(
        layout=layout,
        fits=other.fits,
        step_time_s=other.step_time_s,
        required_bytes=other.required_bytes,
        slower_fraction=other.step_time_s / planned.step_time_s - 1,
        fields=tuple((name, str(here[name]), str(there[name])) for name in here if here[name] != there[name]),
        time_s=_lines(planned.breakdown_s.model_dump(), other.breakdown_s.model_dump()),
        memory_bytes=_lines(planned.memory_bytes.model_dump(), other.memory_bytes.model_dump()),
        host_bytes=_lines(*hosts),
        reason=reason,
    )


_Number = TypeVar("_Number", int, float)


def _lines(planned: dict[str, _Number], other: dict[str, _Number]) -> dict[str, tuple[_Number, _Number, _Number]]:
    """Return (plan, other, other - plan) of each term that is not zero in both."""
    return {name: (value, other[name], other[name] - value) for name, value in planned.items() if value or other[name]}
