"""Plans whose pools decode with attention and feed-forward parts on devices of their own (--modes afd)."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from meshwright.cost_models.serving.simulation import RequestTable, simulate
from meshwright.engines.registry import export
from meshwright.planner import plan
from meshwright.planner.explain.serving import explain_serving
from meshwright.planner.request import PlanRequest
from meshwright.planner.serving.checks import Deployment
from meshwright.planner.serving.families import KindRates
from meshwright.planner.serving.layouts import split_layouts
from meshwright.planner.serving.replay import engine_pool
from meshwright.planner.tasks.serving import ServingProblem
from meshwright.schema import (
    ClusterSpec,
    ConfigError,
    MeshwrightError,
    ModelSpec,
    RuntimeMismatchError,
    Serving,
    ServingPlan,
)
from meshwright.schema.layout import parse_assignments
from meshwright.schema.plan import Plan
from meshwright.schema.requests_file import parse_limit, parse_requests

KINKS = 1.025
"""As in test_serving_bound.py: tables of the steady state and of the simulation lie over unlike sizes."""

CHANCE = 0.061
"""As there: by so much a queue may grow unseen while requests are counted."""


def task(load: str, *modes: str, tpot: str | None = "30ms@p90", **fields: object) -> Serving:
    limits = () if tpot is None else (parse_limit("tpot", tpot),)
    return Serving(requests=parse_requests(load), modes=modes or ("afd",), limits=limits, **fields)  # type: ignore[arg-type]


def planned(model: str, cluster: str | ClusterSpec, serving: Serving, **fixed: int) -> ServingPlan:
    made = plan(model, cluster, serving, fixed=fixed)
    assert isinstance(made, ServingPlan)
    return made


@cache
def small() -> ServingPlan:
    return planned("llama-3.1-8b", "4xH100-SXM-80GB", task("isl=1024,osl=128,rate=10"))


def test_a_plan_has_a_pool_that_prefills_and_two_groups_that_decode() -> None:
    made = small()
    assert made.mode == "afd" and [pool.role for pool in made.pools] == ["prefill", "decode"]
    prefill, decode = made.pools
    assert prefill.micro_batches is None and prefill.layout.ffn_devices == 0
    assert decode.layout.ffn_devices >= 1 and decode.micro_batches in (1, 2, 3, 4)
    assert made.num_devices == prefill.num_devices + decode.replicas * (
        decode.layout.tp * decode.layout.attention_dp + decode.layout.ffn_devices
    )
    assert made.search is not None and made.search.bound <= made.num_devices
    split = made.estimate.pools[1].split
    assert split is not None and made.estimate.pools[0].split is None
    assert 0 < split.link < 1 and 0 < split.attention <= 1 and 0 < split.feed_forward <= 1
    assert "waiting" in made.estimate.pools[1].step_parts_s
    assert "micro_batches=" in made.summary["pools"] and any("nothing exports" in note for note in made.notes)


def test_a_plan_is_the_same_after_a_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    small().save(path)
    assert Plan.load(path) == small()


def test_a_plan_replays_as_it_was_simulated() -> None:
    made = small()
    pools = [engine_pool(made, pool) for pool in made.pools]
    count, rng = 600, np.random.default_rng(1)
    arrival = np.cumsum(rng.exponential(1 / 10, count))
    sent_s = made.estimate.transfer_s / 1024
    seen = simulate(pools, RequestTable.of(1024, 128, arrival), transfer_s_per_token=sent_s)
    assert float(np.quantile(seen.tpot_s[100:], 0.9)) == pytest.approx(made.estimate.limits[0].simulated_s, rel=0.05)


@pytest.mark.parametrize(
    ("model", "cluster", "load", "fixed"),
    [
        pytest.param("llama-3.1-8b", "4xH100-SXM-80GB", "isl=2048,osl=128", {"pp": 1, "tp": 1}, marks=pytest.mark.long),
        ("mixtral-8x7b", "8xH100-SXM-80GB", "isl=1024,osl=64", {"tp": 2}),
        ("deepseek-v2-lite", "4xA100-SXM-80GB", "isl=2000,osl=100", {"tp": 1, "pp": 1}),
    ],
)
def test_no_simulation_carries_more_than_the_bound(model: str, cluster: str, load: str, fixed: dict[str, int]) -> None:
    serving = task(load, tpot="40ms@p90", objective="throughput")
    problem = ServingProblem(
        PlanRequest.create(ModelSpec.named(model), ClusterSpec.parse(cluster), serving, fixed=fixed)
    )
    nodes = sorted(problem.roots().nodes, key=lambda node: node.bound)
    assert nodes
    for node in (nodes[0], nodes[len(nodes) // 2]):
        for family in node.state.family.with_limits()[:3]:
            served, _, _, _ = problem.saturated(family, Deployment(family.kinds, node.state.counts[0][1]))
            if served is not None:
                per_device = served.tokens_per_s / problem.request.cluster.num_devices
                assert per_device <= -node.bound * KINKS * (1 + CHANCE)


@pytest.mark.parametrize(
    ("model", "cluster"), [("llama-3.1-8b", "4xH100-SXM-80GB"), ("mixtral-8x7b", "8xH100-SXM-80GB")]
)
def test_the_micro_batches_of_an_instance_are_the_best_of_all(model: str, cluster: str) -> None:
    """Each number by itself, by brute force: a search begins with what carries most, its bound is of the quickest for each step."""
    serving = task("isl=2048,osl=128", tpot="40ms@p90", objective="throughput")
    space = ServingProblem(
        PlanRequest.create(ModelSpec.named(model), ClusterSpec.parse(cluster), serving, fixed={"tp": 1})
    ).space
    chosen = set()
    for kind in space.split:
        rates = {
            each.micro_batches: KindRates(each, serving).largest("decode", fluid=True).requests_per_s
            for each in kind.variants("decode", math.inf)
        }
        assert set(rates) == {1, 2, 3, 4}
        # Numbers are compared over all rows, the largest rate is of those that a cache holds and a curve has points at.
        assert rates[kind.micro_batches] >= 0.97 * max(rates.values())
        bound = KindRates(kind, serving).largest("decode", fluid=True).requests_per_s
        assert bound >= max(rates.values()) * (1 - 1e-9)
        chosen.add(kind.micro_batches)
    assert chosen - {1}


def test_the_other_modes_are_as_they_are_without_it() -> None:
    """A mode more can only help: the same certificate or a better one."""
    load = "isl=1024,osl=128,rate=25"
    before = planned("llama-3.1-8b", "8xH100-SXM-80GB", task(load, "agg", "disagg"))
    after = planned("llama-3.1-8b", "8xH100-SXM-80GB", task(load, "agg", "disagg", "afd"))
    assert after.num_devices <= before.num_devices
    assert after.mode == before.mode and after.pools == before.pools


def offers(h20: float) -> ClusterSpec:
    """Return nodes of one H100 and of one H20 at a price."""
    made = [ClusterSpec.parse(f"4x{name}") for name in ("H100-SXM-80GB", "H20-96GB")]
    prices = (2.0, h20)
    groups = tuple(
        group.replace(
            device=group.device.replace(price_per_hour=price), num_nodes=4, devices_per_node=1, levels=made[0].levels
        )
        for cluster, price in zip(made, prices, strict=True)
        for group in cluster.groups
    )
    levels = (made[0].levels[0].replace(domain_size=8),)
    return ClusterSpec(name="both", groups=groups, levels=levels)


@pytest.mark.long
def test_unlike_devices_are_counted_by_their_own_stock_and_price() -> None:
    """Attention on H20, feed-forward parts on H100 (Lamina): each pool of devices is used and paid for by itself (E3)."""
    serving = task("isl=4096,osl=512,rate=2", objective="cost", weights="fp8")
    request = PlanRequest.create(ModelSpec.named("llama-3.1-8b"), offers(0.5), serving, fixed={})
    problem = ServingProblem(request)
    unlike = [kind for kind in problem.space.split if kind.ffn_part is not None]
    assert unlike and {kind.device for kind in unlike} == {"H100-SXM-80GB", "H20-96GB"}
    for kind in unlike:
        price = {"H100-SXM-80GB": 2.0, "H20-96GB": 0.5}
        pool = kind.pool("decode", 1)
        assert pool.ffn_device is not None and pool.ffn_device != pool.device
        total = kind.layout.stage_devices * price[pool.device] + kind.layout.ffn_devices * price[pool.ffn_device]
        assert kind.usd_per_hour == pytest.approx(total)
        assert sum(kind.uses.values()) == kind.size and kind.max_count == min(
            4 // kind.layout.stage_devices, 4 // kind.layout.ffn_devices
        )
    family = next(family for family in problem.families if family.kinds[1] is unlike[0])
    most = unlike[0].max_count
    assert not family.fits((1, most + 1))
    made = planned("llama-3.1-8b", offers(0.5), serving)
    assert made.search is not None and made.estimate.usd_per_hour is not None
    assert made.search.bound <= made.estimate.usd_per_hour * (1 + 1e-9)
    (_, decode), (_, cost) = made.pools, made.estimate.pools
    assert cost.largest_requests_per_s > 0 and decode.micro_batches is not None


def test_layouts_fill_nodes_and_divide_the_model() -> None:
    model, cluster = ModelSpec.named("mixtral-8x7b"), ClusterSpec.parse("16xH100-SXM-80GB")
    every = list(split_layouts(model, (cluster, cluster)))
    assert len(set(every)) == len(every) > 10
    for layout in every:
        assert layout.num_devices in (2, 4, 8, 16) and 8 % layout.ep == 0 and layout.moe_tp <= 8
        assert 32 % layout.tp == 0 and layout.pp == 1
    assert not list(split_layouts(model, (ClusterSpec.parse("1xH100-SXM-80GB"),) * 2))


def test_explanations_compare_modes_and_say_what_either_group_does() -> None:
    answer = explain_serving(small(), why_not="agg")
    assert "feed-forward devices for" in answer.binds[1]
    assert answer.why_not is not None and answer.why_not.num_devices == 1
    changes = [change.change for change in explain_serving(small()).changes]
    assert "mode disagg instead of afd" in changes and "one more decode instance" in changes
    plain = planned("llama-3.1-8b", "4xH100-SXM-80GB", task("isl=1024,osl=128,rate=10", "agg"))
    asked = explain_serving(plain, why_not="afd").why_not
    assert asked is not None and asked.num_devices == small().num_devices


def test_what_goes_with_it_alone_or_not_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="without --speculate and --engine meshwright"):
        task("isl=8,osl=8", engine="meshwright", speculate={"method": "eagle3", "accept": 0.5})
    with pytest.raises(ConfigError, match="without --nano-batches on"):
        task("isl=8,osl=8", nano_batches=True)
    load = task("isl=1024,osl=128,rate=1", "agg")
    with pytest.raises(ConfigError, match="micro_batches: instances have them"):
        planned("llama-3.1-8b", "4xH100-SXM-80GB", load, micro_batches=2)
    with pytest.raises(ConfigError, match="has feed-forward parts on devices of their own"):
        planned("llama-3.1-8b", "1xH100-SXM-80GB", task("isl=1024,osl=128,rate=1"))
    with pytest.raises(ConfigError, match="and pp=2"):
        planned("llama-3.1-8b", "4xH100-SXM-80GB", task("isl=1024,osl=128,rate=1"), pp=2)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "dynamo", "llm-d"])
def test_no_engine_runs_it(engine: str) -> None:
    with pytest.raises(MeshwrightError) as error:
        export(small(), engine)
    assert "on devices of their own" in json.dumps(str(error.value) + " ".join(error.value.details))


def test_edited_pools_that_mean_nothing_are_refused() -> None:
    prefill, decode = small().pools
    with pytest.raises(ConfigError, match="of pools that decode, not of role prefill"):
        decode.replace(role="prefill")
    with pytest.raises(ConfigError, match="those of a pool whose layout has ffn_devices"):
        prefill.replace(micro_batches=2)
    with pytest.raises(ConfigError, match="those of a pool whose layout has ffn_devices"):
        decode.replace(micro_batches=None)


def test_our_own_engine_does_not_serve_it() -> None:
    from meshwright.runtime.serving.instance import require_servable

    with pytest.raises(RuntimeMismatchError, match="all parts of a layer on the same devices"):
        require_servable(ModelSpec.named("llama-3.1-8b"), small().pools[1], is_single=False)


def test_every_degree_and_limit_of_serving_is_read_from_text() -> None:
    text = "tp=1,attention_dp=2,ffn_devices=8,micro_batches=3,max_batch=16"
    expected = {"tp": 1, "attention_dp": 2, "ffn_devices": 8, "micro_batches": 3, "max_batch": 16}
    assert parse_assignments(text, Serving.fixable) == expected
    with pytest.raises(ConfigError, match="unknown layout field 'zero_stage'"):
        parse_assignments("zero_stage=1", Serving.fixable)
