"""The step model: parts sum to the whole, bounds are bounds, and hand arithmetic holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.cost_models.layer.operators import attended_tokens
from meshwright.cost_models.pipeline.in_flight import in_flight_of_stage
from meshwright.cost_models.pipeline.replay import pipelined_s
from meshwright.cost_models.stage.bounds import memory_bounds, uniform_time_bounds
from meshwright.cost_models.stage.step import model_flops_per_token
from meshwright.cost_models.stage.table import CostTable
from meshwright.planner import estimate
from meshwright.planner.expand import expand
from meshwright.planner.request import PlanRequest
from meshwright.planner.space import build_space
from meshwright.schema import Calibration, ClusterSpec, Layout, ModelSpec, Workload
from meshwright.schema.layout_table import LayoutTable
from meshwright.schema.task import LowRank

CASES = [
    ("smollm2-135m", "8xA100-SXM-80GB", 64, 2048),
    ("llama-3.1-8b", "16xH100-SXM-80GB", 64, 4096),
    ("mixtral-8x7b", "32xA100-SXM-80GB", 64, 4096),
    ("gpt3-175b", "64xA100-SXM-80GB", 64, 2048),
]


@pytest.mark.parametrize("recompute", ["", "selective"])
@pytest.mark.parametrize(("model", "cluster", "batch", "seq_len"), CASES)
def test_bounds_never_exceed_the_expanded_cost(
    model: str, cluster: str, batch: int, seq_len: int, recompute: str
) -> None:
    spec, machine = ModelSpec.named(model), ClusterSpec.parse(cluster)
    workload = Workload(seq_len=seq_len, global_batch_size=batch)
    fixed = {"recompute": recompute} if recompute else {}
    space = build_space(PlanRequest(spec, machine, workload, fixed))
    costs = CostTable.from_layouts(spec, workload, machine, space.batch)
    bound_s, bound_bytes = uniform_time_bounds(costs), memory_bounds(costs)
    for idx in np.random.default_rng(0).choice(len(space.batch), size=min(30, len(space.batch)), replace=False):
        found = expand(costs, int(idx)).estimate
        # A bound on blocks that choose counts what they must recompute to fit.
        assert bound_s[idx] <= found.step_time_s * (1 + 1e-9) or (not recompute and not found.fits)
        assert bound_bytes[idx] <= found.peak_allocated_bytes + 16  # whole bytes of seven parts
        if recompute and space.batch.pp[idx] == 1:
            assert bound_s[idx] == pytest.approx(found.step_time_s, rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4]),
    micro=st.sampled_from([1, 2]),
    recompute=st.sampled_from(["none", "selective", "full"]),
)
def test_parts_sum_to_the_whole(tp: int, pp: int, micro: int, recompute: str) -> None:
    layout = Layout(tp=tp, pp=pp, dp_shard=32 // tp // pp, micro_batch_size=micro, recompute=recompute)
    workload = Workload(seq_len=4096, global_batch_size=512)
    found = estimate(ModelSpec.named("llama-3.1-8b"), ClusterSpec.parse("32xH100-SXM-80GB"), workload, layout)
    assert found.breakdown_s.total == pytest.approx(found.step_time_s, rel=1e-12)
    assert found.memory_bytes.total == found.peak_allocated_bytes
    assert max(stage.memory_bytes.total for stage in found.stages) == found.peak_allocated_bytes
    assert found.tokens_per_s == pytest.approx(512 * 4096 / found.step_time_s)
    assert found.step_time_interval_s.low <= found.step_time_s <= found.step_time_interval_s.high


def test_states_equal_hand_arithmetic() -> None:
    """zero 3 over 8 ranks: 4 B parameters, 4 B gradients, 8 B AdamW states per parameter, an eighth of each."""
    spec = ModelSpec.named("llama-3.1-8b")
    workload = Workload(seq_len=4096, global_batch_size=64)
    found = estimate(spec, ClusterSpec.parse("8xH100-SXM-80GB"), workload, Layout(dp_shard=8, recompute="full"))
    parts = found.memory_bytes
    assert (parts.parameters, parts.gradients, parts.optimizer) == pytest.approx(
        (spec.num_params / 2, spec.num_params / 2, spec.num_params), rel=1e-6
    )


def test_tensor_parallel_divides_states() -> None:
    spec = ModelSpec.named("llama-3.1-8b")
    workload = Workload(seq_len=4096, global_batch_size=64)
    found = estimate(spec, ClusterSpec.parse("8xH100-SXM-80GB"), workload, Layout(tp=8))
    norms = (2 * 32 + 1) * 4096
    expected = 4 * ((spec.num_params - norms) / 8 + norms)
    assert found.memory_bytes.parameters == pytest.approx(expected, rel=1e-9)


def test_tied_embedding_is_held_twice_under_a_pipeline() -> None:
    spec = ModelSpec.named("smollm2-135m")
    assert spec.tie_embeddings
    workload = Workload(seq_len=2048, global_batch_size=64)
    found = estimate(spec, ClusterSpec.parse("2xA100-SXM-80GB"), workload, Layout(pp=2))
    held = sum(stage.memory_bytes.parameters for stage in found.stages)
    assert held == pytest.approx(4 * (spec.num_params + spec.vocab_size * spec.hidden_dim), rel=1e-9)


def test_flops_follow_six_n() -> None:
    """6 FLOPs per weight of a product and token, plus causal attention once: forward 2*2*s/2*D, backward twice that."""
    spec = ModelSpec.named("llama-2-7b")
    layers = tuple((run.layer, run.count) for run in spec.layers)
    products = spec.num_params - spec.vocab_size * spec.hidden_dim - (2 * 32 + 1) * 4096
    attention = 32 * 3 * 4 * 4096 * attended_tokens(4096, None)
    assert model_flops_per_token(layers, spec.hidden_dim, 4096) == pytest.approx(6 * products + attention, rel=1e-12)


@pytest.mark.parametrize(("seq_len", "window"), [(16, None), (16, 4), (7, 16), (5, 1), (10, 4)])
def test_attended_tokens_equals_a_count(seq_len: int, window: int | None) -> None:
    sliding = sum(min(i + 1, window or seq_len) for i in range(seq_len)) / seq_len
    chunked = sum(i % (window or seq_len) + 1 for i in range(seq_len)) / seq_len
    assert attended_tokens(seq_len, window) == pytest.approx(sliding)
    assert attended_tokens(seq_len, window, chunked=True) == pytest.approx(chunked)


def test_recompute_trades_memory_for_time() -> None:
    spec, machine = ModelSpec.named("llama-3.1-8b"), ClusterSpec.parse("8xH100-SXM-80GB")
    workload = Workload(seq_len=4096, global_batch_size=64)
    found = [estimate(spec, machine, workload, Layout(dp_shard=8, recompute=r)) for r in ("none", "selective", "full")]
    times = [e.step_time_s for e in found]
    activations = [e.memory_bytes.activations for e in found]
    assert times == sorted(times)
    assert times[2] > 1.15 * times[0]
    assert activations == sorted(activations, reverse=True)


def test_gradients_of_weights_are_a_part_of_the_backward_pass() -> None:
    """Products have them, attention and norms do not; a frozen model has none but its adapters'."""
    machine, layout = ClusterSpec.parse("8xH100-SXM-80GB"), Layout(dp_shard=8)
    spec, workload = ModelSpec.named("llama-3.1-8b"), Workload(seq_len=4096, global_batch_size=64)
    frozen = workload.replace(adapters=LowRank(targets=("qkv", "mlp"), frozen="16-bit"))
    parts = []
    for wanted in (workload, frozen):
        costs = CostTable.from_layouts(spec, wanted, machine, LayoutTable.from_layouts([layout], 64))
        block = costs.by_case[1]
        parts.append(float(block.weight_s[0] / block.backward_s[0]))
    assert 0.3 < parts[0] < 0.5
    assert 0 < parts[1] < 0.1


