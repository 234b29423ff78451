"""Widths of intervals: planted deviations come out again, sources weigh alike, sources left out are covered as often as said."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from meshwright.fitting.intervals import COVERED, Errors, fit_deviations, leave_sources_out


def made(sources: int = 30, rows: int = 40, *, seed: int = 0) -> Errors:
    """Runs with noise of 5 % and, in every second one, a cause of another 14 % above and 7 % below."""
    rng = np.random.default_rng(seed)
    count = sources * rows
    has_cause = np.arange(count) % 2
    low, high = np.hypot(0.05, 0.07 * has_cause), np.hypot(0.05, 0.14 * has_cause)
    is_above = rng.random(count) < high / (low + high)  # as often as its side is wide: the density is continuous
    error = np.abs(rng.standard_t(5, count)) * np.where(is_above, high, -low)
    causes = np.stack([np.ones(count), has_cause], axis=1).astype(float)
    source = pd.Series([f"s{i % sources}" for i in range(count)])
    return Errors(("noise", "cause"), causes, error, source)


def test_planted_deviations_come_out_again() -> None:
    fitted = fit_deviations(made())
    assert fitted.of_cause == pytest.approx([0.05, 0.14], rel=0.15)  # a thousand runs, and the priors' pull
    assert fitted.skew == pytest.approx(0.5, rel=0.3)


def test_a_long_source_weighs_as_much_as_a_short_one() -> None:
    short, long = np.full(20, 0.05), np.full(2000, 0.4)
    signs = np.tile([1.0, -1.0], 1010)
    errors = Errors(
        ("noise",),
        np.ones((2020, 1)),
        np.concatenate([short, long]) * signs,
        pd.Series(["short"] * 20 + ["long"] * 2000),
    )
    alike = Errors(
        ("noise",),
        np.ones((40, 1)),
        np.concatenate([short, long[:20]]) * signs[:40],
        pd.Series(["short"] * 20 + ["long"] * 20),
    )
    assert fit_deviations(errors, is_skewed=False).of_cause == pytest.approx(
        fit_deviations(alike, is_skewed=False).of_cause, rel=1e-3
    )


def test_sources_left_out_are_covered_as_often_as_said() -> None:
    errors = made()
    left_out = leave_sources_out(errors, errors)
    assert np.mean(list(left_out.coverage.values())) == pytest.approx(COVERED, abs=0.01)
    assert set(left_out.width) == set(errors.source)


def test_the_last_cause_is_fitted_to_its_own_runs_once_all_others_are_known() -> None:
    planted = made()
    names = ("noise", "unstated", "framework")
    known = Errors(
        names, np.column_stack([planted.causes, np.zeros(len(planted.source))]), planted.log_ratio, planted.source
    )
    fitted = fit_deviations(known, is_skewed=False)
    wider = planted.log_ratio * np.where(planted.causes[:, 1] == 0, 4.0, 100.0)  # runs with another doubt do not count
    renamed = Errors(names, np.column_stack([planted.causes, np.ones(len(planted.source))]), wider, planted.source)
    named = fit_deviations(renamed, is_skewed=False, known=fitted)
    assert named.of_cause[:2] == pytest.approx(fitted.of_cause[:2])
    assert np.hypot(named.of_cause[0], named.of_cause[2]) == pytest.approx(4 * fitted.of_cause[0], rel=0.2)
