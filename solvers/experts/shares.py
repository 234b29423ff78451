"""Step 5: which share of an expert's tokens each of its replicas takes, for known loads: the weighted split, exactly.

Sets and Data: experts/instance.py; the slots x[s] are given, one layer at a time.
Variables
    f[e,g]  load of expert e that its replica on GPU g takes
Objective
    (O)  min  T
Constraints
    (C1) all:   sum_g f[e,g] = LOAD[e]
    (C2) level: sum_e f[e,g] <= T SPEED[g]
    f >= 0, and 0 where GPU g does not hold e

Method: each expert in turn fills its GPUs like water; then the fullest GPU hands load on along shortest
paths of replicas to a GPU below the bound. The bound of a set A of GPUs is what must stay in it, over its speed: where
nothing leads out of the GPUs that can be reached from the fullest, they are such a set. Equal bound and level prove the
answer. Each bound is the Newton step of a parametric maximum flow, so that there are few. Source: Dinkelbach, Management
Science 13(7), 1967.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from ...schema.units import FloatArray, IntArray
from ..tolerances import FLOW
from .instance import ExpertInstance

_MAX_PATHS = 100_000
"""Never reached with exact numbers: a guard against rounding in a circle."""


@dataclass(frozen=True)
class LoadSplit:
    """y [L, S], the level of the fullest GPU over the mean [L] and its bound [L]: equal where the split is optimal."""

    share: FloatArray
    level: FloatArray
    bound: FloatArray


def split_loads(instance: ExpertInstance, placed: IntArray, scenario: int = 0) -> LoadSplit:
    """Return the shares of x [L, S] with the lowest (O) under the loads of one scenario."""
    num_layers = len(placed)
    share = np.empty(placed.shape)
    level, bound = np.empty(num_layers), np.empty(num_layers)
    gpu, speed = instance.gpu_of_slot.tolist(), instance.gpu_speed.tolist()
    for layer in range(num_layers):
        problem = _LayerSplit(instance.weight[layer, :, scenario].tolist(), placed[layer].tolist(), gpu, speed)
        share[layer], level[layer], bound[layer] = problem.solve()
    return LoadSplit(share, level, bound)


class _LayerSplit:
    """One layer as plain lists, which at this size are quicker than arrays."""

    def __init__(self, weight: list[float], placed: list[int], gpu: list[int], speed: list[float]) -> None:
        slots_of: list[list[int]] = [[] for _ in weight]
        for slot, expert in enumerate(placed):
            slots_of[expert].append(slot)
        self.weight, self.placed, self.gpu, self.speed, self.slots_of = weight, placed, gpu, speed, slots_of
        self.flow = [weight[expert] / len(slots_of[expert]) for expert in placed]
        self.replicated = sorted((e for e, slots in enumerate(slots_of) if len(slots) > 1), key=lambda e: -weight[e])
        self.load = [0.0] * len(speed)
        for slot, amount in enumerate(self.flow):
            self.load[gpu[slot]] += amount
        self.shared_on: list[list[int]] = [[] for _ in speed]
        for expert in self.replicated:
            for slot in slots_of[expert]:
                self.shared_on[gpu[slot]].append(slot)

    def solve(self) -> tuple[list[float], float, float]:
        """Return the shares of the slots, the level and its bound."""
        for expert in self.replicated:  # the paths mend the rest faster than a second sweep
            self._fill(expert)
        level, bound = self._hand_on()
        share = [
            self.flow[slot] / self.weight[e] if self.weight[e] > 0 else 1 / len(self.slots_of[e])
            for slot, e in enumerate(self.placed)
        ]
        return share, level, bound

    def _fill(self, expert: int) -> None:
        """Spread an expert's load, all of it (C1), over its GPUs anew, the emptiest first, up to one level."""
        load, gpu, speed, flow, slots = self.load, self.gpu, self.speed, self.flow, self.slots_of[expert]
        for slot in slots:
            load[gpu[slot]] -= flow[slot]
        order = sorted((load[gpu[slot]] / speed[gpu[slot]], slot) for slot in slots)
        volume, width, level = self.weight[expert], 0.0, 0.0
        for height, slot in order:
            if width and volume / width <= height:
                break
            volume += load[gpu[slot]]
            width += speed[gpu[slot]]
            level = volume / width
        for height, slot in order:
            g = gpu[slot]
            flow[slot] = max(level - height, 0.0) * speed[g]
            load[g] += flow[slot]

    def _hand_on(self) -> tuple[float, float]:
        """Push load along paths from the fullest GPU, whose level is that of (C2), until it is its bound."""
        bound = sum(self.load) / sum(self.speed)
        for _ in range(_MAX_PATHS):
            used = [load / speed for load, speed in zip(self.load, self.speed, strict=True)]
            fullest = max(range(len(used)), key=used.__getitem__)
            if used[fullest] <= bound * (1 + FLOW):
                break
            came_by, end = self._reach(fullest, bound)
            if end is None:
                inside = came_by.keys()
                bound = max(bound, sum(self.load[g] for g in inside) / sum(self.speed[g] for g in inside))
                continue
            self._push(fullest, end, came_by, bound)
        return max(load / speed for load, speed in zip(self.load, self.speed, strict=True)), bound

    def _reach(self, start: int, bound: float) -> tuple[dict[int, tuple[int, int]], int | None]:
        """Return the GPUs that load of `start` can get to, with the (from slot, to slot) they were reached by, and the first one
        below the bound.
        """
        came_by: dict[int, tuple[int, int]] = {start: (-1, -1)}
        seen: set[int] = set()
        queue = deque([start])
        min_flow = self.weight[self.replicated[0]] * 1e-14 if self.replicated else 0.0  # less is rounding
        while queue:
            gpu = queue.popleft()
            for slot in self.shared_on[gpu]:
                expert = self.placed[slot]
                if self.flow[slot] <= min_flow or expert in seen:
                    continue
                seen.add(expert)
                for other in self.slots_of[expert]:
                    g = self.gpu[other]
                    if g not in came_by:
                        came_by[g] = (slot, other)
                        if self.load[g] < bound * self.speed[g] * (1 - FLOW):
                            return came_by, g
                        queue.append(g)
        return came_by, None

    def _push(self, start: int, end: int, came_by: dict[int, tuple[int, int]], bound: float) -> None:
        amount = min(self.load[start] - bound * self.speed[start], bound * self.speed[end] - self.load[end])
        path = []
        g = end
        while g != start:
            source, target = came_by[g]
            path.append((source, target))
            amount = min(amount, self.flow[source])
            g = self.gpu[source]
        for source, target in path:
            self.flow[source] -= amount
            self.flow[target] += amount
        self.load[start] -= amount
        self.load[end] += amount
