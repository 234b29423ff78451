"""Seconds to send tokens to the ranks of their experts, or the results back: kernels that send a token once to a place.

A token with k chosen experts, spread over d places alike, goes to

    E(d) = d (1 - (1 - 1/d)^k)

distinct places (in the mean, drawn with replacement). Kernels such as DeepEP send it over the network once to each node
where it has an expert, and there over the scale-up link once to each rank. Of t tokens of b bytes on a rank cross

    network:   t b E(nodes) (nodes - 1) / nodes        scale-up:   t b E(ranks) (m - 1) / m,   m ranks a node

each through the rank's own NIC and link; both work at once, the slower one decides. An all-to-all sends all k copies
instead: ``collective_s("all_to_all", k t b, ...)``. Where routing is uneven the fullest rank decides: ``imbalance`` is its
tokens over the mean.
"""

from __future__ import annotations

import numpy as np

from ..schema import ClusterSpec
from .layouts import FloatArray, IntArray

SCALE_UP_EFFICIENCY = 0.68
"""Line rate reached: 292 (8-bit dispatch) and 322 (bf16 combine) of 450 GB/s, eight H100 (aiconfigurator, Apache-2.0)."""

KERNEL_BYTES_PER_S = 350e9
"""What the kernels copy at most with the multiprocessors they take: 318 and 442 GB/s on B200, 257 and 292 on GB200, whose links
do 900 (aiconfigurator)."""

SCALE_OUT_EFFICIENCY = 0.86
"""Line rate reached: 41, 39, 46 and 48 of 50 GB/s on two and four nodes (aiconfigurator); 43 to 58 (DeepEP, MIT)."""

LATENCY_S = 35e-6
"""One small dispatch or combine in a node: 26 and 47 us on H100 (aiconfigurator)."""

NOTIFY_S = 20e-6
"""Exchange of counts for each doubling of the nodes: 30, 50 and 70 us on two, four and eight (aiconfigurator)."""


def distinct_places(top_k: FloatArray | int, places: FloatArray | IntArray) -> FloatArray:
    """Mean number of distinct places that ``top_k`` experts of a token lie in: ``d (1 - (1 - 1/d)^k)``."""
    places = np.asarray(places, dtype=np.float64)
    return np.asarray(places * (1.0 - (1.0 - 1.0 / places) ** top_k))


def expert_exchange_s(
    token_bytes: FloatArray | float,
    top_k: int,
    group: IntArray,
    stride: IntArray,
    cluster: ClusterSpec,
    imbalance: float = 1.0,
) -> FloatArray:
    """Seconds of one dispatch or one combine, arrays [N].

    Args:
        token_bytes: all tokens of one rank once: tokens times width times bytes of an element.
        top_k: experts of a token.
        group: ranks that share the experts; 1 costs nothing.
        stride: distance between neighbouring ranks of the group.
        cluster: link levels.
        imbalance: tokens of the fullest rank over the mean.
    """
    size = np.asarray(token_bytes, dtype=np.float64) * imbalance
    slowest = np.zeros(np.broadcast_shapes(size.shape, group.shape))
    latency = np.full_like(slowest, LATENCY_S)
    inner = np.ones_like(group)
    for level in cluster.levels:
        inside = np.gcd(np.maximum(level.domain_size // stride, 1), group)
        members = group if level is cluster.levels[-1] else np.maximum(inside, inner)
        places = group // inner
        reached = members // inner
        copies = distinct_places(top_k, places) * (reached - 1) / reached
        sharing = cluster.largest_node if level.link.shared_by == "node" else 1
        is_network = level.link.kind == "scale-out"
        line_rate = level.link.bandwidth_bytes_per_s / sharing
        rate = (
            line_rate * SCALE_OUT_EFFICIENCY if is_network else min(line_rate * SCALE_UP_EFFICIENCY, KERNEL_BYTES_PER_S)
        )
        slowest = np.maximum(slowest, size * copies / rate)
        if is_network:
            latency = latency + np.where(reached > 1, NOTIFY_S * np.log2(np.maximum(reached, 1)) + NOTIFY_S / 2, 0.0)
        inner = members
    return np.asarray(np.where(group > 1, latency + slowest, 0.0))
