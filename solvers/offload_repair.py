"""Choices brought within memory, and made faster, one or two layers at a time; the simulation decides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass

import numpy as np

from .linear_program import FloatArray, IntArray
from .offload_changes import BYTES, Changes, Sums, places_of, with_layer
from .offload_count import Reserve
from .offload_instance import Choice, Instance
from .offload_simulation import Simulated, check

MOST_PREFETCH = 6
"""Blocks ahead that are tried."""

MOST_WIDER = 2
"""Blocks more that are tried although it takes some recompute to make room for them."""

MOST_REPAIRS = 40

MOST_PAIRED = 48
"""Changes of single layers that are tried in pairs."""


@dataclass(frozen=True)
class Found:
    """A choice, its simulation, and the window of blocks ahead that it has."""

    choice: Choice
    simulated: Simulated
    prefetch: int

    @property
    def step_s(self) -> float:
        """Seconds of the simulated step."""
        return self.simulated.step_s


def fitting(sums: Sums, choice: Choice, *, prefetch: int = 1) -> Found | None:
    """The choice within memory: layers change, the least seconds a byte first; None if they cannot."""
    instance = sums.instance
    for _ in range(MOST_REPAIRS):
        simulated = sums.simulate(choice, prefetch=prefetch)
        if not _beyond(instance, simulated).any():
            break
        changed = _relieved(sums, choice, simulated)
        if changed is None:
            return None
        choice = changed
    return None if check(instance, choice, simulated) else with_window(sums, Found(choice, simulated, prefetch))


def wider(sums: Sums, best: Found) -> Found:
    """With more blocks ahead, where layers that change to make room for them cost less than that saves."""
    while best.prefetch < MOST_PREFETCH:
        found = fitting(sums, best.choice, prefetch=best.prefetch + 1)
        if found is None or found.step_s >= best.step_s * (1 - 1e-7):
            break
        best = found
    return best


def roomier(sums: Sums, best: Found, *, good_enough_s: float, tries: int) -> Found:
    """The same where the room must be looked for: with one or two blocks more ahead, and then improved."""
    fastest = best
    for prefetch in range(best.prefetch + 1, best.prefetch + 1 + MOST_WIDER):
        found = fitting(sums, best.choice, prefetch=prefetch)
        if found is not None and found.prefetch == prefetch:
            found = improved(sums, found, good_enough_s=good_enough_s, tries=tries)
            fastest = min(fastest, found, key=lambda each: each.step_s)
    return fastest


def beyond_bytes(instance: Instance, simulated: Simulated) -> float:
    """Bytes beyond the room of all places."""
    return float(_beyond(instance, simulated).sum())


def tighter(instance: Instance, by: Reserve, simulated: Simulated) -> Reserve | None:
    """More to leave free where a simulation is beyond its room; None where it is not."""
    beyond = _beyond(instance, simulated)
    return Reserve(*(np.array(astuple(by)) + beyond).tolist()) if beyond.any() else None


def as_it_is(sums: Sums, choice: Choice, faster_than_s: float) -> Found | None:
    """The choice if it is within memory and faster, with the best window."""
    simulated = sums.simulate(choice)
    if check(sums.instance, choice, simulated):
        return None
    found = with_window(sums, Found(choice, simulated, 1))
    return found if found.step_s < faster_than_s else None


def with_window(sums: Sums, found: Found) -> Found:
    """The same with as many blocks ahead as are worth it and fit."""
    instance = sums.instance
    if not (found.choice.of(instance.moved_bytes).any() or found.choice.parameters.any()):
        return found
    for prefetch in range(found.prefetch + 1, MOST_PREFETCH + 1):
        ahead = sums.simulate_within(found.choice, found.step_s * (1 - 1e-9), prefetch=prefetch)
        if ahead is None or ahead.peak_bytes > instance.cap_bytes:
            break
        found = Found(found.choice, ahead, prefetch)
    return found


def _room(i: Instance, simulated: Simulated) -> FloatArray:
    """Bytes that are free [5], in the order of offload_changes.BYTES; below zero where there are too few."""
    on_device = np.array([simulated.forward_bytes, simulated.backward_bytes, simulated.update_bytes])
    elsewhere = [i.host_cap_bytes - simulated.host_bytes, i.storage_cap_bytes - simulated.storage_bytes]
    return np.concatenate([i.cap_bytes - on_device, elsewhere])


def _beyond(i: Instance, simulated: Simulated) -> FloatArray:
    """Bytes too many in the same places."""
    return np.maximum(-_room(i, simulated), 0.0)


def _relieved(sums: Sums, choice: Choice, simulated: Simulated) -> Choice | None:
    """Layers changed until no place is beyond its room by the sums, the least seconds a byte first; None if they cannot be."""
    room, changed = _room(sums.instance, simulated), False
    for _ in range(sums.instance.num_layers):
        if (room >= 0).all():
            return choice
        offers = sums.changes(choice, _members(sums.instance, choice, 1))
        bytes_ = offers.sums[:, BYTES]
        full = room < 0
        saved = (np.minimum(np.maximum(-bytes_, 0.0), np.where(full, -room, 0.0)) * full).sum(axis=1)
        saved -= (np.maximum(bytes_, 0.0) * full).sum(axis=1)
        fits = ((bytes_ <= np.maximum(room, 0.0)) | full).all(axis=1) & (saved > 0)
        if not fits.any():
            return choice if changed else None
        price = np.where(fits, np.maximum(offers.seconds, 1e-12) / np.maximum(saved, 1.0), np.inf)
        best = int(np.argmin(price))
        choice = with_layer(choice, int(offers.layer[best]), int(offers.option[best]), int(offers.place[best]))
        room, changed = room - bytes_[best], True
    return choice


def improved(sums: Sums, best: Found, *, good_enough_s: float, tries: int) -> Found:
    """Changes of one or two layers, those that the sums promise most of first, as long as the simulation is faster."""
    instance, going, known = sums.instance, True, set[bytes]()
    while going and best.step_s > good_enough_s:
        going = False
        for changed in _promising(sums, best):
            key = changed.option.tobytes() + places_of(changed).tobytes()
            if key in known:
                continue
            if tries <= 0:
                return best
            known.add(key)
            tries -= 1
            simulated = sums.simulate_within(changed, best.step_s * (1 - 1e-7), prefetch=best.prefetch)
            if simulated is not None and not check(instance, changed, simulated):
                best, going = with_window(sums, Found(changed, simulated, best.prefetch)), True
                break
    return best


def _promising(sums: Sums, best: Found) -> Iterator[Choice]:
    """Choices that are faster by the sums and have room, the fastest first: of one change, then of two."""
    room = np.maximum(_room(sums.instance, best.simulated), 0.0)
    offers = sums.changes(best.choice, _members(sums.instance, best.choice, 3))
    bytes_ = offers.sums[:, BYTES]
    good = np.flatnonzero((offers.seconds < -1e-9) & (bytes_ <= room).all(axis=1))
    for row in good[np.argsort(offers.seconds[good])]:
        yield _with(best.choice, offers, int(row))
    chosen = _of_pairs(offers, bytes_)
    one, two = np.triu_indices(len(chosen), 1)
    one, two = chosen[one], chosen[two]
    apart = offers.layer[one] != offers.layer[two]
    one, two = one[apart], two[apart]
    base = sums.total(best.choice)
    seconds = sums.seconds(base + offers.sums[one] + offers.sums[two]) - sums.seconds(base)
    good = np.flatnonzero((seconds < -1e-9) & (bytes_[one] + bytes_[two] <= room).all(axis=1))
    for pair in good[np.argsort(seconds[good])]:
        yield _with(_with(best.choice, offers, int(one[pair])), offers, int(two[pair]))


def _of_pairs(offers: Changes, bytes_: FloatArray) -> IntArray:
    """The changes that gain most seconds, and those that save most bytes of the device for each second."""
    half = MOST_PAIRED // 2
    faster = np.argsort(offers.seconds)[:half]
    saved = -bytes_[:, :3].min(axis=1)
    price = np.where(saved > 0, np.maximum(offers.seconds, 1e-12) / np.maximum(saved, 1.0), np.inf)
    return np.unique(np.concatenate([faster, np.argsort(price)[:half]]))


def _with(choice: Choice, offers: Changes, row: int) -> Choice:
    return with_layer(choice, int(offers.layer[row]), int(offers.option[row]), int(offers.place[row]))


def _members(i: Instance, choice: Choice, most: int) -> IntArray:
    """Layers of which each kind with the same option and place has at most so many: the middle one, the last one, the first one."""
    keys = (i.kind * 64 + choice.option * 8 + places_of(choice)).astype(np.int64)
    order = np.argsort(keys, kind="stable")
    first = np.flatnonzero(np.diff(keys[order], prepend=-1))
    last = np.append(first[1:], len(keys)) - 1
    middle = (first + last + 1) // 2
    return np.unique(order[np.concatenate([middle, last, first][:most])])
