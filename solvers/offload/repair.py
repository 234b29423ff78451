"""Changes of single layers: which of them are worth a simulation, and the local search that they make up.

`ResourceSums` estimates the seconds of a choice as the count form sees it: the longest of compute and of each direction of the link
in a micro-batch, and of all that the update does at once, plus a small part of everything, since less of what is hidden is easier
to hide. A change of a layer is then a change of twelve sums. The simulation decides:

    change_until_it_fits    layers change, the fewest seconds a byte first, until the simulation is within memory
    improve_choice          changes of one or two layers, those that promise most first, as long as the simulation is faster
    widen_window            more blocks ahead where layers that make room for them cost less than that saves
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...schema.units import FloatArray, IntArray
from ..tolerances import ROUNDING, SUMMED
from .instance import OPTIONS, OffloadChoice, OffloadInstance
from .simulation import SimulatedStep, broken_constraints, simulate_within

LOCATIONS = ("device", "host", "streamed", "parameters", "host, stored", "streamed, stored")
"""Where the states of a layer are; with `parameters` these are on the host too."""

NUM_SUMS = 12
COMPUTE_S, DOWN, UP, DEVICE_UPDATE_S, HOST_UPDATE_S, UPDATE_DOWN, UPDATE_UP = range(7)
DEVICE, DEVICE_AT_END, DEVICE_IN_UPDATE, HOST, STORED = range(7, NUM_SUMS)
BYTES = slice(7, NUM_SUMS)
"""Sums over layers: seconds and bytes of a micro-batch, of the update; bytes that are on the device when backward passes begin and
end and in the update, on the host and on storage."""

HIDDEN = 0.02
"""Of a second of a resource that is not the longest: enough to break ties, too little to prefer it over a shorter step."""

MAX_PREFETCH = 6
"""Blocks ahead that are tried; each takes the memory of a block, and one is enough where a copy is no longer than a pass."""

MAX_EXTRA_PREFETCH = 2
"""Blocks more that are tried although it takes recompute to make room for them."""

MAX_REPAIRS = 40
"""Simulations until a choice must be within memory; each ends nearer to it."""

MAX_PAIRED = 48
"""Changes of single layers that are tried in pairs, 1,128 of them."""

_MIN_SAVED_S = 1e-9
"""Changes that promise less are not simulated."""

_MIN_GAIN = 1e-7
"""Relative: a change that gains less of a simulated step is rounding."""


def locations_of(choice: OffloadChoice) -> IntArray:
    """Return the location of each layer's states [L], into LOCATIONS."""
    stored = 3 * choice.storage
    location = np.where(choice.host_optimizer, 1 + stored, np.where(choice.streamed_optimizer, 2 + stored, 0))
    return np.where(choice.parameters, 3, location)


def choice_from_locations(option: IntArray, location: IntArray) -> OffloadChoice:
    """Return a choice by option and location of each layer [L]."""
    return OffloadChoice(
        option=option,
        host_optimizer=(location == 1) | (location == 4),
        streamed_optimizer=(location == 2) | (location == 5),
        parameters=location == 3,
        storage=location >= 4,
    )


@dataclass(frozen=True)
class LayerChanges:
    """One change a row [N]: layer, its new option and location, what sums [N, 12] change by, and the estimated seconds."""

    layer: IntArray
    option: IntArray
    location: IntArray
    sums: FloatArray
    seconds: FloatArray

    def apply(self, choice: OffloadChoice, row: int | np.integer[Any]) -> OffloadChoice:
        """Return the choice with one of the changes."""
        option, location, layer = choice.option.copy(), locations_of(choice), self.layer[row]
        option[layer], location[layer] = self.option[row], self.location[row]
        return choice_from_locations(option, location)


