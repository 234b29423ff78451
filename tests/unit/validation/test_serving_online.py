"""The simulation against recorded online runs: a run request by request, layouts of one trace, MLPerf submissions.

Sources: casys-kaist/LLMServingSim @ 5daddb2, microsoft/apex_plus @ 8769096, mlcommons/inference_results_v5.1.
Run with -s to see the figures of every row.
"""

from __future__ import annotations

import csv
import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from meshwright.cost_models.serving.engine import EngineProfile
from meshwright.cost_models.serving.memory import serving_memory
from meshwright.cost_models.serving.simulation import EnginePool, RequestTable, SimulatedRequests, simulate
from meshwright.cost_models.serving.step import StepCosts
from meshwright.schema import ClusterSpec, ModelSpec
from meshwright.schema.serving import CacheDtype, ServingLayout, WeightDtype

SHARED = Path(__file__).resolve().parents[4] / "shared/data/serving"
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="the measured runs are not beside the repository")


def table(name: str) -> list[dict[str, str]]:
    path = SHARED / name
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return list(csv.DictReader(file))


def column(rows: list[dict[str, str]], name: str) -> Any:
    return np.array([float(row[name]) for row in rows])


def error(predicted: Any, measured: Any) -> float:
    """Return the mean relative error."""
    return float(np.mean(np.abs(predicted / measured - 1)))


def test_a_run_on_a_gpu_never_profiled_request_by_request() -> None:
    """vLLM 0.19, Llama-3.1-8B on an RTX 4090 that is overloaded: 300 requests, budget, batch and cache as reported."""
    rows = sorted(table("online_requests_llmservingsim.csv"), key=lambda row: float(row["arrival_s"]))
    step = StepCosts.build(
        ModelSpec.named("llama-3.1-8b"),
        ClusterSpec.parse("1xRTX4090-24GB"),
        ServingLayout(),
        weights="bf16",
        cache="bf16",
    )
    profile = EngineProfile.named("vllm", "0.19.0")
    limits = profile.limits(device_bytes=24e9, cache_tokens=41408, max_batch=256, max_batched_tokens=2048)
    requests = RequestTable.of(column(rows, "prompt_tokens"), column(rows, "output_tokens"), column(rows, "arrival_s"))
    served = simulate(EnginePool.of(step, profile, limits), requests)
    ttft, tpot = 1e3 * served.ttft_s, 1e3 * served.tpot_s
    errors = error(ttft, column(rows, "ttft_ms")), error(tpot, column(rows, "tpot_ms"))
    print(f"TTFT {errors[0]:.3f}, TPOT {errors[1]:.3f}")
    assert errors[0] < 0.2
    assert errors[1] < 0.16
    assert np.corrcoef(ttft, column(rows, "ttft_ms"))[0, 1] > 0.99


def apex_row(row: dict[str, str], steps: dict[int, StepCosts]) -> SimulatedRequests:
    """Serve a trace with dp replicas of a tp; requests stopped early, so that outputs are scaled to the tokens served."""
    trace = table(f"traces/apex_{row['trace'].replace('/', '_')}_0.5.csv.gz")[: int(row["requests"])]
    tp, outputs = int(row["tp"]), column(trace, "output_tokens")
    outputs = np.maximum(np.round(outputs * float(row["output_tokens"]) / float(row["requests"]) / outputs.mean()), 1)
    if tp not in steps:
        cluster, layout = ClusterSpec.parse(f"{tp}xH100-SXM-80GB"), ServingLayout(tp=tp)
        steps[tp] = StepCosts.build(ModelSpec.named(row["model"]), cluster, layout, weights="bf16", cache="bf16")
    profile, prompts = EngineProfile.named("vllm", "0.6.0"), column(trace, "prompt_tokens")
    memory = serving_memory(steps[tp], profile, request_len=float((prompts + outputs).max()))
    limits = profile.limits(
        device_bytes=memory.device_bytes, cache_tokens=memory.cache_tokens, longest_prompt=int(prompts.max())
    )
    pool = EnginePool.of(steps[tp], profile, limits, replicas=int(row["dp"]))
    arrivals = column(trace, "arrival_s") * 0.5 / float(row["requests_per_s"])
    return simulate(pool, RequestTable.of(prompts, outputs, arrivals), router="round_robin")


