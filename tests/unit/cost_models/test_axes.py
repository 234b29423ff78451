"""Context and expert parallelism: what they leave the same, what they divide, what they send."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cost_cases import cost_inputs, layer_cost
from meshwright.cost_models.layer.context import ring_attention
from meshwright.cost_models.layer.operators import CostInputs, FusedAttention
from meshwright.cost_models.layer.parallel import (
    dispatch_s,
    expected_distinct,
    expert_params,
    token_share,
)
from meshwright.cost_models.stage.bounds import memory_bounds, uniform_time_bounds
from meshwright.cost_models.stage.table import CostTable
from meshwright.planner import estimate, not_executed
from meshwright.planner.expand import expand
from meshwright.schema import ClusterSpec, ConfigError, Layout, ModelSpec, Workload
from meshwright.schema.layers import MoE
from meshwright.schema.layout_table import LayoutTable
from meshwright.schema.units import GIB

MIXTRAL = ModelSpec.named("mixtral-8x7b")
BLOCK = MIXTRAL.block_runs[0][0]
NODE, NODES = ClusterSpec.parse("8xH100-SXM-80GB"), ClusterSpec.parse("32xH100-SXM-80GB")
WORKLOAD = Workload(seq_len=4096, global_batch_size=64, engine="megatron")


def batch_of(*layouts: Layout, global_batch_size: int = 64) -> LayoutTable:
    return LayoutTable.from_layouts(list(layouts), global_batch_size)


def setting_of(model: ModelSpec, batch: LayoutTable, workload: Workload, cluster: ClusterSpec) -> CostInputs:
    return cost_inputs(model.hidden_dim, batch, workload, cluster)


def test_layouts_survive_a_batch() -> None:
    layout = Layout(dp_shard=4, cp=2, tp=2, pp=2, ep=4, etp=2, zero_stage=1, num_model_chunks=2)
    batch = batch_of(layout)
    assert batch.layout(0) == layout
    assert (batch.stage_ranks[0], batch.num_shards[0], batch.num_replicas[0]) == (16, 8, 1)
    assert (batch.expert_tp[0], batch.expert_shards[0], batch.expert_replicas[0]) == (2, 2, 1)


def test_context_ranks_share_in_the_sharding_or_replicate() -> None:
    sharded, whole = Layout(cp=4, zero_stage=1), Layout(cp=4, dp_replicate=2, zero_stage=0)
    batch = batch_of(sharded, whole)
    assert batch.num_shards.tolist() == [4, 1]
    assert batch.num_replicas.tolist() == [1, 8]


def test_experts_without_axes_are_experts_over_tp() -> None:
    """ep = etp = 1 and etp = tp are the same; nothing is sent to experts."""
    layouts = [Layout(dp_shard=2, tp=4, etp=etp, zero_stage=1) for etp in (1, 4)]
    first, second = (estimate(MIXTRAL, NODE, WORKLOAD, layout) for layout in layouts)
    assert first == second
    assert first.breakdown_s.ep == 0


@pytest.mark.parametrize(("ep", "etp"), [(1, 4), (2, 1), (4, 2), (8, 1), (8, 4)])
def test_experts_are_held_once_over_their_group(ep: int, etp: int) -> None:
    batch = batch_of(Layout(dp_shard=8, tp=4, ep=ep, etp=etp, zero_stage=1))
    assert isinstance(BLOCK.mlp, MoE)
    held = expert_params(BLOCK, MIXTRAL.hidden_dim, batch)[0] * ep * etp
    assert held == pytest.approx(BLOCK.mlp.num_experts * BLOCK.mlp.expert.num_params(MIXTRAL.hidden_dim))
    cost = layer_cost(BLOCK, MIXTRAL.hidden_dim, batch, WORKLOAD, NODES)
    whole = (2 + BLOCK.mlp.num_experts) * MIXTRAL.hidden_dim  # norms and router
    dense = (BLOCK.num_params(MIXTRAL.hidden_dim) - held - whole) / 4 + whole
    assert cost.num_params[0] - cost.expert_params[0] == pytest.approx(dense)


@pytest.mark.parametrize(("tp", "ep", "etp"), [(1, 8, 1), (4, 4, 2), (4, 8, 1), (2, 8, 2)])
def test_expert_work_is_conserved(tp: int, ep: int, etp: int) -> None:
    """Rows of a rank times its part of an expert, over all ranks: top_k rows a token, whatever the axes."""
    batch = batch_of(Layout(dp_shard=32 // tp, tp=tp, ep=ep, etp=etp, zero_stage=1))
    rows = batch.tokens(4096) * token_share(batch, WORKLOAD) * 2
    distinct_tokens = batch.dp_shard * batch.tokens(4096)
    assert rows[0] / etp * batch.stage_ranks[0] == pytest.approx(2 * distinct_tokens[0])


def test_memory_falls_with_expert_parallelism() -> None:
    layouts = [Layout(dp_shard=8, ep=ep, zero_stage=1) for ep in (1, 2, 4, 8)]
    held = [estimate(MIXTRAL, NODE, WORKLOAD, layout).memory_bytes for layout in layouts]
    assert [h.gradients for h in held] == sorted((h.gradients for h in held), reverse=True)
    assert held[3].gradients < 0.3 * held[0].gradients
    # Eight ranks hold eight eighths of the optimizer either way: sharded over dp, or as experts of their own.
    assert held[3].optimizer == pytest.approx(held[0].optimizer, rel=1e-6)


def test_each_token_is_sent_once_to_each_expert_of_others() -> None:
    """T tokens of D elements, two copies, seven eighths of them to others, there and back: H100 nodes at their own rate."""
    batch = batch_of(Layout(dp_shard=8, ep=8, zero_stage=1), Layout(dp_shard=8, ep=1, zero_stage=1))
    seconds = dispatch_s(BLOCK, setting_of(MIXTRAL, batch, WORKLOAD, NODE))
    assert seconds[1] == 0
    sent = 2 * 2 * 4096 * MIXTRAL.hidden_dim * 2 * 7 / 8
    assert (
        sent / NODE.levels[0].link.bandwidth_bytes_per_s
        < seconds[0]
        < 3 * sent / NODE.levels[0].link.bandwidth_bytes_per_s
    )


def test_experts_across_nodes_cost_more_and_one_copy_a_node_less() -> None:
    inside, across = Layout(dp_shard=32, ep=8, zero_stage=1), Layout(dp_shard=32, ep=32, zero_stage=1)
    many = ModelSpec.named("qwen3-30b-a3b")
    block, batch = many.block_runs[0][0], batch_of(inside, across)
    plain = dispatch_s(block, setting_of(many, batch, WORKLOAD.replace(engine="fsdp2"), NODES))
    deduplicated = dispatch_s(block, setting_of(many, batch, WORKLOAD, NODES))
    assert plain[1] > 2 * plain[0]
    assert deduplicated[0] == pytest.approx(plain[0])
    assert plain[0] < deduplicated[1] < 0.7 * plain[1]


def test_groups_of_experts_bound_the_nodes_of_a_token() -> None:
    """DeepSeek-V3 sends a token to at most four of eight nodes (arXiv:2412.19437 section 2.1.2)."""
    spec = ModelSpec.named("deepseek-v3")
    block, machine = spec.block_runs[-1][0], ClusterSpec.parse("64xH100-SXM-80GB")
    assert isinstance(block.mlp, MoE)
    assert (block.mlp.num_groups, block.mlp.top_groups) == (8, 4)
    free = block.replace(mlp=block.mlp.replace(num_groups=1, top_groups=1))
    batch = batch_of(Layout(dp_shard=64, ep=64, zero_stage=1), Layout(dp_shard=64, ep=16, zero_stage=1))
    limited, unlimited = (dispatch_s(b, setting_of(spec, batch, WORKLOAD, machine)) for b in (block, free))
    # Bytes between nodes decide; latencies do not shrink with them.
    assert limited[0] / unlimited[0] == pytest.approx(4 * (1 - 0.75**8) / (8 * (1 - 0.875**8)), rel=0.05)
    assert limited[1] == unlimited[1]


@pytest.mark.parametrize(("groups", "picks"), [(1, 3), (2, 2), (4, 3), (3, 5)])
def test_distinct_groups_equals_a_count(groups: int, picks: int) -> None:
    outcomes = list(itertools.product(range(groups), repeat=picks))
    counted = sum(len(set(outcome)) for outcome in outcomes) / len(outcomes)
    assert expected_distinct(np.array([groups]), picks)[0] == pytest.approx(counted)


def test_ring_is_hidden_by_long_sequences_and_shown_by_slow_links() -> None:
    spec = ModelSpec.named("llama-3.1-8b")
    attention = FusedAttention("attention", 32, 128, 128, 65536.5, 131072, 131072, num_kv_heads=8)
    assert attention.kv_width == 2 * 8 * 128
    batch, long = batch_of(Layout(cp=8)), WORKLOAD.replace(seq_len=131072)
    seconds, slow_node = (np.array([0.2]), np.array([0.5])), ClusterSpec.parse("8x1xA100-SXM-80GB/eth10")
    fast = ring_attention(attention, seconds, setting_of(spec, batch, long, NODE))
    assert (fast.exposed_forward_s[0], fast.exposed_backward_s[0]) == (0, 0)
    slow = ring_attention(attention, seconds, setting_of(spec, batch, long, slow_node))
    # 16384 tokens of 2048 elements of 2 bytes at 10 Gb/s or less, seven times, less the attention beside them
    assert slow.exposed_forward_s[0] > 7 * (16384 * 2048 * 2 * 8 / 10e9 - 0.2 / 8)
    assert slow.exposed_backward_s[0] > slow.exposed_forward_s[0]


def test_context_parallelism_divides_work_and_activations() -> None:
    spec = ModelSpec.named("llama-3.1-8b")
    workload = Workload(seq_len=65536, global_batch_size=8)
    layouts = [Layout(dp_shard=8, recompute="full"), Layout(cp=8, recompute="full")]
    alone, shared = (estimate(spec, NODE, workload, layout) for layout in layouts)
    # One sequence on eight ranks eight times, or eight sequences at once: the same work; at this length the ring adds an eighth,
    # for kernels of one rank's keys each and the sums of what they put out.
    assert alone.step_time_s < shared.step_time_s < 1.15 * alone.step_time_s
    of_one, of_eight = CostTable.from_layouts(spec, workload, NODE, batch_of(*layouts, global_batch_size=8)).total(
        "activation_bytes"
    )
    assert of_eight == pytest.approx(of_one / 8, rel=1e-6)
    assert shared.memory_bytes.parameters == alone.memory_bytes.parameters
    assert shared.mfu == pytest.approx(alone.mfu * alone.step_time_s / shared.step_time_s)


@pytest.mark.parametrize(("tp", "cp", "measured_gib"), [(2, 4, 68.43), (1, 8, 104.51)])
def test_memory_under_context_parallelism_as_measured(tp: int, cp: int, measured_gib: float) -> None:
    """Llama-3-70B cut to 12 blocks, 32,768 tokens, Megatron with sharded optimizer on 8 B200 (SimuMax v1.2, Apache-2.0)."""
    spec = ModelSpec.named("llama-3.1-70b")
    embedding, blocks, head = spec.layers
    short = spec.replace(layers=(embedding, blocks.replace(count=12), head))
    workload = Workload(seq_len=32768, global_batch_size=4, engine="megatron")
    layout = Layout(cp=cp, tp=tp, zero_stage=1)
    found = estimate(short, ClusterSpec.parse("8xB200-SXM-180GB"), workload, layout)
    assert found.peak_allocated_bytes / GIB == pytest.approx(measured_gib, rel=0.05)


def test_bounds_hold_with_every_axis() -> None:
    layouts = [
        Layout(dp_shard=4, cp=2, tp=2, pp=2, ep=8, zero_stage=1),
        Layout(dp_shard=16, cp=2, ep=8, etp=2, zero_stage=3),
        Layout(dp_replicate=2, dp_shard=2, cp=2, tp=4, ep=4, etp=1, zero_stage=2, recompute="full"),
        Layout(dp_shard=8, pp=4, ep=8, num_model_chunks=2, zero_stage=1, recompute="selective"),
        Layout(cp=8, tp=4, ep=2, etp=4, zero_stage=0),
    ]
    costs = CostTable.from_layouts(MIXTRAL, WORKLOAD, NODES, batch_of(*layouts))
    bound_s, bound_bytes = uniform_time_bounds(costs), memory_bounds(costs)
    for idx in range(len(layouts)):
        found = expand(costs, idx).estimate
        assert bound_s[idx] <= found.step_time_s * (1 + 1e-9)
        assert bound_bytes[idx] <= found.peak_allocated_bytes + 16  # whole bytes of seven parts
        assert found.breakdown_s.total == pytest.approx(found.step_time_s)


@pytest.mark.parametrize(
    ("layout", "rule"),
    [
        (Layout(cp=8, dp_shard=4, zero_stage=1), "sequence_per_cp"),
        (Layout(dp_shard=32, ep=16, zero_stage=1), "experts_per_ep"),
        (Layout(dp_shard=8, pp=4, ep=8, etp=4, zero_stage=1), "expert_ranks"),
        (Layout(dp_shard=8, tp=4, ep=8, sequence_parallel=False), "tokens_of_experts"),
        (Layout(dp_shard=32, num_model_chunks=2), "interleaved_microbatches"),
    ],
)
def test_layouts_that_no_engine_runs_have_no_estimate(layout: Layout, rule: str) -> None:
    workload = WORKLOAD.replace(seq_len=4100)
    with pytest.raises(ConfigError, match=rf"\[{rule}\]"):
        estimate(MIXTRAL, NODES, workload, layout)


def test_layouts_of_other_engines_have_an_estimate_and_a_reason() -> None:
    layout = Layout(dp_shard=16, cp=2, ep=8, zero_stage=1)
    assert estimate(MIXTRAL, NODES, WORKLOAD, layout).step_time_s > 0
    ours = WORKLOAD.replace(engine="fsdp2")
    assert not_executed(MIXTRAL, NODES, ours, layout) == ()
    offloaded = layout.replace(offload="optimizer")
    assert any("[offload]" in reason for reason in not_executed(MIXTRAL, NODES, ours, offloaded))
    assert not_executed(MIXTRAL, NODES, ours, Layout(dp_shard=32)) == ()
    assert not_executed(MIXTRAL, NODES, WORKLOAD, layout) == ("it is costed for megatron",)
