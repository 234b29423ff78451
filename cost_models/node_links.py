"""Measured bandwidth between nodes: the slowest pair of nodes that a ring, a chain of hops or an exchange crosses.

Ranks count devices node by node, so a group of ranks with a stride names the nodes it lies on. Its steps wait for the slowest
pair of nodes that it crosses:

    ring    neighbours, and the last with the first       collectives, stages with several chunks
    chain   neighbours                                    pipeline stages
    all     every pair of the group                       all-to-all

BANDWIDTH[n, n'] is what one device of node n gets to its counterpart on node n' while the others of its node send as well; the
slower direction counts, because groups send both ways.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..schema import ClusterSpec
from .layouts import FloatArray, IntArray

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
