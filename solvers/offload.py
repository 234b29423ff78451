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

from . import offload_bound, offload_count, offload_fluid, offload_uniform
from .offload_changes import Sums
from .offload_fluid import Fluid
from .offload_instance import Choice, Instance, Worth
from .offload_repair import Found, as_it_is, beyond_bytes, fitting, improved, roomier, tighter, wider
from .offload_rounding import ENDS, rounded, spread
from .offload_simulation import Simulated
from .status import Status

PHASES = (0.5, 0.0)
"""Where error diffusion begins: the share of a layer that each option is ahead."""

GOOD_ENOUGH = 0.002
"""A simulated step within this of the bound ends the search for a better one; no model of a machine is as exact."""

PROVED = 1e-9
"""Of a step: the bound of the linear program is not more exact."""

MOST_TRIES = 30
"""Simulations spent on changes of one or two layers."""

MOST_TRIES_QUICKLY = 6

APART = 0.01
"""Of a step: where the simulation takes so much longer than the linear program, copies wait for room."""

MOST_TRIES_WIDER = 20

LARGE_GAP = 0.01
"""From which on the bound is worth some more linear programs."""

MOST_TIGHTER = 4
"""Problems with less room that are solved until what comes out is within memory."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """``objective_s`` of the linear program with this choice, ``bound_s`` of all; ``simulated`` with ``prefetch`` blocks ahead."""

    status: Status
    choice: Choice | None
    objective_s: float
    bound_s: float
    simulated: Simulated | None
    prefetch: int
    worth: Worth
    solve_s: float

    @property
    def gap(self) -> float:
        """(objective - bound) / objective."""
        return max(0.0, 1 - self.bound_s / self.objective_s) if self.objective_s > 0 else 0.0


def solve(instance: Instance) -> Solution:
    """The fastest choice found whose simulation is within memory; infeasible where even fluids are not."""
    begun = time.perf_counter()
    status, fluid = offload_fluid.solve(instance)
    if fluid is None:
        return _nothing(status, 0.0, begun)
    status, counted = _counted(instance)
    if status is Status.INFEASIBLE:
        return _nothing(status, 0.0, begun)
    bound_s = max(fluid.bound_s, 0.0 if counted is None else counted.fluid.bound_s)
    sums, good_enough_s = Sums(instance), bound_s * (1 + GOOD_ENOUGH)
    best = _fastest(sums, _starts(sums, fluid, counted), good_enough_s)
    best = _with_uniform(sums, best) or _fastest(sums, _more_starts(sums, fluid, counted), good_enough_s)
    if best is None:
        return _nothing(Status.UNKNOWN, bound_s, begun)
    best = improved(sums, wider(sums, best), good_enough_s=good_enough_s, tries=MOST_TRIES)
    objective_s = _planned_s(instance, best, bound_s)
    if best.step_s > objective_s * (1 + APART):
        wide = roomier(sums, best, good_enough_s=good_enough_s, tries=MOST_TRIES_WIDER)
        if wide.step_s < best.step_s:
            best, objective_s = wide, _planned_s(instance, wide, bound_s)
    if objective_s * (1 - LARGE_GAP) > bound_s:
        bound_s = max(bound_s, offload_bound.raised(instance, fluid, best.step_s))
    return _answer(best, objective_s, bound_s, fluid.worth, begun)


def _planned_s(instance: Instance, found: Found, bound_s: float) -> float:
    """What the linear program says of a choice: between the bound and the simulation, so not asked where these agree."""
    if found.step_s <= bound_s * (1 + PROVED):
        return found.step_s
    _, copies = offload_fluid.solve(instance, found.choice)
    return found.step_s if copies is None else copies.objective_s


def solve_quickly(instance: Instance) -> Solution:
    """Roundings of the count form alone, with its bound: what the search over layouts compares."""
    begun = time.perf_counter()
    status, counted = _counted(instance, quickly=True)
    if counted is None:
        return _nothing(status, 0.0, begun)
    sums, bound_s = Sums(instance), counted.fluid.bound_s
    good_enough_s = bound_s * (1 + GOOD_ENOUGH)
    best = _fastest(sums, iter([_with_room(sums, counted, PHASES[0], quickly=True)]), good_enough_s)
    best = _with_uniform(sums, best, offload_uniform.SHARES[:1])
    if best is None:
        return _nothing(Status.UNKNOWN, bound_s, begun)
    best = improved(sums, best, good_enough_s=good_enough_s, tries=MOST_TRIES_QUICKLY)
    return _answer(best, best.step_s, bound_s, counted.fluid.worth, begun)


@dataclass(frozen=True)
class _Counted:
    """The optimum of the count form, and the form whose numbers of layers leave more room."""

    fluid: Fluid
    numbers: offload_count.Counted


def _counted(instance: Instance, *, quickly: bool = False) -> tuple[Status, _Counted | None]:
    form, numbers = offload_count.of_layers(instance, quickly=quickly)
    status, fluid = form.solve()
    return status, None if fluid is None else _Counted(fluid, numbers)


def _starts(sums: Sums, fluid: Fluid, counted: _Counted | None) -> Iterator[Choice]:
    """Whole layers of each bound: numbers of the count form near the places of the fluid, and evenly; the fluid itself."""
    if counted is not None:
        yield _with_room(sums, counted, PHASES[0], fluid)
        yield _with_room(sums, counted, PHASES[0])
    for phase in PHASES:
        yield rounded(sums.instance, fluid, phase)


def _more_starts(sums: Sums, fluid: Fluid, counted: _Counted | None) -> Iterator[Choice]:
    """Where none of those comes within memory."""
    if counted is not None:
        yield _with_room(sums, counted, PHASES[1], fluid)
        yield _with_room(sums, counted, PHASES[1])
    yield from offload_uniform.policies(sums.instance, offload_uniform.SHARES[:1])


def _with_room(
    sums: Sums, counted: _Counted, phase: float, where: Fluid | None = None, *, quickly: bool = False
) -> Choice:
    """Numbers of layers that leave as much room as whole copies need more than fluid ones."""
    ends: tuple[tuple[float, float], ...] = ENDS[::2] if quickly else ENDS
    choice, reserve = _best_spread(sums, counted.fluid, phase, where, ends), offload_count.NOTHING
    ends = (choice[2],)
    for _ in range(MOST_TIGHTER // 2 if quickly else MOST_TIGHTER):
        more = tighter(sums.instance, reserve, choice[1])
        if more is None:
            break
        reserve, found = more, counted.numbers.solve(more)[1]
        if found is None:
            break
        choice = _best_spread(sums, found, phase, where, ends)
    return choice[0]


def _best_spread(
    sums: Sums, counted: Fluid, phase: float, where: Fluid | None, all_ends: tuple[tuple[float, float], ...]
) -> tuple[Choice, Simulated, tuple[float, float]]:
    """Of the ways to place the same numbers of layers that within memory, or the least beyond, which is the fastest; its ends."""
    best: tuple[Choice, Simulated, tuple[float, float]] | None = None
    least = (np.inf, np.inf)
    for ends in all_ends:
        choice = spread(sums.instance, counted, phase, where, ends)
        simulated = sums.simulate_within(choice, np.inf if least[0] > 0 else least[1])
        if simulated is None:
            continue
        rank = (beyond_bytes(sums.instance, simulated), simulated.step_s)
        if rank < least:
            best, least = (choice, simulated, ends), rank
    assert best is not None
    return best


def _fastest(sums: Sums, starts: Iterator[Choice], good_enough_s: float) -> Found | None:
    best: Found | None = None
    for choice in starts:
        found = fitting(sums, choice)
        if found is not None and (best is None or found.step_s < best.step_s):
            best = found
        if best is not None and best.step_s <= good_enough_s:
            break
    return best


def _with_uniform(sums: Sums, best: Found | None, shares: tuple[float, ...] = offload_uniform.SHARES) -> Found | None:
    """The best of a choice and of the uniform policies; those that could be faster are simulated, as they are."""
    for choice in offload_uniform.policies(sums.instance, shares):
        fastest_s = float("inf") if best is None else best.step_s
        if offload_uniform.least_s(sums.instance, choice) < fastest_s:
            best = as_it_is(sums, choice, fastest_s) or best
    return best


def _answer(best: Found, objective_s: float, bound_s: float, worth: Worth, begun: float) -> Solution:
    return Solution(
        status=Status.FEASIBLE,
        choice=best.choice,
        objective_s=objective_s,
        bound_s=min(bound_s, objective_s),
        simulated=best.simulated,
        prefetch=best.prefetch,
        worth=worth,
        solve_s=time.perf_counter() - begun,
    )


def _nothing(status: Status, bound_s: float, begun: float) -> Solution:
    return Solution(
        status=status,
        choice=None,
        objective_s=0.0,
        bound_s=bound_s,
        simulated=None,
        prefetch=1,
        worth=Worth(),
        solve_s=time.perf_counter() - begun,
    )
