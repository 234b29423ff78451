"""Ranks that meet once a step (ZeRO 0 to 2): micro-batches of ranks need not be aligned, and the busiest rank decides.

(O')        min  max_r  sum over groups g of r (t[g] + FIXED)

with (C1), (C2), (C3), (C6) of instance.py. Groups are aligned blocks, so of any two one holds the other or they have no rank in
common: each rank computes its groups in the order of their sizes, largest first, and then nobody waits for a group before all of
its ranks are through with it. That makes (O') the time of the step, and the order one without deadlocks.

A deadline is bisected. Slowest first, a sequence goes to the block of the smallest degree whose busiest rank then ends soonest, if
it ends within the deadline: into the group that is open there while it has room for the tokens, else into a new one, which costs
FIXED. Few sequences on few ranks are then enumerated: groups one after the other, on every block, as long as that may be better.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from ...schema.units import FloatArray, IntArray
from ..tolerances import SUMMED
from .bound import lower_bound_s
from .exact import subsets_with_first
from .instance import BatchGroup, BatchInstance

_TOLERANCE = 0.003
"""Of the bisection of the deadline, relative."""


_MAX_ENUMERATED, _MAX_RANKS = 6, 4
"""Sequences and ranks up to which schedules are enumerated: some 10 ms."""


@dataclass
class _Block:
    """Groups of one aligned block of ranks."""

    first: int
    column: int
    groups: list[list[int]] = field(default_factory=list)


def solve_without_waits(i: BatchInstance) -> tuple[tuple[BatchGroup, ...], ...]:
    """Return the groups of a batch in rounds of blocks without a rank in common, largest first."""
    order = np.argsort(-i.fastest_s, kind="stable")
    low, high = lower_bound_s(i), math.inf
    deadline, best = low, None
    while best is None or high / low - 1 > _TOLERANCE:
        filled = _filled(i, order, deadline * (1 + SUMMED))
        if filled is None:
            low, deadline = deadline, deadline * 1.25 if best is None else math.sqrt(deadline * high)
        else:
            blocks, busiest_s = filled
            best, high = blocks, busiest_s
            deadline = math.sqrt(low * high)
            if high <= low:
                break
    if len(i.lengths) <= _MAX_ENUMERATED and i.num_ranks <= _MAX_RANKS:
        best = _Enumeration(i, best, high).blocks
    return _rounds(i, best)


class _Enumeration:
    """The best blocks of a few sequences, which are bits; begins with blocks that are known and what they take."""

    def __init__(self, i: BatchInstance, blocks: list[_Block], busiest_s: float) -> None:
        self.i, self.blocks, self.busiest_s = i, blocks, busiest_s
        members = [[s for s in range(len(i.lengths)) if mask >> s & 1] for mask in range(1 << len(i.lengths))]
        self._groups = [
            [
                (column, degree, float(i.seconds[group, column].sum()) + i.fixed_s)
                for column, degree in enumerate(i.degrees)
                if i.lengths[group].sum() <= i.tokens_per_rank * degree
            ]
            for group in members
        ]
        self._members = members
        self._extend((1 << len(i.lengths)) - 1, [0.0] * i.num_ranks, [])

    def _extend(self, mask: int, loads: list[float], blocks: list[_Block]) -> None:
        if not mask:
            self.blocks, self.busiest_s = list(blocks), max(loads)
            return
        for part in subsets_with_first(mask):
            for column, degree, seconds in self._groups[part]:
                for first in range(0, self.i.num_ranks - degree + 1, degree):
                    inside = tuple(loads[first : first + degree])
                    if max(inside) + seconds >= self.busiest_s * (1 - SUMMED):
                        continue
                    for rank in range(first, first + degree):
                        loads[rank] += seconds
                    self._extend(mask ^ part, loads, [*blocks, _Block(first, column, [self._members[part]])])
                    loads[first : first + degree] = inside


def _filled(i: BatchInstance, order: IntArray, deadline: float) -> tuple[list[_Block], float] | None:
    """Return the blocks under a deadline, and the end of the busiest rank; None where a sequence is left."""
    loads: FloatArray = np.zeros(i.num_ranks)
    room = [np.zeros(i.num_ranks // degree, dtype=np.int64) for degree in i.degrees]
    blocks = [
        [_Block(degree * idx, column) for idx in range(i.num_ranks // degree)]
        for column, degree in enumerate(i.degrees)
    ]
    lengths, seconds = i.lengths.tolist(), i.seconds
    for sequence in order.tolist():
        length = lengths[sequence]
        for column, degree in enumerate(i.degrees):
            if length > i.tokens_per_rank * degree or seconds[sequence, column] > deadline:
                continue
            used = len(room[column]) * degree
            busy = loads[:used].reshape(-1, degree).max(axis=1) if degree > 1 else loads[:used]
            ends = busy + np.where(room[column] >= length, 0.0, i.fixed_s)
            idx = int(ends.argmin())
            if ends[idx] + seconds[sequence, column] > deadline:
                continue
            block = blocks[column][idx]
            if room[column][idx] < length:
                block.groups.append([])
                room[column][idx] = i.tokens_per_rank * degree
                loads[block.first : block.first + degree] += i.fixed_s
            block.groups[-1].append(sequence)
            room[column][idx] -= length
            loads[block.first : block.first + degree] += seconds[sequence, column]
            break
        else:
            return None
    return [block for row in blocks for block in row if block.groups], float(loads.max())


def _rounds(i: BatchInstance, blocks: list[_Block]) -> tuple[tuple[BatchGroup, ...], ...]:
    """Return the groups in rounds: each in the first one after those of its ranks that are larger or come before."""
    following = np.zeros(i.num_ranks, dtype=np.int64)
    rounds: list[list[BatchGroup]] = []
    for block in sorted(blocks, key=lambda block: (-block.column, block.first)):
        ranks = slice(block.first, block.first + i.degrees[block.column])
        for sequences in block.groups:
            number = int(following[ranks].max())
            following[ranks] = number + 1
            if number == len(rounds):
                rounds.append([])
            seconds = float(i.seconds[sequences, block.column].sum())
            rounds[number].append(BatchGroup(block.first, i.degrees[block.column], tuple(sorted(sequences)), seconds))
    return tuple(tuple(groups) for groups in rounds)
