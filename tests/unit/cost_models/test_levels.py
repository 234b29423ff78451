"""Parameters, gradients and optimizer states each sharded at a level of its own: what each level sends and holds."""

from __future__ import annotations

import numpy as np
import pytest
from cost_cases import layer_cost
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.cost_models.hardware.collectives import collective_s
from meshwright.cost_models.layer.layer import LayerCost
from meshwright.cost_models.stage.bounds import memory_bounds, uniform_time_bounds
from meshwright.cost_models.stage.table import CostTable
from meshwright.planner import estimate, not_executed
from meshwright.planner.expand import expand
from meshwright.planner.request import PlanRequest
from meshwright.planner.space import build_space
from meshwright.schema import ClusterSpec, ConfigError, Layout, ModelSpec, Workload
from meshwright.schema.layout_rules import FSDP2_RULES, broken_rules, problem_facts
from meshwright.schema.layout_table import LayoutTable

LLAMA, MIXTRAL = ModelSpec.named("llama-3.1-8b"), ModelSpec.named("mixtral-8x7b")
BLOCK = LLAMA.block_runs[0][0]
NODES = ClusterSpec.parse("8x8xA100-SXM-80GB/eth25")
WORKLOAD = Workload(seq_len=4096, global_batch_size=128)
ENGINES = ("fsdp2", "deepspeed", "megatron", "internevo", "nanotron")


def cost_of(layout: Layout, engine: str) -> LayerCost:
    workload = WORKLOAD.replace(engine=engine)
    return layer_cost(BLOCK, LLAMA.hidden_dim, LayoutTable.from_layouts([layout], 128), workload, NODES)


def seconds(op: str, size: float, group: int, stride: int = 1) -> float:
    return float(collective_s(op, size, np.array([group]), np.array([stride]), NODES)[0])


