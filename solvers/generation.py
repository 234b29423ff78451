"""Where weights, keys and values, and hidden states lie while text is generated: for one rank and one block of sequences.

A block is K device batches of b sequences. Each pass goes through the layers once, and through all batches within a layer, so that
weights that come from elsewhere come once a pass.

Sets        kinds of layers c, phases p (the prefill; parts of the decoding, by how much a token attends to)
            places D device, H host, S storage
            ways of keys and values D; HA, SA on the host or on storage, attended by the host's processors; HC, SC copied up
Data        N_c             layers of a kind          R_p         passes of a phase
            W_c, M_c        bytes of a layer's weights, and of those that a pass brings where they are not on the device
            MAY_cS          whether storage may hold them
            COMPUTE_cp      seconds of the device for a layer and all K batches, attention to keys and values before left out
            ATTEND_p        seconds of the device to attend to all keys and values of a pass
            READ_p, NEW_p   bytes of keys and values that a pass attends to, that it makes; CACHE: of all at the end
            HIDDEN_p        bytes of the hidden states of all sequences between two layers; STATES: their most
            ASK_p           bytes that go down, and as many up, where the host attends
            STEPS           layers that hidden states go through
            UP, DOWN, DUPLEX, DISK, HOST    rates of the link's directions, both at once, of storage, of the host's attention
            BUFFER, SLOT    bytes of weights on the way; of one batch's keys and values of one layer
            WORK, CAP_D, CAP_H, STAGE, CAP_S   bytes in use while computing; of the device, of the host, what storage passes through
Variables   w_cx  layers of kind c in place x, integer     k_x  share of keys and values in each way     h_x  share of hidden states
            t_p   seconds of a pass
(O)         min  sum_p R_p t_p
(C1)        everything is somewhere: sum_x w_cx = N_c;  sum_x k_x = 1;  sum_x h_x = 1
(C2)        compute: t_p >= sum_c N_c COMPUTE_cp + ATTEND_p (k_D + k_HC + k_SC)
(C3)        links: with up_p   = sum_c M_c (w_cH + w_cS) + READ_p (k_HC + k_SC) + ASK_p (k_HA + k_SA) + STEPS HIDDEN_p (h_H + h_S)
                        down_p = NEW_p (1 - k_D) + ASK_p (k_HA + k_SA) + STEPS HIDDEN_p (h_H + h_S)
                        UP t_p >= up_p;  DOWN t_p >= down_p;  (1 + DUPLEX) t_p >= up_p / UP + down_p / DOWN
(C4)        storage: DISK t_p >= sum_c M_c w_cS + (READ_p + NEW_p) (k_SA + k_SC) + 2 STEPS HIDDEN_p h_S
(C5)        host attention: HOST t_p >= READ_p (k_HA + k_SA)
(C6)        one batch: t_p >= (sum_c N_c COMPUTE_cp + READ_p (k_HA + k_SA) / HOST + ASK_p (k_HA + k_SA) (1 / UP + 1 / DOWN)) / K
(C7)        device memory: sum_c W_c w_cD + BUFFER + CACHE k_D + 2 SLOT (1 - k_D) + STATES h_D + WORK <= CAP_D
(C8)        host memory: sum_c W_c w_cH + CACHE (k_HA + k_HC) + STATES h_H + STAGE <= CAP_H
(C9)        storage: sum_c W_c w_cS + CACHE (k_SA + k_SC) + STATES h_S <= CAP_S

Copies and compute of different batches and layers run side by side: a pass is as long as the busiest resource, which (C6)
corrects where there is one batch only. Decoding reads the weights from the device's memory once for each batch, and its keys and
values once: that is in COMPUTE and ATTEND, which are the larger of arithmetic and memory traffic.

The linear program lets a layer lie in parts, and is a bound. Integer layers come from branching on the number of layers of a kind
in a place, best bound first; the first answers are the relaxation's, rounded down on the device and on the host. Few kinds of
layers differ in their weights, so a few dozen programs of some twenty variables suffice.
Source: FlexGen (arXiv:2303.06865) for the schedule of blocks, the places and the idea of a linear program over them; terms for
memory bandwidth, integer layers, shares that differ in who attends, and duals are ours.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, final

import numpy as np

from ..schema.units import BoolArray, FloatArray, IntArray
from .backend import RowSolver, Solution, Status
from .branch_and_bound import Clock, Leaf, Node, Search, Step, Stop
from .linear_program import LinearAnswer, LinearProgram, Term
from .tolerances import RELAXATION, SOLVER

RESOURCES = ("compute", "link to device", "link to host", "link both ways", "storage", "host attention", "one batch")
"""Resources that a pass may wait for, in the order of (C2) to (C6)."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes per second of one rank; ``storage`` is zero where there is none."""

    to_device: float
    to_host: float
    duplex: float
    storage: float
    host_attention: float


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Bytes of one rank: of its memories, and what is taken whatever lies where (WORK, BUFFER, SLOT, STAGE)."""

    device: float
    host: float
    storage: float
    working: float
    buffer: float
    slot: float
    staging: float


@dataclass(frozen=True, kw_only=True)
class GenerationInstance:
    """Arrays [C] by kind of layer, [P] by phase, [C, P] by both; see DATA above. ``streams``: layers may be off the device."""

    counts: IntArray
    weight_bytes: FloatArray
    moved_bytes: FloatArray
    may_store: BoolArray
    passes: FloatArray
    compute_s: FloatArray
    attend_s: FloatArray
    read_bytes: FloatArray
    new_bytes: FloatArray
    hidden_bytes: FloatArray
    ask_bytes: FloatArray
    cache_bytes: float
    states_bytes: float
    hidden_steps: int
    num_batches: int
    rates: Rates
    capacity: Capacity
    streams: bool = True

    @property
    def layer_compute_s(self) -> FloatArray:
        """Seconds of the device for all layers of a pass [P]."""
        return np.asarray(self.counts @ self.compute_s)

    @property
    def min_s(self) -> float:
        """Seconds of a block that nothing is below: the device's, for all layers."""
        return float(self.passes @ self.layer_compute_s)

    def with_capacity(self, **changes: float) -> GenerationInstance:
        """Return the same problem on a machine with other capacities."""
        return replace(self, capacity=replace(self.capacity, **changes))