class ResourceSums:
    """Sums over layers of one problem's choices, and their simulations."""

    def __init__(self, instance: OffloadInstance) -> None:
        """Work out the sums of every option [K, L, 12] and location [6, L, 12]."""
        self.instance = i = instance
        self._updates: dict[bytes, float] = {}
        self._known: dict[tuple[bytes, bytes, int], SimulatedStep] = {}
        self._of_option, self._of_location = np.zeros((len(OPTIONS), i.num_layers, NUM_SUMS)), _sums_by_location(i)
        self._of_option[..., COMPUTE_S], self._of_option[..., DEVICE] = i.repeated_s, i.retained_bytes
        self._of_option[..., [DOWN, UP, HOST]] = i.moved_bytes[..., None]
        anywhere, stored = np.ones(i.num_layers, dtype=bool), i.storage_cap_bytes > 0
        host, streamed = (i.state_bytes > 0) & i.may.host_optimizer, (i.state_bytes > 0) & i.may.streamed_optimizer
        parameters = i.streamable & i.may.parameters
        self._may_be = np.stack([anywhere, host, streamed, parameters, host & stored, streamed & stored])

    def simulate(self, choice: OffloadChoice, *, prefetch: int = 1) -> SimulatedStep:
        """Simulate a step; what was already simulated is remembered."""
        simulated = self.simulate_within(choice, np.inf, prefetch=prefetch)
        assert simulated is not None
        return simulated

    def simulate_within(self, choice: OffloadChoice, within_s: float, *, prefetch: int = 1) -> SimulatedStep | None:
        """Simulate a step; None if it takes longer than ``within_s``."""
        key = (choice.option.tobytes(), locations_of(choice).tobytes(), prefetch)
        if key not in self._known:
            simulated = simulate_within(self.instance, choice, within_s, self._updates, prefetch=prefetch)
            if simulated is None:
                return None
            self._known[key] = simulated
        return self._known[key] if self._known[key].step_s <= within_s else None

    def total(self, choice: OffloadChoice) -> FloatArray:
        """Return the sums of a choice [12]."""
        layers = np.arange(self.instance.num_layers)
        by_layer = self._of_option[choice.option, layers] + self._of_location[locations_of(choice), layers]
        return np.asarray(by_layer.sum(axis=0))

    def lower_bound_s(self, choice: OffloadChoice) -> float:
        """Return seconds that no simulation of a choice is below, every copy hidden; infinite if it cannot fit."""
        i, total = self.instance, self.total(choice)
        always = choice.take(i.working_bytes).max(initial=0.0) + i.fixed_bytes
        in_update = 2 * i.state_bytes[choice.streamed_optimizer].max(initial=0.0) + i.update_bytes
        on_device = always + max(total[DEVICE] + i.turn_bytes, total[DEVICE_IN_UPDATE] + in_update)
        fits = on_device <= i.cap_bytes * (1 + SUMMED) and total[HOST] <= i.host_cap_bytes * (1 + SUMMED)
        return float(self.seconds(total, hidden=0.0)) * (1 - SUMMED) if fits else np.inf

    def seconds(self, sums: FloatArray, *, hidden: float = HIDDEN) -> FloatArray:
        """Return the estimated seconds of sums [..., 12]."""
        i, links, m = self.instance, self.instance.links, self.instance.num_microbatches
        down, gone = sums[..., DOWN] / links.to_host_bytes_per_s, sums[..., UPDATE_DOWN] / links.to_host_bytes_per_s
        up, back = sums[..., UP] / links.to_device_bytes_per_s, sums[..., UPDATE_UP] / links.to_device_bytes_per_s
        both_ways = 1 / links.read_bytes_per_s + 1 / links.write_bytes_per_s if i.storage_cap_bytes > 0 else 0.0
        passes = np.stack([i.compute_s + sums[..., COMPUTE_S], links.seconds(down, up)])
        on_device, on_host, stored = sums[..., DEVICE_UPDATE_S], sums[..., HOST_UPDATE_S], sums[..., STORED] * both_ways
        update = np.stack([on_device, on_host, links.seconds(gone, back), stored])
        longest = m * passes.max(axis=0) + update.max(axis=0)
        return np.asarray(longest + hidden * (m * passes.sum(axis=0) + update.sum(axis=0)))

    def changes(self, choice: OffloadChoice, members: IntArray) -> LayerChanges:
        """Return every other option and every other location of the layers ``members`` [n], one at a time."""
        i, location, option, base = self.instance, locations_of(choice), choice.option, self.total(choice)
        k, one = np.nonzero(i.allowed[:, members] & (np.arange(len(OPTIONS))[:, None] != option[members]))
        q, other = np.nonzero(self._may_be[:, members] & (np.arange(len(LOCATIONS))[:, None] != location[members]))
        first, second = members[one], members[other]
        by_option = self._of_option[k, first] - self._of_option[option[first], first]
        by_location = self._of_location[q, second] - self._of_location[location[second], second]
        in_use = _change_of_largest(choice.take(i.working_bytes), first, i.working_bytes[k, first])
        by_option[:, [DEVICE, DEVICE_AT_END, DEVICE_IN_UPDATE]] += in_use[:, None]
        streamed = np.where((q == 2) | (q == 5), i.state_bytes[second], 0.0)
        buffer = _change_of_largest(np.where(choice.streamed_optimizer, i.state_bytes, 0.0), second, streamed)
        by_location[:, DEVICE_IN_UPDATE] += 2 * buffer
        sums = np.concatenate([by_option, by_location])
        return LayerChanges(
            layer=np.concatenate([first, second]),
            option=np.concatenate([k, option[second]]),
            location=np.concatenate([location[first], q]),
            sums=sums,
            seconds=self.seconds(base + sums) - self.seconds(base),
        )


