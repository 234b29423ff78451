"""Kernels that differ between engines: attention of rows that decode, all-reduces, casts, experts."""

from __future__ import annotations

import numpy as np
import pytest
from meshwright.cost_models.coefficients import packaged_coefficients
from meshwright.cost_models.serving.communication import all_reduce_s
from meshwright.cost_models.serving.engine import EngineProfile, Kernels, profiles
from meshwright.cost_models.serving.step import StepCosts
from meshwright.schema import ClusterSpec, ModelSpec
from meshwright.schema.serving import CacheDtype, KernelEngine, ServingLayout, WeightDtype

ROWS = np.array([32.0, 64.0, 128.0])


def parts(kernels: Kernels, *, weights: WeightDtype = "fp8", cache: CacheDtype = "fp8") -> dict[str, np.ndarray]:
    model, cluster = ModelSpec.named("llama-3.1-8b"), ClusterSpec.parse("1xH100-SXM-80GB")
    step = StepCosts.build(model, cluster, ServingLayout(), weights=weights, cache=cache, kernels=kernels)
    return step.parts(ROWS, ROWS * 2048)


def test_every_profile_names_kernels_that_were_timed() -> None:
    own = {profile.engine: profile.kernels.attention for profile in profiles()}
    assert own == {"vllm": "vllm", "sglang": "sglang", "trtllm": "trtllm", "meshwright": "vllm"}


def test_an_8_bit_cache_on_hopper_is_read_faster_by_tensorrt_llm() -> None:
    """Its kernels take 0.7 to 0.8 of FlashAttention-3's (decode_attention.parquet)."""
    of = {engine: parts(Kernels(attention=engine))["decode_attention"] for engine in ("vllm", "sglang", "trtllm")}
    assert np.all(of["trtllm"] < 0.9 * of["vllm"])
    np.testing.assert_allclose(of["sglang"], of["vllm"], rtol=0.15)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_a_part_of_a_step_is_the_engines_alone(engine: KernelEngine) -> None:
    """On one device engines differ in attention, and in no other part."""
    own, others = parts(Kernels(attention=engine)), parts(Kernels(attention="vllm"))
    for name in own.keys() - {"decode_attention"}:
        np.testing.assert_array_equal(own[name], others[name])


def test_casts_that_are_fused_cost_nothing_in_8_bits_and_change_nothing_in_16() -> None:
    compiled, plain = EngineProfile.named("trtllm", "0.14").kernels, Kernels(attention="trtllm")
    assert compiled.fuses_casts and not plain.fuses_casts
    saved = parts(plain)["products"] - parts(compiled)["products"]
    launches = 4 * 32 * packaged_coefficients()["serving"]["cast_s"]["fp8"]  # four products of each layer
    assert np.all(saved > launches)
    of_16 = [parts(kernels, weights="bf16", cache="bf16")["products"] for kernels in (compiled, plain)]
    np.testing.assert_array_equal(*of_16)


def test_all_reduces_of_few_bytes_are_the_engines() -> None:
    """TensorRT-LLM's take 0.7 of vLLM's on Hopper (custom_all_reduce.parquet); AMD's have no table, and are alike."""
    sizes = np.array([8192.0, 65536.0])

    def seconds(device: str, engine: KernelEngine) -> np.ndarray:
        return all_reduce_s(sizes, 4, ClusterSpec.parse(f"4x{device}"), packaged_coefficients(), [engine])

    assert np.all(seconds("H100-SXM-80GB", "trtllm") < 0.8 * seconds("H100-SXM-80GB", "vllm"))
    np.testing.assert_array_equal(seconds("MI300X-192GB", "trtllm"), seconds("MI300X-192GB", "vllm"))


def test_cutlass_experts_of_blackwell_take_longer_than_the_usual_ones() -> None:
    """1.4 to 2.6 times in nvfp4 (moe_grouped_gemm.parquet, 6,144 x 3,072, 128 experts); attention and products are the same."""
    model, cluster = ModelSpec.named("qwen3-235b-a22b"), ClusterSpec.parse("4xB200-SXM-180GB")
    usual, cutlass = (
        StepCosts.build(model, cluster, ServingLayout(tp=4), weights="nvfp4", cache="fp8", kernels=kernels).parts(
            ROWS, ROWS * 1024
        )
        for kernels in (Kernels(attention="trtllm"), Kernels(attention="trtllm", cutlass_experts=True))
    )
    assert np.all(cutlass["experts"] > 1.2 * usual["experts"]) and np.all(cutlass["experts"] < 3 * usual["experts"])
    for name in usual.keys() - {"experts"}:
        np.testing.assert_array_equal(usual[name], cutlass[name])
