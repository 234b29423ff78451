"""What a space leaves out by a theorem is nowhere better than what it keeps."""

from __future__ import annotations

import numpy as np
import pytest
from meshwright.cost_models.stage.step import estimate_step
from meshwright.cost_models.stage.table import CostTable
from meshwright.planner import enumeration, plan, search
from meshwright.planner.enumeration import SAME_SECONDS_FRACTION
from meshwright.planner.expand import expand, expand_fitting
from meshwright.planner.request import PlanRequest
from meshwright.planner.space import Space, build_space
from meshwright.schema import ClusterSpec, ConfigError, Layout, ModelSpec, Workload
from meshwright.schema.layout_table import LayoutTable
from small_spaces import shortened

CLUSTERS = ("8xH100-SXM-80GB", "2x4xA100-SXM-40GB/ib200", "8x1xA100-SXM-40GB/eth25")

NO_RECOMPUTE = {"recompute": "none"}  # where blocks choose by themselves, one cut has many times
ONE_VALUE = {**NO_RECOMPUTE, "tp_overlap": False, "cuda_graphs": False}


@pytest.mark.parametrize("seq_len", [2048, 65536])
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("engine", ["fsdp2", "megatron"])
def test_splits_of_cp_left_out_are_no_faster(
    engine: str, cluster: str, seq_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, machine = ModelSpec.named("llama-3.2-1b"), ClusterSpec.parse(cluster)
    workload = Workload(seq_len=seq_len, global_batch_size=8, engine=engine)
    kept = build_space(PlanRequest(spec, machine, workload, ONE_VALUE)).batch
    monkeypatch.setattr(
        enumeration, "exchanges_worth_trying", lambda c, sizes, *_: np.ones((len(c["tp"]), len(sizes)), dtype=bool)
    )
    whole = build_space(PlanRequest(spec, machine, workload, ONE_VALUE)).batch
    # Over Ethernet, of long sequences, each split that our ring takes is better than the others in some pass.
    each_is_best = (engine, cluster, seq_len) == ("fsdp2", CLUSTERS[2], 65536)
    assert len(kept) < len(whole) or each_is_best
    layouts = [kept.layout(idx) for idx in range(len(kept))]
    left_out = sorted(
        {whole.layout(idx) for idx in range(len(whole))} - set(layouts), key=lambda layout: layout.model_dump_json()
    )
    rng = np.random.default_rng(0)
    for idx in rng.choice(len(left_out), size=min(12, len(left_out)), replace=False):
        like = [layout for layout in layouts if _without_split(layout) == _without_split(left_out[idx])]
        times = _step_times([left_out[idx], *like], spec, machine, workload)
        assert min(times[1:]) <= times[0] * (1 + 1e-9)


def _without_split(layout: Layout) -> Layout:
    return layout.replace(cp_ulysses=1)


def _step_times(layouts: list[Layout], spec: ModelSpec, cluster: ClusterSpec, workload: Workload) -> list[float]:
    """Of all layouts with the stages of the first: with others, the search may find a better cut for one than for another."""
    batch = LayoutTable.from_layouts(layouts, workload.global_batch_size)
    costs = CostTable.from_layouts(spec, workload, cluster, batch)
    boundaries = expand(costs, 0).boundaries
    return [estimate_step(costs, idx, boundaries).step_time_s for idx in range(len(layouts))]


def test_every_degree_that_the_engine_takes_stays_reachable() -> None:
    """DeepSpeed has no ring: a split that only the ring would beat stays."""
    spec, machine = ModelSpec.named("llama-3.2-1b"), ClusterSpec.parse("8xH100-SXM-80GB")
    batch = build_space(
        PlanRequest(spec, machine, Workload(seq_len=2048, global_batch_size=8, engine="deepspeed"))
    ).batch
    assert set(batch.cp) == {1, 2, 4, 8}
    assert np.array_equal(batch.cp, batch.cp_ulysses)


OTHER_VALUES = {"sequence_parallel": True, "tp_overlap": False, "cuda_graphs": False}
"""Of each switch the value that stays where the other one gains nothing."""


def keep_every_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enumeration, "may_gain", lambda c, *_: np.ones(len(c["tp"]), dtype=bool))


