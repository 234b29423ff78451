"""Holdings over time: against every policy, the bound, and the laws of prices and machines."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.solvers.spot_policy import SpotInstance, bound_usd, hindsight_usd, solve


def instance(seed: int, *, num_periods: int = 4, machines: int = 1, states: int = 2, **changes: object) -> SpotInstance:
    rng = np.random.default_rng(seed)
    move = rng.uniform(0.05, 1, (states, states))
    values = {
        "tokens": 2.0 * 60, "deadline_s": 60.0 * num_periods, "period_s": 60.0, "rate": np.arange(machines + 1.0),
        "move": move / move.sum(axis=1, keepdims=True), "spot_usd": float(rng.uniform(0.5, 2)),
        "demand_usd": 3.0 * np.arange(machines + 1), "lost_s": 2.0, "joined_s": 1.0, "restart_s": 15.0, "num_cells": 8,
        "late_usd": 50.0,
    }  # fmt: skip
    return SpotInstance(**values | changes)  # type: ignore[arg-type]


def least_usd(data: SpotInstance, available: int) -> float:
    """Try every holding in every period, in the terms of the problem's statement."""

    @functools.cache
    def least(k: int, w: int, a: int, before: tuple[int, int]) -> float:
        if k == data.num_periods:
            return w * data.late_usd / data.num_cells
        answers = []
        for s, m in data.holdings:
            held = min(s, a)
            away_s = 0.0
            if held + m:
                is_restart = min(before[0], a) + before[1] == 0
                away_s = data.restart_s if is_restart else 2.0 * (a < before[0]) + 1.0 * ((s, m) != before)
            done = data.rate[held + m] * (data.period_s - away_s) / (data.tokens / data.num_cells)
            usd = data.usd_per_hour(held, m) * data.period_s / 3600 * (min(1.0, w / done) if done else 1.0)
            rest = max(0.0, w - done)
            remembered = (s, m) if held else (0, m)
            for cells, part in ((int(rest), 1 - rest % 1), (int(rest) + 1, rest % 1)):
                if part:
                    usd += part * sum(
                        p * least(k + 1, cells, b, remembered) for b, p in enumerate(data.move[a].tolist())
                    )
            answers.append(usd)
        return min(answers)

    return least(0, data.num_cells, available, (0, 0))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("machines", "states"), [(1, 2), (2, 3)])
def test_no_policy_costs_less_and_none_is_below_the_bound(seed: int, machines: int, states: int) -> None:
    data = instance(seed, machines=machines, states=states)
    policy = solve(data)
    for available in range(states):
        assert policy.usd[available] == pytest.approx(least_usd(data, available), rel=1e-9)
        assert policy.bound_usd[available] <= policy.usd[available] * (1 + 1e-9)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), more=st.floats(1, 3))
def test_dearer_machines_and_nearer_deadlines_never_cost_less(seed: int, more: float) -> None:
    usd = solve(instance(seed, num_periods=6)).usd
    dear = instance(seed, num_periods=6)
    dearer = instance(seed, num_periods=6, spot_usd=dear.spot_usd * more, demand_usd=dear.demand_usd * more)
    assert np.all(solve(dearer).usd >= usd - 1e-9)
    assert np.all(solve(instance(seed, num_periods=5)).usd >= usd - 1e-9)


def test_the_bound_of_a_pool_that_is_always_there_is_what_its_machines_cost() -> None:
    data = instance(0, spot_usd=1.0, restart_s=0.0, joined_s=0.0)
    assert bound_usd(data, np.array([0.0, 240.0])) == pytest.approx(data.tokens / 3600)
    # A quarter of the time: half of the work has to be done on demand.
    assert bound_usd(data, np.array([180.0, 60.0])) == pytest.approx(60 / 3600 + 3 * 60 / 3600)


def test_the_policy_is_on_demand_once_nothing_else_is_in_time() -> None:
    data = instance(3, num_periods=8)
    policy = solve(data)
    chosen = data.holdings[policy.decide(data.deadline_s - 160, 120.0, 1, 0)]
    assert chosen == (0, 1)
    with pytest.raises(ValueError, match="C4"):
        instance(0, move=np.ones((2, 2)))


@pytest.mark.parametrize("seed", range(6))
def test_who_knows_the_pool_pays_no_more_on_average_and_as_much_where_it_never_changes(seed: int) -> None:
    data = instance(seed)
    paths = [(a, b, c, d) for a in (0, 1) for b in (0, 1) for c in (0, 1) for d in (0, 1)]
    chance = [np.prod([data.move[x, y] for x, y in zip((1, *p), p, strict=False)]) for p in paths]
    first = np.array([p[0] for p in paths])
    for a in (0, 1):
        known = sum(
            c / data.move[1, a] * hindsight_usd(data, np.array(p))
            for p, c, f in zip(paths, chance, first, strict=True)
            if f == a
        )
        assert known <= solve(data).usd[a] * (1 + 1e-9)
    still = instance(seed, move=np.eye(2))
    assert solve(still).usd[1] == pytest.approx(hindsight_usd(still, np.ones(4, dtype=int)))
