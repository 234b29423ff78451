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

Method: every named order that fits the cap and every greedy variant is simulated; the best is the incumbent. CP-SAT improves it
from that hint, in windows of time (solvers/pipeline/improve.py), and tries to prove it where all actions fit into one window. Cold,
CP-SAT finds nothing at 8 stages and 24 micro-batches.

Bound, with head(r) = ticks until rank r's first input can arrive (zero for the span) and work(r) its busy ticks:
    length >= head(r) + work(r) + idle(r),   idle(r) >= way(r) - F(r),
because before rank r's first B, which is way(r) after its first F, only F can run there, and CAP[r] admits F(r) ticks of them.
Source: Qi et al., arXiv:2401.10241, sections 3 and 4 (greedy and integer program); windows: Shaw, CP 1998.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from ...cost_models.pipeline import orders
from ...cost_models.pipeline.simulation import Order, Pipeline, peak_bytes, simulate
from ...schema.errors import ConfigError, InfeasibleError
from ...schema.schedules import SCHEDULES, placement
from ..backend import Solution, Status
from ..tolerances import ROUNDING, SUMMED
from .greedy import (
    EVENT_RULES,
    Length,
    PipelineInstance,
    check,
    greedy_order,
    length_s,
    lower_bound_s,
    refill_weight_passes,
)
from .improve import improve
from .waves import WAVE_RULES, wave_order

_FITS = (0.0, 0.5, 1.0)  # share of a weight pass that must fit into a gap, as in EventRule


def solve(
    instance: PipelineInstance, *, time_limit_s: float = 10.0, rel_gap: float = 0.0, seed: int = 0
) -> Solution[Order]:
    """Return the shortest order of the search; deterministic for a seed unless the time limit ends it."""
    begin = time.perf_counter()
    start = _from_greedy(instance, until=begin + time_limit_s)
    improved = _improve_with_cp_sat(instance, start, end=begin + time_limit_s, rel_gap=rel_gap, seed=seed)
    return replace(improved, solve_s=time.perf_counter() - begin)


def synthesise(
    instances: tuple[PipelineInstance, ...], *, time_limit_s: float = 10.0, rel_gap: float = 0.0, seed: int = 0
) -> tuple[int, Solution[Order]]:
    """Return the best over instances (placements) and its index: all by greedy, then CP-SAT on those whose bound can still win.

    Raises:
        InfeasibleError: no placement holds one micro-batch.
    """
    begin = time.perf_counter()
    end = begin + time_limit_s
    by_bound = sorted(range(len(instances)), key=lambda k: (lower_bound_s(instances[k]), k))
    solutions: dict[int, Solution[Order]] = {}
    for k in by_bound:
        if lower_bound_s(instances[k]) < min((solution.objective for solution in solutions.values()), default=math.inf):
            solutions[k] = _from_greedy(instances[k], until=end)
    solutions = {k: solution for k, solution in solutions.items() if solution.status is not Status.INFEASIBLE}
    if not solutions:
        raise InfeasibleError(
            "no placement of this pipeline can hold one micro-batch within its memory caps [memory (C3)]"
        )
    for turn, k in enumerate(sorted(solutions, key=lambda k: solutions[k].objective)):
        if solutions[k].bound < min(solution.objective for solution in solutions.values()):
            share_s = (end - time.perf_counter()) / min(2, len(solutions) - turn)
            solutions[k] = _improve_with_cp_sat(
                instances[k], solutions[k], end=time.perf_counter() + share_s, rel_gap=rel_gap, seed=seed
            )
    best = min(solutions, key=lambda k: solutions[k].objective)
    return best, replace(solutions[best], solve_s=time.perf_counter() - begin)


def _from_greedy(instance: PipelineInstance, *, until: float) -> Solution[Order]:
    best = best_greedy(instance, until=until)
    if best is None:
        return Solution(status=Status.INFEASIBLE, choice=None, bound=math.inf, backend="greedy")
    return _solution(best[0], best[1], check(instance, best[1]), lower_bound_s(instance))


