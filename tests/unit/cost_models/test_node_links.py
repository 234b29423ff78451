"""Measured bandwidth between nodes: which pairs count, and what they do to collectives and sends."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from meshwright.cost_models.hardware.collectives import collective_s, p2p_s
from meshwright.cost_models.hardware.node_links import Hops, NodeLinks, max_slowest, node_links, slowest_of
from meshwright.schema import ClusterSpec, ConfigError

NODES = 4


def cluster(matrix: np.ndarray, spec: str = "4x8xA100-SXM-80GB/ib200") -> ClusterSpec:
    return ClusterSpec.parse(spec).replace(bandwidth_matrix=tuple(map(tuple, matrix.tolist())))


def seconds(op: str, spec: ClusterSpec, group: int, stride: int) -> float:
    return float(collective_s(op, 1e9, np.array([group]), np.array([stride]), spec)[0])


@pytest.mark.parametrize(
    ("group", "stride", "pattern", "expected"),
    [
        (8, 1, "ring", []),
        (16, 1, "ring", [(0, 1), (1, 0), (2, 3), (3, 2)]),
        (32, 1, "ring", [(0, 1), (1, 2), (2, 3), (3, 0)]),
        (4, 8, "ring", [(0, 1), (1, 2), (2, 3), (3, 0)]),
        (4, 8, "loop", [(0, 1), (1, 2), (2, 3), (3, 0)]),
        (4, 8, "chain", [(0, 1), (1, 2), (2, 3)]),
        (4, 8, "all", [(a, b) for a in range(4) for b in range(4) if a != b]),
        (2, 16, "ring", [(0, 2), (1, 3), (2, 0), (3, 1)]),
        (8, 4, "chain", [(0, 1), (1, 2), (2, 3)]),
        (2, 24, "ring", [(0, 3), (3, 0)]),
    ],
)
def test_pairs_that_groups_cross(group: int, stride: int, pattern: str, expected: list[tuple[int, int]]) -> None:
    links = NodeLinks(((1.0,) * NODES,) * NODES, (8,) * NODES)
    assert [tuple(pair) for pair in links.crossed(group, stride, pattern)] == expected


def test_levels_between_nodes_count_their_own_pairs() -> None:
    links = NodeLinks(((1.0,) * NODES,) * NODES, (8,) * NODES)
    assert [tuple(p) for p in links.crossed(32, 1, "ring", inner=8, outer=16)] == [(0, 1), (2, 3)]
    assert [tuple(p) for p in links.crossed(32, 1, "ring", inner=16)] == [(1, 2), (3, 0)]


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_a_matrix_of_what_the_level_achieves_changes_nothing(op: str) -> None:
    plain = ClusterSpec.parse("4x8xA100-SXM-80GB/ib200")
    link = plain.levels[-1].link
    achieved = link.bandwidth_bytes_per_s * link.efficiency.p2p
    same = cluster(np.full((NODES, NODES), achieved))
    for group, stride in ((8, 1), (32, 1), (4, 8), (2, 16)):
        assert seconds(op, same, group, stride) == pytest.approx(seconds(op, plain, group, stride))
    hops = Hops(np.array([4]), np.array([8]), "chain")
    assert p2p_s(np.array([1e8]), hops, same) == pytest.approx(p2p_s(np.array([1e8]), hops, plain))


def test_only_groups_that_cross_the_slow_pair_are_slower() -> None:
    matrix = np.full((NODES, NODES), 20e9)
    slow = matrix.copy()
    slow[1, 2] = 1e9
    good, bad = cluster(matrix), cluster(slow)
    assert seconds("all_reduce", bad, 16, 1) == seconds("all_reduce", good, 16, 1)
    assert seconds("all_reduce", bad, 2, 16) == seconds("all_reduce", good, 2, 16)
    assert seconds("all_reduce", bad, 32, 1) > 5 * seconds("all_reduce", good, 32, 1)
    chain, apart = Hops(np.array([4]), np.array([8]), "chain"), Hops(np.array([2]), np.array([16]), "chain")
    size = np.array([1e9])
    assert p2p_s(size, chain, bad) == pytest.approx(
        (20 + 1) / 2 * p2p_s(size, chain, good), rel=0.01
    )  # there, and back
    assert p2p_s(size, apart, bad) == p2p_s(size, apart, good)


def test_nodes_that_do_not_reach_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"bandwidth_matrix\[0\]\[1\] is 0 bytes/s"):
        cluster(np.zeros((NODES, NODES)))
    assert node_links(ClusterSpec.parse("4x8xA100-SXM-80GB")) is None


def test_a_direction_that_no_ring_takes_costs_nothing() -> None:
    """Against the order of the ranks a ring sends nothing; an all-to-all does, and gradients of a pipeline."""
    matrix = np.full((NODES, NODES), 20e9)
    slow = matrix.copy()
    slow[2, 1] = 1e9
    good, bad = cluster(matrix), cluster(slow)
    for op in ("all_reduce", "all_gather", "reduce_scatter"):
        assert seconds(op, bad, 32, 1) == seconds(op, good, 32, 1)
    assert seconds("all_to_all", bad, 32, 1) > 5 * seconds("all_to_all", good, 32, 1)
    size, chain = np.array([1e9]), Hops(np.array([4]), np.array([8]), "chain")
    assert p2p_s(size, chain, bad) == pytest.approx((20 + 1) / 2 * p2p_s(size, chain, good), rel=0.01)


@pytest.mark.parametrize("seed", range(12))
def test_no_order_of_the_nodes_has_a_faster_slowest_pair(seed: int) -> None:
    """Against every order of five or six nodes; and where one group of all nodes sends to each other, the very same."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(5, 7))
    rates = rng.choice([1.0, 3.0, 20.0], (size, size)) * rng.uniform(0.9, 1.1, (size, size))
    links = NodeLinks(tuple(map(tuple, rates.tolist())), (8,) * size)
    for group, stride, pattern in (
        (size, 8, "ring"),
        (size, 8, "chain"),
        (2, 8, "ring"),
        (3, 8, "all"),
        (size * 8, 1, "all"),
    ):
        pairs = links.crossed(group, stride, pattern)
        orders = np.array(list(itertools.permutations(range(size))))
        best = float(rates[orders[:, pairs[:, 0]], orders[:, pairs[:, 1]]].min(axis=1).max())
        assert max_slowest(rates, pairs) >= best
        if group == size * 8:
            assert max_slowest(rates, pairs) == best == slowest_of(rates, pairs)


def test_a_ring_of_two_racks_crosses_between_them() -> None:
    """The best link of every node is a fast one; a ring of all of them takes a slow one, rings of a rack do not."""
    rack = np.arange(8) % 2
    rates = np.where(rack[:, None] == rack[None, :], 20.0, 2.0)
    everyone, halves = [
        [(k, (k + 1) % 8) for k in range(8)],
        [(4 * h + k, 4 * h + (k + 1) % 4) for h in (0, 1) for k in range(4)],
    ]
    assert max_slowest(rates, np.array(everyone)) == 2.0
    assert max_slowest(rates, np.array(halves)) == 20.0
