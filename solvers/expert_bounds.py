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
"""

from __future__ import annotations

import numpy as np

from .expert_instance import FloatArray, Instance
from .expert_replicas import greedy_counts

_LEVELS = np.concatenate([[0.5003, 0.501, 0.503, 0.51], np.linspace(0.53, 1.0, 10)])
_PRICES = np.array([1.0, 1.2, 1.5, 2.0, 3.0, 5.0])
_HALVINGS = 10
_WORTH = 1.002


def lower_bound(instance: Instance, *, weighted: bool, reached: FloatArray | None = None) -> FloatArray:
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
    bound = np.maximum(1.0, _with_partners(instance))
    if not np.all(instance.slots_per_gpu == 2) or np.any(instance.gpu_speed != 1):
        return bound
    open_layers = np.ones(len(bound), dtype=bool) if reached is None else reached > bound * _WORTH
    for d in range(len(instance.load)):
        if open_layers.any():
            found = _hall(instance.weight[open_layers, :, d], instance.num_gpus, bound[open_layers])
            bound[open_layers] = np.maximum(bound[open_layers], found)
    return bound


def _with_partners(instance: Instance) -> FloatArray:
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


def _hall(weight: FloatArray, num_gpus: int, low: FloatArray) -> FloatArray:
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
