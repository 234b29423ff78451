"""Offload schedules: whole layers near the fluid optimum, proved against it, and simulated (the problem: offload_instance.py).

1. the fluid linear program is a bound on every schedule (offload_fluid.py), and so is the count form with whole layers
   (offload_count.py): the larger one is taken;
2. error diffusion takes whole layers in their proportions, layer after layer (offload_rounding.py);
3. layers change until the simulation is within memory (offload_repair.py), for these and for the uniform policies that could be
   faster (offload_uniform.py), so that none of those is faster than the answer;
4. one or two layers of the fastest change as long as it becomes faster; the linear program with its options gives the best copies,
   and where it is far below the simulation more blocks ahead are made room for;
5. where the gap is large, what a faster schedule would have to have in use raises the bound (offload_bound.py).

`objective_s` is what the linear program says of the choice, `simulated` what a runtime should take, which is never less.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..solution import Status
from . import bound, program, starts
from .instance import OffloadChoice, OffloadInstance, OffloadMarginalSeconds
from .program import FluidSchedule
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
from .simulation import SimulatedStep
from .starts import ENDS, place_counts, round_fluid

PHASES = (0.5, 0.0)
"""Where error diffusion begins: the share of a layer that each option is ahead."""

GOOD_ENOUGH = 0.002
"""A simulated step within this of the bound ends the search for a better one; no model of a machine is as exact."""

PROVED = 1e-9
"""Of a step: the bound of the linear program is not more exact."""

MAX_TRIES = 30
"""Simulations spent on changes of one or two layers."""

MAX_TRIES_APPROXIMATELY = 6

APART = 0.01
"""Of a step: where the simulation takes so much longer than the linear program, copies wait for room."""

MAX_TRIES_WIDER = 20

LARGE_GAP = 0.01
"""From which on the bound is worth some more linear programs."""

MAX_RESERVES = 4
"""Problems with less room that are solved until what comes out is within memory."""


@dataclass(frozen=True, kw_only=True)
class OffloadSolution:
    """``objective_s`` of the linear program with this choice, ``bound_s`` of all; ``simulated`` with ``prefetch`` blocks ahead."""

    status: Status
    choice: OffloadChoice | None
    objective_s: float
    bound_s: float
    simulated: SimulatedStep | None
    prefetch: int
    worth: OffloadMarginalSeconds
    solve_s: float

    @property
    def gap(self) -> float:
        """(objective - bound) / objective."""
        return max(0.0, 1 - self.bound_s / self.objective_s) if self.objective_s > 0 else 0.0


def solve(instance: OffloadInstance) -> OffloadSolution:
    """The fastest choice found whose simulation is within memory; infeasible where even fluids are not."""
    begun = time.perf_counter()
    status, fluid = program.solve_fluid(instance)
    if fluid is None:
        return _no_answer(status, 0.0, begun)
    status, counted = _solve_counts(instance)
    if status is Status.INFEASIBLE:
        return _no_answer(status, 0.0, begun)
    bound_s = max(fluid.bound_s, 0.0 if counted is None else counted.fluid.bound_s)
    sums, good_enough_s = ResourceSums(instance), bound_s * (1 + GOOD_ENOUGH)
    best = _fastest(sums, _starts(sums, fluid, counted), good_enough_s)
    best = _with_uniform(sums, best) or _fastest(sums, _more_starts(sums, fluid, counted), good_enough_s)
    if best is None:
        return _no_answer(Status.UNKNOWN, bound_s, begun)
    best = improve_choice(sums, widen_window(sums, best), good_enough_s=good_enough_s, tries=MAX_TRIES)
    objective_s = _planned_s(instance, best, bound_s)
    if best.step_s > objective_s * (1 + APART):
        wide = make_room_for_window(sums, best, good_enough_s=good_enough_s, tries=MAX_TRIES_WIDER)
        if wide.step_s < best.step_s:
            best, objective_s = wide, _planned_s(instance, wide, bound_s)
    if objective_s * (1 - LARGE_GAP) > bound_s:
        bound_s = max(bound_s, bound.raise_bound_s(instance, fluid, best.step_s))
    return _answer(best, objective_s, bound_s, fluid.worth, begun)


def _planned_s(instance: OffloadInstance, found: SimulatedChoice, bound_s: float) -> float:
    """What the linear program says of a choice: between the bound and the simulation, so not asked where these agree."""
    if found.step_s <= bound_s * (1 + PROVED):
        return found.step_s
    _, copies = program.solve_fluid(instance, found.choice)
    return found.step_s if copies is None else copies.objective_s


def solve_approximately(instance: OffloadInstance) -> OffloadSolution:
    """Roundings of the count form alone, with its bound: what the search over layouts compares."""
    begun = time.perf_counter()
    status, counted = _solve_counts(instance, quickly=True)
    if counted is None:
        return _no_answer(status, 0.0, begun)
    sums, bound_s = ResourceSums(instance), counted.fluid.bound_s
    good_enough_s = bound_s * (1 + GOOD_ENOUGH)
    best = _fastest(sums, iter([_place_with_reserve(sums, counted, PHASES[0], quickly=True)]), good_enough_s)
    best = _with_uniform(sums, best, starts.SHARES[:1])
    if best is None:
        return _no_answer(Status.UNKNOWN, bound_s, begun)
    best = improve_choice(sums, best, good_enough_s=good_enough_s, tries=MAX_TRIES_APPROXIMATELY)
    return _answer(best, best.step_s, bound_s, counted.fluid.worth, begun)


@dataclass(frozen=True)
class _CountSolution:
    """The optimum of the count form, and the form whose numbers of layers leave more room."""

    fluid: FluidSchedule
    numbers: bound.CountProgram


def _solve_counts(instance: OffloadInstance, *, quickly: bool = False) -> tuple[Status, _CountSolution | None]:
    form, numbers = bound.count_programs(instance, quickly=quickly)
    status, fluid = form.solve()
    return status, None if fluid is None else _CountSolution(fluid, numbers)


def _starts(sums: ResourceSums, fluid: FluidSchedule, counted: _CountSolution | None) -> Iterator[OffloadChoice]:
    """Whole layers of each bound: numbers of the count form near the places of the fluid, and evenly; the fluid itself."""
    if counted is not None:
        yield _place_with_reserve(sums, counted, PHASES[0], fluid)
        yield _place_with_reserve(sums, counted, PHASES[0])
    for phase in PHASES:
        yield round_fluid(sums.instance, fluid, phase)


def _more_starts(sums: ResourceSums, fluid: FluidSchedule, counted: _CountSolution | None) -> Iterator[OffloadChoice]:
    """Where none of those comes within memory."""
    if counted is not None:
        yield _place_with_reserve(sums, counted, PHASES[1], fluid)
        yield _place_with_reserve(sums, counted, PHASES[1])
    yield from starts.uniform_policies(sums.instance, starts.SHARES[:1])


def _place_with_reserve(
    sums: ResourceSums,
    counted: _CountSolution,
    phase: float,
    where: FluidSchedule | None = None,
    *,
    quickly: bool = False,
) -> OffloadChoice:
    """Numbers of layers that leave as much room as whole copies need more than fluid ones."""
    ends: tuple[tuple[float, float], ...] = ENDS[::2] if quickly else ENDS
    choice, reserve = _best_placing(sums, counted.fluid, phase, where, ends), bound.NO_RESERVE
    ends = (choice[2],)
    for _ in range(MAX_RESERVES // 2 if quickly else MAX_RESERVES):
        more = reserve_excess(sums.instance, reserve, choice[1])
        if more is None:
            break
        reserve, found = more, counted.numbers.solve(more)[1]
        if found is None:
            break
        choice = _best_placing(sums, found, phase, where, ends)
    return choice[0]


def _best_placing(
    sums: ResourceSums,
    counted: FluidSchedule,
    phase: float,
    where: FluidSchedule | None,
    all_ends: tuple[tuple[float, float], ...],
) -> tuple[OffloadChoice, SimulatedStep, tuple[float, float]]:
    """Of the ways to place the same numbers of layers that within memory, or the least beyond, which is the fastest; its ends."""
    best: tuple[OffloadChoice, SimulatedStep, tuple[float, float]] | None = None
    least = (np.inf, np.inf)
    for ends in all_ends:
        choice = place_counts(sums.instance, counted, phase, where, ends)
        simulated = sums.simulate_within(choice, np.inf if least[0] > 0 else least[1])
        if simulated is None:
            continue
        rank = (excess_bytes(sums.instance, simulated), simulated.step_s)
        if rank < least:
            best, least = (choice, simulated, ends), rank
    assert best is not None
    return best


def _fastest(sums: ResourceSums, starts: Iterator[OffloadChoice], good_enough_s: float) -> SimulatedChoice | None:
    best: SimulatedChoice | None = None
    for choice in starts:
        found = change_until_it_fits(sums, choice)
        if found is not None and (best is None or found.step_s < best.step_s):
            best = found
        if best is not None and best.step_s <= good_enough_s:
            break
    return best


def _with_uniform(
    sums: ResourceSums, best: SimulatedChoice | None, shares: tuple[float, ...] = starts.SHARES
) -> SimulatedChoice | None:
    """The best of a choice and of the uniform policies; those that could be faster are simulated, as they are."""
    for choice in starts.uniform_policies(sums.instance, shares):
        fastest_s = float("inf") if best is None else best.step_s
        if starts.uniform_lower_bound_s(sums.instance, choice) < fastest_s:
            best = simulate_unchanged(sums, choice, fastest_s) or best
    return best


def _answer(
    best: SimulatedChoice, objective_s: float, bound_s: float, worth: OffloadMarginalSeconds, begun: float
) -> OffloadSolution:
    return OffloadSolution(
        status=Status.FEASIBLE,
        choice=best.choice,
        objective_s=objective_s,
        bound_s=min(bound_s, objective_s),
        simulated=best.simulated,
        prefetch=best.prefetch,
        worth=worth,
        solve_s=time.perf_counter() - begun,
    )


def _no_answer(status: Status, bound_s: float, begun: float) -> OffloadSolution:
    return OffloadSolution(
        status=status,
        choice=None,
        objective_s=0.0,
        bound_s=bound_s,
        simulated=None,
        prefetch=1,
        worth=OffloadMarginalSeconds(),
        solve_s=time.perf_counter() - begun,
    )
