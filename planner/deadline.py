"""Deadline: when the planner stops, because its time is over or because somebody asked."""

from __future__ import annotations

import time

from ..schema import SolverLimitError


class Deadline:
    """The end of a time limit that began when this was made, or of the user's patience (`stop`), whichever comes first.

    Long array passes look at it between their pieces (`require`); the search looks at it before every layout (`is_over`).
    """

    def __init__(self, limit_s: float, *, within: Deadline | None = None) -> None:
        """Start the clock; a stop of the deadline that this one is ``within`` ends it too."""
        self.limit_s = limit_s
        self._within = within
        self._end_s = time.perf_counter() + limit_s
        self.is_stopped = False
        """Whether somebody asked to stop."""

    @property
    def is_over(self) -> bool:
        """Whether to stop now with what there is."""
        if self._within is not None and self._within.is_stopped:
            return True
        return self.is_stopped or time.perf_counter() >= self._end_s

    @property
    def left_s(self) -> float:
        """Seconds that remain, at least 0."""
        return 0.0 if self.is_stopped else max(0.0, self._end_s - time.perf_counter())

    def stop(self) -> None:
        """Ask for an early end; safe in a signal handler."""
        self.is_stopped = True

    def require(self, doing: str) -> None:
        """Go on only while there is time: without bounds on the whole space nothing can be certified.

        Raises:
            SolverLimitError: time is over; the message names what was being done.
        """
        if self.is_over:
            raise no_incumbent(self, f"while {doing}")


def no_incumbent(deadline: Deadline, when: str, *details: str) -> SolverLimitError:
    """The error for a search that was ended before it had any layout that fits."""
    ended = "was stopped" if deadline.is_stopped else f"ran into its time limit of {deadline.limit_s:g} s"
    return SolverLimitError(
        f"the search {ended} {when}, before any layout that fits was found",
        details=details,
        help="raise --time-limit-s, or fix some degrees with --fix so that fewer layouts are to be compared",
    )
