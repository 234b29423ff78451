"""A greedy order for pipelines with one stage a rank, under a memory cap on each rank.

Micro-batch by micro-batch: one wave of forward passes down, one of backward passes up, weight passes into the gaps. Three switches,
eight variants.
Source: Qi et al., arXiv:2401.10241, section 3.1, whose "ZB-1p" and "ZB-2p" bubble rates it reproduces.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ...cost_models.pipeline.simulation import Action, Kind, Order, Pipeline
from ...schema.errors import InfeasibleError
from ..tolerances import CLOCK


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
    return _Waves(pipeline, cap_bytes, rule).run()


class _Waves:
    """Counts, clocks and resident bytes of each rank while the waves go over it."""

    def __init__(self, pipeline: Pipeline, cap_bytes: Sequence[float], rule: WaveRule) -> None:
        size = pipeline.num_ranks
        self.costs, self.cap, self.rule, self.size = pipeline, cap_bytes, rule, size
        self.hop = [pipeline.hop_s(s) for s in range(size - 1)]
        self.clock, self.resident, self.idle = [0.0] * size, [0.0] * size, [0.0] * size
        self.ends: dict[Kind, list[list[float]]] = {kind: [[] for _ in range(size)] for kind in ("F", "B", "W")}
        self.rows: list[list[Action]] = [[] for _ in range(size)]
        for rank, (need, cap) in enumerate(zip(pipeline.held_bytes, cap_bytes, strict=True)):
            if need > cap + CLOCK:
                raise InfeasibleError(f"rank {rank} cannot hold one micro-batch of {need:g} bytes in {cap:g}")

    def run(self) -> Order:
        """Return the order after the last wave."""
        self._warm_up()
        for wave in range(1, self.costs.num_microbatches):
            for rank in self._advancing_ranks():
                self._free_memory(rank)
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
        self.resident[rank] += change[kind]
        self.ends[kind][rank].append(self.clock[rank])
        self.rows[rank].append(Action(rank, kind, i))

    def _pending(self, rank: int) -> bool:
        return self._done(rank, "W") < self._done(rank, "B")

    def _drain(self, rank: int) -> None:
        while self._pending(rank):
            self._put(rank, "W")

    def _free_memory(self, rank: int) -> None:
        while not self._fits(rank):
            self._put(rank, "W")

    def _fits(self, rank: int, *, freed: float = 0.0) -> bool:
        return self.resident[rank] - freed + self.costs.held_bytes[rank] <= self.cap[rank] + CLOCK

    def _can_fit(self, rank: int) -> bool:
        pending = self._done(rank, "B") - self._done(rank, "W")
        return self._fits(rank, freed=pending * self.costs.weight_freed_bytes[rank])

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
            self._free_memory(rank)
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
            forward = costs.forward_s[rank]
            while (
                1 + extra[rank] < costs.num_microbatches and resident + costs.held_bytes[rank] <= self.cap[rank] + CLOCK
            ):
                if clock >= arrival if not self.rule.overrun_first else clock + forward > arrival:
                    break
                resident, clock, extra[rank] = resident + costs.held_bytes[rank], clock + forward, extra[rank] + 1
            backward_end = max(clock, arrival) + costs.backward_s[rank]
        return extra

    def _advancing_ranks(self) -> list[int]:
        """Return the ranks that run a forward pass in this wave: those with memory, when all behind do and the one above leads."""
        done, m = [self._done(rank, "F") for rank in range(self.size)], self.costs.num_microbatches
        advances = [done[r] < m and self._can_fit(r) and not self._should_wait(r) for r in range(self.size)]
        for rank in reversed(range(self.size - 1)):
            advances[rank] = advances[rank] and advances[rank + 1]
        for rank in range(1, self.size):
            advances[rank] = advances[rank] and (advances[rank - 1] or done[rank - 1] > done[rank])
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
        weight_s, resident = 0.0, self.resident[rank] + costs.held_bytes[rank]
        pending = self._done(rank, "B") - self._done(rank, "W")
        while resident > self.cap[rank] + CLOCK and pending:
            weight_s, resident, pending = (
                weight_s + costs.weight_s[rank],
                resident - costs.weight_freed_bytes[rank],
                pending - 1,
            )
        if self.clock[rank] + costs.forward_s[rank] + weight_s <= next_backward:
            return False
        return next_backward - self.clock[rank] <= max(self.idle) - self.idle[rank]
