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
from ..schema.serving import WeightDtype
from ..schema.units import GB, TFLOP, counted, format_bytes, format_percent, format_seconds
from .complete import complete_models
from .options import JsonOption, Mode, OptionModel, command, option
from .terminal import Table, figures_table, headed_table, show_answer
from .terminal import show as show_table

if TYPE_CHECKING:
    from ..profilers.run.protocol import MeasurementStep, ProfileProgress, ProfileTask, RankPlace

_MACHINE_SHARE = 0.25
"""Of the budget, for the machine where the serving engine is measured as well."""

_BRIEF_S = 8.0
"""Of measuring the machine as `--cluster local` does."""

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
    sample_batch: str | None = option(
        None, "what MODEL, given as module:name, is called with: FILE.py that defines sample_batch, or module:name.",
        needs=("model",), barred_by=("serve", "documents"),
    )  # fmt: skip
    micro_batch_size: Count = option(1, "sequences of a micro-batch of the layers.", needs=("model",))
    documents: bool = option(
        False, "measure them over shorter sequences as well, as batches of documents have.", needs=("model",)
    )
    budget_s: float = option(120.0, "seconds for everything, start-up included.", metavar="S")
    out: Path = option(Path("profile.json"), "where the profile goes; written after every part.")
    serve: bool = option(
        False, "measure our serving engine as well, every layout of the model on this machine (docs/serving.md).", needs=("model",)
    )  # fmt: skip
    weights: WeightDtype = option("bf16", "type of the engine's weights and caches.", needs=("serve",))
    ranks: int | None = option(None, "processes on this machine. Default: one a GPU, without GPUs one a core.")
    parts: str | None = option(None, "some of compute,memory,layers,links,host,storage,overlap. Default: all.")
    nvme: Path | None = option(None, "folder on the storage to measure.", metavar="PATH")
    cpu_seconds: bool = option(
        False,
        "count the seconds of processors, one thread a rank, not those of the clock: for a machine without GPUs that others use.",
        barred_by=("serve", "nvme"),
    )
    resume: bool = option(False, "keep the parts that the file at --out has.")
    as_json: bool = option(False, "the profile as JSON on stdout.", name="--json")


def _is_rank() -> bool:
    """Say whether torchrun or Slurm started this process as one rank of a job."""
    from ..profilers.machine import slurm_number

    return "RANK" in os.environ or ("SLURM_NTASKS" in os.environ and slurm_number(os.environ, "SLURM_NTASKS") > 1)


RANK = Mode(
    name="torchrun or srun",
    when=lambda values: _is_rank(),
    takes=(MeasureOptions,),
    without=frozenset({"ranks", "serve", "weights", "sample_batch"}),
    why="says how many ranks there are",
)


@profile_app.callback()
@command(RANK, Mode(takes=(MeasureOptions,)))
def measure(context: typer.Context, options: MeasureOptions) -> None:
    """Measure this machine, or under torchrun or srun every node of the job, one rank a device."""
    if context.invoked_subcommand is not None:
        return
    from ..profilers.machine import pace, process_age_s

    # The command began with its process, imports included; its pace since then is that of the machine against an idle one.
    age_s = process_age_s() if context.obj is not None else 0.0
    slowness = pace(age_s, time.process_time())
    finish_s = min(_FINISH_S * slowness, 0.2 * options.budget_s)
    task = replace(_task(options), started_at=time.time() - age_s, pace=slowness, finish_s=finish_s)
    profile = _measure(task, options.ranks, is_brief=options.serve and options.parts is None)
    if profile is not None and options.serve:
        profile = _measure_engine(profile, options, task)
        profile.save(options.out)
    if profile is not None and options.sample_batch is not None:
        profile = _time_user_model(profile, options)
        profile.save(options.out)
    if profile is not None:
        if options.as_json:
            typer.echo(profile.model_dump_json(indent=2))
        else:
            _show_profile(profile)
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
    from ..schema.runnable import why_not_runnable

    out, nvme = options.out, options.nvme
    if not options.budget_s > 0:
        raise ConfigError(f"--budget-s {options.budget_s:g}: must be positive")
    if options.parts is not None:
        parts = tuple(part.strip() for part in options.parts.split(","))
    else:  # what describes the machine, where its engine is what is asked for
        parts = ("compute", "links") if options.serve else ALL_PARTS
    if unknown := [part for part in parts if part not in ALL_PARTS]:
        raise ConfigError(f"--parts: no part is called {unknown[0]!r}", help=f"parts are {', '.join(ALL_PARTS)}")
    if not out.resolve().parent.is_dir():
        raise ConfigError(f"--out {out}: no such folder")
    if out.exists() and not options.resume:
        try:
            Profile.load(out)
        except ConfigError:
            raise ConfigError(f"--out {out} is there and no profile", help="give another name") from None
    if options.cpu_seconds:
        if visible_gpus()[0]:
            raise ConfigError("--cpu-seconds: this machine has GPUs, whose seconds are not a processor's")
        parts = tuple(part for part in parts if part not in ("storage", "overlap"))  # they are of waiting
    is_code = options.sample_batch is not None
    if is_code and visible_gpus()[0]:
        raise ConfigError("--sample-batch: layers of a module are timed on CPUs, and this machine has GPUs")
    spec = ModelSpec.resolve(options.model) if options.model is not None and not is_code else None
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
        budget_s=options.budget_s * (_MACHINE_SHARE if options.serve and options.parts else 1),
        sample_s=min(0.1, max(0.005, options.budget_s / 2400)),
        model=spec.model_dump_json() if spec else "",
        seq_len=options.seq_len,
        micro_batch_size=options.micro_batch_size,
        storage_path=str(nvme.resolve()) if nvme else "",
        out=str(out.resolve()),
        resume=options.resume,
        documents=options.documents,
        cpu_seconds=options.cpu_seconds,
        threads=int(options.cpu_seconds),
    )


