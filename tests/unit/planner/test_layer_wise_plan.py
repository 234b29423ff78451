"""Against a published layer-wise plan: Galvatron's for Llama-2-7B on one node of 8 GPUs, costed layer by layer in our own model.

Source of the facts: AFDWang/Hetu-Galvatron (Apache-2.0), commit bd3ab5f of 2024-12-01, galvatron/models/llama_hf/configs/
galvatron_config_hidden4096_head32_1nodes_8gpus_per_node_36GB_bf16_[tpconsec_off].json, found by its search with the settings in
scripts/search_dist.sh of the same commit: llama-7b, sequences of 8192, 64 a step, bf16, at most 36 GB of each GPU.
"""

from __future__ import annotations

import numpy as np
import pytest
from meshwright.cost_models.stage.table import CostTable
from meshwright.planner import estimate, plan
from meshwright.schema import ClusterSpec, Layout, ModelSpec, Workload
from meshwright.schema.layout_table import LayoutTable
from meshwright.schema.units import GIB

MODEL = ModelSpec.named("llama-2-7b")
MEMORY_BYTES = 36 * GIB
GLOBAL_BATCH_SIZE, CHUNKS, GPUS = 64, 8, 8
PP, TP = 1, 1
NUM_BLOCKS = 32
NOT_SHARDED_FULLY = range(26, 29)
"""Blocks under ZeRO-2, as are embedding and head; all others are under ZeRO-3."""
NOT_RECOMPUTED = range(29, 32)
"""Blocks that keep their activations; all others are recomputed."""


def of_block(block: int) -> tuple[int, str]:
    """ZeRO stage and recompute of one block."""
    return 2 if block in NOT_SHARDED_FULLY else 3, "none" if block in NOT_RECOMPUTED else "full"


STRATEGIES = [(2, "none"), *(of_block(block) for block in range(NUM_BLOCKS)), (2, "none")]
"""Of every layer: embedding, blocks, head."""


def layer_wise_step_s(cluster: ClusterSpec, workload: Workload, strategies: list[tuple[int, str]]) -> float:
    """Seconds of a step without a pipeline whose layers each have a strategy of their own.

    What layers add is added up as `estimate` does; what a step has once is what the strategy with the least of it has.
    """
    distinct = sorted(set(strategies))
    layouts = [
        Layout(dp_shard=GPUS, zero_stage=stage, micro_batch_size=1, recompute=recompute)
        for stage, recompute in distinct
    ]
    costs = CostTable.from_layouts(MODEL, workload, cluster, LayoutTable.from_layouts(layouts, GLOBAL_BATCH_SIZE))
    of_layer = [distinct.index(strategy) for strategy in strategies]
    busy = [costs.per_layer("busy_s", idx) for idx in range(len(distinct))]
    once = [costs.per_step.once_per_layer_s(idx) for idx in range(len(distinct))]
    layers = sum(CHUNKS * busy[idx][at] + once[idx][at] for at, idx in enumerate(of_layer))
    return float(layers) + float(np.min(costs.per_step.dp_edges_s))


def node(device: str) -> ClusterSpec:
    cluster = ClusterSpec.parse(f"{GPUS}x{device}")
    return cluster.replace(reserved_bytes=cluster.weakest_device.memory_bytes - MEMORY_BYTES)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_layers_of_one_strategy_cost_what_the_layout_costs(stage: int, recompute: str) -> None:
    cluster = node("A100-SXM-80GB")
    workload = Workload(seq_len=2048, global_batch_size=GLOBAL_BATCH_SIZE)
    layout = Layout(dp_shard=GPUS, zero_stage=stage, micro_batch_size=1, recompute=recompute)
    expected = estimate(MODEL, cluster, workload, layout).step_time_s
    found = layer_wise_step_s(cluster, workload, [(stage, recompute)] * MODEL.num_layers)
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("device", ["A100-SXM-40GB", "A100-SXM-80GB"])
@pytest.mark.parametrize("seq_len", [2048, 8192])
def test_plan_is_no_slower_than_the_published_one(device: str, seq_len: int) -> None:
    assert GLOBAL_BATCH_SIZE == CHUNKS * GPUS // (PP * TP)
    assert len(STRATEGIES) == MODEL.num_layers
    cluster, workload = node(device), Workload(seq_len=seq_len, global_batch_size=GLOBAL_BATCH_SIZE)
    published_s = layer_wise_step_s(cluster, workload, STRATEGIES)
    ours = plan(MODEL, cluster, workload)
    assert ours.estimate.fits
    assert ours.estimate.required_bytes <= MEMORY_BYTES
    print(f"{device}, {seq_len} tokens: published {published_s:.3f} s, ours {ours.estimate.step_time_s:.3f} s")
    assert ours.estimate.step_time_s <= published_s
