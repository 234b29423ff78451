"""Offload schedules: whole layers near the fluid optimum, proved against it, and simulated (the problem: offload_instance.py).

1. the fluid linear program is a bound on every schedule (offload_fluid.py);
2. error diffusion takes whole layers in its proportions, layer after layer;
3. layers change their option, the cheapest byte first, until the simulation is within memory (offload_simulation.py);
4. the linear program with these options gives the best copies; of several roundings the fastest in the simulation is taken.

`gap` = (objective - bound) / objective, both of the linear program; the simulated seconds are those a runtime should take.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from . import offload_count, offload_fluid
from .linear_program import FloatArray, IntArray
from .offload_fluid import Fluid
from .offload_instance import OPTIONS, Choice, Instance, Worth
from .offload_simulation import Simulated, check, simulate
from .status import Status

PHASES = (0.5, 0.0, 0.25, 0.75)
"""Where error diffusion begins: the share of a layer that each option is ahead."""

GOOD_ENOUGH = 0.005
"""A simulated step within this of the bound ends the search for a better rounding; no model of a machine is as exact."""

MOST_PREFETCH = 6
"""Blocks ahead that are tried."""

MOST_TRIES = 16
"""Simulations spent on single layers after the rounding, and how many kinds of layers each change is tried on."""

MOST_ALIKE = 2

MOST_REPAIRS = 60


@dataclass(frozen=True, kw_only=True)
class Solution:
    """``objective_s`` of the linear program with this choice, ``bound_s`` without; ``simulated`` with ``prefetch`` blocks ahead."""

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
    """The fastest rounding of the fluid optimum that its simulation is within memory with; infeasible where even fluids are not."""
    begun = time.perf_counter()
    status, fluid = offload_fluid.solve(instance)
    if fluid is None:
        return _nothing(status, 0.0, begun)
    counted = offload_count.solve(instance)[1]
    best = _best_rounding(instance, [fluid, *([] if counted is None else [counted])], fluid.objective_s)
    if best is None:
        return _nothing(Status.UNKNOWN, fluid.objective_s, begun)
    best = _improved(instance, best, fluid.objective_s)
    _, copies = offload_fluid.solve(instance, best[0])
    objective_s = best[1].step_s if copies is None else min(copies.objective_s, best[1].step_s)
    return _answer(best, objective_s, fluid, begun)


def solve_quickly(instance: Instance) -> Solution:
    """Roundings of the count form alone, with its bound: what the search over layouts compares."""
    begun = time.perf_counter()
    status, counted = offload_count.solve(instance)
    if counted is None:
        return _nothing(status, 0.0, begun)
    best = _best_rounding(instance, [counted], counted.objective_s, PHASES[:2])
    if best is None:
        return _nothing(Status.UNKNOWN, counted.objective_s, begun)
    return _answer(best, best[1].step_s, counted, begun)


Rounding = tuple[Choice, Simulated, int]
"""A choice, its simulation, and the window of blocks ahead that it has."""


def _best_rounding(
    instance: Instance, starts: list[Fluid], bound_s: float, phases: tuple[float, ...] = PHASES
) -> Rounding | None:
    """The fastest in the simulation, of several phases of error diffusion from each fluid answer."""
    best: Rounding | None = None
    for phase in phases:
        for fluid in starts:
            if best is not None and best[1].step_s <= bound_s * (1 + GOOD_ENOUGH):
                return best
            for choice in _with_room(instance, rounded(instance, fluid, phase), phase):
                found = _fitting(instance, choice)
                if found is not None and (best is None or found[1].step_s < best[1].step_s):
                    best = found
    return best


def _with_room(instance: Instance, choice: Choice, phase: float) -> Iterator[Choice]:
    """The choice; and where it is too large, one that leaves as much room: whole copies need more of it than fluids."""
    yield choice
    excess = simulate(instance, choice).peak_bytes - instance.cap_bytes
    if excess > 0:
        counted = offload_count.solve(instance.with_cap(instance.cap_bytes - excess))[1]
        if counted is not None:
            yield rounded(instance, counted, phase)


def _improved(instance: Instance, best: Rounding, bound_s: float) -> Rounding:
    """Single layers changed as long as that is faster in the simulation and within memory, one of each kind of change at a time."""
    tries = MOST_TRIES
    improved = True
    while improved and tries > 0:
        improved = False
        for changed in _returns(instance, best[0]):
            if tries <= 0 or best[1].step_s <= bound_s * (1 + GOOD_ENOUGH):
                return best
            tries -= 1
            simulated = simulate(instance, changed, prefetch=best[2])
            if simulated.step_s < best[1].step_s * (1 - 1e-9) and not check(instance, changed, simulated):
                best, improved = (changed, simulated, best[2]), True
                break
    return best


def _returns(i: Instance, choice: Choice) -> list[Choice]:
    """What costs less time: a layer's states back to the device, its parameters back, another option; the dearest first."""
    rows, found = np.arange(i.num_layers), list[Choice]()
    masks = {"parameters": choice.parameters, "host_optimizer": choice.host_optimizer}
    masks["streamed_optimizer"] = choice.streamed_optimizer
    for name, mask in masks.items():
        for idx in _distinct(np.flatnonzero(mask), i.kind, choice.option)[:MOST_ALIKE]:
            here = rows == idx
            back = replace(choice, **{name: mask & ~here}, storage=choice.storage & ~here)
            if name != "streamed_optimizer" and i.may.streamed_optimizer:
                found.append(replace(back, streamed_optimizer=choice.streamed_optimizer | here))
            found.append(back)
    seconds = choice.of(i.repeated_s) + choice.of(i.moved_bytes) / i.links.to_host_bytes_per_s
    for k in range(len(OPTIONS)):
        cheaper = i.repeated_s[k] + i.moved_bytes[k] / i.links.to_host_bytes_per_s < seconds - 1e-12
        for idx in _distinct(np.flatnonzero(i.allowed[k] & cheaper), i.kind, choice.option)[:MOST_ALIKE]:
            found.append(replace(choice, option=np.where(rows == idx, k, choice.option)))
    return found


