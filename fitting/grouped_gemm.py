"""Fits [grouped_gemm] of coefficients.toml: what products of experts take over plain products of the same host.

    pass = experts * per_expert_s + ratio * max(F / (P e), bytes / (W e_m))        e: the host's plain products

Measured on SimuMax's training passes (Transformer Engine, bf16). aiconfigurator's tables of fused mixture-of-experts layers time
both products, the activation and the permutation of inference kernels (Triton, TensorRT-LLM) in one figure; they are scored
with the same roofline and say how much uneven routing costs. Prints; writes no artefact.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from ..schema.arrays import FloatArray
from .attention import PEAKS
from .operators import FittedModels

HOSTS = {"a100_pcie": (1.935e12, 312e12), "b200_bf16_ceperm": (7.672e12, 2250e12)}
"""Bytes/s and bf16 FLOP/s of the data sheets."""

MEMORY_EFFICIENCY = 0.75
STAGES = {"fwd": "forward", "bwd_grad_act": "dgrad", "bwd_grad_w": "wgrad"}


def fit(folder: Path, *, score: bool) -> FittedModels:
    """Coefficients of each pass, with the errors of shapes left out."""
    table = read_passes(folder / "operators" / "simumax" / "efficiency.csv")
    scores: dict[str, Any] = {}
    for stage, name in STAGES.items():
        part = table[table.stage == stage]
        expert_us, ratio = _solve(part)
        scores[f"{name}: microseconds an expert, ratio"] = (round(float(expert_us), 2), round(float(ratio), 3))
        if score:
            scores[f"{name}: shapes left out"] = _left_out(part)
    if score:
        scores.update(_fused_layers(folder / "operators" / "moe_grouped_gemm.parquet"))
    return FittedModels({}, scores)


def read_passes(path: Path) -> pd.DataFrame:
    """Grouped products: experts, rows of each, n, k, pass, seconds, and the roofline from the host's plain products."""
    table = pd.read_csv(path)
    plain = table[table.op == "matmul"].groupby("sys").eff.median()
    table = table[table.op == "group_matmul"].reset_index(drop=True)
    names = {"experts": "ng", "rows": "M", "n": "N", "k": "K"}
    for name, key in names.items():
        table[name] = table.key.str.extract(rf"\b{key}=(\d+)")[0].astype(float)
    table["stage"] = table.key.str.extract(r"stage=(\w+)")[0]
    fp32 = table.key.str.contains("main_grad_dtype=fp32") & (table.stage == "bwd_grad_w")
    is_weights = table.stage == "bwd_grad_w"
    weight_bytes = np.where(is_weights, np.where(fp32, 8.0, 4.0), 2.0)
    flops = 2 * table.experts * table.rows * table.n * table.k
    moved = table.experts * (weight_bytes * table.n * table.k + 2 * table.rows * (table.n + table.k))
    table["seconds"] = flops / (table.eff * table.tflops * 1e12)
    bandwidth, peak = (table.sys.map({host: sheet[i] for host, sheet in HOSTS.items()}) for i in range(2))
    table["roofline"] = np.maximum(flops / (peak * table.sys.map(plain)), moved / (bandwidth * MEMORY_EFFICIENCY))
    return table


def _columns(table: pd.DataFrame) -> FloatArray:
    return np.asarray(table[["experts", "roofline"]].to_numpy() * [1e-6, 1.0])


def _solve(table: pd.DataFrame) -> FloatArray:
    seconds = table.seconds.to_numpy()
    return np.asarray(nnls(_columns(table) / seconds[:, None], np.ones(len(seconds)))[0])


def _left_out(table: pd.DataFrame) -> float:
    """Mean absolute percentage error of shapes that were not fitted."""
    errors = []
    for _, part in table.groupby(["experts", "rows", "n", "k"]):
        coefficients = _solve(table.drop(part.index))
        errors.append(np.mean(np.abs(_columns(part) @ coefficients / part.seconds - 1)))
    return round(float(100 * np.mean(errors)), 1)


def _fused_layers(path: Path) -> dict[str, Any]:
    """Whole bf16 expert layers of one rank: error of a four-term roofline on a fifth left out, and the cost of uneven routing."""
    table = pd.read_parquet(path)
    plain = (table.moe_dtype == "bfloat16") & (table.moe_ep_size == 1) & (table.num_tokens >= 1024)
    table = table[plain & table.kernel_source.str.contains("tritonexperts|trtllm|vllm_fused_moe")].astype(
        dict.fromkeys(("num_tokens", "topk", "hidden_size", "inter_size", "num_experts", "moe_tp_size"), float)
    )
    peaks = np.array([PEAKS[name] for name in table.system])
    rows, width = table.num_tokens * table.topk, table.inter_size / table.moe_tp_size
    weights = 3 * table.num_experts * table.hidden_size * width
    columns = np.column_stack(
        [
            np.full(len(table), 1e-6),
            6 * rows * table.hidden_size * width / peaks[:, 0],
            2 * weights / peaks[:, 1],
            2 * rows * (2 * table.hidden_size + 5 * width) / peaks[:, 1],
        ]
    )
    seconds = table.latency.to_numpy(dtype=float) * 1e-3
    seen = np.random.default_rng(0).random(len(table)) < 0.8
    scores: dict[str, Any] = {}
    for system in sorted(set(table.system)):
        own = (table.system == system).to_numpy()
        terms = nnls(columns[own & seen] / seconds[own & seen, None], np.ones(int((own & seen).sum())))[0]
        error = np.abs(columns[own & ~seen] @ terms / seconds[own & ~seen] - 1)
        scores[f"fused layer forward, {system}, a fifth left out"] = round(float(100 * np.mean(error)), 1)
    scores["fused layer: power law 1.2 over balanced"] = _uneven(table)
    return scores


def _uneven(table: pd.DataFrame) -> float:
    """Median ratio of seconds under a power-law router of exponent 1.2 to those of an even one, same shape."""
    keys = ["system", "num_tokens", "topk", "hidden_size", "inter_size", "num_experts", "moe_tp_size", "kernel_source"]
    wide = table.pivot_table(index=keys, columns="distribution", values="latency", aggfunc="median")
    return round(float((wide["power_law_1.2"] / wide["balanced"]).median()), 3)
