"""Decision groups: measured rows that differ in nothing but their layout, and what a rule would have taken of them.

The regret of a choice is 1 - best / measured(choice), the best being the best that was measured, predicted or not. Beside it stand
the regret of the naive rule, the mean over all rows that could be predicted (random), and the rank correlation inside the group.
Whether predicted gains come true is told by the gain of the choice over its group's geometric mean, as predicted and as measured.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import spearmanr

from ..cost_models.coefficients import packaged_coefficients
from ..cost_models.stage.interval import differences
from ..planner.choice import plainest
from ..schema.layout_table import LayoutTable
from ..schema.units import BoolArray, FloatArray
from .predict import Prediction
from .rows import RunRow
from .stalls import stalled


@dataclass(frozen=True)
class Group:
    """Measured rows [N] that differ in nothing but their layout, as far as they could be predicted.

    Attributes:
        ids: of the rows.
        best_s: the least seconds that were measured, where that row could not be predicted; 0 where it could.
    """

    source: str
    table: LayoutTable
    predicted_s: FloatArray
    measured_s: FloatArray
    fits: BoolArray
    ids: tuple[str, ...] = ()
    best_s: float = 0.0

    def pairs(self) -> tuple[FloatArray, FloatArray]:
        """Return what differs between the rows of each pair [P, KINDS], and the error of the log of their ratio [P]."""
        error = np.log(self.predicted_s / self.measured_s)
        idxs = list(itertools.combinations(range(len(error)), 2))
        between = [differences(self.table, i) for i in range(len(error))]
        return np.array([between[i][j] for i, j in idxs]), np.array([error[j] - error[i] for i, j in idxs])

    def regret(self, chosen: int) -> float:
        """Return 1 - best / measured(chosen)."""
        return float(1 - (self.best_s or self.measured_s.min()) / self.measured_s[chosen])

    def gains(self, chosen: int) -> tuple[float, float]:
        """Return by how much the chosen row is faster than the geometric mean of all: predicted, and measured."""
        logs = (np.log(self.predicted_s), np.log(self.measured_s))
        predicted, measured = (float(np.expm1(each.mean() - each[chosen])) for each in logs)
        return predicted, measured


@dataclass(frozen=True)
class GroupScore:
    """One decision group. Regrets are None where fewer than two of its measured rows could be predicted.

    Attributes:
        chosen, best: rows: the fastest by prediction that fits, and the fastest measured.
        regret, plain, naive, random: of our choice, of the planner's (the plainest near tie), of the naive rule, and the mean.
        rank: rank correlation; None for fewer than three rows.
        predicted_gain, measured_gain: of our choice over the geometric mean of the rows.
    """

    source_set: str
    measured: int
    predicted: int
    best: str
    chosen: str | None = None
    regret: float | None = None
    plain: float | None = None
    naive: float | None = None
    random: float | None = None
    rank: float | None = None
    predicted_gain: float | None = None
    measured_gain: float | None = None


Member = tuple[RunRow, Prediction, float]


def decision_groups(rows: Sequence[RunRow], predictions: Sequence[Prediction]) -> list[Group]:
    """Return the decision groups with two or more scored rows that could be predicted; none that stalled between nodes."""
    groups = (_group(members) for members in _members(rows, predictions).values())
    return [group for group in groups if group is not None]


def score_groups(
    rows: Sequence[RunRow], predictions: Sequence[Prediction], names: Sequence[str] | None = None
) -> dict[str, GroupScore]:
    """Return the choice in every decision group of a table that has scored, measured rows; only of the named ones where given."""
    members = _members(rows, predictions)
    return {name: _score(members[name]) for name in (members if names is None else names) if members.get(name)}


def _members(rows: Sequence[RunRow], predictions: Sequence[Prediction]) -> dict[str, list[Member]]:
    """Return the scored rows of each group with their seconds, predicted or not."""
    members: dict[str, list[Member]] = defaultdict(list)
    for row, prediction, has_stalled in zip(rows, predictions, stalled(rows), strict=True):
        seconds = prediction.measured_s or row.measured_s
        if row.decision_group and row.is_scored and seconds is not None and not has_stalled:
            members[row.decision_group].append((row, prediction, seconds))
    return members


def _group(members: Sequence[Member]) -> Group | None:
    known = [
        (row.id, prediction.inputs, prediction.estimate, seconds)
        for row, prediction, seconds in members
        if prediction.inputs is not None and prediction.estimate is not None
    ]
    if len(known) < 2:
        return None
    ids, inputs, estimates, seconds = zip(*known, strict=True)
    return Group(
        source=members[0][0].source_set,
        table=LayoutTable.from_layouts([i.layout for i in inputs], inputs[0].workload.global_batch_size),
        predicted_s=np.array([estimate.step_time_s for estimate in estimates]),
        measured_s=np.array(seconds, dtype=np.float64),
        fits=np.array([estimate.fits for estimate in estimates]),
        ids=ids,
        best_s=min(member[2] for member in members),
    )


def _score(members: Sequence[Member]) -> GroupScore:
    group = _group(members)
    best = min(members, key=lambda member: member[2])[0].id
    source = members[0][0].source_set
    if group is None:
        known = sum(prediction.estimate is not None for _, prediction, _ in members)
        return GroupScore(source, len(members), known, best)
    chosen = choose_by(group, probability=0.5)
    predicted_gain, measured_gain = group.gains(chosen)
    return GroupScore(
        source_set=source,
        measured=len(members),
        predicted=len(group.ids),
        best=best,
        chosen=group.ids[chosen],
        regret=group.regret(chosen),
        plain=group.regret(choose_by(group)),
        naive=group.regret(choose_naively(group)),
        random=float(np.mean([group.regret(idx) for idx in range(len(group.ids))])),
        rank=rank_correlation(group.predicted_s, group.measured_s),
        predicted_gain=predicted_gain,
        measured_gain=measured_gain,
    )


def rank_correlation(predicted: ArrayLike, measured: ArrayLike) -> float | None:
    """Return Spearman's, with ties sharing their rank; None for fewer than three values or where one side is constant."""
    if np.size(predicted) < 3 or np.ptp(predicted) == 0 or np.ptp(measured) == 0:
        return None
    return float(spearmanr(predicted, measured).statistic)


def choose_by(group: Group, sd: Mapping[str, float] | None = None, probability: float | None = None) -> int:
    """Return the row that the planner would take, by its sd and probability unless given; at a half: the fastest by prediction."""
    rows = np.flatnonzero(group.fits) if group.fits.any() else np.arange(len(group.fits))
    if probability == 0.5:
        return int(rows[np.argmin(group.predicted_s[rows])])
    if probability is None:
        probability = float(packaged_coefficients()["ratio"]["preferred_probability"])
    nothing_lacks = np.zeros(len(rows), dtype=bool)
    seconds = group.predicted_s[rows]
    return int(rows[plainest(group.table.select(rows), seconds, nothing_lacks, probability=probability, sd=sd)])


def choose_naively(group: Group) -> int:
    """Return the row with the least tp x pp, then the largest micro-batch."""
    table = group.table
    return int(np.lexsort((-table.micro_batch_size, table.tp * table.pp))[0])
