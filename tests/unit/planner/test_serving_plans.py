"""Serving plans: their bound, every deployment of a small space, laws, and what the document says."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from meshwright.planner import plan
from meshwright.planner.request import PlanRequest
from meshwright.planner.serving.checks import Deployment, drawn_requests, serve, wilson
from meshwright.planner.serving.limits import Touched
from meshwright.planner.serving.mix import cluster_of_offers
from meshwright.planner.tasks.serving import ServingProblem, search_serving
from meshwright.schema import ClusterSpec, ConfigError, InfeasibleError, ModelSpec, Offer, Plan, Serving, ServingPlan
from meshwright.schema.requests_file import parse_limit, parse_requests

LIMITS = {"ttft": "400ms@p90", "tpot": "12ms@p90"}


def task(
    requests: str = "isl=1024,osl=128,rate=25", *, ttft: str | None = "", tpot: str | None = "", **fields: Any
) -> Serving:
    texts = {"ttft": LIMITS["ttft"] if ttft == "" else ttft, "tpot": LIMITS["tpot"] if tpot == "" else tpot}
    limits = tuple(parse_limit(name, text) for name, text in texts.items() if text)
    return Serving(requests=parse_requests(requests), limits=limits, **fields)


@cache
def planned(serving: Serving, cluster: str = "8xH100-SXM-80GB", fixed: str = "") -> ServingPlan:
    options = dict(item.split("=") for item in fixed.split(",") if item)
    return plan("llama-3.1-8b", cluster, serving, fixed={name: int(value) for name, value in options.items()})


def test_the_plan_meets_its_limits_and_is_read_back(tmp_path: Path) -> None:
    answer = planned(task())
    assert all(limit.is_met for limit in answer.estimate.limits)
    assert answer.search is not None and answer.search.unit == "devices"
    assert answer.search.objective == answer.num_devices
    assert answer.resource_bound is not None and answer.resource_bound <= answer.search.bound <= answer.num_devices
    assert answer.estimate.requests_per_s == pytest.approx(25, rel=0.1)
    (likely,) = [note for note in answer.notes if "load tests that were predicted" in note]
    (tpot,) = [limit for limit in answer.estimate.limits if limit.metric == "tpot"]
    assert f"{tpot.limit_s / tpot.simulated_s:.2f} times which is the limit" in likely
    assert ("limit: 95 %" in likely) == (tpot.limit_s >= 1.24 * tpot.simulated_s)
    answer.save(tmp_path / "serve.json")
    assert Plan.load(tmp_path / "serve.json") == answer


@pytest.mark.parametrize("objective", ["gpus", "cost"])
def test_no_deployment_of_a_small_space_is_better(objective: str) -> None:
    """Every count of every family simulated: the search has the least that meets the limits, and its bound is below all."""
    serving = task("isl=1024,osl=128,rate=40", objective=objective)
    request = PlanRequest.create(
        ModelSpec.named("llama-3.1-8b"), ClusterSpec.parse("4xH100-SXM-80GB"), serving, fixed={"pp": 1}
    )
    search = search_serving(request)
    problem, costs = ServingProblem(request), list[float]()
    for family in problem.families:
        ranges = [range(1, kind.max_count + 1) for kind in family.kinds]
        for counts in itertools.product(*ranges):
            if family.fits(counts):
                served = serve(Deployment(family.kinds, counts), serving, rate=40, in_flight=30)
                if served.meets_limits:
                    costs.append(problem.cost(family, counts))
    assert costs and search.answer.best is not None
    assert search.answer.best.objective == pytest.approx(min(costs))
    assert search.answer.bound <= min(costs) * (1 + 1e-9)


def test_no_batch_limits_are_better_than_those_found() -> None:
    """Every limit of every count of one layout simulated: none meets the limits with fewer devices, the engine's own need more."""
    serving = task("isl=2048,osl=64,rate=30", modes=("agg",))
    request = PlanRequest.create(
        ModelSpec.named("llama-3.1-8b"), ClusterSpec.parse("8xH100-SXM-80GB"), serving, fixed={"pp": 1, "tp": 1}
    )
    search, problem = search_serving(request), ServingProblem(request)
    least = []
    for limited in problem.families[0].with_limits():
        every = (Deployment(limited.kinds, (count,)) for count in range(1, 9))
        meeting = (each for each in every if serve(each, serving, rate=30, in_flight=20).meets_limits)
        least.append(next((each.num_devices for each in meeting), 9))
    assert search.answer.best is not None and search.answer.is_proved
    assert search.answer.best.objective == min(least) < least[0]


