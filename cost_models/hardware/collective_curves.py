"""Measured shape of collectives: seconds against size, for each kind of link, operation and number of devices.

A collective of n devices that moves b bytes through each device's link of rate W takes

    t(x) = (latency + x / efficiency + sqrt(ramp * x)) * exp(residual(x)),   x = b / W

with x the seconds at line rate. The square root is the pipeline fill: a message in k chunks over a path of latency a
takes k a + (1 + 1/k) x / e, least at x / e + 2 sqrt(a x / e). The residual is piecewise linear in log x and holds what
this shape misses: the switches of NCCL between its protocols (LL, LL128, Simple) and, for the all-reduce of Hopper and
Blackwell, the reduction in the switch (NVLS). In units of x one curve serves links of other rates, such as the halved
NVLink of an H800. Curves are made non-decreasing. Parameters: collective_curves.json, written by
``python -m meshwright.fitting collectives``.

Measured bandwidth between nodes: the slowest pair of nodes that a ring, a chain of hops or an exchange crosses.

Ranks count devices node by node, so a group of ranks with a stride names the nodes it lies on. Its steps wait for the slowest
pair of nodes that it crosses:

    ring    neighbours, and the last with the first       collectives, stages with several chunks
    chain   neighbours                                    pipeline stages
    all     every pair of the group                       all-to-all

BANDWIDTH[n, n'] is what one device of node n gets to its counterpart on node n' while the others of its node send as well; the
slower direction counts, because groups send both ways.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...schema import ClusterSpec
from ...schema.arrays import FloatArray, IntArray

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


KNOT_STEP = 2.0
"""Distance of the residual's knots in log2 of the seconds at line rate: a factor of four."""


_LOG2_GRID = np.arange(-34.0, 4.01, 0.5)
"""Where curves are tabulated; they continue in proportion to x beyond it."""


MIN_X = 2.0 ** float(_LOG2_GRID[0])


class CurveParameters(NamedTuple):
    """One operation over one number of devices.

    Attributes:
        latency_s: a message without content.
        efficiency: share of the line rate that a long message approaches.
        ramp_s: pipeline fill.
        first_knot: log2 seconds at line rate of the first value of ``residual``; the others follow KNOT_STEP apart.
        residual: log of measured over the shape; beyond the knots it stays what it is at the nearest.
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
    """The shape without residual: ``latency + x / efficiency + sqrt(ramp x)``."""
    return np.asarray(parameters.latency_s + x / parameters.efficiency + np.sqrt(parameters.ramp_s * x))


def knots(parameters: CurveParameters) -> FloatArray:
    """Positions of the residual's values, log2 seconds at line rate."""
    return np.asarray(parameters.first_knot + KNOT_STEP * np.arange(len(parameters.residual)))


def tabulated(by_group: Mapping[int, CurveParameters]) -> Curves:
    """Curves of one operation from the parameters of each number of devices."""
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
    """Latency and transfer seconds of groups [N] of at least two devices whose links are busy for ``x`` [N] at line rate.

    Between measured numbers of devices log seconds are linear in the log of the number. Beyond the largest, the latency grows
    by as much for each device as between the two largest (rings), the transfer stays.
    """
    largest = 2.0 ** curves.log2_groups[-1]
    row, row_part = _place(np.log2(np.clip(group, 2, largest)), curves.log2_groups)
    log_x = np.log2(np.maximum(x, MIN_X))
    column, column_part = _place(log_x, _LOG2_GRID)
    table = curves.log_seconds
    latency = np.exp(_mixed(table[row, 0], table[row + 1, 0], row_part))
    low = _mixed(table[row, column], table[row, column + 1], column_part)
    high = _mixed(table[row + 1, column], table[row + 1, column + 1], column_part)
    beyond = 2.0 ** np.maximum(log_x - _LOG2_GRID[-1], 0.0)
    total = np.exp(_mixed(low, high, row_part)) * beyond
    ends = np.exp(table[-2:, 0])
    hop = max(float(ends[1] - ends[0]), 0.0) / float(largest - 2.0 ** curves.log2_groups[-2])
    return latency + hop * np.maximum(group - largest, 0), np.maximum(total - latency, 0.0)


def _place(values: FloatArray, grid: FloatArray) -> tuple[IntArray, FloatArray]:
    """Index of the grid interval of each value and how far into it the value lies, 0..1."""
    idx = np.clip(np.searchsorted(grid, values, side="right") - 1, 0, len(grid) - 2)
    return idx, np.clip((values - grid[idx]) / (grid[idx + 1] - grid[idx]), 0.0, 1.0)


