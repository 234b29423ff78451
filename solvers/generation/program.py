"""The linear program over places of weights, keys and values, and hidden states (instance.py), and integer layers by branching.

The linear program lets a layer lie in parts, and is a bound. Integer layers come from branching on the number of layers of a kind
in a place, best bound first; the first answers are the relaxation's, rounded down on the device and on the host. Few kinds of
layers differ in their weights, so a few dozen programs of some twenty variables suffice.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

import numpy as np

from ...schema.units import FloatArray, IntArray
from ..backend import RowSolver, Solution, Status
from ..branch_and_bound import Clock, Leaf, Node, Search, Step, Stop
from ..linear_program import LinearAnswer, LinearProgram, Term
from ..tolerances import RELAXATION
from .instance import WAYS, GenerationInstance, GenerationMarginalSeconds, GenerationPlacement, busy_s, check

SCALE = 1e9
"""Bytes of one unit in the program, so that coefficients are within 1e-3 to 1e6."""

_AWAY_COST = 1e-6
"""Of a block's seconds: the cost of having everything away from the device, so that ties go there; the bound is lowered by it."""

_INTEGER_TOLERANCE = 1e-5
"""Layers; a relaxed number closer to an integer than this counts as one."""

_REL_GAP = 1e-3
"""Of the seconds of a block: no machine keeps to its model's so closely."""

_MAX_PROGRAMS = 200
"""Of 160 random problems with two kinds of layers none took more than 14; at some 3 ms each these are within a second."""

Goal = Literal["seconds", "device_bytes", "host_bytes", "storage_bytes"]


@dataclass(frozen=True, kw_only=True)
class RelaxedPlacement:
    """An answer of the relaxation: (O), or the fewest bytes of a place; what more of a resource saves."""

    objective: float
    place: GenerationPlacement
    marginal: GenerationMarginalSeconds


GenerationSolution = Solution[GenerationPlacement]
"""Its objective in seconds of a block, as `check` computes it."""


class _Variables(NamedTuple):
    """Indices: layers [C, 3], cache [6], hidden [3], seconds [P]."""

    layers: IntArray
    cache: IntArray
    hidden: IntArray
    seconds: IntArray


def solve_relaxation(
    instance: GenerationInstance,
    min_layers: IntArray | None = None,
    max_layers: IntArray | None = None,
    *,
    goal: Goal = "seconds",
) -> tuple[Status, RelaxedPlacement | None]:
    """Solve the linear program with between ``min_layers`` and ``max_layers`` [C, 3] layers of a kind in each place."""
    i = instance
    upper = i.counts[:, None] * i.allowed_layers
    lp, stored = LinearProgram("generation"), float(i.rates.storage > 0)
    away = _AWAY_COST * i.min_s / 3 if goal == "seconds" else 0.0
    variables = _Variables(
        lp.add_variables(
            upper.size,
            x_min=0.0 if min_layers is None else min_layers.reshape(-1),
            x_max=(upper if max_layers is None else np.minimum(upper, max_layers)).reshape(-1),
            cost=np.tile([0.0, away, away], len(i.counts)) / i.counts.sum(),
        ).reshape(upper.shape),
        lp.add_variables(len(WAYS), x_max=i.allowed_ways * 1.0, cost=[0.0, *([away] * (len(WAYS) - 1))]),
        lp.add_variables(3, x_max=[1.0, float(i.has_host), stored], cost=[0.0, away, away]),
        lp.add_variables(len(i.passes), cost=i.passes if goal == "seconds" else 0.0),
    )
    lp.add_rows("C1", [(variables.layers[:, x], 1.0) for x in range(3)], lower=i.counts, upper=i.counts)
    lp.add_row("C1", [(variables.cache, 1.0)], lower=1.0, upper=1.0)
    lp.add_row("C1", [(variables.hidden, 1.0)], lower=1.0, upper=1.0)
    _add_busy_resources_C2_to_C6_C10(lp, i, variables)
    _add_memory_C7_to_C9(lp, i, variables, goal)
    status, answer = RowSolver(lp).solve()
    return status, None if answer is None else _relaxed_placement(lp, i, variables, answer, goal)


def solve(instance: GenerationInstance, *, deadline: Clock | None = None) -> GenerationSolution:
    """Place integer layers within a thousandth of the bound, where some hundred linear programs and the time suffice."""
    start, problem = time.perf_counter(), _IntegerLayers(instance)
    search = Search(problem)
    answer = search.run(Stop(rel_gap=_REL_GAP, max_effort=_MAX_PROGRAMS - problem.num_programs, deadline=deadline))
    bound = 0.0 if problem.is_unknown else answer.bound
    if answer.best is not None:
        status = Status.OPTIMAL if bound >= answer.objective * (1 - RELAXATION) else Status.FEASIBLE
    else:
        status = Status.UNKNOWN if search.open_nodes or problem.is_unknown else Status.INFEASIBLE
    return GenerationSolution(
        status=status,
        choice=None if answer.best is None else answer.best.candidate,
        objective=answer.objective,
        bound=bound,
        solve_s=time.perf_counter() - start,
        backend="highs",
    )


