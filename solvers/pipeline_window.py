"""A window of time in a pipeline order as a CP-SAT model: (O) and (C1)-(C4) of solvers/pipeline_schedule.py over its actions.

The actions that start in the window are free. Those before it stay where they are; those after it keep their sequence, so that
all they add to the length is the longest way behind each free action, a constant: they need no variable. A window of
every action is the whole problem.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..cost_models.pipeline_simulation import Action, Kind, Order, Pipeline, simulate
from .backend import new_constraint_program
from .pipeline_instance import Instance, length_s

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

_BYTE_STEPS = 10**6
_PART_OF_A_STEP = 1e-6


@dataclass(frozen=True)
class Window:
    """Free actions of each rank with their starts, and what is fixed around them; times in units of `Instance.ticked`.

    Args:
        free: [R] contiguous part of each rank's sequence.
        start: current start of each free action, a solution.
        ready: earliest start of each free action that the fixed actions before it allow.
        behind: [R] time from the end of a free action to the end of each rank, -inf where nothing leads there.
        first_start: [R] start of a rank's first action; every order has the same.
        length: the incumbent's, which the answer must not exceed.
        held: [R] pieces of memory held when the window opens: (freed by which free action, or None, and bytes).
    """

    free: tuple[tuple[Action, ...], ...]
    start: dict[Action, int]
    ready: dict[Action, int]
    behind: dict[Action, NDArray[np.float64]]
    first_start: tuple[int, ...]
    length: int
    held: tuple[tuple[tuple[Action | None, float], ...], ...]


def open_window(instance: Instance, order: Order, opening: float, closing: float) -> Window:
    """The window of the actions that start at `opening` or later and before `closing`."""
    costs = instance.ticked
    timeline = simulate(costs, order)
    starts = {
        a: int(t)
        for actions, times in zip(order, timeline.start_s, strict=True)
        for a, t in zip(actions, times, strict=True)
    }
    free = tuple(tuple(a for a in actions if opening <= starts[a] < closing) for actions in order)
    inside = set(itertools.chain.from_iterable(free))
    ready = {}
    for actions, part in zip(order, free, strict=True):
        fixed = [a for a in actions if starts[a] < opening]
        clear = starts[fixed[-1]] + _ticks(costs, fixed[-1]) if fixed else 0
        for a in part:
            source = _source(costs, a)
            known = source is not None and source[0] not in inside
            arrival = starts[source[0]] + _ticks(costs, source[0]) + source[1] if source and known else 0
            ready[a] = max(clear, arrival)
    return Window(
        free=free,
        start={a: starts[a] for a in inside},
        ready=ready,
        behind=_behind(costs, order, free, starts, closing),
        first_start=tuple(starts[actions[0]] for actions in order),
        length=int(length_s(timeline, instance.length)),
        held=_held(costs, order, free, starts, opening),
    )


def _ticks(costs: Pipeline, action: Action) -> int:
    return int({"F": costs.forward_s, "B": costs.backward_s, "W": costs.weight_s}[action.kind][action.stage])


def _source(costs: Pipeline, action: Action) -> tuple[Action, int] | None:
    """(C1): what an action needs, and the transfer behind that."""
    stage, kind, i = action
    if kind == "F":
        return (Action(stage - 1, "F", i), int(costs.hop_s(stage - 1))) if stage else None
    if kind == "W":
        return Action(stage, "B", i), 0
    if stage == costs.num_stages - 1:
        return Action(stage, "F", i), 0
    return Action(stage + 1, "B", i), int(costs.hop_s(stage))


def _behind(
    costs: Pipeline, order: Order, free: tuple[tuple[Action, ...], ...], starts: dict[Action, int], closing: float
) -> dict[Action, NDArray[np.float64]]:
    """Longest way from the end of each free action to each rank's end, over the actions after the window."""
    after = sorted((t, a.kind != "F", a) for a, t in starts.items() if t >= closing)
    behind = {a: np.full(costs.num_ranks, -np.inf) for part in free for a in part}
    way: dict[Action, NDArray[np.float64]] = {}
    following = {a: b for actions in order for a, b in itertools.pairwise(actions)}
    leads_to: dict[Action, list[tuple[Action, int]]] = {}
    for _, _, a in after:
        source = _source(costs, a)
        if source:
            leads_to.setdefault(source[0], []).append((a, source[1]))
    for _, _, a in reversed(after):
        rank = costs.rank_of_stage[a.stage]
        ends = np.full(costs.num_ranks, -np.inf)
        if a in following:
            ends = np.maximum(ends, way[following[a]])
        else:
            ends[rank] = 0.0
        for target, hop in leads_to.get(a, ()):
            ends = np.maximum(ends, way[target] + hop)
        way[a] = ends + _ticks(costs, a)
    for rank, part in enumerate(free):
        for a in part:
            for target, hop in leads_to.get(a, ()):
                behind[a] = np.maximum(behind[a], way[target] + hop)
            following_fixed = following.get(part[-1])
            if following_fixed is not None:
                behind[a] = np.maximum(behind[a], way[following_fixed])
            else:
                behind[a][rank] = max(behind[a][rank], 0.0)
    return behind


