"""Offload schedules: integer layers near the fluid optimum, proved against it, and simulated (the problem: offload/instance.py).

1. the fluid linear program is a bound on every schedule (program.py), and so is the count form with integer layers (bound.py): the
   larger one is taken;
2. error diffusion takes integer layers in their proportions, layer after layer (starts.py);
3. layers change until the simulation is within memory (repair.py), for these and for the uniform policies that could be faster
   (starts.py), so that none of those is faster than the answer;
4. one or two layers of the fastest change as long as it becomes faster; the linear program with its options gives the best copies,
   and where it is far below the simulation more blocks ahead are made room for;
5. where the gap is large, what a faster schedule would have to have in use raises the bound (bound.py).

The objective of a solution is that of the linear program with its choice; `simulated`, never less, is what a runtime should take.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..backend import Solution, Status
from ..tolerances import SUMMED
from . import starts
from .bound import NO_RESERVE, CountProgram, count_programs, raise_bound_s
from .instance import OffloadChoice, OffloadInstance, OffloadMarginalSeconds
from .program import solve_fluid
from .repair import (
    ResourceSums,
    SimulatedChoice,
    change_until_it_fits,
    excess_bytes,
    improve_choice,
    make_room_for_window,
    reserve_excess,
    simulate_unchanged,
    widen_window,
)
from .rows import FluidSchedule
from .simulation import SimulatedStep

PHASES = (0.5, 0.0)
"""Where error diffusion begins: the share of a layer that each option is ahead."""

GOOD_ENOUGH = 0.002
"""A simulated step within this of the bound ends the search for a better one; no model of a machine is as exact."""

MAX_TRIES = 30
"""Simulations spent on changes of one or two layers."""

MAX_TRIES_APPROXIMATELY = 6
"""The same while layouts are compared, each with a schedule."""

APART = 0.01
"""Of a step: where the simulation takes so much longer than the linear program, copies wait for memory."""

MAX_TRIES_WIDER = 20
"""Simulations spent on each wider window that must be made room for."""

LARGE_GAP = 0.01
"""From which on the bound is worth some more linear programs."""

MAX_RESERVES = 4
"""Problems with less memory that are solved until their simulation is within it."""

Ends = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class OffloadSolution(Solution[OffloadChoice]):
    """A schedule: ``simulated`` with ``prefetch`` blocks ahead, and what more of a resource would save."""

    simulated: SimulatedStep | None = None
    prefetch: int = 1
    marginal: OffloadMarginalSeconds = field(default_factory=OffloadMarginalSeconds)


def solve(instance: OffloadInstance) -> OffloadSolution:
    """Return the fastest choice whose simulation is within memory; infeasible where even fluids are not."""
    start = time.perf_counter()
    status, fluid = solve_fluid(instance)
    if fluid is None:
        return _no_answer(status, 0.0, start)
    status, counts = _solve_counts(instance)
    if status is Status.INFEASIBLE:
        return _no_answer(status, 0.0, start)
    bound_s = max(fluid.bound_s, 0.0 if counts is None else counts.fluid.bound_s)
    sums, good_enough_s = ResourceSums(instance), bound_s * (1 + GOOD_ENOUGH)
    best = _fastest(sums, _starts(sums, fluid, counts), good_enough_s)
    best = _with_uniform(sums, best) or _fastest(sums, _more_starts(sums, fluid, counts), good_enough_s)
    if best is None:
        return _no_answer(Status.UNKNOWN, bound_s, start)
    best = improve_choice(sums, widen_window(sums, best), good_enough_s=good_enough_s, tries=MAX_TRIES)
    objective_s = _planned_s(instance, best, bound_s)
    if best.step_s > objective_s * (1 + APART):
        wider = make_room_for_window(sums, best, good_enough_s=good_enough_s, tries=MAX_TRIES_WIDER)
        if wider.step_s < best.step_s:
            best, objective_s = wider, _planned_s(instance, wider, bound_s)
    if objective_s * (1 - LARGE_GAP) > bound_s:
        bound_s = max(bound_s, raise_bound_s(instance, fluid, best.step_s))
    return _answer(best, objective_s, bound_s, fluid.marginal, start)


def _planned_s(instance: OffloadInstance, best: SimulatedChoice, bound_s: float) -> float:
    """Return the linear program's seconds of a choice; between the bound and the simulation, so not solved where these agree."""
    if best.step_s <= bound_s * (1 + SUMMED):
        return best.step_s
    _, copies = solve_fluid(instance, best.choice)
    return best.step_s if copies is None else copies.objective_s