class _Box(NamedTuple):
    """A subproblem: between so many layers [C, 3] each, and those of its relaxation."""

    min_layers: IntArray
    max_layers: IntArray
    layers: IntArray | FloatArray


@final
class _IntegerLayers:
    """Branch and bound over boxes; `num_programs` counts linear programs, and `is_unknown` says that one of them failed."""

    def __init__(self, instance: GenerationInstance) -> None:
        self._instance = instance
        self.num_programs, self.is_unknown = 0, False

    def roots(self) -> Step[_Box, GenerationPlacement]:
        """Return the relaxation over all layers, and its roundings as the first candidates."""
        counts = self._instance.counts
        nodes = self._open(np.zeros((len(counts), 3), dtype=np.int64), np.repeat(counts[:, None], 3, axis=1))
        starts = [layers for node in nodes for layers in _roundings(self._instance, node.state.layers)]
        return Step(nodes, [leaf for layers in starts for leaf in self._close(layers)])

    def expand(self, node: Node[_Box], incumbent: float) -> Step[_Box, GenerationPlacement]:
        """Branch on the number of layers that is farthest from an integer."""
        box, before, layers = node.state, self.num_programs, node.state.layers
        distance = np.abs(layers - np.round(layers))
        if distance.max() <= _INTEGER_TOLERANCE:
            return Step(leaves=self._close(np.round(layers).astype(np.int64)), evaluated=1, effort=1)
        branch = np.unravel_index(int(np.argmax(distance)), distance.shape)
        below, above = box.max_layers.copy(), box.min_layers.copy()
        below[branch], above[branch] = np.floor(layers[branch]), np.ceil(layers[branch])
        nodes = [*self._open(box.min_layers, below), *self._open(above, box.max_layers)]
        return Step(nodes, effort=self.num_programs - before)

    def _open(self, min_layers: IntArray, max_layers: IntArray) -> list[Node[_Box]]:
        self.num_programs += 1
        status, relaxed = solve_relaxation(self._instance, min_layers, max_layers)
        self.is_unknown |= status is Status.UNKNOWN
        if relaxed is None:
            return []
        return [Node(relaxed.objective, _Box(min_layers, max_layers, relaxed.place.layers), key=self.num_programs)]

    def _close(self, layers: IntArray) -> list[Leaf[GenerationPlacement]]:
        self.num_programs += 1
        _, relaxed = solve_relaxation(self._instance, layers, layers)
        if relaxed is None:
            return []
        cache, hidden = (np.clip(shares, 0.0, None) for shares in (relaxed.place.cache, relaxed.place.hidden))
        place = GenerationPlacement(layers=layers, cache=cache / cache.sum(), hidden=hidden / hidden.sum())
        return [Leaf(check(self._instance, place), place)]


def min_bytes(instance: GenerationInstance, goal: Goal) -> float:
    """Return the bytes of a place that every placement needs, were they unlimited; infinite where none fits even so."""
    status, relaxed = solve_relaxation(instance, goal=goal)
    if relaxed is not None:
        return relaxed.objective * SCALE
    return np.inf if status is Status.INFEASIBLE else 0.0


def _roundings(i: GenerationInstance, layers: IntArray | FloatArray) -> list[IntArray]:
    """Return integer layers near the relaxation: rounded down on the device, the rest to the host or to storage."""
    roundings = []
    for x in (1, 2) if i.has_host else (2,):
        rounded = np.floor(layers + _INTEGER_TOLERANCE).astype(np.int64)
        rounded[:, x] += i.counts - rounded.sum(axis=1)
        if i.streams and np.all(i.may_store | (rounded[:, 2] == 0)):
            roundings.append(rounded)
    return roundings or [np.stack([i.counts, 0 * i.counts, 0 * i.counts], axis=1)]


