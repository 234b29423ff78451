"""`meshwright compare`: the job that runs today next to a plan, or next to the best plan that its cluster could have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..schema.errors import ConfigError, InfeasibleError, MeshwrightError
from .explain import SourceOptions, tell_assumptions
from .options import JsonOption, Mode, OptionModel, command, option
from .plan_options import ClusterOptions
from .terminal import INTERRUPTED, search_progress, show, show_answer, stopping_on_interrupt

if TYPE_CHECKING:
    from ..engines.launch import Given, Job
    from ..engines.launch.compared import JobComparison
    from ..planner.request import Deadline
    from ..schema import ClusterSpec, OffloadSchedule, TrainingEstimate, TrainingPlan


class JobOptions(OptionModel):
    """What a launch file leaves open."""

    model: str | None = option(
        None,
        "where the file does not say it: a catalogue name, a config.json, or a folder that holds one.",
        metavar="MODEL",
    )
    seq_len: int | None = option(None, "tokens of one sequence, where the file does not say.", ge=1)
    global_batch_size: int | None = option(None, "sequences of one step, where the file does not say.", ge=1)
    precision: str | None = option(
        None, "bf16-mixed, fp16-mixed, fp8, tf32 or fp32, where the file does not say.", metavar="P"
    )
    set: tuple[str, ...] = option(
        (),
        "a variable of the script or a setting of the engine, which wins over the file's; repeatable.",
        metavar="NAME=VALUE",
    )
    time_limit_s: float = option(60.0, "for the plan; stop then with the best so far.", ge=0.1, metavar="S")

    def given(self, cluster: ClusterSpec) -> Given:
        """Return what the user says of the job.

        Raises:
            ConfigError: an item of --set is not NAME=VALUE, or the model is unknown.
        """
        from ..engines.launch import Given
        from ..schema import ModelSpec

        sets = {}
        for item in self.set:
            name, equals, value = item.partition("=")
            if not equals or not name:
                raise ConfigError(f"--set {item!r} is not NAME=VALUE", help="e.g. --set NNODES=8")
            sets[name] = value
        return Given(
            num_devices=cluster.num_devices,
            model=ModelSpec.resolve(self.model) if self.model else None,
            seq_len=self.seq_len,
            global_batch_size=self.global_batch_size,
            precision=self.precision,
            sets=sets,
        )


WITH_PLAN = Mode(
    name="PLAN",
    when=lambda values: values["plan"] is not None,
    takes=(SourceOptions,),
    why="is of the plan's model and cluster",
)
WITHOUT_PLAN = Mode(takes=(SourceOptions, ClusterOptions, JobOptions))


@command(WITH_PLAN, WITHOUT_PLAN)
def compare(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A launch script, or a configuration of torchtitan, Megatron-LM, NeMo, DeepSpeed or Accelerate; with PLAN also a "
            "plan.json.",
        ),
    ],
    source: SourceOptions,
    cluster: ClusterOptions | None,
    job: JobOptions | None,
    plan: Annotated[
        Path | None, typer.Argument(metavar="[PLAN]", help="A plan.json of the same model and cluster.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Say what the job that you run today loses against the best plan, and which few settings to change.

    Without PLAN everything is read from the launch file, and the best plan for the same engine, model, batch and --cluster is
    searched. Nothing of the file is run. With PLAN its configuration is costed with the plan's model, cluster and batch.
    """
    if plan is not None:
        _compare_with_plan(file, plan, source.engine, as_json=json)
        return
    assert cluster is not None and job is not None
    if _is_plan(file):
        raise ConfigError(f"{file} is a plan: there is nothing to compare it with", help="give another plan after it")
    _compare_with_best(file, source.engine, cluster, job, as_json=json)


