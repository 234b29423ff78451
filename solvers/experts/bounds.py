"""What no placement of the experts can beat, for each layer, as largest load over the mean; and exact slots for small cases.

`lower_bound` is the largest of four:
    mean      1: utilisations are over their mean
    share     min over r of max_e LOAD[e] / r[e] / max SPEED: a replica of one expert takes that much, however it is split; with
              several workloads LOAD is the largest of them, as one r serves all
    partners  a GPU with K slots that holds the largest share holds K - 1 other experts too (C2). Of the slots beyond one for each
              expert these have X more than the least r of the other bound gives them, and then take at least (sum of the roots of
              the K - 1 smallest shares)^2 / (K - 1 + X), by Cauchy and Schwarz: a share s / (1 + x / r) is at least s / (1 + x).
              The largest share without these X slots plus that, the least over X. Uniform split only
    Hall      two slots on every GPU: a share above T / 2 needs a partner that is at most T less it, each another one. If for some a
              in (T/2, T] every r has more shares of a or more than shares of T - a or less, no placement reaches T (Hall's
              condition). Over r that is a knapsack, relaxed by Lagrange. Uniform split only

`solve_exactly` is CP-SAT, layer by layer, the largest gap first:

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

from ...schema.units import BoolArray, FloatArray, IntArray
from ..backend import Limits, new_constraint_program, solve_constraint_program
from ..tolerances import ROUNDING, SUMMED
from .instance import ExpertInstance, experts_on_gpus, replica_counts, select_layers, uniform_objective
from .packing import greedy_counts

_LEVELS = np.concatenate([[0.5003, 0.501, 0.503, 0.51], np.linspace(0.53, 1.0, 10)])
"""Levels a / T that Hall's condition is tried at: any of them proves, those just above a half are the strongest most often."""

_PRICES = np.array([1.0, 1.2, 1.5, 2.0, 3.0, 5.0])
"""Lagrangian prices of a slot: each gives a bound, the best of them counts."""

_HALVINGS = 10
"""Of the interval [T, 2 T], to a thousandth of T."""

_MIN_GAP = 1.002
"""Of an answer to the other bounds, from which on Hall's condition is tried."""

_SCALE = 10**6
"""Integer units of the mean load in CP-SAT."""

_MAX_VARIABLES = 60_000
"""With more CP-SAT does not get beyond its hint within seconds."""

_MAX_LEVEL = 1000
"""In parts of the mean: a GPU has at most G of them where all are alike, and with a thousand GPUs the model is too large."""

_PROVED = 1 + 1e-5
"""(O) over a bound from which on nothing is proved: ten units of _SCALE."""


def lower_bound(instance: ExpertInstance, *, weighted: bool, reached: FloatArray | None = None) -> FloatArray:
    """Return the largest of the bounds [L].

    Args:
        weighted: shares are free; else every replica of an expert takes as much as any other.
        reached: objective of a known answer [L]: Hall's bound is worked out only where the others leave a gap to it.
    """
    largest_load = instance.weight.max(axis=2)
    counts = greedy_counts(largest_load, instance.num_slots, instance.num_gpus)
    share = (largest_load / counts).max(axis=1) / instance.gpu_speed.max()
    if weighted:
        return np.asarray(np.maximum(1.0, share))
    bound = np.maximum(np.maximum(1.0, share), _partner_bound(instance))
    if not np.all(instance.slots_per_gpu == 2) or np.any(instance.gpu_speed != 1):
        return bound
    open_layers = np.ones(len(bound), dtype=bool) if reached is None else reached > bound * _MIN_GAP
    for d in range(len(instance.load)):
        if open_layers.any():
            hall = _hall_bound(instance.weight[open_layers, :, d], instance.num_gpus, bound[open_layers])
            bound[open_layers] = np.maximum(bound[open_layers], hall)
    return bound


def _partner_bound(instance: ExpertInstance) -> FloatArray:
    """Return the largest share plus the least that the other slots of its GPU can hold [L], the largest over workloads."""
    others = int(instance.slots_per_gpu.min()) - 1
    bounds = [_share_with_partners(weight, others, instance) for weight in np.moveaxis(instance.weight, 2, 0)]
    return np.asarray(np.max(bounds, axis=0) / instance.gpu_speed.max())


def _share_with_partners(weight: FloatArray, others: int, instance: ExpertInstance) -> FloatArray:
    """Return the least over X of the largest share that all slots but X allow, and its partners with these X [L]."""
    best, open_layers = np.full(len(weight), np.inf), np.arange(len(weight))
    for spent in range(instance.num_slots - instance.num_experts + 1):
        load = weight[open_layers]
        share = load / greedy_counts(load, instance.num_slots - spent, instance.num_gpus)
        largest = share.max(axis=1)
        smallest = np.sort(share, axis=1)[:, :others]
        partners = np.sqrt(smallest).sum(axis=1) ** 2 / max(others + spent, 1)
        best[open_layers] = np.minimum(best[open_layers], largest + partners)
        # With more of them the largest share grows; below the mean the bound says nothing.
        open_layers = open_layers[(largest < best[open_layers]) & (best[open_layers] > 1)]
        if not len(open_layers):
            break
    return best


