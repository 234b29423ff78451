"""What no placement of the experts can beat, for each layer, as largest load over the mean.

mean     1: the loads sum to what they sum to
share    min over r of max_e LOAD[e] / r[e] / max SPEED: some replica of some expert takes that much, whatever is split;
with several workloads LOAD is the largest of them, as one r serves all
partners a GPU with K slots that holds the largest share holds K - 1 other experts too (C2). With X slots beyond one for each
expert these take at least (sum of the roots of the K - 1 smallest loads)^2 / (K - 1 + X), by Cauchy and Schwarz.
Uniform split only
Hall     two slots on every GPU: a share above T / 2 needs a partner of its own below T less it. If for some a in (T/2, T]
every r has more shares of a or more than shares of T - a or less, no placement reaches T (Hall's condition). Over r that is a
knapsack, relaxed by Lagrange. Uniform split only

Exact places for small cases, and bounds, by CP-SAT: layer by layer, the largest gap first.

Variables
    z[e,r]    1 if expert e has r replicas
    y[e,r,g]  1 if one of these r is on GPU g
    T         level, in parts of the mean
Objective
    (O)  min T
Constraints
    (C1) present:  sum_{r >= 1} z[e,r] = 1
    (C2) distinct: sum_g y[e,r,g] = r z[e,r], at most one on each GPU
    (C5) slots:    sum_{e,r} y[e,r,g] = SLOTS[g]
    (C6) level:    sum_{e,r} floor(SCALE LOAD[d,e] / r / SPEED[g]) y[e,r,g] <= T, each d and g
The sizes are rounded down, so that the bound holds for the real ones; the objective of an answer is recomputed.
"""

from __future__ import annotations

import time

import numpy as np

from ..backend import Limits, new_constraint_program, solve_constraint_program
from ..solution import Status
from .instance import (
    ExpertInstance,
    FloatArray,
    IntArray,
    experts_on_gpus,
    replica_counts,
    select_layers,
    uniform_objective,
)
from .packing import greedy_counts

_LEVELS = np.concatenate([[0.5003, 0.501, 0.503, 0.51], np.linspace(0.53, 1.0, 10)])


_PRICES = np.array([1.0, 1.2, 1.5, 2.0, 3.0, 5.0])


_HALVINGS = 10


_MIN_GAP = 1.002


def lower_bound(instance: ExpertInstance, *, weighted: bool, reached: FloatArray | None = None) -> FloatArray:
    """The largest of the bounds [L].

    Args:
        weighted: shares are free; else every replica of an expert takes as much as any other.
        reached: objective of a known answer [L]: Hall's bound is looked for only where the others leave a gap to it.
    """
    largest_load = instance.weight.max(axis=2)
    counts = greedy_counts(largest_load, instance.num_slots, instance.num_gpus)
    share = (largest_load / counts).max(axis=1) / instance.gpu_speed.max()
    if weighted:
        return np.asarray(np.maximum(1.0, share))
    bound = np.maximum(1.0, _partner_bound(instance))
    if not np.all(instance.slots_per_gpu == 2) or np.any(instance.gpu_speed != 1):
        return bound
    open_layers = np.ones(len(bound), dtype=bool) if reached is None else reached > bound * _MIN_GAP
    for d in range(len(instance.load)):
        if open_layers.any():
            found = _hall_bound(instance.weight[open_layers, :, d], instance.num_gpus, bound[open_layers])
            bound[open_layers] = np.maximum(bound[open_layers], found)
    return bound


def _partner_bound(instance: ExpertInstance) -> FloatArray:
    """Largest share plus the least that the other slots of its GPU can hold [L], the largest over workloads."""
    others = int(instance.slots_per_gpu.min()) - 1
    extra = instance.num_slots - instance.num_experts
    bounds = []
    for weight in np.moveaxis(instance.weight, 2, 0):
        counts = greedy_counts(weight, instance.num_slots, instance.num_gpus)
        smallest = np.sort(weight, axis=1)[:, :others]
        partners = smallest.sum(axis=1) if extra == 0 else np.sqrt(smallest).sum(axis=1) ** 2 / max(others + extra, 1)
        bounds.append((weight / counts).max(axis=1) + partners)
    together = instance.weight.max(axis=2)
    counts = greedy_counts(together, instance.num_slots, instance.num_gpus)
    bounds.append((together / counts).max(axis=1))
    return np.asarray(np.max(bounds, axis=0) / instance.gpu_speed.max())


def _hall_bound(weight: FloatArray, num_gpus: int, low: FloatArray) -> FloatArray:
    """The largest T [B] found impossible, from T = ``low`` upwards by halving, else ``low``."""
    high = low * 2.0
    low = low.copy()
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        impossible = _breaks_hall(weight, middle, num_gpus)
        low, high = np.where(impossible, middle, low), np.where(impossible, high, middle)
    return low


