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
from .expansion import Candidate, expand_fitting
from .search import REL_GAP, SearchResult
from .synthesis import LEANEST, SYNTHESISED, synthesise, with_schedule

MAX_ORDERS = 4
"""Orders that are made for the front of time and memory."""

MAX_ORDERED, MAX_TRIES, FASTEST_FIRST = 2, 12, 2
"""Layouts that get orders of their own after a search, those whose stages are cut for that, and those taken by their named time."""

_OVER_A_V = frozenset(SCHEDULES.index(name) for name in V_SCHEDULES)


def with_orders(result: SearchResult, deadline: Deadline) -> SearchResult:
    """The result with an order of its own (planner/synthesis.py) where that makes a layout over a V the fastest.

    Layouts over a V are tried whose bound under any order (cost_models/pipeline.py) is below the best. The result's bound is about
    named schedules: an order that is faster than that takes the bound along.
    """
    if not result.fitting or result.stopped_early:
        return result
    best_s = result.fitting[0].estimate.step_time_s
    found: list[Candidate] = []
    tried = 0
    for any_order_s, row in _over_a_v(result, best_s)[:MAX_TRIES]:
        if deadline.is_over or tried == MAX_ORDERED:
            break
        if any_order_s >= best_s * (1 - REL_GAP):
            continue
        alone = with_schedule(result.costs.select(np.array([row])).compacted(), SYNTHESISED)
        candidate = expand_fitting(alone, 0, bound_s=any_order_s)
        tried += candidate is not None
        if candidate is not None and candidate.estimate.step_time_s < best_s * (1 - REL_GAP):
            found.append(replace(candidate, idx=row, any_order_s=any_order_s))
            best_s = candidate.estimate.step_time_s
    result.fitting = sorted([*result.fitting, *found], key=lambda c: (c.estimate.step_time_s, c.idx))
    result.bound_s = min(result.bound_s, result.fitting[0].estimate.step_time_s)
    return result


def _over_a_v(result: SearchResult, below_s: float) -> list[tuple[float, int]]:
    """Layouts over a V and their bounds under any order, if these are below ``below_s``; of those that differ in the schedule one.

    First the fastest under named schedules, then by their bounds. Where not even the named order that holds least has stages that
    fit, none is tried.
    """
    batch = result.costs.batch
    too_large = {_but_schedule(batch, row) for row in result.rejected if batch.schedule[row] == LEANEST}
    least: dict[tuple[float, ...], tuple[float, int]] = {}
    for row, any_order_s in result.any_order_s.items():
        if int(batch.schedule[row]) in _OVER_A_V and any_order_s < below_s:
            key = _but_schedule(batch, row)
            least[key] = min(least.get(key, (any_order_s, row)), (any_order_s, row))
    fastest = [_but_schedule(batch, c.idx) for c in result.fitting if int(batch.schedule[c.idx]) in _OVER_A_V]
    by_bound = sorted((key for key in least if key not in too_large), key=lambda key: least[key])
    known = [key for key in dict.fromkeys(fastest) if key in least][:FASTEST_FIRST]
    return [least[key] for key in dict.fromkeys([*known, *by_bound])]


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
