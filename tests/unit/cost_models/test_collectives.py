"""Collectives: the formula on cases that can be done by hand, and its laws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshwright.cost_models.hardware.collectives import NETWORK_RING_STEP_S, collective_s, p2p_s
from meshwright.cost_models.hardware.node_links import Hops
from meshwright.schema import ClusterSpec, Link, LinkLevel
from meshwright.schema.cluster import CollectiveLatency, LinkEfficiency
from meshwright.schema.profile import CollectivePoint

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
    # 8 rings, one through each NIC of a node; each carries all of its eighth but one part
    assert seconds("all_gather", 8e9, 32, 1, ideal) == pytest.approx(8e9 * 31 / 32 / 8 / 10e9)
    assert seconds("all_reduce", 8e9, 32, 1, ideal) == pytest.approx(2 * 8e9 * 31 / 32 / 8 / 10e9)


def test_one_group_gets_no_more_of_a_node_than_a_flow_carries(ideal: ClusterSpec) -> None:
    """8 devices of a node share 80 GB/s; a group of all of them gets 20 of these, eight groups of one each their 10."""
    limited = ideal.levels[1].link.replace(group_bandwidth_bytes_per_s=20e9)
    cluster = ideal.replace(levels=(ideal.levels[0], ideal.levels[1].replace(link=limited)))
    assert seconds("all_reduce", 8e9, 32, 1, cluster) == pytest.approx(2 * 8e9 * 31 / 32 / 20e9)
    assert seconds("all_reduce", 8e9, 16, 2, cluster) == pytest.approx(2 * 8e9 * 15 / 16 / 20e9)
    assert seconds("all_reduce", 1e9, 4, 8, cluster) == seconds("all_reduce", 1e9, 4, 8, ideal)
    slow = limited.replace(group_bandwidth_bytes_per_s=5e9)
    cluster = ideal.replace(levels=(ideal.levels[0], ideal.levels[1].replace(link=slow)))
    hops = Hops(np.array([2]), np.array([8]), "chain")
    assert float(p2p_s(np.array([1e9]), hops, cluster)[0]) == pytest.approx(1e9 / 5e9)


def test_all_reduce_between_two_nodes_sends_the_buffer_once_each_way(ideal: ClusterSpec) -> None:
    slow = LinkLevel(link=ideal_link("out", 1e9), domain_size=32)
    cluster = ideal.replace(levels=(ideal.levels[0], slow))
    assert seconds("all_reduce", 8e9, 16, 1, cluster) == pytest.approx(8e9 / 8 / 1e9)


def test_all_to_all_sends_what_leaves_the_node_through_each_ranks_own_nic(ideal: ClusterSpec) -> None:
    # every rank of 32 sends 24 of 32 parts to other nodes, whatever its node-mates send
    assert seconds("all_to_all", 8e9, 32, 1, ideal) == pytest.approx(8e9 * 24 / 32 / 10e9)


def test_one_member_a_node_uses_one_nic(ideal: ClusterSpec) -> None:
    assert seconds("all_gather", 8e9, 4, 8, ideal) == pytest.approx(8e9 * 3 / 4 / 10e9)


def test_group_of_one_costs_nothing(ideal: ClusterSpec) -> None:
    assert seconds("all_reduce", 8e9, 1, 4, ideal) == 0.0


def test_p2p_takes_the_link_it_crosses(ideal: ClusterSpec) -> None:
    times = p2p_s(np.array([1e9, 1e9]), Hops(np.array([5, 3]), np.array([1, 4]), "chain"), ideal)
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


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize(
    "cluster",
    ["4x8xH100-SXM-80GB/efa-v2", "2x8xA100-SXM-80GB", "8xMI300X", "4x4xL40S", "144xGB200", "2x4xV100-SXM2-32GB"],
)
def test_seconds_grow_with_bytes_and_with_the_node_count(op: str, cluster: str) -> None:
    spec = ClusterSpec.parse(cluster)
    groups = [n for n in (2, 4, 8, 16, 32, 64) if spec.num_devices % n == 0]
    sizes = np.logspace(2, 11, 200)
    for group in groups:
        times = collective_s(op, sizes, np.full(200, group), np.ones(200, dtype=np.int64), spec)
        assert np.all(np.diff(times) >= 0)
        assert times[0] > 0
        # saturated: a hundred times the bytes take about a hundred times as long at the end
        assert times[-1] / times[-2] == pytest.approx(sizes[-1] / sizes[-2], rel=0.05)


def test_hierarchical_is_not_slower_than_one_nic_for_all(ideal: ClusterSpec) -> None:
    """Eight rails carry what one shared NIC would carry alone."""
    shared = ideal.replace(
        levels=(ideal.levels[0], LinkLevel(link=ideal.levels[1].link.replace(shared_by="node"), domain_size=32))
    )
    for op in ("all_reduce", "all_gather", "all_to_all"):
        assert seconds(op, 8e9, 32, 1, ideal) < seconds(op, 8e9, 32, 1, shared)
        assert seconds(op, 8e9, 4, 8, shared) == pytest.approx(8 * seconds(op, 8e9, 4, 8, ideal))


def test_launch_of_many_messages_fills_the_fabric_once() -> None:
    """On EFA the first messages of a ring take 350 us a node, those that wait in the same launch 14."""
    cluster = ClusterSpec.parse("8x8xH100-SXM-80GB/efa-v2")
    ranks = np.array([8])
    alone = collective_s("all_gather", 1e9, ranks, ranks, cluster)
    among = collective_s("all_gather", 1e9, ranks, ranks, cluster, in_one_launch=True)
    base_s = cluster.levels[-1].link.collective_latency_s.base
    assert alone[0] - among[0] == pytest.approx(base_s + 7 * (350e-6 - NETWORK_RING_STEP_S), rel=1e-6)


def test_ring_between_nodes_pays_for_every_crossing_and_a_tree_for_every_doubling() -> None:
    cluster = ClusterSpec.parse("64x8xH100-SXM-80GB/efa-v2")
    link = cluster.levels[-1].link
    assert link.ring_step_s is not None
    gather = [seconds("all_gather", 2e9, 8 * nodes, 1, cluster) for nodes in (8, 16)]
    assert gather[1] - gather[0] == pytest.approx(8 * link.ring_step_s, rel=0.2)
    reduce = [seconds("all_reduce", 8.0, 8 * nodes, 1, cluster) for nodes in (8, 16)]
    assert reduce[1] - reduce[0] == pytest.approx(link.collective_latency_s.per_hop, rel=0.05)


def test_pair_on_a_mesh_uses_the_one_link_between_them() -> None:
    cluster = ClusterSpec.parse("8xMI300X")
    size = 4294967296.0
    assert size / seconds("all_reduce", size, 2, 1, cluster) == pytest.approx(47.7e9, rel=0.1)  # measured: stas
    assert 2 * 7 / 8 * size / seconds("all_reduce", size, 8, 1, cluster) == pytest.approx(312.9e9, rel=0.05)


PUBLISHED = [  # source, cluster, operation, devices, bytes, measured seconds
    ("dgxc-benchmarking nccl/README (MIT)", "8xH100-SXM-80GB", "all_reduce", 8, 2**34, 62648e-6),
    ("dgxc-benchmarking nccl/README (MIT)", "8xH100-SXM-80GB", "all_reduce", 8, 2**26, 325e-6),
    ("ml-engineering network/README", "8xH200-SXM-141GB", "all_reduce", 8, 2**31, 8010e-6),
    ("ml-engineering network/README", "8xA100-SXM-80GB", "all_reduce", 8, 2**33, 64074e-6),
    ("ml-engineering network/README", "8xB200-SXM-180GB", "all_reduce", 8, 2**32, 10148e-6),
    ("awsome-distributed-training (MIT-0)", "2x8xA100-SXM-80GB/efa-v1", "all_reduce", 16, 2**31, 51406e-6),
    ("awsome-distributed-training (MIT-0)", "2x8xH100-SXM-80GB/efa-v2", "all_reduce", 16, 2**34, 66132e-6),
    ("awsome-distributed-training (MIT-0)", "16x8xH100-SXM-80GB/efa-v2", "all_reduce", 128, 2**34, 92.2e-3),
    ("ml-engineering network/README", "4x8xB200-SXM-180GB/efa-v4", "all_reduce", 32, 2**34, 87182e-6),
    ("a3-mega log", "2x8xH100-SXM-80GB/tcpxo", "all_reduce", 16, 2**33, 47535e-6),
    ("cscs-docs (CC0)", "2x4xGH200-96GB/slingshot11", "all_reduce", 8, 2**27, 1916e-6),
    ("Jean Zay (bigscience, Apache-2.0)", "16x4xV100-SXM2-32GB/opa100", "all_reduce", 64, 4 * 10**9, 1.1467),
]


@pytest.mark.parametrize(("source", "cluster", "op", "devices", "size", "measured"), PUBLISHED)
def test_published_times_of_long_messages(
    source: str, cluster: str, op: str, devices: int, size: int, measured: float
) -> None:
    """Within 12 %: two benchmarks of the same machines differ by 5 to 10 % in these logs."""
    found = seconds(op, float(size), devices, 1, ClusterSpec.parse(cluster))
    assert found == pytest.approx(measured, rel=0.12), source


def test_measured_points_win_and_are_met() -> None:
    cluster = ClusterSpec.parse("8xA100-SXM-80GB")
    points = tuple(
        CollectivePoint(op="all_gather", group_size=8, size_bytes=size, time_s=time)
        for size, time in ((2**10, 1e-3), (2**20, 2e-3), (2**30, 1.0))
    )
    link = cluster.levels[0].link.replace(measured=points)
    here = cluster.replace(levels=(LinkLevel(link=link, domain_size=8),))
    for point in points:
        assert seconds("all_gather", float(point.size_bytes), 8, 1, here) == pytest.approx(point.time_s)
    assert 1e-3 < seconds("all_gather", 2.0**15, 8, 1, here) < 2e-3
    assert seconds("all_gather", 2.0**31, 8, 1, here) == pytest.approx(2.0)
    assert seconds("all_reduce", 2.0**20, 8, 1, here) == seconds("all_reduce", 2.0**20, 8, 1, cluster)
