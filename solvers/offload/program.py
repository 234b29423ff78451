"""The linear program of offload/instance.py layer by layer: options and copies as fluids, or the best copies of a given choice.

Its optimum is a bound on every schedule. A family of constraints is one function with the label in its name; running sums over
layers make (C4) to (C6) sparse. The families that stand outside of the class are those of the count form (bound.py) too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, final

import numpy as np

from ...schema.units import FloatArray, IntArray
from ..backend import RowSolver, Status
from ..linear_program import LinearAnswer, LinearProgram, Term
from ..tolerances import ROUNDING, SUMMED
from .instance import OPTIONS, OffloadChoice, OffloadInstance, OffloadMarginalSeconds

SCALE = 1e9
"""Bytes of one unit in the program, so that coefficients are within 1e-3 to 1e6."""

Direction = Literal["to_host", "to_device"]
RateTerm = tuple[range, Sequence[Term], Direction]
"""Rows, and those of their terms that are divided by the rate of a direction."""


class Decisions(NamedTuple):
    """Variables: options z [K, L], parameters p [L], and bytes of states (host x, streamed s, what of each is on storage) [4].

    In the count form they are by kinds of layers, L then stands for these.
    """

    options: IntArray
    parameters: IntArray
    states: IntArray


@dataclass(frozen=True)
class FluidSchedule:
    """An answer: options [K, L] and parameters [L] as fractions, and what more of each resource would save.

    Attributes:
        bound_s: no schedule is below.
        state_bytes: of states that the host updates, that are streamed, that are on storage [3].
        locations: [4, L] layers whose states the host updates, are streamed, are on storage from either; fractions, if known.
        working_bytes: in use at once.
    """

    objective_s: float
    bound_s: float
    options: FloatArray
    parameters: FloatArray
    state_bytes: FloatArray
    locations: FloatArray | None = None
    working_bytes: float = 0.0
    marginal: OffloadMarginalSeconds = field(default_factory=OffloadMarginalSeconds)


def solve_fluid(
    instance: OffloadInstance, choice: OffloadChoice | None = None, *, min_working_bytes: float = 0.0
) -> tuple[Status, FluidSchedule | None]:
    """Solve for the fluid optimum, a bound on every schedule (that has so much in use); with a ``choice`` for its best copies."""
    program = FluidProgram(instance, choice, min_working_bytes)
    status, answer = RowSolver(program.lp).solve()
    return status, None if answer is None else program.read(answer)


@final
class FluidProgram:
    """The program of one instance: its variables are attributes, [L] by layer, and each family of rows is a method.

    Copies, bytes that move in each slot, are [L + 1]: the last one is in the idle slot (start, turn, tail) before or after.
    """

    def __init__(
        self, instance: OffloadInstance, choice: OffloadChoice | None = None, min_working_bytes: float = 0.0
    ) -> None:
        """State all rows, named by the labels of offload/instance.py."""
        self.instance, self.choice, self.lp = instance, choice, LinearProgram("offload")
        i, lp, size, m = instance, self.lp, instance.num_layers, instance.num_microbatches
        self.decisions = add_decisions_C1(lp, i, np.arange(size), 1.0, choice)
        self.forward, self.backward = lp.add_variables(size, cost=m), lp.add_variables(size, cost=m)
        self.idle = lp.add_variables(3, cost=m)
        self.update, self.working = lp.add_variables(1, cost=1.0), lp.add_variables(1, x_min=min_working_bytes / SCALE)
        self.acts_down_fwd = lp.add_variables(size + 1)  # u, idle: turn
        self.acts_down_bwd = lp.add_variables(size + 1)  # w
        self.acts_up = lp.add_variables(size + 1)  # v, idle: turn
        max_bytes = np.inf if i.may.parameters and (choice is None or choice.parameters.any()) else 0.0
        self.params_up_fwd = lp.add_variables(size + 1, x_max=max_bytes)  # a, idle: start
        self.params_up_bwd = lp.add_variables(size + 1, x_max=max_bytes)  # c, idle: turn
        self.grads_down = lp.add_variables(size + 1, x_max=max_bytes)  # g, idle: tail
        self.rate_terms: list[RateTerm] = []
        self._add_slots_C2_C3()
        self._add_running_sums()
        self._add_departures_C4()
        if self.has_streams:
            self._add_parameters_in_time_C5()
            self._add_gradients_leave_C4()
        self._add_memory_C6_to_C8()
        self.rate_terms += add_update_C9(lp, i, self.update, self.decisions, np.arange(size))

    def _add_slots_C2_C3(self) -> None:
        """Add f_l >= F_l + SLOW_d u_l / RATE_d + SLOW_h a_l / RATE_h (C2), likewise b_l with what is computed again; the links."""
        i, lp, (start, turn, tail) = self.instance, self.lp, self.idle
        down, up = SCALE / i.links.to_host_bytes_per_s, SCALE / i.links.to_device_bytes_per_s
        repeated = [
            (z, -again_s) for z, again_s in zip(self.decisions.options, i.repeated_s, strict=True) if again_s.any()
        ]
        down_bwd, up_bwd = [self.acts_down_bwd, self.grads_down], [self.acts_up, self.params_up_bwd]
        for length, compute_s, more, going, coming in (
            (self.forward, i.forward_s, [], [self.acts_down_fwd], [self.params_up_fwd]),
            (self.backward, i.backward_s, repeated, down_bwd, up_bwd),
        ):
            goes, comes = [(copy[:-1], down) for copy in going], [(copy[:-1], up) for copy in coming]
            lost_down: list[Term] = [(idxs, -i.links.compute_lost_to_host * rate) for idxs, rate in goes]
            lost_up: list[Term] = [(idxs, -i.links.compute_lost_to_device * rate) for idxs, rate in comes]
            rows = lp.add_rows("C2", [(length, 1.0), *more, *lost_down, *lost_up], lower=compute_s)
            self.rate_terms += [(rows, lost_down, "to_host"), (rows, lost_up, "to_device")]
            self.rate_terms += add_links(lp, "C3", length, goes, comes, i.links.hinder)
        none = list[IntArray]()
        idle = (
            (start, none, [self.params_up_fwd]),
            (turn, [self.acts_down_fwd], up_bwd),
            (tail, [self.grads_down], none),
        )
        for length, going, coming in idle:
            goes, comes = [(copy[-1:], down) for copy in going], [(copy[-1:], up) for copy in coming]
            self.rate_terms += add_links(lp, "C3", length, goes, comes, i.links.hinder)

    def _add_running_sums(self) -> None:
        """Add bytes added up over layers: what exists of layers 0..l, what has gone or come by the end of slot l."""
        lp, i, (z, p, _) = self.lp, self.instance, self.decisions
        self.has_streams = any(lp.x_max[j] > 0 for j in p)

        def over_options(values: FloatArray) -> IntArray:
            return _running_sum(lp, [(z[k], values[k] / SCALE) for k in range(len(OPTIONS)) if values[k].any()], len(p))

        def over_streamed(bytes_: FloatArray) -> IntArray:
            return _running_sum(lp, [(p, bytes_ / SCALE)] if self.has_streams else [], len(p))

        def in_slots(copy: IntArray, *, reverse: bool = True, first: IntArray | None = None) -> IntArray:
            return _running_sum(lp, [(copy[:-1], 1.0)], len(p), reverse=reverse, first=first)

        self.acts_down_by_fwd = in_slots(self.acts_down_fwd, reverse=False)
        self.acts_down_by_turn = lp.add_variables(1)
        gone = [(self.acts_down_by_fwd[-1], -1.0), (self.acts_down_fwd[-1], -1.0)]
        lp.add_row("sum", [(self.acts_down_by_turn, 1.0), *gone], lower=0.0, upper=0.0)
        self.retained, self.moved = over_options(i.retained_bytes), over_options(i.moved_bytes)
        self.acts_down_by_bwd = in_slots(self.acts_down_bwd, first=self.acts_down_by_turn)
        self.acts_up_by_bwd = in_slots(self.acts_up, first=self.acts_up[-1:])
        self.streamed = over_streamed(i.parameter_bytes)
        self.params_up_by_fwd = in_slots(self.params_up_fwd, reverse=False, first=self.params_up_fwd[-1:])
        self.params_up_by_bwd = in_slots(self.params_up_bwd, first=self.params_up_bwd[-1:])
        self.streamed_grads = over_streamed(i.gradient_bytes)
        self.grads_down_by_bwd = in_slots(self.grads_down)

    def _add_departures_C4(self) -> None:
        """Add that activations go down once they exist and come up once they are gone (C4), and are back in time (C5).

        Layer l itself can go down as soon as its pass has ended: for as long as its slot is longer, f_l - F_l.
        """
        lp, i, rate = self.lp, self.instance, self.instance.links.to_host_bytes_per_s / SCALE
        gone: list[Term] = [(self.acts_down_by_fwd, 1.0), _previous(self.moved, -1.0), (self.forward, -rate)]
        lp.add_rows("C4", gone, upper=-rate * i.forward_s)
        lp.add_row("C4", [(self.acts_down_by_bwd[0], 1.0), (self.moved[-1], -1.0)], lower=0.0, upper=0.0)
        lp.add_row("C4", [(self.acts_up[-1], 1.0), (self.acts_down_by_turn, -1.0)], upper=0.0)
        lp.add_rows("C4", [(self.acts_up_by_bwd, 1.0), (self.acts_down_by_bwd, -1.0)], upper=0.0)
        self._add_return_in_time_C5(self.acts_up[-1], self.acts_up_by_bwd, self.moved)

    def _add_parameters_in_time_C5(self) -> None:
        lp, up, streamed = self.lp, self.params_up_by_fwd, self.streamed
        lp.add_row("C5", [(self.params_up_fwd[-1], 1.0), (streamed[0], -1.0)], lower=0.0)
        lp.add_rows("C5", [(up[:-1], 1.0), (streamed[1:], -1.0)], lower=0.0)
        lp.add_rows("C5", [(up, 1.0), (streamed[-1], -1.0)], upper=0.0)
        self._add_return_in_time_C5(self.params_up_bwd[-1], self.params_up_by_bwd, streamed)

    def _add_return_in_time_C5(self, came_at_turn: Any, back: IntArray, away: IntArray) -> None:
        """Add that before the backward pass of layer l all of layers l.. is back, of what is ``away`` of layers 0..l."""
        lp, total = self.lp, away[-1]
        lp.add_rows("C5", [(back, 1.0), (total, -1.0)], upper=0.0)
        lp.add_row("C5", [(came_at_turn, 1.0), (total, -1.0), (away[-2:-1], 1.0)], lower=0.0)
        lp.add_rows("C5", [(back[1:], 1.0), (total, -1.0), _previous(away[:-1], 1.0)], lower=0.0)

    def _add_gradients_leave_C4(self) -> None:
        """Add that gradients of streamed parameters leave after their backward pass, within its slot or later."""
        lp, i, total, down = self.lp, self.instance, self.streamed_grads[-1], self.grads_down_by_bwd
        rate = i.links.to_host_bytes_per_s / SCALE
        repeated = [(z, rate * seconds) for z, seconds in zip(self.decisions.options, i.repeated_s, strict=True)]
        made: list[Term] = [(down, 1.0), (total, -1.0), (self.streamed_grads, 1.0)]
        lp.add_rows("C4", [*made, (self.backward, -rate), *repeated], upper=-rate * i.backward_s)
        lp.add_row("C4", [(down[0], 1.0), (self.grads_down[-1], 1.0), (total, -1.0)], lower=0.0, upper=0.0)

    def _add_memory_C6_to_C8(self) -> None:
        """Add the memory of the device (C6) in every slot, at the turn and in the update, of the host (C7) and of storage (C8)."""
        lp, i, (z, p, states) = self.lp, self.instance, self.decisions
        in_use: list[Term] = [(z[k], -i.working_bytes[k] / SCALE) for k in range(len(OPTIONS))]
        lp.add_rows("working", [(self.working[0], 1.0), *in_use], lower=0.0)
        resident = lp.add_variables(1)
        terms: list[Term] = [(resident, 1.0), (p, i.layer_bytes / SCALE), (states[:2], 1.0)]
        lp.add_row("resident", terms, lower=i.resident_bytes / SCALE, upper=i.resident_bytes / SCALE)
        always: list[Term] = [(resident, 1.0), (self.working, 1.0)]
        headroom = (i.cap_bytes - i.fixed_bytes) / SCALE
        self._add_passes_memory_C6(always, headroom)
        self._add_update_memory_C6(always, headroom)
        if np.isfinite(i.host_cap_bytes):
            on_host = host_terms(i, self.decisions, np.arange(i.num_layers))
            lp.add_row("C7", [*on_host, (self.moved[-1], 1.0)], upper=i.host_cap_bytes / SCALE)
        if i.storage_cap_bytes > 0:
            lp.add_row("C8", [(states[2:], 1.0)], upper=i.storage_cap_bytes / SCALE)

    def _add_passes_memory_C6(self, always: list[Term], headroom: float) -> None:
        """Add what waits to go in the forward slots and at the turn; in the backward slots what is back and not used yet, gradients
        that have not gone, and copies of parameters.
        """
        lp, i, retained, moved = self.lp, self.instance, self.retained, self.moved
        early: list[Term] = [(self.params_up_by_fwd[1:], 1.0), (self.streamed[1:], -1.0)]
        waiting: list[Term] = [(moved[1:], 1.0), (self.acts_down_by_fwd[:-1], -1.0), *early]
        lp.add_rows("C6", [*always, (retained[1:], 1.0), *waiting], upper=headroom)
        came_at_turn: list[Term] = [(self.acts_up[-1], 1.0), (self.params_up_bwd[-1], 1.0)]
        turn_terms: list[Term] = [
            (retained[-1], 1.0),
            (moved[-1], 1.0),
            (self.acts_down_by_fwd[-1], -1.0),
            *came_at_turn,
        ]
        lp.add_row("C6", [*always, *turn_terms], upper=headroom - i.turn_bytes / SCALE)
        terms: list[Term] = [
            *always, (retained, 1.0),
            (self.acts_up_by_bwd, 1.0), (self.acts_down_by_bwd, -1.0), (moved, 1.0), (self.params_up_by_bwd, 1.0),
            (self.streamed[-1], -1.0), (self.grads_down_by_bwd, -1.0), _previous(self.streamed, 1.0),
        ]  # fmt: skip
        freed = i.freed_bytes / SCALE
        grads_so_far = np.cumsum((i.gradient_bytes / SCALE - freed)[::-1])[::-1] + freed
        if i.gradients_accumulate:
            terms += [(self.streamed_grads[-1], 1.0), _previous(self.streamed_grads, -1.0)]
        if freed.any():
            freed_of_streamed = _running_sum(lp, [(self.decisions.parameters, freed)], i.num_layers)
            terms += [(freed_of_streamed[-1], 1.0), (freed_of_streamed, -1.0)]
        lp.add_rows("C6", terms, upper=headroom - (0.0 if i.gradients_accumulate else grads_so_far))

    def _add_update_memory_C6(self, always: list[Term], headroom: float) -> None:
        """Add the update's own bytes and the two buffers through which states are streamed, of the smallest layer at least."""
        i, choice, (_, p, states), buffer = self.instance, self.choice, self.decisions, list[Term]()
        if choice is None and (i.state_bytes > 0).any():
            buffer = [(states[1:2], 2 * float(i.state_bytes[i.state_bytes > 0].min()) / i.total_state_bytes)]
        elif choice is not None and choice.streamed_optimizer.any():
            headroom -= 2 * float(i.state_bytes[choice.streamed_optimizer].max()) / SCALE
        resident_gradients: list[Term] = [] if i.gradients_accumulate else [(p, -i.gradient_bytes / SCALE)]
        gradients = 0.0 if i.gradients_accumulate else float(i.gradient_bytes.sum()) / SCALE
        copies = float(i.copy_bytes.sum()) / SCALE
        update_terms: list[Term] = [*always, *buffer, *resident_gradients, (p, i.copy_bytes / SCALE)]
        self.lp.add_row("C6", update_terms, upper=headroom - gradients + copies - i.update_bytes / SCALE)

    def read(self, answer: LinearAnswer) -> FluidSchedule:
        """Return the schedule that an answer says, and its marginal seconds from the duals.

        An upper side's dual is what the objective changes by for one unit more of it; a coefficient q / RATE times x in a row with
        dual y changes the objective by y q x / RATE for each unit of RATE.
        """

        def side(label: str) -> float:
            rows = self.lp.families.get(label, [])
            return max(-float(sum(answer.duals[rows_.start : rows_.stop].sum() for rows_ in rows)) / SCALE, 0.0)

        saved, links = {"to_host": 0.0, "to_device": 0.0}, self.instance.links
        for rows, terms, direction in self.rate_terms:
            for idxs, coefficient in terms:
                saved[direction] -= float(
                    (answer.duals[rows.start : rows.stop] * answer.values[idxs] * coefficient).sum()
                )
        return FluidSchedule(
            objective_s=answer.objective,
            bound_s=answer.bound,
            options=answer.values[self.decisions.options],
            parameters=answer.values[self.decisions.parameters],
            state_bytes=state_bytes(answer, self.decisions),
            working_bytes=float(answer.values[self.working[0]]) * SCALE,
            marginal=OffloadMarginalSeconds(
                device_s_per_byte=side("C6"),
                host_s_per_byte=side("C7"),
                to_host_s2_per_byte=max(saved["to_host"] / links.to_host_bytes_per_s, 0.0),
                to_device_s2_per_byte=max(saved["to_device"] / links.to_device_bytes_per_s, 0.0),
            ),
        )