def test_in_flight_microbatches() -> None:
    assert in_flight_of_stage(1, 8, 4, np.arange(4)).tolist() == [4, 3, 2, 1]
    assert in_flight_of_stage(1, 2, 4, np.arange(4)).tolist() == [2, 2, 2, 1]
    assert in_flight_of_stage(0, 8, 4, np.arange(4)).tolist() == [8, 8, 8, 8]


def test_pipeline_bubble_is_the_textbook_one() -> None:
    """Equal stages wait (pp - 1) / m of their busy time, sums of gradients included; the head makes ours a little unequal."""
    spec, machine = ModelSpec.named("llama-3.1-70b"), ClusterSpec.parse("32xH100-SXM-80GB")
    workload = Workload(seq_len=4096, global_batch_size=64)
    found = estimate(spec, machine, workload, Layout(tp=8, pp=4, recompute="full"))
    parts = found.breakdown_s
    busy = parts.compute + parts.recompute + parts.tp + parts.pp
    assert parts.bubble / busy == pytest.approx(3 / 64, rel=0.05)


def test_required_bytes_decide_and_the_interval_holds_the_prediction() -> None:
    spec, workload = ModelSpec.named("llama-3.1-8b"), Workload(seq_len=4096, global_batch_size=64)
    machine = ClusterSpec.parse("8xH100-SXM-80GB")
    found = estimate(spec, machine, workload, Layout(dp_shard=8))
    assert found.budget_bytes == machine.weakest_device.memory_bytes - machine.reserved_bytes
    assert found.fits == (found.required_bytes <= found.budget_bytes)
    assert found.peak_allocated_bytes <= found.required_bytes
    assert found.memory_interval_bytes.low < found.peak_allocated_bytes < found.memory_interval_bytes.high


