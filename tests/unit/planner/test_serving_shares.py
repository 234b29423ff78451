"""Plans whose phases share devices: the best share by search, a true bound, explained, replayed, refused where meaningless."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.cost_models.serving.shares import SHARES, PromptSeconds, mean_cycle_s, min_cycle_s
from meshwright.planner import plan
from meshwright.planner.explain.serving import explain_serving
from meshwright.planner.request import PlanRequest
from meshwright.planner.serving.checks import Deployment
from meshwright.planner.serving.replay import replay
from meshwright.planner.tasks.serving import ServingProblem, search_serving
from meshwright.schema import (
    ClusterSpec,
    ConfigError,
    LatencyLimit,
    ModelSpec,
    RequestClass,
    Requests,
    Serving,
    ServingPlan,
)
from meshwright.schema.errors import RuntimeMismatchError
from meshwright.schema.layout import parse_assignments
from meshwright.schema.requests_file import parse_limit, parse_requests, read_trace
from meshwright.schema.serving import Pool

MODEL, H100 = ModelSpec.named("llama-3.1-8b"), ClusterSpec.parse("1xH100-SXM-80GB")

KINKS, CHANCE = 1.025, 0.061
"""As of other modes (test_serving_bound.py): tables lie over unlike sizes; queues are taken to grow from some part on."""


def task(load: str = "isl=1024,osl=128,rate=12", modes: tuple[str, ...] = ("shared",), **fields: Any) -> Serving:
    limits = (parse_limit("ttft", "500ms@p90"), parse_limit("tpot", "10ms@p90"))
    return Serving(**{"requests": parse_requests(load), "modes": modes, "limits": limits, **fields})


@cache
def made(
    modes: tuple[str, ...] = ("shared",), cluster: str = "4xH100-SXM-80GB", load: str = "isl=1024,osl=128,rate=40"
) -> ServingPlan:
    answer = plan("llama-3.1-8b", cluster, task(load, modes))
    assert isinstance(answer, ServingPlan)
    return answer


def test_a_plan_says_the_share_and_survives_its_file(tmp_path: Path) -> None:
    answer = made()
    (pool,) = answer.pools
    assert answer.mode == "shared" and pool.role == "agg" and pool.prefill_eighths in SHARES
    assert f"shared {pool.prefill_eighths}/8" in answer.summary["pools"]
    (cost,) = answer.estimate.pools
    assert (
        cost.prefill_step_s is not None and cost.prefill_utilisation is not None and 0 < cost.prefill_utilisation <= 1
    )
    assert cost.step_s == pytest.approx(sum(cost.step_parts_s.values()), rel=0.02)
    assert all(limit.is_met for limit in answer.estimate.limits)
    answer.save(tmp_path / "serve.json")
    assert ServingPlan.load(tmp_path / "serve.json") == answer


def test_fewer_devices_hold_a_limit_on_tokens_where_prompts_are_not_in_their_steps() -> None:
    shared, together = made(), made(("agg",))
    assert shared.num_devices < together.num_devices
    (pool,) = shared.pools
    layout = {"tp": pool.layout.tp, "pp": pool.layout.pp}
    same = plan("llama-3.1-8b", "4xH100-SXM-80GB", task("isl=1024,osl=128,rate=40", ("agg",), limits=()), fixed=layout)
    assert isinstance(same, ServingPlan) and same.num_devices <= shared.num_devices
    assert shared.estimate.overall.tpot.mean_s < same.estimate.overall.tpot.mean_s


@pytest.mark.long
def test_more_modes_never_need_more_devices() -> None:
    each = [made((mode,)).num_devices for mode in ("agg", "shared")]
    assert made(("agg", "shared")).num_devices == min(each)


@pytest.mark.parametrize("objective", [pytest.param("throughput", marks=pytest.mark.long), "latency"])
def test_the_share_is_the_best_of_all(objective: str) -> None:
    """Brute force: no share that is fixed does better than the one that the search takes, but for the gap at which it ends."""
    load = "isl=2048,osl=64,rate=6" if objective == "latency" else "isl=2048,osl=64"
    serving = task(
        load, objective=objective, limits=() if objective == "latency" else (parse_limit("tpot", "15ms@p90"),)
    )
    values = []
    for eighths in (None, *SHARES):
        fixed = {"tp": 1, "pp": 1, "max_batched_tokens": 8192} | (
            {} if eighths is None else {"prefill_eighths": eighths}
        )
        best = search_serving(PlanRequest.create(MODEL, H100, serving, fixed=fixed)).answer.best
        if best is not None and eighths is not None:
            assert best.candidate.deployment.kinds[0].prefill_eighths == eighths
        values.append(np.inf if best is None else best.objective)
    free, *forced = values
    assert free <= min(forced) + 0.02 * abs(min(forced))
    assert free < max(forced) - 0.05 * abs(free)


loads = st.builds(
    lambda isl, osl, prefix, concurrency, limit, engine: Serving(
        requests=Requests(
            classes=(RequestClass(prompt_len=isl, output_len=osl, prefix_len=isl // 2 * prefix),), concurrency=concurrency
        ),
        limits=limit, engine=engine, modes=("shared",), objective="throughput",
    ),
    st.integers(32, 6000), st.integers(2, 600), st.integers(0, 1), st.one_of(st.none(), st.integers(1, 400)),
    st.sampled_from([(), (LatencyLimit(metric="tpot", seconds=0.02),), (LatencyLimit(metric="ttft", seconds=1),)]),
    st.sampled_from(["vllm", "sglang", "trtllm"]),
)  # fmt: skip


@pytest.mark.long
@settings(max_examples=8, deadline=None)
@given(loads, st.sampled_from(SHARES))
def test_nothing_simulated_is_above_the_bound(serving: Serving, eighths: int) -> None:
    problem = ServingProblem(PlanRequest.create(MODEL, H100, serving, fixed={"prefill_eighths": eighths}))
    for family in problem.families:
        for limited in family.with_limits()[:2]:
            deployment = Deployment(limited.kinds, (1,))
            if (concurrency := serving.requests.concurrency) is not None:
                served = problem._serve(limited, deployment, None)
                assert served.requests_per_s <= KINKS * family.in_closed_loop((1,), concurrency, fluid=True)[0]
            elif most := family.largest(0, fluid=True):
                assert not problem._serve(limited, deployment, (KINKS + CHANCE) * most).meets_limits


def test_the_steady_state_of_a_load_in_flight_is_near_the_simulation() -> None:
    serving = Serving(
        requests=parse_requests("isl=1024,osl=128", concurrency=24), modes=("shared",), objective="throughput"
    )
    for eighths in (2, 4, 6):
        problem = ServingProblem(PlanRequest.create(MODEL, H100, serving, fixed={"prefill_eighths": eighths}))
        (family,) = problem.families
        served = problem._serve(family, Deployment(family.kinds, (1,)), None)
        assert family.in_closed_loop((1,), 24, fluid=False)[0] == pytest.approx(served.requests_per_s, rel=0.12)


@pytest.mark.parametrize("eighths", SHARES)
def test_the_bound_is_below_the_estimate_and_each_of_its_terms_below_the_bound(eighths: int) -> None:
    """(D3) against (D2): the estimate shares what there is, so that traffic and both phases fit its time."""
    problem = ServingProblem(PlanRequest.create(MODEL, H100, task(), fixed={"prefill_eighths": eighths}))
    rates = problem.families[0].rates[0]
    model, mix, x = rates.kind.model, rates.mix, np.geomspace(0.01, 1.5, 30)
    least_s, token_s = min_cycle_s(model, mix, x)
    assert np.all(token_s <= least_s) and np.all(x * PromptSeconds.of(model, mix, lowest=True).phase_s <= least_s)
    assert np.all(least_s <= mean_cycle_s(model, mix, x, np.maximum(x * mix.decode_steps, 1.0)) * (1 + 1e-9))


def test_replay_serves_the_same_requests_alike(tmp_path: Path) -> None:
    answer, rng = made(), np.random.default_rng(5)
    arrivals = np.cumsum(rng.exponential(1 / 40, 1500))
    lines = ["arrival_s,prompt_tokens,output_tokens", *(f"{arrival:.6f},1024,128" for arrival in arrivals)]
    (tmp_path / "load.csv").write_text("\n".join(lines))
    again = replay(answer, read_trace(str(tmp_path / "load.csv")))
    assert again.latencies["tpot"].p50_s == pytest.approx(answer.estimate.overall.tpot.p50_s, rel=0.05)
    assert again.latencies["ttft"].p50_s == pytest.approx(answer.estimate.overall.ttft.p50_s, rel=0.2)
    assert all(limit.within > 0.85 for limit in again.limits)


@pytest.mark.long
def test_explain_compares_the_other_modes_and_other_shares() -> None:
    answer = made(cluster="2xH100-SXM-80GB", load="isl=1024,osl=64,rate=10")
    explained = explain_serving(answer)
    changes = [change.change for change in explained.changes]
    assert "mode agg instead of shared" in changes and "mode disagg instead of shared" in changes
    assert "as it is, at its largest rate" in changes
    asked = explain_serving(answer, why_not="prefill_eighths=1").why_not
    assert asked is not None and asked.change == "prefill_eighths=1"
    together = explain_serving(made(("agg",), "2xH100-SXM-80GB", "isl=1024,osl=64,rate=10"), why_not="shared").why_not
    assert together is not None and together.pools.startswith("1 x shared")


@pytest.mark.parametrize(
    ("fields", "fixed", "words"),
    [
        ({"engine": "meshwright"}, {}, "our own engine has one stream"),
        ({"nano_batches": True}, {}, "without --speculate, --nano-batches"),
        ({"scheduler": "prefill_first", "engine": "sglang"}, {}, "steps of their own"),
        ({"modes": ("agg",)}, {"prefill_eighths": 4}, "add --modes shared|share no devices"),
        ({}, {"prefill_eighths": 8}, "1 to 7 of 8 parts"),
        ({}, {"pp": 2}, "stages of a pipeline"),
        ({"requests": parse_requests("isl=512,osl=1,rate=3"), "limits": ()}, {}, "nothing to decode"),
    ],
)
def test_what_shares_nothing_is_refused(fields: dict[str, Any], fixed: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan("llama-3.1-8b", "2xH100-SXM-80GB", task(**fields), fixed=fixed)


def test_fixed_fields_of_a_serving_plan_are_read_from_text() -> None:
    text = "prefill_eighths=3,max_batch=64,tp=2"
    assert parse_assignments(text, Serving.fixable) == {"prefill_eighths": 3, "max_batch": 64, "tp": 2}
    with pytest.raises(ConfigError, match="whole number"):
        parse_assignments("prefill_eighths=half", Serving.fixable)
    with pytest.raises(ConfigError, match="unknown layout field 'prefill_eighths'"):
        parse_assignments("prefill_eighths=3")


def test_processors_without_multiprocessors_are_refused() -> None:
    cpu = ClusterSpec.parse("1xH100-SXM-80GB")
    (group,) = cpu.groups
    host = cpu.replace(groups=(group.replace(device=group.device.replace(vendor="cpu", name="cpu")),))
    with pytest.raises(ConfigError, match="without multiprocessors"):
        plan("llama-3.1-8b", host, task())


def test_a_pool_with_a_pipeline_shares_nothing_and_our_engine_serves_no_shares() -> None:
    from meshwright.runtime.serving.instance import require_servable

    (pool,) = made().pools
    with pytest.raises(ConfigError, match="pp 1"):
        Pool(**pool.model_dump() | {"layout": {"pp": 2}})
    with pytest.raises(RuntimeMismatchError, match="one stream of steps"):
        require_servable(ModelSpec.named("smollm2-135m"), pool)
