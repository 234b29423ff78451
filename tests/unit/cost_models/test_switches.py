"""What a switch of an engine takes and gives: chunks of products beside their collectives, graphs, gradients in 16 bits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from meshwright.cost_models.coefficients import packaged_coefficients
from meshwright.cost_models.layer.parallel import STASH_RATIO
from meshwright.cost_models.stage.table import CostTable
from meshwright.planner import estimate
from meshwright.planner.request import PlanRequest
from meshwright.planner.space import build_space
from meshwright.schema import ClusterSpec, Layout, ModelSpec, TrainingEstimate, Workload
from meshwright.schema.layout_table import LayoutTable

NODE = ClusterSpec.parse("8xH100-SXM-80GB")
LLAMA = ModelSpec.named("llama-3.1-8b")
SPLIT = Layout(dp_shard=2, tp=4, zero_stage=1, micro_batch_size=2)


def run(layout: Layout, model: ModelSpec = LLAMA, **choices: str) -> TrainingEstimate:
    workload = Workload(seq_len=4096, global_batch_size=64, engine="megatron", **choices)  # type: ignore[arg-type]
    return estimate(model, NODE, workload, layout)


@pytest.mark.parametrize(
    ("model", "switch"),
    [
        *itertools.product(("llama-3.2-1b", "deepseek-v2-lite"), ("tp_overlap", "cuda_graphs")),
        ("deepseek-v2-lite", "ep_overlap"),
    ],
)
def test_layers_never_take_longer_and_sometimes_less_by_a_switch(model: str, switch: str) -> None:
    """What the bound of a group rests on, and what lets the search leave out a switch that gains nothing."""
    spec, workload = ModelSpec.named(model), Workload(seq_len=1024, global_batch_size=16, engine="megatron")
    table = build_space(PlanRequest(spec, NODE, workload, {"recompute": "none"})).batch
    table = table.select((table.sequence_parallel == 1) & (table.columns[switch] == 0))
    off, on = (
        CostTable.from_layouts(spec, workload, NODE, table.replace(**{switch: np.full_like(table.tp, value)}))
        for value in (0, 1)
    )
    for before, after in zip(off.by_kind, on.by_kind, strict=True):
        assert np.all(after.busy_s <= before.busy_s * (1 + 1e-12))
    assert np.any(sum(cost.busy_s for cost in on.by_kind) < 0.99 * sum(cost.busy_s for cost in off.by_kind))


@pytest.mark.parametrize(("precision", "bytes_of_element"), [("bf16-mixed", 20), ("fp8", 14)])
def test_chunks_have_ten_buffers_of_the_hidden_states(precision: str, bytes_of_element: int) -> None:
    """Six gathers and four reductions, the gathers in fp8 where products are; tokens of two sequences, of all tp ranks."""
    plain, chunked = (run(SPLIT.replace(tp_overlap=value), precision=precision).memory_bytes for value in (False, True))
    assert chunked.temporary - plain.temporary == 2 * 4096 * LLAMA.hidden_dim * bytes_of_element
    assert chunked.replace(temporary=plain.temporary) == plain


def test_graphs_keep_what_their_passes_use() -> None:
    """Logits and the gradients of the update come on top of activations and working sets."""
    plain, graphs = (run(SPLIT.replace(cuda_graphs=value)).memory_bytes for value in (False, True))
    assert graphs.activations == plain.activations > 0  # the peak is in a backward pass
    whole, in_graphs = (
        run(Layout(tp=8, gradients="compute", cuda_graphs=value)).memory_bytes for value in (False, True)
    )
    assert (
        whole.gradients == in_graphs.gradients > whole.unsharded
    )  # both peaks are in the update, which makes fp32 copies
    assert in_graphs.activations > whole.activations == 0


def test_graphs_leave_routed_experts_to_the_host() -> None:
    """Of a model whose feed-forward parts are experts graphs replay the rest, unless counts of tokens stay on the device."""
    spec, small = ModelSpec.named("deepseek-v2-lite"), Workload(seq_len=256, global_batch_size=8, engine="megatron")
    costs = CostTable.from_layouts(
        spec,
        small,
        NODE,
        LayoutTable.from_layouts(
            [
                Layout(dp_shard=8, ep=8, zero_stage=1, cuda_graphs=graphs, expert_graphs=whole)
                for graphs, whole in ((False, False), (True, False), (True, True))
            ],
            8,
        ),
    )
    experts = next(cost for kind, cost in zip(costs.kinds, costs.by_kind, strict=True) if kind.experts is not None)
    eager, graphs, whole = experts.forward_s + experts.backward_s
    host = packaged_coefficients()["host"]["megatron"]
    assert eager > host["routing_s"] > graphs > host["graphed_routing_s"] > whole
    saved = experts.activation_bytes
    assert (
        saved[0] == saved[1] < saved[2] < STASH_RATIO * saved[0]
    )  # of the tensors, those of experts are in larger buffers


def test_graphs_gain_nothing_of_the_routing_where_the_host_reads_the_splits_of_an_all_to_all() -> None:
    """Attention and router are replayed under either dispatcher; the rest of the difference is the routing's."""
    layout = Layout(dp_shard=8, ep=8, zero_stage=1, cuda_graphs=True)
    host = packaged_coefficients()["host"]["megatron"]
    waits, leaves = (
        estimate(
            ModelSpec.named("deepseek-v2-lite"),
            NODE,
            Workload(seq_len=256, global_batch_size=80, engine="megatron", token_dispatch=dispatch),
            layout,
        ).breakdown_s.compute
        for dispatch in ("copies", "engine")
    )
    each_s = (waits - leaves) / (10 * 26)  # passes of ten micro-batches through 26 blocks with experts
    assert each_s == pytest.approx(host["routing_s"] - host["graphed_routing_s"], rel=0.1)


