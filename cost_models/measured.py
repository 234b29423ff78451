"""Layers that were measured themselves: their seconds stand in for what the operators of the model add up to.

A profile holds a layer forward and backward at some micro-batches and tensor-parallel shards. With t the measured and f the
modelled seconds of a point, operators of a layout with x tokens a rank take f(x) * exp(interpolated log(t / f)), linear in log x
and beyond the measured sizes as at the nearest, from the points of the nearest tp. So a measured size has the measured time, and in
between the model gives the shape. What recompute repeats, and what context parallelism adds, follows from the operators;
communication is no part of a measured layer and is added as always.

Fused attention as it was measured on a device: the model's seconds times measured over modelled of the nearest measured shape.

Nearest by the logarithms of sequence length, head width and of all rows together; each direction by itself. Two octaves count as
another regime (a kernel bound by its launch, or one that does not skip what the mask excludes): beyond, the ratio fades to one by
half for each further octave.

What a profile's points beside products, attention and collectives say about a device and its host, in place of the coefficients.

streams at once     The law's slow-downs (a, b) of two streams times the ratio k that makes `overlap.pair_s` of the measured seconds
                    alone those measured together; the median of k over the points of the pair. ``k^2 a b <= 1``, beyond which
                    one after the other would be quicker.
elementwise         Bytes over seconds of the largest kernels of each kind, with the passes that the cost model counts for the kind.
host link           Pinned copies of all devices of a node at once, the slower direction.
host update         AdamW by all ranks of a node at once: 28 bytes of traffic for each fp32 parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Literal

import numpy as np

from ..schema import ClusterSpec, Layout, Workload
from ..schema.arrays import FloatArray, IntArray
from ..schema.layout_table import LayoutTable
from ..schema.profile import AttentionPoint, Direction, HostCopyPoint, LayerPoint, OverlapPoint
from .coefficients import coefficients, remembered
from .hardware.compute import OperatorTime
from .hardware.kernels import kernels_of_engine
from .hardware.overlap import STREAMS, Pair, pair_s, slowdown_law
from .layer.operators import CostInputs, FusedAttention, Layer, Operator, attended_tokens

_LAYER_DTYPES = {"bf16-mixed": ("bf16",), "bf16": ("bf16",), "fp16-mixed": ("fp16",), "fp32": ("fp32", "tf32")}


def as_measured(
    times: list[OperatorTime],
    layer: Layer,
    setting: CostInputs,
    modelled: Callable[[CostInputs], tuple[FloatArray, FloatArray]],
) -> list[OperatorTime]:
    """The times of a layer's operators, corrected by the profile's points of this layer; the same without any.

    Args:
        modelled: seconds of the layer forward and backward, host included and communication not, under a batch of layouts.
    """
    points = _points_of(layer, setting)
    if not points:
        return times
    forward, backward = modelled(_setting_of(points, setting))
    there = _layer_ratio(points, forward, "forward", setting)
    back = _layer_ratio(points, backward, "backward", setting)
    # Where the host's dispatch adds to the device's time the measured one includes it.
    adds = setting.cluster.weakest_device.backend.is_host
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


def _points_of(layer: Layer, setting: CostInputs) -> list[LayerPoint]:
    """Measured under this workload's sequence length and dtype, without recompute."""
    profile, workload = setting.cluster.profile, setting.workload
    if (
        profile is None
        or not profile.layers
        or not workload.engine_facts.is_own_runtime
        or workload.adapters is not None
    ):
        return []
    dtypes = _LAYER_DTYPES.get(workload.precision, ())
    return [
        point
        for point in profile.layers
        if point.recompute == "none"
        and point.hidden_dim == setting.hidden_dim
        and point.seq_len == workload.seq_len
        and point.dtype in dtypes
        and point.layer == layer
    ]


def _setting_of(points: Sequence[LayerPoint], setting: CostInputs) -> CostInputs:
    """The layouts that the points stand for: one rank's shard, no data parallelism."""
    layouts = [Layout(tp=point.tp, micro_batch_size=point.micro_batch_size) for point in points]
    size = int(np.lcm.reduce([point.micro_batch_size for point in points]))
    return replace(setting, batch=LayoutTable.from_layouts(layouts, size))


