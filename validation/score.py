"""How far predictions are from measurements, by source: errors, intervals, memory, what fits, choices; and by fields of layouts.

Ratios are predicted over measured, so a bias above zero means we are too slow or too large. Runs that stalled between nodes
(stalls.py) are scored apart. What stands for all sources weighs each alike.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ..schema.units import GIB, FloatArray
from .decisions import GroupScore, rank_correlation
from .predict import Prediction, RunInputs
from .rows import RunRow, stated
from .stalls import stalled

Pair = tuple[RunRow, Prediction]


@dataclass(frozen=True)
class TimeScore:
    """Step times of ``count`` rows: `relative_error`, median of predicted over measured, `log_bias`, `rank_correlation`.

    Attributes:
        coverage, width: part of the measurements inside the nominal 90 % interval; its mean length over the prediction.
    """

    count: int
    mape: float
    median_ratio: float
    bias: float
    spearman: float | None
    coverage: float
    width: float


@dataclass(frozen=True)
class MemoryScore:
    """Peak memory of ``count`` rows; mape, bias and coverage as for times."""

    count: int
    mape: float
    bias: float
    coverage: float


@dataclass(frozen=True)
class FitScore:
    """Whether runs fit, in runs.

    Attributes:
        failed, misses: runs that failed for memory, and those of them that we say fit.
        ran, alarms: runs that fit, and those of them that we call infeasible.
    """

    failed: int
    misses: int
    ran: int
    alarms: int


@dataclass(frozen=True)
class ChoiceScore:
    """Means over ``count`` decision groups of what `GroupScore` has of each; median and max of our regret."""

    count: int
    mean: float
    median: float
    max: float
    plain: float | None
    naive: float | None
    random: float | None
    rank: float | None
    predicted_gain: float | None
    measured_gain: float | None


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
    stalled: TimeScore | None
    memory: dict[str, MemoryScore]
    fit: FitScore
    regret: ChoiceScore | None


@dataclass(frozen=True)
class OverallScore:
    """All sources: coverage, width and mean regrets with sources weighing alike; groups and runs summed up."""

    coverage: float | None
    width: float | None
    regret: float | None
    plain: float | None
    naive: float | None
    random: float | None
    num_groups: int
    alarms: int
    ran: int
    misses: int
    failed: int


def relative_error(predicted: ArrayLike, measured: ArrayLike) -> float:
    """Return the mean of |predicted / measured - 1|."""
    return float(np.mean(np.abs(_ratio(predicted, measured) - 1)))


def log_bias(predicted: ArrayLike, measured: ArrayLike) -> float:
    """Return exp(mean log(predicted / measured)) - 1: twice too slow and twice too fast cancel."""
    return float(np.exp(np.mean(np.log(_ratio(predicted, measured)))) - 1)


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
    apart: dict[str, list[Pair]] = defaultdict(list)
    for row, prediction, has_stalled in zip(rows, predictions, stalled(rows), strict=True):
        by_source[row.source_set].append((row, prediction))
        if has_stalled:
            apart[row.source_set].append((row, prediction))
    return {source: _score_source(source, pairs, apart[source], groups) for source, pairs in by_source.items()}


def score_overall(scores: Iterable[SourceScore]) -> OverallScore:
    """Return what holds for all sources together."""
    scores = list(scores)
    times = [score.time for score in scores if score.time is not None]
    choices, fits = [score.regret for score in scores if score.regret is not None], [score.fit for score in scores]
    return OverallScore(
        coverage=_mean(time.coverage for time in times),
        width=_mean(time.width for time in times),
        regret=_mean(choice.mean for choice in choices),
        plain=_mean(choice.plain for choice in choices),
        naive=_mean(choice.naive for choice in choices),
        random=_mean(choice.random for choice in choices),
        num_groups=sum(choice.count for choice in choices),
        alarms=sum(fit.alarms for fit in fits),
        ran=sum(fit.ran for fit in fits),
        misses=sum(fit.misses for fit in fits),
        failed=sum(fit.failed for fit in fits),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of those that are known."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


FIELDS: dict[str, Callable[[RunRow, RunInputs], object]] = {
    "tp": lambda row, run: run.layout.tp,
    "pp": lambda row, run: run.layout.pp,
    "chunks": lambda row, run: run.layout.num_model_chunks,
    "cp": lambda row, run: run.layout.cp,
    "ep": lambda row, run: run.layout.ep,
    "dp": lambda row, run: run.layout.dp,
    "zero": lambda row, run: run.layout.zero_stage,
    "micro_batch": lambda row, run: run.layout.micro_batch_size,
    "recompute": lambda row, run: run.layout.recompute,
    "offload": lambda row, run: run.layout.offload,
    "precision": lambda row, run: run.workload.precision,
    "engine": lambda row, run: run.workload.engine,
    "seq_len": lambda row, run: run.workload.seq_len,
    "devices": lambda row, run: run.cluster.num_devices,
    "device": lambda row, run: run.cluster.weakest_device.name,
    "model": lambda row, run: row.model,
    "framework": lambda row, run: row.framework,
    "group": lambda row, run: row.decision_group,
}
"""What errors can be listed by."""


def score_by(
    rows: Sequence[RunRow], predictions: Sequence[Prediction], names: Sequence[str]
) -> dict[tuple[object, ...], TimeScore]:
    """Return scores of step times by source and the values of some FIELDS, in their order; without runs that stalled."""
    members: dict[tuple[object, ...], list[Pair]] = defaultdict(list)
    for row, prediction, has_stalled in zip(rows, predictions, stalled(rows), strict=True):
        if prediction.inputs is not None and row.is_scored and not has_stalled:
            values = (FIELDS[name](row, prediction.inputs) for name in names)
            members[row.source_set, *values].append((row, prediction))
    scores = {key: _score_time(pairs) for key, pairs in members.items()}
    sources = list(dict.fromkeys(row.source_set for row in rows))
    ordered = sorted(scores, key=lambda key: (sources.index(str(key[0])), [(str(type(v)), v) for v in key[1:]]))
    return {key: score for key in ordered if (score := scores[key]) is not None}


def _score_source(source: str, pairs: list[Pair], apart: list[Pair], groups: Mapping[str, GroupScore]) -> SourceScore:
    usable = [(row, p) for row, p in pairs if row.is_scored]
    stalled_ids = {row.id for row, _ in apart}
    inputs = [p.inputs for _, p in usable if p.inputs is not None and p.estimate is not None]
    return SourceScore(
        rows=len(pairs),
        scored=len(inputs),
        unscored=len(pairs) - len(usable),
        skipped=_counts(p.skipped for _, p in usable if p.skipped),
        approximated=_counts(name for i in inputs for name in i.approximated),
        assumed=_counts(name for i in inputs for name in i.assumed),
        time=_score_time([pair for pair in usable if pair[0].id not in stalled_ids]),
        stalled=_score_time([pair for pair in apart if pair[0].is_scored]),
        memory=_score_memory(usable),
        fit=_score_fit(usable),
        regret=_score_choices([group for group in groups.values() if group.source_set == source]),
    )


def _score_choices(groups: Iterable[GroupScore]) -> ChoiceScore | None:
    known = [group for group in groups if group.regret is not None]
    if not known:
        return None
    regrets = [group.regret for group in known if group.regret is not None]
    return ChoiceScore(
        count=len(known),
        mean=float(np.mean(regrets)),
        median=float(np.median(regrets)),
        max=max(regrets),
        plain=_mean(group.plain for group in known),
        naive=_mean(group.naive for group in known),
        random=_mean(group.random for group in known),
        rank=_mean(group.rank for group in known),
        predicted_gain=_mean(group.predicted_gain for group in known),
        measured_gain=_mean(group.measured_gain for group in known),
    )


def _counts(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())


def _score_time(pairs: list[Pair]) -> TimeScore | None:
    known = [(p.estimate, p.measured_s) for _, p in pairs if p.estimate is not None and p.measured_s is not None]
    if not known:
        return None
    predicted, measured = np.array([e.step_time_s for e, _ in known]), np.array([m for _, m in known])
    low, high = np.array([(e.step_time_interval_s.low, e.step_time_interval_s.high) for e, _ in known]).T
    return TimeScore(
        count=len(known),
        mape=relative_error(predicted, measured),
        median_ratio=float(np.median(predicted / measured)),
        bias=log_bias(predicted, measured),
        spearman=rank_correlation(predicted, measured),
        coverage=float(np.mean((low <= measured) & (measured <= high))),
        width=float(np.mean((high - low) / predicted)),
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
    known = [(row, p.estimate.fits) for row, p in pairs if p.estimate is not None]
    failed, ran = [fits for row, fits in known if row.is_oom], [fits for row, fits in known if row.status == "ok"]
    return FitScore(failed=len(failed), misses=sum(failed), ran=len(ran), alarms=len(ran) - sum(ran))


def _ratio(predicted: ArrayLike, measured: ArrayLike) -> FloatArray:
    return np.asarray(predicted, dtype=np.float64) / np.asarray(measured, dtype=np.float64)
