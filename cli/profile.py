"""`meshwright profile`: measure this machine or all nodes of a job; show, compare and join what was measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..schema import ConfigError, Profile
from ..schema.base import Count
from .options import JsonOption, Mode, OptionModel, command, complete_models, option
from .terminal import show as show_table
from .terminal import show_answer

if TYPE_CHECKING:
    from ..profilers.run.protocol import MeasurementStep, ProfileProgress, ProfileTask, RankPlace

_FINISH_S = 0.4
"""On an idle machine: ending the ranks, reading their file, showing it and ending this process."""

profile_app = typer.Typer(
    help="Measure this machine, or show, compare and join measurements.", invoke_without_command=True
)


class MeasureOptions(OptionModel):
    """What to measure, and for how long."""

    model: str | None = option(
        None, "measure the real layers of this model as well.", metavar="MODEL", complete=complete_models
    )
    seq_len: Count = option(4096, "tokens of one sequence of the layers.", needs=("model",))
    micro_batch_size: Count = option(1, "sequences of a micro-batch of the layers.", needs=("model",))
    budget_s: float = option(120.0, "seconds for everything, start-up included.", metavar="S")
    out: Path = option(Path("profile.json"), "where the profile goes; written after every part.")
    ranks: int | None = option(None, "processes on this machine. Default: one a GPU, without GPUs one a core.")
    parts: str | None = option(None, "some of compute,memory,layers,links,host,storage,overlap. Default: all.")
    nvme: Path | None = option(None, "folder on the storage to measure.", metavar="PATH")
    resume: bool = option(False, "keep the parts that the file at --out has.")
    as_json: bool = option(False, "the profile as JSON on stdout.", name="--json")


def _is_rank() -> bool:
    """Say whether torchrun or Slurm started this process as one rank of a job."""
    return "RANK" in os.environ or int(os.environ.get("SLURM_NTASKS", "1")) > 1


RANK = Mode(
    name="torchrun or srun",
    when=lambda values: _is_rank(),
    takes=(MeasureOptions,),
    without=frozenset({"ranks"}),
    why="says how many ranks there are",
)


@profile_app.callback()
@command(RANK, Mode(takes=(MeasureOptions,)))
def measure(context: typer.Context, options: MeasureOptions) -> None:
    """Measure this machine, or under torchrun or srun every node of the job, one rank a device."""
    if context.invoked_subcommand is not None:
        return
    from ..profilers.machine import pace, process_age_s
    from .show.profile import show_profile

    # The command began with its process, imports included; its pace since then is that of the machine against an idle one.
    age_s = process_age_s() if context.obj is not None else 0.0
    slowness = pace(age_s, time.process_time())
    finish_s = min(_FINISH_S * slowness, 0.2 * options.budget_s)
    task = replace(_task(options), started_at=time.time() - age_s, pace=slowness, finish_s=finish_s)
    profile = _measure(task, options.ranks)
    if profile is not None:
        if options.as_json:
            typer.echo(profile.model_dump_json(indent=2))
        else:
            show_profile(profile)
        typer.echo(f"wrote {options.out}; next: meshwright plan MODEL --profile {options.out} ...", err=True)
    if _is_rank():
        from ..profilers.run.processes import exit_well

        exit_well()


def _task(options: MeasureOptions) -> ProfileTask:
    """Return what to measure, after everything about it that can be wrong was looked at."""
    from ..profilers.machine import visible_gpus
    from ..profilers.measure.host import check_folder
    from ..profilers.run.protocol import ALL_PARTS, ProfileTask
    from ..schema import ModelSpec
    from ..schema.layout_rules import why_not_runnable

    out, nvme = options.out, options.nvme
    if not options.budget_s > 0:
        raise ConfigError(f"--budget-s {options.budget_s:g}: must be positive")
    parts = ALL_PARTS if options.parts is None else tuple(part.strip() for part in options.parts.split(","))
    if unknown := [part for part in parts if part not in ALL_PARTS]:
        raise ConfigError(f"--parts: no part is called {unknown[0]!r}", help=f"parts are {', '.join(ALL_PARTS)}")
    if not out.resolve().parent.is_dir():
        raise ConfigError(f"--out {out}: no such folder")
    if out.exists() and not options.resume and not _is_profile(out):
        raise ConfigError(f"--out {out} is there and no profile", help="give another name")
    spec = ModelSpec.resolve(options.model) if options.model is not None else None
    if spec is not None and (lacking := why_not_runnable(spec)):
        raise ConfigError(f"the layers of {spec.name} cannot be measured: this version cannot run it", details=lacking)
    if nvme is not None:
        if "storage" not in parts:
            raise ConfigError("--nvme is for the part storage, which --parts leaves out", help="add storage to --parts")
        check_folder(str(nvme))
    return ProfileTask(
        backend="nccl" if visible_gpus()[0] else "gloo",
        parts=tuple(part for part in ALL_PARTS if part in parts or part == "compute"),  # all others build on it
        num_rounds=1,
        budget_s=options.budget_s,
        sample_s=min(0.1, max(0.005, options.budget_s / 2400)),
        model=spec.model_dump_json() if spec else "",
        seq_len=options.seq_len,
        micro_batch_size=options.micro_batch_size,
        storage_path=str(nvme.resolve()) if nvme else "",
        out=str(out.resolve()),
        resume=options.resume,
    )


def _is_profile(path: Path) -> bool:
    try:
        Profile.load(path)
    except ConfigError:
        return False
    return True


def _measure(task: ProfileTask, ranks: int | None) -> Profile | None:
    """Return the profile; None on ranks of a job that are not the first."""
    from ..profilers.machine import (
        available_memory,
        busy_fraction,
        identify,
        memory_left_to_process,
        require_free_memory,
    )
    from ..profilers.run.protocol import launch_ranks

    if _is_rank():
        from ..profilers.run.rank import run_rank

        with _progress() as tell:
            return run_rank(task, profile_steps, tell)
    require_free_memory(available_memory(), ranks, of_process_bytes=memory_left_to_process())
    machine = identify(ranks)
    task = replace(task, foreign_load_fraction=min(1.0, busy_fraction()))
    with _progress() as tell:
        return launch_ranks(profile_steps, task, machine.num_devices, on_progress=tell)


def profile_steps(task: ProfileTask, place: RankPlace, on_gpu: bool) -> list[MeasurementStep]:
    """Return the steps of this command; the ranks call it, and only they import torch, the runtime and the learned model."""
    from ..cost_models.learned.calibration import informative_shapes
    from ..profilers.run.steps import thorough_steps

    build_model = None
    if task.model:
        from ..runtime.recompute import build_standalone as build_model
    return thorough_steps(task, place, on_gpu, choose_shapes=informative_shapes, build_model=build_model)


@contextmanager
def _progress() -> Iterator[Callable[[ProfileProgress], None]]:
    """Show a bar of the budget with what is being measured; of the ranks of a job only the first one is given anything to show."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.fields[part]:>8}"),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    number = bar.add_task("starting the ranks", total=1.0, part="")

    def tell(progress: ProfileProgress) -> None:
        bar.start()
        done = min(1.0, progress.elapsed_s / progress.budget_s)
        bar.update(number, completed=done, description=progress.what, part=progress.part)

    try:
        yield tell
    finally:
        bar.stop()


