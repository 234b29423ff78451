"""The protocol of a measurement: the task that every rank is given, its steps, the progress and the profile that it leaves.

A launcher on this machine starts the ranks with a folder for their messages, follows how far they are, and ends them when the time
is over; what they have stored by then counts.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...schema.base import read_json, write_atomically
from ...schema.errors import MeshwrightError, ProfileError
from ...schema.profile import Profile, ProfileSection, ProfileSectionName
from ..machine import cpu_rank_environment
from .faults import cause_of, explain_failure
from .processes import JobEnd, NodeJob, program, run_ranks

if TYPE_CHECKING:
    from ..measure.timing import Bench, Points

ALL_PARTS: tuple[ProfileSectionName, ...] = ("compute", "memory", "layers", "links", "host", "storage", "overlap")

PROFILE_FILE = "profile.json"
"""Written by the first rank into the launcher's folder after every part."""

_PROGRESS_FILE = "progress.json"


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
        num_rounds: how often everything is measured; the quietest time of each point counts.
        sample_s: time for the samples of one point in one round.
        num_layers, num_sizes: how many of the standard layers and message sizes a brief measurement takes; None: all.
        model, seq_len, micro_batch_size: whose layers to measure: a ModelSpec in JSON; empty for none.
        documents: layers over shorter sequences as well, of as many tokens together.
        storage_path: folder on the storage to measure; empty for none.
        out: file that the profile is written to after every part.
        resume: keep the parts that ``out`` has.
        cpu_seconds: points are seconds of a rank's processor, without those in which it waits or another process has it.
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
    parts: tuple[ProfileSectionName, ...] = ("compute", "memory", "links")
    num_rounds: int = 2
    sample_s: float = 0.02
    num_layers: int | None = None
    num_sizes: int | None = None
    model: str = ""
    seq_len: int = 0
    micro_batch_size: int = 1
    documents: bool = False
    storage_path: str = ""
    out: str = ""
    resume: bool = False
    cpu_seconds: bool = False
    foreign_load_fraction: float | None = None

    @property
    def ends_at(self) -> float:
        """Return when ranks have to be done, seconds of the epoch; infinite where nobody said when it began."""
        return float("inf") if self.started_at is None else self.started_at + self.budget_s - self.finish_s


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Position of a rank: nodes with ``ranks_per_node`` ranks each, numbered node by node."""

    rank: int
    local_rank: int
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
    write_atomically(Path(folder) / _PROGRESS_FILE, json.dumps(progress))


def _read_progress(folder: str | Path) -> ProfileProgress | None:
    path = Path(folder) / _PROGRESS_FILE
    return ProfileProgress(*read_json(path)) if path.exists() else None


# --- the launcher's side ---------------------------------------------------------------------------------------------


def launch_ranks(
    make_steps: MakeSteps, task: ProfileTask, num_ranks: int, *, on_progress: Tell | None = None
) -> Profile:
    """Measure with as many ranks of this machine, and return the profile that the first one leaves.

    Args:
        make_steps: a function of a module, which the ranks import; it runs in them only.

    Raises:
        MeshwrightError: what a rank refused to do; memory ran out; or the time was over before there was anything to keep.
        ProfileError: a rank failed, or a signal ended them; it then does to this process what it would have done without us.
    """
    threads = {} if num_ranks == 1 or "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
    last: ProfileProgress | None = None

    def follow(_: Mapping[int, int]) -> None:
        nonlocal last
        progress = _read_progress(task.folder) if on_progress is not None else None
        if on_progress is not None and progress is not None and progress != last:
            last = progress
            on_progress(progress)

    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        task = replace(task, folder=folder, steps=f"{make_steps.__module__}:{make_steps.__qualname__}")
        path = Path(folder) / "task.json"
        write_atomically(path, json.dumps(asdict(task)))
        job = NodeJob(
            command=program(f"{__package__}.rank", path),
            folder=Path(folder),
            num_ranks=num_ranks,
            variables={**threads, **(cpu_rank_environment() if task.backend == "gloo" else {})},
            ends_at=task.ends_at,
        )
        end = run_ranks(job, follow)
        if not end.received:
            return read_profile(task, end, num_ranks)
    signal.raise_signal(end.received)
    raise ProfileError(f"measuring this machine was ended by {end.received.name}")


def read_profile(task: ProfileTask, end: JobEnd, num_ranks: int) -> Profile:
    """Return what the ranks have left, after everything that speaks against it; late ones leave parts out."""
    if end.deaths and not end.is_late:
        raise profile_failure(end, num_ranks)
    path = Path(task.folder) / PROFILE_FILE
    if not path.exists():
        progress, load = _read_progress(task.folder), 100 * (task.foreign_load_fraction or 0)
        reached = "the start of the ranks" if progress is None else progress.what
        raise MeshwrightError(
            f"the {task.budget_s:g} s were over before there was anything to keep",
            details=(f"reached: {reached}; other work used {load:.0f} % of the cores",),
            help=f"give more time (--budget-s {max(30, round(3 * task.budget_s))}), or measure when the machine is idle",
        )
    profile = Profile.load(path)
    if not end.is_late:
        return profile
    skipped = {"state": "skipped", "duration_s": 0.0, "num_points": 0, "reason": f"the {task.budget_s:g} s were over"}
    names = [name for name in task.parts if name not in {part.name for part in profile.parts}]
    parts = (*profile.parts, *(ProfileSection(name=name, **skipped) for name in names))
    profile = profile.replace(parts=parts, content_sha256="").sealed()
    if task.out:
        profile.save(task.out)
    return profile


def profile_failure(end: JobEnd, num_ranks: int) -> MeshwrightError:
    """Return the error of a measurement of which a rank failed."""
    cause, error = cause_of(end.deaths), explain_failure(end.deaths, world_size=num_ranks)
    if cause.payload is not None:
        return error
    if cause.ran_out_of_memory:
        return MeshwrightError(
            "memory ran out while this machine was measured",
            details=(error.message, *cause.trace[-1:]),
            help="end what uses the memory or raise its limit (ulimit -v), or measure with fewer ranks (--ranks)",
        )
    return ProfileError("measuring this machine failed", details=(error.message, *error.details[-3:]))
