"""Streams that run at once: the closed form is the general one, laws of slow-downs, and published measurements."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshwright.cost_models.coefficients import packaged_coefficients
from meshwright.cost_models.hardware.collectives import Pair, exposed_s, pair_s, slowdown_law
from meshwright.cost_models.hardware.streams import STREAMS, interference, together_s

TRAFFIC = np.array([0.0, 0.2, 0.01, 0.01])
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
    slowed = together_s(seconds, interference(packaged_coefficients(), TRAFFIC, through_host=True))
    assert free == pytest.approx(max(alone))
    assert slowed >= free * (1 - 1e-12)
    assert together_s(
        seconds + np.array([more, 0, 0, 0]), interference(packaged_coefficients(), TRAFFIC, through_host=True)
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


@given(compute=SECONDS, collective=SECONDS, traffic=st.floats(0, 0.3), channels=st.lists(st.floats(0, 1), min_size=2))
def test_more_channels_take_longer(compute: float, collective: float, traffic: float, channels: list[float]) -> None:
    """At the same rate: processors that a collective has are lost to kernels."""
    coefficients = packaged_coefficients()
    laws = [slowdown_law(traffic, coefficients.replaced({"overlap.channels": c})) for c in sorted(channels)]
    seconds = [pair_s(np.array([compute]), np.array([collective]), law)[0] for law in laws]
    assert all(later >= earlier * (1 - 1e-12) for earlier, later in itertools.pairwise(seconds))


@pytest.mark.parametrize("through_host", [False, True])
@pytest.mark.parametrize("copies_wait", [False, True])
def test_a_stream_never_slows_itself(through_host: bool, copies_wait: bool) -> None:
    slowdown = interference(
        packaged_coefficients(), np.stack([0 * TRAFFIC, TRAFFIC]), through_host=through_host, copies_wait=copies_wait
    )
    assert slowdown.shape == (2, len(STREAMS), len(STREAMS))
    assert np.all(np.diagonal(slowdown, axis1=-2, axis2=-1) == 0)
    assert np.all(slowdown >= 0)


def test_the_law_of_a_pair_is_that_of_four_streams_without_copies() -> None:
    both, traffic = np.array([[3.0, 2.0]]), 0.2
    four = np.array([[3.0, 2.0, 0.0, 0.0]])
    slowdown = interference(packaged_coefficients(), np.array([0.0, traffic, 0.0, 0.0]), through_host=True)
    closed = pair_s(both[:, 0], both[:, 1], slowdown_law(traffic, packaged_coefficients()))
    assert together_s(four, slowdown) == pytest.approx(closed)


def test_copies_that_wait_add_all_of_their_time() -> None:
    slowdown = interference(packaged_coefficients(), np.zeros(4), copies_wait=True)
    assert together_s(np.array([3.0, 0.0, 2.0, 0.0]), slowdown) == pytest.approx(5.0)
    assert together_s(np.array([3.0, 0.0, 2.0, 1.0]), slowdown) == pytest.approx(6.0)
    free = interference(packaged_coefficients(), np.zeros(4))
    assert together_s(np.array([3.0, 0.0, 2.0, 0.0]), free) == pytest.approx(3.0)


def test_copies_share_the_host_with_collectives_that_cross_it() -> None:
    seconds = np.array([0.0, 2.0, 2.0, 0.0])
    apart, shared = (
        interference(packaged_coefficients(), np.zeros(4), through_host=crosses) for crosses in (False, True)
    )
    assert together_s(seconds, apart) == pytest.approx(2.0)
    assert together_s(seconds, shared) == pytest.approx(2.0 * (1 + packaged_coefficients()["overlap"]["through_host"]))


def test_a_copy_slows_kernels_by_its_traffic() -> None:
    slowdown = interference(packaged_coefficients(), np.array([0.0, 0.0, 0.02, 0.0]))
    seconds = together_s(np.array([3.0, 0.0, 2.0, 0.0]), slowdown)
    rate = 1 / (1 + 0.02 * packaged_coefficients()["overlap"]["traffic"])
    assert seconds == pytest.approx(2.0 + 3.0 - 2.0 * rate)