@dataclass(frozen=True, kw_only=True)
class GenerationPlacement:
    """``layers`` [C, 3] by kind and place (device, host, storage), integer except in relaxations; ``hidden`` [3] by place.

    ``cache`` [5] by way: device; on the host, attended there or copied; on storage, attended or copied.
    """

    layers: IntArray | FloatArray
    cache: FloatArray
    hidden: FloatArray


@dataclass(frozen=True, kw_only=True)
class GenerationMarginalSeconds:
    """Seconds of a block that one more unit saves: a byte, or a byte per second."""

    device_s_per_byte: float = 0.0
    host_s_per_byte: float = 0.0
    storage_s_per_byte: float = 0.0
    link_s2_per_byte: float = 0.0
    storage_s2_per_byte: float = 0.0
    host_attention_s2_per_byte: float = 0.0


def busy_s(i: GenerationInstance, place: GenerationPlacement) -> FloatArray:
    """Return the seconds [R, P] that each of RESOURCES is busy in one pass, from the definition."""
    on_device, attended, copied, stored_attended, stored_copied = (float(share) for share in place.cache)
    off = float(place.hidden[1] + place.hidden[2])
    by_host = attended + stored_attended
    moved = i.moved_bytes @ place.layers
    up = moved[1] + moved[2] + i.read_bytes * (copied + stored_copied)
    up = up + i.ask_bytes * by_host + i.hidden_steps * i.hidden_bytes * off
    down = i.new_bytes * (1 - on_device) + i.ask_bytes * by_host + i.hidden_steps * i.hidden_bytes * off
    stored = moved[2] + (i.read_bytes + i.new_bytes) * (stored_attended + stored_copied)
    stored = stored + 2 * i.hidden_steps * i.hidden_bytes * float(place.hidden[2])
    compute, to_device, to_host = i.layer_compute_s, up / i.rates.to_device, down / i.rates.to_host
    host = i.read_bytes * by_host / i.rates.host_attention
    exchanged = i.ask_bytes * by_host * (1 / i.rates.to_device + 1 / i.rates.to_host)
    return np.stack(
        [
            compute + i.attend_s * (on_device + copied + stored_copied),
            to_device,
            to_host,
            (to_device + to_host) / (1 + i.rates.duplex),
            np.where(stored > 0, np.inf, 0.0) if i.rates.storage == 0 else stored / i.rates.storage,
            host,
            (compute + host + exchanged) / i.num_batches,
        ]
    )


