"""Fit [grouped_gemm] of coefficients.toml: what products of experts take over plain products of the same host.

    pass = experts * per_expert_s + ratio * max(F / (P e), bytes / (W e_m))        e: the host's plain products

Measured on SimuMax's training passes (Transformer Engine, bf16). aiconfigurator's tables of fused mixture-of-experts layers time
both products, the activation and the permutation of inference kernels (Triton, TensorRT-LLM) in one figure; they are scored
with the same roofline and say how much uneven routing costs. Prints; writes no artefact.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..schema.arrays import FloatArray
from .attention import least_relative_squares
from .estimator import score_lines
from .gemm import SYSTEMS, data_sheet

HOSTS = {"a100_pcie": "A100-PCIe-80GB", "b200_bf16_ceperm": "B200-SXM-180GB"}
MEMORY_EFFICIENCY = 0.75
STAGES = {"fwd": "forward", "bwd_grad_act": "dgrad", "bwd_grad_w": "wgrad"}


def report(options: Namespace) -> str:
    """Return the coefficients of each pass; where requested, with the errors of shapes left out."""
    table = read_passes(options.data / "operators" / "simumax" / "efficiency.csv")
    scores: dict[str, Any] = {}
    for stage, name in STAGES.items():
        passes = table[table.stage == stage]
        expert_us, ratio = _solve(passes)
        scores[f"{name}: microseconds an expert, ratio"] = (round(float(expert_us), 2), round(float(ratio), 3))
        if options.score:
            scores[f"{name}: shapes left out"] = _left_out(passes)
    if options.score:
        scores.update(_fused_layers(options.data / "operators" / "moe_grouped_gemm.parquet"))
    return score_lines("grouped_gemm", scores)


def read_passes(path: Path) -> pd.DataFrame:
    """Return grouped products: experts, rows of each, n, k, pass, seconds, and the roofline from the host's plain products."""
    table = pd.read_csv(path)
    plain = table[table.op == "matmul"].groupby("sys").eff.median()
    table = table[table.op == "group_matmul"].reset_index(drop=True)
    for name, key in {"experts": "ng", "rows": "M", "n": "N", "k": "K"}.items():
        table[name] = table.key.str.extract(rf"\b{key}=(\d+)")[0].astype(float)
    table["stage"] = table.key.str.extract(r"stage=(\w+)")[0]
    is_weights = table.stage == "bwd_grad_w"
    is_fp32 = table.key.str.contains("main_grad_dtype=fp32") & is_weights
    weight_bytes = np.where(is_weights, np.where(is_fp32, 8.0, 4.0), 2.0)
    flops = 2 * table.experts * table.rows * table.n * table.k
    moved_bytes = table.experts * (weight_bytes * table.n * table.k + 2 * table.rows * (table.n + table.k))
    table["seconds"] = flops / (table.eff * table.tflops * 1e12)
    peak, bandwidth = (table.sys.map({host: data_sheet(name)[i] for host, name in HOSTS.items()}) for i in (0, 1))
    table["roofline"] = np.maximum(flops / (peak * table.sys.map(plain)), moved_bytes / (bandwidth * MEMORY_EFFICIENCY))
    return table


def _columns(table: pd.DataFrame) -> FloatArray:
    return np.asarray(table[["experts", "roofline"]].to_numpy() * [1e-6, 1.0])


def _solve(table: pd.DataFrame) -> FloatArray:
    """Return microseconds an expert, and the ratio."""
    return least_relative_squares(_columns(table), table.seconds.to_numpy())


def _left_out(table: pd.DataFrame) -> float:
    """Return the mean absolute percentage error of shapes that were not fitted."""
    errors = []
    for _, shape in table.groupby(["experts", "rows", "n", "k"]):
        coefficients = _solve(table.drop(shape.index))
        errors.append(np.mean(np.abs(_columns(shape) @ coefficients / shape.seconds - 1)))
    return round(float(100 * np.mean(errors)), 1)


def _fused_layers(path: Path) -> dict[str, Any]:
    """Return, of bf16 expert layers of one rank, the error of a four-term roofline and the cost of uneven routing.

    The error is that on a fifth left out.
    """
    table = pd.read_parquet(path)
    plain = (table.moe_dtype == "bfloat16") & (table.moe_ep_size == 1) & (table.num_tokens >= 1024)
    table = table[plain & table.kernel_source.str.contains("tritonexperts|trtllm|vllm_fused_moe")].astype(
        dict.fromkeys(("num_tokens", "topk", "hidden_size", "inter_size", "num_experts", "moe_tp_size"), float)
    )
    peak, bandwidth = np.array([data_sheet(SYSTEMS[name]) for name in table.system]).T
    rows, width = table.num_tokens * table.topk, table.inter_size / table.moe_tp_size
    columns = np.column_stack(
        [
            np.full(len(table), 1e-6),
            6 * rows * table.hidden_size * width / peak,
            6 * table.num_experts * table.hidden_size * width / bandwidth,
            2 * rows * (2 * table.hidden_size + 5 * width) / bandwidth,
        ]
    )
    seconds = table.latency.to_numpy(dtype=float) * 1e-3
    is_train = np.random.default_rng(0).random(len(table)) < 0.8
    scores: dict[str, Any] = {}
    for system in sorted(set(table.system)):
        train, test = ((table.system == system).to_numpy() & part for part in (is_train, ~is_train))
        error = np.abs(columns[test] @ least_relative_squares(columns[train], seconds[train]) / seconds[test] - 1)
        scores[f"fused layer forward, {system}, a fifth left out"] = round(float(100 * np.mean(error)), 1)
    scores["fused layer: power law 1.2 over balanced"] = _uneven(table)
    return scores


def _uneven(table: pd.DataFrame) -> float:
    """Return the median ratio of seconds under a power-law router of exponent 1.2 to those of an even one, same shape."""
    keys = ["system", "num_tokens", "topk", "hidden_size", "inter_size", "num_experts", "moe_tp_size", "kernel_source"]
    wide = table.pivot_table(index=keys, columns="distribution", values="latency", aggfunc="median")
    return round(float((wide["power_law_1.2"] / wide["balanced"]).median()), 3)
