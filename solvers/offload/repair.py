"""Changes of single layers and what they come to in sums over layers: which of them are worth a simulation.

The seconds of a choice as the count form sees it: the longest of compute and of each direction of the link in a micro-batch, and
of all that the update does side by side, plus a small part of everything, since less of what is hidden is easier to hide.

Choices brought within memory, and made faster, one or two layers at a time; the simulation decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass

import numpy as np

from ...schema.arrays import FloatArray, IntArray
from .bound import Reserve
from .instance import OPTIONS, OffloadChoice, OffloadInstance
from .simulation import SimulatedStep, broken_constraints, simulate_within

LOCATIONS = ("device", "host", "streamed", "parameters", "host, stored", "streamed, stored")
"""Where the states of a layer are; with `parameters` these are on the host too."""


COMPUTE_S, DOWN, UP, DEVICE_UPDATE_S, HOST_UPDATE_S, UPDATE_DOWN, UPDATE_UP = range(7)


DEVICE, DEVICE_AT_END, DEVICE_IN_UPDATE, HOST, STORED = range(7, 12)


BYTES = slice(7, 12)
"""What adds up over layers: seconds and bytes of a micro-batch, of the update; bytes that are on the device when backward passes
begin and end and in the update, on the host and on storage."""


_SIZE = 12


HIDDEN = 0.02
"""What a second of a resource counts that is not the longest."""


def locations_of(choice: OffloadChoice) -> IntArray:
    """The place of each layer [L], into PLACES."""
    stored = 3 * choice.storage
    place = np.where(choice.host_optimizer, 1 + stored, np.where(choice.streamed_optimizer, 2 + stored, 0))
    return np.where(choice.parameters, 3, place)


def change_layer(choice: OffloadChoice, idx: int, option: int, place: int) -> OffloadChoice:
    """The choice with another option and place of one layer."""
    options, places = choice.option.copy(), locations_of(choice)
    options[idx], places[idx] = option, place
    return choice_from_locations(options, places)


def choice_from_locations(option: IntArray, place: IntArray) -> OffloadChoice:
    """A choice by option and place of each layer [L]."""
    return OffloadChoice(
        option=option,
        host_optimizer=(place == 1) | (place == 4),
        streamed_optimizer=(place == 2) | (place == 5),
        parameters=place == 3,
        storage=place >= 4,
    )


@dataclass(frozen=True)
class LayerChanges:
    """One change a row [N]: layer, its new option and place, what sums [N, 12] change by, and the estimated seconds."""

    layer: IntArray
    option: IntArray
    place: IntArray
    sums: FloatArray
    seconds: FloatArray


class ResourceSums:
    """Sums over layers of one problem's choices, and their simulations."""

    def __init__(self, instance: OffloadInstance) -> None:
        self.instance = instance
        self._updates: dict[bytes, float] = {}
        self._known: dict[tuple[bytes, bytes, int], SimulatedStep] = {}
        self.of_option, self.of_place = _sums_by_option(instance), _sums_by_location(instance)
        self.may_option, self.may_place = instance.allowed, _allowed_locations(instance)

    def simulate(self, choice: OffloadChoice, *, prefetch: int = 1) -> SimulatedStep:
        """The same as of offload_simulation.py; what was already simulated is remembered."""
        simulated = self.simulate_within(choice, np.inf, prefetch=prefetch)
        assert simulated is not None
        return simulated

    def simulate_within(self, choice: OffloadChoice, within_s: float, *, prefetch: int = 1) -> SimulatedStep | None:
        """The same; None if a step takes longer."""
        key = (choice.option.tobytes(), locations_of(choice).tobytes(), prefetch)
        if key not in self._known:
            simulated = simulate_within(self.instance, choice, within_s, self._updates, prefetch=prefetch)
            if simulated is None:
                return None
            self._known[key] = simulated
        return self._known[key] if self._known[key].step_s <= within_s else None

    def total(self, choice: OffloadChoice) -> FloatArray:
        """[12]."""
        rows = np.arange(self.instance.num_layers)
        parts = self.of_option[choice.option, rows] + self.of_place[locations_of(choice), rows]
        return np.asarray(parts.sum(axis=0))

    def seconds(self, sums: FloatArray) -> FloatArray:
        """Estimated seconds of sums [..., 12]."""
        i, links = self.instance, self.instance.links
        down, up = sums[..., DOWN] / links.to_host_bytes_per_s, sums[..., UP] / links.to_device_bytes_per_s
        gone = sums[..., UPDATE_DOWN] / links.to_host_bytes_per_s
        back = sums[..., UPDATE_UP] / links.to_device_bytes_per_s
        each = 1 / links.read_bytes_per_s + 1 / links.write_bytes_per_s if i.storage_cap_bytes > 0 else 0.0
        passes = np.stack([i.compute_s + sums[..., COMPUTE_S], links.seconds(down, up)])
        update = np.stack(
            [
                sums[..., DEVICE_UPDATE_S],
                sums[..., HOST_UPDATE_S],
                links.seconds(gone, back),
                sums[..., STORED] * each,
            ]
        )
        m = i.num_microbatches
        longest = m * passes.max(axis=0) + update.max(axis=0)
        return np.asarray(longest + HIDDEN * (m * passes.sum(axis=0) + update.sum(axis=0)))

    def changes(self, choice: OffloadChoice, members: IntArray) -> LayerChanges:
        """Every other option and place of the layers ``members`` [n], one of the two at a time."""
        place, option = locations_of(choice), choice.option
        base = self.total(choice)
        k, at = np.nonzero(self.may_option[:, members] & (np.arange(len(OPTIONS))[:, None] != option[members]))
        q, of = np.nonzero(self.may_place[:, members] & (np.arange(len(LOCATIONS))[:, None] != place[members]))
        first, second = members[at], members[of]
        by_option = self.of_option[k, first] - self.of_option[option[first], first]
        by_place = self.of_place[q, second] - self.of_place[place[second], second]
        sums = np.concatenate([by_option, by_place])
        in_use = np.concatenate([self._in_use(choice, first, k), np.zeros(len(second))])
        sums[:, [DEVICE, DEVICE_AT_END, DEVICE_IN_UPDATE]] += in_use[:, None]
        sums[:, DEVICE_IN_UPDATE] += np.concatenate([np.zeros(len(first)), self._buffers(choice, second, q)])
        return LayerChanges(
            layer=np.concatenate([first, second]),
            option=np.concatenate([k, option[second]]),
            place=np.concatenate([place[first], q]),
            sums=sums,
            seconds=self.seconds(base + sums) - self.seconds(base),
        )

    def _in_use(self, choice: OffloadChoice, layer: IntArray, option: IntArray) -> FloatArray:
        """What the largest working set changes by when a layer takes another option."""
        return _change_of_largest(
            choice.of(self.instance.working_bytes), layer, self.instance.working_bytes[option, layer]
        )

    def _buffers(self, choice: OffloadChoice, layer: IntArray, place: IntArray) -> FloatArray:
        """The same of the two buffers through which states are streamed."""
        states = self.instance.state_bytes
        streamed = (place == 2) | (place == 5)
        return 2 * _change_of_largest(
            np.where(choice.streamed_optimizer, states, 0.0), layer, np.where(streamed, states[layer], 0.0)
        )


