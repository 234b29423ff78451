"""Plans of mixtures whose experts lie partly with the host: memory, the share that is chosen, bound, replay, advice, refusals."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from meshwright.cost_models.coefficients import packaged_coefficients
from meshwright.cost_models.hardware.host_memory import host_weight_rates
from meshwright.planner import plan
from meshwright.planner.explain.serving import explain_serving
from meshwright.planner.request import PlanRequest
from meshwright.planner.serving.bound import device_seconds
from meshwright.planner.serving.checks import Deployment
from meshwright.planner.serving.replay import engine_pool, replay
from meshwright.planner.serving.space import ServingSpace
from meshwright.planner.tasks.serving import ServingProblem
from meshwright.runtime.serving.instance import require_servable
from meshwright.schema import ClusterSpec, ConfigError, InfeasibleError, ModelSpec, Plan, Serving, ServingPlan
from meshwright.schema.host_experts import ExpertsOnHost
from meshwright.schema.requests_file import parse_requests, read_trace

RTX, OPEN = ClusterSpec.parse("1xRTX4090"), ExpertsOnHost()
KINKS, CHANCE = 1.025, 0.061
"""As in test_serving_bound.py: tables lie over unlike sizes, and a queue is seen to grow from a part of the requests on."""


def serving(load: str = "concurrency=32", placed: ExpertsOnHost | None = OPEN, **fields: Any) -> Serving:
    return Serving(requests=parse_requests(f"isl=512,osl=64,{load}"), modes=("agg",), experts_on_host=placed, **fields)


def with_host(cluster: ClusterSpec = RTX, **fields: Any) -> ClusterSpec:
    return cluster.replace(groups=tuple(group.replace(**fields) for group in cluster.groups))


@cache
def planned(task: Serving, cluster: ClusterSpec = RTX, model: str = "mixtral-8x7b") -> ServingPlan:
    made = plan(model, cluster, task)
    assert isinstance(made, ServingPlan)
    return made


def test_a_mixture_that_does_not_fit_is_served_with_experts_on_the_host(tmp_path: Path) -> None:
    made = planned(serving())
    (pool,), (cost,) = made.pools, made.estimate.pools
    assert pool.experts_on_host is not None and pool.experts_on_host.share in (7 / 8, 1.0)
    experts = 32 * 8 * 3 * 4096 * 14336 * 2
    assert pool.host_expert_bytes == pool.experts_on_host.share * experts
    assert cost.weight_bytes + cost.cache_bytes < RTX.weakest_device.memory_bytes
    waits = sum(cost.step_parts_s.get(name, 0.0) for name in ("host_link", "host_compute"))
    assert waits > 0.7 * cost.step_s and sum(cost.step_parts_s.values()) == pytest.approx(cost.step_s)
    assert made.search is not None and made.search.bound >= made.search.objective
    notes = "\n".join(made.notes)
    assert "lie in the host's memory" in notes and "host_bandwidth_bytes_per_s" in notes
    made.save(tmp_path / "serve.json")
    assert Plan.load(tmp_path / "serve.json") == made
    with pytest.raises(InfeasibleError, match="serves the load"):
        plan("mixtral-8x7b", RTX, serving(placed=None))


def test_a_share_that_is_asked_for_holds_in_whole_experts() -> None:
    made = planned(serving(placed=ExpertsOnHost(share=0.9, by="copy")))
    assert made.pools[0].experts_on_host == ExpertsOnHost(share=1.0, by="copy")
    assert "host_bandwidth_bytes_per_s" not in "\n".join(made.notes)


def test_where_all_experts_fit_on_quick_devices_the_plan_is_the_plain_one() -> None:
    """The host's link and processors, of eight devices at once, are too slow to help any of them."""
    cluster = ClusterSpec.parse("8xH100-SXM-80GB")
    free, plain = (
        plan("mixtral-8x7b", cluster, serving("concurrency=64", placed), fixed={"tp": 8, "pp": 1, "ep": 1})
        for placed in (OPEN, None)
    )
    assert isinstance(free, ServingPlan) and isinstance(plain, ServingPlan)
    assert free.pools == plain.pools and free.estimate == plain.estimate
    assert any(note.startswith("all experts are on the devices") for note in free.notes)


