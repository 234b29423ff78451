"""Median seconds of a call that all ranks make at the same time, within a budget that all ranks agree on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MAX_SAMPLES = 60
MIN_SAMPLES = 3
CALLS_PER_SAMPLE_ON_GPU = 10
"""Between two synchronisations: a launch takes longer than a small kernel, and training does not wait for each."""


def quietest(rounds: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The points of several rounds, each with its shortest ``time_s``.

    Other processes of the machine come and go within seconds and disturb one round more than the other; what the ranks do
    to one another is in every round, so the minimum keeps it.
    """
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for points in rounds:
        seen: dict[tuple[Any, ...], int] = {}
        for point in points:
            key = tuple(value for name, value in point.items() if name != "time_s")
            seen[key] = seen.get(key, 0) + 1  # forward and backward of a square layer have the same shape
            known = best.setdefault((*key, seen[key]), point)
            if point["time_s"] is not None and point["time_s"] < known["time_s"]:
                best[(*key, seen[key])] = point
    return list(best.values())


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
        """Median seconds of a call on this rank, all ranks calling; the first (allocation, choice of code) is dropped."""
        self._seconds(call)
        first = self._seconds(call)
        fitting = int(self._sample_s / max(self.agree(first) * self._calls, 1e-9))
        further = min(MAX_SAMPLES, max(MIN_SAMPLES, fitting)) - 1
        return median([first, *(self._seconds(call) for _ in range(further))])

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
