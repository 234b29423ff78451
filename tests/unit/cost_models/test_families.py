"""What the blocks of further families cost: parallel parts, gates, windows."""

from __future__ import annotations

import pytest
from meshwright.planner import estimate
from meshwright.schema import ClusterSpec, Layout, ModelSpec, Workload
from meshwright.schema.layers import Block, LayerRun

CLUSTER = ClusterSpec.parse("8xH100-SXM-80GB")
WORKLOAD = Workload(seq_len=4096, global_batch_size=8)
LLAMA = ModelSpec.named("llama-3.1-8b")


def with_block(**changes):
    """Return Llama with other blocks: ``attention`` and ``mlp`` are changes to those parts."""
    block = LLAMA.block_runs[0][0]
    parts = {
        name: getattr(block, name).replace(**changes.pop(name)) for name in ("attention", "mlp") if name in changes
    }
    runs = (LayerRun(layer=block.replace(**parts, **changes), count=run.count) if isinstance(run.layer, Block) else run
            for run in LLAMA.layers)  # fmt: skip
    return LLAMA.replace(layers=tuple(runs))


def cost(model, layout="tp=8 sequence_parallel=true micro_batch=1 recompute=none"):
    return estimate(model, CLUSTER, WORKLOAD, Layout.parse(layout))


def test_parts_that_share_a_norm_reduce_once():
    both, joint = with_block(parallel_residual=True), with_block(parallel_residual=True, num_norms=1)
    assert joint.block_runs[0][0].num_reductions == 1
    ratio = cost(joint).breakdown_s.tp / cost(both).breakdown_s.tp
    # 32 blocks with one pair instead of two, and half of a pair before and after them
    assert ratio == pytest.approx((32 + 1) / (64 + 1), rel=0.02)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": {"gate": "per_element"}},
        {"attention": {"out_norm": True}},
        {"mlp": {"inner_norm": True}},
        {"attention": {"qk_norm": "per_head_bias"}},
    ],
    ids=str,
)
def test_what_a_block_has_beside_costs_time_and_memory(changes):
    more, plain = cost(with_block(**changes)), cost(LLAMA)
    assert more.step_time_s > plain.step_time_s
    assert more.memory_bytes.activations > plain.memory_bytes.activations


def test_windows_in_some_layers_cost_less_than_in_none():
    long = WORKLOAD.replace(seq_len=32768)
    block = LLAMA.block_runs[0][0]
    local = block.replace(attention=block.attention.replace(window=1024))
    mixed = tuple(
        LayerRun(layer=local if idx % 6 != 5 else block) for idx in range(32)
    )  # fmt: skip
    gemma_like = LLAMA.replace(layers=(LLAMA.layers[0], *mixed, LLAMA.layers[-1]))
    layout = Layout.parse("tp=8 sequence_parallel=true micro_batch=1 recompute=full")
    seconds = [estimate(model, CLUSTER, long, layout).step_time_s for model in (LLAMA, gemma_like)]
    assert seconds[1] < 0.8 * seconds[0]
