"""Coefficients of the intervals of step time and memory from measured runs.

`python -m meshwright.planner.validation.fit_intervals RUNS.csv`.

Quantile regression (scikit-learn) of log(measured / predicted) on the shares of the step time, on the `fit` half of the rows, every
source with the same weight. Memory: the same quantiles of measured over predicted peak, by engine. Prints the lines
for cost_models/coefficients.toml and the coverage on the other half.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...cost_models.interval import time_shares
from .predict import Prediction, predict
from .rows import RunRow, read_runs
from .score import memory_ratio

FloatArray = NDArray[np.float64]

TAIL_FRACTION = 0.05
MIN_ROWS = 10
"""Sources with fewer rows in the fit half say nothing about tails."""


def fit(rows: Sequence[RunRow], predictions: Sequence[Prediction]) -> dict[str, dict[str, float]]:
    """Widths per share, by side; none below zero."""
    from sklearn.linear_model import QuantileRegressor

    shares, residuals, sources = table(rows, predictions)
    counts = Counter(sources)
    weights = np.array([1 / counts[source] if counts[source] >= MIN_ROWS else 0.0 for source in sources])
    found = {}
    for side, sign in (("low", -1.0), ("high", 1.0)):
        matrix = np.array([list(row.values()) for row in shares])
        model = QuantileRegressor(quantile=1 - TAIL_FRACTION, alpha=0.0, fit_intercept=False, solver="highs")
        model.fit(matrix, sign * residuals, sample_weight=weights)
        found[side] = dict(zip(shares[0], np.maximum(model.coef_, 0.0).round(3).tolist(), strict=True))
    return found


def table(
    rows: Sequence[RunRow], predictions: Sequence[Prediction]
) -> tuple[list[dict[str, float]], FloatArray, list[str]]:
    """Shares, log(measured / predicted) and source of every scored row with a time."""
    known = [
        (time_shares(p.estimate.breakdown_s), np.log(row.measured_s / p.estimate.step_time_s), row.source_set)
        for row, p in zip(rows, predictions, strict=True)
        if row.is_scored and row.measured_s is not None and p.estimate is not None
    ]
    shares, residuals, sources = zip(*known, strict=True)
    return list(shares), np.array(residuals), list(sources)


def covered(
    rows: Sequence[RunRow], predictions: Sequence[Prediction], found: dict[str, dict[str, float]]
) -> dict[str, float]:
    """Share of each source's measurements inside the interval."""
    shares, residuals, sources = table(rows, predictions)
    inside: dict[str, list[bool]] = {}
    for row, residual, source in zip(shares, residuals, sources, strict=True):
        low, high = (sum(found[side][name] * share for name, share in row.items()) for side in ("low", "high"))
        inside.setdefault(source, []).append(bool(-low <= residual <= high))
    return {source: float(np.mean(values)) for source, values in inside.items()}


def fit_memory(rows: Sequence[RunRow], predictions: Sequence[Prediction]) -> dict[str, tuple[float, float]]:
    """Quantiles of measured over predicted peak by engine; every source of an engine has the same weight."""
    by_engine: dict[str, dict[str, list[float]]] = {}
    for row, p in zip(rows, predictions, strict=True):
        if row.is_scored and p.inputs is not None and (found := memory_ratio(row, p)):
            by_engine.setdefault(p.inputs.workload.engine, {}).setdefault(row.source_set, []).append(found[0])
    return {engine: _quantiles(sources) for engine, sources in by_engine.items()}


def _quantiles(sources: dict[str, list[float]]) -> tuple[float, float]:
    ratios = np.concatenate([np.array(values) for values in sources.values()])
    weights = np.concatenate([np.full(len(values), 1 / len(values)) for values in sources.values()])
    order = np.argsort(ratios)
    # The middle of each run's weight, so that both tails are treated alike.
    at = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    low, high = np.interp([TAIL_FRACTION, 1 - TAIL_FRACTION], at, ratios[order])
    return round(float(low), 2), round(float(high), 2)


def main() -> None:
    """Fit on one half of the table, report on the other."""
    rows = read_runs(sys.argv[1])
    halves = {part: [row for row in rows if row.part == part] for part in ("fit", "held-out")}
    predictions = {part: predict(half) for part, half in halves.items()}
    found = fit(halves["fit"], predictions["fit"])
    lines = [f"{side} = {{{', '.join(f'{k} = {v}' for k, v in widths.items())}}}" for side, widths in found.items()]
    memory = fit_memory(halves["fit"], predictions["fit"])
    lines += [f"{engine} = [{low}, {high}]" for engine, (low, high) in memory.items()]
    coverage = covered(halves["held-out"], predictions["held-out"], found)
    lines += [f"# held-out coverage {source}: {100 * value:.0f} %" for source, value in coverage.items()]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
