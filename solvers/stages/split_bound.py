"""Seconds that no split of the blocks over the stages of a replayed pipeline can beat.

Sets
    i = 0..N-1   blocks in the order of the model;  k its kinds
    r = 0..R-1   ranks; c = 0..V-1 the chunks of one;  s = 0..S-1 the stages
    p            chains of passes past rank r (`paths_past`); every one is over before the step is
Data
    SECONDS[a,i]  forward, input and weight pass of block i;  FIXED[a,s] what stage s has besides its blocks
    ONCE[q,i]     what a block adds to its rank once a step;  ONCE_FIXED[q,s];  ONCE_MIN[q] of the rank with the most of it at least
    FITS[r,i,j]   whether rank r has the memory for blocks i..j-1 (one chunk a rank), or for j - i blocks
    CHOICES[o]    SECONDS and ONCE under each option that every block has by itself (one chunk); those above are then the lowest
    BELOW         seconds of a step that matter: the answer is BELOW where no split is faster
Variables
    y[r]          blocks of rank r, of which before[r] = sum_{r'<r} y[r'] are on the ranks before it
Objective
    (O) min max_r ( max_p chain[p,r] + sum_q max(ONCE_MIN[q], once[q,r]) )
Constraints
    (C1) contiguous: stages hold the blocks in order, at least one each
    (C2) chunks: those of one rank differ by one block at most
    (C3) memory: FITS[r, before[r], before[r+1]]

Every pass waits for the one before it on its rank and for its input, so a step takes as long as its longest chain of passes, and
any chain is a lower bound. Those here enter the row of rank r with the first micro-batch, at its forward or its backward pass
through one of the rank's stages s, follow the row, and leave it with the last micro-batch:

    before   F(0) .. F(s-1)                      to its forward pass
             F(0) .. F(S-1), B(S-1) .. B(s+1)    to its backward pass
    row      the passes of the rank from the one to the other, both included
    behind   B(s-1) .. B(0)                      from its backward pass
             F(s+1) .. F(S-1), B(S-1) .. B(0)    from its forward pass
             F(s+1) .. F(S-1), B(S-1) .. B(s'+1) and the row from B(s') on, back on the same rank
             nothing                             from the last pass of the row

In time, with four ranks and one chunk a rank:

    rank 0  F............................................B
    rank 1    F........................................B
    rank 2 r    F F F B F B F B W F B W B W B W B W B        chain = way down to r (forward, ranks before r)
    rank 3        F B . . .                                        + the row from its first to its last pass
            |--|---------------------------------------|--|        + way back (backward, ranks before r)
            down               row on rank r           back  or a way through the ranks behind r, forward or backward

    chain[p,r] = sum over five ways w of  FIXED of the stages on w + PASS_w(blocks on w)  +  row_p . (FIXED + SECONDS of rank r)

With equal stages one of these chains is the longest of all under 1f1b in any number of chunks. A chain depends on the split
through y[r] (the row), through the work on ranks before r (ways counted from the front of the model) and on ranks behind it (ways
counted from its end). With one chunk these are prefix and suffix sums over blocks, exact:

    blocks       0 ... before[r] | before[r] ... before[r] + y[r] | ... N
                 prefix sums     | the row: a window of y[r]      | suffix sums

With several chunks the lowest number of blocks that the chain's chunks of the other ranks can have, given before[r] and y[r],
stands in (by dynamic programming over (C2) alone); the first blocks of the model are what a chain that begins at stage 0 passes,
the last ones what one that ends at the last stage passes. A chunk holds kinds that its position allows. So chain and once are never
more than those of any split, and

    best[r+1][before + y] = min_y max(best[r][before], cost[r][before, y])

is a lower bound of (O), which is one of the replayed step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache

import numpy as np

from ...cost_models.pipeline.orders import Row
from ...cost_models.pipeline.replay import PipelineShape, rows_of
from ...schema.units import BoolArray, FloatArray, IntArray

MAX_PATHS = 48
"""Chains of a rank that are evaluated, the longest ones with equal stages: any of them bound the step, and time grows with them."""

MAX_CHUNKS = 8
"""Chunks at which chains enter, leave and return, the first or the last ones: there are the long chains."""

_WAYS = ((0, True), (1, False), (0, False), (1, True), (1, False))
"""Ways of a chain through other ranks: forward to the row (0), backward to it (1), forward from it (0), backward from it (1), and
backward again to it (1); and whether a way counts from the front of the model."""


@dataclass(frozen=True)
class Paths:
    """Chains past one rank [P].

    Attributes:
        ends: the stage at which each of `_WAYS` ends, if it counts from the front, or from which on it goes [5, P].
        row: forward, input and weight passes of each chunk in the row [P, 3, V].
    """

    ends: IntArray
    row: IntArray


@lru_cache(maxsize=256)
def paths_past(shape: PipelineShape) -> tuple[Paths, ...]:
    """Return the chains past each rank.

    Of many micro-batches those in the middle add entire rounds to the row: the order repeats there.

    Raises:
        ConfigError: the schedule is not defined for these numbers.
    """
    few = shape.fewer_microbatches
    rows = rows_of(shape.with_microbatches(few))
    return tuple(_past(shape, rank, row, few) for rank, row in enumerate(rows))


def _past(shape: PipelineShape, rank: int, row: Row, few: int) -> Paths:
    last, stages = shape.num_stages, np.flatnonzero(np.array(shape.rank_of_stage) == rank)
    of_kind = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 1, 1]])[row[0]]  # F, B, W, BW
    each = of_kind[:, :, None] * (row[1][:, None] == stages)[:, None, :]
    counts = np.concatenate(
        [np.zeros_like(each[:1]), np.cumsum(each, axis=0)]
    )  # passes before each position [n + 1, 3, V]
    more = shape.num_microbatches - few
    ends = np.flatnonzero((row[0] != 2) & ((row[2] == 0) | (row[2] == few - 1)))
    position = {(min(kind, 1), s, i): n for n, (kind, s, i) in zip(ends.tolist(), row[:, ends].T.tolist(), strict=True)}
    low, high = stages[:MAX_CHUNKS].tolist(), stages[-MAX_CHUNKS:].tolist()
    entries = [(s, last, position[0, s, 0]) for s in low] + [(last, s + 1, position[1, s, 0]) for s in high]
    ways_out: list[tuple[int, int, int, int, int | None]] = [
        (position[1, s, few - 1], last, s, last, None) for s in low
    ]
    ways_out += [(position[0, s, few - 1], s + 1, last, last, None) for s in high]
    ways_out.append((row.shape[1] - 1, last, 0, last, None))
    ways_out += [
        (position[0, s, few - 1], s + 1, 0, t + 1, position[1, t, few - 1])
        for s, t in itertools.product(high, high)
        if position[1, t, few - 1] > position[0, s, few - 1]
    ]
    chains, passes_of_chain = [], []
    for (forward_to, backward_from, enters), way_out in itertools.product(entries, ways_out):
        leaves, forward_from, backward_to, again_from, returns = way_out
        if enters <= leaves:
            passes = counts[leaves + 1] - counts[enters] + more
            passes_of_chain.append(passes if returns is None else passes + counts[-1] - counts[returns])
            chains.append((forward_to, backward_from, forward_from, backward_to, again_from))
    return Paths(np.array(chains, dtype=np.int64).T, np.array(passes_of_chain, dtype=np.int64))


@dataclass(frozen=True)
class SplitBoundInstance:
    """SECONDS [3, N], kind of each block [N], FIXED [3, S], ONCE [Q, N], ONCE_FIXED [Q, S], ONCE_MIN [Q], FITS [R, N+1, N+1]."""

    shape: PipelineShape
    seconds: FloatArray
    kind_of_block: IntArray
    fixed_s: FloatArray
    once_s: FloatArray
    once_fixed_s: FloatArray
    min_once_s: FloatArray
    fits: BoolArray | None = None
    choices: tuple[tuple[FloatArray, FloatArray], ...] = ()

    @property
    def num_blocks(self) -> int:
        """N."""
        return int(self.seconds.shape[1])

    @cached_property
    def stages_of_rank(self) -> IntArray:
        """Stages of each rank, one a chunk [R, V]."""
        ranks = np.array(self.shape.rank_of_stage)
        return np.array([np.flatnonzero(ranks == r) for r in range(self.shape.pp)], dtype=np.int64)

    @cached_property
    def kinds_before(self) -> IntArray:
        """Blocks of each kind before each one [N+1, K]."""
        is_kind = self.kind_of_block[:, None] == np.unique(self.kind_of_block)
        return np.concatenate([np.zeros_like(is_kind[:1], dtype=np.int64), np.cumsum(is_kind, axis=0)])

    @cached_property
    def kind_s(self) -> FloatArray:
        """Forward, input and weight pass of a block of each kind [3, K], behind it what it adds once [3 + Q, K]."""
        first = np.unique(self.kind_of_block, return_index=True)[1]
        return np.concatenate([self.seconds, self.once_s])[:, first]

    @cached_property
    def sums_s(self) -> tuple[FloatArray, FloatArray]:
        """Forward passes and backward chains of the last blocks [2, N+1], and of the first ones."""
        chained = _chained(self.shape, self.seconds)
        return _prefix(chained[:, ::-1]), _prefix(chained)

    @cached_property
    def fixed_prefix_s(self) -> FloatArray:
        """FIXED of the way through the first stages [2, S+1]."""
        return _prefix(_chained(self.shape, self.fixed_s))


@dataclass(frozen=True)
class SplitBound:
    """Seconds that no split beats, and the blocks of each rank [R] that this comes from; none if nothing is under BELOW."""

    bound_s: float
    sizes: tuple[int, ...]


def _chained(shape: PipelineShape, seconds: FloatArray) -> FloatArray:
    """Return forward and backward seconds [2, ...] of a way; the weight pass is on it unless the schedule splits it off."""
    return np.stack([seconds[0], seconds[1] if shape.record.splits_backward else seconds[1] + seconds[2]])


def _prefix(values: FloatArray) -> FloatArray:
    return np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)


def lower_bound_s(instance: SplitBoundInstance, *, below_s: float) -> SplitBound:
    """Return what no split has a lower (O) than, and the split it comes from; ``below_s`` where none is faster."""
    sizes = _promising_sizes(instance, below_s)
    if not len(sizes):
        return SplitBound(below_s, ())
    n, pp, cost_s = instance.num_blocks, instance.shape.pp, _costs_of_ranks(instance, sizes)
    best, choices = _none_placed(n), []
    for rank in range(pp):
        if not max(best.min(), cost_s(pp - 1).min()) < below_s:  # the last rank is often the slowest
            return SplitBound(below_s, ())
        arriving = _arriving(instance, sizes, rank, best, cost_s(rank))
        choices.append(sizes[np.argmin(arriving, axis=1)])
        best[:-1] = arriving.min(axis=1)
    if not best[n] < below_s:
        return SplitBound(below_s, ())
    chosen = list[int]()
    for choice in reversed(choices):
        chosen.insert(0, int(choice[n - sum(chosen)]))
    return SplitBound(float(best[n]), tuple(chosen))


def min_beyond_s(instance: SplitBoundInstance, num_blocks: int, *, below_s: float) -> float:
    """Return what no split is below of those with more than so many blocks on some rank; ``below_s`` where none is faster."""
    sizes = _promising_sizes(instance, below_s)
    if not len(sizes) or sizes[-1] <= num_blocks:
        return below_s
    n, larger, cost_s = instance.num_blocks, sizes > num_blocks, _costs_of_ranks(instance, sizes)
    within, beyond = _none_placed(n), np.full(n + 2, np.inf)  # no rank so far, or one, has more
    for rank in range(instance.shape.pp):
        of_within, of_beyond = (_arriving(instance, sizes, rank, best, cost_s(rank)) for best in (within, beyond))
        beyond[:-1] = np.minimum(of_beyond.min(axis=1), of_within[:, larger].min(axis=1))
        within[:-1] = of_within[:, ~larger].min(axis=1, initial=np.inf)
    return min(below_s, float(beyond[n]))


def _none_placed(num_blocks: int) -> FloatArray:
    """Return `best` [N+2] of no rank; the last entry stands for numbers of blocks that cannot be."""
    best = np.full(num_blocks + 2, np.inf)
    best[0] = 0.0
    return best


def _arriving(
    instance: SplitBoundInstance, sizes: IntArray, rank: int, best: FloatArray, cost_s: FloatArray
) -> FloatArray:
    """Return max(best[before], cost) [N+1, Y] of a rank with each number of blocks, by the blocks up to its last one."""
    n = instance.num_blocks
    before = _rank_splits(instance.shape, n, int(sizes[0]), int(sizes[-1]), rank).before
    reached = np.full((n + 2, len(sizes)), np.inf)
    reached[before[:, 0]] = np.maximum(best[before], cost_s)
    return np.asarray(reached[np.maximum(np.arange(n + 1)[:, None] - sizes, -1), np.arange(len(sizes))])


def _costs_of_ranks(instance: SplitBoundInstance, sizes: IntArray) -> Callable[[int], FloatArray]:
    """Return a function that gives (O) of one rank at least [B, Y]; each is worked out once."""
    shape, n, smallest, largest = instance.shape, instance.num_blocks, int(sizes[0]), int(sizes[-1])
    passes = _Passes.of(instance)
    edges_s = _edges_of_chunks_s(instance, sizes) if shape.num_model_chunks > 1 else ()

    @cache
    def cost_s(rank: int) -> FloatArray:
        splits = _rank_splits(shape, n, smallest, largest, rank)
        step_s = edges_s[rank] if len(edges_s) else _edges_of_blocks_s(instance, rank, splits)
        return _rank_cost_s(instance, rank, splits, _longest_chain_s(passes, smallest, largest, rank) + step_s)

    return cost_s


def _promising_sizes(instance: SplitBoundInstance, below_s: float) -> IntArray:
    """Return the numbers of blocks y that a rank may have in a split that is faster than ``below_s``.

    m * (seconds of the y lightest blocks) + sum_q ONCE_MIN[q] <= BELOW, and the other ranks can have the rest.
    """
    shape, n = instance.shape, instance.num_blocks
    others, min_size = shape.pp - 1, shape.num_model_chunks
    lightest = np.cumsum(np.sort(instance.seconds.sum(axis=0)))
    sizes = np.arange(min_size, n - others * min_size + 1)
    sizes = sizes[shape.num_microbatches * lightest[sizes - 1] + instance.min_once_s.sum() <= below_s]
    return np.asarray(sizes[sizes >= n - others * sizes[-1]] if len(sizes) else sizes)


@dataclass(frozen=True)
class _RankSplits:
    """Blocks that a rank may have and how many others have then at least: counts that all layouts of a shape share.

    Attributes:
        before, sizes: blocks on the ranks before [B, 1] and on the rank [Y].
        can_be: whether the other ranks can have the rest [B, Y].
        ways: for each of `_WAYS` blocks [D, B, Y] in each distinct range of stages, which of these each chain has [P], and the
            first and last stage of each [D, 2].
    """

    before: IntArray
    sizes: IntArray
    can_be: BoolArray
    ways: tuple[tuple[IntArray, IntArray, IntArray], ...]


@lru_cache(maxsize=4096)
def _rank_splits(shape: PipelineShape, n: int, min_size: int, max_size: int, rank: int) -> _RankSplits:
    """Return the splits of n blocks in which every rank has between ``min_size`` and ``max_size`` of them, seen from one rank."""
    sizes, later = np.arange(min_size, max_size + 1), shape.pp - 1 - rank
    first = max(rank * min_size, n - (later + 1) * max_size)
    last = min(rank * max_size, n - (later + 1) * min_size)
    before = np.arange(first, last + 1)[:, None]
    behind = n - before - sizes
    can_be = (later * min_size <= behind) & (behind <= later * max_size)
    behind = np.clip(behind, later * min_size, later * max_size)
    min_blocks = [_min_blocks(shape, n, min_size, max_size, k) for k in range(shape.num_model_chunks + 1)]
    rank_of = np.array(shape.rank_of_stage)

    def blocks(from_stage: int, to_stage: int) -> IntArray:
        ranks = rank_of[from_stage:to_stage]
        lower, upper = int((ranks < rank).sum()), int((ranks > rank).sum())
        local = _min_in_chunks(sizes, shape.num_model_chunks, int((ranks == rank).sum()))
        on_earlier = min_blocks[lower // rank if rank else 0][rank][before]
        on_later = min_blocks[upper // later if later else 0][later][np.minimum(behind, n)]
        return np.asarray(np.minimum(on_earlier + local + on_later, n))

    ways = []
    for (_, from_front), ends in zip(_WAYS, paths_past(shape)[rank].ends, strict=True):
        distinct, inverse = np.unique(ends, return_inverse=True)
        zero = np.zeros_like(distinct)
        ranges = np.stack([zero, distinct] if from_front else [distinct, zero + shape.num_stages], axis=1)
        ways.append((np.array([blocks(i, j) for i, j in ranges]), inverse, ranges))
    return _RankSplits(before, sizes, can_be, tuple(ways))


@dataclass(frozen=True)
class _Passes:
    """What chains depend on: layouts that differ in what they do once share theirs."""

    shape: PipelineShape
    values: tuple[bytes, ...]
    instance: SplitBoundInstance = field(compare=False)

    @classmethod
    def of(cls, instance: SplitBoundInstance) -> _Passes:
        """Return the passes of an instance."""
        values = (instance.seconds, instance.kind_of_block, instance.fixed_s)
        return cls(instance.shape, tuple(array.tobytes() for array in values), instance)


@lru_cache(maxsize=8192)
def _longest_chain_s(passes: _Passes, min_size: int, max_size: int, rank: int) -> FloatArray:
    """Return max_p chain[p,r] of one rank [B, Y]."""
    instance = passes.instance
    splits = _rank_splits(passes.shape, instance.num_blocks, min_size, max_size, rank)
    row, ways_s = _chains_s(instance, rank, splits)
    return np.asarray(np.max(_passes_on_rank_s(instance, rank, splits, row) + ways_s, axis=0))


def _chains_s(instance: SplitBoundInstance, rank: int, splits: _RankSplits) -> tuple[IntArray, FloatArray]:
    """Return the longest chains past a rank: their passes in its row, and the seconds of their ways [P, B, Y]."""
    chains = _longest_chains(instance, rank)
    ways_s = np.zeros((1, 1, 1))
    for (direction, from_front), (blocks, inverse, ranges) in zip(_WAYS, splits.ways, strict=True):
        sums = instance.sums_s[from_front][direction][blocks]
        fixed = instance.fixed_prefix_s[direction]
        sums = sums + (fixed[ranges[:, 1]] - fixed[ranges[:, 0]])[:, None, None]
        ways_s = ways_s + sums[inverse[chains]]
    return paths_past(instance.shape)[rank].row[chains], ways_s


def _rank_cost_s(instance: SplitBoundInstance, rank: int, splits: _RankSplits, cost_s: FloatArray) -> FloatArray:
    """Return (O) of one rank [B, Y], at least the given sum of separate maxima; infinite where that cannot be."""
    can_be, after = splits.can_be, np.minimum(splits.before + splits.sizes, instance.num_blocks)
    if instance.fits is not None:  # (C3)
        can_be = can_be & instance.fits[rank, splits.before, after]
    if instance.choices and instance.shape.num_model_chunks == 1:
        row, ways_s = _chains_s(instance, rank, splits)
        cost_s = np.maximum(cost_s, np.max(_with_choices_s(instance, rank, splits, row[:, :, 0]) + ways_s, axis=0))
    return np.where(can_be, cost_s, np.inf)


def _with_choices_s(instance: SplitBoundInstance, rank: int, splits: _RankSplits, row: IntArray) -> FloatArray:
    """Return row . SECONDS + once [P, B, Y] with each block under the option with the lowest of this sum.

    min_o (row_p . SECONDS_o[i] + sum_q ONCE_o[q,i]) summed over the rank's blocks: no less than the sum of separate minima.
    """
    block_s = np.min([row @ seconds + once.sum(axis=0) for seconds, once in instance.choices], axis=0)
    fixed = row @ instance.fixed_s[:, rank] + instance.once_fixed_s[:, rank].sum()
    return np.asarray(_sums_over_blocks(block_s, splits) + fixed[:, None, None])


def _longest_chains(instance: SplitBoundInstance, rank: int) -> IntArray:
    """Return the `MAX_PATHS` chains past a rank that are longest when all stages are equal, that is SECONDS.sum() / S each."""
    shape, paths = instance.shape, paths_past(instance.shape)[rank]
    stage_s = instance.seconds.sum(axis=1) / shape.num_stages
    mean = instance.fixed_prefix_s + _chained(shape, stage_s)[:, None] * np.arange(shape.num_stages + 1)
    local = stage_s[:, None] + instance.fixed_s[:, instance.stages_of_rank[rank]]
    length = paths.row.reshape(len(paths.row), -1) @ local.reshape(-1)
    for (direction, from_front), ends in zip(_WAYS, paths.ends, strict=True):
        reached = mean[direction][ends]
        length = length + (reached if from_front else mean[direction, -1] - reached)
    return np.argsort(-length, kind="stable")[:MAX_PATHS]


def _passes_on_rank_s(instance: SplitBoundInstance, rank: int, splits: _RankSplits, row: IntArray) -> FloatArray:
    """Return the seconds of the row [P, B or 1, Y]: sum over passes a and chunks c of row_p[a,c] (FIXED + SECONDS)[a,c]."""
    stages = instance.stages_of_rank[rank]
    fixed = (row.reshape(len(row), -1) @ instance.fixed_s[:, stages].reshape(-1))[:, None, None]
    if instance.shape.num_model_chunks == 1:
        return np.asarray(fixed + _sums_over_blocks(row[:, :, 0] @ instance.seconds, splits))
    weights = np.swapaxes(row, 1, 2) @ instance.kind_s[:3]
    return np.asarray(fixed + _lightest_chunks(instance, stages, splits.sizes, weights)[:, None, :])


def _edges_of_blocks_s(instance: SplitBoundInstance, rank: int, splits: _RankSplits) -> FloatArray:
    """Return sum_q max(ONCE_MIN[q], ONCE_FIXED[q] + ONCE[q] of the rank's blocks) [B, Y], one chunk a rank."""
    added = _sums_over_blocks(instance.once_s, splits)
    added = added + instance.once_fixed_s[:, instance.stages_of_rank[rank]].sum(axis=1)[:, None, None]
    return np.asarray(np.maximum(added, instance.min_once_s[:, None, None]).sum(axis=0))


def _edges_of_chunks_s(instance: SplitBoundInstance, sizes: IntArray) -> FloatArray:
    """Return the same of all ranks, with several chunks each [R, 1, Y]."""
    stages = instance.stages_of_rank
    weights = np.repeat(instance.kind_s[3:, None, :], stages.shape[1], axis=1)
    added = (
        _lightest_chunks(instance, stages, sizes, weights) + instance.once_fixed_s[:, stages].sum(axis=2).T[:, :, None]
    )
    return np.asarray(np.maximum(added, instance.min_once_s[:, None]).sum(axis=1, keepdims=True))


def _sums_over_blocks(values: FloatArray, splits: _RankSplits) -> FloatArray:
    """Return sum_{i = before .. before + y - 1} values[P, i] [P, B, Y], to the last block where fewer remain."""
    sums = _prefix(values)
    after = np.minimum(splits.before + splits.sizes, sums.shape[1] - 1)
    return np.asarray(sums[:, after] - sums[:, splits.before])


def _lightest_chunks(
    instance: SplitBoundInstance, stages: IntArray, sizes: IntArray, weights: FloatArray
) -> FloatArray:
    """Return the lowest sum of the weights [P, V, K] of y blocks [..., P, Y] in chunks ``stages`` [..., V], as (C1) and (C2) let
    kinds into them.

    A chunk has y // V or y // V + 1 blocks. All count as the most frequent kind, less what the lightest other kind that can be in
    the chunk saves, for as many blocks as there are of other kinds; the y mod V odd blocks go where they are lightest.
    """
    shape, n, chunks = instance.shape, instance.num_blocks, instance.shape.num_model_chunks
    min_size = max(1, int(sizes[0]) // chunks)
    before = instance.kinds_before
    present = before[n - (shape.num_stages - 1 - stages) * min_size] - before[stages * min_size]  # [..., V, K]
    main = int(np.argmax(before[-1]))
    lighter = weights[:, :, main, None] - weights
    saved = np.where(present[..., None, :, :] > 0, lighter, 0.0).max(axis=-1)[..., None]  # [..., P, V, 1]
    others = (present.sum(axis=-1) - present[..., main])[..., None, :, None]
    even, odd = sizes // chunks, sizes % chunks
    heavy = weights[:, :, main, None]
    odd_blocks = np.sort(heavy - saved * (even < others), axis=-2)
    up_to = np.concatenate([np.zeros_like(odd_blocks[..., :1, :]), np.cumsum(odd_blocks, axis=-2)], axis=-2)
    even_sum = (heavy * even - saved * np.minimum(even, others)).sum(axis=-2)
    return np.asarray(even_sum + up_to[..., odd, np.arange(len(sizes))])


def _min_in_chunks(sizes: IntArray, num_chunks: int, subset: int) -> IntArray:
    """Return the blocks that ``subset`` of a rank's V chunks have at least: subset (y // V) + max(0, y mod V - (V - subset))."""
    return np.asarray(subset * (sizes // num_chunks) + np.maximum(sizes % num_chunks - (num_chunks - subset), 0))


@lru_cache(maxsize=4096)
def _min_blocks(shape: PipelineShape, num_blocks: int, min_size: int, max_size: int, subset: int) -> IntArray:
    """Return the blocks that ``subset`` chunks of each of k ranks have at least when the k ranks have n [R, N+1].

    min_blocks[k+1][n] = min_y min_blocks[k][n - y] + _min_in_chunks(y); N where that cannot be.
    """
    sizes = np.arange(min_size, max_size + 1)
    in_chunks = _min_in_chunks(sizes, shape.num_model_chunks, subset)
    min_blocks = [np.where(np.arange(num_blocks + 1) == 0, 0, num_blocks)]
    for _ in range(shape.pp - 1):
        following = np.full_like(min_blocks[-1], num_blocks)
        for size, added in zip(sizes, in_chunks, strict=True):
            following[size:] = np.minimum(following[size:], min_blocks[-1][: num_blocks + 1 - size] + added)
        min_blocks.append(following)
    return np.array(min_blocks)
