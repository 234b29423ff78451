"""Fit what serving engines run: decode_attention.npz and experts.npz, residuals over rooflines that are the same everywhere.

Rows are aiconfigurator's kernel tables; of attention none of the kernels that an engine falls back to. Experts are
taken with the loads of a power law (imbalance of real routers), whose rank with most rows the table times. Scores leave out whole
architectures, since devices of one share a die.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..cost_models.coefficients import packaged_coefficients
from ..cost_models.learned import serving_kernels as kernels
from ..cost_models.learned.kernels import ResidualModel
from ..cost_models.learned.serving_kernels import DecodeShape, ExpertShape, KernelDevice
from ..schema.catalogue import find_device
from ..schema.serving import BYTES_OF
from ..schema.units import FloatArray
from .estimator import fit_residual, percent_error, write_artefact
from .gemm import SYSTEMS, family_of

SOURCE = "aiconfigurator 095f58a (Apache-2.0)"
ATTENTION_KERNELS = (
    "torch_flow", "torch_flow_flashinfer", "vllm_flash_attn_fa3", "fa3", "trtllm_mha", "vllm_flashinfer_trtllmdecode",
    "vllm_flash_attn", "vllm_flash_attn_fa2", "vllm_flashinfer_fidecode", "flashinfer",
)  # fmt: skip
"""Of TensorRT-LLM, vLLM and SGLang; without Triton's, which engines fall back to."""

EXPERT_DTYPES = {"bfloat16": "bf16", "fp8_block": "fp8", "nvfp4": "nvfp4"}
LOADS = "balanced"
POPULARITY_CV = float(packaged_coefficients()["serving"]["popularity_cv"])
_TREES = {"max_iter": 220, "max_leaf_nodes": 24, "learning_rate": 0.1}
_MAX_ROWS = 60_000


def report_attention(options: Namespace) -> str:
    """Write decode_attention.npz."""
    folder = options.data / "serving/operators"
    table = pd.concat(
        [_attention_rows(folder / "decode_attention.parquet"), _latent_rows(folder / "decode_latent_attention.parquet")]
    )
    return _fitted(
        options,
        "decode_attention",
        table.reset_index(drop=True),
        decode_shape,
        kernels.decode_roofline_s,
        kernels.decode_features,
    )


def report_experts(options: Namespace) -> str:
    """Write experts.npz."""
    table = pd.read_parquet(options.data / "operators/moe_grouped_gemm.parquet")
    dtype = table.moe_dtype.map(EXPERT_DTYPES)
    # Only skewed loads were timed on A100; those of DeepSeek's groups of experts are never even.
    skewed = (table.distribution == "power_law_1.01") & (table.moe_ep_size == 1) & (table.system == "a100_sxm")
    grouped = (table.hidden_size == 7168) & (table.num_experts == 256)
    even = (table.distribution == LOADS) & ~grouped
    table = table[(even | skewed) & dtype.notna()].assign(dtype=dtype)
    table = table.assign(seconds=table.latency / 1e3, fp8=table.dtype == "fp8", fp4=table.dtype == "nvfp4")
    return _fitted(
        options,
        "experts",
        table.reset_index(drop=True),
        expert_shape,
        kernels.expert_roofline_s,
        kernels.expert_features,
    )


def _attention_rows(path: Path) -> pd.DataFrame:
    table = pd.read_parquet(path)
    slow = (
        (table.engine == "sglang")
        & ~table.system.isin(["h100_sxm", "h200_sxm"])
        & (table.kernel_source != "trtllm_mha")
    )
    table = table[table.kernel_source.isin(ATTENTION_KERNELS) & ~slow & (table.num_heads >= table.num_key_value_heads)]
    window = table.window_size.where(table.window_size > 0, np.inf)
    return table.assign(
        seconds=table.latency / 1e3, tokens=np.minimum(table.step + 1, window), kv_heads=table.num_key_value_heads,
        key_dim=table.head_dim, value_dim=table.head_dim, latent=0.0,
    )  # fmt: skip


def _latent_rows(path: Path) -> pd.DataFrame:
    table = pd.read_parquet(path)
    # SGLang's FlashAttention reads an 8-bit latent cache at a twelfth of the bandwidth: engines take others.
    slow = (table.kernel_source == "flash_attention") & (table.kv_cache_dtype == "fp8")
    table = table[(table.kernel_source != "triton") & ~slow]
    return table.assign(
        seconds=table.latency / 1e3, tokens=table.step + 1, kv_heads=1, key_dim=576, value_dim=512, latent=1.0
    )


def _columns(table: pd.DataFrame, *names: str) -> list[FloatArray]:
    return [table[name].to_numpy(dtype=float) for name in names]


