"""Ranks that compute slower than their peers beyond noise: an exact sign test over the steps of a run.

Of every rank r and step t the seconds c[r, t] of its own work, waiting left out. Peers have the same work: the other ranks of the
same pipeline stage; of a stage with one rank all others, each over what the plan expects of it. With

    d[r, t] = log(c[r, t] / expected[r]) - median over peers of the same,   m[r] = median over steps of d[r]

a rank is slow where m exceeds the smallest difference that is worth naming, `SLOWER` among ranks with the same work and
`SLOWER_THAN_EXPECTED` where only the plan's expectation makes them comparable, and where d is above zero in more steps than chance
allows: of a rank like its peers each step is above or below with equal odds, so that k or more of T are above with the probability
of a binomial tail, whatever the distribution of the noise. Over all ranks together a run without a slow rank names one at most
once in 1 / `FALSE_ALARMS` runs (Bonferroni), which is why few steps name nobody: T >= log2(R / FALSE_ALARMS).
"""

from __future__ import annotations

import math
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

SLOWER, SLOWER_THAN_EXPECTED = 0.10, 0.50
FALSE_ALARMS = 0.01


class Straggler(TypedDict):
    """A slow rank: by what fraction its own work takes longer than its peers', and how likely so many slow steps are by chance."""

    rank: int
    slower_fraction: float
    chance: float


def stragglers(compute_s: FloatArray, stage_of_rank: NDArray[np.int64], expected_s: FloatArray) -> list[Straggler]:
    """The slow ranks, slowest first.

    Args:
        compute_s: seconds of each rank's own work in each step [R, T].
        stage_of_rank: pipeline position [R]; expected_s: what the plan expects of each rank's work [R], in any unit.
    """
    num_ranks, num_steps = compute_s.shape
    if num_ranks < 2 or num_steps == 0 or np.any(compute_s <= 0):
        return []
    from scipy.special import bdtrc  # here: no launcher needs it, of the ranks the one that reports, at its end

    logs = np.log(compute_s / expected_s[:, None])
    found = []
    for rank in range(num_ranks):
        others = np.arange(num_ranks) != rank
        peers = others & (stage_of_rank == stage_of_rank[rank])
        least = SLOWER if peers.any() else SLOWER_THAN_EXPECTED
        difference = logs[rank] - np.median(logs[peers if peers.any() else others], axis=0)
        slower = math.expm1(float(np.median(difference)))
        chance = float(bdtrc(max(np.count_nonzero(difference > 0), 1) - 1, num_steps, 0.5))
        if slower > least and chance * num_ranks <= FALSE_ALARMS:
            found.append(Straggler(rank=rank, slower_fraction=slower, chance=chance))
    return sorted(found, key=lambda entry: -entry["slower_fraction"])