def _change_of_largest(values: FloatArray, layer: IntArray, new: FloatArray) -> FloatArray:
    """What the largest of ``values`` [L] changes by when that of ``layer`` [N] becomes ``new`` [N]."""
    order = np.argsort(values)
    most = values[order[-1]]
    others = np.where(layer == order[-1], values[order[-2]] if len(values) > 1 else 0.0, most)
    return np.asarray(np.maximum(others, new) - most)


def _sums_by_option(i: OffloadInstance) -> FloatArray:
    """[K, L, 12]."""
    sums = np.zeros((len(OPTIONS), i.num_layers, _SIZE))
    sums[..., COMPUTE_S] = i.repeated_s
    sums[..., DOWN] = sums[..., UP] = sums[..., HOST] = i.moved_bytes
    sums[..., DEVICE] = i.kept_bytes
    return sums


def _sums_by_location(i: OffloadInstance) -> FloatArray:
    """[6, L, 12]."""
    sums = np.zeros((len(LOCATIONS), i.num_layers, _SIZE))
    master, gradient, states = i.parameter_bytes, i.gradient_bytes, i.state_bytes
    there, at_end = gradient * i.gradients_accumulate, master + i.copy_bytes - i.freed_bytes + gradient
    sums[..., DEVICE_UPDATE_S], sums[..., DEVICE] = i.device_update_s, master + i.copy_bytes + there
    sums[..., DEVICE_AT_END], sums[..., DEVICE_IN_UPDATE] = at_end, master + gradient
    for bytes_ in (DEVICE, DEVICE_AT_END, DEVICE_IN_UPDATE):
        sums[0, :, bytes_] += states
    for place in (1, 4):
        sums[place, :, DEVICE_UPDATE_S], sums[place, :, HOST_UPDATE_S] = 0.0, i.host_update_s
        sums[place, :, UPDATE_DOWN], sums[place, :, UPDATE_UP] = gradient, master
        sums[place, :, HOST] = master + gradient + states
    for place in (2, 5):
        sums[place, :, UPDATE_DOWN] = sums[place, :, UPDATE_UP] = sums[place, :, HOST] = states
    sums[3] = 0.0
    sums[3, :, DOWN], sums[3, :, UP], sums[3, :, HOST] = gradient, 2 * master, master + gradient + states
    sums[3, :, HOST_UPDATE_S] = i.host_update_s
    sums[4:, :, STORED] = states
    sums[4:, :, HOST] -= states
    return sums


