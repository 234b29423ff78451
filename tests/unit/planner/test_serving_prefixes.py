"""Where prefixes lie that requests share: the device's cache while it holds them, the host, or nowhere, and what each takes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from meshwright.planner import plan
from meshwright.planner.request import PlanRequest
from meshwright.planner.serving.checks import Deployment
from meshwright.planner.serving.replay import replay
from meshwright.planner.tasks.serving import ServingProblem
from meshwright.schema import ClusterSpec, ConfigError, ModelSpec, Serving, ServingPlan
from meshwright.schema.requests_file import parse_limit, parse_requests, read_trace
from meshwright.schema.serving import PrefixTier

H100 = ClusterSpec.parse("1xH100-SXM-80GB")
LIMITS = (parse_limit("ttft", "2s@p90"), parse_limit("tpot", "40ms@p90"))


def serving(prefixes: int, load: str = "rate=20", engine: str = "vllm", *, is_on: bool = True) -> Serving:
    requests = parse_requests(f"isl=4096,osl=64,prefix=0.75,prefixes={prefixes},{load}")
    return Serving(requests=requests, limits=LIMITS, modes=("agg",), engine=engine, prefix_cache=is_on)


@cache
def planned(task: Serving, cluster: str = "8xH100-SXM-80GB") -> ServingPlan:
    return plan("llama-3.1-8b", cluster, task, fixed={"tp": 1, "pp": 1})


def test_prefixes_lie_on_the_device_while_it_holds_them_and_with_the_host_after() -> None:
    few, some, many, none = planned(serving(1)), planned(serving(100)), planned(serving(200)), serving(200, is_on=False)
    assert [made.pools[0].prefixes for made in (few, some, many)] == ["device", "device", "host"]
    assert "0.7 % of it" in "".join(few.notes) and "69.0 % of it" in "".join(some.notes)
    stored = 200 * 3072 * 131_072  # tokens, of 32 layers with 8 heads of 128 in 16 bits
    assert many.pools[0].host_prefix_bytes == stored
    assert few.num_devices <= many.num_devices < planned(none).num_devices
    assert planned(none).pools[0].prefixes is None
    # A copy of 403 MB before the first token, and a cache that nothing shares.
    assert many.estimate.overall.ttft.p50_s > few.estimate.overall.ttft.p50_s + 0.02


def test_a_pool_that_only_decodes_fetches_none() -> None:
    task = serving(400, "rate=20").replace(modes=("disagg",))
    made = plan("llama-3.1-8b", "8xH100-SXM-80GB", task, fixed={"tp": 1, "pp": 1})
    assert isinstance(made, ServingPlan)
    assert [pool.prefixes for pool in made.pools] == ["host", "none"]
    assert made.pools[0].host_prefix_bytes > 0 == made.pools[1].host_prefix_bytes


def test_an_engine_without_a_place_for_them_computes_them() -> None:
    assert planned(serving(200, "rate=5", "meshwright")).pools[0].prefixes == "none"


def test_a_host_that_is_too_small_holds_none() -> None:
    (group,) = H100.groups
    small = H100.replace(groups=(group.replace(host_memory_bytes=64 * 10**9),))
    made = plan("llama-3.1-8b", small, serving(200, "rate=2"), fixed={"tp": 1})
    assert isinstance(made, ServingPlan) and made.pools[0].prefixes == "none"


@pytest.mark.parametrize("load", ["cv=1", "concurrency=40"])
@pytest.mark.parametrize(
    ("host", "tiers"),
    [
        ({}, {"device", "host"}),
        ({"host_memory_bytes": 10**9, "storage_bytes_per_s": 1e9}, {"device", "storage", "none"}),
    ],
)
def test_no_simulation_is_above_the_bound_wherever_prefixes_lie(
    load: str, host: dict[str, Any], tiers: set[str]
) -> None:
    """Drives are left where the host holds all, and computing where a copy is quicker."""
    (group,) = H100.groups
    cluster = H100.replace(groups=(group.replace(**host),))
    problem = ServingProblem(
        PlanRequest.create(ModelSpec.named("llama-3.1-8b"), cluster, serving(100, load, "sglang"), fixed={"tp": 1})
    )
    (family,) = problem.families
    seen = dict[PrefixTier | None, float]()
    for limited in family.with_limits():
        (kind,) = limited.kinds
        if kind.prefixes in seen or kind.limits.max_batched_tokens != family.kinds[0].limits.max_batched_tokens:
            continue
        deployment = Deployment(limited.kinds, (1,))
        if problem.serving.requests.concurrency is None:
            seen[kind.prefixes] = most = limited.largest(0, fluid=True)
            assert not problem._serve(limited, deployment, 1.05 * most).meets_limits
            assert most <= 1.005 * family.largest(0, fluid=True)  # between two points of a curve
        else:
            seen[kind.prefixes] = limited.in_closed_loop((1,), 40, fluid=True)[0]
            assert problem._serve(limited, deployment, None).requests_per_s <= 1.025 * seen[kind.prefixes]
    assert seen.keys() == tiers


def test_a_recording_is_replayed_where_its_prefixes_fit(tmp_path: Path) -> None:
    """Blocks that come again are to be held from their first use to their last one."""
    rows = [(0, "a b"), (1, "c d"), (2, "a b"), (3, "c e"), (4, "f"), (5, "f")]
    lines = [f"{at},1200,8,{blocks}" for at, blocks in rows]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,prefix_blocks", *lines]) + "\n")
    trace = read_trace(path)
    assert trace.prefix_len.tolist() == [0, 0, 1024, 512, 0, 512]
    assert trace.file.prefix_tokens == 3 * 512  # a, b and c at once; d and e never come again
    made = planned(serving(1))
    computed = sum(entry.prompt_tokens for entry in replay(made, trace).instances)
    assert computed == 6 * 1200 - 2048
    (pool,) = made.pools
    tiny = made.replace(pools=(pool.replace(limits=pool.limits.replace(cache_blocks=90)),))
    with pytest.raises(ConfigError, match="1,536 tokens: more than the device of pool agg holds"):
        replay(tiny, trace)