def _previous(sums: IntArray, factor: float) -> Term:
    """Return the term of the layer before each, which the first one does not have."""
    idxs = np.arange(len(sums))
    return sums[np.maximum(idxs - 1, 0)], factor * (idxs > 0)


def _running_sum(
    lp: LinearProgram, terms: list[Term], size: int, *, reverse: bool = False, first: IntArray | None = None
) -> IntArray:
    """Return variables that add the terms up, from the first layer on or from the last one; ``first`` is there before."""
    if not terms:
        return lp.add_variables(size, x_max=0.0)
    sums = lp.add_variables(size)
    order = np.arange(size)[:: -1 if reverse else 1]
    added: list[Term] = [(idxs[order], -np.broadcast_to(values, size)[order]) for idxs, values in terms]
    if first is not None:
        added.append((first, -1.0 * (np.arange(size) == 0)))
    lp.add_rows("sum", [(sums[order], 1.0), _previous(sums[order], -1.0), *added], lower=0.0, upper=0.0)
    return sums


def state_bytes(answer: LinearAnswer, v: Decisions) -> FloatArray:
    """Return the bytes of states that the host updates, that are streamed, that are on storage [3]."""
    host, streamed, *stored = answer.values[v.states] * SCALE
    return np.array([host, streamed, sum(stored)])