File = Annotated[Path, typer.Argument(metavar="FILE", help="A profile.", show_default=False)]


@profile_app.command()
@command()
def show(profile: File, json: JsonOption = False) -> None:
    """Say what a profile holds, where it was measured, and whether it may be used here."""
    from ..profilers.files import mismatches

    loaded = Profile.load(profile)
    problems = mismatches(loaded)
    _print(loaded, as_json=json)
    for problem in problems:
        typer.echo(f"not of this machine: {problem}", err=True)
    then = "" if problems else f"next: meshwright plan MODEL --profile {profile} ..."
    typer.echo(then or "next: meshwright profile measures this machine", err=True)


@profile_app.command()
@command()
def diff(first: File, second: File, json: JsonOption = False) -> None:
    """Say what differs between two profiles: machines, rates, and the times of points that both measured."""
    from json import dumps

    from ..profilers.files import compare
    from .show.profile import difference_table

    differences = compare(Profile.load(first), Profile.load(second))
    if json:
        typer.echo(dumps(differences, indent=2))
    else:
        show_table(difference_table(differences))


@profile_app.command()
@command()
def merge(
    profiles: Annotated[list[Path], typer.Argument(metavar="FILE FILE ...", help="Profiles of one machine.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the joined profile is written.")],
    json: JsonOption = False,
) -> None:
    """Join profiles of one machine: every point of any, of points measured twice the median."""
    from ..profilers.files import merge_profiles

    joined = merge_profiles([Profile.load(path) for path in profiles])
    joined.save(out)
    _print(joined, as_json=json)
    typer.echo(f"wrote {out}; next: meshwright plan MODEL --profile {out} ...", err=True)


def _print(profile: Profile, *, as_json: bool) -> None:
    from ..profilers.files import summary
    from .show.profile import summary_table

    show_answer(profile, summary_table(profile, summary(profile)), as_json=as_json)
