"""Median seconds of a call that all ranks make at the same time, within a budget that all ranks agree on."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MAX_SAMPLES = 60
MIN_SAMPLES = 3
CALLS_PER_SAMPLE_ON_GPU = 10
"""Between two synchronisations: a launch takes longer than a small kernel, and training does not wait for each."""


class Bench:
    """The clock of one rank. Final.

    Every decision (how often to repeat, whether there is time for another point) is made on the maximum over the ranks,
    so that all ranks make the same calls in the same order.

    Args:
        device: where the ranks compute.
        sample_s: time to spend on the samples of one point.
    """

    def __init__(self, device: torch.device, sample_s: float) -> None:
        self.device = device
        self._sample_s = sample_s
        self._calls = CALLS_PER_SAMPLE_ON_GPU if device.type == "cuda" else 1
        self._deadline = float("inf")

    def start_budget(self, seconds: float) -> None:
        """From now on ``has_time`` answers for so many seconds."""
        self._deadline = time.perf_counter() + seconds

    def has_time(self) -> bool:
        """Whether the budget of the slowest rank lasts."""
        return self.agree(time.perf_counter() - self._deadline) < 0

    def agree(self, value: float) -> float:
        """Maximum of a number over the ranks."""
        import torch
        import torch.distributed as dist

        numbers = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        return float(numbers.item())

    def median_s(self, call: Callable[[], Any]) -> float:
        """Median seconds of one call on this rank, all ranks calling; the first call (allocation, code choice) is dropped."""
        self._seconds(call)
        first = self.agree(self._seconds(call))
        samples = int(self._sample_s / max(first * self._calls, 1e-9))
        return median(self._seconds(call) for _ in range(min(MAX_SAMPLES, max(MIN_SAMPLES, samples))))

    def _seconds(self, call: Callable[[], Any]) -> float:
        self._synchronize()
        start = time.perf_counter()
        for _ in range(self._calls):
            call()
        self._synchronize()
        return (time.perf_counter() - start) / self._calls

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)