def _measure(task: ProfileTask, ranks: int | None, *, is_brief: bool) -> Profile | None:
    """Return the profile; None on ranks of a job that are not the first; ``is_brief``: only what `--cluster local` measures."""
    from ..profilers import machine
    from ..profilers.run.protocol import launch_ranks
    from ..profilers.run.steps import brief_steps

    if _is_rank():
        from ..profilers.run.rank import run_rank

        with _progress() as tell:
            return run_rank(task, profile_steps, tell)
    machine.require_free_memory(machine.available_memory(), ranks, of_process_bytes=machine.memory_left_to_process())
    num_devices = machine.identify(ranks).num_devices
    task = replace(task, foreign_load_fraction=min(1.0, machine.busy_fraction()))
    if is_brief:  # all of it is needed, so that no time ends it
        task = replace(task, started_at=None, budget_s=_BRIEF_S)
    with _progress() as tell:
        return launch_ranks(brief_steps if is_brief else profile_steps, task, num_devices, on_progress=tell)


def _measure_engine(profile: Profile, options: MeasureOptions, task: ProfileTask) -> Profile:
    """Return the profile with steps of our serving engine, every layout of the model that this machine has room for."""
    from ..cost_models.serving.engine import EngineProfile
    from ..planner.serving.layouts import layouts
    from ..profilers.profiled_cluster import profiled_cluster
    from ..profilers.run.protocol import ProfileProgress
    from ..runtime.serving.measure_layouts import measure_layouts
    from ..schema import ModelSpec
    from ..schema.profile import ProfileSection
    from ..schema.serving import RequestClass, Requests, Serving

    spec, cluster, begun = ModelSpec.model_validate_json(task.model), profiled_cluster(profile), time.time()
    any_load = Requests(classes=(RequestClass(prompt_len=1, output_len=1),))
    candidates = list(layouts(spec, cluster, Serving(requests=any_load, engine="meshwright")))
    limits = EngineProfile.named("meshwright").limits(
        device_bytes=cluster.weakest_device.memory_bytes, cache_tokens=1e6
    )
    origin_s = begun if task.started_at is None else task.started_at
    remaining_s = options.budget_s - (begun - origin_s)
    with _progress() as tell:
        points, left_out = measure_layouts(
            spec, candidates, num_devices=profile.machine.num_devices, limits=limits, weights=options.weights,
            device="cpu" if profile.machine.backend == "gloo" else "cuda", budget_s=remaining_s,
            tell=lambda what: tell(ProfileProgress("serving", what, time.time() - origin_s, options.budget_s)),
        )  # fmt: skip
    if not points["serving_steps"]:
        raise ConfigError(f"our engine was not measured: {left_out}", help="give more time (--budget-s)")
    known = [one for one in profile.serving_steps if one.content != spec.content or one.weights != options.weights]
    known_hosts = [one for one in profile.serving_host if one.content != spec.content or one.weights != options.weights]
    section = ProfileSection(
        name="serving", state="shortened" if left_out else "complete", duration_s=time.time() - begun,
        num_points=sum(map(len, points.values())), reason=left_out,
    )  # fmt: skip
    return profile.replace(
        serving_steps=(*known, *points["serving_steps"]), serving_host=(*known_hosts, *points["serving_host"]),
        parts=(*(part for part in profile.parts if part.name != "serving"), section),
        duration_s=profile.duration_s + section.duration_s, budget_s=options.budget_s, content_sha256="",
    ).sealed()  # fmt: skip


