"""What Megatron's layers do differently from ours: unfused attention, recompute, pipeline boundaries, a slow host."""

from __future__ import annotations

import numpy as np
import pytest
from cost_cases import layer_cost, operators_under
from hypothesis import given
from hypothesis import strategies as st
from meshwright.cost_models.hardware.machine import waiting_s
from meshwright.cost_models.layer.layer import LayerCost
from meshwright.cost_models.layer.operators import CORE_ATTENTION, Elementwise, FusedAttention, Gemm
from meshwright.cost_models.stage.bounds import uniform_time_bounds
from meshwright.cost_models.stage.step import estimate_step
from meshwright.cost_models.stage.table import CostTable
from meshwright.schema import ClusterSpec, Layout, ModelSpec, Workload
from meshwright.schema.layers import Block, SoftmaxAttention
from meshwright.schema.layout_table import LayoutTable

A100 = ClusterSpec.parse("8xA100-SXM-80GB")
GPT = ModelSpec.named("gpt3-175b")


def block_of(model: ModelSpec) -> Block:
    return model.block_runs[0][0]


def cost_of(
    layout: Layout, workload: Workload, *, block: Block | None = None, cluster: ClusterSpec = A100
) -> LayerCost:
    batch = LayoutTable.from_layouts([layout], workload.global_batch_size)
    return layer_cost(block or block_of(GPT), GPT.hidden_dim, batch, workload, cluster)


def megatron(**changes: object) -> Workload:
    return Workload(seq_len=2048, global_batch_size=64, engine="megatron", precision="fp16-mixed").replace(**changes)


def test_unfused_attention_is_two_products_and_passes_between_them() -> None:
    """Twice the causal FLOPs, because every token is scored against all others; no weights."""
    block = block_of(GPT)
    fused = next(op for op in operators_under(block, GPT.hidden_dim, 2048) if isinstance(op, FusedAttention))
    core = [
        op
        for op in operators_under(block, GPT.hidden_dim, 2048, engine="megatron", attention="math")
        if op.name in CORE_ATTENTION
    ]
    products = [op for op in core if isinstance(op, Gemm)]
    assert [op.name for op in core] == ["scores", "softmax", "context"]
    assert sum(2 * op.n * op.k for op in products) == pytest.approx(2 * fused.forward_flops_per_token, rel=1e-3)
    assert sum(op.num_params for op in products) == 0


def test_separate_kernels_pass_over_scores_more_often_than_the_fused_one() -> None:
    def elements(engine: str) -> float:
        workload = {"engine": engine, "attention": "math"}
        operators = operators_under(block_of(GPT), GPT.hidden_dim, 2048, **workload)
        passes = next(op for op in operators if op.name == "softmax")
        assert isinstance(passes, Elementwise)
        return passes.forward_elements + passes.backward_elements

    assert elements("fsdp2") > elements("megatron")


def test_selective_recompute_of_unfused_attention_repeats_its_core_alone() -> None:
    """Korthikanti et al. (arXiv:2205.05198) section 5: one forward of the core, memory as if no score were kept."""
    layout = Layout(tp=8, recompute="selective")
    found, none = cost_of(layout, megatron(attention="math")), cost_of(Layout(tp=8), megatron(attention="math"))
    full = cost_of(Layout(tp=8, recompute="full"), megatron(attention="math"))
    fused = cost_of(Layout(tp=8), megatron())
    assert 0 < found.recompute_s[0] < 0.25 * full.recompute_s[0]
    assert found.tp_backward_s == pytest.approx(none.tp_backward_s)
    assert found.activation_bytes == pytest.approx(fused.activation_bytes)
    assert none.activation_bytes > 1.5 * found.activation_bytes


def test_megatron_repeats_the_whole_layer_and_ours_all_but_the_last_product() -> None:
    repeated_s = {}
    for engine in ("megatron", "fsdp2"):
        full, plain = (cost_of(Layout(tp=8, recompute=kind), megatron(engine=engine)) for kind in ("full", "none"))  # type: ignore[arg-type]
        repeated_s[engine] = float(full.tp_backward_s[0] - plain.tp_backward_s[0])
        assert full.recompute_s < plain.forward_s * 1.01
    forward_s = float(cost_of(Layout(tp=8), megatron()).tp_forward_s[0])
    assert repeated_s["megatron"] == pytest.approx(forward_s)
    assert repeated_s["fsdp2"] < forward_s


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_megatron_hides_backward_reductions_beside_weight_gradients(sequence_parallel: bool) -> None:
    """Both reductions of a wide block fit beside the gradients of its weights: without sequence parallelism nothing is left."""
    layout = Layout(tp=8, sequence_parallel=sequence_parallel)
    theirs, ours = (cost_of(layout, megatron(engine=engine)) for engine in ("megatron", "fsdp2"))
    # Ours copies along the sequence, around each collective.
    assert ours.tp_forward_s == pytest.approx(theirs.tp_forward_s, rel=0.3 if sequence_parallel else 1e-6)
    assert ours.tp_backward_s == pytest.approx(ours.tp_forward_s)
    share = theirs.tp_backward_s[0] / theirs.tp_forward_s[0]
    assert share == pytest.approx(0.5 if sequence_parallel else 0.0, abs=0.1)


