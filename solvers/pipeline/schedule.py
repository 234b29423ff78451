"""Order the passes of a pipeline whose stages differ, under a memory cap on each rank.

Sets
    a            actions: F, B, W of every stage s and micro-batch i (cost_models/pipeline/simulation.py)
    r            ranks
Data
    TICKS[a]     duration in ticks, an integer; a tick is one thousandth of the shortest duration or less
    HOP[s]       ticks from stage s to s+1 and back
    CAP[r]       bytes of activations rank r may hold
Variables
    start[a]     tick at which a starts
Objective
    (O)  min  makespan or span, as the instance asks: last end over all ranks, or the longest rank from first start to last end
Constraints
    (C1) inputs: start[a] >= end of every action a needs, plus HOP where it is on another stage
    (C2) one at a time: the actions of a rank do not overlap
    (C3) memory: bytes held on rank r stay within CAP[r]; F takes them at its start, B and W give them back at their ends
    (C4) in order: F, B and W of a stage take the micro-batches in order; they are identical, so this loses nothing

Every rank starts as soon as its first input can arrive, as it does in a run.

Method: every named order that fits the cap, repeated blocks (blocks.py) and every greedy variant are simulated; the best is the
incumbent. CP-SAT improves it from that hint, in windows of time (solvers/pipeline/improve.py: `solve`), and tries to prove it where
all actions fit into one window. Cold, CP-SAT finds nothing at 8 stages and 24 micro-batches.

Bound: `no_order_below_s`.
Source: Qi et al., arXiv:2401.10241, sections 3 and 4 (greedy and integer program); windows: Shaw, CP 1998.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from ...cost_models.pipeline.orders import ORDERS, Order, Pipeline, dualpipe_v, no_order_below_s
from ...cost_models.pipeline.simulation import Timeline, peak_bytes, simulate
from ...schema.errors import ConfigError, InfeasibleError
from ...schema.schedules import SCHEDULES, placement
from ..tolerances import ROUNDING, SUMMED
from .greedy import EVENT_RULES, block_orders, greedy_order, refill_weight_passes
from .waves import WAVE_RULES, wave_order

Length = Literal["makespan", "span"]

_TICKS_PER_SHORTEST = 1000
"""Rounding a duration to ticks then changes it by at most 0.05 %."""

MAX_BLOCKS = 6
"""Blocks over a V that an order may start from."""


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
    def unit_s(self) -> float:
        """Seconds of the unit of `ticked`: the common factor of all durations in ticks.

        A tick is a power of ten, at least 1000 ticks to the shortest duration; decimal inputs become exact.
        """
        durations = durations_s(self.pipeline)
        shortest = min((seconds for seconds in durations if seconds > 0), default=1.0)
        tick_s = float(10.0 ** math.floor(math.log10(shortest / _TICKS_PER_SHORTEST)))
        return tick_s * max(1, math.gcd(*(round(seconds / tick_s) for seconds in durations)))

    @cached_property
    def ticked(self) -> Pipeline:
        """The pipeline with every duration in units."""
        columns: dict[str, Any] = {
            name: tuple(float(round(seconds / self.unit_s)) for seconds in getattr(self.pipeline, name))
            for name in ("forward_s", "backward_s", "weight_s", "transfer_s")
        }
        return replace(self.pipeline, **columns)


def durations_s(pipeline: Pipeline) -> tuple[float, ...]:
    """Return the seconds of all passes and transfers."""
    return (*pipeline.forward_s, *pipeline.backward_s, *pipeline.weight_s, *pipeline.transfer_s)


def length_s(timeline: Timeline, length: Length) -> float:
    """Return the length that counts, in the timeline's unit."""
    return timeline.makespan_s if length == "makespan" else timeline.span_s


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


def lower_bound_s(instance: PipelineInstance) -> float:
    """Return the seconds that no order can beat, with the rounding that `check` allows."""
    caps = [cap * (1 + SUMMED) for cap in instance.cap_bytes]
    return no_order_below_s(instance.pipeline, caps, ranks_apart=instance.length == "span")


def best_greedy(instance: PipelineInstance, *, until: float = math.inf) -> tuple[str, Order] | None:
    """Return name and order of the best named or greedy order within the cap; None when a rank cannot hold one micro-batch.

    Args:
        until: reading of the performance counter after which no further candidate is tried once there is an answer.
    """
    best: tuple[tuple[float, ...], str, Order] | None = None
    enough = lower_bound_s(instance) / instance.unit_s * (1 + ROUNDING)
    for name, order in _candidates(instance):
        if np.any(peak_bytes(instance.ticked, order) > np.array(instance.cap_bytes) * (1 + SUMMED)):
            continue
        timeline = simulate(instance.ticked, order)
        key = (length_s(timeline, instance.length), timeline.makespan_s, timeline.span_s)
        if best is None or key < best[0]:
            best = (key, name, order)
        if best[0][0] <= enough or time.perf_counter() > until:
            break
    return best and best[1:]


def _candidates(instance: PipelineInstance) -> Iterator[tuple[str, Order]]:
    """Yield named orders, also with weight passes refilled, blocks and greedy ones; without those not defined for these numbers."""
    costs, caps = instance.ticked, instance.cap_bytes
    for name, make in named_orders(instance.pipeline).items():
        with contextlib.suppress(ConfigError):  # not defined for this number of micro-batches
            order = make()
            yield name, order
            with contextlib.suppress(InfeasibleError):
                for fit in (0.0, 0.5, 1.0):
                    yield f"{name}, W refilled", refill_weight_passes(costs, caps, order, fit)
    with contextlib.suppress(InfeasibleError):
        for _, order in block_orders(costs, caps, max_blocks=MAX_BLOCKS):
            yield "blocks", order
        if costs.rank_of_stage == placement(costs.num_ranks, 1, "loop"):
            for wave in WAVE_RULES:
                yield "waves", wave_order(costs, caps, wave)
        for event in EVENT_RULES:
            yield "events", greedy_order(costs, caps, event)[0]


def named_orders(pipeline: Pipeline) -> dict[str, Callable[[], Order]]:
    """Return the orders of the named schedules, and of DualPipe-V, that are defined on this placement."""
    ranks, chunks = pipeline.num_ranks, pipeline.num_stages // pipeline.num_ranks
    makers = {name: make for name, make in ORDERS.items() if SCHEDULES[name].takes_chunks(chunks)}
    if chunks == 2:
        makers["dualpipe-v"] = lambda p, m, _: dualpipe_v(p, m)
    named: dict[str, Callable[[], Order]] = {}
    for name, maker in reversed(makers.items()):
        style = SCHEDULES[name].placement_of(chunks) if name in SCHEDULES else "wave"
        make = functools.partial(maker, ranks, pipeline.num_microbatches, chunks)
        if pipeline.rank_of_stage == placement(ranks, chunks, style):
            named[name] = make
        elif style == "wave" and pipeline.rank_of_stage == placement(ranks, chunks, "wave_from_last"):
            named[name] = functools.partial(lambda of_first: of_first()[::-1], make)
    return named
