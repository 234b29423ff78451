"""Cut an ordered list of layers into contiguous pipeline stages.

Sets
    l = 0..L-1   layers in order
    s = 0..S-1   stages in order
Data
    BUSY[l]      seconds layer l adds to the stage that holds it, for one micro-batch; where stages run on different devices
                 BUSY[s,l], with BASE[s] seconds of the stage itself and ROUNDS
    FITS[s,i,j]  whether stage s has the memory (and is allowed) to hold layers i..j-1
Variables
    c[s]         boundaries 0 = c[0] < c[1] < ... < c[S] = L; stage s holds layers c[s]..c[s+1]-1
Objective
    (O)  min  max_s  sum_{l in stage s} BUSY[l]          the slowest stage decides (cost_models/pipeline)
    (O') min  ROUNDS max_s t[s] + sum_s t[s],  t[s] = BASE[s] + sum_{l in stage s} BUSY[s,l]
                                                         where the sum depends on who holds what, and counts too
Constraints
    (C1) contiguous: every layer is on one stage, stages in order
    (C2) memory: FITS[s, c[s], c[s+1]]

Among the splits with the lowest (O) the one with the lowest sum of squared stage times is taken: it is the most even one. For (O')
that is tried too.

Method: dynamic programming over (stage, boundary), exact. best[s][j] is the lowest objective of stages 0..s-1 that hold
layers 0..j-1, and best[s+1][j] = min_i combine(best[s][i], BUSY(i..j-1)) over FITS[s,i,j]: S array operations on [L+1, L+1].
For (O') the lowest sum under a cap on the slowest stage is found so, and the cap lowered below the slowest stage of the last split
until no lower cap can be better: every pair of a slowest stage and its lowest sum is met.
Source: the classic linear partition recurrence (Kernighan, J. ACM 18(1), 1971).
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import numpy as np

from ...schema.arrays import BoolArray, FloatArray
from ..solution import Solution, Status
from ..tolerances import EVENNESS, ROUNDING

Boundaries = tuple[int, ...]
"""c [S+1]."""


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

    @property
    def span_s(self) -> FloatArray:
        """Seconds of layers i..j-1 [L+1, L+1], or of each stage with them [S, L+1, L+1]."""
        prefix = np.concatenate([np.zeros((*self.busy_s.shape[:-1], 1)), np.cumsum(self.busy_s, axis=-1)], axis=-1)
        span = prefix[..., None, :] - prefix[..., :, None]
        return np.asarray(span if self.base_s is None else span + self.base_s[:, None, None])


def solve(instance: StageSplitInstance) -> Solution[Boundaries]:
    """Return the split with the lowest (O), the most even one of these; where stages differ the one with the lowest (O')."""
    start = time.perf_counter()
    span = instance.span_s
    if instance.stages_differ:
        return _solution(*_min_weighted(instance, span), start)
    slowest, _ = _dynamic_program(instance.fits, span, np.maximum)
    if not np.isfinite(slowest):
        return _solution((), slowest, start)
    within = instance.fits & (span <= slowest * (1 + ROUNDING))[None]
    _, boundaries = _dynamic_program(within, span**2, np.add)
    return _solution(boundaries, float(slowest), start)


def _solution(boundaries: Boundaries, objective: float, start: float) -> Solution[Boundaries]:
    return Solution(
        status=Status.OPTIMAL if boundaries else Status.INFEASIBLE,
        choice=boundaries or None,
        objective=objective,
        bound=objective,
        solve_s=time.perf_counter() - start,
        backend="dynamic program",
    )


def fastest_split(instance: StageSplitInstance) -> Boundaries:
    """Return boundaries with the lowest (O), even or not; empty where there are none."""
    slowest, boundaries = _dynamic_program(instance.fits, instance.span_s, np.maximum)
    return boundaries if np.isfinite(slowest) else ()


def min_slowest_s(instance: StageSplitInstance) -> float:
    """Return the lowest (O) without a split; infinite where there is none."""
    return _dynamic_program(instance.fits, instance.span_s, np.maximum)[0]


def _min_weighted(instance: StageSplitInstance, span: FloatArray) -> tuple[Boundaries, float]:
    """Return boundaries with the lowest (O'), by ever lower caps on the slowest stage."""
    slowest, boundaries = _dynamic_program(instance.fits, span, np.maximum)
    if not np.isfinite(slowest):
        return (), float("inf")
    stages = np.arange(instance.num_stages)
    min_sum, _ = _dynamic_program(instance.fits, span, np.add)
    best = instance.rounds * slowest + float(span[stages, boundaries[:-1], boundaries[1:]].sum())
    cap = (best - min_sum) / instance.rounds if instance.rounds > 0 else np.inf
    while cap >= slowest * (1 - ROUNDING):
        within = instance.fits & (span <= cap * (1 + ROUNDING))
        total, split = _dynamic_program(within, span, np.add)
        if instance.rounds * slowest + total >= best or not np.isfinite(total):
            break
        longest = float(span[stages, split[:-1], split[1:]].max())
        if instance.rounds * longest + total < best:
            boundaries, best = split, instance.rounds * longest + total
        cap = longest * (1 - 4 * ROUNDING)  # below the longest stage of this split, whatever ROUNDING let through
    return _evenest(instance, span, boundaries, best), float(best)


def _evenest(instance: StageSplitInstance, span: FloatArray, boundaries: Boundaries, best: float) -> Boundaries:
    """Return, of the splits as good as ``boundaries``, one with a low sum of squared stage times."""
    stages = np.arange(instance.num_stages)
    longest = float(span[stages, boundaries[:-1], boundaries[1:]].max())
    within = instance.fits & (span <= longest * (1 + ROUNDING))
    _, split = _dynamic_program(within, span + EVENNESS * span**2 / longest, np.add)
    seconds = span[stages, split[:-1], split[1:]]
    as_good = instance.rounds * seconds.max() + seconds.sum() <= best * (1 + ROUNDING)
    return split if as_good else boundaries


def _dynamic_program(allowed: BoolArray, cost: FloatArray, combine: np.ufunc) -> tuple[float, Boundaries]:
    """Return the lowest combined cost and its boundaries; infinite and arbitrary when there is no way."""
    num_stages, size = len(allowed), cost.shape[-1]
    non_empty = np.triu(np.ones((size, size), dtype=bool), k=1)
    best = np.full(size, np.inf)
    best[0] = 0.0
    choices = []
    for s in range(num_stages):
        reached = np.where(allowed[s] & non_empty, combine(best[:, None], cost if cost.ndim == 2 else cost[s]), np.inf)
        choices.append(np.argmin(reached, axis=0))
        best = np.min(reached, axis=0)
    boundaries = [size - 1]
    for s in reversed(range(num_stages)):
        boundaries.append(int(choices[s][boundaries[-1]]))
    return float(best[size - 1]), tuple(reversed(boundaries))


def check(instance: StageSplitInstance, boundaries: Boundaries) -> float:
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
