"""Which GPU each replica goes to, for all layers at once: largest first onto the GPU with most room.

The classic list rule (Graham, SIAM J. Appl. Math. 17(2), 1969) with (C2): a GPU that holds the expert already is passed over.
Where the last replicas find no such GPU, the layer is packed anew by `spread`, which always ends. Arrays of places are
[L, G, K], K the most slots of a GPU, -1 where a GPU has fewer.
"""

from __future__ import annotations

import numpy as np

from .expert_instance import FloatArray, Instance, IntArray
from .expert_replicas import items_of

NO_EXPERT = -1


def largest_first(instance: Instance, counts: IntArray, *, order_noise: FloatArray | None = None) -> IntArray:
    """Places [L, G, K] of ``counts`` [L, E] replicas; a layer whose counts fit no such packing has others (see `spread`).

    Args:
        order_noise: [L, E] factors on the sizes that give the order, for other starts.
    """
    slots, speed = instance.slots_per_gpu, instance.gpu_speed
    num_layers, num_gpus = instance.num_layers, instance.num_gpus
    size = instance.weight / counts[:, :, None]
    largest = size.max(axis=2) if order_noise is None else size.max(axis=2) * order_noise
    experts = items_of(counts, instance.num_slots)
    rank = np.argsort(-np.take_along_axis(largest, experts, axis=1), axis=1, kind="stable")
    experts = np.take_along_axis(experts, rank, axis=1)
    places = np.full((num_layers, num_gpus, int(slots.max())), NO_EXPERT)
    load = np.zeros((num_layers, num_gpus, size.shape[2]))
    filled = np.zeros((num_layers, num_gpus), dtype=np.int64)
    closed = np.zeros((num_layers, num_gpus))
    last = np.full((num_layers, num_gpus), NO_EXPERT)
    stuck = np.zeros(num_layers, dtype=bool)
    rows = np.arange(num_layers)
    for s in range(instance.num_slots):
        expert = experts[:, s]
        added = size[rows, expert]
        room = _reach(load, added, speed) + closed
        # Replicas of an expert follow one another, so that a GPU that has it has it last.
        room[last == expert[:, None]] = np.inf
        gpu = np.argmin(room, axis=1)
        stuck |= ~np.isfinite(room[rows, gpu])
        load[rows, gpu] += added
        places[rows, gpu, np.minimum(filled[rows, gpu], slots[gpu] - 1)] = expert
        last[rows, gpu] = expert
        filled[rows, gpu] += 1
        closed[rows, gpu] = np.where(filled[rows, gpu] >= slots[gpu], np.inf, 0.0)
    for layer in np.flatnonzero(stuck):
        places[layer] = spread(slots, counts[layer], largest[layer])
    return places


def _reach(load: FloatArray, added: FloatArray, speed: FloatArray) -> FloatArray:
    """How full each GPU [L, G] is with one item more: its utilisation, or with several workloads a high power's sum."""
    if load.shape[2] == 1:
        return np.asarray((load[:, :, 0] + added) / speed)
    return np.asarray((((load + added[:, None]) / speed[:, None]) ** 8).sum(axis=2))


def spread(slots: IntArray, counts: IntArray, size: FloatArray) -> IntArray:
    """Places [G, K] of one layer: experts with most replicas first, each on the GPUs with most free slots.

    With as many slots on every GPU this places any counts up to G (neighbours in a cyclic order). With other slots some
    counts have no packing at all (Gale and Ryser's condition); then an expert gets fewer, and the slots left take the largest
    shares that their GPU does not hold.
    """
    places = np.full((len(slots), int(slots.max())), NO_EXPERT)
    free = slots.copy()
    placed = np.zeros_like(counts)
    for expert in np.lexsort((-size, -counts)):
        gpus = np.argsort(-free, kind="stable")[: counts[expert]]
        gpus = gpus[free[gpus] > 0]
        places[gpus, slots[gpus] - free[gpus]] = expert
        free[gpus] -= 1
        placed[expert] = len(gpus)
    share = size * counts
    for gpu in np.flatnonzero(free):
        while free[gpu]:
            held = np.isin(np.arange(len(counts)), places[gpu])
            expert = int(np.argmax(np.where(held, -np.inf, share / np.maximum(placed, 1e-9))))
            places[gpu, slots[gpu] - free[gpu]] = expert
            placed[expert] += 1
            free[gpu] -= 1
    return places


def flat(places: IntArray) -> IntArray:
    """Slots [L, S] of places [L, G, K]."""
    num_layers = len(places)
    return np.asarray(places[places != NO_EXPERT].reshape(num_layers, -1))


def nested(placed: IntArray, slots: IntArray) -> IntArray:
    """Places [L, G, K] of slots [L, S]."""
    used = np.arange(int(slots.max())) < slots[:, None]
    places = np.full((len(placed), *used.shape), NO_EXPERT)
    places[:, used] = placed
    return places
