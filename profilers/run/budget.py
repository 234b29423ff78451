"""How a time budget is spread over the steps of a measurement: by their value, and what one leaves the later ones get."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence


class Budget:
    """Seconds for each step, asked for in order. Final.

    A step gets ``left * value_i / sum of the values from i on`` of what is left when it begins: a step that ends early gives
    to all later ones, and one that overruns takes from them in proportion, never more than there is.

    Args:
        total_s: seconds for everything.
        values: of the steps in their order; only their ratios count.
        started_s: when it began, on ``clock``; unset, now.
        reserve_s: kept for what comes after the last step.
        clock: seconds of any origin.
    """

    def __init__(
        self,
        total_s: float,
        values: Sequence[float],
        *,
        started_s: float | None = None,
        reserve_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._end_s = (clock() if started_s is None else started_s) + total_s - reserve_s
        self._values = tuple(values)

    def left_s(self) -> float:
        """Seconds until the end, not negative."""
        return max(0.0, self._end_s - self._clock())

    def share_s(self, idx: int) -> float:
        """Seconds for step ``idx``, which begins now."""
        rest = sum(self._values[idx:])
        return self.left_s() * self._values[idx] / rest if rest else 0.0
