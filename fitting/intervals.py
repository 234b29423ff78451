"""Coefficients of the intervals of step time and memory from measured runs.

`python -m meshwright.fitting.intervals RUNS.csv`.

Quantile regression (scikit-learn) of log(measured / predicted) on the shares of the step time, on the `fit` half of the rows,
every source with the same weight, widened until it holds for sources that were left out.
 Memory: the same quantiles of measured over predicted peak, by engine. Prints the lines
for cost_models/coefficients.toml and the coverage on the other half.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..cost_models.stage.step import time_shares
from ..schema.task import Engine
from ..validation.predict import Prediction, predict
from ..validation.rows import RunRow, read_runs
from ..validation.score import memory_ratio
from .command import run_command

FloatArray = NDArray[np.float64]

TAIL_FRACTION = 0.05
OWN_WIDTHS: Engine = "nanotron"
"""Its pipelines over several nodes scatter by a factor of up to 40 between runs that differ in nothing their table states
(docs/log.md), which says nothing about other engines."""

MAX_WIDTH = 5.0
"""Of log(measured / predicted) for a share of one: more is an extrapolation from shares of a few percent."""

MIN_ROWS = 10
"""Sources with fewer rows in the fit half say nothing about tails."""


Widths = dict[str, dict[str, float]]


def fit(runs: Runs) -> Widths:
    """Widths per share, by side, for a source that is not among these runs.

    The widths of all sources, times the least factor at which 90 % of a source are inside when the widths come from the others
    (mean over the sources left out in turn): a user's cluster is one more source.
    """
    counts = Counter(runs.sources)
    large = [source for source, count in counts.items() if count >= MIN_ROWS]
    if len(large) == 1:
        return _regression(runs, large)
    left_out = {source: _regression(runs, [other for other in large if other != source]) for source in large}
    factor = next(
        factor
        for factor in np.arange(1.0, 10.0, 0.05)
        if np.mean([_covered(runs, left_out[source], factor)[source] for source in large]) >= 1 - 2 * TAIL_FRACTION
    )
    widths = _regression(runs, large)
    return {side: {name: factor * width for name, width in shares.items()} for side, shares in widths.items()}


def _regression(runs: Runs, sources: Sequence[str]) -> Widths:
    """Quantile regression on the shares; every one of ``sources`` has the same weight; none below zero."""
    from sklearn.linear_model import QuantileRegressor

    counts = Counter(runs.sources)
    weights = np.array([1 / counts[source] if source in sources else 0.0 for source in runs.sources])
    matrix = np.array([list(row.values()) for row in runs.shares])
    found = {}
    for side, sign in (("low", -1.0), ("high", 1.0)):
        model = QuantileRegressor(quantile=1 - TAIL_FRACTION, alpha=0.0, fit_intercept=False, solver="highs")
        model.fit(matrix, sign * runs.residuals, sample_weight=weights)
        found[side] = dict(zip(runs.shares[0], np.clip(model.coef_, 0.0, MAX_WIDTH).tolist(), strict=True))
    return found


class Runs(NamedTuple):
    """Shares of the step time, log(measured / predicted) and source of every scored row with a time."""

    shares: list[dict[str, float]]
    residuals: FloatArray
    sources: list[str]


def table(rows: Sequence[RunRow], predictions: Sequence[Prediction], *, own: bool) -> Runs:
    """What the widths are fitted to: runs of the engines with widths of their own (OWN_WIDTHS), or of all others."""
    known = [
        (time_shares(p.estimate.breakdown_s), np.log(row.measured_s / p.estimate.step_time_s), row.source_set)
        for row, p in zip(rows, predictions, strict=True)
        if row.is_scored
        and row.measured_s is not None
        and p.estimate is not None
        and p.inputs is not None
        and (p.inputs.workload.engine == OWN_WIDTHS) == own
    ]
    shares, residuals, sources = zip(*known, strict=True)
    return Runs(list(shares), np.array(residuals), list(sources))


def _covered(runs: Runs, widths: Widths, factor: float) -> dict[str, float]:
    matrix = np.array([list(row.values()) for row in runs.shares])
    low, high = (factor * matrix @ np.array(list(widths[side].values())) for side in ("low", "high"))
    inside = (-low <= runs.residuals) & (runs.residuals <= high)
    sources = np.array(runs.sources)
    return {source: float(np.mean(inside[sources == source])) for source in dict.fromkeys(runs.sources)}


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
    return round(min(float(low), 1.0), 2), round(max(float(high), 1.0), 2)  # an interval holds its prediction


def report(path: Path) -> str:
    """Fit on one half of the table, report on the other."""
    rows = read_runs(path)
    halves = {part: [row for row in rows if row.part == part] for part in ("fit", "held-out")}
    predictions = {part: predict(half) for part, half in halves.items()}
    lines = []
    for own in (False, True):
        found = fit(table(halves["fit"], predictions["fit"], own=own))
        lines.append(f"[interval.time.{OWN_WIDTHS if own else 'others'}]")
        for side, widths in found.items():
            lines.append(f"{side} = {{{', '.join(f'{name} = {width:.3f}' for name, width in widths.items())}}}")
        for source, part in _covered(table(halves["held-out"], predictions["held-out"], own=own), found, 1.0).items():
            lines.append(f"# held-out coverage {source}: {100 * part:.0f} %")
    lines.append("[interval.memory]")
    memory = fit_memory(halves["fit"], predictions["fit"])
    lines += [f"{engine} = [{low}, {high}]" for engine, (low, high) in memory.items()]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Lines for coefficients.toml."""
    parser = ArgumentParser(prog="python -m meshwright.fitting.intervals", description=__doc__)
    parser.add_argument("runs", type=Path, help="table of measured runs")
    run_command(parser, lambda options: report(options.runs), arguments)


if __name__ == "__main__":
    main()
