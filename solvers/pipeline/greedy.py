"""A pipeline to order, its bound and check (the problem: pipeline/schedule.py), and greedy orders under memory caps.

`greedy_order` runs the clock: a rank that falls idle takes the best pass of those that have arrived. It never deadlocks, because a
forward pass leaves memory for one micro-batch in each later stage of its rank, so the oldest micro-batch can always go on.
`refill_weight_passes` takes the sequence of forward and backward passes from another order and only places the weight passes.
`quick_order` is the best of a few greedy ones, (O) the makespan: rules at the full memory cap, then with less, because a rule that
may fill all of it takes in micro-batches that later ones wait for. A number of passes limits the tries, so nothing depends on the
clock.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from ...cost_models.pipeline.simulation import Action, Kind, Order, Pipeline, Timeline, simulate
from ...schema.errors import ConfigError, InfeasibleError
from ..tolerances import CLOCK, SUMMED

Length = Literal["makespan", "span"]


_TICKS_PER_SHORTEST = 1000
"""Rounding a duration to ticks then changes it by at most 0.05 %."""


@dataclass(frozen=True)
class PipelineInstance:
    """A pipeline, CAP [R] in bytes and which length counts. The solvers work on `ticked`, whose times are integers."""

    pipeline: Pipeline
    cap_bytes: tuple[float, ...]
    length: Length = "makespan"

    def __post_init__(self) -> None:
        if len(self.cap_bytes) != self.pipeline.num_ranks:
            raise ConfigError(f"{len(self.cap_bytes)} memory caps for {self.pipeline.num_ranks} ranks")

    @cached_property
    def tick_s(self) -> float:
        """Seconds of a tick: a power of ten, at least 1000 ticks to the shortest duration; decimal inputs become exact."""
        costs = self.pipeline
        times = (*costs.forward_s, *costs.backward_s, *costs.weight_s, *costs.transfer_s)
        shortest = min((seconds for seconds in times if seconds > 0), default=1.0)
        return float(10.0 ** math.floor(math.log10(shortest / _TICKS_PER_SHORTEST)))

    @cached_property
    def ticked(self) -> Pipeline:
        """The pipeline with every duration in ticks, divided by their common factor (see `unit_s`)."""
        return _scaled(self.pipeline, self.unit_s)

    @cached_property
    def unit_s(self) -> float:
        """Seconds of the unit of `ticked`."""
        rounded = _scaled(self.pipeline, self.tick_s)
        ticks = (*rounded.forward_s, *rounded.backward_s, *rounded.weight_s, *rounded.transfer_s)
        return self.tick_s * max(1, math.gcd(*(int(count) for count in ticks)))


def check(instance: PipelineInstance, order: Order) -> float:
    """Recompute the objective (O) in seconds by simulation.

    Raises:
        ConfigError: (C1) or (C2) cannot hold: the order is incomplete or never finishes.
        ValueError: memory (C3), with the rank and the bytes.
    """
    timeline = simulate(instance.pipeline, order)
    for rank, (peak, cap) in enumerate(zip(timeline.peak_bytes, instance.cap_bytes, strict=True)):
        if peak > cap * (1 + SUMMED):
            raise ValueError(f"memory (C3): rank {rank} holds {peak:g} bytes of {cap:g}")
    return length_s(timeline, instance.length)


def length_s(timeline: Timeline, length: Length) -> float:
    """Return the length that counts, in the timeline's unit."""
    return timeline.makespan_s if length == "makespan" else timeline.span_s


def lower_bound_s(instance: PipelineInstance) -> float:
    """Return the seconds that no order can beat: the bound stated in pipeline/schedule.py, the largest over ranks."""
    costs = instance.pipeline
    hops = [costs.hop_s(s) for s in range(costs.num_stages - 1)]
    heads = np.concatenate([[0.0], np.cumsum(np.array(costs.forward_s[:-1]) + hops)])
    tails = np.concatenate([np.cumsum((np.array(costs.backward_s[1:]) + hops)[::-1])[::-1], [0.0]])
    down = heads[-1] + costs.forward_s[-1]
    work = costs.work_s()
    bounds = []
    for rank in range(costs.num_ranks):
        stages = costs.stages_of(rank)
        first, last = stages[0], stages[-1]
        way = down - heads[first] + tails[last]
        resident, seconds = (np.array([column[s] for s in stages]) for column in (costs.held_bytes, costs.forward_s))
        admitted = math.inf if np.any(resident <= 0) else instance.cap_bytes[rank] * float(np.max(seconds / resident))
        if np.all(resident == resident[0]) and resident[0] > 0:
            admitted = math.floor(instance.cap_bytes[rank] / resident[0] * (1 + SUMMED)) * float(np.max(seconds))
        idle = max(0.0, way - min(admitted, float(np.sum(seconds)) * costs.num_microbatches))
        bounds.append((heads[first] if instance.length == "makespan" else 0.0) + work[rank] + idle)
    return float(max(bounds))


