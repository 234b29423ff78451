"""Laws of the simulation of requests: conservation, Little's law, closed forms, and that more of anything is never worse."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.cost_models.serving.engine import EngineProfile
from meshwright.cost_models.serving.simulation import EnginePool, RequestTable, SimulatedRequests, simulate
from meshwright.schema import ConfigError
from meshwright.schema.serving import EngineLimits

ENGINES = ("vllm", "sglang", "trtllm", "meshwright")


@dataclass(frozen=True)
class ConstantCosts:
    """A step whose parts are proportional to what they are of."""

    scale: float = 1.0

    def parts(
        self,
        decode_rows: Any,
        cached_tokens: Any,
        prefill_tokens: Any = 0,
        prefill_context: Any = 0,
        *,
        prompts: Any = 0,
    ) -> dict[str, Any]:
        b, cached, p, context, n = (
            np.asarray(value, dtype=np.float64)
            for value in (decode_rows, cached_tokens, prefill_tokens, prefill_context, prompts)
        )
        parts = {
            "products": 5e-3 + (b + p) * 2e-5,
            "experts": (b + p) * 1e-6,
            "head": 1e-4 + 1e-6 * (b + n),
            "decode_attention": cached * 1e-8,
            "prefill_attention": p * context * 1e-11,
        }
        return {name: value * self.scale for name, value in parts.items()}


def pool(
    engine: str = "vllm", *, cache_tokens: int = 200_000, scale: float = 1.0, max_batch: int = 64, **sizes: int
) -> EnginePool:
    profile = EngineProfile.named(engine)
    limits = profile.limits(device_bytes=200e9, cache_tokens=cache_tokens, max_batch=max_batch, max_batched_tokens=4096)
    return EnginePool.of(ConstantCosts(scale), profile, limits, num_kernels=200, **sizes)


def load(count: int = 200, seed: int = 0, rate: float = 10.0, *, longest: int = 2000) -> RequestTable:
    draw = np.random.default_rng(seed)
    return RequestTable.of(
        draw.integers(1, longest, count), draw.integers(1, 300, count), np.cumsum(draw.exponential(1 / rate, count))
    )


def require_all_served(requests: RequestTable, served: SimulatedRequests) -> None:
    """Check that every request ended, in order, and that its tokens were computed once, or more often where it lost its cache."""
    assert np.all(served.ttft_s > 0)
    assert np.all(served.e2e_s >= served.ttft_s - 1e-12)
    assert np.all(served.queue_s >= -1e-12)
    tokens = served.ttft_s + served.tpot_s * (requests.output_len - 1)
    np.testing.assert_allclose(tokens, served.e2e_s, rtol=1e-9)
    first, last = served.pools[0], served.pools[-1]
    computed = sum(use.prompt_tokens for use in first) + (
        sum(use.prompt_tokens for use in last) if first is not last else 0
    )
    decoded = sum(use.decode_tokens for use in last)
    if served.preemptions.any():
        assert computed > requests.prompt_len.sum()
    else:
        assert computed == (requests.prompt_len - requests.prefix_len).sum()
        assert decoded == (requests.output_len - 1).sum()
    assert all(use.max_cache <= 1 for uses in served.pools for use in uses)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("concurrency", [None, 1, 17])
@pytest.mark.parametrize("sizes", [{}, {"replicas": 3}, {"ranks": 4}, {"lanes": 2}])
def test_every_request_ends_and_tokens_add_up(engine: str, concurrency: int | None, sizes: dict[str, int]) -> None:
    requests = load()
    require_all_served(requests, simulate(pool(engine, **sizes), requests, concurrency=concurrency))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_small_cache_delays_and_preempts_but_loses_nothing(engine: str) -> None:
    requests = load(longest=900)
    served = simulate(pool(engine, cache_tokens=2400), requests, concurrency=40)
    require_all_served(requests, served)
    reserves_all = EngineProfile.named(engine).admission.reserve_running == 1
    assert served.preemptions.any() != reserves_all
    assert served.e2e_s.mean() > simulate(pool(engine), requests, concurrency=40).e2e_s.mean()


@pytest.mark.parametrize("engine", ENGINES)
def test_disaggregated_requests_pass_both_pools(engine: str) -> None:
    requests = load()
    pools = [pool(engine, replicas=2), pool(engine, replicas=3)]
    served = simulate(pools, requests, transfer_s_per_token=1e-6)
    require_all_served(requests, served)
    assert sum(use.decode_tokens for use in served.pools[0]) == 0
    assert sum(use.prompt_tokens for use in served.pools[1]) == 0
    slower = simulate(pools, requests, transfer_s_per_token=1e-4)
    assert np.all(slower.ttft_s >= served.ttft_s - 0.02)
    assert slower.ttft_s.mean() > served.ttft_s.mean()


@settings(max_examples=30, deadline=None)
@given(
    engine=st.sampled_from(ENGINES), count=st.integers(1, 60), seed=st.integers(0, 99),
    concurrency=st.none() | st.integers(1, 30), replicas=st.integers(1, 3),
)  # fmt: skip
def test_mean_in_flight_is_rate_times_mean_latency(
    engine: str, count: int, seed: int, concurrency: int | None, replicas: int
) -> None:
    """Little's law, exact over the whole run: every request begins and ends within it."""
    requests = load(count, seed)
    served = simulate(pool(engine, replicas=replicas), requests, concurrency=concurrency)
    rate = count / served.duration_s
    assert served.mean_in_flight == pytest.approx(rate * served.e2e_s.mean(), rel=1e-9)
    if concurrency is not None:
        assert served.mean_in_flight <= concurrency + 1e-9


