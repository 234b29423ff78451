"""Attention and feed-forward parts on devices of their own: the cycle of micro-batches, closed forms, what is never slower."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.cost_models.coefficients import packaged_coefficients
from meshwright.cost_models.serving.attention_ffn import (
    MICRO_BATCHES,
    SplitCosts,
    copies_of,
    fill_s,
    has_feed_forward,
    layer_s,
    link_s,
)
from meshwright.cost_models.serving.engine import EngineProfile
from meshwright.cost_models.serving.memory import serving_memory
from meshwright.cost_models.serving.step import StepCosts
from meshwright.cost_models.serving.step_table import SplitTable
from meshwright.cost_models.serving.tables import ROWS as TABLED
from meshwright.schema import ClusterSpec, ConfigError, ModelSpec
from meshwright.schema.layers import DenseMLP
from meshwright.schema.serving import ServingLayout

ROWS = np.array([1.0, 7, 32, 200, 1000])
LATENCIES = {"serving.low_latency_s": 0.0, "serving.low_latency_network_s": 0.0}


def cycle_s(layers: list[tuple[float, ...]], micro_batches: int) -> float:
    """Return the seconds of so many jobs through layers of four servers each, event by event: what (A4) and (A5) are a form of."""
    free, ready = [0.0] * 4, [0.0] * micro_batches
    for stops in layers:
        for job in range(micro_batches):
            for server, seconds in enumerate(stops):
                free[server] = ready[job] = max(free[server], ready[job]) + seconds
    return max(ready)


def formula_s(layers: list[tuple[float, ...]], micro_batches: int) -> float:
    fill = max(float(fill_s(stops, micro_batches)) for stops in layers)
    return sum(float(layer_s(stops, micro_batches)) for stops in layers) + fill


stops = st.tuples(*[st.floats(0, 1) for _ in range(4)])


@given(stops, st.integers(1, 20), st.integers(1, 6))
def test_alike_layers_take_what_the_cycle_takes(layer: tuple[float, ...], num_layers: int, micro_batches: int) -> None:
    layers = num_layers * [layer]
    assert formula_s(layers, micro_batches) == pytest.approx(cycle_s(layers, micro_batches), abs=1e-9)


@given(stops, stops, st.integers(1, 6), st.integers(40, 80), st.integers(1, 4))
def test_runs_of_unlike_layers_take_nearly_what_the_cycle_takes(
    first: tuple[float, ...], second: tuple[float, ...], few: int, many: int, micro_batches: int
) -> None:
    """Where a run begins, its first round trips overlap the last ones of the other: one layer of both together at most."""
    layers = few * [first] + many * [second]
    trip = max(sum(first), sum(second), micro_batches * max(first), micro_batches * max(second))
    assert abs(formula_s(layers, micro_batches) - cycle_s(layers, micro_batches)) <= trip + 1e-9


def cluster(devices: int, *, times: float = 1.0, latency_s: float | None = None) -> ClusterSpec:
    """Return H100 with links so many times as quick."""
    made = ClusterSpec.parse(f"{devices}xH100-SXM-80GB")
    levels = tuple(
        level.replace(
            link=level.link.replace(
                bandwidth_bytes_per_s=times * level.link.bandwidth_bytes_per_s,
                latency_s=level.link.latency_s if latency_s is None else latency_s,
            )
        )
        for level in made.levels
    )
    return made.replace(levels=levels)


@cache
def costs(name: str, layout: ServingLayout, devices: int, times: float = 1.0, micro_batches: int = 3) -> SplitCosts:
    machine = cluster(devices, times=times)
    return SplitCosts.split(
        ModelSpec.named(name), (machine, machine), layout, weights="fp8", cache="bf16", micro_batches=micro_batches
    )


ONE_EACH = ServingLayout(ffn_devices=1)
MIXTURE = ServingLayout(attention_dp=8, ep=8, ffn_devices=8)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-2-9b", "mixtral-8x7b", "deepseek-v2-lite"])
def test_one_micro_batch_is_a_plain_step_and_two_ways_a_layer(name: str) -> None:
    """One device of either kind has what one device has, a + f, and of each layer the rows go over and come back once."""
    model, machine = ModelSpec.named(name), cluster(2)
    plain = StepCosts.build(model, machine, ServingLayout(), weights="bf16", cache="bf16")
    split = SplitCosts.split(model, (machine, machine), ONE_EACH, weights="bf16", cache="bf16")
    ways = 2 * model.num_blocks * link_s(
        2 * ROWS * model.hidden_dim, ONE_EACH, (machine, machine), packaged_coefficients()["serving"]
    )  # fmt: skip
    np.testing.assert_allclose(split.seconds(ROWS, 900 * ROWS), plain.seconds(ROWS, 900 * ROWS) + ways, rtol=1e-9)
    prompts = (0, 0, ROWS, ROWS / 2)
    np.testing.assert_allclose(split.seconds(*prompts, prompts=1), plain.seconds(*prompts, prompts=1) + ways, rtol=1e-9)
    total = split.weight_bytes + split.ffn_weight_bytes
    assert total == pytest.approx(plain.weight_bytes, rel=1e-9)
    assert split.cache_bytes_per_token == plain.cache_bytes_per_token


def test_a_free_link_and_a_group_without_work_are_the_plain_decode_pool() -> None:
    model = ModelSpec.named("llama-3.1-8b")
    layers = tuple(
        run.replace(layer=run.layer.replace(mlp=DenseMLP(ffn_dim=0, gated=False), num_norms=1))
        if run.layer.is_block
        else run
        for run in model.layers
    )
    attention_alone = model.replace(layers=layers)
    machine = cluster(2)
    dtypes = {"weights": "bf16", "cache": "bf16"}
    plain = StepCosts.build(attention_alone, machine, ServingLayout(), **dtypes)
    split = SplitCosts.split(attention_alone, (machine, machine), ONE_EACH, **dtypes)
    assert not has_feed_forward(attention_alone) and has_feed_forward(model)
    np.testing.assert_allclose(split.seconds(ROWS, 900 * ROWS), plain.seconds(ROWS, 900 * ROWS), rtol=1e-9)
    free = cluster(2, times=1e3, latency_s=0.0)
    without = packaged_coefficients().replaced(LATENCIES)
    plain = StepCosts.build(model, free, ServingLayout(), coefficients=without, **dtypes)
    split = SplitCosts.split(model, (free, free), ONE_EACH, coefficients=without, **dtypes)
    # A thousandth of the link's time remains.
    np.testing.assert_allclose(split.seconds(ROWS, 900 * ROWS), plain.seconds(ROWS, 900 * ROWS), rtol=1e-3)


def test_the_closed_form_of_a_dense_model_with_micro_batches() -> None:
    """Of alike layers: L max(m s, a + w + f + w') + min(.., (m - 1) s) and what is once a step, from single micro-batches."""
    model, machine, m = ModelSpec.named("llama-3.1-8b"), cluster(2), 3
    split = costs("llama-3.1-8b", ONE_EACH, 2, micro_batches=m)
    one = costs("llama-3.1-8b", ONE_EACH, 2, micro_batches=1)
    rows, cached = 96.0, 96 * 1500.0
    attention, feed_forward, link = (float(each) / model.num_blocks for each in one.busy(rows / m, cached / m))
    there = float(
        link_s(
            np.array([rows / m * model.hidden_dim]), ONE_EACH, (machine, machine), packaged_coefficients()["serving"]
        )[0]
    )
    trip, slowest = attention + feed_forward + link + there, max(attention, feed_forward, link)
    once = float(np.interp(rows, TABLED, split.embedding) + split.parts(rows, cached)["head"])
    expected = model.num_blocks * max(m * slowest, trip) + min(trip - slowest, (m - 1) * slowest) + once
    assert float(split.seconds(rows, cached)) == pytest.approx(expected, rel=1e-9)


def test_what_attention_devices_do_and_wait_for_is_the_step() -> None:
    for micro_batches in MICRO_BATCHES:
        split = costs("deepseek-v3", MIXTURE, 16, micro_batches=micro_batches)
        parts = split.parts(ROWS, 2000 * ROWS)
        assert all(np.all(seconds >= 0) for seconds in parts.values())
        np.testing.assert_allclose(split.seconds(ROWS, 2000 * ROWS), sum(parts.values()))
        for busy in split.busy(ROWS, 2000 * ROWS):
            assert np.all(busy <= split.seconds(ROWS, 2000 * ROWS) * (1 + 1e-12))


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from([ONE_EACH, MIXTURE, ServingLayout(tp=2, attention_dp=4, ep=2, ffn_devices=8)]),
    st.sampled_from(MICRO_BATCHES),
    st.floats(1.0, 400.0),
    st.floats(16.0, 30_000.0),
)
def test_quicker_links_and_fewer_rows_are_never_slower(
    layout: ServingLayout, micro_batches: int, rows: float, context: float
) -> None:
    name = "llama-3.1-8b" if layout == ONE_EACH else "deepseek-v3"
    now, quicker = (costs(name, layout, 16, times, micro_batches) for times in (1.0, 2.0))
    seconds = float(now.seconds(rows, rows * context))
    assert float(quicker.seconds(rows, rows * context)) <= seconds * (1 + 1e-12)
    # Learned residuals of kernels are trees: a few rows or tokens more may be a little quicker.
    assert seconds <= float(now.seconds(rows, 1.5 * rows * context)) * 1.05
    assert seconds <= float(now.seconds(2 * rows, 2 * rows * context)) * 1.05


