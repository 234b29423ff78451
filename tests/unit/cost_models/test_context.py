"""Context parallelism split into an exchange of tokens for heads and a ring: what each part sends, and its limits."""

from __future__ import annotations

import numpy as np
import pytest
from cost_cases import cost_inputs
from meshwright.cost_models.layer.context import context_parallel, ring_attention, ulysses_exchange
from meshwright.cost_models.layer.operators import CostInputs, FusedAttention
from meshwright.cost_models.stage.bounds import memory_bounds, uniform_time_bounds
from meshwright.cost_models.stage.table import CostTable
from meshwright.planner import estimate
from meshwright.planner.expand import expand
from meshwright.schema import ClusterSpec, ConfigError, Layout, ModelSpec, Workload
from meshwright.schema.layout_table import LayoutTable

LLAMA = ModelSpec.named("llama-3.1-8b")
ATTENTION = FusedAttention("attention", 32, 128, 128, 65536.5, 131072, 131072, num_kv_heads=8)
NODE, NODES = ClusterSpec.parse("8xH100-SXM-80GB"), ClusterSpec.parse("4x8xH100-SXM-80GB/ib400")
LONG = Workload(seq_len=131072, global_batch_size=8, engine="megatron")
SECONDS = (np.array([0.01]), np.array([0.025]))


def setting_of(layout: Layout, cluster: ClusterSpec = NODE) -> CostInputs:
    batch = LayoutTable.from_layouts([layout], LONG.global_batch_size)
    return cost_inputs(LLAMA.hidden_dim, batch, LONG, cluster)


def test_ulysses_alone_has_no_ring_and_a_ring_alone_no_exchange() -> None:
    only_ring, only_exchange = setting_of(Layout(cp=8)), setting_of(Layout(cp=8, cp_ulysses=8))
    assert all(part[0] == 0 for part in ulysses_exchange(ATTENTION, only_ring))
    assert all(part[0] == 0 for part in ring_attention(ATTENTION, SECONDS, only_exchange))
    assert context_parallel(ATTENTION, SECONDS, only_ring) == ring_attention(ATTENTION, SECONDS, only_ring)


def test_exchanged_bytes_are_those_of_all_to_all() -> None:
    """16,384 tokens of q, k, v and output, seven eighths of them to others, in both passes."""
    found = ulysses_exchange(ATTENTION, setting_of(Layout(cp=8, cp_ulysses=8)))
    sent = 131072 / 8 * (2 * ATTENTION.num_heads * 128 + ATTENTION.kv_width) * 2 * 7 / 8
    line_s = sent / NODE.levels[0].link.bandwidth_bytes_per_s
    assert line_s < found.exposed_forward_s[0] < 2 * line_s
    assert found.exposed_backward_s[0] == found.exposed_forward_s[0]


def test_exchange_inside_nodes_and_ring_between_them_needs_fewer_steps() -> None:
    alone = ring_attention(ATTENTION, SECONDS, setting_of(Layout(cp=32), NODES))
    outside = ring_attention(ATTENTION, SECONDS, setting_of(Layout(cp=32, cp_ulysses=8), NODES))
    assert outside.dispatches[0] == pytest.approx(alone.dispatches[0] * 3 / 31)
    # Three transfers instead of 31, each beside a quarter of the attention instead of a 32nd.
    assert outside.exposed_forward_s[0] < alone.exposed_forward_s[0]


def test_rings_longer_than_the_sequence_have_a_cost() -> None:
    """They are costed before a rule excludes them."""
    workload, layout = Workload(seq_len=1024, global_batch_size=8), LayoutTable.from_layouts([Layout(cp=2048)], 8)
    short = FusedAttention("attention", 32, 128, 128, 512.5, 1024, 1024, 8)
    added = ring_attention(short, SECONDS, cost_inputs(LLAMA.hidden_dim, layout, workload, NODES))
    assert all(np.isfinite(part).all() for part in added)


def test_memory_does_not_depend_on_the_split() -> None:
    splits = [estimate(LLAMA, NODE, LONG, Layout(cp=8, cp_ulysses=u, recompute="full")) for u in (1, 2, 8)]
    assert len({split.memory_bytes for split in splits}) == 1
    assert len({split.step_time_s for split in splits}) == 3


def test_layouts_say_their_split() -> None:
    layout = Layout(cp=8, cp_ulysses=4, dp_shard=2)
    assert "cp=8 cp_ulysses=4" in str(layout)
    assert LayoutTable.from_layouts([layout], 16).layout(0) == layout
    assert Layout.model_validate(Layout(cp=8).model_dump(exclude={"cp_ulysses"})) == Layout(cp=8)


@pytest.mark.parametrize(
    ("layout", "rule"),
    [
        (Layout(cp=8, cp_ulysses=3), "ulysses_divides_cp"),
        (Layout(cp=4, tp=2, cp_ulysses=4), None),
        (Layout(cp=2, tp=4, cp_ulysses=4), "ulysses_divides_cp"),
        (Layout(cp=2, tp=4, cp_ulysses=2), None),
        (Layout(tp=8, cp=4, cp_ulysses=4), "heads_per_ulysses"),
    ],
)
def test_splits_that_cannot_be_executed_name_the_rule(layout: Layout, rule: str | None) -> None:
    cluster = ClusterSpec.parse(f"{layout.world_size}xH100-SXM-80GB")
    if rule is None:
        assert estimate(LLAMA, cluster, LONG, layout).breakdown_s.cp > 0
        return
    with pytest.raises(ConfigError) as error:
        estimate(LLAMA, cluster, LONG, layout)
    assert any(f"[{rule}]" in detail for detail in error.value.details)


@pytest.mark.parametrize("engine", ["fsdp2", "megatron", "deepspeed"])
def test_bounds_hold_under_every_split(engine: str) -> None:
    workload = LONG.replace(engine=engine, global_batch_size=32)
    layouts = [
        Layout(dp_shard=4, cp=8, cp_ulysses=u, zero_stage=z, recompute=r)
        for u in (1, 2, 4, 8)
        for z in (1, 3)
        for r in ("none", "full")
    ]
    layouts += [Layout(pp=4, cp=8, cp_ulysses=u, zero_stage=1) for u in (1, 2, 8)]
    costs = CostTable.from_layouts(
        LLAMA, workload, NODES, LayoutTable.from_layouts(layouts, workload.global_batch_size)
    )
    bound_s, bound_bytes = uniform_time_bounds(costs), memory_bounds(costs)
    for idx in range(len(layouts)):
        found = expand(costs, idx).estimate
        assert bound_s[idx] <= found.step_time_s * (1 + 1e-9)
        assert bound_bytes[idx] <= found.peak_allocated_bytes + 16  # parts are whole bytes