def test_interleaving_divides_the_bubble_and_keeps_more_in_flight() -> None:
    """Narayanan et al., arXiv:2104.04473 section 2.2: the bubble is (pp - 1) / (m v); Megatron's warm-up counts."""
    stages = np.full(4, 2.0)
    assert pipelined_s(stages, 8, 1) == pytest.approx((8 + 3) * 2.0)
    assert pipelined_s(stages, 8, 2) == pytest.approx((8 + 3 / 2) * 2.0)
    # pp 4, 2 chunks: 2 * (4 - s - 1) + 4 + 1 chunk passes warm up stage s
    assert in_flight_of_stage(1, 64, 4, np.arange(4), 2).tolist() == [5.5, 4.5, 3.5, 2.5]


def test_engines_differ_in_what_they_hold() -> None:
    """Megatron holds one whole fp32 gradient buffer below zero 2 and its bf16 parameters: 2 P + 4 P + 12 P / N."""
    spec, machine = ModelSpec.named("llama-3.1-8b"), ClusterSpec.parse("8xH100-SXM-80GB")
    workload = Workload(seq_len=4096, global_batch_size=8)
    layout = Layout(dp_shard=8, zero_stage=1, recompute="full")
    ours = estimate(spec, machine, workload, layout).memory_bytes
    theirs = estimate(spec, machine, workload.replace(engine="megatron"), layout).memory_bytes
    assert theirs.gradients == pytest.approx(4 * spec.num_params, rel=1e-6)
    assert theirs.unsharded == pytest.approx(2 * spec.num_params, rel=1e-6)
    assert theirs.parameters + theirs.optimizer == pytest.approx(12 * spec.num_params / 8, rel=1e-6)
    assert ours.gradients < theirs.gradients


def test_unfused_attention_costs_time_and_memory() -> None:
    spec, machine = ModelSpec.named("gpt2-xl"), ClusterSpec.parse("8xA100-SXM-80GB")
    workload = Workload(seq_len=1024, global_batch_size=64)
    fused = estimate(spec, machine, workload, Layout(dp_replicate=8))
    unfused = estimate(spec, machine, workload.replace(attention="math"), Layout(dp_replicate=8))
    assert unfused.step_time_s > fused.step_time_s
    assert unfused.memory_bytes.activations > fused.memory_bytes.activations


def test_calibrated_activations_are_as_many_times_as_large() -> None:
    cluster, model = ClusterSpec.parse("8xA100-SXM-80GB"), ModelSpec.named("llama-3.2-1b")
    workload, layout = Workload(seq_len=2048, global_batch_size=32), Layout(dp_shard=8, micro_batch_size=4)
    plain, more = (
        estimate(model, cluster.replace(calibration=Calibration(activations=ratio)), workload, layout).memory_bytes
        for ratio in (1.0, 1.25)
    )
    assert more.activations == pytest.approx(1.25 * plain.activations)
    assert more.replace(activations=plain.activations) == plain
