"""A short order for any placement under memory caps, without a solver: greedy rules compared on few micro-batches.

Sets, data, objective (O) and constraints (C1)-(C4) are those of pipeline_schedule.py; the length is the makespan.

Method: a greedy rule (pipeline_greedy.EVENT_RULES) that may fill its memory takes too many micro-batches in at first, and later ones
wait for them; less memory may be faster. So each rule orders a few micro-batches at the whole cap, the best rules do so at parts of
it, and the best pairs of rule and part order them all. Nothing depends on the clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..cost_models.pipeline_simulation import Order, Pipeline
from ..schema.errors import InfeasibleError
from .pipeline_greedy import EVENT_RULES, EventRule, timed

ROUNDS = 4
"""Micro-batches for each rank by which rules are compared: filling and draining take two."""

PARTS = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6)
"""Of the memory cap."""

KEPT_RULES, KEPT_PAIRS = 3, 3

Try = tuple[EventRule, float]


def quick_order(pipeline: Pipeline, cap_bytes: tuple[float, ...]) -> Order | None:
    """The shortest order found with `cap_bytes` [R]; None where a rank cannot hold one micro-batch."""
    few = replace(pipeline, num_microbatches=min(pipeline.num_microbatches, ROUNDS * pipeline.num_ranks))
    whole = _best_first(few, cap_bytes, ((rule, 1.0) for rule in EVENT_RULES))
    if not whole:
        return None
    rules = [rule for _, (rule, _), _ in whole[:KEPT_RULES]]
    parts = _best_first(few, cap_bytes, ((rule, part) for rule in rules for part in PARTS))
    found = sorted([*whole, *parts], key=lambda one: one[0])
    if few.num_microbatches == pipeline.num_microbatches:
        return found[0][2]
    return _best_first(pipeline, cap_bytes, (pair for _, pair, _ in found[:KEPT_PAIRS]))[0][2]


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
