"""What a profile measured on a device, in place of what the model says: one function for each kind of cost that consults it.

layers              A layer at some micro-batches and tensor-parallel shards. With t the measured and f the modelled seconds of a
                    point, operators of a layout with x tokens a rank take f(x) * exp(interpolated log(t / f)), linear in log x
                    and beyond the measured sizes as at the nearest, from the points of the nearest tp. Communication is no part
                    of a measured layer; what recompute repeats and context parallelism adds follows from the operators.
attention           Modelled seconds times measured over modelled of the nearest shape: by the logarithms of sequence length, head
                    width and of all rows together, each direction by itself. Two octaves count as another regime: beyond, the
                    ratio fades to one by half for each further octave.
streams at once     The law's slow-downs (a, b) of two streams times the ratio k that makes `overlap.pair_s` of the isolated
                    measured seconds those measured together; the median of k over the points of the pair. ``k^2 a b <= 1``,
                    beyond which one after the other would be quicker.
elementwise         Bytes over seconds of the largest kernels of each kind, with the passes that the cost model counts for the kind.
host link           Pinned copies of all devices of a node at once, the slower direction.
host update         AdamW by all ranks of a node at once: 28 bytes of traffic for each fp32 parameter.

Products correct the learned model (learned/calibration.py), collectives are read off their points (hardware/collectives.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import median

import numpy as np

from ..schema import ClusterSpec, Layout, Workload
from ..schema.layout_table import LayoutTable
from ..schema.profile import AttentionPoint, Direction, HostCopyPoint, LayerPoint, OverlapPoint
from ..schema.units import FloatArray, IntArray
from .coefficients import Coefficients, Scenario
from .hardware.overlap import STREAMS, Pair, pair_s, slowdown_law
from .layer.operators import CostInputs, FusedAttention, Layer, attended_tokens, kernels_of

LARGE_COPY_BYTES = 2**24
"""Bytes from which a copy between host and device shows its bandwidth."""

ADAM_BYTES = 28
"""Parameter, gradient and two states read, all but the gradient written, in fp32."""

_NEAR_OCTAVES = 2.0
_MIN_SLOWDOWN = 0.01
"""Of a pair that the law does not slow down: what its ratio multiplies."""

_NUM_HALVINGS = 50
_DTYPES = {"fp32": "fp32", "fp16": "fp16", "fp16-mixed": "fp16"}
_LAYER_DTYPES = {"bf16-mixed": ("bf16",), "bf16": ("bf16",), "fp16-mixed": ("fp16",), "fp32": ("fp32", "tf32")}

PassSeconds = Callable[[CostInputs], tuple[FloatArray, FloatArray]]
"""Modelled forward and backward seconds [N] of one layer, host included and communication not."""


def layer_ratios(layer: Layer, inputs: CostInputs, modelled_s: PassSeconds) -> tuple[FloatArray, FloatArray] | None:
    """Return measured over modelled seconds of a layer's operators, forward and backward [N]; None without points of it."""
    points = _layer_points(layer, inputs)
    if not points:
        return None
    # The layouts that the points stand for: one rank's shard, no data parallelism.
    layouts = [Layout(tp=point.tp, micro_batch_size=point.micro_batch_size) for point in points]
    size = int(np.lcm.reduce([point.micro_batch_size for point in points]))
    forward_s, backward_s = modelled_s(replace(inputs, layouts=LayoutTable.from_layouts(layouts, size)))
    return _layer_ratio(points, forward_s, "forward", inputs), _layer_ratio(points, backward_s, "backward", inputs)


def _layer_points(layer: Layer, inputs: CostInputs) -> list[LayerPoint]:
    """Return the points of a layer under this workload's sequence length and dtype, without recompute."""
    profile, workload = inputs.cluster.profile, inputs.workload
    is_ours = workload.engine_facts.is_own_runtime and workload.adapters is None
    if profile is None or not profile.layers or not is_ours:
        return []
    dtypes = _LAYER_DTYPES.get(workload.precision, ())
    return [
        point
        for point in profile.layers
        if point.recompute == "none"
        and point.hidden_dim == inputs.hidden_dim
        and point.seq_len == workload.seq_len
        and point.dtype in dtypes
        and point.layer == layer
    ]


