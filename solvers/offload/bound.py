"""Bounds on every offload schedule: the count form of the linear program, and one that is raised against a known schedule.

The count form is the program of offload/instance.py with layers of a kind, and all slots of a pass, taken together. Every row is a
sum of rows of the program layer by layer or weaker than one of them, so its optimum is a bound on every schedule; it has some
twenty variables and takes milliseconds, which the search over layouts needs. With integer layers it is a tighter bound: the bytes
in use of the largest option that any layer has, and of the largest layer whose states are streamed, then count in full or not at
all. Where layers are of many kinds only these are integer, and the numbers of layers are not.

`raise_bound_s` works on what every schedule that is faster than a known one must do. The fluid program takes parts of the options
of many layers, and so has less in use at once than any of these layers needs. If even the count form is not faster than the known
schedule where no layer may have w bytes or more in use, then every faster schedule has a layer with at least w; the fluid program
with `working >= w` is a bound on those, and the lower of that and of the known schedule is one on all. The largest such w comes by
bisection.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from ...schema.units import FloatArray, IntArray
from ..backend import RowSolver, Status
from ..linear_program import LinearProgram, Term
from .instance import OPTIONS, OffloadInstance, OffloadMarginalSeconds
from .program import solve_fluid
from .rows import SCALE, Decisions, FluidSchedule, add_one_location_C1, add_update_C9, host_terms

MANY_KINDS = 8
"""Kinds of layers whose numbers are still integer; of more the program takes longer than it gains."""

TOO_MANY_KINDS = 64
"""Kinds of which even what is in use at once takes longer than it gains: a single layer is then little of all."""

MAX_LEVELS = 6
"""Sizes of working sets, and of streamed layers, that the program distinguishes."""

MAX_NODES, FEW_NODES = 400, 20
"""Of HiGHS' branch and bound, with few kinds and with many: its bound holds wherever it is stopped."""

SMALLEST_GAP = 5e-4
"""At which HiGHS stops: a quarter of what ends the search for a schedule (schedule.GOOD_ENOUGH)."""


@dataclass(frozen=True)
class Reserve:
    """Bytes to leave free: on the device when the backward passes begin, when they end, in the update; of the host; of storage."""

    turn: float = 0.0
    end: float = 0.0
    update: float = 0.0
    host: float = 0.0
    storage: float = 0.0


NO_RESERVE = Reserve()


class _PassCopies(NamedTuple):
    """Variables [1]: bytes of all layers in a micro-batch; ``acts_early`` of the activations go down within the forward passes."""

    acts: IntArray
    acts_early: IntArray
    params_fwd: IntArray
    params_bwd: IntArray
    grads: IntArray


