"""What a profile's points beside products, attention and collectives say about a device and its host, in place of the coefficients.

streams at once     The law's slow-downs (a, b) of two streams times the ratio k that makes `overlap.pair_s` of the measured seconds
                    alone those measured together; the median of k over the points of the pair. ``k^2 a b <= 1``, beyond which
                    one after the other would be quicker.
elementwise         Bytes over seconds of the largest kernels of each kind, with the passes that the cost model counts for the kind.
host link           Pinned copies of all devices of a node at once, the slower direction.
host update         AdamW by all ranks of a node at once: 28 bytes of traffic for each fp32 parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np

from ..schema import ClusterSpec, Workload
from ..schema.profile_points import HostCopyPoint, OverlapPoint
from .coefficients import coefficients, remembered
from .kernels import kernels_of
from .layouts import FloatArray
from .overlap import STREAMS, Pair, law_of, pair_s

LARGE_COPY_BYTES = 2**24
"""Bytes from which a copy between host and device shows its bandwidth."""

ADAM_BYTES = 28
"""Parameter, gradient and two states read, all but the gradient written, in fp32."""

_LEAST_SLOWDOWN = 0.01
"""Of a pair that the law does not slow down: what its ratio multiplies."""

_HALVINGS = 50
_DTYPES = {"fp32": "fp32", "fp16": "fp16", "fp16-mixed": "fp16"}


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
            law = _at_least(law_of(sent / seconds["collective"] / memory_bytes_per_s))
            found.append(slowdown_ratio(law, seconds["compute"], seconds["collective"], point.together_s))
    return median(found) if found else 1.0


def measured_interference(slowdown: FloatArray, points: Sequence[OverlapPoint]) -> FloatArray:
    """Slow-downs [4, 4] of streams with those of the measured pairs scaled."""
    result = slowdown.copy()
    ratios: dict[tuple[int, int], list[float]] = {}
    for point in points:
        if len(point.streams) == 2 and {"compute", "collective"} != set(point.streams):
            i, j = (STREAMS.index(name) for name in point.streams)
            law = _at_least(Pair(slowdown[i, j], slowdown[j, i]))
            ratios.setdefault((i, j), []).append(
                slowdown_ratio(law, point.alone_s[0], point.alone_s[1], point.together_s)
            )
    for (i, j), found in ratios.items():
        law = _at_least(Pair(slowdown[i, j], slowdown[j, i]))
        result[i, j], result[j, i] = median(found) * float(law.compute), median(found) * float(law.collective)
    return result


def _at_least(pair: Pair) -> Pair:
    return Pair(max(float(pair.compute), _LEAST_SLOWDOWN), max(float(pair.collective), _LEAST_SLOWDOWN))


def elementwise_bytes_per_s(cluster: ClusterSpec, workload: Workload) -> float | None:
    """Rate of memory-bound kernels in the workload's dtype: their bytes over their seconds together; None without points.

    A copy, a gated activation and a norm, each at the largest size, where caches and launches no longer count. A softmax is left
    out: attention is one kernel with points of its own.
    """
    points = cluster.profile.elementwise if cluster.profile is not None else ()
    kernels = kernels_of(workload.engine, workload.fusion, on_cpu=cluster.weakest_device.vendor == "cpu")
    passes = {"copy": 2.0, "silu_mul": 5.0, "rms_norm": kernels.norm.forward}
    dtype = _DTYPES.get(workload.precision, "bf16")
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
    if together and cluster.weakest_device.backend == "nccl":
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
