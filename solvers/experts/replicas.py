"""Numbers of replicas that change while slots are packed: other starts, and a walk that hands slots from expert to expert.

Where GPUs have few slots and some experts most of the load, balance is decided by how many replicas each expert has: shares of one
size (packing.greedy_counts) do not fill a GPU, two of half a GPU's load or one of a whole one next to small ones do. Two steps:

Starts: r by the greedy rule on loads that are distorted, so that the shares of the hottest experts are larger or smaller than
those of the others by a ratio, and by levels (packing.counts_up_to_level). All of them are packed, the best are kept.

Walk, each turn of it for all rows at once (a row is a start of a layer):
    transfer   one slot of an expert with two replicas or more is given to another expert. All GPUs that hold either change. The
               measure is the sum over GPUs of u^32, u the load over the largest (the nearer to balance, the more differences are
               enlarged): each transfer's change of it is summed from what one replica less and one more make of each slot, and
               the best few transfers are worked out exactly
    exchanges  of packing.py, with the new shares
The best transfer is made even where it is worse, and none that undoes a part of it for some turns (Glover, ORSA Journal on
Computing 1(3), 1989), so that a walk leaves what exchanges alone cannot; one that gains nothing goes back to its best.
"""

from __future__ import annotations

import numpy as np

from ...schema.units import BoolArray, FloatArray, IntArray
from ..tolerances import SUMMED
from .instance import BestSlots, ExpertInstance, experts_on_gpus, replica_counts, select_layers, uniform_objective
from .packing import (
    Effort,
    SlotGrid,
    counts_up_to_level,
    exchange_pairs,
    exchange_slots,
    greedy_counts,
    grid_from_slots,
    improve_grid,
    largest_first,
    relieve_fullest,
    slots_from_grid,
)

_SQUARINGS = 5
"""The measure's power is 2 to this: 32, with which 2 % more load count 1.9 times as much."""

_SCALE, _MAX_ZOOM = 0.1, 100.0
"""Where the largest load is less than the first above the mean, differences count as if it were that, up to so many times."""

_LEVELS = np.linspace(0.35, 1.0, 8)
"""Of the mean: shares up to these."""

_HOT_PARTS, _RATIOS = (0.3, 0.5, 0.7), (0.4, 0.6, 0.8, 1.25, 1.6)
"""The experts that have this part of the load between them, and their loads times this for the greedy rule."""

_NUM_RANDOM, _LOAD_NOISE = 8, 0.3
"""Starts with every load times a random factor, and the standard deviation of its logarithm."""

_START_EFFORT = Effort(rounds=6, last=4)
"""Of the many starts, most of which go no further."""

_LAST_EFFORT = Effort(rounds=12, last=40, done_ratio=1.00001)
"""Of the best of each layer after a stage."""

_NUM_GAINING, _NUM_FULLEST = 8, 4
"""Transfers that are looked at: any slot to the experts that gain most, and slots of the fullest GPUs to any expert."""

_NUM_EXACT = 12
"""Transfers that are worked out exactly."""

_NOISE = 0.1
"""Part of the measure by which transfers may differ and be taken for equal."""

_WAIT = 10
"""Turns after a transfer in which its taker gives nothing and its giver takes nothing; at most half as many as experts."""

_FOLDED_TURNS = 2
"""Turns in place of one where sorting packs best, which is quick."""

_PATIENCE = 12
"""Turns without gain after which a walk goes back to its best."""

_STAGES = ((8, 12), (4, 20), (2, 40))
"""Rows of each layer and turns of their walks: many short walks, then longer ones from the best of these."""

_FEW_LAYERS, _MIN_PART = 12, 0.3
"""Up to so many layers walks have all of their turns; with more they share them, down to this part."""

_ORDER_NOISE = 0.15
"""Standard deviation of the logarithm of the factors that disturb the order of replicas."""

_ROUNDS = 6
"""Of exchanges after a transfer."""

_MAX_CELLS = 5 * 10**7
"""Layers x rows x experts x GPUs that are worked on together at most."""