def _change_of_largest(values: FloatArray, layer: IntArray, new: FloatArray) -> FloatArray:
    """Return what the largest of ``values`` [L] changes by when that of ``layer`` [N] becomes ``new`` [N]."""
    order = np.argsort(values)
    largest = values[order[-1]]
    others = np.where(layer == order[-1], values[order[-2]] if len(values) > 1 else 0.0, largest)
    return np.asarray(np.maximum(others, new) - largest)


def _sums_by_location(i: OffloadInstance) -> FloatArray:
    """Return the sums of each layer with its states in each location [6, L, 12]."""
    sums = np.zeros((len(LOCATIONS), i.num_layers, NUM_SUMS))
    master, gradient, states = i.parameter_bytes, i.gradient_bytes, i.state_bytes
    accumulated, end_bytes = gradient * i.gradients_accumulate, master + i.copy_bytes - i.freed_bytes + gradient
    sums[..., DEVICE_UPDATE_S], sums[..., DEVICE] = i.device_update_s, master + i.copy_bytes + accumulated
    sums[..., DEVICE_AT_END], sums[..., DEVICE_IN_UPDATE] = end_bytes, master + gradient
    for bytes_ in (DEVICE, DEVICE_AT_END, DEVICE_IN_UPDATE):
        sums[0, :, bytes_] += states
    for location in (1, 4):
        sums[location, :, DEVICE_UPDATE_S], sums[location, :, HOST_UPDATE_S] = 0.0, i.host_update_s
        sums[location, :, UPDATE_DOWN], sums[location, :, UPDATE_UP] = gradient, master
        sums[location, :, HOST] = master + gradient + states
    for location in (2, 5):
        sums[location, :, UPDATE_DOWN] = sums[location, :, UPDATE_UP] = sums[location, :, HOST] = states
    sums[3] = 0.0
    sums[3, :, DOWN], sums[3, :, UP], sums[3, :, HOST] = gradient, 2 * master, master + gradient + states
    sums[3, :, HOST_UPDATE_S] = i.host_update_s
    sums[4:, :, STORED] = states
    sums[4:, :, HOST] -= states
    return sums


@dataclass(frozen=True)
class SimulatedChoice:
    """A choice, its simulation, and the window of blocks ahead in it."""

    choice: OffloadChoice
    simulated: SimulatedStep
    prefetch: int

    @property
    def step_s(self) -> float:
        """Seconds of the simulated step."""
        return self.simulated.step_s


