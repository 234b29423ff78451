"""Seconds of a pipelined step in closed form.

    T = sum_s t_s + (m - 1) * max_s t_s

with t_s the seconds stage s needs for one micro-batch, forward and backward. Exact for 1f1b and gpipe with equal stages,
where it is (m + pp - 1) * t (Narayanan et al., arXiv:2104.04473 section 2.2); an upper bound for unequal ones, because while the
slowest stage works the others fill some of their gaps.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any


def pipelined_s(stage_s: Array, num_microbatches: Array) -> Array:
    """Seconds of one step; ``stage_s`` has the stages on its last axis [..., pp]."""
    return np.sum(stage_s, axis=-1) + (num_microbatches - 1) * np.max(stage_s, axis=-1)


def pipelined_lower_bound_s(total_s: Array, num_microbatches: Array, pp: Array) -> Array:
    """The same for the best split that ``total_s`` seconds of work could have: pp equal stages. Never above `pipelined_s`."""
    return total_s * (num_microbatches - 1 + pp) / pp
