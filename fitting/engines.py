"""Fit what serving engines do beside their kernels, one constant after the other, to load tests of few models.

    minimise  mean over rows of |log(predicted / measured)|, of TTFT or TPOT as simulated, over one constant between two bounds

Rows of a fit are of the models and devices that `FITS` names, with few in flight where the constant is of a request or a launch, so
that nothing waits; its other models are rows that no fit saw. Golden section on the logarithm. Each fit takes
the constants that those before it gave.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from ..cost_models.coefficients import Coefficients, packaged_coefficients
from ..schema import ConfigError
from ..validation.serving import ServingRow, profile_of, read_serving, serve_row

ANY, FEW = math.inf, 8
"""Requests in flight."""

EVALUATIONS = 10


@dataclass(frozen=True)
class Rows:
    """Load tests by (model, start of a device's name), engine's version, lengths and requests in flight."""

    of: tuple[tuple[str, str], ...]
    max_in_flight: float = FEW
    weights: tuple[str, ...] = ()
    isl: tuple[int, ...] = ()
    drafts: bool = False

    def holds(self, row: ServingRow) -> bool:
        """Return whether a row is one of them."""
        return (
            row.mode == "agg"
            and any(row.model == model and row.gpu.startswith(gpu) for model, gpu in self.of)
            and (row.concurrency or 0) <= self.max_in_flight
            and (not self.weights or row.gemm_dtype in self.weights)
            and (not self.isl or row.isl in self.isl)
            and bool(row.speculate) == self.drafts
        )


@dataclass(frozen=True)
class Fit:
    """A constant of an engine's profile (``overhead.row_s``) or of coefficients.toml (``serving.dequantized_rate``).

    Attributes:
        version: of the profile that has it; "": of all; also: other engines that have it.
        metric: what it is fitted to; low, high: bounds.
        fitted, checked: rows.
    """

    engine: str
    version: str
    constant: str
    metric: str
    low: float
    high: float
    fitted: Rows
    checked: Rows
    also: tuple[str, ...] = ()

    @property
    def is_cost(self) -> bool:
        """Return whether it is one of coefficients.toml."""
        return self.constant.startswith("serving.")


FITS = (
    Fit(
        "vllm", "", "request.token_s", "ttft_ms", 1e-7, 1e-4,
        Rows((("gpt-oss-120b", "B200"),), isl=(8192,)),
        Rows((("Llama-3.1-70B", "B200"), ("Kimi-K2.5", "B200"), ("Qwen3-32B", "H100")), isl=(8192,)),
        also=("sglang", "trtllm"),
    ),
    Fit(
        "vllm", "", "request.way_s", "ttft_ms", 1e-4, 1e-1,
        Rows((("gpt-oss-120b", "B200"),), isl=(1024,)),
        Rows((("Llama-3.1-70B", "B200"), ("Kimi-K2.5", "B200"), ("Qwen3-32B", "H100")), isl=(1024,)),
        also=("sglang", "trtllm"),
    ),
    Fit(
        "vllm", "", "overhead.eager_kernel_s", "ttft_ms", 5e-6, 2e-4,
        Rows((("gpt-oss-120b", "B200"),)),
        Rows((("Llama-3.1-70B", "B200"), ("Kimi-K2.5", "B200"), ("Qwen3-32B", "H100"))),
    ),
    Fit(
        "sglang", "", "overhead.eager_kernel_s", "ttft_ms", 5e-6, 2e-4,
        Rows((("DeepSeek-R1", "B200"),)),
        Rows((("Qwen3.5-397B-A17B", "B200"), ("GLM-5", "B200"), ("Qwen3-32B", "H100"))),
    ),
    Fit(
        "trtllm", "", "overhead.eager_kernel_s", "ttft_ms", 5e-6, 2e-4,
        Rows((("DeepSeek-R1", "B200"), ("Llama-3.1-70B", "B200"))),
        Rows((("Qwen3-32B", "H100"), ("Qwen3-235B-A22B", "H100"), ("gpt-oss-120b", "B200"), ("gpt-oss-120b", "H200"))),
    ),
    Fit(
        "vllm", "0.8", "overhead.step_s", "tpot_ms", 5e-5, 1e-2,
        Rows((("Qwen3-32B", "H100"), ("Llama-3.1-70B", "H100"))), Rows((("Llama-3.1-70B", "B200"),)),
    ),
    Fit(
        "vllm", "0.8", "overhead.row_s", "tpot_ms", 2e-6, 5e-4,
        Rows((("Qwen3-32B", "H100"), ("Llama-3.1-70B", "H100")), max_in_flight=ANY),
        Rows((("Llama-3.1-70B", "B200"),), max_in_flight=ANY),
    ),
    Fit(
        "trtllm", "1.0", "overhead.row_s", "tpot_ms", 5e-6, 5e-4,
        Rows((("Llama-3.1-8B", "H100"),), max_in_flight=ANY),
        Rows((("Qwen3-32B", "H100"),), max_in_flight=ANY),
    ),
    Fit(
        "sglang", "0.5", "overhead.draft_row_s", "tpot_ms", 2e-5, 2e-3,
        Rows((("Qwen3.5-397B-A17B", "B200"),), max_in_flight=ANY, weights=("fp8",), isl=(1024,), drafts=True),
        Rows((("Qwen3.5-397B-A17B", "B200"),), max_in_flight=ANY, weights=("fp8",), isl=(8192,), drafts=True),
    ),
    Fit(
        "vllm", "", "serving.dequantized_rate", "tpot_ms", 0.2, 1.0,
        Rows((("gpt-oss-120b", "H200"),), max_in_flight=ANY),
        Rows((("Kimi-K2.5", "B200"),), max_in_flight=ANY, weights=("int4-weights", "int4")),
    ),
)  # fmt: skip


def report(options: Namespace) -> str:
    """Return each constant as packaged and as fitted, with the errors of the rows that fitted it and of those that did not."""
    rows = [row for row in read_serving(options.points) if row.is_scored]
    lines = [
        f"{'engine':8}{'constant':28}{'packaged':>10}{'fitted':>10}  mean error: rows fitted, at both; rows not fitted, at both"
    ]
    names = {name for name in options.names.split(",") if name}
    if unknown := names - {fit.constant for fit in FITS}:
        raise ConfigError(
            f"--names {unknown.pop()}: no such constant", help=", ".join(sorted({fit.constant for fit in FITS}))
        )
    known: dict[Fit, float] = {}
    for fit in (fit for fit in FITS if not names or fit.constant in names):
        ours, others = (rows_of(rows, fit, which) for which in (fit.fitted, fit.checked))
        if not ours:
            continue
        best = fitted(fit, ours, known)
        text = f"{fit.engine:8}{fit.constant:28}{_packaged(fit, ours[0]):10.3g}{best:10.3g}"
        for part in (ours, others):
            if part:
                errors = (mean_error(part, fit, values) for values in (known, {**known, fit: best}))
                text += f"  {len(part):4} " + " ".join(f"{error:6.1%}" for error in errors)
        lines.append(text)
        known[fit] = best
    return "\n".join(lines) + "\n"


def rows_of(rows: Sequence[ServingRow], fit: Fit, which: Rows) -> list[ServingRow]:
    """Return the rows of a fit, of the engine and version that it is for."""
    return [
        row
        for row in rows
        if row.engine == fit.engine and which.holds(row) and fit.version in ("", profile_of(row).version)
    ]


def fitted(fit: Fit, rows: Sequence[ServingRow], known: Mapping[Fit, float]) -> float:
    """Return the value of a constant with the least mean error of rows, beside constants that are known."""
    return _argmin(lambda value: mean_error(rows, fit, {**known, fit: value}), fit.low, fit.high)


def _packaged(fit: Fit, row: ServingRow) -> float:
    section, _, name = fit.constant.partition(".")
    if section == "serving":
        return float(packaged_coefficients().value(fit.constant))
    return float(getattr(getattr(profile_of(row), section), name))


def mean_error(rows: Sequence[ServingRow], fit: Fit, values: Mapping[Fit, float]) -> float:
    """Return the mean of |log(predicted / measured)| of rows, in the metric of a fit, with values of constants."""
    coefficients = _coefficients(tuple((each.constant, value) for each, value in values.items() if each.is_cost))
    errors = []
    for row in rows:
        profile = profile_of(row)
        for each, value in values.items():
            if not each.is_cost and row.engine in (each.engine, *each.also) and each.version in ("", profile.version):
                section, _, name = each.constant.partition(".")
                profile = profile.replace(**{section: getattr(profile, section).replace(**{name: value})})
        served, _, _ = serve_row(row, profile, coefficients)
        seconds = served.ttft_s if fit.metric == "ttft_ms" else served.tpot_s
        errors.append(abs(math.log(float(seconds.mean()) * 1e3 / getattr(row, fit.metric))))
    return float(np.mean(errors))


@cache
def _coefficients(values: tuple[tuple[str, float], ...]) -> Coefficients:
    return packaged_coefficients().replaced(dict(values))


def _argmin(error: Callable[[float], float], low: float, high: float) -> float:
    """Return where an error is least between two bounds, by golden section on the logarithm."""
    ratio = (math.sqrt(5) - 1) / 2
    a, b = math.log(low), math.log(high)
    c, d = b - ratio * (b - a), a + ratio * (b - a)
    error_c, error_d = error(math.exp(c)), error(math.exp(d))
    for _ in range(EVALUATIONS - 2):
        if error_c <= error_d:
            b, d, error_d = d, c, error_c
            c = b - ratio * (b - a)
            error_c = error(math.exp(c))
        else:
            a, c, error_c = c, d, error_d
            d = a + ratio * (b - a)
            error_d = error(math.exp(d))
    return math.exp(c if error_c <= error_d else d)
