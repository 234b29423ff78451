"""Pools of copies of models: against every partition, size and offload there is, and against the definition."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from meshwright.solvers.branch_and_bound import Stop
from meshwright.solvers.pools import (
    PlacedPools,
    PoolsInstance,
    PoolsProblem,
    check,
    fits_memory_C2,
    partitions,
    period,
    solve_pools,
)

SIZES = (1, 2, 4, 8)


def instance(seed: int, *, copies: int = 3, ahead: float = 0.0, budget: float = 40.0) -> PoolsInstance:
    """Return a generator, an actor with a score and an update, and copies with a score each, on 8 devices."""
    rng = np.random.default_rng(seed)
    copy_of = (0, 1, *range(2, copies), 1)
    level_of = (0, *(1,) * (copies - 1), 2)
    work = rng.uniform(1, 20, len(copy_of))[:, None]
    seconds = work / np.array(SIZES) ** rng.uniform(0.4, 1.1, (len(copy_of), 1)) + rng.uniform(0, 1, (len(copy_of), 4))
    live = rng.uniform(5, 60, (len(copy_of), 1)) / np.array(SIZES) + 8
    seconds[live > budget] = math.inf
    state = rng.uniform(0, 30, (copies, 1)) / np.array(SIZES)
    return PoolsInstance(
        copy_of=copy_of,
        level_of=level_of,
        sizes=SIZES,
        seconds=seconds,
        live_bytes=live,
        state_bytes=state,
        move_s=state * rng.uniform(0, 0.1),
        send_s=rng.uniform(0, 0.5, (4, 4)),
        budget_bytes=budget,
        host_bytes=20.0,
        num_devices=8,
        ahead=ahead,
        fetches=(1, 4)[seed % 2],
    )


def brute_force(i: PoolsInstance) -> float:
    """Try every partition, every size of each pool and every set of copies that lie on the hosts."""
    best = math.inf
    subsets = [frozenset(s) for n in range(i.num_copies + 1) for s in itertools.combinations(range(i.num_copies), n)]
    for partition in partitions(i.num_copies):
        for sizes in itertools.product(range(len(i.sizes)), repeat=len(partition)):
            for offloaded in subsets:
                answer = PlacedPools(partition, sizes, offloaded)
                if not check(i, answer):
                    best = min(best, period(i, answer))
    return best


@pytest.mark.parametrize("count", range(6))
def test_partitions_are_all_there_once(count: int) -> None:
    bell = (1, 1, 2, 5, 15, 52)
    every = [frozenset(map(frozenset, partition)) for partition in partitions(count)]
    assert len(every) == len(set(every)) == bell[count]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), ahead=st.sampled_from([0.0, 0.5, 1.0]), budget=st.sampled_from([25.0, 40.0, 90.0]))
@example(seed=7537, ahead=0.5, budget=40.0)  # the last pool is the one without memory
def test_three_copies_on_eight_devices_equal_brute_force(seed: int, ahead: float, budget: float) -> None:
    i = instance(seed, ahead=ahead, budget=budget)
    answer = solve_pools(i)
    best = brute_force(i)
    if answer.best is None:
        assert math.isinf(best)
        return
    assert answer.objective == pytest.approx(best, rel=1e-12) and answer.is_proved
    assert answer.bound == pytest.approx(answer.objective)
    assert not check(i, answer.best.candidate)
    assert period(i, answer.best.candidate) == answer.objective


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), ahead=st.sampled_from([0.0, 1.0]))
def test_bounds_are_below_every_leaf_under_them(seed: int, ahead: float) -> None:
    i = instance(seed, ahead=ahead)
    problem = PoolsProblem(i)
    nodes = list(problem.roots().nodes)
    while nodes:
        node = nodes.pop()
        step = problem.expand(node, math.inf)
        assert all(child.bound >= node.bound - 1e-9 for child in step.nodes)
        assert all(leaf.objective >= node.bound - 1e-9 for leaf in step.leaves)
        nodes += step.nodes


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_more_memory_or_staleness_is_never_slower(seed: int) -> None:
    tight, loose = solve_pools(instance(seed, budget=40.0)), solve_pools(instance(seed, budget=400.0))
    assert loose.objective <= tight.objective + 1e-9
    assert solve_pools(instance(seed, ahead=1.0)).objective <= tight.objective + 1e-9


def test_states_that_do_not_fit_together_lie_on_the_hosts_and_their_moves_count() -> None:
    i = instance(3, copies=2, budget=1000.0)
    alone = solve_pools(i, chosen=[((0, 1),)])
    assert alone.best is not None
    size = alone.best.candidate.size_idxs[0]
    tight = PoolsInstance(
        **{**{name: getattr(i, name) for name in i.__dataclass_fields__},
           "budget_bytes": float(i.live_bytes[:, size].max() + 0.01), "sizes": SIZES}
    )  # fmt: skip
    forced = solve_pools(tight, chosen=[((0, 1),)])
    assert forced.best is not None and forced.objective >= alone.objective
    placed = forced.best.candidate
    assert fits_memory_C2(tight, (0, 1), placed.size_idxs[0], sorted(placed.offloaded))


def test_a_monte_carlo_search_finds_nothing_better() -> None:
    i = instance(11, copies=4)
    best = solve_pools(i).objective
    rng = np.random.default_rng(0)
    every = list(partitions(4))
    for _ in range(3000):
        partition = every[rng.integers(len(every))]
        offloaded = frozenset(np.flatnonzero(rng.random(4) < 0.3).tolist())
        answer = PlacedPools(partition, tuple(rng.integers(0, 4, len(partition)).tolist()), offloaded)
        if not check(i, answer):
            assert period(i, answer) >= best - 1e-9


def test_a_deadline_ends_the_search_with_a_bound() -> None:
    class Over:
        is_over = True

    answer = solve_pools(instance(5), deadline=Over())
    assert answer.ended == "deadline" and not answer.is_proved
    assert answer.bound <= solve_pools(instance(5)).objective
    assert Stop().cutoff(math.inf) == math.inf
