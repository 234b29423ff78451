"""`meshwright profile`: measure this machine or all nodes of a job; show, compare and join what was measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .inputs import JsonOption
from .terminal import exit_on_error

if TYPE_CHECKING:
    from ..profilers.run.protocol import MeasurementStep, ProfileProgress, ProfileTask, RankPlace
    from ..schema import Profile


_FINISH_S = 0.4
"""On an idle machine: ending the ranks, reading their file, showing it and ending this process."""


def measure(
    context: typer.Context,
    *,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Measure the real layers of this model as well.")
    ] = None,
    seq_len: Annotated[int, typer.Option(metavar="N", help="Tokens of one sequence, for the layers.")] = 4096,
    micro_batch_size: Annotated[int, typer.Option(help="Sequences of a micro-batch, for the layers.")] = 1,
    budget_s: Annotated[float, typer.Option(help="Seconds for everything, start-up included.")] = 120.0,
    out: Annotated[Path, typer.Option(help="Where the profile goes; written after every part.")] = Path("profile.json"),
    ranks: Annotated[
        int | None, typer.Option(help="Processes on this machine. Default: one a GPU, without GPUs one a core.")
    ] = None,
    parts: Annotated[
        str | None, typer.Option(help="Some of compute,memory,layers,links,host,storage,overlap. Default: all.")
    ] = None,
    nvme: Annotated[Path | None, typer.Option(metavar="PATH", help="Folder on the storage to measure.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the parts that the file at --out has.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="The profile as JSON on stdout.")] = False,
) -> None:
    """Measure this machine, or under torchrun or srun every node of the job, one rank a device."""
    if context.invoked_subcommand is not None:
        return
    started_at, pace = _start(own_process=context.obj is not None)
    with exit_on_error():
        task = _task(
            model, seq_len, micro_batch_size, budget_s=budget_s, out=out, parts=parts, nvme=nvme, resume=resume
        )
        found = _measure(replace(task, started_at=started_at, pace=pace, finish_s=_finish_s(budget_s, pace)), ranks)
        if found is not None:
            _report(found, out, as_json=json_output)
        if _is_rank():
            from ..profilers.run.processes import exit_well

            exit_well()


def _start(*, own_process: bool) -> tuple[float, float]:
    """When this command began (seconds of the epoch), imports included, and the machine's pace since then against an idle one."""
    from ..profilers.machine import pace, process_age_s

    age_s = process_age_s() if own_process else 0.0
    return time.time() - age_s, pace(age_s, time.process_time())


def _finish_s(budget_s: float, pace: float) -> float:
    """Of the budget, for reading what the ranks leave and telling it."""
    return min(_FINISH_S * pace, 0.2 * budget_s)


def _report(found: Profile, out: Path, *, as_json: bool) -> None:
    from .show.profile import show_profile

    if as_json:
        typer.echo(found.model_dump_json(indent=2))
    else:
        show_profile(found)
    typer.echo(f"wrote {out}; next: meshwright plan MODEL --profile {out} ...", err=True)


def _task(
    model: str | None,
    seq_len: int,
    micro_batch_size: int,
    *,
    budget_s: float,
    out: Path,
    parts: str | None,
    nvme: Path | None,
    resume: bool,
) -> ProfileTask:
    """What to measure, after everything about it that can be wrong was looked at."""
    from ..profilers.machine import visible_gpus
    from ..profilers.measure.host import check_folder
    from ..profilers.run.protocol import ALL_PARTS, ProfileTask
    from ..schema import ConfigError, ModelSpec
    from ..schema.runnable import why_not_runnable

    if not budget_s > 0:
        raise ConfigError(f"--budget-s {budget_s:g}: must be positive")
    if seq_len < 1 or micro_batch_size < 1:
        raise ConfigError(f"--seq-len {seq_len} and --micro-batch-size {micro_batch_size} must be positive")
    wanted = ALL_PARTS if parts is None else tuple(part.strip() for part in parts.split(","))
    if unknown := [part for part in wanted if part not in ALL_PARTS]:
        raise ConfigError(f"--parts: no part is called {unknown[0]!r}", help=f"parts are {', '.join(ALL_PARTS)}")
    if not out.resolve().parent.is_dir():
        raise ConfigError(f"--out {out}: no such folder")
    if out.exists() and not resume and not _is_profile(out):
        raise ConfigError(f"--out {out} is there and no profile", help="give another name")
    spec = ModelSpec.resolve(model) if model is not None else None
    if spec is not None and (lacking := why_not_runnable(spec)):
        raise ConfigError(f"the layers of {spec.name} cannot be measured: this version cannot run it", details=lacking)
    if nvme is not None:
        check_folder(str(nvme))
    return ProfileTask(
        backend="nccl" if visible_gpus()[0] else "gloo",
        parts=tuple(part for part in ALL_PARTS if part in wanted or part == "compute"),  # all others build on it
        is_thorough=True,
        num_rounds=1,
        budget_s=budget_s,
        sample_s=min(0.1, max(0.005, budget_s / 2400)),
        model=spec.model_dump_json() if spec else "",
        seq_len=seq_len,
        micro_batch_size=micro_batch_size,
        storage_path=str(nvme.resolve()) if nvme else "",
        out=str(out.resolve()),
        resume=resume,
    )


