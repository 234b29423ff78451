"""Improve a pipeline order with CP-SAT, one window of time after the other, and prove what can be proved on small ones.

A window is the problem of pipeline/schedule.py, (O) and (C1)-(C4), over the actions that start in it, which are free. Those before
it stay where they are; those after it keep their sequence, so that all they add to the length is the longest way behind each free
action, a constant: they need no variable. A window of every action is the full problem.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...cost_models.pipeline.simulation import Action, Kind, Order, Pipeline, peak_bytes, simulate
from ...schema.units import FloatArray
from ..backend import Limits, Status, new_constraint_program, solve_constraint_program
from ..tolerances import SUMMED
from .greedy import PipelineInstance, length_s

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


_BYTE_STEPS = 10**6
"""Steps of memory that a cap has at most: CP-SAT's cumulative constraint sums integers of this size exactly."""

_STEP_ROUNDING = 1e-6
"""Of a step: what a number of bytes may lack of a multiple of the step and still count as one."""

_MAX_ACTIONS_IN_FULL = 450
"""Of an order that is also solved as one window: with more CP-SAT proves nothing in its time."""

_WINDOW_ACTIONS = (30, 60, 120)
"""Actions of a window, small ones first, which leave less to the larger ones."""

_WINDOW_WORK, _FULL_WORK = 3.0, 60.0
"""Deterministic time of CP-SAT for a window and for all actions at once."""

_ROUNDING = 0.5e-3
"""A duration of 1000 ticks or more is rounded by half a tick at most, so a bound in ticks by this part of it."""


@dataclass(frozen=True)
class OrderWindow:
    """Free actions of each rank with their starts, and what is fixed around them; times in units of `PipelineInstance.ticked`.

    Args:
        free: [R] contiguous part of each rank's sequence.
        start: current start of each free action, a solution.
        ready: earliest start of each free action that the fixed actions before it allow.
        behind: [R] time from the end of a free action to the end of each rank, -inf where nothing leads there.
        first_start: [R] start of a rank's first action; every order has the same.
        length: the incumbent's, which the answer must not exceed.
        resident: [R] pieces of memory resident when the window opens: (freed by which free action, or None, and bytes).
    """

    free: tuple[tuple[Action, ...], ...]
    start: dict[Action, int]
    ready: dict[Action, int]
    behind: dict[Action, FloatArray]
    first_start: tuple[int, ...]
    length: int
    resident: tuple[tuple[tuple[Action | None, float], ...], ...]


def open_window(instance: PipelineInstance, order: Order, opening: float, closing: float) -> OrderWindow:
    """Return the window of the actions that start at `opening` or later and before `closing`."""
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
            is_fixed = source is not None and source[0] not in inside
            arrival = starts[source[0]] + _ticks(costs, source[0]) + source[1] if source and is_fixed else 0
            ready[a] = max(clear, arrival)
    return OrderWindow(
        free=free,
        start={a: starts[a] for a in inside},
        ready=ready,
        behind=_ways_behind(costs, order, free, starts, closing),
        first_start=tuple(starts[actions[0]] for actions in order),
        length=int(length_s(timeline, instance.length)),
        resident=_resident_at_opening(costs, order, free, starts, opening),
    )


def _ticks(costs: Pipeline, action: Action) -> int:
    return int({"F": costs.forward_s, "B": costs.backward_s, "W": costs.weight_s}[action.kind][action.stage])


def _source(costs: Pipeline, action: Action) -> tuple[Action, int] | None:
    """Return the action that another needs (C1), and the transfer behind it."""
    stage, kind, i = action
    if kind == "F":
        return (Action(stage - 1, "F", i), int(costs.hop_s(stage - 1))) if stage else None
    if kind == "W":
        return Action(stage, "B", i), 0
    if stage == costs.num_stages - 1:
        return Action(stage, "F", i), 0
    return Action(stage + 1, "B", i), int(costs.hop_s(stage))


def _ways_behind(
    costs: Pipeline, order: Order, free: tuple[tuple[Action, ...], ...], starts: dict[Action, int], closing: float
) -> dict[Action, FloatArray]:
    """Return the longest way from the end of each free action to each rank's end, over the actions after the window."""
    after = sorted((t, a.kind != "F", a) for a, t in starts.items() if t >= closing)
    behind = {a: np.full(costs.num_ranks, -np.inf) for part in free for a in part}
    way: dict[Action, FloatArray] = {}
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