def three_levels(**fields: int) -> Layout:
    return Layout(
        **({"dp_shard": 4, "dp_replicate": 16, "gradient_shard": 8, "optimizer_shard": 64, "zero_stage": 3} | fields)
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("stage", [2, 3])
def test_equal_levels_are_one_level(engine: str, stage: int) -> None:
    layout = Layout(dp_shard=8, dp_replicate=8, zero_stage=stage)
    same = layout.replace(optimizer_shard=8, gradient_shard=8 if stage == 3 else 1)
    workload = WORKLOAD.replace(engine=engine)
    assert estimate(LLAMA, NODES, workload, same) == estimate(LLAMA, NODES, workload, layout)


def test_layouts_with_levels_survive_a_batch_text_and_documents() -> None:
    layout = three_levels()
    assert LayoutTable.from_layouts([layout], 128).layout(0) == layout
    assert "dp_shard=4" in str(layout)
    assert "zero=3 gradient_shard=8 optimizer_shard=64" in str(layout)
    old = Layout(dp_shard=8).model_dump(exclude={"gradient_shard", "optimizer_shard"})
    assert Layout.model_validate(old) == Layout(dp_shard=8)


@pytest.mark.parametrize(
    "layout",
    [
        three_levels(gradient_shard=6),
        three_levels(optimizer_shard=12),
        three_levels(gradient_shard=16, optimizer_shard=8),
        Layout(dp_shard=8, dp_replicate=8, zero_stage=2, gradient_shard=16),
        Layout(dp_shard=8, dp_replicate=8, zero_stage=1, optimizer_shard=64),
    ],
)
def test_shards_that_do_not_nest_name_the_rule(layout: Layout) -> None:
    with pytest.raises(ConfigError) as error:
        estimate(LLAMA, NODES, WORKLOAD, layout)
    assert any("[nested_shards]" in detail for detail in error.value.details)


def test_second_partition_serves_the_backward_pass_of_our_engine_and_of_deepspeed() -> None:
    """ZeRO++ (arXiv:2306.10209 section 3.2), reshard_after_forward=8: forward over all 64 ranks, backward within the node."""
    layout = three_levels(dp_shard=8, dp_replicate=8, gradient_shard=64)
    for engine in ("fsdp2", "deepspeed"):
        cost = cost_of(layout, engine)
        size = float(cost.num_params[0]) * 2
        assert cost.gather_s[0] == pytest.approx(seconds("all_gather", size, 64))
        assert cost.regather_s[0] == pytest.approx(seconds("all_gather", size, 8))
        assert cost.reduce_s[0] == pytest.approx(
            seconds("reduce_scatter", float(cost.num_params[0]) * WORKLOAD.replace(engine=engine).master_bytes, 64)
        )
        assert cost.levels_s[0] == 0


def test_three_levels_cross_each_link_once_a_step() -> None:
    """Passes gather within 4 and reduce within 8 ranks; once a step gradients go on to 64, and parameters come back to 4."""
    cost, workload = cost_of(three_levels(), "internevo"), WORKLOAD.replace(engine="internevo")
    size = float(cost.num_params[0])
    reduced = size * workload.master_bytes
    assert cost.gather_s[0] == cost.regather_s[0] == pytest.approx(seconds("all_gather", 2 * size, 4))
    assert cost.reduce_s[0] == pytest.approx(seconds("reduce_scatter", reduced, 8))
    onward = seconds("reduce_scatter", reduced / 8, 8, stride=8)
    back = seconds("all_gather", 2 * size / 4, 16, stride=4)
    assert cost.levels_s[0] == pytest.approx(onward + back)


def test_islands_are_summed_once_a_step_by_mics() -> None:
    """MiCS (arXiv:2205.00119 section 3.4) sums over islands when micro-batches have been added up, fully_shard after each."""
    layout = Layout(dp_shard=8, dp_replicate=8, zero_stage=3)
    ours, theirs = cost_of(layout, "fsdp2"), cost_of(layout, "deepspeed")
    shard = float(ours.num_params[0]) * WORKLOAD.replace(engine="deepspeed").master_bytes / 8
    assert theirs.levels_s[0] == pytest.approx(seconds("all_reduce", shard, 8, stride=8))
    assert ours.levels_s[0] == 0
    assert ours.reduce_s[0] > theirs.reduce_s[0]


def test_bytes_follow_the_level_of_each_state() -> None:
    """P bf16 parameters over 4 ranks, gradients over 8, 12 bytes of fp32 masters and AdamW over 64."""
    workload, size = WORKLOAD.replace(engine="internevo"), LLAMA.num_params
    found = estimate(LLAMA, NODES, workload, three_levels(recompute="full")).memory_bytes
    assert found.parameters + found.optimizer == pytest.approx(12 * size / 64, rel=1e-6)
    assert found.gradients == pytest.approx(workload.master_bytes * size / 8, rel=1e-6)
    alone = estimate(
        LLAMA, NODES, workload, Layout(dp_shard=4, dp_replicate=16, zero_stage=3, recompute="full")
    ).memory_bytes
    assert found.unsharded == pytest.approx(alone.unsharded, rel=1e-6)


def test_whole_parameters_may_have_their_states_sharded_over_more_ranks_than_gradients() -> None:
    workload = WORKLOAD.replace(engine="internevo")
    narrow = Layout(dp_shard=8, dp_replicate=8, zero_stage=2, recompute="full")
    before, after = (
        estimate(LLAMA, NODES, workload, layout).memory_bytes for layout in (narrow, narrow.replace(optimizer_shard=64))
    )
    assert after.optimizer == pytest.approx(before.optimizer / 8, rel=1e-6)
    assert (after.gradients, after.unsharded) == (before.gradients, before.unsharded)


DIVISORS = st.sampled_from([1, 2, 4])


@st.composite
def nested(draw: st.DrawFn) -> Layout:
    """A layout of 64 ranks whose levels nest."""
    tp, pp, cp = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    shard, wider, widest = draw(st.sampled_from([2, 4, 8])), draw(DIVISORS), draw(DIVISORS)
    dp = 64 // (tp * pp * cp)
    stage = draw(st.sampled_from([2, 3]))
    gradients = min(shard * wider, dp)
    return Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        cp_ulysses=draw(st.sampled_from([1, cp])),
        dp_shard=shard,
        dp_replicate=dp // shard,
        zero_stage=stage,
        gradient_shard=gradients if stage == 3 else 1,
        optimizer_shard=min((gradients if stage == 3 else shard) * widest, dp),
        ep=draw(st.sampled_from([1, 2, 8])),
        sequence_parallel=tp > 1,
        recompute=draw(st.sampled_from(["none", "full"])),
    )


@settings(max_examples=40, deadline=None)
@given(nested(), st.sampled_from(ENGINES))
def test_bounds_hold_on_random_levels(layout: Layout, engine: str) -> None:
    workload = WORKLOAD.replace(engine=engine)
    costs = CostTable.from_layouts(
        MIXTRAL, workload, NODES, LayoutTable.from_layouts([layout], workload.global_batch_size)
    )
    bound_s, bound_bytes = uniform_time_bounds(costs), memory_bounds(costs)
    found = expand(costs, 0).estimate
    assert bound_s[0] <= found.step_time_s * (1 + 1e-9)
    assert bound_bytes[0] <= found.peak_allocated_bytes + 16  # parts are whole bytes
    assert found.breakdown_s.total == pytest.approx(found.step_time_s)


