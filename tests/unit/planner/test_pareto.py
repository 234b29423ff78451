"""The Pareto front: each point is the fastest under its cap, found again by expanding every layout under it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from meshwright.cost_models.stage.table import CostTable
from meshwright.planner import pareto, plan
from meshwright.planner.expand import expand_fitting
from meshwright.planner.request import PlanRequest
from meshwright.planner.search import REL_GAP
from meshwright.planner.space import build_space
from meshwright.schema import ClusterSpec, ModelSpec, Workload

CASES = [
    ("smollm2-1.7b", "4xA100-SXM-40GB", 16, "fsdp2"),
    ("llama-2-7b", "6xA100-SXM-80GB", 12, "deepspeed"),
    ("llama-3.2-1b", "4xL40S", 8, "megatron"),
]


@pytest.mark.parametrize(
    "case",
    [CASES[1], *(pytest.param(case, marks=pytest.mark.long) for case in CASES[::2])],
    ids=lambda case: f"{case[0]}-{case[3]}",
)
def test_points_are_the_fastest_layouts_under_their_caps(case: tuple[str, str, int, str]) -> None:
    model, cluster, batch, engine = case
    spec, machine = ModelSpec.named(model), ClusterSpec.parse(cluster)
    workload = Workload(seq_len=1024, global_batch_size=batch, engine=engine)
    runnable = engine == "fsdp2"
    fixed = {"micro_batch_size": 2} if runnable else {"micro_batch_size": 2, "cp": 1}
    points = pareto(spec, machine, workload, fixed=fixed, runnable=runnable, step_fraction=0.04)
    space = build_space(PlanRequest(spec, machine, workload, fixed, runnable=runnable))
    costs = CostTable.from_layouts(spec, workload, machine, space.batch)
    assert len(points) >= 2
    assert points[0].cap_bytes == machine.memory_budget_bytes
    for faster, slower in itertools.pairwise(points):
        assert faster.step_time_s < slower.step_time_s
        assert faster.required_bytes > slower.required_bytes
    step = int(0.04 * machine.memory_budget_bytes)
    caps = [point.cap_bytes for point in points[:: max(1, len(points) // 3)]]
    for cap in caps:
        capped = costs.with_budget(cap)
        splits = [expand_fitting(capped, idx) for idx in range(len(space.batch))]
        best = min(split.estimate.step_time_s for split in splits if split is not None)
        point = next(point for point in points if point.cap_bytes == cap)
        assert point.required_bytes <= cap
        assert point.step_time_s <= best * (1 + 2 * REL_GAP)
        assert point.bound_s <= best * (1 + 1e-9)
    left = costs.with_budget(points[-1].required_bytes - step)
    assert all(expand_fitting(left, idx) is None for idx in range(len(space.batch)))


@pytest.mark.long
def test_first_point_is_the_fastest_layout_of_the_plan() -> None:
    spec, machine = ModelSpec.named("smollm2-1.7b"), ClusterSpec.parse("4xA100-SXM-40GB")
    workload = Workload(seq_len=4096, global_batch_size=16)
    fixed = {"micro_batch_size": 1}
    points = pareto(spec, machine, workload, fixed=fixed, step_fraction=0.05)
    assert len(points) >= 3
    assert points == pareto(spec, machine, workload, fixed=fixed, step_fraction=0.05)
    assert points[0].step_time_s == pytest.approx(
        plan(spec, machine, workload, fixed=fixed).search.bound_s, rel=2 * REL_GAP
    )
    assert points[0].tokens_per_s == pytest.approx(workload.tokens_per_step / points[0].step_time_s)
    assert all(sum(point.layers_of_stage) == spec.num_layers for point in points)
    assert all(len(point.layers_of_stage) == point.layout.pp * point.layout.num_model_chunks for point in points)


def test_nothing_that_fits_has_no_front() -> None:
    workload = Workload(seq_len=4096, global_batch_size=8)
    assert pareto(ModelSpec.named("llama-3.1-70b"), ClusterSpec.parse("1xA100-SXM-80GB"), workload) == ()


def test_smaller_budget_changes_only_what_fits() -> None:
    spec, machine = ModelSpec.named("llama-3.2-1b"), ClusterSpec.parse("4xH100-SXM-80GB")
    workload = Workload(seq_len=4096, global_batch_size=8)
    costs = CostTable.from_layouts(spec, workload, machine, build_space(PlanRequest(spec, machine, workload)).batch)
    assert np.isfinite(costs.total("busy_s")).all()
    half = costs.with_budget(machine.memory_budget_bytes // 2)
    assert half.cluster.memory_budget_bytes == machine.memory_budget_bytes // 2
    assert np.array_equal(half.total("busy_s"), costs.total("busy_s"))
    assert half.by_kind[0].forward_s == pytest.approx(costs.by_kind[0].forward_s)