def _resident_at_opening(
    costs: Pipeline, order: Order, free: tuple[tuple[Action, ...], ...], starts: dict[Action, int], opening: float
) -> tuple[tuple[tuple[Action | None, float], ...], ...]:
    """Return the memory of forward passes before the window that is freed in it (by which action) or after it (None)."""
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
    pieces: tuple[tuple[Kind, float], ...] = (
        ("B", costs.backward_freed_bytes[stage]),
        ("W", costs.weight_freed_bytes[stage]),
    )
    return [piece for piece in pieces if piece[1] > 0]


def build_model(
    instance: PipelineInstance, window: OrderWindow, *, compact: bool
) -> tuple[cp_model.CpModel, dict[Action, cp_model.IntVar]]:
    """State (O) and (C1)-(C4) over the free actions, hinted with the current starts.

    Args:
        compact: only look for starts near the current ones, and break ties of (O) by the sum of the ranks' ends in the window,
            so that the next windows have space; without it the bound of the model is one of the problem.
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
    instance: PipelineInstance
    window: OrderWindow
    rank: int
    starts: dict[Action, cp_model.IntVar]
    horizon: int

    def add(self) -> None:
        costs, cap = self.instance.ticked, self.instance.cap_bytes[self.rank]
        opens = min(self.window.ready.values(), default=0)
        step = _byte_step(self.instance, self.rank)
        room, boxes, sizes = math.floor(cap / step + _STEP_ROUNDING), [], []
        for freeing, size in self.window.resident[self.rank]:
            if freeing is None:
                room -= math.floor(size / step + _STEP_ROUNDING)
            else:
                boxes.append(self._piece(opens, freeing))
                sizes.append(math.floor(size / step + _STEP_ROUNDING))
        for a in (a for a in self.window.free[self.rank] if a.kind == "F"):
            for kind, size in _freed(costs, a.stage):
                boxes.append(self._piece(self.starts[a], a._replace(kind=kind)))
                sizes.append(math.floor(size / step + _STEP_ROUNDING))
        if boxes:
            self.model.add_cumulative(boxes, sizes, max(room, 0))

    def _piece(self, start: cp_model.IntVar | int, freeing: Action) -> cp_model.IntervalVar:
        """Return the time from `start` to the end of the action that frees it, past everything if that is not free."""
        if freeing in self.starts:
            end: cp_model.LinearExprT = self.starts[freeing] + _ticks(self.instance.ticked, freeing)
        else:
            end = self.horizon + _ticks(self.instance.ticked, freeing) + 1
        size = self.model.new_int_var(0, 2 * self.horizon + 10**9, "C3 size")
        return self.model.new_interval_var(start, size, end, f"C3 {freeing}")


def _byte_step(instance: PipelineInstance, rank: int) -> float:
    """Return the bytes of a step of (C3): the common factor of what is freed, which is exact, or a millionth of the cap if finer.

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
    instance: PipelineInstance,
    window: OrderWindow,
    starts: dict[Action, cp_model.IntVar],
    *,
    horizon: int,
    compact: bool,
) -> None:
    """State (O): every rank's end that a free action leads to; for the span less that rank's first start."""
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


def _ends(instance: PipelineInstance, window: OrderWindow, action: Action) -> list[tuple[int, int]]:
    """Return ways to an end and what is taken off at it: to every rank's end for the span, the longest for the makespan."""
    ways = [
        (int(way), first)
        for way, first in zip(window.behind[action], window.first_start, strict=True)
        if way > -math.inf
    ]
    return [(max(ways)[0], 0)] if ways and instance.length == "makespan" else ways


def improve(
    instance: PipelineInstance, order: Order, *, bound_s: float, time_limit_s: float, rel_gap: float, seed: int
) -> tuple[Order, float]:
    """Return a shorter order or the same, and a proved bound in seconds (zero unless all actions were solved at once)."""
    begin = time.perf_counter()
    order = split_backward(order)
    if not _in_order(order):
        return order, 0.0
    search = _WindowSearch(instance, order, bound_s, begin + time_limit_s, rel_gap, seed)
    search.sweep()
    if sum(map(len, order)) <= _MAX_ACTIONS_IN_FULL and not search.finished():
        search.solve_full_window()
    return search.order, search.bound_s


