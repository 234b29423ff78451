"""Seconds of collectives: latency and transfer on every link level a group spans, hierarchical; and next to kernels.

A group of ``group`` ranks with ``stride`` (neighbours are ``stride`` ranks apart; ranks count devices node by node) has m_l members
inside one domain of level l, and f_l = m_l / m_{l-1} inner domains there. Bytes through each device's link, S the full buffer:

| operation | innermost level | further out |
|---|---|---|
| all-gather, reduce-scatter | S (f - 1) / f | S (m - 1) / m / m_{l-1}: a ring for each device of a node, carrying everything |
| all-reduce | 2 S (f - 1) / f | twice that; S / m_{l-1} between two domains (trees, both directions at once) |
| all-to-all, S the buffer of one rank | S (m - 1) / group | S (m - m_{l-1}) / group |

Levels work at the same time on different chunks, so the slowest transfer decides; latencies add. On a level with measured
points or curves these say how long x = bytes / line rate takes. One group gets no more of a node than the link's group bandwidth:
the rate of each of its m_{l-1} members there is at most that over m_{l-1}. Where bandwidth between nodes was measured (`NodeLinks`)
the slowest pair that a group crosses, over the link's efficiency of a send, stands in for the line rate. Otherwise

    latency + x / efficiency + sqrt(ramp x)

with latency = base + per_hop log2(f): trees, exchanges, and everything inside a node. The square root is the pipeline fill: a
message in k chunks over a path of latency a takes k a + (1 + 1/k) x / e, least at x / e + 2 sqrt(a x / e). Between nodes all-gather
and reduce-scatter have rings only, of every member and without ramp; between regions a step of the ring for each of the others.
NCCL takes the better of two protocols: a ring_step for
every crossing between nodes (and IN_NODE_RING_STEP_S inside) at full bandwidth (Simple), or LL_STEP_RATIO of that at
LL_BANDWIDTH_RATIO of the bandwidth (LL).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple

import numpy as np

from ...schema import ClusterSpec, LinkLevel
from ...schema.profile import CollectivePoint
from ...schema.units import FloatArray, IntArray
from ..coefficients import Coefficients
from .node_links import Hops, Pattern, slowest_rates

LL_STEP_RATIO = 0.2
"""Ring step of NCCL's LL protocol over that of Simple between nodes: 2.7 of 14 us (NVIDIA/nccl src/graph/tuning.cc)."""

IN_NODE_RING_STEP_S = 3.4e-6
"""One step between devices of a node of a Simple ring that spans nodes (NVIDIA/nccl src/graph/tuning.cc, NVLink)."""

NETWORK_RING_STEP_S = 14e-6
"""One step between nodes of a Simple ring whose next messages wait in the same launch (NVIDIA/nccl src/graph/tuning.cc, network).
What a fabric adds to that when a ring fills is there once a launch, not once a message: under nanotron's ZeRO-1 every tensor of a
step costs 12 us a node on EFA, where a collective by itself costs 350."""

LL_BANDWIDTH_RATIO = 0.1
"""Bandwidth of LL rings across nodes over that of Simple: NCCL caps LL at 45 of 400 GB/s on two Hopper nodes (tuning.cc)."""

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