def _allowed_locations(i: OffloadInstance) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """[6, L]."""
    has, stored = i.state_bytes > 0, i.storage_cap_bytes > 0
    host, streamed = has & i.may.host_optimizer, has & i.may.streamed_optimizer
    parameters = i.streamable & i.may.parameters
    return np.stack([np.ones(i.num_layers, dtype=bool), host, streamed, parameters, host & stored, streamed & stored])


MAX_PREFETCH = 6
"""Blocks ahead that are tried."""


MAX_EXTRA_PREFETCH = 2
"""Blocks more that are tried although it takes some recompute to make room for them."""


MAX_REPAIRS = 40


MAX_PAIRED = 48
"""Changes of single layers that are tried in pairs."""


@dataclass(frozen=True)
class SimulatedChoice:
    """A choice, its simulation, and the window of blocks ahead that it has."""

    choice: OffloadChoice
    simulated: SimulatedStep
    prefetch: int

    @property
    def step_s(self) -> float:
        """Seconds of the simulated step."""
        return self.simulated.step_s


def change_until_it_fits(sums: ResourceSums, choice: OffloadChoice, *, prefetch: int = 1) -> SimulatedChoice | None:
    """The choice within memory: layers change, the least seconds a byte first; None if they cannot."""
    instance = sums.instance
    for _ in range(MAX_REPAIRS):
        simulated = sums.simulate(choice, prefetch=prefetch)
        if not _excess_by_location(instance, simulated).any():
            break
        changed = _free_memory(sums, choice, simulated)
        if changed is None:
            return None
        choice = changed
    return (
        None
        if broken_constraints(instance, choice, simulated)
        else with_widest_window(sums, SimulatedChoice(choice, simulated, prefetch))
    )


def widen_window(sums: ResourceSums, best: SimulatedChoice) -> SimulatedChoice:
    """With more blocks ahead, where layers that change to make room for them cost less than that saves."""
    while best.prefetch < MAX_PREFETCH:
        found = change_until_it_fits(sums, best.choice, prefetch=best.prefetch + 1)
        if found is None or found.step_s >= best.step_s * (1 - 1e-7):
            break
        best = found
    return best


