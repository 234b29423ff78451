"""Many cuts of one pipeline replayed at once: the recurrences of replay.py as arrays, one column for each cut.

Passes are put into waves: a wave has all passes whose two predecessors are in earlier waves. A wave is one array operation over its
passes and all cuts, so that some cuts take little longer than one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ...schema.units import FloatArray, IntArray
from .replay import SAME, PipelineShape, program


@dataclass(frozen=True)
class Waves:
    """A program (replay.py) by waves: passes n = 1..P in their order, 0 stands for nothing.

    Attributes:
        before, needs: the two passes that each waits for [P + 1].
        kinds: for each an index into the seconds of F, B, W and BW of every stage [P + 1].
        starts: first pass of each wave, and the end.
        positions: of F, backward and weight passes [3, S, M].
    """

    before: IntArray
    needs: IntArray
    kinds: IntArray
    starts: tuple[int, ...]
    positions: IntArray


@lru_cache(maxsize=16)
def waves(shape: PipelineShape) -> Waves:
    """Return the order of a shape by waves.

    Raises:
        ConfigError: the schedule is not defined for these numbers, or never finishes.
    """
    passes = program(shape)
    wave = [0]
    for previous, needed in zip(passes.before, passes.needs, strict=True):
        one, other = wave[previous], wave[needed]
        wave.append((one if one > other else other) + 1)
    of_pass = np.array(wave)
    order = np.argsort(of_pass, kind="stable")
    moved = np.empty_like(order)
    moved[order] = np.arange(len(order))
    columns = (passes.before, passes.needs, passes.kinds)
    ranks_before, inputs, kinds = (np.array([0, *column], dtype=np.int64)[order] for column in columns)
    starts = np.searchsorted(of_pass[order], np.arange(1, of_pass[order[-1]] + 2))
    return Waves(moved[ranks_before], moved[inputs], kinds, tuple(starts.tolist()), moved[passes.positions])


def makespans_s(shape: PipelineShape, seconds: FloatArray) -> FloatArray:
    """Return `makespan_s` of each cut [C]: ``seconds`` of forward, input and weight passes [3, S, C].

    Raises:
        ConfigError: the schedule is not defined for these numbers.
    """
    m, period, reach = shape.num_microbatches, shape.period, shape.reach
    few = m if shape.order is not None else shape.fewer_microbatches
    result, waiting = np.zeros(seconds.shape[2]), np.arange(seconds.shape[2])
    while few < m:
        short = waves(shape.with_microbatches(few))
        ends = _ends_s(short, seconds[:, :, waiting])
        window = ends[short.positions[:, :, reach : few - reach]]
        later = (window[:, :, period:] - window[:, :, :-period]).reshape(-1, len(waiting))
        last = ends.max(axis=0)
        repeats = np.ptp(later, axis=0) <= SAME * last
        result[waiting] = last + (m - few) // period * later.mean(axis=0)
        waiting = waiting[~repeats]
        if not len(waiting):
            return result
        few += period * -(-few // period)
    result[waiting] = _ends_s(waves(shape), seconds[:, :, waiting]).max(axis=0)
    return result


def _ends_s(passes: Waves, seconds: FloatArray) -> FloatArray:
    """Return the seconds at which each pass ends [P + 1, C]."""
    of_kind = np.concatenate([*seconds, seconds[1] + seconds[2]])
    ends = of_kind[passes.kinds]
    ends[0] = 0.0
    for first, end in zip(passes.starts[:-1], passes.starts[1:], strict=True):
        ready = ends[passes.before[first:end]]
        np.maximum(ready, ends[passes.needs[first:end]], out=ready)
        ends[first:end] += ready
    return ends
