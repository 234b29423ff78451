"""Decision groups: measured rows that differ in nothing but their layout, and what a rule would have taken of them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..cost_models.stage.interval import differences
from ..planner.choice import plainest
from ..schema.layout_table import LayoutTable
from ..schema.units import BoolArray, FloatArray
from .predict import Prediction
from .rows import RunRow
from .stalls import stalled


@dataclass(frozen=True)
class Group:
    """Measured rows [N] that differ in nothing but their layout."""

    source: str
    table: LayoutTable
    predicted_s: FloatArray
    measured_s: FloatArray
    fits: BoolArray
    engine: str

    def pairs(self) -> tuple[FloatArray, FloatArray]:
        """Return what differs between the rows of each pair [P, KINDS], and the error of the log of their ratio [P]."""
        error = np.log(self.predicted_s / self.measured_s)
        idxs = list(itertools.combinations(range(len(error)), 2))
        between = [differences(self.table, i) for i in range(len(error))]
        return np.array([between[i][j] for i, j in idxs]), np.array([error[j] - error[i] for i, j in idxs])

    def regret(self, chosen: int) -> float:
        """Return 1 - best / measured(chosen)."""
        return float(1 - self.measured_s.min() / self.measured_s[chosen])


def read_groups(rows: Sequence[RunRow], predictions: Sequence[Prediction]) -> list[Group]:
    """Return the decision groups with two or more scored rows that could be predicted; none that stalled between nodes."""
    members: dict[str, list[tuple[RunRow, Prediction]]] = defaultdict(list)
    for row, prediction, has_stalled in zip(rows, predictions, stalled(rows), strict=True):
        if row.decision_group and row.is_scored and prediction.measured_s is not None and not has_stalled:
            members[row.decision_group].append((row, prediction))
    return [_group(pairs) for pairs in members.values() if len(pairs) > 1]


def _group(members: Sequence[tuple[RunRow, Prediction]]) -> Group:
    inputs = [prediction.inputs for _, prediction in members if prediction.inputs is not None]
    estimates = [prediction.estimate for _, prediction in members if prediction.estimate is not None]
    return Group(
        source=members[0][0].source_set,
        table=LayoutTable.from_layouts([i.layout for i in inputs], inputs[0].workload.global_batch_size),
        predicted_s=np.array([estimate.step_time_s for estimate in estimates]),
        measured_s=np.array([prediction.measured_s for _, prediction in members], dtype=np.float64),
        fits=np.array([estimate.fits for estimate in estimates]),
        engine=inputs[0].workload.engine,
    )


def choose_by(group: Group, sd: Mapping[str, float], probability: float) -> int:
    """Return the row that the planner would take; a half: the fastest by prediction."""
    rows = np.flatnonzero(group.fits) if group.fits.any() else np.arange(len(group.fits))
    if probability == 0.5:
        return int(rows[np.argmin(group.predicted_s[rows])])
    nothing_lacks = np.zeros(len(rows), dtype=bool)
    seconds = group.predicted_s[rows]
    return int(rows[plainest(group.table.select(rows), seconds, nothing_lacks, probability=probability, sd=sd)])


def choose_naively(group: Group) -> int:
    """Return the row with the least tp x pp, then the largest micro-batch."""
    table = group.table
    return int(np.lexsort((-table.micro_batch_size, table.tp * table.pp))[0])
