"""The launcher's part of a job that goes on without its dead: it tells what it sees, and follows what is decided (decisions.py).

Ranks that are alive are never ended for another's death. A rank that stands still is first killed by the watch, which makes it a
death like any other. On a node without the store a thread talks to it, so that the launcher never waits for the network: a node
that has no answer for some time ends with its ranks, as the others count it as lost.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch.distributed as dist

from ...profilers.run.faults import FOLLOWING, RankDeath, explain_failure
from ...schema import MeshwrightError, TrainingPlan
from ...schema.errors import InterruptedRunError
from ..job.events import JobEvent, OnEvent
from ..job.rendezvous import Meeting
from ..job.watch import Watch
from .decisions import SILENT_S, Decisions, Silence
from .generations import Board, Generation, Report

_BEAT_S, _LEAVE_S = 0.25, 1.0

SCALE_S = 1.0
"""Between two looks at how many machines to hold."""


class Hold(NamedTuple):
    """Machines to hold, of a spot pool and on demand, and devices that are to train."""

    spot: int
    demand: int
    num_devices: int


Scale = Callable[[int, int], Hold]
"""What to hold, given the steps that are done and the devices that are there."""

_COME_BACK = "start the same command here again to come back"


class Line:
    """The talk of a node's launcher with the store of another node, in a thread.

    Attributes:
        generation: the last one that is known here; None before the first.
        over: why nobody goes on; empty where the job does.
        notice: what was told of this node's end, which is near; None before.
        met, is_stopping: since then: the last generation that is known to have met; there is no plan without this node.
        num_answers: how often the store has answered.
        failure: why there is no connection any more; empty where there is.
    """

    def __init__(self, store: dist.Store, node: int) -> None:
        self.generation: Generation | None = None
        self.over, self.failure, self.num_answers = "", "", 0
        self.notice: Report | None = None
        self.met, self.is_stopping = 0, False
        self._board, self._node = Board(store), node
        self._reports, self._wake, self._is_closed = deque[Report](), threading.Event(), False
        threading.Thread(target=self._talk, daemon=True, name="line").start()

    def tell(self, report: Report) -> None:
        """Tell what has happened here, as soon as that is possible."""
        self._reports.append(report)
        self._wake.set()

    def give_notice(self, report: Report) -> None:
        """Tell that this node is about to be taken away."""
        self.notice = report
        self.tell(report)

    @property
    def is_idle(self) -> bool:
        """Everything is told."""
        return not self._reports

    def close(self) -> None:
        """End, with what there is to tell told if that takes no time."""
        end = time.monotonic() + _LEAVE_S
        while self._reports and not self.failure and time.monotonic() < end:
            time.sleep(0.01)
        self._is_closed = True
        self._wake.set()

    def _talk(self) -> None:
        board = self._board
        try:
            while not self._is_closed:
                self._wake.clear()
                while self._reports:
                    board.tell(self._reports[0])
                    self._reports.popleft()
                board.beat(self._node)
                before = -1 if self.generation is None else self.generation.number
                for generation in board.after(before):
                    self.generation = generation
                self.over = board.end_reason()
                if self.notice is not None and self.generation is not None:
                    self.is_stopping = board.is_marked("stopping", 0)
                    if board.is_marked("met", self.generation.number):
                        self.met = self.generation.number
                self.num_answers += 1
                self._wake.wait(_BEAT_S)
        except dist.DistError as error:
            self.failure = (str(error).strip().splitlines() or [type(error).__name__])[0]


class Supervisor:
    """The supervisor of one node's ranks.

    Args:
        plan, fallbacks: what the job starts with, and plans for fewer devices.
        nodes: the numbers of each node's processes, those that stand by included.
        watch: over suspended and hung ranks.
        restarts: how often a dead rank of this node is started anew, all together.
        slow: ranks that stand by where there are others.
        scale: how many machines to hold; only the launcher with the store asks.
        needs_all: a death ends a job whose islands train by themselves.
    """

    def __init__(
        self,
        meeting: Meeting,
        plan: TrainingPlan,
        fallbacks: Sequence[TrainingPlan],
        nodes: Sequence[range],
        watch: Watch,
        *,
        restarts: int = 0,
        slow: Collection[int] = (),
        on_event: OnEvent = lambda _: None,
        scale: Scale | None = None,
        needs_all: bool = False,
    ) -> None:
        self._has_islands = plan.local_updates is not None
        self._node, self._ranks, self._watch, self._restarts = (
            meeting.node_rank,
            nodes[meeting.node_rank],
            watch,
            restarts,
        )
        self._num_processes = nodes[-1].stop
        self._decisions: Decisions | None = None
        if meeting.is_host:
            self._decisions = Decisions(meeting, plan, fallbacks, nodes, slow, needs_all=needs_all)
        self._line = None if meeting.is_host else Line(meeting.store, self._node)
        self._silence, self._seen, self._on_event = Silence(), None, on_event
        self._to_start: list[int] = []
        self._coming = set(self._ranks) if meeting.is_return else set[int]()
        self._has_others = len(nodes) > 1
        self._scale, self._next_scale_s = scale, 0.0
        self._last_hold: Hold | None = None

    @property
    def _generation(self) -> Generation | None:
        if self._decisions is not None:
            return self._decisions.generation
        assert self._line is not None
        return self._line.generation

    def goes_on(self, death: RankDeath) -> bool:
        """Tell of a death; return False where nobody can go on."""
        local_rank = death.rank - self._ranks.start
        death = self._watch.completed(death, local_rank)
        is_final = not self._has_islands and (death.payload is not None or death.kind in FOLLOWING)
        cause = explain_failure((death,), world_size=self._num_processes).message
        self._tell(Report(node=self._node, ranks=(death.rank,), cause=cause, is_final=is_final))
        if is_final or (self._decisions is not None and self._decisions.is_over):
            return False
        if self._restarts:
            self._restarts -= 1
            self._to_start.append(local_rank)
        return True

    def look(self, pids: Mapping[int, int]) -> None:
        """Look at the processes of this node's ranks, and at what the others tell; called twenty times a second.

        Raises:
            MeshwrightError: nobody goes on, or the others go on without this node.
        """
        if self._decisions is not None:
            self._rescale(self._decisions)
            self._decisions.look()
            if self._decisions.is_over:
                raise MeshwrightError(self._decisions.board.end_reason())
        else:
            self._listen()
        generation = self._generation
        if generation is None:
            return
        if generation is not self._seen:
            self._tell_of(generation, self._seen)
            self._seen = generation
            self._watch.begin_anew()
            self._coming -= set(generation.members)
        first = self._ranks.start
        outside = [rank for rank in pids if first + rank not in {*generation.members, *self._coming}]
        if outside and self._has_islands and (self._decisions is not None or self._restarts):
            # The others of its island still live; this launcher has the store, or starts them anew.
            for rank in outside:
                os.kill(pids[rank], signal.SIGKILL)
        elif outside:
            raise MeshwrightError(
                f"the job goes on without node {self._node}", details=(generation.cause,), help=_COME_BACK
            )
        has_met = self._line is not None and self._line.notice is not None and self._line.met == generation.number
        if has_met and not set(self._ranks) & set(generation.active):
            raise InterruptedRunError(signal.SIGTERM)  # the others have what was held here
        members = {rank: pid for rank, pid in pids.items() if first + rank in generation.members}
        self._watch.look(members, [rank for rank in members if first + rank not in generation.active])

    def _rescale(self, decisions: Decisions) -> None:
        """Follow the policy of the job: more or fewer ranks train from the next step on; machines are the user's to rent."""
        if self._scale is None or time.monotonic() < self._next_scale_s:
            return
        self._next_scale_s = time.monotonic() + SCALE_S
        hold = self._scale(self._watch.num_steps, decisions.num_alive)
        decisions.limit = hold.num_devices
        if hold != self._last_hold:
            self._last_hold = hold
            self._on_event(JobEvent(event="hold", spot=hold.spot, demand=hold.demand))

    def _listen(self) -> None:
        line = self._line
        assert line is not None
        if line.over:
            raise MeshwrightError(line.over)
        silent_s = self._silence.hear(line.num_answers)
        if line.failure or silent_s > SILENT_S:
            raise MeshwrightError(
                f"node {self._node} has lost the node with the store of the job",
                details=(line.failure or f"no answer for {silent_s:.0f} s",),
                help=f"the others may go on without this node; {_COME_BACK}",
            )

    @property
    def ended_early(self) -> bool:
        """The job did not end by itself: nodes without which nobody could go on were taken away."""
        return self._decisions is not None and self._decisions.board.is_marked("stopping", 0)

    def leaves(self) -> bool:
        """Tell the others that this node is about to be taken away; return False where all ranks are to save and end."""
        if self._line is None:  # the store goes with this node
            return False
        if self._has_islands:  # all of them end after the same step
            return False
        if self._line.notice is None:
            cause = f"node {self._node} is about to be taken away"
            self._line.give_notice(Report(node=self._node, ranks=tuple(self._ranks), cause=cause, is_notice=True))
        return not self._line.is_stopping

    def returning(self) -> Collection[int]:
        """Return the local ranks that are to be started anew, once their deaths are told."""
        if not self._to_start or (self._line is not None and not self._line.is_idle):
            return ()
        ranks, self._to_start = self._to_start, []
        for rank in ranks:
            self._watch.forget(rank)
        self._coming |= {self._ranks.start + rank for rank in ranks}
        return ranks

    def stays(self) -> bool:
        """Tell whether this launcher is needed although none of its ranks runs."""
        if self._to_start:
            return True
        return self._decisions is not None and not (self._decisions.is_over or self._decisions.board.is_finished())

    @contextmanager
    def telling_its_end(self) -> Iterator[None]:
        """Tell the others where this launcher ends before the job does; afterwards it holds nothing of the store."""
        try:
            yield
        except BaseException as error:
            self._close(error)
            raise
        self._close(None)

    def _close(self, error: BaseException | None) -> None:
        if error is not None:
            said = error.message if isinstance(error, MeshwrightError) else type(error).__name__
            cause = f"node {self._node} has ended: {said}"
            if self._decisions is None:
                self._tell(Report(node=self._node, ranks=tuple(self._ranks), cause=cause, leaves=True))
            elif self._has_others:
                if not self._decisions.is_over:
                    self._decisions.end(cause)
                time.sleep(2 * _BEAT_S)  # the store goes with this launcher, and the others should know why
        if self._line is not None:
            self._line.close()
        self._decisions = self._line = None

    def _tell_of(self, generation: Generation, before: Generation | None) -> None:
        """Tell whoever started the job of a new generation, and how its members are others than those before."""
        causes = (generation.cause,) if generation.cause else ()
        known = generation.members if before is None else before.members
        lost, returned = (
            tuple(sorted(set(a) - set(b))) for a, b in ((known, generation.members), (generation.members, known))
        )
        if lost:
            self._on_event(JobEvent(event="lost", ranks=lost, causes=causes, generation=generation.number))
        if returned:
            self._on_event(JobEvent(event="returned", ranks=returned, causes=causes, generation=generation.number))
        self._on_event(JobEvent(event="began", ranks=generation.active, causes=causes, generation=generation.number))

    def _tell(self, report: Report) -> None:
        if self._decisions is not None:
            self._decisions.take(report)
        elif self._line is not None:
            self._line.tell(report)