def test_limits_that_nothing_touched_change_nothing() -> None:
    problem = ServingProblem(
        PlanRequest.create(ModelSpec.named("llama-3.1-8b"), ClusterSpec.parse("1xH100-SXM-80GB"), task())
    )
    own, *others = problem.families[0].with_limits()
    served = serve(Deployment(own.kinds, (1,)), problem.serving, rate=10, in_flight=10)
    touched, seen = Touched.of(served.result.pools[0]), 0
    for other in others:
        again = serve(Deployment(other.kinds, (1,)), problem.serving, rate=10, in_flight=10)
        if touched.same_under(own.kinds[0].limits, other.kinds[0].limits):
            seen += 1
            assert (again.result.ttft_s == served.result.ttft_s).all()
    assert seen
    tight = own.kinds[0].limits.replace(max_batch=touched.rows - 1)
    assert not touched.same_under(own.kinds[0].limits, tight)
    assert Touched(5, 100, 0.1).reached(tight.replace(max_batch=5))


def test_a_chunk_is_kept_or_refused_where_the_engine_has_no_words_for_it() -> None:
    limits = planned(task(engine="meshwright"), fixed="chunk=256,max_batched_tokens=1024,tp=1").pools[0].limits
    assert (limits.chunk, limits.max_batched_tokens) == (256, 1024)
    with pytest.raises(ConfigError, match="sglang cuts prompts where"):
        planned(task(engine="sglang"), fixed="chunk=256")


def test_mixed_steps_spare_tokens_the_wait_for_prompts_and_are_refused_where_the_engine_has_them_not() -> None:
    load = {"tpot": None, "engine": "sglang", "modes": ("agg",), "objective": "gpus"}
    first, mixed = (planned(task(**load, scheduler=policy), "1xH100-SXM-80GB", "tp=1") for policy in (None, "mixed"))
    assert mixed.estimate.overall.tpot.p50_s < first.estimate.overall.tpot.p50_s
    assert mixed.estimate.overall.ttft.p50_s >= 0.95 * first.estimate.overall.ttft.p50_s
    with pytest.raises(ConfigError, match="has mixed alone"):
        planned(task(scheduler="prefill_first"))


