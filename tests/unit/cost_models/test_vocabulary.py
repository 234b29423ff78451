"""Embedding and head split over the stages of a pipeline: nothing is lost, stages are equal, bounds hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.cost_models.stage.bounds import memory_bounds, quick_time_bounds, uniform_time_bounds
from meshwright.cost_models.stage.table import CostTable
from meshwright.planner import estimate, not_executed
from meshwright.planner.expand import expand
from meshwright.planner.request import PlanRequest
from meshwright.planner.space import build_space
from meshwright.schema import ClusterSpec, ConfigError, Layout, ModelSpec, Workload
from meshwright.schema.engine_facts import PLANNED_ENGINES
from meshwright.schema.layout_table import LayoutTable

GEMMA, QWEN = ModelSpec.named("gemma-2-9b"), ModelSpec.named("qwen2.5-7b")
NODES = ClusterSpec.parse("4x8xH100-SXM-80GB/ib400")
WORKLOAD = Workload(seq_len=4096, global_batch_size=256, engine="megatron")
SPLIT = Layout(tp=2, pp=4, dp_shard=4, zero_stage=1, vocabulary="split")


def costs_of(spec: ModelSpec, *layouts: Layout, engine: str = "megatron") -> CostTable:
    workload = WORKLOAD.replace(engine=engine)
    return CostTable.from_layouts(
        spec, workload, NODES, LayoutTable.from_layouts(list(layouts), workload.global_batch_size)
    )


@pytest.mark.parametrize("spec", [GEMMA, QWEN], ids=lambda spec: spec.name)
def test_stages_hold_the_vocabulary_once(spec: ModelSpec) -> None:
    """Shares of all stages are the embedding and the projection; tied ones are held once and not copied."""
    share = costs_of(spec, SPLIT).vocabulary
    assert share is not None
    held = share.total("num_params")[0] * SPLIT.pp * SPLIT.tp
    matrices = (1 if spec.tie_embeddings else 2) * spec.vocab_size * spec.hidden_dim
    assert held == pytest.approx(matrices, rel=1e-3)  # the norm is on every rank
    assert share.logits[0] == pytest.approx(2 * 4096 * spec.vocab_size / SPLIT.pp / SPLIT.tp, rel=1e-3)


def test_stages_differ_in_blocks_alone() -> None:
    """Eight stages of four blocks: equal, where the last one would have a head of many blocks' work."""
    embedding, blocks, head = QWEN.layers
    spec = QWEN.replace(layers=(embedding, blocks.replace(count=32), head))
    split = SPLIT.replace(pp=8, dp_shard=2)
    at_ends, shared = (estimate(spec, NODES, WORKLOAD, layout) for layout in (split.replace(vocabulary="ends"), split))
    seconds = [stage.forward_s + stage.backward_s for stage in shared.stages]
    assert seconds == pytest.approx([seconds[0]] * 8)
    assert shared.step_time_s < at_ends.step_time_s
    assert shared.breakdown_s.total == pytest.approx(shared.step_time_s)


def test_barrier_keeps_one_more_micro_batch() -> None:
    at_ends, shared = (estimate(GEMMA, NODES, WORKLOAD, layout) for layout in (SPLIT.replace(vocabulary="ends"), SPLIT))
    assert shared.stages[0].memory_bytes.activations > at_ends.stages[0].memory_bytes.activations
    # Optimizer states of the vocabulary are no longer those of two stages alone.
    spread = [max(s.memory_bytes.optimizer for s in e.stages) - min(s.memory_bytes.optimizer for s in e.stages)
              for e in (at_ends, shared)]  # fmt: skip
    assert spread[1] < spread[0]


def test_layouts_at_the_ends_are_not_touched_by_others_that_split() -> None:
    ends = SPLIT.replace(vocabulary="ends")
    alone, together = costs_of(GEMMA, ends), costs_of(GEMMA, SPLIT, ends)
    one, other = expand(alone, 0).estimate, expand(together, 1).estimate
    assert one.memory_bytes == other.memory_bytes
    assert one.step_time_s == pytest.approx(other.step_time_s, rel=1e-12)  # sums over kinds round
    for bounds_of in (uniform_time_bounds, memory_bounds):
        bound, bounds = bounds_of(alone), bounds_of(together)
        assert bound[0] == pytest.approx(bounds[1], rel=1e-12)


@st.composite
def split_layouts(draw: st.DrawFn) -> Layout:
    """A layout of 32 ranks that splits the vocabulary."""
    tp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([2, 4, 8]))
    dp = 32 // tp // pp
    shard = draw(st.sampled_from([d for d in (1, 2, 4, 8, 16) if dp % d == 0]))
    return Layout(
        tp=tp,
        pp=pp,
        dp_shard=shard,
        dp_replicate=dp // shard,
        zero_stage=draw(st.sampled_from([1, 2, 3])) if shard > 1 else 0,
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        micro_batch_size=draw(st.sampled_from([1, 2])),
        vocabulary="split",
    )


@settings(max_examples=30, deadline=None)
@given(split_layouts(), st.sampled_from([*PLANNED_ENGINES, "nanotron"]), st.sampled_from([GEMMA, QWEN]))
def test_bounds_hold_where_the_vocabulary_is_split(layout: Layout, engine: str, spec: ModelSpec) -> None:
    costs = costs_of(spec, layout, engine=engine)
    bound_s, bound_bytes = uniform_time_bounds(costs), memory_bounds(costs)
    found = expand(costs, 0).estimate
    assert np.isfinite(bound_s[0])
    assert quick_time_bounds(costs)[0] <= bound_s[0] * (1 + 1e-9)
    assert bound_s[0] <= found.step_time_s * (1 + 1e-9)
    assert bound_bytes[0] <= found.peak_allocated_bytes + 16  # parts are whole bytes


@pytest.mark.parametrize("engine", PLANNED_ENGINES)
def test_no_engine_executes_it_and_says_so(engine: str) -> None:
    workload = WORKLOAD.replace(engine=engine)
    assert any("[vocabulary_at_ends]" in reason for reason in not_executed(GEMMA, NODES, workload, SPLIT))
    with pytest.raises(ConfigError) as error:
        build_space(PlanRequest(GEMMA, NODES, workload, {"vocabulary": "split"}))
    assert "[vocabulary_at_ends]" in str(error.value)
    assert set(build_space(PlanRequest(GEMMA, NODES, workload)).batch.vocabulary) == {0}


@pytest.mark.parametrize(
    "layout",
    [Layout(dp_shard=32, vocabulary="split"), SPLIT.replace(num_model_chunks=2), SPLIT.replace(schedule="gpipe")],
)
def test_only_known_schedules_split_it(layout: Layout) -> None:
    with pytest.raises(ConfigError) as error:
        estimate(GEMMA, NODES, WORKLOAD, layout)
    assert any("[vocabulary_over_stages]" in detail for detail in error.value.details)


def test_layouts_say_their_vocabulary() -> None:
    assert Layout.parse("pp=4,vocabulary=split").vocabulary == "split"
    assert "vocabulary=split" in str(SPLIT)
    assert LayoutTable.from_layouts([SPLIT], 256).layout(0) == SPLIT
    assert Layout.model_validate(SPLIT.model_dump(exclude={"vocabulary"})).vocabulary == "ends"
