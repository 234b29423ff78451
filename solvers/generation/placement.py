"""Placements for generation: the linear program of inference_instance.py, and whole layers by branch and bound over it.

The relaxation lets a layer lie in parts; it is a bound. Whole layers come from branching on the number of layers of a kind in a
place, best bound first; the first answer is the relaxation's, rounded down on the device and on the host. Few kinds of layers
differ in their weights, so a few dozen programs of some twenty variables suffice.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass
from typing import Literal, final

import numpy as np

from ..backend import solve_rows
from ..linear_program import FloatArray, IntArray, LinearAnswer, LinearProgram, Term
from ..solution import Status
from .instance import GenerationInstance, GenerationMarginalSeconds, GenerationPlacement, busy_s, check

SCALE = 1e9
"""Bytes of one unit in the program."""

_AWAY_COST = 1e-6
"""Of a block's seconds: what it costs to have everything away from the device; the bound is lowered by it."""

_PROVED = 1e-5
"""Relative; the linear programs are no more exact."""

INTEGER_TOLERANCE = 1e-5
"""Layers; closer to a whole number than this counts as one."""

Goal = Literal["seconds", "device_bytes", "host_bytes", "storage_bytes"]


@dataclass(frozen=True, kw_only=True)
class RelaxedPlacement:
    """The relaxation: (O), or the least bytes of a place; layers [C, 3] in parts."""

    objective: float
    layers: FloatArray
    cache: FloatArray
    hidden: FloatArray
    worth: GenerationMarginalSeconds


@dataclass(frozen=True, kw_only=True)
class GenerationSolution:
    """``objective_s`` is recomputed by `check`, no whole layers are below ``bound_s``; gap = (objective - bound) / objective."""

    status: Status
    placement: GenerationPlacement | None
    objective_s: float
    bound_s: float
    gap: float
    num_programs: int
    solve_s: float


@dataclass(frozen=True)
class _Variables:
    layers: IntArray
    cache: IntArray
    hidden: IntArray
    seconds: IntArray


def solve_relaxation(
    instance: GenerationInstance, least: IntArray | None = None, most: IntArray | None = None, *, goal: Goal = "seconds"
) -> tuple[Status, RelaxedPlacement | None]:
    """The linear program with between ``least`` and ``most`` [C, 3] layers of a kind in each place."""
    i = instance
    allowed = np.stack([np.ones_like(i.may_store), np.full_like(i.may_store, i.streams), i.may_store & i.streams], 1)
    upper = i.counts[:, None] * allowed
    lp, stored = LinearProgram(), float(i.rates.storage > 0)
    # Where nothing else decides, things stay on the device.
    manners = _AWAY_COST * i.least_s / 3 if goal == "seconds" else 0.0
    v = _Variables(
        lp.variables(
            upper.size,
            least=0.0 if least is None else least.reshape(-1),
            most=(upper if most is None else np.minimum(upper, most)).reshape(-1),
            cost=np.tile([0.0, manners, manners], len(i.counts)) / i.counts.sum(),
        ).reshape(upper.shape),
        lp.variables(5, most=[1.0, 1.0, 1.0, stored, stored], cost=[0.0, *([manners] * 4)]),
        lp.variables(3, most=[1.0, 1.0, stored], cost=[0.0, manners, manners]),
        lp.variables(len(i.passes), cost=i.passes if goal == "seconds" else 0.0),
    )
    _somewhere(lp, i, v)
    _times(lp, i, v)
    _memory(lp, i, v, goal)
    status, answer = solve_rows(lp)
    return (status, None) if answer is None else (status, _read(lp, i, v, answer, seconds=goal == "seconds"))


