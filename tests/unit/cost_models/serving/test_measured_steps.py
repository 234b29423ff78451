from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshwright.cost_models.serving.engine import EngineProfile
from meshwright.cost_models.serving.measured_steps import MeasuredSteps
from meshwright.cost_models.serving.simulation import EnginePool, RequestTable, simulate
from meshwright.schema.errors import ConfigError
from meshwright.schema.serving import EngineLimits

KINDS = np.array(
    [(rows, rows * context, 0, 0, 0) for rows, context in product((1, 2, 4, 8), (32, 128, 512))]
    + [(0, 0, tokens, start + tokens / 2, 1) for tokens, start in product((8, 64, 256), (0, 256))]
    + [(4, 400, 60, 30, 1), (8, 2000, 120, 60, 0)]
).T
positive = st.floats(1e-3, 1e3)


def _seconds(kinds: np.ndarray, fixed: float, row: float, head: float, cached: float, pair: float) -> np.ndarray:
    decoding, stored, tokens, context, ending = kinds
    return 1e-6 * (
        fixed + row * (decoding + tokens) + head * (decoding + ending) + cached * stored + pair * tokens * context
    )


@given(st.tuples(positive, positive, positive, positive, positive))
def test_steps_that_follow_the_formula_are_predicted_where_nothing_was_measured(terms: tuple[float, ...]) -> None:
    fit = MeasuredSteps.fit(*KINDS, _seconds(KINDS, *terms))
    assert fit.error < 1e-6
    others = np.array([(3, 300, 0, 0, 0), (6, 100, 30, 40, 1), (0, 0, 100, 300, 1)]).T
    parts = fit.parts(*others[:4], prompts=others[4])
    # Rows between two that were measured: the curve is linear there, as the formula is.
    assert sum(parts.values()) == pytest.approx(_seconds(others, *terms), rel=1e-4)


def test_no_part_is_negative_and_more_rows_are_never_faster() -> None:
    noise = np.random.default_rng(0).uniform(0.5, 1.5, KINDS.shape[1])
    fit = MeasuredSteps.fit(*KINDS, _seconds(KINDS, 50, 2, 1, 0.01, 0.001) * noise)
    rows = np.arange(0, 2000)
    parts = fit.parts(rows, rows * 100)
    assert all((part >= 0).all() for part in parts.values())
    assert (np.diff(parts["products"]) >= 0).all()
    assert parts["products"][0] == 0


def test_a_simulation_takes_measured_steps() -> None:
    """One request alone: its prompt's step and a step for each further token."""
    fit = MeasuredSteps.fit(*KINDS, _seconds(KINDS, 1000, 10, 5, 0, 0))
    limits = EngineLimits(max_batch=8, max_batched_tokens=256, chunk=256, cache_blocks=100)
    profile = EngineProfile.named("meshwright")
    simulated = simulate(EnginePool.of(fit, profile, limits), RequestTable.of([64], [11]))
    overhead = profile.overhead.step_s + profile.overhead.row_s
    assert simulated.tpot_s[0] == pytest.approx(1015e-6 + overhead, rel=1e-3)


@pytest.mark.parametrize("seconds", [[1.0] * 3, [0.0] * 10, [float("nan")] * 10])
def test_what_is_no_measurement_is_refused(seconds: list[float]) -> None:
    columns = [np.ones(len(seconds))] * 5
    with pytest.raises(ConfigError, match="no measurement of an engine"):
        MeasuredSteps.fit(*columns, seconds)
