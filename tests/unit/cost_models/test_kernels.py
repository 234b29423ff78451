"""Memory-bound kernels by engine, experts' products, casts of fp8 training."""

from __future__ import annotations

import numpy as np
import pytest
from cost_cases import operators_under
from meshwright.cost_models.coefficients import Scenario, packaged_coefficients
from meshwright.cost_models.hardware.compute import gemm_s, grouped_gemm_s, operator_time
from meshwright.cost_models.hardware.machine import device_rates
from meshwright.cost_models.layer.operators import Elementwise, Gemm
from meshwright.cost_models.learned import kernels
from meshwright.planner import estimate
from meshwright.schema import ClusterSpec, Layout, ModelSpec, Workload
from meshwright.schema.engine_facts import ENGINES
from meshwright.schema.task import LowRank

WORKLOAD = Workload(seq_len=4096, global_batch_size=8, engine="megatron")
H100 = ClusterSpec.parse("8xH100-SXM-80GB")


def block_traffic(engine: str, model: str = "llama-3.1-8b") -> float:
    """Elements all memory-bound kernels of one block read and write for a token."""
    spec = ModelSpec.named(model)
    block = next(run.layer for run in spec.layers if run.count > 1)
    operators = operators_under(block, spec.hidden_dim, 4096, engine=engine)
    return sum(op.forward_elements + op.backward_elements for op in operators if isinstance(op, Elementwise))


def test_fused_kernels_move_less_than_eager_ones() -> None:
    assert block_traffic("megatron") < 0.75 * block_traffic("fsdp2")


def pass_traffic(fusion: str) -> float:
    """Elements of a block of Llama-3-8B for a token: forward, forward again under recompute, backward."""
    spec = ModelSpec.named("llama-3.1-8b")
    block = next(run.layer for run in spec.layers if run.count > 1)
    operators = operators_under(block, spec.hidden_dim, 8192, fusion=fusion)
    return sum(2 * op.forward_elements + op.backward_elements for op in operators if isinstance(op, Elementwise))


def test_what_compilation_saves_is_what_torchtitan_measured() -> None:
    # 32 blocks, 2 x 8192 tokens a device; 2.844 s eager, 2.458 s compiled (benchmarks/llama3_h100_202412, table 1).
    saved_bytes = 2 * 32 * 16384 * (pass_traffic("composite_norm") - pass_traffic("compiled"))
    bandwidth = 0.87 * 2.4e12  # H100 with HBM2e
    assert saved_bytes / bandwidth == pytest.approx(2.844 - 2.458, rel=0.15)


def test_one_kernel_a_norm_lies_between() -> None:
    assert pass_traffic("compiled") < pass_traffic("engine") < pass_traffic("composite_norm")


def test_dropout_adds_to_the_residuals_only() -> None:
    spec = ModelSpec.named("llama-3.1-8b")
    block = next(run.layer for run in spec.layers if run.count > 1)
    plain, dropped = (operators_under(block, spec.hidden_dim, 4096, dropout=is_on) for is_on in (False, True))
    assert [one.name for one, other in zip(plain, dropped, strict=True) if one != other] == ["residual_adds"]


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_every_engine_reads_and_writes_each_norm_at_least_once(engine) -> None:
    norm = ENGINES[engine].kernels.norm
    assert norm.forward >= 2  # the input and the output
    assert norm.backward >= 3  # the input, both gradients


def products(precision: str, **changes: object) -> dict[str, float]:
    """Forward seconds of a block's and the head's products in one precision."""
    spec = ModelSpec.named("llama-3.1-8b")
    rates = device_rates(Scenario.build(WORKLOAD.replace(precision=precision, **changes), H100))
    one, tokens = np.ones(1, dtype=np.int64), np.array([8192])
    kinds = dict.fromkeys(run.layer for run in spec.layers)
    operators = [op for layer in kinds for op in operators_under(layer, spec.hidden_dim, 4096, engine="megatron")]
    return {
        op.name: float(operator_time(op, tokens, one, one, rates=rates).forward_s[0])
        for op in operators
        if isinstance(op, Gemm)
    }


