"""Improve a pipeline order with CP-SAT, one window of time after the other, and prove what can be proved on small ones."""

from __future__ import annotations

import math
import random
import time

import numpy as np

from ..cost_models.pipeline_simulation import Action, Order, peak_bytes, simulate
from .backend import Limits, solve_constraint_program
from .pipeline_instance import CAP_SLACK, Instance, length_s
from .pipeline_window import Window, build_model, open_window
from .status import Status

_WHOLE_ACTIONS = 450
_WINDOW_ACTIONS = (30, 60, 120)
_WINDOW_WORK = 3.0
_WHOLE_WORK = 60.0
_ROUNDING = 0.5e-3  # a duration of 1000 ticks or more is rounded by half a tick at most


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
            fits = np.all(
                peak_bytes(self.instance.ticked, order) <= np.array(self.instance.cap_bytes) * (1 + CAP_SLACK)
            )
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


def _with_window(order: Order, window: Window, start: dict[Action, int]) -> Order:
    rows = []
    for actions, free in zip(order, window.free, strict=True):
        at = actions.index(free[0]) if free else 0
        rows.append((*actions[:at], *sorted(free, key=lambda a: start[a]), *actions[at + len(free) :]))
    return tuple(rows)