def _hall_bound(weight: FloatArray, num_gpus: int, low: FloatArray) -> FloatArray:
    """Return the largest T [B] that is proved impossible, from T = ``low`` upwards by halving, else ``low``."""
    high = low * 2.0
    low = low.copy()
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        impossible = _breaks_hall(weight, middle, num_gpus)
        low, high = np.where(impossible, middle, low), np.where(impossible, high, middle)
    return low


def _breaks_hall(weight: FloatArray, target: FloatArray, num_gpus: int) -> BoolArray:
    """Return whether some level a leaves every r [B] with more big shares than small ones, by the Lagrangian bound of the knapsack.

    An expert with r replicas counts +r where LOAD / r <= T - a, -r where LOAD / r >= a; max over r of the sum, with sum r
    = 2 G, is at most min over prices p >= 1 of 2 G p + sum_e max_r (count - p r). For p >= 1 the lowest r of each kind is
    the best of it.
    """
    goal = target[:, None, None]
    load = weight[:, None, :]
    level = goal * _LEVELS[None, :, None]
    min_r = np.maximum(np.ceil(load / goal * (1 - ROUNDING)), 1)
    # At a = T no share is small enough to be a partner: the denominator is zero, and r as good as infinite.
    small_r = np.maximum(np.ceil(load / np.maximum(goal - level, 1e-300) * (1 - ROUNDING)), 1)
    middle_r = np.maximum(np.floor(load / level * (1 + ROUNDING)) + 1, 1)
    best = np.full(level.shape[:2], np.inf)
    for price in _PRICES:
        value = np.where(small_r <= num_gpus, (1 - price) * small_r, -np.inf)
        value = np.maximum(value, np.where(middle_r <= num_gpus, -price * middle_r, -np.inf))
        value = np.maximum(value, np.where(min_r <= num_gpus, -(1 + price) * min_r, -np.inf))
        best = np.minimum(best, 2 * num_gpus * price + value.sum(axis=2))
    return np.asarray((best < -SUMMED).any(axis=1))


def solve_exactly(
    instance: ExpertInstance, placed: IntArray, *, time_limit_s: float, seed: int
) -> tuple[IntArray, FloatArray]:
    """Return better slots where there are, and bounds [L] that are equal to (O) where the answer is proved."""
    deadline = time.perf_counter() + time_limit_s
    best, reached = placed.copy(), uniform_objective(instance, placed)
    bound = lower_bound(instance, weighted=False, reached=reached)
    order = np.argsort(-reached / bound)
    order = order[reached[order] > bound[order] * _PROVED]
    for done, layer in enumerate(order):
        remaining_s = deadline - time.perf_counter()
        if remaining_s <= 0:
            break
        part = select_layers(instance, np.array([layer]))
        slots, proved = _solve_layer(
            part, best[layer], Limits(time_limit_s=remaining_s / (len(order) - done), seed=seed)
        )
        bound[layer] = max(bound[layer], proved)
        if slots is not None:
            objective = uniform_objective(part, slots[None])[0]
            if objective < reached[layer]:
                best[layer], reached[layer] = slots, objective
    return best, np.minimum(bound, reached)


def _solve_layer(instance: ExpertInstance, start: IntArray, limits: Limits) -> tuple[IntArray | None, float]:
    """Return the slots [S] of one layer, if any, and a bound on its level; 0 where the model would be too large to help."""
    num_experts, num_gpus = instance.num_experts, instance.num_gpus
    max_replicas = min(num_gpus, 1 + instance.num_slots - num_experts)
    if num_experts * num_gpus * max_replicas > _MAX_VARIABLES:
        return None, 0.0
    model = new_constraint_program()
    replicas = range(1, max_replicas + 1)
    z = {(e, r): model.new_bool_var(f"z_{e}_{r}") for e in range(num_experts) for r in replicas}
    y = {(e, r, g): model.new_bool_var(f"y_{e}_{r}_{g}") for e, r in z for g in range(num_gpus)}
    level = model.new_int_var(0, _SCALE * _MAX_LEVEL, "level")
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
    is_on_gpu = experts_on_gpus(start[None], instance.gpu_of_slot, num_experts)[0]
    for (e, r), variable in z.items():
        model.add_hint(variable, bool(counts[e] == r))
        for g in range(num_gpus):
            model.add_hint(y[e, r, g], bool(counts[e] == r and is_on_gpu[g, e]))
    outcome, solver = solve_constraint_program(model, limits)
    bound = (outcome.bound or 0.0) / _SCALE
    if not outcome.status.has_answer:
        return None, bound
    slots = [e for g in range(num_gpus) for e, r in z if solver.value(y[e, r, g])]
    return np.array(slots), bound
