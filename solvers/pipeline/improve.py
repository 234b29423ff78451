"""Shortest orders of a pipeline (the problem: pipeline/schedule.py): greedy ones, improved with CP-SAT window by window.

A window is the problem, (O) and (C1)-(C4), over the actions that start in a span of time, which are free. Those before it stay
where they are; those after it keep their sequence, so that all they add to the length is the longest way behind each free action,
a constant: they need no variable. A window of every action is the full problem, which proves what can be proved on small ones.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ...cost_models.pipeline.orders import Action, Kind, Order
from ...cost_models.pipeline.simulation import peak_bytes, simulate
from ...schema.errors import InfeasibleError
from ...schema.units import FloatArray
from ..backend import Limits, Solution, Status, new_constraint_program, solve_constraint_program
from ..tolerances import ROUNDING, SUMMED
from .schedule import PipelineInstance, best_greedy, check, durations_s, length_s, lower_bound_s

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

_ROUNDED_BOUND = 0.5e-3
"""A duration of 1000 ticks or more is rounded by half a tick at most, so a bound in ticks by this part of it."""


def solve(
    instance: PipelineInstance, *, time_limit_s: float = 10.0, rel_gap: float = 0.0, seed: int = 0
) -> Solution[Order]:
    """Return the shortest order of the search; deterministic for a seed unless the time limit ends it."""
    try:
        return synthesise((instance,), time_limit_s=time_limit_s, rel_gap=rel_gap, seed=seed)[1]
    except InfeasibleError:
        return Solution(status=Status.INFEASIBLE, choice=None, bound=math.inf, backend="greedy")


def synthesise(
    instances: tuple[PipelineInstance, ...], *, time_limit_s: float = 10.0, rel_gap: float = 0.0, seed: int = 0
) -> tuple[int, Solution[Order]]:
    """Return the best over instances (placements) and its index: all by greedy, then CP-SAT on those whose bound can still win.

    Raises:
        InfeasibleError: no placement holds one micro-batch.
    """
    begin = time.perf_counter()
    end, bounds = begin + time_limit_s, [lower_bound_s(instance) for instance in instances]
    solutions: dict[int, Solution[Order]] = {}
    for k in sorted(range(len(instances)), key=lambda k: bounds[k]):
        if bounds[k] < min((solution.objective for solution in solutions.values()), default=math.inf):
            greedy = best_greedy(instances[k], until=end)
            if greedy is not None:
                solutions[k] = _solution(*greedy, check(instances[k], greedy[1]), bounds[k])
    if not solutions:
        raise InfeasibleError(
            "no placement of this pipeline can hold one micro-batch within its memory caps [memory (C3)]"
        )
    for turn, k in enumerate(sorted(solutions, key=lambda k: solutions[k].objective)):
        if solutions[k].bound < min(solution.objective for solution in solutions.values()):
            now = time.perf_counter()
            until = now + (end - now) / min(2, len(solutions) - turn)
            solutions[k] = _improved(instances[k], solutions[k], until=until, rel_gap=rel_gap, seed=seed)
    best = min(solutions, key=lambda k: solutions[k].objective)
    return best, replace(solutions[best], solve_s=time.perf_counter() - begin)


def _improved(
    instance: PipelineInstance, start: Solution[Order], *, until: float, rel_gap: float, seed: int
) -> Solution[Order]:
    if start.choice is None or start.gap <= max(rel_gap, ROUNDING) or time.perf_counter() >= until:
        return start
    search = _WindowSearch(instance, split_backward(start.choice), start.bound, until, rel_gap, seed)
    turns: dict[tuple[int, Kind], list[int]] = {}
    for stage, kind, micro_batch in itertools.chain.from_iterable(search.order):
        turns.setdefault((stage, kind), []).append(micro_batch)
    if all(row == sorted(row) for row in turns.values()):  # (C4)
        search.run()
    objective_s = check(instance, search.order)
    if objective_s < start.objective:
        return _solution(f"{start.backend} + cp-sat", search.order, objective_s, search.bound_s)
    return _solution(start.backend, start.choice, start.objective, search.bound_s)


def _solution(backend: str, order: Order, objective_s: float, bound_s: float) -> Solution[Order]:
    status = Status.OPTIMAL if objective_s <= bound_s * (1 + SUMMED) else Status.FEASIBLE
    bound_s = min(bound_s, objective_s)
    return Solution(status=status, choice=order, objective=objective_s, bound=bound_s, backend=backend)


def split_backward(order: Order) -> Order:
    """Return the order with every BW as B and W."""
    halves: dict[Kind, tuple[Kind, ...]] = {"BW": ("B", "W")}
    return tuple(
        tuple(a._replace(kind=kind) for a in actions for kind in halves.get(a.kind, (a.kind,))) for actions in order
    )


class _WindowSearch:
    """The incumbent, its length in units, its proved bound, and the clock."""

    def __init__(
        self, instance: PipelineInstance, order: Order, bound_s: float, end: float, rel_gap: float, seed: int
    ) -> None:
        self.instance, self.order, self.bound_s, self.end = instance, order, bound_s, end
        self.rel_gap, self.seed = rel_gap, seed
        self.length = self._length(order)
        self.random = random.Random(seed)

    def run(self) -> None:
        """Solve windows over the full length, ever larger, until a sweep of the largest gains nothing; then all as one."""
        for size in _WINDOW_ACTIONS:
            gained = True
            while gained and not self._is_finished():
                before = self.length
                for opening, closing in self._openings(size):
                    if self._is_finished():
                        return
                    self._solve(opening, closing, _WINDOW_WORK)
                gained = self.length < before
        if sum(map(len, self.order)) <= _MAX_ACTIONS_IN_FULL and not self._is_finished():
            status, bound = self._solve(0.0, math.inf, _FULL_WORK)
            if status is not Status.INFEASIBLE and bound is not None:
                unit_s = self.instance.unit_s
                pairs = zip(durations_s(self.instance.pipeline), durations_s(self.instance.ticked), strict=True)
                is_exact = all(abs(s - t * unit_s) <= 1e-9 * s for s, t in pairs)
                proved_s = math.ceil(bound - 1e-6) * unit_s * (1 if is_exact else 1 - _ROUNDED_BOUND)
                self.bound_s = max(self.bound_s, proved_s)

    def _length(self, order: Order) -> float:
        return length_s(simulate(self.instance.ticked, order), self.instance.length)

    def _is_finished(self) -> bool:
        """Return whether the order is proved within the gap, or time is over."""
        close = self.length * self.instance.unit_s <= self.bound_s * (1 + max(self.rel_gap, 1e-9))
        return close or time.perf_counter() >= self.end

    def _openings(self, size: int) -> list[tuple[float, float]]:
        timeline = simulate(self.instance.ticked, self.order)
        starts = np.sort(np.concatenate(timeline.start_s))
        edges = [*starts[:: max(1, size // 2)], math.inf]
        windows = [(edges[k], edges[min(k + 2, len(edges) - 1)]) for k in range(max(1, len(edges) - 2))]
        self.random.shuffle(windows)
        return windows

    def _solve(self, opening: float, closing: float, work_limit: float) -> tuple[Status, float | None]:
        window = OrderWindow(self.instance, self.order, opening, closing)
        model, starts = build_model(window, compact=opening > 0 or closing < math.inf)
        limits = Limits(
            time_limit_s=self.end - time.perf_counter(), rel_gap=self.rel_gap, seed=self.seed, work_limit=work_limit
        )
        outcome, solver = solve_constraint_program(model, limits)
        if outcome.status.has_answer:
            rows = []
            for actions, free in zip(self.order, window.free, strict=True):
                idx = actions.index(free[0]) if free else 0
                moved = sorted(free, key=lambda a: solver.value(starts[a]))
                rows.append((*actions[:idx], *moved, *actions[idx + len(free) :]))
            order = tuple(rows)
            length = self._length(order)
            fits = np.all(peak_bytes(self.instance.ticked, order) <= np.array(self.instance.cap_bytes) * (1 + SUMMED))
            if fits and length <= self.length:
                self.order, self.length = order, length
        return outcome.status, outcome.bound


class OrderWindow:
    """The actions that start in a span of time, which are free, and what is fixed around them; times in units of `ticked`."""

    def __init__(self, instance: PipelineInstance, order: Order, opening: float, closing: float) -> None:
        """Free the actions that start at `opening` or later and before `closing`."""
        self.instance, self.costs, self.order, self.opening = instance, instance.ticked, order, opening
        timeline = simulate(self.costs, order)
        self.start = {
            a: int(t)
            for row, times in zip(order, timeline.start_s, strict=True)
            for a, t in zip(row, times, strict=True)
        }
        self.free = tuple(tuple(a for a in row if opening <= self.start[a] < closing) for row in order)
        self.inside = dict.fromkeys(itertools.chain.from_iterable(self.free))
        self.after = sorted((t, a.kind != "F", a) for a, t in self.start.items() if t >= closing)
        self.length = int(length_s(timeline, instance.length))

    def ticks(self, action: Action) -> int:
        """Return the time of an action."""
        costs = self.costs
        return int({"F": costs.forward_s, "B": costs.backward_s, "W": costs.weight_s}[action.kind][action.stage])

    def source(self, action: Action) -> tuple[Action, int] | None:
        """Return the action that another needs (C1), and the transfer behind it."""
        stage, kind, i = action
        if kind == "F":
            return (Action(stage - 1, "F", i), int(self.costs.hop_s(stage - 1))) if stage else None
        if kind == "W":
            return Action(stage, "B", i), 0
        if stage == self.costs.num_stages - 1:
            return Action(stage, "F", i), 0
        return Action(stage + 1, "B", i), int(self.costs.hop_s(stage))

    def freed(self, stage: int) -> list[tuple[Kind, float]]:
        """Return which passes free what a forward pass of a stage keeps, and how much each."""
        pieces = (self.costs.backward_freed_bytes[stage], self.costs.weight_freed_bytes[stage])
        kinds: tuple[Kind, Kind] = ("B", "W")
        return [(kind, size) for kind, size in zip(kinds, pieces, strict=True) if size > 0]

    def ready(self) -> dict[Action, int]:
        """Return the earliest start of each free action that the fixed actions before it allow."""
        ready = {}
        for row, part in zip(self.order, self.free, strict=True):
            fixed = [a for a in row if self.start[a] < self.opening]
            clear = self.start[fixed[-1]] + self.ticks(fixed[-1]) if fixed else 0
            for a in part:
                source = self.source(a)
                is_fixed = source is not None and source[0] not in self.inside
                arrival = self.start[source[0]] + self.ticks(source[0]) + source[1] if source and is_fixed else 0
                ready[a] = max(clear, arrival)
        return ready

    def ways_behind(self) -> dict[Action, FloatArray]:
        """Return the longest way from the end of each free action to each rank's end [R], over the actions after the window."""
        way: dict[Action, FloatArray] = {}
        following = {a: b for row in self.order for a, b in itertools.pairwise(row)}
        leads_to: dict[Action, list[tuple[Action, int]]] = {}
        for _, _, a in self.after:
            if source := self.source(a):
                leads_to.setdefault(source[0], []).append((a, source[1]))

        def longest(a: Action, next_on_rank: Action | None) -> FloatArray:
            ways, ranks = [way[target] + hop for target, hop in leads_to.get(a, ())], np.arange(self.costs.num_ranks)
            to_end = np.where(ranks == self.costs.rank_of_stage[a.stage], 0.0, -np.inf)
            return np.asarray(np.max([*ways, to_end if next_on_rank is None else way[next_on_rank]], axis=0))

        for _, _, a in reversed(self.after):
            way[a] = longest(a, following.get(a)) + self.ticks(a)
        return {a: longest(a, following.get(part[-1])) for part in self.free for a in part}

    def resident(self, rank: int) -> list[tuple[Action | None, float]]:
        """Return the memory of forward passes before the window, each piece with the free action that frees it, or None."""
        done = {a for a in self.order[rank] if self.start[a] < self.opening}
        freeing = [
            (Action(stage, freed_by, i), size)
            for stage, kind, i in sorted(done)
            if kind == "F"
            for freed_by, size in self.freed(stage)
        ]
        return [(a if a in self.inside else None, size) for a, size in freeing if a not in done]

    def byte_step(self, rank: int) -> float:
        """Return the bytes of a step of (C3): the common factor of what is freed, which is exact, or a millionth of the cap.

        Pieces are then rounded down: the model allows a little more than the cap, its bound holds, and its answer is checked.
        """
        cap = self.instance.cap_bytes[rank]
        for parts in (1, 2, 4, 8):  # a rank's memory cut into chunks leaves such fractions
            pieces = [parts * size for s in self.costs.stages_of(rank) for _, size in self.freed(s)]
            if all(float(piece).is_integer() for piece in pieces):
                step = math.gcd(*(int(piece) for piece in pieces)) / parts
                return step if cap <= step * _BYTE_STEPS else cap / _BYTE_STEPS
        return cap / _BYTE_STEPS