@pytest.mark.parametrize(("nodes", "ep", "shares"), [(1, 8, 8), (1, 4, 4), (2, 16, 16 + 3 + 1), (4, 32, 32 + 9 + 1)])
def test_a_dispatcher_has_room_for_the_tokens_of_all_ranks_of_its_experts(nodes: int, ep: int, shares: int) -> None:
    """As if one rank got all of them; between nodes once more the rank's own and three times those of the other nodes."""
    spec, layout = ModelSpec.named("deepseek-v2-lite"), Layout(dp_shard=8 * nodes, ep=ep, zero_stage=1)
    with_buffers, without = (
        estimate(
            spec,
            ClusterSpec.parse(f"{nodes}x8xH100-SXM-80GB"),
            Workload(seq_len=1024, global_batch_size=8 * nodes, engine="megatron", token_dispatch=dispatch),
            layout,
        ).memory_bytes
        for dispatch in ("engine", "copies")
    )
    assert with_buffers.temporary - without.temporary == shares * 1024 * spec.hidden_dim * 2
    assert with_buffers.replace(temporary=without.temporary) == without


OVERLAPPED = Layout(dp_shard=8, ep=8, zero_stage=1, ep_overlap=True)


def exchange_of(layout: Layout, num_microbatches: int = 64) -> TrainingEstimate:
    workload = Workload(seq_len=4096, global_batch_size=8 * num_microbatches, engine="megatron")
    return estimate(ModelSpec.named("qwen3-30b-a3b"), NODE, workload, layout)


def test_another_micro_batch_hides_a_part_of_the_exchange_and_keeps_what_a_block_saves() -> None:
    alone, beside = (exchange_of(OVERLAPPED.replace(ep_overlap=value)) for value in (False, True))
    assert 0.3 * alone.breakdown_s.ep < beside.breakdown_s.ep < 0.7 * alone.breakdown_s.ep
    assert beside.breakdown_s.dp == pytest.approx(alone.breakdown_s.dp)
    assert beside.memory_bytes.activations == pytest.approx(49 / 48 * alone.memory_bytes.activations, rel=1e-2)
    assert beside.memory_bytes.replace(activations=0) == alone.memory_bytes.replace(activations=0)


def test_the_first_and_the_last_micro_batch_have_nothing_beside_them() -> None:
    """So that one micro-batch gains nothing, and two half of what each of many gains."""
    gains = [
        exchange_of(OVERLAPPED.replace(ep_overlap=False), m).breakdown_s.ep - exchange_of(OVERLAPPED, m).breakdown_s.ep
        for m in (1, 2, 64)
    ]
    assert gains[0] == pytest.approx(0.0, abs=1e-9)
    assert gains[1] > 0
    assert gains[2] == pytest.approx(63 * gains[1])


def test_exchanges_longer_than_all_compute_stay_exposed() -> None:
    """Over slow links: what hides is no more than the compute beside it."""
    nodes = ClusterSpec.parse("2x8xH100-SXM-80GB/eth100")
    workload = Workload(seq_len=4096, global_batch_size=1024, engine="megatron")
    layout = Layout(dp_shard=16, ep=16, zero_stage=1)
    alone, beside = (
        estimate(ModelSpec.named("qwen3-30b-a3b"), nodes, workload, layout.replace(ep_overlap=value)).breakdown_s
        for value in (False, True)
    )
    assert 0 < alone.ep - beside.ep < alone.compute < beside.ep


def test_gradients_in_16_bits_halve_what_is_reduced_and_held() -> None:
    layout = Layout(dp_shard=8, zero_stage=1, micro_batch_size=8)
    whole, half = (run(layout.replace(gradients=dtype)) for dtype in ("fp32", "compute"))
    assert half.breakdown_s.dp < whole.breakdown_s.dp
    assert half.memory_bytes.gradients == whole.memory_bytes.gradients // 2
    table = LayoutTable.from_layouts([layout, layout.replace(gradients="compute")], 64)
    assert list(table.reduces_in_compute_dtype) == [False, True]


@pytest.mark.parametrize(("device", "both"), [("H100-SXM-80GB", False), ("B200-180GB", True)])
def test_before_blackwell_either_exchange_or_tensor_parallel_communication_is_hidden(device: str, both: bool) -> None:
    """Several queues hide the one, a single queue the other (CUDA_DEVICE_MAX_CONNECTIONS)."""
    workload = Workload(seq_len=4096, global_batch_size=64, engine="megatron")
    layout = Layout(dp_shard=4, tp=2, ep=8, zero_stage=1, ep_overlap=True)
    exposed = {
        switches: estimate(
            ModelSpec.named("qwen3-30b-a3b"),
            ClusterSpec.parse(f"8x{device}"),
            workload,
            layout.replace(ep_overlap=switches[0], tp_overlap=switches[1]),
        ).breakdown_s
        for switches in ((True, True), (True, False), (False, True), (False, False))
    }
    hides_tp = exposed[True, True].tp < exposed[True, False].tp
    assert exposed[True, True].ep < exposed[False, True].ep
    assert exposed[False, True].tp < exposed[False, False].tp
    assert hides_tp is both
    assert (exposed[True, False].tp > exposed[False, False].tp) is not both  # reductions beside gradients of weights
