"""A job beside the best plan: what it loses, and the few changes that gain most of it."""

from __future__ import annotations

import math
from typing import Self

from ...cost_models.stage.interval import margin, probability_above, ratio_sd
from ...schema.base import Frozen, PositiveFloat
from ...schema.layout import Layout
from ...schema.layout_table import LayoutTable
from ...schema.training_plan import Interval, TrainingEstimate, TrainingPlan
from .flags import Change
from .job import Job

TAIL = 0.05
"""Of the interval of a ratio, at either end."""


class Difference(Frozen):
    """How much longer one step takes than another, as parts of the longer one's time.

    Attributes:
        lost_fraction: of the first step's time that the second saves; below 0 where it takes longer.
        ratio: the first step's time over the second's.
        ratio_interval: nominal 90 % interval: most of the error of two predictions for one machine is the same for both
            (cost_models/stage/interval.py).
        probability: that the first step takes longer, by the same error.
    """

    lost_fraction: float
    ratio: PositiveFloat
    ratio_interval: Interval
    probability: float

    @classmethod
    def between(
        cls, first: tuple[Layout, TrainingEstimate], second: tuple[Layout, TrainingEstimate], global_batch_size: int
    ) -> Self:
        """Return the difference of two layouts of one model and batch on one machine."""
        ratio = first[1].step_time_s / second[1].step_time_s
        table = LayoutTable.from_layouts([first[0], second[0]], global_batch_size)
        sd = ratio_sd(table, 1)[:1]
        factor = math.exp(float(margin(sd, 1 - TAIL)[0]))
        return cls(
            lost_fraction=1 - 1 / ratio,
            ratio=ratio,
            ratio_interval=Interval(low=ratio / factor, high=ratio * factor),
            probability=probability_above(math.log(ratio), float(sd[0])),
        )


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
