"""Loads of requests as text and as files, limits on latency, and the document of a serving plan."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from meshwright.schema import ClusterSpec, ConfigError, ModelSpec, Plan, RequestClass, Requests, Serving, ServingPlan
from meshwright.schema.requests_file import parse_limit, parse_requests, read_trace
from meshwright.schema.serving import EngineLimits, Pool, ServingLayout
from meshwright.schema.serving_plan import ClassEstimate, Percentiles, PoolEstimate, Route, ServingEstimate


def test_one_class_as_text() -> None:
    load = parse_requests("isl=4k,osl=512,rate=20,cv=1.5,prefix=0.25")
    assert load.classes == (RequestClass(prompt_len=4096, output_len=512, prefix_len=1024),)
    assert (load.rate, load.arrival_cv, load.concurrency) == (20, 1.5, None)
    assert parse_requests("isl=4k,osl=512,prefix=1024,prefixes=3").classes[0].prefix_len == 1024


def test_shares_are_normalised_and_an_option_stands_in_for_the_rate() -> None:
    load = parse_requests("isl=100,osl=10,share=3;isl=1000,osl=20,share=1,rate=7", concurrency=32)
    assert [entry.share for entry in load.classes] == [0.75, 0.25]
    assert (load.rate, load.concurrency) == (None, 32)


@pytest.mark.parametrize(
    "text",
    ["isl=4096", "isl=4096,osl=x", "isl=4096,osl=5,pref=3", "isl=10,isl=20,osl=3", "isl=-5,osl=3", "nowhere.csv",
     "isl=10,osl=10,prefix=10", "isl=10,osl=10,rate=3,concurrency=4", "isl=10,osl=10,share=0", "isl=0,osl=10",
     "isl=10,osl=10,rate=nan", "isl=10,osl=10,prefix=1", "isl=10,osl=10,prefix=2.5", "isl=10,osl=10,prefixes=3",
     "isl=10,osl=10,share=0.5;isl=20,osl=10", "isl=10,osl=10,rate=0"],
)  # fmt: skip
def test_loads_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_requests(text)


def test_limits_have_units_and_percentiles() -> None:
    limit = parse_limit("ttft", "500ms@p99")
    assert (limit.metric, limit.seconds, limit.quantile) == ("ttft", 0.5, 0.99)
    assert parse_limit("tpot", "2s").quantile == 0.9
    for wrong in ("500", "ms", "30ms@90", "30ms@p100", "-3ms", "1e999s", "1.2.3s"):
        with pytest.raises(ConfigError):
            parse_limit("tpot", wrong)


def test_a_trace_is_binned_with_its_rate_and_prefixes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrival = np.cumsum(rng.exponential(0.1, 2000))
    prompt, output = rng.integers(100, 4000, 2000), rng.integers(1, 300, 2000)
    path = tmp_path / "trace.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write("arrival_s,prompt_tokens,output_tokens,prefix_blocks\n")
        for i in range(2000):
            file.write(f"{arrival[i]},{prompt[i]},{output[i]},{'7 8' if i % 2 else f'{100 + i}'}\n")
    load = parse_requests(str(path))
    assert load.rate == pytest.approx(1999 / (arrival[-1] - arrival[0]))
    assert load.arrival_cv == pytest.approx(1, abs=0.1)
    assert load.mean_prompt_len == pytest.approx(prompt.mean(), rel=0.01)
    assert load.mean_output_len == pytest.approx(output.mean(), rel=0.01)
    assert load.trace is not None and load.trace.num_requests == 2000
    trace = read_trace(path)
    assert trace.prefix_len[1] == 0 and trace.prefix_len[3] == min(1024, trace.prompt_len[3] - 1)
    faster = parse_requests(str(path), rate=2 * load.rate)
    assert faster.trace is not None and faster.trace.rate_scale == pytest.approx(2)


@pytest.mark.parametrize(
    "content",
    ["", "a,b\n1,2\n", "arrival_s,prompt_tokens,output_tokens\n0,x,3\n", "arrival_s,prompt_tokens,output_tokens\n",
     "arrival_s,prompt_tokens,output_tokens\n0,-4,3\n", "arrival_s,prompt_tokens,output_tokens\n0,4,3\n0,4,3\n"],
)  # fmt: skip
def test_files_that_are_no_trace_are_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(content)
    with pytest.raises(ConfigError):
        parse_requests(str(path))
    broken = tmp_path / "trace.csv.gz"
    broken.write_bytes(b"\x1f\x8b\x08no gzip")
    with pytest.raises(ConfigError):
        parse_requests(str(broken))


def test_different_blocks_of_a_trace_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.schema.requests_file.MAX_PREFIX_BLOCKS", 3)
    path = tmp_path / "trace.csv"
    header = "arrival_s,prompt_tokens,output_tokens,prefix_blocks\n"
    path.write_text(f"{header}0,900,3,1 2 3\n1,900,3,1 2\n")
    assert read_trace(path).prefix_len.tolist() == [0, 899]
    path.write_text(f"{header}0,900,3,1 2 3\n1,900,3,1 2 4\n")
    with pytest.raises(ConfigError, match="more than 3 different blocks"):
        read_trace(path)


def test_a_plan_is_read_back_as_one_for_serving(tmp_path: Path) -> None:
    some = Percentiles(mean_s=0.1, p50_s=0.1, p90_s=0.2, p99_s=0.3)
    overall = ClassEstimate(num_simulated=10, ttft=some, tpot=some, e2e=some, goodput_requests_per_s=1, attainment=1)
    limits = EngineLimits(max_batch=8, max_batched_tokens=2048, cache_blocks=1000)
    pool = Pool(device="H100-SXM-80GB", replicas=2, layout=ServingLayout(tp=4), limits=limits)
    of_pool = PoolEstimate(
        requests_per_s=1, decode_rows=4, prefill_tokens=100, step_s=0.01, step_parts_s={"products": 0.01}, binds="rate",
        cache_bytes=10**9, cache_use=0.5, weight_bytes=10**9, utilisation=0.3, largest_requests_per_s=3,
    )  # fmt: skip
    estimate = ServingEstimate(
        tokens_per_s=100, num_devices=8, tokens_per_s_per_device=12.5, tokens_per_s_per_user=10, requests_per_s=1,
        max_requests_per_s=6, overall=overall, pools=(of_pool,),
    )  # fmt: skip
    serving = Serving(requests=Requests(classes=(RequestClass(prompt_len=100, output_len=10),), rate=1))
    plan = ServingPlan(
        model=ModelSpec.named("llama-3.1-8b"), cluster=ClusterSpec.parse("8xH100-SXM-80GB"), serving=serving, pools=(pool,),
        routes=(Route(request_class=0, pool=0, share=1),), estimate=estimate,
    )  # fmt: skip
    plan.save(tmp_path / "serve.json")
    assert Plan.load(tmp_path / "serve.json") == plan
    assert plan.summary["pools"] == "2 x tp=4" and plan.num_devices == 8
    with pytest.raises(ConfigError, match="sum to one"):
        plan.replace(routes=(Route(request_class=0, pool=0, share=0.5),))
    with pytest.raises(ConfigError, match="roles"):
        plan.replace(routes=(Route(request_class=0, pool=0, decode_pool=0, share=1),))
