"""Run a plan to its end on this node's devices, again from the last checkpoint after faults, and tell what happens as it does."""

from __future__ import annotations

import _thread
import contextlib
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field

from ...schema import ConfigError, TrainingPlan
from ...schema.base import Frozen
from ...schema.errors import (
    InfeasibleError,
    InterruptedRunError,
    MeshwrightError,
    NodesNotMetError,
    RuntimeMismatchError,
)
from ..supervision.supervisor import Scale
from ..training.metrics import MetricsWriter, read_new_records
from ..training.options import TrainOptions, prepare_options, why_not_continued
from . import preflight
from .events import JobEvent, OnEvent
from .launch import launch
from .rendezvous import Rendezvous
from .worker import Job, OnFault

_BETWEEN_S = 1.0
"""Between two tries to meet."""

OnRecord = Callable[[dict[str, Any]], None]
Replan = Callable[[TrainingPlan, Path], tuple[TrainingPlan, Path]]


class JobSettings(Frozen):
    """How a job is started and watched, and what becomes of it after faults.

    Attributes:
        on_fault: continue: the ranks that are left go on at once, under the plan's fallbacks, or the regions that are left where
            these train by themselves; restart: all end. None: continue where there are fallbacks, spares or such regions, and
            nothing is in the way.
        max_restarts: how often a job that ended starts again from its last checkpoint.
        preflight: compare the ranks before; those that are slow stand by, as far as there are spares.
        spares, restart_ranks, timeout_s, hang_timeout_s, grace_s, script: as of `Job`.
    """

    on_fault: OnFault | None = None
    spares: int = Field(default=0, ge=0)
    restart_ranks: int = Field(default=0, ge=0)
    max_restarts: int = Field(default=0, ge=0)
    preflight: bool = False
    timeout_s: float = Field(default=600.0, gt=0)
    hang_timeout_s: float = Field(default=10.0, ge=0)
    grace_s: float = Field(default=25.0, ge=0)
    script: tuple[str, ...] = ()


def apply(
    plan: TrainingPlan | str | Path,
    options: TrainOptions | None = None,
    *,
    rendezvous: Rendezvous | None = None,
    fallbacks: Sequence[TrainingPlan] | None = None,
    on_event: OnEvent | None = None,
    on_record: OnRecord | None = None,
    replan: Replan | None = None,
    scale: Scale | None = None,
    **settings: Any,
) -> dict[str, Any] | None:
    """Run a plan; return its prediction and what was measured, on the node whose rank reports. Call it from the main thread.

    Args:
        plan: or the file of one.
        options: of the built-in training; not for a script of one's own.
        fallbacks: instead of those of the plan.
        on_event: called with each `JobEvent`, in another thread.
        on_record: called with each line of the report: steps, events, notes and the result.
        replan: called before each start; returns the plan for the machines that are there, and its file.
        scale: called every second on the launcher with the store; says how many devices are to train, of those that are there.
        settings: fields of `JobSettings`, such as ``on_fault="continue"``, and of `TrainOptions`, such as ``steps=100``.

    Raises:
        ConfigError, RuntimeMismatchError: the plan does not suit the options or this machine.
        MeshwrightError: the job failed, for the last time.
    """
    trains = {name: settings.pop(name) for name in [*settings] if name in TrainOptions.model_fields}
    chosen, result = JobSettings(**settings), None
    options = (options or TrainOptions()).replace(**trains)

    def handle(record: dict[str, Any]) -> None:
        nonlocal result
        if "predicted" in record:
            result = record
        if on_record is not None:
            on_record(record)
        if on_event is not None and "event" in record:
            on_event(JobEvent(**record))

    with tempfile.TemporaryDirectory(prefix="meshwright-") as name:
        folder = Path(name)
        path = folder / "plan.json" if isinstance(plan, TrainingPlan) else Path(plan).resolve()
        if isinstance(plan, TrainingPlan):
            plan.save(path)
        else:
            plan = TrainingPlan.load(path)
        prepared = TrainOptions() if chosen.script else prepare_options(plan, options)
        plans = plan.fallbacks if fallbacks is None else fallbacks
        job = Job(
            plan=str(path),
            options=prepared,
            report=str(folder / "report.jsonl"),
            fallbacks=_saved(plans, folder) if goes_on(plan, prepared, chosen, has_fallbacks=bool(plans)) else (),
            regions=None if plan.local_updates is None or chosen.script else chosen.on_fault or "continue",
            preflight_s=preflight.PREFLIGHT_S if chosen.preflight else 0.0,
            **{name: getattr(chosen, name) for name in set(JobSettings.model_fields) & set(Job.model_fields)},
        )
        with _followed(folder / "report.jsonl", handle):
            if scale is not None and (not job.goes_on or job.regions is not None):
                raise ConfigError(
                    "only a training that goes on takes machines in and lets them go", help="--on-fault continue"
                )
            _run(plan, job, rendezvous or Rendezvous(), chosen.max_restarts, replan, scale)
    return result


