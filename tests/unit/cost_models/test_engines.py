"""What engines differ in: which communication hides, per-tensor collectives, passes of the optimizer."""

from __future__ import annotations

import numpy as np
import pytest
from cost_cases import operators_under
from meshwright.cost_models.hardware.collectives import IN_NODE_RING_STEP_S, NETWORK_RING_STEP_S
from meshwright.cost_models.hardware.compute import OperatorTime
from meshwright.cost_models.hardware.host_memory import update_bytes_per_param
from meshwright.cost_models.layer.data import copied_bytes_per_param, passes_per_step
from meshwright.cost_models.layer.operators import Gemm
from meshwright.cost_models.layer.passes import alternate_products_s
from meshwright.cost_models.stage.table import CostTable
from meshwright.planner import estimate
from meshwright.schema import ClusterSpec, Layout, ModelSpec, TrainingEstimate, Workload
from meshwright.schema.engine_facts import Engine
from meshwright.schema.layers import Block
from meshwright.schema.layout_table import LayoutTable


def run(
    engine: Engine, layout: Layout, cluster: str = "64xH100-SXM-80GB", batch: int = 128, **choices: str | bool
) -> TrainingEstimate:
    workload = Workload(seq_len=4096, global_batch_size=batch, engine=engine, **choices)  # type: ignore[arg-type]
    return estimate(ModelSpec.named("llama-3.1-8b"), ClusterSpec.parse(cluster), workload, layout)


def test_paddle_waits_for_its_tensor_parallel_reductions() -> None:
    """enable_mp_async_allreduce is off unless a run asks for it; Megatron reduces beside the gradients of weights."""
    layout = Layout(dp_shard=4, tp=2, sequence_parallel=False, zero_stage=1)
    waits, hides = (run(name, layout, "8xA100-SXM-80GB", 64).breakdown_s.tp for name in ("paddlenlp", "megatron"))
    assert waits > 1.1 * hides > 0


def test_what_follows_the_backward_pass_is_exposed() -> None:
    layout = Layout(dp_shard=64, zero_stage=1, micro_batch_size=2)
    hidden, after = (run("megatron", layout, overlap=overlap).breakdown_s.dp for overlap in (True, False))
    assert after > 1.5 * hidden > 0
    assert run("deepspeed", layout, overlap=True) == run("deepspeed", layout, overlap=False)


def test_what_a_host_does_once_a_step_does_not_grow_with_the_batch() -> None:
    layout = Layout(dp_shard=64, zero_stage=1)
    one, four = (run("internevo", layout, batch=batch).breakdown_s.optimizer for batch in (64, 256))
    assert one == four == pytest.approx(run("megatron", layout).breakdown_s.optimizer + 0.3, abs=0.05)


def test_reductions_in_the_compute_dtype_move_half_the_bytes() -> None:
    layout = Layout(dp_replicate=64, micro_batch_size=2)
    whole, half = (run("deepspeed", layout.replace(gradients=dtype)).breakdown_s.dp for dtype in ("fp32", "compute"))
    assert whole / half == pytest.approx(2, rel=0.1)  # latency and the start of a transfer do not halve


def test_collectives_tensor_by_tensor_cost_the_steps_of_their_rings() -> None:
    """Two collectives for each of six tensors of 32 blocks, instead of two a block, in rings over eight nodes of eight ranks."""
    layout = Layout(dp_shard=64, zero_stage=1, micro_batch_size=2)
    by_tensor, by_bucket = (run(engine, layout).breakdown_s.dp for engine in ("nanotron", "deepspeed"))
    step_s = 8 * NETWORK_RING_STEP_S + 56 * IN_NODE_RING_STEP_S
    assert by_tensor - by_bucket == pytest.approx(2 * (32 * 6 - 32) * step_s, rel=0.2)


