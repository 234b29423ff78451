"""plan(): equal to exhaustive enumeration, within memory by hand arithmetic, monotone, and honest about limits."""

from __future__ import annotations

import functools
import re

import pytest
from meshwright.cost_models.stage.step import estimate_step
from meshwright.cost_models.stage.table import CostTable
from meshwright.planner import default_precision, estimate, plan
from meshwright.planner.choice import MAX_PRICE
from meshwright.planner.enumeration import divisors
from meshwright.planner.expand import expand
from meshwright.planner.planned_stages import reestimate
from meshwright.planner.request import PlanRequest
from meshwright.planner.space import build_space
from meshwright.schema import (
    ClusterSpec,
    ConfigError,
    InfeasibleError,
    Layout,
    ModelSpec,
    SolverLimitError,
    TrainingPlan,
    Workload,
)

SMALL = [
    ("smollm2-135m", "4xA100-SXM-80GB", 8, 2048),
    ("llama-3.2-1b", "8xRTX4090", 32, 2048),
    ("llama-3.1-8b", "8xH100-SXM-80GB", 16, 8192),
    ("llama-2-13b", "8xA100-SXM-40GB", 24, 4096),
    ("qwen2.5-7b", "6xH100-SXM-80GB", 6, 4096),
    ("mixtral-8x7b", "16xH100-SXM-80GB", 32, 4096),
]

PARTS = {
    "smollm2-135m": {"cp": 1},
    "llama-3.2-1b": {"cp": 1, "tp": 2},
    "llama-3.1-8b": {"num_model_chunks": 1, "micro_batch_size": 1},
    "llama-2-13b": {"cp": 1, "pp": 4},
    "mixtral-8x7b": {"cp": 1, "num_model_chunks": 1, "etp": 1, "micro_batch_size": 2},
}
"""Of the larger spaces a part, because every layout of it is expanded: some 150 each, where every axis varies in two or more."""

PAIRS = [
    *SMALL,
    ("gpt2", "1xT4", 8, 1024),
    ("pythia-12b", "8xH100-SXM-80GB", 64, 2048),
    ("smollm2-1.7b", "2xL40S", 16, 2048),
    ("llama-3.2-1b", "1xH200-SXM-141GB", 8, 4096),
    ("llama-3.1-70b", "64xH100-SXM-80GB", 128, 8192),
    ("llama-3.1-70b", "32xA100-SXM-80GB", 64, 4096),
    ("llama-3.1-405b", "512xH100-SXM-80GB", 256, 8192),
    ("gpt3-175b", "128xA100-SXM-80GB", 256, 2048),
    ("nemotron-4-340b", "768xH100-SXM-80GB", 768, 4096),
    ("qwen3-32b", "16xB200-SXM-180GB", 64, 8192),
    ("qwen3-235b-a22b", "256xH200-SXM-141GB", 256, 4096),
    ("gemma-2-9b", "16xA100-SXM-80GB", 32, 4096),
    ("gpt-oss-120b", "64xH100-SXM-80GB", 128, 4096),
    ("deepseek-v2-lite", "8xH100-SXM-80GB", 64, 4096),
    ("llama-4-scout", "128xH100-SXM-80GB", 128, 8192),
    ("mistral-7b", "8xMI300X", 64, 8192),
]


def make(
    model: str,
    cluster: str,
    batch: int,
    seq_len: int,
    *,
    runnable: bool | None = None,
    fixed: dict[str, int] | None = None,
) -> TrainingPlan:
    machine = ClusterSpec.parse(cluster)
    workload = Workload(seq_len=seq_len, global_batch_size=batch, precision=default_precision(machine))
    return plan(ModelSpec.named(model), machine, workload, runnable=runnable, fixed=fixed or {})


@functools.cache
def made(case: tuple[str, str, int, int]) -> TrainingPlan:
    """Planned once for all tests that look at the same plan."""
    return make(*case)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=f"{c[0]}-{c[1]}", marks=[] if c[0] == "llama-2-13b" else [pytest.mark.long]) for c in SMALL],
)
def test_search_equals_exhaustive_enumeration(case: tuple[str, str, int, int]) -> None:
    part = PARTS.get(case[0], {})
    found = make(*case, runnable=True, fixed=part)
    space = build_space(PlanRequest(found.model, found.cluster, found.workload, part, runnable=True))
    costs = CostTable.from_layouts(found.model, found.workload, found.cluster, space.batch)
    everything = [expand(costs, idx).estimate for idx in range(len(space.batch))]
    best = min(e.step_time_s for e in everything if e.fits)
    assert found.search is not None
    assert found.search.status != "stopped"
    assert found.search.bound_s <= best * (1 + 1e-9)
    assert (
        found.search.bound_s >= best * 0.93
    )  # on slow links: what a stage adds once is bounded by its mean over stages
    assert found.estimate.step_time_s <= best * (1 + MAX_PRICE) * (1 + 1e-4)  # and the search's own relative gap
    assert found.search.gap == pytest.approx(1 - found.search.bound_s / found.search.objective_s)
    # Cuts inside blocks are no layouts of the space: they are tried afterwards, where they may be faster.
    assert found.layout.half_blocks or best <= found.search.objective_s * (1 + 1e-9)
    assert found.search.objective_s <= best * (1 + 1e-4)
    assert found.price_of_simplicity == pytest.approx(found.estimate.step_time_s / found.search.objective_s - 1)


