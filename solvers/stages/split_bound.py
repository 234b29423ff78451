"""Seconds that no split of the blocks over the stages of a replayed pipeline can beat.

Sets
    i = 0..N-1   blocks in the order of the model;  k its kinds
    r = 0..R-1   ranks; c = 0..V-1 the chunks of one;  s = 0..S-1 the stages
    p            chains of passes past rank r (cost_models/pipeline/paths.py); every one is over before the step is
Data
    SECONDS[a,i]  forward, input and weight pass of block i;  FIXED[a,s] what stage s has beside its blocks
    ONCE[q,i]     what a block adds to its rank once a step;  ONCE_FIXED[q,s];  LEAST[q] of the rank with the most of it at least
    FITS[r,i,j]   whether rank r has the memory for blocks i..j-1 (one chunk a rank), or for j - i blocks
    CHOICES[o]    SECONDS and ONCE under each option that every block has by itself (one chunk); those above are then the least
    BELOW         seconds of a step that matter: the answer is BELOW where no split is faster
Variables
    y[r]          blocks of rank r, of which before[r] = sum_{r'<r} y[r'] are on the ranks before it
Objective
    (O) min max_r ( max_p chain[p,r] + sum_q max(LEAST[q], once[q,r]) )
Constraints
    (C1) contiguous: stages hold the blocks in order, at least one each
    (C2) chunks: those of one rank differ by one block at most
    (C3) memory: FITS[r, before[r], before[r+1]]

chain[p,r] depends on the split through y[r], through the work on ranks before r and on ranks behind it. With one chunk these are
prefix and suffix sums over blocks, exact. With several chunks the least number of blocks that the chain's chunks of the other ranks
can have, given before[r] and y[r], stands in (by dynamic programming over (C2) alone); the first blocks of the model are what a
chain that begins at stage 0 passes, the last ones what one that ends at the last stage passes. A chunk holds kinds that its place
allows.
So chain and once are never more than those of any split, and

    best[r+1][before + y] = min_y max(best[r][before], cost[r][before, y])

is a lower bound of (O), which is one of the replayed step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from ...cost_models.pipeline.paths import Paths, paths_past
from ...cost_models.pipeline.replay import PipelineShape

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

MAX_PATHS = 48
"""Chains of a rank that are looked at: the longest ones with equal stages."""


@dataclass(frozen=True)
class SplitBoundInstance:
    """SECONDS [3, N], kind of each block [N], FIXED [3, S], ONCE [Q, N], ONCE_FIXED [Q, S], LEAST [Q], FITS [R, N+1, N+1]."""

    shape: PipelineShape
    seconds: FloatArray
    kind_of_block: IntArray
    fixed_s: FloatArray
    once_s: FloatArray
    once_fixed_s: FloatArray
    least_once_s: FloatArray
    fits: NDArray[np.bool_] | None = None
    choices: tuple[tuple[FloatArray, FloatArray], ...] = ()

    @property
    def num_blocks(self) -> int:
        """N."""
        return int(self.seconds.shape[1])

    @cached_property
    def stages_of_rank(self) -> IntArray:
        """Stages of each rank, one a chunk [R, V]."""
        return np.array(
            [np.flatnonzero(np.array(self.shape.rank_of_stage) == r) for r in range(self.shape.pp)], dtype=np.int64
        )

    @cached_property
    def kinds_before(self) -> IntArray:
        """Blocks of each kind before each one [N+1, K]."""
        is_kind = self.kind_of_block[:, None] == np.arange(int(self.kind_of_block.max()) + 1)
        return np.concatenate([np.zeros_like(is_kind[:1], dtype=np.int64), np.cumsum(is_kind, axis=0)])

    @cached_property
    def of_kind(self) -> FloatArray:
        """Forward, input and weight pass of a block of each kind [3, K], behind it what it adds once [3 + Q, K]."""
        first = np.array([int(np.argmax(self.kind_of_block == k)) for k in range(int(self.kind_of_block.max()) + 1)])
        return np.concatenate([self.seconds, self.once_s])[:, first]

    @cached_property
    def before_s(self) -> FloatArray:
        """Forward passes and backward chains of the first blocks [2, N+1]."""
        return _prefix(self.chained_s)

    @cached_property
    def behind_s(self) -> FloatArray:
        """The same of the last blocks [2, N+1]."""
        return _prefix(self.chained_s[:, ::-1])

    @property
    def chained_s(self) -> FloatArray:
        """What a micro-batch's way down and back takes in each block [2, N]."""
        return _chained(self.shape, self.seconds)

    @cached_property
    def fixed_before_s(self) -> FloatArray:
        """FIXED of the way through the first stages [2, S+1]."""
        return _prefix(_chained(self.shape, self.fixed_s))


