"""The linear program layer by layer: options and copies as fluids (equations: offload_instance.py), or the copies of a choice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...schema.arrays import FloatArray, IntArray
from ..backend import solve_rows
from ..linear_program import LinearAnswer, LinearProgram, Term
from ..solution import Status
from .instance import OPTIONS, OffloadChoice, OffloadInstance, OffloadMarginalSeconds

SCALE = 1e9
"""Bytes of one unit in the program, so that coefficients are within 1e-3 to 1e6."""


@dataclass(frozen=True)
class FluidSchedule:
    """An answer: options [K, L] and parameters [L] as fractions, states in bytes, and what more of each resource would save.

    ``bound_s``: no schedule is below. ``places`` [4, L], where told: layers whose states the host updates, are streamed, and are on
    storage from either, as fractions. ``working_bytes``: in use at once.
    """

    objective_s: float
    bound_s: float
    options: FloatArray
    parameters: FloatArray
    host_bytes: float
    streamed_bytes: float
    storage_bytes: float
    worth: OffloadMarginalSeconds
    places: FloatArray | None = None
    working_bytes: float = 0.0


@dataclass(frozen=True)
class _FluidModel:
    """Variables: options [K, L], parameters [L], states (host, streamed, and what of each is on storage), forward slots [L],
    backward slots by layer [L], start, turn and tail, the update, the working set; copies by name [L + 1], the last one outside
    the passes.

    ``rates`` has the terms of rows that are divided by the rate of a direction: (first row, terms, direction).
    """

    lp: LinearProgram
    z: IntArray
    p: IntArray
    states: IntArray
    forward: IntArray
    backward: IntArray
    idle: IntArray
    update: int
    working: int
    copies: dict[str, IntArray]
    rates: list[tuple[range, list[Term], str]] = field(default_factory=list)


def solve_fluid(
    instance: OffloadInstance, choice: OffloadChoice | None = None, *, least_working_bytes: float = 0.0
) -> tuple[Status, FluidSchedule | None]:
    """The fluid optimum, a bound on every schedule (that has so much in use); with a ``choice`` the best copies for it."""
    model = build_model(instance, choice, least_working_bytes=least_working_bytes)
    status, answer = solve_rows(model.lp)
    if answer is None:
        return status, None
    states = answer.values[model.states] * SCALE
    return status, FluidSchedule(
        objective_s=answer.objective,
        bound_s=answer.bound,
        options=answer.values[model.z],
        parameters=answer.values[model.p],
        host_bytes=float(states[0]),
        streamed_bytes=float(states[1]),
        storage_bytes=float(states[2] + states[3]),
        worth=_marginal_seconds(instance, model, answer),
        working_bytes=float(answer.values[model.working]) * SCALE,
    )


def build_model(
    i: OffloadInstance, choice: OffloadChoice | None = None, *, least_working_bytes: float = 0.0
) -> _FluidModel:
    """All rows, named by the labels of offload_instance.py."""
    lp, size, m = LinearProgram(), i.num_layers, i.num_microbatches
    z, p, states = _decisions(lp, i, choice)
    forward, backward, idle = (
        lp.add_variables(size, cost=m),
        lp.add_variables(size, cost=m),
        lp.add_variables(3, cost=m),
    )
    update, working = (
        int(lp.add_variables(1, cost=1.0)[0]),
        int(lp.add_variables(1, x_min=least_working_bytes / SCALE)[0]),
    )
    most = np.inf if i.may.parameters and (choice is None or choice.parameters.any()) else 0.0
    copies = {name: lp.add_variables(size + 1, x_max=np.inf if name in "uwv" else most) for name in "uwvacg"}
    model = _FluidModel(lp, z, p, states, forward, backward, idle, update, working, copies)
    _compute_and_links(model, i)
    _memory(model, i, _arrivals(model, i), choice)
    _update(model, i)
    return model


def _decisions(
    lp: LinearProgram, i: OffloadInstance, choice: OffloadChoice | None
) -> tuple[IntArray, IntArray, IntArray]:
    """Variables of a choice, within (C1) or as given."""
    size, num_options, total = i.num_layers, len(OPTIONS), i.total_state_bytes / SCALE
    if choice is None:
        z = lp.add_variables(num_options * size, x_max=i.allowed.astype(np.float64).reshape(-1)).reshape(
            num_options, size
        )
        p = lp.add_variables(size, x_max=(i.streamable & i.may.parameters).astype(np.float64))
        bytes_ = total * np.array([i.may.host_optimizer, i.may.streamed_optimizer])
        states = lp.add_variables(4, x_max=np.concatenate([bytes_, bytes_ * (i.storage_cap_bytes > 0)]))
    else:
        exact = (np.arange(num_options)[:, None] == choice.option).astype(np.float64).reshape(-1)
        z = lp.add_variables(num_options * size, x_min=exact, x_max=exact).reshape(num_options, size)
        p = lp.add_variables(size, x_min=choice.parameters * 1.0, x_max=choice.parameters * 1.0)
        where = (choice.host_optimizer, choice.streamed_optimizer)
        masks = (*where, *(mask & choice.storage for mask in where))
        parts = [float(i.state_bytes[mask].sum()) / SCALE for mask in masks]
        states = lp.add_variables(4, x_min=parts, x_max=parts)
    lp.add_rows("C1", [(z[k], 1.0) for k in range(num_options)], lower=1.0, upper=1.0)
    lp.add_row("C1", [(p, i.state_bytes / SCALE), (states[:2], 1.0)], upper=total * (1 + 1e-9) + 1e-12)
    lp.add_rows("C1", [(states[2:], 1.0), (states[:2], -1.0)], upper=0.0)
    return z, p, states


def _compute_and_links(model: _FluidModel, i: OffloadInstance) -> None:
    """(C2), (C3) in every slot."""
    lp, links = model.lp, i.links
    down, up = SCALE / links.to_host_bytes_per_s, SCALE / links.to_device_bytes_per_s
    u, w, v, a, c, g = (model.copies[name] for name in "uwvacg")
    f, b = model.forward, model.backward
    start, turn, tail = model.idle
    repeated: list[Term] = [(model.z[k], -i.repeated_s[k]) for k in range(len(OPTIONS)) if i.repeated_s[k].any()]
    slots: list[tuple[Any, list[IntArray], list[IntArray], Any]] = [
        (f, [u[:-1]], [a[:-1]], i.forward_s),
        (b, [w[:-1], g[:-1]], [v[:-1], c[:-1]], i.backward_s),
        (start, [], [a[-1:]], None),
        (turn, [u[-1:]], [v[-1:], c[-1:]], None),
        (tail, [g[-1:]], [], None),
    ]
    for slot, downs, ups, compute_s in slots:
        going: list[Term] = [(idxs, down) for idxs in downs]
        coming: list[Term] = [(idxs, up) for idxs in ups]
        if compute_s is not None:
            lost = {
                "to_host": [(idxs, -links.compute_lost_to_host * rate) for idxs, rate in going],
                "to_device": [(idxs, -links.compute_lost_to_device * rate) for idxs, rate in coming],
            }
            terms = [(slot, 1.0), *(repeated if slot is b else []), *lost["to_host"], *lost["to_device"]]
            made = lp.add_rows("C2", terms, lower=compute_s)
            model.rates.extend((made, part, way) for way, part in lost.items())
        _link(model, "C3", (going, coming), slot, links.hinder)


def _link(model: _FluidModel, label: str, copies: tuple[list[Term], list[Term]], slot: Any, hinder: float) -> None:
    """Seconds of copies down and up within a slot, or within each of some: one row for each direction that has copies."""
    for own, other, ways in ((0, 1, ("to_host", "to_device")), (1, 0, ("to_device", "to_host"))):
        if not copies[own]:
            continue
        hindered: list[Term] = [(idxs, hinder * rate) for idxs, rate in copies[other]] if hinder > 0 else []
        terms = [*copies[own], *hindered, (slot, -1.0)]
        made = model.lp.add_rows(label, terms, upper=0.0)
        model.rates.extend([(made, copies[own], ways[0]), (made, hindered, ways[1])])


@dataclass(frozen=True)
class _RunningSums:
    """Running sums [L]: kept, moved, parameters and their gradients over layers 0..l; what had ``gone`` by the end of forward slot
    l; what has ``left``, come back, been gathered again and been reduced by the end of backward slot l.
    """

    kept: IntArray
    moved: IntArray
    gone: IntArray
    left: IntArray
    back: IntArray
    streamed: IntArray
    gathered: IntArray
    regathered: IntArray
    streamed_gradients: IntArray
    reduced: IntArray


def _running_sum(
    lp: LinearProgram, terms: list[Term], size: int, *, reverse: bool = False, first: Any = None
) -> IntArray:
    """Variables that add the terms up, from the first layer on or from the last one."""
    if not terms:
        return lp.add_variables(size, x_max=0.0)
    sums = lp.add_variables(size)
    order = np.arange(size)[:: -1 if reverse else 1]
    s, added = sums[order], [(idxs[order], -np.broadcast_to(values, size)[order]) for idxs, values in terms]
    begin: list[Term] = [] if first is None else [(first, -1.0)]
    lp.add_rows(
        "sum", [(s[:1], 1.0), *begin, *((idxs[:1], values[:1]) for idxs, values in added)], lower=0.0, upper=0.0
    )
    if size > 1:
        rest = [(s[1:], 1.0), (s[:-1], -1.0), *((idxs[1:], values[1:]) for idxs, values in added)]
        lp.add_rows("sum", rest, lower=0.0, upper=0.0)
    return sums


def _arrivals(model: _FluidModel, i: OffloadInstance) -> _RunningSums:
    """Running sums with (C4) and (C5)."""
    lp, size, p = model.lp, i.num_layers, model.p
    u, w, v, a, c, g = (model.copies[name] for name in "uwvacg")

    def of_options(values: FloatArray) -> IntArray:
        terms = [(model.z[k], values[k] / SCALE) for k in range(len(OPTIONS)) if values[k].any()]
        return _running_sum(lp, terms, size)

    has_streams = any(lp.x_max[j] > 0 for j in p)
    of_p: list[Term] = [(p, i.parameter_bytes / SCALE)] if has_streams else []
    of_gradients: list[Term] = [(p, i.gradient_bytes / SCALE)] if has_streams else []
    gone = _running_sum(lp, [(u[:-1], 1.0)], size)
    by_turn = lp.add_variables(1)
    lp.add_row("sum", [(by_turn, 1.0), (gone[-1], -1.0), (u[-1], -1.0)], lower=0.0, upper=0.0)
    sums = _RunningSums(
        kept=of_options(i.kept_bytes),
        moved=of_options(i.moved_bytes),
        gone=gone,
        left=_running_sum(lp, [(w[:-1], 1.0)], size, reverse=True, first=by_turn),
        back=_running_sum(lp, [(v[:-1], 1.0)], size, reverse=True, first=v[-1:]),
        streamed=_running_sum(lp, of_p, size),
        gathered=_running_sum(lp, [(a[:-1], 1.0)], size, first=a[-1:]),
        regathered=_running_sum(lp, [(c[:-1], 1.0)], size, reverse=True, first=c[-1:]),
        streamed_gradients=_running_sum(lp, of_gradients, size),
        reduced=_running_sum(lp, [(g[:-1], 1.0)], size, reverse=True),
    )
    # Layer l itself can go down as soon as its pass has ended: for as long as its slot is longer.
    rate = i.links.to_host_bytes_per_s / SCALE
    f = model.forward
    lp.add_rows("C4", [(sums.gone[:1], 1.0), (f[:1], -rate)], upper=-rate * i.forward_s[:1])
    lp.add_rows("C4", [(sums.gone[1:], 1.0), (sums.moved[:-1], -1.0), (f[1:], -rate)], upper=-rate * i.forward_s[1:])
    lp.add_row("C4", [(sums.left[0], 1.0), (sums.moved[-1], -1.0)], lower=0.0, upper=0.0)
    lp.add_row("C4", [(v[-1], 1.0), (by_turn, -1.0)], upper=0.0)
    lp.add_rows("C4", [(sums.back, 1.0), (sums.left, -1.0)], upper=0.0)
    _return_in_time(lp, v[-1], sums.back, sums.moved)
    if has_streams:
        lp.add_row("C5", [(a[-1], 1.0), (sums.streamed[0], -1.0)], lower=0.0)
        lp.add_rows("C5", [(sums.gathered[:-1], 1.0), (sums.streamed[1:], -1.0)], lower=0.0)
        lp.add_rows("C5", [(sums.gathered, 1.0), (sums.streamed[-1], -1.0)], upper=0.0)
        _return_in_time(lp, c[-1], sums.regathered, sums.streamed)
        total = sums.streamed_gradients[-1]
        ended: list[Term] = [
            (model.backward, -rate),
            *((model.z[k], rate * i.repeated_s[k]) for k in range(len(OPTIONS))),
        ]
        made: list[Term] = [(sums.reduced, 1.0), (total, -1.0), (sums.streamed_gradients, 1.0)]
        lp.add_rows("C4", [*made, *ended], upper=-rate * i.backward_s)
        lp.add_row("C4", [(sums.reduced[0], 1.0), (g[-1], 1.0), (total, -1.0)], lower=0.0, upper=0.0)
    return sums


def _return_in_time(lp: LinearProgram, at_turn: Any, back: IntArray, there: IntArray) -> None:
    """(C5): before the backward pass of layer l all of layers l.. is back, of what is ``there`` over layers 0..l."""
    total = there[-1]
    lp.add_rows("C5", [(back, 1.0), (total, -1.0)], upper=0.0)
    lp.add_row("C5", [(at_turn, 1.0), (total, -1.0), (there[-2:-1], 1.0)], lower=0.0)
    if len(there) > 1:
        lp.add_row("C5", [(back[1], 1.0), (total, -1.0)], lower=0.0)
    if len(there) > 2:
        lp.add_rows("C5", [(back[2:], 1.0), (total, -1.0), (there[:-2], 1.0)], lower=0.0)


def _memory(model: _FluidModel, i: OffloadInstance, sums: _RunningSums, choice: OffloadChoice | None) -> None:
    """(C6) in every slot and (C7)."""
    lp, p = model.lp, model.p
    room = (i.cap_bytes - i.fixed_bytes) / SCALE
    lp.add_rows(
        "working",
        [(model.working, 1.0), *((model.z[k], -i.working_bytes[k] / SCALE) for k in range(len(OPTIONS)))],
        lower=0.0,
    )
    accumulated = i.gradient_bytes * i.gradients_accumulate
    leaves = (i.parameter_bytes + i.copy_bytes + i.state_bytes + accumulated) / SCALE
    resident = lp.add_variables(1)
    terms: list[Term] = [(resident, 1.0), (p, leaves), (model.states[:2], 1.0)]
    lp.add_row("resident", terms, lower=i.resident_bytes / SCALE, upper=i.resident_bytes / SCALE)
    always: list[Term] = [(resident, 1.0), (model.working, 1.0)]
    kept, moved, gone = sums.kept, sums.moved, sums.gone
    waiting: list[Term] = [(moved[1:], 1.0), (gone[:-1], -1.0), (sums.gathered[1:], 1.0), (sums.streamed[1:], -1.0)]
    lp.add_rows("C6", [*always, (kept[1:], 1.0), *waiting], upper=room)
    c, v = model.copies["c"], model.copies["v"]
    at_turn: list[Term] = [(kept[-1], 1.0), (moved[-1], 1.0), (gone[-1], -1.0), (v[-1], 1.0), (c[-1], 1.0)]
    lp.add_row("C6", [*always, *at_turn], upper=room - i.turn_bytes / SCALE)
    _memory_in_backward(model, i, sums, always, room)
    buffer: list[Term] = []
    streamed_room = room
    if choice is None and (i.state_bytes > 0).any():
        least = 2 * float(i.state_bytes[i.state_bytes > 0].min()) / i.total_state_bytes
        buffer = [(model.states[1:2], least)]
    elif choice is not None and choice.streamed_optimizer.any():
        streamed_room -= 2 * float(i.state_bytes[choice.streamed_optimizer].max()) / SCALE
    gradients = 0.0 if i.gradients_accumulate else float(i.gradient_bytes.sum()) / SCALE
    kept_gradients: list[Term] = [] if i.gradients_accumulate else [(p, -i.gradient_bytes / SCALE)]
    copies = float(i.copy_bytes.sum()) / SCALE
    in_update: list[Term] = [*always, *buffer, *kept_gradients, (p, i.copy_bytes / SCALE)]
    lp.add_row("C6", in_update, upper=streamed_room - gradients + copies - i.update_bytes / SCALE)
    if np.isfinite(i.host_cap_bytes):
        master, gradient = i.beside_states
        away = (i.parameter_bytes + i.gradient_bytes + i.state_bytes) / SCALE
        held: list[Term] = [
            (model.states[0], 1 + master + gradient), (model.states[1], 1.0), (model.states[2:], -1.0), (p, away), (moved[-1], 1.0),
        ]  # fmt: skip
        lp.add_row("C7", held, upper=i.host_cap_bytes / SCALE)
    if i.storage_cap_bytes > 0:
        lp.add_row("C8", [(model.states[2:], 1.0)], upper=i.storage_cap_bytes / SCALE)


def _memory_in_backward(
    model: _FluidModel, i: OffloadInstance, sums: _RunningSums, always: list[Term], room: float
) -> None:
    """(C6) in the slots of the backward passes: what is back and not yet used, gradients that have not gone, copies."""
    lp, freed = model.lp, i.freed_bytes / SCALE
    made = np.cumsum((i.gradient_bytes / SCALE - freed)[::-1])[::-1] + freed
    of_streamed = _running_sum(lp, [(model.p, freed)], i.num_layers) if freed.any() else None
    for at, before in ((np.arange(1), None), (np.arange(1, i.num_layers), np.arange(i.num_layers - 1))):
        terms: list[Term] = [
            *always, (sums.kept[at], 1.0), (sums.back[at], 1.0), (sums.left[at], -1.0), (sums.moved[at], 1.0),
            (sums.regathered[at], 1.0), (sums.streamed[-1], -1.0), (sums.reduced[at], -1.0),
        ]  # fmt: skip
        if before is not None:
            terms.append((sums.streamed[before], 1.0))
        if i.gradients_accumulate:
            terms.append((sums.streamed_gradients[-1], 1.0))
            if before is not None:
                terms.append((sums.streamed_gradients[before], -1.0))
        if of_streamed is not None:
            terms += [(of_streamed[-1], 1.0), (of_streamed[at], -1.0)]
        if len(at):
            lp.add_rows("C6", terms, upper=room - (0.0 if i.gradients_accumulate else made[at]))


def _update(model: _FluidModel, i: OffloadInstance) -> None:
    """(C9)."""
    lp, total, links = model.lp, i.total_state_bytes, i.links
    if total == 0:
        return
    t, p, (host, streamed, *_) = model.update, model.p, model.states
    share = i.state_bytes / total
    on_device, on_host = float(i.device_update_s.sum()), float(i.host_update_s.sum())
    unit = SCALE / total
    lp.add_row("C9", [(t, 1.0), (host, on_device * unit), (p, on_device * share)], lower=on_device)
    lp.add_row("C9", [(t, 1.0), (host, -on_host * unit), (p, -on_host * share)], lower=0.0)
    master, gradient = i.beside_states
    down, up = SCALE / links.to_host_bytes_per_s, SCALE / links.to_device_bytes_per_s
    going: list[Term] = [(host, gradient * down), (streamed, down)]
    coming: list[Term] = [(host, master * up), (streamed, up)]
    _link(model, "C9", (going, coming), t, links.hinder)
    if i.storage_cap_bytes > 0:
        each = SCALE / links.read_bytes_per_s + SCALE / links.write_bytes_per_s
        lp.add_row("C9", [(model.states[2:], each), (t, -1.0)], upper=0.0)


def _marginal_seconds(i: OffloadInstance, model: _FluidModel, answer: LinearAnswer) -> OffloadMarginalSeconds:
    """Duals: an upper side's dual is what the objective changes by for one unit more of it.

    A coefficient q / RATE times x in a row with dual y changes the objective by y q x / RATE for each unit of RATE.
    """

    def sides(label: str) -> float:
        return -float(sum(answer.duals[made.start : made.stop].sum() for made in model.lp.families.get(label, [])))

    saved = {"to_host": 0.0, "to_device": 0.0}
    for made, terms, way in model.rates:
        y = answer.duals[made.start : made.stop]
        for idxs, coefficient in terms:
            saved[way] -= float((y * answer.values[idxs] * coefficient).sum())
    return OffloadMarginalSeconds(
        device_s_per_byte=max(sides("C6") / SCALE, 0.0),
        host_s_per_byte=max(sides("C7") / SCALE, 0.0),
        to_host_s2_per_byte=max(saved["to_host"] / i.links.to_host_bytes_per_s, 0.0),
        to_device_s2_per_byte=max(saved["to_device"] / i.links.to_device_bytes_per_s, 0.0),
    )
