"""All-reduce between machines whose messages are few and small, as programs on processors send it: ring, star or exchange.

n machines, S bytes, a seconds a message takes however small it is, W bytes/s of each machine's link, both ways at once:

    (A1) ring      2 (n - 1) (a + S / (n W))        a part of the buffer goes around twice
    (A2) star      2 a + 2 (n - 1) S / W            all send to one machine, which sends the sum to each: two messages, one link
    (A3) exchange  d (a + S / W)                    with partners 1, 2, 4, ... apart; d = log2 n, of other n floor(log2 n) + 2 at
                                                    most: those beyond the power of two hand theirs over and get the sum after

A ring moves least, a star waits least, an exchange is between them; which is quickest depends on S / W over a, so each size has
its own. Where a machine has several ranks they reduce among themselves first, each carries its part of the buffer over the network,
and what comes of it is gathered within the machine: as many bytes inside as one all-reduce there.

NCCL's all-reduce, and links whose collectives were measured, are in collectives.py.
Source: star against ring and tree where links have latency, TPI-LLM (arXiv:2410.00531, 3.2 and A.1), which counts no queue at
the centre's link; exchange: recursive doubling (Thakur, Rabenseifner and Gropp, doi:10.1177/1094342005051521).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...schema import ClusterSpec, LinkLevel
from ...schema.generation import SumAlgorithm
from ...schema.units import FloatArray, IntArray
from .collectives import collective_s, line_rate_per_device

ALGORITHMS: tuple[SumAlgorithm, ...] = ("ring", "star", "exchange")
"""(A1), (A2), (A3)."""


class Network(NamedTuple):
    """Seconds of a message that holds nothing; bytes per second of each machine's link, in each direction."""

    latency_s: float
    bytes_per_s: float


def ring_s(size_bytes: FloatArray, num_machines: int, network: Network) -> FloatArray:
    """Return the seconds (A1) of buffers [...]."""
    steps = 2 * (num_machines - 1)
    return np.asarray(steps * (network.latency_s + size_bytes / num_machines / network.bytes_per_s))


def star_s(size_bytes: FloatArray, num_machines: int, network: Network) -> FloatArray:
    """Return the seconds (A2) of buffers [...]."""
    messages = 2 * (num_machines - 1)
    through_centre = messages * size_bytes / network.bytes_per_s
    return np.asarray(np.where(num_machines > 1, 2 * network.latency_s + through_centre, 0.0))


def exchange_s(size_bytes: FloatArray, num_machines: int, network: Network) -> FloatArray:
    """Return the seconds (A3) of buffers [...]."""
    rounds = num_machines.bit_length() - 1
    steps = rounds if num_machines == 2**rounds else rounds + 2
    return np.asarray(steps * (network.latency_s + size_bytes / network.bytes_per_s))


def seconds_by_algorithm(size_bytes: FloatArray, num_machines: int, network: Network) -> FloatArray:
    """Return the seconds of each of ALGORITHMS [3, ...]."""
    forms = (ring_s, star_s, exchange_s)
    return np.stack([form(np.asarray(size_bytes, dtype=np.float64), num_machines, network) for form in forms])


def tensor_parallel_all_reduce_s(size_bytes: FloatArray, tp: int, cluster: ClusterSpec) -> tuple[FloatArray, IntArray]:
    """Return the seconds [...] of an all-reduce over ``tp`` neighbours, and which of ALGORITHMS crosses machines; -1: none of them.

    Within a node, with NCCL, and over links that were measured it is `collective_s`.
    """
    size, node = np.asarray(size_bytes, dtype=np.float64), cluster.largest_node
    flat, ranks = size.reshape(-1), np.full(size.size, tp)
    level = next(level for level in cluster.levels if level.domain_size % tp == 0)
    is_measured = bool(level.link.measured or level.link.curve)
    if tp <= node or cluster.weakest_device.backend.collectives == "nccl" or is_measured:
        seconds = collective_s("all_reduce", flat, ranks, np.ones_like(ranks), cluster)
        return seconds.reshape(size.shape), np.full(size.shape, -1)
    inside = collective_s("all_reduce", flat, np.full_like(ranks, node), np.ones_like(ranks), cluster).reshape(
        size.shape
    )
    between = seconds_by_algorithm(size / node, tp // node, network_of(level, cluster))
    return inside + between.min(axis=0), between.argmin(axis=0)


def network_of(level: LinkLevel, cluster: ClusterSpec) -> Network:
    """Return what one device of each machine has of the links between them while its neighbours send as well.

    Of measured bandwidths between nodes it is the least.
    """
    rate = line_rate_per_device(level, cluster) * level.link.efficiency.p2p
    if cluster.bandwidth_matrix is not None:
        matrix = np.array(cluster.bandwidth_matrix)
        rate = float(matrix[~np.eye(len(matrix), dtype=bool)].min())
    return Network(level.link.latency_s, rate)
