"""Greedy orders of a pipeline's passes under a memory cap on each rank (the problem: pipeline/schedule.py).

By events, for any placement: a rank that falls idle takes the best pass of those that have arrived. It never deadlocks, because a
forward pass leaves memory for one micro-batch in each later stage of its rank, so the oldest micro-batch can always go on.
`refill_weight_passes` takes the sequence of forward and backward passes from another order and only places the weight passes.

`quick_order` is the best of a few, (O) the makespan: rules at the full memory cap, then with less, because a rule that may fill all
of it takes in micro-batches that later ones wait for; and over a V whose memory is short the repeated blocks that fill it best
(blocks.py). A number of passes limits the tries, so nothing depends on the clock.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ...cost_models.pipeline.orders import Action, Kind, Order, Pipeline
from ...schema.errors import InfeasibleError
from ..tolerances import CLOCK
from .blocks import pulled_orders


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


def greedy_order(
    pipeline: Pipeline, cap_bytes: Sequence[float], rule: EventRule, *, below_s: float = math.inf
) -> tuple[Order, float]:
    """Return an order for any placement, and the seconds until its last pass ends; `cap_bytes` [R].

    Infinite seconds where they are not below ``below_s``; the order is then not whole.

    Raises:
        InfeasibleError: a rank cannot hold one micro-batch of all its stages.
    """
    events = _Events(pipeline, cap_bytes, rule, below_s)
    order = events.run()
    if events.is_too_long:
        return order, math.inf
    assert not any(events.remaining), "a forward pass leaves memory for its micro-batch to go on"
    return order, max(events.idle_from_s)


def refill_weight_passes(pipeline: Pipeline, cap_bytes: Sequence[float], order: Order, fit: float) -> Order:
    """Keep the forward and backward passes in sequence, and put the weight passes where a rank would wait or needs their memory.

    Args:
        fit: as in `EventRule`.

    Raises:
        InfeasibleError: the sequence does not fit the cap.
    """
    followed = _followed(pipeline, cap_bytes, order, fit)
    if followed is None:
        raise InfeasibleError("this sequence of forward and backward passes needs more memory than the cap")
    return followed[1]


def _followed(
    pipeline: Pipeline, cap_bytes: Sequence[float], order: Order, fit: float | None, *, below_s: float = math.inf
) -> tuple[float, Order] | None:
    """Return seconds and order of `refill_weight_passes`; None over the cap, and where it takes ``below_s`` or more.

    Without ``fit`` weight passes stay where they are.
    """
    events = _Events(pipeline, cap_bytes, EventRule("B", True, 0.0 if fit is None else fit), below_s)
    events.follows_weights = fit is None
    events.sequence = [
        [a._replace(kind="B") if a.kind == "BW" else a for a in actions if a.kind != "W" or fit is None]
        for actions in order
    ]
    followed = events.run()
    return None if any(events.remaining) else (max(events.idle_from_s), followed)


class _Events:
    """The clock: passes that have arrived at each stage, and when each rank is free."""

    def __init__(
        self, pipeline: Pipeline, cap_bytes: Sequence[float], rule: EventRule, below_s: float = math.inf
    ) -> None:
        """Begin; passes end once some rank cannot be done before ``below_s``."""
        self.costs, self.cap, self.rule, self.below_s = pipeline, cap_bytes, rule, below_s
        self.is_too_long, self.remaining_s = False, pipeline.work_s().tolist()
        self.sequence: list[list[Action]] | None = None
        self.follows_weights = False
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
            require_one_microbatch(rank, max((self.needed[s] for s in self.stages[rank]), default=0.0), cap_bytes)

    def _reserve_bytes(self, s: int) -> float:
        """Return the bytes that a forward pass of a stage leaves free, so that its micro-batch alone can go on."""
        local = self.stages[self.costs.rank_of_stage[s]]
        return sum(self.costs.held_bytes[later] for later in local if later > s) + max(self.growth[k] for k in local)

    def run(self) -> Order:
        """Return the order once no rank can go on."""
        while self.queue:
            now, rank = heapq.heappop(self.queue)
            if now + self.remaining_s[rank] >= self.below_s + CLOCK and self.remaining[rank]:
                self.is_too_long = True
                break
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
        local, listed = self.stages[rank], ("F", "B", "W") if self.follows_weights else ("F", "B")
        weights = [] if self.follows_weights else [s for s in local if self.done["W"][s] < self.done["B"][s]]
        coming, lacks_memory = math.inf, False
        position = sum(self.done[kind][s] for s in local for kind in listed)
        if position < len(sequence):
            s, kind, i = sequence[position]
            if kind == "W":
                coming = now
            elif i < len(self.arrivals[kind][s]):
                coming = self.arrivals[kind][s][i]
            more = self.change[kind][s]
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
        self.remaining_s[rank] -= self.seconds[kind][s]
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


def require_one_microbatch(rank: int, need_bytes: float, cap_bytes: Sequence[float]) -> None:
    """Require that a rank can hold so much.

    Raises:
        InfeasibleError: it cannot.
    """
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

MIN_TRIES, MAX_BLOCKS = 3, 5

TRIES_OF_A_BLOCK = 12
"""Tries of a rule that take as long as a block with its weight passes placed in four ways."""

AMPLE = 1.5
"""Micro-batches a rank for each rank of a V with which greedy orders are as short as blocks."""

REFILLS = (0.5, 1.0, 0.0)
"""Shares of a weight pass that must fit into a gap (`EventRule.fit`), by how often each was best behind a block."""

Try = tuple[EventRule, float]


def quick_order(
    pipeline: Pipeline,
    cap_bytes: tuple[float, ...],
    *,
    min_idle_fraction: float = 0.0,
    below_s: float = math.inf,
) -> Order | None:
    """Return the shortest order tried with `cap_bytes` [R]; None where a rank cannot hold one micro-batch.

    Args:
        min_idle_fraction: blocks are tried where the greedy orders leave the busiest rank idle for more than this part of its work,
            all that a better order could gain.
        below_s: seconds that matter: tries that take as long are ended, all but the first.
    """
    affordable = MAX_PASSES // (3 * pipeline.num_stages * pipeline.num_microbatches)
    tries, max_blocks = max(MIN_TRIES, affordable), min(MAX_BLOCKS, -(-affordable // TRIES_OF_A_BLOCK))
    num_rules = min(len(QUICK_RULES), -(-tries * 2 // 3))
    with_full_cap = _shortest_first(pipeline, cap_bytes, [(QUICK_RULES[0], 1.0)])
    if not with_full_cap:
        return None
    others = ((rule, 1.0) for rule in QUICK_RULES[1:num_rules])
    with_full_cap = sorted(
        [*with_full_cap, *_shortest_first(pipeline, cap_bytes, others, below_s=below_s)], key=lambda tried: tried[0]
    )
    candidates = [(seconds, order) for seconds, _, order in with_full_cap]
    pairs = [(rule, fraction) for _, (rule, _), _ in with_full_cap for fraction in CAP_FRACTIONS][: tries - num_rules]
    within_s = min(below_s, candidates[0][0])
    candidates += [(s, order) for s, _, order in _shortest_first(pipeline, cap_bytes, pairs, below_s=within_s)]
    shortest_s = min(seconds for seconds, _ in candidates)
    if shortest_s > (1 + min_idle_fraction) * float(max(pipeline.work_s())):
        candidates += block_orders(pipeline, cap_bytes, max_blocks=max_blocks, below_s=min(below_s, shortest_s))
    return min(candidates, key=lambda candidate: candidate[0])[1]


def block_orders(
    pipeline: Pipeline, cap_bytes: Sequence[float], *, max_blocks: int, below_s: float = math.inf
) -> Iterator[tuple[float, Order]]:
    """Yield seconds and orders of repeated blocks over a V, as pulled forward and with weight passes placed anew.

    Those that fit and take less than ``below_s``.

    None where memory is ample: nothing is longer without them.
    """
    ranks = tuple(range(pipeline.num_ranks))
    is_v = len(ranks) > 1 and pipeline.rank_of_stage in (ranks + ranks[::-1], ranks[::-1] + ranks)
    largest = [2 * max(pipeline.held_bytes[s] for s in pipeline.stages_of(r)) for r in ranks]
    short = any(cap < AMPLE * len(ranks) * each for cap, each in zip(cap_bytes, largest, strict=True))
    for pulled in pulled_orders(pipeline, cap_bytes, max_blocks=max_blocks) if is_v and short else ():
        for fit in (None, *REFILLS):
            if (followed := _followed(pipeline, cap_bytes, pulled, fit, below_s=below_s)) is not None:
                yield followed


def _shortest_first(
    pipeline: Pipeline, cap_bytes: tuple[float, ...], tries: Iterable[Try], *, below_s: float = math.inf
) -> list[tuple[float, Try, Order]]:
    orders = []
    for rule, fraction in tries:
        try:
            cap = tuple(fraction * cap for cap in cap_bytes)
            order, seconds = greedy_order(pipeline, cap, rule, below_s=below_s)
        except InfeasibleError:
            continue
        if seconds == math.inf:
            continue
        orders.append((seconds, (rule, fraction), order))
    return sorted(orders, key=lambda tried: tried[0])