def solve_approximately(instance: OffloadInstance) -> OffloadSolution:
    """Return the best rounding of the count form, with its bound: what the search over layouts compares."""
    start = time.perf_counter()
    status, counts = _solve_counts(instance, approximate=True)
    if counts is None:
        return _no_answer(status, 0.0, start)
    sums, bound_s = ResourceSums(instance), counts.fluid.bound_s
    good_enough_s = bound_s * (1 + GOOD_ENOUGH)
    rounding = _place_with_reserve(sums, counts, PHASES[0], all_ends=starts.ENDS[::2], max_reserves=MAX_RESERVES // 2)
    best = _fastest(sums, iter([rounding]), good_enough_s)
    best = _with_uniform(sums, best, starts.SHARES[:1])
    if best is None:
        return _no_answer(Status.UNKNOWN, bound_s, start)
    best = improve_choice(sums, best, good_enough_s=good_enough_s, tries=MAX_TRIES_APPROXIMATELY)
    return _answer(best, best.step_s, bound_s, counts.fluid.marginal, start)


class _CountSolution(NamedTuple):
    """The optimum of the count form, and the program whose numbers of layers leave more memory free."""

    fluid: FluidSchedule
    numbers: CountProgram


def _solve_counts(instance: OffloadInstance, *, approximate: bool = False) -> tuple[Status, _CountSolution | None]:
    bound, numbers = count_programs(instance, approximate=approximate)
    status, fluid = bound.solve()
    return status, None if fluid is None else _CountSolution(fluid, numbers)


def _starts(sums: ResourceSums, fluid: FluidSchedule, counts: _CountSolution | None) -> Iterator[OffloadChoice]:
    """Yield integer layers of each bound: numbers of the count form near the fluid's positions, and evenly; the fluid itself."""
    if counts is not None:
        yield _place_with_reserve(sums, counts, PHASES[0], fluid)
        yield _place_with_reserve(sums, counts, PHASES[0])
    for phase in PHASES:
        yield starts.round_fluid(sums.instance, fluid, phase)


def _more_starts(sums: ResourceSums, fluid: FluidSchedule, counts: _CountSolution | None) -> Iterator[OffloadChoice]:
    if counts is not None:
        yield _place_with_reserve(sums, counts, PHASES[1], fluid)
        yield _place_with_reserve(sums, counts, PHASES[1])
    yield from starts.uniform_policies(sums.instance, starts.SHARES[:1])


def _place_with_reserve(
    sums: ResourceSums,
    counts: _CountSolution,
    phase: float,
    near: FluidSchedule | None = None,
    *,
    all_ends: tuple[Ends, ...] = starts.ENDS,
    max_reserves: int = MAX_RESERVES,
) -> OffloadChoice:
    """Return numbers of layers that leave as much memory free as copies of undivided layers need more than fluid ones."""
    choice, simulated, ends = _best_placing(sums, counts.fluid, phase, near, all_ends)
    reserve = NO_RESERVE
    for _ in range(max_reserves):
        larger = reserve_excess(sums.instance, reserve, simulated)
        if larger is None:
            break
        reserve, fluid = larger, counts.numbers.solve(larger)[1]
        if fluid is None:
            break
        choice, simulated, _ = _best_placing(sums, fluid, phase, near, (ends,))
    return choice


def _best_placing(
    sums: ResourceSums, counted: FluidSchedule, phase: float, near: FluidSchedule | None, all_ends: tuple[Ends, ...]
) -> tuple[OffloadChoice, SimulatedStep, Ends]:
    """Return the fastest way to place the same numbers of layers that is within memory, or the least beyond, and its ends."""
    best: tuple[OffloadChoice, SimulatedStep, Ends] | None = None
    best_rank = (np.inf, np.inf)
    for ends in all_ends:
        choice = starts.place_counts(sums.instance, counted, phase, near, ends)
        simulated = sums.simulate_within(choice, np.inf if best_rank[0] > 0 else best_rank[1])
        if simulated is None:
            continue
        rank = (excess_bytes(sums.instance, simulated), simulated.step_s)
        if rank < best_rank:
            best, best_rank = (choice, simulated, ends), rank
    assert best is not None
    return best


def _fastest(sums: ResourceSums, choices: Iterator[OffloadChoice], good_enough_s: float) -> SimulatedChoice | None:
    best: SimulatedChoice | None = None
    for choice in choices:
        candidate = change_until_it_fits(sums, choice)
        if candidate is not None and (best is None or candidate.step_s < best.step_s):
            best = candidate
        if best is not None and best.step_s <= good_enough_s:
            break
    return best


def _with_uniform(
    sums: ResourceSums, best: SimulatedChoice | None, shares: tuple[float, ...] = starts.SHARES
) -> SimulatedChoice | None:
    """Return the best of a choice and of the uniform policies; those that could be faster are simulated, unchanged."""
    for choice in starts.uniform_policies(sums.instance, shares):
        fastest_s = np.inf if best is None else best.step_s
        if starts.uniform_lower_bound_s(sums.instance, choice) < fastest_s:
            best = simulate_unchanged(sums, choice, fastest_s) or best
    return best


def _answer(
    best: SimulatedChoice, objective_s: float, bound_s: float, marginal: OffloadMarginalSeconds, start: float
) -> OffloadSolution:
    return OffloadSolution(
        status=Status.FEASIBLE,
        choice=best.choice,
        objective=objective_s,
        bound=min(bound_s, objective_s),
        simulated=best.simulated,
        prefetch=best.prefetch,
        marginal=marginal,
        solve_s=time.perf_counter() - start,
        backend="highs + local search",
    )


def _no_answer(status: Status, bound_s: float, start: float) -> OffloadSolution:
    return OffloadSolution(status=status, choice=None, bound=bound_s, solve_s=time.perf_counter() - start)
