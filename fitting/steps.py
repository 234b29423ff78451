"""Fit coefficients and intervals of entire steps to measured runs; print lines for cost_models/coefficients.toml.

Coefficients:

    minimise  mean over sources of mean |log(predicted / measured)|  +  PRIOR_WEIGHT sum ((log c - log c0) / width)^2

over the `fit` half of the rows, c within its range. Every source counts alike (less where it has few rows) and by at most ``cap``
rows, so that no table decides by its length; absolute values, so that no outlier does. A bounded pattern search along coordinates:
no randomness, no gradients of a model with maxima in it. c0, width and range of each coefficient: priors.csv.

Intervals: quantile regression of log(measured / predicted) on the shares of the step time, every source with the same weight,
widened until it holds for sources that were left out; of memory the same quantiles of measured over predicted peak, by engine.
Both report on the `held-out` half.
"""

from __future__ import annotations

import zlib
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from sklearn.linear_model import QuantileRegressor

from ..cost_models.coefficients import packaged_coefficients
from ..cost_models.stage.step import time_shares
from ..schema import ConfigError
from ..schema.engine_facts import Engine
from ..schema.units import FloatArray
from ..validation.predict import Prediction, RunInputs, estimate_runs, predict, run_inputs
from ..validation.rows import RunRow, read_runs
from ..validation.score import memory_ratio

PRIOR_WEIGHT = 0.001
"""A coefficient one width from its prior costs a tenth of a percent of the mean error."""

MIN_ROWS = 10
"""Sources with fewer rows weigh in proportion, and say nothing about tails."""

FIRST_STEP, LAST_STEP = 0.16, 0.02
"""Of log c."""

TAIL_FRACTION = 0.05

SEPARATE_ENGINE: Engine = "nanotron"
"""Its pipelines over several nodes scatter by a factor of up to 40 between runs that differ in nothing their table states
(docs/log.md), which says nothing about other engines: it has separate widths."""

MAX_WIDTH = 5.0
"""Of log(measured / predicted) for a share of one: more is an extrapolation from shares of a few percent."""


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
    for row in rows:
        if row.is_scored and row.status == "ok":
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


Widths = dict[str, dict[str, float]]
"""Side (low, high) -> share of the step time -> width."""


class Residuals(NamedTuple):
    """Shares of the step time [n, k], log(measured / predicted) [n] and source [n] of scored rows with a time."""

    shares: pd.DataFrame
    log_ratio: pd.Series
    source: pd.Series


def residuals(rows: Sequence[RunRow], predictions: Sequence[Prediction], *, separate: bool) -> Residuals:
    """Return what the widths are fitted to: runs of SEPARATE_ENGINE, or of all others."""
    known = [
        (time_shares(p.estimate.breakdown_s), np.log(p.measured_s / p.estimate.step_time_s), row.source_set)
        for row, p in zip(rows, predictions, strict=True)
        if row.is_scored
        and p.measured_s is not None
        and p.estimate is not None
        and p.inputs is not None
        and (p.inputs.workload.engine == SEPARATE_ENGINE) == separate
    ]
    shares, log_ratio, source = zip(*known, strict=True)
    return Residuals(pd.DataFrame(shares), pd.Series(log_ratio), pd.Series(source))


def fit_widths(runs: Residuals) -> Widths:
    """Return widths per share, by side, for a source that is not among these runs.

    The widths of all sources, times the lowest factor at which 90 % of a source are inside when the widths come from the others
    (mean over the sources left out in turn): a user's cluster is one more source.
    """
    counts = Counter(runs.source)
    large = [source for source, count in counts.items() if count >= MIN_ROWS]
    if len(large) == 1:
        return _quantile_regression(runs, large)
    left_out = {source: _quantile_regression(runs, [other for other in large if other != source]) for source in large}
    factor = next(
        factor
        for factor in np.arange(1.0, 10.0, 0.05)
        if np.mean([coverage(runs, left_out[source], factor)[source] for source in large]) >= 1 - 2 * TAIL_FRACTION
    )
    widths = _quantile_regression(runs, large)
    return {side: {name: factor * width for name, width in shares.items()} for side, shares in widths.items()}


def _quantile_regression(runs: Residuals, sources: Sequence[str]) -> Widths:
    """Regress on the shares; every one of ``sources`` has the same weight; no width is below zero."""
    weights = np.where(runs.source.isin(sources), 1 / runs.source.map(runs.source.value_counts()), 0.0)
    widths = {}
    for side, sign in (("low", -1.0), ("high", 1.0)):
        model = QuantileRegressor(quantile=1 - TAIL_FRACTION, alpha=0.0, fit_intercept=False, solver="highs")
        model.fit(runs.shares.to_numpy(), sign * runs.log_ratio.to_numpy(), sample_weight=weights)
        widths[side] = dict(zip(runs.shares, np.clip(model.coef_, 0.0, MAX_WIDTH).tolist(), strict=True))
    return widths


def coverage(runs: Residuals, widths: Widths, factor: float = 1.0) -> dict[str, float]:
    """Return the part of each source's runs inside the widths times ``factor``."""
    low, high = (factor * runs.shares.to_numpy() @ np.array(list(widths[side].values())) for side in ("low", "high"))
    is_inside = (-low <= runs.log_ratio) & (runs.log_ratio <= high)
    return is_inside.groupby(runs.source, sort=False).mean().to_dict()


def fit_memory(rows: Sequence[RunRow], predictions: Sequence[Prediction]) -> dict[str, tuple[float, float]]:
    """Return quantiles of measured over predicted peak by engine; every source of an engine has the same weight."""
    known = [
        (p.inputs.workload.engine, row.source_set, ratio[0])
        for row, p in zip(rows, predictions, strict=True)
        if row.is_scored and p.inputs is not None and (ratio := memory_ratio(row, p))
    ]
    table = pd.DataFrame(known, columns=["engine", "source", "ratio"])
    return {str(engine): _quantiles(members) for engine, members in table.groupby("engine", sort=False)}


def _quantiles(members: pd.DataFrame) -> tuple[float, float]:
    members = members.sort_values("ratio", kind="stable")
    weight = 1 / members.groupby("source").ratio.transform("size")
    # The middle of each run's weight, so that both tails are treated alike.
    position = (weight.cumsum() - weight / 2) / weight.sum()
    low, high = np.interp([TAIL_FRACTION, 1 - TAIL_FRACTION], position, members.ratio)
    return round(min(float(low), 1.0), 2), round(max(float(high), 1.0), 2)  # an interval holds its prediction


def report_intervals(options: Namespace) -> str:
    """Fit on one half of the table; return the lines of coefficients.toml and the coverage of the other half."""
    rows = read_runs(options.runs)
    halves = {part: [row for row in rows if row.part == part] for part in ("fit", "held-out")}
    predictions = {part: predict(half) for part, half in halves.items()}
    lines = []
    for separate in (False, True):
        known = {part: residuals(halves[part], predictions[part], separate=separate) for part in halves}
        fitted = fit_widths(known["fit"])
        lines.append(f"[interval.time.{SEPARATE_ENGINE if separate else 'others'}]")
        for side, widths in fitted.items():
            lines.append(f"{side} = {{{', '.join(f'{name} = {width:.3f}' for name, width in widths.items())}}}")
        for source, part in coverage(known["held-out"], fitted).items():
            lines.append(f"# held-out coverage {source}: {100 * part:.0f} %")
    lines.append("[interval.memory]")
    memory = fit_memory(halves["fit"], predictions["fit"])
    lines += [f"{engine} = [{low}, {high}]" for engine, (low, high) in memory.items()]
    return "\n".join(lines) + "\n"
