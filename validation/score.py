"""How far predictions are from measurements: errors, ranks, coverage, memory, out-of-memory recall, regret.

Ratios are predicted over measured, so a bias above zero means we are too slow or too large.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import spearmanr

from ..schema.units import GIB, FloatArray
from .predict import Prediction
from .rows import RunRow, stated

Pair = tuple[RunRow, Prediction]


@dataclass(frozen=True)
class TimeScore:
    """Step times of ``count`` rows: `relative_error`, median of predicted over measured, `log_bias`, `rank_correlation`.

    Attributes:
        coverage: part of the measurements inside the nominal 90 % interval.
    """

    count: int
    mape: float
    median_ratio: float
    bias: float
    spearman: float | None
    coverage: float


@dataclass(frozen=True)
class MemoryScore:
    """Peak memory of ``count`` rows; mape, bias and coverage as for times."""

    count: int
    mape: float
    bias: float
    coverage: float


@dataclass(frozen=True)
class FitScore:
    """Whether runs fit.

    Attributes:
        failed, recall: runs that failed for memory, and the part of them that we call infeasible.
        ran, false_alarms: runs that fit, and the part of them that we call infeasible.
    """

    failed: int
    recall: float | None
    ran: int
    false_alarms: float | None


@dataclass(frozen=True)
class GroupScore:
    """Our choice in one decision group; regret None where fewer than two of its measured rows could be predicted."""

    source_set: str
    measured: int
    predicted: int
    chosen: str | None
    best: str | None
    regret: float | None


@dataclass(frozen=True)
class RegretScore:
    """Regrets of ``count`` decision groups."""

    count: int
    mean: float
    median: float
    max: float


@dataclass(frozen=True)
class SourceScore:
    """Everything about the rows of one source.

    Attributes:
        unscored: rows of quality C or with a flag: predicted where possible, not scored.
        skipped, approximated, assumed: scored-quality rows by reason, by stand-in, by default taken.
    """

    rows: int
    scored: int
    unscored: int
    skipped: dict[str, int]
    approximated: dict[str, int]
    assumed: dict[str, int]
    time: TimeScore | None
    memory: dict[str, MemoryScore]
    fit: FitScore
    regret: RegretScore | None


def relative_error(predicted: ArrayLike, measured: ArrayLike) -> float:
    """Return the mean of |predicted / measured - 1|."""
    return float(np.mean(np.abs(_ratio(predicted, measured) - 1)))


def log_bias(predicted: ArrayLike, measured: ArrayLike) -> float:
    """Return exp(mean log(predicted / measured)) - 1: twice too slow and twice too fast cancel."""
    return float(np.exp(np.mean(np.log(_ratio(predicted, measured)))) - 1)


def rank_correlation(predicted: ArrayLike, measured: ArrayLike) -> float | None:
    """Return Spearman's, with ties sharing their rank; None for fewer than three values or where one side is constant."""
    if np.size(predicted) < 3 or np.ptp(predicted) == 0 or np.ptp(measured) == 0:
        return None
    return float(spearmanr(predicted, measured).statistic)


def regret(
    times_s: Sequence[float], fits: Sequence[bool], measured_s: Sequence[float], best_s: float
) -> tuple[int, float]:
    """Return the index of our choice and 1 - best / measured(choice).

    Our choice is the fastest prediction among those that fit; among all where none does.
    """
    candidates = [idx for idx, fit in enumerate(fits) if fit] or list(range(len(times_s)))
    chosen = min(candidates, key=lambda idx: times_s[idx])
    return chosen, 1 - best_s / measured_s[chosen]


def memory_kind(text: str) -> str:
    """Return allocated, reserved, nvidia-smi, "peak" (whose counter is not stated) or unstated."""
    return stated("memory", text) or "unstated"


def memory_ratio(row: RunRow, prediction: Prediction) -> tuple[float, float, float] | None:
    """Return measured over predicted peak of a run and the ends of its interval, as ratios; None where a peak is unknown."""
    estimate = prediction.estimate
    if estimate is None or row.peak_mem_gib is None or row.status != "ok":
        return None
    interval, allocated = estimate.memory_interval_bytes, estimate.peak_allocated_bytes
    # A framework's peak is torch's max_memory_allocated unless it says otherwise.
    predicted = {"allocated": allocated, "peak": allocated, "nvidia-smi": estimate.peak_device_bytes}
    measured = row.peak_mem_gib * GIB / predicted.get(memory_kind(row.mem_kind), estimate.peak_reserved_bytes)
    return measured, interval.low / allocated, interval.high / allocated


