"""Score the seconds of a serving step against measured tables: ``python benchmarks/serving_operators.py [DATA] [--rows OUT.csv]``.

Static batches, prefills and decode steps alone, first tokens, and closed loops of few requests, where hardly anything waits.
Nothing of an engine but its kernels is counted: no scheduler, no sampling, no host. Static batches of vLLM and TensorRT-LLM have
what their host adds to a step too, and runs of all requests at once are simulated (saturated.py). Errors are
|predicted / measured - 1|; ``ratio`` is the median of predicted over measured.
"""

from __future__ import annotations

import argparse
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from meshwright.cost_models.learned.serving_kernels import ExpertShape
from meshwright.cost_models.serving.engine import EngineProfile, Kernels
from meshwright.cost_models.serving.operators import row_costs
from meshwright.cost_models.serving.step import StepCosts, decoding_plane, prompts_plane
from meshwright.cost_models.serving.tables import Plane, over_rows
from meshwright.fitting.gemm import SYSTEMS
from meshwright.fitting.hosts import ENGINES, MODELS, decode_s, prefill_s
from meshwright.schema import ClusterSpec, Link, MeshwrightError, ModelSpec
from meshwright.schema.catalogue import find_link
from meshwright.schema.serving import ServingLayout
from saturated import profile_of, saturated_s

DATA = Path(__file__).resolve().parents[2] / "shared/data/serving"
DTYPES = {"fp4": "nvfp4", "fp8-block": "fp8", "int4-weights": "int4"}
PUBLISHED = {"gpt-oss-120b": "mxfp4"}
"""Type of models that are published in one alone; the tables call every 4-bit format nvfp4."""
PROFILED = ("vllm", "sglang", "trtllm")
OFFLINE_HOSTS = {"vLLM": (1.13e-3, 87e-6), "TensorRT-LLM": (1.25e-3, 20e-6)}
"""Seconds of a step and of a sequence in it, of loops without a server, on A100 [fitted: python -m meshwright.fitting hosts
STATIC_BATCHES.csv]."""


@cache
def model(name: str) -> ModelSpec:
    """Return the catalogue's model of a name in the tables."""
    names = {
        "deepseek-r1": "deepseek-v3",
        "deepseek-r1-0528": "deepseek-v3",
        **MODELS,
        "llama-3.3-70b": "llama-3.1-70b",
        "mistral-large": "mistral-large-2407",
    }
    return ModelSpec.named(names.get(name.lower(), name.lower()))


@cache
def step_costs(
    name: str, gpu: str, layout: tuple[int, int, int, int], dtypes: tuple[str, str, str], kernels: Kernels
) -> StepCosts:
    """Return the costs of an instance on nodes of eight devices (72 of GB200)."""
    tp, pp, attention_dp, ep = layout
    devices = tp * pp * attention_dp
    node = 72 if gpu.startswith("GB") else 8
    cluster = ClusterSpec.parse(f"1x{devices}x{gpu}" if devices <= node else f"{-(-devices // node)}x{node}x{gpu}")
    if cluster.levels[0].link.name == "pcie4-isolated":  # of clouds, not of NVIDIA's own machines
        link = Link(name="pcie4", **find_link("pcie4")[1])
        cluster = cluster.replace(levels=(cluster.levels[0].replace(link=link), *cluster.levels[1:]))
    weights, experts, kv = dtypes
    weights, experts = PUBLISHED.get(name, weights), PUBLISHED.get(name, experts)
    return StepCosts.build(
        model(name),
        cluster,
        ServingLayout(tp=tp, pp=pp, attention_dp=attention_dp, ep=ep),
        weights=DTYPES.get(weights, weights),
        experts=DTYPES.get(experts, experts),
        cache=DTYPES.get(kv, kv),
        kernels=kernels,
    )


@cache
def kernels_of(engine: str, version: Any = None) -> Kernels:
    """Return the kernels of an engine of the tables; those of vLLM where it has no profile."""
    if engine in ENGINES:
        return EngineProfile.named(*ENGINES[engine]).kernels
    number = re.match(r"\d+\.\d+", str(version))
    return EngineProfile.named(engine if engine in PROFILED else "vllm", number and number[0]).kernels