class CountProgram:
    """The count form of a problem, which can be solved again with more memory left free."""

    def __init__(
        self,
        instance: OffloadInstance,
        *,
        integer: bool = False,
        objective: Literal["seconds", "host_bytes"] = "seconds",
    ) -> None:
        """Count the layers of each kind; rows are stated when the program is first solved."""
        self.integer, self._instance, self._timed = integer, instance, objective == "seconds"
        self._kinds, self._first, counts = np.unique(instance.kind, return_index=True, return_counts=True)
        self._n = counts.astype(np.float64)
        self._locations: IntArray | None = None
        self._memory_rows: dict[str, tuple[int, float]] = {}

    @cached_property
    def _solver(self) -> RowSolver:
        self._build()
        if self.integer:
            self._locations = self._add_integer_layers()
        many = len(self._kinds) > MANY_KINDS
        return RowSolver(self._lp, rel_gap=SMALLEST_GAP, max_nodes=FEW_NODES if many else MAX_NODES)

    def solve(self, reserve: Reserve = NO_RESERVE) -> tuple[Status, FluidSchedule | None]:
        """Return the optimum with so much left free, spread evenly over the layers of each kind."""
        solver = self._solver
        for location, (row, upper) in self._memory_rows.items():
            solver.change_upper(row, upper - getattr(reserve, location) / SCALE)
        status, answer = solver.solve()
        if answer is None:
            return status, None
        kind, n, v = np.searchsorted(self._kinds, self._instance.kind), self._n, self._variables
        states = answer.values[v.states] * SCALE
        return status, FluidSchedule(
            objective_s=answer.objective,
            bound_s=answer.bound,
            locations=None if self._locations is None else (answer.values[self._locations] / n)[:, kind],
            options=(answer.values[v.options] / n)[:, kind],
            parameters=(answer.values[v.parameters] / n)[kind],
            host_bytes=float(states[0]),
            streamed_bytes=float(states[1]),
            storage_bytes=float(states[2] + states[3]),
            marginal=OffloadMarginalSeconds(),
        )

    def _build(self) -> None:
        self._lp = lp = LinearProgram()
        i, first, n, m, timed = self._instance, self._first, self._n, self._instance.num_microbatches, self._timed
        max_layers = (i.allowed[:, first] * n).reshape(-1)
        options = lp.add_variables(len(OPTIONS) * len(first), x_max=max_layers).reshape(-1, len(first))
        parameters = lp.add_variables(len(first), x_max=(i.streamable & i.may.parameters)[first] * n)
        may = np.array([i.may.host_optimizer, i.may.streamed_optimizer]) * i.total_state_bytes / SCALE
        states = lp.add_variables(4, x_max=np.concatenate([may, may * (i.storage_cap_bytes > 0)]))
        self._variables = v = Decisions(options, parameters, states)
        passes, idle = lp.add_variables(2, cost=m * timed), lp.add_variables(3, cost=m * timed)
        update = lp.add_variables(1, cost=timed)
        copies = _PassCopies(*(lp.add_variables(1) for _ in range(5)))
        self._working = lp.add_variables(1)
        add_one_location_C1(lp, i, v, first, n)
        self._add_copies_C4(v, copies)
        again: list[Term] = [(options.reshape(-1), -i.repeated_s[:, first].reshape(-1))]
        _add_compute_C2(lp, i, again, (passes, idle), copies)
        _add_links_C3(lp, i, (passes, idle), copies)
        add_update_C9(lp, i, update, v, first)
        self._add_device_memory_C6(copies)
        self._add_host_memory_C7_and_storage_C8(copies)

    def _add_copies_C4(self, v: Decisions, copies: _PassCopies) -> None:
        i, lp = self._instance, self._lp
        lp.add_row("copies", [(copies.acts, -1.0), *self._over_layers(i.moved_bytes)], lower=0.0, upper=0.0)
        lp.add_row("C4", [(copies.acts_early, 1.0), (copies.acts, -1.0)], upper=0.0)
        for bytes_moved, bytes_ in (
            (copies.params_fwd, i.parameter_bytes), (copies.params_bwd, i.parameter_bytes), (copies.grads, i.gradient_bytes),
        ):  # fmt: skip
            terms: list[Term] = [(bytes_moved, -1.0), (v.parameters, bytes_[self._first] / SCALE)]
            lp.add_row("copies", terms, lower=0.0, upper=0.0)

    def _over_layers(self, values: FloatArray) -> list[Term]:
        """Return the sum over layers of a value by option [K, L]."""
        return [(self._variables.options.reshape(-1), (values[:, self._first] / SCALE).reshape(-1))]

    def _add_device_memory_C6(self, copies: _PassCopies) -> None:
        i, lp, first = self._instance, self._lp, self._first
        options, p, states = self._variables
        accumulated = i.gradient_bytes * i.gradients_accumulate
        leaves = (i.parameter_bytes + i.copy_bytes + i.state_bytes + accumulated)[first] / SCALE
        always: list[Term] = [(p, -leaves), (states[:2], -1.0), (self._working, 1.0)]
        in_use: list[Term] = [(options[k], -i.working_bytes[k, first] / self._n / SCALE) for k in range(len(OPTIONS))]
        lp.add_rows("working", [(self._working[0], 1.0), *in_use], lower=0.0)
        gradients = i.gradient_bytes * (not i.gradients_accumulate) / SCALE
        headroom = (i.cap_bytes - i.fixed_bytes) / SCALE - i.resident_bytes / SCALE
        free = headroom - float(gradients.sum())
        turn_terms: list[Term] = [
            *always, *self._over_layers(i.retained_bytes), (copies.acts, 1.0), (copies.acts_early, -1.0),
        ]  # fmt: skip
        self._buffer = lp.add_variables(1)
        update_terms: list[Term] = [*always, (self._buffer, 1.0), (p, i.copy_bytes[first] / SCALE - gradients[first])]
        copied = float(i.copy_bytes.sum())
        self._add_memory("C6", "turn", turn_terms, headroom - i.turn_bytes / SCALE)
        freed = i.freed_bytes / SCALE
        self._add_memory("C6", "end", [*always, (p, freed[first] - gradients[first])], free + float(freed.sum()))
        self._add_memory("C6", "update", update_terms, free - (i.update_bytes - copied) / SCALE)

    def _add_host_memory_C7_and_storage_C8(self, copies: _PassCopies) -> None:
        i, lp, states = self._instance, self._lp, self._variables.states
        on_host = [*host_terms(i, self._variables, self._first), (copies.acts, 1.0)]
        if not self._timed:
            lp.add_row("C7", [*on_host, (lp.add_variables(1, cost=1.0), -1.0)], upper=0.0)
        elif np.isfinite(i.host_cap_bytes):
            self._add_memory("C7", "host", on_host, i.host_cap_bytes / SCALE)
        if i.storage_cap_bytes > 0:
            self._add_memory("C8", "storage", [(states[2:], 1.0)], i.storage_cap_bytes / SCALE)

    def _add_memory(self, label: str, location: str, terms: list[Term], upper: float) -> None:
        self._memory_rows[location] = (self._lp.add_row(label, terms, upper=upper).start, upper)

    def _add_integer_layers(self) -> IntArray:
        """Make layers integer, and return how many of each kind have states that the host updates, are streamed, and are on storage
        from either [4, C]; what is in use counts in full as soon as one layer needs it.
        """
        i, lp, (z, p, states), first, n = self._instance, self._lp, self._variables, self._first, self._n
        kinds, away = len(first), i.state_bytes[first] > 0
        may = np.array([i.may.host_optimizer, i.may.streamed_optimizer])[:, None] * away
        stored = may * (i.storage_cap_bytes > 0)
        layers = lp.add_variables(4 * kinds, x_max=(np.concatenate([may, stored]) * n).reshape(-1)).reshape(4, kinds)
        for of_location, bytes_ in zip(layers, states, strict=True):
            terms: list[Term] = [(bytes_, -1.0), (of_location, i.state_bytes[first] / SCALE)]
            lp.add_row("C1", terms, lower=0.0, upper=0.0)
        lp.add_rows("C1", [(p, 1.0), (layers[0], 1.0), (layers[1], 1.0)], upper=np.where(away, n, np.inf))
        lp.add_rows("C1", [(layers[2:].reshape(-1), 1.0), (layers[:2].reshape(-1), -1.0)], upper=0.0)
        in_use = np.where(i.allowed[:, first], i.working_bytes[:, first], 0.0)
        _add_largest(lp, (z, in_use), self._working, n)
        _add_largest(lp, (layers[1:2], 2 * i.state_bytes[None, first] * may[1:]), self._buffer, n)
        if kinds <= MANY_KINDS:
            lp.integer.extend([*z.reshape(-1).tolist(), *p.tolist(), *layers.reshape(-1).tolist()])
        return layers


