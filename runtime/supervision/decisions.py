"""Who goes on with a job, under which plan: decided by the one launcher that holds the store, from what launchers tell for sure.

A generation begins when a rank that trains has died, when a node is lost, or at a step's end when processes that were started anew
make a larger plan possible, or a node is about to be taken away: its ranks then are members that stand by, so that the others get
what they hold. A node is lost when its launcher says so, or has said nothing for some time; that is short where ranks have seen
connections closed, which a cut cable does not do. No step ends without the sums over all who train, and whoever does not reach the
store begins no generation: so there is never a second job that trains.

Of a job whose islands train by themselves (schema/local_updates.py) an island lives and dies as one, and any number of them goes on
under the same plan. One that was started anew is taken in at the end of a sum, which all others have then done, and not by the
generation that a death begins in the middle of one.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from ...schema import TrainingPlan
from ...schema.local_updates import devices_of_islands
from ..job.rendezvous import Meeting
from .generations import Board, Generation, Report

SILENT_S, BROKEN_S = 8.0, 3.0
"""After how long without a word of its launcher a node is lost, and where ranks have lost connections. The first is more than TCP
takes to send again what a cable cut for 3 s has swallowed (after .2, .6, 1.4, 3 and 6.2 s)."""

NOTICE_S = 3.0
"""How long a rank whose collective failed waits for word of a death on its own node."""

MAX_MEETINGS = 5
"""How often in a row members may fail to meet although none of them died."""

_LOOK_S = 0.25


class Silence:
    """For how long nothing was heard, in seconds in which this process itself was not kept from listening."""

    def __init__(self) -> None:
        self._heard, self._looked_s, self.seconds = -1, time.monotonic(), 0.0

    def hear(self, number: int) -> float:
        """Return the seconds since a number of messages last grew."""
        now = time.monotonic()
        self.seconds = 0.0 if number != self._heard else self.seconds + min(now - self._looked_s, 4 * _LOOK_S)
        self._heard, self._looked_s = number, now
        return self.seconds


class Decisions:
    """What the launcher with the store decides.

    Args:
        plan: what the job starts with.
        fallbacks: plans for fewer devices.
        nodes: the numbers of each node's processes, those that stand by included.
        slow: ranks that were seen to be slow: they and their nodes come after the others.
        needs_all: a death ends a job of islands.

    Attributes:
        is_over: nobody goes on.
        limit: ranks that are to train at most, as far as there is a plan for so few; changed while the job runs.
    """

    def __init__(
        self,
        meeting: Meeting,
        plan: TrainingPlan,
        fallbacks: Sequence[TrainingPlan],
        nodes: Sequence[range],
        slow: Collection[int] = (),
        *,
        needs_all: bool = False,
    ) -> None:
        self._islands = devices_of_islands(plan.cluster) if plan.local_updates is not None else ()
        self._needs_all = needs_all
        self.board, self._meeting, self._nodes, self.is_over = Board(meeting.store), meeting, nodes, False
        self._sizes = {each.layout.world_size for each in (plan, *fallbacks)}
        for each in (plan, *fallbacks):
            self.board.write_plan(each)
        self._dead, self._leaving, self._slow = set[int](), set[int](), frozenset(slow)
        self._notice, self.limit = "", nodes[-1].stop
        self._num_meetings = self._num_reports = self._num_arrivals = 0
        self._returned: list[int] = []
        self._is_invited = False
        self._silences = {node: Silence() for node in range(len(nodes)) if node != meeting.node_rank}
        self._next_look_s = 0.0
        self._begin(0, "")

    @property
    def num_processes(self) -> int:
        """All processes of the job, those that stand by included."""
        return self._nodes[-1].stop

    def take(self, report: Report) -> None:
        """Decide what becomes of the job after ranks have ended."""
        if self.is_over or self.board.is_finished():
            return
        if report.leaves:
            self._meeting.leave_out(report.node)
        if report.is_notice:
            self._leaving |= set(report.ranks) - self._dead
            self._notice = report.cause
            return
        lost = set(report.ranks)
        for island in self._islands:
            if not lost.isdisjoint({*island} & {*self.generation.active}):
                lost |= {*island}
        lost -= self._dead
        self._dead |= lost
        self._leaving -= lost
        self._returned = [rank for rank in self._returned if rank not in lost]
        if report.is_final:
            self.end(report.cause)
        elif lost & set(self.generation.active):
            self._num_meetings = 0
            self._begin(self.generation.number + 1, report.cause, takes_in=not self._islands)

    def look(self) -> None:
        """Read what launchers and ranks have told since; called twenty times a second."""
        if self.is_over or self.board.is_finished():
            return
        for report in self.board.reports(self._num_reports):
            self._num_reports += 1
            self.take(report)
        if time.monotonic() > self._next_look_s:
            self._next_look_s = time.monotonic() + _LOOK_S
            self._listen()
        for process in self.board.arrivals(self._num_arrivals):
            self._num_arrivals += 1
            self._dead.discard(process)
            self._returned.append(process)
        if self.is_over:
            return
        number = self.generation.number
        goes, num_active = bool(self._leaving & set(self.generation.active)), self._num_active()
        if goes and not num_active:
            self.board.mark("stopping", 0)
        elif not self._is_invited and (goes or num_active not in (0, self.generation.num_active)):
            self._is_invited = True
            self.board.mark("invited", number)
        if self.board.is_marked("requested", number):
            if self._is_invited:
                causes = [f"{_ranks(self._returned)} came back"] if self._returned else []
                causes += [self._notice] if goes else []
                self._begin(number + 1, "; ".join(causes) or f"{num_active} ranks are to train")
            elif self._num_meetings < MAX_MEETINGS:
                self._num_meetings += 1
                self._begin(number + 1, "ranks that are alive could not meet")

    def _listen(self) -> None:
        """Look which launchers are silent."""
        limit_s = BROKEN_S if self.board.is_marked("broken", self.generation.number) else SILENT_S
        for node, silence in self._silences.items():
            silent_s = silence.hear(self.board.beats(node))
            if silent_s > limit_s and not self._meeting.is_absent(node):
                cause = f"node {node} of {len(self._nodes)} said nothing for {silent_s:.0f} s"
                self.take(Report(node=node, ranks=tuple(self._nodes[node]), cause=cause, leaves=True))

    def _complete_islands(self, out: Collection[int]) -> tuple[int, ...]:
        """Return the ranks of islands of which none is out."""
        return tuple(rank for island in self._islands if {*island}.isdisjoint(out) for rank in island)

    def _members(self) -> tuple[int, ...]:
        """Return who is left, those of complete nodes first: plans for fewer devices are for complete nodes."""

        def order(rank: int) -> tuple[int, ...]:
            node = next(node for node in self._nodes if rank in node)
            lacks, slow = (sum(each in ranks for each in node) for ranks in (self._dead, self._slow))
            return rank in self._leaving, lacks, slow, node.start, rank in self._slow, rank

        return tuple(sorted({rank for node in self._nodes for rank in node} - self._dead, key=order))

    def _num_active(self) -> int:
        """Return for how many devices there is a plan, of those that are left and wanted; 0 where there is none."""
        if self._islands:
            num_complete = len(self._complete_islands(self._dead))
            return num_complete if num_complete == self.num_processes or not self._needs_all else 0
        possible = [size for size in self._sizes if size <= self.num_alive]
        return max((size for size in possible if size <= self.limit), default=min(possible, default=0))

    @property
    def num_alive(self) -> int:
        """Processes that are left and stay."""
        return self.num_processes - len(self._dead | self._leaving)

    def _begin(self, number: int, cause: str, *, takes_in: bool = True) -> None:
        """Begin a generation; of islands without those that wait, unless it takes them in."""
        num_active, members = self._num_active(), self._members()
        if self._islands:
            members = self._complete_islands(self._dead if takes_in else self._dead.union(self._returned))
            num_active = min(num_active, len(members))
        if not num_active:
            self.end(f"{cause}, and there is no plan for {self.num_alive} of {self.num_processes} ranks")
            return
        self._returned, self._is_invited = [] if takes_in else self._returned, False
        self.generation = Generation(
            number=number, members=members, num_active=num_active, cause=cause, time_s=time.time(),
            notice_s=NOTICE_S if len(self._nodes) == 1 else SILENT_S + NOTICE_S,
        )  # fmt: skip
        self.board.publish(self.generation)

    def end(self, reason: str) -> None:
        """Tell all that nobody goes on."""
        self.is_over = True
        self.board.end(reason)


def _ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, sorted(ranks)))
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