def _layer_ratio(
    points: Sequence[LayerPoint], modelled_s: FloatArray, direction: Direction, inputs: CostInputs
) -> FloatArray:
    """Return measured over modelled seconds [N] of one direction, given the modelled seconds of each point."""
    pairs = [(point, s) for point, s in zip(points, modelled_s, strict=True) if point.direction == direction]
    ratio = np.ones(len(inputs.layouts))
    if not pairs:
        return ratio
    shards = np.unique([point.tp for point, _ in pairs])
    nearest = shards[np.argmin(np.abs(np.log(shards)[:, None] - np.log(inputs.layouts.tp)[None, :]), axis=0)]
    for tp in shards:
        log_tokens, log_ratios = _curve([pair for pair in pairs if pair[0].tp == tp])
        rows: IntArray = np.flatnonzero(nearest == tp)
        ratio[rows] = np.exp(np.interp(np.log(inputs.tokens[rows]), log_tokens, log_ratios))
    return ratio


def _curve(points: Sequence[tuple[LayerPoint, float]]) -> tuple[FloatArray, FloatArray]:
    """Return log tokens, ascending, and log ratio of the points of one shard; several of one size count as their mean."""
    tokens = np.log([float(point.micro_batch_size * point.seq_len) for point, _ in points])
    logs = np.log([point.time_s / seconds for point, seconds in points])
    sizes, size_idx = np.unique(tokens, return_inverse=True)
    return sizes, np.asarray(np.bincount(size_idx, logs) / np.bincount(size_idx))


def attention_ratio(
    op: FusedAttention,
    direction: Direction,
    inputs: CostInputs,
    modelled_s: Callable[[FusedAttention, int, Direction], float],
) -> FloatArray | None:
    """Return measured over modelled seconds [N] of fused attention, from the point nearest to each layout; None without points.

    Args:
        op: the attention of the layouts.
        direction: which pass.
        inputs: the layouts.
        modelled_s: seconds of an attention for so many tokens on one rank.
    """
    profile, dtype = inputs.cluster.profile, _DTYPES.get(inputs.workload.precision, "bf16")
    measured = profile.attention if profile is not None else ()
    points = [p for p in measured if p.dtype == dtype and p.causal and p.direction == direction]
    if not points:
        return None

    def log_ratio(point: AttentionPoint) -> float:
        shape = FusedAttention(
            "attention", point.num_heads, point.head_dim, point.head_dim, attended_tokens(point.seq_len, None),
            point.seq_len, point.seq_len, point.num_kv_heads,
        )  # fmt: skip
        return math.log(point.time_s / modelled_s(shape, point.batch * point.seq_len, direction))

    logs = np.array([log_ratio(point) for point in points])
    rows = np.log2(inputs.tokens * op.num_heads / inputs.layouts.tp)
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


def overlap_ratio(scenario: Scenario) -> float:
    """Return the slow-down of kernels with a collective, measured over the law; 1 without such a point."""
    profile = scenario.cluster.profile
    if profile is None or not profile.overlaps:
        return 1.0
    memory_bytes_per_s = scenario.cluster.weakest_device.memory_bandwidth_bytes_per_s
    return _overlap_ratio(profile.overlaps, memory_bytes_per_s, scenario.coefficients)


@lru_cache(maxsize=16)
def _overlap_ratio(points: tuple[OverlapPoint, ...], memory_bytes_per_s: float, coefficients: Coefficients) -> float:
    ratios = []
    for point in points:
        if set(point.streams) == {"compute", "collective"}:
            seconds = dict(zip(point.streams, point.alone_s, strict=True))
            sent = 2.0 * (point.group_size - 1) / point.group_size * point.collective_bytes
            law = _floored(slowdown_law(sent / seconds["collective"] / memory_bytes_per_s, coefficients))
            ratios.append(slowdown_ratio(law, seconds["compute"], seconds["collective"], point.together_s))
    return median(ratios) if ratios else 1.0


def slowdown_ratio(pair: Pair, first_s: float, second_s: float, together: float) -> float:
    """Return k, so that streams slowed down by ``(k a, k b)`` take as long together as measured; at its bounds where none does."""
    a, b = float(pair.compute), float(pair.collective)
    low, high = 0.0, float(1.0 / np.sqrt(a * b))
    isolated = np.array([first_s]), np.array([second_s])
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        is_short = float(pair_s(*isolated, Pair(middle * a, middle * b))[0]) < together
        low, high = (middle, high) if is_short else (low, middle)
    return (low + high) / 2


def interference(slowdown: FloatArray, points: Sequence[OverlapPoint]) -> FloatArray:
    """Return slow-downs [4, 4] of streams with those of the measured pairs scaled."""
    result = slowdown.copy()
    ratios: dict[tuple[int, int], list[float]] = {}
    for point in points:
        if len(point.streams) == 2 and {"compute", "collective"} != set(point.streams):
            i, j = (STREAMS.index(name) for name in point.streams)
            law = _floored(Pair(slowdown[i, j], slowdown[j, i]))
            ratio = slowdown_ratio(law, point.alone_s[0], point.alone_s[1], point.together_s)
            ratios.setdefault((i, j), []).append(ratio)
    for (i, j), of_pair in ratios.items():
        law, ratio = _floored(Pair(slowdown[i, j], slowdown[j, i])), median(of_pair)
        result[i, j], result[j, i] = ratio * float(law.compute), ratio * float(law.collective)
    return result


