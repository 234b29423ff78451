"""The space of each engine: what is enumerated, what rules exclude and why, costs shared between layouts."""

from __future__ import annotations

import contextlib
from dataclasses import fields

import numpy as np
import pytest
from meshwright.cost_models.layer.layer import LayerCost
from meshwright.cost_models.stage.table import CostTable
from meshwright.planner import plan
from meshwright.planner.request import PlanRequest
from meshwright.planner.space import build_narrow_space, build_space
from meshwright.schema import ClusterSpec, ConfigError, Layout, ModelSpec, Workload
from meshwright.schema.engine_facts import ENGINES, PLANNED_ENGINES, require_our_engine
from meshwright.schema.layout_rules import ENGINE_RULES, broken_rules, problem_facts
from meshwright.schema.layout_table import MIXED, RECOMPUTES, LayoutTable, distinct_rows
from meshwright.schema.schedules import OVER_A_V, SCHEDULE_NAMES, SCHEDULES
from meshwright.schema.task import LowRank

LLAMA, MIXTRAL = ModelSpec.named("llama-3.1-8b"), ModelSpec.named("mixtral-8x7b")
NODES = ClusterSpec.parse("2x8xH100-SXM-80GB/ib400")


def workload(engine: str, **changes: object) -> Workload:
    return Workload(**({"seq_len": 4096, "global_batch_size": 64, "engine": engine} | changes))


def test_megatron_space_has_every_axis() -> None:
    batch = build_space(PlanRequest(MIXTRAL, NODES, workload("megatron"))).batch
    for axis, largest in {"tp": 8, "cp": 16, "pp": 16, "ep": 8, "etp": 8, "num_model_chunks": 16}.items():
        assert set(getattr(batch, axis)) >= {1, 2, largest}, axis
    assert set(batch.zero_stage) == {0, 1}
    assert set(batch.recompute) == {0, 1, 2, MIXED}
    assert np.all(
        (batch.recompute == MIXED)
        == ((batch.num_model_chunks == 1) & (batch.cuda_graphs == 0) & (batch.ep_overlap == 0))
    )


