"""Changes of single layers and what they come to in sums over layers: which of them are worth a simulation.

The seconds of a choice as the count form sees it: the longest of compute and of each direction of the link in a micro-batch, and
of all that the update does side by side, plus a small part of everything, since less of what is hidden is easier to hide.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .linear_program import FloatArray, IntArray
from .offload_instance import OPTIONS, Choice, Instance
from .offload_simulation import Simulated, simulate_within

PLACES = ("device", "host", "streamed", "parameters", "host, stored", "streamed, stored")
"""Where the states of a layer are; with `parameters` these are on the host too."""

COMPUTE_S, DOWN, UP, DEVICE_UPDATE_S, HOST_UPDATE_S, UPDATE_DOWN, UPDATE_UP = range(7)
DEVICE, DEVICE_AT_END, DEVICE_IN_UPDATE, HOST, STORED = range(7, 12)
BYTES = slice(7, 12)
"""What adds up over layers: seconds and bytes of a micro-batch, of the update; bytes that are on the device when backward passes
begin and end and in the update, on the host and on storage."""

_SIZE = 12

HIDDEN = 0.02
"""What a second of a resource counts that is not the longest."""


def places_of(choice: Choice) -> IntArray:
    """The place of each layer [L], into PLACES."""
    stored = 3 * choice.storage
    place = np.where(choice.host_optimizer, 1 + stored, np.where(choice.streamed_optimizer, 2 + stored, 0))
    return np.where(choice.parameters, 3, place)


def with_layer(choice: Choice, idx: int, option: int, place: int) -> Choice:
    """The choice with another option and place of one layer."""
    options, places = choice.option.copy(), places_of(choice)
    options[idx], places[idx] = option, place
    return choice_of(options, places)


def choice_of(option: IntArray, place: IntArray) -> Choice:
    """A choice by option and place of each layer [L]."""
    return Choice(
        option=option,
        host_optimizer=(place == 1) | (place == 4),
        streamed_optimizer=(place == 2) | (place == 5),
        parameters=place == 3,
        storage=place >= 4,
    )


@dataclass(frozen=True)
class Changes:
    """One change a row [N]: layer, its new option and place, what sums [N, 12] change by, and the estimated seconds."""

    layer: IntArray
    option: IntArray
    place: IntArray
    sums: FloatArray
    seconds: FloatArray


class Sums:
    """Sums over layers of one problem's choices, and their simulations."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self._updates: dict[bytes, float] = {}
        self._known: dict[tuple[bytes, bytes, int], Simulated] = {}
        self.of_option, self.of_place = _of_options(instance), _of_places(instance)
        self.may_option, self.may_place = instance.allowed, _allowed_places(instance)

    def simulate(self, choice: Choice, *, prefetch: int = 1) -> Simulated:
        """The same as of offload_simulation.py; what was already simulated is remembered."""
        simulated = self.simulate_within(choice, np.inf, prefetch=prefetch)
        assert simulated is not None
        return simulated

    def simulate_within(self, choice: Choice, within_s: float, *, prefetch: int = 1) -> Simulated | None:
        """The same; None if a step takes longer."""
        key = (choice.option.tobytes(), places_of(choice).tobytes(), prefetch)
        if key not in self._known:
            simulated = simulate_within(self.instance, choice, within_s, self._updates, prefetch=prefetch)
            if simulated is None:
                return None
            self._known[key] = simulated
        return self._known[key] if self._known[key].step_s <= within_s else None

    def total(self, choice: Choice) -> FloatArray:
        """[12]."""
        rows = np.arange(self.instance.num_layers)
        parts = self.of_option[choice.option, rows] + self.of_place[places_of(choice), rows]
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

    def changes(self, choice: Choice, members: IntArray) -> Changes:
        """Every other option and place of the layers ``members`` [n], one of the two at a time."""
        place, option = places_of(choice), choice.option
        base = self.total(choice)
        k, at = np.nonzero(self.may_option[:, members] & (np.arange(len(OPTIONS))[:, None] != option[members]))
        q, of = np.nonzero(self.may_place[:, members] & (np.arange(len(PLACES))[:, None] != place[members]))
        first, second = members[at], members[of]
        by_option = self.of_option[k, first] - self.of_option[option[first], first]
        by_place = self.of_place[q, second] - self.of_place[place[second], second]
        sums = np.concatenate([by_option, by_place])
        in_use = np.concatenate([self._in_use(choice, first, k), np.zeros(len(second))])
        sums[:, [DEVICE, DEVICE_AT_END, DEVICE_IN_UPDATE]] += in_use[:, None]
        sums[:, DEVICE_IN_UPDATE] += np.concatenate([np.zeros(len(first)), self._buffers(choice, second, q)])
        return Changes(
            layer=np.concatenate([first, second]),
            option=np.concatenate([k, option[second]]),
            place=np.concatenate([place[first], q]),
            sums=sums,
            seconds=self.seconds(base + sums) - self.seconds(base),
        )

    def _in_use(self, choice: Choice, layer: IntArray, option: IntArray) -> FloatArray:
        """What the largest working set changes by when a layer takes another option."""
        return _most_after(choice.of(self.instance.working_bytes), layer, self.instance.working_bytes[option, layer])

    def _buffers(self, choice: Choice, layer: IntArray, place: IntArray) -> FloatArray:
        """The same of the two buffers through which states are streamed."""
        states = self.instance.state_bytes
        streamed = (place == 2) | (place == 5)
        return 2 * _most_after(
            np.where(choice.streamed_optimizer, states, 0.0), layer, np.where(streamed, states[layer], 0.0)
        )


def _most_after(values: FloatArray, layer: IntArray, new: FloatArray) -> FloatArray:
    """What the largest of ``values`` [L] changes by when that of ``layer`` [N] becomes ``new`` [N]."""
    order = np.argsort(values)
    most = values[order[-1]]
    others = np.where(layer == order[-1], values[order[-2]] if len(values) > 1 else 0.0, most)
    return np.asarray(np.maximum(others, new) - most)


def _of_options(i: Instance) -> FloatArray:
    """[K, L, 12]."""
    sums = np.zeros((len(OPTIONS), i.num_layers, _SIZE))
    sums[..., COMPUTE_S] = i.repeated_s
    sums[..., DOWN] = sums[..., UP] = sums[..., HOST] = i.moved_bytes
    sums[..., DEVICE] = i.kept_bytes
    return sums


def _of_places(i: Instance) -> FloatArray:
    """[6, L, 12]."""
    sums = np.zeros((len(PLACES), i.num_layers, _SIZE))
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


def _allowed_places(i: Instance) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """[6, L]."""
    has, stored = i.state_bytes > 0, i.storage_cap_bytes > 0
    host, streamed = has & i.may.host_optimizer, has & i.may.streamed_optimizer
    parameters = i.streamable & i.may.parameters
    return np.stack([np.ones(i.num_layers, dtype=bool), host, streamed, parameters, host & stored, streamed & stored])