def change_until_it_fits(sums: ResourceSums, choice: OffloadChoice, *, prefetch: int = 1) -> SimulatedChoice | None:
    """Change layers, the fewest seconds a byte first, until the choice is within memory; None if it cannot be."""
    instance = sums.instance
    for _ in range(MAX_REPAIRS):
        simulated = sums.simulate(choice, prefetch=prefetch)
        if not excess_by_memory(instance, simulated).any():
            break
        changed = _free_memory(sums, choice, simulated)
        if changed is None:
            return None
        choice = changed
    if broken_constraints(instance, choice, simulated):
        return None
    return with_widest_window(sums, SimulatedChoice(choice, simulated, prefetch))


def widen_window(sums: ResourceSums, best: SimulatedChoice) -> SimulatedChoice:
    """Return the choice with more blocks ahead, where layers that change to make room for them cost less than that saves."""
    while best.prefetch < MAX_PREFETCH:
        wider = change_until_it_fits(sums, best.choice, prefetch=best.prefetch + 1)
        if wider is None or wider.step_s >= best.step_s * (1 - _MIN_GAIN):
            break
        best = wider
    return best


def make_room_for_window(
    sums: ResourceSums, best: SimulatedChoice, *, good_enough_s: float, tries: int
) -> SimulatedChoice:
    """Return the choice with one or two blocks more ahead although that costs at first, and then improved."""
    fastest = best
    for prefetch in range(best.prefetch + 1, best.prefetch + 1 + MAX_EXTRA_PREFETCH):
        wider = change_until_it_fits(sums, best.choice, prefetch=prefetch)
        if wider is not None and wider.prefetch == prefetch:
            wider = improve_choice(sums, wider, good_enough_s=good_enough_s, tries=tries)
            fastest = min(fastest, wider, key=lambda candidate: candidate.step_s)
    return fastest


def simulate_unchanged(sums: ResourceSums, choice: OffloadChoice, faster_than_s: float) -> SimulatedChoice | None:
    """Return the choice with its best window if it is within memory and faster."""
    simulated = sums.simulate(choice)
    if broken_constraints(sums.instance, choice, simulated):
        return None
    candidate = with_widest_window(sums, SimulatedChoice(choice, simulated, 1))
    return candidate if candidate.step_s < faster_than_s else None


def with_widest_window(sums: ResourceSums, candidate: SimulatedChoice) -> SimulatedChoice:
    """Return the choice with as many blocks ahead as make it faster and fit."""
    instance = sums.instance
    if not (candidate.choice.take(instance.moved_bytes).any() or candidate.choice.parameters.any()):
        return candidate
    for prefetch in range(candidate.prefetch + 1, MAX_PREFETCH + 1):
        ahead = sums.simulate_within(candidate.choice, candidate.step_s * (1 - SUMMED), prefetch=prefetch)
        if ahead is None or ahead.peak_bytes > instance.cap_bytes:
            break
        candidate = SimulatedChoice(candidate.choice, ahead, prefetch)
    return candidate


def _free_bytes(i: OffloadInstance, simulated: SimulatedStep) -> FloatArray:
    """Return the bytes that are free [5], in the order of BYTES; below zero where there are too few."""
    on_device = np.array([simulated.forward_bytes, simulated.backward_bytes, simulated.update_bytes])
    elsewhere = [i.host_cap_bytes - simulated.host_bytes, i.storage_cap_bytes - simulated.storage_bytes]
    return np.concatenate([i.cap_bytes - on_device, elsewhere])


def excess_by_memory(i: OffloadInstance, simulated: SimulatedStep) -> FloatArray:
    """Return the bytes beyond the capacity [5], in the order of BYTES."""
    return np.maximum(-_free_bytes(i, simulated), 0.0)