@pytest.mark.parametrize("engine", PLANNED_ENGINES)
@pytest.mark.parametrize("spec", [LLAMA, MIXTRAL], ids=lambda spec: spec.name)
def test_every_layout_of_a_space_is_a_valid_one_and_occurs_once(spec: ModelSpec, engine: str) -> None:
    wanted = workload(engine)
    batch = build_space(PlanRequest(spec, NODES, wanted)).batch
    layouts = [batch.layout(idx) for idx in range(0, len(batch), max(len(batch) // 150, 1))]
    for layout in layouts:
        problem = problem_facts(spec, wanted, world_size=16, scaleup_domain=NODES.scaleup_domain)
        assert broken_rules(layout, problem, ENGINE_RULES + ENGINES[engine].rules) == ()
    columns = np.stack([np.asarray(column, dtype=np.float64) for column in batch.columns.values()])
    assert len(np.unique(columns, axis=1).T) == len(batch)


def test_degrees_need_not_be_powers_of_two() -> None:
    batch = build_space(
        PlanRequest(LLAMA, ClusterSpec.parse("3x4xA100-SXM-80GB"), workload("megatron", global_batch_size=60))
    ).batch
    assert {3, 6, 12} <= set(batch.pp)  # 32 blocks do not divide by any of them
    assert {1, 3, 12} <= set(batch.dp_shard)
    assert {3, 5} <= set(batch.micro_batch_size)


def test_chunks_divide_the_blocks_of_a_stage_and_fill_the_pipeline() -> None:
    batch = build_space(PlanRequest(LLAMA, NODES, workload("megatron"))).batch
    chunked = batch.num_model_chunks > 1
    assert np.all(-(-32 // batch.pp[chunked]) % batch.num_model_chunks[chunked] == 0)
    assert np.all(batch.num_microbatches[chunked] % batch.pp[chunked] == 0)
    assert np.all(batch.pp[chunked] > 1)


SCHEDULE_RULES = [
    ({"num_model_chunks": 2, "pp": 2, "schedule": "zb-h2"}, "zb_h2_chunks"),
    ({"pp": 2, "schedule": "zb-h1", "recompute": "full"}, "split_backward_keeps_activations"),
    ({"pp": 2, "num_model_chunks": 1, "schedule": "zb-v"}, "v_schedule_chunks"),
]


@pytest.mark.parametrize(("fixed", "rule"), SCHEDULE_RULES, ids=[rule for _, rule in SCHEDULE_RULES])
def test_schedules_that_are_asked_for_have_their_rules(fixed: dict, rule: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_space(PlanRequest(LLAMA, NODES, workload("fsdp2"), fixed))
    assert f"[{rule}]" in str(error.value)


def test_torch_has_every_named_schedule_and_other_engines_one() -> None:
    found = build_space(
        PlanRequest(LLAMA, ClusterSpec.parse("3x8xH100-SXM-80GB/ib400"), workload("fsdp2"), {"pp": 3})
    ).batch
    split = found.schedule_fact("splits_backward")
    splitting = {s.name for s in SCHEDULES.values() if s.splits_backward and not s.is_given}
    assert {SCHEDULE_NAMES[idx] for idx in found.schedule} >= {"1f1b", *splitting}
    assert np.all((found.recompute[split] == 0) & (found.zero_stage[split] <= 1) & (found.pp[split] > 1))
    folded = np.isin(found.schedule, [v.idx for v in OVER_A_V])
    assert np.all(found.num_model_chunks[folded] == 2)
    assert np.any(found.num_microbatches[folded] % 3)  # a V needs no rounds
    assert {
        SCHEDULE_NAMES[idx] for idx in build_space(PlanRequest(LLAMA, NODES, workload("megatron"))).batch.schedule
    } == {"1f1b"}
    runnable = build_space(PlanRequest(LLAMA, NODES, workload("fsdp2"), runnable=True)).batch
    assert {SCHEDULE_NAMES[idx] for idx in runnable.schedule} >= {"1f1b", "zb-h1", "zb-v", "v-half", "v-min"}


def test_shards_of_other_engines_fill_islands() -> None:
    batch = build_space(PlanRequest(LLAMA, NODES, workload("megatron"), {"tp": 1, "pp": 1, "cp": 1})).batch
    assert set(batch.dp_shard) == {1, 8, 16}
    runnable = build_space(PlanRequest(LLAMA, NODES, workload("fsdp2"), {"tp": 1, "pp": 1}, runnable=True)).batch
    assert set(runnable.dp_shard) == {1, 2, 4, 8, 16}


@pytest.mark.parametrize(
    ("engine", "spec", "fixed", "rule"),
    [
        ("megatron", LLAMA, {"zero_stage": 3}, "megatron_zero_stage"),
        ("megatron", LLAMA, {"ep": 2}, "experts_per_ep"),
        ("megatron", LLAMA, {"pp": 2, "schedule": "gpipe"}, "schedule_of_engine"),
        ("megatron", LLAMA, {"pp": 1, "num_model_chunks": 2}, "interleaved_microbatches"),
        ("megatron", LLAMA, {"pp": 16, "num_model_chunks": 4}, "layers_per_stage"),
        ("megatron", MIXTRAL, {"ep": 3}, "experts_per_ep"),
        ("deepspeed", LLAMA, {"pp": 2, "zero_stage": 3}, "deepspeed_zero_under_pipeline"),
        ("deepspeed", LLAMA, {"cp": 2, "tp": 2}, "deepspeed_exchange"),
        (
            "deepspeed",
            LLAMA,
            {"cp": 2, "cp_ulysses": 2, "pp": 2, "tp": 1, "zero_stage": 1, "num_model_chunks": 1},
            "deepspeed_exchange_without_pipeline",
        ),
        ("megatron", LLAMA, {"cp": 4, "cp_ulysses": 3}, "ulysses_divides_cp"),
        ("megatron", LLAMA, {"cp": 4, "cp_ulysses": 4, "tp": 4}, "heads_per_ulysses"),
        ("deepspeed", MIXTRAL, {"ep": 2}, "deepspeed_axes"),
        ("deepspeed", LLAMA, {"pp": 1, "tp": 1, "cp": 1, "dp_shard": 8, "zero_stage": 1}, "deepspeed_shards_over_all"),
        ("fsdp2", LLAMA, {"recompute_fraction": 0.5}, "recompute_of_all_blocks"),
        ("fsdp2", LLAMA, {"schedule": "zb-h1", "recompute": "full"}, "split_backward_keeps_activations"),
        ("fsdp2", LLAMA, {"schedule": "zb-h2", "num_model_chunks": 2, "pp": 2}, "schedule_in_chunks"),
    ],
)
def test_excluded_requests_name_the_rule(engine: str, spec: ModelSpec, fixed: dict, rule: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_space(PlanRequest(spec, NODES, workload(engine), fixed, runnable=engine == "fsdp2"))
    assert f"[{rule}]" in str(error.value)


def test_split_backward_is_enumerated_without_recomputation_only() -> None:
    batch = build_space(
        PlanRequest(LLAMA, NODES, workload("fsdp2"), {"schedule": "zb-h1", "pp": 2}, runnable=True)
    ).batch
    assert set(batch.recompute) == {RECOMPUTES.index("none")}
    other = build_space(
        PlanRequest(LLAMA, NODES, workload("fsdp2"), {"schedule": "1f1b", "pp": 2}, runnable=True)
    ).batch
    assert set(other.recompute) >= set(range(len(RECOMPUTES)))


def test_rules_count_what_they_exclude() -> None:
    excluded = build_space(PlanRequest(LLAMA, NODES, workload("deepspeed"))).excluded
    assert excluded["deepspeed_zero_under_pipeline"] > 0
    assert excluded.keys() == {rule.name for rule in ENGINE_RULES + ENGINES["deepspeed"].rules}


def test_given_offloading_is_in_every_layout() -> None:
    batch = build_space(
        PlanRequest(LLAMA, NODES, workload("deepspeed"), {"offload": "optimizer", "offload_fraction": 0.5})
    ).batch
    layout = batch.layout(len(batch) // 2)
    assert (layout.offload, layout.offload_fraction) == ("optimizer", 0.5)


def test_engines_without_known_rules_cannot_be_planned_for() -> None:
    with pytest.raises(ConfigError, match="cannot plan for nanotron"):
        plan(LLAMA, NODES, workload("nanotron"))


def test_plans_of_other_engines_are_not_ours() -> None:
    require_our_engine("fsdp2")
    with pytest.raises(ConfigError, match="for megatron"):
        require_our_engine("megatron")


def test_distinct_rows_finds_each_combination_once() -> None:
    columns = [
        np.array([1, 2, 1, 2, 1]),
        np.array([0.5, 0.5, 0.5, 0.25, 0.5]),
        np.array([True, False, True, False, False]),
    ]
    rows, like = distinct_rows(columns)
    assert sorted(rows) == [0, 1, 3, 4]
    for column in columns:
        assert np.array_equal(column[rows][like], column)


def test_distinct_rows_of_large_values_do_not_collide() -> None:
    columns = [np.arange(3) * 2**40 + 1, np.arange(3)[::-1] * 2**40 + 1, np.array([1, 2**40, 1])]
    rows, like = distinct_rows(columns)
    assert len(rows) == 3
    assert np.array_equal(rows[like], np.arange(3))


def test_context_parallelism_needs_fused_attention() -> None:
    space = build_space(PlanRequest(LLAMA, NODES, workload("megatron", attention="math")))
    assert set(space.batch.cp) == {1}
    assert space.excluded["attention_per_cp"] > 0
    with pytest.raises(ConfigError, match="cp") as error:
        build_space(PlanRequest(LLAMA, NODES, workload("megatron", attention="math"), {"cp": 2}))
    assert any("attention_per_cp" in detail for detail in error.value.details)


CHANGES: tuple[dict[str, object], ...] = (
    {},
    {"adapters": LowRank(targets=("qkv", "mlp"), frozen="nf4")},
    {"attention": "math", "precision": "bf16"},
    {"precision": "fp8"},
)


def _neighbours(layout: Layout) -> list[Layout]:
    """Like the layout in everything but one field or two, so that a key without one of them would show."""
    changes: list[dict[str, object]] = [
        {"offload_activations": 0.5},
        {"offload_activations": 0.5, "offload_to": "storage", "offload": "optimizer"},
        {"offload": "parameters", "zero_stage": 3},
        {"recompute": "full", "recompute_fraction": 0.5},
        {"recompute": "selective"},
        {"cuda_graphs": True},
        {"tp_overlap": True},
        {"gradients": "compute"},
        {"sequence_parallel": not layout.sequence_parallel},
        {"zero_stage": 0},
        {"dp_shard": 1, "dp_replicate": 1, "zero_stage": 0},
        {"pp": 3 - min(layout.pp, 2)},
        {"zero_stage": 3, "gradient_shard": layout.dp, "optimizer_shard": layout.dp},
        {"zero_stage": 3, "optimizer_shard": layout.dp},
        {"vocabulary": "split"},
        {"cp_ulysses": layout.cp if layout.cp_ulysses == 1 else 1},
    ]
    neighbours = []
    for change in changes:
        with contextlib.suppress(ConfigError):  # not every layout has every neighbour
            neighbours.append(Layout(**(layout.model_dump() | change)))
    return neighbours


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: "-".join(changes) or "plain")
@pytest.mark.parametrize("engine", [*PLANNED_ENGINES, "nanotron"])
@pytest.mark.parametrize(
    "model",
    [
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("llama-3.1-8b", "mixtral-8x7b")),
        pytest.param("deepseek-v2-lite", marks=pytest.mark.long),
        "gpt2",
    ],
)
def test_costs_shared_between_layouts_are_those_of_each_alone(
    model: str, engine: str, changes: dict[str, object]
) -> None:
    """What distinct cases leave out of their key must not matter."""
    spec = ModelSpec.named(model)
    wanted = workload(engine if engine != "nanotron" else "megatron", seq_len=1024, **changes)
    batch = build_space(PlanRequest(spec, NODES, wanted)).batch
    rows = np.random.default_rng(0).choice(len(batch), size=min(6, len(batch)), replace=False)
    layouts = [batch.layout(int(row)) for row in rows]
    layouts += [neighbour for layout in layouts[:2] for neighbour in _neighbours(layout)]
    batch = LayoutTable.from_layouts(layouts, wanted.global_batch_size)
    wanted = wanted.replace(engine=engine)
    together = CostTable.from_layouts(spec, wanted, NODES, batch)
    alone = [
        CostTable.from_layouts(spec, wanted, NODES, batch.select(np.array([idx]))).by_kind for idx in range(len(batch))
    ]
    for kind, shared in enumerate(together.by_kind):
        for field in fields(LayerCost):
            expected = [getattr(costs[kind], field.name)[0] for costs in alone]
            np.testing.assert_allclose(
                getattr(shared, field.name), expected, rtol=1e-12, atol=1e-18, err_msg=field.name
            )


def test_layout_of_a_megatron_space_reads_back() -> None:
    batch = build_space(PlanRequest(MIXTRAL, NODES, workload("megatron"), {"ep": 4, "etp": 2, "pp": 2})).batch
    layout = batch.layout(0)
    assert isinstance(layout, Layout)
    assert (layout.ep, layout.etp, layout.pp, layout.world_size) == (4, 2, 2, 16)


def test_early_answers_look_at_larger_micro_batches_without_a_pipeline() -> None:
    request = PlanRequest(MIXTRAL, ClusterSpec.parse("256xH100-SXM-80GB"), workload("fsdp2", global_batch_size=1024))
    narrow = build_narrow_space(request)
    assert narrow is not None
    layouts = narrow.batch
    larger = layouts.micro_batch_size > 1
    assert larger.any()
    assert np.all(layouts.pp[larger] * layouts.tp[larger] == 1)