def _scaled(pipeline: Pipeline, unit_s: float) -> Pipeline:
    def in_units(seconds: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(float(round(value / unit_s)) for value in seconds)

    return replace(
        pipeline,
        forward_s=in_units(pipeline.forward_s),
        backward_s=in_units(pipeline.backward_s),
        weight_s=in_units(pipeline.weight_s),
        transfer_s=in_units(pipeline.transfer_s),
    )


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


def greedy_order(pipeline: Pipeline, cap_bytes: Sequence[float], rule: EventRule) -> Order:
    """Return an order for any placement; `cap_bytes` [R].

    Raises:
        InfeasibleError: a rank cannot hold one micro-batch of all its stages.
    """
    return greedy_order_and_length(pipeline, cap_bytes, rule)[0]


def greedy_order_and_length(pipeline: Pipeline, cap_bytes: Sequence[float], rule: EventRule) -> tuple[Order, float]:
    """Return `greedy_order` and the seconds until its last pass ends.

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
        self.change = {
            "F": pipeline.held_bytes,
            "B": tuple(-freed for freed in pipeline.backward_freed_bytes),
            "W": tuple(-freed for freed in pipeline.weight_freed_bytes),
        }
        self.arrivals: dict[str, list[list[float]]] = {"F": [[] for _ in stages], "B": [[] for _ in stages]}
        self.arrivals["F"][0] = [0.0] * m
        self.done = {kind: [0] * pipeline.num_stages for kind in ("F", "B", "W")}
        self.resident = [0.0] * pipeline.num_ranks
        self.rows: list[list[Action]] = [[] for _ in ranks]
        self.remaining = [3 * m * len(rank_stages) for rank_stages in self.stages]
        self.queue = [(0.0, rank) for rank in ranks]
        self.idle_from_s = [0.0] * pipeline.num_ranks
        for rank in ranks:
            need = max((self.needed[s] for s in self.stages[rank]), default=0.0)
            if need > cap_bytes[rank] + CLOCK:
                raise InfeasibleError(
                    f"rank {rank} cannot hold one micro-batch of {need:g} bytes in {cap_bytes[rank]:g}"
                )

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
        soon, free_bytes = now + CLOCK, self.cap[rank] + CLOCK - self.resident[rank]
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
                    lacks_memory = lacks_memory or self._lacks_memory_for(rank, s)
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

    def _lacks_memory_for(self, rank: int, s: int) -> bool:
        return self.resident[rank] + self.growth[s] > self.cap[rank] * (1 + CLOCK) + CLOCK

    def _follow(self, now: float, rank: int, sequence: list[Action]) -> None:
        can_w = [s for s in self.stages[rank] if self.done["W"][s] < self.done["B"][s]]
        coming, blocked = math.inf, False
        position = sum(self.done[k][s] for s in self.stages[rank] for k in ("F", "B"))
        if position < len(sequence):
            s, kind, i = sequence[position]
            arrivals = self.arrivals[kind][s]
            coming = arrivals[i] if i < len(arrivals) else coming
            more = self.costs.held_bytes[s] if kind == "F" else self.growth[s]
            blocked = more > 0 and self.resident[rank] + more > self.cap[rank] + CLOCK
        if coming <= now + CLOCK and not blocked:
            self._run(now, rank, kind, s)
        elif can_w and (blocked or coming - now >= self.rule.fit * self.costs.weight_s[can_w[-1]]):
            self._run(now, rank, "W", can_w[-1])
        elif coming < math.inf and not blocked:
            heapq.heappush(self.queue, (max(coming, now), rank))

    def _run(self, now: float, rank: int, kind: Kind, s: int) -> None:
        costs, i = self.costs, self.done[kind][s]
        end = now + self.seconds[kind][s]
        self.resident[rank] += self.change[kind][s]
        self.done[kind][s] += 1
        self.remaining[rank] -= 1
        self.rows[rank].append(Action(s, kind, i))
        self.idle_from_s[rank] = end
        heapq.heappush(self.queue, (end, rank))
        if kind == "F" and s + 1 < costs.num_stages:
            self._announce("F", s + 1, end + self.hop[s])
        elif kind == "F":
            self._announce("B", s, end)
        elif kind == "B" and s:
            self._announce("B", s - 1, end + self.hop[s - 1])

    def _announce(self, kind: str, s: int, time_s: float) -> None:
        self.arrivals[kind][s].append(time_s)
        rank = self.costs.rank_of_stage[s]
        heapq.heappush(self.queue, (max(time_s, self.idle_from_s[rank]), rank))


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
            order, seconds = greedy_order_and_length(pipeline, tuple(fraction * cap for cap in cap_bytes), rule)
        except InfeasibleError:
            continue
        orders.append((seconds, (rule, fraction), order))
    return sorted(orders, key=lambda tried: tried[0])