@dataclass(frozen=True)
class SplitBound:
    """Seconds that no split beats, and the blocks of each rank [R] that this comes from; none if nothing is faster than asked."""

    bound_s: float
    sizes: tuple[int, ...]


def _chained(shape: PipelineShape, seconds: FloatArray) -> FloatArray:
    return np.stack([seconds[0], seconds[1] if shape.splits_backward else seconds[1] + seconds[2]])


def _prefix(values: FloatArray) -> FloatArray:
    return np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)


def lower_bound_s(instance: SplitBoundInstance, *, below_s: float) -> SplitBound:
    """What no split within the constraints is below, and the split it comes from; ``below_s`` where none is faster than that."""
    sizes = sizes_worth_trying(instance, below_s)
    if not len(sizes):
        return SplitBound(below_s, ())
    n, pp = instance.num_blocks, instance.shape.pp
    best, choices = np.full(n + 1, np.inf), []
    best[0] = 0.0
    for rank in range(pp):
        places = _rank_splits(instance.shape, n, int(sizes[0]), int(sizes[-1]), rank)
        reached = np.maximum(best[places.before], _rank_cost_s(instance, rank, places))
        best, choice = np.full(n + 1, np.inf), np.zeros(n + 1, dtype=np.int64)
        for size, cost_s in zip(sizes, reached.T, strict=True):
            after = places.before[:, 0] + size
            some = after <= n
            after, cost_s = after[some], cost_s[some]
            is_better = cost_s < best[after]
            best[after[is_better]], choice[after[is_better]] = cost_s[is_better], size
        choices.append(choice)
    if not best[-1] < below_s:
        return SplitBound(below_s, ())
    return SplitBound(float(best[-1]), _backtrack(choices, n))


def _backtrack(choices: list[IntArray], num_blocks: int) -> tuple[int, ...]:
    sizes, left = [], num_blocks
    for choice in reversed(choices):
        sizes.append(int(choice[left]))
        left -= sizes[-1]
    return tuple(reversed(sizes))


def sizes_worth_trying(instance: SplitBoundInstance, below_s: float) -> IntArray:
    """Numbers of blocks that a rank may have in a split that is faster than ``below_s``."""
    shape, n = instance.shape, instance.num_blocks
    others, fewest = shape.pp - 1, shape.num_model_chunks
    lightest = np.cumsum(np.sort(instance.seconds.sum(axis=0)))
    sizes = np.arange(fewest, n - others * fewest + 1)
    sizes = sizes[shape.num_microbatches * lightest[sizes - 1] + instance.least_once_s.sum() <= below_s]
    return np.asarray(sizes[sizes >= n - others * sizes[-1]] if len(sizes) else sizes)


@dataclass(frozen=True)
class _RankSplits:
    """What a rank may have and what others have then at least: whole numbers that all layouts of a shape share.

    Attributes:
        before, sizes: blocks on the ranks before [B, 1] and on the rank [Y].
        can_be: whether the other ranks can have the rest [B, Y].
        ways: for each of `_WAYS` blocks [D, B, Y] in each distinct range of stages and which of these each chain has [P].
        ranges: first and last stage of each of these [D, 2].
    """

    before: IntArray
    sizes: IntArray
    can_be: NDArray[np.bool_]
    ways: tuple[tuple[IntArray, IntArray], ...]
    ranges: tuple[IntArray, ...]


_WAYS = (
    ("forward_to", 0, True),
    ("backward_from", 1, False),
    ("forward_from", 0, False),
    ("backward_to", 1, True),
    ("backward_again_from", 1, False),
)
"""Ways of a chain through other ranks: the stage it ends before or begins at, forward or backward, from the front or not."""


