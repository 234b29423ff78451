"""Offload schedules: integer layers near the fluid optimum, proved against it, and simulated (the problem: offload/instance.py).

1. the fluid linear program is a bound on every schedule (program.py), and so is the count form with integer layers (bound.py): the
   larger one is taken;
2. integer layers in their proportions: `round_fluid` takes the fluid's by error diffusion from the first layer on, `place_counts`
   the integer numbers of the count form, evenly over the sequence or near the positions of the fluid;
3. layers change until the simulation is within memory (repair.py), for these and for the `uniform_policies` that could be faster,
   so that none of those is faster than the answer: one option for all blocks, and the states or the parameters of a share of the
   layers in one location, which is what users of other engines would choose;
4. one or two layers of the fastest change as long as it becomes faster; the linear program with its options gives the best copies,
   and where it is far below the simulation more blocks ahead are made room for;
5. where the gap is large, what a faster schedule would have to have in use raises the bound (bound.py).

The objective of a solution is that of the linear program with its choice; `simulated`, never less, is what a runtime should take.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from ...schema.units import BoolArray, FloatArray, IntArray
from ..backend import Solution, Status
from ..tolerances import ROUNDING, SUMMED
from .bound import MANY_KINDS, MEMORIES, CountProgram, count_programs, raise_bound_s
from .instance import OPTIONS, OffloadChoice, OffloadInstance, OffloadMarginalSeconds
from .program import FluidSchedule, solve_fluid
from .repair import (
    ResourceSums,
    SimulatedChoice,
    change_until_it_fits,
    excess_by_memory,
    improve_choice,
    make_room_for_window,
    simulate_unchanged,
    widen_window,
)
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

_TIE = 0.2
"""Of a layer: how far phases move options apart, so that those of equal fractions are not all due at the same layers."""

_MIN_WEIGHT = 1e-3
"""Weight of every option of a layer at least, so that numbers can be reached."""

_AVOIDED = 1e-6
"""Weight of an option that moves much, at the ends: taken only where quotas leave nothing else."""

_BALANCES = 12
"""Rounds of scaling rows and columns in turn; far fewer leave numbers that the quotas then correct."""

Ends = tuple[float, float]

ENDS = ((0.0, 0.0), (0.0, 0.03), (0.08, 0.03), (0.2, 0.03), (0.35, 0.06))
"""Shares of the layers at both ends that are not moved where others can be: at the turn what just moved is still on the device, and
when the backward passes end so are all gradients. The first is none; the others are tried in turn."""

SHARES = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125)
"""Shares of the layers from the first one on that are away: all of them, then an eighth less each time."""

_MASKS = {"host": "host_optimizer", "streamed": "streamed_optimizer", "parameters": "parameters"}
"""Locations of states off the device: updated by the host, streamed to the device, with the parameters on the host."""


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
    bound_program, numbers = count_programs(instance)
    status, counted = bound_program.solve()
    if status is Status.INFEASIBLE:
        return _no_answer(status, 0.0, start)
    bound_s = max(fluid.bound_s, 0.0 if counted is None else counted.bound_s)
    sums, good_enough_s = ResourceSums(instance), bound_s * (1 + GOOD_ENOUGH)

    def placed(phase: float) -> Iterator[OffloadChoice]:
        """Yield the numbers of the count form near the fluid's positions, and evenly."""
        if counted is not None:
            yield _place_with_reserve(sums, counted, numbers, phase, fluid)
            yield _place_with_reserve(sums, counted, numbers, phase)

    rounded = (round_fluid(instance, fluid, phase) for phase in PHASES)
    best = _with_uniform(sums, _fastest(sums, itertools.chain(placed(PHASES[0]), rounded), good_enough_s))
    if best is None:
        others = itertools.chain(placed(PHASES[1]), uniform_policies(instance, SHARES[:1]))
        best = _fastest(sums, others, good_enough_s)
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


def solve_approximately(instance: OffloadInstance) -> OffloadSolution:
    """Return the best rounding of the count form, with its bound: what the search over layouts compares."""
    start = time.perf_counter()
    bound_program, numbers = count_programs(instance, approximate=True)
    status, counted = bound_program.solve()
    if counted is None:
        return _no_answer(status, 0.0, start)
    sums, good_enough_s = ResourceSums(instance), counted.bound_s * (1 + GOOD_ENOUGH)
    rounding = _place_with_reserve(
        sums, counted, numbers, PHASES[0], all_ends=ENDS[::2], max_reserves=MAX_RESERVES // 2
    )
    best = _with_uniform(sums, _fastest(sums, [rounding], good_enough_s), SHARES[:1])
    if best is None:
        return _no_answer(Status.UNKNOWN, counted.bound_s, start)
    best = improve_choice(sums, best, good_enough_s=good_enough_s, tries=MAX_TRIES_APPROXIMATELY)
    return _answer(best, best.step_s, counted.bound_s, counted.marginal, start)


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


def _planned_s(instance: OffloadInstance, best: SimulatedChoice, bound_s: float) -> float:
    """Return the linear program's seconds of a choice; between the bound and the simulation, so not solved where these agree."""
    if best.step_s <= bound_s * (1 + SUMMED):
        return best.step_s
    _, copies = solve_fluid(instance, best.choice)
    return best.step_s if copies is None else copies.objective_s