def _add_busy_resources_C2_to_C6_C10(lp: LinearProgram, i: GenerationInstance, v: _Variables) -> None:
    """Add (C2)-(C6), (C10): RATE t_p >= use by layers, keys and values, and hidden states, for each phase and resource.

    Bytes are in SCALE.
    """
    r, phases, compute = i.rates, len(i.passes), i.layer_compute_s
    read, new, ask = (bytes_[:, None] / SCALE for bytes_ in (i.read_bytes, i.new_bytes, i.ask_bytes))
    on_device, host_attended, host_copied, storage_attended, storage_copied, in_drives = np.eye(len(WAYS))
    by_host, copied, off = host_attended + storage_attended, host_copied + storage_copied, 1 - on_device
    queries, stored = ask * (by_host + in_drives), storage_attended + storage_copied
    weights = np.zeros((2, *v.layers.shape))  # those that come from the host or from storage; from storage alone
    weights[0, :, 1:], weights[:, :, 2] = (i.moved_bytes / SCALE)[:, None], i.moved_bytes / SCALE
    weights = np.repeat(weights.reshape(2, 1, -1), phases, axis=1)
    states = i.hidden_steps * i.hidden_bytes[:, None] / SCALE * np.array([0.0, 1.0, 1.0])
    none = np.zeros_like(weights[0])
    up = np.hstack([weights[0], read * copied + queries, states])
    down = np.hstack([none, new * off + queries, states])
    written = 2 * states * np.array([0.0, 0.0, 1.0])
    disk = np.hstack([weights[1], (read + new) * stored + (new + 2 * ask) * in_drives, written])
    attend = np.hstack([none, i.attend_s[:, None] * (on_device + copied), 0 * states])
    to_device, to_host, host = r.to_device / SCALE, r.to_host / SCALE, r.host_attention / SCALE
    one_by_one = read / host * by_host + queries * (1 / to_device + 1 / to_host)
    if drives := r.drive_attention / SCALE:
        one_by_one = one_by_one + (read / drives + 2 * ask / (r.storage / SCALE)) * in_drives
    one_batch = np.hstack([none, one_by_one, 0 * states])
    idxs = np.concatenate([v.layers.reshape(-1), v.cache, v.hidden, v.seconds])

    def add(label: str, used: FloatArray, rate: float, upper: FloatArray | float = 0.0) -> None:
        lp.add_block(label, idxs, np.hstack([used, -rate * np.eye(phases)]), upper=upper)

    add("C2", attend, 1.0, -compute)
    add("C3 up", up, to_device)
    add("C3 down", down, to_host)
    add("C3 both", up / to_device + down / to_host, 1 + r.duplex)
    add("C4", disk, r.storage / SCALE)
    add("C5", np.hstack([none, read * by_host, 0 * states]), host)
    add("C6", one_batch, float(i.num_batches), -compute)
    if drives:
        add("C10", np.hstack([none, read * in_drives, 0 * states]), drives)


def _add_memory_C7_to_C9(lp: LinearProgram, i: GenerationInstance, v: _Variables, goal: Goal) -> None:
    c, cache = i.capacity, i.cache_bytes / SCALE
    slot = 2 * c.slot / SCALE
    fixed = ((c.working + c.buffer) / SCALE + slot, c.staging / SCALE, 0.0)
    shares = ([(v.cache[:1], cache - slot)], [(v.cache[1:3], cache)], [(v.cache[3:], cache)])
    capacities = (("C7", "device_bytes", c.device), ("C8", "host_bytes", c.host), ("C9", "storage_bytes", c.storage))
    for x, (label, name, cap) in enumerate(capacities):
        states = (v.hidden[x : x + 1], i.states_bytes / SCALE)
        resident: list[Term] = [(v.layers[:, x], i.weight_bytes / SCALE), *shares[x], states]
        if goal == name:
            need = lp.add_variables(1, cost=1.0, x_min=-np.inf)
            lp.add_row(label, [*resident, (need, -1.0)], upper=-fixed[x])
        else:
            lp.add_row(label, resident, upper=cap / SCALE - fixed[x])


def _relaxed_placement(
    lp: LinearProgram, i: GenerationInstance, v: _Variables, answer: LinearAnswer, goal: Goal
) -> RelaxedPlacement:
    """Read an answer, and from its duals what one more unit of each resource saves.

    A row bytes <= RATE t: one more of RATE is worth t of its right-hand side, or the bytes over RATE^2 where it divides.
    """
    values = answer.values
    place = GenerationPlacement(layers=values[v.layers], cache=values[v.cache], hidden=values[v.hidden])

    def dual(label: str) -> FloatArray:
        return np.abs(answer.duals[[row for rows in lp.families[label] for row in rows]])

    t, r, busy = values[v.seconds], i.rates, busy_s(i, place)
    by_host, in_drives = float(place.cache[1] + place.cache[3]), float(place.cache[5])
    line = (dual("C3 up") + dual("C3 down")) @ t / SCALE
    both = dual("C3 both") @ (busy[1] / r.to_device + busy[2] / r.to_host)
    exchanged = dual("C6") @ i.ask_bytes * (by_host + in_drives) * (1 / r.to_device**2 + 1 / r.to_host**2)
    attended = dual("C6") @ i.read_bytes * by_host / r.host_attention**2
    through_drives, in_drives_s2 = 0.0, 0.0
    if r.drive_attention > 0:
        through_drives = 2 * float(dual("C6") @ i.ask_bytes) * in_drives / r.storage**2
        in_drives_s2 = float(dual("C10") @ t) / SCALE
        in_drives_s2 += float(dual("C6") @ i.read_bytes) * in_drives / r.drive_attention**2
    return RelaxedPlacement(
        objective=answer.objective - (_AWAY_COST * i.min_s if goal == "seconds" else 0.0),
        place=place,
        marginal=GenerationMarginalSeconds(
            device_s_per_byte=float(dual("C7")[0]) / SCALE,
            host_s_per_byte=float(dual("C8")[0]) / SCALE,
            storage_s_per_byte=float(dual("C9")[0]) / SCALE,
            link_s2_per_byte=float(line + both + exchanged),
            storage_s2_per_byte=float(dual("C4") @ t) / SCALE + through_drives,
            host_attention_s2_per_byte=float(dual("C5") @ t / SCALE + attended),
            drive_attention_s2_per_byte=in_drives_s2,
        ),
    )
