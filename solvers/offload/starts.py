"""Choices to start from: integer layers near the linear programs, and uniform policies.

`round_fluid` makes integer layers of fractions by error diffusion from the first layer on; `place_counts` places integer numbers of
layers of each kind over the sequence, evenly or near the positions of a fluid answer. `uniform_policies` have one option for all
blocks, and the states or the parameters of a share of the layers in one location: what users of other engines would choose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ...schema.units import BoolArray, FloatArray, IntArray
from ..tolerances import ROUNDING, SUMMED
from .bound import MANY_KINDS
from .instance import OPTIONS, OffloadChoice, OffloadInstance
from .rows import FluidSchedule
from .simulation import host_bytes, update_bytes

_TIE = 0.2
"""Of a layer: how far phases move options apart, so that those of equal fractions are not all due at the same layers."""


_MIN_WEIGHT = 1e-3
"""Weight of every option of a layer at least, so that numbers can be reached."""


_BALANCES = 12
"""Rounds of scaling rows and columns in turn; far fewer leave numbers that the quotas then correct."""


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
    host = _diffuse_bytes(remaining, fluid.host_bytes)
    streamed = _diffuse_bytes(np.where(host, 0.0, remaining), fluid.streamed_bytes)
    storage = _diffuse_bytes(np.where(host | streamed, instance.state_bytes, 0.0), fluid.storage_bytes)
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


ENDS = ((0.0, 0.0), (0.0, 0.03), (0.08, 0.03), (0.2, 0.03), (0.35, 0.06))
"""Shares of the layers at both ends that are not moved where others can be: at the turn what just moved is still on the device, and
when the backward passes end so are all gradients. The first is none; the others are tried in turn."""


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
    return OffloadChoice(
        option=option,
        parameters=masks[0],
        host_optimizer=masks[1],
        streamed_optimizer=masks[2],
        storage=masks[3] | masks[4],
    )


def _move_from_ends(instance: OffloadInstance, options: FloatArray, ends: tuple[float, float]) -> FloatArray:
    """Return fractions [K, L] with options that move much away from both ends, the sums as they were."""
    if ends == ENDS[0]:
        return options
    size, moved = instance.num_layers, instance.moved_bytes
    position = np.arange(size)
    outside = (position < ends[0] * size) | (position >= (1 - ends[1]) * size)
    heavy = moved > 0.5 * moved.max(initial=0.0)
    others = (instance.allowed & ~heavy).any(axis=0)
    masked = np.where(heavy & outside & others, 1e-6, options + _MIN_WEIGHT) * instance.allowed
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


UNIFORM_LOCATIONS = ("device", "host", "streamed", "parameters")
"""Locations of states: on the device, updated by the host, streamed to the device, with the parameters on the host."""


SHARES = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125)
"""Shares of the layers from the first one on that are away: all of them, then an eighth less each time."""


_STATES = {"host": "host_optimizer", "streamed": "streamed_optimizer", "parameters": "parameters"}


def uniform_policy(instance: OffloadInstance, option: int, location: str, share: float = 1.0) -> OffloadChoice:
    """Return one option for all blocks, and the states of the first ``share`` of the layers in one location."""
    none = np.zeros(instance.num_layers, dtype=bool)
    masks = dict.fromkeys((*_STATES.values(), "storage"), none)
    if location != "device":
        masks[_STATES[location]] = np.arange(instance.num_layers) < round(share * instance.num_layers)
    otherwise = int(np.argmax(instance.allowed.sum(axis=1) == instance.num_layers))
    return OffloadChoice(option=np.where(instance.allowed[option], option, otherwise), **masks)


def uniform_policies(instance: OffloadInstance, shares: tuple[float, ...] = SHARES) -> Iterator[OffloadChoice]:
    """Yield all policies that (C1) allows, those of all layers before those of a share."""
    may = {"device": True, "host": instance.may.host_optimizer, "streamed": instance.may.streamed_optimizer}
    may["parameters"] = instance.may.parameters and bool(instance.streamable.all())
    for share in shares:
        for location in UNIFORM_LOCATIONS:
            for option in range(len(OPTIONS)):
                if may[location] and instance.allowed[option].any() and (location != "device" or share == 1.0):
                    yield uniform_policy(instance, option, location, share)


def uniform_lower_bound_s(i: OffloadInstance, choice: OffloadChoice) -> float:
    """Return the seconds that a choice takes even if every copy is hidden; infinite if it cannot fit."""
    away = choice.host_optimizer | choice.parameters
    streamed, master, gradient = i.state_bytes[choice.streamed_optimizer], i.parameter_bytes, i.gradient_bytes
    links, of_host = i.links, choice.host_optimizer
    down = (gradient[of_host].sum() + streamed.sum()) / links.to_host_bytes_per_s
    up = (master[of_host].sum() + streamed.sum()) / links.to_device_bytes_per_s
    update = max(i.device_update_s[~away].sum(), i.host_update_s[away].sum(), links.seconds(down, up))
    m, moved, p = i.num_microbatches, choice.take(i.moved_bytes).sum(), choice.parameters
    compute = i.compute_s + choice.take(i.repeated_s).sum()
    to_host = (moved + gradient[p].sum()) / links.to_host_bytes_per_s
    to_device = (moved + 2 * master[p].sum()) / links.to_device_bytes_per_s
    resident = i.resident_bytes - i.state_bytes[choice.streamed_optimizer | choice.host_optimizer].sum()
    resident -= (master + i.copy_bytes + i.state_bytes + gradient * i.gradients_accumulate)[p].sum()
    working = choice.take(i.working_bytes).max(initial=0.0)
    turn_bytes = resident + choice.take(i.retained_bytes).sum() + working + i.fixed_bytes + i.turn_bytes
    if max(turn_bytes, update_bytes(i, choice)) > i.cap_bytes or host_bytes(i, choice) > i.host_cap_bytes:
        return np.inf
    return float(m * max(compute, to_host, to_device) + update)
