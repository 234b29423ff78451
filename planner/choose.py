"""From expanded layouts to one choice and its runner-ups, each with the reason why it lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..cost_models.layouts import LAYOUT_RECOMPUTES, LayoutBatch
from ..schema import Alternative, Estimate, Layout
from ..schema.layout_facts import SPLIT_SCHEDULES
from ..schema.plan import TimeBreakdown
from ..schema.units import format_bytes
from .expansion import Candidate
from .search import SearchResult

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


def choose(result: SearchResult, batch: LayoutBatch, *, slowest_s: float = math.inf) -> Candidate:
    """The simplest of the layouts whose predicted time is within SAME_TIME_FRACTION of the best, and within ``slowest_s``."""
    best = result.fitting[0].estimate.step_time_s
    slowest = max(best, min(best * (1 + SAME_TIME_FRACTION), slowest_s))
    close = [c for c in result.fitting if c.estimate.step_time_s <= slowest]
    return min(close, key=lambda c: (complexity(c.layout(batch)), c.estimate.step_time_s, c.idx))


def alternatives(result: SearchResult, batch: LayoutBatch, chosen: Candidate, top: int) -> tuple[Alternative, ...]:
    """The best of every other combination of degrees, and those faster ones that lack the least memory."""
    seen = {batch.degrees(chosen.idx)}
    slower: list[Alternative] = []
    for candidate in result.fitting:
        if batch.degrees(candidate.idx) in seen or len(slower) == top:
            continue
        seen.add(batch.degrees(candidate.idx))
        layout = candidate.layout(batch)
        slower.append(alternative(layout, candidate.estimate, chosen.estimate))
    too_large: list[Alternative] = []
    for candidate in sorted(result.too_large, key=lambda c: c.estimate.peak_allocated_bytes):
        if candidate.estimate.step_time_s >= chosen.estimate.step_time_s:
            continue
        if batch.degrees(candidate.idx) in seen or len(too_large) == min(top, 2):
            continue
        seen.add(batch.degrees(candidate.idx))
        layout = candidate.layout(batch)
        too_large.append(alternative(layout, candidate.estimate, chosen.estimate))
    return (*slower, *too_large)


def with_schedules(
    scheduled: Sequence[Alternative], beside: SearchResult | None, chosen: Estimate, top: int
) -> tuple[Alternative, ...]:
    """Runner-ups of a plan with an offload schedule: the fastest of others with one, and of layouts ``beside`` without any."""
    plain: list[Alternative] = []
    if beside is not None:
        batch = beside.costs.batch
        best = choose(beside, batch)
        first = alternative(best.layout(batch), best.estimate, chosen)
        plain = [first, *alternatives(beside, batch, replace(best, estimate=chosen), top)]
    fitting = sorted((a for a in (*scheduled, *plain) if not _lacks(a)), key=lambda a: a.step_time_s)
    return (*fitting[:top], *(a for a in plain if _lacks(a)))


def _lacks(other: Alternative) -> bool:
    return other.reason.startswith(TOO_LARGE)


def alternative(layout: Layout, estimate: Estimate, chosen: Estimate) -> Alternative:
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
