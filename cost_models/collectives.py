"""Seconds of collectives: latency + bytes / bandwidth on every link level a group spans, hierarchical.

A group of ``size`` ranks with ``stride`` (neighbours are ``stride`` ranks apart; ranks count devices node by node) has
inner_l members inside one domain of level l. Level l moves, through each device's own link, what its inner members
do not already share:

    bytes_l = S * (f_l - 1) / f_l / inner_{l-1},   f_l = inner_l / inner_{l-1}

for all-gather and reduce-scatter of S bytes in total; all-reduce is one of each. All-to-all with S the buffer of one rank
moves S * (inner_l - inner_{l-1}) / group over level l.
Levels work at the same time on different chunks, so the slowest one decides; latencies add.
A flat ring over nodes would be 5 to 13 times too slow. The latency of an all-reduce grows with log2 of the ranks (trees); between
nodes all-gather and reduce-scatter have rings only, whose latency grows with the nodes.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from ..schema import ClusterSpec, LinkLevel
from .layouts import FloatArray, IntArray

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]

_PASSES: dict[Op, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


def collective_s(
    op: Op, size_bytes: FloatArray | float, group: IntArray, stride: IntArray, cluster: ClusterSpec
) -> FloatArray:
    """Seconds of one collective, arrays [N].

    Args:
        op: which one.
        size_bytes: the full buffer: what an all-gather ends with, a reduce-scatter or all-reduce starts with.
        group: ranks of the group; 1 costs nothing.
        stride: distance between neighbouring ranks of the group.
        cluster: link levels.
    """
    size = np.asarray(size_bytes, dtype=np.float64)
    bandwidth_s = np.zeros(np.broadcast_shapes(size.shape, group.shape))
    latency_s = np.zeros_like(bandwidth_s)
    inner = np.ones_like(group)
    for level in cluster.levels:
        # Groups that do not fill whole domains straddle them: only a common divisor is sure to stay inside. The last level has all.
        inside = np.gcd(np.maximum(level.domain_size // stride, 1), group)
        members = group if level is cluster.levels[-1] else inside
        fanout = members / inner
        shared = _PASSES[op] * size * (fanout - 1) / fanout / inner
        # In an all-to-all every pair has bytes of its own: inner members share nothing.
        moved = size * (members - inner) / group if op == "all_to_all" else shared
        bandwidth_s = np.maximum(bandwidth_s, moved / _bandwidth(level, op, cluster))
        latency = level.link.collective_latency_s
        is_ring = op != "all_reduce" and level.link.kind == "scale-out"
        steps_s = fanout * level.link.latency_s if is_ring else latency.per_hop * np.log2(fanout)
        latency_s = latency_s + np.where(fanout > 1, latency.base + steps_s, 0.0)
        inner = np.maximum(members, inner)
    return np.asarray(np.where(group > 1, latency_s + bandwidth_s, 0.0), dtype=np.float64)


def p2p_s(size_bytes: FloatArray, distance: IntArray, cluster: ClusterSpec) -> FloatArray:
    """Seconds to send ``size_bytes`` [N] between ranks within ``distance`` [N] of one another: over the slowest link there."""
    seconds = np.full(size_bytes.shape, np.inf)
    for level in reversed(cluster.levels):
        link = level.link
        here = link.latency_s + size_bytes / (_per_device(level, cluster) * link.efficiency.p2p)
        seconds = np.where(distance < level.domain_size, here, seconds)
    return seconds


def _bandwidth(level: LinkLevel, op: Op, cluster: ClusterSpec) -> float:
    return _per_device(level, cluster) * float(getattr(level.link.efficiency, op))


def _per_device(level: LinkLevel, cluster: ClusterSpec) -> float:
    """Line rate one device gets when all devices of its node use the link at once, bytes/s."""
    sharing = cluster.largest_node if level.link.shared_by == "node" else 1
    return level.link.bandwidth_bytes_per_s / sharing