def test_space_counts_what_rules_of_the_runtime_exclude() -> None:
    workload = Workload(seq_len=2048, global_batch_size=8)
    space = build_space(PlanRequest(ModelSpec.named("llama-3.2-1b"), ClusterSpec.parse("2x4xA100-SXM-80GB"), workload))
    assert space.excluded["tp_in_scaleup_domain"] > 0
    assert space.excluded["zero_under_pipeline"] > 0


def test_bound_holds_for_every_split_into_stages() -> None:
    """Slow links make the even split of compute a bad one; brute force over all splits must not beat the bound."""
    spec, machine = ModelSpec.named("llama-3.2-1b"), ClusterSpec.parse("4x1xA100-SXM-80GB/eth10")
    workload = Workload(seq_len=2048, global_batch_size=8)
    fixed = {"pp": 2, "dp_replicate": 2, "num_model_chunks": 1, "schedule": "1f1b"}
    found = plan(spec, machine, workload, fixed=fixed)
    space = build_space(PlanRequest(spec, machine, workload, fixed | {"recompute_fraction": 1.0}))
    assert set(space.batch.recompute) == {0, 1, 2}
    costs = CostTable.from_layouts(spec, workload, machine, space.batch)
    splits = [
        (idx, (0, cut, spec.num_layers)) for idx in range(len(space.batch)) for cut in range(2, spec.num_layers - 1)
    ]
    estimates = [estimate_step(costs, idx, boundaries) for idx, boundaries in splits]
    best = min(e.step_time_s for e in estimates if e.fits)
    assert found.search.bound_s <= best * (1 + 1e-9)
    assert found.estimate.step_time_s <= best * 1.03


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{case[0]}-{case[1]}", marks=pytest.mark.nightly if idx % 2 else pytest.mark.long)
        for idx, case in enumerate(PAIRS)
    ],
)
def test_plans_fit_by_hand_arithmetic_on_states(case: tuple[str, str, int, int]) -> None:
    """fp32 parameters, gradients and AdamW states of each stage over its ranks, nothing else, against the device's memory."""
    found = made(case)
    layout = found.layout
    layers = list(found.staged_model.iter_layers())
    for stage in found.stages:
        params = sum(layers[idx].num_params(found.model.hidden_dim) for idx in stage.layer_idxs)
        shards = layout.dp_shard * layout.cp if layout.zero_stage >= 1 else 1
        states = params / layout.tp / shards * (4 + 8)
        gradients = params / layout.tp * 4 / shards
        assert states + gradients <= found.cluster.weakest_device.memory_bytes
    assert found.estimate.fits
    assert layout.world_size == found.cluster.num_devices
    assert 0 < found.estimate.mfu < 1


@pytest.mark.parametrize("case", SMALL[:3], ids=lambda c: c[0])
def test_plan_survives_a_json_round_trip(case: tuple[str, str, int, int], tmp_path) -> None:
    found = made(case)
    found.save(tmp_path / "plan.json")
    assert TrainingPlan.load(tmp_path / "plan.json") == found


def test_plan_is_deterministic() -> None:
    first, second = made(SMALL[2]), make(*SMALL[2])
    assert first.layout == second.layout
    assert first.estimate == second.estimate
    assert first.alternatives == second.alternatives


@pytest.mark.long
def test_more_memory_is_never_slower() -> None:
    machine = ClusterSpec.parse("8xA100-SXM-40GB")
    group = machine.groups[0]
    larger = machine.replace(
        groups=(group.replace(device=group.device.replace(memory_bytes=2 * group.device.memory_bytes)),)
    )
    spec, workload = ModelSpec.named("llama-2-7b"), Workload(seq_len=4096, global_batch_size=64)
    assert plan(spec, larger, workload).search.bound_s <= plan(spec, machine, workload).search.bound_s


def test_fixed_fields_are_kept() -> None:
    machine = ClusterSpec.parse("16xH100-SXM-80GB")
    workload = Workload(seq_len=4096, global_batch_size=64)
    fixed = {"tp": 4, "pp": 2, "recompute": "full", "micro_batch_size": 2}
    found = plan(ModelSpec.named("llama-3.1-8b"), machine, workload, fixed=fixed)
    assert {name: getattr(found.layout, name) for name in fixed} == fixed


