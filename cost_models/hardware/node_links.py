"""Measured bandwidth between nodes, in either direction: which pairs of nodes groups cross, and the slowest of them."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...schema import ClusterSpec
from ...schema.units import FloatArray, IntArray

Pattern = Literal["ring", "chain", "loop", "all"]
"""Who sends to whom: each rank to the next one, the last to the first (rings of collectives); neighbours to each other (pipeline
stages: activations there, gradients back), in a loop also the last and the first (several chunks); all to all of their group."""


class Hops(NamedTuple):
    """Neighbours of groups [N] of ``group`` ranks, ``stride`` apart, send to one another."""

    group: IntArray
    stride: IntArray
    pattern: Pattern


class NodeLinks:
    """Bandwidth [n, n] of the nodes in the order of the ranks, and which node each rank is on.

    It is what one device of node n gets to its counterpart on node n' while the others of its node send as well. A group's steps
    wait for the slowest pair of nodes of which one sends to the other. With ``any_order`` nodes may be listed in any order, and it
    is what no order exceeds: pairs of at least that rate have to join as many nodes, and each node with as many, as the groups do.
    """

    def __init__(
        self, matrix: tuple[tuple[float, ...], ...], node_sizes: tuple[int, ...], *, any_order: bool = False
    ) -> None:
        """Take the devices of each node."""
        self.bandwidth: FloatArray = np.array(matrix, dtype=np.float64)
        self.any_order = any_order
        self.node_of_rank = np.repeat(np.arange(len(node_sizes)), node_sizes)
        self._slowest: dict[tuple[int, int, Pattern, int, int, bool], float] = {}

    def slowest(
        self,
        group: int,
        stride: int,
        pattern: Pattern,
        inner: int = 1,
        outer: int | None = None,
        *,
        back: bool = False,
    ) -> float:
        """Return the bytes/s of the slowest pair that some group of ``group`` ranks crosses; infinite where none leaves its node.

        Only pairs in different domains of ``inner`` ranks and in the same one of ``outer`` ranks count; with ``back`` the way back.
        """
        key = (group, stride, pattern, inner, outer or len(self.node_of_rank), back)
        if key not in self._slowest:
            pairs = self.crossed(group, stride, pattern, inner, outer)
            pairs = pairs[:, ::-1] if back else pairs
            bottleneck = max_slowest if self.any_order else slowest_of
            self._slowest[key] = bottleneck(self.bandwidth, pairs)
        return self._slowest[key]

    def crossed(
        self, group: int, stride: int, pattern: Pattern, inner: int = 1, outer: int | None = None
    ) -> NDArray[np.int64]:
        """Return the pairs of nodes [P, 2], sender first, that the groups cross; the arguments are those of `slowest`."""
        world = len(self.node_of_rank)
        ranks = np.arange(world)
        place = ranks // stride % group
        if pattern == "all":
            pairs = [(ranks, ranks + step * stride, place + step < group) for step in range(1, group)]
            pairs += [(second, first, exists) for first, second, exists in pairs]
        else:
            pairs = [(ranks, ranks + stride, place + 1 < group)]
            if pattern != "chain":
                pairs.append((ranks, ranks - (group - 1) * stride, place == group - 1))
        steps = [
            np.stack([first, second], axis=1)[exists & (np.maximum(first, second) < world) & (second >= 0)]
            for first, second, exists in pairs
        ]
        sent = np.concatenate([*steps, np.zeros((0, 2), dtype=np.int64)])
        apart = sent[:, 0] // inner != sent[:, 1] // inner
        joined = sent[:, 0] // (outer or world) == sent[:, 1] // (outer or world)
        nodes = self.node_of_rank[sent[apart & joined]]
        return np.unique(nodes[nodes[:, 0] != nodes[:, 1]], axis=0)


def slowest_of(bandwidth: FloatArray, pairs: IntArray) -> float:
    """Return the least rate over pairs of nodes [P, 2], sender first; infinite without any."""
    return float(np.min(bandwidth[pairs[:, 0], pairs[:, 1]], initial=np.inf))


def max_slowest(bandwidth: FloatArray, pairs: IntArray) -> float:
    """Return a rate that `slowest_of` exceeds in no order of the nodes: the largest that satisfies what every order needs.

    With the links of at least that rate: nodes that groups join, as many as they join; and of nodes that send to (hear from) so
    many others as many as there are in the groups.
    """
    size, away = len(bandwidth), ~np.eye(len(bandwidth), dtype=bool)
    if not len(pairs):
        return np.inf
    needed = np.zeros((size, size), dtype=bool)
    needed[pairs[:, 0], pairs[:, 1]] = True
    rings = _joined_sizes(needed, "strong")
    connection: Literal["strong", "weak"] = "strong" if np.array_equal(rings, _joined_sizes(needed, "weak")) else "weak"
    groups, degrees = _joined_sizes(needed, connection), _degrees(needed)
    groups = groups[groups > 1]
    rates = np.unique(bandwidth[away])
    low, high = 0, len(rates) - 1  # all links satisfy everything
    while low < high:
        middle = (low + high + 1) // 2
        links = (bandwidth >= rates[middle]) & away
        joined = _joined_sizes(links, connection)
        enough = all(np.sum(joined // number) >= np.sum(groups >= number) for number in np.unique(groups))
        if enough and np.all(_degrees(links) >= degrees):
            low = middle
        else:
            high = middle - 1
    return float(rates[low])


def _joined_sizes(links: NDArray[np.bool_], connection: Literal["strong", "weak"]) -> IntArray:
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    return np.bincount(connected_components(csr_array(links), connection=connection)[1])


def _degrees(links: NDArray[np.bool_]) -> IntArray:
    """Return the numbers of nodes that each one sends to, and hears from, in descending order [2, n]."""
    return np.sort(np.stack([links.sum(axis=1), links.sum(axis=0)]), axis=1)[:, ::-1]


_links = lru_cache(maxsize=256)(NodeLinks)


def node_links(cluster: ClusterSpec) -> NodeLinks | None:
    """Return what was measured between the nodes of a cluster; None where nothing was."""
    if cluster.bandwidth_matrix is None:
        return None
    return _links(cluster.bandwidth_matrix, cluster.node_sizes, any_order=cluster.any_node_order)


def slowest_rates(
    cluster: ClusterSpec,
    group: IntArray,
    stride: IntArray,
    pattern: Pattern,
    inner: int = 1,
    outer: int | None = None,
    *,
    back: bool = False,
) -> FloatArray:
    """Return `NodeLinks.slowest` of many groups [N] at once, on a cluster with measurements."""
    links = node_links(cluster)
    assert links is not None
    base = int(stride.max(initial=0)) + 1
    pairs, case_idx = np.unique(group * base + stride, return_inverse=True)
    rates = [links.slowest(*divmod(int(pair), base), pattern, inner, outer, back=back) for pair in pairs]
    return np.asarray(np.array(rates)[case_idx.reshape(group.shape)])