def _floored(pair: Pair) -> Pair:
    return Pair(max(float(pair.compute), _MIN_SLOWDOWN), max(float(pair.collective), _MIN_SLOWDOWN))


def elementwise_bytes_per_s(cluster: ClusterSpec, workload: Workload) -> float | None:
    """Return the rate of memory-bound kernels in the workload's dtype: their bytes over their seconds; None without points.

    A copy, a gated activation and a norm, each at the largest size, where caches and launches no longer count. A softmax is left
    out: attention is one kernel with points of its own.
    """
    points = cluster.profile.elementwise if cluster.profile is not None else ()
    kernels = kernels_of(workload, on_host=cluster.weakest_device.backend.is_host)
    traffic = {"copy": 2.0, "silu_mul": 5.0, "rms_norm": kernels.norm.forward}
    dtype = _DTYPES.get(workload.precision, "bf16")
    num_bytes = seconds = 0.0
    for op, count in traffic.items():
        of_op = [point for point in points if point.op == op and point.dtype == dtype]
        if not of_op:
            return None
        largest = max(of_op, key=lambda point: point.num_elements)
        num_bytes += count * largest.num_elements * (4 if dtype == "fp32" else 2)
        seconds += largest.time_s
    return num_bytes / seconds


def copy_bytes_per_s(cluster: ClusterSpec) -> float | None:
    """Return the rate of one device's copies while all devices of its node copy, the slower direction; None without points."""
    points = cluster.profile.host_copies if cluster.profile is not None else ()
    if not points or len(cluster.groups) > 1:
        return None
    rates = [pinned_rates(points, direction, cluster.largest_node) for direction in ("to_device", "to_host")]
    return min(median(rate) for rate in rates) if all(rates) else None


def pinned_rates(points: Sequence[HostCopyPoint], direction: str, devices_at_once: int) -> list[float]:
    """Return the bytes/s of one device, of large pinned copies in one direction."""
    return [
        point.size_bytes / point.time_s
        for point in points
        if point.direction == direction
        and point.host_memory == "pinned"
        and point.devices_at_once == devices_at_once
        and point.size_bytes >= LARGE_COPY_BYTES
    ]


def host_update_bytes_per_s(cluster: ClusterSpec) -> float | None:
    """Return the traffic of one node's processors that update parameters, measured by all its ranks at once; None without."""
    points = cluster.profile.cpu_adam if cluster.profile is not None else ()
    of_node = [point for point in points if point.ranks_at_once == cluster.largest_node]
    if not of_node:
        return None
    largest = max(of_node, key=lambda point: point.num_parameters)
    return ADAM_BYTES * largest.num_parameters * largest.ranks_at_once / largest.time_s


def measured_terms(
    cluster: ClusterSpec, workload: Workload, coefficients: Coefficients | None = None
) -> tuple[str, ...]:
    """Return which terms of the estimate are read off the profile's points, in words with numbers."""
    profile = cluster.profile
    if profile is None:
        return ()
    terms = []
    together = [point for point in profile.overlaps if set(point.streams) == {"compute", "collective"}]
    if together and cluster.weakest_device.backend.has_streams:
        ratio = overlap_ratio(Scenario.build(workload, cluster, coefficients))
        terms.append(f"slow-down of kernels beside collectives {ratio:.2f} times the law's ({len(together)} points)")
    if (rate := elementwise_bytes_per_s(cluster, workload)) is not None:
        terms.append(f"elementwise kernels {rate / 1e9:.4g} GB/s ({len(profile.elementwise)} points)")
    if (copies := copy_bytes_per_s(cluster)) is not None:
        terms.append(f"host link {copies / 1e9:.4g} GB/s a device with all of a node copying")
    if (update := host_update_bytes_per_s(cluster)) is not None:
        terms.append(f"updates on the host {update / 1e9:.4g} GB/s a node")
    if profile.storage and cluster.groups[0].storage_bytes_per_s:
        terms.append(f"storage {cluster.groups[0].storage_bytes_per_s / 1e9:.4g} GB/s a node")
    if any(point.concurrent_groups > 1 and point.num_nodes > 1 for point in profile.collectives):
        terms.append("links between nodes with all groups of a node sending at once")
    return tuple(terms)