def score_sources(
    rows: Sequence[RunRow], predictions: Sequence[Prediction], groups: Mapping[str, GroupScore]
) -> dict[str, SourceScore]:
    """Return scores by source_set, in the order of the table."""
    by_source: dict[str, list[Pair]] = defaultdict(list)
    for row, prediction in zip(rows, predictions, strict=True):
        by_source[row.source_set].append((row, prediction))
    return {source: _score_source(source, pairs, groups) for source, pairs in by_source.items()}


def score_groups(
    rows: Sequence[RunRow], predictions: Sequence[Prediction], names: Sequence[str]
) -> dict[str, GroupScore]:
    """Return our choice in every named decision group that has scored, measured rows."""
    members: dict[str, list[tuple[RunRow, Prediction, float]]] = defaultdict(list)
    for row, prediction in zip(rows, predictions, strict=True):
        measured = prediction.measured_s or row.measured_s
        if row.decision_group and row.is_scored and measured is not None:
            members[row.decision_group].append((row, prediction, measured))
    return {name: _score_group(members[name]) for name in names if members.get(name)}


def _score_group(members: list[tuple[RunRow, Prediction, float]]) -> GroupScore:
    source = members[0][0].source_set
    best, _, best_s = min(members, key=lambda member: member[2])
    known = [(row, p.estimate, measured) for row, p, measured in members if p.estimate is not None]
    if len(known) < 2:
        return GroupScore(source, len(members), len(known), None, best.id, None)
    times, fits = [e.step_time_s for _, e, _ in known], [e.fits for _, e, _ in known]
    chosen, value = regret(times, fits, [measured for *_, measured in known], best_s)
    return GroupScore(source, len(members), len(known), known[chosen][0].id, best.id, value)


def _score_source(source: str, pairs: list[Pair], groups: Mapping[str, GroupScore]) -> SourceScore:
    usable = [(row, p) for row, p in pairs if row.is_scored]
    inputs = [p.inputs for _, p in usable if p.inputs is not None and p.estimate is not None]
    regrets = [g.regret for g in groups.values() if g.source_set == source and g.regret is not None]
    score = (
        RegretScore(len(regrets), float(np.mean(regrets)), float(np.median(regrets)), max(regrets)) if regrets else None
    )
    return SourceScore(
        rows=len(pairs),
        scored=len(inputs),
        unscored=len(pairs) - len(usable),
        skipped=_counts(p.skipped for _, p in usable if p.skipped),
        approximated=_counts(name for i in inputs for name in i.approximated),
        assumed=_counts(name for i in inputs for name in i.assumed),
        time=_score_time(usable),
        memory=_score_memory(usable),
        fit=_score_fit(usable),
        regret=score,
    )


def _counts(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())


def _score_time(pairs: list[Pair]) -> TimeScore | None:
    known = [(p.estimate, p.measured_s) for _, p in pairs if p.estimate is not None and p.measured_s is not None]
    if not known:
        return None
    predicted, measured = np.array([e.step_time_s for e, _ in known]), np.array([m for _, m in known])
    is_inside = [e.step_time_interval_s.low <= m <= e.step_time_interval_s.high for e, m in known]
    return TimeScore(
        count=len(known),
        mape=relative_error(predicted, measured),
        median_ratio=float(np.median(predicted / measured)),
        bias=log_bias(predicted, measured),
        spearman=rank_correlation(predicted, measured),
        coverage=float(np.mean(is_inside)),
    )


def _score_memory(pairs: list[Pair]) -> dict[str, MemoryScore]:
    """Return scores by kind of measurement."""
    by_kind: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for row, p in pairs:
        if ratios := memory_ratio(row, p):
            by_kind[memory_kind(row.mem_kind)].append(ratios)
    scores = {}
    for kind, members in sorted(by_kind.items()):
        measured, low, high = np.array(members).T
        is_inside = (low <= measured) & (measured <= high)
        error, bias = relative_error(1 / measured, 1.0), log_bias(1 / measured, 1.0)
        scores[kind] = MemoryScore(len(members), error, bias, coverage=float(np.mean(is_inside)))
    return scores


def _score_fit(pairs: list[Pair]) -> FitScore:
    known = [(row, not p.estimate.fits) for row, p in pairs if p.estimate is not None]
    failed = [is_refused for row, is_refused in known if row.is_oom]
    ran = [is_refused for row, is_refused in known if row.status == "ok"]
    recall, false_alarms = (float(np.mean(part)) if part else None for part in (failed, ran))
    return FitScore(len(failed), recall, len(ran), false_alarms)


def _ratio(predicted: ArrayLike, measured: ArrayLike) -> FloatArray:
    return np.asarray(predicted, dtype=np.float64) / np.asarray(measured, dtype=np.float64)
