"""Cut an ordered list of layers into pipeline stages of which every rank holds several.

Sets
    l = 0..L-1   layers in order; some are blocks
    r = 0..R-1   ranks, v chunks each
    s = 0..Rv-1  stages in order, on rank RANK[s]
Data
    BUSY[l]      seconds layer l adds to the rank that holds it, for one micro-batch
    REQUIRED     function: bytes each rank requires, given the boundaries of the stages
    CAP          bytes a rank may require
Variables
    n[r] >= v    blocks of rank r; its first n[r] mod v chunks have one more than its others
Objective
    (O)  min  max_r  sum_{l on rank r} BUSY[l]
Constraints
    (C1) contiguous: every layer is on one stage, stages in order; layers before the first block are on the first, those behind
         the last block on the last stage
    (C2) memory: REQUIRED[r] <= CAP
    (C3) chunks: a block for every stage, and those of one rank differ by one block at most

Method: from equal numbers of blocks, one block at a time moves from a rank with the most work, or with the most bytes beyond the
cap, to the one where this helps most (bytes beyond the cap, then (O), then the sum of squares), until no move helps. Ranks differ
only in what is no block and in the kinds of their blocks, so few moves suffice. A local optimum; the tests compare all splits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...schema.arrays import BoolArray, FloatArray, IntArray
from ..solution import Solution, Status
from ..tolerances import ROUNDING

Boundaries = tuple[int, ...]
"""First layer of each stage and the end [R v + 1]."""

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

    @property
    def num_ranks(self) -> int:
        """R."""
        return max(self.rank_of_stage) + 1

    @property
    def num_chunks(self) -> int:
        """v."""
        return len(self.rank_of_stage) // self.num_ranks


def solve(instance: ChunkSplitInstance) -> Solution[Boundaries]:
    """Return the best split that the moves reach."""
    start = time.perf_counter()
    num_ranks, chunks = instance.num_ranks, instance.num_chunks
    num_blocks = int(instance.is_block.sum())
    if num_blocks < num_ranks * chunks:
        return Solution(status=Status.INFEASIBLE, choice=None, solve_s=time.perf_counter() - start)
    blocks = num_blocks // num_ranks + (np.arange(num_ranks) < num_blocks % num_ranks)
    blocks, scores = _scored(instance, blocks[None, :])
    while True:
        moved = _moves(instance, blocks[0], scores[0])
        if not len(moved):
            break
        moved, moved_scores = _scored(instance, moved)
        if not _is_better(moved_scores[0], scores[0]):
            break
        blocks, scores = moved[:1], moved_scores[:1]
    excess_bytes, slowest_s, _ = scores[0]
    if excess_bytes > 0:
        return Solution(status=Status.INFEASIBLE, choice=None, solve_s=time.perf_counter() - start)
    return Solution(
        status=Status.FEASIBLE,
        choice=tuple(int(end) for end in boundaries_from_blocks(instance, blocks)[0]),
        objective=float(slowest_s),
        solve_s=time.perf_counter() - start,
        backend="local search",
    )


def _is_better(scores: FloatArray, than: FloatArray) -> bool:
    """Return whether the first score that differs by more than rounding is smaller."""
    for score, other in zip(scores, than, strict=True):
        if abs(score - other) > ROUNDING * max(abs(other), abs(score)):
            return bool(score < other)
    return False


def _moves(instance: ChunkSplitInstance, blocks: IntArray, scores: FloatArray) -> IntArray:
    """Return the blocks of ranks [C, R] after one goes from the slowest rank, or from the fullest, to every other rank."""
    boundaries = boundaries_from_blocks(instance, blocks[None, :])
    givers = {int(np.argmax(rank_busy_s(instance, boundaries)[0]))}
    if scores[0] > 0:
        givers.add(int(np.argmax(instance.required_bytes(boundaries)[0])))
    moves = []
    for giver in sorted(givers):
        if blocks[giver] > instance.num_chunks:
            steps = np.eye(len(blocks), dtype=np.int64)
            moves.append(np.delete(blocks + steps - steps[giver], giver, axis=0))
    return np.concatenate(moves) if moves else np.zeros((0, len(blocks)), dtype=np.int64)


def _scored(instance: ChunkSplitInstance, blocks: IntArray) -> tuple[IntArray, FloatArray]:
    """Return numbers of blocks [C, R] and scores (bytes beyond the cap, slowest rank, sum of squares) [C, 3], best first."""
    boundaries = boundaries_from_blocks(instance, blocks)
    busy = rank_busy_s(instance, boundaries)
    excess = np.zeros(len(blocks))
    if math.isfinite(instance.cap_bytes):
        excess = np.maximum(instance.required_bytes(boundaries) - instance.cap_bytes, 0.0).sum(axis=1)
    scores = np.stack([excess, busy.max(axis=1), (busy**2).sum(axis=1)], axis=1)
    order = np.lexsort((scores[:, 2], scores[:, 1], scores[:, 0]))
    return blocks[order], scores[order]


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


def check(instance: ChunkSplitInstance, boundaries: Boundaries) -> float:
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