@pytest.mark.long
def test_the_best_layout_of_a_trace_is_the_measured_one() -> None:
    """Llama-3.1-70B on eight H100 as dp x tp, vLLM 0.6: 22 runs, six choices."""
    rows, steps = table("online_layouts_apex.csv"), dict[int, StepCosts]()
    served = [apex_row(row, steps) for row in rows]
    latency = np.array([part.e2e_s.mean() for part in served])
    figures = {
        "ttft_ms": np.array([1e3 * part.ttft_s.mean() for part in served]),
        "tpot_ms": np.array([1e3 * part.tpot_s.mean() for part in served]),
        "mean_e2e_s": latency,
    }
    errors = {name: error(values, column(rows, name)) for name, values in figures.items()}
    print(errors)
    assert errors["tpot_ms"] < 0.08
    assert errors["ttft_ms"] < 0.2
    assert errors["mean_e2e_s"] < 0.12
    choices = 0
    for key in {(row["trace"], row["requests_per_s"]) for row in rows}:
        members = [i for i, row in enumerate(rows) if (row["trace"], row["requests_per_s"], row["gpus"]) == (*key, "8")]
        measured = column(rows, "mean_e2e_s")[members]
        choices += int(np.argmin(latency[members]) == np.argmin(measured))
    assert choices == 6


LOADS = {
    "llama2-70b-99": ("llama-2-70b", 294, 0.9, 0.7),
    "llama3.1-405b": ("llama-3.1-405b", 9400, 0.6, 0.3),
    "llama3.1-8b": ("llama-3.1-8b", 870, 0.4, 0.0),
}
"""Model, mean prompt and the variation of prompts and answers of a benchmark; DeepSeek-R1's submissions speculate."""
WEIGHTS: dict[str, WeightDtype] = {"fp4": "nvfp4", "fp8": "fp8"}


def mlperf_row(row: dict[str, str]) -> SimulatedRequests:
    """Serve a submission: Poisson arrivals, lengths drawn with the benchmark's means (gamma)."""
    name, mean_prompt, prompt_cv, output_cv = LOADS[row["model"]]
    tp, rate = int(float(row["tp"])), float(row["target_qps"])
    replicas = int(float(row["accelerators"])) // tp
    mean_output, draw = float(row["result"]) / rate, np.random.default_rng(0)
    count = int(np.clip(150 * rate, 1000, 60_000))

    def lengths(mean: float, cv: float) -> Any:
        drawn = draw.gamma(1 / cv**2, mean * cv**2, count) if cv else np.full(count, mean)
        return np.maximum(np.round(drawn), 1)

    kv: CacheDtype = "fp8"
    step = StepCosts.build(
        ModelSpec.named(name), ClusterSpec.parse(f"{tp}xB200-SXM-180GB"), ServingLayout(tp=tp),
        weights=WEIGHTS[row["weights"]], cache=kv,
    )  # fmt: skip
    profile = EngineProfile.named("trtllm", "0.14")
    tokens = int(float(row["max_num_tokens"] or 2048))
    profile = profile.replace(scheduler=profile.scheduler.replace(chunks_prompts=True))
    batch = int(float(row["max_batch"]))
    memory = serving_memory(
        step, profile, request_len=mean_prompt + mean_output, max_batch=batch, max_batched_tokens=tokens
    )
    limits = profile.limits(
        device_bytes=memory.device_bytes, cache_tokens=memory.cache_tokens, max_batch=batch, max_batched_tokens=tokens
    )
    requests = RequestTable.of(
        lengths(mean_prompt, prompt_cv), lengths(mean_output, output_cv), np.cumsum(draw.exponential(1 / rate, count))
    )
    return simulate(EnginePool.of(step, profile, limits, replicas=replicas), requests)


@pytest.mark.long
def test_mlperf_servers_with_a_known_layout() -> None:
    """One submission a benchmark and scenario (NVIDIA's): rates that were served are served, TPOT by benchmark."""
    rows = [
        row
        for row in table("mlperf_inference.csv")
        if row["submitter"] == "NVIDIA"
        and row["scenario"] in ("Server", "Interactive")
        and row["tp"]
        and row["model"] in LOADS
    ]
    assert rows
    found = []
    for row in rows:
        served = mlperf_row(row)
        half, begin, end = served.after(len(served.ttft_s) // 2), np.quantile(served.sent_s, 0.5), served.sent_s.max()
        ended = (served.sent_s + served.e2e_s > begin) & (served.sent_s + served.e2e_s <= end)
        tpot, rate = np.quantile(half.tpot_s, 0.99) * 1e3, served.output_len[ended].sum() / (end - begin)
        found.append((tpot / float(row["tpot_p99_ms"]), rate / float(row["result"])))
        print(row["model"], row["scenario"], f"p99 TPOT {tpot:.1f} of {row['tpot_p99_ms']}, tokens/s {rate:.0f} of {row['result']}",
              f"TTFT {half.ttft_s.mean() * 1e3:.0f} of {row['ttft_mean_ms']}")  # fmt: skip
    ratios = np.array(found)
    print("median error", np.median(np.abs(ratios - 1), axis=0))
    assert np.median(np.abs(ratios[:, 1] - 1)) < 0.15