def test_a_cluster_file_says_what_the_host_reads_and_computes(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(
        'name = "lab"\n[[groups]]\ndevice = "RTX4090"\nnum_nodes = 1\ndevices_per_node = 2\n'
        "host_bandwidth_bytes_per_s = 3e11\nhost_flops_per_s = 8e12\n"
    )
    cluster, coefficients = ClusterSpec.parse(str(path)), packaged_coefficients()
    assert host_weight_rates(cluster, coefficients) == (1.5e11, 4e12)
    usual = coefficients["serving"]["host_experts"]
    read, computed = host_weight_rates(ClusterSpec.parse("1xRTX4090"), coefficients)
    assert (read, computed) == (usual["bytes_per_s"][1], usual["flops_per_s"][1])


def test_quicker_hosts_serve_no_less() -> None:
    rates = {"host_link_bytes_per_s": 2e10, "host_bandwidth_bytes_per_s": 1e11, "host_flops_per_s": 3e12}
    slow = planned(serving(), with_host(**rates))
    quick = planned(serving(), with_host(**{name: 2 * rate for name, rate in rates.items()}))
    assert quick.estimate.tokens_per_s > 1.5 * slow.estimate.tokens_per_s


@pytest.mark.parametrize("load", ["cv=1", "concurrency=48"])
@pytest.mark.parametrize("by", ["balance", "copy"])
def test_no_simulation_is_above_the_bound_whatever_lies_with_the_host(load: str, by: Any) -> None:
    task = serving(load, ExpertsOnHost(by=by, predicted=0.5))
    problem = ServingProblem(PlanRequest.create(ModelSpec.named("mixtral-8x7b"), RTX, task))
    (family,) = problem.families
    shares = set[float]()
    for limited in family.with_limits():
        (kind,) = limited.kinds
        if kind.limits.max_batched_tokens != family.kinds[0].limits.max_batched_tokens:
            continue
        assert kind.experts_on_host is not None and kind.experts_on_host.share is not None
        shares.add(kind.experts_on_host.share)
        deployment = Deployment(limited.kinds, (1,))
        if load == "cv=1":
            most = limited.largest(0, fluid=True)
            assert not problem._serve(limited, deployment, (KINKS + CHANCE) * most).meets_limits
            assert most <= 1.005 * family.largest(0, fluid=True)
        else:
            carried = family.in_closed_loop((1,), 48, fluid=True)[0]
            assert problem._serve(limited, deployment, None).requests_per_s <= KINKS * carried
    assert shares == {7 / 8, 1.0}


def test_the_bound_of_peaks_counts_no_experts_that_the_host_may_compute() -> None:
    model = ModelSpec.named("mixtral-8x7b")
    cluster = ClusterSpec.parse("2xH100-SXM-80GB")
    free, plain = (
        ServingProblem(PlanRequest.create(model, cluster, serving("concurrency=64", placed))) for placed in (OPEN, None)
    )
    assert 0 < device_seconds(free, cluster) < 0.5 * device_seconds(plain, cluster)


def test_a_host_that_is_too_small_is_refused_with_the_numbers() -> None:
    small = with_host(host_memory_bytes=64 * 10**9)
    space = ServingSpace.build(PlanRequest.create(ModelSpec.named("mixtral-8x7b"), small, serving()), serving())
    assert not space.kinds
    assert all("of a host's memory" in reason for _, reason in space.too_large)
    made = planned(serving())
    with pytest.raises(ConfigError, match="of a host's memory"):
        engine_pool(made.replace(cluster=small), made.pools[0])


def test_a_plan_is_replayed_with_its_experts_where_they_lie(tmp_path: Path) -> None:
    made = planned(serving())
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{idx},512,16\n" for idx in range(8)))
    answer = replay(made, read_trace(path))
    assert answer.num_requests == 8
    quick = with_host(host_bandwidth_bytes_per_s=6e11, host_flops_per_s=4e13, host_link_bytes_per_s=6e10)
    sooner = replay(made.replace(cluster=quick), read_trace(path))
    assert sooner.latencies["tpot"].mean_s < 0.6 * answer.latencies["tpot"].mean_s


def test_what_does_not_fit_says_that_experts_may_lie_with_the_host() -> None:
    with pytest.raises(InfeasibleError) as refused:
        plan("mixtral-8x7b", RTX, serving("rate=0.2", None))
    advice = [refused.value.help or "", *refused.value.details]
    assert any("--experts-on-host on: 1 x tp=1 with 87.5 % of the experts on the host" in line for line in advice)


def test_explanations_say_what_binds_and_what_other_ways_give() -> None:
    made = planned(serving())
    explained = explain_serving(made)
    assert any("host compute" in line or "host link" in line for line in explained.binds)
    changes = {change.change: change for change in explained.changes}
    assert changes["all experts on the devices"].difference.startswith("nothing serves the load so; memory")
    for name in ("experts on the host copied up alone", "experts on the host computed there alone"):
        other = changes[name].tokens_per_s_per_device
        assert other is not None and other < made.estimate.tokens_per_s_per_device


def test_models_without_experts_and_hosts_without_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="no routed experts"):
        plan("llama-3.1-8b", RTX, serving())
    (group,) = RTX.groups
    processors = with_host(device=group.device.replace(vendor="cpu"))
    with pytest.raises(ConfigError, match="the host's own processors"):
        plan("mixtral-8x7b", processors, serving())


def test_our_own_engine_serves_no_such_plan() -> None:
    made = planned(serving())
    with pytest.raises(ConfigError, match="experts in the host's memory"):
        require_servable(made.model, made.pools[0])
