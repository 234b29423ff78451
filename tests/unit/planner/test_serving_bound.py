"""Laws of the bound of serving plans: nothing that only costs raises it, and nothing simulated is above it."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from meshwright.planner.request import PlanRequest
from meshwright.planner.serving.checks import Deployment
from meshwright.planner.tasks.serving import ServingProblem, search_serving
from meshwright.schema import ClusterSpec, LatencyLimit, ModelSpec, RequestClass, Requests, Serving
from meshwright.schema.adapters import Adapters

MODEL, H100 = ModelSpec.named("llama-3.1-8b"), ClusterSpec.parse("1xH100-SXM-80GB")

KINKS = 1.025
"""Tables of the steady state and of the simulation lie over unlike sizes: seconds of a step differ by so much at worst."""

CHANCE = 0.02 + 0.041
"""Queues are taken to grow from 2 % of the counted requests on, and twice the root of those in flight (checks.py): at most 4.1 %
where 800 are counted, three times those in flight."""

SPACING = 1.005
"""A curve has its best between two of its points."""

LIMITS = {
    "none": (),
    "tpot": (LatencyLimit(metric="tpot", seconds=0.02),),
    "ttft": (LatencyLimit(metric="ttft", seconds=1),),
}


def request(serving: Serving, cluster: ClusterSpec = H100, **fixed: int) -> PlanRequest:
    return PlanRequest.create(MODEL, cluster, serving, fixed=fixed)


def bound(serving: Serving, cluster: ClusterSpec = H100, **fixed: int) -> float:
    """Return the bound before anything is simulated: tokens a second, of all devices."""
    problem = ServingProblem(request(serving, cluster, **fixed))
    return max((-node.bound for node in problem.roots().nodes), default=0.0) * cluster.num_devices


def with_memory(size: int) -> ClusterSpec:
    (group,) = H100.groups
    return H100.replace(groups=(group.replace(device=group.device.replace(memory_bytes=size)),))


loads = st.builds(
    lambda isl, osl, prefix, concurrency, limits, engine: Serving(
        requests=Requests(
            classes=(RequestClass(prompt_len=isl, output_len=osl, prefix_len=isl // 2 * prefix),), concurrency=concurrency
        ),
        limits=LIMITS[limits], engine=engine, modes=("agg",), objective="throughput",
    ),
    st.integers(32, 6000), st.integers(2, 600), st.integers(0, 1), st.one_of(st.none(), st.integers(1, 400)),
    st.sampled_from(sorted(LIMITS)), st.sampled_from(["vllm", "sglang", "trtllm"]),
)  # fmt: skip


@settings(max_examples=3, deadline=None)
@given(loads.filter(lambda serving: serving.requests.concurrency is None))
def test_what_only_costs_never_raises_the_bound(serving: Serving) -> None:
    """Of loads that arrive: of one that is kept in flight the seconds of a token jump where its requests begin to come in waves."""
    plain = bound(serving)
    assert bound(serving.replace(adapters=Adapters(count=5, rank=16))) <= plain * SPACING
    tighter = tuple(limit.replace(seconds=0.7 * limit.seconds) for limit in serving.limits)
    assert bound(serving.replace(limits=tighter)) <= plain * SPACING
    assert bound(serving, max_batch=32) <= plain * SPACING
    assert bound(serving, with_memory(H100.weakest_device.memory_bytes // 2)) <= plain * SPACING
    assert bound(serving, ClusterSpec.parse("2xH100-SXM-80GB"), pp=1) >= plain / SPACING


WAVES = Requests(classes=(RequestClass(prompt_len=53, output_len=30),))
"""A thousand end together, and as many wait then: those in flight are as few as before, 9 % above the bound."""


SHORT = Requests(classes=(RequestClass(prompt_len=2331, output_len=2),))
"""Two tokens: three prompts in a step and one that decodes, between whose tokens no prompt comes."""


@settings(max_examples=4, deadline=None)
@given(loads)
@example(Serving(requests=WAVES, engine="sglang", modes=("agg",), objective="throughput"))
@example(Serving(requests=SHORT, limits=LIMITS["tpot"], engine="vllm", modes=("agg",), objective="throughput"))
def test_nothing_simulated_is_above_the_bound(serving: Serving) -> None:
    problem = ServingProblem(request(serving))
    for family in problem.families:
        for limited in family.with_limits()[:2]:
            deployment = Deployment(limited.kinds, (1,))
            if serving.requests.concurrency is not None:
                served = problem._serve(limited, deployment, None)
                assert (
                    served.requests_per_s
                    <= KINKS * family.in_closed_loop((1,), serving.requests.concurrency, fluid=True)[0]
                )
            elif most := family.largest(0, fluid=True):
                assert not problem._serve(limited, deployment, (KINKS + CHANCE) * most).meets_limits


def test_a_load_in_flight_that_needs_a_smaller_batch_has_a_plan() -> None:
    """As many rows as are in flight take 21.6 ms a token, 13 of them 7.3: their family had no node, and nothing else was tried."""
    load = Requests(classes=(RequestClass(prompt_len=3119, output_len=85),), concurrency=20)
    serving = Serving(requests=load, limits=LIMITS["tpot"], engine="vllm", modes=("agg",), objective="throughput")
    best = search_serving(request(serving)).answer.best
    assert best is not None and best.candidate.meets_limits
    assert best.candidate.deployment.kinds[0].model.max_batch < 20


@pytest.mark.parametrize("concurrency", [None, 256])
def test_the_bound_is_not_below_what_the_search_reached(concurrency: int | None) -> None:
    load = Requests(classes=(RequestClass(prompt_len=1024, output_len=128),), concurrency=concurrency)
    reached = []
    for adapters in (None, Adapters(count=5, rank=16)):
        serving = Serving(requests=load, objective="throughput", modes=("agg",), adapters=adapters)
        search = search_serving(request(serving))
        assert search.answer.best is not None
        reached.append(-search.answer.best.objective)
        assert reached[-1] <= KINKS * bound(serving)
    assert reached[1] <= reached[0]


def test_a_prefix_that_is_shared_takes_no_cache_of_each_request() -> None:
    """A cache of two prompts holds many requests that differ in their last tokens alone."""
    load = Requests(classes=(RequestClass(prompt_len=8192, output_len=64, prefix_len=8176),), concurrency=64)
    serving = Serving(requests=load, objective="throughput", modes=("agg",))
    problem = ServingProblem(request(serving, with_memory(22 * 10**9)))
    (family,) = problem.families
    assert family.kinds[0].model.cache_tokens < 4 * 8192
    served = problem._serve(family, Deployment(family.kinds, (1,)), None)
    assert served.requests_per_s <= KINKS * family.in_closed_loop((1,), 64, fluid=True)[0]
    assert max(use.max_rows for use in served.result.pools[0]) > 30
