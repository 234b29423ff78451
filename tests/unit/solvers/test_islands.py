"""Islands with slow links: against brute force over orders and choices, an event simulation of the ring, and the laws of shares."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.schema.local_updates import wire_bytes
from meshwright.solvers.islands import (
    FRAGMENTS,
    NEARLY,
    Exchange,
    IslandsInstance,
    best_ring,
    check,
    deal,
    ring_s,
    slowest_bound_s,
    slowest_edge_s,
    solve,
    step_s,
)


def random_instance(seed: int, n: int, *, max_steps: int = 8, max_delay: int = 2) -> IslandsInstance:
    rng = np.random.default_rng(seed)
    rate = rng.uniform(1e7, 1e9, (n, n)) * (rng.random((n, n)) > 0.15)
    return IslandsInstance(
        step_s=rng.uniform(1, 3, n), rate=rate, latency_s=rng.uniform(0.001, 0.1, (n, n)), num_params=1e9,
        max_steps=max_steps, max_delay=max_delay,
    )  # fmt: skip


def all_choices(instance: IslandsInstance) -> list[Exchange]:
    n = len(instance.step_s)
    orders = [(0, *rest) for rest in itertools.permutations(range(1, n))]
    return [
        Exchange(order, steps, p, bits, delay)
        for order in orders
        for p in FRAGMENTS
        for steps in range(p, instance.max_steps + 1, p)
        for bits in instance.bits
        for delay in range(min(instance.max_delay, steps // p - 1) + 1)
    ]


@pytest.mark.parametrize(("seed", "n"), [(seed, n) for seed in range(6) for n in (2, 3, 4, 5)])
def test_no_choice_is_faster_than_the_bound_and_the_choice_is_nearly_that(seed: int, n: int) -> None:
    instance = random_instance(seed, n)
    best_s = min(step_s(instance, choice) for choice in all_choices(instance))
    solution = solve(instance)
    if math.isinf(best_s):
        assert solution.choice is None
        return
    assert solution.choice is not None
    assert solution.bound == pytest.approx(best_s, rel=1e-12)
    assert solution.objective == check(instance, solution.choice) <= best_s * (1 + NEARLY) * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_orders_are_exact(seed: int) -> None:
    edges = random_instance(seed, 7).edge_s(1, 8)
    best_s = min(slowest_edge_s(edges, (0, *rest)) for rest in itertools.permutations(range(1, 7)))
    order, bound_s = best_ring(edges)
    assert sorted(order) == list(range(7))
    assert slowest_edge_s(edges, order) == best_s == bound_s


def test_many_islands_get_a_ring_near_its_bound() -> None:
    rng = np.random.default_rng(1)
    place = rng.uniform(0, 1, (16, 2))
    edges = np.linalg.norm(place[:, None] - place[None], axis=2) + 0.01
    np.fill_diagonal(edges, np.inf)
    order, bound_s = best_ring(edges)
    assert sorted(order) == list(range(16))
    assert bound_s <= slowest_edge_s(edges, order) <= 1.6 * bound_s
    exact, _ = best_ring(edges[:10, :10])
    assert slowest_edge_s(edges, exact) >= best_ring(edges[:10, :10])[1]


def simulated_ring_s(edges: np.ndarray, order: tuple[int, ...]) -> float:
    """Events: an island sends its next chunk once it has the one before and its own link is free."""
    n = len(order)
    has = np.zeros((n, 2 * n - 1))
    for k in range(2 * (n - 1)):
        for a in range(n):
            sender, receiver = a, (a + 1) % n
            ready = max(has[sender, k], has[receiver, k])
            has[receiver, k + 1] = ready + edges[order[sender], order[receiver]]
    return float(has.max())


@pytest.mark.parametrize("n", [2, 3, 5])
def test_formula_is_what_events_give_where_links_are_alike_and_an_upper_bound_elsewhere(n: int) -> None:
    instance = random_instance(3, n)
    alike = IslandsInstance(
        step_s=np.ones(n), rate=np.full((n, n), 1e8), latency_s=np.full((n, n), 0.05), num_params=1e9, max_steps=8
    )
    order = tuple(range(n))
    assert ring_s(alike, Exchange(order)) == pytest.approx(simulated_ring_s(alike.edge_s(1, 32), order))
    slow = instance.edge_s(1, 32)
    if math.isfinite(slowest_edge_s(slow, order)):
        assert simulated_ring_s(slow, order) <= ring_s(instance, Exchange(order)) * (1 + 1e-12)


def test_the_plainest_of_the_nearly_best_is_taken() -> None:
    fast = IslandsInstance(
        step_s=np.ones(2),
        rate=np.full((2, 2), 1e15),
        latency_s=np.zeros((2, 2)),
        num_params=1e9,
        max_steps=64,
        max_delay=8,
    )
    assert solve(fast).choice == Exchange((0, 1))
    slow = IslandsInstance(
        step_s=np.ones(2), rate=np.full((2, 2), 1e8), latency_s=np.zeros((2, 2)), num_params=1e9, max_steps=64
    )
    choice = solve(slow).choice
    assert choice is not None and choice.delay == 0 and choice.steps > 32 and choice.bits == 8


@pytest.mark.parametrize(
    ("choice", "label"),
    [
        (Exchange((0, 0)), "C4"),
        (Exchange((0, 1), steps=99), "C2"),
        (Exchange((0, 1), steps=3, fragments=2), "C2"),
        (Exchange((0, 1), steps=4, delay=4), "C2"),
    ],
)
def test_a_broken_constraint_is_named(choice: Exchange, label: str) -> None:
    with pytest.raises(ValueError, match=label):
        check(random_instance(0, 2), choice)


@given(
    st.integers(4, 40),
    st.lists(st.tuples(st.floats(0, 2), st.floats(0.1, 2), st.integers(1, 4)), min_size=1, max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_no_other_shares_end_earlier(batch: int, islands: list[tuple[float, float, int]]) -> None:
    fixed, each, unit = (list(values) for values in zip(*islands, strict=True))
    least = [max(1, u // 2) for u in unit]

    def end_s(shares: tuple[int, ...]) -> float:
        return max(f + p * -(-s // u) for f, p, u, s in zip(fixed, each, unit, shares, strict=True))

    if batch < sum(least):
        with pytest.raises(ValueError, match="C3"):
            deal(batch, fixed, each, unit, least)
        return
    shares = deal(batch, fixed, each, unit, least)
    assert sum(shares) == batch and all(share >= few for share, few in zip(shares, least, strict=True))
    parts = itertools.product(*(range(few, batch + 1) for few in least[:-1]))
    others = [(*part, batch - sum(part)) for part in parts if batch - sum(part) >= least[-1]]
    assert end_s(shares) <= min(map(end_s, others)) * (1 + 1e-9)


def test_int8_has_a_scale_for_each_row() -> None:
    assert wire_bytes(1024, 8) == 1028
    assert wire_bytes(1024, 16) == 2048


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 3),
    batch=st.integers(3, 14),
)
def test_no_shares_end_before_the_bound_of_the_slowest_island(seed: int, n: int, batch: int) -> None:
    steps_s = np.cumsum(np.random.default_rng(seed).exponential(1, (n, batch + 1)), axis=1)
    steps_s[:, 0] = 0.0
    fastest_s = min(
        max(steps_s[i, share] for i, share in enumerate(shares))
        for shares in itertools.product(range(batch + 1), repeat=n)
        if sum(shares) == batch
    )
    rates = (np.arange(1, batch + 1) / steps_s[:, 1:]).max(axis=1)
    shares = np.ceil(batch * rates / rates.sum() - 1e-9).astype(int)
    least_s = steps_s[np.arange(n), shares]
    bound_s = slowest_bound_s(batch, rates.tolist(), shares.tolist(), least_s.tolist())
    assert max(batch / rates.sum(), least_s.min()) * (1 - 1e-8) <= bound_s <= fastest_s * (1 + 1e-9)