def closed_loop_step_s(step: StepCosts, rows: float, prompt: float, output: float) -> float:
    """Return the mean seconds between tokens where every request that ends is followed by another, whose prompt joins a step."""
    steady = float(step.seconds(rows, rows * (prompt + output / 2)))
    joins = float(
        step.seconds(max(rows - 1, 0), max(rows - 1, 0) * (prompt + output / 2), prompt, (prompt + 1) / 2, prompts=1)
    )
    return steady + (rows - 1) / output * (joins - steady) if rows > 1 else steady


def static_batches(data: Path) -> pd.DataFrame:
    table = pd.read_csv(data / "static_batches.csv")
    table = table[~table.gpu.isin(["SN40L"]) & ~table.note.fillna("").str.contains("layers|capped")]
    kv = table.kv_precision
    return _scored(
        table,
        lambda r: (r.gpu, (r.tp, r.pp, 1, 1), (r.precision, r.precision, kv[r.Index])),
        lambda s, r: prefill_s(s, r.batch, r.isl) + decode_s(s, r.batch, r.isl, r.osl) + r.osl * host_s(r),
        "e2e_s",
        1.0,
        lambda r: f"static {r.gpu} {r.engine} {r.precision}",
    )


def host_s(row: Any) -> float:
    """Return the seconds that an engine's host adds to a step: of its own loop (LLM-Inference-Bench), or of a version's profile."""
    if row.version == "2024" and row.engine in OFFLINE_HOSTS:
        step_s, row_s = OFFLINE_HOSTS[row.engine]
        return step_s + row_s * row.batch
    if row.engine != "vLLM":
        return 0.0
    overhead = EngineProfile.named("vllm", row.version).overhead
    return 0.0 if overhead.overlapped else overhead.step_s + overhead.row_s * row.batch


def splitwise(data: Path) -> pd.DataFrame:
    table = pd.read_csv(data / "prefill_decode_splitwise.csv")
    table = table[~table.gpu.str.contains("capped")]

    def build(r: Any) -> Any:
        return (r.gpu, (r.tp, 1, 1, 1), ("fp16",) * 3)

    def prefill(step: StepCosts, r: Any) -> float:
        return prefill_s(step, r.batch, r.isl)

    def decode(step: StepCosts, r: Any) -> float:
        return decode_s(step, r.batch, r.isl, r.osl) / (r.osl - 1)

    first = _scored(table, build, prefill, "prefill_ms", 1e-3, lambda r: f"splitwise prefill {r.gpu}")
    rest = _scored(table, build, decode, "decode_ms_per_step", 1e-3, lambda r: f"splitwise decode {r.gpu}")
    return pd.concat([first, rest])


def tensorrt_llm(data: Path) -> pd.DataFrame:
    table = pd.read_csv(data / "tensorrt_llm_published.csv")
    table["kv"] = np.where(table.precision.isin(["fp8", "fp4"]), "fp8", "fp16")

    def build(r: Any) -> Any:
        return (
            r.gpu,
            (r.tp, r.pp, r.attention_dp, 1 if np.isnan(r.ep) else int(r.ep)),
            (r.precision, r.precision, r.kv),
        )

    first = table[table.table == "first token latency"]
    scores = [
        _scored(
            first,
            build,
            lambda s, r: prefill_s(s, r.batch, r.isl),
            "ttft_ms",
            1e-3,
            lambda r: f"trtllm first token {r.gpu} {r.precision}",
        )
    ]
    static = table[(table.table == "peak throughput") & table.batch.notna()]
    static = static.assign(seconds=static.batch * static.osl / static.output_tokens_per_s)
    scores.append(
        _scored(
            static,
            build,
            lambda s, r: prefill_s(s, r.batch, r.isl) + decode_s(s, r.batch, r.isl, r.osl),
            "seconds",
            1.0,
            lambda r: f"trtllm static {r.gpu} {r.precision}",
        )
    )
    full = table[(table.table == "throughput") & ~table.version.isin(["0.10.0"])]
    full = full.assign(seconds=1.0 / full.output_tokens_per_s)
    scores.append(
        _scored(
            full,
            build,
            saturated_s,
            "seconds",
            1.0,
            lambda r: f"trtllm saturated {r.gpu} {r.precision}",
            kernels=lambda r: profile_of(r).kernels,
        )
    )
    online = table[table.table == "online serving (means)"]
    online = online[online.requests_per_s <= 4]
    scores.append(
        _scored(online, build, lambda s, r: online_step_s(s, r), "itl_ms", 1e-3, lambda r: f"trtllm online {r.gpu}")
    )
    return pd.concat(scores)