def resident_bytes(i: GenerationInstance, place: GenerationPlacement) -> FloatArray:
    """Return the bytes [3] in each place at the most."""
    on_device, attended, copied, stored_attended, stored_copied = (float(share) for share in place.cache)
    weights, c = i.weight_bytes @ place.layers, i.capacity
    cache = np.array([on_device, attended + copied, stored_attended + stored_copied]) * i.cache_bytes
    fixed = np.array([c.buffer + 2 * c.slot * (1 - on_device) + c.working, c.staging, 0.0])
    return np.asarray(weights + cache + place.hidden * i.states_bytes + fixed)


def check(i: GenerationInstance, place: GenerationPlacement) -> float:
    """Recompute the objective (O) of a placement, seconds of a block, from the definition.

    Raises:
        ValueError: it breaks (C1), (C7), (C8) or (C9), which the message names.
    """
    if np.any(place.layers < 0) or np.any(place.layers.sum(axis=1) != i.counts):
        raise ValueError(f"everything is somewhere (C1): layers {place.layers.tolist()} of {i.counts.tolist()}")
    if np.any(place.layers[~i.may_store, 2]) or (not i.streams and np.any(place.layers[:, 1:])):
        raise ValueError("everything is somewhere (C1): layers where they may not be")
    for name, shares in (("keys and values", place.cache), ("hidden states", place.hidden)):
        if np.any(shares < -SOLVER) or abs(float(shares.sum()) - 1) > SOLVER:
            raise ValueError(f"everything is somewhere (C1): shares of {name} {shares.tolist()}")
    c, labels = i.capacity, ("device memory (C7)", "host memory (C8)", "storage (C9)")
    for label, resident, cap in zip(labels, resident_bytes(i, place), (c.device, c.host, c.storage), strict=True):
        if resident > cap * (1 + SOLVER) + 1.0:  # a byte for capacities of zero
            raise ValueError(f"{label}: {resident:.0f} bytes of {cap:.0f}")
    return float(i.passes @ busy_s(i, place).max(axis=0))


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
    """Indices: layers [C, 3], cache [5], hidden [3], seconds [P]."""

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
    allowed = np.stack([np.ones_like(i.may_store), np.full_like(i.may_store, i.streams), i.may_store & i.streams], 1)
    upper = i.counts[:, None] * allowed
    lp, stored = LinearProgram("generation"), float(i.rates.storage > 0)
    away = _AWAY_COST * i.min_s / 3 if goal == "seconds" else 0.0
    variables = _Variables(
        lp.add_variables(
            upper.size,
            x_min=0.0 if min_layers is None else min_layers.reshape(-1),
            x_max=(upper if max_layers is None else np.minimum(upper, max_layers)).reshape(-1),
            cost=np.tile([0.0, away, away], len(i.counts)) / i.counts.sum(),
        ).reshape(upper.shape),
        lp.add_variables(5, x_max=[1.0, 1.0, 1.0, stored, stored], cost=[0.0, *([away] * 4)]),
        lp.add_variables(3, x_max=[1.0, 1.0, stored], cost=[0.0, away, away]),
        lp.add_variables(len(i.passes), cost=i.passes if goal == "seconds" else 0.0),
    )
    lp.add_rows("C1", [(variables.layers[:, x], 1.0) for x in range(3)], lower=i.counts, upper=i.counts)
    lp.add_row("C1", [(variables.cache, 1.0)], lower=1.0, upper=1.0)
    lp.add_row("C1", [(variables.hidden, 1.0)], lower=1.0, upper=1.0)
    _add_busy_resources_C2_to_C6(lp, i, variables)
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
    for x in (1, 2):
        rounded = np.floor(layers + _INTEGER_TOLERANCE).astype(np.int64)
        rounded[:, x] += i.counts - rounded.sum(axis=1)
        if i.streams and np.all(i.may_store | (rounded[:, 2] == 0)):
            roundings.append(rounded)
    return roundings or [np.stack([i.counts, 0 * i.counts, 0 * i.counts], axis=1)]


