"""Parts of a step: they sum to what the estimate says, for every kind of layout, and lie where hand arithmetic says."""

from __future__ import annotations

from typing import Any

import pytest
from meshwright.cost_models.stage.parts import compute_parts
from meshwright.cost_models.stage.step import estimate_step
from meshwright.cost_models.stage.table import CostTable
from meshwright.planner import plan
from meshwright.planner.planned_stages import costed_stages
from meshwright.planner.request import OffloadRequest
from meshwright.planner.step_parts import step_parts
from meshwright.schema import ClusterSpec, Layout, ModelSpec, TrainingPlan, Workload
from meshwright.schema.layout_table import LayoutTable
from meshwright.schema.task import parse_training

EXACT = 1e-9
"""Sums of the same terms in another order."""


def planned(model: str, cluster: str, batch: int, seq_len: int, train: str = "full", **options: Any) -> TrainingPlan:
    fields = {name: options.pop(name) for name in ("engine", "precision") if name in options}
    workload = Workload(seq_len=seq_len, global_batch_size=batch, **fields).replace(**parse_training(train))
    return plan(ModelSpec.named(model), ClusterSpec.parse(cluster), workload, **options)


CASES: dict[str, tuple[Any, ...]] = {
    "data": ("llama-3.1-8b", "16xH100-SXM-80GB", 64, 4096),
    "pipeline": ("llama-3.1-8b", "16xH100-SXM-80GB", 64, 4096, "full", {"fixed": {"pp": 4}}),
    "chunks": (
        "llama-3.1-70b", "64xH100-SXM-80GB", 256, 8192, "full",
        {"fixed": {"pp": 4, "num_model_chunks": 2}, "engine": "megatron"},
    ),
    "context": ("llama-3.1-8b", "8xH100-SXM-80GB", 8, 65536, "full", {"fixed": {"cp": 8}}),
    "experts": ("mixtral-8x7b", "32xA100-SXM-80GB", 64, 4096),
    "fp8": ("llama-3.1-8b", "8xH100-SXM-80GB", 64, 4096, "full", {"engine": "megatron", "precision": "fp8"}),
    "adapters": ("llama-3.1-70b", "8xA100-SXM-80GB", 16, 2048, "lora:r=16,targets=qkv+out,frozen=nf4"),
    "forward only": ("llama-3.1-8b", "8xH100-SXM-80GB", 64, 4096, "zeroth-order"),
    "offload": ("llama-3.1-8b", "2xA100-SXM-80GB", 16, 4096, "full", {"offload": OffloadRequest()}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_parts_sum_to_the_step(case: str) -> None:
    *words, options = (*CASES[case], {}) if not isinstance(CASES[case][-1], dict) else CASES[case]
    answer = planned(*words, **options)
    stages = costed_stages(answer)
    parts = compute_parts(stages.costs, 0, stages.boundaries, stages.pool_of_stage)
    assert sum(parts) == pytest.approx(answer.estimate.breakdown_s.compute, rel=EXACT)
    assert min(parts) >= -EXACT * sum(parts)
    named = step_parts(answer)
    assert sum(named.values()) == pytest.approx(answer.estimate.step_time_s, rel=EXACT)
    assert "compute" not in named and named["dp"] == answer.estimate.breakdown_s.dp


def test_parts_of_a_split_vocabulary_sum_to_the_compute() -> None:
    model, cluster = ModelSpec.named("llama-3.1-8b"), ClusterSpec.parse("16xH100-SXM-80GB")
    workload = Workload(seq_len=4096, global_batch_size=64)
    layout = Layout(pp=4, dp_shard=4, zero_stage=1, micro_batch_size=1, vocabulary="split")
    table = LayoutTable.from_layouts([layout], workload.global_batch_size)
    costs, boundaries = CostTable.from_layouts(model, workload, cluster, table), (0, 9, 17, 25, 34)
    parts = compute_parts(costs, 0, boundaries)
    assert sum(parts) == pytest.approx(estimate_step(costs, 0, boundaries).breakdown_s.compute, rel=EXACT)


def test_parts_on_the_pools_of_a_mixed_cluster_sum_to_the_compute() -> None:
    fast, slow = (ClusterSpec.parse(f"8x{name}") for name in ("H100-SXM-80GB", "A100-SXM-80GB"))
    outer = ClusterSpec.parse("16xA100-SXM-80GB").levels[-1]
    groups = (fast.groups[0], slow.groups[0])
    mixed = slow.replace(name="mixed", groups=groups, levels=(slow.levels[0], outer))
    workload = Workload(seq_len=4096, global_batch_size=64)
    answer = plan(ModelSpec.named("llama-3.1-8b"), mixed, workload, fixed={"pp": 2})
    assert {stage.device for stage in answer.estimate.stages} != {""}
    assert sum(step_parts(answer).values()) == pytest.approx(answer.estimate.step_time_s, rel=EXACT)
    stages = costed_stages(answer)
    parts = compute_parts(stages.costs, 0, stages.boundaries, stages.pool_of_stage)
    assert sum(parts) == pytest.approx(answer.estimate.breakdown_s.compute, rel=EXACT)


def test_arithmetic_at_the_peak_is_that_of_model_flops() -> None:
    """One stage on every rank: its FLOPs at the peak are the MFU's share of the step."""
    answer = planned("llama-3.1-8b", "16xH100-SXM-80GB", 64, 4096, fixed={"pp": 1, "tp": 1})
    parts = step_parts(answer)
    peak_s = parts["products_ideal"] + parts["attention_ideal"]
    assert peak_s == pytest.approx(answer.estimate.mfu * answer.estimate.step_time_s, rel=1e-6)


def test_dispatch_is_none_under_one_graph() -> None:
    """With CUDA graphs the host launches a pass at once, so that small layers no longer wait for it."""
    layer_by_layer, graphs = (
        planned("smollm2-135m", "8xH100-SXM-80GB", 64, 512, engine="megatron", fixed={"tp": 1, "cuda_graphs": graphs})
        for graphs in (False, True)
    )
    waits, waits_less = (step_parts(answer)["dispatch"] for answer in (layer_by_layer, graphs))
    assert 0 <= waits_less < waits / 2
