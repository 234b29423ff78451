"""Improve a pipeline order with CP-SAT, one window of time after the other; the model of solvers/pipeline_schedule.py.

In a window the actions that start in it are free. Those before it stay where they are; those after it keep their sequence, so that
all they add to the length is the longest path behind each free action, a constant: they need no variable. A window that
holds every action is the whole problem, and its bound is a bound of the problem.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .backend import Limits, new_constraint_program, solve_constraint_program
from .pipeline_schedule import Instance, length_s
from .pipeline_simulation import Action, Order, Pipeline, simulate
from .status import Status

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

_WHOLE_ACTIONS = 450
_WINDOW_ACTIONS = (30, 60, 120)
_WINDOW_WORK = 3.0
_WHOLE_WORK = 60.0
_ROUNDING = 0.5e-3  # a duration of 1000 ticks or more is rounded by half a tick at most
_BYTE_STEPS = 10**6


@dataclass(frozen=True)
class Window:
    """Free actions of each rank with their starts, and what is fixed around them; times in units of `Instance.ticked`.

    Args:
        free: [R] contiguous part of each rank's sequence.
        start: current start of each free action, a solution.
        ready: earliest start of each free action that the fixed actions before it allow.
        behind: [R] seconds from the end of a free action to the end of each rank, -inf where nothing leads there.
        first_start: [R] start of a rank's first action, None where that is free.
        held: [R] pieces of memory held when the window opens: (freed by which free action, or None, and bytes).
    """

    free: tuple[tuple[Action, ...], ...]
    start: dict[Action, int]
    ready: dict[Action, int]
    behind: dict[Action, NDArray[np.float64]]
    first_start: tuple[int | None, ...]
    held: tuple[tuple[tuple[Action | None, float], ...], ...]


def improve(
    instance: Instance, order: Order, *, bound_s: float, time_limit_s: float, rel_gap: float, seed: int
) -> tuple[Order, float]:
    """A shorter order or the same, and a proved bound in seconds (zero where no whole window was solved)."""
    begin = time.perf_counter()
    order = split_backward(order)
    if not _in_order(order):
        return order, 0.0
    search = _Search(instance, order, bound_s, begin + time_limit_s, rel_gap, seed)
    search.sweep()
    if sum(map(len, order)) <= _WHOLE_ACTIONS and not search.finished():
        search.whole()
    return search.order, search.bound_s


def split_backward(order: Order) -> Order:
    """Every BW as B and W."""

    def parts(action: Action) -> tuple[Action, ...]:
        if action.kind != "BW":
            return (action,)
        return action._replace(kind="B"), action._replace(kind="W")

    return tuple(tuple(part for action in actions for part in parts(action)) for actions in order)


def _in_order(order: Order) -> bool:
    """(C4): each stage and kind takes the micro-batches in order."""
    for actions in order:
        latest: dict[tuple[int, str], int] = {}
        for stage, kind, micro_batch in actions:
            if micro_batch < latest.get((stage, kind), -1):
                return False
            latest[stage, kind] = micro_batch
    return True


class _Search:
    """The incumbent, its length, and the clock."""

    def __init__(self, instance: Instance, order: Order, bound_s: float, end: float, rel_gap: float, seed: int) -> None:
        self.instance, self.order, self.bound_s, self.end = instance, order, bound_s, end
        self.rel_gap, self.seed = rel_gap, seed
        self.length = self._length(order)
        self.random = random.Random(seed)

    def _length(self, order: Order) -> float:
        return length_s(simulate(self.instance.ticked, order), self.instance.length)

    def finished(self) -> bool:
        """Proved within the gap, or out of time."""
        close = self.length * self.instance.unit_s <= self.bound_s * (1 + max(self.rel_gap, 1e-9))
        return close or time.perf_counter() >= self.end

    def whole(self) -> None:
        """All actions free at once."""
        status, bound = self._solve(0.0, math.inf, _WHOLE_WORK)
        if status is not Status.INFEASIBLE and bound is not None:
            self.bound_s = max(self.bound_s, math.ceil(bound - 1e-6) * self.instance.unit_s * (1 - self._rounding()))

    def sweep(self) -> None:
        """Windows over the whole time, ever larger, until a sweep of the largest gains nothing."""
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
        """Half-overlapping windows of about `size` actions, in random order."""
        timeline = simulate(self.instance.ticked, self.order)
        starts = np.sort(np.concatenate(timeline.start_s))
        edges = [*starts[:: max(1, size // 2)], math.inf]
        windows = [(edges[k], edges[min(k + 2, len(edges) - 1)]) for k in range(max(1, len(edges) - 2))]
        self.random.shuffle(windows)
        return windows

    def _solve(self, opening: float, closing: float, work_limit: float) -> tuple[Status, float | None]:
        window = open_window(self.instance, self.order, opening, closing)
        whole = opening <= 0 and closing == math.inf
        model, starts = build_model(self.instance, window, compact=not whole)
        limits = Limits(
            time_limit_s=self.end - time.perf_counter(), rel_gap=self.rel_gap, seed=self.seed, work_limit=work_limit
        )
        outcome, solver = solve_constraint_program(model, limits)
        if outcome.status in (Status.OPTIMAL, Status.FEASIBLE):
            found = {action: solver.value(variable) for action, variable in starts.items()}
            order = _with_window(self.order, window, found)
            length = self._length(order)
            if length <= self.length:
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


def _with_window(order: Order, window: Window, start: dict[Action, int]) -> Order:
    rows = []
    for actions, free in zip(order, window.free, strict=True):
        at = actions.index(free[0]) if free else 0
        rows.append((*actions[:at], *sorted(free, key=lambda a: start[a]), *actions[at + len(free) :]))
    return tuple(rows)


def open_window(instance: Instance, order: Order, opening: float, closing: float) -> Window:
    """The window of the actions that start at `opening` or later and before `closing`."""
    costs = instance.ticked
    timeline = simulate(costs, order)
    starts = {a: int(t) for actions, times in zip(order, timeline.start_s, strict=True) for a, t in zip(actions, times, strict=True)}
    free = tuple(tuple(a for a in actions if opening <= starts[a] < closing) for actions in order)
    inside = set(itertools.chain.from_iterable(free))
    ready, first_start = {}, []
    for actions, part in zip(order, free, strict=True):
        fixed = [a for a in actions if starts[a] < opening]
        clear = starts[fixed[-1]] + _ticks(costs, fixed[-1]) if fixed else 0
        first_start.append(starts[actions[0]] if actions[0] not in inside else None)
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
        first_start=tuple(first_start),
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
            for freeing, size in (("B", costs.backward_freed_bytes[stage]), ("W", costs.weight_freed_bytes[stage])):
                a = Action(stage, freeing, i)  # type: ignore[arg-type]
                if a not in done:
                    pieces.append((a if a in inside else None, size))
        rows.append(tuple(pieces))
    return tuple(rows)


def build_model(
    instance: Instance, window: Window, *, compact: bool
) -> tuple[cp_model.CpModel, dict[Action, cp_model.IntVar]]:
    """(O) and (C1)-(C4) over the free actions, hinted with the current starts.

    Args:
        compact: break ties of (O) by the sum of the ranks' ends in the window, so that the next windows find room.
    """
    costs, model = instance.ticked, new_constraint_program()
    horizon = max((t + _ticks(costs, a) for a, t in window.start.items()), default=0) + 1
    starts = {a: model.new_int_var(window.ready[a], horizon, str(a)) for a in window.start}
    ends = {a: starts[a] + _ticks(costs, a) for a in starts}
    for a, variable in starts.items():
        model.add_hint(variable, window.start[a])
        source = _source(costs, a)
        if source and source[0] in starts:
            model.add(variable >= ends[source[0]] + source[1]).with_name(f"C1 {a}")
        earlier = a._replace(micro_batch=a.micro_batch - 1)
        if earlier in starts:
            model.add(variable >= ends[earlier]).with_name(f"C4 {a}")
    opens = min(window.ready.values(), default=0)
    for rank, part in enumerate(window.free):
        boxes = [model.new_fixed_size_interval_var(starts[a], _ticks(costs, a), f"C2 {a}") for a in part]
        model.add_no_overlap(boxes)
        _add_memory(model, instance, window, rank, starts, opens, horizon)
    _add_objective(model, instance, window, starts, compact)
    return model, starts


def _add_memory(
    model: cp_model.CpModel, instance: Instance, window: Window, rank: int, starts: dict[Action, cp_model.IntVar], opens: int, horizon: int
) -> None:
    """(C3) as a cumulative resource: one piece from F to the end of B, one from F to the end of W."""
    costs, cap = instance.ticked, instance.cap_bytes[rank]
    if not window.free[rank] or cap <= 0:
        return
    step = cap / _BYTE_STEPS if any(x % 1 for x in (cap, *costs.backward_freed_bytes, *costs.weight_freed_bytes)) else 1.0
    room = math.floor(cap / step * (1 + 1e-9))
    boxes, sizes = [], []
    for freeing, size in window.held[rank]:
        if freeing is None:
            room -= math.ceil(size / step - 1e-3)
        elif size > 0:
            boxes.append(_piece(model, opens, starts[freeing], _ticks(costs, freeing), horizon, str(freeing)))
            sizes.append(math.ceil(size / step - 1e-3))
    for a in window.free[rank]:
        if a.kind != "F":
            continue
        for freeing, size in (("B", costs.backward_freed_bytes[a.stage]), ("W", costs.weight_freed_bytes[a.stage])):
            end = a._replace(kind=freeing)  # type: ignore[arg-type]
            until = starts.get(end)
            if size > 0:
                ticks = _ticks(costs, end) if until is not None else 0
                boxes.append(_piece(model, starts[a], until if until is not None else horizon + 1, ticks, horizon, f"{a}-{end}"))
                sizes.append(math.ceil(size / step - 1e-3))
    if boxes:
        model.add_cumulative(boxes, sizes, max(room, 0))


def _piece(
    model: cp_model.CpModel, start: cp_model.IntVar | int, last: cp_model.IntVar | int, ticks: int, horizon: int, name: str
) -> cp_model.IntervalVar:
    length = model.new_int_var(0, 2 * horizon + ticks + 2, f"C3 length {name}")
    return model.new_interval_var(start, length, last + ticks, f"C3 {name}")


def _add_objective(
    model: cp_model.CpModel, instance: Instance, window: Window, starts: dict[Action, cp_model.IntVar], compact: bool
) -> None:
    """(O): every end that a free action leads to; for the span less the first start of that rank."""
    costs = instance.ticked
    total = int(sum(np.max(behind, initial=0.0) for behind in itertools.islice(window.behind.values(), 1)))
    horizon = max((t for t in window.start.values()), default=0)
    length = model.new_int_var(0, 4 * (horizon + total) + 10**9, "length")
    done = []
    for rank, part in enumerate(window.free):
        if not part:
            continue
        cleared = model.new_int_var(0, 2 * horizon + 10**9, f"done {rank}")
        done.append(cleared)
        for a in part:
            end = starts[a] + _ticks(costs, a)
            model.add(cleared >= end)
            for target, way in _targets(instance, window.behind[a]):
                first = window.first_start[target] if target is not None else 0
                opening = starts[window.free[target][0]] if first is None and target is not None else int(first or 0)
                model.add(length >= end + way - opening).with_name(f"O {a} {target}")
    if compact:
        model.minimize(length * (4 * len(done) + 1) + sum(done))
    else:
        model.minimize(length)


def _targets(instance: Instance, behind: NDArray[np.float64]) -> Sequence[tuple[int | None, int]]:
    """Ranks whose end counts, with the way there: all for the span, only the longest for the makespan."""
    if instance.length == "makespan":
        longest = float(np.max(behind))
        return [(None, int(longest))] if longest > -math.inf else []
    return [(rank, int(way)) for rank, way in enumerate(behind) if way > -math.inf]
