"""A short order for any placement under memory caps, without a solver: the best of a few greedy ones.

Sets, data, objective (O) and constraints (C1)-(C4) are those of pipeline_schedule.py; the length is the makespan.

Method: greedy rules (pipeline_greedy.by_events) at the whole memory cap, the most successful ones first; then the best of them with
less memory, because a rule that may fill all of it takes in micro-batches that later ones wait for. As many are tried as a number
of passes allows, so nothing depends on the clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..cost_models.pipeline_simulation import Order, Pipeline
from ..schema.errors import InfeasibleError
from .pipeline_greedy import EventRule, timed

MAX_PASSES = 40_000
"""Passes placed for one pipeline, all tries together: some 0.2 s."""

RULES = (
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

PARTS = (0.97, 0.93, 0.9)
"""Of the memory cap."""

LEAST_TRIES = 3

Try = tuple[EventRule, float]


def quick_order(pipeline: Pipeline, cap_bytes: tuple[float, ...]) -> Order | None:
    """The shortest order found with `cap_bytes` [R]; None where a rank cannot hold one micro-batch."""
    tries = max(LEAST_TRIES, MAX_PASSES // (3 * pipeline.num_stages * pipeline.num_microbatches))
    num_rules = min(len(RULES), -(-tries * 2 // 3))
    whole = _best_first(pipeline, cap_bytes, ((rule, 1.0) for rule in RULES[:num_rules]))
    if not whole:
        return None
    pairs = [(rule, part) for _, (rule, _), _ in whole for part in PARTS][: tries - num_rules]
    return min([*whole, *_best_first(pipeline, cap_bytes, pairs)], key=lambda one: one[0])[2]


def _best_first(
    pipeline: Pipeline, cap_bytes: tuple[float, ...], tries: Iterable[Try]
) -> list[tuple[float, Try, Order]]:
    """Seconds, what was tried and its order, shortest first; without what a rank cannot hold."""
    found = []
    for rule, part in tries:
        try:
            order, seconds = timed(pipeline, tuple(part * cap for cap in cap_bytes), rule)
        except InfeasibleError:
            continue
        found.append((seconds, (rule, part), order))
    return sorted(found, key=lambda one: one[0])
