"""Dispatch and combine of experts: distinct places by counting, laws, and what DeepEP prints."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from meshwright.cost_models.collectives import collective_s
from meshwright.cost_models.expert_exchange import NOTIFY_S, distinct_places, expert_exchange_s
from meshwright.schema import ClusterSpec


def seconds(token_bytes: float, top_k: int, group: int, cluster: ClusterSpec, stride: int = 1) -> float:
    return float(expert_exchange_s(token_bytes, top_k, np.array([group]), np.array([stride]), cluster)[0])


@pytest.mark.parametrize(("top_k", "places"), [(1, 4), (2, 3), (3, 4)])
def test_distinct_places_is_the_mean_over_all_choices(top_k: int, places: int) -> None:
    choices = list(itertools.product(range(places), repeat=top_k))
    assert distinct_places(top_k, np.array(places)) == pytest.approx(np.mean([len(set(c)) for c in choices]))


def test_group_of_one_costs_nothing_and_more_bytes_cost_more() -> None:
    cluster = ClusterSpec.parse("2x8xH100-SXM-80GB")
    assert seconds(1e9, 8, 1, cluster) == 0.0
    times = [seconds(size, 8, 16, cluster) for size in (1e3, 1e6, 1e9)]
    assert times == sorted(times)
    assert seconds(1e9, 8, 16, cluster) < expert_exchange_s(1e9, 8, np.array([16]), np.array([1]), cluster, 1.5)[0]


def test_sending_each_token_once_to_a_node_beats_sending_all_its_copies() -> None:
    cluster = ClusterSpec.parse("4x8xH100-SXM-80GB")
    group, stride = np.array([32]), np.array([1])
    copies = float(collective_s("all_to_all", 8 * 1e8, group, stride, cluster)[0])
    assert seconds(1e8, 8, 32, cluster) < copies / 2


@pytest.mark.parametrize(("nodes", "gb_per_s"), [(1, 153), (2, 43), (4, 58)])
def test_deepep_bandwidths_on_h800(nodes: int, gb_per_s: float) -> None:
    """4096 tokens of 7168 bytes, eight experts: NVLink bandwidth in a node, network bandwidth between (deepseek-ai/DeepEP, MIT).

    Their counts include what stays on the rank or node, hence 58 GB/s through a NIC of 50. Within 15 %.
    """
    cluster = ClusterSpec.parse(f"{nodes}x8xH800-SXM-80GB")
    size = 4096 * 7168.0
    transfer = seconds(size, 8, 8 * nodes, cluster) - seconds(0.0, 8, 8 * nodes, cluster)
    counted = size * float(distinct_places(8, np.array(8 if nodes == 1 else nodes)))
    assert counted / transfer / 1e9 == pytest.approx(gb_per_s, rel=0.15)


def test_nodes_exchange_counts_first() -> None:
    cluster = ClusterSpec.parse("4x8xH100-SXM-80GB")
    assert seconds(0.0, 8, 32, cluster) == pytest.approx(seconds(0.0, 8, 16, cluster) + NOTIFY_S)
