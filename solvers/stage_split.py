"""Cut an ordered list of layers into contiguous pipeline stages.

Sets
    l = 0..L-1   layers in order
    s = 0..S-1   stages in order
Data
    BUSY[l]      seconds layer l adds to the stage that holds it, for one micro-batch
    FITS[s,i,j]  whether stage s has the memory (and is allowed) to hold layers i..j-1
Variables
    c[s]         boundaries 0 = c[0] < c[1] < ... < c[S] = L; stage s holds layers c[s]..c[s+1]-1
Objective
    (O)  min  max_s  sum_{l in stage s} BUSY[l]          the slowest stage decides (cost_models/pipeline.py)
Constraints
    (C1) contiguous: every layer is on one stage, stages in order
    (C2) memory: FITS[s, c[s], c[s+1]]

Among the splits with the least (O) the one with the least sum of squared stage times is taken: it is the most even one.

Method: dynamic programming over (stage, boundary), exact. best[s][j] is the least objective of stages 0..s-1 that hold
layers 0..j-1, and best[s+1][j] = min_i combine(best[s][i], BUSY(i..j-1)) over FITS[s,i,j]: S array operations on [L+1, L+1].
Source: the classic linear partition recurrence (Kernighan, J. ACM 18(1), 1971).
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .status import Status

_RELATIVE_TOLERANCE = 1e-12


@dataclass(frozen=True)
class Instance:
    """BUSY [L] in seconds and FITS [S, L+1, L+1]."""

    busy_s: NDArray[np.float64]
    fits: NDArray[np.bool_]

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.busy_s)

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.fits)


@dataclass(frozen=True)
class Solution:
    """Boundaries [S+1] and the slowest stage's seconds; both empty when infeasible."""

    status: Status
    boundaries: tuple[int, ...]
    objective_s: float
    solve_s: float


def solve(instance: Instance) -> Solution:
    """The split with the fastest slowest stage, the most even one of these."""
    start = time.perf_counter()
    prefix = np.concatenate([[0.0], np.cumsum(instance.busy_s)])
    span = prefix[None, :] - prefix[:, None]
    slowest, _ = _dynamic_program(instance.fits, span, np.maximum)
    if not np.isfinite(slowest):
        return Solution(Status.INFEASIBLE, (), float("inf"), time.perf_counter() - start)
    within = instance.fits & (span <= slowest * (1 + _RELATIVE_TOLERANCE))[None]
    _, boundaries = _dynamic_program(within, span**2, np.add)
    return Solution(Status.OPTIMAL, boundaries, float(slowest), time.perf_counter() - start)


def least_slowest_s(instance: Instance) -> float:
    """(O) alone: infinite when there is no split."""
    prefix = np.concatenate([[0.0], np.cumsum(instance.busy_s)])
    return _dynamic_program(instance.fits, prefix[None, :] - prefix[:, None], np.maximum)[0]


def _dynamic_program(
    allowed: NDArray[np.bool_], cost: NDArray[np.float64], combine: np.ufunc
) -> tuple[float, tuple[int, ...]]:
    """Least combined cost and its boundaries; infinite and arbitrary when there is no way."""
    num_stages, size = len(allowed), cost.shape[0]
    non_empty = np.triu(np.ones((size, size), dtype=bool), k=1)
    best = np.full(size, np.inf)
    best[0] = 0.0
    choices = []
    for s in range(num_stages):
        reached = np.where(allowed[s] & non_empty, combine(best[:, None], cost), np.inf)
        choices.append(np.argmin(reached, axis=0))
        best = np.min(reached, axis=0)
    boundaries = [size - 1]
    for s in reversed(range(num_stages)):
        boundaries.append(int(choices[s][boundaries[-1]]))
    return float(best[size - 1]), tuple(reversed(boundaries))


def check(instance: Instance, boundaries: tuple[int, ...]) -> float:
    """Objective (O) of a split, recomputed from the definition; knows nothing of the method.

    Raises:
        ValueError: the split breaks (C1) or (C2); the message names which.
    """
    expected_ends = (0, instance.num_layers)
    increasing = all(i < j for i, j in itertools.pairwise(boundaries))
    if len(boundaries) != instance.num_stages + 1 or (boundaries[0], boundaries[-1]) != expected_ends or not increasing:
        raise ValueError(f"contiguous (C1): boundaries {boundaries}")
    slowest = 0.0
    for s, (i, j) in enumerate(itertools.pairwise(boundaries)):
        if not instance.fits[s, i, j]:
            raise ValueError(f"memory (C2): stage {s} cannot hold layers {i}..{j - 1}")
        slowest = max(slowest, float(sum(instance.busy_s[i:j])))
    return slowest
