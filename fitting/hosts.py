"""Fit what the host of an engine without a server adds to a step: ``python -m meshwright.fitting hosts STATIC_BATCHES.csv``.

Static batches of LLM-Inference-Bench were run by offline loops (vLLM's benchmark_latency.py, TensorRT-LLM's run.py), which neither
stream tokens nor take requests over a network, so that the host of an engine's profile is not theirs. A batch of b sequences takes
its kernels and, for each of its o tokens, h + r b seconds: h and r leave the least mean |log(predicted / measured)| on the rows of
A100 in 16 bits. Rows of H100 fit nothing and are scored beside them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import minimize

from ..cost_models.serving.engine import EngineProfile
from ..cost_models.serving.step import StepCosts
from ..schema import ClusterSpec, ModelSpec
from ..schema.errors import ConfigError
from ..schema.serving import ServingLayout
from ..schema.units import FloatArray

ENGINES = {"vLLM": ("vllm", "0.6"), "TensorRT-LLM": ("trtllm", "0.14")}
"""Profiles whose kernels those of 2024 had."""

MODELS = {"llama-3-8b": "llama-3.1-8b", "llama-3-70b": "llama-3.1-70b", "llama2-70b": "llama-2-70b"}
"""Names of the table whose shape the catalogue has under another one."""

FITTED, UNSEEN = "A100-SXM-40GB", "H100-SXM-80GB"
_REQUIRED = ("engine", "version", "gpu", "precision", "model", "tp", "batch", "isl", "osl", "e2e_s")
_TOKEN_LIMIT = 16384
"""Of prompts at once."""

_POINTS = 16
"""Passes of a decoding that are evaluated: its seconds are nearly linear in the tokens seen."""

_STARTS = ((1e-3, 1e-5), (3e-3, 5e-5), (5e-4, 1e-4))


def prefill_s(step: StepCosts, batch: float, prompt: float) -> float:
    """Return the seconds of prompts, as many at once as a step takes."""
    num_prompts = max(min(batch, _TOKEN_LIMIT // prompt), 1)
    return float(step.seconds(0, 0, num_prompts * prompt, (prompt + 1) / 2, prompts=num_prompts)) * batch / num_prompts


def decode_s(step: StepCosts, batch: float, prompt: float, output: float) -> float:
    """Return the seconds of the tokens after the first."""
    if output <= 1:
        return 0.0
    context = prompt + np.linspace(1, output - 1, _POINTS)
    return float(np.mean(step.seconds(batch, batch * context)) * (output - 1))


def report(options: Namespace) -> str:
    """Return h and r of each engine, and errors on the rows that fitted them and on those of the other device."""
    table = pd.read_csv(options.points)
    if missing := [name for name in _REQUIRED if name not in table]:
        raise ConfigError(
            f"{options.points} has no column {missing[0]}", help="a table of static batches (static_batches.csv)"
        )
    table = table[
        (table.version.astype(str) == "2024") & (table.precision == "fp16") & table.gpu.isin((FITTED, UNSEEN))
    ]
    lines = []
    for engine in ENGINES:
        rows = table[table.engine == engine].reset_index(drop=True)
        rows = rows.assign(kernels_s=[_kernels_s(row) for row in rows.itertuples()]).dropna(subset="kernels_s")
        seen, unseen = (rows[rows.gpu == gpu] for gpu in (FITTED, UNSEEN))
        host = fitted_host(seen)
        errors = ", ".join(
            f"{gpu} {100 * _mean_error(host, part):.1f} %" for gpu, part in ((FITTED, seen), (UNSEEN, unseen))
        )
        lines.append(
            f"{engine:14s} {1e3 * host[0]:.2f} ms and {1e6 * host[1]:.0f} us a sequence; mean error {errors} (unseen)\n"
        )
    return "".join(lines)


def fitted_host(rows: pd.DataFrame) -> tuple[float, float]:
    """Return h and r in seconds of a table with kernels_s, e2e_s, osl and batch."""

    def loss(logs: FloatArray) -> float:
        return float(np.abs(np.log(_predicted_s(np.exp(logs), rows) / rows.e2e_s)).mean())

    ends = [minimize(loss, np.log(start), method="Nelder-Mead") for start in _STARTS]
    step_s, row_s = np.exp(min(ends, key=lambda end: float(end.fun)).x)
    return float(step_s), float(row_s)


def _predicted_s(host: Sequence[float] | FloatArray, rows: pd.DataFrame) -> pd.Series:
    return rows.kernels_s + rows.osl * (host[0] + host[1] * rows.batch)


def _mean_error(host: Sequence[float], rows: pd.DataFrame) -> float:
    return float((_predicted_s(host, rows) / rows.e2e_s - 1).abs().mean())


def _kernels_s(row: Any) -> float:
    """Return the seconds of a row's kernels; NaN where the catalogue has no such model."""
    step = _step(row.model.lower(), row.gpu, int(row.tp), row.engine)
    return np.nan if step is None else prefill_s(step, row.batch, row.isl) + decode_s(step, row.batch, row.isl, row.osl)


@cache
def _step(model: str, gpu: str, tp: int, engine: str) -> StepCosts | None:
    try:
        spec, cluster = ModelSpec.named(MODELS.get(model, model)), ClusterSpec.parse(f"1x{tp}x{gpu}")
        kernels = EngineProfile.named(*ENGINES[engine]).kernels
        return StepCosts.build(spec, cluster, ServingLayout(tp=tp), weights="fp16", cache="fp16", kernels=kernels)
    except ConfigError:
        return None
