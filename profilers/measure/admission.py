"""Which measurements still fit into the time: those that are expected to end before it does, and the others are left out.

Expected seconds come from FLOPs and bytes and the rates measured so far. What a machine under load makes of them is its pace,
the seconds taken by the points of the last seconds over those expected of them; it multiplies every expectation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import exp

SLOWEST_PACE = 50.0
QUICKEST_PACE = 0.5
"""A point that took less than half of its expectation says that the expectation was careful, not that the next one is."""

MEMORY_S = 2.0
"""What was taken and expected is forgotten by ``exp(-seconds taken / MEMORY_S)``."""

_PRIOR_S = 0.2
"""Expected seconds that the pace at the beginning counts for."""

OVERHEAD_S = 1e-3
"""Of a point beside its calls: agreeing with the other ranks, on an idle machine."""


class Admission:
    """The clock of one rank against its deadline, and its pace. Final.

    Attributes:
        left_out: what was not begun for want of time, with its expected seconds.

    Args:
        clock: seconds of any origin.
        pace: to begin with; above 1 on a machine that was slow already.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, *, pace: float = 1.0) -> None:
        self._clock = clock
        self._expected_s, self._taken_s = _PRIOR_S, _PRIOR_S * pace
        self.left_out: list[tuple[str, float]] = []
        self._end_s = float("inf")
        self._begun: tuple[float, float] | None = None

    @property
    def pace(self) -> float:
        """Seconds that points take over seconds that were expected of them."""
        return min(max(self._taken_s / self._expected_s, QUICKEST_PACE), SLOWEST_PACE)

    def start(self, seconds: float) -> float:
        """From now on there are so many seconds; returns the end before, for `restore`."""
        before, self._end_s = self._end_s, self._clock() + seconds
        return before

    def restore(self, end_s: float) -> None:
        """Give an end back that `start` returned."""
        self._end_s = end_s

    def left_s(self) -> float:
        """Seconds until the end; negative after it."""
        return self._end_s - self._clock()

    def late_s(self, expected_s: float = 0.0) -> float:
        """By how many seconds something that is begun now would end too late; negative where it fits."""
        return self.paced_s(expected_s) - self.left_s()

    def paced_s(self, expected_s: float) -> float:
        """What is expected on an idle machine, on this one."""
        return self.pace * (expected_s + OVERHEAD_S) if expected_s > 0 else 0.0

    def begin(self, expected_s: float) -> None:
        """Something was admitted and begins; `settle` closes it."""
        self._begun = (self._clock(), expected_s + OVERHEAD_S) if expected_s > 0 else None

    def settle(self) -> None:
        """What was begun last has ended: its seconds count for the pace."""
        if self._begun is None:
            return
        begin_s, expected_s = self._begun
        self._begun = None
        taken_s = self._clock() - begin_s
        kept = exp(-taken_s / MEMORY_S)
        self._taken_s = kept * self._taken_s + taken_s
        self._expected_s = kept * self._expected_s + expected_s

    def leave_out(self, what: str, expected_s: float, count: int = 1) -> None:
        """Note something that does not fit."""
        self.left_out += [(what, self.paced_s(expected_s))] * count

    def why(self) -> str:
        """What was left out since the last call, in words; empty where nothing was."""
        if not self.left_out:
            return ""
        what, expected_s = self.left_out[0]
        count = len(self.left_out)
        self.left_out = []
        first = f"{what} ({expected_s:.2g} s expected)" if expected_s else what
        return f"no time for {first}" + (f" and {count - 1} more" if count > 1 else "")