def _compare_with_best(
    file: Path, engine: str | None, cluster: ClusterOptions, options: JobOptions, *, as_json: bool
) -> None:
    from ..engines.launch import read_job
    from ..planner.request import Deadline
    from .show.compare import job_tables, understood

    machine, deadline = cluster.read(), Deadline(options.time_limit_s)
    job = read_job(file, options.given(machine), engine=engine)
    try:
        with search_progress(quiet=as_json) as on_progress, stopping_on_interrupt(deadline):
            answer = compare_job(job, machine, deadline=deadline, on_progress=on_progress)
    except InfeasibleError:
        if not as_json:
            show(understood(job, machine))
        raise
    show_answer(answer, *job_tables(answer, machine), as_json=as_json)
    if deadline.is_stopped:
        raise typer.Exit(INTERRUPTED)
    typer.echo(f"next: {_next(job, cluster, options)}", err=True)


def _next(job: Job, cluster: ClusterOptions, options: JobOptions) -> str:
    """Return the command that makes the plan as a file."""
    from ..schema.catalogue import model_names

    model, work = options.model or job.model.name, job.workload
    if options.model is None and model not in model_names():
        return "change these settings, and compare again"
    where = (
        f"--cluster {cluster.cluster}" if cluster.cluster else " ".join(f"--profile {path}" for path in cluster.profile)
    )
    unusual = [
        f" --{name.replace('_', '-')} {getattr(work, name)}"
        for name in ("optimizer", "update", "attention", "loss", "token_dispatch")
        if getattr(work, name) != type(work).model_fields[name].default
    ]
    unusual += [f" --recompute-modules {name}" for name in work.recompute_modules]
    unusual += [" --paged-states"] * work.paged_states
    return (
        f"meshwright plan {model} {where} --engine {work.engine} --global-batch-size {work.global_batch_size} "
        f"--seq-len {work.seq_len} --precision {work.precision}{''.join(unusual)} "
        "writes the plan, meshwright export its configuration"
    )


def compare_job(
    job: Job, cluster: ClusterSpec, *, deadline: Deadline, on_progress: Callable[..., None] | None = None
) -> JobComparison:
    """Estimate a job as it is, plan the same model, batch and engine, and find the few changes that gain most of the difference.

    Raises:
        ConfigError: the job's layout breaks a rule that holds for any engine.
        InfeasibleError, SolverLimitError: no plan fits, or none was found in time.
    """
    from ..engines.launch.compared import Difference, JobComparison, Step
    from ..engines.launch.flags import changes_of
    from ..planner import estimate
    from ..planner.explain.changes import BEST_SWITCHES, Changes, Variant, variant_plan
    from ..planner.request import PlanRequest

    costs, batch = estimate(job.model, cluster, job.workload, job.layout), job.workload.global_batch_size
    before = Variant(layout=job.layout, workload=job.workload, estimate=costs)
    best = _best_plan(job, cluster, BEST_SWITCHES, deadline=deadline, on_progress=on_progress)
    request = PlanRequest(job.model, cluster, job.workload)
    targets = [(best.layout, best.workload), *((other.layout, best.workload) for other in best.alternatives)]
    variants = Changes(request, before, deadline).steps(targets) if _has_gain(costs, best) else ()
    steps, last, last_plan = [], before, variant_plan(request, before)
    for variant in variants:
        made = variant_plan(request, variant)
        steps.append(
            Step(
                changes=changes_of(job.engine, last_plan, made, job.facts),
                layout=made.layout,
                estimate=variant.estimate,
                difference=Difference.between((last.layout, last.estimate), (variant.layout, variant.estimate), batch),
            )
        )
        last, last_plan = variant, made
    return JobComparison(
        job=job,
        estimate=costs,
        plan=best,
        difference=Difference.between((job.layout, costs), (best.layout, best.estimate), batch),
        steps=tuple(steps),
    )


def _has_gain(costs: TrainingEstimate, best: TrainingPlan) -> bool:
    from ..planner.explain.changes import SMALLEST_GAIN

    return not costs.fits or costs.step_time_s > best.estimate.step_time_s * (1 + SMALLEST_GAIN)