def test_a_row_is_copied_to_the_groups_that_have_its_experts() -> None:
    """By drawing 8 of 8 groups with replacement, as the formula has it; one group, and a dense part, take one copy."""
    model = ModelSpec.named("deepseek-v3")
    drawn = np.random.default_rng(0).integers(0, 8, (100_000, 8))
    distinct = np.mean([len(set(row)) for row in drawn[:20_000].tolist()])
    assert copies_of(model, MIXTURE) == pytest.approx(distinct, rel=0.01)
    assert copies_of(model, ServingLayout(ffn_devices=8)) == 1
    assert copies_of(ModelSpec.named("llama-3.1-8b"), ONE_EACH) == 1


def test_the_smaller_group_and_unlike_devices_bound_the_link() -> None:
    coefficients, size = packaged_coefficients()["serving"], np.array([1e9])
    machine, slow = cluster(16), ClusterSpec.parse("16xA100-SXM-80GB")
    even, uneven = (ServingLayout(attention_dp=n, ffn_devices=16 - n) for n in (8, 12))
    assert link_s(size, uneven, (machine, machine), coefficients) > link_s(size, even, (machine, machine), coefficients)
    unlike = link_s(size, even, (machine, slow), coefficients)
    rate = min(each.levels[-1].link.bandwidth_bytes_per_s for each in (machine, slow))
    assert float(unlike[0]) >= 1e9 / 8 / rate
    assert float(unlike[0]) == float(link_s(size, even, (slow, machine), coefficients)[0])


