"""After which steps a run is saved: every N, or as often as what was measured of steps, saves and faults makes best."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

from ...cost_models.goodput import best_interval_s
from .options import TrainOptions

PAST = "MESHWRIGHT_PAST"
"""Names in a rank's environment how often its job has started again, and when it began, seconds of the epoch: ``2 1.79e9``."""

MTBF_HOURS_PER_DEVICE = 50_000.0
"""Llama 3 (arXiv:2407.21783, table 5): 419 unexpected interruptions of 16,384 H100 in 54 days, one in 50,700 hours of each."""

DOUBT = 0.01
"""A rate of faults under which so many as were seen are less likely than this is not that of this job."""

FIRST_STEPS = 5
"""Steps before the first save of an automatic schedule, which measures what a save takes."""


class SaveSchedule:
    """Says when a save is due; every rank has one and calls it at the same steps.

    An automatic one takes the interval T* of (G1) with the seconds of the last save, the median step, and the faults that are to be
    expected (`expected_mtbf_s`); the first rank decides, so that all save at once.

    Attributes:
        save_s: for how long the last save stopped the training.
    """

    def __init__(self, options: TrainOptions, *, done: int) -> None:
        self._every, self._steps = options.checkpoint_every, options.steps
        self._mtbf_hours = options.mtbf_hours_per_device or MTBF_HOURS_PER_DEVICE
        self._next = done + FIRST_STEPS
        self._begin_s = self.save_s = 0.0
        restarts, _, begun_s = os.environ.get(PAST, "").partition(" ")
        self._restarts, self._job_begun_s = int(restarts or 0), float(begun_s or time.time())

    def is_due(self, step: int) -> bool:
        """Return whether to save after this step."""
        if self._every == "auto":
            return step >= self._next
        return step % (self._every or self._steps) == 0

    def begin(self) -> None:
        """Note that a save begins."""
        self._begin_s = time.perf_counter()

    def end(self, step: int, step_times_s: Sequence[float]) -> None:
        """Note that training goes on, and decide when the next save is due."""
        self.save_s = max(time.perf_counter() - self._begin_s, 1e-6)
        if self._every != "auto":
            return
        if not step_times_s:  # a save that a death cut short, before the first step of those who are left
            self._next = step + FIRST_STEPS
            return
        step_s, given_s = median(step_times_s), self._mtbf_hours * 3600 / dist.get_world_size()
        mtbf_s = expected_mtbf_s(given_s, faults=self._restarts, seconds=time.time() - self._job_begun_s)
        interval_s = best_interval_s(mtbf_s=mtbf_s, save_s=self.save_s)
        due = torch.tensor([step + max(round(interval_s / step_s), 1)], dtype=torch.int64)
        device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
        due = due.to(device)
        dist.broadcast(due, 0)
        self._next = int(due.item())


def expected_mtbf_s(given_s: float, *, faults: int, seconds: float) -> float:
    """Return the mean seconds between faults of a job that has seen some.

    What was given counts as one fault in that time (a Gamma prior of shape 1), M = (given + seconds) / (1 + faults), until faults
    speak against it: where as many or more had a probability below `DOUBT`, what was seen counts alone.

    Args:
        given_s: mean seconds between faults, as somebody said before.
        seconds: in which so many faults were seen.
    """
    expected = seconds / given_s
    fewer = (
        sum(math.exp(i * math.log(expected) - expected - math.lgamma(i + 1)) for i in range(faults)) if expected else 0
    )
    if faults and 1 - fewer < DOUBT:
        return seconds / faults
    return (given_s + seconds) / (1 + faults)
