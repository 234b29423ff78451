"""Launch a measurement on this machine, follow how far it is, and end it when its time is over."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from ...schema.errors import MeshwrightError, ProfileError
from ...schema.profile import Profile, ProfileSection
from ..machine import cpu_rank_environment
from .faults import cause_of, explain_failure
from .processes import JobEnd, NodeJob, run_ranks
from .protocol import MakeSteps, ProfileProgress, ProfileTask, Tell, read_progress

PROFILE_FILE = "profile.json"
"""Written by the first rank into the launcher's folder after every part."""


def launch_ranks(
    make_steps: MakeSteps, task: ProfileTask, num_ranks: int, *, on_progress: Tell | None = None
) -> Profile:
    """Measure with as many ranks of this machine, and return the profile that the first one leaves.

    Where the task has a start and a budget, ranks that are not done shortly before its end are ended: what they have stored counts.

    Args:
        make_steps: a function of a module, which the ranks import; it runs in them only.

    Raises:
        MeshwrightError: what a rank refused to do; memory ran out; or the time was over before there was anything to keep.
        ProfileError: a rank failed, or a signal ended them; it then does to this process what it would have done without us.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        task = replace(task, folder=folder, steps=f"{make_steps.__module__}:{make_steps.__qualname__}")
        path = Path(folder) / "task.json"
        task.save(path)
        job = NodeJob(
            command=(sys.executable, "-m", f"{__package__}.rank", str(path)),
            folder=Path(folder),
            num_ranks=num_ranks,
            variables=_variables(task, num_ranks),
            ends_at=task.ends_at,
        )
        end = run_ranks(job, _progress_reader(folder, on_progress))
        profile = None if end.received else read_profile(task, end, num_ranks)
    if end.received:
        signal.raise_signal(end.received)
    if profile is None:
        raise ProfileError(f"measuring this machine was ended by {end.received.name if end.received else 'a signal'}")
    return profile


def _variables(task: ProfileTask, num_ranks: int) -> dict[str, str]:
    threads = {} if num_ranks == 1 or "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
    return {**threads, **(cpu_rank_environment() if task.backend == "gloo" else {})}


def _progress_reader(folder: str, on_progress: Tell | None) -> Callable[[Mapping[int, int]], None]:
    last: ProfileProgress | None = None

    def look(_: Mapping[int, int]) -> None:
        nonlocal last
        progress = read_progress(folder) if on_progress is not None else None
        if on_progress is not None and progress is not None and progress != last:
            last = progress
            on_progress(progress)

    return look


def read_profile(task: ProfileTask, end: JobEnd, num_ranks: int) -> Profile:
    """Return what the ranks have left, after everything that speaks against it."""
    path = Path(task.folder) / PROFILE_FILE
    if end.deaths and not end.is_late:
        raise profile_failure(end, num_ranks)
    if not path.exists():
        raise _too_late(task)
    profile = Profile.load(path)
    if not end.is_late:
        return profile
    profile = _cut_short(profile, task).sealed()
    if task.out:
        profile.save(task.out)
    return profile


def _cut_short(profile: Profile, task: ProfileTask) -> Profile:
    """Add a record of the parts that the ranks did not come to."""
    known = {part.name for part in profile.parts}
    reason = f"the {task.budget_s:g} s were over"
    missing = tuple(
        ProfileSection(name=name, state="skipped", duration_s=0.0, num_points=0, reason=reason)
        for name in task.parts
        if name not in known
    )
    return profile.replace(parts=(*profile.parts, *missing), content_sha256="")


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


def _too_late(task: ProfileTask) -> MeshwrightError:
    progress = read_progress(task.folder)
    reached = "the start of the ranks" if progress is None else progress.what
    return MeshwrightError(
        f"the {task.budget_s:g} s were over before there was anything to keep",
        details=(f"reached: {reached}; other work used {100 * (task.foreign_load_fraction or 0):.0f} % of the cores",),
        help=f"give more time (--budget-s {max(30, round(3 * task.budget_s))}), or measure when the machine is idle",
    )
