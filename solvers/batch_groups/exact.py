"""Few sequences, exactly: dynamic programming over subsets of the groups of a micro-batch, then of the micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .instance import BatchInstance, Groups

MAX_STEPS = 60_000
"""Steps of the program up to which it is used: some 0.1 s."""


def num_steps(i: BatchInstance) -> int:
    """Return the steps of the program: subsets of subsets, for each degree and number of ranks."""
    return 3 ** min(len(i.lengths), 20) * len(i.degrees) * i.num_ranks


_Within = tuple[float, list[tuple[int, int]]]
"""Seconds of the slowest group of a micro-batch, and its groups: (index of the degree, subset)."""


def solve_exactly(i: BatchInstance) -> list[Groups]:
    """Return the best schedule, by dynamic programming over subsets: groups of a micro-batch, then micro-batches."""
    size = 1 << len(i.lengths)
    bits = [[s for s in range(len(i.lengths)) if mask >> s & 1] for mask in range(size)]
    tokens = [int(i.lengths[members].sum()) for members in bits]
    seconds = [i.seconds[members].sum(axis=0).tolist() for members in bits]
    width = i.num_ranks + 1
    within: list[list[_Within]] = [[(0.0 if mask == 0 else math.inf, [])] * width for mask in range(size)]
    for mask in range(1, size):
        row: list[_Within] = [(math.inf, [])] * (i.num_ranks + 1)
        for part in subsets_with_first(mask):
            for k, degree in enumerate(i.degrees):
                if tokens[part] > i.tokens_per_rank * degree:
                    continue
                for ranks in range(degree, i.num_ranks + 1):
                    rest, groups = within[mask ^ part][ranks - degree]
                    slowest = max(seconds[part][k], rest)
                    if slowest < row[ranks][0]:
                        row[ranks] = slowest, [(k, part), *groups]
        within[mask] = row
    total: list[tuple[float, list[int]]] = [(0.0, [])]
    for mask in range(1, size):
        options = (
            (within[part][-1][0] + i.fixed_s + total[mask ^ part][0], [part, *total[mask ^ part][1]])
            for part in subsets_with_first(mask)
        )
        total.append(min(options, key=lambda option: option[0]))
    return [[(k, bits[part]) for k, part in within[chosen][-1][1]] for chosen in total[-1][1]]


def subsets_with_first(mask: int) -> Iterator[int]:
    """Yield the subsets of a set of sequences that hold its first one."""
    first = mask & -mask
    part = rest = mask ^ first
    while True:
        yield part | first
        if not part:
            return
        part = (part - 1) & rest
