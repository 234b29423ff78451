"""Seconds of collectives: latency and transfer on every link level a group spans, hierarchical.

A group of ``group`` ranks with ``stride`` (neighbours are ``stride`` ranks apart; ranks count devices node by node) has m_l members
inside one domain of level l, and f_l = m_l / m_{l-1} inner domains there. Bytes through each device's own link, S the full buffer:

| operation | innermost level | further out |
|---|---|---|
| all-gather, reduce-scatter | S (f - 1) / f | S (m - 1) / m / m_{l-1}: a ring for each device of a node, carrying everything |
| all-reduce | 2 S (f - 1) / f | twice that; S / m_{l-1} between two domains (trees, both directions at once) |
| all-to-all, S the buffer of one rank | S (m - 1) / group | S (m - m_{l-1}) / group |

Levels work at the same time on different chunks, so the slowest transfer decides; latencies add. On a level with measured
points or curves (collective_curves.py) these say how long x = bytes / line rate takes. Where bandwidth between nodes was measured
(node_links.py) the slowest pair that a group crosses, over the link's efficiency of a send, stands in for the line rate. Otherwise

    latency + x / efficiency + sqrt(ramp x)

with latency = base + per_hop log2(f): trees, exchanges, and everything inside a node. Between nodes all-gather and
reduce-scatter have rings only, of every member and without ramp. NCCL takes the better of two protocols: a ring_step for
every crossing between nodes (and IN_NODE_RING_STEP_S inside) at full bandwidth (Simple), or LL_STEP_RATIO of that at
LL_BANDWIDTH_RATIO of the bandwidth (LL).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...schema import ClusterSpec, LinkLevel
from ...schema.arrays import FloatArray, IntArray
from ...schema.profile import CollectivePoint
from .collective_curves import Op, Pattern, curve_s, link_curves, slowest_rates

LL_STEP_RATIO = 0.2
"""Ring step of NCCL's LL protocol over that of Simple between nodes: 2.7 of 14 us (NVIDIA/nccl src/graph/tuning.cc)."""

IN_NODE_RING_STEP_S = 3.4e-6
"""One step between devices of a node of a Simple ring that spans nodes (NVIDIA/nccl src/graph/tuning.cc, NVLink)."""

LL_BANDWIDTH_RATIO = 0.1
"""Bandwidth of LL rings across nodes over that of Simple: NCCL caps LL at 45 of 400 GB/s on two Hopper nodes (tuning.cc)."""

_SECONDS = tuple[FloatArray, FloatArray]
"""Latency and transfer."""


class Hops(NamedTuple):
    """Neighbours of groups [N] of ``group`` ranks, ``stride`` apart, send to one another: a ring, or a chain."""

    group: IntArray
    stride: IntArray
    pattern: Pattern


