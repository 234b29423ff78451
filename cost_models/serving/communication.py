"""Seconds of what the ranks of a serving engine exchange: all-reduces within a node by their own kernels, rows to experts and back.

All-reduce of B bytes over n ranks that reach each other's memory, R bytes/s out of each; the least of three:

    one-shot     a + (n - 1) B / (e1 R)                    every rank reads all others'
    two-shot     a + s + 2 (n - 1) / n B / (e2 R)          a reduce-scatter and an all-gather, a barrier between
    NCCL         `collective_s`

a, s, e1 and e2 are those of the engine's kernels on the generation.

Rows to experts over n ranks, k experts a row, D wide, 1 byte an element there (fp8) and 2 back; the least of three:

    low latency  l + copies k rows D / (rate e)            a copy for each expert (DeepEP's kernels for decoding)
    normal       o + copies to each rank once              n (1 - (1 - 1/n)^k) of them (DeepEP's for prompts)
    gathered     an all-gather of rows and a reduce-scatter of outputs

Within a node copies go out at R, to other nodes at the network's rate, both at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...schema import ClusterSpec, LinkLevel
from ...schema.serving import KernelEngine
from ...schema.units import FloatArray
from ..coefficients import Coefficients
from ..hardware.collectives import Op, collective_s


class AllReduceKernels(NamedTuple):
    """All-reduces within a node of an engine: a of few bytes, s of a second barrier, e1 and e2 of the links' rate."""

    floor_s: float
    barrier_s: float
    one_shot: float
    two_shot: float


def group_s(op: Op, num_bytes: FloatArray, group: int, stride: int, cluster: ClusterSpec) -> FloatArray:
    """Return the seconds [N] of a collective of ``group`` ranks, ``stride`` apart."""
    ranks = np.full(np.shape(num_bytes), group)
    return collective_s(op, num_bytes, ranks, np.full_like(ranks, stride), cluster)


def all_reduce_s(
    num_bytes: FloatArray, group: int, cluster: ClusterSpec, coefficients: Coefficients, engines: Sequence[KernelEngine]
) -> FloatArray:
    """Return the seconds [N] of an all-reduce of neighbours by the fastest of these engines' kernels and the library's."""
    if group == 1:
        return np.zeros_like(num_bytes)
    fastest_s = group_s("all_reduce", num_bytes, group, 1, cluster)
    level, device, known = cluster.levels[0], cluster.weakest_device, coefficients["serving"]["all_reduce"]
    # Over PCIe peers are read through the host: engines use these kernels for pairs only.
    reaches = level.link.kind == "scale-up" and (group == 2 or level.link.shared_by == "device")
    if group > level.domain_size or not reaches:
        return fastest_s
    for engine in engines:
        c = known[engine].get(device.architecture) or known.get(device.vendor)
        if c is not None:
            rate = rate_to_peers(level, cluster, group)
            fastest_s = np.minimum(fastest_s, kernels_all_reduce_s(num_bytes, group, rate, AllReduceKernels(**c)))
    return np.asarray(fastest_s)


def kernels_all_reduce_s(
    num_bytes: FloatArray, group: FloatArray | int, rate: FloatArray | float, c: AllReduceKernels
) -> FloatArray:
    """Return the seconds [N] of the faster of one-shot and two-shot; ``rate``: bytes/s out of each device."""
    one_shot = (group - 1) * num_bytes / (c.one_shot * rate)
    two_shot = c.barrier_s + 2 * (group - 1) / group * num_bytes / (c.two_shot * rate)
    return np.asarray(c.floor_s + np.minimum(one_shot, two_shot))


def rate_to_peers(level: LinkLevel, cluster: ClusterSpec, group: int) -> float:
    """Return the bytes/s that a rank sends to ``group - 1`` peers in its node."""
    link = level.link
    rate = link.bandwidth_bytes_per_s * cluster.calibration.scale_up
    if link.mesh_peers is not None:
        rate *= min((group - 1) / link.mesh_peers, 1.0)
    return rate


def to_experts_s(
    rows: FloatArray,
    hidden_dim: int,
    top_k: int,
    ranks: tuple[int, int],
    cluster: ClusterSpec,
    coefficients: Coefficients,
) -> FloatArray:
    """Return the seconds [N] of sending ``rows`` of each attention rank to their experts, and their outputs back.

    Args:
        rows: of one attention rank.
        hidden_dim: width of a row; top_k: experts that it visits.
        ranks: of the exchange, and the distance between two (tp: each sends its part of the rows).
        cluster: its links; coefficients: of section ``serving``.
    """
    group, stride = ranks
    gathered = rows * group * hidden_dim * 2
    fastest_s = group_s("all_gather", gathered, group, stride, cluster) + group_s(
        "reduce_scatter", gathered, group, stride, cluster
    )
    level, c = cluster.levels[0], coefficients["serving"]
    if level.link.kind != "scale-up" or level.link.shared_by != "device" or cluster.weakest_device.vendor != "nvidia":
        return fastest_s
    in_node = max(min(group, level.domain_size // stride), 1)
    spans = group > in_node
    distinct = group * (1 - (1 - 1 / group) ** top_k)
    for latency, copies, efficiency in (
        (c["low_latency_s"] + spans * c["low_latency_network_s"], top_k, c["low_latency_efficiency"]),
        (c["exchange_s"] + spans * c["low_latency_network_s"], distinct, c["exchange_efficiency"]),
    ):
        # Ranks of a tensor-parallel group have the same rows, and each sends its part.
        arriving = rows / stride * copies * hidden_dim
        seconds: Any = 0.0
        for element_bytes in (1, 2):
            within = (
                element_bytes
                * arriving
                * (in_node - 1)
                / group
                / (efficiency * rate_to_peers(level, cluster, in_node + 1))
            )
            across = 0.0
            if spans:
                outer = cluster.levels[-1].link
                share = cluster.largest_node if outer.shared_by == "node" else 1
                across = (
                    element_bytes
                    * arriving
                    * (group - in_node)
                    / group
                    * share
                    / (c["network_efficiency"] * outer.bandwidth_bytes_per_s * cluster.calibration.scale_out)
                )
            seconds = seconds + latency + np.maximum(within, across)
        fastest_s = np.minimum(fastest_s, seconds)
    return np.asarray(fastest_s)
