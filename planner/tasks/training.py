"""From expanded layouts to one choice and its runner-ups, each with the reason why it lost.

What is tried for the last few layouts of a search, those whose own bound is below the best that was found.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from ...cost_models.stage.table import CostTable
from ...schema import Alternative, Estimate, Layout
from ...schema.layout_table import LAYOUT_RECOMPUTES, LayoutTable
from ...schema.plan import TimeBreakdown
from ...schema.schedules import SCHEDULE_NAMES, SPLIT_SCHEDULES, V_SCHEDULES
from ...schema.units import format_bytes
from ..deadline import Deadline
from ..expand import Candidate, expand_fitting
from ..search import REL_GAP, SearchResult
from ..synthesis import LEANEST, SYNTHESISED, synthesise, with_schedule

SAME_TIME_FRACTION = 0.01
"""Plans this close are equal within any model's error and any machine's noise; the simpler one is taken."""


TOO_LARGE = "does not fit"


_PART_TITLES = {
    "compute": "compute of the busiest rank",
    "recompute": "recompute",
    "tp": "tensor-parallel communication",
    "cp": "context-parallel communication",
    "ep": "expert-parallel communication",
    "dp": "data-parallel communication",
    "pp": "stage transfers",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer update",
    "offload": "waiting for the host",
}


def complexity(layout: Layout) -> tuple[int, ...]:
    """Order of simplicity: fewer axes, backward passes in one, no recompute, a lower ZeRO stage, smaller degrees of the axes that
    cost the most care, less memory where only sequence parallelism is left out.
    """
    degrees = (layout.dp_replicate, layout.dp_shard, layout.tp, layout.pp, layout.cp, layout.ep, layout.etp)
    levels = (layout.gradient_shard, layout.optimizer_shard)
    axes = sum(degree > 1 for degree in (*degrees, *levels, layout.num_model_chunks)) + (
        1 < layout.cp_ulysses < layout.cp
    )
    recompute = LAYOUT_RECOMPUTES.index(layout.recompute)
    further = (
        layout.cp,
        layout.ep,
        layout.etp,
        layout.num_model_chunks,
        int(layout.tp > 1 and not layout.sequence_parallel),
    )
    splits = int(layout.schedule in SPLIT_SCHEDULES)
    return (axes, splits, recompute, layout.zero_stage, layout.pp, layout.tp, *further, layout.micro_batch_size)


def choose_simplest(result: SearchResult, batch: LayoutTable, *, slowest_s: float = math.inf) -> Candidate:
    """The simplest of the layouts whose predicted time is within SAME_TIME_FRACTION of the best, and within ``slowest_s``."""
    best = result.fitting[0].estimate.step_time_s
    slowest = max(best, min(best * (1 + SAME_TIME_FRACTION), slowest_s))
    close = [c for c in result.fitting if c.estimate.step_time_s <= slowest]
    return min(close, key=lambda c: (complexity(c.layout(batch)), c.estimate.step_time_s, c.idx))


def build_alternatives(
    result: SearchResult, batch: LayoutTable, chosen: Candidate, top: int
) -> tuple[Alternative, ...]:
    """The best of every other combination of degrees, and those faster ones that lack the least memory."""
    seen = {batch.degrees(chosen.idx)}
    slower: list[Alternative] = []
    for candidate in result.fitting:
        if batch.degrees(candidate.idx) in seen or len(slower) == top:
            continue
        seen.add(batch.degrees(candidate.idx))
        layout = candidate.layout(batch)
        slower.append(build_alternative(layout, candidate.estimate, chosen.estimate))
    too_large: list[Alternative] = []
    for candidate in sorted(result.too_large, key=lambda c: c.estimate.peak_allocated_bytes):
        if candidate.estimate.step_time_s >= chosen.estimate.step_time_s:
            continue
        if batch.degrees(candidate.idx) in seen or len(too_large) == min(top, 2):
            continue
        seen.add(batch.degrees(candidate.idx))
        layout = candidate.layout(batch)
        too_large.append(build_alternative(layout, candidate.estimate, chosen.estimate))
    return (*slower, *too_large)


def alternatives_with_schedules(
    scheduled: Sequence[Alternative], beside: SearchResult | None, chosen: Estimate, top: int
) -> tuple[Alternative, ...]:
    """Runner-ups of a plan with an offload schedule: the fastest of others with one, and of layouts ``beside`` without any."""
    plain: list[Alternative] = []
    if beside is not None:
        batch = beside.costs.batch
        best = choose_simplest(beside, batch)
        first = build_alternative(best.layout(batch), best.estimate, chosen)
        plain = [first, *build_alternatives(beside, batch, replace(best, estimate=chosen), top)]
    fitting = sorted((a for a in (*scheduled, *plain) if not _lacks(a)), key=lambda a: a.step_time_s)
    return (*fitting[:top], *(a for a in plain if _lacks(a)))


def _lacks(other: Alternative) -> bool:
    return other.reason.startswith(TOO_LARGE)


def build_alternative(layout: Layout, estimate: Estimate, chosen: Estimate) -> Alternative:
    """A layout that was not chosen, and why."""
    return Alternative(
        layout=layout,
        step_time_s=estimate.step_time_s,
        peak_reserved_bytes=estimate.peak_reserved_bytes,
        reason=why_slower(estimate, chosen) if estimate.fits else why_too_large(estimate),
    )


def why_slower(other: Estimate, chosen: Estimate) -> str:
    """The part of the step that costs the loser the most, as a share of the winner's step."""
    parts = {name: _part(other.breakdown_s, name) - _part(chosen.breakdown_s, name) for name in _PART_TITLES}
    worst = max(parts, key=lambda name: parts[name])
    slower = other.step_time_s / chosen.step_time_s - 1
    if slower < SAME_TIME_FRACTION:
        return f"{100 * slower:+.1f} %: as fast within the model's error, not simpler"
    return f"{100 * slower:+.1f} %: {_PART_TITLES[worst]} {100 * parts[worst] / chosen.step_time_s:+.1f} %"