def test_model_chunks_hide_reductions_and_transfers() -> None:
    workload = Workload(seq_len=512, global_batch_size=128, engine="megatron")
    layouts = [Layout(dp_shard=16, pp=4, zero_stage=1, num_model_chunks=v) for v in (1, 4)]
    cluster = ClusterSpec.parse("64xL4")
    batch = LayoutTable.from_layouts(layouts, workload.global_batch_size)
    costs = CostTable.from_layouts(ModelSpec.named("llama-3.1-8b"), workload, cluster, batch)
    block = next(k for k, kind in enumerate(costs.kinds) if isinstance(kind, Block))
    plain, chunked = costs.per_step.dp_exposed_by_kind[block]
    assert chunked < plain
    assert costs.transfer_s[1] < costs.transfer_s[0]


def test_the_optimizer_makes_at_least_the_passes_of_a_fused_update() -> None:
    for engine in ("fsdp2", "megatron", "deepspeed", "nanotron", "internevo"):
        workload = Workload(seq_len=1, global_batch_size=1, engine=engine)
        assert update_bytes_per_param(workload) >= 7 * 4


def test_sharded_gradients_are_reduced_in_every_pass_only_where_shards_add_up() -> None:
    """Eight micro-batches; whole gradients of Megatron's descendants wait for the last, as those of every pipeline."""
    layout = Layout(dp_shard=16, tp=4, zero_stage=2, micro_batch_size=1)
    found = {}
    for engine in ("fsdp2", "deepspeed", "megatron"):
        workload = Workload(seq_len=512, global_batch_size=128, engine=engine)
        for pp in (1, 2):
            piped = LayoutTable.from_layouts([layout.replace(dp_shard=16 // pp, pp=pp)], 128)
            found[engine, pp] = tuple(int(counts[0]) for counts in passes_per_step(piped, workload))
    assert found == {
        ("fsdp2", 1): (8, 8), ("deepspeed", 1): (1, 8), ("megatron", 1): (1, 1),
        ("fsdp2", 2): (1, 1), ("deepspeed", 2): (1, 1), ("megatron", 2): (1, 1),
    }  # fmt: skip


def test_every_pass_that_reduces_pays_for_it() -> None:
    """Nothing hides DeepSpeed's reductions: eight micro-batches expose eight times those of one, and one gather."""
    one, eight = (
        run("deepspeed", Layout(dp_shard=64, zero_stage=2, micro_batch_size=1), batch=64 * m).breakdown_s.dp
        for m in (1, 8)
    )
    once = run("deepspeed", Layout(dp_shard=64, zero_stage=1, micro_batch_size=1), batch=64).breakdown_s.dp
    assert one == pytest.approx(once, rel=1e-6)
    assert 4 * one < eight < 8 * one


def test_deepspeed_scales_and_casts_within_adam() -> None:
    """Flattened fp16 gradients (4 bytes) and their norm (2) come before 28 bytes of Adam."""
    assert update_bytes_per_param(Workload(seq_len=1, global_batch_size=1, engine="deepspeed")) == 34


def test_keeping_every_second_product_repeats_the_others() -> None:
    """k, out and up of q, k, v, out, gate, up, down: (1024 + 4096 + 14336) of (6144 + 4096 + 3 * 14336) columns of 4096."""
    spec = ModelSpec.named("llama-3.1-8b")
    block = next(run.layer for run in spec.layers if isinstance(run.layer, Block))
    products = tuple(op for op in operators_under(block, spec.hidden_dim, 4096) if isinstance(op, Gemm))
    batch = LayoutTable.from_layouts([Layout()], 1)
    times = [OperatorTime(np.array([float(op.n * op.k)]), np.zeros(1), 1, 2) for op in products]
    share = alternate_products_s(products, times, batch)[0] / sum(op.n * op.k for op in products)
    assert share == pytest.approx((1024 + 4096 + 14336) / (6144 + 4096 + 3 * 14336))


@pytest.mark.parametrize(("engine", "expected"), [("deepspeed", 3 * 2), ("nanotron", 2 + 2 * 4)])
def test_micro_batches_add_to_the_gradients_of_earlier_ones(engine: Engine, expected: float) -> None:
    """Read the new gradient and the sum, write the sum; with one micro-batch there is nothing to add."""
    workload = Workload(seq_len=1, global_batch_size=8, engine=engine)
    layouts = [Layout(dp_replicate=dp) for dp in (8, 4)]
    assert copied_bytes_per_param(LayoutTable.from_layouts(layouts, 8), workload).tolist() == [0, 2 * expected]


def test_megatron_adds_within_its_products() -> None:
    """Read and write of the fp32 sum, from the first micro-batch on."""
    batch = LayoutTable.from_layouts([Layout(dp_replicate=8), Layout()], 8)
    workload = Workload(seq_len=1, global_batch_size=8, engine="megatron")
    assert copied_bytes_per_param(batch, workload).tolist() == [8, 64]


def test_fully_shard_copies_what_it_gathers_and_reduces() -> None:
    """Zero 3: fp32 shards cast and copied into the buffer (6 and 4 bytes of 8 ranks' part), bf16 out of it, both in two passes; a
    gradient cast into the buffer (6). Zero 1 with two micro-batches: one gather; a gradient cast, one added to it (10), the sum
    into the buffer (8).
    """
    layouts = [Layout(dp_shard=8), Layout(dp_shard=4, zero_stage=1)]
    copied = copied_bytes_per_param(LayoutTable.from_layouts(layouts, 8), Workload(seq_len=1, global_batch_size=8))
    assert copied.tolist() == [2 * (10 / 8 + 4) + 6, 10 / 4 + 4 + 6 + 10 + 8]


def test_parameters_with_nothing_to_gather_are_cast_and_copied() -> None:
    """One rank, and experts that each rank has for itself: cast (6) and copied (4), the gradient cast (6), its sum copied (8); of
    experts it is multiplied before (4).
    """
    table = LayoutTable.from_layouts([Layout(), Layout(dp_shard=8, ep=8, zero_stage=2)], 8)
    workload = Workload(seq_len=1, global_batch_size=8)
    one, of_dense = copied_bytes_per_param(table, workload).tolist()
    _, of_experts = copied_bytes_per_param(table, workload, of_experts=True).tolist()
    assert of_experts == 28
    assert of_dense == 10 / 8 + 4 + 6
    assert (
        one == 10 + 6 + 7 * 10 + 8 + 8
    )  # eight micro-batches: the first gradient cast, seven added, the sum into the buffer


def test_one_dtype_is_never_cast() -> None:
    """fp32: DDP copies into its buckets and divides (16 bytes); four micro-batches of a pipeline add three times."""
    layouts = [Layout(dp_replicate=8), Layout(pp=2, micro_batch_size=2), Layout(micro_batch_size=8)]
    workload = Workload(seq_len=1, global_batch_size=8, precision="fp32")
    assert copied_bytes_per_param(LayoutTable.from_layouts(layouts, 8), workload).tolist() == [16, 3 * 12, 0]


def test_chunked_tensor_parallel_communication_leaves_a_chunk_exposed() -> None:
    layout = Layout(dp_shard=2, tp=4, zero_stage=1, sequence_parallel=True)
    plain, chunked = (
        run("megatron", layout.replace(tp_overlap=choice), "8xH100-SXM-80GB", 16).breakdown_s.tp
        for choice in (False, True)
    )
    assert 0 < chunked < 0.7 * plain


def test_graphs_free_short_passes_of_the_host() -> None:
    model = ModelSpec.named("pythia-70m")
    layout, cluster = Layout(dp_replicate=8), ClusterSpec.parse("8xH100-SXM-80GB")
    times = [
        estimate(
            model,
            cluster,
            Workload(seq_len=512, global_batch_size=8, engine="megatron"),
            layout.replace(cuda_graphs=graphs),
        ).step_time_s
        for graphs in (False, True)
    ]
    assert times[1] < 0.6 * times[0]


def test_lower_power_limit_slows_products() -> None:
    layout = Layout(dp_shard=8, zero_stage=3)
    full, capped = (
        run("fsdp2", layout, f"8x{name}", 8).step_time_s for name in ("H100-SXM-80GB", "H100-SXM-96GB-HBM2e")
    )
    assert 1.1 < capped / full < (700 / 500) * (3.35 / 2.4)
