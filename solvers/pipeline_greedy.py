"""Two greedy ways to order a pipeline whose stages differ, under a memory cap on each rank.

`in_waves` (one stage a rank) goes micro-batch by micro-batch: one wave of forward passes down, one of backward passes up, weight
passes into the gaps. Three switches, eight variants.
Source: Qi et al., arXiv:2401.10241, section 3.1, whose "ZB-1p" and "ZB-2p" bubble rates it reproduces.

`by_events` (any placement) runs the clock: a rank that falls idle takes the best of what has arrived. It never deadlocks, because
a forward pass leaves room for one micro-batch in each later stage of its rank, so the oldest micro-batch can always go on.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ..schema.errors import InfeasibleError
from .pipeline_simulation import Action, Kind, Order, Pipeline

_SLACK = 1e-9


@dataclass(frozen=True)
class WaveRule:
    """Variants of `in_waves`.

    overrun_first: a warm-up forward pass may delay the first backward pass.
    backward_first: a rank skips its forward pass where that would hold up the wave behind it.
    fill_all: a weight pass may overrun a gap even when the rank is not the one with the least idle time.
    """

    overrun_first: bool
    backward_first: bool
    fill_all: bool


@dataclass(frozen=True)
class EventRule:
    """Variants of `by_events`.

    prefer: F or B when both have arrived.
    deepest_first: of several forward passes the one of the latest stage.
    fit: share of a weight pass that must fit into a gap for it to start there; 0 starts it in any gap.
    """

    prefer: Literal["F", "B"]
    deepest_first: bool
    fit: float


WAVE_RULES = tuple(WaveRule(*switches) for switches in itertools.product((True, False), repeat=3))
EVENT_RULES = tuple(
    EventRule(prefer, deepest, fit) for prefer in ("B", "F") for deepest in (True, False) for fit in (0.0, 0.5, 1.0)
)


def in_waves(pipeline: Pipeline, cap_bytes: Sequence[float], rule: WaveRule) -> Order:
    """Order of a pipeline with one stage a rank, stage r on rank r; `cap_bytes` [R].

    Raises:
        InfeasibleError: a rank cannot hold one micro-batch.
    """
    return _Waves(pipeline, cap_bytes, rule).run()


class _Waves:
    """Counts, clocks and held bytes of each rank while the waves go over it."""

    def __init__(self, pipeline: Pipeline, cap_bytes: Sequence[float], rule: WaveRule) -> None:
        size = pipeline.num_ranks
        self.costs, self.cap, self.rule, self.size = pipeline, cap_bytes, rule, size
        self.hop = [pipeline.hop_s(s) for s in range(size - 1)]
        self.clock, self.held, self.idle = [0.0] * size, [0.0] * size, [0.0] * size
        self.ends: dict[Kind, list[list[float]]] = {kind: [[] for _ in range(size)] for kind in ("F", "B", "W")}
        self.rows: list[list[Action]] = [[] for _ in range(size)]

    def run(self) -> Order:
        self._warm_up()
        for wave in range(1, self.costs.num_microbatches):
            for rank in self._that_advance():
                self._make_room(rank)
                if rank:
                    self._fill_until(rank, self._forward_arrival(rank, self._done(rank, "F")))
                self._put(rank, "F")
            for rank in reversed(range(self.size)):
                if rank + 1 < self.size:
                    self._fill_until(rank, self.ends["B"][rank + 1][wave] + self.hop[rank])
                if rank == 0 and self._done(0, "F") == self.costs.num_microbatches:
                    self._drain(0)
                self._put(rank, "B")
        for rank in range(self.size):
            self._drain(rank)
        return tuple(tuple(row) for row in self.rows)

    def _done(self, rank: int, kind: Kind) -> int:
        return len(self.ends[kind][rank])

    def _forward_arrival(self, rank: int, micro_batch: int) -> float:
        return self.ends["F"][rank - 1][micro_batch] + self.hop[rank - 1]

    def _put(self, rank: int, kind: Kind) -> None:
        i, costs = self._done(rank, kind), self.costs
        ready = self.clock[rank]
        if kind == "F" and rank:
            ready = max(ready, self._forward_arrival(rank, i))
        if kind == "B" and rank + 1 < self.size:
            ready = max(ready, self.ends["B"][rank + 1][i] + self.hop[rank])
        if self._done(rank, "F"):
            self.idle[rank] += ready - self.clock[rank]
        seconds = {"F": costs.forward_s, "B": costs.backward_s, "W": costs.weight_s}[kind][rank]
        change = {
            "F": costs.held_bytes[rank],
            "B": -costs.backward_freed_bytes[rank],
            "W": -costs.weight_freed_bytes[rank],
        }
        self.clock[rank] = ready + seconds
        self.held[rank] += change[kind]
        self.ends[kind][rank].append(self.clock[rank])
        self.rows[rank].append(Action(rank, kind, i))

    def _pending(self, rank: int) -> bool:
        return self._done(rank, "W") < self._done(rank, "B")

    def _drain(self, rank: int) -> None:
        while self._pending(rank):
            self._put(rank, "W")

    def _make_room(self, rank: int) -> None:
        while self.held[rank] + self.costs.held_bytes[rank] > self.cap[rank] + _SLACK:
            if not self._pending(rank):
                raise InfeasibleError(
                    f"rank {rank} cannot hold one micro-batch of {self.costs.held_bytes[rank]:g} bytes in {self.cap[rank]:g}"
                )
            self._put(rank, "W")

    def _fill_until(self, rank: int, arrival: float) -> None:
        """Weight passes while they fit before the next input; one more may overrun it if the rank can afford that less."""
        while self._pending(rank) and self.clock[rank] + self.costs.weight_s[rank] <= arrival:
            self._put(rank, "W")
        gap = arrival - self.clock[rank]
        if self._pending(rank) and gap > 0 and (self.rule.fill_all or gap > max(self.idle) - self.idle[rank]):
            self._put(rank, "W")

    def _warm_up(self) -> None:
        """Micro-batch 0 down, as many further forward passes as the wait for its backward pass allows, and micro-batch 0 up."""
        for rank in range(self.size):
            self._make_room(rank)
            self._put(rank, "F")
        extra = self._extra_forwards()
        for rank in range(1, self.size):
            while extra[rank] > 0 and extra[rank] >= extra[rank - 1] and 1 + extra[rank] < self.costs.num_microbatches:
                extra[rank] -= 1
        for rank in range(self.size):
            for _ in range(extra[rank]):
                self._put(rank, "F")
        for rank in reversed(range(self.size)):
            self._put(rank, "B")

    def _extra_forwards(self) -> list[int]:
        costs, extra = self.costs, [0] * self.size
        backward_end = self.clock[-1] + costs.backward_s[self.size - 1]
        for rank in reversed(range(self.size - 1)):
            held, clock, arrival = self.held[rank], self.clock[rank], backward_end + self.hop[rank]
            forward = costs.forward_s[rank]
            while 1 + extra[rank] < costs.num_microbatches and held + costs.held_bytes[rank] <= self.cap[rank] + _SLACK:
                if clock >= arrival if not self.rule.overrun_first else clock + forward > arrival:
                    break
                held, clock, extra[rank] = held + costs.held_bytes[rank], clock + forward, extra[rank] + 1
            backward_end = max(clock, arrival) + costs.backward_s[rank]
        return extra

    def _that_advance(self) -> list[int]:
        """Ranks that run a forward pass in this wave; a rank does only when all behind it do."""
        m = self.costs.num_microbatches
        advances = [self._done(rank, "F") < m and not self._should_wait(rank) for rank in range(self.size)]
        for rank in reversed(range(self.size - 1)):
            advances[rank] = advances[rank] and advances[rank + 1]
        return [rank for rank in range(self.size) if advances[rank]]

    def _should_wait(self, rank: int) -> bool:
        ahead = rank + 1 < self.size and self._done(rank, "F") >= self._done(rank + 1, "F") + 2
        if not (self.rule.backward_first and ahead):
            return False
        costs = self.costs
        after = costs.forward_s[rank + 1] + costs.backward_s[rank + 1]
        next_backward = self.clock[rank + 1] + after + self.hop[rank]
        if self.clock[rank] >= next_backward:
            return True
        room_s, held, pending = (
            0.0,
            self.held[rank] + costs.held_bytes[rank],
            self._done(rank, "B") - self._done(rank, "W"),
        )
        while held > self.cap[rank] + _SLACK and pending:
            room_s, held, pending = room_s + costs.weight_s[rank], held - costs.weight_freed_bytes[rank], pending - 1
        if self.clock[rank] + costs.forward_s[rank] + room_s <= next_backward:
            return False
        return next_backward - self.clock[rank] <= max(self.idle) - self.idle[rank]


def by_events(pipeline: Pipeline, cap_bytes: Sequence[float], rule: EventRule) -> Order:
    """Order for any placement; `cap_bytes` [R].

    Raises:
        InfeasibleError: a rank cannot hold one micro-batch of all its stages.
    """
    return _Events(pipeline, cap_bytes, rule).run()


class _Events:
    """What has arrived where, and when each rank is free."""

    def __init__(self, pipeline: Pipeline, cap_bytes: Sequence[float], rule: EventRule) -> None:
        self.costs, self.cap, self.rule = pipeline, cap_bytes, rule
        ranks, stages, m = range(pipeline.num_ranks), range(pipeline.num_stages), pipeline.num_microbatches
        self.stages = [pipeline.stages_of(rank) for rank in ranks]
        self.hop = [pipeline.hop_s(s) for s in range(pipeline.num_stages - 1)]
        self.room = [
            sum(pipeline.held_bytes[later] for later in self.stages[pipeline.rank_of_stage[s]] if later > s)
            for s in stages
        ]
        self.arrivals: dict[str, list[list[float]]] = {"F": [[] for _ in stages], "B": [[] for _ in stages]}
        self.arrivals["F"][0] = [0.0] * m
        self.done = {kind: [0] * pipeline.num_stages for kind in ("F", "B", "W")}
        self.held = [0.0] * pipeline.num_ranks
        self.rows: list[list[Action]] = [[] for _ in ranks]
        self.left = [3 * m * len(of_rank) for of_rank in self.stages]
        self.queue = [(0.0, rank) for rank in ranks]
        self.free_at = [0.0] * pipeline.num_ranks
        for rank in ranks:
            need = max((pipeline.held_bytes[s] + self.room[s] for s in self.stages[rank]), default=0.0)
            if need > cap_bytes[rank] + _SLACK:
                raise InfeasibleError(
                    f"rank {rank} cannot hold one micro-batch of {need:g} bytes in {cap_bytes[rank]:g}"
                )

    def run(self) -> Order:
        while self.queue:
            now, rank = heapq.heappop(self.queue)
            if now >= self.free_at[rank] - _SLACK and self.left[rank]:
                self._decide(now, rank)
        return tuple(tuple(row) for row in self.rows)

    def _waiting(self, rank: int, kind: str) -> Iterator[tuple[float, int]]:
        """Arrival and stage of the next pass of each stage whose input is known to come."""
        for s in self.stages[rank]:
            arrivals, done = self.arrivals[kind][s], self.done[kind][s]
            if done < len(arrivals):
                yield arrivals[done], s

    def _decide(self, now: float, rank: int) -> None:
        forward = list(self._waiting(rank, "F"))
        backward = list(self._waiting(rank, "B"))
        fits = [
            s
            for _, s in forward
            if self.held[rank] + self.costs.held_bytes[s] + self.room[s] <= self.cap[rank] + _SLACK
        ]
        can_f = [s for at, s in forward if at <= now + _SLACK and s in fits]
        can_b = [s for at, s in backward if at <= now + _SLACK]
        can_w = [s for s in self.stages[rank] if self.done["W"][s] < self.done["B"][s]]
        if can_b and (self.rule.prefer == "B" or not can_f):
            self._run(now, rank, "B", max(can_b))
        elif can_f:
            self._run(now, rank, "F", max(can_f) if self.rule.deepest_first else min(can_f))
        else:
            coming = min(
                (at for at, s in (*backward, *((at, s) for at, s in forward if s in fits))), default=float("inf")
            )
            if can_w and coming - now >= self.rule.fit * self.costs.weight_s[can_w[-1]]:
                self._run(now, rank, "W", can_w[-1])
            elif coming < float("inf"):
                heapq.heappush(self.queue, (max(coming, now), rank))

    def _run(self, now: float, rank: int, kind: Kind, s: int) -> None:
        costs, i = self.costs, self.done[kind][s]
        end = now + {"F": costs.forward_s, "B": costs.backward_s, "W": costs.weight_s}[kind][s]
        self.held[rank] += {
            "F": costs.held_bytes[s],
            "B": -costs.backward_freed_bytes[s],
            "W": -costs.weight_freed_bytes[s],
        }[kind]
        self.done[kind][s] += 1
        self.left[rank] -= 1
        self.rows[rank].append(Action(s, kind, i))
        self.free_at[rank] = end
        heapq.heappush(self.queue, (end, rank))
        if kind == "F" and s + 1 < costs.num_stages:
            self._announce("F", s + 1, end + self.hop[s])
        elif kind == "F":
            self._announce("B", s, end)
        elif kind == "B" and s:
            self._announce("B", s - 1, end + self.hop[s - 1])

    def _announce(self, kind: str, s: int, at: float) -> None:
        self.arrivals[kind][s].append(at)
        rank = self.costs.rank_of_stage[s]
        heapq.heappush(self.queue, (max(at, self.free_at[rank]), rank))