def _free_memory(sums: ResourceSums, choice: OffloadChoice, simulated: SimulatedStep) -> OffloadChoice | None:
    """Change layers until all memories have enough by the sums, the fewest seconds a byte first; None if that cannot be."""
    free, changed = _free_bytes(sums.instance, simulated), False
    for _ in range(sums.instance.num_layers):
        if (free >= 0).all():
            return choice
        offers = sums.changes(choice, _sample_layers(sums.instance, choice, 1))
        bytes_, full = offers.sums[:, BYTES], free < 0
        saved = (np.minimum(np.maximum(-bytes_, 0.0), np.where(full, -free, 0.0)) * full).sum(axis=1)
        saved -= (np.maximum(bytes_, 0.0) * full).sum(axis=1)
        fits = ((bytes_ <= np.maximum(free, 0.0)) | full).all(axis=1) & (saved > 0)
        if not fits.any():
            return choice if changed else None
        price = np.where(fits, np.maximum(offers.seconds, ROUNDING) / np.maximum(saved, 1.0), np.inf)
        best = int(np.argmin(price))
        choice, free, changed = offers.apply(choice, best), free - bytes_[best], True
    return choice


def improve_choice(sums: ResourceSums, best: SimulatedChoice, *, good_enough_s: float, tries: int) -> SimulatedChoice:
    """Change one or two layers, those that promise most by the sums first, as long as the simulation is faster."""
    instance, is_better, known = sums.instance, True, set[bytes]()
    while is_better and best.step_s > good_enough_s:
        is_better = False
        for changed in _promising_changes(sums, best):
            key = changed.option.tobytes() + locations_of(changed).tobytes()
            if key in known:
                continue
            if tries <= 0:
                return best
            known.add(key)
            tries -= 1
            simulated = sums.simulate_within(changed, best.step_s * (1 - _MIN_GAIN), prefetch=best.prefetch)
            if simulated is not None and not broken_constraints(instance, changed, simulated):
                best, is_better = with_widest_window(sums, SimulatedChoice(changed, simulated, best.prefetch)), True
                break
    return best


def _promising_changes(sums: ResourceSums, best: SimulatedChoice) -> Iterator[OffloadChoice]:
    free = np.maximum(_free_bytes(sums.instance, best.simulated), 0.0)
    offers = sums.changes(best.choice, _sample_layers(sums.instance, best.choice, 3))
    bytes_ = offers.sums[:, BYTES]
    good = np.flatnonzero((offers.seconds < -_MIN_SAVED_S) & (bytes_ <= free).all(axis=1))
    for row in good[np.argsort(offers.seconds[good])]:
        yield offers.apply(best.choice, row)
    # Pairs of those that gain most seconds and those that save most bytes of the device for each second.
    saved = -bytes_[:, :3].min(axis=1)
    price = np.where(saved > 0, np.maximum(offers.seconds, ROUNDING) / np.maximum(saved, 1.0), np.inf)
    half = MAX_PAIRED // 2
    chosen = np.unique(np.concatenate([np.argsort(offers.seconds)[:half], np.argsort(price)[:half]]))
    one, two = chosen[np.array(np.triu_indices(len(chosen), 1))]
    apart = offers.layer[one] != offers.layer[two]
    one, two = one[apart], two[apart]
    base = sums.total(best.choice)
    seconds = sums.seconds(base + offers.sums[one] + offers.sums[two]) - sums.seconds(base)
    good = np.flatnonzero((seconds < -_MIN_SAVED_S) & (bytes_[one] + bytes_[two] <= free).all(axis=1))
    for pair in good[np.argsort(seconds[good])]:
        yield offers.apply(offers.apply(best.choice, one[pair]), two[pair])


def _sample_layers(i: OffloadInstance, choice: OffloadChoice, max_per_group: int) -> IntArray:
    """Return at most ``max_per_group`` layers of each kind, option and location: the middle one, the last one, the first one."""
    keys = (i.kind * 64 + choice.option * 8 + locations_of(choice)).astype(np.int64)
    order = np.argsort(keys, kind="stable")
    first = np.flatnonzero(np.diff(keys[order], prepend=-1))
    last = np.append(first[1:], len(keys)) - 1
    middle = (first + last + 1) // 2
    return np.unique(order[np.concatenate([middle, last, first][:max_per_group])])
