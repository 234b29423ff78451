"""What is tried for the last few layouts of a search, those whose own bound is below the best that was found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace

import numpy as np

from ..cost_models.layouts import LayoutBatch
from ..cost_models.space_costs import SpaceCosts
from ..schema.layout import SCHEDULES
from ..schema.layout_facts import V_SCHEDULES
from .deadline import Deadline
from .search import REL_GAP, Candidate, SearchResult, expand_row
from .synthesis import synthesise

MAX_ORDERS = 4
"""Orders that are made, for layouts in the order of their bounds."""

_OVER_A_V = frozenset(SCHEDULES.index(name) for name in V_SCHEDULES)


def with_orders(result: SearchResult, deadline: Deadline) -> SearchResult:
    """The result with an order of its own (planner/synthesis.py) where that makes a layout over a V the fastest.

    Layouts over a V are tried whose bound under any order (cost_models/pipeline.py) is below the best. The result's bound is about
    named schedules: an order that is faster than that takes the bound along.
    """
    if not result.fitting or result.stopped_early:
        return result
    best_s = result.fitting[0].estimate.step_time_s
    found = ordered(result.costs, [*result.fitting, *_cut_now(result, best_s)], best_s, deadline)
    result.fitting = sorted([*result.fitting, *found], key=lambda c: (c.estimate.step_time_s, c.idx))
    result.bound_s = min(result.bound_s, result.fitting[0].estimate.step_time_s)
    return result


def _cut_now(result: SearchResult, best_s: float) -> list[Candidate]:
    """Layouts over a V that a replay of their own schedule excluded, cut into stages; of those that differ in the schedule one."""
    batch = result.costs.batch
    is_open = {row: s for row, s in result.any_order_s.items() if int(batch.schedule[row]) in _OVER_A_V and s < best_s}
    seen = {_but_schedule(batch, c.idx) for c in result.fitting} | {
        _but_schedule(batch, row) for row in result.rejected
    }
    rows: list[int] = []
    for row in sorted(is_open, key=lambda row: (is_open[row], row)):
        if _but_schedule(batch, row) not in seen and len(rows) < MAX_ORDERS:
            seen.add(_but_schedule(batch, row))
            rows.append(row)
    cut = (expand_row(result.costs, row, bound_s=is_open[row]) for row in rows)
    return [candidate for candidate in cut if candidate.estimate.fits]


def ordered(costs: SpaceCosts, fitting: Iterable[Candidate], best_s: float, deadline: Deadline) -> list[Candidate]:
    """Candidates with orders of their own, each faster than ``best_s`` and the one before."""
    finalists = [c for group in _groups(costs.batch, fitting) for c in {c.boundaries: c for c in group}.values()]
    found: list[Candidate] = []
    for candidate in finalists[:MAX_ORDERS]:
        if deadline.is_over or candidate.any_order_s >= best_s * (1 - REL_GAP):
            break
        made = synthesise(costs, candidate.idx, candidate.boundaries)
        if made is not None and made.estimate.step_time_s < best_s * (1 - REL_GAP):
            found.append(replace(candidate, estimate=made.estimate, order=made.order))
            best_s = made.estimate.step_time_s
    return found


def _groups(batch: LayoutBatch, fitting: Iterable[Candidate]) -> list[list[Candidate]]:
    """Candidates over a V that differ in the schedule alone, by their least bound."""
    groups = dict[tuple[float, ...], list[Candidate]]()
    for candidate in fitting:
        placed = candidate.nodes or candidate.part_of_stage
        if int(batch.schedule[candidate.idx]) in _OVER_A_V and not placed:
            groups.setdefault(_but_schedule(batch, candidate.idx), []).append(candidate)
    found = [sorted(group, key=lambda c: c.any_order_s) for group in groups.values()]
    return sorted(found, key=lambda group: (group[0].any_order_s, group[0].idx))


def _but_schedule(batch: LayoutBatch, idx: int) -> tuple[float, ...]:
    return tuple(float(np.asarray(getattr(batch, f.name))[idx]) for f in fields(batch) if f.name != "schedule")
