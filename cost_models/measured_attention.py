"""Fused attention as it was measured on a device: the model's seconds times measured over modelled of the nearest measured shape.

Nearest by the logarithms of sequence length, head width and of all rows together; each direction by itself. Two octaves count as
another regime (a kernel bound by its launch, or one that does not skip what the mask excludes): beyond, the ratio fades to one by
half for each further octave.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np

from ..schema.profile_points import AttentionPoint
from .compute import OperatorTime
from .layouts import FloatArray
from .operators import FusedAttention, Operator, attended_tokens
from .setting import Setting

_NEAR_OCTAVES = 2.0
_DTYPES = {"bf16-mixed": "bf16", "bf16": "bf16", "fp16-mixed": "fp16", "fp32": "fp32"}

Time = Callable[..., OperatorTime]


def with_measured_attention(op: Operator, time: OperatorTime, setting: Setting, of: Time) -> OperatorTime:
    """The time of an operator, corrected if it is fused attention of which the profile has points.

    Args:
        of: time of an operator for tokens, tp and sequence parallelism.
    """
    profile, workload = setting.cluster.profile, setting.workload
    if not isinstance(op, FusedAttention) or profile is None or not profile.attention:
        return time
    dtype = _DTYPES.get(workload.precision, "bf16")
    points = [point for point in profile.attention if point.dtype == dtype and point.causal]
    forward = _ratio([p for p in points if p.direction == "forward"], op, setting, of)
    backward = _ratio([p for p in points if p.direction == "backward"], op, setting, of)
    return replace(time, forward_s=time.forward_s * forward, backward_s=time.backward_s * backward)


def _ratio(points: list[AttentionPoint], op: FusedAttention, setting: Setting, of: Time) -> FloatArray:
    """Measured over modelled seconds [N] of the point nearest to each layout."""
    if not points:
        return np.ones(len(setting.batch))
    logs = np.array([math.log(point.time_s / _modelled_s(point, of)) for point in points])
    rows = np.log2(setting.tokens * op.num_heads / setting.batch.tp)
    distance = np.stack(
        [
            np.abs(rows - math.log2(point.batch * point.seq_len * point.num_heads))
            + abs(math.log2(op.seq_len / point.seq_len))
            + abs(math.log2(op.qk_dim / point.head_dim))
            for point in points
        ]
    )
    nearest = np.argmin(distance, axis=0)
    octaves = np.take_along_axis(distance, nearest[None], axis=0)[0]
    return np.asarray(np.exp(logs[nearest] * 0.5 ** np.maximum(octaves - _NEAR_OCTAVES, 0.0)))


def _modelled_s(point: AttentionPoint, of: Time) -> float:
    shape = FusedAttention(
        "attention", point.num_heads, point.head_dim, point.head_dim, attended_tokens(point.seq_len, None), point.seq_len,
        point.seq_len, point.num_kv_heads,
    )  # fmt: skip
    one = np.ones(1, dtype=np.int64)
    time = of(shape, one * point.batch * point.seq_len, one, one)
    seconds: dict[Literal["forward", "backward"], FloatArray] = {"forward": time.forward_s, "backward": time.backward_s}
    return float(seconds[point.direction][0])
