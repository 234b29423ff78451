"""Greedy orders of a pipeline's passes under a memory cap on each rank (the problem: pipeline/schedule.py).

By events, for any placement: a rank that falls idle takes the best pass of those that have arrived. It never deadlocks, because a
forward pass leaves memory for one micro-batch in each later stage of its rank, so the oldest micro-batch can always go on.
`refill_weight_passes` takes the sequence of forward and backward passes from another order and only places the weight passes.
`quick_order` is the best of a few, (O) the makespan: rules at the full memory cap, then with less, because a rule that may fill all
of it takes in micro-batches that later ones wait for. A number of passes limits the tries, so nothing depends on the clock.

By waves, for one stage a rank: micro-batch by micro-batch one wave of forward passes down, one of backward passes up, weight passes
into the gaps. Source: Qi et al., arXiv:2401.10241, section 3.1, whose "ZB-1p" and "ZB-2p" bubble rates this reproduces.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ...cost_models.pipeline.orders import Action, Kind, Order, Pipeline
from ...schema.errors import InfeasibleError
from ..tolerances import CLOCK


@dataclass(frozen=True)
class EventRule:
    """Variants of `greedy_order`.

    prefer: F or B when both have arrived.
    deepest_first: of several forward passes the one of the latest stage.
    fit: share of a weight pass that must fit into a gap for it to start there; 0 starts it in any gap.
    """

    prefer: Literal["F", "B"]
    deepest_first: bool
    fit: float


EVENT_RULES = tuple(
    EventRule(prefer, deepest, fit) for prefer in ("B", "F") for deepest in (True, False) for fit in (0.0, 0.5, 1.0)
)


def greedy_order(pipeline: Pipeline, cap_bytes: Sequence[float], rule: EventRule) -> tuple[Order, float]:
    """Return an order for any placement, and the seconds until its last pass ends; `cap_bytes` [R].

    Raises:
        InfeasibleError: a rank cannot hold one micro-batch of all its stages.
    """
    events = _Events(pipeline, cap_bytes, rule)
    order = events.run()
    assert not any(events.remaining), "a forward pass leaves memory for its micro-batch to go on"
    return order, max(events.idle_from_s)


def refill_weight_passes(pipeline: Pipeline, cap_bytes: Sequence[float], order: Order, fit: float) -> Order:
    """Keep the forward and backward passes in sequence, and put the weight passes where a rank would wait or needs their memory.

    Args:
        fit: as in `EventRule`.

    Raises:
        InfeasibleError: the sequence does not fit the cap.
    """
    events = _Events(pipeline, cap_bytes, EventRule("B", True, fit))
    events.sequence = [
        [a._replace(kind="B") if a.kind == "BW" else a for a in actions if a.kind != "W"] for actions in order
    ]
    refilled = events.run()
    if any(events.remaining):
        raise InfeasibleError("this sequence of forward and backward passes needs more memory than the cap")
    return refilled


class _Events:
    """The clock: passes that have arrived at each stage, and when each rank is free."""

    def __init__(self, pipeline: Pipeline, cap_bytes: Sequence[float], rule: EventRule) -> None:
        self.costs, self.cap, self.rule = pipeline, cap_bytes, rule
        self.sequence: list[list[Action]] | None = None
        ranks, stages, m = range(pipeline.num_ranks), range(pipeline.num_stages), pipeline.num_microbatches
        self.stages = [pipeline.stages_of(rank) for rank in ranks]
        self.hop = [pipeline.hop_s(s) for s in range(pipeline.num_stages - 1)]
        self.growth = [max(0.0, -freed) for freed in pipeline.backward_freed_bytes]
        self.needed = [pipeline.held_bytes[s] + self._reserve_bytes(s) for s in stages]
        self.seconds = {"F": pipeline.forward_s, "B": pipeline.backward_s, "W": pipeline.weight_s}
        self.change = pipeline.memory_changes
        self.arrivals: dict[str, list[list[float]]] = {"F": [[] for _ in stages], "B": [[] for _ in stages]}
        self.arrivals["F"][0] = [0.0] * m
        self.done = {kind: [0] * pipeline.num_stages for kind in ("F", "B", "W")}
        self.resident = [0.0] * pipeline.num_ranks
        self.rows: list[list[Action]] = [[] for _ in ranks]
        self.remaining = [3 * m * len(rank_stages) for rank_stages in self.stages]
        self.queue = [(0.0, rank) for rank in ranks]
        self.idle_from_s = [0.0] * pipeline.num_ranks
        for rank in ranks:
            _require_one_microbatch(rank, max((self.needed[s] for s in self.stages[rank]), default=0.0), cap_bytes)

    def _reserve_bytes(self, s: int) -> float:
        """Return the bytes that a forward pass of a stage leaves free, so that its micro-batch alone can go on."""
        local = self.stages[self.costs.rank_of_stage[s]]
        return sum(self.costs.held_bytes[later] for later in local if later > s) + max(self.growth[k] for k in local)

    def run(self) -> Order:
        """Return the order once no rank can go on."""
        while self.queue:
            now, rank = heapq.heappop(self.queue)
            if now >= self.idle_from_s[rank] - CLOCK and self.remaining[rank]:
                self._decide(now, rank) if self.sequence is None else self._follow(now, rank, self.sequence[rank])
        return tuple(tuple(row) for row in self.rows)

    def _decide(self, now: float, rank: int) -> None:
        """Run the next pass of a rank, or set when to ask again: each stage's next passes have arrived, or are known to come."""
        soon, resident, cap = now + CLOCK, self.resident[rank], self.cap[rank]
        free_bytes, lacking_from = cap + CLOCK - resident, cap * (1 + CLOCK) + CLOCK
        forward = backward = weight = -1
        coming = math.inf
        lacks_memory = False
        done_f, done_b, done_w = self.done["F"], self.done["B"], self.done["W"]
        arrivals_f, arrivals_b = self.arrivals["F"], self.arrivals["B"]
        for s in self.stages[rank]:
            done, arrived = done_f[s], arrivals_f[s]
            if done < len(arrived) and self.needed[s] <= free_bytes:
                if arrived[done] <= soon:
                    forward = s if self.rule.deepest_first or forward < 0 else forward
                elif arrived[done] < coming:
                    coming = arrived[done]
            done, arrived = done_b[s], arrivals_b[s]
            if done < len(arrived):
                if arrived[done] <= soon:
                    backward = s
                    lacks_memory = lacks_memory or resident + self.growth[s] > lacking_from
                elif arrived[done] < coming:
                    coming = arrived[done]
            if done_w[s] < done:
                weight = s
        if weight >= 0 and lacks_memory:
            self._run(now, rank, "W", weight)
        elif backward >= 0 and (self.rule.prefer == "B" or forward < 0):
            self._run(now, rank, "B", backward)
        elif forward >= 0:
            self._run(now, rank, "F", forward)
        elif weight >= 0 and coming - now >= self.rule.fit * self.costs.weight_s[weight]:
            self._run(now, rank, "W", weight)
        elif coming < math.inf:
            heapq.heappush(self.queue, (max(coming, now), rank))

    def _follow(self, now: float, rank: int, sequence: list[Action]) -> None:
        """Run the next pass of a rank's sequence, or a weight pass before it."""
        weights = [s for s in self.stages[rank] if self.done["W"][s] < self.done["B"][s]]
        coming, lacks_memory = math.inf, False
        position = sum(self.done[k][s] for s in self.stages[rank] for k in ("F", "B"))
        if position < len(sequence):
            s, kind, i = sequence[position]
            arrivals = self.arrivals[kind][s]
            coming = arrivals[i] if i < len(arrivals) else coming
            more = self.costs.held_bytes[s] if kind == "F" else self.growth[s]
            lacks_memory = more > 0 and self.resident[rank] + more > self.cap[rank] + CLOCK
        if coming <= now + CLOCK and not lacks_memory:
            self._run(now, rank, kind, s)
        elif weights and (lacks_memory or coming - now >= self.rule.fit * self.costs.weight_s[weights[-1]]):
            self._run(now, rank, "W", weights[-1])
        elif coming < math.inf and not lacks_memory:
            heapq.heappush(self.queue, (max(coming, now), rank))

    def _run(self, now: float, rank: int, kind: Kind, s: int) -> None:
        i, end = self.done[kind][s], now + self.seconds[kind][s]
        self.resident[rank] += self.change[kind][s]
        self.done[kind][s] += 1
        self.remaining[rank] -= 1
        self.rows[rank].append(Action(s, kind, i))
        self.idle_from_s[rank] = end
        heapq.heappush(self.queue, (end, rank))
        if kind == "F" and s + 1 < self.costs.num_stages:
            self._announce("F", s + 1, end + self.hop[s])
        elif kind == "F":
            self._announce("B", s, end)
        elif kind == "B" and s:
            self._announce("B", s - 1, end + self.hop[s - 1])

    def _announce(self, kind: str, s: int, time_s: float) -> None:
        self.arrivals[kind][s].append(time_s)
        rank = self.costs.rank_of_stage[s]
        heapq.heappush(self.queue, (max(time_s, self.idle_from_s[rank]), rank))