def build_model(window: OrderWindow, *, compact: bool) -> tuple[cp_model.CpModel, dict[Action, cp_model.IntVar]]:
    """State (O) and (C1)-(C4) over the free actions, hinted with the current starts.

    Args:
        compact: only look for starts near the current ones, and break ties of (O) by the sum of the ranks' ends in the window,
            so that the next windows have space; without it the bound of the model is one of the problem.
    """
    model, ready, behind = new_constraint_program(), window.ready(), window.ways_behind()
    latest_end = max((window.start[a] + window.ticks(a) for a in window.inside), default=0)
    opens, first_start = min(ready.values(), default=0), [window.start[row[0]] for row in window.order]
    horizon = latest_end + (latest_end - opens) // 4 if compact else max(first_start) + window.length
    starts = {a: model.new_int_var(ready[a], horizon, str(a)) for a in window.inside}
    for a, variable in starts.items():
        model.add_hint(variable, window.start[a])
        source = window.source(a)
        if source and source[0] in starts:
            model.add(variable >= starts[source[0]] + window.ticks(source[0]) + source[1])  # C1
        earlier = a._replace(micro_batch=a.micro_batch - 1)
        if earlier in starts:
            model.add(variable >= starts[earlier] + window.ticks(a))  # C4
    length, cleared = model.new_int_var(0, window.length, "length"), []
    for rank, part in enumerate(window.free):
        model.add_no_overlap([model.new_fixed_size_interval_var(starts[a], window.ticks(a), f"C2 {a}") for a in part])
        _add_memory(model, window, rank, starts, opens, horizon)
        if part:
            cleared.append(model.new_int_var(0, 2 * horizon + 10**9, "done"))
        for a in part:
            end = starts[a] + window.ticks(a)
            model.add(cleared[-1] >= end)
            # For the span less each rank's first start, which is the same in every order; the longest for the makespan.
            ways = [(int(way), first) for way, first in zip(behind[a], first_start, strict=True) if way > -math.inf]
            if window.instance.length == "makespan":
                ways = [(max(ways)[0], 0)] if ways else []
            for way, first in ways:
                model.add(length >= end + way - first)  # O
    model.minimize(length * (4 * len(cleared) + 1) + sum(cleared) if compact else length)
    return model, starts


