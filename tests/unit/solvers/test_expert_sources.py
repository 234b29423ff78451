"""Loads by source rank: where GPUs go, against every order of them; and more slots than experts with one GPU a node."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import strategies as st
from meshwright.schema import ConfigError
from meshwright.solvers.experts.instance import Router, check, make_instance, synthetic_trace, uniform_shares
from meshwright.solvers.experts.placement import place_experts, rebalance_experts
from meshwright.solvers.experts.sources import off_node_tokens
from tiers import drawn


def counted_off_node(sources: np.ndarray, placed: np.ndarray, num_gpus: int, num_nodes: int) -> float:
    """Count the tokens of one layer that leave their node, one slot and source at a time."""
    share, leaving = uniform_shares(placed, sources.shape[2])[0], 0.0
    per_gpu, per_node = placed.shape[1] // num_gpus, num_gpus // num_nodes
    for rank, slot in itertools.product(range(len(sources)), range(placed.shape[1])):
        if rank // (len(sources) // num_nodes) != slot // per_gpu // per_node:
            leaving += sources[rank, 0, placed[0, slot]] * share[slot]
    return leaving


@drawn(few=4, many=15, seed=st.integers(0, 10**6), num_nodes=st.sampled_from([2, 4]), ranks_per_node=st.integers(1, 2))
def test_no_order_of_the_gpus_keeps_more_tokens_on_their_node(seed: int, num_nodes: int, ranks_per_node: int) -> None:
    rng = np.random.default_rng(seed)
    sources = rng.lognormal(0, 1.2, (num_nodes * ranks_per_node, 1, 8)) * (rng.random((1, 1, 8)) < 0.9)
    sources[0, 0, 0] += 1
    near = place_experts(None, sources=sources, num_gpus=4, num_nodes=num_nodes, num_slots=12)
    anywhere = place_experts(sources.sum(axis=0), num_gpus=4, num_nodes=num_nodes, num_slots=12)
    contents = near.physical_to_logical.reshape(4, 3)
    best = min(
        counted_off_node(sources, contents[list(order)].reshape(1, 12), 4, num_nodes)
        for order in itertools.permutations(range(4))
    )
    assert near.off_node_tokens[0] == pytest.approx(best)
    assert near.balance[0] == pytest.approx(anywhere.balance[0])


def test_a_node_that_uses_its_own_experts_gets_them() -> None:
    """Node 1 uses experts 0 to 3 only, node 0 the others: no token needs to leave."""
    sources = np.zeros((2, 1, 8))
    sources[0, 0, 4:], sources[1, 0, :4] = 1.0, 1.0
    placed = np.array([[4, 5, 6, 7, 0, 1, 2, 3]])
    instance = make_instance(sources.sum(axis=0), num_gpus=4, num_slots=8, num_nodes=2)
    assert off_node_tokens(instance, placed, sources)[0] == 0
    assert off_node_tokens(instance, placed[:, ::-1], sources)[0] == 8


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sources": np.ones((3, 2, 8))}, "2 nodes of equal size"),
        ({"sources": -np.ones((4, 2, 8))}, "64 of 64 are negative"),
        ({"sources": np.ones((4, 8))}, "ranks, layers, experts"),
        ({"split": "weighted"}, "uniform shares"),
        ({"num_groups": 2}, "without groups"),
        ({"gpu_speed": [1, 1, 1, 2]}, "alike"),
    ],
)
def test_bad_sources_are_refused(change: dict, said: str) -> None:
    good = {"sources": np.ones((4, 2, 8)), "num_gpus": 4, "num_nodes": 2, "num_slots": 12}
    with pytest.raises(ConfigError, match=said):
        place_experts(None, **{**good, **change})


def test_replicas_with_one_gpu_on_each_node() -> None:
    """The experts of a group are too few for the slots of their node, so that groups do not stay together."""
    load = np.random.default_rng(0).lognormal(0, 1.0, (3, 16))
    placed, _, counts = rebalance_experts(load, 24, 8, 8, 8)
    assert np.array_equal(counts.sum(axis=1), [24, 24, 24])
    assert np.all(counts >= 1)
    assert np.all(np.diff(np.sort(placed.reshape(3, 8, 3), axis=2), axis=2) > 0)
    with pytest.raises(ConfigError, match="cannot be filled with its own experts"):
        place_experts(load, num_gpus=8, num_nodes=8, num_groups=8, num_slots=24)


@pytest.mark.parametrize("num_groups", [4, None])
def test_traffic_with_one_gpu_on_each_node_and_replicas(num_groups: int | None) -> None:
    router = Router(num_layers=2, num_experts=16, top_k=4, sigma=0.9, num_groups=4, top_groups=2)
    trace = synthetic_trace(router, 2000, seed=1)
    options = {"num_gpus": 4, "num_nodes": 4, "num_groups": num_groups, "objective": "traffic", "time_limit_s": 1}
    plain = place_experts(None, trace=trace, num_slots=16, **options)  # type: ignore[arg-type]
    more = place_experts(None, trace=trace, num_slots=32, **options)  # type: ignore[arg-type]
    on_gpus = np.sort(more.physical_to_logical.reshape(2, 4, 8), axis=2)
    assert np.all(np.diff(on_gpus, axis=2) > 0)
    instance = make_instance(more.expert_load, num_gpus=4, num_slots=32, num_nodes=4)
    assert np.allclose(check(instance, more.physical_to_logical, more.share), more.balance)
    assert np.all(more.evaluate_trace(trace).node_balance <= plain.evaluate_trace(trace).node_balance + 1e-9)