def make_room_for_window(
    sums: ResourceSums, best: SimulatedChoice, *, good_enough_s: float, tries: int
) -> SimulatedChoice:
    """The same where the room must be looked for: with one or two blocks more ahead, and then improved."""
    fastest = best
    for prefetch in range(best.prefetch + 1, best.prefetch + 1 + MAX_EXTRA_PREFETCH):
        found = change_until_it_fits(sums, best.choice, prefetch=prefetch)
        if found is not None and found.prefetch == prefetch:
            found = improve_choice(sums, found, good_enough_s=good_enough_s, tries=tries)
            fastest = min(fastest, found, key=lambda each: each.step_s)
    return fastest


def excess_bytes(instance: OffloadInstance, simulated: SimulatedStep) -> float:
    """Bytes beyond the room of all places."""
    return float(_excess_by_location(instance, simulated).sum())


def reserve_excess(instance: OffloadInstance, by: Reserve, simulated: SimulatedStep) -> Reserve | None:
    """More to leave free where a simulation is beyond its room; None where it is not."""
    beyond = _excess_by_location(instance, simulated)
    return Reserve(*(np.array(astuple(by)) + beyond).tolist()) if beyond.any() else None


def simulate_unchanged(sums: ResourceSums, choice: OffloadChoice, faster_than_s: float) -> SimulatedChoice | None:
    """The choice if it is within memory and faster, with the best window."""
    simulated = sums.simulate(choice)
    if broken_constraints(sums.instance, choice, simulated):
        return None
    found = with_widest_window(sums, SimulatedChoice(choice, simulated, 1))
    return found if found.step_s < faster_than_s else None


def with_widest_window(sums: ResourceSums, found: SimulatedChoice) -> SimulatedChoice:
    """The same with as many blocks ahead as are worth it and fit."""
    instance = sums.instance
    if not (found.choice.of(instance.moved_bytes).any() or found.choice.parameters.any()):
        return found
    for prefetch in range(found.prefetch + 1, MAX_PREFETCH + 1):
        ahead = sums.simulate_within(found.choice, found.step_s * (1 - 1e-9), prefetch=prefetch)
        if ahead is None or ahead.peak_bytes > instance.cap_bytes:
            break
        found = SimulatedChoice(found.choice, ahead, prefetch)
    return found


def _free_bytes(i: OffloadInstance, simulated: SimulatedStep) -> FloatArray:
    """Bytes that are free [5], in the order of offload_changes.BYTES; below zero where there are too few."""
    on_device = np.array([simulated.forward_bytes, simulated.backward_bytes, simulated.update_bytes])
    elsewhere = [i.host_cap_bytes - simulated.host_bytes, i.storage_cap_bytes - simulated.storage_bytes]
    return np.concatenate([i.cap_bytes - on_device, elsewhere])


def _excess_by_location(i: OffloadInstance, simulated: SimulatedStep) -> FloatArray:
    """Bytes too many in the same places."""
    return np.maximum(-_free_bytes(i, simulated), 0.0)


def _free_memory(sums: ResourceSums, choice: OffloadChoice, simulated: SimulatedStep) -> OffloadChoice | None:
    """Layers changed until no place is beyond its room by the sums, the least seconds a byte first; None if they cannot be."""
    room, changed = _free_bytes(sums.instance, simulated), False
    for _ in range(sums.instance.num_layers):
        if (room >= 0).all():
            return choice
        offers = sums.changes(choice, _sample_layers(sums.instance, choice, 1))
        bytes_ = offers.sums[:, BYTES]
        full = room < 0
        saved = (np.minimum(np.maximum(-bytes_, 0.0), np.where(full, -room, 0.0)) * full).sum(axis=1)
        saved -= (np.maximum(bytes_, 0.0) * full).sum(axis=1)
        fits = ((bytes_ <= np.maximum(room, 0.0)) | full).all(axis=1) & (saved > 0)
        if not fits.any():
            return choice if changed else None
        price = np.where(fits, np.maximum(offers.seconds, 1e-12) / np.maximum(saved, 1.0), np.inf)
        best = int(np.argmin(price))
        choice = change_layer(choice, int(offers.layer[best]), int(offers.option[best]), int(offers.place[best]))
        room, changed = room - bytes_[best], True
    return choice