def solve(instance: GenerationInstance, *, rel_gap: float = 1e-3, most_programs: int = 200) -> GenerationSolution:
    """Whole layers in each place, within ``rel_gap`` of the bound where ``most_programs`` linear programs suffice."""
    search = _Search(instance, rel_gap)
    search.open(np.zeros((len(instance.counts), 3), dtype=np.int64), np.repeat(instance.counts[:, None], 3, axis=1))
    if search.queue:
        for layers in _roundings(instance, search.queue[0][-1].layers):
            search.close(layers)
    while search.queue and search.queue[0][0] < search.cutoff and search.programs < most_programs:
        _, _, least, most, node = heapq.heappop(search.queue)
        spread = np.abs(node.layers - np.round(node.layers))
        if spread.max() <= INTEGER_TOLERANCE:
            search.close(np.round(node.layers).astype(np.int64))
            continue
        place = np.unravel_index(int(np.argmax(spread)), spread.shape)
        below, above = most.copy(), least.copy()
        below[place], above[place] = np.floor(node.layers[place]), np.ceil(node.layers[place])
        search.open(least, below)
        search.open(above, most)
    return search.solution()


@final
class _Search:
    """Branch and bound: open nodes by their bound, the best whole layers so far, and the least bound that was cut off."""

    def __init__(self, instance: GenerationInstance, rel_gap: float) -> None:
        self.instance, self.rel_gap = instance, rel_gap
        self.queue: list[tuple[float, int, IntArray, IntArray, RelaxedPlacement]] = []
        self.objective: float = np.inf
        self.best: GenerationPlacement | None = None
        self.programs, self.least_cut, self.unknown = 0, np.inf, False
        self.start = time.perf_counter()

    @property
    def cutoff(self) -> float:
        """Nodes not below this are not worth their programs."""
        return self.objective * (1 - self.rel_gap)

    def open(self, least: IntArray, most: IntArray) -> None:
        """A node with its bound; nothing where it has no answer."""
        self.programs += 1
        status, node = solve_relaxation(self.instance, least, most)
        self.unknown |= status is Status.UNKNOWN
        if node is None:
            return
        if node.objective < self.cutoff:
            heapq.heappush(self.queue, (node.objective, self.programs, least, most, node))
        else:
            self.least_cut = min(self.least_cut, node.objective)

    def close(self, layers: IntArray) -> None:
        """Whole layers with their best shares."""
        self.programs += 1
        _, found = solve_relaxation(self.instance, layers, layers)
        if found is None:
            return
        cache, hidden = (np.clip(shares, 0.0, None) for shares in (found.cache, found.hidden))
        place = GenerationPlacement(layers=layers, cache=cache / cache.sum(), hidden=hidden / hidden.sum())
        objective = check(self.instance, place)
        if objective < self.objective:
            self.objective, self.best = objective, place

    def solution(self) -> GenerationSolution:
        """The best with its bound."""
        left = self.queue[0][0] if self.queue else np.inf
        bound = 0.0 if self.unknown else min(self.objective, left, self.least_cut)
        gap = (self.objective - bound) / self.objective if self.best is not None else np.inf
        status = Status.OPTIMAL if gap <= _PROVED else Status.FEASIBLE
        if self.best is None:
            status = Status.UNKNOWN if self.queue or self.unknown else Status.INFEASIBLE
        return GenerationSolution(
            status=status,
            placement=self.best,
            objective_s=self.objective,
            bound_s=bound,
            gap=gap,
            num_programs=self.programs,
            solve_s=time.perf_counter() - self.start,
        )


def min_bytes(instance: GenerationInstance, goal: Goal) -> float:
    """Bytes of a place that every placement needs, whatever is there of it; infinite where none fits even so."""
    status, found = solve_relaxation(instance, goal=goal)
    return found.objective * SCALE if found is not None else np.inf if status is Status.INFEASIBLE else 0.0


def _roundings(i: GenerationInstance, layers: FloatArray) -> list[IntArray]:
    """Whole layers near the relaxation: rounded down on the device, the rest to the host or to storage."""
    down = np.floor(layers + INTEGER_TOLERANCE).astype(np.int64)
    found = []
    for x in (1, 2):
        whole = down.copy()
        whole[:, x] += i.counts - whole.sum(axis=1)
        if i.streams and np.all(i.may_store | (whole[:, 2] == 0)):
            found.append(whole)
    return found or [np.stack([i.counts, 0 * i.counts, 0 * i.counts], axis=1)]


def _somewhere(lp: LinearProgram, i: GenerationInstance, v: _Variables) -> None:
    lp.rows("C1", [(v.layers[:, x], 1.0) for x in range(3)], lower=i.counts, upper=i.counts)
    lp.row("C1", [(v.cache, 1.0)], lower=1.0, upper=1.0)
    lp.row("C1", [(v.hidden, 1.0)], lower=1.0, upper=1.0)


