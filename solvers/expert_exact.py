"""Exact places for small cases, and bounds, by CP-SAT: layer by layer, the largest gap first.

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

from .backend import Limits, new_constraint_program, solve_constraint_program
from .expert_balance import layers_of, uniform_objective
from .expert_bounds import lower_bound
from .expert_instance import FloatArray, Instance, IntArray, replica_counts
from .expert_moves import held
from .status import Status

_SCALE = 10**6
_MOST_VARIABLES = 60_000
_PROVED = 1 + 1e-5


def exact(instance: Instance, placed: IntArray, *, time_limit_s: float, seed: int) -> tuple[IntArray, FloatArray]:
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
        part = layers_of(instance, np.array([layer]))
        found, proved = _solve(part, best[layer], Limits(time_limit_s=left / (len(order) - done), seed=seed))
        bound[layer] = max(bound[layer], proved)
        if found is not None:
            objective = uniform_objective(part, found[None])[0]
            if objective < reached[layer]:
                best[layer], reached[layer] = found, objective
    return best, np.minimum(bound, reached)


def _solve(instance: Instance, start: IntArray, limits: Limits) -> tuple[IntArray | None, float]:
    """Places [S] of one layer, if any, and a bound on its level; 0 where the model would be too large to help."""
    num_experts, num_gpus = instance.num_experts, instance.num_gpus
    most = min(num_gpus, 1 + instance.num_slots - num_experts)
    if num_experts * num_gpus * most > _MOST_VARIABLES:
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
    on = held(start[None], instance.gpu_of_slot, num_experts)[0]
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
