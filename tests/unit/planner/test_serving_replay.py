"""A serving plan under recorded requests: every request is served, by the pools that its routes name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from meshwright.cli.main import app
from meshwright.planner.serving.replay import Replay, replay
from meshwright.schema import ClusterSpec, ConfigError, ModelSpec, RequestClass, Requests, Serving, ServingPlan
from meshwright.schema.requests_file import Trace, read_trace
from meshwright.schema.serving import EngineLimits, LatencyLimit, Pool, Role, ServingLayout
from meshwright.schema.serving_plan import ClassEstimate, Percentiles, PoolEstimate, Route, ServingEstimate
from typer.testing import CliRunner

COUNT = 120


def plan_of(roles: tuple[Role, ...], *, routes: tuple[Route, ...], **requests: object) -> ServingPlan:
    some = Percentiles(mean_s=0.1, p50_s=0.1, p90_s=0.2, p99_s=0.3)
    overall = ClassEstimate(num_simulated=10, ttft=some, tpot=some, e2e=some, goodput_requests_per_s=1, attainment=1)
    limits = EngineLimits(
        max_batch=32, max_batched_tokens=4096, chunk=4096, cache_blocks=8000, graph_sizes=(1, 2, 4, 8, 16, 32)
    )
    of_pool = PoolEstimate(
        requests_per_s=1, decode_rows=4, prefill_tokens=100, step_s=0.01, step_parts_s={"products": 0.01}, binds="rate",
        cache_bytes=10**9, cache_use=0.5, weight_bytes=10**9, utilisation=0.3, largest_requests_per_s=3,
    )  # fmt: skip
    pools = tuple(
        Pool(role=role, device="H100-SXM-80GB", replicas=2, layout=ServingLayout(tp=idx + 1), limits=limits)
        for idx, role in enumerate(roles)
    )
    estimate = ServingEstimate(
        tokens_per_s=100, num_devices=8, tokens_per_s_per_device=12.5, tokens_per_s_per_user=10, requests_per_s=1,
        max_requests_per_s=6, overall=overall, pools=(of_pool,) * len(pools), transfer_s=0.001,
    )  # fmt: skip
    classes = (RequestClass(prompt_len=500, output_len=50),)
    limit = LatencyLimit(metric="ttft", seconds=0.2, quantile=0.9)
    return ServingPlan(
        model=ModelSpec.named("llama-3.1-8b"), cluster=ClusterSpec.parse("8xH100-SXM-80GB"),
        serving=Serving(requests=Requests(classes=classes, rate=5, **requests), limits=(limit,)), pools=pools, routes=routes,
        estimate=estimate,
    )  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    draw = np.random.default_rng(0)
    path = tmp_path / "trace.csv"
    arrivals = np.cumsum(draw.exponential(0.1, COUNT))
    lines = [f"{at:.4f},{draw.integers(50, 1500)},{draw.integers(1, 120)}" for at in arrivals]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]) + "\n")
    return read_trace(path)


def require_conserved(found: Replay, trace: Trace) -> None:
    assert found.num_requests == COUNT
    assert sum(entry.prompt_tokens for entry in found.instances) == trace.prompt_len.sum()
    assert sum(entry.output_tokens for entry in found.instances) == (trace.output_len - 1).sum()
    assert found.latencies["ttft"].p50_s <= found.latencies["ttft"].p99_s <= found.latencies["ttft"].max_s
    assert found.limits[0].within == pytest.approx(1, abs=1)


def test_one_pool_serves_all_requests_on_all_instances(trace: Trace) -> None:
    found = replay(plan_of(("agg",), routes=(Route(request_class=0, pool=0, share=1),)), trace)
    require_conserved(found, trace)
    assert [entry.instance for entry in found.instances] == [0, 1]
    assert all(entry.steps for entry in found.instances)


def test_prompts_and_tokens_are_of_different_pools_where_disaggregated(trace: Trace) -> None:
    found = replay(
        plan_of(("prefill", "decode"), routes=(Route(request_class=0, pool=0, decode_pool=1, share=1),)), trace
    )
    require_conserved(found, trace)
    assert {entry.pool for entry in found.instances if entry.prompt_tokens} == {0}
    assert {entry.pool for entry in found.instances if entry.output_tokens} == {1}


def test_routes_share_requests_between_pools(trace: Trace) -> None:
    routes = (Route(request_class=0, pool=0, share=0.25), Route(request_class=0, pool=1, share=0.75))
    found = replay(plan_of(("agg", "agg"), routes=routes), trace)
    require_conserved(found, trace)
    first = sum(entry.prompt_tokens for entry in found.instances if entry.pool == 0)
    assert first / trace.prompt_len.sum() == pytest.approx(0.25, abs=0.08)


def test_a_higher_rate_waits_longer_and_a_closed_loop_keeps_its_number(trace: Trace) -> None:
    plan = plan_of(("agg",), routes=(Route(request_class=0, pool=0, share=1),))
    slow, fast = (replay(plan, trace, rate=rate) for rate in (2.0, 200.0))
    assert fast.latencies["ttft"].mean_s > slow.latencies["ttft"].mean_s
    assert fast.duration_s < slow.duration_s
    closed = replay(plan, trace, concurrency=6)
    assert 4 < closed.mean_in_flight <= 6


def test_the_command_prints_tables_and_json(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "serve.json"
    plan_of(("agg",), routes=(Route(request_class=0, pool=0, share=1),)).save(path)
    run = lambda *more: CliRunner().invoke(app, ["replay", str(path), "--requests", trace.file.path, *more])  # noqa: E731
    shown = run()
    assert shown.exit_code == 0, shown.output
    assert "in flight" in shown.stdout
    assert Replay.model_validate_json(run("--json").stdout).num_requests == COUNT
    assert run("--rate", "3", "--concurrency", "4").exit_code == 2


def test_a_device_that_is_not_there_is_named(trace: Trace) -> None:
    plan = plan_of(("agg",), routes=(Route(request_class=0, pool=0, share=1),))
    with pytest.raises(ConfigError, match="has no B200"):
        replay(plan.replace(pools=(plan.pools[0].replace(device="B200-SXM-180GB"),)), trace)