def _breaks_hall(weight: FloatArray, target: FloatArray, num_gpus: int) -> np.ndarray:
    """Whether some level a leaves every r [B] with more big shares than small ones, by the Lagrangian bound of the knapsack.

    An expert with r replicas counts +r where LOAD / r <= T - a, -r where LOAD / r >= a; max over r of the sum, with sum r
    = 2 G, is at most min over prices p >= 1 of 2 G p + sum_e max_r (count - p r). For p >= 1 the least r of each kind is
    the best of it.
    """
    goal = target[:, None, None]
    load = weight[:, None, :]
    level = goal * _LEVELS[None, :, None]
    least = np.maximum(np.ceil(load / goal * (1 - 1e-12)), 1)
    small = np.ceil(load / np.maximum(goal - level, 1e-300) * (1 - 1e-12))
    small = np.maximum(small, 1)
    middle = np.maximum(np.floor(load / level * (1 + 1e-12)) + 1, 1)
    best = np.full(level.shape[:2], np.inf)
    for price in _PRICES:
        value = np.where(small <= num_gpus, (1 - price) * small, -np.inf)
        value = np.maximum(value, np.where(middle <= num_gpus, -price * middle, -np.inf))
        value = np.maximum(value, np.where(least <= num_gpus, -(1 + price) * least, -np.inf))
        best = np.minimum(best, 2 * num_gpus * price + value.sum(axis=2))
    return np.asarray((best < -1e-9).any(axis=1))


_SCALE = 10**6


_MAX_VARIABLES = 60_000


_PROVED = 1 + 1e-5


def solve_exactly(
    instance: ExpertInstance, placed: IntArray, *, time_limit_s: float, seed: int
) -> tuple[IntArray, FloatArray]:
    """Better places where there are, and bounds [L] that are equal to (O) where the answer is proved."""
    deadline = time.perf_counter() + time_limit_s
    best, reached = placed.copy(), uniform_objective(instance, placed)
    bound = lower_bound(instance, weighted=False, reached=reached)
    order = np.argsort(-reached / bound)
    order = order[reached[order] > bound[order] * _PROVED]
    for done, layer in enumerate(order):
        left = deadline - time.perf_counter()
        if left <= 0:
            break
        part = select_layers(instance, np.array([layer]))
        found, proved = _solve_layer(part, best[layer], Limits(time_limit_s=left / (len(order) - done), seed=seed))
        bound[layer] = max(bound[layer], proved)
        if found is not None:
            objective = uniform_objective(part, found[None])[0]
            if objective < reached[layer]:
                best[layer], reached[layer] = found, objective
    return best, np.minimum(bound, reached)


def _solve_layer(instance: ExpertInstance, start: IntArray, limits: Limits) -> tuple[IntArray | None, float]:
    """Places [S] of one layer, if any, and a bound on its level; 0 where the model would be too large to help."""
    num_experts, num_gpus = instance.num_experts, instance.num_gpus
    most = min(num_gpus, 1 + instance.num_slots - num_experts)
    if num_experts * num_gpus * most > _MAX_VARIABLES:
        return None, 0.0
    model = new_constraint_program()
    replicas = range(1, most + 1)
    z = {(e, r): model.new_bool_var(f"z_{e}_{r}") for e in range(num_experts) for r in replicas}
    y = {(e, r, g): model.new_bool_var(f"y_{e}_{r}_{g}") for e, r in z for g in range(num_gpus)}
    level = model.new_int_var(0, _SCALE * 1000, "level")
    for e in range(num_experts):
        model.add_exactly_one(z[e, r] for r in replicas)  # (C1)
        for r in replicas:
            model.add(sum(y[e, r, g] for g in range(num_gpus)) == r * z[e, r])  # (C2)
    size = np.floor(_SCALE * instance.weight[0][:, None] / np.array(replicas)[:, None]).astype(np.int64)
    for g in range(num_gpus):
        model.add(sum(y[e, r, g] for e, r in z) == int(instance.slots_per_gpu[g]))  # (C5)
        for d in range(len(instance.load)):
            terms = [int(size[e, r - 1, d] / instance.gpu_speed[g]) * y[e, r, g] for e, r in z]
            model.add(sum(terms) <= level)  # (C6)
    model.minimize(level)
    counts = replica_counts(start[None], num_experts)[0]
    on = experts_on_gpus(start[None], instance.gpu_of_slot, num_experts)[0]
    for (e, r), variable in z.items():
        model.add_hint(variable, bool(counts[e] == r))
        for g in range(num_gpus):
            model.add_hint(y[e, r, g], bool(counts[e] == r and on[g, e]))
    outcome, solver = solve_constraint_program(model, limits)
    bound = (outcome.bound or 0.0) / _SCALE
    if outcome.status not in (Status.OPTIMAL, Status.FEASIBLE):
        return None, bound
    places = [e for g in range(num_gpus) for e, r in z if solver.value(y[e, r, g])]
    return np.array(places), bound