def _add_largest(lp: LinearProgram, uses: tuple[IntArray, FloatArray], largest: IntArray, n: FloatArray) -> None:
    """Add largest >= bytes of every variable [K, C] that is not zero, of layers n [C], by levels of bytes."""
    variables, bytes_ = uses
    sizes = np.unique(bytes_[bytes_ > 0])
    if not len(sizes):
        return
    floors = sizes[np.unique(np.linspace(0, len(sizes), MAX_LEVELS, endpoint=False).astype(np.int64))]
    is_used = lp.add_variables(len(floors), x_max=1.0)
    lp.integer.extend(is_used.tolist())
    lp.add_rows("working", [(largest[0], 1.0), (is_used, -floors / SCALE)], lower=0.0)
    layers = np.broadcast_to(n, bytes_.shape)[bytes_ > 0]
    level = np.searchsorted(floors, bytes_[bytes_ > 0], side="right") - 1
    lp.add_rows("working", [(variables[bytes_ > 0], 1.0), (is_used[level], -layers)], upper=0.0)


def _add_compute_C2(
    lp: LinearProgram, i: OffloadInstance, again: list[Term], slots: tuple[IntArray, IntArray], copies: _PassCopies
) -> None:
    """Add compute of all forward and of all backward passes; what these do not hide of copies runs in the idle slots."""
    (forward, backward), (start, turn, tail) = slots
    down, up = SCALE / i.links.to_host_bytes_per_s, SCALE / i.links.to_device_bytes_per_s
    lost_down, lost_up = i.links.compute_lost_to_host * down, i.links.compute_lost_to_device * up
    forward_s, backward_s = float(i.forward_s.sum()), float(i.backward_s.sum())
    # A pass is at least its compute: what it does not hide runs in the idle slots, where it costs none.
    lp.add_row("C2", [(forward, 1.0)], lower=forward_s)
    lp.add_row("C2", [(backward, 1.0), *again], lower=backward_s)
    begins: list[Term] = [(forward, 1.0), (start, 1.0), (turn, 1.0)]
    lp.add_row("C2", [*begins, (copies.acts_early, -lost_down), (copies.params_fwd, -lost_up)], lower=forward_s)
    ends: list[Term] = [(backward, 1.0), (turn, 1.0), (tail, 1.0), *again]
    lost_bwd: list[Term] = [
        (copies.acts, -lost_up), (copies.params_bwd, -lost_up), (copies.grads, -lost_down),
        (copies.acts, -lost_down), (copies.acts_early, lost_down),
    ]  # fmt: skip
    lp.add_row("C2", [*ends, *lost_bwd], lower=backward_s)


