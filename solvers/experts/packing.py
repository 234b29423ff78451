"""Steps 1 to 3: how many replicas each expert gets, which GPU each goes to, and exchanges between GPUs; all layers at once.

1. Replicas. The slots beyond one for each expert go, one after the other, to the expert with the largest share LOAD / r. With one
   workload this minimises max_e LOAD[e] / r[e] (each step lowers the only share that can be the largest), which is EPLB's rule;
   here no expert gets more replicas than there are GPUs (C2), and the load of an expert is its largest over the workloads.
2. Packing. Largest share first onto the GPU that is least full with it, the classic list rule (Graham, SIAM J. Appl. Math. 17(2),
   1969) with (C2): a GPU that holds the expert already is passed over. Where the last replicas find no such GPU, the layer is
   packed anew by `spread_replicas`, which always ends.
3. Exchanges. The GPUs of a layer, sorted by load, are paired: the fullest with the emptiest and so on inwards, in later rounds
   shifted. Each pair makes the best exchange there is: of one slot against one, or, where a GPU has few slots, of any subset of
   their slots (the pair is split anew, exactly). Every exchange lowers the fuller GPU of its pair, so rounds end; at last the
   fullest GPU tries every other one. What would bring an expert to a GPU that has it is not considered (C2).

With several workloads the measure of a GPU is the sum of a high power of its loads under each, which comes close to the largest.
Grids of slots are [L, G, K], K the slots of the largest GPU, NO_EXPERT where a GPU has fewer.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ...schema.limits import MAX_EXCHANGES
from ...schema.units import BoolArray, FloatArray, IntArray
from ..tolerances import SUMMED
from .instance import ExpertInstance, replica_counts

NO_EXPERT = -1
"""In a grid: no slot."""

_SPLIT_SLOTS = 4
"""Slots of a GPU up to which a pair is split anew: C(8, 4) / 2 = 35 splits; with more single exchanges are enough and quicker."""

_POWER = 32
"""Of a GPU's loads under several workloads, as squares of squares: 2 % more load count 1.9 times as much."""

_PACKING_POWER = 8
"""The same while packing, where loads are not final yet: 2 % more count 1.2 times as much."""


def greedy_counts(weight: FloatArray, num_slots: int, limit: int) -> IntArray:
    """Return r [L, E] with sum ``num_slots`` and 1 <= r <= ``limit``, of weights [L, E]."""
    num_layers, num_experts = weight.shape
    counts = np.ones((num_layers, num_experts), dtype=np.int64)
    share = weight.copy()
    if limit == 1:
        share[:] = -np.inf
    rows = np.arange(num_layers)
    for _ in range(num_slots - num_experts):
        largest = np.argmax(share, axis=1)
        counts[rows, largest] += 1
        now = counts[rows, largest]
        share[rows, largest] = np.where(now < limit, weight[rows, largest] / now, -np.inf)
    return counts


def list_replicas(counts: IntArray, num_slots: int) -> IntArray:
    """Return the experts of all replicas [L, S], each as often as its count."""
    num_layers, num_experts = counts.shape
    experts = np.tile(np.arange(num_experts), num_layers)
    return np.repeat(experts, counts.ravel()).reshape(num_layers, num_slots)


