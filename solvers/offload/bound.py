"""The count form: the linear program of offload_instance.py with layers of a kind and all slots of a pass taken together.

Every row is a sum of rows of the whole program or weaker than one of them, so its optimum is a bound on every schedule; it has some
twenty variables and takes milliseconds, which the search over layouts needs. With whole layers (`solve_whole`) it is a tighter
bound: the bytes in use of the largest option that any layer has, and of the largest layer whose states are streamed, are then
there or not. Where layers are of many kinds only these are whole, and the numbers of layers are not.

A higher bound, from what every schedule that is faster than a known one must do.

The fluid program takes parts of the options of many layers, and so has less in use at once than any of these layers needs. If even
the count form is not faster than the known schedule where no layer may have w bytes or more in use, then every faster schedule has
a layer with at least w; the fluid program with `working >= w` is a bound on those, and the least of that and of the known schedule
is one on all. The largest such w is found by bisection.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from ...schema.arrays import FloatArray, IntArray
from ..backend import RowSolver
from ..linear_program import LinearProgram, Term
from ..solution import Status
from . import program
from .instance import OPTIONS, OffloadInstance, OffloadMarginalSeconds
from .program import FluidSchedule

SCALE = 1e9


MANY_KINDS = 8
"""Kinds of layers whose numbers are still whole; of more the program takes longer than it gains."""


TOO_MANY_KINDS = 64
"""Kinds of which even what is in use at once takes longer than it gains: a single layer is then little of the whole."""


MAX_LEVELS = 6
"""Sizes of working sets, and of streamed layers, that are told apart."""


MAX_NODES, FEW_NODES = 400, 20


SMALLEST_GAP = 5e-4


@dataclass(frozen=True)
class Reserve:
    """Bytes to leave free: on the device when the backward passes begin, when they end, in the update; of the host; of storage."""

    turn: float = 0.0
    end: float = 0.0
    update: float = 0.0
    host: float = 0.0
    storage: float = 0.0


NO_RESERVE = Reserve()


class CountProgram:
    """The count form of a problem, which can be solved again with more room left free."""

    def __init__(
        self, instance: OffloadInstance, *, whole: bool = False, objective: Literal["seconds", "host_bytes"] = "seconds"
    ) -> None:
        self.whole, self._instance, self._timed = whole, instance, objective == "seconds"
        self._kinds, self._first, counts = np.unique(instance.kind, return_index=True, return_counts=True)
        self._n = counts.astype(np.float64)
        self._places: IntArray | None = None
        self._room: dict[str, tuple[int, float]] = {}

    @cached_property
    def _solver(self) -> RowSolver:
        self._build()
        if self.whole:
            self._places = self._whole_layers()
        many = len(self._kinds) > MANY_KINDS
        return RowSolver(self._lp, rel_gap=SMALLEST_GAP, max_nodes=FEW_NODES if many else MAX_NODES)

    def solve(self, reserve: Reserve = NO_RESERVE) -> tuple[Status, FluidSchedule | None]:
        """The optimum, spread evenly over the layers of each kind, with so much room left free."""
        solver = self._solver
        for place, (row, upper) in self._room.items():
            solver.change_upper(row, upper - getattr(reserve, place) / SCALE)
        status, answer = solver.solve()
        if answer is None:
            return status, None
        of_kind, n = np.searchsorted(self._kinds, self._instance.kind), self._n
        where = answer.values[self._states] * SCALE
        return status, FluidSchedule(
            objective_s=answer.objective,
            bound_s=answer.bound,
            places=None if self._places is None else (answer.values[self._places] / n)[:, of_kind],
            options=(answer.values[self._z] / n)[:, of_kind],
            parameters=(answer.values[self._p] / n)[of_kind],
            host_bytes=float(where[0]),
            streamed_bytes=float(where[1]),
            storage_bytes=float(where[2] + where[3]),
            worth=OffloadMarginalSeconds(),
        )

    def _build(self) -> None:
        """Variables and all rows that fractions of layers have."""
        self._lp = lp = LinearProgram()
        i, first, n, m, timed = self._instance, self._first, self._n, self._instance.num_microbatches, self._timed
        z = lp.add_variables(len(OPTIONS) * len(first), x_max=(i.allowed[:, first] * n).reshape(-1)).reshape(
            -1, len(first)
        )
        p = lp.add_variables(len(first), x_max=(i.streamable & i.may.parameters)[first] * n)
        may = np.array([i.may.host_optimizer, i.may.streamed_optimizer]) * i.total_state_bytes / SCALE
        states = lp.add_variables(4, x_max=np.concatenate([may, may * (i.storage_cap_bytes > 0)]))
        self._z, self._p, self._states = z, p, states
        passes, idle = lp.add_variables(2, cost=m * timed), lp.add_variables(3, cost=m * timed)
        update = lp.add_variables(1, cost=timed)
        u, early, a, c, g = (lp.add_variables(1) for _ in range(5))
        self._working = lp.add_variables(1)
        lp.add_rows("C1", [(z[k], 1.0) for k in range(len(OPTIONS))], lower=n, upper=n)
        total = i.total_state_bytes / SCALE
        lp.add_row("C1", [(p, i.state_bytes[first] / SCALE), (states[:2], 1.0)], upper=total * (1 + 1e-9) + 1e-12)
        lp.add_rows("C1", [(states[2:], 1.0), (states[:2], -1.0)], upper=0.0)
        lp.add_row("copies", [(u, -1.0), *self._of(i.moved_bytes)], lower=0.0, upper=0.0)
        lp.add_row("C4", [(early, 1.0), (u, -1.0)], upper=0.0)
        for copies, bytes_ in ((a, i.parameter_bytes), (c, i.parameter_bytes), (g, i.gradient_bytes)):
            lp.add_row("copies", [(copies, -1.0), (p, bytes_[first] / SCALE)], lower=0.0, upper=0.0)
        again: list[Term] = [(z.reshape(-1), -i.repeated_s[:, first].reshape(-1))]
        _passes(lp, i, again, (passes, idle), (u, early, a, c, g))
        _update(lp, i, update, states, (p, first))
        self._device_memory(u, early)
        self._other_memory(u)

    def _of(self, values: FloatArray) -> list[Term]:
        """Sum over layers of a value by option."""
        return [(self._z.reshape(-1), (values[:, self._first] / SCALE).reshape(-1))]

    def _device_memory(self, u: IntArray, early: IntArray) -> None:
        """(C6) at the turn, when the backward passes end, and in the update."""
        i, lp, z, p, first = self._instance, self._lp, self._z, self._p, self._first
        accumulated = i.gradient_bytes * i.gradients_accumulate
        leaves = (i.parameter_bytes + i.copy_bytes + i.state_bytes + accumulated)[first] / SCALE
        there: list[Term] = [(p, -leaves), (self._states[:2], -1.0), (self._working, 1.0)]
        in_use: list[Term] = [(z[k], -i.working_bytes[k, first] / self._n / SCALE) for k in range(len(OPTIONS))]
        lp.add_rows("working", [(self._working[0], 1.0), *in_use], lower=0.0)
        gradients = i.gradient_bytes * (not i.gradients_accumulate) / SCALE
        room = (i.cap_bytes - i.fixed_bytes) / SCALE - i.resident_bytes / SCALE
        free = room - float(gradients.sum())
        at_turn: list[Term] = [*there, *self._of(i.kept_bytes), (u, 1.0), (early, -1.0)]
        self._buffer = lp.add_variables(1)
        in_update: list[Term] = [*there, (self._buffer, 1.0), (p, i.copy_bytes[first] / SCALE - gradients[first])]
        copies = float(i.copy_bytes.sum())
        self._within("C6", "turn", at_turn, room - i.turn_bytes / SCALE)
        freed = i.freed_bytes / SCALE
        self._within("C6", "end", [*there, (p, freed[first] - gradients[first])], free + float(freed.sum()))
        self._within("C6", "update", in_update, free - (i.update_bytes - copies) / SCALE)

    def _other_memory(self, u: IntArray) -> None:
        """(C7), or what the host must hold, and (C8)."""
        i, lp, states = self._instance, self._lp, self._states
        master, gradient = i.beside_states
        away = (i.parameter_bytes + i.gradient_bytes + i.state_bytes)[self._first] / SCALE
        held: list[Term] = [
            (states[0], 1 + master + gradient), (states[1], 1.0), (states[2:], -1.0), (self._p, away), (u, 1.0),
        ]  # fmt: skip
        if not self._timed:
            lp.add_row("C7", [*held, (lp.add_variables(1, cost=1.0), -1.0)], upper=0.0)
        elif np.isfinite(i.host_cap_bytes):
            self._within("C7", "host", held, i.host_cap_bytes / SCALE)
        if i.storage_cap_bytes > 0:
            self._within("C8", "storage", [(states[2:], 1.0)], i.storage_cap_bytes / SCALE)

    def _within(self, label: str, place: str, terms: list[Term], upper: float) -> None:
        """A row of memory, whose place is one of a `Reserve`."""
        self._room[place] = (self._lp.add_row(label, terms, upper=upper).start, upper)

    def _whole_layers(self) -> IntArray:
        """Layers of each kind whose states the host updates, are streamed, and are on storage from either [4, kinds]; what is in
        use is all there as soon as one layer needs it.
        """
        i, lp, z, p, first, n = self._instance, self._lp, self._z, self._p, self._first, self._n
        kinds, away = len(first), i.state_bytes[first] > 0
        may = np.array([i.may.host_optimizer, i.may.streamed_optimizer])[:, None] * away
        stored = may * (i.storage_cap_bytes > 0)
        places = lp.add_variables(4 * kinds, x_max=(np.concatenate([may, stored]) * n).reshape(-1)).reshape(4, kinds)
        for place, bytes_ in zip(places, self._states, strict=True):
            lp.add_row("C1", [(bytes_, -1.0), (place, i.state_bytes[first] / SCALE)], lower=0.0, upper=0.0)
        lp.add_rows("C1", [(p, 1.0), (places[0], 1.0), (places[1], 1.0)], upper=np.where(away, n, np.inf))
        lp.add_rows("C1", [(places[2:].reshape(-1), 1.0), (places[:2].reshape(-1), -1.0)], upper=0.0)
        uses = np.where(i.allowed[:, first], i.working_bytes[:, first], 0.0)
        _at_once(lp, (z, uses), self._working, n)
        _at_once(lp, (places[1:2], 2 * i.state_bytes[None, first] * may[1:]), self._buffer, n)
        if kinds <= MANY_KINDS:
            lp.integer.extend([*z.reshape(-1).tolist(), *p.tolist(), *places.reshape(-1).tolist()])
        return places


def count_programs(instance: OffloadInstance, *, quickly: bool = False) -> tuple[CountProgram, CountProgram]:
    """For the bound, with whole layers unless there are far too many kinds; for the numbers that roundings start from, with whole
    layers unless there are many. One program where both are the same.
    """
    kinds = len(np.unique(instance.kind))
    bound, whole = CountProgram(instance, whole=kinds <= TOO_MANY_KINDS and not quickly), kinds <= MANY_KINDS
    return bound, bound if bound.whole == whole else CountProgram(instance, whole=whole)


def solve_whole(instance: OffloadInstance) -> tuple[Status, FluidSchedule | None]:
    """With whole layers of each kind."""
    return count_programs(instance)[0].solve()


def lower_bound_s(instance: OffloadInstance) -> float:
    """(O) that no schedule is below; infinite where none fits."""
    status, fluid = CountProgram(instance).solve()
    return fluid.objective_s if fluid is not None else np.inf if status is Status.INFEASIBLE else 0.0


def min_host_bytes(instance: OffloadInstance) -> float:
    """Host memory that every schedule needs, were there enough of it; infinite where none fits on the device even so."""
    status, fluid = CountProgram(instance, objective="host_bytes").solve()
    return fluid.objective_s * SCALE if fluid is not None else np.inf if status is Status.INFEASIBLE else 0.0


def _at_once(lp: LinearProgram, uses: tuple[IntArray, FloatArray], most: IntArray, n: FloatArray) -> None:
    """At least the bytes of every variable [K, kinds] that is not zero, of layers n [kinds], by levels of bytes."""
    variables, bytes_ = uses
    sizes = np.unique(bytes_[bytes_ > 0])
    if not len(sizes):
        return
    floors = sizes[np.unique(np.linspace(0, len(sizes), MAX_LEVELS, endpoint=False).astype(np.int64))]
    any_ = lp.add_variables(len(floors), x_max=1.0)
    lp.integer.extend(any_.tolist())
    lp.add_rows("working", [(most[0], 1.0), (any_, -floors / SCALE)], lower=0.0)
    layers = np.broadcast_to(n, bytes_.shape)[bytes_ > 0]
    level = np.searchsorted(floors, bytes_[bytes_ > 0], side="right") - 1
    lp.add_rows("working", [(variables[bytes_ > 0], 1.0), (any_[level], -layers)], upper=0.0)


def _passes(
    lp: LinearProgram,
    i: OffloadInstance,
    again: list[Term],
    slots: tuple[IntArray, IntArray],
    copies: tuple[IntArray, ...],
) -> None:
    """(C2), (C3) of all forward passes, and of all backward passes."""
    (forward, backward), (start, turn, tail) = slots
    u, early, a, c, g = copies
    links, h = i.links, i.links.hinder
    down, up = SCALE / links.to_host_bytes_per_s, SCALE / links.to_device_bytes_per_s

    def late(rate: float) -> list[Term]:
        """Copies down that are left for the backward passes."""
        return [(u, rate), (early, -rate)]

    # What the passes alone do not hide runs in the idle slots, where it costs no compute.
    lp.add_row("C2", [(forward, 1.0)], lower=float(i.forward_s.sum()))
    lp.add_row("C2", [(backward, 1.0), *again], lower=float(i.backward_s.sum()))
    lost = links.compute_lost_to_host * down, links.compute_lost_to_device * up
    begins: list[Term] = [(forward, 1.0), (start, 1.0), (turn, 1.0), (early, -lost[0]), (a, -lost[1])]
    lp.add_row("C2", begins, lower=float(i.forward_s.sum()))
    ends: list[Term] = [(backward, 1.0), (turn, 1.0), (tail, 1.0)]
    lp.add_row(
        "C2",
        [*ends, *again, (u, -lost[1]), (c, -lost[1]), (g, -lost[0]), *late(-lost[0])],
        lower=float(i.backward_s.sum()),
    )
    # A copy in a slot that has one direction alone does not hinder the other one.
    for slot, gone, come, own_down, own_up in (
        (forward, [(early, 1.0)], [(a, 1.0)], turn, start),
        (backward, [(g, 1.0), *late(1.0)], [(u, 1.0), (c, 1.0)], tail, turn),
    ):
        going, coming = _times(gone, down), _times(come, up)
        lp.add_row("C3", [*going, *_times(coming, h), (slot, -1.0), (own_down, -1.0), (own_up, -h)], upper=0.0)
        lp.add_row("C3", [*coming, *_times(going, h), (slot, -1.0), (own_up, -1.0), (own_down, -h)], upper=0.0)


def _times(terms: list[Term], factor: float) -> list[Term]:
    return [(idxs, factor * values) for idxs, values in terms]


def _update(
    lp: LinearProgram, i: OffloadInstance, update: IntArray, states: IntArray, streamed: tuple[IntArray, IntArray]
) -> None:
    """(C9)."""
    total, links, (p, first) = i.total_state_bytes, i.links, streamed
    if total == 0:
        return
    on_device, on_host, unit = float(i.device_update_s.sum()), float(i.host_update_s.sum()), SCALE / total
    share = i.state_bytes[first] / total
    host, kept = states[:1], states[1:2]
    lp.add_row("C9", [(update, 1.0), (host, on_device * unit), (p, on_device * share)], lower=on_device)
    lp.add_row("C9", [(update, 1.0), (host, -on_host * unit), (p, -on_host * share)], lower=0.0)
    master, gradient = i.beside_states
    down, up = SCALE / links.to_host_bytes_per_s, SCALE / links.to_device_bytes_per_s
    going: list[Term] = [(host, gradient * down), (kept, down)]
    coming: list[Term] = [(host, master * up), (kept, up)]
    lp.add_row("C9", [*going, *_times(coming, links.hinder), (update, -1.0)], upper=0.0)
    lp.add_row("C9", [*coming, *_times(going, links.hinder), (update, -1.0)], upper=0.0)
    if i.storage_cap_bytes > 0:
        each = SCALE / links.read_bytes_per_s + SCALE / links.write_bytes_per_s
        lp.add_row("C9", [(states[2:], each), (update, -1.0)], upper=0.0)


def raise_bound_s(instance: OffloadInstance, fluid: FluidSchedule, known_s: float) -> float:
    """Seconds that no schedule is below, given one that takes ``known_s``; never below the bound of ``fluid``."""
    sizes = np.unique(instance.working_bytes[instance.allowed])
    sizes = sizes[sizes > fluid.working_bytes]
    below, above = -1, len(sizes)  # what is needed at sizes[below] is proved, at sizes[above] it is not
    while above - below > 1:
        middle = (below + above) // 2
        if _bound_without_s(instance, float(sizes[middle])) >= known_s:
            below = middle
        else:
            above = middle
    if below < 0:
        return fluid.bound_s
    _, tighter = program.solve_fluid(instance, least_working_bytes=float(sizes[below]))
    return max(fluid.bound_s, known_s if tighter is None else min(known_s, tighter.bound_s))


def _bound_without_s(instance: OffloadInstance, bytes_: float) -> float:
    """A bound on schedules of which no layer has so many bytes in use."""
    return lower_bound_s(replace(instance, allowed=instance.allowed & (instance.working_bytes < bytes_)))
