"""Generations of a job: which processes are left, and with how many of them it trains.

They are in the store that all launchers and ranks share, where the launcher that holds the store writes them and never takes one
back. Launchers see processes end and tell it; who has no connection to the store can begin nothing. What is written besides:

    plan/N          the plan for N devices, as text: all train under the same
    report/K        what launchers tell (`Report`)
    beat/NODE       a number that its launcher raises as long as it runs
    arrival/K       a process that was started anew and waits to be taken in
    invited/N       processes wait to be taken in, or are about to be taken away: generation N is to end with a step
    requested/N     a generation after N, because its members could not meet, or because they ended the step
    met/N           all members of generation N have the states that they need: those that stand by may go
    stopping/0      nodes are about to be taken away, and there is no plan without them: their ranks ask all to save and end
    broken/N        a rank of generation N has lost the connection to another
    finished, over  the job is done, or nobody goes on because of this

Everything is JSON: whoever reaches the store can end a job, but runs no code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch.distributed as dist

from ...schema import MeshwrightError, TrainingPlan
from ...schema.base import Frozen, NonNegativeInt, PositiveInt


class Generation(Frozen):
    """One generation of a job.

    Attributes:
        members: the processes that are left, by their numbers at the start of the job: those of complete nodes first.
        num_active: members that train, the first ones, under the plan for so many; the others stand by.
        cause: why it began; empty for the first one.
        time_s: when, seconds of the epoch.
        notice_s: how long a rank whose collective failed waits for word of a death, before it fails itself.
    """

    number: NonNegativeInt
    members: tuple[NonNegativeInt, ...]
    num_active: PositiveInt
    cause: str = ""
    time_s: float = 0.0
    notice_s: float = 3.0

    @property
    def active(self) -> tuple[int, ...]:
        """The members that train."""
        return self.members[: self.num_active]


class Report(Frozen):
    """What a launcher tells: ranks of its node ended.

    Attributes:
        cause: one line.
        is_final: no rank can go on, because the error is not one rank's.
        leaves: the node's launcher ends too.
        is_notice: the ranks live, and are about to be taken away.
    """

    node: NonNegativeInt
    ranks: tuple[NonNegativeInt, ...]
    cause: str
    is_final: bool = False
    leaves: bool = False
    is_notice: bool = False


class GenerationOverError(MeshwrightError):
    """There is a later generation: what this one does will not be finished."""


class Board:
    """The generations in a store, as the launchers and every rank see them."""

    def __init__(self, store: dist.Store) -> None:
        self.store = dist.PrefixStore("meshwright/generations", store)

    def publish(self, generation: Generation) -> None:
        """Begin a generation."""
        self.store.set(key_of(generation.number), generation.model_dump_json())

    def read(self, number: int) -> Generation:
        """Return a generation, once it is there."""
        return Generation.model_validate_json(self.store.get(key_of(number)))

    def after(self, number: int) -> list[Generation]:
        """Return the generations that have begun after this one, oldest first."""
        later = []
        while self.store.check([key_of(number + len(later) + 1)]):
            later.append(self.read(number + len(later) + 1))
        return later

    def write_plan(self, plan: TrainingPlan) -> None:
        """Write the plan for a number of devices."""
        self.store.set(f"plan/{plan.layout.world_size}", plan.model_dump_json())

    def plan_for(self, num_devices: int) -> TrainingPlan:
        """Return the plan for a number of devices."""
        return TrainingPlan(**json.loads(self.store.get(f"plan/{num_devices}")))

    def tell(self, report: Report) -> None:
        """Tell the launcher that decides."""
        self._append("report", report.model_dump_json())

    def reports(self, read: int) -> Iterator[Report]:
        """Yield the reports after the first ``read`` ones."""
        return (Report.model_validate_json(text) for text in self._read_on("report", read))

    def arrive(self, process: int) -> None:
        """Tell that a process was started anew and waits to be taken in."""
        self._append("arrival", str(process))

    def arrivals(self, read: int) -> Iterator[int]:
        """Yield the processes that came after the first ``read`` ones."""
        return map(int, self._read_on("arrival", read))

    def beat(self, node: int) -> None:
        """Tell that the launcher of a node runs."""
        self.store.add(f"beat/{node}", 1)

    def beats(self, node: int) -> int:
        """Return how often the launcher of a node told that it runs."""
        return self.store.add(f"beat/{node}", 0)

    def mark(self, name: str, number: int) -> None:
        """Note one of the words above of a generation."""
        self.store.set(f"{name}/{number}", "1")

    def is_marked(self, name: str, number: int) -> bool:
        """Tell whether that was noted of a generation."""
        return self.store.check([f"{name}/{number}"])

    def finish(self) -> None:
        """Tell ranks that stand by that the job is done."""
        self.store.set("finished", "1")

    def is_finished(self) -> bool:
        """Tell whether the job is done."""
        return self.store.check(["finished"])

    def end(self, reason: str) -> None:
        """Tell all launchers that nobody goes on."""
        self.store.set("over", reason)

    def end_reason(self) -> str:
        """Return why nobody goes on; empty where the job does."""
        return self.store.get("over").decode(errors="replace") if self.store.check(["over"]) else ""

    def _append(self, kind: str, text: str) -> None:
        self.store.set(f"{kind}/{self.store.add(f'num_{kind}', 1)}", text)

    def _read_on(self, kind: str, read: int) -> Iterator[bytes]:
        while self.store.check([f"{kind}/{read + 1}"]):
            read += 1
            yield self.store.get(f"{kind}/{read}")


def key_of(number: int) -> str:
    """Return the key of a generation."""
    return f"generation/{number}"
