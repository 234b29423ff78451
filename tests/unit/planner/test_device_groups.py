"""Device pools that are used and left out: equal to searching every choice, and what a plan says of it."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from meshwright.cli.meeting import meeting_of_used
from meshwright.planner import device_groups, explain, plan, search
from meshwright.planner.device_groups import PoolChoice, pool_choices, search_device_pools
from meshwright.planner.request import PlanRequest
from meshwright.planner.space import build_space
from meshwright.runtime.job.rendezvous import Rendezvous
from meshwright.schema import ClusterSpec, ConfigError, ModelSpec, TrainingPlan, Workload
from meshwright.schema.device_groups import with_parts_only
from test_mixed import DEVICES, group_of, joined, shortened

ZONES = """
name = "three-zones"
[[groups]]
zone = "one"
device = "A100-SXM-40GB"
num_nodes = 4
devices_per_node = 4
[[groups]]
zone = "two"
device = "A100-SXM-40GB"
num_nodes = 4
devices_per_node = 4
[[groups]]
zone = "far"
device = "A100-SXM-40GB"
num_nodes = 4
devices_per_node = 4
[[levels]]
link = "nvlink3"
domain_size = 4
[[levels]]
link = "eth100"
domain_size = 16
[[levels]]
link = { name = "wide-area", bandwidth_bytes_per_s = FAR, latency_s = 20e-3 }
domain_size = 48
[[zone_links]]
zones = ["one", "two"]
link = { name = "region", bandwidth_bytes_per_s = 10e9, latency_s = 3e-4 }
"""


def zones(tmp_path: Path, far: float = 0.05e9, text: str = ZONES) -> ClusterSpec:
    path = tmp_path / "zones.toml"
    path.write_text(text.replace("FAR", str(far)))
    return ClusterSpec.parse(str(path))


@pytest.mark.parametrize(
    "seed",
    [
        0,
        2,
        *(pytest.param(n, marks=pytest.mark.long) for n in (1, 3)),
        *(pytest.param(n, marks=pytest.mark.nightly) for n in range(4, 12)),
    ],
)
def test_the_best_choice_of_pools_is_that_of_searching_them_all(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "REL_GAP", 0.0)
    monkeypatch.setattr(device_groups, "REL_GAP", 0.0)
    rng = np.random.default_rng(seed)
    devices = rng.choice(DEVICES, size=2 + seed % 2, replace=False)
    groups = [group_of(str(d), int(rng.integers(1, 3)), memory_ratio=float(rng.choice([0.25, 1.0]))) for d in devices]
    cluster = joined(groups, str(rng.choice(["eth10", "eth100", "ib200"])))
    spec = shortened(str(rng.choice(["gpt2", "llama-3.2-1b"])), 6)
    precision = "fp16-mixed" if any("V100" in d for d in devices) else "bf16-mixed"
    workload = Workload(seq_len=512, global_batch_size=48, engine="megatron", precision=precision)
    fixed = {"cp": 1, "num_model_chunks": 1, "micro_batch_size": 1, "schedule": "1f1b", "recompute": "none"}
    request = PlanRequest.create(spec, cluster, workload, fixed=fixed)
    used, result, left_out = search_device_pools(request, runner_ups=0)
    times = {}
    for n in range(1, len(cluster.parts) + 1):
        for pools in itertools.combinations(range(len(cluster.parts)), n):
            only = PlanRequest.create(spec, with_parts_only(cluster, pools), workload, fixed=fixed)
            try:
                alone = search.search(only, build_space(only))
            except ConfigError:  # no layout on so many devices
                continue
            if alone.feasible:
                times[pools] = alone.feasible[0].step_time_s
    best = min(times.values())
    assert result.feasible[0].step_time_s == pytest.approx(best, rel=1e-9)
    assert result.bound_s <= best * (1 + 1e-9)
    assert used.cluster.num_devices + sum(pool.num_devices for pool in left_out) == cluster.num_devices
    for pool in left_out:
        assert pool.step_time_s is None or pool.step_time_s >= best * (1 - 1e-9)


@pytest.mark.nightly
def test_a_zone_that_slows_the_others_down_is_left_out_and_the_plan_says_what_it_costs(tmp_path: Path) -> None:
    cluster = zones(tmp_path)
    found = plan(ModelSpec.named("llama-3.2-1b"), cluster, Workload(seq_len=2048, global_batch_size=96), top=0)
    assert {group.zone for group in found.cluster.groups} == {"one", "two"}
    assert found.cluster.levels[-1].link.name == "region"
    assert sorted(found.rank_map) == list(range(32))
    (far,) = found.left_out
    assert (far.zone, far.num_devices) == ("far", 16)
    assert far.step_time_s is not None and far.step_time_s > found.estimate.step_time_s
    assert any("are left out: with them a step takes" in note for note in found.notes)
    assert any("16 x A100-SXM-40GB/far are left out" in note for note in explain(found).notes)
    path = tmp_path / "plan.json"
    found.save(path)
    assert TrainingPlan.load(path) == found


@pytest.mark.long
def test_apply_on_all_nodes_leaves_those_idle_that_the_plan_leaves_out(tmp_path: Path) -> None:
    """The far zone stands between the others."""
    groups = ZONES.split("[[groups]]")
    text = "[[groups]]".join([groups[0], groups[1], groups[3].split("[[levels]]")[0], groups[2]])
    text += "[[levels]]" + ZONES.split("[[levels]]", 1)[1]
    cluster = zones(tmp_path, text=text)
    found = plan(ModelSpec.named("llama-3.2-1b"), cluster, Workload(seq_len=2048, global_batch_size=96), top=0)
    assert found.left_out[0].nodes == (4, 5, 6, 7)
    assert [group.zone for group in found.cluster.groups] == ["one", "two"]
    meetings = [meeting_of_used(found, Rendezvous(nnodes=12, node_rank=n, endpoint="host:1")) for n in range(12)]
    assert [None if job is None else job.node_rank for job in meetings] == [0, 1, 2, 3, *[None] * 4, 4, 5, 6, 7]
    assert {job.nnodes for job in meetings if job is not None} == {8}
    alone = Rendezvous(nnodes=8, node_rank=7, endpoint="host:1")
    assert meeting_of_used(found, alone) == alone


@pytest.mark.long
def test_nothing_is_left_out_where_the_links_between_zones_are_fast(tmp_path: Path) -> None:
    cluster = zones(tmp_path, far=10e9, text=ZONES.replace("20e-3", "3e-4"))
    found = plan(ModelSpec.named("llama-3.2-1b"), cluster, Workload(seq_len=2048, global_batch_size=96), top=0)
    assert found.left_out == ()
    assert found.cluster == cluster


def test_choices_that_cost_the_same_count_once(tmp_path: Path) -> None:
    """Zones one and two are alike: all, both, one with the far one, one alone; the far one alone is as one alone."""
    request = PlanRequest.create(ModelSpec.named("gpt2"), zones(tmp_path), Workload(seq_len=512, global_batch_size=96))
    assert [choice.pools for choice in pool_choices(request)] == [(0, 1, 2), (0, 1), (0, 2), (0,)]


def test_of_many_pools_some_choices_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_groups, "MAX_POOLS_IN_EVERY_CHOICE", 3)
    cluster = joined([group_of(device) for device in DEVICES])
    workload = Workload(seq_len=512, global_batch_size=96, precision="fp16-mixed")
    tried = [choice.pools for choice in pool_choices(PlanRequest.create(ModelSpec.named("gpt2"), cluster, workload))]
    assert tried[0] == (0, 1, 2, 3, 4)
    assert {len(pools) for pools in tried} == {1, 2, 3, 4, 5}


def test_of_many_zones_those_of_one_link_are_a_choice_for_every_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_groups, "MAX_POOLS_IN_EVERY_CHOICE", 3)
    groups, rest = ZONES.split("[[levels]]", 1)
    older = groups[groups.index("[[groups]]") :].replace("A100-SXM-40GB", "V100-SXM2-32GB")
    cluster = zones(tmp_path, text=(groups + older + "[[levels]]" + rest).replace("= 48", "= 96"))
    workload = Workload(seq_len=512, global_batch_size=192, precision="fp16-mixed")
    tried = {choice.pools for choice in pool_choices(PlanRequest.create(ModelSpec.named("gpt2"), cluster, workload))}
    assert {(0, 1, 2, 3, 4, 5), (0, 1, 3, 4), (0, 1), (3, 4), (0, 3)} <= tried


@pytest.mark.parametrize("seed", [*(pytest.param(n, marks=pytest.mark.long) for n in range(2)), 2])
def test_no_plan_on_a_choice_is_below_its_first_bound(seed: int, tmp_path: Path) -> None:
    models, engine = ("gpt2", "llama-3.2-1b", "olmoe-1b-7b"), ("fsdp2", "megatron", "deepspeed")[seed]
    workload = Workload(seq_len=1024, global_batch_size=96, engine=engine)
    request = PlanRequest.create(ModelSpec.named(models[seed]), zones(tmp_path, far=20e9), workload)
    for choice in pool_choices(request):
        result = search.search(choice.request, build_space(choice.request), max_expanded=3)
        assert all(choice.min_s <= candidate.step_time_s for candidate in result.feasible)


def test_a_deadline_among_the_choices_leaves_the_best_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = PlanRequest.create(ModelSpec.named("gpt2"), zones(tmp_path), Workload(seq_len=512, global_batch_size=96))
    opened = []

    def open_one(choice: PoolChoice) -> search.LayoutProblem | None:
        if choice.problem is None and opened:
            request.deadline.stop()
            request.deadline.require("opening another choice")
        opened.append(choice)
        return real(choice)

    real = PoolChoice.open
    monkeypatch.setattr(PoolChoice, "open", open_one)
    _, result, _ = search_device_pools(request, runner_ups=0)
    assert result.feasible
    assert result.stopped_early
    assert result.certificate().status == "stopped"
