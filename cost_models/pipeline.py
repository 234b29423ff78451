"""Seconds of a pipelined step in closed form.

    T = m * max_s t_s + (sum_s t_s - max_s t_s) / v

with t_s the seconds stage s needs for one micro-batch, forward and backward, and v model chunks per stage (1: not interleaved).
Exact for 1f1b and gpipe with equal stages, where it is (m + pp - 1) * t, and for interleaved 1f1b, whose bubble is a v-th of that
(Narayanan et al., arXiv:2104.04473 section 2.2); an upper bound for unequal stages, because while the slowest works the others
fill some of their gaps.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any


def pipelined_s(stage_s: Array, num_microbatches: Array, num_model_chunks: Array) -> Array:
    """Seconds of one step; ``stage_s`` has the stages on its last axis [..., pp]."""
    slowest = np.max(stage_s, axis=-1)
    return num_microbatches * slowest + (np.sum(stage_s, axis=-1) - slowest) / num_model_chunks


def pipelined_lower_bound_s(total_s: Array, num_microbatches: Array, pp: Array, num_model_chunks: Array) -> Array:
    """The same for the best split that ``total_s`` seconds of work could have: pp equal stages. Never above `pipelined_s`.

    `pipelined_s` is sum / v + (m - 1 / v) * max, and the largest of pp parts is at least their mean.
    """
    return total_s * (num_microbatches + (pp - 1) / num_model_chunks) / pp