@settings(max_examples=40, deadline=None)
@given(nested(), st.sampled_from(ENGINES))
def test_states_over_more_ranks_never_need_more_memory(layout: Layout, engine: str) -> None:
    workload, dp = WORKLOAD.replace(engine=engine), layout.dp
    wider = layout.replace(optimizer_shard=dp)
    narrow_bytes, wide_bytes = (estimate(MIXTRAL, NODES, workload, one).peak_allocated_bytes for one in (layout, wider))
    # Parameters that stay within fewer ranks than their states are a copy of their own: the first step down may cost that
    # copy, but AdamW's states and fp32 masters weigh more.
    assert wide_bytes <= narrow_bytes + 16


@settings(max_examples=40, deadline=None)
@given(nested())
def test_levels_of_experts_nest_and_fill_their_copies(layout: Layout) -> None:
    batch = LayoutTable.from_layouts([layout], 128)
    levels = [int(v[0]) for v in (batch.expert_shards, batch.expert_gradient_shards, batch.expert_optimizer_shards)]
    copies = int((batch.stage_ranks // (batch.ep * batch.expert_tp))[0])
    assert levels[1] % levels[0] == 0
    assert levels[2] % levels[1] == 0
    assert copies % levels[2] == 0


def test_the_space_has_levels_where_an_engine_runs_them() -> None:
    for engine in ("fsdp2", "deepspeed"):
        batch = build_space(
            PlanRequest(LLAMA, NODES, WORKLOAD.replace(engine=engine), {"tp": 1, "cp": 1, "pp": 1})
        ).batch
        columns = np.stack([batch.dp_shard, batch.gradient_shard, batch.optimizer_shard], axis=1)
        levels = {tuple(row) for row in columns.tolist()}
        assert (8, 64, 64) in levels
        assert ((8, 1, 1) in levels) == (engine == "fsdp2")  # islands: HSDP; DeepSpeed has no MiCS any more
        assert all(g == o for _, g, o in levels)
    for changes in ({"engine": "megatron"}, {"engine": "fsdp2", "runnable": True}):
        runnable = bool(changes.pop("runnable", False))
        batch = build_space(PlanRequest(LLAMA, NODES, WORKLOAD.replace(**changes), runnable=runnable)).batch
        assert set(batch.optimizer_shard) == set(batch.gradient_shard) == {1}


def test_what_torch_and_this_version_lack_is_named() -> None:
    problem = problem_facts(LLAMA, WORKLOAD, world_size=64, scaleup_domain=8)
    assert any("[levels_of_fully_shard]" in reason for reason in broken_rules(three_levels(), problem, FSDP2_RULES))
    second = three_levels(dp_shard=8, dp_replicate=8, gradient_shard=64)
    assert broken_rules(second, problem, FSDP2_RULES) == ()
    assert any("[levels_of_this_version]" in reason for reason in not_executed(LLAMA, NODES, WORKLOAD, second))


@pytest.mark.parametrize(("dp_shard", "cp", "is_refused"), [(4096, 1, False), (8192, 1, True), (4096, 2, True)])
def test_more_shards_than_the_hidden_width_are_refused(dp_shard: int, cp: int, is_refused: bool) -> None:
    many = ClusterSpec.parse("1024x8xA100-SXM-80GB/eth25")
    layout = Layout(dp_shard=dp_shard, cp=cp, dp_replicate=8192 // dp_shard // cp, zero_stage=3)
    reasons = not_executed(LLAMA, many, WORKLOAD.replace(global_batch_size=8192), layout)
    assert any("[shards_of_matrices]" in reason for reason in reasons) == is_refused


def test_given_levels_are_kept() -> None:
    fixed = {"dp_shard": 8, "optimizer_shard": 64, "tp": 1, "pp": 1, "cp": 1}
    batch = build_space(PlanRequest(LLAMA, NODES, WORKLOAD, fixed)).batch
    assert {(int(batch.gradient_shard[i]), int(batch.optimizer_shard[i])) for i in range(len(batch))} == {(64, 64)}
    with pytest.raises(ConfigError) as error:
        build_space(PlanRequest(LLAMA, NODES, WORKLOAD.replace(engine="megatron"), fixed))
    assert "[nested_shards]" in str(error.value)
