"""A plan rehearsed: the runtime's own code path under it, without devices (runtime/rehearsal/)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..schema.errors import InfeasibleError
from ..schema.local_updates import slowest_island
from ..schema.units import format_bytes
from .step_parts import step_parts

if TYPE_CHECKING:
    from ..schema import TrainingPlan
    from ..schema.rehearsal import Rehearsal


def rehearse(
    plan: TrainingPlan,
    *,
    ranks: Sequence[int] = (),
    script: Sequence[str] = (),
    plan_path: str = "",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Rehearsal:
    """Let every kind of rank of a plan go through a step on this machine, without devices; return what each holds and sends.

    Args:
        ranks: only the kinds of these ranks.
        script: of the user, with its arguments, in place of the built-in training of the plan's own model; stopped after two
            updates. It finds the plan at ``plan_path``, as under `apply`.
        progress: told how many kinds are done, of how many.

    Raises:
        ConfigError: a rank that the plan does not have.
        RuntimeMismatchError: this version does not run such a plan.
    """
    from ..runtime.rehearsal.rank import Setting
    from ..runtime.rehearsal.run import rehearse as run

    if plan.local_updates is not None:  # a region is a job of its own
        plan = slowest_island(plan)
    setting = Setting(script=tuple(script), plan_path=plan_path)
    rehearsal = run(plan, ranks=ranks, setting=setting, progress=progress)
    return rehearsal.replace(predicted_time_parts=predicted_parts(plan)) if rehearsal.time_parts else rehearsal


def predicted_parts(plan: TrainingPlan) -> dict[str, float]:
    """Return the seconds of a step of the plan's estimate by the parts that a rehearsal has."""
    parts = step_parts(plan)
    return {
        name: sum(parts.pop(f"{name}_{part}") for part in ("ideal", "loss")) for name in ("products", "attention")
    } | {name: seconds for name, seconds in parts.items() if seconds}


def first_that_runs(
    plan: TrainingPlan,
    again: Callable[[dict[str, Any]], TrainingPlan],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[TrainingPlan, list[str]]:
    """Return a plan, or the first of its runner-ups, that goes through a rehearsal and fits by it; and why those before it do not.

    Args:
        again: plans with all fields of a layout fixed.
        progress: told how many kinds of ranks of the plan at hand are done, of how many.

    Raises:
        InfeasibleError: none of them runs and fits.
    """
    reasons, layouts, candidate = list[str](), [other.layout for other in plan.alternatives], plan
    while True:
        rehearsal = rehearse(candidate, progress=progress)
        if rehearsal.fits:
            return candidate, reasons
        reasons.append(f"{candidate.layout}: {_why_not(rehearsal)}")
        while layouts:
            layout = layouts.pop(0)
            try:
                candidate = again({name: getattr(layout, name) for name in type(layout).model_fields})
                break
            except InfeasibleError as error:
                reasons.append(f"{layout}: {error.message}")
        else:
            raise InfeasibleError(
                "no plan goes through its rehearsal", details=tuple(reasons), help="ask for more runner-ups: --top 8"
            )


def _why_not(rehearsal: Rehearsal) -> str:
    if rehearsal.failures:
        failure = rehearsal.failures[0]
        return f"rank {failure.rank} fails: {failure.message}"
    fullest = max(rehearsal.kinds, key=lambda kind: kind.peak_reserved_bytes)
    return (
        f"rank {fullest.rank} reserves {format_bytes(fullest.peak_reserved_bytes)} of {format_bytes(rehearsal.budget_bytes)}, "
        f"predicted {format_bytes(fullest.predicted_allocated_bytes)} allocated"
    )