@pytest.mark.parametrize(
    ("fixed", "rule"),
    [
        ({"tp": 3}, "world_size"),
        ({"tp": 16}, "tp_in_scaleup_domain"),
        ({"pp": 2, "zero_stage": 3, "dp_shard": 8}, "zero_under_pipeline"),
        ({"offload": "optimizer"}, "offload"),
        ({"micro_batch_size": 65}, "micro_batch_needed"),
    ],
)
def test_impossible_fix_names_the_rule(fixed: dict[str, int], rule: str) -> None:
    workload = Workload(seq_len=4096, global_batch_size=64)
    with pytest.raises(ConfigError, match=rf"\[{rule}\]"):
        plan(ModelSpec.named("llama-2-7b"), ClusterSpec.parse("16xH100-SXM-80GB"), workload, fixed=fixed)


@pytest.mark.long
def test_infeasible_names_memory_and_a_size_that_fits() -> None:
    spec, workload = ModelSpec.named("llama-3.1-70b"), Workload(seq_len=4096, global_batch_size=256)
    with pytest.raises(InfeasibleError) as caught:
        plan(spec, ClusterSpec.parse("8xH100-SXM-80GB"), workload)
    assert "[memory (C2)]" in str(caught.value)
    larger = re.search(r"use (\d+) devices", str(caught.value))
    assert caught.value.help is not None and larger is not None
    devices = int(larger[1])
    assert plan(spec, ClusterSpec.parse(f"{devices}xH100-SXM-80GB"), workload).estimate.fits


def test_alternatives_differ_and_say_why() -> None:
    found = made(SMALL[2])
    degrees = [(a.layout.dp_replicate, a.layout.dp_shard, a.layout.tp, a.layout.pp) for a in found.alternatives]
    assert len(set(degrees)) == len(degrees) >= 4
    assert all(any(word in a.reason for word in ("%", "does not fit", "as fast")) for a in found.alternatives)
    slower = [a for a in found.alternatives if "does not fit" not in a.reason]
    assert [a.step_time_s for a in slower] == sorted(a.step_time_s for a in slower)


@pytest.mark.long
def test_time_limit_returns_an_incumbent_and_an_honest_gap() -> None:
    spec, machine = ModelSpec.named("llama-3.1-405b"), ClusterSpec.parse("16384xH100-SXM-80GB")
    workload = Workload(seq_len=8192, global_batch_size=2048)
    complete = plan(spec, machine, workload)
    try:
        hurried = plan(spec, machine, workload, time_limit_s=complete.search.search_s / 3)
    except SolverLimitError:  # on a slow machine the limit may come before any answer
        return
    assert hurried.search.bound_s <= complete.search.bound_s * (1 + 1e-9)
    assert hurried.search.objective_s >= complete.search.bound_s


def test_estimate_of_the_chosen_stages_is_the_plans_estimate() -> None:
    found = made(SMALL[3])
    assert reestimate(found, found.cluster).breakdown_s == found.estimate.breakdown_s
    cut_anew = estimate(
        found.model, found.cluster, found.workload, found.layout
    )  # mixed recompute may fill all of the memory
    assert cut_anew.step_time_s <= found.estimate.step_time_s * (1 + 1e-9)


def test_estimate_refuses_a_layout_of_another_size() -> None:
    workload = Workload(seq_len=4096, global_batch_size=64)
    with pytest.raises(ConfigError, match=r"\[world_size\]"):
        estimate(ModelSpec.named("llama-3.1-8b"), ClusterSpec.parse("8xH100-SXM-80GB"), workload, Layout(tp=4))


def test_mixed_cluster_is_planned_as_its_weakest_device(tmp_path) -> None:
    path = tmp_path / "mixed.toml"
    path.write_text(
        """
        name = "mixed"
        [[groups]]
        device = "A100-SXM-80GB"
        num_nodes = 1
        devices_per_node = 8
        [[groups]]
        device = "A100-SXM-40GB"
        num_nodes = 1
        devices_per_node = 8
        """
    )
    workload = Workload(seq_len=4096, global_batch_size=64)
    found = plan(ModelSpec.named("llama-2-7b"), ClusterSpec.parse(str(path)), workload)
    assert found.estimate.budget_bytes < 40 * 2**30
    assert any("mixed" in note for note in found.notes)


@pytest.mark.parametrize("n", [1, 2, 7, 12, 97, 360, 16384])
def test_divisors(n: int) -> None:
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


def test_mixed_devices_have_only_what_all_of_them_have() -> None:
    v100, l4 = (ClusterSpec.parse(f"1x4x{name}").groups[0] for name in ("V100-SXM2-32GB", "L4"))
    machine = ClusterSpec.parse("2x4xL4/eth100").replace(groups=(v100, l4))
    assert machine.weakest_device.peak_flops_per_s.bf16 is None
    assert machine.weakest_device.peak_flops_per_s.fp8 is None
    assert default_precision(machine) == "fp16-mixed"
