"""Places that balance the GPUs: starts, exchanges, and the best of them for each layer.

fast: replicas by the greedy rule, largest first, exchanges; where a gap to the bound is left, EPLB's placement is a second
start. search: further starts, the order of the replicas and their numbers disturbed, for the layers with the largest gaps
until the time is over.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .expert_bounds import lower_bound
from .expert_eplb import eplb_placement
from .expert_exchange import Effort, improve
from .expert_instance import FloatArray, Instance, IntArray, replica_counts, uniform_shares, utilisation
from .expert_packing import flat, largest_first, nested
from .expert_replicas import greedy_counts, level_counts, neighbours

_NOISE = 0.15
_FURTHER = Effort(rounds=24, last=30, done_ratio=1.00001)
_SEARCHED = Effort(rounds=60, last=200, done_ratio=1.00001)
_MANY_WORKLOADS = Effort(rounds=24, last=16)
_BATCH = 64
_TURNS_BESIDE_EPLB = 40
_FAR = 1.01
_FEW_LAYERS = 8


@dataclass(frozen=True)
class Search:
    """How hard to look: further starts until `time_limit_s`, if any, with random numbers of `seed`."""

    further: bool = False
    time_limit_s: float = 10.0
    seed: int = 0


def balanced(instance: Instance, search: Search) -> IntArray:
    """X [L, S] with small (O) under the uniform split."""
    clock = time.perf_counter()
    several = len(instance.load) > 1
    effort = (
        _MANY_WORKLOADS
        if several and instance.num_layers > _FEW_LAYERS
        else Effort(rounds=60, last=200)
        if several
        else Effort()
    )
    best = _from_counts(instance, _counts(instance, "largest"), effort)
    objective = uniform_objective(instance, best)
    if several and (search.further or instance.num_layers <= _FEW_LAYERS):
        _adopt(best, objective, instance, _from_counts(instance, _counts(instance, "mean"), effort))
    rng = np.random.default_rng(search.seed)
    _beside_eplb(instance, best, objective, rng)
    bound = lower_bound(instance, weighted=False, reached=objective)
    if not several or instance.num_layers <= _FEW_LAYERS:
        _again(instance, best, objective, np.flatnonzero(objective > bound * _FAR), rng)
    if not search.further:
        return best
    while time.perf_counter() - clock < search.time_limit_s:
        gap = objective / bound
        worst = np.argsort(-gap)[: max(1, _BATCH // (4 * len(instance.load)))]
        worst = worst[gap[worst] > _SEARCHED.done_ratio]
        if not len(worst):
            break
        _again(instance, best, objective, worst, rng)
    return best


def _again(
    instance: Instance, best: IntArray, objective: FloatArray, layers: NDArray[np.int64], rng: np.random.Generator
) -> None:
    """Further starts for some layers, in place."""
    if len(layers):
        part = layers_of(instance, layers)
        found, reached = best[layers], objective[layers]
        _adopt(found, reached, part, _further(part, found, rng))
        best[layers], objective[layers] = found, reached


def uniform_objective(instance: Instance, placed: IntArray) -> FloatArray:
    """(O) [L] under the uniform split."""
    share = uniform_shares(placed, instance.num_experts)
    return np.asarray(utilisation(instance, placed, share).max(axis=(0, 2)))


def layers_of(instance: Instance, layers: NDArray[np.int64]) -> Instance:
    """The same problem for some layers."""
    return replace(instance, load=instance.load[:, layers])


def _counts(instance: Instance, kind: str) -> IntArray:
    weight = instance.weight.max(axis=2) if kind == "largest" else instance.weight.mean(axis=2)
    return greedy_counts(weight, instance.num_slots, instance.num_gpus)


def _from_counts(instance: Instance, counts: IntArray, effort: Effort, noise: FloatArray | None = None) -> IntArray:
    """Largest first and exchanges."""
    return exchanged(instance, flat(largest_first(instance, counts, order_noise=noise)), effort)


def exchanged(instance: Instance, placed: IntArray, effort: Effort) -> IntArray:
    """X [L, S] after exchanges; the numbers of replicas stay."""
    size = instance.weight / replica_counts(placed, instance.num_experts)[:, :, None]
    bound = np.maximum(1.0, size.max(axis=(1, 2)) / instance.gpu_speed.max())
    return flat(improve(instance, nested(placed, instance.slots_per_gpu), size, bound, effort))


def _adopt(best: IntArray, objective: FloatArray, instance: Instance, other: IntArray) -> None:
    """Take the other places where they are better, in place."""
    reached = uniform_objective(instance, other)
    better = reached < objective
    best[better], objective[better] = other[better], reached[better]


def _beside_eplb(instance: Instance, best: IntArray, objective: FloatArray, rng: np.random.Generator) -> None:
    """Never worse than EPLB's result: where it is, its places if they keep replicas apart (C2), and further starts until
    it is not.
    """
    if np.any(instance.slots_per_gpu != instance.slots_per_gpu[0]):
        return
    start = eplb_placement(instance.weight.mean(axis=2), num_slots=instance.num_slots, num_gpus=instance.num_gpus)
    theirs = uniform_objective(instance, start)
    for turn in range(_TURNS_BESIDE_EPLB):
        layers = np.flatnonzero(objective > theirs)
        if not len(layers):
            return
        part = layers_of(instance, layers)
        found, reached = best[layers], objective[layers]
        other = exchanged(part, found, _SEARCHED) if turn == 0 else _further(part, found, rng)
        apart = distinct(instance, start[layers])
        if turn == 0 and apart.any():
            other[apart] = exchanged(layers_of(part, np.flatnonzero(apart)), start[layers][apart], _SEARCHED)
        _adopt(found, reached, part, other)
        best[layers], objective[layers] = found, reached


def distinct(instance: Instance, placed: IntArray) -> NDArray[np.bool_]:
    """Whether (C2) holds [L]."""
    pairs = np.sort(placed + instance.gpu_of_slot * instance.num_experts, axis=1)
    return np.asarray(np.all(np.diff(pairs, axis=1) > 0, axis=1))


def _further(instance: Instance, placed: IntArray, rng: np.random.Generator) -> IntArray:
    """The best of some further starts for each layer: other replicas, another order, exchanges."""
    copies = max(1, _BATCH // (instance.num_layers * len(instance.load)))
    part = layers_of(instance, np.repeat(np.arange(instance.num_layers), copies))
    found = _from_counts(part, _other_counts(part, placed.repeat(copies, axis=0), rng), _FURTHER, _noise(part, rng))
    reached = uniform_objective(part, found).reshape(-1, copies)
    best = np.arange(instance.num_layers) * copies + np.argmin(reached, axis=1)
    return np.asarray(found[best])


def _noise(instance: Instance, rng: np.random.Generator) -> FloatArray:
    """Factors [L, E] that change the order in which replicas are placed; half of the layers keep theirs."""
    shape = (instance.num_layers, instance.num_experts)
    spread = rng.choice([0.0, _NOISE], (instance.num_layers, 1))
    return np.asarray(np.exp(spread * rng.standard_normal(shape)))


def _other_counts(instance: Instance, placed: IntArray, rng: np.random.Generator) -> IntArray:
    """R [L, E]: a few replicas moved, or by the greedy rule on disturbed loads, or few where loads are below a level, by
    turns.
    """
    weight = instance.weight.max(axis=2)
    limit, num_slots = instance.num_gpus, instance.num_slots
    counts = neighbours(
        replica_counts(placed, instance.num_experts), rng.integers(0, 4, instance.num_layers), limit, rng
    )
    kind = rng.integers(0, 3, instance.num_layers)
    disturbed = weight * np.exp(2 * _NOISE * rng.standard_normal(weight.shape))
    counts[kind == 1] = greedy_counts(disturbed[kind == 1], num_slots, limit)
    level = rng.uniform(0.4, 1.0, instance.num_layers) * np.maximum(instance.gpu_speed.max(), 1.0)
    counts[kind == 2] = level_counts(weight[kind == 2], level[kind == 2], num_slots, limit)
    return counts
