"""What a serving plan says agrees with itself, and what means nothing is refused by name."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from meshwright.planner import plan
from meshwright.planner.explain.serving import explain_serving
from meshwright.planner.request import Deadline, PlanRequest
from meshwright.planner.serving.checks import independent
from meshwright.planner.serving.replay import replay
from meshwright.planner.tasks.serving import ServingProblem
from meshwright.schema import ClusterSpec, ConfigError, ModelSpec, Serving, ServingPlan, SolverLimitError
from meshwright.schema.requests_file import parse_limit, parse_requests


def task(load: str, *, tpot: str = "", e2e: str = "", **fields: Any) -> Serving:
    limits = tuple(parse_limit(name, text) for name, text in (("tpot", tpot), ("e2e", e2e)) if text)  # type: ignore[arg-type]
    return Serving(requests=parse_requests(load), limits=limits, **fields)


@cache
def planned(load: str, cluster: str = "4xH100-SXM-80GB", **fields: Any) -> ServingPlan:
    answer = plan("llama-3.1-8b", cluster, task(load, **fields))
    assert isinstance(answer, ServingPlan)
    return answer


@pytest.mark.parametrize(
    ("load", "fields", "words"),
    [
        ("isl=200000,osl=128,rate=1", {}, "takes 131,072"),
        ("isl=100,osl=1,rate=1", {"tpot": "9ms"}, "--tpot"),
        ("isl=100,osl=1,rate=1", {"modes": ("disagg",)}, "mode disagg"),
        ("isl=100,osl=9,rate=1", {"nano_batches": True}, "no experts"),
    ],
)
def test_what_means_nothing_for_the_requests_is_refused(load: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        planned(load, **fields)


def test_a_chunk_beyond_every_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 16384 tokens"):
        plan("llama-3.1-8b", "1xH100-SXM-80GB", task("isl=100,osl=9,rate=1"), fixed={"chunk": 10**5})


def test_a_device_without_bf16_is_planned_in_fp16() -> None:
    answer = planned("isl=256,osl=32,rate=1", "2xV100-SXM2-32GB")
    assert {(pool.weights, pool.cache) for pool in answer.pools} == {("fp16", "fp16")}


def test_the_mean_step_of_a_pool_is_what_its_tokens_take() -> None:
    """Figures of a pool are of the time in which requests are counted, not of the time in which it fills and empties."""
    answer = planned("isl=2048,osl=256,rate=24", modes=("disagg",))
    decode = answer.estimate.pools[-1]
    assert decode.step_s == pytest.approx(answer.estimate.overall.tpot.mean_s, rel=0.03)
    rows = answer.estimate.requests_per_s / answer.pools[-1].replicas * answer.estimate.overall.tpot.mean_s * 255
    assert decode.decode_rows * answer.pools[-1].layout.pp == pytest.approx(rows, rel=0.05)
    assert all(
        pool.utilisation <= 1 and pool.largest_requests_per_s >= pool.requests_per_s for pool in answer.estimate.pools
    )


@pytest.mark.parametrize("load", ["isl=256,osl=64,concurrency=3", "isl=1024,osl=128,share=1;isl=50,osl=5,share=1"])
def test_nothing_that_is_shown_is_beyond_the_bound(load: str) -> None:
    answer = planned(load, modes=("agg",))
    assert answer.search is not None
    bound = answer.search.bound * (1 + 1e-9)
    assert answer.estimate.tokens_per_s_per_device <= bound
    assert all(other.tokens_per_s_per_device <= bound for other in answer.alternatives)


def test_a_limit_that_no_lone_request_meets_leaves_nothing_to_simulate() -> None:
    load = task("isl=1024,osl=128,rate=25", e2e="100ms@p99")
    problem = ServingProblem(
        PlanRequest.create(ModelSpec.named("llama-3.1-8b"), ClusterSpec.parse("8xH100-SXM-80GB"), load)
    )
    assert not problem.roots().nodes


def test_the_interval_of_a_share_is_wider_where_neighbours_are_alike() -> None:
    draw = np.random.default_rng(0).random(2000) < 0.9
    assert independent(draw) > 800
    assert independent(np.sort(draw)) < 100
    assert independent(np.ones(500, dtype=bool)) == 500


def test_what_the_time_limit_left_out_is_said() -> None:
    answer = planned("isl=256,osl=64,concurrency=3", modes=("agg",))
    explanation = explain_serving(answer, deadline=Deadline(0))
    assert not explanation.changes
    assert "weights in fp8" in explanation.not_searched
    with pytest.raises(SolverLimitError):
        explain_serving(answer, why_not="tp=2", deadline=Deadline(0))


def test_a_stated_load_is_replayed_as_it_was_planned() -> None:
    answer = planned("isl=2048,osl=256,rate=24", modes=("disagg",))
    again = replay(answer, answer.serving.requests)
    planned_s, replayed_s = answer.estimate.overall, again.latencies
    for metric in ("ttft", "tpot", "e2e"):
        assert replayed_s[metric].p50_s == pytest.approx(getattr(planned_s, metric).p50_s, rel=0.05)
    assert np.isclose(again.requests_per_s, 24, rtol=0.1)