def test_the_simulation_has_the_steps_of_the_steady_state() -> None:
    """At the contexts that both tabulate, where no graph is padded and no rank has more than another."""
    split = costs("deepseek-v3", MIXTURE, 16)
    profile = EngineProfile.named("vllm")
    limits = profile.limits(device_bytes=80e9, cache_tokens=10**6).replace(graph_sizes=())
    table = SplitTable(split, profile, limits)
    for rows in (1, 5, 48, 200):
        device_s = float(split.seconds(rows, 1024 * rows))
        host = profile.overhead
        expected = max(device_s + host.device_s, host.step_s + host.row_s * rows) if host.overlapped else (
            device_s + host.device_s + host.step_s + host.row_s * rows
        )  # fmt: skip
        assert table.decode_s(rows, 1024 * rows) == pytest.approx(expected, rel=1e-9)
        # Ranks with fewer rows leave feed-forward devices less to do; curves of means lie a 64th apart.
        assert table.decode_s(rows, 1024 * rows, rows / 2) <= table.decode_s(rows, 1024 * rows) * (1 + 1e-12)
    prompt = float(split.seconds(3, 3000, 512, 256, prompts=1))
    assert table.prompt_s(3, 3000, 512, 256, 1) >= prompt


def test_both_groups_have_to_fit() -> None:
    """671 GB of experts on two devices do not, whatever attention devices have left."""
    profile = EngineProfile.named("vllm")
    fits = serving_memory(costs("deepseek-v3", MIXTURE, 16), profile, request_len=4000.0)
    assert not fits.fits and fits.reason is not None and fits.reason.startswith("feed-forward weights of")
    machine = ClusterSpec.parse("16xH200-SXM-141GB")
    split = SplitCosts.split(
        ModelSpec.named("deepseek-v3"), (machine, machine), MIXTURE, weights="fp8", cache="bf16", micro_batches=3
    )
    memory = serving_memory(split, profile, request_len=4000.0)
    assert memory.fits and memory.ffn_free_bytes > 0
    total = 8 * memory.ffn_weight_bytes + memory.weight_bytes
    assert total == pytest.approx(ModelSpec.named("deepseek-v3").num_params, rel=0.05)


def test_layouts_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="pp 1, not 2"):
        ServingLayout(pp=2, ffn_devices=4)
    with pytest.raises(ConfigError, match="does not divide the 6 feed-forward devices"):
        ServingLayout(ep=4, ffn_devices=6)
    layout = ServingLayout(tp=2, attention_dp=4, ep=2, ffn_devices=8)
    assert (layout.num_devices, layout.moe_tp) == (16, 4)