@lru_cache(maxsize=4096)
def _rank_splits(shape: PipelineShape, n: int, least: int, most: int, rank: int) -> _RankSplits:
    sizes, later = np.arange(least, most + 1), shape.pp - 1 - rank
    first, last = max(rank * least, n - (later + 1) * most), min(rank * most, n - (later + 1) * least)
    before = np.arange(first, last + 1)[:, None]
    behind = n - before - sizes
    within = (later * least <= behind) & (behind <= later * most)
    behind = np.clip(behind, later * least, later * most)
    fewest = [_min_blocks(shape, n, least, most, k) for k in range(shape.num_model_chunks + 1)]
    rank_of = np.array(shape.rank_of_stage)

    def blocks(from_stage: int, to_stage: int) -> IntArray:
        ranks = rank_of[from_stage:to_stage]
        lower, upper = int((ranks < rank).sum()), int((ranks > rank).sum())
        own = _min_in_chunks(sizes, shape.num_model_chunks, int((ranks == rank).sum()))
        fewer = fewest[lower // rank if rank else 0][rank][before]
        more = fewest[upper // later if later else 0][later][np.minimum(behind, n)]
        return np.asarray(np.minimum(fewer + own + more, n))

    ways, ranges = [], []
    for name, _, from_front in _WAYS:
        ends, inverse = np.unique(getattr(paths_past(shape)[rank], name), return_inverse=True)
        of_way = np.stack([0 * ends, ends] if from_front else [ends, 0 * ends + shape.num_stages], axis=1)
        ways.append((np.array([blocks(i, j) for i, j in of_way]), inverse))
        ranges.append(of_way)
    return _RankSplits(before, sizes, within, tuple(ways), tuple(ranges))


def _rank_cost_s(instance: SplitBoundInstance, rank: int, places: _RankSplits) -> FloatArray:
    """(O) of one rank at least, given the blocks before it and its own [B, Y]; infinite where that cannot be."""
    can_be = places.can_be
    if instance.fits is not None:  # (C3)
        after = np.minimum(places.before + places.sizes, instance.num_blocks)
        can_be = can_be & instance.fits[rank, places.before, after]
    chains = _longest_chains(instance, rank)
    paths = paths_past(instance.shape)[rank].select(chains)
    beside = np.zeros((1, 1, 1))
    for (_, way, from_front), (blocks, inverse), ranges in zip(_WAYS, places.ways, places.ranges, strict=True):
        sums = (instance.before_s if from_front else instance.behind_s)[way][blocks]
        fixed = instance.fixed_before_s[way]
        sums = sums + (fixed[ranges[:, 1]] - fixed[ranges[:, 0]])[:, None, None]
        beside = beside + sums[inverse[chains]]
    least = np.max(_passes_on_rank_s(instance, rank, places, paths) + beside, axis=0) + _once_on_rank_s(
        instance, rank, places
    )
    if instance.choices and instance.shape.num_model_chunks == 1:
        least = np.maximum(least, np.max(_with_choices(instance, rank, places, paths) + beside, axis=0))
    return np.where(can_be, least, np.inf)


def _with_choices(instance: SplitBoundInstance, rank: int, places: _RankSplits, paths: Paths) -> FloatArray:
    """Passes in the row and what the rank adds once, each block under the option with the least of their sum [P, B, Y]."""
    row = paths.row[:, :, 0]
    each = np.min([row @ seconds + once.sum(axis=0) for seconds, once in instance.choices], axis=0)
    fixed = row @ instance.fixed_s[:, rank] + instance.once_fixed_s[:, rank].sum()
    return np.asarray(_sums_over_blocks(each, places) + fixed[:, None, None])


def _longest_chains(instance: SplitBoundInstance, rank: int) -> IntArray:
    """Those chains past a rank that are longest when all stages are equal."""
    shape, paths = instance.shape, paths_past(instance.shape)[rank]
    each = instance.seconds.sum(axis=1) / shape.num_stages
    mean = instance.fixed_before_s + _chained(shape, each)[:, None] * np.arange(shape.num_stages + 1)
    own = each[:, None] + instance.fixed_s[:, instance.stages_of_rank[rank]]
    length = paths.row.reshape(len(paths.row), -1) @ own.reshape(-1)
    for name, way, from_front in _WAYS:
        reached = mean[way][getattr(paths, name)]
        length = length + (reached if from_front else mean[way, -1] - reached)
    return np.argsort(-length, kind="stable")[:MAX_PATHS]


def _passes_on_rank_s(instance: SplitBoundInstance, rank: int, places: _RankSplits, paths: Paths) -> FloatArray:
    """Seconds of the passes in the row [P, B or 1, Y]."""
    own = instance.stages_of_rank[rank]
    fixed = (paths.row.reshape(len(paths.row), -1) @ instance.fixed_s[:, own].reshape(-1))[:, None, None]
    if instance.shape.num_model_chunks == 1:
        return np.asarray(fixed + _sums_over_blocks(paths.row[:, :, 0] @ instance.seconds, places))
    weights = np.swapaxes(paths.row, 1, 2) @ instance.of_kind[:3]
    return np.asarray(fixed + _lightest_chunks(instance, rank, places.sizes, weights)[:, None, :])


def _once_on_rank_s(instance: SplitBoundInstance, rank: int, places: _RankSplits) -> FloatArray:
    """What a rank adds once, or the one with the most of it at least [B or 1, Y]."""
    own, chunks = instance.stages_of_rank[rank], instance.shape.num_model_chunks
    if chunks == 1:
        added = _sums_over_blocks(instance.once_s, places)
    else:
        weights = np.repeat(instance.of_kind[3:, None, :], chunks, axis=1)
        added = _lightest_chunks(instance, rank, places.sizes, weights)[:, None, :]
    added = added + instance.once_fixed_s[:, own].sum(axis=1)[:, None, None]
    return np.asarray(np.maximum(added, instance.least_once_s[:, None, None]).sum(axis=0))


def _sums_over_blocks(values: FloatArray, places: _RankSplits) -> FloatArray:
    """Sums of [P, N] over the blocks of a rank [P, B, Y], over fewer where fewer are left."""
    sums = _prefix(values)
    after = np.minimum(places.before + places.sizes, sums.shape[1] - 1)
    return np.asarray(sums[:, after] - sums[:, places.before])


def _lightest_chunks(instance: SplitBoundInstance, rank: int, sizes: IntArray, weights: FloatArray) -> FloatArray:
    """Least sum of the weights [P, V, K] of a rank's blocks, by their number [P, Y]: as (C1) and (C2) let kinds into its chunks.

    Those that are lighter than the most frequent kind and may be in a chunk all count as the lightest of them.
    """
    shape, n, chunks = instance.shape, instance.num_blocks, instance.shape.num_model_chunks
    own, least = instance.stages_of_rank[rank], max(1, int(sizes[0]) // chunks)
    before = instance.kinds_before
    here = before[n - (shape.num_stages - 1 - own) * least] - before[own * least]  # [V, K]
    main = int(np.argmax(before[-1]))
    saved = np.where(here > 0, weights[:, :, main, None] - weights, 0.0).max(axis=-1)[:, :, None]
    others = (here.sum(axis=1) - here[:, main])[None, :, None]
    even, odd = sizes // chunks, sizes % chunks
    heavy = weights[:, :, main, None]
    further = np.sort(heavy - saved * (even < others), axis=1)
    upto = np.concatenate([np.zeros_like(further[:, :1]), np.cumsum(further, axis=1)], axis=1)
    whole = (heavy * even - saved * np.minimum(even, others)).sum(axis=1)
    return np.asarray(whole + upto[:, odd, np.arange(len(sizes))])


def _min_in_chunks(sizes: IntArray, num_chunks: int, some: int) -> IntArray:
    """Blocks that so many of a rank's chunks have at least, by its number of blocks."""
    return np.asarray(some * (sizes // num_chunks) + np.maximum(sizes % num_chunks - (num_chunks - some), 0))


@lru_cache(maxsize=4096)
def _min_blocks(shape: PipelineShape, num_blocks: int, least: int, most: int, some: int) -> IntArray:
    """Blocks that ``some`` chunks of each of k ranks have at least when the ranks have n [R, N+1]; N where that cannot be."""
    sizes = np.arange(least, most + 1)
    each = _min_in_chunks(sizes, shape.num_model_chunks, some)
    found = [np.where(np.arange(num_blocks + 1) == 0, 0, num_blocks)]
    for _ in range(shape.pp - 1):
        following = np.full_like(found[-1], num_blocks)
        for size, added in zip(sizes, each, strict=True):
            following[size:] = np.minimum(following[size:], found[-1][: num_blocks + 1 - size] + added)
        found.append(following)
    return np.array(found)
