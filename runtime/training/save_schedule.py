"""After which steps a run is saved: every N, or as often as what was measured of steps, saves and faults makes best."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

from ...cost_models.goodput import best_interval_s
from .options import TrainOptions

MTBF_HOURS_PER_DEVICE = 50_000.0
"""Llama 3 (arXiv:2407.21783, table 5): 419 unexpected interruptions of 16,384 H100 in 54 days, one in 50,700 hours of each."""

FIRST_STEPS = 5
"""Steps before the first save of an automatic schedule, which measures what a save takes."""


class SaveSchedule:
    """Says when a save is due; every rank has one and calls it at the same steps.

    An automatic one takes faults to be as frequent as `--mtbf-hours-per-device` says, as if one had been seen in that time, and
    those that restarted this job besides (a Gamma prior of one fault): M = (MTBF + seconds so far) / (1 + restarts). The interval
    is T* of (G1) with the seconds of the last save and the median step; the first rank decides, so that all save at once.
    """

    def __init__(self, options: TrainOptions, *, done: int) -> None:
        self._every, self._steps = options.checkpoint_every, options.steps
        self._mtbf_hours = options.mtbf_hours_per_device or MTBF_HOURS_PER_DEVICE
        self._next = done + FIRST_STEPS
        self._begin_s = 0.0

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
        if self._every != "auto":
            return
        save_s, step_s = max(time.perf_counter() - self._begin_s, 1e-6), median(step_times_s)
        faults = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        mtbf_s = (self._mtbf_hours * 3600 / dist.get_world_size() + step * step_s) / (1 + faults)
        interval_s = best_interval_s(mtbf_s=mtbf_s, save_s=save_s)
        due = torch.tensor([step + max(round(interval_s / step_s), 1)], dtype=torch.int64)
        device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
        due = due.to(device)
        dist.broadcast(due, 0)
        self._next = int(due.item())
