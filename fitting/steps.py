"""Fit coefficients of entire steps to measured runs; print their old and new values.

    minimise  mean over sources of mean |log(predicted / measured)|  +  PRIOR_WEIGHT sum ((log c - log c0) / width)^2

over the `fit` half of the rows, c within its range. Every source counts alike (less where it has few rows) and by at most ``cap``
rows, so that no table decides by its length; absolute values, so that no outlier does. A bounded pattern search along coordinates:
no randomness, no gradients of a model with maxima in it. c0, width and range of each coefficient: priors.csv.

It reports on the `held-out` half too. Runs that stalled between nodes (validation/stalls.py) are left out.
"""

from __future__ import annotations

import zlib
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from ..cost_models.coefficients import packaged_coefficients
from ..schema import ConfigError
from ..schema.units import FloatArray
from ..validation.predict import RunInputs, estimate_runs, run_inputs
from ..validation.rows import RunRow, read_runs
from ..validation.stalls import stalled

PRIOR_WEIGHT = 0.001
"""A coefficient one width from its prior costs a tenth of a percent of the mean error."""

MIN_ROWS = 10
"""Sources with fewer rows weigh in proportion, and say nothing about tails."""

FIRST_STEP, LAST_STEP = 0.16, 0.02
"""Of log c."""


class Prior(NamedTuple):
    """What is known of a coefficient before any run.

    Attributes:
        value: c0; width: of log c; low, high: physical range.
        shared_with: paths of coefficients.toml that have the same value.
    """

    value: float
    width: float
    low: float
    high: float
    shared_with: tuple[str, ...] = ()


@cache
def priors() -> dict[str, Prior]:
    """Return the prior of each coefficient by its path in coefficients.toml."""
    table = pd.read_csv(Path(__file__).parent / "priors.csv", keep_default_na=False)
    return {
        line.name: Prior(line.value, line.width, line.low, line.high, tuple(line.shared_with.split()))
        for line in table.itertuples(index=False)
    }


class Measured(NamedTuple):
    """Runs with a measured time."""

    sources: tuple[str, ...]
    inputs: tuple[RunInputs, ...]
    measured_s: tuple[float, ...]


def measured(rows: Sequence[RunRow], cap: int | None = None) -> Measured:
    """Return scored rows that can be predicted; of each source at most ``cap``, in the order of a checksum of their names."""
    by_source: dict[str, list[RunRow]] = defaultdict(list)
    for row, has_stalled in zip(rows, stalled(rows), strict=True):
        if row.is_scored and row.status == "ok" and not has_stalled:
            by_source[row.source_set].append(row)
    known = [
        (source, inputs, inputs.measured_s)
        for source, members in sorted(by_source.items())
        for row in sorted(members, key=lambda row: zlib.crc32(row.id.encode()))[:cap]
        if isinstance(inputs := run_inputs(row), RunInputs) and inputs.measured_s is not None
    ]
    return Measured(*(tuple(column) for column in zip(*known, strict=True))) if known else Measured((), (), ())


def errors(runs: Measured, values: Mapping[str, float]) -> dict[str, FloatArray]:
    """Return log(predicted / measured) by source, with these coefficients."""
    shared = {path: value for name, value in values.items() for path in priors()[name].shared_with}
    estimates = estimate_runs(runs.inputs, packaged_coefficients().replaced(shared | dict(values)))
    logs: dict[str, list[float]] = defaultdict(list)
    for source, estimate, seconds in zip(runs.sources, estimates, runs.measured_s, strict=True):
        if not isinstance(estimate, str):
            logs[source].append(float(np.log(estimate.step_time_s / seconds)))
    return {source: np.array(members) for source, members in logs.items()}


def loss(by_source: Mapping[str, FloatArray], values: Mapping[str, float]) -> float:
    """Return the weighted mean over sources of mean |log|, plus what the priors say."""
    weights = np.array([min(1.0, len(logs) / MIN_ROWS) for logs in by_source.values()])
    means = np.array([float(np.mean(np.abs(logs))) for logs in by_source.values()])
    away = [np.log(value / priors()[name].value) / priors()[name].width for name, value in values.items()]
    return float(weights @ means / weights.sum() + PRIOR_WEIGHT * np.sum(np.square(away)))


def search_coefficients(
    start: Mapping[str, float], objective: Callable[[Mapping[str, float]], float]
) -> dict[str, float]:
    """Move each coefficient up or down by a step of its logarithm as long as that helps, then by half the step."""
    best, best_value, step = dict(start), objective(start), FIRST_STEP
    while step >= LAST_STEP:
        before = best_value
        for name in best:
            prior = priors()[name]
            for sign in (1.0, -1.0):
                moved = best | {name: min(max(best[name] * float(np.exp(sign * step)), prior.low), prior.high)}
                value = objective(moved)
                if value < best_value:
                    best, best_value = moved, value
                    break
        step = step if best_value < before - 1e-4 else step / 2
    return best


def report_coefficients(options: Namespace) -> str:
    """Fit on one half of the table; return old and new values and what they do to every source of both halves."""
    names = options.names.split(",") if options.names else list(priors())
    if unknown := [name for name in names if name not in priors()]:
        raise ConfigError(f"nothing is known of {', '.join(unknown)}; known are {', '.join(priors())}")
    rows = read_runs(options.runs)
    halves = {part: measured([row for row in rows if row.part == part], options.cap) for part in ("fit", "held-out")}
    start = {name: float(packaged_coefficients().value(name)) for name in names}
    fitted = search_coefficients(start, lambda values: loss(errors(halves["fit"], values), values))
    lines = [f"{name}: {start[name]:.4g} -> {value:.4g}" for name, value in fitted.items()]
    for part, runs in halves.items():
        before, after = errors(runs, start), errors(runs, fitted)
        lines.append(f"# {part}: mean |log|, mean log, in percent, before -> after")
        for source, logs in before.items():
            old, new = (f"{100 * np.mean(np.abs(x)):5.1f} {100 * np.mean(x):+6.1f}" for x in (logs, after[source]))
            lines.append(f"# {source:18} {len(logs):4}  {old} -> {new}")
        lines.append(f"# loss {loss(before, start):.4f} -> {loss(after, fitted):.4f}")
    return "\n".join(lines) + "\n"