def _place_with_reserve(
    sums: ResourceSums,
    counted: FluidSchedule,
    numbers: CountProgram,
    phase: float,
    near: FluidSchedule | None = None,
    *,
    all_ends: tuple[Ends, ...] = ENDS,
    max_reserves: int = MAX_RESERVES,
) -> OffloadChoice:
    """Place numbers of layers that leave as much memory free as copies of undivided layers need more than fluid ones."""
    choice, simulated, ends = _best_placing(sums, counted, phase, near, all_ends)
    reserve = np.zeros(len(MEMORIES))
    for _ in range(max_reserves):
        excess = excess_by_memory(sums.instance, simulated)
        reserve += excess
        fluid = numbers.solve(reserve)[1] if excess.any() else None
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
        choice = place_counts(sums.instance, counted, phase, near, ends)
        simulated = sums.simulate_within(choice, np.inf if best_rank[0] > 0 else best_rank[1])
        if simulated is not None:
            rank = (float(excess_by_memory(sums.instance, simulated).sum()), simulated.step_s)
            if rank < best_rank:
                best, best_rank = (choice, simulated, ends), rank
    assert best is not None
    return best


def _fastest(sums: ResourceSums, choices: Iterable[OffloadChoice], good_enough_s: float) -> SimulatedChoice | None:
    best: SimulatedChoice | None = None
    for choice in choices:
        candidate = change_until_it_fits(sums, choice)
        if candidate is not None and (best is None or candidate.step_s < best.step_s):
            best = candidate
        if best is not None and best.step_s <= good_enough_s:
            break
    return best


def _with_uniform(
    sums: ResourceSums, best: SimulatedChoice | None, shares: tuple[float, ...] = SHARES
) -> SimulatedChoice | None:
    """Return the best of a choice and of the uniform policies; those that could be faster are simulated, unchanged."""
    for choice in uniform_policies(sums.instance, shares):
        fastest_s = np.inf if best is None else best.step_s
        if sums.lower_bound_s(choice) < fastest_s:
            best = simulate_unchanged(sums, choice, fastest_s) or best
    return best


def round_fluid(instance: OffloadInstance, fluid: FluidSchedule, phase: float) -> OffloadChoice:
    """Return integer layers in the proportions of a fluid answer, by error diffusion from the first layer on."""
    size, options = instance.num_layers, range(len(OPTIONS))
    option, parameters = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=bool)
    ahead, due = [0.0] * len(OPTIONS), phase
    first = [_TIE * (phase - 0.5) * k for k in options]
    columns = zip(fluid.options.T.tolist(), instance.allowed.T.tolist(), fluid.parameters.tolist(), strict=True)
    for idx, (shares, allowed, share) in enumerate(columns):
        ahead = [ahead[k] + shares[k] for k in options]
        weights = [ahead[k] + first[k] if allowed[k] else -np.inf for k in options]
        taken = weights.index(max(weights))
        option[idx], ahead[taken] = taken, ahead[taken] - 1.0
        due += share
        if due >= 1.0 - SUMMED and instance.streamable[idx]:
            parameters[idx], due = True, due - 1.0
    remaining = np.where(parameters, 0.0, instance.state_bytes)
    host = _diffuse_bytes(remaining, fluid.state_bytes[0])
    streamed = _diffuse_bytes(np.where(host, 0.0, remaining), fluid.state_bytes[1])
    storage = _diffuse_bytes(np.where(host | streamed, instance.state_bytes, 0.0), fluid.state_bytes[2])
    return OffloadChoice(
        option=option, host_optimizer=host, streamed_optimizer=streamed, parameters=parameters, storage=storage
    )


def _diffuse_bytes(bytes_: FloatArray, target: float) -> BoolArray:
    """Return layers that hold at least ``target`` of ``bytes_`` [L], evenly among all of them, and no layer too many."""
    total, chosen = float(bytes_.sum()), np.zeros(len(bytes_), dtype=bool)
    if target <= SUMMED * max(total, 1.0) or total == 0:
        return chosen
    share, due = min(target / total, 1.0), 0.0
    for layer, size in enumerate(bytes_.tolist()):
        due += share * size
        if size > 0 and due >= size * (1 - SUMMED):
            chosen[layer], due = True, due - size
    missing = target - float(bytes_[chosen].sum())
    for idx in sorted(np.flatnonzero((bytes_ > 0) & ~chosen), key=lambda idx: (bytes_[idx] < missing, bytes_[idx])):
        if missing <= SUMMED * total:
            break
        chosen[idx], missing = True, missing - float(bytes_[idx])
    return chosen


