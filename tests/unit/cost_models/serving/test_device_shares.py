"""Phases on shares of one device: parts of devices, what both draw on, and the simulation of both at once."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.cost_models.coefficients import packaged_coefficients
from meshwright.cost_models.serving.device_part import ENTIRE, DevicePart
from meshwright.cost_models.serving.engine import EngineProfile
from meshwright.cost_models.serving.shares import SHARES, SharedSteps
from meshwright.cost_models.serving.simulation import EnginePool, RequestTable, SimulatedRequests, simulate
from meshwright.cost_models.serving.step import StepCosts
from meshwright.schema import ClusterSpec, ModelSpec
from meshwright.schema.serving import EngineLimits, ServingLayout

PLAIN = EngineProfile.named("vllm")
PROFILE = PLAIN.replace(
    overhead=PLAIN.overhead.replace(step_s=0.0, row_s=0.0, device_s=0.0, eager_kernel_s=0.0),
    request=PLAIN.request.replace(fixed_s=0.0, token_s=0.0, way_s=0.0),
)
"""An engine whose host takes no time, so that seconds are those of kernels."""

CASES = (
    ("llama-3.1-8b", "1xH100-SXM-80GB", ServingLayout()),
    ("llama-3.1-70b", "4xA100-SXM-80GB", ServingLayout(tp=4)),
    ("deepseek-v3", "8xH200-SXM-141GB", ServingLayout(attention_dp=8, ep=8)),
)


KINKS = 0.025
"""Tables of a simulation lie over other sizes than those of steps: seconds differ by so much at worst (docs/serving.md)."""


@cache
def costs(name: str = CASES[0][0], cluster: str = CASES[0][1], layout: ServingLayout = CASES[0][2]) -> StepCosts:
    weights = "fp8" if name == "deepseek-v3" else "bf16"
    return StepCosts.build(ModelSpec.named(name), ClusterSpec.parse(cluster), layout, weights=weights, cache="bf16")


@cache
def shared(eighths: int, case: int = 0) -> SharedSteps:
    return SharedSteps.build(costs(*CASES[case]), eighths)


def on_part(part: DevicePart) -> StepCosts:
    instance = costs().instance
    return StepCosts.build(
        instance.model, instance.cluster, instance.layout, weights="bf16", cache="bf16", part=part,
    )  # fmt: skip


def limits(**changed: int) -> EngineLimits:
    known = PROFILE.limits(device_bytes=80e9, cache_tokens=400_000)
    return known.replace(graph_sizes=(), **changed)


def served(eighths: int, requests: RequestTable, profile: EngineProfile = PROFILE, **changed: int) -> SimulatedRequests:
    return simulate(EnginePool.of(shared(eighths), profile, limits(**changed), num_kernels=0), requests)


SIZES = [(1, 4096, 0, 0, 0), (64, 64 * 2000, 0, 0, 0), (0, 0, 512, 256, 1), (0, 0, 8192, 2048, 4)]


def test_a_share_of_one_is_the_entire_device() -> None:
    assert DevicePart.of_share(1.0, packaged_coefficients()) == ENTIRE
    rows = (3.0, 6000.0, 700.0, 350.0)
    assert float(on_part(ENTIRE).seconds(*rows, prompts=1)) == float(costs().seconds(*rows, prompts=1))


@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_larger_share_is_never_slower_and_takes_at_least_its_part(case: int) -> None:
    """Terms grow by 1 / s at most: a step on half of the multiprocessors takes at most twice as long."""
    step = costs(*CASES[case])
    for rows, cached, tokens, context, prompts in SIZES:
        size = (rows, cached, tokens, context)
        seconds = [float(shared(e, case).prefill.seconds(*size, prompts=prompts)) for e in SHARES]
        assert all(later <= earlier * (1 + 1e-12) for earlier, later in itertools.pairwise(seconds))
        entire = float(step.seconds(*size, prompts=prompts))
        assert all(
            entire * (1 - 1e-12) <= s <= 8 / e * entire * (1 + 1e-12) for e, s in zip(SHARES, seconds, strict=True)
        )


def test_few_multiprocessors_draw_most_of_the_bandwidth() -> None:
    """Three eighths draw all of it (0.35 do): rows that decode lose little, prompts nearly as much as they have less."""
    decode, prompts = (64, 64 * 4000), (0, 0, 8192, 1024)
    part = DevicePart.of_share(3 / 8, packaged_coefficients())
    assert part == DevicePart(3 / 8, 1.0)
    assert DevicePart.of_share(1 / 8, packaged_coefficients()).bandwidth == pytest.approx(0.125 / 0.35)
    assert 1 < float(on_part(part).seconds(*decode) / costs().seconds(*decode)) < 1.1
    assert 2.3 < float(on_part(part).seconds(*prompts, prompts=4) / costs().seconds(*prompts, prompts=4)) < 8 / 3


@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_phase_draws_no_more_than_its_part_has(case: int) -> None:
    for eighths in SHARES:
        steps = shared(eighths, case)
        for rows, cached, tokens, context, prompts in SIZES:
            size = (rows, cached, tokens, context)
            phase = steps.decode if rows else steps.prefill
            share = 1 - eighths / 8 if rows else eighths / 8
            drawn = float(steps.memory.seconds(*size, prompts=prompts) / phase.seconds(*size, prompts=prompts))
            assert 0 < drawn <= DevicePart.of_share(share, packaged_coefficients()).bandwidth + 1e-9
            assert (steps.links is None) == (case == 0)
            if steps.links is not None:
                assert (
                    0
                    < float(steps.links.seconds(*size, prompts=prompts))
                    < float(phase.seconds(*size, prompts=prompts))
                )


@settings(max_examples=25, deadline=None)
@given(st.floats(0.05, 1), st.floats(0.05, 1), st.floats(1, 4), st.floats(1, 4))
def test_more_bandwidth_or_arithmetic_is_never_slower(
    compute: float, bandwidth: float, more_flops: float, more_bytes: float
) -> None:
    before = on_part(DevicePart(compute, bandwidth))
    for part in (
        DevicePart(compute * more_flops, bandwidth),
        DevicePart(compute, bandwidth * more_bytes),
    ):
        after = on_part(part)
        for rows, cached, tokens, context, prompts in SIZES:
            size = (rows, cached, tokens, context)
            now, then = (float(each.seconds(*size, prompts=prompts)) for each in (before, after))
            assert then <= now * (1 + 1e-12)


def test_a_phase_by_itself_takes_what_its_part_takes() -> None:
    """Prompts alone are those of an instance that has the part; so are rows once no prompt is left."""
    arrivals = np.cumsum(np.full(50, 0.03))
    prompts = RequestTable.of(1024, 1, arrivals)
    apart = simulate(EnginePool.of(shared(5).prefill, PROFILE, limits(), num_kernels=0), prompts)
    np.testing.assert_allclose(served(5, prompts).ttft_s, apart.ttft_s, rtol=1e-9)
    lone = served(5, RequestTable.of([1024], [64]))
    after_s = float(shared(5).decode.seconds(1, 1024 + 32))
    assert float(lone.tpot_s[0]) == pytest.approx(after_s, rel=KINKS)
    assert float(lone.ttft_s[0]) == pytest.approx(
        float(shared(5).prefill.seconds(0, 0, 1024, 512, prompts=1)), rel=KINKS
    )


def test_equal_requests_at_once_have_a_closed_form() -> None:
    """Eight come while a prompt without an answer is computed: they fill the next step, then eight rows decode."""
    table = RequestTable.of([1000] * 9, [1] + [33] * 8, [0.0] + [1e-6] * 8)
    result = served(4, table, max_batched_tokens=8192)
    first_s = float(shared(4).prefill.seconds(0, 0, 8000, 500, prompts=8)) + float(result.ttft_s[0])
    token_s = float(np.mean([shared(4).decode.seconds(8, 8 * (1000 + made)) for made in range(1, 33)]))
    np.testing.assert_allclose(result.ttft_s[1:], first_s, rtol=KINKS)
    np.testing.assert_allclose(result.tpot_s[1:], token_s, rtol=KINKS)
    (use,) = result.pools[0]
    assert (use.steps, use.prompt_steps, use.decode_tokens, use.prompt_tokens) == (32, 2, 8 * 32, 9000)


@pytest.mark.parametrize("eighths", [5, 7])
def test_two_phases_at_once_slow_each_other_as_the_law_says(eighths: int) -> None:
    """(D1): a prompt comes while a row decodes. On three eighths the row draws so much that there is not enough for both."""
    steps, context = shared(eighths), 3000
    result = served(eighths, RequestTable.of([context, 256], [4000, 1], [0.0, 1.0]))
    size, row = (0, 0, 256, 128), (1, context + 150)
    prompt_s, row_s = float(steps.prefill.seconds(*size, prompts=1)), float(steps.decode.seconds(*row))
    drawn = float(steps.memory.seconds(*size, prompts=1)) / prompt_s + float(steps.memory.seconds(*row)) / row_s
    assert drawn > 1.3 if eighths == 5 else drawn < 1
    assert float(result.ttft_s[1]) == pytest.approx(max(drawn, 1.0) * prompt_s, rel=KINKS)


requests = st.builds(
    lambda seed, count, prompt, output, rate: RequestTable.of(
        np.random.default_rng(seed).integers(1, prompt, count), np.random.default_rng(seed + 1).integers(1, output, count),
        np.cumsum(np.random.default_rng(seed + 2).exponential(1 / rate, count)),
    ),
    st.integers(0, 10**6), st.integers(1, 60), st.integers(2, 3000), st.integers(2, 200), st.floats(0.5, 200),
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(requests, st.sampled_from(SHARES), st.sampled_from([220, 400, 4000]), st.sampled_from([16, 1024]),
       st.sampled_from(["vllm", "sglang", "trtllm"]))  # fmt: skip
def test_every_request_ends_and_littles_law_holds(
    table: RequestTable, eighths: int, blocks: int, batch: int, engine: str
) -> None:
    profile = EngineProfile.named(engine)
    result = served(eighths, table, profile, cache_blocks=blocks, max_batch=batch)
    uses = result.pools[0]
    # A prompt that is computed again gives the next token by itself.
    made = sum(use.decode_tokens for use in uses)
    assert made <= int((table.output_len - 1).sum()) <= made + int(result.preemptions.sum())
    assert sum(use.prompt_tokens for use in uses) >= int(table.prompt_len.sum())
    if not result.preemptions.any():
        assert sum(use.prompt_tokens for use in uses) == int(table.prompt_len.sum())
    assert np.all(result.ttft_s > 0) and np.all(result.e2e_s >= result.ttft_s - 1e-9)
    np.testing.assert_allclose(result.mean_in_flight * result.duration_s, result.e2e_s.sum(), rtol=1e-9)
    for use in uses:
        assert use.busy_s <= result.duration_s * (1 + 1e-9) and use.prompt_busy_s <= result.duration_s * (1 + 1e-9)
        assert use.max_rows <= batch and use.max_cache <= 1
    again = served(eighths, table, profile, cache_blocks=blocks, max_batch=batch)
    np.testing.assert_array_equal(result.e2e_s, again.e2e_s)


def test_rows_whose_cache_is_full_preempt_and_are_computed_again() -> None:
    evicting = PROFILE.replace(admission=PROFILE.admission.replace(reserve_new=0.0, reserve_running=0.0))
    result = served(4, RequestTable.of(1000, 400, np.arange(30) * 0.05), evicting, cache_blocks=600)
    (use,) = result.pools[0]
    assert result.preemptions.sum() > 0
    assert use.decode_tokens <= 30 * 399 <= use.decode_tokens + result.preemptions.sum()
    assert use.prompt_tokens > 30 * 1000


def test_no_more_crosses_the_memory_than_it_carries() -> None:
    """The seconds of all traffic fit the time in which any phase runs."""
    table = RequestTable.of(2000, 200, np.cumsum(np.random.default_rng(3).exponential(0.06, 200)))
    steps, result = shared(3), served(3, table)
    (use,) = result.pools[0]
    rows, tokens = use.decode_tokens / use.steps, use.prompt_tokens / use.prompt_steps
    moved = use.steps * float(steps.memory.seconds(rows, rows * 2100)) + use.prompt_steps * float(
        steps.memory.seconds(0, 0, tokens, 1000, prompts=tokens / 2000)
    )
    assert use.prompt_busy_s > 0.5 * result.duration_s and use.busy_s > 0.9 * result.duration_s
    assert 0.5 * result.duration_s < moved < result.duration_s