def why_too_large(estimate: Estimate) -> str:
    """The bytes a layout would need against the budget, and its largest part."""
    parts = estimate.memory_bytes.model_dump()
    largest = max(parts, key=lambda name: parts[name])
    return (
        f"{TOO_LARGE}: needs up to {format_bytes(estimate.required_bytes)} of "
        f"{format_bytes(estimate.budget_bytes)}; {largest} {format_bytes(parts[largest])}"
    )


def _part(breakdown: TimeBreakdown, name: str) -> float:
    return float(getattr(breakdown, name))


MAX_ORDERS = 4
"""Orders that are made for the front of time and memory."""


MAX_ORDERED, MAX_TRIES, FASTEST_FIRST = 2, 12, 2
"""Layouts that get orders of their own after a search, those whose stages are cut for that, and those taken by their named time."""


_OVER_A_V = frozenset(SCHEDULE_NAMES.index(name) for name in V_SCHEDULES)


def add_synthesised_orders(result: SearchResult, deadline: Deadline) -> SearchResult:
    """The result with an order of its own (planner/synthesis.py) where that makes a layout over a V the fastest.

    Layouts over a V are tried whose bound under any order (cost_models/pipeline/lower_bounds.py) is below the best.
    The result's bound is about
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


def synthesise_orders(
    costs: CostTable, fitting: Iterable[Candidate], best_s: float, deadline: Deadline
) -> list[Candidate]:
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


def _groups(batch: LayoutTable, fitting: Iterable[Candidate]) -> list[list[Candidate]]:
    """Candidates over a V that differ in the schedule alone, by their least bound."""
    groups = dict[tuple[float, ...], list[Candidate]]()
    for candidate in fitting:
        placed = candidate.nodes or candidate.part_of_stage
        if int(batch.schedule[candidate.idx]) in _OVER_A_V and not placed:
            groups.setdefault(_but_schedule(batch, candidate.idx), []).append(candidate)
    found = [sorted(group, key=lambda c: c.any_order_s) for group in groups.values()]
    return sorted(found, key=lambda group: (group[0].any_order_s, group[0].idx))


def _but_schedule(batch: LayoutTable, idx: int) -> tuple[float, ...]:
    return tuple(float(column[idx]) for name, column in batch.columns.items() if name != "schedule")
