"""Ranks that compute slower than their peers beyond noise: robust statistics over the steps of a run.

Of every rank r and step t the seconds c[r, t] of its own work, waiting left out. Peers have the same work: the other ranks of the
same pipeline stage; of a stage with one rank all others, each over what the plan expects of it. With

    d[r, t] = log(c[r, t] / expected[r]) - median over peers of the same,   m[r] = median over steps of d[r]
    noise[r] = 1.25 * 1.48 * median |d[r] - m[r]| / sqrt(steps)             (deviation of a median of normal errors)

a rank is slow where m exceeds both ``DEVIATIONS`` times its noise and the smallest difference that is worth naming: `SLOWER` among
ranks with the same work, `SLOWER_THAN_EXPECTED` where only the plan's expectation makes them comparable.
"""

from __future__ import annotations

import math
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

SLOWER, SLOWER_THAN_EXPECTED = 0.10, 0.50
DEVIATIONS = 5.0
MIN_STEPS = 5
"""Fewer have no spread to speak of."""

_MEDIAN_DEVIATION = 1.2533 * 1.4826


class Straggler(TypedDict):
    """A slow rank: by what fraction its own work takes longer than its peers', and the standard deviation of that."""

    rank: int
    slower_fraction: float
    noise: float


def stragglers(compute_s: FloatArray, stage_of_rank: NDArray[np.int64], expected_s: FloatArray) -> list[Straggler]:
    """The slow ranks, slowest first.

    Args:
        compute_s: seconds of each rank's own work in each step [R, T].
        stage_of_rank: pipeline position [R]; expected_s: what the plan expects of each rank's work [R], in any unit.
    """
    num_ranks, num_steps = compute_s.shape
    if num_ranks < 2 or num_steps < MIN_STEPS or np.any(compute_s <= 0):
        return []
    logs = np.log(compute_s / expected_s[:, None])
    found = []
    for rank in range(num_ranks):
        others = np.arange(num_ranks) != rank
        peers = others & (stage_of_rank == stage_of_rank[rank])
        least = SLOWER if peers.any() else SLOWER_THAN_EXPECTED
        difference = logs[rank] - np.median(logs[peers if peers.any() else others], axis=0)
        middle = float(np.median(difference))
        noise = _MEDIAN_DEVIATION * float(np.median(np.abs(difference - middle))) / math.sqrt(num_steps)
        if middle > max(math.log1p(least), DEVIATIONS * noise):
            found.append(Straggler(rank=rank, slower_fraction=math.expm1(middle), noise=noise))
    return sorted(found, key=lambda entry: -entry["slower_fraction"])