def _time_user_model(profile: Profile, options: MeasureOptions) -> Profile:
    """Return the profile with the layers of a user's model, timed in this process with the threads of one rank."""
    import torch

    from ..profilers.machine import num_cores
    from ..profilers.module.layer_times import MICRO_BATCHES
    from ..profilers.module.user_code import time_user_model
    from ..schema.profile import ProfileSection

    assert options.model is not None
    assert options.sample_batch is not None
    begun = time.time()
    torch.set_num_threads(1 if options.cpu_seconds else max(1, num_cores() // profile.machine.num_devices))
    points = time_user_model(
        options.model, options.sample_batch, cpu_seconds=options.cpu_seconds,
        micro_batches=[size * options.micro_batch_size for size in MICRO_BATCHES],
    )  # fmt: skip
    section = ProfileSection(name="layers", state="complete", duration_s=time.time() - begun, num_points=len(points))
    parts = tuple(section if part.name == "layers" else part for part in profile.parts)
    return profile.replace(
        layers=points, parts=parts if section in parts else (*parts, section), content_sha256="",
        duration_s=profile.duration_s + section.duration_s,
    ).sealed()  # fmt: skip


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

    part, what = TextColumn("{task.fields[part]:>8}"), TextColumn("{task.description}")
    bar = Progress(part, BarColumn(), TimeRemainingColumn(), what, console=Console(stderr=True), transient=True)
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
    show_answer(loaded, *_summary_tables(loaded), as_json=json)
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

    differences = compare(Profile.load(first), Profile.load(second))
    if json:
        typer.echo(dumps(differences, indent=2))
        return
    title = "machine" if differences["machine"] else "the same machine"
    machines = headed_table(title, "", "first", "second", text=("", "first", "second"))
    for name, (a, b) in differences["machine"].items():
        machines.add_row(name.replace("_", " "), str(a), str(b))
    rates = headed_table("rates", "", "first", "second", "second / first")
    for name, (a, b) in differences["rates"].items():
        ratio = f"{b / a:.2f}" if a and b else ""
        first_rate, second_rate = (_in_usual_units(name, value)[1] if value else "" for value in (a, b))
        rates.add_row(_in_usual_units(name, a or b)[0], first_rate, second_rate, ratio)
    ratio_title = "seconds, second / first"
    points = headed_table("points", "", "in both", "only first", "only second", ratio_title)
    for name, row in differences["points"].items():
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        points.add_row(name.replace("_", " "), *(str(row[count]) for count in ("both", "first", "second")), ratio)
    show_table(machines, rates, points)


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
    show_answer(joined, *_summary_tables(joined), as_json=json)
    typer.echo(f"wrote {out}; next: meshwright plan MODEL --profile {out} ...", err=True)


def _show_profile(profile: Profile) -> None:
    """Print sections with their points and time, the figures that matter most, and what is slow, on stdout."""
    from .markup import plain

    machine = profile.machine
    nodes = f" on {counted(machine.num_nodes, 'node')}" if machine.num_nodes > 1 else ""
    head = f"{machine.device}: {counted(machine.num_devices, 'rank')}{nodes}, {machine.backend}, torch {machine.torch}"
    title = f"measured in {format_seconds(profile.duration_s)}"
    sections = headed_table(title, "part", "points", "time", "", text=("part", ""))
    for section in profile.parts:
        state = section.state if not section.reason else f"{section.state}: {section.reason}"
        duration = format_seconds(section.duration_s) if section.num_points else "-"
        sections.add_row(section.name, str(section.num_points), duration, state)
    remarks, lines = figures_table("", 0), []
    if profile.foreign_load_fraction > 0.2:
        load = format_percent(profile.foreign_load_fraction, 0)
        lines.append(f"other work used {load} of the cores when it began: rates are too low")
    lines += [
        f"slow: {slow.name}: {slow.what} takes {slow.ratio:.2f} times as long as elsewhere (noise {slow.noise:.2f})"
        for slow in profile.slow
    ]
    if len(profile.ranks) > 1 and not profile.slow:
        lines.append("no rank or link is slower than its peers beyond noise")
    for line in lines:
        remarks.add_row("", plain(line))
    show_table(figures_table(head, 0), sections, _rates_table(profile), remarks)


def _rates_table(profile: Profile) -> Table:
    table = Table("", ("", ""), words=False)
    rates: dict[str, float] = {}
    for point in profile.matmuls:
        rates[point.dtype] = max(rates.get(point.dtype, 0.0), 2 * point.m * point.n * point.k / point.time_s)
    for dtype, rate in rates.items():
        table.add_row(f"{dtype} products, best", f"{rate / TFLOP:.4g} TFLOP/s")
    table.add_row("memory bandwidth", f"{profile.memory_bandwidth_bytes_per_s / GB:.4g} GB/s")
    for op in dict.fromkeys(point.op for point in profile.collectives):
        points = [p for p in profile.collectives if p.op == op and p.group_size == profile.machine.num_devices]
        if points:
            largest = max(points, key=lambda point: point.size_bytes)
            rate = largest.size_bytes / largest.time_s / GB
            table.add_row(f"{op}, all ranks, {format_bytes(largest.size_bytes)}", f"{rate:.4g} GB/s")
    for copy in profile.host_copies:
        if copy.host_memory == "pinned" and copy.size_bytes == max(p.size_bytes for p in profile.host_copies):
            rate = copy.size_bytes / copy.time_s / GB
            table.add_row(f"{copy.direction}, pinned, {copy.devices_at_once} devices", f"{rate:.4g} GB/s each")
    for adam in profile.cpu_adam[-2:]:
        rate = adam.num_parameters / adam.time_s / 1e9
        table.add_row(f"AdamW on the host, {adam.ranks_at_once} ranks at once", f"{rate:.4g} G parameters/s each")
    for point in profile.storage[-2:]:
        rate = point.size_bytes / point.time_s / GB
        table.add_row(f"storage {point.operation}{'' if point.direct else ', not direct'}", f"{rate:.4g} GB/s each")
    for step in profile.step_memory:
        peak = max(step.forward_peak_bytes, step.backward_peak_bytes, step.optimizer_peak_bytes)
        table.add_row(f"{step.model} on one device, {step.recompute} recompute", format_bytes(peak))
    return table


def _summary_tables(profile: Profile) -> Iterator[Table]:
    """Yield where a profile was measured, the rates, and how many points of each kind there are."""
    from ..profilers.files import point_lists, summary

    machine = profile.machine
    title = f"{machine.device}, {machine.num_devices} x {machine.backend}"
    origin = Table(title, ("", ""))
    rows = {
        "nodes": str(machine.num_nodes),
        "torch, python": f"{machine.torch}, {machine.python}",
        "driver": machine.driver,
        "hosts": ", ".join(profile.provenance.hosts),
        "measured": f"{profile.created} in {format_seconds(profile.duration_s)}",
        "other work on the cores": format_percent(profile.foreign_load_fraction, 0),
        "runs folded in": str(profile.calibration.num_runs) if profile.calibration.num_runs else "",
        "content": "altered since" if profile.is_altered else "as measured" if profile.content_sha256 else "not sealed",
    }
    for name, value in rows.items():
        if value:
            origin.add_row(name, value)
    measured = headed_table("rates", "", "measured")
    for name, value in summary(profile).items():
        measured.add_row(*_in_usual_units(name, value))
    points = headed_table("points", "", "points", "median spread")
    for name, values in point_lists(profile).items():
        spread = sorted(value.spread for value in values)[len(values) // 2]
        points.add_row(name.replace("_", " "), str(len(values)), format_percent(spread, 0))
    yield from (origin, measured, points)


def _in_usual_units(name: str, value: float) -> tuple[str, str]:
    """Return a rate's title and its value in a unit that people use."""
    if name.endswith("_flops_per_s"):
        return f"{name.removesuffix('_flops_per_s')} products", f"{value / 1e12:.3g} TFLOP/s"
    if name.endswith("_bytes_per_s"):
        return name.removesuffix("_bytes_per_s").replace("_", " "), f"{value / GB:.3g} GB/s"
    return name.removesuffix("_s").replace("_", " "), format_seconds(value)
