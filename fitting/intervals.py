"""Fit how far predictions may be off ([interval] of coefficients.toml): widths by cause that hold for sources never seen.

Errors log(measured / predicted) of scored runs have a Student t distribution around 0 whose variance is that of
`cost_models.stage.interval`:

    sd^2 = sum_k (sd_k x_k)^2 above the prediction,  sd_noise^2 + SKEW^2 sum_{others} (sd_k x_k)^2 below it

    minimise  mean over sources of mean -log density  +  PRIOR_WEIGHT sum_k (log sd_k / PRIOR)^2

Sources weigh alike (those with few rows in proportion), so that the values are of a run of a source drawn at random: what differs
between sources is part of them. A cause with little evidence stays near PRIOR. Each run counts once more under a framework of a
name that nobody knows: what the name had told is a cause of error of its own, fitted after all others to those of these runs that
state what decides. One factor turns deviations into widths: the lowest at which COVERED of a source's runs are inside, mean over
sources, with deviations that were fitted without the source. Peaks have the same law, both sides alike. Runs that stalled between
nodes (validation/stalls.py) count nowhere.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import minimize

from ..cost_models.coefficients import Scenario
from ..cost_models.stage.interval import CAUSES, MEMORY_CAUSES, Basis
from ..schema.units import FloatArray
from ..validation.predict import Prediction, predict
from ..validation.rows import RunRow, read_runs
from ..validation.score import memory_ratio
from ..validation.stalls import stalled

PRIOR, NOISE_PRIOR, SKEW_PRIOR = 0.1, 0.05, 0.7
PRIOR_WEIGHT = 0.02

TAILS = 5
"""Degrees of freedom; 3 to 8 score alike on sources left out."""

WIDEST = (1e-3, 2.0)
"""Of deviations."""

COVERED = 0.90
MIN_ROWS = 10
"""Sources with fewer rows weigh in proportion, and say nothing about coverage."""

DOUBTS = ("unstated", "framework")
"""Causes of error of a table's rows (`RunInputs.doubts`)."""

NOBODY = "an engine nobody knows"

_STEP = 0.01


class Errors(NamedTuple):
    """Runs: causes [n, k] in the order of ``names``, of which the first is noise; log(measured / predicted) [n]; source [n]."""

    names: tuple[str, ...]
    causes: FloatArray
    log_ratio: FloatArray
    source: pd.Series

    def take(self, rows: pd.Series) -> Errors:
        """Return the runs of a mask."""
        return Errors(self.names, self.causes[rows], self.log_ratio[rows], self.source[rows].reset_index(drop=True))