def collective_s(
    op: Op, size_bytes: FloatArray | float, group: IntArray, stride: IntArray, cluster: ClusterSpec
) -> FloatArray:
    """Seconds of one collective, arrays [N].

    Args:
        op: which one.
        size_bytes: the full buffer: what an all-gather ends with, a reduce-scatter or all-reduce starts with; of an all-to-all
            what one rank sends, its own part included.
        group: ranks of the group; 1 costs nothing.
        stride: distance between neighbouring ranks of the group.
        cluster: link levels.
    """
    shape = np.broadcast_shapes(np.shape(size_bytes), group.shape, stride.shape)
    size = np.broadcast_to(np.asarray(size_bytes, dtype=np.float64), shape)
    group, stride = np.broadcast_to(group, shape), np.broadcast_to(stride, shape)
    slowest, latency_s = np.zeros(shape), np.zeros(shape)
    inner, inner_domain = np.ones_like(group), 1
    for level in cluster.levels:
        # Groups that do not fill whole domains straddle them: only a common divisor is sure to stay inside. The last level has all.
        inside = np.gcd(np.maximum(level.domain_size // stride, 1), group)
        members = np.maximum(group if level is cluster.levels[-1] else inside, inner)
        if np.any(members > inner):
            rate = _line_rate(op, (group, stride), inner_domain, level, cluster)
            latency, transfer = _level_s(op, size, (inner, members, group), level, rate)
            slowest = np.maximum(slowest, np.where(members > inner, transfer, 0.0))
            latency_s = latency_s + np.where(members > inner, latency, 0.0)
        inner, inner_domain = members, level.domain_size
    return np.asarray(np.where(group > 1, latency_s + slowest, 0.0), dtype=np.float64)


def p2p_s(size_bytes: FloatArray, hops: Hops, cluster: ClusterSpec) -> FloatArray:
    """Seconds of the slowest of ``hops`` [N] that all send ``size_bytes`` [N] at once: over the slowest link that they span.

    Links are full duplex: a message the other way at the same time costs nothing.
    """
    seconds = np.full(size_bytes.shape, np.inf)
    rate = slowest_rates(cluster, np.asarray(hops.group), np.asarray(hops.stride), hops.pattern)
    distance = hops.group * hops.stride - 1
    for level in reversed(cluster.levels):
        link = level.link
        line = _per_device(level, cluster) * link.efficiency.p2p
        measured = line if rate is None else np.where(np.isfinite(rate), rate * _calibrated(level, cluster), line)
        spans = (distance < level.domain_size) | (level is cluster.levels[-1])
        seconds = np.where(spans, link.latency_s + size_bytes / measured, seconds)
    return seconds


def _level_s(
    op: Op,
    size: FloatArray,
    ranks: tuple[IntArray, IntArray, IntArray],
    level: LinkLevel,
    rate: tuple[float, FloatArray | float],
) -> _SECONDS:
    """Latency and transfer of one level; ``ranks`` are members inside the inner domain, inside this one, and of the group.

    Args:
        rate: line rate of the level for each device, and the part of it that these groups have.
    """
    inner, members, _ = ranks
    link = level.link
    x = _moved_bytes(op, size, *ranks) / (rate[0] * rate[1] * _mesh_fraction(level, members // inner))
    if points := [point for point in link.measured if point.op == op]:
        latency_s, transfer = _interpolated_s(op, points, size / inner, members // inner)
        return latency_s, transfer / rate[1]
    if link.curve and (curves := link_curves(link.curve)):
        return curve_s(curves[op], members // inner, x)
    latency = link.collective_latency_s
    transfer = x / float(getattr(link.efficiency, op))
    if op in ("all_reduce", "all_to_all") or link.kind == "scale-up":
        hops_s = latency.per_hop * np.log2(np.maximum(members / inner, 1))
        return latency.base + hops_s, transfer + np.sqrt(link.ramp_s * x)
    domains = members // inner
    # A chunk that starts inside a domain crosses into each domain once, its own included at the end.
    crossings = domains - (inner == 1)
    crossing = link.latency_s if link.ring_step_s is None else link.ring_step_s
    steps = crossing * crossings + IN_NODE_RING_STEP_S * (members - domains)
    quick = LL_STEP_RATIO * steps
    return latency.base + quick, np.minimum(steps - quick + transfer, transfer / LL_BANDWIDTH_RATIO)


def _moved_bytes(op: Op, size: FloatArray, inner: IntArray, members: IntArray, group: IntArray) -> FloatArray:
    """Bytes through each device's link of one level: the table of the module's docstring."""
    if op == "all_to_all":
        return np.asarray(size * (members - inner) / group)
    shared = size * (members - 1) / members / inner
    if op != "all_reduce":
        return np.asarray(shared)
    return np.asarray(np.where(members == 2 * inner, size / inner, 2 * shared))


def _mesh_fraction(level: LinkLevel, members: IntArray) -> FloatArray | float:
    """Share of a device's links that lead to members of its own group."""
    peers = level.link.mesh_peers
    if peers is None:
        return 1.0
    return np.clip((members - 1) / min(peers, max(level.domain_size - 1, 1)), 1e-6, 1.0)


def _interpolated_s(op: Op, points: Sequence[CollectivePoint], size: FloatArray, group: IntArray) -> _SECONDS:
    """Measured points of the nearest number of ranks, log seconds over log size; another number in proportion to the bytes through
    a link.

    Beyond the largest message seconds grow in proportion, below the smallest they stay.
    """
    sizes = np.unique([point.group_size for point in points])
    nearest = sizes[np.argmin(np.abs(np.log(sizes)[:, None] - np.log(np.maximum(group.ravel(), 1))[None]), axis=0)]
    nearest = nearest.reshape(group.shape)
    latency, transfer = np.zeros(size.shape), np.zeros(size.shape)
    for measured in sizes:
        rows = nearest == measured
        if not np.any(rows):
            continue
        mine = sorted((point.size_bytes, point.time_s) for point in points if point.group_size == measured)
        log_size = np.log([float(at) for at, _ in mine])
        log_time = np.maximum.accumulate(np.log([seconds for _, seconds in mine]))
        here = size[rows] * bus_factor(op, group[rows]) / bus_factor(op, np.asarray(measured))
        log_here = np.log(np.maximum(here, 1.0))
        seconds = np.exp(np.interp(log_here, log_size, log_time)) * np.exp(np.maximum(log_here - log_size[-1], 0.0))
        latency[rows] = float(np.exp(log_time[0]))
        transfer[rows] = np.maximum(seconds - latency[rows], 0.0)
    return latency, transfer


def bus_factor(op: Op, group: IntArray) -> FloatArray:
    """Bytes through a device's link for each byte of the full buffer, inside one node (nccl-tests)."""
    return np.asarray((2.0 if op == "all_reduce" else 1.0) * (group - 1) / group)


def _line_rate(
    op: Op, groups: tuple[IntArray, IntArray], inner_domain: int, level: LinkLevel, cluster: ClusterSpec
) -> tuple[float, FloatArray | float]:
    """Line rate of a level for each device, bytes/s, and how much of it the nodes that ``groups`` cross there have."""
    line = _per_device(level, cluster)
    pattern: Pattern = "all" if op == "all_to_all" else "ring"
    outer = None if level is cluster.levels[-1] else level.domain_size
    measured = slowest_rates(cluster, *groups, pattern, inner_domain, outer)
    if measured is None:
        return line, 1.0
    achieved = measured * _calibrated(level, cluster) / level.link.efficiency.p2p
    return line, np.where(np.isfinite(measured), achieved / line, 1.0)


def _per_device(level: LinkLevel, cluster: ClusterSpec) -> float:
    """Line rate one device gets when all devices of its node use the link at once, bytes/s."""
    sharing = cluster.largest_node if level.link.shared_by == "node" else 1
    return level.link.bandwidth_bytes_per_s * _calibrated(level, cluster) / sharing


def _calibrated(level: LinkLevel, cluster: ClusterSpec) -> float:
    """What measured runs say about rates of this kind of link."""
    return cluster.calibration.scale_up if level.link.kind == "scale-up" else cluster.calibration.scale_out