def split_backward(order: Order) -> Order:
    """Return the order with every BW as B and W."""

    def split(action: Action) -> tuple[Action, ...]:
        if action.kind != "BW":
            return (action,)
        return action._replace(kind="B"), action._replace(kind="W")

    return tuple(tuple(half for action in actions for half in split(action)) for actions in order)


def _in_order(order: Order) -> bool:
    """Return whether each stage and kind takes the micro-batches in order (C4)."""
    for actions in order:
        latest: dict[tuple[int, str], int] = {}
        for stage, kind, micro_batch in actions:
            if micro_batch < latest.get((stage, kind), -1):
                return False
            latest[stage, kind] = micro_batch
    return True


class _WindowSearch:
    """The incumbent, its length, and the clock."""

    def __init__(
        self, instance: PipelineInstance, order: Order, bound_s: float, end: float, rel_gap: float, seed: int
    ) -> None:
        self.instance, self.order, self.bound_s, self.end = instance, order, bound_s, end
        self.rel_gap, self.seed = rel_gap, seed
        self.length = self._length(order)
        self.random = random.Random(seed)

    def _length(self, order: Order) -> float:
        return length_s(simulate(self.instance.ticked, order), self.instance.length)

    def finished(self) -> bool:
        """Return whether the order is proved within the gap, or time is over."""
        close = self.length * self.instance.unit_s <= self.bound_s * (1 + max(self.rel_gap, 1e-9))
        return close or time.perf_counter() >= self.end

    def solve_full_window(self) -> None:
        """Solve with all actions free, which proves a bound."""
        status, bound = self._solve(0.0, math.inf, _FULL_WORK)
        if status is not Status.INFEASIBLE and bound is not None:
            self.bound_s = max(self.bound_s, math.ceil(bound - 1e-6) * self.instance.unit_s * (1 - self._rounding()))

    def sweep(self) -> None:
        """Solve windows over the full length, ever larger, until a sweep of the largest gains nothing."""
        for size in _WINDOW_ACTIONS:
            gained = True
            while gained and not self.finished():
                before = self.length
                for opening, closing in self._openings(size):
                    if self.finished():
                        return
                    self._solve(opening, closing, _WINDOW_WORK)
                gained = self.length < before

    def _openings(self, size: int) -> list[tuple[float, float]]:
        timeline = simulate(self.instance.ticked, self.order)
        starts = np.sort(np.concatenate(timeline.start_s))
        edges = [*starts[:: max(1, size // 2)], math.inf]
        windows = [(edges[k], edges[min(k + 2, len(edges) - 1)]) for k in range(max(1, len(edges) - 2))]
        self.random.shuffle(windows)
        return windows

    def _solve(self, opening: float, closing: float, work_limit: float) -> tuple[Status, float | None]:
        window = open_window(self.instance, self.order, opening, closing)
        is_full = opening <= 0 and closing == math.inf
        model, starts = build_model(self.instance, window, compact=not is_full)
        limits = Limits(
            time_limit_s=self.end - time.perf_counter(), rel_gap=self.rel_gap, seed=self.seed, work_limit=work_limit
        )
        outcome, solver = solve_constraint_program(model, limits)
        if outcome.status.has_answer:
            new_starts = {action: solver.value(variable) for action, variable in starts.items()}
            order = _with_window(self.order, window, new_starts)
            length = self._length(order)
            fits = np.all(peak_bytes(self.instance.ticked, order) <= np.array(self.instance.cap_bytes) * (1 + SUMMED))
            if fits and length <= self.length:
                self.order, self.length = order, length
        return outcome.status, outcome.bound

    def _rounding(self) -> float:
        costs, ticked, unit = self.instance.pipeline, self.instance.ticked, self.instance.unit_s
        pairs = zip(
            (*costs.forward_s, *costs.backward_s, *costs.weight_s, *costs.transfer_s),
            (*ticked.forward_s, *ticked.backward_s, *ticked.weight_s, *ticked.transfer_s),
            strict=True,
        )
        return 0.0 if all(abs(s - t * unit) <= 1e-9 * s for s, t in pairs) else _ROUNDING


def _with_window(order: Order, window: OrderWindow, start: dict[Action, int]) -> Order:
    rows = []
    for actions, free in zip(order, window.free, strict=True):
        idx = actions.index(free[0]) if free else 0
        rows.append((*actions[:idx], *sorted(free, key=lambda a: start[a]), *actions[idx + len(free) :]))
    return tuple(rows)
