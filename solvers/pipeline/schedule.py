"""Order the passes of a pipeline whose stages differ, under a memory cap on each rank.

Sets
    a            actions: F, B, W of every stage s and micro-batch i (cost_models/pipeline/simulation.py)
    r            ranks
Data
    TICKS[a]     duration in whole ticks; a tick is one thousandth of the shortest duration or less
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
from dataclasses import dataclass, replace

import numpy as np

from ...cost_models.pipeline import orders
from ...cost_models.pipeline.simulation import Order, Pipeline, peak_bytes, placement, simulate
from ...schema.errors import ConfigError, InfeasibleError
from ..solution import Status
from .greedy import EVENT_RULES, greedy_order, refill_weight_passes
from .improve import improve
from .instance import CAP_SLACK, Length, PipelineInstance, check, length_s, lower_bound_s
from .waves import WAVE_RULES, wave_order

_EXACT = 1e-12
_PROVED = 1e-9
_FITS = (0.0, 0.5, 1.0)  # share of a weight pass that must fit into a gap, as in EventRule


@dataclass(frozen=True)
class PipelineSolution:
    """Order and its length in seconds as `check` computes it; empty and infinite when infeasible."""

    status: Status
    order: Order
    objective_s: float
    bound_s: float
    solve_s: float
    backend: str

    @property
    def gap(self) -> float:
        """(objective - bound) / objective."""
        return max(0.0, 1.0 - self.bound_s / self.objective_s) if math.isfinite(self.objective_s) else math.inf


def solve(
    instance: PipelineInstance, *, time_limit_s: float = 10.0, rel_gap: float = 0.0, seed: int = 0
) -> PipelineSolution:
    """The shortest order found; deterministic for a seed unless the time limit ends the search."""
    begin = time.perf_counter()
    start = _from_greedy(instance, until=begin + time_limit_s)
    improved = _improve_with_cp_sat(instance, start, end=begin + time_limit_s, rel_gap=rel_gap, seed=seed)
    return replace(improved, solve_s=time.perf_counter() - begin)


def synthesise(
    instances: tuple[PipelineInstance, ...], *, time_limit_s: float = 10.0, rel_gap: float = 0.0, seed: int = 0
) -> tuple[int, PipelineSolution]:
    """Best over several instances (placements) and its index: all by greedy, then CP-SAT on those whose bound can still win.

    Raises:
        InfeasibleError: no placement holds one micro-batch.
    """
    begin = time.perf_counter()
    end = begin + time_limit_s
    by_bound = sorted(range(len(instances)), key=lambda k: (lower_bound_s(instances[k]), k))
    found: dict[int, PipelineSolution] = {}
    for k in by_bound:
        if lower_bound_s(instances[k]) < min((solution.objective_s for solution in found.values()), default=math.inf):
            found[k] = _from_greedy(instances[k], until=end)
    found = {k: solution for k, solution in found.items() if solution.status is not Status.INFEASIBLE}
    if not found:
        raise InfeasibleError(
            "no placement of this pipeline can hold one micro-batch within its memory caps [memory (C3)]"
        )
    for turn, k in enumerate(sorted(found, key=lambda k: found[k].objective_s)):
        if found[k].bound_s < min(solution.objective_s for solution in found.values()):
            share_s = (end - time.perf_counter()) / min(2, len(found) - turn)
            found[k] = _improve_with_cp_sat(
                instances[k], found[k], end=time.perf_counter() + share_s, rel_gap=rel_gap, seed=seed
            )
    best = min(found, key=lambda k: found[k].objective_s)
    return best, replace(found[best], solve_s=time.perf_counter() - begin)


def _from_greedy(instance: PipelineInstance, *, until: float) -> PipelineSolution:
    """The best greedy order with the bound."""
    best = best_greedy(instance, until=until)
    if best is None:
        return PipelineSolution(Status.INFEASIBLE, (), math.inf, math.inf, 0.0, "greedy")
    return _solution(best[0], best[1], check(instance, best[1]), lower_bound_s(instance))


def _improve_with_cp_sat(
    instance: PipelineInstance, start: PipelineSolution, *, end: float, rel_gap: float, seed: int
) -> PipelineSolution:
    """The same or a shorter order and the same or a higher bound, by CP-SAT until `end`."""
    left_s = end - time.perf_counter()
    if start.status is Status.INFEASIBLE or start.gap <= max(rel_gap, _EXACT) or left_s <= 0:
        return start
    order, proved_s = improve(
        instance, start.order, bound_s=start.bound_s, time_limit_s=left_s, rel_gap=rel_gap, seed=seed
    )
    bound_s, objective_s = max(start.bound_s, proved_s), check(instance, order)
    if objective_s < start.objective_s:
        return _solution(f"{start.backend} + cp-sat", order, objective_s, bound_s)
    return _solution(start.backend, start.order, start.objective_s, bound_s)


def _solution(backend: str, order: Order, objective_s: float, bound_s: float) -> PipelineSolution:
    status = Status.OPTIMAL if objective_s <= bound_s * (1 + _PROVED) else Status.FEASIBLE
    return PipelineSolution(status, order, objective_s, min(bound_s, objective_s), 0.0, backend)


def best_greedy(instance: PipelineInstance, *, until: float = math.inf) -> tuple[str, Order] | None:
    """Name and order of the best named or greedy order within the cap; None when a rank cannot hold one micro-batch.

    Args:
        until: reading of the performance counter after which no further candidate is tried once there is an answer.
    """
    other: Length = "span" if instance.length == "makespan" else "makespan"
    best: tuple[tuple[float, float], str, Order] | None = None
    enough = lower_bound_s(instance) / instance.unit_s * (1 + _EXACT)
    for name, order in _candidates(instance):
        if np.any(peak_bytes(instance.ticked, order) > np.array(instance.cap_bytes) * (1 + CAP_SLACK)):
            continue
        timeline = simulate(instance.ticked, order)
        key = (length_s(timeline, instance.length), length_s(timeline, other))
        if best is None or key < best[0]:
            best = (key, name, order)
        if best[0][0] <= enough or time.perf_counter() > until:
            break
    return best and best[1:]


def named_orders(pipeline: Pipeline) -> dict[str, Callable[[], Order]]:
    """The named schedules defined on this placement."""
    ranks, m = pipeline.num_ranks, pipeline.num_microbatches
    chunks = pipeline.num_stages // ranks
    if pipeline.rank_of_stage == placement(ranks, 1, "loop"):
        return {
            "zb-h1": lambda: orders.zb_h1(ranks, m),
            "zb-h2": lambda: orders.zb_h2(ranks, m),
            "1f1b": lambda: orders.one_f_one_b(ranks, m),
            "gpipe": lambda: orders.gpipe(ranks, m),
        }
    if pipeline.rank_of_stage == placement(ranks, chunks, "loop"):
        return {
            "interleaved-zb": lambda: orders.interleaved_zero_bubble(ranks, m, chunks),
            "interleaved": lambda: orders.interleaved(ranks, m, chunks),
            "looped-bfs": lambda: orders.looped_bfs(ranks, m, chunks),
        }
    v_shaped: dict[str, Callable[[int, int], Order]] = {
        "zb-v": orders.zb_v,
        "dualpipe-v": orders.dualpipe_v,
        "v-half": orders.v_half,
        "v-min": orders.v_min,
    }
    if pipeline.rank_of_stage == placement(ranks, 2, "wave"):
        return {name: functools.partial(make, ranks, m) for name, make in v_shaped.items()}
    if pipeline.rank_of_stage == placement(ranks, 2, "wave_from_last"):
        return {name: functools.partial(_mirrored, make, ranks, m) for name, make in v_shaped.items()}
    return {}


def _mirrored(make: Callable[[int, int], Order], num_ranks: int, num_microbatches: int) -> Order:
    """A V schedule with the ranks counted from the other end."""
    return make(num_ranks, num_microbatches)[::-1]


def _candidates(instance: PipelineInstance) -> Iterator[tuple[str, Order]]:
    """Named orders, their weight passes refilled, then the greedy ones; those that do not exist for these numbers are left out."""
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