def counts_up_to_level(weight: FloatArray, level: FloatArray, num_slots: int, limit: int) -> IntArray:
    """Return r [L, E] that brings every share to ``level`` [L] at most, as far as slots reach; the rest go to the smallest loads.

    Small shares next to large ones fill GPUs better than many of middle size where GPUs have few slots or differ in speed.
    """
    target = np.clip(np.ceil(weight / level[:, None]), 1, limit).astype(np.int64)
    counts = np.minimum(target, greedy_counts(weight, num_slots, limit))
    order = np.argsort(weight, axis=1)
    headroom = np.take_along_axis(limit - counts, order, axis=1)
    before = np.cumsum(headroom, axis=1) - headroom
    remaining = num_slots - counts.sum(axis=1, keepdims=True)
    added = np.clip(remaining - before, 0, np.minimum(headroom, max(1, limit // 2)))
    np.put_along_axis(counts, order, np.take_along_axis(counts, order, axis=1) + added, axis=1)
    missing = num_slots - counts.sum(axis=1)
    for layer in np.flatnonzero(missing):
        share = weight[layer] / counts[layer]
        for _ in range(missing[layer]):
            expert = int(np.argmax(np.where(counts[layer] < limit, share, -np.inf)))
            counts[layer, expert] += 1
            share[expert] = weight[layer, expert] / counts[layer, expert]
    return counts


def largest_first(instance: ExpertInstance, counts: IntArray, *, order_noise: FloatArray | None = None) -> IntArray:
    """Return a grid [L, G, K] of ``counts`` [L, E] replicas; a layer whose counts fit no packing has others (see
    `spread_replicas`).

    Args:
        order_noise: [L, E] factors on the sizes that give the order, for other starts.
    """
    slots, speed = instance.slots_per_gpu, instance.gpu_speed
    num_layers, num_gpus = instance.num_layers, instance.num_gpus
    size = instance.weight / counts[:, :, None]
    largest = size.max(axis=2) if order_noise is None else size.max(axis=2) * order_noise
    experts = list_replicas(counts, instance.num_slots)
    rank = np.argsort(-np.take_along_axis(largest, experts, axis=1), axis=1, kind="stable")
    experts = np.take_along_axis(experts, rank, axis=1)
    grid = np.full((num_layers, num_gpus, int(slots.max())), NO_EXPERT)
    load = np.zeros((num_layers, num_gpus, size.shape[2]))
    filled = np.zeros((num_layers, num_gpus), dtype=np.int64)
    closed = np.zeros((num_layers, num_gpus))
    last = np.full((num_layers, num_gpus), NO_EXPERT)
    stuck = np.zeros(num_layers, dtype=bool)
    rows = np.arange(num_layers)
    for s in range(instance.num_slots):
        expert = experts[:, s]
        added = size[rows, expert]
        used = (load + added[:, None]) / speed[:, None]
        fullness = closed + (used[:, :, 0] if used.shape[2] == 1 else (used**_PACKING_POWER).sum(axis=2))
        # Replicas of an expert follow one another, so that a GPU that has it has it last.
        fullness[last == expert[:, None]] = np.inf
        gpu = np.argmin(fullness, axis=1)
        stuck |= ~np.isfinite(fullness[rows, gpu])
        load[rows, gpu] += added
        grid[rows, gpu, np.minimum(filled[rows, gpu], slots[gpu] - 1)] = expert
        last[rows, gpu] = expert
        filled[rows, gpu] += 1
        closed[rows, gpu] = np.where(filled[rows, gpu] >= slots[gpu], np.inf, 0.0)
    for layer in np.flatnonzero(stuck):
        grid[layer] = spread_replicas(slots, counts[layer], largest[layer])
    return grid


def spread_replicas(slots: IntArray, counts: IntArray, size: FloatArray) -> IntArray:
    """Return the grid [G, K] of one layer: experts with most replicas first, each on the GPUs with most free slots.

    With as many slots on every GPU this places any counts up to G (neighbours in a cyclic order). With other slots some
    counts have no packing at all (Gale and Ryser's condition); then an expert gets fewer, and the remaining slots take the
    largest shares that their GPU does not hold.
    """
    grid = np.full((len(slots), int(slots.max())), NO_EXPERT)
    free = slots.copy()
    placed = np.zeros_like(counts)
    for expert in np.lexsort((-size, -counts)):
        gpus = np.argsort(-free, kind="stable")[: counts[expert]]
        gpus = gpus[free[gpus] > 0]
        grid[gpus, slots[gpus] - free[gpus]] = expert
        free[gpus] -= 1
        placed[expert] = len(gpus)
    share = size * counts
    for gpu in np.flatnonzero(free):
        while free[gpu]:
            is_on_gpu = np.isin(np.arange(len(counts)), grid[gpu])
            # An expert without any slot comes before all others.
            expert = int(np.argmax(np.where(is_on_gpu, -np.inf, share / np.maximum(placed, SUMMED))))
            grid[gpu, slots[gpu] - free[gpu]] = expert
            placed[expert] += 1
            free[gpu] -= 1
    return grid


def slots_from_grid(grid: IntArray) -> IntArray:
    """Return the slots [L, S] of a grid [L, G, K]."""
    num_layers = len(grid)
    return np.asarray(grid[grid != NO_EXPERT].reshape(num_layers, -1))


def grid_from_slots(placed: IntArray, slots: IntArray) -> IntArray:
    """Return the grid [L, G, K] of slots [L, S]."""
    used = np.arange(int(slots.max())) < slots[:, None]
    grid = np.full((len(placed), *used.shape), NO_EXPERT)
    grid[:, used] = placed
    return grid


@dataclass(frozen=True)
class Effort:
    """How long to exchange: rounds over pairs, last exchanges of the fullest GPU, ratio to the bound at which a layer is done."""

    rounds: int = 24
    last: int = 60
    done_ratio: float = 1.0005


class SlotGrid:
    """A grid [B, G, K] of layers with the sizes [B, G, K, D] of its slots and the loads [B, G, D] of its GPUs, kept in step."""

    def __init__(self, instance: ExpertInstance, grid: IntArray, size: FloatArray) -> None:
        """Lay out the grid; ``size`` [B, E, D] of one replica of each expert, on GPUs of speed 1."""
        self.expert = grid
        self.speed = instance.gpu_speed
        self.even = bool(np.all(instance.slots_per_gpu == instance.slots_per_gpu[0]))
        padded = np.concatenate([size, np.zeros_like(size[:, :1])], axis=1)
        self.size = padded[np.arange(len(grid))[:, None, None], grid]
        self.load = self.size.sum(axis=2)

    def fullest(self) -> FloatArray:
        """Return the largest utilisation of each layer [B]."""
        return np.asarray((self.load.max(axis=2) / self.speed).max(axis=1))

    def take(self, layers: BoolArray) -> SlotGrid:
        """Return the same for a subset of the layers."""
        subset = object.__new__(SlotGrid)
        subset.speed, subset.even = self.speed, self.even
        subset.expert, subset.size, subset.load = self.expert[layers], self.size[layers], self.load[layers]
        return subset

    def put(self, layers: BoolArray, subset: SlotGrid) -> None:
        """Write back what `take` took."""
        self.expert[layers], self.size[layers], self.load[layers] = subset.expert, subset.size, subset.load


def improve_grid(
    instance: ExpertInstance, grid: IntArray, size: FloatArray, bound: FloatArray, effort: Effort
) -> IntArray:
    """Return a grid [L, G, K] with no layer's largest load higher, for sizes [L, E, D] of one replica and bounds [L]."""
    # Layers are apart: as many at a time as their exchanges have memory.
    exchanges = instance.num_gpus * grid.shape[2] ** 2 * size.shape[2]
    if (chunk := max(MAX_EXCHANGES // exchanges, 1)) < len(grid):
        parts = [slice(first, first + chunk) for first in range(0, len(grid), chunk)]
        return np.concatenate([improve_grid(instance, grid[part], size[part], bound[part], effort) for part in parts])
    state = SlotGrid(instance, grid.copy(), size)
    if instance.num_gpus == 1:
        return state.expert
    bound = bound.copy()
    for turn in range(effort.rounds + effort.last):
        active = state.fullest() > bound * effort.done_ratio
        if not active.any():
            break
        subset = state.take(active)
        if turn < effort.rounds:
            exchange_pairs(subset, turn)
        else:
            bound[np.flatnonzero(active)[~relieve_fullest(subset)]] = np.inf
        state.put(active, subset)
    return state.expert


def exchange_slots(instance: ExpertInstance, placed: IntArray, effort: Effort) -> IntArray:
    """Return x [L, S] after exchanges; the numbers of replicas stay."""
    size = instance.weight / replica_counts(placed, instance.num_experts)[:, :, None]
    bound = np.maximum(1.0, size.max(axis=(1, 2)) / instance.gpu_speed.max())
    return slots_from_grid(improve_grid(instance, grid_from_slots(placed, instance.slots_per_gpu), size, bound, effort))


def exchange_pairs(state: SlotGrid, turn: int) -> None:
    """Pair the GPUs, shifted by ``turn``, and make the best exchange of each pair."""
    split = state.even and state.expert.shape[2] <= _SPLIT_SLOTS
    (_split_pairs if split else _swap_pairs)(state, *_pair_gpus(state, turn))


def _pair_gpus(state: SlotGrid, turn: int) -> tuple[IntArray, IntArray]:
    """Return GPUs [B, G // 2] of the fuller half and their partners of the emptier one, shifted by ``turn``."""
    used = state.load.max(axis=2) / state.speed
    order = np.argsort(-used, axis=1)
    half = order.shape[1] // 2
    return order[:, :half], np.roll(order[:, ::-1][:, :half], turn, axis=1)


def _pair_measure(one: FloatArray, other: FloatArray, speed_one: FloatArray, speed_other: FloatArray) -> FloatArray:
    """Return how bad two GPUs with loads [..., D] are: the larger utilisation, or over workloads the sum of their powers."""
    if one.shape[-1] == 1:
        return np.maximum(one[..., 0] / speed_one, other[..., 0] / speed_other)
    used, used_other = one / speed_one[..., None], other / speed_other[..., None]
    for _ in range(_POWER.bit_length() - 1):
        used, used_other = used * used, used_other * used_other
    return np.asarray(used.sum(axis=-1) + used_other.sum(axis=-1))


def _after_swap(state: SlotGrid, first: IntArray, second: IntArray) -> tuple[FloatArray, FloatArray]:
    """Return each pair's measure now [B, P] and after each exchange of one slot against one [B, P, K, K], infinite where that is
    not allowed.
    """
    rows = np.arange(len(first))[:, None]
    one, other = state.expert[rows, first], state.expert[rows, second]
    moved = state.size[rows, first][:, :, :, None] - state.size[rows, second][:, :, None]
    loads, speeds = (state.load[rows, first], state.load[rows, second]), (state.speed[first], state.speed[second])
    now = _pair_measure(*loads, *speeds)
    load_one, load_other = (load[:, :, None, None] for load in loads)
    after = _pair_measure(load_one - moved, load_other + moved, *(speed[:, :, None, None] for speed in speeds))
    same = one[:, :, :, None] == other[:, :, None]
    if same.any() or not state.even:
        after[same.any(axis=3)[:, :, :, None] | same.any(axis=2)[:, :, None]] = np.inf
        after[(one == NO_EXPERT)[:, :, :, None] | (other == NO_EXPERT)[:, :, None]] = np.inf
    return now, after


def _exchange(state: SlotGrid, rows: IntArray, first: IntArray, i: IntArray, second: IntArray, j: IntArray) -> None:
    moved = state.size[rows, first, i] - state.size[rows, second, j]
    np.subtract.at(state.load, (rows, first), moved)
    np.add.at(state.load, (rows, second), moved)
    for array in (state.expert, state.size):
        array[rows, first, i], array[rows, second, j] = array[rows, second, j].copy(), array[rows, first, i].copy()


def _swap_pairs(state: SlotGrid, first: IntArray, second: IntArray) -> None:
    now, after = _after_swap(state, first, second)
    num_slots = after.shape[2]
    choices = after.reshape(*now.shape, -1)
    best = np.argmin(choices, axis=2)
    gains = np.take_along_axis(choices, best[:, :, None], axis=2)[:, :, 0] < now * (1 - SUMMED)
    rows, pair = np.nonzero(gains)
    chosen = best[rows, pair]
    _exchange(state, rows, first[rows, pair], chosen // num_slots, second[rows, pair], chosen % num_slots)


def relieve_fullest(state: SlotGrid, *, num_others: int | None = None) -> BoolArray:
    """Make the best exchange of the fullest GPU with one of the emptiest ``num_others`` (None: all); return the changed layers."""
    used = state.load.max(axis=2) / state.speed
    order = np.argsort(used, axis=1)
    fullest, others = order[:, -1], order[:, : num_others or order.shape[1] - 1]
    others = others[:, : order.shape[1] - 1]
    now, after = _after_swap(state, np.broadcast_to(fullest[:, None], others.shape), others)
    num_slots, rows = after.shape[2], np.arange(len(now))
    value = after if state.load.shape[2] == 1 else after - now[:, :, None, None]
    best = np.argmin(value.reshape(len(now), -1), axis=1)
    pair, chosen = best // num_slots**2, best % num_slots**2
    changed = after.reshape(len(now), -1)[rows, best] < now[rows, pair] * (1 - SUMMED)
    rows, pair, chosen = rows[changed], pair[changed], chosen[changed]
    _exchange(state, rows, fullest[changed], chosen // num_slots, others[rows, pair], chosen % num_slots)
    return np.asarray(changed)


@lru_cache(maxsize=8)
def _splits(num_slots: int, *, are_alike: bool) -> tuple[BoolArray, FloatArray]:
    """Return which of 2K slots the first GPU gets [C, 2K], also as numbers [2K, C]; of GPUs that are alike it keeps slot 0."""
    chosen = [set(c) for c in itertools.combinations(range(2 * num_slots), num_slots)]
    chosen = [c for c in chosen if 0 in c] if are_alike else chosen
    is_first = np.array([[i in c for i in range(2 * num_slots)] for c in chosen])
    return is_first, np.ascontiguousarray(is_first.T.astype(np.float64))


def _split_pairs(state: SlotGrid, first: IntArray, second: IntArray) -> None:
    rows, num_slots = np.arange(len(first))[:, None], state.expert.shape[2]
    expert = np.concatenate([state.expert[rows, first], state.expert[rows, second]], axis=2)
    size = np.concatenate([state.size[rows, first], state.size[rows, second]], axis=2)
    is_first, numbers = _splits(num_slots, are_alike=bool(np.all(state.speed == state.speed[0])))
    loads, speeds = (state.load[rows, first], state.load[rows, second]), (state.speed[first], state.speed[second])
    load = np.swapaxes(np.matmul(np.swapaxes(size, 2, 3), numbers), 2, 3)
    others = (loads[0] + loads[1])[:, :, None] - load
    after = _pair_measure(load, others, *(speed[:, :, None] for speed in speeds))
    # Not where both slots of an expert would be on one GPU (C2).
    row, pair, i, j = np.nonzero(expert[:, :, :num_slots, None] == expert[:, :, None, num_slots:])
    together = is_first[:, i] == is_first[:, num_slots + j]
    np.maximum.at(after, (row, pair), np.where(together.T, np.inf, 0.0))
    now = _pair_measure(*loads, *speeds)
    best = np.argmin(after, axis=2)
    gains = np.take_along_axis(after, best[:, :, None], axis=2)[:, :, 0] < now * (1 - SUMMED)
    row, pair = np.nonzero(gains)
    # Stable sort: the slots of the first GPU before those of the second.
    order = np.argsort(~is_first[best[row, pair]], axis=1, kind="stable")
    expert = np.take_along_axis(expert[row, pair], order, axis=1)
    size = np.take_along_axis(size[row, pair], order[:, :, None], axis=1)
    for gpu, part in ((first[row, pair], slice(0, num_slots)), (second[row, pair], slice(num_slots, None))):
        state.expert[row, gpu] = expert[:, part]
        state.size[row, gpu] = size[:, part]
        state.load[row, gpu] = size[:, part].sum(axis=1)
