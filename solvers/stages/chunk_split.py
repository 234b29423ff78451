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
only in what is no block and in the kinds of their blocks, so few moves suffice. A local optimum; the tests compare all cuts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..solution import Status

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Required = Callable[[IntArray], FloatArray]

_EXACT = 1e-12


def memoized(required_bytes: Required) -> Required:
    """The same function, asked for each boundaries once: instances with other seconds pass through the same cuts."""
    known: dict[bytes, FloatArray] = {}

    def answered(boundaries: IntArray) -> FloatArray:
        keys = [row.tobytes() for row in boundaries]
        missing = [at for at, key in enumerate(keys) if key not in known]
        if missing:
            known.update(zip([keys[at] for at in missing], required_bytes(boundaries[missing]), strict=True))
        return np.array([known[key] for key in keys])

    return answered


@dataclass(frozen=True)
class ChunkSplitInstance:
    """BUSY [L] in seconds, which layers are blocks [L], RANK [R v], REQUIRED of boundaries [C, R v + 1] as [C, R], and CAP."""

    busy_s: FloatArray
    is_block: NDArray[np.bool_]
    rank_of_stage: tuple[int, ...]
    required_bytes: Required
    cap_bytes: float = math.inf

    @property
    def num_ranks(self) -> int:
        """R."""
        return max(self.rank_of_stage) + 1

    @property
    def num_chunks(self) -> int:
        """V."""
        return len(self.rank_of_stage) // self.num_ranks


@dataclass(frozen=True)
class ChunkSplitSolution:
    """Boundaries [R v + 1] and the slowest rank's seconds; both empty when no cut was found within the cap."""

    status: Status
    boundaries: tuple[int, ...]
    objective_s: float
    solve_s: float


def solve(instance: ChunkSplitInstance) -> ChunkSplitSolution:
    """The best cut found."""
    start = time.perf_counter()
    num_ranks, chunks = instance.num_ranks, instance.num_chunks
    num_blocks = int(instance.is_block.sum())
    if num_blocks < num_ranks * chunks:
        return ChunkSplitSolution(Status.INFEASIBLE, (), math.inf, time.perf_counter() - start)
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
    beyond, slowest, _ = scores[0]
    if beyond > 0:
        return ChunkSplitSolution(Status.INFEASIBLE, (), math.inf, time.perf_counter() - start)
    boundaries = tuple(int(end) for end in boundaries_from_blocks(instance, blocks)[0])
    return ChunkSplitSolution(Status.FEASIBLE, boundaries, float(slowest), time.perf_counter() - start)


def _is_better(scores: FloatArray, than: FloatArray) -> bool:
    """Smaller in the first score that differs by more than rounding."""
    for score, other in zip(scores, than, strict=True):
        if abs(score - other) > _EXACT * max(abs(other), abs(score)):
            return bool(score < other)
    return False


def _moves(instance: ChunkSplitInstance, blocks: IntArray, scores: FloatArray) -> IntArray:
    """One block from the slowest rank, or from the one with the most bytes, to every other rank [C, R]."""
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
    """Numbers of blocks [C, R] and their scores (bytes beyond the cap, slowest rank, sum of squares) [C, 3], best first."""
    boundaries = boundaries_from_blocks(instance, blocks)
    busy = rank_busy_s(instance, boundaries)
    beyond = np.zeros(len(blocks))
    if math.isfinite(instance.cap_bytes):
        beyond = np.maximum(instance.required_bytes(boundaries) - instance.cap_bytes, 0.0).sum(axis=1)
    scores = np.stack([beyond, busy.max(axis=1), (busy**2).sum(axis=1)], axis=1)
    order = np.lexsort((scores[:, 2], scores[:, 1], scores[:, 0]))
    return blocks[order], scores[order]


def boundaries_from_blocks(instance: ChunkSplitInstance, blocks: IntArray) -> IntArray:
    """Boundaries [C, R v + 1] of the stages, given the blocks of each rank [C, R]."""
    chunks, ranks = instance.num_chunks, np.array(instance.rank_of_stage)
    chunk = np.arange(len(ranks)) // instance.num_ranks
    sizes = blocks[:, ranks] // chunks + (chunk < blocks[:, ranks] % chunks)
    ends = np.flatnonzero(instance.is_block)[np.cumsum(sizes, axis=1) - 1] + 1
    ends[:, -1] = len(instance.busy_s)
    return np.concatenate([np.zeros((len(blocks), 1), dtype=np.int64), ends], axis=1)


def rank_busy_s(instance: ChunkSplitInstance, boundaries: IntArray) -> FloatArray:
    """Seconds of each rank [C, R]."""
    prefix = np.concatenate([[0.0], np.cumsum(instance.busy_s)])
    of_stage = np.diff(prefix[boundaries], axis=1)
    on_rank = np.array(instance.rank_of_stage)[:, None] == np.arange(instance.num_ranks)
    return np.asarray(of_stage @ on_rank)


def check(instance: ChunkSplitInstance, boundaries: tuple[int, ...]) -> float:
    """Objective (O) of a cut, recomputed from the definition; knows nothing of the method.

    Raises:
        ValueError: the cut breaks (C1), (C2) or (C3); the message names which.
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
    for rank, of_rank in sizes.items():
        if min(of_rank) < 1 or max(of_rank) - min(of_rank) > 1:
            raise ValueError(f"chunks (C3): rank {rank} has stages of {of_rank} blocks")
    return max(busy)