def _layer_ratio(
    points: Sequence[LayerPoint], modelled_s: FloatArray, direction: Direction, setting: CostInputs
) -> FloatArray:
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


_NEAR_OCTAVES = 2.0


_ATTENTION_DTYPES = {"bf16-mixed": "bf16", "bf16": "bf16", "fp16-mixed": "fp16", "fp32": "fp32"}


Time = Callable[..., OperatorTime]


def with_measured_attention(op: Operator, time: OperatorTime, setting: CostInputs, of: Time) -> OperatorTime:
    """The time of an operator, corrected if it is fused attention of which the profile has points.

    Args:
        of: time of an operator for tokens, tp and sequence parallelism.
    """
    profile, workload = setting.cluster.profile, setting.workload
    if not isinstance(op, FusedAttention) or profile is None or not profile.attention:
        return time
    dtype = _ATTENTION_DTYPES.get(workload.precision, "bf16")
    points = [point for point in profile.attention if point.dtype == dtype and point.causal]
    forward = _attention_ratio([p for p in points if p.direction == "forward"], op, setting, of)
    backward = _attention_ratio([p for p in points if p.direction == "backward"], op, setting, of)
    return replace(time, forward_s=time.forward_s * forward, backward_s=time.backward_s * backward)


def _attention_ratio(points: list[AttentionPoint], op: FusedAttention, setting: CostInputs, of: Time) -> FloatArray:
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


LARGE_COPY_BYTES = 2**24
"""Bytes from which a copy between host and device shows its bandwidth."""


ADAM_BYTES = 28
"""Parameter, gradient and two states read, all but the gradient written, in fp32."""


_LEAST_SLOWDOWN = 0.01
"""Of a pair that the law does not slow down: what its ratio multiplies."""


_HALVINGS = 50


_ELEMENTWISE_DTYPES = {"fp32": "fp32", "fp16": "fp16", "fp16-mixed": "fp16"}


def slowdown_ratio(pair: Pair, first_s: float, second_s: float, together: float) -> float:
    """k, so that streams slowed down by ``(k a, k b)`` take as long together as was measured; at its bounds where none does."""
    a, b = float(pair.compute), float(pair.collective)
    low, high = 0.0, float(1.0 / np.sqrt(a * b))
    alone = np.array([first_s]), np.array([second_s])
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        is_short = float(pair_s(*alone, Pair(middle * a, middle * b))[0]) < together
        low, high = (middle, high) if is_short else (low, middle)
    return (low + high) / 2


@remembered
def overlap_ratio(points: tuple[OverlapPoint, ...], memory_bytes_per_s: float) -> float:
    """Of kernels beside a collective, measured over the law; 1 without such a point."""
    found = []
    for point in points:
        if set(point.streams) == {"compute", "collective"}:
            seconds = dict(zip(point.streams, point.alone_s, strict=True))
            sent = 2.0 * (point.group_size - 1) / point.group_size * point.collective_bytes
            law = _floored(slowdown_law(sent / seconds["collective"] / memory_bytes_per_s))
            found.append(slowdown_ratio(law, seconds["compute"], seconds["collective"], point.together_s))
    return median(found) if found else 1.0


def measured_interference(slowdown: FloatArray, points: Sequence[OverlapPoint]) -> FloatArray:
    """Slow-downs [4, 4] of streams with those of the measured pairs scaled."""
    result = slowdown.copy()
    ratios: dict[tuple[int, int], list[float]] = {}
    for point in points:
        if len(point.streams) == 2 and {"compute", "collective"} != set(point.streams):
            i, j = (STREAMS.index(name) for name in point.streams)
            law = _floored(Pair(slowdown[i, j], slowdown[j, i]))
            ratios.setdefault((i, j), []).append(
                slowdown_ratio(law, point.alone_s[0], point.alone_s[1], point.together_s)
            )
    for (i, j), found in ratios.items():
        law = _floored(Pair(slowdown[i, j], slowdown[j, i]))
        result[i, j], result[j, i] = median(found) * float(law.compute), median(found) * float(law.collective)
    return result


def _floored(pair: Pair) -> Pair:
    return Pair(max(float(pair.compute), _LEAST_SLOWDOWN), max(float(pair.collective), _LEAST_SLOWDOWN))


