"""A job beside the best plan: what it loses, and the few changes that gain most of it."""

from __future__ import annotations

from typing import Self

from ...schema.base import Frozen, PositiveFloat
from ...schema.layout import Layout
from ...schema.training_plan import Interval, TrainingEstimate, TrainingPlan
from .flags import Change
from .job import Job


class Difference(Frozen):
    """How much longer one step takes than another, as parts of the longer one's time.

    Attributes:
        lost_fraction: of the first step's time that the second saves; below 0 where it takes longer.
        ratio: the first step's time over the second's.
    """

    lost_fraction: float
    ratio: PositiveFloat
    ratio_interval: Interval

    @classmethod
    def between(cls, first: TrainingEstimate, second: TrainingEstimate) -> Self:
        """Return the difference of two estimates of one model on one machine."""
        ratio = first.step_time_s / second.step_time_s
        return cls(lost_fraction=1 - 1 / ratio, ratio=ratio, ratio_interval=Interval(low=ratio, high=ratio))


class Step(Frozen):
    """One more change: what it is in the engine's own spelling, and what it gains over the step before."""

    changes: tuple[Change, ...]
    layout: Layout
    estimate: TrainingEstimate
    difference: Difference


class JobComparison(Frozen):
    """A job, what it costs, the best plan for its engine, and the way there.

    Attributes:
        difference: the job's step against the plan's.
        steps: the smallest set of changes that gains most of it, in the order of their worth.
    """

    job: Job
    estimate: TrainingEstimate
    plan: TrainingPlan
    difference: Difference
    steps: tuple[Step, ...] = ()