def improve_choice(sums: ResourceSums, best: SimulatedChoice, *, good_enough_s: float, tries: int) -> SimulatedChoice:
    """Changes of one or two layers, those that the sums promise most of first, as long as the simulation is faster."""
    instance, going, known = sums.instance, True, set[bytes]()
    while going and best.step_s > good_enough_s:
        going = False
        for changed in _promising_changes(sums, best):
            key = changed.option.tobytes() + locations_of(changed).tobytes()
            if key in known:
                continue
            if tries <= 0:
                return best
            known.add(key)
            tries -= 1
            simulated = sums.simulate_within(changed, best.step_s * (1 - 1e-7), prefetch=best.prefetch)
            if simulated is not None and not broken_constraints(instance, changed, simulated):
                best, going = with_widest_window(sums, SimulatedChoice(changed, simulated, best.prefetch)), True
                break
    return best


def _promising_changes(sums: ResourceSums, best: SimulatedChoice) -> Iterator[OffloadChoice]:
    """Choices that are faster by the sums and have room, the fastest first: of one change, then of two."""
    room = np.maximum(_free_bytes(sums.instance, best.simulated), 0.0)
    offers = sums.changes(best.choice, _sample_layers(sums.instance, best.choice, 3))
    bytes_ = offers.sums[:, BYTES]
    good = np.flatnonzero((offers.seconds < -1e-9) & (bytes_ <= room).all(axis=1))
    for row in good[np.argsort(offers.seconds[good])]:
        yield _apply_change(best.choice, offers, int(row))
    chosen = _changes_to_pair(offers, bytes_)
    one, two = np.triu_indices(len(chosen), 1)
    one, two = chosen[one], chosen[two]
    apart = offers.layer[one] != offers.layer[two]
    one, two = one[apart], two[apart]
    base = sums.total(best.choice)
    seconds = sums.seconds(base + offers.sums[one] + offers.sums[two]) - sums.seconds(base)
    good = np.flatnonzero((seconds < -1e-9) & (bytes_[one] + bytes_[two] <= room).all(axis=1))
    for pair in good[np.argsort(seconds[good])]:
        yield _apply_change(_apply_change(best.choice, offers, int(one[pair])), offers, int(two[pair]))


def _changes_to_pair(offers: LayerChanges, bytes_: FloatArray) -> IntArray:
    """The changes that gain most seconds, and those that save most bytes of the device for each second."""
    half = MAX_PAIRED // 2
    faster = np.argsort(offers.seconds)[:half]
    saved = -bytes_[:, :3].min(axis=1)
    price = np.where(saved > 0, np.maximum(offers.seconds, 1e-12) / np.maximum(saved, 1.0), np.inf)
    return np.unique(np.concatenate([faster, np.argsort(price)[:half]]))


def _apply_change(choice: OffloadChoice, offers: LayerChanges, row: int) -> OffloadChoice:
    return change_layer(choice, int(offers.layer[row]), int(offers.option[row]), int(offers.place[row]))


def _sample_layers(i: OffloadInstance, choice: OffloadChoice, most: int) -> IntArray:
    """Layers of which each kind with the same option and place has at most so many: the middle one, the last one, the first one."""
    keys = (i.kind * 64 + choice.option * 8 + locations_of(choice)).astype(np.int64)
    order = np.argsort(keys, kind="stable")
    first = np.flatnonzero(np.diff(keys[order], prepend=-1))
    last = np.append(first[1:], len(keys)) - 1
    middle = (first + last + 1) // 2
    return np.unique(order[np.concatenate([middle, last, first][:most])])
