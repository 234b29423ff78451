"""The correction through measured points: the mean of the process by its definition, and what it does to products."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.cost_models.hardware.machine import gemm_rates
from meshwright.cost_models.learned import calibration, kernels
from meshwright.cost_models.learned.calibration import (
    FEATURES,
    SHIPPED_COVARIANCE,
    Covariance,
    correction_through,
    covariance,
    most_informative_shapes,
)
from meshwright.schema.cluster import Device

SHARED = Path(__file__).resolve().parents[5] / "shared/data"


def drawn(number, seed):
    """Columns of FEATURES and an answer of the trees for so many shapes."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 4, number) for name in FEATURES}, rng.normal(0, 0.3, number)


def joined(first, second):
    return {name: np.concatenate([first[name], second[name]]) for name in FEATURES}


@given(seed=st.integers(0, 10**6), points=st.integers(1, 30))
@settings(max_examples=30, deadline=None)
def test_correction_is_the_mean_of_the_process_by_its_definition(seed, points):
    (at, trees_at), (asked, trees_asked) = drawn(points, seed), drawn(7, seed + 1)
    left = np.random.default_rng(seed).normal(0, 0.2, points)
    whole = covariance(joined(at, asked), np.concatenate([trees_at, trees_asked]), SHIPPED_COVARIANCE)
    among = whole[:points, :points] + SHIPPED_COVARIANCE.noise**2 * np.eye(points)
    expected = whole[points:, :points] @ np.linalg.inv(among) @ left
    assert correction_through(at, trees_at, left, SHIPPED_COVARIANCE)(asked, trees_asked) == pytest.approx(
        expected, abs=1e-8
    )


def test_covariance_is_one_of_a_process():
    columns, learned = drawn(60, 3)
    found = covariance(columns, learned, SHIPPED_COVARIANCE)
    assert found == pytest.approx(found.T)
    assert np.linalg.eigvalsh(found).min() > -1e-9
    diagonal = SHIPPED_COVARIANCE.local**2 + SHIPPED_COVARIANCE.of_trees**2 * learned**2 + SHIPPED_COVARIANCE.common**2
    assert np.diag(found) == pytest.approx(diagonal)


def test_exact_points_are_met_and_far_from_them_only_what_is_common_stays():
    columns, learned = drawn(20, 5)
    left = np.random.default_rng(5).normal(0.1, 0.05, 20)
    exact = Covariance(SHIPPED_COVARIANCE.lengths, SHIPPED_COVARIANCE.local, of_trees=0.0, common=0.2, noise=1e-6)
    correction = correction_through(columns, learned, left, exact)
    assert correction(columns, learned) == pytest.approx(left, abs=1e-4)
    far = correction({name: column + 1e6 for name, column in columns.items()}, learned)
    assert far == pytest.approx(np.full(20, correction.offset))


def test_a_device_without_the_pattern_of_the_trees_takes_it_back():
    """Measured times are the roofline's alone: points say that the trees do not hold here, near them and far away."""
    (columns, learned), (far, far_learned) = drawn(100, 8), drawn(50, 9)
    correction = correction_through(columns, learned, -learned, SHIPPED_COVARIANCE)
    far = {name: column + 1e3 for name, column in far.items()}
    left = far_learned + correction(far, far_learned) - correction.offset
    assert np.abs(left).mean() < 0.25 * np.abs(far_learned).mean()


@pytest.mark.skipif(not (SHARED / "operators/gemm.parquet").exists(), reason="measured tables are not here")
def test_chosen_points_of_a_device_improve_its_other_products():
    """A quarter off the error of products of a GPU taken for unknown hardware, with 60 points chosen without a look at a time."""
    fit = pytest.importorskip("meshwright.fitting.gemm")
    rows = fit.read_rows(SHARED)
    rows = rows[(rows.software == "sglang") & (rows.device == "L40S-48GB")].sample(2000, random_state=1)
    m, n, k, seconds = (rows[name].to_numpy() for name in ("m", "n", "k", "seconds"))
    device = Device.named("L40S")
    unknown = gemm_rates(device.replace(name="one", architecture="volta"), "bf16-mixed")
    unknown = unknown._replace(sustained_ratio=1.0, reference=None)
    chosen = most_informative_shapes(m[:600], n[:600], k[:600], unknown, 60)
    known = calibration.calibrate(m[chosen], n[chosen], k[chosen], seconds[chosen], unknown)
    before, after = (
        np.abs(kernels.predict(m[600:], n[600:], k[600:], rates) / seconds[600:] - 1).mean()
        for rates in (unknown, known)
    )
    assert after < 0.75 * before
