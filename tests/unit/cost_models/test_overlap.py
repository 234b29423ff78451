"""Streams that run at once: the closed form is the general one, laws of slow-downs, and published measurements."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshwright.cost_models.coefficients import packaged_coefficients
from meshwright.cost_models.hardware.collectives import Pair, exposed_s, pair_s, slowdown_law
from meshwright.cost_models.hardware.streams import STREAMS, Fabric, interference, together_s

SECONDS = st.floats(0, 10, allow_subnormal=False)
SLOWDOWN = st.floats(0, 0.9)


@given(compute=SECONDS, collective=SECONDS, a=SLOWDOWN, b=SLOWDOWN)
def test_two_streams_have_a_closed_form(compute: float, collective: float, a: float, b: float) -> None:
    both = np.array([[compute, collective]])
    general = together_s(both, np.array([[0.0, a], [b, 0.0]]))
    closed = pair_s(both[:, 0], both[:, 1], Pair(a, b))
    assert closed == pytest.approx(general, rel=1e-9, abs=1e-12)


@given(alone=st.lists(SECONDS, min_size=4, max_size=4), more=SECONDS)
def test_running_at_once_takes_between_the_longest_and_nothing_less(alone: list[float], more: float) -> None:
    seconds = np.array([alone])
    free = together_s(seconds, np.zeros((4, 4)))
    slowed = together_s(seconds, interference("nvlink", packaged_coefficients()))
    assert free == pytest.approx(max(alone))
    assert slowed >= free * (1 - 1e-12)
    assert together_s(
        seconds + np.array([more, 0, 0, 0]), interference("nvlink", packaged_coefficients())
    ) >= slowed * (1 - 1e-9)


def test_hand_arithmetic() -> None:
    """A collective of 2 s that slows kernels to half their speed beside 3 s of them: 2 s together do 1 s of kernels, 2 s remain."""
    exposed = exposed_s(np.array([3.0]), np.array([2.0]), Pair(1.0, 0.0))
    assert exposed == pytest.approx([1.0])
    assert exposed_s(np.array([0.0]), np.array([2.0]), Pair(1.0, 0.0)) == pytest.approx([2.0])


def test_slowdown_grows_with_traffic() -> None:
    pair, law = slowdown_law(np.array([0.0, 0.01, 0.1]), packaged_coefficients()), packaged_coefficients()["overlap"]
    expected = [law["channels"] + law["traffic"] * traffic for traffic in (0.0, 0.01, 0.1)]
    assert np.asarray(pair.compute).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("fabric", get_args(Fabric))
def test_a_stream_never_slows_itself(fabric: Fabric) -> None:
    slowdown = interference(fabric, packaged_coefficients())
    assert slowdown.shape == (len(STREAMS), len(STREAMS))
    assert np.all(np.diag(slowdown) == 0)
    assert np.all(slowdown >= 0)
