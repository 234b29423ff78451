"""Streams that run at once and slow each other down: compute, collectives, copies; and rates of copies next to kernels.

While the streams of a set A are active, stream i advances at

    rate_i = 1 / (1 + sum_{j in A, j != i} slowdown[i, j])

of its isolated speed; when one ends, the others speed up. For two streams this has a closed form, `collectives.pair_s`. The
slow-downs follow from what two streams share, by one law for every machine ([overlap] of coefficients.toml, fitting/overlap.py):

    multiprocessors, memory       kernels by a collective, CHANNELS + TRAFFIC x; a collective by kernels, COMPUTE
                                  (`collectives.slowdown_law`); kernels by a copy, TRAFFIC x
                                  (x the bytes per second of the one that slows, over the memory's bandwidth)
    the host's memory and links   a copy and a collective that passes through the host, THROUGH_HOST each;
                                  copies of opposite directions, BOTH_WAYS each
    order                         where copies wait for everything before them (pageable memory, one queue of the device)
                                  a copy and anything else run one after the other: 1 each

Source of the model: Mist (Zhu et al., EuroSys 2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from ...schema import ClusterSpec, Workload
from ...schema.profile import OverlapPoint
from ...schema.units import BoolArray, FloatArray
from ..coefficients import Coefficients, Scenario
from ..measured import floored, slowdown_ratio
from .collectives import Pair, slowdown_law
from .host_memory import (
    host_link_bytes_per_s,
    host_update_bytes_per_param,
    host_update_bytes_per_s,
    storage_bytes_per_s,
)

STREAMS = ("compute", "collective", "to_device", "to_host")
"""Order of the streams in every array and matrix of this file."""

USABLE_HOST_MEMORY = 0.94
"""Of a host's memory: published runs fill 94 to 96 % of it with states (SuperOffload, 25e9 parameters in 480 GB; MegaTrain, 120e9
in 1.5 TB)."""


def interference(
    coefficients: Coefficients,
    traffic: FloatArray,
    *,
    through_host: BoolArray | bool = False,
    copies_wait: BoolArray | bool = False,
) -> FloatArray:
    """Return the slow-down of stream i (row) by stream j (column), [..., 4, 4] with an empty diagonal.

    Args:
        coefficients: those of [overlap].
        traffic: bytes that a device sends or copies per second over its memory's bandwidth, by stream [..., 4]; 0 for kernels.
        through_host: the collective crosses the host [...]: PCIe without links between devices, or a network.
        copies_wait: copies run by themselves [...].
    """
    law, pair = coefficients["overlap"], slowdown_law(traffic[..., 1], coefficients)
    shape = np.broadcast_shapes(traffic.shape[:-1], np.shape(through_host), np.shape(copies_wait))
    slowdown = np.zeros((*shape, len(STREAMS), len(STREAMS)))
    slowdown[..., 0, 1], slowdown[..., 1, 0] = pair
    slowdown[..., 0, 2:] = law["traffic"] * traffic[..., 2:]
    for copy, opposite in ((2, 3), (3, 2)):
        slowdown[..., copy, 1] = slowdown[..., 1, copy] = law["through_host"] * np.asarray(through_host)
        slowdown[..., copy, opposite] = law["both_ways"]
        for other in (0, 1, opposite):
            pairs = slowdown[..., copy, other], slowdown[..., other, copy]
            slowdown[..., copy, other], slowdown[..., other, copy] = (np.where(copies_wait, 1.0, s) for s in pairs)
    return slowdown


def together_s(isolated_s: FloatArray, slowdown: FloatArray) -> FloatArray:
    """Return the seconds until the last of some streams ends that start at once.

    Args:
        isolated_s: seconds of each stream by itself, streams on the last axis [..., S]; 0 for a stream that is not present.
        slowdown: of row by column [..., S, S].
    """
    remaining, passed = isolated_s.astype(np.float64), np.zeros(isolated_s.shape[:-1])
    for _ in range(isolated_s.shape[-1]):
        active = remaining > 0
        stretch = 1.0 + np.einsum("...ij,...j->...i", slowdown, active.astype(np.float64))
        until_end = np.where(active, remaining * stretch, np.inf)
        first = np.argmin(until_end, axis=-1, keepdims=True)
        elapsed = np.take_along_axis(until_end, first, axis=-1)
        elapsed = np.where(np.isfinite(elapsed), elapsed, 0.0)
        remaining = np.maximum(remaining - elapsed / stretch, 0.0)
        np.put_along_axis(remaining, first, 0.0, axis=-1)
        passed = passed + elapsed[..., 0]
    return np.asarray(passed)


def measured_interference(slowdown: FloatArray, points: Sequence[OverlapPoint]) -> FloatArray:
    """Return slow-downs [4, 4] of streams with those of the measured pairs scaled."""
    result = slowdown.copy()
    ratios: dict[tuple[int, int], list[float]] = {}
    for point in points:
        if len(point.streams) == 2 and {"compute", "collective"} != set(point.streams):
            i, j = (STREAMS.index(name) for name in point.streams)
            law = floored(Pair(slowdown[i, j], slowdown[j, i]))
            ratio = slowdown_ratio(law, point.alone_s[0], point.alone_s[1], point.together_s)
            ratios.setdefault((i, j), []).append(ratio)
    for (i, j), of_pair in ratios.items():
        law, ratio = floored(Pair(slowdown[i, j], slowdown[j, i])), median(of_pair)
        result[i, j], result[j, i] = ratio * float(law.compute), ratio * float(law.collective)
    return result


@dataclass(frozen=True, kw_only=True)
class HostRates:
    """One rank's rates, bytes per second; seconds of compute lost for each of a copy; host seconds to update one parameter.

    Attributes:
        link_bytes_per_s: of one direction alone; to_host_bytes_per_s, to_device_bytes_per_s: of copies that run with kernels.
        duplex: copies of both directions at once reach 1 + duplex of one.
        memory_bytes: of the host that the rank may use; infinite where it is not known.
    """

    link_bytes_per_s: float
    to_host_bytes_per_s: float
    to_device_bytes_per_s: float
    duplex: float
    compute_lost_to_host: float
    compute_lost_to_device: float
    update_s_per_param: float
    storage_bytes_per_s: float
    memory_bytes: float


def host_rates(
    workload: Workload,
    cluster: ClusterSpec,
    *,
    memory_bytes: float | None = None,
    coefficients: Coefficients | None = None,
) -> HostRates:
    """Return the rates of the weakest device's host; ``memory_bytes`` of a node stand in for what the cluster says."""
    scenario, ranks = Scenario.build(workload, cluster, coefficients), cluster.largest_node
    line = float(host_link_bytes_per_s(np.zeros(1), scenario)[0])
    share = line / cluster.weakest_device.memory_bandwidth_bytes_per_s
    slow = interference(scenario.coefficients, np.array([0.0, 0.0, share, share]))
    if cluster.profile is not None:
        slow = measured_interference(slow, cluster.profile.overlaps)
    compute, to_device, to_host = (STREAMS.index(name) for name in ("compute", "to_device", "to_host"))
    both = 1 / (1 + slow[to_device, to_host]) + 1 / (1 + slow[to_host, to_device])
    if memory_bytes is None:
        sizes = [group.host_memory_bytes for group in cluster.groups]
        memory_bytes = USABLE_HOST_MEMORY * min(size or 0.0 for size in sizes) if all(sizes) else np.inf
    is_host = cluster.weakest_device.backend.is_host  # a copy within one memory takes cores from the compute
    return HostRates(
        link_bytes_per_s=line,
        to_host_bytes_per_s=line / (1 + float(slow[to_host, compute])),
        to_device_bytes_per_s=line / (1 + float(slow[to_device, compute])),
        duplex=0.0 if is_host else float(np.clip(both - 1, 0.0, 1.0)),
        compute_lost_to_host=min(float(slow[compute, to_host]), 0.5),
        compute_lost_to_device=min(float(slow[compute, to_device]), 0.5),
        update_s_per_param=host_update_bytes_per_param(workload) * ranks / host_update_bytes_per_s(scenario),
        storage_bytes_per_s=storage_bytes_per_s(scenario) / ranks,
        memory_bytes=memory_bytes / ranks,
    )