def _held(
    costs: Pipeline, order: Order, free: tuple[tuple[Action, ...], ...], starts: dict[Action, int], opening: float
) -> tuple[tuple[tuple[Action | None, float], ...], ...]:
    """Memory of forward passes before the window that is freed in it (by which action) or after it (None)."""
    rows = []
    for actions, part in zip(order, free, strict=True):
        inside, done = set(part), {a for a in actions if starts[a] < opening}
        pieces: list[tuple[Action | None, float]] = []
        for stage, kind, i in sorted(done):
            if kind != "F":
                continue
            for freeing, size in _freed(costs, stage):
                a = Action(stage, freeing, i)
                if a not in done:
                    pieces.append((a if a in inside else None, size))
        rows.append(tuple(pieces))
    return tuple(rows)


def _freed(costs: Pipeline, stage: int) -> list[tuple[Kind, float]]:
    """What B and W of a stage give back, where it is anything."""
    pieces: tuple[tuple[Kind, float], ...] = (
        ("B", costs.backward_freed_bytes[stage]),
        ("W", costs.weight_freed_bytes[stage]),
    )
    return [piece for piece in pieces if piece[1] > 0]


def build_model(
    instance: Instance, window: Window, *, compact: bool
) -> tuple[cp_model.CpModel, dict[Action, cp_model.IntVar]]:
    """(O) and (C1)-(C4) over the free actions, hinted with the current starts.

    Args:
        compact: only look for starts near the current ones, and break ties of (O) by the sum of the ranks' ends in the window,
            so that the next windows find room; without it the bound of the model is one of the problem.
    """
    costs, model = instance.ticked, new_constraint_program()
    ends_now = [t + _ticks(costs, a) for a, t in window.start.items()]
    near = max(ends_now, default=0) + (max(ends_now, default=0) - min(window.ready.values(), default=0)) // 4
    horizon = near if compact else max(window.first_start) + window.length
    starts = {a: model.new_int_var(window.ready[a], horizon, str(a)) for a in window.start}
    for a, variable in starts.items():
        model.add_hint(variable, window.start[a])
        source = _source(costs, a)
        if source and source[0] in starts:
            model.add(variable >= starts[source[0]] + _ticks(costs, source[0]) + source[1])  # C1
        earlier = a._replace(micro_batch=a.micro_batch - 1)
        if earlier in starts:
            model.add(variable >= starts[earlier] + _ticks(costs, a))  # C4
    for rank, part in enumerate(window.free):
        model.add_no_overlap([model.new_fixed_size_interval_var(starts[a], _ticks(costs, a), f"C2 {a}") for a in part])
        _Memory(model, instance, window, rank, starts, horizon).add()
    _add_objective(model, instance, window, starts, horizon=horizon, compact=compact)
    return model, starts