def _best_plan(job: Job, cluster: ClusterSpec, switches: dict[str, Any], **options: Any) -> TrainingPlan:
    """Return the best plan that the job's engine runs, within what its configuration has words for."""
    from ..planner import plan
    from ..schema.layout import SWITCHES, Layout

    workload = job.workload.replace(**switches)
    plans: list[TrainingPlan] = []
    refusals: list[MeshwrightError] = []
    switched_on = {
        name: value for name in SWITCHES if (value := getattr(job.layout, name)) != Layout.model_fields[name].default
    }
    for fixed in ({}, *([switched_on] if switched_on else [])):
        try:
            plans.append(plan(job.model, cluster, workload, fixed=fixed, runnable=False, top=10, **options))
        except (ConfigError, InfeasibleError) as error:  # nothing with these fields fits, or can be executed
            refusals.append(error)
    if not plans:
        raise refusals[0]
    return min(plans, key=lambda each: each.estimate.step_time_s)


def _compare_with_plan(file: Path, plan: Path, engine: str | None, *, as_json: bool) -> None:
    from ..engines import read_configuration
    from ..planner import compare as make_comparison
    from ..planner import estimate
    from ..schema import TrainingPlan
    from .show.explain import side_by_side

    given = TrainingPlan.load(plan)
    schedule = imported = None
    if _is_plan(file):
        if engine is not None:
            raise ConfigError(f"--from {engine} with {file}, which is a plan of ours", help="leave out --from")
        other = TrainingPlan.load(file)
        name, layout = "the other plan", other.layout
        costs, schedule, notes = _costs_of_plan(other, given, file)
    else:
        devices = given.cluster.num_devices
        imported = read_configuration(file, engine=engine, num_devices=devices, model=given.model)
        name, layout = imported.engine, imported.layout
        costs = estimate(given.model, given.cluster, given.workload, layout)
        notes = [
            f"{field} is {value} in the configuration; both are costed with the plan's {getattr(given.workload, field)}"
            for field in ("global_batch_size", "seq_len", "precision")
            if (value := getattr(imported, field)) not in (None, getattr(given.workload, field))
        ]
    comparison = make_comparison(given, layout, costs, schedule=schedule)
    planned_s = given.estimate.step_time_s
    table = side_by_side(f"{file} next to {plan}", given.layout, planned_s, [(name, comparison)])
    show_answer(comparison, table, as_json=as_json)
    if imported is not None:
        tell_assumptions(imported)
    for line in notes:
        typer.echo(f"note: {line}", err=True)
    percent = 100 * min(costs.step_time_s, planned_s) / max(costs.step_time_s, planned_s)
    if costs.step_time_s > planned_s:
        verdict = f"the plan takes {percent:.1f} % of its time"
    else:
        verdict = f"it takes {percent:.1f} % of the plan's time" if percent < 100 else "both take the same time"
    typer.echo(verdict, err=True)


def _is_plan(file: Path) -> bool:
    from ..schema.base import read_json

    if file.suffix != ".json":
        return False
    content = read_json(file)
    return isinstance(content, dict) and {"schema_version", "estimate"} <= content.keys()


def _costs_of_plan(
    other: TrainingPlan, given: TrainingPlan, file: Path
) -> tuple[TrainingEstimate, OffloadSchedule | None, list[str]]:
    """Return what a plan costs with the model, cluster and workload of the given one, its offload schedule, and what differs."""
    from ..planner.plan import estimate_with_schedule
    from ..planner.request import OffloadRequest, PlanRequest

    differing = [name for name in ("model", "cluster", "workload") if getattr(other, name) != getattr(given, name)]
    if not differing:
        return other.estimate, other.offload, []
    request = PlanRequest(given.model, given.cluster, given.workload, offload=OffloadRequest.from_plan(other))
    costs, scheduled = estimate_with_schedule(request, other.layout)
    note = f"{file} is for another {' and '.join(differing)}; its layout is costed with the plan's"
    return costs, None if scheduled is None else scheduled.schedule, [note]