def online_step_s(step: StepCosts, row: Any) -> float:
    """Return the seconds between tokens at a request rate, by Little's law."""
    seconds, rate = 0.02, row.requests_per_s
    for _ in range(40):
        rows = rate * row.osl * seconds
        seconds = float(step.seconds(rows, rows * (row.isl + row.osl / 2), rate * seconds * row.isl, (row.isl + 1) / 2))
    return seconds


def end_to_end(data: Path) -> pd.DataFrame:
    table = pd.read_csv(data / "end_to_end_points.csv")
    usable = table.layout.isin(["given", "corrected"]) & (table.ambiguous == 0) & (table.out_of_order == 0)
    table = table[usable & (table["mode"] == "agg") & table.tp.notna()]
    table = table.assign(attention_dp=table.attention_dp.fillna(1), pp=table.pp.fillna(1), ep=table.ep.fillna(1))
    replicas = np.maximum(table.gpus / (table.tp * table.pp * table.attention_dp), 1)
    table = table.assign(rows=np.maximum(table.concurrency / replicas / table.attention_dp, 1))
    table = table[table.concurrency / replicas <= 8]

    def build(r: Any) -> Any:
        return (
            r.gpu,
            (int(r.tp), int(r.pp), int(r.attention_dp), int(r.ep)),
            (r.gemm_dtype, r.moe_dtype or r.gemm_dtype, cache_of(r)),
        )

    ends = _scored(
        table,
        build,
        lambda s, r: closed_loop_step_s(s, r.rows, 0.9 * r.isl, 0.9 * r.osl),
        "tpot_ms",
        1e-3,
        lambda r: f"tpot <= 8 {r.engine} {r.model} {r.gpu} {r.gemm_dtype}",
    )
    return ends


def latent_modules(data: Path) -> pd.DataFrame:
    """Return DeepSeek-V3's attention, projections included, on kernels that no fit has seen: rows that decode, and prompts."""
    block = model("deepseek-v3").block_runs[-1][0]
    half = block.halves[0]
    found = []
    for name in ("decode_latent_module", "prefill_latent_module"):
        table = pd.read_parquet(data / f"operators/{name}.parquet")
        usual = (table.engine == "trtllm") & (table.num_heads >= 16) & (table.gemm_type != "nvfp4")
        table = table[usual & table.system.isin(["h100_sxm", "h200_sxm", "b200_sxm", "gb200"])]
        for key, part in table.groupby(["system", "num_heads", "kv_cache_dtype", "gemm_type"]):
            gpu, tp = SYSTEMS[key[0]], 128 // key[1]
            dtypes = ("fp8" if "fp8" in key[3] else "bf16",) * 2 + ("fp8" if key[2] == "fp8" else "bf16",)
            step = step_costs("deepseek-v3", gpu, (tp, 1, 1, 1), dtypes, kernels_of("trtllm"))
            costs = row_costs(step.instance, half)["products"]
            planes = [Plane.of(plane(step.instance, half)) for plane in (decoding_plane, prompts_plane)]
            rows, isl = part.batch_size.to_numpy(dtype=float), part.isl.to_numpy(dtype=float)
            if name.startswith("decode"):
                seconds = over_rows(rows, costs) + planes[0](rows, part.step + 1.0)
            else:
                seconds = over_rows(rows * isl, costs) + planes[1](rows * isl, (isl + 1) / 2)
            label = f"{name} {gpu} {key[3]}"
            found.append(pd.DataFrame({"table": label, "predicted": seconds, "measured": part.latency / 1e3}))
    return pd.concat(found)