def _answer(best: Rounding, objective_s: float, bound: Fluid, begun: float) -> Solution:
    return Solution(
        status=Status.FEASIBLE,
        choice=best[0],
        objective_s=objective_s,
        bound_s=bound.objective_s,
        simulated=best[1],
        prefetch=best[2],
        worth=bound.worth,
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


def rounded(instance: Instance, fluid: Fluid, phase: float) -> Choice:
    """Whole layers in the proportions of a fluid answer, by error diffusion from the first layer on."""
    size, rows = instance.num_layers, range(instance.num_layers)
    option, parameters = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=bool)
    ahead, due = np.full(len(OPTIONS), 0.0), phase
    for idx in rows:
        ahead = ahead + fluid.options[:, idx]
        allowed = np.where(instance.allowed[:, idx], ahead + _TIE * (phase - 0.5) * np.arange(len(OPTIONS)), -np.inf)
        option[idx] = int(np.argmax(allowed))
        ahead[option[idx]] -= 1.0
        due += fluid.parameters[idx]
        if due >= 1.0 - 1e-9 and instance.streamable[idx]:
            parameters[idx], due = True, due - 1.0
    left = np.where(parameters, 0.0, instance.state_bytes)
    host = _taken(left, fluid.host_bytes)
    streamed = _taken(np.where(host, 0.0, left), fluid.streamed_bytes)
    storage = _taken(np.where(host | streamed, instance.state_bytes, 0.0), fluid.storage_bytes)
    return Choice(
        option=option, host_optimizer=host, streamed_optimizer=streamed, parameters=parameters, storage=storage
    )


_TIE = 0.2


def _taken(bytes_: FloatArray, wanted: float) -> NDArray[np.bool_]:
    """Layers that hold at least ``wanted`` of ``bytes_`` [L], spread over all of them, and no layer more than that takes."""
    total, chosen = float(bytes_.sum()), np.zeros(len(bytes_), dtype=bool)
    if wanted <= 1e-9 * max(total, 1.0) or total == 0:
        return chosen
    share, due = min(wanted / total, 1.0), 0.0
    for idx in np.flatnonzero(bytes_ > 0):
        due += share * bytes_[idx]
        if due >= bytes_[idx] * (1 - 1e-9):
            chosen[idx], due = True, due - bytes_[idx]
    missing = wanted - float(bytes_[chosen].sum())
    for idx in sorted(np.flatnonzero((bytes_ > 0) & ~chosen), key=lambda idx: (bytes_[idx] < missing, bytes_[idx])):
        if missing <= 1e-9 * total:
            break
        chosen[idx], missing = True, missing - float(bytes_[idx])
    return chosen