@pytest.mark.parametrize(
    ("engine", "cluster", "seq_len"),
    [
        ("megatron", "2x4xA100-SXM-40GB/ib200", 16384),
        ("deepspeed", "8xH100-SXM-80GB", 32768),
    ],
)
def test_switches_left_out_gain_no_more_than_is_said(
    engine: str, cluster: str, seq_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, machine = ModelSpec.named("llama-3.2-1b"), ClusterSpec.parse(cluster)
    workload = Workload(seq_len=seq_len, global_batch_size=16, engine=engine)
    kept = build_space(PlanRequest(spec, machine, workload, NO_RECOMPUTE)).batch
    keep_every_value(monkeypatch)
    whole = build_space(PlanRequest(spec, machine, workload, NO_RECOMPUTE)).batch
    left_out = sorted(
        {whole.layout(idx) for idx in range(len(whole))} - {kept.layout(idx) for idx in range(len(kept))},
        key=lambda layout: layout.model_dump_json(),
    )
    assert left_out
    rng = np.random.default_rng(0)
    for idx in rng.choice(len(left_out), size=min(12, len(left_out)), replace=False):
        others = [name for name, value in OTHER_VALUES.items() if getattr(left_out[idx], name) != value]
        like = [
            left_out[idx].replace(**{name: OTHER_VALUES[name]})
            for name in others
            if name != "sequence_parallel" or left_out[idx].tp > 1
        ]
        times = _step_times([left_out[idx], *like], spec, machine, workload)
        assert min(times[1:]) <= times[0] * (1 + SAME_SECONDS_FRACTION)


@pytest.mark.parametrize("engine", ["fsdp2", "megatron", "deepspeed"])
def test_search_over_both_equals_enumeration_and_is_no_worse_than_with_sequence_parallelism_alone(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where links are slow; the reference has both values of every switch of every layout, whatever a layer gains."""
    spec, machine = shortened("llama-3.2-1b", 3), ClusterSpec.parse("4xA100-PCIE-40GB")
    workload, fixed = Workload(seq_len=1024, global_batch_size=8, engine=engine), {"micro_batch_size": 2}
    monkeypatch.setattr(search, "REL_GAP", 0.0)
    monkeypatch.setattr("meshwright.planner.space.BLOCK", 16)
    found = search.search(
        PlanRequest(spec, machine, workload), build_space(PlanRequest(spec, machine, workload, fixed))
    )
    keep_every_value(monkeypatch)
    batch = build_space(PlanRequest(spec, machine, workload, fixed)).batch
    of_engine = ("tp_overlap", "cuda_graphs") if engine == "megatron" else ("sequence_parallel",)
    for name in OTHER_VALUES:
        assert set(batch.columns[name][batch.tp > 1]) == (
            {0, 1} if name in of_engine else {int(name == "sequence_parallel")}
        )
    costs = CostTable.from_layouts(spec, workload, machine, batch)
    times = np.array(
        [e.step_time_s if (e := expand(costs, idx).estimate).fits else np.inf for idx in range(len(batch))]
    )
    best_s = found.feasible[0].estimate.step_time_s
    assert times.min() * (1 - 1e-9) <= best_s <= times.min() * (1 + SAME_SECONDS_FRACTION)
    assert found.bound_s <= times.min() * (1 + SAME_SECONDS_FRACTION)
    split = (batch.tp == 1) | (batch.sequence_parallel == 1)
    alone = search.search(PlanRequest(spec, machine, workload), Space(batch.select(split), {}))
    assert best_s <= alone.feasible[0].estimate.step_time_s * (1 + 1e-9)


def test_tensor_parallelism_does_without_where_that_is_faster_and_with_where_memory_is_short() -> None:
    spec, machine = ModelSpec.named("llama-3.2-1b"), ClusterSpec.parse("8xH100-SXM-80GB")
    workload, tp = Workload(seq_len=4096, global_batch_size=64), {"tp": 8, "micro_batch_size": 2, "recompute": "none"}
    found = plan(spec, machine, workload, fixed=tp)
    other = plan(spec, machine, workload, fixed=tp | {"sequence_parallel": True})
    assert not found.layout.sequence_parallel
    assert other.layout.sequence_parallel
    assert found.estimate.step_time_s < other.estimate.step_time_s
    middle = (found.estimate.required_bytes + other.estimate.required_bytes) // 2
    short = machine.replace(reserved_bytes=machine.memory_budget_bytes + machine.reserved_bytes - middle)
    assert plan(spec, short, workload, fixed=tp).layout.sequence_parallel


def test_what_the_engine_takes_with_sequence_parallelism_only_is_never_enumerated_without() -> None:
    spec, machine = ModelSpec.named("mixtral-8x7b"), ClusterSpec.parse("8xA100-PCIE-80GB")
    workload = Workload(seq_len=4096, global_batch_size=8, engine="megatron")
    batch = build_space(PlanRequest(spec, machine, workload)).batch
    assert np.array_equal(batch.sequence_parallel == 1, batch.tp > 1)
    with pytest.raises(ConfigError) as error:
        build_space(
            PlanRequest(
                spec,
                machine,
                Workload(seq_len=4096, global_batch_size=8, engine="megatron"),
                {"tp": 2, "sequence_parallel": False},
            )
        )
    assert "[megatron_experts_split_sequence]" in str(error.value)
    batch = build_space(PlanRequest(spec, machine, Workload(seq_len=4096, global_batch_size=8))).batch
    without = (batch.tp > 1) & (batch.sequence_parallel == 0)
    assert without.any()
    assert np.all(batch.experts_follow_tp[without])


@pytest.mark.long
def test_runner_ups_are_not_hidden_by_their_like_without_sequence_parallelism_that_does_not_fit() -> None:
    spec, machine = ModelSpec.named("llama-3.1-70b"), ClusterSpec.parse("256xH100-SXM-80GB")
    workload = Workload(seq_len=8192, global_batch_size=1024)
    found = plan(spec, machine, workload, top=4, prefer="fastest")
    alone = plan(spec, machine, workload, top=4, prefer="fastest", fixed={"sequence_parallel": True})
    assert found.estimate.step_time_s <= alone.estimate.step_time_s * (1 + 1e-4)
    assert found.alternatives[0].step_time_s <= alone.alternatives[0].step_time_s * (1 + 1e-4)


@pytest.mark.long
def test_search_over_the_exchange_beside_another_micro_batch_equals_enumeration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a mixture of experts, every switch on and off; with little memory, so that cuts in chunks are refused."""
    spec, machine = shortened("olmoe-1b-7b", 4), ClusterSpec.parse("4xH100-SXM-80GB").with_budget(11 * 2**30)
    workload, fixed = Workload(seq_len=2048, global_batch_size=32, engine="megatron"), {"tp": 1, "cp": 1, "etp": 1}
    monkeypatch.setattr(search, "REL_GAP", 0.0)
    found = search.search(
        PlanRequest(spec, machine, workload), build_space(PlanRequest(spec, machine, workload, fixed))
    )
    keep_every_value(monkeypatch)
    batch = build_space(PlanRequest(spec, machine, workload, fixed)).batch
    assert set(batch.ep_overlap[batch.ep > 1]) == {0, 1}
    assert not batch.ep_overlap[batch.ep == 1].any()
    costs = CostTable.from_layouts(spec, workload, machine, batch)
    candidates = [expand_fitting(costs, idx) for idx in range(len(batch))]
    times = np.array([np.inf if candidate is None else candidate.step_time_s for candidate in candidates])
    assert 0.05 < np.mean(np.isinf(times)) < 0.95
    best_s = found.feasible[0].estimate.step_time_s
    assert times.min() * (1 - 1e-9) <= best_s <= times.min() * (1 + SAME_SECONDS_FRACTION)
    assert found.bound_s <= times.min() * (1 + SAME_SECONDS_FRACTION)