@dataclass(frozen=True)
class _Memory:
    """(C3) of one rank as a cumulative resource: one piece from F to the end of B, one from F to the end of W."""

    model: cp_model.CpModel
    instance: Instance
    window: Window
    rank: int
    starts: dict[Action, cp_model.IntVar]
    horizon: int

    def add(self) -> None:
        costs, cap = self.instance.ticked, self.instance.cap_bytes[self.rank]
        opens = min(self.window.ready.values(), default=0)
        step = _byte_step(self.instance, self.rank)
        room, boxes, sizes = math.floor(cap / step + _PART_OF_A_STEP), [], []
        for freeing, size in self.window.held[self.rank]:
            if freeing is None:
                room -= math.floor(size / step + _PART_OF_A_STEP)
            else:
                boxes.append(self._piece(opens, freeing))
                sizes.append(math.floor(size / step + _PART_OF_A_STEP))
        for a in (a for a in self.window.free[self.rank] if a.kind == "F"):
            for kind, size in _freed(costs, a.stage):
                boxes.append(self._piece(self.starts[a], a._replace(kind=kind)))
                sizes.append(math.floor(size / step + _PART_OF_A_STEP))
        if boxes:
            self.model.add_cumulative(boxes, sizes, max(room, 0))

    def _piece(self, start: cp_model.IntVar | int, freeing: Action) -> cp_model.IntervalVar:
        """From `start` to the end of the action that frees it, past everything when that is not free itself."""
        if freeing in self.starts:
            end: cp_model.LinearExprT = self.starts[freeing] + _ticks(self.instance.ticked, freeing)
        else:
            end = self.horizon + _ticks(self.instance.ticked, freeing) + 1
        size = self.model.new_int_var(0, 2 * self.horizon + 10**9, "C3 size")
        return self.model.new_interval_var(start, size, end, f"C3 {freeing}")


def _byte_step(instance: Instance, rank: int) -> float:
    """Bytes of a step of (C3): the common factor of what is freed, which is exact, or a millionth of the cap where that is finer.

    Pieces are then rounded down: the model allows a little more than the cap, its bound holds, and its answer is checked.
    """
    costs, cap = instance.ticked, instance.cap_bytes[rank]
    for parts in (1, 2, 4, 8):  # a rank's memory cut into chunks leaves such fractions
        pieces = [parts * size for s in costs.stages_of(rank) for _, size in _freed(costs, s)]
        if all(float(piece).is_integer() for piece in pieces):
            step = math.gcd(*(int(piece) for piece in pieces)) / parts
            return step if cap <= step * _BYTE_STEPS else cap / _BYTE_STEPS
    return cap / _BYTE_STEPS


def _add_objective(
    model: cp_model.CpModel,
    instance: Instance,
    window: Window,
    starts: dict[Action, cp_model.IntVar],
    *,
    horizon: int,
    compact: bool,
) -> None:
    """(O): every rank's end that a free action leads to; for the span less that rank's first start."""
    length = model.new_int_var(0, window.length, "length")
    cleared = []
    for part in filter(None, window.free):
        done = model.new_int_var(0, 2 * horizon + 10**9, "done")
        cleared.append(done)
        for a in part:
            end = starts[a] + _ticks(instance.ticked, a)
            model.add(done >= end)
            for way, first in _ends(instance, window, a):
                model.add(length >= end + way - first)  # O
    model.minimize(length * (4 * len(cleared) + 1) + sum(cleared) if compact else length)


def _ends(instance: Instance, window: Window, action: Action) -> list[tuple[int, int]]:
    """Way to an end and what is taken off there: to every rank's end for the span, the longest for the makespan."""
    ways = [
        (int(way), first)
        for way, first in zip(window.behind[action], window.first_start, strict=True)
        if way > -math.inf
    ]
    return [(max(ways)[0], 0)] if ways and instance.length == "makespan" else ways
