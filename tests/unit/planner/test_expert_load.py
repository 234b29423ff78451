"""Measured loads of experts in a plan: what imbalance costs, which ep is chosen, and where the plan puts the experts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from meshwright.cli.main import app
from meshwright.cost_models.stage.bounds import memory_bounds, uniform_time_bounds
from meshwright.cost_models.stage.table import CostTable
from meshwright.planner import estimate, plan
from meshwright.planner.experts import with_imbalance
from meshwright.schema import ClusterSpec, ConfigError, Layout, ModelSpec, TrainingPlan, Workload
from meshwright.schema.layout_table import LayoutTable
from typer.testing import CliRunner

MODEL, CLUSTER = ModelSpec.named("mixtral-8x7b"), ClusterSpec.parse("32xH100-SXM-80GB")
WORKLOAD = Workload(seq_len=4096, global_batch_size=256, engine="megatron")
LOAD = np.random.default_rng(0).lognormal(0, 0.9, (32, 8))


@pytest.fixture(scope="module")
def plans() -> tuple[TrainingPlan, TrainingPlan]:
    return plan(MODEL, CLUSTER, WORKLOAD), plan(MODEL, CLUSTER, WORKLOAD, expert_load=LOAD)


@pytest.mark.long
def test_imbalance_makes_the_plan_slower_and_its_expert_parallelism_smaller(
    plans: tuple[TrainingPlan, TrainingPlan],
) -> None:
    even, measured = plans
    assert measured.estimate.step_time_s > even.estimate.step_time_s
    assert measured.layout.ep < even.layout.ep
    assert measured.search is not None
    assert measured.search.bound_s <= measured.search.objective_s
    kept = estimate(MODEL, CLUSTER, measured.workload, even.layout)
    assert measured.estimate.step_time_s < kept.step_time_s


def test_plan_says_where_the_experts_of_every_layer_stand(
    plans: tuple[TrainingPlan, TrainingPlan], tmp_path: Path
) -> None:
    plan(MODEL, CLUSTER, WORKLOAD, expert_load=LOAD, fixed={"ep": 4}).save(tmp_path / "plan.json")
    loaded = TrainingPlan.load(tmp_path / "plan.json")
    assert len(loaded.expert_slots) == 32
    fullest = []
    for slots, load in zip(loaded.expert_slots, LOAD, strict=True):
        ranks = np.array(slots.experts).reshape(loaded.layout.ep, -1)
        used = load[ranks].sum(axis=1)
        fullest.append(used.max() / used.mean())
    assert np.mean(fullest) == pytest.approx(dict(loaded.workload.expert_imbalance)[loaded.layout.ep])
    assert plans[0].expert_slots == ()


@pytest.mark.long
def test_our_runtime_moves_experts_only_where_that_saves_more_than_it_moves() -> None:
    """Mixtral's experts have 352 MB each, OLMoE's 13; of 16 experts' rows on a rank of four, those of three stand on the first."""
    load = np.ones((1, 64))
    load[0, :3] = 200.0
    light, cluster = ModelSpec.named("olmoe-1b-7b"), ClusterSpec.parse("8xH100-SXM-80GB")
    workload = Workload(seq_len=4096, global_batch_size=64)
    moved = plan(light, cluster, workload, expert_load=load, fixed={"ep": 4})
    assert len(moved.expert_slots) == 16
    assert dict(moved.workload.expert_imbalance)[4] < 1.4  # in order (3 * 200 + 13) / 165 = 3.7
    heavy = plan(MODEL, CLUSTER, WORKLOAD.replace(engine="fsdp2"), expert_load=LOAD, fixed={"ep": 4})
    assert heavy.expert_slots == ()
    assert any("experts stay in order" in note for note in heavy.notes)
    on_ranks = LOAD.reshape(32, 4, 2).sum(axis=2)
    in_order = (on_ranks.max(axis=1) / on_ranks.mean(axis=1)).mean()
    assert dict(heavy.workload.expert_imbalance)[4] == pytest.approx(in_order)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_rows_and_bytes_of_the_fullest_rank_count(recompute: str) -> None:
    workload = with_imbalance(MODEL, CLUSTER, WORKLOAD, LOAD)
    fields = {"dp_shard": 8, "pp": 4, "zero_stage": 1, "recompute": recompute}
    spread, follows = Layout(ep=8, **fields), Layout(ep=1, **fields)
    for layout, slower in ((spread, True), (follows, False)):
        even = estimate(MODEL, CLUSTER, WORKLOAD, layout)
        measured = estimate(MODEL, CLUSTER, workload, layout)
        assert (measured.step_time_s > even.step_time_s) is slower
        assert (measured.breakdown_s.ep > even.breakdown_s.ep) is slower
        assert (measured.peak_allocated_bytes > even.peak_allocated_bytes) is slower


def test_bounds_stay_below_costs_with_measured_loads() -> None:
    workload = with_imbalance(MODEL, CLUSTER, WORKLOAD, LOAD)
    layouts = [Layout(dp_shard=32 // pp, pp=pp, ep=ep, zero_stage=1) for pp in (2, 4) for ep in (1, 2, 4, 8)]
    costs = CostTable.from_layouts(
        MODEL, workload, CLUSTER, LayoutTable.from_layouts(layouts, workload.global_batch_size)
    )
    bound_s, bound_bytes = uniform_time_bounds(costs), memory_bounds(costs)
    for idx, layout in enumerate(layouts):
        found = estimate(MODEL, CLUSTER, workload, layout)
        assert bound_s[idx] <= found.step_time_s * (1 + 1e-9)  # sums in another order
        assert bound_bytes[idx] <= found.peak_allocated_bytes + 1


@pytest.mark.parametrize(
    ("model", "load", "said"),
    [
        ("llama-3.1-8b", LOAD, "has no experts"),
        ("mixtral-8x7b", LOAD[:, :4], "32 layers x 4 experts"),
        ("mixtral-8x7b", LOAD[:5], "5 layers x 8 experts"),
        ("mixtral-8x7b", -LOAD, "negative"),
    ],
)
def test_loads_that_are_not_the_models_are_refused(model: str, load: np.ndarray, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan(ModelSpec.named(model), CLUSTER, WORKLOAD, expert_load=load)


def test_command_reads_the_loads_and_writes_nothing_on_bad_ones(tmp_path: Path) -> None:
    np.save(tmp_path / "load.npy", LOAD[:5])
    options = ["--cluster", "8xH100-SXM-80GB", "--global-batch-size", "64", "--seq-len", "4096", "--engine", "megatron"]
    out = tmp_path / "plan.json"
    files = ["--expert-load", str(tmp_path / "load.npy"), "--out", str(out)]
    result = CliRunner().invoke(app, ["plan", "mixtral-8x7b", *options, *files])
    assert result.exit_code == 2, result.output
    assert "5 layers" in result.stderr
    assert not out.exists()
