"""`meshwright explain`, `report`, `export` and `import`: look at a plan that was made, next to other engines' words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..engines import RL_TARGETS, SERVING_TARGETS, TARGETS
from ..schema import Plan, ServingPlan, TrainingPlan
from ..schema.errors import ConfigError, printable
from .complete import complete_engines, complete_layout, complete_targets
from .options import JsonOption, OptionModel, PlanArgument, command, option
from .plan_options import SearchOptions
from .terminal import INTERRUPTED, progress_bar, show_answer, stopping_on_interrupt

if TYPE_CHECKING:
    from ..engines import Imported


class QuestionOptions(OptionModel):
    """What is asked about a plan."""

    why_not: str = option(
        "",
        "layout fields that the plan does not have, e.g. tp=4,pp=2; the rest is searched.",
        metavar="A=B,...",
        complete=complete_layout,
    )
    placements: bool = option(
        False,
        "of a module traced from code: each operator with the forms of its values over tp, and what conversions cost.",
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
    them, this is the answer (exit code 0), with its numbers; of a serving plan they may be a mode: aggregated or disaggregated.
    Everything comes from the plan file, and every figure from estimating or searching again.
    """
    from ..planner.explain.report import explain_in_parts
    from ..planner.request import Deadline
    from ..schema.layout import parse_assignments
    from .show.explain import part_tables

    if isinstance(serving := Plan.load(plan), ServingPlan):
        _explain_serving(serving, question, as_json=json)
        return
    fields, given = parse_assignments(question.why_not), TrainingPlan.load(plan)
    if question.placements:
        from .show.placements import placement_tables

        if given.model.code is None:
            raise ConfigError(f"{given.model.name} was not traced from code", help="leave out --placements")
        show_answer(given.model.code, *placement_tables(given), as_json=json)
        return
    deadline = Deadline(question.time_limit_s)
    with progress_bar("searching again", quiet=json) as bar, stopping_on_interrupt(deadline):
        for part in explain_in_parts(given, why_not=fields, deadline=deadline):
            if not json:
                bar.show(*part_tables(given, part))
            values = part.explanation.worth
            bar.set(part.done, values[-1].change if part.name == "value" else "searching again")
    if json:
        typer.echo(part.explanation.model_dump_json(indent=2))
    if deadline.is_stopped:
        raise typer.Exit(INTERRUPTED)
    typer.echo(f"next: meshwright explain {plan} --why-not tp=2,... compares any other layout", err=True)


def _explain_serving(plan: ServingPlan, question: QuestionOptions, *, as_json: bool) -> None:
    from ..planner.explain.serving import explain_serving
    from ..planner.request import Deadline
    from .show.serving import explanation_tables

    deadline = Deadline(question.time_limit_s)
    with stopping_on_interrupt(deadline):
        explanation = explain_serving(plan, why_not=question.why_not, deadline=deadline)
    show_answer(explanation, *explanation_tables(plan, explanation), as_json=as_json)
    if deadline.is_stopped:
        raise typer.Exit(INTERRUPTED)


class DrawingOptions(OptionModel):
    """What is drawn."""

    mirrors = SearchOptions

    report: Path | None = None
    trace: Path | None = None
    explain_limit_s: float = 30.0


@command()
def report(plan: PlanArgument, drawings: DrawingOptions) -> None:
    """Draw a plan: a page that opens in any browser without a network, and of training the predicted step as a trace."""
    if drawings.report is None and drawings.trace is None:
        raise ConfigError("nothing to write", help="give --report report.html, --trace trace.json, or both")
    from .page.document import write_report

    write_report(Plan.load(plan), drawings.report, drawings.trace, explain_limit_s=drawings.explain_limit_s)


class SourceOptions(OptionModel):
    """Where a configuration is from."""

    engine: str | None = option(
        None,
        "whose it is, where its content leaves that open.",
        name="--from",
        metavar="ENGINE",
        complete=complete_engines,
    )


