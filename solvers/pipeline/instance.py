"""A pipeline to order: its costs, its memory caps and the length that counts; the bound on that length and the check of an answer.

Sets, data, objective (O) and constraints (C1)-(C4): solvers/pipeline/schedule.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from ...cost_models.pipeline.simulation import Order, Pipeline, Timeline, simulate
from ...schema.errors import ConfigError
from ..tolerances import SUMMED

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