def add_decisions_C1(
    lp: LinearProgram, i: OffloadInstance, idxs: IntArray, num_layers: Any, choice: OffloadChoice | None = None
) -> Decisions:
    """Add one option and one location for each layer ``idxs`` [L], free or as chosen; or of kinds with ``num_layers`` each."""
    total = i.total_state_bytes / SCALE
    max_bytes = total * np.array([i.may.host_optimizer, i.may.streamed_optimizer])
    v = Decisions(
        lp.add_variables(i.allowed[:, idxs].size, x_max=(i.allowed[:, idxs] * num_layers).reshape(-1)).reshape(
            -1, len(idxs)
        ),
        lp.add_variables(len(idxs), x_max=(i.streamable & i.may.parameters)[idxs] * num_layers),
        lp.add_variables(4, x_max=np.concatenate([max_bytes, max_bytes * (i.storage_cap_bytes > 0)])),
    )
    if choice is not None:
        away = (choice.host_optimizer, choice.streamed_optimizer)
        states = [
            float(i.state_bytes[mask].sum()) / SCALE for mask in (*away, *(mask & choice.storage for mask in away))
        ]
        option = np.arange(len(OPTIONS))[:, None] == choice.option
        variables = np.concatenate([v.options.reshape(-1), v.parameters, v.states])
        for variable, value in zip(variables, [*option.reshape(-1), *choice.parameters, *states], strict=True):
            lp.x_min[variable] = lp.x_max[variable] = float(value)
    lp.add_rows("C1", [(z, 1.0) for z in v.options], lower=num_layers, upper=num_layers)
    # The sum of the layers' bytes rounds: without a margin all states off the device could be infeasible.
    terms: list[Term] = [(v.parameters, i.state_bytes[idxs] / SCALE), (v.states[:2], 1.0)]
    lp.add_row("C1", terms, upper=total * (1 + SUMMED) + ROUNDING)
    lp.add_rows("C1", [(v.states[2:], 1.0), (v.states[:2], -1.0)], upper=0.0)
    return v


def add_links(
    lp: LinearProgram, label: str, length: Any, down: Sequence[Term], up: Sequence[Term], hinder: float
) -> list[RateTerm]:
    """Add seconds of one direction + HINDER seconds of the other <= length (C3), for each direction that has copies."""
    rate_terms: list[RateTerm] = []
    ways: tuple[tuple[Sequence[Term], Direction], ...] = ((down, "to_host"), (up, "to_device"))
    for (copies, direction), (others, other_direction) in (ways, ways[::-1]):
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
