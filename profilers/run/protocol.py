"""The protocol of a measurement: the task that every rank is given, its steps, and the progress that it reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...schema.base import read_json, write_atomically
from ...schema.profile import ProfileSectionName
from ..measure.compute import CPU_LAYERS
from ..measure.links import SIZES
from ..measure.timing import Points

if TYPE_CHECKING:
    from ..measure.timing import Bench

ALL_PARTS: tuple[ProfileSectionName, ...] = ("compute", "memory", "layers", "links", "host", "storage", "overlap")
_PROGRESS = "progress.json"


@dataclass(frozen=True, kw_only=True)
class ProfileTask:
    """One measurement.

    Attributes:
        steps: ``module:function`` of what makes the steps, set by the launcher.
        folder: of the launcher: the ranks leave ``profile.json`` and their progress there; empty where torchrun or Slurm
            started them.
        threads: of each rank; 0: as torch is configured.
        budget_s: for everything, from ``started_at`` (seconds of the epoch), or where that is not given from when the ranks are up.
        finish_s: of the budget, for what the launcher does after the ranks.
        pace: of this machine against an idle one at the start.
        parts: what to measure.
        is_thorough: everything there is in a part; else only what describes a cluster.
        num_rounds: how often everything is measured; the quietest time of each point counts.
        sample_s: time for the samples of one point in one round.
        num_layers, num_sizes: how many of the standard layers and message sizes to measure.
        model, seq_len, micro_batch_size: whose layers to measure: a ModelSpec in JSON; empty for none.
        storage_path: folder on the storage to measure; empty for none.
        out: file that the profile is written to after every part.
        resume: keep the parts that ``out`` has.
        foreign_load_fraction: of the cores, before the ranks were started; None: to be measured by them.
    """

    backend: str
    steps: str = ""
    folder: str = ""
    threads: int = 0
    budget_s: float = 8.0
    started_at: float | None = None
    finish_s: float = 0.0
    pace: float = 1.0
    parts: tuple[ProfileSectionName, ...] = ("compute", "links")
    is_thorough: bool = False
    num_rounds: int = 2
    sample_s: float = 0.02
    num_layers: int = len(CPU_LAYERS)
    num_sizes: int = len(SIZES)
    model: str = ""
    seq_len: int = 0
    micro_batch_size: int = 1
    storage_path: str = ""
    out: str = ""
    resume: bool = False
    foreign_load_fraction: float | None = None

    @property
    def ends_at(self) -> float:
        """Return when ranks have to be done, seconds of the epoch; infinite where nobody said when it began."""
        return float("inf") if self.started_at is None else self.started_at + self.budget_s - self.finish_s

    def save(self, path: Path) -> None:
        """Write the JSON form."""
        write_atomically(path, json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: str | Path) -> ProfileTask:
        """Read the JSON form."""
        return cls(**read_json(path))


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Position of a rank: nodes with ``ranks_per_node`` ranks each, numbered node by node."""

    rank: int
    local_rank: int
    node: int
    num_nodes: int
    ranks_per_node: int

    @property
    def world_size(self) -> int:
        """Return the number of ranks of all nodes."""
        return self.num_nodes * self.ranks_per_node


class MeasurementStep(NamedTuple):
    """One kind of measurement, made by all ranks together.

    Attributes:
        value: how much of the time it deserves against the other steps.
        measure: from the bench and what this rank has so far to new points.
        skipped: why it is not made; empty where it is.
        is_needed: made even where no time remains: without it there is no profile.
    """

    part: ProfileSectionName
    what: str
    value: float
    measure: Callable[[Bench, Points], Points]
    skipped: str = ""
    is_needed: bool = False


class ProfileProgress(NamedTuple):
    """How far a measurement is, for a person."""

    part: str
    what: str
    elapsed_s: float
    budget_s: float


MakeSteps = Callable[[ProfileTask, RankPlace, bool], Sequence[MeasurementStep]]
"""From the task, the rank's place and whether it computes on a GPU to its steps. The ranks import what a launcher is given."""

Tell = Callable[[ProfileProgress], None]


def write_progress(folder: str | Path, progress: ProfileProgress) -> None:
    """Tell the launcher how far the measurement is; the first rank does it."""
    write_atomically(Path(folder) / _PROGRESS, json.dumps(progress))


def read_progress(folder: str | Path) -> ProfileProgress | None:
    """Return the last progress of the first rank; None where it has not begun."""
    path = Path(folder) / _PROGRESS
    return ProfileProgress(*read_json(path)) if path.exists() else None
