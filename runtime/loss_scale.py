"""The factor on the loss under fp16-mixed."""

from __future__ import annotations

from dataclasses import dataclass

from ..schema.training_plan import TrainingPlan

INITIAL_SCALE = 2.0**16
GROWTH_STEPS = 2000
MIN_SCALE = 1.0
"""Below it gradients overflow although nothing is multiplied any more."""


@dataclass
class LossScale:
    """The factor on the loss under fp16-mixed, so that small gradients do not round to zero; one rank's copy.

    It is halved when a gradient overflows (that step changes nothing) and doubled after `GROWTH_STEPS` steps without
    (Micikevicius et al., arXiv:1710.03740). What decides is the norm of all gradients, which every rank knows: all of them skip
    a step, or none. A power of two, so that it changes no digit; 1 in other precisions. ``steps`` are counted since it changed.
    """

    value: float
    is_dynamic: bool
    steps: int = 0

    @classmethod
    def from_plan(cls, plan: TrainingPlan) -> LossScale:
        """Return the factor at the start of a run."""
        is_dynamic = plan.workload.precision == "fp16-mixed"
        return cls(INITIAL_SCALE if is_dynamic else 1.0, is_dynamic)

    def update(self, *, overflowed: bool) -> None:
        """Update the factor after a step; to be called with the same on all ranks."""
        if not self.is_dynamic:
            return
        self.steps += 1
        if overflowed:
            self.value, self.steps = self.value / 2, 0
        elif self.steps >= GROWTH_STEPS:
            self.value, self.steps = self.value * 2, 0
