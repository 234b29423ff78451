"""Packs through pipelines: which pipeline computes which packs, and in which order they enter.

Packs are of equal tokens and unequal attention. The micro-batches of a pipeline have one shape; how long they take differs.

Sets        p packs;  r pipelines, each with M of them;  t places in the order of a pipeline
Data        FACTOR[p] seconds of a pack over those of the mean one, the same on every stage
Variables   place[p,r,t] in {0,1}
(O)         min  max_r makespan of the replay whose micro-batch t takes FACTOR times the stages' seconds
(C1) one pack a place: sum_p place[p,r,t] = 1

Packs are dealt longest first to the pipeline with least work that has a place left. Within one the orders descending, ascending
and with the longest in the middle are each improved by exchanging two packs as long as that shortens the replay; of few packs all
orders are replayed.
Source: the replay is cost_models/pipeline/replay.py's, with seconds by micro-batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...cost_models.pipeline.replay import PipelineShape, program
from ...schema.errors import ConfigError
from ...schema.units import FloatArray, IntArray
from ..tolerances import SUMMED

_MAX_PERMUTED, _MAX_REPLAYS = 6, 3_000
"""Packs of a pipeline of which all orders are replayed; replays of a pipeline, shared out over the climbs."""


@dataclass(frozen=True)
class PackOrder:
    """Packs of each pipeline in the order in which they enter, and the seconds of the pipeline that takes longest."""

    pipelines: tuple[tuple[int, ...], ...]
    seconds: float


@dataclass(frozen=True)
class UnequalReplay:
    """The replay of a pipeline whose micro-batches differ: seconds of F, B and W of the mean one on each stage [3, S]."""

    shape: PipelineShape
    seconds: FloatArray

    @cached_property
    def _passes(self) -> list[tuple[int, int, float, int]]:
        """Return of each pass the two positions it waits for, the mean seconds, and the micro-batch."""
        passes = program(self.shape)
        forward_s, backward_s, weight_s = self.seconds
        mean_s = np.concatenate([forward_s, backward_s, weight_s, backward_s + weight_s])[passes.kinds]
        micro_batch: IntArray = np.zeros(len(passes.kinds) + 1, dtype=np.int64)
        for positions in passes.positions:
            micro_batch[positions] = np.arange(self.shape.num_microbatches)
        return list(zip(passes.before, passes.needs, mean_s.tolist(), micro_batch[1:].tolist(), strict=True))

    def makespan_s(self, factors: Sequence[float]) -> float:
        """Return (O) of one pipeline: the seconds of the step, with a factor for each micro-batch in order."""
        ends = [0.0]
        for before, needs, mean_s, micro_batch in self._passes:
            ends.append(max(ends[before], ends[needs]) + mean_s * factors[micro_batch])
        return max(ends)


def order_packs(
    factors: Sequence[float], replay: UnequalReplay, *, num_pipelines: int = 1, max_replays: int = _MAX_REPLAYS
) -> PackOrder:
    """Return the packs of each pipeline in their order.

    Args:
        factors: seconds of each pack over those of the mean one, or of one that takes a second.
        max_replays: of a pipeline, after which no climb goes on; of fewer than all orders take, few packs are climbed as well.

    Raises:
        ConfigError: there are not as many packs as the pipelines have micro-batches, or one takes no time.
    """
    count = replay.shape.num_microbatches
    if len(factors) != count * num_pipelines:
        raise ConfigError(f"{len(factors)} packs for {num_pipelines} pipelines of {count} micro-batches")
    if min(factors) <= 0:
        raise ConfigError(f"pack {int(np.argmin(factors))} takes {min(factors)} times the mean: a pack takes some time")
    answers = [_ordered(packs, factors, replay, max_replays) for packs in _dealt(factors, count, num_pipelines)]
    return PackOrder(tuple(tuple(packs) for packs, _ in answers), max(seconds for _, seconds in answers))


def _dealt(factors: Sequence[float], count: int, num_pipelines: int) -> list[list[int]]:
    """Return the packs of each pipeline, each with as many as it has places: (C1)."""
    pipelines: list[list[int]] = [[] for _ in range(num_pipelines)]
    work = [0.0] * num_pipelines
    for pack in sorted(range(len(factors)), key=lambda pack: -factors[pack]):
        r = min((r for r in range(num_pipelines) if len(pipelines[r]) < count), key=lambda r: work[r])
        pipelines[r].append(pack)
        work[r] += factors[pack]
    return pipelines


def _ordered(
    packs: list[int], factors: Sequence[float], replay: UnequalReplay, max_replays: int
) -> tuple[list[int], float]:
    """Return packs, given longest first, in the best order that is met, with its seconds."""

    def makespan_s(order: list[int]) -> float:
        return replay.makespan_s([factors[pack] for pack in order])

    if math.factorial(min(len(packs), _MAX_PERMUTED + 1)) <= max_replays:
        order = min(map(list, itertools.permutations(packs)), key=makespan_s)
        return order, makespan_s(order)
    peaked = [*packs[1::2][::-1], *packs[0::2]]
    climbed = (_climbed(start, makespan_s, max_replays // 3) for start in (packs, packs[::-1], peaked))
    return min(climbed, key=lambda entry: entry[1])


def _climbed(order: list[int], makespan_s: Callable[[list[int]], float], max_replays: int) -> tuple[list[int], float]:
    """Exchange two packs as long as that shortens the replay."""
    best, best_s, replays, improves = order, makespan_s(order), 0, True
    while improves and replays < max_replays:
        improves = False
        for i, j in itertools.islice(itertools.combinations(range(len(best)), 2), max_replays - replays):
            order = list(best)
            order[i], order[j] = order[j], order[i]
            seconds, replays = makespan_s(order), replays + 1
            if seconds < best_s * (1 - SUMMED):
                best, best_s, improves = order, seconds, True
    return best, best_s
