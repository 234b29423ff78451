"""After which steps a run is saved: every N, or as often as what was measured of steps, saves and faults makes best."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

from ...cost_models.goodput import MTBF_HOURS_PER_DEVICE, steps_to_save
from .options import TrainOptions

PAST = "MESHWRIGHT_PAST"
"""Names in a rank's environment how often its job has started again, when it began, and when it last did: seconds of the epoch."""

DOUBT = 0.01
"""A rate of faults under which so many as were seen are less likely than this is not that of this job."""

FIRST_STEPS = 5
"""Steps before the first save of an automatic schedule, which measures what a save takes."""


class SaveSchedule:
    """Says when a save is due; every rank has one and calls it at the same steps.

    An automatic one divides what remains evenly, by the interval T* of (G1) with the seconds of the last save, the median step, and
    the faults that are to be expected (`expected_mtbf_s`); the first rank decides, so that all save at once. Until a save
    is measured it is due after a few steps; a run that goes on knows what one took before.

    Args:
        begun_s: when this process began to train, seconds of the epoch.

    Attributes:
        save_s: for how long the last save stopped the training; 0 where none is known.
    """

    def __init__(self, options: TrainOptions, *, done: int, begun_s: float = 0.0, save_s: float = 0.0) -> None:
        self._every, self._steps = options.checkpoint_every, options.steps
        self._given_hours = options.mtbf_hours_per_device
        self._first, self._next, self._saved = done + FIRST_STEPS, done + FIRST_STEPS, done
        self._begin_s, self.save_s = 0.0, save_s
        begun_s = begun_s or time.time()
        restarts, job_begun_s, started_s = map(float, os.environ.get(PAST, f"0 {begun_s} {begun_s}").split())
        self._restarts = int(restarts)
        # Starts, which took as long as this one, were not time in which faults were seen.
        self._since_s = job_begun_s + (1 + restarts) * (begun_s - started_s)

    def is_due(self, step: int, step_times_s: Sequence[float]) -> bool:
        """Return whether to save after this step."""
        if self._every == "auto":
            if step == self._first and self.save_s:
                self._decide(step, step_times_s)
            return step >= self._next
        return step % (self._every or self._steps) == 0

    def begin(self) -> None:
        """Note that a save begins."""
        self._begin_s = time.perf_counter()

    def end(self, step: int, step_times_s: Sequence[float]) -> None:
        """Note that training goes on, and decide when the next save is due."""
        self.save_s, self._saved = max(time.perf_counter() - self._begin_s, 1e-6), step
        if self._every == "auto" and step_times_s:
            self._decide(step, step_times_s)
        elif self._every == "auto":  # a save that a death cut short, before the first step of those who are left
            self._first = self._next = step + FIRST_STEPS

    def _decide(self, step: int, step_times_s: Sequence[float]) -> None:
        step_s, devices = median(step_times_s), dist.get_world_size()
        given_s = None if self._given_hours is None else self._given_hours * 3600 / devices
        seconds = max(time.time() - self._since_s, step * step_s)
        mtbf_s = expected_mtbf_s(given_s, faults=self._restarts, seconds=seconds, devices=devices)
        remaining = max(self._steps - self._saved, 1)
        steps = steps_to_save(remaining, step_s=step_s, mtbf_s=mtbf_s, save_s=self.save_s)
        due = torch.tensor([max(self._saved + steps, step)], dtype=torch.int64)
        device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
        due = due.to(device)
        dist.broadcast(due, 0)
        self._next = int(due.item())


def expected_mtbf_s(given_s: float | None, *, faults: int, seconds: float, devices: int) -> float:
    """Return the mean seconds between faults of a job that has seen some.

    What was given counts as one fault in that time (a Gamma prior of shape 1), M = (given + seconds) / (1 + faults), until faults
    speak against it: where as many or more had a probability below `DOUBT`, what was seen counts alone. Where nothing was given,
    nobody knows of a job more than what it has shown: M = seconds / (1/2 + faults) (Jeffreys' prior of a rate), at most what is
    usual of its devices.

    Args:
        given_s: mean seconds between faults of the job, as somebody said before.
        seconds: in which so many faults were seen.
    """
    if given_s is None:
        return min(seconds / (0.5 + faults), MTBF_HOURS_PER_DEVICE * 3600 / devices)
    expected = seconds / given_s
    fewer = (
        sum(math.exp(i * math.log(expected) - expected - math.lgamma(i + 1)) for i in range(faults)) if expected else 0
    )
    if faults and 1 - fewer < DOUBT:
        return seconds / faults
    return (given_s + seconds) / (1 + faults)