def test_fp8_speeds_up_blocks_by_less_than_two_and_logits_not_at_all() -> None:
    bf16, fp8 = products("bf16-mixed"), products("fp8")
    assert fp8["logits"] == pytest.approx(bf16["logits"])
    assert all(0.5 * bf16[name] < fp8[name] < bf16[name] for name in ("qkv", "mlp_up", "mlp_down"))


def test_finding_scales_costs_passes_over_what_is_cast() -> None:
    ways = [{"engine": "megatron"}, {"engine": "fsdp2"}, {"engine": "fsdp2", "fp8_scaling": "row"}]
    delayed, dynamic, by_row = (sum(products("fp8", **changes).values()) for changes in ways)
    assert delayed < dynamic < by_row < sum(products("bf16-mixed").values())


def grouped(experts: float, engine: str = "megatron") -> tuple[float, float]:
    """Forward and backward seconds of 32768 rows over experts."""
    rates = device_rates(Scenario.build(WORKLOAD.replace(engine=engine), H100))
    n, k = np.array([4096.0]), np.array([7168.0])
    forward, backward, weight = grouped_gemm_s(np.array([32768]), n, k, experts, rates)
    assert 0 < weight < backward
    return float(forward[0]), float(backward[0])


def test_fewer_rows_an_expert_are_less_efficient() -> None:
    times = [grouped(experts)[0] for experts in (8, 32, 128, 256)]
    assert times == sorted(times)
    assert times[-1] > 1.2 * times[0]


def test_few_experts_cost_like_one_product() -> None:
    rates = device_rates(Scenario.build(WORKLOAD, H100))
    plain = float(gemm_s(np.array([32768]), np.array([4096.0]), np.array([7168.0]), rates)[0])
    assert grouped(2)[0] == pytest.approx(plain, rel=0.05)  # the ratio of experts to plain products is 0.97


def test_one_launch_for_all_experts_saves_what_each_costs() -> None:
    each = packaged_coefficients()["grouped_gemm"]["forward_expert_s"]
    assert grouped(64)[0] - grouped(64, "fsdp2")[0] == pytest.approx(64 * each)


def test_weight_gradients_are_the_slowest_pass() -> None:
    forward, backward = grouped(128)
    assert backward > 2 * forward


def test_plain_model_code_dispatches_for_as_long_as_on_litgpts_a100() -> None:
    # LLaMA-Adapter on Llama-2-7B, 112 tokens: 2.8 ms a block, forward and backward (LitGPT, tutorials/resource-tables.md).
    adapter = LowRank(rank=1, targets=("qkv", "out", "mlp"), dropout=False)
    workload = Workload(seq_len=112, global_batch_size=1, precision="bf16", adapters=adapter, fusion="eager")
    found = estimate(ModelSpec.named("llama-2-7b"), ClusterSpec.parse("1xA100-SXM-40GB"), workload, Layout())
    assert found.breakdown_s.compute / 32 == pytest.approx(2.8e-3, rel=0.15)


def test_products_take_the_same_whatever_was_timed_before() -> None:
    rates = device_rates(Scenario.build(WORKLOAD, H100)).gemm
    assert rates is not None
    sizes = np.random.default_rng(0).integers(1, 200, (3, 300)) * 64.0
    kernels._known_shapes.cache_clear()
    parts = [kernels.gemm_seconds(*sizes[:, i : i + 70], rates) for i in (140, 0, 70, 210, 230)]
    together = kernels.gemm_seconds(*sizes, rates)
    kernels._known_shapes.cache_clear()
    np.testing.assert_array_equal(kernels.gemm_seconds(*sizes, rates), together)
    np.testing.assert_array_equal(np.concatenate([parts[1], parts[2], parts[0]]), together[:210])
