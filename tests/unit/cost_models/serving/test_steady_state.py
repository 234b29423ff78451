"""The steady state of an engine instance: closed forms with steps of known cost, and laws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from meshwright.cost_models.serving.instance_model import InstanceModel
from meshwright.cost_models.serving.mix import Mix
from meshwright.cost_models.serving.steady_state import Prefill, largest_rate, operating_points
from meshwright.schema import LatencyLimit, RequestClass, Requests
from meshwright.schema.units import FloatArray


class AffineSteps:
    """Steps of 10 ms, 0.1 ms a row and prompt token, 1 us a cached token."""

    def seconds(
        self,
        decode_rows: Any,
        cached_tokens: Any,
        prefill_tokens: Any = 0,
        prefill_context: Any = 0,
        *,
        prompts: Any = 0,
    ) -> FloatArray:
        rows = np.asarray(decode_rows, dtype=np.float64) + prefill_tokens + 0.0 * np.asarray(prompts)
        return np.asarray(0.01 + 1e-4 * rows + 1e-6 * np.asarray(cached_tokens) + 0.0 * np.asarray(prefill_context))


LOAD = Requests(classes=(RequestClass(prompt_len=1000, output_len=101),), rate=1)
TWO = Requests(
    classes=(
        RequestClass(share=0.8, prompt_len=200, output_len=50),
        RequestClass(share=0.2, prompt_len=3000, output_len=400),
    ),
    rate=1,
)
INSTANCE = InstanceModel(steps=AffineSteps(), max_batch=256, max_batched_tokens=4096, cache_tokens=200_000)
LIMITS = (LatencyLimit(metric="ttft", seconds=1), LatencyLimit(metric="tpot", seconds=0.05))


def test_equal_requests_that_only_decode_have_a_closed_form() -> None:
    mix = Mix.of(LOAD).decoding
    curve = operating_points(INSTANCE, mix, np.array([0.2, 1.0]), fluid=True)
    rows = np.array([20.0, 100.0])
    step = 0.01 + 1e-4 * rows + 1e-6 * rows * (1000 + 101 / 2)
    assert curve.rows == pytest.approx(rows)
    assert curve.step_s == pytest.approx(step)
    assert curve.requests_per_s == pytest.approx(np.array([0.2, 1.0]) / step)
    # Little's law: requests in flight are their rate times their time.
    assert curve.requests_per_s * 100 * curve.step_s == pytest.approx(rows)


def test_affine_steps_cost_the_same_however_prompts_fall_on_them() -> None:
    curve = operating_points(INSTANCE, Mix.of(LOAD), np.array([0.5]), fluid=True)
    assert curve.step_s[0] == pytest.approx(0.01 + 1e-4 * (50 + 500) + 1e-6 * 50 * 1050.5)


def test_prefill_is_a_queue_of_its_service() -> None:
    mix = Mix.of(LOAD)
    service = 0.01 + 1e-4 * 1000
    instance = replace(INSTANCE, max_batched_tokens=1000)
    points = Prefill.of(instance, mix).points(np.array([0.5]), transfer_s_per_token=1e-5)
    assert points.requests_per_s[0] == pytest.approx(0.5 / service)
    assert points.ttft_s[0] == pytest.approx(service + 0.5 / 0.5 / 2 * service + 1e-5 * 1000)
    tail = points.quantile_s("ttft", 0.9)[0] - service - 0.01
    assert 0.5 * np.exp(-tail / service) == pytest.approx(
        0.1, rel=1e-3
    )  # M/D/1 waits longer than t: about rho e^(-t / s)


@pytest.mark.parametrize("load", [LOAD, TWO])
@pytest.mark.parametrize("prefill_first", [False, True])
def test_more_room_and_looser_limits_are_never_worse(load: Requests, prefill_first: bool) -> None:
    mix, instance = Mix.of(load), replace(INSTANCE, prefill_first=prefill_first)
    best = largest_rate(instance, mix, LIMITS)
    assert best.point is not None and best.requests_per_s > 0
    assert best.point.tpot_s(0.9)[0] <= 0.05 and best.point.quantile_s("ttft", 0.9)[0] <= 1
    least = best.requests_per_s * (1 - 1e-4)  # of the bisection
    looser = tuple(limit.replace(seconds=1.3 * limit.seconds) for limit in LIMITS)
    assert largest_rate(instance, mix, looser).requests_per_s >= least
    assert largest_rate(replace(instance, cache_tokens=400_000), mix, LIMITS).requests_per_s >= least
    assert largest_rate(instance, mix, LIMITS, replicas=8).requests_per_s >= least
    assert largest_rate(instance, mix, LIMITS, fluid=True).requests_per_s >= best.requests_per_s
    assert largest_rate(replace(instance, lanes=2), mix, LIMITS).requests_per_s == pytest.approx(
        2 * best.requests_per_s
    )


def test_what_binds_is_named() -> None:
    mix = Mix.of(LOAD)
    assert largest_rate(replace(INSTANCE, cache_tokens=3000), mix, ()).binds == "cache"
    assert largest_rate(replace(INSTANCE, max_batch=4), mix, ()).binds == "max_batch"
    assert largest_rate(INSTANCE, mix, LIMITS[1:]).binds == "tpot"
    assert largest_rate(INSTANCE, mix, (LatencyLimit(metric="ttft", seconds=0.14),)).binds == "ttft"
    none = largest_rate(INSTANCE, mix, (LatencyLimit(metric="tpot", seconds=0.001),))
    assert (none.requests_per_s, none.binds) == (0, "tpot")


def test_a_prefix_in_the_cache_is_not_computed() -> None:
    with_prefix = Requests(classes=(RequestClass(prompt_len=1000, output_len=101, prefix_len=800),), rate=1)
    assert (
        largest_rate(INSTANCE, Mix.of(with_prefix), LIMITS).requests_per_s
        > largest_rate(INSTANCE, Mix.of(LOAD), LIMITS).requests_per_s
    )
    assert Mix.of(with_prefix, prefixes="none").new_tokens == 1000
    copied, copying = Mix.of(with_prefix, prefixes="host"), replace(INSTANCE, fetch_s_per_token=1e-3)
    assert copied.new_tokens == 200
    assert copied.occupied_steps(reserves_output=False) == Mix.of(LOAD).occupied_steps(reserves_output=False)
    limited = largest_rate(copying, copied, ())
    assert limited.binds == "host_link"
    assert limited.requests_per_s == pytest.approx(INSTANCE.lanes / (800 * 1e-3), rel=0.01)


def test_requests_wait_for_a_place_among_max_batch_as_at_that_many_servers() -> None:
    mix = Mix.of(LOAD).decoding
    one = replace(INSTANCE, max_batch=1)
    curve = operating_points(one, mix, np.array([0.005]))
    # A single place is a queue M/D/1: rho / (1 - rho) / 2 lives, of 100 steps each; rho = .005 x 100 rows.
    assert curve.wait_s[0] == pytest.approx(0.5 / 0.5 / 2 * 100 * curve.step_s[0], rel=1e-6)
    waits = [
        float(operating_points(replace(INSTANCE, max_batch=size), mix, np.array([0.2])).wait_s[0])
        for size in (21, 25, 40)
    ]
    assert waits[0] > 3 * waits[1] > 9 * waits[2] > 0
    assert operating_points(one, mix, np.array([0.005]), fluid=True).wait_s[0] == 0