def _is_profile(path: Path) -> bool:
    from ..schema import ConfigError, Profile

    try:
        Profile.load(path)
    except ConfigError:
        return False
    return True


def _measure(task: ProfileTask, ranks: int | None) -> Profile | None:
    """The profile; None on ranks of a job that are not the first."""
    from ..profilers.machine import (
        available_memory,
        busy_fraction,
        identify,
        memory_left_to_process,
        require_free_memory,
    )
    from ..profilers.run.launch import launch_ranks

    if _is_rank():
        from ..profilers.run.rank import run_rank

        with _progress(quiet=False) as tell:
            return run_rank(task, profile_steps, tell)
    require_free_memory(available_memory(), ranks, of_process_bytes=memory_left_to_process())
    machine = identify(ranks)
    task = replace(task, foreign_load_fraction=min(1.0, busy_fraction()))
    with _progress(quiet=False) as tell:
        return launch_ranks(profile_steps, task, machine.num_devices, on_progress=tell)


def profile_steps(task: ProfileTask, place: RankPlace, on_gpu: bool) -> list[MeasurementStep]:
    """Return the steps of this command; the ranks call it, which alone import torch, the runtime and the learned model."""
    from ..cost_models.learned.calibration import informative_shapes
    from ..profilers.run.steps import thorough_steps

    build_model = None
    if task.model:
        from ..runtime.recompute import build_standalone as build_model
    return thorough_steps(task, place, on_gpu, choose_shapes=informative_shapes, build_model=build_model)


def _is_rank() -> bool:
    """Whether torchrun or Slurm started this process as one rank of a job."""
    import os

    return "RANK" in os.environ or int(os.environ.get("SLURM_NTASKS", "1")) > 1


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[ProfileProgress], None]]:
    """A bar of the budget with what is being measured; on ranks of a job only the first one is told anything."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.fields[part]:>8}"),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet)
    number = bar.add_task("starting the ranks", total=1.0, part="")

    def tell(progress: ProfileProgress) -> None:
        bar.start()
        done = min(1.0, progress.elapsed_s / progress.budget_s)
        bar.update(number, completed=done, description=progress.what, part=progress.part)

    try:
        yield tell
    finally:
        bar.stop()


profile_app = typer.Typer(
    help="Measure this machine, or show, compare and join measurements.", invoke_without_command=True
)


profile_app.callback()(measure)


File = Annotated[Path, typer.Argument(metavar="FILE", help="A profile.", show_default=False)]


@profile_app.command()
def show(profile: File, *, json: JsonOption = False) -> None:
    """What a profile holds, where it was measured, and whether it may be used here."""
    with exit_on_error():
        from ..profilers.files import mismatches, summary
        from ..schema import Profile
        from .show.plan import show as show_table
        from .show.profile import summary_table

        loaded = Profile.load(profile)
        problems = mismatches(loaded)
        if json:
            typer.echo(loaded.model_dump_json(indent=2))
        else:
            show_table(summary_table(loaded, summary(loaded)))
        for problem in problems:
            typer.echo(f"not of this machine: {problem}", err=True)
        then = "" if problems else f"next: meshwright plan MODEL --profile {profile} ..."
        typer.echo(then or "next: meshwright profile measures this machine", err=True)


@profile_app.command()
def diff(first: File, second: File, *, json: JsonOption = False) -> None:
    """What differs between two profiles: machines, rates, and the times of points that both measured."""
    with exit_on_error():
        from json import dumps

        from ..profilers.files import compare
        from ..schema import Profile
        from .show.plan import show as show_table
        from .show.profile import difference_table

        found = compare(Profile.load(first), Profile.load(second))
        if json:
            typer.echo(dumps(found, indent=2))
        else:
            show_table(difference_table(found))


@profile_app.command()
def merge(
    profiles: Annotated[list[Path], typer.Argument(metavar="FILE FILE ...", help="Profiles of one machine.")],
    *,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the joined profile is written.")],
    json: JsonOption = False,
) -> None:
    """Join profiles of one machine: every point of any, of points measured twice the median."""
    with exit_on_error():
        from ..profilers.files import merge_profiles, summary
        from ..schema import Profile
        from .show.plan import show as show_table
        from .show.profile import summary_table

        joined = merge_profiles([Profile.load(path) for path in profiles])
        joined.save(out)
        if json:
            typer.echo(joined.model_dump_json(indent=2))
        else:
            show_table(summary_table(joined, summary(joined)))
        typer.echo(f"wrote {out}; next: meshwright plan MODEL --profile {out} ...", err=True)