def goes_on(plan: TrainingPlan, options: TrainOptions, settings: JobSettings, *, has_fallbacks: bool) -> bool:
    """Return whether a training goes on without ranks that die.

    Raises:
        ConfigError, RuntimeMismatchError: it is to, and cannot.
    """
    extras = settings.spares or settings.restart_ranks
    if plan.local_updates is not None and settings.spares:
        raise ConfigError(
            "--spares stand by for a single job: regions that train by themselves are many", help="leave it out"
        )
    if plan.local_updates is not None and settings.on_fault != "restart":
        return False  # without fallbacks: each region goes on under its own plan
    if settings.on_fault == "restart" or settings.script:
        if extras:
            raise ConfigError(
                "--spares and --restart-ranks are for a training that goes on without a rank that dies",
                help="leave them out, or say --on-fault continue",
            )
        return False
    is_continued = settings.on_fault == "continue" or settings.spares > 0
    if not is_continued and not has_fallbacks:
        if settings.restart_ranks:
            raise ConfigError("--restart-ranks needs --on-fault continue, or a plan with fallbacks (plan --tolerate)")
        return False
    if reasons := why_not_continued(plan, options):
        if is_continued:
            raise RuntimeMismatchError(
                "this training cannot go on without a rank that dies", details=reasons, help="say --on-fault restart"
            )
        return False
    if not has_fallbacks and not settings.spares:
        raise ConfigError(
            "a training goes on under a plan for fewer devices, and the plan has no fallbacks", help="plan --tolerate N"
        )
    return True


def _saved(plans: Sequence[TrainingPlan], folder: Path) -> tuple[str, ...]:
    files = [folder / f"{each.layout.world_size}.json" for each in plans]
    for each, file in zip(plans, files, strict=True):
        each.save(file)
    return tuple(map(str, files))


# --- again after faults ----------------------------------------------------------------------------------------------


def _run(
    plan: TrainingPlan,
    job: Job,
    rendezvous: Rendezvous,
    max_restarts: int,
    replan: Replan | None,
    scale: Scale | None,
) -> None:
    """Launch a job, again after each fault of a rank as often as allowed; bad input, a plan that this machine cannot run and
    signals to the launcher end it.

    On several nodes every launcher sees the fault and does the same; they meet again under the next name, so that nodes that come
    late do not meet those of the attempt before.

    Raises:
        MeshwrightError: of the last attempt.
    """
    job = job.replace(begun_s=time.time())
    for attempt in range(max_restarts + 1):
        until_s, place = 0.0, rendezvous
        if attempt:
            job = job.replace(options=job.options.replace(resume=True, restart_data=False), restarts=attempt)
        if attempt and rendezvous.nnodes > 1:
            if job.regions != "continue":  # the others are still there, and wait for nobody
                place = replace(rendezvous, run_id=f"{rendezvous.run_id or 'meshwright'}-{attempt}")
            until_s = time.monotonic() + rendezvous.timeout_s
        if replan is not None:
            plan, path = replan(plan, Path(job.plan))
            job = job.replace(plan=str(path))
        try:
            _launch(plan, job, place, until_s=until_s, scale=scale)
            return
        except (ConfigError, InfeasibleError, InterruptedRunError, RuntimeMismatchError):
            raise
        except MeshwrightError as error:
            if attempt == max_restarts:
                raise
            causes = (str(error), f"restart {attempt + 1} of {max_restarts}")
            write_event(job, JobEvent(event="restarted", causes=causes))


def _launch(plan: TrainingPlan, job: Job, rendezvous: Rendezvous, *, until_s: float, scale: Scale | None) -> None:
    """Launch a job; where nodes do not meet, again until a time of the monotonic clock.

    After a fault the node that holds the meeting place closes it and opens it anew. A node that is back earlier comes to the old
    one and is thrown out.
    """
    while True:
        try:
            launch(plan, job, rendezvous=rendezvous, on_event=lambda event: write_event(job, event), scale=scale)
            return
        except NodesNotMetError:
            if time.monotonic() > until_s:
                raise
            time.sleep(_BETWEEN_S)


# --- what happens ----------------------------------------------------------------------------------------------------


def write_event(job: Job, event: JobEvent) -> None:
    """Write what a launcher has to tell into the report."""
    writer = MetricsWriter(job.report, append=True)
    writer.write(event.record())
    writer.close()


@contextlib.contextmanager
def _followed(path: Path, handle: OnRecord) -> Iterator[None]:
    """Handle each line of a file as it comes, in another thread, to the last one."""
    finished = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(_for_each, handle, read_new_records(path, finished))
        try:
            yield
        except MeshwrightError:
            finished.set()
            reader.result()  # raises what the run was ended for, where it was this
            raise
        finally:
            finished.set()
        reader.result()


def _for_each(handle: OnRecord, records: Iterator[dict[str, Any]]) -> None:
    """Handle each record; if that fails (a full disk, a closed pipe) end the run."""
    try:
        for record in records:
            handle(record)
    except BaseException as error:
        ignores = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # as shells let jobs in the background do
        _thread.interrupt_main(signal.SIGTERM if ignores else signal.SIGINT)
        if isinstance(error, OSError):
            raise MeshwrightError(f"cannot write the metrics of the run: {error.strerror}") from None
        raise
