"""Mixed clusters: search equals expanding every layout, bounds hold for every order and split, equal parts change nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from meshwright.cost_models.stage import memory
from meshwright.cost_models.stage.bounds import quick_time_bounds, time_bounds
from meshwright.cost_models.stage.capacity import time_bounds_of_pools
from meshwright.cost_models.stage.step import estimate_step
from meshwright.cost_models.stage.table import CostTable, is_aligned
from meshwright.planner import estimate, expand, plan, search
from meshwright.planner.rank_map import orders
from meshwright.planner.request import PlanRequest
from meshwright.planner.space import Space, build_space
from meshwright.planner.tasks.training import plan_layout, search_layouts
from meshwright.schema import ClusterSpec, ConfigError, Layout, ModelSpec, Workload
from meshwright.schema.cluster import NodeGroup
from meshwright.schema.layout_table import LayoutTable
from tiers import seed_groups

DEVICES = ("1x4xA100-SXM-40GB", "1x4xH100-SXM-80GB", "1x4xL40S", "1x4xA100-SXM-80GB", "1x4xV100-SXM2-32GB")
MODELS = ("gpt2", "llama-3.2-1b", "olmoe-1b-7b", "qwen2.5-7b")
NUM_INSTANCES, NUM_GROUPS = 102, 6


def shortened(model: str, num_blocks: int) -> ModelSpec:
    """The model with so many blocks."""
    spec = ModelSpec.named(model)
    runs = (run.replace(count=min(run.count, num_blocks)) if run.layer.kind == "block" else run for run in spec.layers)
    return spec.replace(layers=tuple(runs))


def group_of(text: str, num_nodes: int = 1, *, memory_ratio: float = 1.0, network: str = "") -> NodeGroup:
    """Nodes of a catalogue device with its own links."""
    _, size, device = text.split("x", 2)
    spec = ClusterSpec.parse(f"{num_nodes}x{size}x{device}{network}")
    group = spec.groups[0]
    memory = int(group.device.memory_bytes * memory_ratio)
    return group.replace(device=group.device.replace(memory_bytes=memory), levels=spec.levels)


def joined(groups: list[NodeGroup], network: str = "eth100") -> ClusterSpec:
    """One cluster of several groups of nodes of four."""
    levels = ClusterSpec.parse(f"2x4xL40S/{network}").levels
    total = sum(group.num_devices for group in groups)
    return ClusterSpec(name="mixed", groups=tuple(groups), levels=(levels[0], levels[-1].replace(domain_size=total)))


def random_instance(seed: int) -> tuple[ModelSpec, Workload, ClusterSpec, Space]:
    """Two or three parts of one to three nodes, and some layouts, most of whose stages lie each on one part."""
    rng = np.random.default_rng(seed)
    devices = rng.choice(DEVICES, size=int(rng.choice([2, 2, 3])), replace=False)
    spec = shortened(str(rng.choice(MODELS)), int(rng.integers(4, 8)))
    groups = [
        group_of(str(d), int(rng.integers(1, 4)), memory_ratio=float(rng.choice([0.1, 0.25, 1.0]))) for d in devices
    ]
    cluster = joined(groups, str(rng.choice(["eth100", "ib200"])))
    engine = str(rng.choice(["fsdp2", "megatron", "deepspeed"]))
    precision = "fp16-mixed" if any("V100" in d for d in devices) else "bf16-mixed"
    batch_size = cluster.num_devices * int(rng.choice([2, 4, 6]))
    workload = Workload(seq_len=512, global_batch_size=batch_size, engine=engine, precision=precision)
    fixed = {"cp": 1, "ep": 1, "etp": 1, "num_model_chunks": 1, "micro_batch_size": int(rng.choice([1, 2]))}
    batch = build_space(PlanRequest(spec, cluster, workload, fixed)).batch
    fills = np.all([part.cluster.num_devices % batch.stage_ranks == 0 for part in cluster.parts], axis=0)
    rows = [rng.permutation(np.flatnonzero(some))[:n] for some, n in ((fills, 3), (~fills, 1))]
    return spec, workload, cluster, Space(batch.select(np.sort(np.concatenate(rows))), {})


@seed_groups(NUM_INSTANCES, NUM_GROUPS, num_long=2)
def test_search_equals_exhaustive_enumeration_on_random_mixed_clusters(
    seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "REL_GAP", 0.0)
    monkeypatch.setattr("meshwright.planner.space.BLOCK", 3)
    solved = on_parts = 0
    for seed in seeds:
        spec, workload, cluster, space = random_instance(seed)
        found = search.search(PlanRequest(spec, cluster, workload), space)
        costs = found.costs
        everything = [expand.expand(costs, idx) for idx in range(len(space.batch))]
        times = [c.estimate.step_time_s for c in everything if c.estimate.fits]
        assert bool(found.feasible) == bool(times), seed
        if times:
            solved += 1
            on_parts += bool(found.feasible[0].part_of_stage)
            assert found.feasible[0].estimate.step_time_s == pytest.approx(min(times), rel=1e-9), seed
            assert found.bound_s <= min(times) * (1 + 1e-9), seed
        bound_s, quick_s = time_bounds(costs), quick_time_bounds(costs)
        within_memory_s = time_bounds_of_pools(costs)
        for idx, candidate in enumerate(everything):
            if candidate.estimate.fits:
                assert quick_s[idx] <= bound_s[idx] * (1 + 1e-9), seed
                assert bound_s[idx] <= candidate.estimate.step_time_s * (1 + 1e-9), seed
                assert within_memory_s[idx] <= candidate.estimate.step_time_s * (1 + 1e-9), seed
                assert candidate.bound_s <= candidate.estimate.step_time_s * (1 + 1e-9), seed
    assert solved > len(seeds) / 4
    assert on_parts > 0


def all_placements(costs: CostTable, idx: int) -> list[tuple[float, bool]]:
    """Step time and whether it fits of every order of the parts and every split of the layers of one layout."""
    ranks, num_layers = int(costs.layouts.stage_ranks[idx]), costs.model.num_layers
    found = []
    for order in orders(costs):
        counts = [costs.device_pools[g].cluster.num_devices // ranks for g in order]
        placed = np.repeat(np.array(order), counts)
        for cuts in itertools.combinations(range(2, num_layers - 1), len(placed) - 1):
            one = estimate_step(costs, idx, (0, *cuts, num_layers), placed)
            fits = all(
                memory.required_bytes(float(s.memory_bytes.total), s.memory_bytes.parameters, part.scenario)
                <= part.cluster.memory_budget_bytes
                for s, part in zip(one.stages, [costs.device_pools[g] for g in placed], strict=True)
            )
            found.append((one.step_time_s, fits))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_no_order_and_no_split_beats_the_bound_and_the_best_one_is_found(seed: int) -> None:
    """Brute force over orders and cuts, whatever fits; what a stage adds once may cost the found split a little."""
    rng = np.random.default_rng(seed)
    ratio = float(rng.choice([0.12, 0.3, 1.0]))
    cluster = joined([group_of(DEVICES[0], 2, memory_ratio=ratio), group_of(DEVICES[1 + seed % 2], 1)])
    spec = shortened("llama-3.2-1b", 6)
    workload = Workload(seq_len=1024, global_batch_size=48, engine="megatron" if seed % 2 else "fsdp2")
    batch = build_space(
        PlanRequest(spec, cluster, workload, {"pp": 3, "num_model_chunks": 1, "schedule": "1f1b"})
    ).batch
    on_parts = np.flatnonzero(is_aligned(CostTable.from_layouts(spec, workload, cluster, batch)))
    batch = batch.select(np.sort(rng.choice(on_parts, size=2, replace=False)))
    costs = CostTable.from_layouts(spec, workload, cluster, batch)
    for idx in range(len(batch)):
        placements = all_placements(costs, idx)
        fitting = [time for time, fits in placements if fits]
        candidate = expand.expand_fitting(costs, idx)
        assert (candidate is None) == (not fitting)
        assert time_bounds(costs)[idx] <= min(time for time, _ in placements) * (1 + 1e-9)
        assert time_bounds_of_pools(costs)[idx] <= min(fitting, default=np.inf) * (1 + 1e-9)
        if candidate is not None:
            assert candidate.bound_s <= min(fitting) * (1 + 1e-9)
            assert min(fitting) <= candidate.estimate.step_time_s * (1 + 1e-9)
            assert candidate.estimate.step_time_s <= min(fitting) * 1.02


def test_groups_that_are_alike_are_planned_as_one() -> None:
    one = ClusterSpec.parse("4x4xA100-SXM-40GB/ib200")
    group = one.groups[0]
    two = one.replace(groups=(group.replace(num_nodes=1), group.replace(num_nodes=3)))
    workload = Workload(seq_len=2048, global_batch_size=32)
    spec = ModelSpec.named("llama-3.2-1b")
    plans = [plan(spec, cluster, workload) for cluster in (one, two)]
    assert plans[0].layout == plans[1].layout
    assert plans[0].estimate == plans[1].estimate
    assert plans[0].rank_map == plans[1].rank_map


@pytest.mark.parametrize("engine", ["fsdp2", "megatron"])
def test_parts_that_cost_the_same_have_the_split_of_one(engine: str) -> None:
    """Nodes that differ in what no cost of these layouts looks at."""
    one = ClusterSpec.parse("4x4xA100-SXM-80GB/ib200")
    group = one.groups[0]
    sizes = ((10**12, 1), (2 * 10**12, 3))
    two = one.replace(groups=tuple(group.replace(num_nodes=n, host_memory_bytes=host) for host, n in sizes))
    assert len(two.parts) == 2
    workload, spec = Workload(seq_len=2048, global_batch_size=64, engine=engine), shortened("llama-3.2-1b", 13)
    batch = build_space(PlanRequest(spec, one, workload, {"pp": 4, "num_model_chunks": 1})).batch
    alike, mixed = (CostTable.from_layouts(spec, workload, cluster, batch) for cluster in (one, two))
    for idx in range(0, len(batch), max(len(batch) // 12, 1)):
        plain, on_parts = expand.expand(alike, idx), expand.expand(mixed, idx)
        assert on_parts.estimate.fits == plain.estimate.fits
        if plain.estimate.fits:
            # Of equally good splits another one may be taken, which differs in what it adds to a step once.
            assert on_parts.estimate.step_time_s >= plain.estimate.step_time_s * 0.995
            assert on_parts.estimate.step_time_s <= plain.estimate.step_time_s * 1.01
            if on_parts.boundaries == plain.boundaries and on_parts.part_of_stage:
                assert on_parts.estimate.step_time_s == pytest.approx(plain.estimate.step_time_s, rel=1e-9)
                assert on_parts.estimate.memory_bytes == plain.estimate.memory_bytes


def test_faster_devices_get_more_layers_and_every_stage_its_own_memory() -> None:
    cluster = joined([group_of("1x4xA100-SXM-40GB", 2), group_of("1x4xH100-SXM-80GB", 2)], "ib200")
    spec, workload = ModelSpec.named("llama-3.1-8b"), Workload(seq_len=4096, global_batch_size=64, engine="megatron")
    found = plan(spec, cluster, workload, fixed={"pp": 4, "tp": 4, "num_model_chunks": 1})
    layers = {stage.device: 0 for stage in found.estimate.stages}
    for stage, cost in zip(found.stages, found.estimate.stages, strict=True):
        layers[cost.device] += stage.num_layers
    assert layers["H100-SXM-80GB"] > 1.3 * layers["A100-SXM-40GB"]
    weakest = plan(
        spec, cluster.replace(groups=(cluster.groups[0], cluster.groups[0])), workload, fixed={"pp": 4, "tp": 4}
    )
    assert found.estimate.step_time_s < weakest.estimate.step_time_s
    for cost in found.estimate.stages:
        device = next(group.device for group in cluster.groups if group.device.name == cost.device)
        assert cost.memory_bytes.total < device.memory_bytes - cluster.reserved_bytes
    assert any("stages" in note and "on A100-SXM-40GB" in note for note in found.notes)


def test_ranks_of_a_stage_lie_on_the_part_that_it_was_costed_for() -> None:
    cluster = joined([group_of("1x4xA100-SXM-40GB", 2), group_of("1x4xH100-SXM-80GB", 1)])
    workload = Workload(seq_len=2048, global_batch_size=24, engine="megatron")
    found = plan(
        ModelSpec.named("llama-3.2-1b"),
        cluster,
        workload,
        fixed={"pp": 3, "cp": 1, "micro_batch_size": 1, "schedule": "1f1b"},
    )
    names = [group.device.name for group in cluster.groups for _ in range(group.num_devices)]
    ranks = found.layout.stage_ranks
    for s, stage in enumerate(found.estimate.stages):
        devices = found.rank_map[s * ranks : (s + 1) * ranks]
        assert {names[device] for device in devices} == {stage.device}
    assert sorted(found.rank_map) == list(range(12))


@pytest.mark.long
def test_data_parallel_groups_stay_on_one_network() -> None:
    """Two halves on fast networks of their own, joined by a slow one: a pipeline of the halves beats one group over both."""
    halves = [group_of("1x4xA100-SXM-80GB", 2, network=network) for network in ("/ib400", "/ib200")]
    cluster = joined(halves, "eth25")
    workload = Workload(seq_len=2048, global_batch_size=64)
    spec = ModelSpec.named("llama-3.1-8b")
    found = plan(spec, cluster, workload)
    assert found.layout.pp % 2 == 0
    assert {stage.device for stage in found.estimate.stages} == {"A100-SXM-80GB/ib400", "A100-SXM-80GB/ib200"}
    request = PlanRequest.create(spec, cluster, workload, fixed={"pp": 1})
    across = plan_layout(request, search_layouts(request), top=0)
    assert across.estimate.step_time_s > found.estimate.step_time_s
    assert any("data-parallel ranks take sequences as they are fast" in note for note in across.notes)


def test_layouts_that_do_not_fill_the_parts_are_costed_as_the_weakest() -> None:
    cluster = joined([group_of("1x4xA100-SXM-40GB", 1), group_of("1x4xH100-SXM-80GB", 2)])
    alike = cluster.groups[0].replace(device=cluster.weakest_device, num_nodes=3, levels=())
    weakest = cluster.replace(groups=(alike,))
    assert weakest.parts == ()
    spec, workload = ModelSpec.named("llama-3.2-1b"), Workload(seq_len=2048, global_batch_size=24)
    layout = build_space(PlanRequest(spec, cluster, workload, {"pp": 2, "dp_shard": 6, "tp": 1})).batch.layout(0)
    assert (
        estimate(spec, cluster, workload, layout).step_time_s == estimate(spec, weakest, workload, layout).step_time_s
    )


@pytest.mark.long
def test_measured_bandwidth_between_parts_counts_where_stages_meet() -> None:
    groups = [group_of("1x4xA100-SXM-40GB", 2), group_of("1x4xH100-SXM-80GB", 2)]
    workload, spec = Workload(seq_len=2048, global_batch_size=32, engine="megatron"), ModelSpec.named("llama-3.2-1b")
    times = []
    for between in (20e9, 0.2e9):
        rates = np.full((4, 4), 20e9)
        rates[:2, 2:] = rates[2:, :2] = between
        cluster = joined(groups).replace(bandwidth_matrix=tuple(map(tuple, rates.tolist())))
        fixed = {"pp": 4, "tp": 1, "cp": 1, "num_model_chunks": 1}
        request = PlanRequest.create(spec, cluster, workload, fixed=fixed)
        found = plan_layout(request, search_layouts(request), top=0)  # on all nodes, however slowly they are joined
        assert found.search.bound_s <= found.estimate.step_time_s * (1 + 1e-9)
        assert all(stage.device for stage in found.estimate.stages)
        times.append(found.estimate.step_time_s)
    assert times[0] < times[1]


def test_tf32_is_fp32_on_the_devices_that_have_no_units_for_it() -> None:
    """As torch's allow_tf32; where no device has them it is refused."""
    cluster = joined([group_of("1x4xA100-SXM-40GB", 1), group_of("1x4xV100-SXM2-32GB", 1)])
    spec, layout = ModelSpec.named("gpt2"), Layout(pp=2, dp_shard=4, zero_stage=1)
    of_precision = {}
    for precision in ("fp32", "tf32"):
        workload = Workload(seq_len=512, global_batch_size=16, precision=precision)
        request = PlanRequest(spec, cluster, workload)
        costs = expand.CostTable.from_layouts(spec, workload, cluster, LayoutTable.from_layouts([layout], 16))
        of_precision[precision] = [pool.per_layer("busy_s", 0).sum() for pool in costs.device_pools]
        assert {s.device for s in expand.expand_layout(request, layout).estimate.stages} == {
            "A100-SXM-40GB",
            "V100-SXM2-32GB",
        }
    (a100_fp32, v100_fp32), (a100_tf32, v100_tf32) = of_precision.values()
    assert v100_tf32 == v100_fp32
    assert a100_tf32 < 0.7 * a100_fp32
    assert plan(spec, cluster, workload, top=0).cluster.num_devices > 0  # every choice of the pools
    with pytest.raises(ConfigError, match="V100-SXM2-32GB has no tf32 rate"):
        estimate(spec, ClusterSpec.parse("4xV100-SXM2-32GB"), workload, Layout(dp_shard=4))
