"""Goodput: published interval cases, an event simulation, and laws."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshwright.cost_models.goodput import (
    best_interval_s,
    continuing_goodput,
    lost_units,
    restart_goodput,
    steps_to_save,
)

CASES = Path(__file__).parents[3] / "../shared/data/faults/interval_cases.json"


@pytest.mark.skipif(not CASES.exists(), reason="needs ../shared/data/faults")
def test_intervals_and_goodput_are_those_of_the_cases() -> None:
    cases = json.loads(CASES.read_text())
    for case in cases:
        interval_s = best_interval_s(mtbf_s=case["mtbf_s"], save_s=case["save_s"])
        goodput = restart_goodput(interval_s, mtbf_s=case["mtbf_s"], save_s=case["save_s"], restart_s=case["restart_s"])
        assert interval_s == pytest.approx(case["best_interval_s"], rel=0.01)
        assert goodput == pytest.approx(case["goodput"], abs=1e-4)
    assert len(cases) == 12


@pytest.mark.parametrize("mtbf_s", [50.0, 3e3, 1e6, 1e12])
@pytest.mark.parametrize("save_s", [1e-3, 1.0, 40.0])
def test_no_other_interval_is_better(mtbf_s: float, save_s: float) -> None:
    best_s = best_interval_s(mtbf_s=mtbf_s, save_s=save_s)
    best = restart_goodput(best_s, mtbf_s=mtbf_s, save_s=save_s, restart_s=10)
    for factor in np.geomspace(0.2, 5, 41):
        other = restart_goodput(best_s * factor, mtbf_s=mtbf_s, save_s=save_s, restart_s=10)
        assert other <= best * (1 + 1e-9)
    assert best_s <= math.sqrt(2 * mtbf_s * save_s) * (1 + 1e-6)  # Young's is an upper bound


def _simulate(case: dict, *, seconds: float, seed: int) -> float:
    """Return the goodput of a birth-death process, fault by fault."""
    rng, now, lost, work = np.random.default_rng(seed), 0.0, 0, 0.0
    rates, units = case["rates"], case["units"]
    while now < seconds:
        loss, back = (units - lost) / case["unit_mtbf_s"], lost / case["repair_s"]
        stay_s = rng.exponential(1 / (loss + back))
        now += stay_s
        work += stay_s * rates[lost] * (1 - case["copies"])
        if rng.random() < back / (loss + back):
            work -= case["move_s"][lost] * rates[lost]
            lost -= 1
        elif lost < len(rates) - 1:
            work -= case["lost_s"][lost] * rates[lost]
            lost += 1
        else:
            work -= case["beyond_s"] * rates[lost]
    return work / now / rates[0]


@pytest.mark.parametrize("seed", range(12))
def test_going_on_is_what_an_event_simulation_gives(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tolerated, units = int(rng.integers(1, 4)), int(rng.integers(4, 200))
    rates = np.cumprod([1.0, *rng.uniform(0.7, 0.99, tolerated)]).tolist()
    mtbf_s = float(rng.uniform(1e5, 1e7))
    case = {
        "rates": rates, "units": units, "unit_mtbf_s": mtbf_s, "repair_s": float(rng.uniform(0.01, 0.5) * mtbf_s / units),
        "lost_s": rng.uniform(1, 200, tolerated + 1).tolist(), "move_s": rng.uniform(0, 60, tolerated + 1).tolist(),
        "beyond_s": float(rng.uniform(200, 1_000)), "copies": float(rng.uniform(0, 0.05)),
    }  # fmt: skip
    simulated = _simulate(case, seconds=20_000 * mtbf_s / units, seed=seed)
    assert continuing_goodput(**case) == pytest.approx(simulated, rel=0.02)


def test_lost_units_are_a_distribution_that_detailed_balance_holds_for() -> None:
    shares = lost_units(units=50, unit_mtbf_s=1e6, repair_s=4e4, tolerated=5)
    assert shares.sum() == pytest.approx(1)
    for lost in range(5):
        assert shares[lost] * (50 - lost) / 1e6 == pytest.approx(shares[lost + 1] * (lost + 1) / 4e4)


def test_a_job_that_is_interrupted_before_every_save_makes_no_progress() -> None:
    assert restart_goodput(1e6, mtbf_s=10, save_s=1, restart_s=1) == 0.0


@given(remaining=st.integers(1, 400), save_s=st.floats(0.01, 50), mtbf_s=st.floats(10, 1e6))
def test_what_remains_is_divided_as_cheaply_as_any_number_of_saves_would(
    remaining: int, save_s: float, mtbf_s: float
) -> None:
    """Against every number of equal intervals; the closed form is of whole steps, whose rounding may cost a little."""

    def cost(count: int) -> float:
        return count * math.expm1(min((remaining / count + save_s) / mtbf_s, 700.0))

    steps = steps_to_save(remaining, step_s=1.0, mtbf_s=mtbf_s, save_s=save_s)
    assert 1 <= steps <= remaining
    count = math.ceil(remaining / steps)
    assert cost(count) <= 1.1 * min(map(cost, range(1, remaining + 1)))