def _fitting(instance: Instance, choice: Choice) -> tuple[Choice, Simulated, int] | None:
    """A choice and window whose simulation is within memory: by changing layers, the cheapest byte first."""
    for _ in range(MOST_REPAIRS):
        simulated = simulate(instance, choice)
        if simulated.peak_bytes <= instance.cap_bytes:
            break
        changed = _relieved(instance, choice, simulated)
        if changed is None:
            return None
        choice = changed
    if check(instance, choice, simulated):
        return None
    best = (simulated, 1)
    for prefetch in range(2, MOST_PREFETCH + 1):
        ahead = simulate(instance, choice, prefetch=prefetch)
        if ahead.peak_bytes > instance.cap_bytes:
            break
        if ahead.step_s < best[0].step_s * (1 - 1e-9):
            best = (ahead, prefetch)
    return choice, *best


def _relieved(instance: Instance, choice: Choice, simulated: Simulated) -> Choice | None:
    """Layers changed, the least seconds a byte first, until the bytes beyond memory where it is too full are saved; None if they
    cannot be.
    """
    i, in_update = instance, simulated.update_bytes > instance.cap_bytes
    excess = (simulated.update_bytes if in_update else simulated.microbatch_bytes) - i.cap_bytes
    changed: Choice | None = None
    while excess > 0:
        offers = _state_changes(i, choice, in_update=in_update)
        if not in_update:
            offers += _option_changes(i, choice)
        priced = [
            (max(seconds, 1e-12) / min(saved, excess), saved, other) for seconds, saved, other in offers if saved > 0
        ]
        if not priced:
            return changed
        _, saved, choice = min(priced, key=lambda offer: offer[0])
        changed, excess = choice, excess - saved
    return changed


def _option_changes(i: Instance, choice: Choice) -> list[tuple[float, float, Choice]]:
    """(seconds, bytes saved, choice) of other options of a layer, one of each kind."""
    rows, kept, found = np.arange(i.num_layers), choice.of(i.kept_bytes), []
    for k in range(len(OPTIONS)):
        saved = kept - i.kept_bytes[k]
        # A byte that moves is hidden or not: half of its seconds, to compare with recompute.
        copied = 0.5 * (i.moved_bytes[k] - choice.of(i.moved_bytes)) / i.links.to_host_bytes_per_s
        seconds = i.num_microbatches * (i.repeated_s[k] - choice.of(i.repeated_s) + copied)
        for idx in _distinct(np.flatnonzero(i.allowed[k] & (saved > 0)), i.kind, choice.option):
            changed = replace(choice, option=np.where(rows == idx, k, choice.option))
            found.append((float(seconds[idx]), float(saved[idx]), changed))
    return found


def _state_changes(i: Instance, choice: Choice, *, in_update: bool) -> list[tuple[float, float, Choice]]:
    """The same of where a layer's states and parameters lie."""
    rows, found = np.arange(i.num_layers), list[tuple[float, float, Choice]]()
    away = choice.host_optimizer | choice.streamed_optimizer
    gradients = in_update or i.gradients_accumulate
    candidates = np.flatnonzero(~choice.parameters & (i.state_bytes > 0))
    for idx in _distinct(candidates, 2 * i.kind + i.streamable, away.astype(np.int64)):
        here, states = rows == idx, float(i.state_bytes[idx])
        if not away[idx] and i.may.streamed_optimizer:
            moved = choice.streamed_optimizer | here
            found.append((states / i.links.to_host_bytes_per_s, states, replace(choice, streamed_optimizer=moved)))
        if not away[idx] and i.may.host_optimizer:
            moved = choice.host_optimizer | here
            found.append((float(i.host_update_s[idx]), states, replace(choice, host_optimizer=moved)))
        if i.may.parameters and i.streamable[idx]:
            size = float(
                i.parameter_bytes[idx] + (not in_update) * i.copy_bytes[idx] + gradients * i.gradient_bytes[idx]
            )
            gathered = i.num_microbatches * 2 * float(i.parameter_bytes[idx]) / i.links.to_device_bytes_per_s
            seconds = gathered + float(i.host_update_s[idx])
            changed = replace(
                choice,
                parameters=choice.parameters | here,
                host_optimizer=choice.host_optimizer & ~here,
                streamed_optimizer=choice.streamed_optimizer & ~here,
                storage=choice.storage & ~here,
            )
            found.append((seconds, size + (0.0 if away[idx] else states), changed))
    return found


def _distinct(candidates: IntArray, kind: IntArray, option: IntArray) -> list[int]:
    """One of each kind and option, the middle one."""
    groups: dict[tuple[int, int], list[int]] = {}
    for idx in candidates:
        groups.setdefault((int(kind[idx]), int(option[idx])), []).append(int(idx))
    return [members[len(members) // 2] for members in groups.values()]