def place_counts(
    instance: OffloadInstance,
    counted: FluidSchedule,
    phase: float,
    where: FluidSchedule | None = None,
    ends: tuple[float, float] = ENDS[0],
) -> OffloadChoice:
    """Place integer numbers of layers of each kind (``counted``) over the sequence: evenly, or near a fluid answer.

    With many kinds the numbers are not integer, and error diffusion makes them so.
    """
    if counted.locations is None or len(np.unique(instance.kind)) > MANY_KINDS:
        options = counted.options
        if where is not None:
            options = _balance(where.options * instance.allowed, options.sum(axis=1)) * instance.allowed
        return round_fluid(instance, replace(counted, options=_move_from_ends(instance, options, ends)), phase)
    fractions = _move_from_ends(instance, counted.options if where is None else where.options, ends)
    size = instance.num_layers
    option = np.zeros(size, dtype=np.int64)
    masks = np.zeros((5, size), dtype=bool)  # parameters, host, streamed, storage of either
    for kind in np.unique(instance.kind):
        members = np.flatnonzero(instance.kind == kind)
        quotas = np.rint(counted.options[:, members].sum(axis=1))
        weights = _balance(fractions[:, members], quotas)
        option[members] = _diffuse_counts(weights, quotas, phase)
        numbers = np.rint([counted.parameters[members].sum(), *counted.locations[:, members].sum(axis=1)])
        remaining = members
        for row, number in enumerate(numbers[:3].astype(np.int64)):
            chosen = remaining[_evenly(len(remaining), int(number), phase)]
            masks[row, chosen] = True
            remaining = np.setdiff1d(remaining, chosen)
        for row, number in ((1, numbers[3]), (2, numbers[4])):
            of_row = members[masks[row, members]]
            masks[row + 2, of_row[_evenly(len(of_row), int(number), phase)]] = True
    parameters, host, streamed, *stored = masks
    return OffloadChoice(
        option=option,
        host_optimizer=host,
        streamed_optimizer=streamed,
        parameters=parameters,
        storage=stored[0] | stored[1],
    )


def _move_from_ends(instance: OffloadInstance, options: FloatArray, ends: tuple[float, float]) -> FloatArray:
    """Return fractions [K, L] with options that move much away from both ends, the sums as they were."""
    if ends == ENDS[0]:
        return options
    size, position = instance.num_layers, np.arange(instance.num_layers)
    outside = (position < ends[0] * size) | (position >= (1 - ends[1]) * size)
    heavy = instance.moved_bytes > 0.5 * instance.moved_bytes.max(initial=0.0)  # block inputs are far below activations
    others = (instance.allowed & ~heavy).any(axis=0)
    masked = np.where(heavy & outside & others, _AVOIDED, options + _MIN_WEIGHT) * instance.allowed
    return _balance(masked, options.sum(axis=1))


def _evenly(size: int, number: int, phase: float) -> IntArray:
    if number <= 0:
        return np.zeros(0, dtype=np.int64)
    return np.minimum(((np.arange(number) + phase) * size / min(number, size)).astype(np.int64), size - 1)[:size]


def _diffuse_counts(weights: FloatArray, quotas: FloatArray, phase: float) -> IntArray:
    """Return one option for each column of ``weights`` [K, n], as often as its quota [K] says, by error diffusion."""
    option, remaining = np.zeros(weights.shape[1], dtype=np.int64), quotas.copy()
    ahead = _TIE * (phase - 0.5) * np.arange(len(quotas))
    for idx in range(len(option)):
        ahead = ahead + weights[:, idx]
        option[idx] = int(np.argmax(np.where(remaining > 0, ahead, -np.inf)))
        ahead[option[idx]] -= 1.0
        remaining[option[idx]] -= 1
    return option


def _balance(weights: FloatArray, quotas: FloatArray) -> FloatArray:
    """Scale weights [K, n] until rows add up to the quotas and columns to one."""
    scaled = weights + _MIN_WEIGHT
    for _ in range(_BALANCES):
        scaled = scaled * (quotas / np.maximum(scaled.sum(axis=1), ROUNDING))[:, None]
        scaled = scaled / np.maximum(scaled.sum(axis=0), ROUNDING)
    return scaled


def uniform_policy(instance: OffloadInstance, option: int, location: str, share: float = 1.0) -> OffloadChoice:
    """Return one option for all blocks, and the states of the first ``share`` of the layers in one location, or on the device."""
    masks = dict.fromkeys((*_MASKS.values(), "storage"), np.zeros(instance.num_layers, dtype=bool))
    if location != "device":
        masks[_MASKS[location]] = np.arange(instance.num_layers) < round(share * instance.num_layers)
    otherwise = int(np.argmax(instance.allowed.sum(axis=1) == instance.num_layers))
    return OffloadChoice(option=np.where(instance.allowed[option], option, otherwise), **masks)


def uniform_policies(instance: OffloadInstance, shares: tuple[float, ...] = SHARES) -> Iterator[OffloadChoice]:
    """Yield all policies that (C1) allows, those of all layers before those of a share."""
    may = {"device": True, "host": instance.may.host_optimizer, "streamed": instance.may.streamed_optimizer}
    may["parameters"] = instance.may.parameters and bool(instance.streamable.all())
    for share in shares:
        for location in ("device", *_MASKS):
            for option in np.flatnonzero(instance.allowed.any(axis=1)).tolist():
                if may[location] and (location != "device" or share == 1.0):
                    yield uniform_policy(instance, option, location, share)
