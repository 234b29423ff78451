"""Decisions, families of constraints and the form of an answer that the program layer by layer and its count form share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ...schema.units import FloatArray, IntArray
from ..linear_program import LinearProgram, Term
from .instance import OffloadInstance, OffloadMarginalSeconds

SCALE = 1e9
"""Bytes of one unit in the program, so that coefficients are within 1e-3 to 1e6."""

Direction = Literal["to_host", "to_device"]
RateTerm = tuple[range, Sequence[Term], Direction]
"""Rows, and those of their terms that are divided by the rate of a direction."""


@dataclass(frozen=True)
class FluidSchedule:
    """An answer: options [K, L] and parameters [L] as fractions, states in bytes, and what more of each resource would save.

    Attributes:
        bound_s: no schedule is below.
        locations: [4, L] layers whose states the host updates, are streamed, are on storage from either; fractions, if known.
        working_bytes: in use at once.
    """

    objective_s: float
    bound_s: float
    options: FloatArray
    parameters: FloatArray
    host_bytes: float
    streamed_bytes: float
    storage_bytes: float
    marginal: OffloadMarginalSeconds
    locations: FloatArray | None = None
    working_bytes: float = 0.0


class Decisions(NamedTuple):
    """Variables: options z [K, L], parameters p [L], and bytes of states (host x, streamed s, what of each is on storage) [4].

    Of the count form (bound.py) they are by kinds of layers, L then stands for these.
    """

    options: IntArray
    parameters: IntArray
    states: IntArray


def add_one_location_C1(lp: LinearProgram, i: OffloadInstance, v: Decisions, idxs: IntArray, num_layers: Any) -> None:
    """Add one option and one location for each layer; ``idxs`` [L] are layers, or one of each kind that has ``num_layers``."""
    total = i.total_state_bytes / SCALE
    lp.add_rows("C1", [(z, 1.0) for z in v.options], lower=num_layers, upper=num_layers)
    # The sum of the layers' bytes rounds: without a margin all states off the device could be infeasible.
    terms: list[Term] = [(v.parameters, i.state_bytes[idxs] / SCALE), (v.states[:2], 1.0)]
    lp.add_row("C1", terms, upper=total * (1 + 1e-9) + 1e-12)
    lp.add_rows("C1", [(v.states[2:], 1.0), (v.states[:2], -1.0)], upper=0.0)


def add_links(
    lp: LinearProgram, label: str, length: Any, down: Sequence[Term], up: Sequence[Term], hinder: float
) -> list[RateTerm]:
    """Add seconds of one direction + HINDER seconds of the other <= length (C3), for each direction that has copies."""
    rate_terms: list[RateTerm] = []
    ways: tuple[tuple[Sequence[Term], Sequence[Term], Direction, Direction], ...] = (
        (down, up, "to_host", "to_device"),
        (up, down, "to_device", "to_host"),
    )
    for copies, others, direction, other_direction in ways:
        if copies:
            hindered: list[Term] = [(idxs, hinder * rate) for idxs, rate in others] if hinder > 0 else []
            rows = lp.add_rows(label, [*copies, *hindered, (length, -1.0)], upper=0.0)
            rate_terms += [(rows, copies, direction), (rows, hindered, other_direction)]
    return rate_terms


def host_terms(i: OffloadInstance, v: Decisions, idxs: IntArray) -> list[Term]:
    """Return the bytes on the host but for activations (C7): master parameters, gradients and states, less those on storage."""
    master, gradient = i.bytes_per_state_byte
    away = (i.parameter_bytes + i.gradient_bytes + i.state_bytes)[idxs] / SCALE
    host, streamed = v.states[0], v.states[1]
    return [(host, 1 + master + gradient), (streamed, 1.0), (v.states[2:], -1.0), (v.parameters, away)]


def add_update_C9(lp: LinearProgram, i: OffloadInstance, update: Any, v: Decisions, idxs: IntArray) -> list[RateTerm]:
    """Add t >= the device's update, the host's update, copies of the update as in (C3), reads and writes on storage."""
    total, links, p, (host, streamed) = i.total_state_bytes, i.links, v.parameters, v.states[:2]
    if total == 0:
        return []
    share, unit = i.state_bytes[idxs] / total, SCALE / total
    on_device, on_host = float(i.device_update_s.sum()), float(i.host_update_s.sum())
    lp.add_row("C9", [(update, 1.0), (host, on_device * unit), (p, on_device * share)], lower=on_device)
    lp.add_row("C9", [(update, 1.0), (host, -on_host * unit), (p, -on_host * share)], lower=0.0)
    master, gradient = i.bytes_per_state_byte
    down, up = SCALE / links.to_host_bytes_per_s, SCALE / links.to_device_bytes_per_s
    going: list[Term] = [(host, gradient * down), (streamed, down)]
    coming: list[Term] = [(host, master * up), (streamed, up)]
    rate_terms = add_links(lp, "C9", update, going, coming, links.hinder)
    if i.storage_cap_bytes > 0:
        both_ways = SCALE / links.read_bytes_per_s + SCALE / links.write_bytes_per_s
        lp.add_row("C9", [(v.states[2:], both_ways), (update, -1.0)], upper=0.0)
    return rate_terms
