"""`meshwright explain`, `report`, `compare`, `export` and `import`: look at a plan that was made, next to other engines' words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from ..engines import TARGETS
from ..schema import TrainingPlan
from ..schema.errors import ConfigError
from .options import JsonOption, PlanArgument, command
from .terminal import INTERRUPTED, show_answer, spinner, stopping_on_interrupt

if TYPE_CHECKING:
    from ..engines import Imported
    from ..schema import Layout, OffloadSchedule, TrainingEstimate


@command()
def explain(
    plan: PlanArgument,
    why_not: Annotated[
        str,
        typer.Option(
            metavar="A=B,...", help="Layout fields that the plan does not have, e.g. tp=4,pp=2; the rest is searched."
        ),
    ] = "",
    time_limit_s: Annotated[
        float, typer.Option(metavar="S", min=0.1, help="For all searches together; what was not reached is left out.")
    ] = 60.0,
    json: JsonOption = False,
) -> None:
    """Say what binds a plan: memory of which stage, which link, bubbles, compute; what one more GiB or GB/s would be worth; how
    the runner-ups differ, line by line.

    --why-not completes the given fields as well as can be and compares that with the plan; where a rule or the memory excludes
    them, this is the answer (exit code 0), with its numbers. Everything comes from the plan file, and every figure from estimating
    or searching again.
    """
    from ..planner import explain as make_explanation
    from ..planner.request import Deadline
    from ..schema.layout import parse_assignments
    from .show.explain import explanation_tables

    fields, given, deadline = parse_assignments(why_not), TrainingPlan.load(plan), Deadline(time_limit_s)
    with spinner("searching again with more of each resource", quiet=json), stopping_on_interrupt(deadline):
        explanation = make_explanation(given, why_not=fields, deadline=deadline)
    show_answer(explanation, *explanation_tables(given, explanation), as_json=json)
    if deadline.is_stopped:
        raise typer.Exit(INTERRUPTED)
    typer.echo(f"next: meshwright explain {plan} --why-not tp=2,... compares any other layout", err=True)


@command()
def report(
    plan: PlanArgument,
    html: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE.html",
            help="A self-contained page: where the step goes, timeline, memory, rank map.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="FILE.json", help="The predicted step for chrome://tracing or ui.perfetto.dev."
        ),
    ] = None,
) -> None:
    """Draw a plan: a page that opens in any browser without a network, and the predicted step as a trace."""
    from .show.report import write_report

    if html is None and trace is None:
        raise ConfigError("nothing to write", help="give --report report.html, --trace trace.json, or both")
    write_report(TrainingPlan.load(plan), html, trace)


@command()
def compare(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A configuration as `meshwright import` reads it, or another plan.json."),
    ],
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json of the same model and cluster.")],
    engine: Annotated[
        str | None, typer.Option("--from", metavar="ENGINE", help="Whose it is, where its content leaves that open.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Set a present configuration, or another plan, next to a plan: what it costs with the plan's model, cluster and batch."""
    from ..planner import compare as make_comparison
    from .show.explain import side_by_side

    given = TrainingPlan.load(plan)
    present = _other_plan(file, engine, given) if _is_plan(file) else _configuration(file, engine, given)
    comparison = make_comparison(given, present.layout, present.estimate, schedule=present.schedule)
    columns = [(present.name, comparison)]
    table = side_by_side(f"{file} next to {plan}", given.layout, given.estimate.step_time_s, columns)
    show_answer(comparison, table, as_json=json)
    if present.imported is not None:
        tell_assumptions(present.imported)
    for line in present.notes:
        typer.echo(f"note: {line}", err=True)
    typer.echo(_verdict(present.estimate.step_time_s / given.estimate.step_time_s), err=True)


class _Present(NamedTuple):
    """What stands next to a plan: its name in the table, layout and costs, in what it differs otherwise, how it was read, and its
    offload schedule.
    """

    name: str
    layout: Layout
    estimate: TrainingEstimate
    notes: list[str]
    imported: Imported | None = None
    schedule: OffloadSchedule | None = None


def _configuration(file: Path, engine: str | None, given: TrainingPlan) -> _Present:
    from ..engines import read_configuration
    from ..planner import estimate

    imported = read_configuration(file, engine=engine, num_devices=given.cluster.num_devices, model=given.model)
    costs = estimate(given.model, given.cluster, given.workload, imported.layout)
    return _Present(imported.engine, imported.layout, costs, _other_workload(imported, given), imported)