@command()
def export(
    plan: PlanArgument,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            "--engine",
            metavar="ENGINE",
            autocompletion=complete_targets,
            help=f"{', '.join(TARGETS[:-1])} or {TARGETS[-1]}; a serving plan: {', '.join(SERVING_TARGETS)}; a "
            f"post-training plan: {' or '.join(RL_TARGETS)}.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "--dir", metavar="FOLDER", help="Where the files go. Default: a folder named as the engine."
        ),
    ] = None,
    rdma_resource: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="With kubernetes: network cards that a pod asks for (rdma/hca, or NAME=COUNT)."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write a plan as the engine's own configuration, or as the manifest of a job on Kubernetes; a serving plan as the commands or
    manifests that start its instances, with the load to test them.

    What the engine cannot run is refused with the reason (exit code 2); what its configuration has no words for is listed. A plan
    that was made for another engine is costed again for this one, and refused where it no longer fits.
    """
    from ..engines import export as make_export

    loaded, options = Plan.load(plan), {} if rdma_resource is None else {"rdma_resource": rdma_resource}
    exported = make_export(loaded, to, **options)
    changes = _costed_again(loaded, to) if isinstance(loaded, TrainingPlan) else []
    paths = exported.write(out or Path(to))
    typer.echo(exported.model_dump_json(indent=2) if json else "\n".join(map(str, paths)))
    for line in exported.not_expressed:
        typer.echo(printable(f"not in the configuration: {line}"), err=True)
    for line in changes:
        typer.echo(line, err=True)
    for line in exported.to_set:
        typer.echo(printable(f"yours to set: {line}"), err=True)
    typer.echo(printable(f"next: cd {out or to} && {exported.command}"), err=True)


def _costed_again(plan: TrainingPlan, to: str) -> list[str]:
    """Return what a plan for one engine costs under another.

    Raises:
        ConfigError: it does not fit there.
    """
    from ..engines import as_run_by
    from ..planner.planned_stages import reestimate
    from ..schema.units import format_bytes, format_seconds

    if (other := as_run_by(plan, to)) is None:
        return []
    before, after = plan.estimate, reestimate(other, other.cluster)
    if before.fits and not after.fits:
        terms = {
            name: (size, getattr(before.stages[0].memory_bytes, name)) for name, size in after.stages[0].memory_bytes
        }
        grown = max(terms, key=lambda name: terms[name][0] - terms[name][1])
        raise ConfigError(
            f"the plan does not fit under {to}",
            details=(
                f"needs up to {format_bytes(after.required_bytes)} of {format_bytes(after.budget_bytes)}, under "
                f"{plan.workload.engine} {format_bytes(before.required_bytes)}; {grown} {format_bytes(terms[grown][0])} instead "
                f"of {format_bytes(terms[grown][1])}",
            ),
            help=f"plan again with --engine {to}",
        )
    faster = 100 * (after.step_time_s / before.step_time_s - 1)
    return [
        f"costed for {to}: step time {format_seconds(after.step_time_s)} ({faster:+.1f} %), needs up to "
        f"{format_bytes(after.required_bytes)} of {format_bytes(after.budget_bytes)} ({format_bytes(before.required_bytes)} under "
        f"{plan.workload.engine}); --engine {to} plans for it"
    ]


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
    else:
        layout = imported.layout
        by_itself = {"sequence_parallel"} if layout.sequence_parallel == (layout.tp > 1) else set()
        typer.echo(format_assignments(layout.model_dump(exclude_defaults=True, exclude=by_itself)))
    tell_assumptions(imported)
    typer.echo(
        "next: meshwright estimate MODEL --cluster C --layout ... costs it, meshwright compare sets it next to a plan",
        err=True,
    )


def tell_assumptions(imported: Imported) -> None:
    """Say on stderr what a configuration left open, and which of its settings are not about the layout."""
    for line in imported.assumed:
        typer.echo(printable(f"assumed: {line}"), err=True)
    if imported.ignored:
        typer.echo(printable(f"says nothing about the layout: {', '.join(imported.ignored)}"), err=True)