def _add_links_C3(lp: LinearProgram, i: OffloadInstance, slots: tuple[IntArray, IntArray], copies: _PassCopies) -> None:
    """Add seconds of copies of all forward and of all backward passes, with the idle slots of either direction.

    A copy in an idle slot that has one direction only does not hinder the other one.
    """
    (forward, backward), (start, turn, tail) = slots
    down, up, h = SCALE / i.links.to_host_bytes_per_s, SCALE / i.links.to_device_bytes_per_s, i.links.hinder
    late: list[Term] = [(copies.acts, 1.0), (copies.acts_early, -1.0)]
    for slot, goes, comes, idle_down, idle_up in (
        (forward, [(copies.acts_early, 1.0)], [(copies.params_fwd, 1.0)], turn, start),
        (backward, [(copies.grads, 1.0), *late], [(copies.acts, 1.0), (copies.params_bwd, 1.0)], tail, turn),
    ):
        going, coming = _times(goes, down), _times(comes, up)
        idle_of_going: list[Term] = [(slot, -1.0), (idle_down, -1.0), (idle_up, -h)]
        idle_of_coming: list[Term] = [(slot, -1.0), (idle_up, -1.0), (idle_down, -h)]
        lp.add_row("C3", [*going, *_times(coming, h), *idle_of_going], upper=0.0)
        lp.add_row("C3", [*coming, *_times(going, h), *idle_of_coming], upper=0.0)


def _times(terms: list[Term], factor: float) -> list[Term]:
    return [(idxs, factor * values) for idxs, values in terms]


def count_programs(instance: OffloadInstance, *, approximate: bool = False) -> tuple[CountProgram, CountProgram]:
    """Return the program of the bound, with integer layers unless there are far too many kinds, and that of the numbers which
    roundings start from, with integer layers unless there are many; one program where both are the same.
    """
    kinds = len(np.unique(instance.kind))
    bound, is_integer = CountProgram(instance, integer=kinds <= TOO_MANY_KINDS and not approximate), kinds <= MANY_KINDS
    return bound, bound if bound.integer == is_integer else CountProgram(instance, integer=is_integer)


def lower_bound_s(instance: OffloadInstance) -> float:
    """Return what no schedule has a lower (O) than, by fractions of layers; infinite where none fits."""
    status, fluid = CountProgram(instance).solve()
    if fluid is not None:
        return fluid.objective_s
    return np.inf if status is Status.INFEASIBLE else 0.0


def min_host_bytes(instance: OffloadInstance) -> float:
    """Return the host memory that every schedule needs, were there enough; infinite where none fits on the device even so."""
    status, fluid = CountProgram(instance, objective="host_bytes").solve()
    if fluid is not None:
        return fluid.objective_s * SCALE
    return np.inf if status is Status.INFEASIBLE else 0.0


def raise_bound_s(instance: OffloadInstance, fluid: FluidSchedule, known_s: float) -> float:
    """Return seconds that no schedule is below, given one that takes ``known_s``; never below the bound of ``fluid``."""
    sizes = np.unique(instance.working_bytes[instance.allowed])
    sizes = sizes[sizes > fluid.working_bytes]
    proved, unproved = -1, len(sizes)  # every faster schedule has sizes[proved] in use; not known of sizes[unproved]
    while unproved - proved > 1:
        middle = (proved + unproved) // 2
        allowed = instance.allowed & (instance.working_bytes < float(sizes[middle]))
        if lower_bound_s(replace(instance, allowed=allowed)) >= known_s:
            proved = middle
        else:
            unproved = middle
    if proved < 0:
        return fluid.bound_s
    _, tighter = solve_fluid(instance, min_working_bytes=float(sizes[proved]))
    return max(fluid.bound_s, known_s if tighter is None else min(known_s, tighter.bound_s))