def decode_shape(table: pd.DataFrame) -> DecodeShape:
    """Return the calls of a table."""
    names = ("batch_size", "tokens", "num_heads", "kv_heads", "key_dim", "value_dim", "latent")
    rows, tokens, heads, kv_heads, key_dim, value_dim, latent = _columns(table, *names)
    element = np.where(table.kv_cache_dtype == "fp8", 1.0, 2.0)
    width = np.where(latent > 0, key_dim, key_dim + value_dim)
    engine = table.engine.map(kernels.ENGINES.index).to_numpy(dtype=float)
    return DecodeShape(
        rows, tokens, heads, kv_heads, key_dim, value_dim, width * kv_heads * element, element, latent, engine
    )


def expert_shape(table: pd.DataFrame) -> ExpertShape:
    """Return the calls of a table."""
    names = ("num_tokens", "topk", "num_experts", "moe_ep_size", "moe_tp_size", "hidden_size", "inter_size")
    tokens, top_k, all_experts, ep, tp, hidden_dim, ffn_dim = _columns(table, *names)
    experts = all_experts / ep
    return ExpertShape(
        rows=tokens * top_k / ep,
        tokens=tokens,
        reached=np.where(
            table.distribution == LOADS,
            np.minimum(experts, tokens * top_k / ep),
            experts * kernels.reached_fraction(tokens * top_k / all_experts, POPULARITY_CV),
        ),
        experts=experts,
        hidden_dim=hidden_dim,
        ffn_dim=ffn_dim / tp,
        gated=np.ones(len(table)),
        weight_bytes=table.dtype.map(BYTES_OF).to_numpy(dtype=float),
        faster=np.asarray(device_of(table).flops_per_s / _peaks(table, "bf16")),
        # Those that scale by blocks are as fast as others.
        cutlass=(table.kernel_source.str.contains("cutlass") & (table.dtype != "fp8")).to_numpy(dtype=float),
    )


def _peaks(table: pd.DataFrame, dtype: str) -> FloatArray:
    peaks = {name: find_device(device)[1]["peak_flops_per_s"].get(dtype, np.nan) for name, device in SYSTEMS.items()}
    return np.asarray(table.system.map(peaks).to_numpy(dtype=float))


def device_of(table: pd.DataFrame) -> KernelDevice:
    """Return the data sheets of a table's devices, with the peak of the operands' type."""
    peak = _peaks(table, "bf16")
    for dtype in ("fp8", "fp4"):
        if dtype in table:
            faster = _peaks(table, dtype)
            peak = np.where(table[dtype] & ~np.isnan(faster), faster, peak)
    sheets = pd.DataFrame({name: find_device(device)[1] for name, device in SYSTEMS.items()}).T.loc[table.system]
    bandwidth, processors, cache = _columns(sheets, "memory_bandwidth_bytes_per_s", "num_sms", "cache_bytes")
    return KernelDevice(bandwidth, peak, processors, cache)


Shape = Callable[[pd.DataFrame], Any]


def _fitted(
    options: Namespace,
    name: str,
    table: pd.DataFrame,
    shape: Shape,
    roofline: Callable[..., FloatArray],
    features: Callable[..., Any],
) -> str:
    def columns(part: pd.DataFrame) -> tuple[dict[str, FloatArray], FloatArray]:
        return features(shape(part), device_of(part)), np.ravel(roofline(shape(part), device_of(part)))

    def model(part: pd.DataFrame) -> ResidualModel:
        part = part.sample(min(len(part), _MAX_ROWS), random_state=0)
        x, base = columns(part)
        regressor = fit_residual(np.stack(list(x.values()), axis=1), base, part.seconds.to_numpy(), **_TREES)
        return regressor.to_model(list(x), {"rows": len(table), "sources": SOURCE})

    def error(fit: ResidualModel, part: pd.DataFrame) -> float:
        x, base = columns(part)
        return round(percent_error(base * np.exp(fit.log_residual(x)), part.seconds.to_numpy()), 1)

    scores: dict[str, Any] = {}
    if options.score:
        random = np.random.default_rng(0).random(len(table)) < 0.2
        scores["a random fifth of the rows"] = error(model(table[~random]), table[random])
        family = table.system.map({system: family_of(device) for system, device in SYSTEMS.items()})
        for left_out in sorted(set(family)):
            scores[f"{left_out} left out"] = error(model(table[family != left_out]), table[family == left_out])
        for system in sorted(set(table.system)):
            scores[f"{system} left out"] = error(model(table[table.system != system]), table[table.system == system])
    return write_artefact(model(table), options.out, name, scores)
