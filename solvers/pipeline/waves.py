"""Greedy orders of a pipeline with one stage a rank, by waves (the problem: pipeline/schedule.py).

Micro-batch by micro-batch one wave of forward passes down, one of backward passes up, weight passes into the gaps.
Source: Qi et al., arXiv:2401.10241, section 3.1, whose "ZB-1p" and "ZB-2p" bubble rates this reproduces.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ...cost_models.pipeline.orders import Action, Kind, Order, Pipeline
from ..tolerances import CLOCK
from .greedy import require_one_microbatch


@dataclass(frozen=True)
class WaveRule:
    """Variants of `wave_order`.

    overrun_first: a warm-up forward pass may delay the first backward pass.
    backward_first: a rank skips its forward pass where that would hold up the wave behind it.
    fill_all: a weight pass may overrun a gap even when the rank is not the one with the least idle time.
    """

    overrun_first: bool
    backward_first: bool
    fill_all: bool


WAVE_RULES = tuple(WaveRule(*switches) for switches in itertools.product((True, False), repeat=3))


def wave_order(pipeline: Pipeline, cap_bytes: Sequence[float], rule: WaveRule) -> Order:
    """Return the order of a pipeline with one stage a rank, stage r on rank r; `cap_bytes` [R].

    Raises:
        InfeasibleError: a rank cannot hold one micro-batch.
    """
    for rank, need_bytes in enumerate(pipeline.held_bytes):
        require_one_microbatch(rank, need_bytes, cap_bytes)
    return _Waves(pipeline, cap_bytes, rule).run()


class _Waves:
    """Clocks and resident bytes of each rank, and the ends of its passes, while the waves go over it."""

    def __init__(self, pipeline: Pipeline, cap_bytes: Sequence[float], rule: WaveRule) -> None:
        size = pipeline.num_ranks
        self.costs, self.cap, self.rule, self.size = pipeline, cap_bytes, rule, size
        self.hop = [pipeline.hop_s(s) for s in range(size - 1)]
        self.clock, self.resident, self.idle = [0.0] * size, [0.0] * size, [0.0] * size
        self.ends: dict[Kind, list[list[float]]] = {kind: [[] for _ in range(size)] for kind in ("F", "B", "W")}
        self.seconds = {"F": pipeline.forward_s, "B": pipeline.backward_s, "W": pipeline.weight_s}
        self.rows: list[list[Action]] = [[] for _ in range(size)]

    def run(self) -> Order:
        """Return the order after the last wave."""
        self._warm_up()
        for _ in range(1, self.costs.num_microbatches):
            for rank in self._advancing_ranks():
                while not self._fits(rank):
                    self._put(rank, "W")
                self._fill_until_input(rank, "F")
                self._put(rank, "F")
            for rank in reversed(range(self.size)):
                self._fill_until_input(rank, "B")
                if rank == 0 and self._done(0, "F") == self.costs.num_microbatches:
                    self._drain(0)
                self._put(rank, "B")
        for rank in range(self.size):
            self._drain(rank)
        return tuple(tuple(row) for row in self.rows)

    def _done(self, rank: int, kind: Kind) -> int:
        return len(self.ends[kind][rank])

    def _pending(self, rank: int) -> int:
        return self._done(rank, "B") - self._done(rank, "W")

    def _arrival_s(self, rank: int, kind: Kind) -> float:
        """Return when the input of a rank's next F or B arrives; zero where it waits for no other rank."""
        i = self._done(rank, kind)
        if kind == "F" and rank:
            return self.ends["F"][rank - 1][i] + self.hop[rank - 1]
        if kind == "B" and rank + 1 < self.size:
            return self.ends["B"][rank + 1][i] + self.hop[rank]
        return 0.0

    def _put(self, rank: int, kind: Kind) -> None:
        ready = max(self.clock[rank], self._arrival_s(rank, kind))
        if self._done(rank, "F"):
            self.idle[rank] += ready - self.clock[rank]
        self.rows[rank].append(Action(rank, kind, self._done(rank, kind)))
        self.clock[rank] = ready + self.seconds[kind][rank]
        self.resident[rank] += self.costs.memory_changes[kind][rank]
        self.ends[kind][rank].append(self.clock[rank])

    def _drain(self, rank: int) -> None:
        while self._pending(rank):
            self._put(rank, "W")

    def _fits(self, rank: int, *, freed: float = 0.0) -> bool:
        return self.resident[rank] - freed + self.costs.held_bytes[rank] <= self.cap[rank] + CLOCK

    def _fill_until_input(self, rank: int, kind: Kind) -> None:
        """Weight passes while they fit before the next input; one more may overrun it if the rank can afford that less."""
        arrival = self._arrival_s(rank, kind)
        while self._pending(rank) and self.clock[rank] + self.costs.weight_s[rank] <= arrival:
            self._put(rank, "W")
        gap = arrival - self.clock[rank]
        if self._pending(rank) and gap > 0 and (self.rule.fill_all or gap > max(self.idle) - self.idle[rank]):
            self._put(rank, "W")

    def _warm_up(self) -> None:
        """Micro-batch 0 down, as many further forward passes as the wait for its backward pass allows, and micro-batch 0 up."""
        for rank in range(self.size):
            self._put(rank, "F")
        extra = self._extra_forwards()
        for rank in range(1, self.size):
            before, all_of_them = extra[rank - 1], self.costs.num_microbatches - 1
            extra[rank] = min(extra[rank], before if before == all_of_them else max(0, before - 1))
        for rank in range(self.size):
            for _ in range(extra[rank]):
                self._put(rank, "F")
        for rank in reversed(range(self.size)):
            self._put(rank, "B")

    def _extra_forwards(self) -> list[int]:
        costs, extra = self.costs, [0] * self.size
        backward_end = self.clock[-1] + costs.backward_s[self.size - 1]
        for rank in reversed(range(self.size - 1)):
            resident, clock, arrival = self.resident[rank], self.clock[rank], backward_end + self.hop[rank]
            more, forward_s, cap_bytes = costs.held_bytes[rank], costs.forward_s[rank], self.cap[rank] + CLOCK
            while 1 + extra[rank] < costs.num_microbatches and resident + more <= cap_bytes:
                if clock >= arrival if not self.rule.overrun_first else clock + forward_s > arrival:
                    break
                resident, clock, extra[rank] = resident + more, clock + forward_s, extra[rank] + 1
            backward_end = max(clock, arrival) + costs.backward_s[rank]
        return extra

    def _advancing_ranks(self) -> list[int]:
        """Return the ranks that run a forward pass in this wave: those with memory, when all behind do and the one above leads."""
        done, m = [self._done(rank, "F") for rank in range(self.size)], self.costs.num_microbatches
        freed = [self._pending(r) * self.costs.weight_freed_bytes[r] for r in range(self.size)]
        advances = [done[r] < m and self._fits(r, freed=freed[r]) and not self._waits(r) for r in range(self.size)]
        for rank in reversed(range(self.size - 1)):
            advances[rank] = advances[rank] and advances[rank + 1]
        for rank in range(1, self.size):
            advances[rank] = advances[rank] and (advances[rank - 1] or done[rank - 1] > done[rank])
        return [rank for rank in range(self.size) if advances[rank]]

    def _waits(self, rank: int) -> bool:
        """Return whether a rank ahead of the next one leaves its forward pass out, for its backward pass to come in time."""
        ahead = rank + 1 < self.size and self._done(rank, "F") >= self._done(rank + 1, "F") + 2
        if not (self.rule.backward_first and ahead):
            return False
        costs, clock = self.costs, self.clock[rank]
        next_backward = self.clock[rank + 1] + (costs.forward_s[rank + 1] + costs.backward_s[rank + 1]) + self.hop[rank]
        if clock >= next_backward:
            return True
        weight_s, resident, pending = 0.0, self.resident[rank] + costs.held_bytes[rank], self._pending(rank)
        while resident > self.cap[rank] + CLOCK and pending:
            weight_s, resident = weight_s + costs.weight_s[rank], resident - costs.weight_freed_bytes[rank]
            pending -= 1
        overlaps = clock + costs.forward_s[rank] + weight_s > next_backward
        return overlaps and next_backward - clock <= max(self.idle) - self.idle[rank]
