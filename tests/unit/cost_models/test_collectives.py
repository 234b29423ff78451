"""Collectives: the formula on cases that can be done by hand, and its laws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshwright.cost_models.collectives import collective_s, p2p_s
from meshwright.schema import ClusterSpec, Link, LinkLevel
from meshwright.schema.cluster import CollectiveLatency, LinkEfficiency

_ALL = LinkEfficiency(p2p=1, all_reduce=1, all_gather=1, reduce_scatter=1, all_to_all=1)


def ideal_link(name: str, bandwidth: float) -> Link:
    return Link(
        name=name,
        kind="scale-up",
        bandwidth_bytes_per_s=bandwidth,
        latency_s=0,
        efficiency=_ALL,
        collective_latency_s=CollectiveLatency(base=0, per_hop=0),
    )


@pytest.fixture(scope="module")
def ideal() -> ClusterSpec:
    """4 nodes of 8, 100 GB/s inside and 10 GB/s per device between them, no latency."""
    spec = ClusterSpec.parse("4x8xH100-SXM-80GB")
    levels = (
        LinkLevel(link=ideal_link("in", 100e9), domain_size=8),
        LinkLevel(link=ideal_link("out", 10e9), domain_size=32),
    )
    return spec.replace(levels=levels)


def seconds(op: str, size: float, group: int, stride: int, cluster: ClusterSpec) -> float:
    return float(collective_s(op, size, np.array([group]), np.array([stride]), cluster)[0])


def test_in_node_all_gather_moves_its_share_once(ideal: ClusterSpec) -> None:
    assert seconds("all_gather", 8e9, 8, 1, ideal) == pytest.approx(8e9 * 7 / 8 / 100e9)


def test_all_reduce_is_twice_the_reduce_scatter(ideal: ClusterSpec) -> None:
    assert seconds("all_reduce", 8e9, 8, 1, ideal) == pytest.approx(2 * seconds("reduce_scatter", 8e9, 8, 1, ideal))


def test_across_nodes_every_nic_carries_its_share(ideal: ClusterSpec) -> None:
    # 8 members a node: each NIC moves 3/4 of the buffer divided by 8; slower than the node's own 7/8 at 100 GB/s.
    assert seconds("all_gather", 8e9, 32, 1, ideal) == pytest.approx(max(8e9 * 7 / 8 / 100e9, 8e9 * 3 / 4 / 8 / 10e9))


def test_one_member_a_node_uses_one_nic(ideal: ClusterSpec) -> None:
    assert seconds("all_gather", 8e9, 4, 8, ideal) == pytest.approx(8e9 * 3 / 4 / 10e9)


def test_group_of_one_costs_nothing(ideal: ClusterSpec) -> None:
    assert seconds("all_reduce", 8e9, 1, 4, ideal) == 0.0


def test_p2p_takes_the_link_it_crosses(ideal: ClusterSpec) -> None:
    times = p2p_s(np.array([1e9, 1e9]), np.array([4, 8]), ideal)
    assert times == pytest.approx([1e9 / 100e9, 1e9 / 10e9])


@given(
    size=st.floats(1e3, 1e11),
    group=st.sampled_from([2, 4, 8, 16, 32]),
    op=st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]),
)
def test_more_bytes_never_faster_and_more_bandwidth_never_slower(size: float, group: int, op: str) -> None:
    cluster = ClusterSpec.parse("4x8xH100-SXM-80GB/ib200")
    faster = ClusterSpec.parse("4x8xH100-SXM-80GB/ib400")
    assert seconds(op, 2 * size, group, 1, cluster) >= seconds(op, size, group, 1, cluster)
    assert seconds(op, size, group, 1, faster) <= seconds(op, size, group, 1, cluster) * (1 + 1e-12)


def test_group_that_straddles_nodes_pays_for_the_network(ideal: ClusterSpec) -> None:
    """Three neighbours do not fill nodes of eight: some group of them lies across two."""
    assert seconds("all_gather", 3e9, 3, 1, ideal) == pytest.approx(3e9 * 2 / 3 / 10e9)
