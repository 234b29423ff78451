"""Stages that end inside blocks: what halves cost, a search over them, and plans that have them only where they pay."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from meshwright.cost_models.layer.layer import LayerCost
from meshwright.cost_models.stage.bounds import memory_bounds, uniform_time_bounds
from meshwright.cost_models.stage.step import step_flops_per_token
from meshwright.cost_models.stage.table import CostTable
from meshwright.engines import export
from meshwright.planner import choice, search
from meshwright.planner.expand import expand, expand_layout
from meshwright.planner.plan import plan
from meshwright.planner.request import PlanRequest
from meshwright.planner.space import build_space
from meshwright.planner.tasks.training import search_layouts
from meshwright.schema import ClusterSpec, ConfigError, Layout, ModelSpec, TrainingPlan, Workload
from meshwright.schema.layout_rules import require_valid
from meshwright.schema.layout_table import LayoutTable
from small_spaces import shortened

LLAMA = ModelSpec.named("llama-3.1-8b")
EIGHT = ClusterSpec.parse("8xH100-SXM-80GB")
SIX = ClusterSpec.parse("6xH100-SXM-80GB")
WORKLOAD = Workload(seq_len=4096, global_batch_size=24)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt2", "mixtral-8x7b", "deepseek-v3", "qwen3-8b"])
def test_halves_have_the_parameters_and_flops_of_the_model(name: str) -> None:
    model = ModelSpec.named(name)
    halved = model.in_halves
    assert halved is not None and halved.num_blocks == 2 * model.num_blocks
    assert (halved.num_params, halved.num_active_params) == (model.num_params, model.num_active_params)
    assert step_flops_per_token(halved, WORKLOAD) == step_flops_per_token(model, WORKLOAD)


def costs_of(layout: Layout, workload: Workload = WORKLOAD) -> CostTable:
    table = LayoutTable.from_layouts([layout], workload.global_batch_size)
    return CostTable.from_layouts(LLAMA, workload, EIGHT, table)


@pytest.mark.parametrize("degrees", [{"dp_shard": 4}, {"tp": 4}, {"cp": 4}, {"tp": 2, "dp_shard": 2}])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_halves_cost_together_what_a_block_does(degrees: dict[str, int], recompute: str) -> None:
    layout = Layout.model_validate({"pp": 2, "micro_batch_size": 2, "recompute": recompute, **degrees})
    entire, halved = costs_of(layout), costs_of(layout.replace(half_blocks=True))
    block, halves = entire.by_kind[1], (halved.by_kind[1], halved.by_kind[2])

    def total(name: str) -> float:
        return float(sum(getattr(half, name)[0] for half in halves))

    # What the host adds is not linear, and collectives of a half have a latency of their own.
    loose = {
        "forward_s": 0.03,
        "backward_s": 0.02,
        "weight_s": 0.02,
        "device_backward_s": 0.02,
        "host_backward_s": 0.02,
        "gather_s": 0.15,
        "regather_s": 0.15,
        "reduce_s": 0.15,
    }
    apart = {"activation_bytes", "recompute_s", "tp_backward_s", "cp_backward_s"}
    for field in fields(LayerCost):
        if field.name == "last_pending_bytes":  # only the later half ends a stage
            continue
        if field.name in ("working_bytes", "split_working_bytes"):  # one half runs after the other
            assert total(field.name) > getattr(block, field.name)[0] or recompute == "full"
        elif field.name not in apart or recompute == "none":
            expected = float(getattr(block, field.name)[0])
            assert total(field.name) == pytest.approx(expected, rel=loose.get(field.name, 1e-12)), field.name
    boundary = float(entire.boundary_bytes[0])
    if (
        recompute == "full"
    ):  # the input of the second half is kept as well, and the last product of the first is not made again
        assert total("activation_bytes") == 2 * float(block.activation_bytes[0]) == 2 * boundary
        assert total("recompute_s") < float(block.recompute_s[0])
    elif (
        recompute == "selective" and not layout.sequence_parallel
    ):  # the input stands in for the output of attention's last product
        assert total("activation_bytes") == pytest.approx(float(block.activation_bytes[0]))
    assert halved.block_params[0] == entire.block_params[0]  # a unit of shards holds both
    assert float(halved.total("num_params")[0]) == float(entire.total("num_params")[0])


@pytest.mark.parametrize("memory", [0.2, 0.35, 1.0])
def test_search_over_halves_equals_enumeration(memory: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "REL_GAP", 0.0)
    group = SIX.groups[0]
    device = group.device.replace(memory_bytes=int(memory * group.device.memory_bytes))
    cluster = SIX.replace(groups=(group.replace(device=device),))
    fixed = {"half_blocks": True, "cp": 1, "micro_batch_size": 1}
    request = PlanRequest(shortened("llama-3.2-1b", 5), cluster, WORKLOAD, fixed)
    space = build_space(request)
    assert set(space.batch.pp.tolist()) == {2, 3} and space.batch.half_blocks.all()
    found = search.search(request, space)
    costs = CostTable.from_layouts(request.model, WORKLOAD, cluster, space.batch)
    everything = [expand(costs, idx) for idx in range(len(space.batch))]
    times = [c.step_time_s for c in everything if c.estimate.fits]
    assert bool(times) == bool(found.feasible)
    bound_s, bound_bytes = uniform_time_bounds(costs), memory_bounds(costs)
    for idx, candidate in enumerate(everything):
        assert len(candidate.options) == 12  # embedding, ten halves, head
        assert not candidate.estimate.fits or bound_s[idx] <= candidate.step_time_s * (1 + 1e-9)
        assert bound_bytes[idx] <= candidate.estimate.peak_allocated_bytes + 16
    if times:
        assert found.feasible[0].step_time_s == pytest.approx(min(times), rel=1e-9)
        assert found.bound_s <= min(times) * (1 + 1e-9)


def test_a_cut_inside_a_block_saves_half_of_it_where_blocks_do_not_divide() -> None:
    request = PlanRequest(LLAMA, SIX, WORKLOAD)
    layout = Layout(pp=3, dp_shard=2)
    entire, halved = (expand_layout(request, layout.replace(half_blocks=half)) for half in (False, True))
    slowest = [max(stage.forward_s + stage.backward_s for stage in c.estimate.stages) for c in (entire, halved)]
    halves = costs_of(Layout(pp=2, dp_shard=4, half_blocks=True)).per_layer("busy_s", 0)[1:3]
    assert any(cut % 2 == 0 for cut in halved.boundaries[1:-1])  # behind attention
    assert 0 < slowest[0] - slowest[1] < 2 * max(halves)
    assert halved.step_time_s < entire.step_time_s


def test_plans_have_half_blocks_where_they_are_faster_only(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = {"pp": 3, "num_model_chunks": 1, "cp": 1}
    request = PlanRequest(LLAMA, SIX, WORKLOAD, fixed)
    never = search_layouts(PlanRequest(LLAMA, SIX, WORKLOAD, {**fixed, "half_blocks": False}))
    found = search_layouts(request)
    best = found.feasible[0]
    assert best.half_blocks and best.step_time_s < never.feasible[0].step_time_s
    assert found.bound_s <= best.step_time_s
    assert [c.half_blocks for c in never.feasible] == [False] * len(never.feasible)
    made = plan(LLAMA, SIX, WORKLOAD, fixed=fixed)
    assert made.layout.half_blocks and made.staged_model.num_blocks == 64
    assert TrainingPlan.model_validate_json(made.model_dump_json()) == made
    assert any("inside blocks" in note for note in made.notes)
    # An even model with nothing at its ends has nothing to gain.
    monkeypatch.setattr(choice, "MAX_CUT_TRIES", 0)
    assert not search_layouts(request).feasible[0].half_blocks


def test_half_blocks_are_refused_by_name() -> None:
    sizes = {"world_size": 8, "scaleup_domain": 8}
    layout = Layout(pp=2, dp_shard=4, half_blocks=True)
    require_valid(LLAMA, WORKLOAD, layout, **sizes)
    for model, workload, refused in (
        (LLAMA, WORKLOAD, layout.replace(pp=1, dp_shard=8, zero_stage=3)),
        (LLAMA, WORKLOAD, layout.replace(num_model_chunks=2)),
        (LLAMA, WORKLOAD.replace(engine="megatron"), layout),
        (ModelSpec.named("gemma-2-9b"), WORKLOAD, layout),
    ):
        with pytest.raises(ConfigError) as refusal:
            require_valid(model, workload, refused, **sizes)
        assert any("blocks_in_halves" in line for line in refusal.value.details)
    with pytest.raises(ConfigError, match="share a norm or an input"):
        ModelSpec.named("gemma-2-9b").staged(half_blocks=True)


@pytest.mark.parametrize("engine", ["megatron", "torchtitan", "deepspeed", "nemo"])
def test_other_engines_take_neither_half_blocks_nor_degrees_by_stage(engine: str) -> None:
    fixed = {"pp": 4, "num_model_chunks": 1, "cp": 1, "tp": 1, "recompute": "none", "micro_batch_size": 1}
    made = plan(shortened("llama-3.1-8b", 8), EIGHT, WORKLOAD, fixed={**fixed, "half_blocks": True})
    with pytest.raises(ConfigError) as refusal:
        export(made, engine)
    assert any("half_blocks" in line for line in refusal.value.details)
    made = plan(shortened("llama-3.1-8b", 8), EIGHT, WORKLOAD, fixed={**fixed, "half_blocks": False})
    stages = tuple(stage.replace(tp=1 + (idx == 1)) for idx, stage in enumerate(made.stages))
    by_stage = TrainingPlan(**{**{name: getattr(made, name) for name in TrainingPlan.model_fields}, "stages": stages})
    with pytest.raises(ConfigError) as refusal:
        export(by_stage, engine)
    assert any("tp 1, 2, 1, 1 of the stages" in line for line in refusal.value.details)


def test_a_step_with_equal_stages_takes_the_same_in_either_form() -> None:
    request = PlanRequest(LLAMA.replace(tie_embeddings=False), EIGHT, Workload(seq_len=8192, global_batch_size=64))
    layout = Layout(pp=2, dp_shard=4)
    entire = expand_layout(request, layout)
    table = LayoutTable.from_layouts([layout.replace(half_blocks=True)], 64)
    costs = CostTable.from_layouts(request.model, request.workload, EIGHT, table)
    from meshwright.cost_models.stage.step import estimate_step

    same = estimate_step(costs, 0, [0, *(2 * end - 1 for end in entire.boundaries[1:-1]), 66])
    assert same.step_time_s == pytest.approx(entire.step_time_s, rel=1e-3)
    assert same.peak_allocated_bytes == pytest.approx(entire.estimate.peak_allocated_bytes, rel=0.01)
    assert np.allclose([s.forward_s for s in same.stages], [s.forward_s for s in entire.estimate.stages], rtol=1e-3)
