"""Rank mapping: never worse than the identity, against brute force, and its laws."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.solvers import rank_mapping
from meshwright.solvers.backend import Status
from meshwright.solvers.rank_mapping import Axis, RankMappingInstance, check, lower_bound_s, solve


def ring(places: list[int]) -> list[tuple[int, int]]:
    return [tuple(sorted(pair)) for pair in zip(places, [*places[1:], places[0]], strict=True) if len(places) > 1]


def random_instance(seed: int, num_positions: int, *, num_kinds: int = 1) -> RankMappingInstance:
    """Rings within blocks of two or four places, and hops between the places of consecutive blocks."""
    rng = np.random.default_rng(seed)
    rates = rng.choice([1e9, 5e9, 10e9, 25e9], (num_positions, num_positions)) * rng.uniform(
        0.8, 1.2, (num_positions, num_positions)
    )
    size = int(rng.choice([d for d in (1, 2, 4) if num_positions % d == 0]))
    blocks = np.arange(num_positions).reshape(-1, size)
    rings = {pair for block in blocks for pair in ring([int(k) for k in block])}
    hops = {(int(a), int(b)) for i, j in itertools.pairwise(blocks) for a, b in zip(i, j, strict=True)}
    axes = [Axis(float(rng.uniform(1e9, 1e11)), np.array(sorted(pairs))) for pairs in (rings, hops) if pairs]
    kind = np.repeat(np.arange(num_kinds), -(-num_positions // num_kinds))[:num_positions]
    if num_kinds > 1:
        size = 1
    return RankMappingInstance(np.minimum(rates, rates.T), tuple(axes), kind, np.arange(num_positions) // size)


def brute_force(instance: RankMappingInstance) -> float:
    """Least objective over every order, from the definition, all orders at once."""
    orders = np.array(list(itertools.permutations(range(instance.num_positions))))
    same_block = instance.block[1:] == instance.block[:-1]
    orders = orders[np.all((np.diff(orders, axis=1) > 0) | ~same_block, axis=1)]
    total = np.zeros(len(orders))
    for axis in instance.axes:
        a, b = orders[:, axis.pairs[:, 0]], orders[:, axis.pairs[:, 1]]
        total += axis.weight / instance.bandwidth[a, b].min(axis=1)
    return float(total.min())


@pytest.mark.parametrize("num_positions", [3, 4, *(pytest.param(n, marks=pytest.mark.long) for n in (6, 8))])
def test_best_order_of_brute_force_is_found_nearly_always(num_positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local search proves nothing, but on few nodes it seldom misses; never below the optimum, never above the identity."""
    monkeypatch.setattr(rank_mapping, "ALL_ORDERS_UP_TO", 0)
    met, seeds = 0, range(25)
    for seed in seeds:
        instance = random_instance(seed, num_positions)
        found, best = solve(instance), brute_force(instance)
        assert found.objective == pytest.approx(check(instance, found.choice))
        assert best * (1 - 1e-9) <= found.objective <= check(instance, tuple(range(num_positions))) * (1 + 1e-9)
        assert found.bound <= best * (1 + 1e-9)
        assert found.status is Status.FEASIBLE or found.objective == pytest.approx(best)
        met += found.objective <= best * (1 + 1e-9)
    assert met >= 0.9 * len(seeds)


@pytest.mark.parametrize("seed", range(6))
def test_the_order_of_few_nodes_is_proved(seed: int) -> None:
    instance = random_instance(seed, 6, num_kinds=1 + seed % 2)
    found = solve(instance)
    assert found.status is Status.OPTIMAL
    assert found.choice is not None
    assert found.objective == pytest.approx(check(instance, found.choice))
    assert found.objective <= check(instance, tuple(range(6)))
    if seed % 2 == 0:
        assert found.objective == pytest.approx(brute_force(instance))


@pytest.mark.long
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), num_positions=st.sampled_from([4, 8, 12, 16]), num_kinds=st.integers(1, 3))
def test_never_worse_than_the_identity_and_within_the_constraints(
    seed: int, num_positions: int, num_kinds: int
) -> None:
    instance = random_instance(seed, num_positions, num_kinds=num_kinds)
    found = solve(instance)
    assert check(instance, found.choice) <= check(instance, tuple(range(num_positions))) * (1 + 1e-9)
    assert lower_bound_s(instance) <= found.objective * (1 + 1e-9)
    assert solve(instance).choice == found.choice


def test_two_racks_that_are_listed_alternately_are_sorted_out() -> None:
    """Even nodes reach each other ten times faster than odd ones; rings of four and one hop between the rings."""
    same = np.arange(8)[:, None] % 2 == np.arange(8)[None, :] % 2
    rings = Axis(1e10, np.array([*ring([0, 1, 2, 3]), *ring([4, 5, 6, 7])]))
    hops = Axis(1e8, np.array([(k, k + 4) for k in range(4)]))
    instance = RankMappingInstance(
        np.where(same, 10e9, 1e9), (rings, hops), np.zeros(8, dtype=np.int64), np.arange(8) // 4
    )
    found = solve(instance)
    assert sorted(found.choice[:4]) in ([0, 2, 4, 6], [1, 3, 5, 7])
    assert found.objective == pytest.approx(1e10 / 10e9 + 1e8 / 1e9)


@pytest.mark.parametrize(
    ("node", "tag"), [((0, 0, 2, 3), "once (C1)"), ((0, 2, 1, 3), "kind (C2)"), ((1, 0, 2, 3), "order (C3)")]
)
def test_check_names_the_broken_constraint(node: tuple[int, ...], tag: str) -> None:
    kind, block = np.array([0, 0, 1, 1]), np.array([0, 0, 1, 1])
    instance = RankMappingInstance(np.ones((4, 4)), (Axis(1.0, np.array([(0, 1)])),), kind, block)
    with pytest.raises(ValueError, match=tag.replace("(", r"\(").replace(")", r"\)")):
        check(instance, node)