def _add_memory(
    model: cp_model.CpModel,
    window: OrderWindow,
    rank: int,
    starts: dict[Action, cp_model.IntVar],
    opens: int,
    horizon: int,
) -> None:
    """State (C3) of one rank as a cumulative resource: one piece from F to the end of B, one from F to the end of W."""
    step, boxes, sizes = window.byte_step(rank), [], []

    def steps(size: float) -> int:
        return math.floor(size / step + _STEP_ROUNDING)

    def add_piece(start: cp_model.IntVar | int, freeing: Action, size: float) -> None:
        """Add a piece that is stored until the end of an action, past everything if that is not free."""
        end: cp_model.LinearExprT = horizon + window.ticks(freeing) + 1
        if freeing in starts:
            end = starts[freeing] + window.ticks(freeing)
        length = model.new_int_var(0, 2 * horizon + 10**9, "C3 size")
        boxes.append(model.new_interval_var(start, length, end, f"C3 {freeing}"))
        sizes.append(steps(size))

    room = steps(window.instance.cap_bytes[rank])
    for freeing, size in window.resident(rank):
        if freeing is None:
            room -= steps(size)
        else:
            add_piece(opens, freeing, size)
    for a in (a for a in window.free[rank] if a.kind == "F"):
        for kind, size in window.freed(a.stage):
            add_piece(starts[a], a._replace(kind=kind), size)
    if boxes:
        model.add_cumulative(boxes, sizes, max(room, 0))