@pytest.mark.parametrize("engine", ENGINES)
def test_equal_requests_one_by_one_take_the_closed_form(engine: str) -> None:
    """One in flight: front end, a step of its prompt, and steps over a cache that grows by one."""
    entry, prompt, output = pool(engine), 1000, 50
    served = simulate(entry, RequestTable.of(np.full(5, prompt), output), concurrency=1)
    cost, table = entry.profile.request, entry.table
    ttft = cost.fixed_s + cost.token_s * prompt + table.prompt_s(0, 0, prompt, prompt / 2, 1) + 2 * cost.way_s
    tpot = np.mean([table.decode_s(1, prompt + step) for step in range(output - 1)])
    np.testing.assert_allclose(served.ttft_s, ttft, rtol=1e-9)
    np.testing.assert_allclose(served.tpot_s, tpot, rtol=1e-9)


def test_equal_requests_together_take_the_closed_form() -> None:
    """A batch whose prompts fit one step each way: prompts together, then steps of all of them."""
    count, prompt, output = 4, 100, 40
    entry = pool("sglang")
    entry = EnginePool.of(
        ConstantCosts(),
        entry.profile.replace(request=entry.profile.request.replace(fixed_s=0, token_s=0, way_s=0)),
        entry.limits,
    )
    served = simulate(entry, RequestTable.of(np.full(count, prompt), output, 0.0), concurrency=count)
    table = entry.table
    # The first request to be queued starts at once; the others' prompts follow together.
    first = table.prompt_s(0, 0, prompt, prompt / 2, 1)
    rest = table.prompt_s(0, 0, 3 * prompt, prompt / 2, 3)
    np.testing.assert_allclose(served.ttft_s, [first, *[first + rest] * 3], rtol=1e-9)
    decode = sum(table.decode_s(count, count * (prompt + step)) for step in range(output - 1))
    np.testing.assert_allclose(served.e2e_s, first + rest + decode, rtol=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_same_load_gives_the_same_answer(engine: str) -> None:
    first, second = (simulate(pool(engine, replicas=2), load(), concurrency=20) for _ in range(2))
    assert np.array_equal(first.ttft_s, second.ttft_s)
    assert np.array_equal(first.e2e_s, second.e2e_s)


@pytest.mark.parametrize("engine", ENGINES)
def test_doubling_costs_and_times_doubles_latencies(engine: str) -> None:
    requests = load(80)

    def engine_of(scale: float) -> EnginePool:
        profile = EngineProfile.named(engine)
        overhead = {
            name: getattr(profile.overhead, name) * scale for name in ("step_s", "row_s", "device_s", "eager_kernel_s")
        }
        cost = {name: getattr(profile.request, name) * scale for name in ("fixed_s", "token_s", "way_s")}
        profile = profile.replace(
            overhead=profile.overhead.replace(**overhead), request=profile.request.replace(**cost)
        )
        return EnginePool.of(ConstantCosts(scale), profile, pool(engine).limits, num_kernels=200)

    slow = RequestTable(requests.arrival_s * 2, requests.prompt_len, requests.output_len, requests.prefix_len)
    np.testing.assert_allclose(
        simulate(engine_of(2.0), slow).e2e_s, 2 * simulate(engine_of(1.0), requests).e2e_s, rtol=1e-6
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", range(3))
def test_faster_steps_more_replicas_and_more_cache_are_never_worse_on_average(engine: str, seed: int) -> None:
    requests = load(150, seed, rate=20.0, longest=900)
    base = simulate(pool(engine, cache_tokens=8000), requests).e2e_s.mean()
    assert simulate(pool(engine, cache_tokens=8000, scale=0.7), requests).e2e_s.mean() < base
    assert simulate(pool(engine, cache_tokens=8000, replicas=2), requests).e2e_s.mean() < base
    assert simulate(pool(engine, cache_tokens=80_000), requests).e2e_s.mean() <= base * 1.001


def test_prompts_in_the_prefix_cache_are_not_computed_again() -> None:
    plain = RequestTable.of(np.full(50, 1500), 100, np.arange(50) * 0.1)
    shared = RequestTable.of(np.full(50, 1500), 100, np.arange(50) * 0.1, 1200)
    before, after = (simulate(pool(), requests) for requests in (plain, shared))
    require_all_served(shared, after)
    assert after.ttft_s.mean() < before.ttft_s.mean()


def test_a_prefix_with_the_host_is_copied_in_turn_and_takes_the_cache_of_each_request() -> None:
    alone, many = RequestTable.of([1500], [100], 0.0, 1200), RequestTable.of(np.full(30, 1500), 100, 0.0, 1200)
    device, host, none = (
        replace(pool(), prefixes=prefixes, fetch_s_per_token=1e-4) for prefixes in ("device", "host", "none")
    )
    shared, copied, computed = (simulate(each, alone) for each in (device, host, none))
    assert copied.ttft_s[0] == pytest.approx(shared.ttft_s[0] + 0.12)
    assert computed.ttft_s[0] == simulate(none, RequestTable.of([1500], [100])).ttft_s[0]
    assert simulate(host, many).queue_s.max() < simulate(host, many).ttft_s.max() - 29 * 0.12
    assert shared.pools[0][0].max_cache < copied.pools[0][0].max_cache


def test_a_request_that_no_cache_holds_is_refused() -> None:
    with pytest.raises(ConfigError, match="longer than the cache"):
        simulate(pool(cache_tokens=800), RequestTable.of([700], [200]))


def test_chunks_bound_the_tokens_of_a_step() -> None:
    """Other requests' tokens wait for a chunk at most, not for a whole prompt."""
    requests = RequestTable.of([100, 4000], [400, 10], [0.0, 1.0])
    profile = EngineProfile.named("vllm")

    def largest_gap(max_batched_tokens: int) -> float:
        limits = profile.limits(
            device_bytes=200e9, cache_tokens=100_000, max_batch=8, max_batched_tokens=max_batched_tokens
        )
        return simulate(EnginePool.of(ConstantCosts(), profile, limits), requests).ttft_s[1]

    assert largest_gap(500) > largest_gap(8000)


def test_limits_keep_to_the_given_ones() -> None:
    limits = EngineProfile.named("vllm").limits(device_bytes=200e9, cache_tokens=100_001, max_batch=50)
    assert limits == EngineLimits(
        max_batch=50, max_batched_tokens=8192, chunk=8192, block_size=16, cache_blocks=6250,
        graph_sizes=(1, 2, 4, 8, 16, 24, 32, 40, 48, 56), cache_fraction=0.9,
    )  # fmt: skip


def test_prompts_that_wait_for_all_ranks_come_later_and_interrupt_less() -> None:
    profile = EngineProfile.named("trtllm")
    limits = pool("trtllm").limits
    requests = RequestTable.of(np.full(240, 3000), np.random.default_rng(0).integers(150, 200, 240))

    def served(balance_steps: int) -> SimulatedRequests:
        balanced = profile.replace(scheduler=profile.scheduler.replace(balance_steps=balance_steps))
        return simulate(EnginePool.of(ConstantCosts(), balanced, limits, ranks=4), requests, concurrency=32)

    at_once, together = served(0), served(50)
    assert together.ttft_s.mean() > at_once.ttft_s.mean()
    assert together.tpot_s.mean() < at_once.tpot_s.mean()


def test_arrivals_are_seen_every_few_steps() -> None:
    profile = EngineProfile.named("sglang")
    requests = RequestTable.of([100, 100], [2000, 10], [0.0, 1.0])

    def second_ttft(poll_steps: int) -> float:
        polled = profile.replace(scheduler=profile.scheduler.replace(poll_steps=poll_steps))
        return float(simulate(EnginePool.of(ConstantCosts(), polled, pool("sglang").limits), requests).ttft_s[1])

    step = pool("sglang").table.decode_s(1, 300)
    assert second_ttft(1) < second_ttft(40) <= second_ttft(1) + 41 * step


def test_prompts_take_the_time_of_their_launches_where_no_graph_holds_them() -> None:
    profile, limits = EngineProfile.named("trtllm"), pool("trtllm").limits
    few, many = (EnginePool.of(ConstantCosts(), profile, limits, num_kernels=kernels).table for kernels in (0, 5000))
    assert many.prompt_s(0, 0, 10, 5, 1) == pytest.approx(
        5000 * profile.overhead.eager_kernel_s + profile.overhead.device_s
    )
    assert few.prompt_s(0, 0, 10, 5, 1) < many.prompt_s(0, 0, 10, 5, 1)
    assert few.decode_s(4, 400) == many.decode_s(4, 400)


def test_looks_cut_out_the_time_in_which_instances_fill_and_empty() -> None:
    requests = RequestTable.of(100, 200, np.arange(400) * 0.05)
    entire, cut = (simulate(pool(), requests, looks=looks).pools[0][0] for looks in (None, (100, 300)))
    assert cut.seconds == pytest.approx(200 * 0.05, rel=1e-6)
    assert cut.prompt_tokens == pytest.approx(200 * 100, abs=200)
    assert cut.running_s / cut.seconds > entire.running_s / entire.seconds
    assert (cut.max_running, cut.max_rows) == (entire.max_running, entire.max_rows)