def _improve_with_cp_sat(
    instance: PipelineInstance, start: Solution[Order], *, end: float, rel_gap: float, seed: int
) -> Solution[Order]:
    remaining_s = end - time.perf_counter()
    if start.choice is None or start.gap <= max(rel_gap, ROUNDING) or remaining_s <= 0:
        return start
    order, proved_s = improve(
        instance, start.choice, bound_s=start.bound, time_limit_s=remaining_s, rel_gap=rel_gap, seed=seed
    )
    bound_s, objective_s = max(start.bound, proved_s), check(instance, order)
    if objective_s < start.objective:
        return _solution(f"{start.backend} + cp-sat", order, objective_s, bound_s)
    return _solution(start.backend, start.choice, start.objective, bound_s)


def _solution(backend: str, order: Order, objective_s: float, bound_s: float) -> Solution[Order]:
    status = Status.OPTIMAL if objective_s <= bound_s * (1 + SUMMED) else Status.FEASIBLE
    return Solution(
        status=status, choice=order, objective=objective_s, bound=min(bound_s, objective_s), backend=backend
    )


def best_greedy(instance: PipelineInstance, *, until: float = math.inf) -> tuple[str, Order] | None:
    """Return name and order of the best named or greedy order within the cap; None when a rank cannot hold one micro-batch.

    Args:
        until: reading of the performance counter after which no further candidate is tried once there is an answer.
    """
    other: Length = "span" if instance.length == "makespan" else "makespan"
    best: tuple[tuple[float, float], str, Order] | None = None
    enough = lower_bound_s(instance) / instance.unit_s * (1 + ROUNDING)
    for name, order in _candidates(instance):
        if np.any(peak_bytes(instance.ticked, order) > np.array(instance.cap_bytes) * (1 + SUMMED)):
            continue
        timeline = simulate(instance.ticked, order)
        key = (length_s(timeline, instance.length), length_s(timeline, other))
        if best is None or key < best[0]:
            best = (key, name, order)
        if best[0][0] <= enough or time.perf_counter() > until:
            break
    return best and best[1:]


def named_orders(pipeline: Pipeline) -> dict[str, Callable[[], Order]]:
    """Return the orders of the named schedules, and of DualPipe-V, that are defined on this placement."""
    ranks, chunks = pipeline.num_ranks, pipeline.num_stages // pipeline.num_ranks
    styles = {
        name: SCHEDULES[name].placement_of(chunks) for name in orders.ORDERS if SCHEDULES[name].takes_chunks(chunks)
    }
    makers = dict(orders.ORDERS)
    if chunks == 2:
        styles["dualpipe-v"], makers["dualpipe-v"] = "wave", lambda p, m, _: orders.dualpipe_v(p, m)
    named: dict[str, Callable[[], Order]] = {}
    for name, style in reversed(styles.items()):
        make = functools.partial(makers[name], ranks, pipeline.num_microbatches, chunks)
        if pipeline.rank_of_stage == placement(ranks, chunks, style):
            named[name] = make
        elif style == "wave" and pipeline.rank_of_stage == placement(ranks, chunks, "wave_from_last"):
            named[name] = functools.partial(_mirrored, make)
    return named


def _mirrored(make: Callable[[], Order]) -> Order:
    return make()[::-1]


def _candidates(instance: PipelineInstance) -> Iterator[tuple[str, Order]]:
    """Yield named orders, their weight passes refilled, then the greedy ones; without those not defined for these numbers."""
    costs, caps = instance.ticked, instance.cap_bytes
    for name, make in named_orders(instance.pipeline).items():
        with contextlib.suppress(ConfigError):  # not defined for this number of micro-batches
            order = make()
            yield name, order
            with contextlib.suppress(InfeasibleError):
                for fit in _FITS:
                    yield f"{name}, W refilled", refill_weight_passes(costs, caps, order, fit)
    with contextlib.suppress(InfeasibleError):
        if costs.rank_of_stage == placement(costs.num_ranks, 1, "loop"):
            for wave in WAVE_RULES:
                yield "waves", wave_order(costs, caps, wave)
        for event in EVENT_RULES:
            yield "events", greedy_order(costs, caps, event)