def _other_plan(file: Path, engine: str | None, given: TrainingPlan) -> _Present:
    from ..planner.plan import estimate_with_schedule
    from ..planner.request import OffloadRequest, PlanRequest

    if engine is not None:
        raise ConfigError(f"--from {engine} with {file}, which is a plan of ours", help="leave out --from")
    other = TrainingPlan.load(file)
    differing = [name for name in ("model", "cluster", "workload") if getattr(other, name) != getattr(given, name)]
    if not differing:
        return _Present("the other plan", other.layout, other.estimate, [], schedule=other.offload)
    request = PlanRequest(given.model, given.cluster, given.workload, offload=OffloadRequest.from_plan(other))
    costs, scheduled = estimate_with_schedule(request, other.layout)
    note = f"{file} is for another {' and '.join(differing)}; its layout is costed with the plan's"
    schedule = None if scheduled is None else scheduled.schedule
    return _Present("the other plan", other.layout, costs, [note], schedule=schedule)


def _is_plan(file: Path) -> bool:
    from ..schema.base import read_json

    if file.suffix != ".json":
        return False
    content = read_json(file)
    return isinstance(content, dict) and {"schema_version", "layout"} <= content.keys()


def _other_workload(imported: Imported, plan: TrainingPlan) -> list[str]:
    """Return where the configuration's own workload is another than the plan's."""
    ours = plan.workload
    return [
        f"{name} is {value} in the configuration; both are costed with the plan's {getattr(ours, name)}"
        for name in ("global_batch_size", "seq_len", "precision")
        if (value := getattr(imported, name)) is not None and value != getattr(ours, name)
    ]


def _verdict(slower: float) -> str:
    if slower == 1:
        return "both take the same time"
    if slower > 1:
        return f"the plan takes {100 / slower:.1f} % of its time"
    return f"it takes {100 * slower:.1f} % of the plan's time"


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
    if json:
        typer.echo(exported.model_dump_json(indent=2))
    else:
        for path in paths:
            typer.echo(path)
    for line in exported.not_expressed:
        typer.echo(f"not in the configuration: {line}", err=True)
    for line in exported.to_set:
        typer.echo(f"yours to set: {line}", err=True)
    typer.echo(f"next: cd {out or to} && {exported.command}", err=True)


@command()
def import_configuration(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="torchtitan's .toml or .py, a script with Megatron-LM's options, DeepSpeed's .json, Accelerate's or NeMo's .yaml.",
        ),
    ],
    engine: Annotated[
        str | None, typer.Option("--from", metavar="ENGINE", help="Whose it is, where its content leaves that open.")
    ] = None,
    num_devices: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Ranks of the job, where the file does not say.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="Needed where the file counts layers.")] = None,
    json: JsonOption = False,
) -> None:
    """Read an engine's configuration as a layout, in the form that `--layout` and `--fix` take. Nothing of the file is run."""
    from ..engines import read_configuration
    from ..schema import ModelSpec
    from ..schema.layout import format_assignments

    spec = ModelSpec.resolve(model) if model else None
    imported = read_configuration(file, engine=engine, num_devices=num_devices, model=spec)
    if json:
        typer.echo(imported.model_dump_json(indent=2))
    else:
        typer.echo(format_assignments(_fields_to_type(imported.layout)))
    tell_assumptions(imported)
    typer.echo(
        "next: meshwright estimate MODEL --cluster C --layout ... costs it, meshwright compare sets it next to a plan",
        err=True,
    )


def tell_assumptions(imported: Imported) -> None:
    """Say on stderr what a configuration left open, and which of its settings are not about the layout."""
    for line in imported.assumed:
        typer.echo(f"assumed: {line}", err=True)
    if imported.ignored:
        typer.echo(f"says nothing about the layout: {', '.join(imported.ignored)}", err=True)


def _fields_to_type(layout: Layout) -> dict[str, object]:
    """Return the fields that differ from what a layout of these degrees has by itself."""
    fields = layout.model_dump(exclude_defaults=True)
    return {name: value for name, value in fields.items() if value != 1 or name == "zero_stage"}
