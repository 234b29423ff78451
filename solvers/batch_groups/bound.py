"""Seconds that no schedule of a batch is below.

Under (O), with T the longest of the deadlines and w[s] the fewest rank seconds of a sequence among the degrees within T:

    sum_k T[k] + m FIXED  >=  T + max(0, sum_s w[s] - FULL) / R + m FIXED
    FULL = min(R T, the most work of sequences of R C tokens)                   what the micro-batch that takes T does of it
    m >= 1 + (sum_s LEN[s] - ROOM) / (R C)                                      where ROOM, at most R C, are the tokens that the
         micro-batch of the slowest sequence holds: its own, and the most that R T rank seconds less its own have room for

Both knapsacks are continuous. w falls with T and the rest rises, so that the bound is the least over T at which w changes.
Under (O'): the longest sequence at its fastest, or what all of them come to on ranks that are evenly busy.
"""

from __future__ import annotations

import math

import numpy as np

from ...schema.units import FloatArray
from ..tolerances import SUMMED
from .instance import BatchInstance

_MAX_LEVELS = 256
"""Values of T that are looked at: w of those above is the least of all."""


def lower_bound_s(instance: BatchInstance) -> float:
    """Return seconds that no schedule is below, where ranks wait after every micro-batch or meet once."""
    fixed_s, capacity = instance.fixed_s, float(instance.num_ranks * instance.tokens_per_rank)
    if not instance.waits:
        micro_batches = float(instance.lengths.sum()) / capacity
        even_s = float(instance.rank_seconds.min(axis=1).sum()) / instance.num_ranks + micro_batches * fixed_s
        return max(even_s, float(instance.fastest_s.max()) + fixed_s) * (1 - SUMMED)
    distinct = _Distinct(instance)
    levels = np.unique(instance.seconds[instance.allowed])
    levels = levels[levels >= instance.fastest_s.max()]
    best = math.inf
    for idx, longest_s in enumerate(levels[: _MAX_LEVELS + 1].tolist()):
        if longest_s + instance.min_micro_batches * fixed_s >= best:
            break
        is_last = idx == _MAX_LEVELS
        below_s = math.inf if is_last or idx + 1 == len(levels) else float(levels[idx + 1])
        best = min(best, distinct.seconds(math.inf if is_last else longest_s, longest_s, below_s))
    return best * (1 - SUMMED)


class _Distinct:
    """Sequences that are alike as one row with a count, slowest last."""

    def __init__(self, instance: BatchInstance) -> None:
        rows, _, counts = instance.alike
        self.instance, self.counts = instance, counts
        self._slowest_tokens = float(instance.lengths[rows[-1]])
        self.tokens: FloatArray = (instance.lengths[rows] * counts).astype(np.float64)
        self._seconds, self._rank_seconds = instance.seconds[rows], instance.rank_seconds[rows]
        self._capacity = float(instance.num_ranks * instance.tokens_per_rank)

    def seconds(self, within_s: float, longest_s: float, below_s: float) -> float:
        """Return the bound where the longest deadline is between two, and degrees are within ``within_s``."""
        i = self.instance
        each = np.where(self._seconds <= within_s, self._rank_seconds, math.inf).min(axis=1)
        work, longest = each * self.counts, float(each[-1])
        lightest = np.argsort(work / self.tokens)
        max_work = float(_max_value(self.tokens[lightest[::-1]], work[lightest[::-1]], self._capacity))
        rest_s = max(0.0, float(work.sum()) - min(i.num_ranks * longest_s, max_work)) / i.num_ranks
        room = self._slowest_tokens + _max_value(work[lightest], self.tokens[lightest], i.num_ranks * below_s - longest)
        remaining = (float(self.tokens.sum()) - min(room, self._capacity)) / self._capacity
        micro_batches = 1 + max(0, math.ceil(remaining * (1 - SUMMED)))
        return longest_s + rest_s + micro_batches * i.fixed_s


def _max_value(weights: FloatArray, values: FloatArray, capacity: float) -> float:
    """Return the most value that a capacity holds, of parts as well, given the most value per weight first."""
    total_weight, total_value = (np.concatenate(([0.0], np.cumsum(entries))) for entries in (weights, values))
    return float(np.interp(capacity, total_weight, total_value))