@pytest.mark.parametrize(("num_heads", "slower"), [(96, False), (128, False), (64, False), (4096 // 13, True)])
def test_heads_that_are_not_aligned_run_outside_the_tensor_cores(num_heads: int, slower: bool) -> None:
    head_dim = GPT.hidden_dim // num_heads
    attention = SoftmaxAttention(kind="mha", num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim)
    block = block_of(GPT).replace(attention=attention)
    flops = 2 * 2 * 2 * 2048 * 2048 * num_heads * head_dim
    core_s = cost_of(Layout(), megatron(attention="math"), block=block).forward_s
    rest_s = cost_of(Layout(), megatron(), block=block).forward_s
    assert (head_dim * 2 % 16 != 0) == slower
    assert bool(core_s - rest_s > flops / 2 / 19.5e12) == slower


def test_a_pipeline_boundary_is_sent_in_shares_by_megatron() -> None:
    """Scatter and gather (arXiv:2104.04473 section 4.1): an eighth over the network, then gathered over NVLink."""
    cluster = ClusterSpec.parse("16xA100-SXM-80GB")
    batch = LayoutTable.from_layouts([Layout(tp=8, pp=2, sequence_parallel=False)], 64)
    ours, theirs = (
        float(CostTable.from_layouts(GPT, megatron(engine=engine), cluster, batch).transfer_s[0])
        for engine in ("fsdp2", "megatron")
    )
    assert ours / 8 < theirs < ours / 3


@given(device_s=st.floats(1e-9, 1), host_s=st.floats(1e-9, 1))
def test_a_pass_takes_no_less_than_device_or_host_and_no_more_than_both(device_s: float, host_s: float) -> None:
    total = device_s + float(waiting_s(np.array(device_s), np.array(host_s), 3.0))
    assert max(device_s, host_s) * (1 - 1e-9) <= total <= (device_s + host_s) * (1 + 1e-9)


def test_blocking_launches_add_the_same_host_time_to_every_micro_batch_size() -> None:
    """So that they cost small micro-batches most; a host that runs ahead hides nearly all of it behind wide layers."""
    added_s = []
    for micro_batch_size in (1, 8):
        layout = Layout(tp=8, sequence_parallel=False, recompute="full", micro_batch_size=micro_batch_size)
        ahead, blocked = (
            cost_of(layout, megatron(engine="deepspeed", blocking_launches=is_blocking)).busy_s[0]
            for is_blocking in (False, True)
        )
        added_s.append(float(blocked - ahead))
    assert 2e-3 < added_s[0] < added_s[1] < 1.2 * added_s[0]


@pytest.mark.parametrize("engine", ["megatron", "deepspeed"])
@pytest.mark.parametrize("attention", ["math", "flash"])
def test_bounds_hold_for_engines_with_a_slow_host(engine: str, attention: str) -> None:
    spec, cluster = ModelSpec.named("gpt2-xl"), ClusterSpec.parse("16xA100-SXM-80GB")
    workload = megatron(seq_len=1024, engine=engine, attention=attention)
    layouts = [
        Layout(tp=tp, pp=pp, dp_shard=16 // tp // pp, recompute=recompute)
        for tp in (1, 2, 4)
        for pp in (1, 2, 4)
        for recompute in ("none", "selective", "full")
    ]
    costs = CostTable.from_layouts(spec, workload, cluster, LayoutTable.from_layouts(layouts, 64))
    bound_s = uniform_time_bounds(costs)
    size = len(costs.kind_of_layer)
    for idx, layout in enumerate(layouts):
        each = spec.num_blocks // layout.pp
        boundaries = (0, *(1 + each * stage for stage in range(1, layout.pp)), size)
        assert bound_s[idx] <= estimate_step(costs, idx, boundaries).step_time_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("sequence_parallel", "recompute", "measured_s"), [(False, "full", 18.13), (True, "selective", 13.75)]
)
def test_published_steps_of_megatron_on_a100(sequence_parallel: bool, recompute: str, measured_s: float) -> None:
    """Korthikanti et al. (arXiv:2205.05198) table 5, 175B on 64 devices; within twice what the table as a whole is off by."""
    layout = Layout(tp=8, pp=8, num_model_chunks=3, sequence_parallel=sequence_parallel, recompute=recompute)  # type: ignore[arg-type]
    costs = CostTable.from_layouts(
        GPT, megatron(attention="math"), ClusterSpec.parse("64xA100-SXM-80GB"), LayoutTable.from_layouts([layout], 64)
    )
    boundaries = (0, *(1 + 12 * stage for stage in range(1, 8)), 98)
    assert estimate_step(costs, 0, boundaries).step_time_s == pytest.approx(measured_s, rel=0.08)