def collective_s(
    op: Op,
    size_bytes: FloatArray | float,
    group: IntArray,
    stride: IntArray,
    cluster: ClusterSpec,
    *,
    in_one_launch: bool = False,
) -> FloatArray:
    """Return the seconds of one collective, arrays [N]; a group of one rank costs nothing.

    Args:
        op: which one.
        size_bytes: the full buffer: what an all-gather ends with, a reduce-scatter or all-reduce starts with; of an all-to-all
            what one rank sends, its part for itself included.
        group, stride: ranks of the group, and the distance between neighbours.
        cluster: its links.
        in_one_launch: it is one of many that NCCL runs one after another (ncclGroupStart and End, torch's coalesced collectives).
    """
    shape = np.broadcast_shapes(np.shape(size_bytes), group.shape, stride.shape)
    size = np.broadcast_to(np.asarray(size_bytes, dtype=np.float64), shape)
    group, stride = np.broadcast_to(group, shape), np.broadcast_to(stride, shape)
    slowest, latency_s = np.zeros(shape), np.zeros(shape)
    inner, inner_domain = np.ones_like(group), 1
    for level in cluster.levels:
        # Groups that do not fill domains straddle them: only a common divisor is sure to stay within. The last level has all.
        inside = np.gcd(np.maximum(level.domain_size // stride, 1), group)
        members = np.maximum(group if level is cluster.levels[-1] else inside, inner)
        if np.any(members > inner):
            rate = _line_rate(op, (group, stride), inner_domain, level, cluster)
            latency, transfer = _level_s(op, size, (inner, members, group), level, rate, in_one_launch=in_one_launch)
            slowest = np.maximum(slowest, np.where(members > inner, transfer, 0.0))
            latency_s = latency_s + np.where(members > inner, latency, 0.0)
        inner, inner_domain = members, level.domain_size
    return np.asarray(np.where(group > 1, latency_s + slowest, 0.0), dtype=np.float64)


def p2p_s(size_bytes: FloatArray, hops: Hops, cluster: ClusterSpec) -> FloatArray:
    """Return the seconds of the slowest of ``hops`` [N] that all send ``size_bytes`` [N] at once: over the slowest link they span.

    Links are full duplex: a message the other way at the same time costs nothing. Neighbours that send both ways take the mean of
    the two: what goes there comes back in a step.
    """
    if hops.pattern not in ("chain", "loop"):
        return _one_way_s(size_bytes, hops, cluster)
    return (_one_way_s(size_bytes, hops, cluster) + _one_way_s(size_bytes, hops, cluster, back=True)) / 2


def _one_way_s(size_bytes: FloatArray, hops: Hops, cluster: ClusterSpec, *, back: bool = False) -> FloatArray:
    seconds = np.full(size_bytes.shape, np.inf)
    rate = None
    if cluster.bandwidth_matrix is not None:
        rate = slowest_rates(cluster, np.asarray(hops.group), np.asarray(hops.stride), hops.pattern, back=back)
    distance = hops.group * hops.stride - 1
    for level in reversed(cluster.levels):
        link = level.link
        line = (
            min(line_rate_per_device(level, cluster), link.group_bandwidth_bytes_per_s or np.inf) * link.efficiency.p2p
        )
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
    *,
    in_one_launch: bool,
) -> tuple[FloatArray, FloatArray]:
    """Return latency and transfer of one level.

    ``ranks`` are members within the inner domain, within this one, and of the group; ``rate`` the line rate of the level for each
    device, and the part of it that these groups have.
    """
    inner, members, _ = ranks
    link = level.link
    line_rate = rate[0] * rate[1]
    if link.group_bandwidth_bytes_per_s is not None:  # of all members in an inner domain together
        line_rate = np.minimum(line_rate, link.group_bandwidth_bytes_per_s / inner)
    if link.mesh_peers is not None:  # the share of a device's links that lead to members of its own group
        peers = min(link.mesh_peers, max(level.domain_size - 1, 1))
        line_rate = line_rate * np.clip((members // inner - 1) / peers, 1e-6, 1.0)
    x = _moved_bytes(op, size, *ranks) / line_rate
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
    if link.kind == "wan":
        return np.asarray(link.latency_s * (domains - 1)), transfer
    # A chunk that starts inside a domain crosses into each domain once, its own included at the end.
    crossings = domains - (inner == 1)
    crossing = link.latency_s if link.ring_step_s is None else link.ring_step_s
    crossing = min(crossing, NETWORK_RING_STEP_S) if in_one_launch else crossing
    steps = crossing * crossings + IN_NODE_RING_STEP_S * (members - domains)
    fast = LL_STEP_RATIO * steps
    base = 0.0 if in_one_launch else latency.base
    return base + fast, np.minimum(steps - fast + transfer, transfer / LL_BANDWIDTH_RATIO)


def _moved_bytes(op: Op, size: FloatArray, inner: IntArray, members: IntArray, group: IntArray) -> FloatArray:
    """Return the bytes through each device's link of one level: the table of the module's docstring."""
    if op == "all_to_all":
        return np.asarray(size * (members - inner) / group)
    shared = size * (members - 1) / members / inner
    if op != "all_reduce":
        return np.asarray(shared)
    return np.asarray(np.where(members == 2 * inner, size / inner, 2 * shared))


def _interpolated_s(
    op: Op, points: Sequence[CollectivePoint], size: FloatArray, group: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Return what points of the nearest number of ranks say, log seconds over log size; of another in proportion to the bytes sent.

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
        of_group = sorted((point.size_bytes, point.time_s) for point in points if point.group_size == measured)
        log_size = np.log([float(num_bytes) for num_bytes, _ in of_group])
        log_time = np.maximum.accumulate(np.log([seconds for _, seconds in of_group]))
        scaled = size[rows] * bus_factor(op, group[rows]) / bus_factor(op, np.asarray(measured))
        log_scaled = np.log(np.maximum(scaled, 1.0))
        seconds = np.exp(np.interp(log_scaled, log_size, log_time)) * np.exp(np.maximum(log_scaled - log_size[-1], 0.0))
        latency[rows] = float(np.exp(log_time[0]))
        transfer[rows] = np.maximum(seconds - latency[rows], 0.0)
    return latency, transfer


def bus_factor(op: Op, group: IntArray) -> FloatArray:
    """Return the bytes through a device's link for each byte of the full buffer, within one node (nccl-tests)."""
    return np.asarray((2.0 if op == "all_reduce" else 1.0) * (group - 1) / group)


def _line_rate(
    op: Op, groups: tuple[IntArray, IntArray], inner_domain: int, level: LinkLevel, cluster: ClusterSpec
) -> tuple[float, FloatArray | float]:
    """Return the line rate of a level for each device, bytes/s, and how much of it the nodes that ``groups`` cross have."""
    line = line_rate_per_device(level, cluster)
    if cluster.bandwidth_matrix is None:
        return line, 1.0
    pattern: Pattern = "all" if op == "all_to_all" else "ring"
    outer = None if level is cluster.levels[-1] else level.domain_size
    measured = slowest_rates(cluster, *groups, pattern, inner_domain, outer)
    achieved = measured * _calibrated(level, cluster) / level.link.efficiency.p2p
    return line, np.where(np.isfinite(measured), achieved / line, 1.0)


def line_rate_per_device(level: LinkLevel, cluster: ClusterSpec) -> float:
    """Return the line rate one device gets when all devices of its node use the link at once, bytes/s."""
    sharing = cluster.largest_node if level.link.shared_by == "node" else 1
    return level.link.bandwidth_bytes_per_s * _calibrated(level, cluster) / sharing


def _calibrated(level: LinkLevel, cluster: ClusterSpec) -> float:
    """Return what measured runs say about rates of this kind of link; the rates between regions are measured ones themselves."""
    calibration = cluster.calibration
    rates = {"scale-up": calibration.scale_up, "scale-out": calibration.scale_out, "wan": 1.0}
    return rates[level.link.kind]


# Measured curves

KNOT_STEP = 2.0
"""Distance of the residual's knots in log2 of the seconds at line rate: a factor of four."""

_LOG2_GRID = np.arange(-34.0, 4.01, 0.5)
"""Where curves are tabulated; they continue in proportion to x beyond it."""

MIN_X = 2.0 ** float(_LOG2_GRID[0])


class CurveParameters(NamedTuple):
    """t(x) = (latency + x / efficiency + sqrt(ramp x)) exp(residual(x)) of one operation over one number of devices.

    The residual holds what the shape misses: the switches of NCCL between its protocols (LL, LL128, Simple) and, for the all-reduce
    of Hopper and Blackwell, the reduction in the switch (NVLS). With x the seconds at line rate one curve serves links of other
    rates, such as the halved NVLink of an H800. Written by ``python -m meshwright.fitting collectives``.

    Attributes:
        first_knot: log2 x of the first value of ``residual``; the others follow KNOT_STEP apart.
        residual: piecewise linear in log x; beyond the knots it stays what it is at the nearest.
    """

    latency_s: float
    efficiency: float
    ramp_s: float
    first_knot: float = 0.0
    residual: tuple[float, ...] = ()


class Curves(NamedTuple):
    """Tabulated curves of one operation: log seconds [G, X] over groups of ``2 ** log2_groups`` devices and _LOG2_GRID."""

    log2_groups: FloatArray
    log_seconds: FloatArray


def shape_s(x: FloatArray, parameters: CurveParameters) -> FloatArray:
    """Return the shape without residual: ``latency + x / efficiency + sqrt(ramp x)``."""
    return np.asarray(parameters.latency_s + x / parameters.efficiency + np.sqrt(parameters.ramp_s * x))


def knots(parameters: CurveParameters) -> FloatArray:
    """Return the positions of the residual's values, log2 seconds at line rate."""
    return np.asarray(parameters.first_knot + KNOT_STEP * np.arange(len(parameters.residual)))


def tabulated(by_group: Mapping[int, CurveParameters]) -> Curves:
    """Return the curves of one operation, made non-decreasing, from the parameters of each number of devices."""
    groups, x = sorted(by_group), 2.0**_LOG2_GRID
    rows = []
    for group in groups:
        parameters = by_group[group]
        seconds = np.log(shape_s(x, parameters))
        if parameters.residual:
            seconds = seconds + np.interp(_LOG2_GRID, knots(parameters), parameters.residual)
        rows.append(np.maximum.accumulate(seconds))
    return Curves(np.log2(np.array(groups, dtype=np.float64)), np.array(rows))


def curve_s(curves: Curves, group: IntArray, x: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return latency and transfer seconds of groups [N] of at least two devices whose links are busy for ``x`` [N] at line rate.

    Between measured numbers of devices log seconds are linear in the log of the number. Beyond the largest, the latency grows
    by as much for each device as between the two largest (rings), the transfer stays.
    """
    largest = 2.0 ** curves.log2_groups[-1]
    row, row_part = _place(np.log2(np.clip(group, 2, largest)), curves.log2_groups)
    log_x = np.log2(np.maximum(x, MIN_X))
    column, column_part = _place(log_x, _LOG2_GRID)
    table = curves.log_seconds
    latency = np.exp(_between(table[row, 0], table[row + 1, 0], row_part))
    low = _between(table[row, column], table[row, column + 1], column_part)
    high = _between(table[row + 1, column], table[row + 1, column + 1], column_part)
    beyond = 2.0 ** np.maximum(log_x - _LOG2_GRID[-1], 0.0)
    total = np.exp(_between(low, high, row_part)) * beyond
    ends = np.exp(table[-2:, 0])
    hop = max(float(ends[1] - ends[0]), 0.0) / float(largest - 2.0 ** curves.log2_groups[-2])
    return latency + hop * np.maximum(group - largest, 0), np.maximum(total - latency, 0.0)


def _place(values: FloatArray, grid: FloatArray) -> tuple[IntArray, FloatArray]:
    """Return the index of the grid interval of each value and how far into it the value lies, 0..1."""
    idx = np.clip(np.searchsorted(grid, values, side="right") - 1, 0, len(grid) - 2)
    return idx, np.clip((values - grid[idx]) / (grid[idx + 1] - grid[idx]), 0.0, 1.0)


def _between(low: FloatArray, high: FloatArray, part: FloatArray) -> FloatArray:
    return np.asarray(low + (high - low) * part)


@cache
def link_curves(name: str) -> Mapping[Op, Curves] | None:
    """Return the curves that a link's ``curve`` names; None where collective_curves.json has none of this name."""
    text = files(__package__).joinpath("collective_curves.json").read_text(encoding="utf-8")
    groups_of_op = json.loads(text)["links"].get(name)
    if groups_of_op is None:
        return None

    def parameters(latency_us: float, efficiency: float, ramp_us: float, **residual: Any) -> CurveParameters:
        first_knot, values = residual["first_knot"], tuple(residual["residual"])
        return CurveParameters(latency_us * 1e-6, efficiency, ramp_us * 1e-6, first_knot, values)

    return {
        op: tabulated({int(group): parameters(**values) for group, values in groups.items()})
        for op, groups in groups_of_op.items()
    }


# Next to kernels


class Pair(NamedTuple):
    """Slow-downs of two streams: extra seconds of one for each of its own seconds while the other runs. One element or [N].

    Attributes:
        compute: of kernels while a collective runs.
        collective: of the collective while kernels run.
    """

    compute: FloatArray | float
    collective: FloatArray | float


def slowdown_law(traffic: FloatArray | float, coefficients: Coefficients) -> Pair:
    """Return the slow-downs of kernels and a collective: a share for its channels' multiprocessors, one for its memory traffic.

    Args:
        traffic: bytes that a device sends per second over its memory's bandwidth.
        coefficients: those of [overlap].
    """
    law = coefficients["overlap"]
    return Pair(compute=law["channels"] + law["traffic"] * traffic, collective=law["compute"])


def pair_s(compute_s: FloatArray, collective_s: FloatArray, pair: Pair) -> FloatArray:
    """Return seconds of kernels and a collective [N] at once: max(C + x a (1 + b) / (1 + a), x + C b (1 + a) / (1 + b)).

    a and b are the slow-downs of compute and of the collective; each side of the maximum is the case in which the other ends first
    (`streams.together_s` of two). With a b < 1 it is never slower than one after the other.
    """
    a, b = pair
    by_compute = compute_s + collective_s * a * (1 + b) / (1 + a)
    by_collective = collective_s + compute_s * b * (1 + a) / (1 + b)
    return np.asarray(np.maximum(by_compute, by_collective))


def exposed_s(compute_s: FloatArray, collective_s: FloatArray, pair: Pair) -> FloatArray:
    """Return what a collective adds to the compute it overlaps [N]: at least the slow-down, at most what outlasts the compute."""
    return pair_s(compute_s, collective_s, pair) - compute_s
