"""One batch of sequences of unequal lengths: micro-batches, groups of ranks in each, and which group computes which sequences.

A group of d ranks shares its sequences (context parallelism of degree d): long sequences need large groups, for which the others
pay with exchange. Ranks meet after every micro-batch, as under ZeRO-3, whose gathers all of them take part in; under ZeRO 0 to 2
they meet once a step, and (O') takes the place of (O) (meeting_once.py).

Sets        s sequences;  k = 1..m micro-batches;  g groups of k;  d degrees 1, 2, 4, .. R
Data        LEN[s] tokens;  SECONDS[s,d] of a sequence in a group of d ranks;  FIXED seconds of a micro-batch;  C tokens of a rank
Variables   x[s,g] in {0,1};  d[g] degree;  T[k] seconds
(O)         min  sum_k (T[k] + FIXED)                                   where ranks wait after every micro-batch
(O')        min  max_r sum over groups g of r (t[g] + FIXED)            where they meet once
(C1) once:    sum_g x[s,g] = 1
(C2) memory:  sum_s LEN[s] x[s,g] <= C d[g]
(C3) ranks:   sum_{g of k} d[g] <= R
(C4) slowest: sum_s SECONDS[s,d[g]] x[s,g] <= T[k]
(C6) aligned: a group of d ranks begins at a multiple of d: groups of a micro-batch lie in the order of their sizes

A sequence may have parts that different chains of a model compute (an encoder its patches, a decoder its tokens). Its group
computes all of them: SECONDS is their sum, and LEN what they hold together, in tokens of the decoder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from ...schema.batch import LengthCosts
from ...schema.errors import ConfigError, InfeasibleError
from ...schema.units import BoolArray, FloatArray, IntArray
from ..tolerances import SUMMED


@dataclass(frozen=True, kw_only=True)
class BatchInstance:
    """A batch [S] and its machine.

    Attributes:
        lengths: tokens of each sequence [S].
        degrees: sizes of groups, powers of two up to ``num_ranks`` [D].
        seconds: of each sequence in a group of each size [S, D].
        tokens_per_rank: that a rank can hold in a micro-batch; fixed_s: of every micro-batch.
        waits: the objective is (O), else (O').
    """

    lengths: IntArray
    degrees: tuple[int, ...]
    seconds: FloatArray
    num_ranks: int
    tokens_per_rank: int
    fixed_s: float
    waits: bool = True

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        seconds_of: Callable[[FloatArray, int], FloatArray],
        *,
        num_ranks: int,
        tokens_per_rank: int,
        fixed_s: float,
        max_degree: int | None = None,
        waits: bool = True,
    ) -> BatchInstance:
        """Return the instance of lengths with ``seconds_of(lengths, degree)``.

        Raises:
            ConfigError: there are no sequences, or lengths that are not positive.
            InfeasibleError: the longest sequence fits on no group.
        """
        given = np.asarray(lengths, dtype=np.int64)
        if given.ndim != 1 or not len(given):
            raise ConfigError("a batch has at least one sequence")
        if given.min() < 1:
            raise ConfigError(f"sequence {int(given.argmin())} has {given.min()} tokens: a sequence has at least one")
        degrees = tuple(2**idx for idx in range((max_degree or num_ranks).bit_length()))
        if given.max() > degrees[-1] * tokens_per_rank:
            raise InfeasibleError(
                f"the longest sequence has {given.max():,} tokens; {degrees[-1]} ranks with {tokens_per_rank:,} each hold "
                f"{degrees[-1] * tokens_per_rank:,} (C2)",
                help="cut sequences to that, or take more ranks or full recompute",
            )
        seconds = np.stack([seconds_of(given.astype(np.float64), degree) for degree in degrees], axis=1)
        return cls(
            lengths=given, degrees=degrees, seconds=seconds, num_ranks=num_ranks, tokens_per_rank=tokens_per_rank, fixed_s=fixed_s,
            waits=waits,
        )  # fmt: skip

    @classmethod
    def under(cls, costs: LengthCosts, lengths: Sequence[int]) -> BatchInstance:
        """Return the instance of lengths under the costs of a plan."""
        return cls.of(
            lengths,
            costs.seconds,
            num_ranks=costs.num_ranks,
            max_degree=2 ** (len(costs.token_s) - 1),
            tokens_per_rank=costs.tokens_per_rank,
            fixed_s=costs.fixed_s,
            waits=costs.waits,
        )

    @cached_property
    def allowed(self) -> BoolArray:
        """Return which degrees hold a sequence by itself [S, D] (C2)."""
        return np.asarray(self.lengths[:, None] <= self.tokens_per_rank * np.array(self.degrees))

    @cached_property
    def fastest_s(self) -> FloatArray:
        """Return the seconds of each sequence at its fastest degree [S]."""
        return np.where(self.allowed, self.seconds, math.inf).min(axis=1)

    @cached_property
    def alike(self) -> tuple[IntArray, IntArray, IntArray]:
        """Return one index of each kind of sequence [K], the kind of each [S] and how many there are [K], the slowest kind last.

        Sequences are alike whose tokens and seconds are; of several parts these do not follow from each other.
        """
        order = np.lexsort((self.lengths, self.fastest_s))
        rows = np.column_stack((self.lengths, self.seconds))[order]
        starts = np.flatnonzero(np.append(True, (rows[1:] != rows[:-1]).any(axis=1)))
        counts = np.diff(np.append(starts, len(order)))
        kinds = np.empty(len(order), dtype=np.int64)
        kinds[order] = np.repeat(np.arange(len(starts)), counts)
        return order[starts], kinds, counts

    @cached_property
    def rank_seconds(self) -> FloatArray:
        """Return ranks times seconds of each sequence and degree, infinite where it is not held [S, D]."""
        return np.where(self.allowed, self.seconds * np.array(self.degrees), math.inf)

    @property
    def min_micro_batches(self) -> int:
        """Return the fewest micro-batches that hold all tokens."""
        return max(1, math.ceil(int(self.lengths.sum()) / (self.num_ranks * self.tokens_per_rank)))

    def step_s(self, micro_batches: Sequence[Sequence[BatchGroup]]) -> float:
        """Return (O) or (O') of a schedule, recomputed: a micro-batch takes as long as its slowest group (C4)."""
        column = {degree: idx for idx, degree in enumerate(self.degrees)}
        if not self.waits:
            loads = np.zeros(self.num_ranks)
            for group in (group for groups in micro_batches for group in groups):
                seconds = float(self.seconds[list(group.sequences), column[group.size]].sum())
                loads[group.first : group.first + group.size] += seconds + self.fixed_s
            return float(loads.max())
        slowest = (
            max(float(self.seconds[list(group.sequences), column[group.size]].sum()) for group in groups)
            for groups in micro_batches
        )
        return sum(seconds + self.fixed_s for seconds in slowest)


@dataclass(frozen=True)
class BatchGroup:
    """Ranks ``first .. first + size - 1`` compute these sequences (indices of the batch) in a micro-batch."""

    first: int
    size: int
    sequences: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class BatchSchedule:
    """Micro-batches as groups of ranks; seconds of the batch, a bound that no schedule is below, and those of the solver."""

    micro_batches: tuple[tuple[BatchGroup, ...], ...]
    seconds: float
    bound_seconds: float
    solve_seconds: float

    @property
    def gap(self) -> float:
        """Return what the bound leaves open, as a part of the seconds."""
        return max(0.0, 1 - self.bound_seconds / self.seconds)


class BatchProblem(Protocol):
    """What a batch and its machine are to a checker."""

    @property
    def lengths(self) -> IntArray:
        """Return the tokens of each sequence [S]."""

    @property
    def degrees(self) -> tuple[int, ...]:
        """Return the sizes of groups."""

    @property
    def num_ranks(self) -> int:
        """Return the ranks that share the batch."""

    @property
    def tokens_per_rank(self) -> int:
        """Return what one of them holds in a micro-batch."""

    @property
    def fixed_s(self) -> float:
        """Return the seconds of every micro-batch, whatever is in it."""

    @property
    def waits(self) -> bool:
        """Tell whether ranks wait for each other after every micro-batch."""

    def step_s(self, micro_batches: Sequence[Sequence[BatchGroup]]) -> float:
        """Return the objective of a schedule, recomputed from the sequences."""


Groups = list[tuple[int, list[int]]]
"""Groups of a micro-batch: (index of the degree, sequences)."""


def check_batch(instance: BatchProblem, schedule: BatchSchedule) -> list[str]:
    """Return the constraints that a schedule breaks, by label; empty where it is right."""
    broken = []
    if sorted(idx for groups in schedule.micro_batches for group in groups for idx in group.sequences) != list(
        range(len(instance.lengths))
    ):
        broken.append("(C1) a sequence is computed never or twice")
    for number, groups in enumerate(schedule.micro_batches):
        taken: set[int] = set()
        for group in groups:
            tokens = int(instance.lengths[list(group.sequences)].sum())
            if tokens > instance.tokens_per_rank * group.size:
                broken.append(f"(C2) micro-batch {number}: {group.size} ranks hold {tokens} tokens")
            ranks = set(range(group.first, group.first + group.size))
            if taken & ranks or max(ranks) >= instance.num_ranks:
                broken.append(
                    f"(C3) micro-batch {number}: ranks {group.first} to {max(ranks)} are taken or do not exist"
                )
            taken |= ranks
            if group.first % group.size or group.size not in instance.degrees:
                broken.append(f"(C6) micro-batch {number}: a group of {group.size} begins at rank {group.first}")
    if not math.isclose(schedule.seconds, instance.step_s(schedule.micro_batches), rel_tol=SUMMED):
        broken.append("(O) the seconds are others")
    return broken
