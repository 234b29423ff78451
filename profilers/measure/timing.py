"""Median seconds of a call that all ranks make at the same time, within a budget of time and memory that all ranks agree on.

A measurement is admitted where it is expected to end in time. Expected seconds come from FLOPs and bytes and the rates measured so
far. What a machine under load makes of them is its pace, the seconds taken by the points of the last seconds over those expected of
them; it multiplies every expectation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import exp
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from ..machine import available_memory, memory_left_to_process

if TYPE_CHECKING:
    import torch

SLOWEST_PACE = 50.0

QUICKEST_PACE = 0.5
"""A point that took less than half of its expectation says that the expectation was careful, not that the next one is."""

MEMORY_S = 2.0
"""What was taken and expected is forgotten by ``exp(-seconds taken / MEMORY_S)``."""

_PRIOR_S = 0.2
"""Expected seconds that the pace at the beginning counts for."""

OVERHEAD_S = 1e-3
"""Of a point besides its calls: agreeing with the other ranks, on an idle machine."""

MAX_SAMPLES = 60
MIN_SAMPLES = 3

CALLS_PER_SAMPLE_ON_GPU = 10
"""Between two events: a launch takes longer than a small kernel, and training does not wait for each."""

USABLE_FRACTION = 0.5
"""Of the free memory: what a measurement may take at once; caches, other processes and fragments need the rest."""


class Timing(NamedTuple):
    """Median seconds of a call on this rank, and their relative interquartile range: fields of a point."""

    time_s: float
    spread: float


def summarise_samples(samples: list[float]) -> Timing:
    """Return the median and the relative interquartile range."""
    ordered = sorted(samples)
    middle, quarter = median(ordered), len(ordered) // 4
    return Timing(middle, (ordered[-1 - quarter] - ordered[quarter]) / middle)


class Bench:
    """The clock and the memory of one rank. Final.

    Every decision (how often to repeat, whether there is time or memory for another point) is made on the maximum over the
    ranks, so that all ranks make the same calls in the same order.

    Attributes:
        say: called with what is being measured.
        sample_clock: what a sample on a CPU is measured by.

    Args:
        device: where the ranks compute.
        sample_s: time to spend on the samples of one point.
        ranks_per_node: how many share the memory of the host.
        clock: seconds of any origin, by which the budget goes.
        sample_clock: what samples on a CPU are measured by; unset, the same.
        pace: of this machine against an idle one, to begin with.
    """

    def __init__(
        self,
        device: torch.device,
        sample_s: float,
        *,
        ranks_per_node: int = 1,
        clock: Callable[[], float] = time.perf_counter,
        sample_clock: Callable[[], float] | None = None,
        pace: float = 1.0,
    ) -> None:
        self.device, self.sample_s = device, sample_s
        self.say: Callable[[str], None] = lambda _: None
        self._clock, self._end_s = clock, float("inf")
        self.sample_clock = sample_clock or clock
        self._expected_s, self._taken_s = _PRIOR_S, _PRIOR_S * pace
        self._begun: tuple[float, float] | None = None
        self._skipped: list[tuple[str, float]] = []
        self._ran_out = ""
        self._calls = CALLS_PER_SAMPLE_ON_GPU if device.type == "cuda" else 1
        self._ranks_per_node = ranks_per_node

    # --- time ---

    def start_budget(self, seconds: float) -> None:
        """Let ``has_time`` answer for so many seconds from now on."""
        self._settle()
        self._end_s = self._clock() + seconds
        self._ran_out = ""

    def end_budget(self) -> str:
        """Return why not all of a step was measured; empty where it was."""
        self._settle()
        reasons = []
        if self._skipped:
            what, expected_s = self._skipped[0]
            first = f"{what} ({expected_s:.2g} s expected)" if expected_s else what
            more = len(self._skipped) - 1
            reasons.append(f"no time for {first}" + (f" and {more} more" if more else ""))
            self._skipped = []
        return "; ".join([*reasons, *filter(None, [self._ran_out])])

    @contextmanager
    def part_of_budget(self, fraction: float) -> Iterator[None]:
        """Set a tighter end for a while: a fraction of the time that remains."""
        before, now = self._end_s, self._clock()
        self._end_s = now + max(0.0, before - now) * fraction
        try:
            yield
        finally:
            self._end_s = before

    def remaining_s(self) -> float:
        """Return the seconds that the slowest rank still has."""
        return max(0.0, self.agree_min(self._end_s - self._clock()))

    def remaining_work_s(self) -> float:
        """Return what an idle machine would take for what the slowest rank can still do in its time."""
        return max(0.0, self.agree_min((self._end_s - self._clock()) / self._pace()))

    def has_time(self, for_s: float, what: str) -> bool:
        """Tell whether something of ``for_s`` seconds on an idle machine ends within the budget on the slowest rank, at its pace.

        What is admitted begins now, which is said, and has ended when this is called next.
        """
        self._settle()
        paced_s = self._pace() * (for_s + OVERHEAD_S) if for_s > 0 else 0.0
        if self.agree(paced_s - (self._end_s - self._clock())) >= 0:
            self._skipped.append((what, paced_s))
            return False
        self._begun = (self._clock(), for_s + OVERHEAD_S) if for_s > 0 else None
        self.say(what)
        return True

    def leave_out(self, what: str, count: int) -> None:
        """Note measurements that were not begun, as there is no time."""
        self._skipped += [(what, 0.0)] * count

    def _pace(self) -> float:
        return min(max(self._taken_s / self._expected_s, QUICKEST_PACE), SLOWEST_PACE)

    def _settle(self) -> None:
        """Count the seconds of what was begun last for the pace: it has ended."""
        if self._begun is not None:
            taken_s = self._clock() - self._begun[0]
            retained = exp(-taken_s / MEMORY_S)
            self._taken_s = retained * self._taken_s + taken_s
            self._expected_s = retained * self._expected_s + self._begun[1]
            self._begun = None

    # --- memory ---

    def has_memory(self, num_bytes: int, *, on_host: bool = False) -> bool:
        """Tell whether every rank may allocate so much now; where not, `end_budget` says so."""
        free = self.free_bytes(on_host=on_host)
        if self.agree(num_bytes - USABLE_FRACTION * free) <= 0:
            return True
        self._ran_out = "larger sizes did not fit into the free memory"
        return False

    def free_bytes(self, *, on_host: bool = False) -> int:
        """Return the memory that this rank can have now: the device's, or its share of the host's."""
        if self.device.type == "cuda" and not on_host:
            import torch

            cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            return int(torch.cuda.mem_get_info(self.device)[0]) + cached
        return min(available_memory() // self._ranks_per_node, memory_left_to_process())

    # --- all ranks ---

    def agree(self, value: float) -> float:
        """Return the maximum of a number over the ranks."""
        import torch
        import torch.distributed as dist

        numbers = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        return float(numbers.item())

    def agree_min(self, value: float) -> float:
        """Return the minimum of a number over the ranks."""
        return -self.agree(-value)

    def gather(self, value: Any) -> list[Any]:
        """Return what every rank passed, in their order."""
        import torch.distributed as dist

        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    # --- calls ---

    def point_s(self, call_s: float) -> float:
        """Return the seconds that `measure` takes for a call of ``call_s``: a first one, then as many samples as it takes."""
        sample_s = self._calls * call_s
        return 2 * sample_s + max((MIN_SAMPLES - 1) * sample_s, min(self.sample_s, MAX_SAMPLES * sample_s))

    def measure(self, call: Callable[[], Any], *, calls: int | None = None) -> Timing:
        """Measure median and spread of a call on this rank, all ranks calling; the first (allocation, choice of code) is dropped.

        Args:
            calls: between two looks at the clock; unset, one on a CPU and several on a GPU.
        """
        calls = calls or self._calls
        self._seconds(call, calls)
        first = self._seconds(call, calls)
        num_more = self.num_samples(first * calls) - 1
        return summarise_samples([first, *(self._seconds(call, calls) for _ in range(num_more))])

    def num_samples(self, sample_s: float) -> int:
        """Return how many samples of ``sample_s`` seconds to take, within limits; less where the time is over, but one."""
        sample_s = max(sample_s, 1e-9)
        target = min(MAX_SAMPLES, max(MIN_SAMPLES, int(self.sample_s / sample_s)))
        affordable = max(1.0, min((self._end_s - self._clock()) / sample_s, MAX_SAMPLES))
        return int(self.agree_min(min(target, affordable)))

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)

    def clocked(self, call: Callable[[], Any]) -> float:
        """Return the seconds of one call."""
        return self._seconds(call, 1)

    def _seconds(self, call: Callable[[], Any], calls: int) -> float:
        if self.device.type != "cuda":
            start = self.sample_clock()
            for _ in range(calls):
                call()
            return (self.sample_clock() - start) / calls
        import torch

        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.synchronize()
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        self.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / calls


Points = Mapping[str, list[dict[str, Any]]]
"""Fields of a Profile and the points that one rank has for them; ``time_s`` is None where this rank took no part."""
