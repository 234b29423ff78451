"""Seconds of serving kernels and steps against measured tables, where those are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from meshwright.cost_models.coefficients import packaged_coefficients
from meshwright.cost_models.serving.communication import all_reduce_s
from meshwright.cost_models.serving.engine import EngineProfile
from meshwright.cost_models.serving.step import StepCosts
from meshwright.schema import ClusterSpec, ModelSpec
from meshwright.schema.serving import KernelEngine, ServingLayout

pd = pytest.importorskip("pandas")
DATA = Path(__file__).resolve().parents[5] / "shared/data/serving"
needs_data = pytest.mark.skipif(not DATA.exists(), reason="measured tables are not here")


def step(model: str, gpu: str, tp: int, dtype: str, engine: str = "trtllm") -> StepCosts:
    cache, kernels = "fp8" if dtype == "fp8" else "bf16", EngineProfile.named(engine).kernels
    spec, cluster, layout = ModelSpec.named(model), ClusterSpec.parse(f"8x{gpu}"), ServingLayout(tp=tp)
    return StepCosts.build(spec, cluster, layout, weights=dtype, cache=cache, kernels=kernels)


@needs_data
@pytest.mark.parametrize(
    ("model", "engine", "dtype"),
    [("Llama-3.1-8B", "trtllm", "bf16"), ("Qwen3-32B", "trtllm", "fp8"), ("Qwen3-32B", "vllm", "bf16")],
)
def test_few_requests_decode_as_fast_as_measured_engines_of_today(model: str, engine: str, dtype: str) -> None:
    """A step of the kernels alone is at most a fifth faster than an engine's token, and hardly slower."""
    table = pd.read_csv(DATA / "end_to_end_points.csv")
    rows = table[
        (table.model == model) & (table.engine == engine) & (table.gemm_dtype == dtype) & (table["mode"] == "agg")
    ]
    rows = rows[(rows.concurrency <= 8) & (rows.gpu == "H100-SXM-80GB") & (rows.osl >= 512) & (rows.gpus == rows.tp)]
    assert len(rows) >= 5
    ratios = [
        float(
            step(model.lower(), r.gpu, int(r.tp), dtype, engine).seconds(
                r.concurrency, r.concurrency * (r.isl + r.osl / 2)
            )
        )
        / (r.tpot_ms / 1e3)
        for r in rows.itertuples()
    ]
    print(model, engine, np.round(ratios, 2))
    assert 0.75 < np.median(ratios) < 1.05


@needs_data
def test_prompts_take_as_long_as_published_first_tokens() -> None:
    table = pd.read_csv(DATA / "tensorrt_llm_published.csv")
    rows = table[(table.table == "first token latency") & (table.gpu == "A100-SXM-80GB") & (table.model != "GPT-J-6B")]
    rows = rows[rows.isl >= 1024]
    ratios = []
    for r in rows.itertuples():
        seconds = step(r.model.lower(), r.gpu, r.tp, "fp16").seconds(0, 0, r.isl, (r.isl + 1) / 2, prompts=1)
        ratios.append(float(seconds) / (r.ttft_ms / 1e3))
    print(np.round(ratios, 2))
    assert np.mean(np.abs(np.array(ratios) - 1)) < 0.12


@needs_data
@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("gpu", ["A100-SXM-80GB", "H100-SXM-80GB", "H200-SXM-141GB", "B200-SXM-180GB", "GB200-186GB"])
def test_all_reduces_take_as_long_as_engines_kernels(gpu: str, engine: KernelEngine) -> None:
    """Of 4 KiB to 64 MB over 2 to 8 devices; versions of one engine differ on Blackwell."""
    systems = {"A100": "a100_sxm", "H100": "h100_sxm", "H200": "h200_sxm", "B200": "b200_sxm", "GB200": "gb200"}
    table = pd.read_parquet(DATA / "operators/custom_all_reduce.parquet")
    table = table[(table.system == systems[gpu.partition("-")[0]]) & ~table.kernel_source.str.contains("eager")]
    table = table[table.engine == engine]
    table = table[table.message_size.between(2048, 2**25)]
    errors = [
        np.log(
            all_reduce_s(
                2.0 * part.message_size.to_numpy(),
                n,
                ClusterSpec.parse(f"{n}x{gpu}"),
                packaged_coefficients(),
                [engine],
            )
        )
        - np.log(part.latency.to_numpy() / 1e3)
        for n, part in table.groupby("num_gpus")
    ]
    error = np.concatenate(errors)
    print(gpu, np.abs(error).mean(), np.exp(np.median(error)))
    assert np.abs(error).mean() < 0.3
    assert 0.85 < np.exp(np.median(error)) < 1.2
