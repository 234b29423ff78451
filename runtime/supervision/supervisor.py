"""The launcher's part of a job that goes on without its dead: it sees a process end and says who goes on, under which plan.

It alone decides, from what it knows for sure. Ranks that are alive are never ended for another's death. A rank that stands still
is first killed by the watch, which makes it a death like any other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from ...profilers.run.faults import FOLLOWING, RankDeath, explain_failure
from ...schema import TrainingPlan
from ..job.watch import Watch
from .generations import Board, Generation

MAX_MEETINGS = 5
"""How often in a row members may fail to meet although none of them died."""


class Supervisor:
    """The supervisor of one node's ranks.

    Args:
        plan, path: what the job starts with.
        fallbacks: files of plans for fewer devices.
        watch: over suspended and hung ranks.
    """

    def __init__(
        self, store: dist.Store, plan: TrainingPlan, path: str, fallbacks: Sequence[str], watch: Watch
    ) -> None:
        self._board, self._watch, self._num_processes = Board(store), watch, plan.layout.world_size
        plans = {TrainingPlan.load(file).layout.world_size: file for file in fallbacks}
        self._plans = {self._num_processes: path} | plans
        self._dead: set[int] = set()
        self._num_meetings = 0
        self._publish(0, "")

    def goes_on(self, death: RankDeath) -> bool:
        """Begin the generation after a death; return False where there is no plan for those who are left, or no use in it."""
        if self._board.is_finished() or death.payload is not None or death.kind in FOLLOWING:
            return False
        death = self._watch.completed(death, death.rank)
        was_active = death.rank in self._generation.members[: self._generation.num_active]
        if not any(size < self._num_processes - len(self._dead) for size in self._plans) and was_active:
            return False
        self._dead.add(death.rank)
        if was_active:
            self._num_meetings = 0
            cause = explain_failure((death,), world_size=self._num_processes).message
            self._publish(self._generation.number + 1, cause)
        return True

    def look(self, pids: Mapping[int, int]) -> None:
        """Look at the processes of this node's ranks; called twenty times a second."""
        generation = self._generation
        self._watch.look(
            {rank: pid for rank, pid in pids.items() if rank in generation.members[: generation.num_active]}
        )
        if self._board.is_requested(generation.number) and self._num_meetings < MAX_MEETINGS:
            self._num_meetings += 1
            self._publish(generation.number + 1, "ranks that are alive could not meet")

    def _publish(self, number: int, cause: str) -> None:
        members = tuple(rank for rank in range(self._num_processes) if rank not in self._dead)
        num_active = max(size for size in self._plans if size <= len(members))
        self._generation = Generation(
            number=number, members=members, plan=self._plans[num_active], num_active=num_active, cause=cause,
            time_s=time.time(),
        )  # fmt: skip
        self._watch.begin_anew()
        self._board.publish(self._generation)
