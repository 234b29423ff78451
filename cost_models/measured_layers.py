"""Layers that were measured themselves: their seconds stand in for what the operators of the model add up to.

A profile holds a layer forward and backward at some micro-batches and tensor-parallel shards. With t the measured and f the
modelled seconds of a point, operators of a layout with x tokens a rank take f(x) * exp(interpolated log(t / f)), linear in log x
and beyond the measured sizes as at the nearest, from the points of the nearest tp. So a measured size has the measured time, and in
between the model gives the shape. What recompute repeats, and what context parallelism adds, follows from the operators;
communication is no part of a measured layer and is added as always.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ..schema import Layout
from ..schema.profile_points import Direction, LayerPoint
from .compute import OperatorTime
from .layouts import FloatArray, IntArray, LayoutBatch
from .operators import Layer
from .setting import Setting

_DTYPES = {"bf16-mixed": ("bf16",), "bf16": ("bf16",), "fp16-mixed": ("fp16",), "fp32": ("fp32", "tf32")}


def as_measured(
    times: list[OperatorTime],
    layer: Layer,
    setting: Setting,
    modelled: Callable[[Setting], tuple[FloatArray, FloatArray]],
) -> list[OperatorTime]:
    """The times of a layer's operators, corrected by the profile's points of this layer; the same without any.

    Args:
        modelled: seconds of the layer forward and backward, host included and communication not, under a batch of layouts.
    """
    points = _points_of(layer, setting)
    if not points:
        return times
    forward, backward = modelled(_setting_of(points, setting))
    there = _ratio(points, forward, "forward", setting)
    back = _ratio(points, backward, "backward", setting)
    # Where the host's dispatch adds to the device's time the measured one includes it.
    adds = setting.cluster.weakest_device.vendor == "cpu"
    return [
        replace(
            time,
            forward_s=time.forward_s * there,
            backward_s=time.backward_s * back,
            weight_s=time.weight_s * back,
            forward_dispatches=time.forward_dispatches * (there if adds else 1),
            backward_dispatches=time.backward_dispatches * (back if adds else 1),
        )
        for time in times
    ]


def _points_of(layer: Layer, setting: Setting) -> list[LayerPoint]:
    """Measured under this workload's sequence length and dtype, without recompute."""
    profile, workload = setting.cluster.profile, setting.workload
    if profile is None or not profile.layers or workload.engine != "fsdp2" or workload.adapters is not None:
        return []
    dtypes = _DTYPES.get(workload.precision, ())
    return [
        point
        for point in profile.layers
        if point.recompute == "none"
        and point.hidden_dim == setting.hidden_dim
        and point.seq_len == workload.seq_len
        and point.dtype in dtypes
        and point.layer == layer
    ]


def _setting_of(points: Sequence[LayerPoint], setting: Setting) -> Setting:
    """The layouts that the points stand for: one rank's shard, no data parallelism."""
    layouts = [Layout(tp=point.tp, micro_batch_size=point.micro_batch_size) for point in points]
    size = int(np.lcm.reduce([point.micro_batch_size for point in points]))
    return replace(setting, batch=LayoutBatch.of(layouts, size))


def _ratio(points: Sequence[LayerPoint], modelled_s: FloatArray, direction: Direction, setting: Setting) -> FloatArray:
    """Measured over modelled seconds [N], from the points of a direction with what the model says of each."""
    pairs = [(point, s) for point, s in zip(points, modelled_s, strict=True) if point.direction == direction]
    batch, found = setting.batch, np.ones(len(setting.batch))
    if not pairs:
        return found
    shards = np.unique([point.tp for point, _ in pairs])
    nearest = shards[np.argmin(np.abs(np.log(shards)[:, None] - np.log(batch.tp)[None, :]), axis=0)]
    for tp in shards:
        tokens, logs = _curve([pair for pair in pairs if pair[0].tp == tp])
        rows: IntArray = np.flatnonzero(nearest == tp)
        found[rows] = np.exp(np.interp(np.log(setting.tokens[rows]), tokens, logs))
    return found


def _curve(points: Sequence[tuple[LayerPoint, float]]) -> tuple[FloatArray, FloatArray]:
    """Log tokens, ascending, and log ratio of the points of one shard; several of one size count as their mean."""
    tokens = np.log([float(point.micro_batch_size * point.seq_len) for point, _ in points])
    logs = np.log([point.time_s / seconds for point, seconds in points])
    sizes, which = np.unique(tokens, return_inverse=True)
    return sizes, np.asarray(np.bincount(which, logs) / np.bincount(which))