def _mixed(low: FloatArray, high: FloatArray, part: FloatArray) -> FloatArray:
    return np.asarray(low + (high - low) * part)


@cache
def link_curves(name: str) -> Mapping[Op, Curves] | None:
    """The curves that a link's ``curve`` names; None where there are none of this name."""
    entry = _document()["links"].get(name)
    if entry is None:
        return None
    return {
        op: tabulated({int(n): _parameters(values) for n, values in groups.items()}) for op, groups in entry.items()
    }


def _parameters(values: Mapping[str, Any]) -> CurveParameters:
    return CurveParameters(
        values["latency_us"] * 1e-6,
        values["efficiency"],
        values["ramp_us"] * 1e-6,
        values["first_knot"],
        tuple(values["residual"]),
    )


@cache
def _document() -> dict[str, Any]:
    text = files(__package__).joinpath("collective_curves.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


Pattern = Literal["ring", "chain", "all"]


class NodeLinks:
    """BANDWIDTH [n, n] of the nodes in the order of the ranks, and which node each rank is on."""

    def __init__(self, matrix: tuple[tuple[float, ...], ...], node_sizes: tuple[int, ...]) -> None:
        """Devices of each node; nothing else is worked out before it is asked for."""
        bandwidth = np.array(matrix, dtype=np.float64)
        self.bandwidth: FloatArray = np.minimum(bandwidth, bandwidth.T)
        self.node_of_rank = np.repeat(np.arange(len(node_sizes)), node_sizes)
        self._slowest: dict[tuple[int, int, Pattern, int, int], float] = {}

    def slowest(self, group: int, stride: int, pattern: Pattern, inner: int = 1, outer: int | None = None) -> float:
        """Bytes/s of the slowest pair that some group of ``group`` ranks crosses; infinite where none leaves its node.

        Args:
            group, stride: ranks of a group and the distance between neighbours.
            pattern: who sends to whom.
            inner, outer: only pairs in different domains of ``inner`` ranks and in the same one of ``outer`` ranks.
        """
        key = (group, stride, pattern, inner, outer or len(self.node_of_rank))
        if key not in self._slowest:
            a, b = self.crossed(group, stride, pattern, inner, outer).T
            self._slowest[key] = float(np.min(self.bandwidth[a, b], initial=np.inf))
        return self._slowest[key]

    def crossed(
        self, group: int, stride: int, pattern: Pattern, inner: int = 1, outer: int | None = None
    ) -> NDArray[np.int64]:
        """Pairs of nodes [P, 2], each once, that the groups cross; the arguments are those of `slowest`."""
        world = len(self.node_of_rank)
        ranks = np.arange(world)
        place = ranks // stride % group
        if pattern == "all":
            pairs = [(ranks, ranks + step * stride, place + step < group) for step in range(1, group)]
        else:
            pairs = [(ranks, ranks + stride, place + 1 < group)]
            if pattern == "ring":
                pairs.append((ranks, ranks + (group - 1) * stride, place == 0))
        found = [np.stack([first, second], axis=1)[kept & (second < world)] for first, second, kept in pairs]
        sent = np.concatenate([*found, np.zeros((0, 2), dtype=np.int64)])
        apart = sent[:, 0] // inner != sent[:, 1] // inner
        joined = sent[:, 0] // (outer or world) == sent[:, 1] // (outer or world)
        nodes = np.sort(self.node_of_rank[sent[apart & joined]], axis=1)
        return np.unique(nodes[nodes[:, 0] != nodes[:, 1]], axis=0)


@lru_cache(maxsize=256)
def _links(matrix: tuple[tuple[float, ...], ...], node_sizes: tuple[int, ...]) -> NodeLinks:
    return NodeLinks(matrix, node_sizes)


def node_links(cluster: ClusterSpec) -> NodeLinks | None:
    """What was measured between the nodes of a cluster; None where nothing was."""
    if cluster.bandwidth_matrix is None:
        return None
    return _links(cluster.bandwidth_matrix, cluster.node_sizes)


def slowest_rates(
    cluster: ClusterSpec, group: IntArray, stride: IntArray, pattern: Pattern, inner: int = 1, outer: int | None = None
) -> FloatArray | None:
    """`NodeLinks.slowest` of many groups [N] at once; None without measurements."""
    links = node_links(cluster)
    if links is None:
        return None
    base = int(stride.max(initial=0)) + 1
    kinds, like = np.unique(group * base + stride, return_inverse=True)
    rates = [links.slowest(*divmod(int(kind), base), pattern, inner, outer) for kind in kinds]
    return np.asarray(np.array(rates)[like.reshape(group.shape)])
