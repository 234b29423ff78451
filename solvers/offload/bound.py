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

from dataclasses import replace
from functools import cached_property
from typing import Literal, final

import numpy as np

from ...schema.units import FloatArray, IntArray
from ..backend import RowSolver, Status
from ..linear_program import LinearProgram, Term
from .instance import OPTIONS, OffloadInstance
from .program import SCALE, FluidSchedule, add_decisions_C1, add_update_C9, host_terms, solve_fluid, state_bytes

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


MEMORIES = ("turn", "end", "update", "host", "storage")
"""What a reserve [5] leaves free: of the device when the backward passes begin, when they end, in the update; host; storage."""


@final
class CountProgram:
    """The count form of a problem, which can be solved again with more memory left free; ``integer``: of integer layers."""

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

    def solve(self, reserve: FloatArray | None = None) -> tuple[Status, FluidSchedule | None]:
        """Return the optimum with so much left free (MEMORIES), spread evenly over the layers of each kind."""
        solver = self._solver
        for free, name in zip(np.zeros(len(MEMORIES)) if reserve is None else reserve, MEMORIES, strict=True):
            if name in self._memory_rows:
                row, upper = self._memory_rows[name]
                solver.change_upper(row, upper - free / SCALE)
        status, answer = solver.solve()
        if answer is None:
            return status, None
        kind, n, v = np.searchsorted(self._kinds, self._instance.kind), self._n, self._decisions
        return status, FluidSchedule(
            objective_s=answer.objective,
            bound_s=answer.bound,
            locations=None if self._locations is None else (answer.values[self._locations] / n)[:, kind],
            options=(answer.values[v.options] / n)[:, kind],
            parameters=(answer.values[v.parameters] / n)[kind],
            state_bytes=state_bytes(answer, v),
        )

    @cached_property
    def _solver(self) -> RowSolver:
        i, first, n = self._instance, self._first, self._n
        self._lp = lp = LinearProgram("offload_bound")
        self._decisions = v = add_decisions_C1(lp, i, first, n)
        cost = i.num_microbatches * self._timed
        self._passes, self._idle = lp.add_variables(2, cost=cost), lp.add_variables(3, cost=cost)
        update = lp.add_variables(1, cost=self._timed)
        # Bytes of all layers in a micro-batch; the early ones of the activations go down within the forward passes.
        self._acts, self._acts_early, self._params_fwd, self._params_bwd, self._grads = lp.add_variables(5)[:, None]
        self._working, self._buffer = lp.add_variables(2)[:, None]
        self._add_copies_C4()
        self._add_compute_C2()
        self._add_links_C3()
        add_update_C9(lp, i, update, v, first)
        self._add_device_memory_C6()
        self._add_host_memory_C7_and_storage_C8()
        if self.integer:
            self._locations = self._add_integer_layers()
        max_nodes = FEW_NODES if len(first) > MANY_KINDS else MAX_NODES
        return RowSolver(lp, rel_gap=SMALLEST_GAP, max_nodes=max_nodes)

    def _over_layers(self, values: FloatArray) -> Term:
        """Return the sum over layers of a value by option [K, L]."""
        return self._decisions.options.reshape(-1), values[:, self._first].reshape(-1)

    def _add_copies_C4(self) -> None:
        i, lp = self._instance, self._lp
        lp.add_row("copies", [(self._acts, -1.0), self._over_layers(i.moved_bytes / SCALE)], lower=0.0, upper=0.0)
        lp.add_row("C4", [(self._acts_early, 1.0), (self._acts, -1.0)], upper=0.0)
        streamed = (
            (self._params_fwd, i.parameter_bytes),
            (self._params_bwd, i.parameter_bytes),
            (self._grads, i.gradient_bytes),
        )
        for copied, bytes_ in streamed:
            terms: list[Term] = [(copied, -1.0), (self._decisions.parameters, bytes_[self._first] / SCALE)]
            lp.add_row("copies", terms, lower=0.0, upper=0.0)

    def _add_compute_C2(self) -> None:
        """Add compute of all forward and of all backward passes; what these do not hide of copies runs in the idle slots."""
        i, lp, (forward, backward), (start, turn, tail) = self._instance, self._lp, self._passes, self._idle
        lost_down = i.links.compute_lost_to_host * (SCALE / i.links.to_host_bytes_per_s)
        lost_up = i.links.compute_lost_to_device * (SCALE / i.links.to_device_bytes_per_s)
        forward_s, backward_s = float(i.forward_s.sum()), float(i.backward_s.sum())
        again = self._over_layers(-i.repeated_s)
        # A pass is at least its compute: what it does not hide runs in the idle slots, where it costs none.
        lp.add_row("C2", [(forward, 1.0)], lower=forward_s)
        lp.add_row("C2", [(backward, 1.0), again], lower=backward_s)
        begins: list[Term] = [(forward, 1.0), (start, 1.0), (turn, 1.0)]
        lp.add_row("C2", [*begins, (self._acts_early, -lost_down), (self._params_fwd, -lost_up)], lower=forward_s)
        ends: list[Term] = [(backward, 1.0), (turn, 1.0), (tail, 1.0), again]
        lost_bwd: list[Term] = [
            (self._acts, -lost_up), (self._params_bwd, -lost_up), (self._grads, -lost_down),
            (self._acts, -lost_down), (self._acts_early, lost_down),
        ]  # fmt: skip
        lp.add_row("C2", [*ends, *lost_bwd], lower=backward_s)

    def _add_links_C3(self) -> None:
        """Add seconds of copies of all forward and of all backward passes, with the idle slots of either direction.

        A copy in an idle slot that has one direction only does not hinder the other one.
        """
        links, (forward, backward), (start, turn, tail) = self._instance.links, self._passes, self._idle
        down, up, h = SCALE / links.to_host_bytes_per_s, SCALE / links.to_device_bytes_per_s, links.hinder
        late: list[Term] = [(self._grads, down), (self._acts, down), (self._acts_early, -down)]
        for slot, going, coming, idle_down, idle_up in (
            (forward, [(self._acts_early, down)], [(self._params_fwd, up)], turn, start),
            (backward, late, [(self._acts, up), (self._params_bwd, up)], tail, turn),
        ):
            ways = (going, idle_down), (coming, idle_up)
            for (copies, idle), (others, other_idle) in (ways, ways[::-1]):
                hindered: list[Term] = [(idxs, h * seconds) for idxs, seconds in others]
                slots: list[Term] = [(slot, -1.0), (idle, -1.0), (other_idle, -h)]
                self._lp.add_row("C3", [*copies, *hindered, *slots], upper=0.0)

    def _add_device_memory_C6(self) -> None:
        i, lp, first, (options, p, states) = self._instance, self._lp, self._first, self._decisions
        always: list[Term] = [(p, -i.layer_bytes[first] / SCALE), (states[:2], -1.0), (self._working, 1.0)]
        in_use: list[Term] = [(options[k], -i.working_bytes[k, first] / self._n / SCALE) for k in range(len(OPTIONS))]
        lp.add_rows("working", [(self._working[0], 1.0), *in_use], lower=0.0)
        gradients, freed = i.gradient_bytes * (not i.gradients_accumulate) / SCALE, i.freed_bytes / SCALE
        headroom = (i.cap_bytes - i.fixed_bytes) / SCALE - i.resident_bytes / SCALE
        free = headroom - float(gradients.sum())
        acts: list[Term] = [self._over_layers(i.retained_bytes / SCALE), (self._acts, 1.0), (self._acts_early, -1.0)]
        self._add_memory("C6", "turn", [*always, *acts], headroom - i.turn_bytes / SCALE)
        self._add_memory("C6", "end", [*always, (p, freed[first] - gradients[first])], free + float(freed.sum()))
        update_terms: list[Term] = [*always, (self._buffer, 1.0), (p, i.copy_bytes[first] / SCALE - gradients[first])]
        self._add_memory("C6", "update", update_terms, free - (i.update_bytes - float(i.copy_bytes.sum())) / SCALE)

    def _add_host_memory_C7_and_storage_C8(self) -> None:
        i, lp = self._instance, self._lp
        on_host = [*host_terms(i, self._decisions, self._first), (self._acts, 1.0)]
        if not self._timed:
            lp.add_row("C7", [*on_host, (lp.add_variables(1, cost=1.0), -1.0)], upper=0.0)
        elif np.isfinite(i.host_cap_bytes):
            self._add_memory("C7", "host", on_host, i.host_cap_bytes / SCALE)
        if i.storage_cap_bytes > 0:
            self._add_memory("C8", "storage", [(self._decisions.states[2:], 1.0)], i.storage_cap_bytes / SCALE)

    def _add_memory(self, label: str, name: str, terms: list[Term], upper: float) -> None:
        self._memory_rows[name] = (self._lp.add_row(label, terms, upper=upper).start, upper)

    def _add_integer_layers(self) -> IntArray:
        """Make layers integer, and return how many of each kind have states that the host updates, are streamed, and are on storage
        from either [4, C]; what is in use counts in full as soon as one layer needs it.
        """
        i, lp, (z, p, states), first, n = self._instance, self._lp, self._decisions, self._first, self._n
        away = i.state_bytes[first] > 0
        may = np.array([i.may.host_optimizer, i.may.streamed_optimizer])[:, None] * away
        max_layers = np.concatenate([may, may * (i.storage_cap_bytes > 0)]) * n
        layers = lp.add_variables(max_layers.size, x_max=max_layers.reshape(-1)).reshape(max_layers.shape)
        for of_location, bytes_ in zip(layers, states, strict=True):
            terms: list[Term] = [(bytes_, -1.0), (of_location, i.state_bytes[first] / SCALE)]
            lp.add_row("C1", terms, lower=0.0, upper=0.0)
        lp.add_rows("C1", [(p, 1.0), (layers[0], 1.0), (layers[1], 1.0)], upper=np.where(away, n, np.inf))
        lp.add_rows("C1", [(layers[2:].reshape(-1), 1.0), (layers[:2].reshape(-1), -1.0)], upper=0.0)
        in_use = np.where(i.allowed[:, first], i.working_bytes[:, first], 0.0)
        self._add_largest(z, in_use, self._working)
        self._add_largest(layers[1:2], 2 * i.state_bytes[None, first] * may[1:], self._buffer)
        if len(first) <= MANY_KINDS:
            lp.integer.extend([*z.reshape(-1).tolist(), *p.tolist(), *layers.reshape(-1).tolist()])
        return layers

    def _add_largest(self, variables: IntArray, bytes_: FloatArray, largest: IntArray) -> None:
        """Add largest >= bytes of every variable [K, C] that is not zero, by levels of bytes."""
        lp, sizes = self._lp, np.unique(bytes_[bytes_ > 0])
        if not len(sizes):
            return
        floors = sizes[np.unique(np.linspace(0, len(sizes), MAX_LEVELS, endpoint=False).astype(np.int64))]
        is_used = lp.add_variables(len(floors), x_max=1.0)
        lp.integer.extend(is_used.tolist())
        lp.add_rows("working", [(largest[0], 1.0), (is_used, -floors / SCALE)], lower=0.0)
        max_layers = np.broadcast_to(self._n, bytes_.shape)[bytes_ > 0]
        level = np.searchsorted(floors, bytes_[bytes_ > 0], side="right") - 1
        lp.add_rows("working", [(variables[bytes_ > 0], 1.0), (is_used[level], -max_layers)], upper=0.0)


def count_programs(instance: OffloadInstance, *, approximate: bool = False) -> tuple[CountProgram, CountProgram]:
    """Return the program of the bound, with integer layers unless there are far too many kinds, and that of the numbers which
    roundings start from, with integer layers unless there are many; one program where both are the same.
    """
    kinds = len(np.unique(instance.kind))
    bound, is_integer = CountProgram(instance, integer=kinds <= TOO_MANY_KINDS and not approximate), kinds <= MANY_KINDS
    return bound, bound if bound.integer == is_integer else CountProgram(instance, integer=is_integer)


def lower_bound_s(instance: OffloadInstance) -> float:
    """Return what no schedule has a lower (O) than, by fractions of layers; infinite where none fits."""
    return _optimum(CountProgram(instance))


def min_host_bytes(instance: OffloadInstance) -> float:
    """Return the host memory that every schedule needs, were there enough; infinite where none fits on the device even so."""
    return _optimum(CountProgram(instance, objective="host_bytes")) * SCALE


def _optimum(program: CountProgram) -> float:
    status, fluid = program.solve()
    if fluid is None:
        return np.inf if status is Status.INFEASIBLE else 0.0
    return fluid.objective_s


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
