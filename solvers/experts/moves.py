"""Step 6, from one placement to the next: few slots change, and the transfers that change them.

A move is an expert that a GPU must fetch: one that it holds in the new placement and not in the old one. Slots of a GPU
are alike, so that experts which stay keep their slot (`align_slots`). Under a budget the placement changes step by step from
the previous one, each time where the fullest GPU of the layer gains most: an exchange with one of the emptier GPUs costs
at most two moves, one replica more of one of its experts in place of a replica elsewhere costs one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...schema.units import IntArray
from .instance import (
    BestSlots,
    ExpertInstance,
    experts_on_gpus,
    replica_counts,
    select_layers,
    uniform_shares,
    utilisation,
)
from .packing import SlotGrid, grid_from_slots, relieve_fullest, slots_from_grid

_FAR = 1.03
"""Load over the mean from which on a layer tries one replica more."""

_MORE_REPLICAS = 2
"""Replicas that are added at most, one after the other."""


@dataclass(frozen=True)
class Transfer:
    """GPU `to_gpu` fetches the weights of an expert into a slot; from itself where it has them only in another slot."""

    layer: int
    expert: int
    from_gpu: int
    from_slot: int
    to_gpu: int
    to_slot: int
    round: int


def count_moves(old: IntArray, new: IntArray, gpu_of_slot: IntArray, num_experts: int) -> IntArray:
    """Return the moves [L] between x [L, S] and another."""
    before, after = (experts_on_gpus(placed, gpu_of_slot, num_experts) for placed in (old, new))
    return np.asarray((after & ~before).sum(axis=(1, 2)))


def align_slots(old: IntArray, new: IntArray, gpu_of_slot: IntArray) -> IntArray:
    """Return the new slots [L, S] with every expert that stays on its GPU in its old slot."""
    num_experts = int(max(old.max(), new.max())) + 1
    rows = np.arange(len(old))[:, None]
    stays = experts_on_gpus(new, gpu_of_slot, num_experts)[rows, gpu_of_slot, old]
    known = experts_on_gpus(old, gpu_of_slot, num_experts)[rows, gpu_of_slot, new]
    result = old.copy()
    # Every GPU has as many slots whose expert goes as experts that come, in the same order of slots.
    result[~stays] = new[~known]
    return result


def rebalance_within_budget(instance: ExpertInstance, previous: IntArray, budget: int) -> IntArray:
    """Return x [L, S] at most ``budget`` moves from the previous one in every layer, under the uniform split."""
    if instance.num_gpus == 1 or budget < 1:
        return previous
    best = BestSlots(instance, _exchange_within_budget(instance, previous, previous, budget))
    # A hot expert loads all of its GPUs, which exchanges mend one by one: one replica more relieves them all.
    far = np.flatnonzero(best.objective > _FAR)
    part, start = select_layers(instance, far), previous[far]
    for _ in range(min(_MORE_REPLICAS, budget) if len(far) else 0):
        start = _add_replica(part, start)
        best.offer(_exchange_within_budget(part, previous[far], start, budget), far)
    return best.placed


def _exchange_within_budget(instance: ExpertInstance, previous: IntArray, start: IntArray, budget: int) -> IntArray:
    """Exchange slots of the fullest GPU, from ``start``, at most one move from the previous slots, while the budget lasts."""
    size = instance.weight / replica_counts(start, instance.num_experts)[:, :, None]
    state = SlotGrid(instance, grid_from_slots(start, instance.slots_per_gpu), size)
    num_others = max(4, instance.num_gpus // 4)
    spent = count_moves(previous, start, instance.gpu_of_slot, instance.num_experts)
    for _ in range((budget - 1 - int(spent.max(initial=0))) // 2):  # of two moves at most each
        relieve_fullest(state, num_others=num_others)
    best = slots_from_grid(state.expert)
    layers = np.arange(len(previous))
    while len(layers):
        changed = relieve_fullest(state, num_others=num_others)
        placed = slots_from_grid(state.expert)
        cost = count_moves(previous[layers], placed, instance.gpu_of_slot, instance.num_experts)
        within = changed & (cost <= budget)
        best[layers[within]] = placed[within]
        layers, state = layers[within], state.take(within)
    return best


def _add_replica(instance: ExpertInstance, previous: IntArray) -> IntArray:
    """Return x [L, S] with one replica more of the expert with the largest share, where another has one to spare.

    The emptier the GPU and the smaller the share of the replicas that stay, the better a replica to give up.
    """
    placed = previous.copy()
    counts = replica_counts(previous, instance.num_experts)
    weight = instance.weight.max(axis=2)
    used = utilisation(instance, previous, uniform_shares(previous, instance.num_experts)).max(axis=0)
    has = experts_on_gpus(previous, instance.gpu_of_slot, instance.num_experts)
    for layer in range(len(previous)):
        hot = int(np.argmax(np.where(counts[layer] < instance.num_gpus, weight[layer] / counts[layer], -np.inf)))
        slots = np.flatnonzero((counts[layer, previous[layer]] > 1) & (previous[layer] != hot))
        slots = slots[~has[layer, instance.gpu_of_slot[slots], hot]]
        if len(slots):
            experts = previous[layer, slots]
            share_after = weight[layer, experts] / (counts[layer, experts] - 1)
            placed[layer, slots[np.argmin(share_after + used[layer, instance.gpu_of_slot[slots]])]] = hot
    return placed


def plan_transfers(old: IntArray, new: IntArray, gpu_of_slot: IntArray, node_of_gpu: IntArray) -> tuple[Transfer, ...]:
    """Return the transfers that turn x into its successor, in rounds that lose no weight.

    In a round every GPU reads what others held when the round began, into spare memory, and writes its slots at the
    end of it. A round has one fetch of each GPU, unless a cycle of experts without second copies needs more of them at
    once. A source on the same GPU is taken before one on the same node, that before others, and of these the GPU that has
    sent least.
    """
    done: list[Transfer] = []
    for layer in range(len(old)):
        now, after, waiting = old[layer].copy(), new[layer], np.flatnonzero(old[layer] != new[layer])
        sent, turn = np.zeros(len(node_of_gpu), dtype=np.int64), 0
        while len(waiting):
            chosen = _safe_slots(now, after, waiting, gpu_of_slot)
            for slot in map(int, chosen):
                gpu, sources = int(gpu_of_slot[slot]), np.flatnonzero(now == after[slot])
                owner = gpu_of_slot[sources]
                nearest = np.lexsort((sent[owner], node_of_gpu[owner] != node_of_gpu[gpu], owner != gpu))[0]
                sent[owner[nearest]] += 1
                done.append(
                    Transfer(layer, int(after[slot]), int(owner[nearest]), int(sources[nearest]), gpu, slot, turn)
                )
            now[chosen] = after[chosen]
            waiting, turn = np.setdiff1d(waiting, chosen), turn + 1
    return tuple(done)


def _safe_slots(now: IntArray, new: IntArray, waiting: IntArray, gpu_of_slot: IntArray) -> IntArray:
    """Return the slots that can be written in one round: one a GPU, without those that end a weight which others wait for."""
    _, first = np.unique(gpu_of_slot[waiting], return_index=True)
    chosen = waiting[first]
    while len(chosen):
        after = now.copy()
        after[chosen] = new[chosen]
        lost = np.setdiff1d(new[np.setdiff1d(waiting, chosen)], after)
        if not len(lost):
            return chosen
        chosen = chosen[~np.isin(now[chosen], lost)]
    return waiting