def elementwise_bytes_per_s(cluster: ClusterSpec, workload: Workload) -> float | None:
    """Rate of memory-bound kernels in the workload's dtype: their bytes over their seconds together; None without points.

    A copy, a gated activation and a norm, each at the largest size, where caches and launches no longer count. A softmax is left
    out: attention is one kernel with points of its own.
    """
    points = cluster.profile.elementwise if cluster.profile is not None else ()
    kernels = kernels_of_engine(workload.engine, workload.fusion, on_cpu=cluster.weakest_device.backend.is_host)
    passes = {"copy": 2.0, "silu_mul": 5.0, "rms_norm": kernels.norm.forward}
    dtype = _ELEMENTWISE_DTYPES.get(workload.precision, "bf16")
    num_bytes = seconds = 0.0
    for op, count in passes.items():
        mine = [point for point in points if point.op == op and point.dtype == dtype]
        if not mine:
            return None
        largest = max(mine, key=lambda point: point.num_elements)
        num_bytes += count * largest.num_elements * (4 if dtype == "fp32" else 2)
        seconds += largest.time_s
    return num_bytes / seconds


def copy_bytes_per_s(cluster: ClusterSpec) -> float | None:
    """Of one device while all devices of its node copy, the slower direction; None where that was not measured."""
    points = cluster.profile.host_copies if cluster.profile is not None else ()
    if not points or len(cluster.groups) > 1:
        return None
    rates = [pinned_rates(points, direction, cluster.largest_node) for direction in ("to_device", "to_host")]
    return min(median(rate) for rate in rates) if all(rates) else None


def pinned_rates(points: Sequence[HostCopyPoint], direction: str, devices_at_once: int) -> list[float]:
    """Bytes/s of one device, of large pinned copies in one direction."""
    return [
        point.size_bytes / point.time_s
        for point in points
        if point.direction == direction
        and point.host_memory == "pinned"
        and point.devices_at_once == devices_at_once
        and point.size_bytes >= LARGE_COPY_BYTES
    ]


def host_update_bytes_per_s(cluster: ClusterSpec) -> float:
    """Traffic of one node's processors that update parameters, measured by all ranks of it at once, or the coefficient."""
    measured = measured_host_update_bytes_per_s(cluster)
    return float(coefficients()["offload"]["host_update_bytes_per_s"]) if measured is None else measured


def measured_host_update_bytes_per_s(cluster: ClusterSpec) -> float | None:
    """The same; None where no profile has it."""
    points = cluster.profile.cpu_adam if cluster.profile is not None else ()
    mine = [point for point in points if point.ranks_at_once == cluster.largest_node]
    if not mine:
        return None
    largest = max(mine, key=lambda point: point.num_parameters)
    return ADAM_BYTES * largest.num_parameters * largest.ranks_at_once / largest.time_s


def measured_terms(cluster: ClusterSpec, workload: Workload) -> tuple[str, ...]:
    """What of the estimate is read off the profile's points, in words with numbers."""
    profile = cluster.profile
    if profile is None:
        return ()
    found = []
    together = [point for point in profile.overlaps if set(point.streams) == {"compute", "collective"}]
    if together and cluster.weakest_device.backend.has_streams:
        ratio = overlap_ratio(profile.overlaps, cluster.weakest_device.memory_bandwidth_bytes_per_s)
        found.append(f"slow-down of kernels beside collectives {ratio:.2f} times the law's ({len(together)} points)")
    if (rate := elementwise_bytes_per_s(cluster, workload)) is not None:
        found.append(f"elementwise kernels {rate / 1e9:.4g} GB/s ({len(profile.elementwise)} points)")
    if (copies := copy_bytes_per_s(cluster)) is not None:
        found.append(f"host link {copies / 1e9:.4g} GB/s a device with all of a node copying")
    if any(point.ranks_at_once == cluster.largest_node for point in profile.cpu_adam):
        found.append(f"updates on the host {host_update_bytes_per_s(cluster) / 1e9:.4g} GB/s a node")
    if profile.storage and cluster.groups[0].storage_bytes_per_s:
        found.append(f"storage {cluster.groups[0].storage_bytes_per_s / 1e9:.4g} GB/s a node")
    if any(point.concurrent_groups > 1 and point.num_nodes > 1 for point in profile.collectives):
        found.append("links between nodes with all groups of a node sending at once")
    return tuple(found)