def _times(lp: LinearProgram, i: GenerationInstance, v: _Variables) -> None:
    """(C2), (C3), (C4), (C5) and (C6), a row for each phase; bytes in units of SCALE."""
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
    one = np.hstack([none, (read / host + ask * (1 / to_device + 1 / to_host)) * by_host, 0 * states])
    shared = np.hstack([none, read * by_host, 0 * states])
    idxs = np.concatenate([v.layers.reshape(-1), v.cache, v.hidden, v.seconds])

    def rows(label: str, used: FloatArray, rate: float, upper: FloatArray | float = 0.0) -> None:
        lp.block(label, idxs, np.hstack([used, -rate * np.eye(phases)]), upper=upper)

    rows("C2", attend, 1.0, -compute)
    rows("C3 up", up, to_device)
    rows("C3 down", down, to_host)
    rows("C3 both", up / to_device + down / to_host, 1 + r.duplex)
    rows("C4", disk, r.storage / SCALE)
    rows("C5", shared, host)
    rows("C6", one, float(i.num_batches), -compute)


def _memory(lp: LinearProgram, i: GenerationInstance, v: _Variables, goal: Goal) -> None:
    """(C7), (C8) and (C9), or the least of one of them."""
    c, cache = i.capacity, i.cache_bytes / SCALE
    slot = 2 * c.slot / SCALE
    fixed = ((c.working + c.buffer) / SCALE + slot, c.staging / SCALE, 0.0)
    shares = ([(v.cache[:1], cache - slot)], [(v.cache[1:3], cache)], [(v.cache[3:], cache)])
    for x, (label, name, cap) in enumerate(
        (("C7", "device_bytes", c.device), ("C8", "host_bytes", c.host), ("C9", "storage_bytes", c.storage))
    ):
        held: list[Term] = [
            (v.layers[:, x], i.weight_bytes / SCALE),
            *shares[x],
            (v.hidden[x : x + 1], i.states_bytes / SCALE),
        ]
        if goal == name:
            need = lp.variables(1, cost=1.0, least=-np.inf)
            lp.row(label, [*held, (need, -1.0)], upper=-fixed[x])
        else:
            lp.row(label, held, upper=cap / SCALE - fixed[x])


def _read(
    lp: LinearProgram, i: GenerationInstance, v: _Variables, answer: LinearAnswer, *, seconds: bool
) -> RelaxedPlacement:
    values, duals = answer.values, answer.duals
    layers, cache, hidden = values[v.layers], values[v.cache], values[v.hidden]

    def dual(label: str) -> FloatArray:
        return np.abs(duals[[row for made in lp.families[label] for row in made]])

    # A row bytes <= RATE t: one more of RATE is worth t of its right-hand side, or the bytes over RATE^2 where it divides.
    t, r, by_host = values[v.seconds], i.rates, float(cache[1] + cache[3])
    busy = busy_s(i, GenerationPlacement(layers=layers, cache=cache, hidden=hidden))
    line = (dual("C3 up") + dual("C3 down")) @ t / SCALE
    both = dual("C3 both") @ (busy[1] / r.to_device + busy[2] / r.to_host)
    asked = dual("C6") @ i.ask_bytes * by_host * (1 / r.to_device**2 + 1 / r.to_host**2)
    attended = dual("C6") @ i.read_bytes * by_host / r.host_attention**2
    worth = GenerationMarginalSeconds(
        device_s_per_byte=float(dual("C7")[0]) / SCALE,
        host_s_per_byte=float(dual("C8")[0]) / SCALE,
        storage_s_per_byte=float(dual("C9")[0]) / SCALE,
        link_s2_per_byte=float(line + both + asked),
        storage_s2_per_byte=float(dual("C4") @ t) / SCALE,
        host_attention_s2_per_byte=float(dual("C5") @ t / SCALE + attended),
    )
    return RelaxedPlacement(
        objective=answer.objective - (_AWAY_COST * i.least_s if seconds else 0.0),
        layers=layers,
        cache=cache,
        hidden=hidden,
        worth=worth,
    )