def vary_replicas(best: BestSlots, target: FloatArray, layers: IntArray, rng: np.random.Generator) -> None:
    """Improve some layers, each until its (O) is below its target [L] or its turns are over."""
    instance, copies = best.instance, _STAGES[0][0]
    per_batch = max(1, _MAX_CELLS // (copies * instance.num_experts * instance.num_gpus))
    for first in range(0, len(layers), per_batch):
        _vary_together(best, target, layers[first : first + per_batch], rng)


def _vary_together(best: BestSlots, target: FloatArray, layers: IntArray, rng: np.random.Generator) -> None:
    starts = pack_starts(select_layers(best.instance, layers), _STAGES[0][0] - 1, rng)
    placed = np.concatenate([best.placed[None, layers], starts])  # [C, layers, S]
    part = min(1.0, max(_MIN_PART, _FEW_LAYERS / len(layers)))
    for copies, turns in _STAGES:
        shape = placed[:copies].shape
        walk = ReplicaWalk(
            select_layers(best.instance, np.tile(layers, copies)), placed[:copies].reshape(-1, shape[2]), rng
        )
        walk.run(min(round(turns * part * (_FOLDED_TURNS if walk.folds else 1)), 4 * shape[2]), _ROUNDS)
        reached = walk.objective.reshape(shape[:2])
        order = np.argsort(reached, axis=0, kind="stable")
        placed = np.take_along_axis(walk.best.reshape(shape), order[:, :, None], axis=0)
        best.offer(exchange_slots(select_layers(best.instance, layers), placed[0], _LAST_EFFORT), layers)
        is_open = best.objective[layers] > target[layers]
        layers, placed = layers[is_open], placed[:, is_open]
        if not len(layers):
            return


def start_counts(instance: ExpertInstance, rng: np.random.Generator) -> IntArray:
    """Return numbers of replicas r [F, L, E] to start from; the first are the greedy rule's."""
    weight, num_slots, limit = instance.weight.max(axis=2), instance.num_slots, instance.num_gpus
    order = np.argsort(-weight, axis=1)
    sorted_weight = np.take_along_axis(weight, order, axis=1)
    before = np.cumsum(sorted_weight, axis=1) - sorted_weight
    distorted = [weight]
    for part in _HOT_PARTS:
        is_hot = np.empty(weight.shape, dtype=bool)
        np.put_along_axis(is_hot, order, before < part * sorted_weight.sum(axis=1, keepdims=True), axis=1)
        distorted += [np.where(is_hot, weight * ratio, weight) for ratio in _RATIOS]
    distorted += list(weight * np.exp(_LOAD_NOISE * rng.standard_normal((_NUM_RANDOM, *weight.shape))))
    counts = greedy_counts(np.concatenate(distorted), num_slots, limit)
    mean = max(float(instance.gpu_speed.max()), 1.0)
    levels = [counts_up_to_level(weight, np.full(len(weight), level * mean), num_slots, limit) for level in _LEVELS]
    return np.concatenate([counts.reshape(len(distorted), *weight.shape), np.stack(levels)])


def pack_starts(instance: ExpertInstance, copies: int, rng: np.random.Generator) -> IntArray:
    """Return the best ``copies`` starts of each layer as x [C, L, S]; the greedy rule's numbers differ in order."""
    counts = start_counts(instance, rng)
    num_starts, num_layers, num_experts = counts.shape
    repeated = select_layers(instance, np.tile(np.arange(num_layers), num_starts))
    is_known = np.all(counts == counts[0], axis=2).reshape(-1, 1)
    is_known[:num_layers] = False
    noise = np.exp(_ORDER_NOISE * is_known * rng.standard_normal((len(is_known), num_experts)))
    grid = largest_first(repeated, counts.reshape(-1, num_experts), order_noise=noise)
    size = repeated.weight / replica_counts(slots_from_grid(grid), num_experts)[:, :, None]
    placed = slots_from_grid(improve_grid(repeated, grid, size, np.ones(len(grid)), _START_EFFORT))
    reached = uniform_objective(repeated, placed).reshape(num_starts, num_layers)
    best = np.argsort(reached, axis=0, kind="stable")[:copies]
    return np.take_along_axis(placed.reshape(num_starts, num_layers, -1), best[:, :, None], axis=0)


class ReplicaWalk:
    """Walks over slots x [B, S] of B rows, and the best of each so far with its (O) [B] under the uniform split."""

    def __init__(self, instance: ExpertInstance, placed: IntArray, rng: np.random.Generator) -> None:
        """Begin with some slots."""
        self.instance, self.rng, self.placed = instance, rng, placed.copy()
        self.counts = replica_counts(placed, instance.num_experts)
        self.best, self.objective = placed.copy(), uniform_objective(instance, placed)
        self._weight = np.ascontiguousarray(np.moveaxis(instance.weight, 2, 0))  # [D, B, E]
        self._rows = np.arange(len(placed))[:, None]
        self._gives_from, self._takes_from = (np.zeros(self.counts.shape, dtype=np.int64) for _ in range(2))
        one_workload, alike = len(self._weight) == 1, np.all(instance.gpu_speed == instance.gpu_speed[0])
        self.folds = one_workload and bool(alike and np.all(instance.slots_per_gpu == 2))
        self._wait = int(np.clip(instance.num_experts // 2, 2, _WAIT))
        self._stale, self._turn = np.zeros(len(placed), dtype=np.int64), 0

    def run(self, turns: int, num_exchanges: int) -> None:
        """Make ``turns`` transfers, with so many rounds of exchanges after each."""
        for _ in range(turns):
            self._transfer()
            self._exchange(num_exchanges)
            self._turn += 1

    def _transfer(self) -> None:
        state = _Changes(self.instance, self._weight, self.placed, self.counts)
        may_give = (self._gives_from <= self._turn) & (self.counts > 1)
        may_take = (self._takes_from <= self._turn) & (self.counts < self.instance.num_gpus)
        slot, taker, value = state.promising(may_give, may_take)
        exact = np.where(np.isfinite(value), state.measure_after(slot, taker), np.inf)
        exact *= 1 + _NOISE * self.rng.random(exact.shape)
        choice = np.argmin(exact, axis=1)
        rows = np.flatnonzero(np.isfinite(exact[self._rows[:, 0], choice]))
        slot, taker = slot[rows, choice[rows]], taker[rows, choice[rows]]
        giver = self.placed[rows, slot]
        self.placed[rows, slot] = taker
        self.counts[rows, giver] -= 1
        self.counts[rows, taker] += 1
        self._gives_from[rows, taker] = self._takes_from[rows, giver] = self._turn + self._wait

    def _exchange(self, rounds: int) -> None:
        instance = self.instance
        if self.folds:
            self._fold()
            rounds = min(rounds, 1)
        grid = grid_from_slots(self.placed, instance.slots_per_gpu)
        state = SlotGrid(instance, grid, instance.weight / self.counts[:, :, None])
        for turn in range(rounds):
            last = turn == rounds - 1
            exchange_pairs(state, int(self.rng.integers(max(1, instance.num_gpus // 2))) if last else turn)
        relieve_fullest(state)
        self.placed, reached = slots_from_grid(state.expert), state.fullest()
        better = reached < self.objective * (1 - SUMMED)
        self.best[better], self.objective[better] = self.placed[better], reached[better]
        self._stale = np.where(better, 0, self._stale + 1)
        back = self._stale > _PATIENCE
        self.placed[back] = self.best[back]
        self.counts[back] = replica_counts(self.best[back], instance.num_experts)
        self._stale[back], self._gives_from[back], self._takes_from[back] = 0, 0, 0

    def _fold(self) -> None:
        """Pair the largest share with the smallest and so on inwards: with two slots a GPU no packing of these counts is better.

        Rows in which an expert would meet itself (C2) stay as they are.
        """
        share = np.take_along_axis(self._weight[0] / self.counts, self.placed, axis=1)
        order = np.lexsort((self.placed, -share), axis=1)
        experts, num_gpus = np.take_along_axis(self.placed, order, axis=1), self.instance.num_gpus
        pairs = np.stack([experts[:, :num_gpus], experts[:, ::-1][:, :num_gpus]], axis=2)
        apart = np.all(pairs[:, :, 0] != pairs[:, :, 1], axis=1)
        self.placed[apart] = pairs.reshape(experts.shape)[apart]


class _Changes:
    """What one replica more or less of each expert makes of the measure, for slots x [B, S] and counts r [B, E]."""

    def __init__(self, instance: ExpertInstance, weight: FloatArray, placed: IntArray, counts: IntArray) -> None:
        self.instance, self.placed = instance, placed
        self._rows, self._gpu = np.arange(len(placed))[:, None], instance.gpu_of_slot
        speed = instance.gpu_speed[self._gpu]
        share = weight / counts
        self._more, self._fewer = weight / (counts + 1), weight / np.maximum(counts - 1, 1)
        self._share = share
        self._share_of_slot = share[:, self._rows, placed] / speed
        starts = np.concatenate([[0], np.cumsum(instance.slots_per_gpu)[:-1]])
        used = np.add.reduceat(self._share_of_slot, starts, axis=2)
        self._top = used.max(axis=(0, 2))
        self._used = used / self._top[:, None]
        mean = weight.sum(axis=2).max(axis=0) / instance.gpu_speed.sum()
        self._zoom = np.clip(_SCALE / np.maximum(self._top / mean - 1, SUMMED), 1.0, _MAX_ZOOM)
        self._of_gpu = self._measure(self._used)
        self._share_of_slot /= self._top[:, None]
        on_gpu, now = self._used[:, :, self._gpu], self._of_gpu[:, self._gpu]
        scale = speed * self._top[:, None]
        falls = (share - self._more)[:, self._rows, placed] / scale
        rises = (self._fewer - share)[:, self._rows, placed] / scale
        fall, self._rise = now - self._measure(on_gpu - falls), self._measure(on_gpu + rises) - now
        num_experts = counts.shape[1]
        flat = (placed + self._rows * num_experts).ravel()
        self.gain = np.asarray(
            np.bincount(flat, fall.ravel(), counts.size).reshape(counts.shape), dtype=np.float64
        )  # of one replica more
        self.loss = np.asarray(
            np.bincount(flat, self._rise.ravel(), counts.size).reshape(counts.shape), dtype=np.float64
        )  # of one replica less
        self._has = experts_on_gpus(placed, self._gpu, num_experts).swapaxes(1, 2)  # [B, E, G]

    def promising(self, may_give: BoolArray, may_take: BoolArray) -> tuple[IntArray, IntArray, FloatArray]:
        """Return slots and experts to give them to [B, N], and the summed changes of the measure, infinite where not allowed."""
        num_rows, num_slots = self.placed.shape
        num_experts = self.gain.shape[1]
        gaining = np.argsort(-np.where(may_take, self.gain, -np.inf), axis=1)[:, :_NUM_GAINING]
        every_slot = np.broadcast_to(np.arange(num_slots), (num_rows, num_slots))
        fullest = np.argsort(-self._of_gpu, axis=1)[:, :_NUM_FULLEST]
        is_full = np.zeros(self._of_gpu.shape, dtype=bool)
        np.put_along_axis(is_full, fullest, values=True, axis=1)
        # As many slots in each row: with GPUs of different slots the fullest ones of a row may have fewer.
        num_full = int(np.sort(self.instance.slots_per_gpu)[-_NUM_FULLEST:].sum())
        of_full = np.argsort(~is_full[:, self._gpu], axis=1, kind="stable")[:, :num_full]
        every_expert = np.broadcast_to(np.arange(num_experts), (num_rows, num_experts))
        slots, takers, values = [], [], []
        for slot, taker in ((every_slot, gaining), (of_full, every_expert)):
            value = self._summed(slot, taker, may_give, may_take)
            num = min(_NUM_EXACT, value.shape[1] * value.shape[2])
            flat = value.reshape(num_rows, -1)
            best = np.argpartition(flat, num - 1, axis=1)[:, :num]
            slots.append(np.take_along_axis(slot, best // taker.shape[1], axis=1))
            takers.append(np.take_along_axis(taker, best % taker.shape[1], axis=1))
            values.append(np.take_along_axis(flat, best, axis=1))
        return np.concatenate(slots, axis=1), np.concatenate(takers, axis=1), np.concatenate(values, axis=1)

    def _summed(self, slot: IntArray, taker: IntArray, may_give: BoolArray, may_take: BoolArray) -> FloatArray:
        """Return the change [B, s, n] if slots [B, s] are given to experts [B, n], changes of different GPUs added up."""
        giver, gpu = np.take_along_axis(self.placed, slot, axis=1), self._gpu[slot]
        speed = self.instance.gpu_speed[gpu] * self._top[:, None]
        leaves = self._share_of_slot[:, self._rows, slot]
        comes = self._more[:, self._rows, taker][:, :, None, :] / speed[:, :, None]
        local = (self._used[:, self._rows, gpu] - leaves)[:, :, :, None] + comes
        elsewhere = np.take_along_axis(self.loss, giver, axis=1) - np.take_along_axis(self._rise, slot, axis=1)
        elsewhere = np.where(np.take_along_axis(may_give, giver, axis=1), elsewhere, np.inf)
        elsewhere -= np.take_along_axis(self._of_gpu, gpu, axis=1)
        value = self._measure(local) + elsewhere[:, :, None] - np.take_along_axis(self.gain, taker, axis=1)[:, None]
        holds = self._has[self._rows[:, :, None], taker[:, None, :], gpu[:, :, None]]
        return np.where(holds | ~np.take_along_axis(may_take, taker, axis=1)[:, None], np.inf, value)

    def measure_after(self, slot: IntArray, taker: IntArray) -> FloatArray:
        """Return the measure [B, N] after each of these transfers."""
        giver, gpu = np.take_along_axis(self.placed, slot, axis=1), self._gpu[slot]
        falls = (self._share - self._more)[:, self._rows, taker]
        rises = (self._fewer - self._share)[:, self._rows, giver]
        speed = self.instance.gpu_speed * self._top[:, None, None]
        moved = (
            self._has[self._rows, giver] * rises[:, :, :, None] - self._has[self._rows, taker] * falls[:, :, :, None]
        )
        after = self._used[:, :, None, :] + moved / speed
        local = (self._more[:, self._rows, taker] - self._fewer[:, self._rows, giver]) / self.instance.gpu_speed[gpu]
        after[:, self._rows, np.arange(slot.shape[1]), gpu] += local / self._top[:, None]
        return np.asarray(self._measure(after).sum(axis=2))

    def _measure(self, used: FloatArray) -> FloatArray:
        """Return the measure [B, ...] of GPUs with loads [D, B, ...] over the largest."""
        value = np.maximum(1 + (used - 1) * self._zoom.reshape(-1, *(1,) * (used.ndim - 2)), 0)
        for _ in range(_SQUARINGS):
            value *= value
        return value[0] if len(value) == 1 else np.asarray(value.sum(axis=0))
