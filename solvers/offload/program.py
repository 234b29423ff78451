"""The linear program of offload/instance.py layer by layer: options and copies as fluids, or the best copies of a given choice.

Its optimum is a bound on every schedule. A family of constraints is one function with the label in its name; running sums over
layers make (C4) to (C6) sparse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ...schema.units import FloatArray, IntArray
from ..backend import RowSolver, Status
from ..linear_program import LinearAnswer, LinearProgram, Term
from .instance import OPTIONS, OffloadChoice, OffloadInstance, OffloadMarginalSeconds
from .rows import (
    SCALE,
    Decisions,
    FluidSchedule,
    RateTerm,
    add_links,
    add_one_location_C1,
    add_update_C9,
    host_terms,
)


class Copies(NamedTuple):
    """Variables: bytes that move in each slot, [L + 1] with the last one in the idle slot before or after the passes.

    u: activations to the host in the forward pass (idle: at the turn);     a: parameters to the device in it (idle: at the start)
    w: activations to the host in the backward pass;                        c: parameters to the device in it (idle: at the turn)
    v: activations back to the device in it (idle: at the turn);            g: gradients to the host in it (idle: at the tail)
    """

    acts_down_fwd: IntArray  # u
    acts_down_bwd: IntArray  # w
    acts_up: IntArray  # v
    params_up_fwd: IntArray  # a
    params_up_bwd: IntArray  # c
    grads_down: IntArray  # g


@dataclass(frozen=True)
class FluidModel:
    """The program and its variables.

    Attributes:
        forward, backward: lengths of the slots f, b [L]; idle: start, turn, tail [3]; update: t; working: bytes in use at once.
        rate_terms: for the marginal seconds of each direction's rate.
    """

    lp: LinearProgram
    decisions: Decisions
    forward: IntArray
    backward: IntArray
    idle: IntArray
    update: int
    working: int
    copies: Copies
    rate_terms: list[RateTerm] = field(default_factory=list)


def solve_fluid(
    instance: OffloadInstance, choice: OffloadChoice | None = None, *, min_working_bytes: float = 0.0
) -> tuple[Status, FluidSchedule | None]:
    """Solve for the fluid optimum, a bound on every schedule (that has so much in use); with a ``choice`` for its best copies."""
    model = build_model(instance, choice, min_working_bytes=min_working_bytes)
    status, answer = RowSolver(model.lp).solve()
    if answer is None:
        return status, None
    v = model.decisions
    states = answer.values[v.states] * SCALE
    return status, FluidSchedule(
        objective_s=answer.objective,
        bound_s=answer.bound,
        options=answer.values[v.options],
        parameters=answer.values[v.parameters],
        host_bytes=float(states[0]),
        streamed_bytes=float(states[1]),
        storage_bytes=float(states[2] + states[3]),
        marginal=_marginal_seconds(instance, model, answer),
        working_bytes=float(answer.values[model.working]) * SCALE,
    )


def build_model(
    i: OffloadInstance, choice: OffloadChoice | None = None, *, min_working_bytes: float = 0.0
) -> FluidModel:
    """State all rows, named by the labels of offload/instance.py."""
    lp, size, m = LinearProgram(), i.num_layers, i.num_microbatches
    decisions = _add_decisions_C1(lp, i, choice)
    forward, backward = lp.add_variables(size, cost=m), lp.add_variables(size, cost=m)
    idle = lp.add_variables(3, cost=m)
    update = int(lp.add_variables(1, cost=1.0)[0])
    working = int(lp.add_variables(1, x_min=min_working_bytes / SCALE)[0])
    max_params = np.inf if i.may.parameters and (choice is None or choice.parameters.any()) else 0.0
    copies = Copies(*(lp.add_variables(size + 1, x_max=x_max) for x_max in [np.inf] * 3 + [max_params] * 3))
    model = FluidModel(lp, decisions, forward, backward, idle, update, working, copies)
    for slot in _slots(model, i):
        _add_compute_C2(model, i, slot)
        model.rate_terms.extend(add_links(lp, "C3", slot.length, slot.down, slot.up, i.links.hinder))
    sums = _running_sums(model, i)
    _add_departures_C4(model, i, sums)
    if sums.has_streams:
        _add_parameters_in_time_C5(model, sums)
        _add_gradients_leave_C4(model, i, sums)
    _add_memory_C6_to_C8(model, i, sums, choice)
    model.rate_terms.extend(add_update_C9(lp, i, update, decisions, np.arange(size)))
    return model


def _add_decisions_C1(lp: LinearProgram, i: OffloadInstance, choice: OffloadChoice | None) -> Decisions:
    """Add the variables of a choice, within (C1) or as given."""
    size, num_options, total = i.num_layers, len(OPTIONS), i.total_state_bytes / SCALE
    if choice is None:
        z = lp.add_variables(num_options * size, x_max=i.allowed.astype(np.float64).reshape(-1))
        p = lp.add_variables(size, x_max=(i.streamable & i.may.parameters).astype(np.float64))
        bytes_ = total * np.array([i.may.host_optimizer, i.may.streamed_optimizer])
        states = lp.add_variables(4, x_max=np.concatenate([bytes_, bytes_ * (i.storage_cap_bytes > 0)]))
    else:
        exact = (np.arange(num_options)[:, None] == choice.option).astype(np.float64).reshape(-1)
        z = lp.add_variables(num_options * size, x_min=exact, x_max=exact)
        p = lp.add_variables(size, x_min=choice.parameters * 1.0, x_max=choice.parameters * 1.0)
        away = (choice.host_optimizer, choice.streamed_optimizer)
        fixed = [
            float(i.state_bytes[mask].sum()) / SCALE for mask in (*away, *(mask & choice.storage for mask in away))
        ]
        states = lp.add_variables(4, x_min=fixed, x_max=fixed)
    decisions = Decisions(z.reshape(num_options, size), p, states)
    add_one_location_C1(lp, i, decisions, np.arange(size), 1.0)
    return decisions


class _Slot(NamedTuple):
    """A slot, or one for each layer: its length, seconds of copies (variables, seconds a unit) each way, and its compute."""

    length: Any
    down: list[Term]
    up: list[Term]
    compute_s: FloatArray | None = None
    recompute: Sequence[Term] = ()


def _slots(model: FluidModel, i: OffloadInstance) -> list[_Slot]:
    down, up = SCALE / i.links.to_host_bytes_per_s, SCALE / i.links.to_device_bytes_per_s
    start, turn, tail = model.idle
    acts_down_fwd, acts_down_bwd, acts_up, params_up_fwd, params_up_bwd, grads_down = model.copies
    repeated: list[Term] = [
        (model.decisions.options[k], -i.repeated_s[k]) for k in range(len(OPTIONS)) if i.repeated_s[k].any()
    ]
    return [
        _Slot(model.forward, [(acts_down_fwd[:-1], down)], [(params_up_fwd[:-1], up)], i.forward_s),
        _Slot(
            model.backward,
            [(acts_down_bwd[:-1], down), (grads_down[:-1], down)],
            [(acts_up[:-1], up), (params_up_bwd[:-1], up)],
            i.backward_s,
            repeated,
        ),
        _Slot(start, [], [(params_up_fwd[-1:], up)]),
        _Slot(turn, [(acts_down_fwd[-1:], down)], [(acts_up[-1:], up), (params_up_bwd[-1:], up)]),
        _Slot(tail, [(grads_down[-1:], down)], []),
    ]


def _add_compute_C2(model: FluidModel, i: OffloadInstance, slot: _Slot) -> None:
    """Add f_l >= F_l + SLOW_d u_l / RATE_d + SLOW_h a_l / RATE_h, likewise b_l with what is computed again."""
    if slot.compute_s is None:
        return
    lost_down: list[Term] = [(idxs, -i.links.compute_lost_to_host * rate) for idxs, rate in slot.down]
    lost_up: list[Term] = [(idxs, -i.links.compute_lost_to_device * rate) for idxs, rate in slot.up]
    terms = [(slot.length, 1.0), *slot.recompute, *lost_down, *lost_up]
    rows = model.lp.add_rows("C2", terms, lower=slot.compute_s)
    model.rate_terms.extend([(rows, lost_down, "to_host"), (rows, lost_up, "to_device")])


@dataclass(frozen=True)
class _RunningSums:
    """Variables [L], bytes added up over layers.

    Attributes:
        retained, moved, streamed, streamed_grads: activations kept and moved, parameters and their gradients, of layers 0..l.
        acts_down_by_fwd: activations that have gone by the end of forward slot l; acts_down_by_turn: by the turn.
        acts_down_by_bwd, acts_up_by_bwd: gone, and come back, by the end of backward slot l.
        params_up_by_fwd, params_up_by_bwd, grads_down_by_bwd: come, come again, and gone by the end of slot l.
    """

    has_streams: bool
    retained: IntArray
    moved: IntArray
    acts_down_by_fwd: IntArray
    acts_down_by_turn: IntArray
    acts_down_by_bwd: IntArray
    acts_up_by_bwd: IntArray
    streamed: IntArray
    params_up_by_fwd: IntArray
    params_up_by_bwd: IntArray
    streamed_grads: IntArray
    grads_down_by_bwd: IntArray


def _running_sums(model: FluidModel, i: OffloadInstance) -> _RunningSums:
    lp, size, (z, p, _) = model.lp, i.num_layers, model.decisions
    acts_down_fwd, acts_down_bwd, acts_up, params_up_fwd, params_up_bwd, grads_down = model.copies

    def over_options(values: FloatArray) -> IntArray:
        return _running_sum(lp, [(z[k], values[k] / SCALE) for k in range(len(OPTIONS)) if values[k].any()], size)

    has_streams = any(lp.x_max[j] > 0 for j in p)
    params: list[Term] = [(p, i.parameter_bytes / SCALE)] if has_streams else []
    grads: list[Term] = [(p, i.gradient_bytes / SCALE)] if has_streams else []
    by_fwd = _running_sum(lp, [(acts_down_fwd[:-1], 1.0)], size)
    by_turn = lp.add_variables(1)
    lp.add_row("sum", [(by_turn, 1.0), (by_fwd[-1], -1.0), (acts_down_fwd[-1], -1.0)], lower=0.0, upper=0.0)
    return _RunningSums(
        has_streams=has_streams,
        retained=over_options(i.retained_bytes),
        moved=over_options(i.moved_bytes),
        acts_down_by_fwd=by_fwd,
        acts_down_by_turn=by_turn,
        acts_down_by_bwd=_running_sum(lp, [(acts_down_bwd[:-1], 1.0)], size, reverse=True, first=by_turn),
        acts_up_by_bwd=_running_sum(lp, [(acts_up[:-1], 1.0)], size, reverse=True, first=acts_up[-1:]),
        streamed=_running_sum(lp, params, size),
        params_up_by_fwd=_running_sum(lp, [(params_up_fwd[:-1], 1.0)], size, first=params_up_fwd[-1:]),
        params_up_by_bwd=_running_sum(lp, [(params_up_bwd[:-1], 1.0)], size, reverse=True, first=params_up_bwd[-1:]),
        streamed_grads=_running_sum(lp, grads, size),
        grads_down_by_bwd=_running_sum(lp, [(grads_down[:-1], 1.0)], size, reverse=True),
    )


def _running_sum(
    lp: LinearProgram, terms: list[Term], size: int, *, reverse: bool = False, first: Any = None
) -> IntArray:
    """Return variables that add the terms up, from the first layer on or from the last one; ``first`` is there before."""
    if not terms:
        return lp.add_variables(size, x_max=0.0)
    sums = lp.add_variables(size)
    order = np.arange(size)[:: -1 if reverse else 1]
    s, added = sums[order], [(idxs[order], -np.broadcast_to(values, size)[order]) for idxs, values in terms]
    begin: list[Term] = [] if first is None else [(first, -1.0)]
    first_terms = [(s[:1], 1.0), *begin, *((idxs[:1], values[:1]) for idxs, values in added)]
    lp.add_rows("sum", first_terms, lower=0.0, upper=0.0)
    if size > 1:
        rest = [(s[1:], 1.0), (s[:-1], -1.0), *((idxs[1:], values[1:]) for idxs, values in added)]
        lp.add_rows("sum", rest, lower=0.0, upper=0.0)
    return sums


def _add_departures_C4(model: FluidModel, i: OffloadInstance, sums: _RunningSums) -> None:
    """Add that activations go down once they exist and come up once they are gone (C4), and are back in time (C5).

    Layer l itself can go down as soon as its pass has ended: for as long as its slot is longer, f_l - F_l.
    """
    lp, f, acts_up = model.lp, model.forward, model.copies.acts_up
    rate = i.links.to_host_bytes_per_s / SCALE
    down = sums.acts_down_by_fwd
    lp.add_rows("C4", [(down[:1], 1.0), (f[:1], -rate)], upper=-rate * i.forward_s[:1])
    lp.add_rows("C4", [(down[1:], 1.0), (sums.moved[:-1], -1.0), (f[1:], -rate)], upper=-rate * i.forward_s[1:])
    lp.add_row("C4", [(sums.acts_down_by_bwd[0], 1.0), (sums.moved[-1], -1.0)], lower=0.0, upper=0.0)
    lp.add_row("C4", [(acts_up[-1], 1.0), (sums.acts_down_by_turn, -1.0)], upper=0.0)
    lp.add_rows("C4", [(sums.acts_up_by_bwd, 1.0), (sums.acts_down_by_bwd, -1.0)], upper=0.0)
    _add_return_in_time_C5(lp, acts_up[-1], sums.acts_up_by_bwd, sums.moved)


def _add_parameters_in_time_C5(model: FluidModel, sums: _RunningSums) -> None:
    lp, up, streamed = model.lp, sums.params_up_by_fwd, sums.streamed
    lp.add_row("C5", [(model.copies.params_up_fwd[-1], 1.0), (streamed[0], -1.0)], lower=0.0)
    lp.add_rows("C5", [(up[:-1], 1.0), (streamed[1:], -1.0)], lower=0.0)
    lp.add_rows("C5", [(up, 1.0), (streamed[-1], -1.0)], upper=0.0)
    _add_return_in_time_C5(lp, model.copies.params_up_bwd[-1], sums.params_up_by_bwd, streamed)


def _add_return_in_time_C5(lp: LinearProgram, came_at_turn: Any, back: IntArray, away: IntArray) -> None:
    """Add that before the backward pass of layer l all of layers l.. is back, of what is ``away`` of layers 0..l."""
    total = away[-1]
    lp.add_rows("C5", [(back, 1.0), (total, -1.0)], upper=0.0)
    lp.add_row("C5", [(came_at_turn, 1.0), (total, -1.0), (away[-2:-1], 1.0)], lower=0.0)
    if len(away) > 1:
        lp.add_row("C5", [(back[1], 1.0), (total, -1.0)], lower=0.0)
    if len(away) > 2:
        lp.add_rows("C5", [(back[2:], 1.0), (total, -1.0), (away[:-2], 1.0)], lower=0.0)


def _add_gradients_leave_C4(model: FluidModel, i: OffloadInstance, sums: _RunningSums) -> None:
    """Add that gradients of streamed parameters leave after their backward pass, within its slot or later."""
    lp, total, down = model.lp, sums.streamed_grads[-1], sums.grads_down_by_bwd
    rate = i.links.to_host_bytes_per_s / SCALE
    ended: list[Term] = [
        (model.backward, -rate),
        *((model.decisions.options[k], rate * i.repeated_s[k]) for k in range(len(OPTIONS))),
    ]
    made: list[Term] = [(down, 1.0), (total, -1.0), (sums.streamed_grads, 1.0)]
    lp.add_rows("C4", [*made, *ended], upper=-rate * i.backward_s)
    lp.add_row("C4", [(down[0], 1.0), (model.copies.grads_down[-1], 1.0), (total, -1.0)], lower=0.0, upper=0.0)


def _add_memory_C6_to_C8(
    model: FluidModel, i: OffloadInstance, sums: _RunningSums, choice: OffloadChoice | None
) -> None:
    """Add the memory of the device (C6) in every slot, at the turn and in the update, of the host (C7) and of storage (C8)."""
    lp, (z, p, states) = model.lp, model.decisions
    headroom = (i.cap_bytes - i.fixed_bytes) / SCALE
    in_use: list[Term] = [(z[k], -i.working_bytes[k] / SCALE) for k in range(len(OPTIONS))]
    lp.add_rows("working", [(model.working, 1.0), *in_use], lower=0.0)
    accumulated = i.gradient_bytes * i.gradients_accumulate
    leaves = (i.parameter_bytes + i.copy_bytes + i.state_bytes + accumulated) / SCALE
    resident = lp.add_variables(1)
    terms: list[Term] = [(resident, 1.0), (p, leaves), (states[:2], 1.0)]
    lp.add_row("resident", terms, lower=i.resident_bytes / SCALE, upper=i.resident_bytes / SCALE)
    always: list[Term] = [(resident, 1.0), (model.working, 1.0)]
    _add_forward_memory_C6(model, i, sums, always, headroom)
    _add_backward_memory_C6(model, i, sums, always, headroom)
    _add_update_memory_C6(model, i, choice, always, headroom)
    if np.isfinite(i.host_cap_bytes):
        on_host = host_terms(i, model.decisions, np.arange(i.num_layers))
        lp.add_row("C7", [*on_host, (sums.moved[-1], 1.0)], upper=i.host_cap_bytes / SCALE)
    if i.storage_cap_bytes > 0:
        lp.add_row("C8", [(states[2:], 1.0)], upper=i.storage_cap_bytes / SCALE)


def _add_forward_memory_C6(
    model: FluidModel, i: OffloadInstance, sums: _RunningSums, always: list[Term], headroom: float
) -> None:
    lp, copies = model.lp, model.copies
    retained, moved, down = sums.retained, sums.moved, sums.acts_down_by_fwd
    early: list[Term] = [(sums.params_up_by_fwd[1:], 1.0), (sums.streamed[1:], -1.0)]
    waiting: list[Term] = [(moved[1:], 1.0), (down[:-1], -1.0), *early]
    lp.add_rows("C6", [*always, (retained[1:], 1.0), *waiting], upper=headroom)
    came_at_turn: list[Term] = [(copies.acts_up[-1], 1.0), (copies.params_up_bwd[-1], 1.0)]
    turn_terms: list[Term] = [(retained[-1], 1.0), (moved[-1], 1.0), (down[-1], -1.0), *came_at_turn]
    lp.add_row("C6", [*always, *turn_terms], upper=headroom - i.turn_bytes / SCALE)


def _add_backward_memory_C6(
    model: FluidModel, i: OffloadInstance, sums: _RunningSums, always: list[Term], headroom: float
) -> None:
    """Add what is back and not used yet, gradients that have not gone, and copies of parameters, in the backward slots."""
    lp, freed = model.lp, i.freed_bytes / SCALE
    grads_so_far = np.cumsum((i.gradient_bytes / SCALE - freed)[::-1])[::-1] + freed
    freed_of_streamed = _running_sum(lp, [(model.decisions.parameters, freed)], i.num_layers) if freed.any() else None
    for idxs, before in ((np.arange(1), None), (np.arange(1, i.num_layers), np.arange(i.num_layers - 1))):
        terms: list[Term] = [
            *always, (sums.retained[idxs], 1.0),
            (sums.acts_up_by_bwd[idxs], 1.0), (sums.acts_down_by_bwd[idxs], -1.0), (sums.moved[idxs], 1.0),
            (sums.params_up_by_bwd[idxs], 1.0), (sums.streamed[-1], -1.0), (sums.grads_down_by_bwd[idxs], -1.0),
        ]  # fmt: skip
        if before is not None:
            terms.append((sums.streamed[before], 1.0))
        if i.gradients_accumulate:
            terms.append((sums.streamed_grads[-1], 1.0))
            if before is not None:
                terms.append((sums.streamed_grads[before], -1.0))
        if freed_of_streamed is not None:
            terms += [(freed_of_streamed[-1], 1.0), (freed_of_streamed[idxs], -1.0)]
        if len(idxs):
            lp.add_rows("C6", terms, upper=headroom - (0.0 if i.gradients_accumulate else grads_so_far[idxs]))


def _add_update_memory_C6(
    model: FluidModel, i: OffloadInstance, choice: OffloadChoice | None, always: list[Term], headroom: float
) -> None:
    """Add the update's own bytes and the two buffers through which states are streamed, of the smallest layer at least."""
    (_, p, states), buffer = model.decisions, list[Term]()
    free = headroom
    if choice is None and (i.state_bytes > 0).any():
        smallest = 2 * float(i.state_bytes[i.state_bytes > 0].min()) / i.total_state_bytes
        buffer = [(states[1:2], smallest)]
    elif choice is not None and choice.streamed_optimizer.any():
        free -= 2 * float(i.state_bytes[choice.streamed_optimizer].max()) / SCALE
    gradients = 0.0 if i.gradients_accumulate else float(i.gradient_bytes.sum()) / SCALE
    resident_gradients: list[Term] = [] if i.gradients_accumulate else [(p, -i.gradient_bytes / SCALE)]
    copies = float(i.copy_bytes.sum()) / SCALE
    update_terms: list[Term] = [*always, *buffer, *resident_gradients, (p, i.copy_bytes / SCALE)]
    model.lp.add_row("C6", update_terms, upper=free - gradients + copies - i.update_bytes / SCALE)


def _marginal_seconds(i: OffloadInstance, model: FluidModel, answer: LinearAnswer) -> OffloadMarginalSeconds:
    """Read off the duals: an upper side's dual is what the objective changes by for one unit more of it.

    A coefficient q / RATE times x in a row with dual y changes the objective by y q x / RATE for each unit of RATE.
    """

    def sides(label: str) -> float:
        return -float(sum(answer.duals[rows.start : rows.stop].sum() for rows in model.lp.families.get(label, [])))

    saved = {"to_host": 0.0, "to_device": 0.0}
    for rows, terms, direction in model.rate_terms:
        y = answer.duals[rows.start : rows.stop]
        for idxs, coefficient in terms:
            saved[direction] -= float((y * answer.values[idxs] * coefficient).sum())
    return OffloadMarginalSeconds(
        device_s_per_byte=max(sides("C6") / SCALE, 0.0),
        host_s_per_byte=max(sides("C7") / SCALE, 0.0),
        to_host_s2_per_byte=max(saved["to_host"] / i.links.to_host_bytes_per_s, 0.0),
        to_device_s2_per_byte=max(saved["to_device"] / i.links.to_device_bytes_per_s, 0.0),
    )
