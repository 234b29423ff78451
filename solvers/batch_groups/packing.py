"""Packing alone: sequences into packs of equal tokens whose attention is as much work, for ranks or micro-batches of one shape.

Sets        s sequences;  p packs, as few as hold all tokens
Data        LEN[s] tokens;  C tokens of a pack
Variables   x[s,p] in {0,1}
(O)         min  max_p max(sum_s LEN[s] x[s,p] / mean,  sum_s LEN[s]^2 x[s,p] / mean)
(C1) one pack a sequence: sum_p x[s,p] = 1
(C2) capacity: sum_s LEN[s] x[s,p] <= C

Longest first, each sequence goes where the larger of both is least: long ones are dealt by their squares, short ones fill up
tokens. Then the pack with most tokens swaps sequences with those that have fewer, as long as squares stay even. What one sequence
has of squares beyond the mean no packing evens out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...schema.errors import ConfigError
from ...schema.units import FloatArray, IntArray

_EVEN = 5e-4
"""Difference of tokens between packs, as a part of the mean, from which on they count as equal."""

_MAX_SQUARES = 1.01
"""Squares over the mean up to which a pack may come by a swap."""

_SWAPS_PER_PACK, _PARTNERS = 8, 6


@dataclass(frozen=True)
class Packing:
    """Sequences of each pack, its tokens and the sum of the squares of its lengths."""

    packs: tuple[tuple[int, ...], ...]
    tokens: tuple[int, ...]
    squares: tuple[float, ...]

    @property
    def padding(self) -> float:
        """Return what is padding where all packs are filled up to the fullest, as a part of all tokens."""
        return 1 - sum(self.tokens) / (len(self.tokens) * max(self.tokens))

    @property
    def imbalance(self) -> float:
        """Return the most squares of a pack over the mean."""
        return max(self.squares) * len(self.squares) / sum(self.squares)


def pack_evenly(lengths: Sequence[int], capacity: int) -> Packing:
    """Return packs of at most ``capacity`` tokens.

    Raises:
        ConfigError: there are no sequences, one has no tokens, or one is longer than a pack.
    """
    given = np.asarray(lengths, dtype=np.int64)
    if given.ndim != 1 or not len(given) or given.min() < 1:
        raise ConfigError("packs are made of at least one sequence, each of at least one token")
    if given.max() > capacity:
        raise ConfigError(
            f"the longest sequence has {given.max():,} tokens, a pack {capacity:,}",
            help="cut sequences, or take larger packs",
        )
    number = max(1, math.ceil(int(given.sum()) / capacity))
    while (packing := pack_into(given, number, capacity)) is None:
        number += 1
    return packing


def pack_into(given: IntArray, number: int, capacity: int) -> Packing | None:
    """Return so many packs, empty ones where sequences are fewer; None where one finds no room."""
    packs = _dealt(given, number, capacity)
    if packs is None:
        return None
    _swap(given, packs)
    packs += [[] for _ in range(number - len(packs))]
    return Packing(
        packs=tuple(tuple(sorted(pack)) for pack in packs),
        tokens=tuple(int(given[pack].sum()) for pack in packs),
        squares=tuple(float((given[pack].astype(float) ** 2).sum()) for pack in packs),
    )


def _dealt(lengths: IntArray, number: int, capacity: int) -> list[list[int]] | None:
    """Return so many packs, none empty, each sequence in one (C1); None where a sequence finds no room (C2)."""
    if number >= len(lengths):
        return [[idx] for idx in range(len(lengths))]
    mean_tokens, mean_squares = lengths.sum() / number, (lengths.astype(float) ** 2).sum() / number
    tokens, squares = np.zeros(number), np.zeros(number)
    packs: list[list[int]] = [[] for _ in range(number)]
    for idx in np.argsort(-lengths, kind="stable").tolist():
        length = float(lengths[idx])
        after = np.maximum((squares + length**2) / mean_squares, (tokens + length) / mean_tokens)
        after[tokens + length > capacity] = math.inf
        pack = int(after.argmin())
        if math.isinf(after[pack]):
            return None
        packs[pack].append(idx)
        tokens[pack] += length
        squares[pack] += length**2
    return packs


def _swap(lengths: IntArray, packs: list[list[int]]) -> None:
    """Even out tokens by swaps, in place: (O), whose squares may not grow."""
    values = lengths.astype(float)
    tokens: FloatArray = np.array([values[pack].sum() for pack in packs])
    squares: FloatArray = np.array([(values[pack] ** 2).sum() for pack in packs])
    limit = max(_MAX_SQUARES * squares.mean(), squares.max())
    for _ in range(_SWAPS_PER_PACK * len(packs)):
        fullest = int(tokens.argmax())
        if tokens[fullest] - tokens.mean() < _EVEN * tokens.mean():
            return
        for other in np.argsort(tokens)[:_PARTNERS].tolist():
            pair = _pair(values, packs[fullest], packs[other], (tokens[fullest] - tokens[other]) / 2)
            if pair is None:
                continue
            given, taken = pair
            moved = values[given] - values[taken] if taken >= 0 else values[given]
            moved_squares = values[given] ** 2 - (values[taken] ** 2 if taken >= 0 else 0.0)
            if squares[other] + moved_squares > limit or not 0 < moved < tokens[fullest] - tokens[other]:
                continue
            packs[fullest].remove(given)
            packs[other].append(given)
            if taken >= 0:
                packs[other].remove(taken)
                packs[fullest].append(taken)
            tokens[[fullest, other]] += (-moved, moved)
            squares[[fullest, other]] += (-moved_squares, moved_squares)
            break
        else:
            return


def _pair(values: FloatArray, fuller: list[int], emptier: list[int], surplus: float) -> tuple[int, int] | None:
    """Return the sequences, one of each pack (-1: none of the second), whose swap moves nearest to ``surplus`` tokens."""
    candidates = sorted([*emptier], key=lambda idx: float(values[idx]))
    sizes = np.array([0.0, *values[candidates]])
    best: tuple[float, int, int] | None = None
    for idx in fuller if len(fuller) > 1 else ():
        place = int(np.searchsorted(sizes, values[idx] - surplus))
        for near in (place - 1, place):
            if 0 <= near < len(sizes):
                error = abs(float(values[idx] - sizes[near]) - surplus)
                if best is None or error < best[0]:
                    best = error, idx, candidates[near - 1] if near else -1
    return None if best is None else best[1:]