def _add_busy_resources_C2_to_C6(lp: LinearProgram, i: GenerationInstance, v: _Variables) -> None:
    """Add (C2)-(C6): RATE t_p >= use by layers, keys and values, and hidden states, for each phase and resource; bytes in SCALE."""
    r, phases, compute = i.rates, len(i.passes), i.layer_compute_s
    read, new, ask = (bytes_[:, None] / SCALE for bytes_ in (i.read_bytes, i.new_bytes, i.ask_bytes))
    ways = np.eye(5)
    by_host, stored, off = ways[1] + ways[3], ways[3] + ways[4], 1 - ways[0]
    weights = np.zeros((2, *v.layers.shape))  # those that come from the host or from storage; from storage alone
    weights[0, :, 1:], weights[:, :, 2] = (i.moved_bytes / SCALE)[:, None], i.moved_bytes / SCALE
    weights = np.repeat(weights.reshape(2, 1, -1), phases, axis=1)
    states = i.hidden_steps * i.hidden_bytes[:, None] / SCALE * np.array([0.0, 1.0, 1.0])
    none = np.zeros_like(weights[0])
    up = np.hstack([weights[0], read * (ways[2] + ways[4]) + ask * by_host, states])
    down = np.hstack([none, new * off + ask * by_host, states])
    written = 2 * states * np.array([0.0, 0.0, 1.0])
    disk = np.hstack([weights[1], (read + new) * stored, written])
    attend = np.hstack([none, i.attend_s[:, None] * (ways[0] + ways[2] + ways[4]), 0 * states])
    to_device, to_host, host = r.to_device / SCALE, r.to_host / SCALE, r.host_attention / SCALE
    one_batch = np.hstack([none, (read / host + ask * (1 / to_device + 1 / to_host)) * by_host, 0 * states])
    attended = np.hstack([none, read * by_host, 0 * states])
    idxs = np.concatenate([v.layers.reshape(-1), v.cache, v.hidden, v.seconds])

    def add(label: str, used: FloatArray, rate: float, upper: FloatArray | float = 0.0) -> None:
        lp.add_block(label, idxs, np.hstack([used, -rate * np.eye(phases)]), upper=upper)

    add("C2", attend, 1.0, -compute)
    add("C3 up", up, to_device)
    add("C3 down", down, to_host)
    add("C3 both", up / to_device + down / to_host, 1 + r.duplex)
    add("C4", disk, r.storage / SCALE)
    add("C5", attended, host)
    add("C6", one_batch, float(i.num_batches), -compute)


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

    t, r, by_host, busy = values[v.seconds], i.rates, float(place.cache[1] + place.cache[3]), busy_s(i, place)
    line = (dual("C3 up") + dual("C3 down")) @ t / SCALE
    both = dual("C3 both") @ (busy[1] / r.to_device + busy[2] / r.to_host)
    exchanged = dual("C6") @ i.ask_bytes * by_host * (1 / r.to_device**2 + 1 / r.to_host**2)
    attended = dual("C6") @ i.read_bytes * by_host / r.host_attention**2
    return RelaxedPlacement(
        objective=answer.objective - (_AWAY_COST * i.min_s if goal == "seconds" else 0.0),
        place=place,
        marginal=GenerationMarginalSeconds(
            device_s_per_byte=float(dual("C7")[0]) / SCALE,
            host_s_per_byte=float(dual("C8")[0]) / SCALE,
            storage_s_per_byte=float(dual("C9")[0]) / SCALE,
            link_s2_per_byte=float(line + both + exchanged),
            storage_s2_per_byte=float(dual("C4") @ t) / SCALE,
            host_attention_s2_per_byte=float(dual("C5") @ t / SCALE + attended),
        ),
    )