class Deviations(NamedTuple):
    """``of_cause`` [k], noise first, above the prediction; below it all but noise times ``skew``."""

    of_cause: FloatArray
    skew: float

    def sides(self, causes: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the deviation below and above of each run."""
        squares = np.square(causes * self.of_cause)
        noise, others = squares[:, 0], squares[:, 1:].sum(axis=1)
        return np.sqrt(noise + self.skew**2 * others), np.sqrt(noise + others)


def time_errors(rows: Sequence[RunRow], predictions: Sequence[Prediction]) -> Errors:
    """Return the errors of step times."""
    names, lines, logs, sources = (*CAUSES, *DOUBTS), [], [], []
    for row, prediction in zip(rows, predictions, strict=True):
        inputs, estimate, measured_s = prediction.inputs, prediction.estimate, prediction.measured_s
        if not row.is_scored or inputs is None or estimate is None or measured_s is None:
            continue
        basis = Basis(
            model=inputs.model,
            scenario=Scenario.build(inputs.workload, inputs.cluster),
            terms=estimate.breakdown_s,
            zero_stage=inputs.layout.zero_stage,
            offloads=inputs.layout.offload != "none" or inputs.layout.offload_activations > 0,
        )
        lines.append([*(cause(basis) for cause in CAUSES.values()), *map(float, inputs.doubts.values())])
        logs.append(np.log(measured_s / estimate.step_time_s))
        sources.append(row.source_set)
    return Errors(names, np.array(lines, dtype=np.float64), np.array(logs), pd.Series(sources))


def memory_errors(rows: Sequence[RunRow], predictions: Sequence[Prediction]) -> Errors:
    """Return the errors of peaks."""
    names, lines, logs, sources = (*MEMORY_CAUSES, *DOUBTS), [], [], []
    for row, prediction in zip(rows, predictions, strict=True):
        inputs = prediction.inputs
        if row.is_scored and inputs is not None and (ratio := memory_ratio(row, prediction)):
            scenario = Scenario.build(inputs.workload, inputs.cluster)
            lines.append([*(cause(scenario) for cause in MEMORY_CAUSES.values()), *map(float, inputs.doubts.values())])
            logs.append(np.log(ratio[0]))
            sources.append(row.source_set)
    return Errors(names, np.array(lines, dtype=np.float64), np.array(logs), pd.Series(sources))


def fit_deviations(errors: Errors, *, is_skewed: bool = True, known: Deviations | None = None) -> Deviations:
    """Return the most likely deviations of a run of a source drawn at random.

    With ``known`` only that of the last cause, from the runs without the cause before it, the others as they are there.
    """
    if known is not None:
        errors = errors.take(pd.Series(errors.causes[:, -2] == 0))
    count = errors.source.map(errors.source.value_counts()).to_numpy()
    weight = np.minimum(1.0, count / MIN_ROWS) / count
    weight = weight / weight.sum()
    prior = np.log([NOISE_PRIOR, *[PRIOR] * (len(errors.names) - 1), SKEW_PRIOR if is_skewed else 1.0])

    def loss(logs: FloatArray) -> float:
        low, high = Deviations(np.exp(logs[:-1]), float(np.exp(logs[-1]))).sides(errors.causes)
        away = (errors.log_ratio / np.where(errors.log_ratio < 0, low, high)) ** 2 / TAILS
        density = np.log((low + high) / 2) + (TAILS + 1) / 2 * np.log1p(away)
        return float(weight @ density + PRIOR_WEIGHT * np.sum((logs - prior) ** 2))

    ends = [*[WIDEST] * len(errors.names), (0.2, 1.5) if is_skewed else (1.0, 1.0)]
    if known is not None:
        ends = [*((sd, sd) for sd in known.of_cause[:-1]), WIDEST, (known.skew, known.skew)]
    solution = np.exp(minimize(loss, prior, method="L-BFGS-B", bounds=np.log(ends)).x)
    return Deviations(solution[:-1], float(solution[-1]))


class LeftOut(NamedTuple):
    """Coverage and mean width of each source with widths of the others; the factor that makes widths of deviations."""

    coverage: Mapping[str, float]
    width: Mapping[str, float]
    factor: float


def leave_sources_out(
    errors: Errors,
    judged: Errors,
    *,
    is_skewed: bool = True,
    renamed: Errors | None = None,
    factor: float | None = None,
) -> LeftOut:
    """Fit on ``errors``, and the last cause on ``renamed``, without each source in turn and judge its runs among ``judged``.

    With a ``factor`` they do not decide it.
    """
    low, high = np.zeros(len(judged.log_ratio)), np.zeros(len(judged.log_ratio))
    counts = judged.source.value_counts()
    for source in counts.index:
        without = fit_deviations(errors.take(errors.source != source), is_skewed=is_skewed)
        if renamed is not None:
            without = fit_deviations(renamed.take(renamed.source != source), is_skewed=is_skewed, known=without)
        members = (judged.source == source).to_numpy()
        low[members], high[members] = without.sides(judged.causes[members])
    away = np.abs(judged.log_ratio) / np.where(judged.log_ratio < 0, low, high)
    is_many = judged.source.isin(counts.index[counts >= MIN_ROWS]).to_numpy()

    def covered(factor: float) -> pd.Series:
        return pd.Series(away < factor).groupby(judged.source, sort=False).mean()

    large = sorted(set(judged.source[is_many]))
    if factor is None:
        factor = next(float(f) for f in np.arange(0.5, 10.0, _STEP) if covered(f)[large].mean() >= COVERED)
    width = pd.Series(np.exp(factor * high) - np.exp(-factor * low)).groupby(judged.source, sort=False).mean()
    return LeftOut(covered(factor).to_dict(), width.to_dict(), factor)


def _lines(errors: Errors, renamed: Errors, judged: Errors, blind: Errors, *, is_skewed: bool) -> list[str]:
    """Return widths as lines of coefficients.toml, and what sources left out say of them, as they are and under another name."""
    fitted = fit_deviations(renamed, is_skewed=is_skewed, known=fit_deviations(errors, is_skewed=is_skewed))
    left_out = leave_sources_out(errors, judged, is_skewed=is_skewed)
    widths = dict(zip(errors.names, left_out.factor * fitted.of_cause, strict=True))
    lines = [f"{name} = {width:.3f}" for name, width in widths.items()]
    lines += [f"skew = {fitted.skew:.2f}"] if is_skewed else []
    lines.append(f"# factor {left_out.factor:.2f}")
    nameless = leave_sources_out(errors, blind, is_skewed=is_skewed, renamed=renamed, factor=left_out.factor)
    for what, runs, out in (("as they are", judged, left_out), (NOBODY, blind, nameless)):
        low, high = fitted.sides(runs.causes)
        shipped = np.exp(left_out.factor * high) - np.exp(-left_out.factor * low)
        lines.append(f"# {what}; by source, left out: rows, mean |log|, inside, width; width as shipped")
        for source, members in runs.source.groupby(runs.source, sort=False).groups.items():
            name, error = str(source), np.abs(runs.log_ratio[members])
            lines.append(
                f"# {name:18} {len(members):5} {error.mean():6.3f} {out.coverage[name]:6.0%}"
                f" {out.width[name]:6.2f} {shipped[members].mean():6.2f}"
            )
        counts = runs.source.value_counts()
        inside = np.mean([out.coverage[str(source)] for source in counts.index[counts >= MIN_ROWS]])
        lines.append(f"# sources of {MIN_ROWS} rows and more alike: {inside:.0%} inside")
    return lines


def report(options: Namespace) -> str:
    """Fit on one half of the table; return lines of coefficients.toml and how both halves of sources left out are covered."""
    rows = read_runs(options.runs)
    rows = [row for row, has_stalled in zip(rows, stalled(rows), strict=True) if not has_stalled]
    predictions = predict(rows)
    renamed, nameless = _renamed(rows, predictions)
    is_fit, is_fit_too = ([row.part == "fit" for row in table] for table in (rows, renamed))
    lines = []
    for name, errors_of, is_skewed in (("time", time_errors, True), ("memory", memory_errors, False)):
        fitted = errors_of(list(compress(rows, is_fit)), list(compress(predictions, is_fit)))
        fitted_too = errors_of(list(compress(renamed, is_fit_too)), list(compress(nameless, is_fit_too)))
        judged, judged_too = errors_of(rows, predictions), errors_of(renamed, nameless)
        lines += [f"[interval.{name}]", *_lines(fitted, fitted_too, judged, judged_too, is_skewed=is_skewed), ""]
    return "\n".join(lines)


def _renamed(rows: Sequence[RunRow], predictions: Sequence[Prediction]) -> tuple[list[RunRow], list[Prediction]]:
    """Return rows whose framework is known as those of one that nobody knows, with their predictions."""
    known = [p.inputs is not None and p.inputs.has_known_engine for p in predictions]
    renamed = [replace(row, framework=NOBODY) for row in compress(rows, known)]
    return renamed, predict(renamed)
