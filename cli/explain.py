"""`meshwright explain`, `report`, `compare`, `export` and `import`: look at a plan that was made, next to other engines' words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..engines import TARGETS
from ..schema import TrainingPlan
from ..schema.errors import ConfigError
from .options import JsonOption, OptionModel, PlanArgument, command, option
from .plan import SearchOptions
from .terminal import INTERRUPTED, progress_bar, show_answer, stopping_on_interrupt

if TYPE_CHECKING:
    from ..engines import Imported
    from ..schema import OffloadSchedule, TrainingEstimate


class QuestionOptions(OptionModel):
    """What is asked about a plan."""

    why_not: str = option(
        "", "layout fields that the plan does not have, e.g. tp=4,pp=2; the rest is searched.", metavar="A=B,..."
    )
    time_limit_s: float = option(
        60.0, "for all searches together; what was not reached is left out.", ge=0.1, metavar="S"
    )


@command()
def explain(plan: PlanArgument, question: QuestionOptions, json: JsonOption = False) -> None:
    """Say what binds a plan: memory of which stage, which link, bubbles, compute; what one more GiB or GB/s would be worth; how
    the runner-ups differ, line by line.

    Each part is printed as soon as it is known; Ctrl-C leaves out the searches that are still to come.

    --why-not completes the given fields as well as can be and compares that with the plan; where a rule or the memory excludes
    them, this is the answer (exit code 0), with its numbers. Everything comes from the plan file, and every figure from estimating
    or searching again.
    """
    from ..planner.explain.report import explain_in_parts
    from ..planner.request import Deadline
    from ..schema.layout import parse_assignments
    from .show.explain import part_tables

    fields, given = parse_assignments(question.why_not), TrainingPlan.load(plan)
    deadline = Deadline(question.time_limit_s)
    with progress_bar("searching again", quiet=json) as bar, stopping_on_interrupt(deadline):
        for part in explain_in_parts(given, why_not=fields, deadline=deadline):
            if not json:
                bar.show(*part_tables(given, part))
            worth = part.explanation.worth
            bar.set(part.done, worth[-1].change if part.name == "value" else "searching again")
    if json:
        typer.echo(part.explanation.model_dump_json(indent=2))
    if deadline.is_stopped:
        raise typer.Exit(INTERRUPTED)
    typer.echo(f"next: meshwright explain {plan} --why-not tp=2,... compares any other layout", err=True)


class DrawingOptions(OptionModel):
    """What is drawn."""

    mirrors = SearchOptions

    report: Path | None = None
    trace: Path | None = None
    explain_limit_s: float = 30.0


@command()
def report(plan: PlanArgument, drawings: DrawingOptions) -> None:
    """Draw a plan: a page that opens in any browser without a network, and the predicted step as a trace."""
    if drawings.report is None and drawings.trace is None:
        raise ConfigError("nothing to write", help="give --report report.html, --trace trace.json, or both")
    from .page.document import write_report

    write_report(TrainingPlan.load(plan), drawings.report, drawings.trace, explain_limit_s=drawings.explain_limit_s)


class SourceOptions(OptionModel):
    """Where a configuration is from."""

    engine: str | None = option(
        None, "whose it is, where its content leaves that open.", name="--from", metavar="ENGINE"
    )


@command()
def compare(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A configuration as `meshwright import` reads it, or another plan.json."),
    ],
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json of the same model and cluster.")],
    source: SourceOptions,
    json: JsonOption = False,
) -> None:
    """Set a present configuration, or another plan, next to a plan: what it costs with the plan's model, cluster and batch."""
    from ..engines import read_configuration
    from ..planner import compare as make_comparison
    from ..planner import estimate
    from .show.explain import side_by_side

    given = TrainingPlan.load(plan)
    schedule = imported = None
    if _is_plan(file):
        if source.engine is not None:
            raise ConfigError(f"--from {source.engine} with {file}, which is a plan of ours", help="leave out --from")
        other = TrainingPlan.load(file)
        name, layout = "the other plan", other.layout
        costs, schedule, notes = _costs_of_plan(other, given, file)
    else:
        devices = given.cluster.num_devices
        imported = read_configuration(file, engine=source.engine, num_devices=devices, model=given.model)
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
    show_answer(comparison, table, as_json=json)
    if imported is not None:
        _tell_assumptions(imported)
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


@command()
def export(
    plan: PlanArgument,
    to: Annotated[str, typer.Option(metavar="ENGINE", help=f"{', '.join(TARGETS[:-1])} or {TARGETS[-1]}.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where the files go. Default: a folder named as the engine.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write a plan as the engine's own configuration, or as the manifest of a job on Kubernetes.

    What the engine cannot run is refused with the reason (exit code 2); what its configuration has no words for is listed.
    """
    from ..engines import export as make_export

    exported = make_export(TrainingPlan.load(plan), to)
    paths = exported.write(out or Path(to))
    typer.echo(exported.model_dump_json(indent=2) if json else "\n".join(map(str, paths)))
    for line in exported.not_expressed:
        typer.echo(f"not in the configuration: {line}", err=True)
    for line in exported.to_set:
        typer.echo(f"yours to set: {line}", err=True)
    typer.echo(f"next: cd {out or to} && {exported.command}", err=True)


class ReadingOptions(SourceOptions):
    """What a configuration may leave open."""

    num_devices: int | None = option(None, "ranks of the job, where the file does not say.", ge=1)
    model: str | None = option(None, "needed where the file counts layers.", metavar="MODEL")


@command()
def import_configuration(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="torchtitan's .toml or .py, a script with Megatron-LM's options, DeepSpeed's .json, Accelerate's or NeMo's .yaml.",
        ),
    ],
    reading: ReadingOptions,
    json: JsonOption = False,
) -> None:
    """Read an engine's configuration as a layout, in the form that `--layout` and `--fix` take. Nothing of the file is run."""
    from ..engines import read_configuration
    from ..schema import ModelSpec
    from ..schema.layout import format_assignments

    spec = ModelSpec.resolve(reading.model) if reading.model else None
    imported = read_configuration(file, engine=reading.engine, num_devices=reading.num_devices, model=spec)
    if json:
        typer.echo(imported.model_dump_json(indent=2))
    else:  # what a layout of these degrees has by itself is not said
        fields = imported.layout.model_dump(exclude_defaults=True).items()
        typer.echo(format_assignments({name: value for name, value in fields if value != 1 or name == "zero_stage"}))
    _tell_assumptions(imported)
    typer.echo(
        "next: meshwright estimate MODEL --cluster C --layout ... costs it, meshwright compare sets it next to a plan",
        err=True,
    )


def _tell_assumptions(imported: Imported) -> None:
    """Say on stderr what a configuration left open, and which of its settings are not about the layout."""
    for line in imported.assumed:
        typer.echo(f"assumed: {line}", err=True)
    if imported.ignored:
        typer.echo(f"says nothing about the layout: {', '.join(imported.ignored)}", err=True)
