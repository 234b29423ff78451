"""What a profile measured on a device, in place of what the model says. Nothing here runs where no profile was measured.

layers              A layer at some micro-batches and tensor-parallel shards. With t the measured and f the modelled seconds of a
                    point, operators of a layout with x tokens a rank take f(x) * exp(interpolated log(t / f)), linear in log x
                    and beyond the measured sizes as at the nearest, from the points of the nearest tp. Between two measured
                    lengths of sequences it is interpolated in log length; there is none beyond the longest. Communication is
                    no part of a measured layer; what recompute repeats and context parallelism adds follows from the operators.
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
from typing import NamedTuple

import numpy as np

from ..schema import ClusterSpec, Layout, Workload
from ..schema.layout_table import LayoutTable
from ..schema.profile import AttentionPoint, Direction, LayerPoint, Profile
from ..schema.units import FloatArray, IntArray
from .coefficients import Scenario
from .hardware.collectives import Pair, pair_s, slowdown_law
from .layer.operators import CostInputs, FusedAttention, Layer, attended_tokens, kernels_of

_LARGE_COPY_BYTES = 2**24
"""Bytes from which a copy between host and device shows its bandwidth."""

_ADAM_BYTES = 28
"""Parameter, gradient and two states read, all but the gradient written, in fp32."""

_NEAR_OCTAVES = 2.0
_MIN_SLOWDOWN = 0.01
"""Of a pair that the law does not slow down: what its ratio multiplies."""

_NUM_HALVINGS = 50
_DTYPES = {"fp32": "fp32", "tf32": "fp32", "fp16-mixed": "fp16"}

PassSeconds = Callable[[Layer, CostInputs], tuple[FloatArray, FloatArray]]
"""Modelled forward and backward seconds [N] of a layer, host included and communication not."""


def layer_ratios(layer: Layer, inputs: CostInputs, modelled_s: PassSeconds) -> tuple[FloatArray, FloatArray] | None:
    """Return measured over modelled seconds of a layer's operators, forward and backward [N]; None without points of it.

    Those count that have the workload's engine and dtype and no recompute; of half a block its block's. Sequences of the workload's
    length, or where several lengths were measured those next to it.
    """
    profile, workload = inputs.cluster.profile, inputs.workload
    if profile is None or workload.adapters is not None:
        return None
    dtype, undivided = workload.precision.removesuffix("-mixed"), _undivided(layer)
    points = [
        point
        for point in profile.layers
        if point.engine == workload.engine
        and point.recompute == "none"
        and point.hidden_dim == inputs.hidden_dim
        and point.dtype == dtype
        and (_undivided(point.layer) == undivided or layer in getattr(point.layer, "halves", ()))
    ]
    by_length: dict[int, list[LayerPoint]] = {}
    for point in points:
        by_length.setdefault(point.seq_len, []).append(point)
    length = workload.attended_len
    longer = [entry for entry in by_length if entry >= length]
    shorter = [entry for entry in by_length if entry <= length]
    if not longer or (not shorter and len(by_length) == 1):
        return None
    high, low = min(longer), max(shorter, default=min(longer))
    share = math.log(length / low) / math.log(high / low) if high > low else 0.0
    below, above = (_ratios_of_length(by_length[entry], inputs, modelled_s) for entry in (low, high))
    return below[0] ** (1 - share) * above[0] ** share, below[1] ** (1 - share) * above[1] ** share


@lru_cache(maxsize=256)
def _undivided(layer: Layer) -> Layer:
    """Return a layer without what a placement on some cluster divides of it: it was measured before."""
    if (traced := layer.counted) is None:
        return layer
    products = tuple(product.replace(shard="none") for product in traced.products)
    attentions = tuple(attention.replace(split=False) for attention in traced.attentions)
    return layer.replace(traced=traced.replace(products=products, attentions=attentions, split=None))


def _ratios_of_length(
    points: Sequence[LayerPoint], inputs: CostInputs, modelled_s: PassSeconds
) -> tuple[FloatArray, FloatArray]:
    """Return measured over modelled seconds, forward and backward [N], by points of one length."""
    # The layouts that the points stand for: one rank's shard, no data parallelism.
    layouts = [Layout(tp=point.tp, micro_batch_size=point.micro_batch_size) for point in points]
    size = int(np.lcm.reduce([point.micro_batch_size for point in points]))
    scenario = _of_length(inputs.scenario, points[0].seq_len)
    table = LayoutTable.from_layouts(layouts, size)
    forward_s, backward_s = modelled_s(points[0].layer, replace(inputs, layouts=table, scenario=scenario))
    return _layer_ratio(points, forward_s, "forward", inputs), _layer_ratio(points, backward_s, "backward", inputs)


@lru_cache(maxsize=64)
def _of_length(scenario: Scenario, seq_len: int) -> Scenario:
    """Return the scenario with entire sequences of a length; it is a key of caches, and therefore made once."""
    workload = scenario.workload
    same = workload.replace(seq_len=seq_len, document_len=None, lengths=None)
    return scenario if same == workload else replace(scenario, workload=same)


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
        of_shard = [(point, s) for point, s in pairs if point.tp == tp]
        logs = np.log([point.time_s / s for point, s in of_shard])
        tokens = np.log([float(point.micro_batch_size * point.seq_len) for point, _ in of_shard])
        sizes, size_idx = np.unique(tokens, return_inverse=True)
        means = np.bincount(size_idx, logs) / np.bincount(size_idx)  # several of one size count as their mean
        rows: IntArray = np.flatnonzero(nearest == tp)
        ratio[rows] = np.exp(np.interp(np.log(inputs.tokens[rows]), sizes, means))
    return ratio


def attention_ratio(
    op: FusedAttention,
    direction: Direction,
    inputs: CostInputs,
    modelled_s: Callable[[FusedAttention, int, Direction], float],
) -> FloatArray:
    """Return measured over modelled seconds [N] of fused attention, from the point nearest to each layout; 1 without points.

    ``modelled_s`` gives the seconds of one pass of an attention for so many tokens on one rank.
    """
    profile, dtype = inputs.cluster.profile, _DTYPES.get(inputs.workload.precision, "bf16")
    measured = profile.attention if profile is not None else ()
    points = [p for p in measured if p.dtype == dtype and p.causal and p.direction == direction]
    if not points:
        return np.ones(len(inputs.layouts))

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


class MeasuredRates(NamedTuple):
    """What a profile says of the rates of a scenario; None or a ratio of 1 where it has no points.

    Attributes:
        elementwise_bytes_per_s: of memory-bound kernels in the workload's dtype.
        copy_bytes_per_s: of one device's copies while all devices of its node copy, the slower direction.
        host_update_bytes_per_s: traffic of one node's processors that update parameters, all its ranks at once.
        overlap_ratio: slow-down of kernels with a collective over the law's.
    """

    elementwise_bytes_per_s: float | None = None
    copy_bytes_per_s: float | None = None
    host_update_bytes_per_s: float | None = None
    overlap_ratio: float = 1.0


def rates_of_profile(profile: Profile, scenario: Scenario) -> MeasuredRates:
    """Return what a profile says of the rates of a scenario."""
    return MeasuredRates(
        _elementwise_bytes_per_s(profile, scenario.workload, scenario.cluster),
        _copy_bytes_per_s(profile, scenario.cluster),
        _host_update_bytes_per_s(profile, scenario.cluster),
        _overlap_ratio(profile, scenario),
    )


def _overlap_ratio(profile: Profile, scenario: Scenario) -> float:
    memory_bytes_per_s, ratios = scenario.cluster.weakest_device.memory_bandwidth_bytes_per_s, []
    for point in profile.overlaps:
        if set(point.streams) == {"compute", "collective"}:
            seconds = dict(zip(point.streams, point.alone_s, strict=True))
            sent = 2.0 * (point.group_size - 1) / point.group_size * point.collective_bytes
            law = floored(slowdown_law(sent / seconds["collective"] / memory_bytes_per_s, scenario.coefficients))
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


def floored(pair: Pair) -> Pair:
    """Return the slow-downs, none so small that no ratio could make it the measured one."""
    return Pair(max(float(pair.compute), _MIN_SLOWDOWN), max(float(pair.collective), _MIN_SLOWDOWN))


def _elementwise_bytes_per_s(profile: Profile, workload: Workload, cluster: ClusterSpec) -> float | None:
    """Return bytes over seconds of a copy, a gated activation and a norm at the largest size, where launches no longer count.

    A softmax is left out: attention is one kernel with points of its own.
    """
    kernels = kernels_of(workload, on_host=cluster.weakest_device.backend.is_host)
    traffic = {"copy": 2.0, "silu_mul": 5.0, "rms_norm": kernels.norm.forward}
    dtype = _DTYPES.get(workload.precision, "bf16")
    num_bytes = seconds = 0.0
    for op, count in traffic.items():
        of_op = [point for point in profile.elementwise if point.op == op and point.dtype == dtype]
        if not of_op:
            return None
        largest = max(of_op, key=lambda point: point.num_elements)
        num_bytes += count * largest.num_elements * (4 if dtype == "fp32" else 2)
        seconds += largest.time_s
    return num_bytes / seconds


def _copy_bytes_per_s(profile: Profile, cluster: ClusterSpec) -> float | None:
    large = [
        point
        for point in profile.host_copies
        if point.host_memory == "pinned"
        and point.devices_at_once == cluster.largest_node
        and point.size_bytes >= _LARGE_COPY_BYTES
    ]
    rates = [
        [point.size_bytes / point.time_s for point in large if point.direction == direction]
        for direction in ("to_device", "to_host")
    ]
    return min(median(rate) for rate in rates) if all(rates) and len(cluster.groups) == 1 else None


def _host_update_bytes_per_s(profile: Profile, cluster: ClusterSpec) -> float | None:
    of_node = [point for point in profile.cpu_adam if point.ranks_at_once == cluster.largest_node]
    if not of_node:
        return None
    largest = max(of_node, key=lambda point: point.num_parameters)
    return _ADAM_BYTES * largest.num_parameters * largest.ranks_at_once / largest.time_s


def measured_terms(profile: Profile, scenario: Scenario) -> tuple[str, ...]:
    """Return which terms of the estimate are read off the profile's points, in words with numbers."""
    cluster, rates, terms = scenario.cluster, rates_of_profile(profile, scenario), []
    together = [point for point in profile.overlaps if set(point.streams) == {"compute", "collective"}]
    if together and cluster.weakest_device.backend.has_streams:
        ratio = rates.overlap_ratio
        terms.append(f"slow-down of kernels beside collectives {ratio:.2f} times the law's ({len(together)} points)")
    if (rate := rates.elementwise_bytes_per_s) is not None:
        terms.append(f"elementwise kernels {rate / 1e9:.4g} GB/s ({len(profile.elementwise)} points)")
    if (copies := rates.copy_bytes_per_s) is not None:
        terms.append(f"host link {copies / 1e9:.4g} GB/s a device with all of a node copying")
    if (update := rates.host_update_bytes_per_s) is not None:
        terms.append(f"updates on the host {update / 1e9:.4g} GB/s a node")
    if profile.storage and cluster.groups[0].storage_bytes_per_s:
        terms.append(f"storage {cluster.groups[0].storage_bytes_per_s / 1e9:.4g} GB/s a node")
    if any(point.concurrent_groups > 1 and point.num_nodes > 1 for point in profile.collectives):
        terms.append("links between nodes with all groups of a node sending at once")
    return tuple(terms)
