"""Uniform policies: one option for all blocks, and the states or the parameters of a share of the layers in one place."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .offload_instance import OPTIONS, Choice, Instance
from .offload_simulation import host_bytes, update_bytes

PLACES = ("device", "host", "streamed", "parameters")
"""Where states are: on the device, updated by the host, streamed to the device, with the parameters on the host."""

SHARES = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125)
"""The first eighths of the layers, all of them first."""

_STATES = {"host": "host_optimizer", "streamed": "streamed_optimizer", "parameters": "parameters"}


def policy(instance: Instance, option: int, place: str, share: float = 1.0) -> Choice:
    """The same for all blocks, and the states of the first ``share`` of the layers in one place."""
    none = np.zeros(instance.num_layers, dtype=bool)
    masks = dict.fromkeys((*_STATES.values(), "storage"), none)
    if place != "device":
        masks[_STATES[place]] = np.arange(instance.num_layers) < round(share * instance.num_layers)
    kept = int(np.argmax(instance.allowed.sum(axis=1) == instance.num_layers))
    return Choice(option=np.where(instance.allowed[option], option, kept), **masks)


def policies(instance: Instance, shares: tuple[float, ...] = SHARES) -> Iterator[Choice]:
    """All of them that (C1) allows, the whole ones before those of a share."""
    may = {"device": True, "host": instance.may.host_optimizer, "streamed": instance.may.streamed_optimizer}
    may["parameters"] = instance.may.parameters and bool(instance.streamable.all())
    for share in shares:
        for place in PLACES:
            for option in range(len(OPTIONS)):
                if may[place] and instance.allowed[option].any() and (place != "device" or share == 1.0):
                    yield policy(instance, option, place, share)


def least_s(i: Instance, choice: Choice) -> float:
    """Seconds that a choice takes even if every copy is hidden; infinite if it cannot fit."""
    away = choice.host_optimizer | choice.parameters
    streamed, master, gradient = i.state_bytes[choice.streamed_optimizer], i.parameter_bytes, i.gradient_bytes
    links, of_host = i.links, choice.host_optimizer
    down = (gradient[of_host].sum() + streamed.sum()) / links.to_host_bytes_per_s
    up = (master[of_host].sum() + streamed.sum()) / links.to_device_bytes_per_s
    update = max(i.device_update_s[~away].sum(), i.host_update_s[away].sum(), links.seconds(down, up))
    m, moved, p = i.num_microbatches, choice.of(i.moved_bytes).sum(), choice.parameters
    compute = i.compute_s + choice.of(i.repeated_s).sum()
    to_host = (moved + gradient[p].sum()) / links.to_host_bytes_per_s
    to_device = (moved + 2 * master[p].sum()) / links.to_device_bytes_per_s
    resident = i.resident_bytes - i.state_bytes[choice.streamed_optimizer | choice.host_optimizer].sum()
    resident -= (master + i.copy_bytes + i.state_bytes + gradient * i.gradients_accumulate)[p].sum()
    working = choice.of(i.working_bytes).max(initial=0.0)
    at_turn = resident + choice.of(i.kept_bytes).sum() + working + i.fixed_bytes + i.turn_bytes
    if max(at_turn, update_bytes(i, choice)) > i.cap_bytes or host_bytes(i, choice) > i.host_cap_bytes:
        return np.inf
    return float(m * max(compute, to_host, to_device) + update)