@pytest.mark.parametrize("mode", ["agg", "disagg"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_no_simulation_is_above_the_bound(mode: str, engine: str) -> None:
    serving = task("isl=1024,osl=128", modes=(mode,), engine=engine)
    request = PlanRequest.create(
        ModelSpec.named("llama-3.1-8b"), ClusterSpec.parse("4xH100-SXM-80GB"), serving, fixed={"pp": 1}
    )
    problem = ServingProblem(request)
    for family in problem.families[:4]:
        counts, bound = family.best_split(fluid=True)
        if not bound:
            continue
        beyond = problem._serve(family, Deployment(family.kinds, counts), 1.03 * bound)
        assert not beyond.meets_limits


@pytest.mark.long
def test_looser_limits_and_more_devices_are_never_worse() -> None:
    tight, loose = planned(task()), planned(task(ttft="800ms@p90", tpot="24ms@p90"))
    assert loose.num_devices <= tight.num_devices
    free = task("isl=1024,osl=128", modes=("agg",))
    small, large = planned(free, "4xH100-SXM-80GB"), planned(free, "8xH100-SXM-80GB")
    assert large.estimate.requests_per_s >= 1.9 * small.estimate.requests_per_s
    assert planned(task("isl=1024,osl=128,rate=50")).num_devices >= tight.num_devices


def test_a_closed_loop_keeps_its_requests_in_flight() -> None:
    answer = planned(task("isl=1024,osl=128,concurrency=16", ttft=None, tpot=None))
    cost = answer.estimate
    assert cost.requests_per_s * cost.overall.e2e.mean_s == pytest.approx(16, rel=0.03)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_prompts_alone_are_never_later_than_with_what_decodes(engine: str) -> None:
    """What a deployment is refused for before anything decodes is broken with it, too."""
    request = PlanRequest.create(
        ModelSpec.named("llama-3.1-8b"), ClusterSpec.parse("4xH100-SXM-80GB"), task(engine=engine, modes=("disagg",))
    )
    problem = ServingProblem(request)
    kind = next(kind for kind in problem.space.kinds if kind.size == 1)
    deployment = Deployment((kind, kind), (1, 2))
    free = problem.serving.replace(limits=())
    for rate in (5.0, 40.0):
        entire = serve(deployment, free, rate=rate, in_flight=20)
        first_s = sorted(entire.values("ttft"))
        for seconds in (first_s[len(first_s) // 2], 1e-3):
            limit = parse_limit("ttft", f"{seconds}s@p90")
            limited = serve(deployment, free.replace(limits=(limit,)), rate=rate, in_flight=20)
            assert not limited.meets_limits
            assert len(limited.result.pools) in (1, 2)
            assert limited.limits[0].simulated_s <= float(np.quantile(first_s, 0.9)) + 1e-9
        assert len(limited.result.pools) == 1  # late before anything decodes
        assert limited.tokens_per_s == pytest.approx(128 * limited.requests_per_s)


def test_latency_takes_all_that_helps_and_fixed_degrees_are_kept() -> None:
    quick = planned(task("isl=1024,osl=128,rate=2", objective="latency"))
    few = planned(task("isl=1024,osl=128,rate=2"))
    assert quick.estimate.overall.e2e.mean_s < few.estimate.overall.e2e.mean_s
    assert {pool.layout.tp for pool in planned(task(), fixed="tp=2").pools} == {2}
    assert {pool.limits.max_batch for pool in planned(task(), fixed="max_batch=48").pools} == {48}


@pytest.mark.long
def test_classes_have_latencies_of_their_own_and_prefixes_help() -> None:
    classes = "isl=256,osl=64,share=0.8,rate=10;isl=8192,osl=128,share=0.2"
    answer = planned(task(classes, ttft="2s@p90", tpot="30ms@p90"))
    short, long = answer.estimate.classes
    assert short.ttft.p50_s < long.ttft.p50_s
    with_prefix = task("isl=4096,osl=64,rate=40,prefix=0.9", ttft="2s@p90", tpot="30ms@p90")
    assert planned(with_prefix).num_devices < planned(with_prefix.replace(prefix_cache=False)).num_devices


@pytest.mark.long
def test_what_nothing_serves_names_the_limit_and_what_helps() -> None:
    with pytest.raises(InfeasibleError) as error:
        planned(task("isl=1024,osl=128,rate=100", tpot="30ms@p90", modes=("agg",)), "1xH100-SXM-80GB")
    assert "devices: 100 requests/s" in str(error.value)
    assert "--rate" in str(error.value) or "more devices" in str(error.value)
    with pytest.raises(InfeasibleError, match="tpot: no layout has 1 ms"):
        planned(task(tpot="1ms@p90"), "1xH100-SXM-80GB")
    with pytest.raises(InfeasibleError, match="memory"):
        plan("llama-3.1-405b", "1xH100-SXM-80GB", task(modes=("agg",)))


def offered(text: str, usd_per_hour: float) -> Offer:
    return Offer.from_cluster(ClusterSpec.parse(text), price_per_device_hour=usd_per_hour)


@pytest.mark.long
def test_unlike_devices_share_a_load_where_none_carries_it_alone() -> None:
    both = cluster_of_offers([offered("2xH100-SXM-80GB", 2.95), offered("2xA100-SXM-80GB", 1.35)])
    load = task("isl=200,osl=100,share=0.8,rate=20;isl=4000,osl=200,share=0.2", ttft="1s", tpot="40ms", modes=("agg",))
    free = load.replace(requests=load.requests.replace(rate=None), objective="throughput")
    alone = [
        plan("llama-3.1-8b", kind, free).estimate.requests_per_s for kind in ("2xH100-SXM-80GB", "2xA100-SXM-80GB")
    ]
    rate = max(alone) + 0.3 * min(alone)
    mixed = plan("llama-3.1-8b", both, load.replace(requests=load.requests.replace(rate=rate), objective="cost"))
    assert {pool.device for pool in mixed.pools} == {"H100-SXM-80GB", "A100-SXM-80GB"}
    assert all(limit.is_met for limit in mixed.estimate.limits)
    assert mixed.search is not None and mixed.search.unit == "usd_per_hour"
    for idx in range(2):
        assert sum(route.share for route in mixed.routes if route.request_class == idx) == pytest.approx(1)
    light = load.replace(requests=load.requests.replace(rate=0.8 * min(alone)), objective="cost")
    cheap, small = (
        plan("llama-3.1-8b", both, light),
        plan("llama-3.1-8b", offered("2xA100-SXM-80GB", 1.35).cluster, light),
    )
    assert cheap.search is not None and small.search is not None
    assert cheap.search.objective <= small.search.objective * (1 + 1e-5)


def test_objectives_without_a_load_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs a load"):
        planned(task("isl=1024,osl=128", objective="gpus"))
    with pytest.raises(ConfigError, match="tp=3"):
        planned(task(), fixed="tp=3")


def test_drawn_requests_have_the_rate_and_the_shares() -> None:
    load = parse_requests("isl=100,osl=10,share=3;isl=1000,osl=20,share=1,cv=2")
    table, classes = drawn_requests(load, (100, 1000, 100), 5.0)
    assert (table.arrival_s[1099] - table.arrival_s[99]) == pytest.approx(200)
    assert (classes == 0).mean() == pytest.approx(0.75, abs=0.01)
    low, high = wilson(0.9, 400)
    assert low == pytest.approx(0.8668, abs=1e-3) and high == pytest.approx(0.9257, abs=1e-3)
