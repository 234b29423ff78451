"""Cut an ordered list of layers into pipeline stages, one on each rank or several.

Sets
    l = 0..L-1   layers in order; some are blocks
    s = 0..S-1   stages in order, on rank s, or on RANK[s] of R with v = S / R chunks each
Data
    BUSY[l]      seconds layer l adds to the rank that holds it, for one micro-batch; where stages run on different devices
                 BUSY[s,l], with BASE[s] seconds of the stage itself and ROUNDS
    FITS[s,i,j]  whether stage s has the memory (and is allowed) to hold layers i..j-1
    REQUIRED     with chunks, a function: bytes each rank requires, given the boundaries; CAP, bytes that it may require
Variables
    c[s]         boundaries 0 = c[0] < c[1] < ... < c[S] = L; stage s holds layers c[s]..c[s+1]-1
    n[r] >= v    with chunks, blocks of rank r; its first n[r] mod v chunks have one more than its others
Objective
    (O)  min  max_r  sum_{l on rank r} BUSY[l]           the slowest rank decides (cost_models/pipeline)
    (O') min  ROUNDS max_s t[s] + sum_s t[s],  t[s] = BASE[s] + sum_{l in stage s} BUSY[s,l]
                                                         where the sum depends on who holds what, and counts too
Constraints
    (C1) contiguous: every layer is on one stage, stages in order; with chunks, layers before the first block are on the first and
         those behind the last block on the last
    (C2) memory: FITS[s, c[s], c[s+1]], with chunks REQUIRED[r] <= CAP
    (C3) chunks: a block for every stage, and those of one rank differ by one block at most

One stage a rank: dynamic programming over (stage, boundary), exact. best[s][j] is the lowest objective of stages 0..s-1 that hold
layers 0..j-1, and best[s+1][j] = min_i combine(best[s][i], BUSY(i..j-1)) over FITS[s,i,j]: S array operations on [L+1, L+1]. Of
equal splits the one with the lowest sum of squared stage times is taken, the most even one. For (O') the lowest sum under a cap on
the slowest stage is found so, and the cap lowered below the slowest stage of the last split until no lower cap can be better.

Chunks: from equal numbers of blocks, one block at a time moves from a rank with the most work, or with the most bytes beyond the
cap, to the one where this helps most (bytes beyond the cap, then (O), then the sum of squares), until no move helps. Ranks differ
only in what is no block and in the kinds of their blocks, so few moves suffice. A local optimum; the tests compare all splits.
Source: the classic linear partition recurrence (Kernighan, J. ACM 18(1), 1971).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...schema.units import BoolArray, FloatArray, IntArray
from ..backend import Solution, Status
from ..tolerances import EVENNESS, ROUNDING

Boundaries = tuple[int, ...]
"""First layer of each stage, and the end [S+1]."""


@dataclass(frozen=True)
class StageSplitInstance:
    """BUSY [L] or [S, L] in seconds and FITS [S, L+1, L+1]; BASE [S] and ROUNDS for stages that differ."""

    busy_s: FloatArray
    fits: BoolArray
    base_s: FloatArray | None = None
    rounds: float = 0.0

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.busy_s.shape[-1])

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.fits)

    @property
    def stages_differ(self) -> bool:
        """True where (O') counts."""
        return self.busy_s.ndim == 2

    @cached_property
    def span_s(self) -> FloatArray:
        """Seconds of each stage with layers i..j-1 [S, L+1, L+1]; infinite where it cannot hold them."""
        prefix = np.concatenate([np.zeros((*self.busy_s.shape[:-1], 1)), np.cumsum(self.busy_s, axis=-1)], axis=-1)
        span = prefix[..., None, :] - prefix[..., :, None]
        span = span if self.base_s is None else span + self.base_s[:, None, None]
        return np.where(self.fits & np.triu(np.ones(span.shape[-2:], dtype=bool), k=1), span, np.inf)


def dynamic_program(span: FloatArray, combine: np.ufunc) -> tuple[float, Boundaries]:
    """Return the lowest combined value of stages that hold all layers, and their boundaries; infinite and () without any.

    Args:
        span: values of each stage with layers i..j-1 [S, L+1, L+1], infinite where it cannot hold them.
        combine: of the stages before and one more, `np.maximum` or `np.add`.
    """
    best, choices = np.full(span.shape[-1], np.inf), []
    best[0] = 0.0
    for values in span:
        reached = combine(best[:, None], values)
        choices.append(np.argmin(reached, axis=0))
        best = np.min(reached, axis=0)
    if not np.isfinite(best[-1]):
        return math.inf, ()
    boundaries = [span.shape[-1] - 1]
    for choice in reversed(choices):
        boundaries.append(int(choice[boundaries[-1]]))
    return float(best[-1]), tuple(reversed(boundaries))


def fastest_split(instance: StageSplitInstance) -> tuple[float, Boundaries]:
    """Return the lowest (O) and boundaries that have it, even or not; infinite and () where there are none."""
    return dynamic_program(instance.span_s, np.maximum)


def solve_stages(instance: StageSplitInstance) -> Solution[Boundaries]:
    """Return the split with the lowest (O), the most even one of these; where stages differ the one with the lowest (O')."""
    start, span = time.perf_counter(), instance.span_s
    objective, boundaries = fastest_split(instance)
    if boundaries and instance.stages_differ:
        objective, boundaries = _min_weighted(instance, objective, boundaries)
    elif boundaries:
        within = np.where(span <= objective * (1 + ROUNDING), span**2, np.inf)
        boundaries = dynamic_program(within, np.add)[1]
    return Solution(
        status=Status.OPTIMAL if boundaries else Status.INFEASIBLE,
        choice=boundaries or None,
        objective=objective,
        bound=objective,
        solve_s=time.perf_counter() - start,
        backend="dynamic program",
    )


def _min_weighted(instance: StageSplitInstance, slowest: float, boundaries: Boundaries) -> tuple[float, Boundaries]:
    """Return the lowest (O') and boundaries, by ever lower caps on the slowest stage; start from the lowest (O)."""
    span, stages, rounds = instance.span_s, np.arange(instance.num_stages), instance.rounds

    def seconds(split: Boundaries) -> FloatArray:
        return np.asarray(span[stages, split[:-1], split[1:]])

    min_sum, _ = dynamic_program(span, np.add)
    best = rounds * slowest + float(seconds(boundaries).sum())
    cap = (best - min_sum) / rounds if rounds > 0 else np.inf
    while cap >= slowest * (1 - ROUNDING):
        total, split = dynamic_program(np.where(span <= cap * (1 + ROUNDING), span, np.inf), np.add)
        if rounds * slowest + total >= best or not split:
            break
        longest = float(seconds(split).max())
        if rounds * longest + total < best:
            boundaries, best = split, rounds * longest + total
        cap = longest * (1 - 4 * ROUNDING)  # below the longest stage of this split, whatever ROUNDING let through
    longest = float(seconds(boundaries).max())
    within = np.where(span <= longest * (1 + ROUNDING), span + EVENNESS * span**2 / longest, np.inf)
    _, even = dynamic_program(within, np.add)
    as_good = rounds * seconds(even).max() + seconds(even).sum() <= best * (1 + ROUNDING)
    return float(best), even if as_good else boundaries


def check_stages(instance: StageSplitInstance, boundaries: Boundaries) -> float:
    """Recompute the objective (O) of a split from the definition.

    Raises:
        ValueError: the split breaks (C1) or (C2); the message names which.
    """
    ends = (0, instance.num_layers)
    increasing = all(i < j for i, j in itertools.pairwise(boundaries))
    if len(boundaries) != instance.num_stages + 1 or (boundaries[0], boundaries[-1]) != ends or not increasing:
        raise ValueError(f"contiguous (C1): boundaries {boundaries}")
    seconds = []
    for s, (i, j) in enumerate(itertools.pairwise(boundaries)):
        if not instance.fits[s, i, j]:
            raise ValueError(f"memory (C2): stage {s} cannot hold layers {i}..{j - 1}")
        busy = instance.busy_s[s] if instance.stages_differ else instance.busy_s
        seconds.append(float(sum(busy[i:j])) + (0.0 if instance.base_s is None else float(instance.base_s[s])))
    return instance.rounds * max(seconds) + sum(seconds) if instance.stages_differ else max(seconds)


Required = Callable[[IntArray], FloatArray]
"""Boundaries [C, R v + 1] -> bytes of each rank [C, R]."""


def memoized(required_bytes: Required) -> Required:
    """Return the function with its answers remembered: instances with other seconds pass through the same splits."""
    known: dict[bytes, FloatArray] = {}

    def remembered(boundaries: IntArray) -> FloatArray:
        keys = [row.tobytes() for row in boundaries]
        missing = [idx for idx, key in enumerate(keys) if key not in known]
        if missing:
            known.update(zip([keys[idx] for idx in missing], required_bytes(boundaries[missing]), strict=True))
        return np.array([known[key] for key in keys])

    return remembered


@dataclass(frozen=True)
class ChunkSplitInstance:
    """BUSY [L] in seconds, which layers are blocks [L], RANK [R v], REQUIRED of boundaries [C, R v + 1] as [C, R], and CAP."""

    busy_s: FloatArray
    is_block: BoolArray
    rank_of_stage: tuple[int, ...]
    required_bytes: Required
    cap_bytes: float = math.inf

    @cached_property
    def num_ranks(self) -> int:
        """R."""
        return max(self.rank_of_stage) + 1

    @cached_property
    def num_chunks(self) -> int:
        """v."""
        return len(self.rank_of_stage) // self.num_ranks


def solve_chunks(instance: ChunkSplitInstance) -> Solution[Boundaries]:
    """Return the best split that the moves reach."""
    start, num_ranks, num_blocks = time.perf_counter(), instance.num_ranks, int(instance.is_block.sum())
    if num_blocks < len(instance.rank_of_stage):
        return Solution(status=Status.INFEASIBLE, choice=None, solve_s=time.perf_counter() - start)
    even = num_blocks // num_ranks + (np.arange(num_ranks) < num_blocks % num_ranks)
    blocks, score = _best_of(instance, even[None, :])
    while len(moves := _block_moves(instance, blocks, score)):
        moved, moved_score = _best_of(instance, moves)
        if not _is_better(moved_score, score):
            break
        blocks, score = moved, moved_score
    excess_bytes, slowest_s, _ = score
    if excess_bytes > 0:
        return Solution(status=Status.INFEASIBLE, choice=None, solve_s=time.perf_counter() - start)
    return Solution(
        status=Status.FEASIBLE,
        choice=tuple(boundaries_from_blocks(instance, blocks[None, :])[0].tolist()),
        objective=float(slowest_s),
        solve_s=time.perf_counter() - start,
        backend="local search",
    )


def _is_better(score: FloatArray, than: FloatArray) -> bool:
    differs = np.abs(score - than) > ROUNDING * np.maximum(np.abs(than), np.abs(score))
    return bool(differs.any() and (score < than)[np.argmax(differs)])


def _block_moves(instance: ChunkSplitInstance, blocks: IntArray, score: FloatArray) -> IntArray:
    """Return the blocks of ranks [C, R] after one goes from the slowest rank, or from the fullest, to every other rank."""
    boundaries = boundaries_from_blocks(instance, blocks[None, :])
    givers = {int(np.argmax(rank_busy_s(instance, boundaries)[0]))}
    if score[0] > 0:
        givers.add(int(np.argmax(instance.required_bytes(boundaries)[0])))
    steps = np.eye(len(blocks), dtype=np.int64)
    able = [giver for giver in sorted(givers) if blocks[giver] > instance.num_chunks]
    moves = [np.delete(blocks + steps - steps[giver], giver, axis=0) for giver in able]
    return np.concatenate([steps[:0], *moves])


def _best_of(instance: ChunkSplitInstance, blocks: IntArray) -> tuple[IntArray, FloatArray]:
    """Return the best of some numbers of blocks [C, R] and its score: bytes beyond the cap, slowest rank, sum of squares."""
    boundaries = boundaries_from_blocks(instance, blocks)
    busy = rank_busy_s(instance, boundaries)
    excess = np.zeros(len(blocks))
    if math.isfinite(instance.cap_bytes):
        excess = np.maximum(instance.required_bytes(boundaries) - instance.cap_bytes, 0.0).sum(axis=1)
    scores = np.stack([excess, busy.max(axis=1), (busy**2).sum(axis=1)], axis=1)
    best = np.lexsort((scores[:, 2], scores[:, 1], scores[:, 0]))[0]
    return blocks[best], scores[best]


def boundaries_from_blocks(instance: ChunkSplitInstance, blocks: IntArray) -> IntArray:
    """Return the boundaries [C, R v + 1] of the stages, given the blocks of each rank [C, R]."""
    chunks, ranks = instance.num_chunks, np.array(instance.rank_of_stage)
    chunk = np.arange(len(ranks)) // instance.num_ranks
    sizes = blocks[:, ranks] // chunks + (chunk < blocks[:, ranks] % chunks)
    ends = np.flatnonzero(instance.is_block)[np.cumsum(sizes, axis=1) - 1] + 1
    ends[:, -1] = len(instance.busy_s)
    return np.concatenate([np.zeros((len(blocks), 1), dtype=np.int64), ends], axis=1)


def rank_busy_s(instance: ChunkSplitInstance, boundaries: IntArray) -> FloatArray:
    """Return the seconds of each rank [C, R]."""
    prefix = np.concatenate([[0.0], np.cumsum(instance.busy_s)])
    stage_s = np.diff(prefix[boundaries], axis=1)
    is_on_rank = np.array(instance.rank_of_stage)[:, None] == np.arange(instance.num_ranks)
    return np.asarray(stage_s @ is_on_rank)


def check_chunks(instance: ChunkSplitInstance, boundaries: Boundaries) -> float:
    """Recompute the objective (O) of a split from the definition.

    Raises:
        ValueError: the split breaks (C1), (C2) or (C3); the message names which.
    """
    if boundaries[0] != 0 or boundaries[-1] != len(instance.busy_s) or list(boundaries) != sorted(boundaries):
        raise ValueError(f"contiguous (C1): boundaries {boundaries}")
    busy, sizes = [0.0] * instance.num_ranks, dict[int, list[int]]()
    for rank, i, j in zip(instance.rank_of_stage, boundaries[:-1], boundaries[1:], strict=True):
        busy[rank] += float(sum(instance.busy_s[i:j]))
        sizes.setdefault(rank, []).append(int(sum(instance.is_block[i:j])))
    for rank, required in enumerate(instance.required_bytes(np.array([boundaries]))[0]):
        if required > instance.cap_bytes:
            raise ValueError(f"memory (C2): rank {rank} requires {required:g} of {instance.cap_bytes:g} bytes")
    for rank, rank_sizes in sizes.items():
        if min(rank_sizes) < 1 or max(rank_sizes) - min(rank_sizes) > 1:
            raise ValueError(f"chunks (C3): rank {rank} has stages of {rank_sizes} blocks")
    return max(busy)
