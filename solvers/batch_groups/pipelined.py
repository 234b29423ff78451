"""A batch through pipelines: how many packs there are, which sequences are in each, and in which order they enter which pipeline.

The micro-batches of a pipeline have one shape: packs, filled up to the tokens of the largest. Filling takes time as short sequences
do (`FILLING_LEN`).

Sets        s sequences;  r = 1..R pipelines, each with M packs;  p = 1..R M packs;  i stages, on ranks
Data        LEN[s] tokens;  SECONDS[s] of a sequence on the busiest rank;  FIXED seconds of a pack;  C tokens of a pack
            FORWARD[i], BACKWARD[i], WEIGHT[i] of each stage, of a pack that takes the busiest rank a second
Variables   M;  x[s,p] in {0,1};  place of each pack: pipeline and turn
(O)         min  max_r makespan of the replay whose pack p takes  T[p] = FIXED + sum_s SECONDS[s] x[s,p] + filling  times the stages
(C1) once:   sum_p x[s,p] = 1
(C2) memory: sum_s LEN[s] x[s,p] <= C
(C8) count:  M is one that the schedule is defined for: a multiple of the pipeline's ranks in rounds over chunks, as many at least

Few packs leave the pipeline idle while it fills, many are uneven or mostly filling: numbers from the fewest that hold the tokens to
the one whose packs are as long as the longest sequence, or some times the ranks of a pipeline, are packed (packing.py) and ordered
(pack_order.py): few evenly spaced by ratio at first, then those next to the best.

Bound, over all M: a rank does its part of all sequences, evenly dealt; it begins when the first pack has come through the stages
before it, and behind its last pass those stages run backward. A pack has the tokens of the mean one, or of the longest sequence,
which passes all stages forward and backward:

    max over ranks of  PART (sum_s SECONDS[s] / R + M FIXED) + BEFORE (FIXED + max(LEN, sum LEN / (R M)) * least seconds a token)
    (FIXED + SECONDS of the longest) (sum of FORWARD and BACKWARD, and of WEIGHT where that is one pass with BACKWARD)
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...cost_models.pipeline.replay import PipelineShape
from ...schema.batch import FILLING_LEN, LengthCosts, PipelineCosts
from ...schema.errors import ConfigError, InfeasibleError
from ...schema.units import FloatArray, IntArray
from ..tolerances import SUMMED
from .instance import BatchGroup, BatchSchedule
from .pack_order import UnequalReplay, order_packs
from .packing import pack_into

_NUMBERS, _MAX_BOUNDED = 6, 4096
"""Numbers of packs that are tried at first; that the bound looks at."""

_TIMES_RANKS = 6
"""Packs over the ranks of a pipeline up to which more of them are tried: the pipeline is then idle for a seventh of the time."""

_PASSES = 300_000
"""Passes that are replayed for the order of all packs: a tenth of a second."""


@dataclass(frozen=True)
class PackInstance:
    """A batch [S] under what sequences cost in the pipelines of a plan."""

    lengths: IntArray
    costs: LengthCosts

    @classmethod
    def under(cls, costs: LengthCosts, lengths: Sequence[int]) -> PackInstance:
        """Return the instance of lengths.

        Raises:
            ConfigError: there are none, or one is not positive.
            InfeasibleError: the longest is longer than a pack.
        """
        given = np.asarray(lengths, dtype=np.int64)
        if given.ndim != 1 or not len(given) or given.min() < 1:
            raise ConfigError("a batch has at least one sequence, and each of them at least one token")
        instance = cls(given, costs)
        if given.max() > instance.capacity:
            raise InfeasibleError(
                f"the longest sequence has {given.max():,} tokens, the ranks of a pack hold {instance.capacity:,} (C2)",
                help="cut sequences to that, or plan with more context parallelism, more stages or full recompute",
            )
        return instance

    @property
    def pipeline(self) -> PipelineCosts:
        """Return what the stages take."""
        assert self.costs.pipeline is not None
        return self.costs.pipeline

    @property
    def degrees(self) -> tuple[int, ...]:
        """Return the sizes of groups: the ranks of a stage that share a pack."""
        return (self.pipeline.cp,)

    @property
    def num_ranks(self) -> int:
        """Return the ranks of a stage that share the batch."""
        return self.costs.num_ranks

    @property
    def num_pipelines(self) -> int:
        """Return R."""
        return self.costs.num_ranks // self.pipeline.cp

    @property
    def tokens_per_rank(self) -> int:
        """Return what a rank holds of a pack."""
        return self.costs.tokens_per_rank

    @property
    def capacity(self) -> int:
        """Return C."""
        return self.costs.tokens_per_rank * self.pipeline.cp

    @property
    def fixed_s(self) -> float:
        """Return FIXED."""
        return self.costs.fixed_s

    @property
    def waits(self) -> bool:
        """Tell whether ranks wait for each other after every micro-batch."""
        return False

    @cached_property
    def seconds(self) -> FloatArray:
        """Return SECONDS [S]."""
        return self.costs.seconds(self.lengths.astype(np.float64), 1)

    @cached_property
    def numbers(self) -> tuple[int, int]:
        """Return the fewest packs of a pipeline that hold all tokens, and the most that can be longer than the longest (C8)."""
        tokens, unit = int(self.lengths.sum()), self.pipeline.unit
        low = max(self.pipeline.min_packs, math.ceil(tokens / (self.num_pipelines * self.capacity)))
        high = max(low, tokens // (self.num_pipelines * int(self.lengths.max())))
        return -(-low // unit) * unit, -(-high // unit) * unit

    def pack_seconds(self, packs: Sequence[Sequence[int]]) -> list[float]:
        """Return T of each pack, filled up to the tokens of the largest."""
        tokens = np.array([int(self.lengths[list(pack)].sum()) for pack in packs])
        filling = (tokens.max() - tokens).astype(np.float64)
        filling_s = filling * float(self.costs.seconds(np.array([float(FILLING_LEN)]), 1)[0]) / FILLING_LEN
        sums = [float(self.seconds[list(pack)].sum()) for pack in packs]
        return [self.fixed_s + sum_s + filled_s for sum_s, filled_s in zip(sums, filling_s.tolist(), strict=True)]

    def replay(self, count: int) -> UnequalReplay:
        """Return the replay of a pipeline of so many packs."""
        p = self.pipeline
        shape = PipelineShape(schedule=p.schedule, pp=p.pp, num_model_chunks=p.num_model_chunks, num_microbatches=count)
        return UnequalReplay(shape, np.array([p.forward_s, p.backward_s, p.weight_s]))

    def step_s(self, micro_batches: Sequence[Sequence[BatchGroup]]) -> float:
        """Return (O) of a schedule, recomputed from the sequences."""
        by_place = {(turn, g.first): g.sequences for turn, groups in enumerate(micro_batches) for g in groups}
        pairs = [
            (turn, first) for first in range(0, self.num_ranks, self.pipeline.cp) for turn in range(len(micro_batches))
        ]
        seconds = np.array(self.pack_seconds([by_place.get(place, ()) for place in pairs]))
        replay = self.replay(len(micro_batches))
        return max(replay.makespan_s(of_pipeline) for of_pipeline in seconds.reshape(self.num_pipelines, -1).tolist())


def schedule_packs(instance: PackInstance) -> BatchSchedule:
    """Return the packs of each pipeline in their order, as micro-batches of groups.

    Raises:
        InfeasibleError: no number of packs that was tried holds every sequence.
    """
    start, tried = time.perf_counter(), dict[int, BatchSchedule | None]()
    low, high = instance.numbers
    high = max(
        high, min(_TIMES_RANKS * instance.pipeline.pp, math.ceil(len(instance.lengths) / instance.num_pipelines))
    )
    numbers = {round(number) for number in np.geomspace(low, high, _NUMBERS)}
    while numbers := {-(-number // instance.pipeline.unit) * instance.pipeline.unit for number in numbers} - set(tried):
        tried |= {number: _packed(instance, number, max_replays=3) for number in sorted(numbers)}
        best = _best(tried)
        if best is None:
            numbers = {max(tried) + instance.pipeline.unit}
            if max(tried) > low + len(instance.lengths):
                raise InfeasibleError(f"no packs of {instance.capacity:,} tokens hold the sequences (C2)")
            continue
        count = len(best.micro_batches)
        below, above = (
            max((n for n in tried if n < count), default=count),
            min((n for n in tried if n > count), default=count),
        )
        numbers = {(below + count) // 2, (count + above) // 2} if len(tried) < 2 * _NUMBERS else set()
    best = _best(tried)
    assert best is not None
    count = len(best.micro_batches)
    replays = _PASSES // (instance.num_pipelines * count * 3 * len(instance.pipeline.forward_s))
    ordered = _packed(instance, count, max_replays=replays) or best
    best = min(best, ordered, key=lambda schedule: schedule.seconds)
    return BatchSchedule(best.micro_batches, best.seconds, pack_bound_s(instance), time.perf_counter() - start)


def _best(tried: dict[int, BatchSchedule | None]) -> BatchSchedule | None:
    return min(filter(None, tried.values()), key=lambda schedule: schedule.seconds, default=None)


def _packed(instance: PackInstance, count: int, *, max_replays: int) -> BatchSchedule | None:
    """Return the schedule with so many packs a pipeline, each sequence in one of them (C1); None where one has no room (C2)."""
    number, cp = count * instance.num_pipelines, instance.pipeline.cp
    packing = pack_into(instance.lengths, number, instance.capacity)
    if packing is None:
        return None
    seconds = instance.pack_seconds(packing.packs)
    order = order_packs(seconds, instance.replay(count), num_pipelines=instance.num_pipelines, max_replays=max_replays)
    micro_batches = tuple(
        tuple(BatchGroup(cp * r, cp, packing.packs[pack], seconds[pack]) for r, pack in enumerate(turn))
        for turn in zip(*order.pipelines, strict=True)
    )
    return BatchSchedule(micro_batches, order.seconds, 0.0, 0.0)


def pack_bound_s(instance: PackInstance) -> float:
    """Return seconds that no schedule is below."""
    p, pipelines, tokens = instance.pipeline, instance.num_pipelines, float(instance.lengths.sum())
    low, high = instance.numbers
    count = np.arange(low, min(high + p.unit, low + _MAX_BOUNDED) + 1)
    longest = float(instance.lengths.max())
    token_s = min(instance.costs.token_s[0])
    shortest_s = instance.fixed_s + np.maximum(longest, tokens / (pipelines * count)) * token_s
    if count[-1] < high:  # of more packs
        shortest_s[-1] = instance.fixed_s + longest * token_s
    all_s = float(instance.seconds.sum()) / pipelines + count * instance.fixed_s
    forward, backward, weight = (np.array(seconds) for seconds in (p.forward_s, p.backward_s, p.weight_s))
    ranks = np.array(instance.replay(low).shape.rank_of_stage)
    splits = instance.replay(low).shape.record.splits_backward
    best: FloatArray = np.zeros(len(count))
    for rank in range(p.pp):
        stages = np.flatnonzero(ranks == rank)
        part = float((forward + backward + weight)[stages].sum())
        before = forward[: stages[0]].sum() + (0.0 if splits else (backward + weight)[: stages[0]].sum())
        best = np.maximum(best, part * all_s + before * shortest_s)
    path = (forward + backward).sum() + (weight[0] if splits else weight.sum())
    longest_s = path * (instance.fixed_s + float(instance.seconds.max()))
    return max(float(best.min()), longest_s) * (1 - SUMMED)
