"""What happens to a job while it runs, as it is told to whoever started it.

Launcher and ranks write events as JSON lines into the run's report, between the lines of steps; `apply` reads them as they come.

    compared    ranks were compared before the job began (`report`); `ranks` are slow, and stand by where there are spares for them
    lost        `ranks` died, or their node is gone
    began       a generation of a job that goes on: `ranks` train under a plan for so many
    returned    `ranks` that had been lost, or not been there, are members again
    went on     the first step of a generation is done: `after_step`, `seconds` after the fault
    checkpoint  the training goes on after a save of `after_step`, which stopped it for `seconds`
    copies      how often states are copied to a peer was decided: `every` so many steps, for `share` of the time
    restarted   the job starts again from its last checkpoint
    hold        the policy of the job says how many machines to hold, `spot` and `demand`
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field

from ...schema.base import Frozen, NonNegativeFloat, NonNegativeInt
from ...schema.preflight import PreflightReport
from ...schema.units import format_seconds

EventKind = Literal["compared", "lost", "began", "returned", "went on", "checkpoint", "copies", "restarted", "hold"]


class JobEvent(Frozen):
    """Something that happened to a job.

    Attributes:
        time_s: when, seconds of the epoch.
        ranks: numbers of processes at the start of the job.
        causes: why, oldest first, one line each.
        generation: of a job that goes on; 0 is the first.
        layout: under which the ranks train.
        spot, demand: machines of a spot pool and on demand.
    """

    event: EventKind
    time_s: float = Field(default_factory=time.time)
    ranks: tuple[NonNegativeInt, ...] = ()
    causes: tuple[str, ...] = ()
    generation: NonNegativeInt | None = None
    after_step: NonNegativeInt | None = None
    every: NonNegativeInt | None = None
    seconds: NonNegativeFloat | None = None
    share: NonNegativeFloat | None = None
    layout: str = ""
    spot: NonNegativeInt | None = None
    demand: NonNegativeInt | None = None
    report: PreflightReport | None = None

    def record(self) -> dict[str, Any]:
        """Return the line of the report."""
        return self.model_dump(mode="json", exclude_none=True)

    def sentence(self) -> str:
        """Return what a person should read at once; empty for what another event says more of."""
        if self.event == "went on" and self.seconds is not None:
            causes = "; ".join(self.causes)
            place = f"step {self.after_step} done {format_seconds(self.seconds)} after"
            return f"{causes}: {len(self.ranks)} ranks go on with {self.layout}, {place}"
        if self.event == "compared" and self.report is not None:
            compared = f"{len(self.report.ranks)} ranks compared for {self.report.seconds:g} s"
            return "\n".join(self.causes) or f"{compared}: none is slower than its peers"
        if self.event == "hold":
            return f"hold {self.spot} machines of the spot pool and {self.demand} on demand"
        return "\n".join(self.causes) if self.event == "restarted" else ""


OnEvent = Callable[[JobEvent], None]
