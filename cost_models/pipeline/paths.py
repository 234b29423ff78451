"""Ways through a pipeline's order that lead past one rank: what no split of the layers makes shorter, as counts.

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

With equal stages some of these chains is the longest of all under 1f1b in any number of chunks. Of many chunks only those are
looked at where the long chains are: they enter at a forward pass of the first ones or a backward pass of the last ones, leave at a
forward pass of the last ones or a backward pass of the first ones, and return to one of the last.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .replay import PipelineShape, Row, rows_of

IntArray = NDArray[np.int64]

MAX_CHUNKS = 8
"""Chunks at which chains enter, leave and return."""


@dataclass(frozen=True)
class Paths:
    """Chains past one rank [P].

    Attributes:
        forward_to: F of all stages before this one; ``backward_to`` the same for B (0: none).
        backward_from: B of this stage and all behind it before the row; ``forward_from`` and ``backward_again_from`` behind the
            row (S: none).
        row: forward, input and weight passes of each chunk in the row [P, 3, v].
    """

    forward_to: IntArray
    backward_from: IntArray
    row: IntArray
    forward_from: IntArray
    backward_to: IntArray
    backward_again_from: IntArray

    def select(self, some: IntArray) -> Paths:
        """A few of them."""
        return Paths(*(getattr(self, name)[some] for name in self.__dataclass_fields__))


@lru_cache(maxsize=256)
def paths_past(shape: PipelineShape) -> tuple[Paths, ...]:
    """Chains past each rank.

    Of many micro-batches those in the middle add whole rounds to the row: the order repeats there.

    Raises:
        ConfigError: the schedule is not defined for these numbers.
    """
    few = shape.fewer_microbatches
    rows = rows_of(shape.with_microbatches(few))
    return tuple(_past(shape, rank, row, few) for rank, row in enumerate(rows))


def _past(shape: PipelineShape, rank: int, row: Row, few: int) -> Paths:
    last = shape.num_stages
    stages = [s for s, at in enumerate(shape.rank_of_stage) if at == rank]
    counts = _counted(row, stages)
    more = shape.num_microbatches - few
    ends = np.flatnonzero((row[0] != 2) & ((row[2] == 0) | (row[2] == few - 1)))
    at = {(min(kind, 1), s, i): n for n, (kind, s, i) in zip(ends.tolist(), row[:, ends].T.tolist(), strict=True)}
    low, high = stages[:MAX_CHUNKS], stages[-MAX_CHUNKS:]
    entries = [(s, last, at[0, s, 0]) for s in low] + [(last, s + 1, at[1, s, 0]) for s in high]
    ways_out: list[tuple[int, int, int, int, int | None]] = [(at[1, s, few - 1], last, s, last, None) for s in low]
    ways_out += [(at[0, s, few - 1], s + 1, last, last, None) for s in high]
    ways_out.append((row.shape[1] - 1, last, 0, last, None))
    ways_out += [
        (at[0, s, few - 1], s + 1, 0, t + 1, at[1, t, few - 1])
        for s, t in itertools.product(high, high)
        if at[1, t, few - 1] > at[0, s, few - 1]
    ]
    found = []
    for (forward_to, backward_from, enters), way in itertools.product(entries, ways_out):
        leaves, forward_from, backward_to, again_from, returns = way
        if enters > leaves:
            continue
        passes = counts[leaves + 1] - counts[enters] + more
        if returns is not None:
            passes = passes + counts[-1] - counts[returns]
        found.append((forward_to, backward_from, passes, forward_from, backward_to, again_from))
    columns = list(zip(*found, strict=True))
    return Paths(*(np.array(column, dtype=np.int64) for column in columns))


def _counted(row: Row, stages: list[int]) -> IntArray:
    """Passes before each position of a row [n + 1, 3, v]: forward, input and weight passes of each of the rank's stages."""
    kind, stage = row[0], row[1]
    chunk = np.searchsorted(np.array(stages), stage)
    each = np.zeros((len(kind) + 1, 3, len(stages)), dtype=np.int64)
    n = np.arange(1, len(kind) + 1)
    each[n, np.minimum(kind, 2) * (kind < 3) + (kind == 3), chunk] = 1
    both = np.flatnonzero(kind == 3)
    each[both + 1, 2, chunk[both]] = 1
    return np.asarray(np.cumsum(each, axis=0))
