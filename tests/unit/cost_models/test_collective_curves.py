"""Curves of collectives: laws of the lookup, and the error of the fit on held-out sizes where the tables are there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshwright.cost_models.hardware.collectives import CurveParameters, curve_s, link_curves, shape_s, tabulated
from meshwright.fitting import collectives
from meshwright.schema.catalogue import link_entries

DATA = Path(__file__).parents[4] / "shared" / "data"
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def test_every_curve_that_a_link_names_exists_for_all_operations() -> None:
    named = {entry["curve"] for entry in link_entries().values() if "curve" in entry}
    assert "nvlink4" in named
    for name in named | {collectives.SWITCHED}:
        curves = link_curves(name)
        assert curves is not None
        assert set(curves) == set(OPS)
    assert link_curves("two tins and a string") is None


@given(
    latency=st.floats(1e-6, 1e-3),
    efficiency=st.floats(0.05, 1.2),
    ramp=st.floats(1e-9, 1e-3),
    residual=st.lists(st.floats(-0.5, 0.5), min_size=2, max_size=12),
)
def test_lookup_never_falls_with_size(latency: float, efficiency: float, ramp: float, residual: list[float]) -> None:
    parameters = CurveParameters(latency, efficiency, ramp, -30.0, tuple(residual))
    curves = tabulated({2: parameters, 8: parameters})
    x = np.logspace(-11, 2, 400)
    start, transfer = curve_s(curves, np.full(400, 5), x)
    assert np.all(np.diff(start + transfer) >= -1e-15)


def test_lookup_without_residual_is_the_shape() -> None:
    parameters = CurveParameters(1e-5, 0.8, 2e-5)
    curves = tabulated({2: parameters, 8: parameters})
    x = np.logspace(-9, 0, 50)
    latency, transfer = curve_s(curves, np.full(50, 4), x)
    # linear in log seconds between grid points half an octave apart
    assert latency + transfer == pytest.approx(shape_s(x, parameters), rel=0.01)


def test_latency_grows_beyond_the_largest_measured_group() -> None:
    curves = link_curves("nvlink5-nvl72")
    assert curves is not None
    latency, _ = curve_s(curves["all_gather"], np.array([4, 8, 16, 64]), np.full(4, 1e-3))
    assert np.all(np.diff(latency) > 0)


@pytest.mark.skipif(not (DATA / "operators").is_dir(), reason="the measured tables are not here")
def test_held_out_sizes_are_met_within_five_percent_on_switched_links() -> None:
    points = collectives.read_points(DATA)
    errors = []
    for (link, _, group), all_points in points.items():
        if link == collectives.ISOLATED:  # eight devices across two sockets scatter by 20 % from size to size
            continue
        train, test = all_points.every_second(0), all_points.every_second(1)
        found = collectives.predicted_s(collectives.fit_curve(train), group, test.x)
        errors.append(np.mean(np.abs(found / test.seconds - 1)))
    assert np.mean(errors) < 0.045
    assert (
        np.max(errors) < 0.13
    )  # all-to-all of eight H100 scatters between library versions; protocol switches fall between sizes


@pytest.mark.skipif(not (DATA / "operators").is_dir(), reason="the measured tables are not here")
def test_peer_to_peer_fitted_on_one_host_holds_on_others() -> None:
    """An A100 PCIe host against RTX PRO 6000 over PCIe 5 and a pair of L40S: the goal is 18 %."""
    points = collectives.read_points(DATA)
    shapes = {curve: collectives.fit_shape(of_curve) for curve, of_curve in points.items()}
    curves = collectives.pcie_curves(DATA, shapes)
    large, errors = 0.01, []
    for (op, group), rate in collectives.PUBLISHED.items():
        seconds = shape_s(np.array([large]), curves[collectives.PEERS, collectives.OPS[op], group])[0]
        errors.append(abs(seconds / large * rate / 63 - 1))
    for op in OPS:
        pair = points[collectives.ISOLATED, op, 2]
        errors.append(np.mean(np.abs(shape_s(pair.x, curves[collectives.PEERS, op, 2]) / pair.seconds - 1)))
    assert np.mean(errors) < 0.12
    assert max(errors) < 0.2
