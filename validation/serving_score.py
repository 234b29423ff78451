"""How far predicted load tests are from measured ones: TPOT and TTFT, their order, and choices under a limit on TPOT.

A choice: of the rows that differ in layout, devices and concurrency only, the one with most tokens a second and device whose TPOT
is within the limit. Ours goes by the predicted figures; it meets the limit where the measured TPOT does, and then loses
1 - measured(ours) / measured(best).

A cautious choice takes the most of tokens a second and device times P(limit / predicted), where P(x) is the share of other models'
rows whose TPOT was measured at no more than x times the predicted one: nothing of it is fitted to the rows of the model that is
chosen for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from ..schema.units import FloatArray
from .decisions import rank_correlation
from .serving import ServingPrediction, ServingRow

QUANTILES = tuple(level / 20 for level in range(1, 20))
LIMITS_MS = (15.0, 20.0, 30.0, 50.0, 75.0, 100.0)
Pair = tuple[ServingRow, ServingPrediction]
Chance = Callable[[FloatArray], FloatArray]
"""Of a limit over what was predicted: how likely the measured value is within it."""


@dataclass(frozen=True)
class MetricScore:
    """Relative errors of one metric over the scored rows; measured over predicted at each of QUANTILES."""

    mean: float
    median: float
    ratio: float
    rank: float | None
    measured_ratios: tuple[float, ...]

    @classmethod
    def of(cls, pairs: Sequence[Pair], metric: str) -> MetricScore:
        """Score ``ttft_ms`` or ``tpot_ms``."""
        measured, predicted = (np.array([getattr(pair[side], metric) for pair in pairs]) for side in (0, 1))
        error = np.abs(predicted / measured - 1)
        return cls(
            mean=float(error.mean()), median=float(np.median(error)), ratio=float(np.median(predicted / measured)),
            rank=rank_correlation(predicted, measured),
            measured_ratios=tuple(np.quantile(measured / predicted, QUANTILES).tolist()),
        )  # fmt: skip


@dataclass(frozen=True)
class ChoiceScore:
    """Choices under a limit on TPOT: how many there are, the part that meets it, and what those lose."""

    count: int
    met: float
    lost_mean: float
    lost_p90: float


@dataclass(frozen=True)
class ServingScore:
    """Of some rows: how many there are, how many have an answer, and what fits; metrics where any has.

    Attributes:
        cautious: choices by the errors of other models' rows; None where there are no others.
    """

    count: int
    answered: int
    fits: float
    tpot: MetricScore | None
    ttft: MetricScore | None
    choices: ChoiceScore | None
    cautious: ChoiceScore | None


def score_serving(rows: Sequence[ServingRow], predictions: Sequence[ServingPrediction]) -> dict[str, ServingScore]:
    """Score the rows of each mode that count (`ServingRow.is_scored`), and those of each engine and model."""
    pairs = [pair for pair in zip(rows, predictions, strict=True) if pair[0].is_scored]
    known = [pair for pair in pairs if pair[1].tpot_ms is not None]
    scores: dict[str, ServingScore] = {}
    for columns in (("mode",), ("mode", "engine", "model", "gpu", "gemm_dtype")):
        groups: dict[str, list[Pair]] = defaultdict(list)
        for pair in pairs:
            groups[" ".join(str(getattr(pair[0], column)) for column in columns)].append(pair)
        scores |= {name: _score(group, known) for name, group in sorted(groups.items())}
    return scores


def _score(pairs: Sequence[Pair], every: Sequence[Pair]) -> ServingScore:
    known = [pair for pair in pairs if pair[1].tpot_ms is not None]
    if not known:
        return ServingScore(len(pairs), 0, 0.0, None, None, None, None)
    return ServingScore(
        count=len(pairs),
        answered=len(known),
        fits=sum(bool(prediction.fits) for _, prediction in known) / len(known),
        tpot=MetricScore.of(known, "tpot_ms"),
        ttft=MetricScore.of(known, "ttft_ms"),
        choices=_choices(known, lambda _: _certain),
        cautious=_choices(known, _chances(every)),
    )


def _certain(ratio: FloatArray) -> FloatArray:
    """Return the chance of a limit where predictions are taken for true."""
    return np.asarray(ratio >= 1, dtype=np.float64)


def _chances(every: Sequence[Pair]) -> Callable[[ServingRow], Chance | None]:
    """Return what gives the chances of a row's choice: errors of the rows of other models; None: there are none."""
    known: dict[str, Chance | None] = {}

    def of(row: ServingRow) -> Chance | None:
        if row.model not in known:
            ratios = (
                (other.tpot_ms or 0.0) / (prediction.tpot_ms or 1.0)
                for other, prediction in every
                if other.model != row.model
            )
            errors = np.sort(np.fromiter(ratios, dtype=np.float64))
            known[row.model] = (
                (lambda ratio: np.searchsorted(errors, ratio, side="right") / len(errors)) if len(errors) else None
            )
        return known[row.model]

    return of


def _choices(pairs: Sequence[Pair], chance_of: Callable[[ServingRow], Chance | None]) -> ChoiceScore | None:
    settings: dict[Hashable, list[Pair]] = defaultdict(list)
    for pair in pairs:
        if pair[0].output_tokens_per_s_per_gpu:
            settings[pair[0].setting].append(pair)
    met, lost = [], []
    for group in settings.values():
        chance = chance_of(group[0][0])
        measured, predicted = (np.array([pair[side].tpot_ms for pair in group]) for side in (0, 1))
        rate, guess = (np.array([pair[side].output_tokens_per_s_per_gpu or 0.0 for pair in group]) for side in (0, 1))
        for limit in LIMITS_MS if len(group) > 1 and chance else ():
            if not np.any(measured <= limit):
                continue
            expected = guess * chance(limit / predicted) if chance else guess
            chosen = int(np.argmax(expected) if expected.any() else np.argmin(predicted))
            met.append(measured[chosen] <= limit)
            if met[-1]:
                lost.append(1 - rate[chosen] / rate[measured <= limit].max())
    if not met:
        return None
    return ChoiceScore(
        count=len(met),
        met=float(np.mean(met)),
        lost_mean=float(np.mean(lost)) if lost else 0.0,
        lost_p90=float(np.quantile(lost, 0.9)) if lost else 0.0,
    )
