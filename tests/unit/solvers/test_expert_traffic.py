"""Placement for few visits: on tokens that it has not seen, against homes alone; the replica program against enumeration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from meshwright.schema import ConfigError
from meshwright.solvers.experts.instance import Router, check, make_instance, synthetic_loads, synthetic_trace
from meshwright.solvers.experts.placement import place_experts
from meshwright.solvers.experts.traffic import assign_homes, pair_counts, replicate_on_nodes, serve, visited_nodes


def clustered(num_tokens: int, *, factor: float, seed: int = 0) -> np.ndarray:
    """A layer of 32 experts in 8 hidden clusters; a token's cluster is `factor` times as likely."""
    rng = np.random.default_rng(seed)
    weight = np.ones((8, 32))
    for cluster, experts in enumerate(rng.permutation(32).reshape(8, 4)):
        weight[cluster, experts] = factor
    logits = np.log(weight[rng.integers(0, 8, num_tokens)]) + rng.gumbel(size=(num_tokens, 32))
    return np.argsort(-logits, axis=1)[:, None, :4]


@pytest.mark.long
def test_replicas_balance_nodes_on_unseen_tokens_without_more_visits() -> None:
    router = Router(num_layers=1, num_experts=64, top_k=8, num_groups=8, top_groups=4)
    trace = synthetic_trace(router, 6000, seed=1)
    seen, unseen = trace[::2], trace[1::2]
    options = {"num_gpus": 16, "num_nodes": 8, "num_slots": 96, "num_groups": 8}
    homes_alone = place_experts(None, trace=seen, **options).evaluate_trace(unseen)  # type: ignore[arg-type]
    placement = place_experts(None, trace=seen, objective="traffic", time_limit_s=3, **options)  # type: ignore[arg-type]
    found = placement.evaluate_trace(unseen)
    assert found.node_balance[0] < 1.06 < homes_alone.node_balance[0]
    assert found.visits_per_token[0] <= homes_alone.visits_per_token[0]
    instance = make_instance(placement.expert_load, num_gpus=16, num_slots=96, num_nodes=8)
    assert np.allclose(check(instance, placement.physical_to_logical, placement.share), placement.balance)


@pytest.mark.parametrize("objective", ["traffic", "pareto"])
def test_experts_used_together_share_a_node(objective: str) -> None:
    trace = clustered(4000, factor=40.0)
    seen, unseen = trace[::2], trace[1::2]
    options = {"num_gpus": 8, "num_nodes": 4, "num_slots": 32}
    apart = place_experts(None, trace=seen, **options).evaluate_trace(unseen)  # type: ignore[arg-type]
    near = place_experts(None, trace=seen, objective=objective, **options).evaluate_trace(unseen)  # type: ignore[arg-type]
    assert near.visits_per_token[0] < 0.8 * apart.visits_per_token[0]
    assert near.node_balance[0] < 1.06  # 1.05 on the tokens it has seen


def test_homes_of_separate_cliques_are_the_cliques() -> None:
    tokens = np.array([[4 * c + i for i in range(4)] for c in range(4)] * 10)
    shuffle = np.random.default_rng(0).permutation(16)
    tokens = shuffle[tokens]
    home = assign_homes(pair_counts(tokens, 16), np.ones(16), 4, 1.05)
    assert np.all(visited_nodes(tokens, home, 4).sum(axis=1) == 1)


def test_replica_program_is_as_good_as_the_best_enumerated_replica() -> None:
    """Two nodes, room for one replica on each: all pairs of experts are tried, with the best flow."""
    rng = np.random.default_rng(4)
    tokens = np.array([rng.choice(8, 3, replace=False, p=np.array([8, 6, 5, 4, 1, 1, 1, 1]) / 27) for _ in range(400)])
    home = np.arange(8) // 4
    visits = visited_nodes(tokens, home, 2)
    both = visits.all(axis=1)
    can = np.bincount(tokens[both].ravel(), minlength=8)
    load = np.bincount(home[tokens].ravel(), minlength=2)
    best = min(
        max(load[0] - flow, load[1] + flow)
        for expert in range(4)
        for flow in [min(can[expert], (load[0] - load[1]) / 2)]
    )
    routing = replicate_on_nodes(tokens, home, 2, 1, 8, time_limit_s=5, seed=0)
    expected = load[0] - (routing.part[:, 1] * can)[:4].sum()
    assert expected <= best * 1.002 + 1e-6  # the program's gap
    served = serve(tokens, routing, seed=0)
    assert served.visits <= visits.sum()
    assert served.tokens.sum() == tokens.size


def test_a_trace_must_be_one() -> None:
    good = {"num_gpus": 4, "num_nodes": 2, "num_slots": 8, "objective": "traffic"}
    with pytest.raises(ConfigError, match="need a trace"):
        place_experts(np.ones((1, 8)), **good)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="twice"):
        place_experts(np.ones((1, 8)), trace=np.array([[[1, 1]]]), **good)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"0\.\.7"):
        place_experts(np.ones((1, 8)), trace=np.array([[[1, 9]]]), **good)  # type: ignore[arg-type]


def test_synthetic_loads_have_the_stated_spread_and_drift() -> None:
    loads = synthetic_loads(20, 256, sigma=0.9, steps=2, drift=0.1)
    assert np.log(loads[0]).std() == pytest.approx(0.9, rel=0.05)  # 5120 draws
    assert np.log(loads[1] / loads[0]).std() == pytest.approx(0.1, rel=0.05)


def test_synthetic_tokens_keep_to_their_groups() -> None:
    trace = synthetic_trace(Router(num_layers=2, num_experts=32, top_k=4, num_groups=8, top_groups=2), 300)
    assert trace.shape == (300, 2, 4)
    for token, layer in itertools.product(range(300), range(2)):
        assert len(set(trace[token, layer])) == 4
        assert len(set(trace[token, layer] // 4)) <= 2


def test_a_router_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="fewer experts than top_k"):
        synthetic_trace(Router(num_layers=1, num_experts=32, top_k=8, num_groups=8, top_groups=1), 10)