def wide_experts(data: Path) -> pd.DataFrame:
    """Return DeepSeek-V3's experts over 2 to 256 ranks under even loads (DeepEP's masked kernels), which no fit has seen."""
    table = pd.read_parquet(data / "operators/decode_wide_experts.parquet")
    table = table[table.distribution == "uniform"]
    found = []
    for (system, ep), part in table.groupby(["system", "moe_ep_size"]):
        layout, kernels = (1, 1, int(ep), int(ep)), kernels_of("sglang")
        products = step_costs("deepseek-v3", SYSTEMS[system], layout, ("fp8",) * 3, kernels).instance.products
        tokens, top_k, experts = (part[name].to_numpy(dtype=float) for name in ("num_tokens", "topk", "num_experts"))
        rows, ones = tokens * top_k / ep, np.ones(len(part))
        shape = ExpertShape(
            rows=rows, tokens=tokens * (1 - (1 - 1 / ep) ** top_k), reached=np.minimum(experts / ep, rows), experts=experts / ep,
            hidden_dim=7168 * ones, ffn_dim=2048 * ones, gated=ones, weight_bytes=ones, faster=2 * ones, cutlass=0 * ones,
        )  # fmt: skip
        label = f"experts over {'2 to 16' if ep <= 16 else '32 to 256'} ranks {SYSTEMS[system]}"
        seconds = products.experts(shape, "fp8")
        found.append(pd.DataFrame({"table": label, "predicted": seconds, "measured": part.latency / 1e3}))
    return pd.concat(found)


def cache_of(row: Any) -> str:
    """Return the cache's type of a row that does not say: fp8 where weights are, and that of 16 bits for weights alone in 4."""
    return "fp8" if row.gemm_dtype in ("fp8", "nvfp4") and row.model != "gpt-oss-120b" else "bf16"


def _scored(
    table: pd.DataFrame, build: Any, seconds: Any, column: str, unit: float, group: Any, *, kernels: Any = None
) -> pd.DataFrame:
    found = []
    kernels = kernels or (lambda r: kernels_of(getattr(r, "engine", "trtllm"), getattr(r, "version", None)))
    for row in table.itertuples():
        gpu, layout, dtypes = build(row)
        try:
            step = step_costs(row.model, gpu, tuple(map(int, layout)), tuple(map(str, dtypes)), kernels(row))
            predicted = seconds(step, row)
        except MeshwrightError as error:
            found.append({"table": group(row), "id": row.Index, "note": str(error).splitlines()[0]})
            continue
        measured = getattr(row, column) * unit
        found.append({"table": group(row), "id": row.Index, "predicted": predicted, "measured": measured})
    return pd.DataFrame(found)


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows, mean and median error in percent, and the median ratio by table."""
    rows = rows.assign(error=100 * (rows.predicted / rows.measured - 1).abs(), ratio=rows.predicted / rows.measured)
    return (
        rows.groupby("table")
        .agg(
            rows=("error", "count"),
            refused=("predicted", lambda p: int(p.isna().sum())),
            mean=("error", "mean"),
            median=("error", "median"),
            ratio=("ratio", "median"),
        )
        .round(2)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    parser.add_argument("--rows", type=Path, help="every row as CSV")
    parser.add_argument(
        "--only", default="static_batches,splitwise,tensorrt_llm,end_to_end,latent_modules,wide_experts"
    )
    options = parser.parse_args()
    parts = [globals()[name](options.data) for name in options.only.split(",")]
    rows = pd.concat(parts, ignore_index=True)
    if options.rows:
        rows.to_csv(options.rows, index=False)
    print(summary(rows).to_string())
    if "note" in rows and rows.note.notna().any():
        print(rows[rows.note.notna()].groupby(["table", "note"]).size().to_string())


if __name__ == "__main__":
    main()
