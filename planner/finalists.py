"""What is tried for the last few layouts of a search, those whose own bound is below the best that was found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np

from ..cost_models.layouts import LayoutBatch
from ..schema.layout import SCHEDULES
from ..schema.layout_facts import V_SCHEDULES
from .deadline import Deadline
from .search import REL_GAP, Candidate, SearchResult, expand_row
from .synthesis import synthesise

MAX_ORDERS = 4
"""Orders that are made, for layouts in the order of their bounds."""

MAX_CUTS = 3 * MAX_ORDERS
"""Layouts that are cut into stages for that, where the search had no need to."""

_OVER_A_V = frozenset(SCHEDULES.index(name) for name in V_SCHEDULES)


def with_orders(result: SearchResult, deadline: Deadline) -> SearchResult:
    """The result with an order of its own (planner/synthesis.py) where that makes a layout over a V the fastest.

    Layouts over a V are tried whose bound under any order (cost_models/pipeline.py) is below the best. The result's bound is about
    named schedules: where a made order is faster than that, it takes the bound along.
    """
    if not result.fitting or result.stopped_early:
        return result
    best_s = result.fitting[0].estimate.step_time_s
    found: list[Candidate] = []
    for candidate in _finalists(result, best_s):
        if deadline.is_over or result.any_order_s[candidate.idx] >= best_s * (1 - REL_GAP):
            break
        made = synthesise(result.costs, candidate.idx, candidate.boundaries)
        if made is not None and made.estimate.step_time_s < best_s * (1 - REL_GAP):
            found.append(replace(candidate, estimate=made.estimate, order=made.order))
            best_s = made.estimate.step_time_s
    result.fitting = sorted([*result.fitting, *found], key=lambda c: (c.estimate.step_time_s, c.idx))
    result.bound_s = min(result.bound_s, best_s)
    return result


def _finalists(result: SearchResult, best_s: float) -> Iterator[Candidate]:
    """Layouts over a V by their least bound under any order, `MAX_ORDERS` at most; of layouts that differ in the schedule alone and
    are cut alike, one.
    """
    batch, expanded = result.costs.batch, {c.idx: c for c in result.fitting}
    bounds = sorted((s, row) for row, s in result.any_order_s.items() if s < best_s * (1 - REL_GAP))
    seen = set[tuple[tuple[float, ...], tuple[int, ...]]]()
    for _, row in [(s, row) for s, row in bounds if int(batch.schedule[row]) in _OVER_A_V][:MAX_CUTS]:
        candidate = expanded.get(row) or expand_row(result.costs, row)
        key = _but_schedule(batch, row), candidate.boundaries
        if len(seen) == MAX_ORDERS:
            return
        if key in seen or candidate.nodes or candidate.part_of_stage or not candidate.estimate.fits:
            continue
        seen.add(key)
        yield candidate


def _but_schedule(batch: LayoutBatch, idx: int) -> tuple[float, ...]:
    return tuple(float(np.asarray(getattr(batch, f.name))[idx]) for f in fields(batch) if f.name != "schedule")