def _require_one_microbatch(rank: int, need_bytes: float, cap_bytes: Sequence[float]) -> None:
    if need_bytes > cap_bytes[rank] + CLOCK:
        raise InfeasibleError(f"rank {rank} cannot hold one micro-batch of {need_bytes:g} bytes in {cap_bytes[rank]:g}")


MAX_PASSES = 40_000
"""Passes placed for one pipeline, all tries together: some 0.2 s, little next to the rest of a plan."""

QUICK_RULES = (
    EventRule("B", True, 0.0),
    EventRule("F", True, 0.0),
    EventRule("B", False, 0.0),
    EventRule("F", True, 0.5),
    EventRule("F", False, 0.5),
    EventRule("F", False, 0.0),
    EventRule("B", True, 0.5),
    EventRule("F", True, 1.0),
)
"""By how often each was best on pipelines of 4 and 8 ranks."""

CAP_FRACTIONS = (0.97, 0.93, 0.9)
"""Parts of the memory cap that the rules may fill."""

MIN_TRIES = 3

Try = tuple[EventRule, float]


def quick_order(pipeline: Pipeline, cap_bytes: tuple[float, ...]) -> Order | None:
    """Return the shortest greedy order with `cap_bytes` [R]; None where a rank cannot hold one micro-batch."""
    tries = max(MIN_TRIES, MAX_PASSES // (3 * pipeline.num_stages * pipeline.num_microbatches))
    num_rules = min(len(QUICK_RULES), -(-tries * 2 // 3))
    with_full_cap = _shortest_first(pipeline, cap_bytes, ((rule, 1.0) for rule in QUICK_RULES[:num_rules]))
    if not with_full_cap:
        return None
    pairs = [(rule, fraction) for _, (rule, _), _ in with_full_cap for fraction in CAP_FRACTIONS][: tries - num_rules]
    return min([*with_full_cap, *_shortest_first(pipeline, cap_bytes, pairs)], key=lambda tried: tried[0])[2]


def _shortest_first(
    pipeline: Pipeline, cap_bytes: tuple[float, ...], tries: Iterable[Try]
) -> list[tuple[float, Try, Order]]:
    orders = []
    for rule, fraction in tries:
        try:
            order, seconds = greedy_order(pipeline, tuple(fraction * cap for cap in cap_bytes), rule)
        except InfeasibleError:
            continue
        orders.append((seconds, (rule, fraction), order))
    return sorted(orders, key=lambda tried: tried[0])


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
        _require_one_microbatch(rank, need_bytes, cap_bytes)
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
