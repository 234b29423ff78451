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
from .search import REL_GAP, Candidate, SearchResult
from .synthesis import synthesise

MAX_ORDERS = 4
"""Orders that are made, for layouts in the order of their bounds."""

_OVER_A_V = frozenset(SCHEDULES.index(name) for name in V_SCHEDULES)


def with_orders(result: SearchResult, deadline: Deadline) -> SearchResult:
    """The result with an order of its own (planner/synthesis.py) where that makes a layout over a V the fastest.

    A bound of a layout under a V schedule holds for any order over this V (cost_models/pipeline.py), so the result's bound stays.
    """
    if not result.fitting or result.stopped_early:
        return result
    found = ordered(result.costs, result.fitting, result.fitting[0].estimate.step_time_s, deadline)
    result.fitting = sorted([*result.fitting, *found], key=lambda c: (c.estimate.step_time_s, c.idx))
    result.bound_s = min(result.bound_s, result.fitting[0].estimate.step_time_s)
    return result


def ordered(costs: SpaceCosts, fitting: Iterable[Candidate], best_s: float, deadline: Deadline) -> list[Candidate]:
    """Candidates with orders of their own, each faster than ``best_s`` and the one before."""
    finalists = [c for group in _groups(costs.batch, fitting) for c in {c.boundaries: c for c in group}.values()]
    found: list[Candidate] = []
    for candidate in finalists[:MAX_ORDERS]:
        if deadline.is_over or candidate.bound_s >= best_s * (1 - REL_GAP):
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
    found = [sorted(group, key=lambda c: c.bound_s) for group in groups.values()]
    return sorted(found, key=lambda group: (group[0].bound_s, group[0].idx))


def _but_schedule(batch: LayoutBatch, idx: int) -> tuple[float, ...]:
    return tuple(float(np.asarray(getattr(batch, f.name))[idx]) for f in fields(batch) if f.name != "schedule")
