"""`meshwright rehearse`: a plan's step on every kind of rank, without a device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..schema import TrainingPlan
from ..schema.base import write_atomically
from .options import JsonOption, OptionModel, PlanArgument, command, option
from .terminal import progress_bar, show


class RehearsalOptions(OptionModel):
    """What is rehearsed, and where it is written."""

    rank: tuple[int, ...] = option((), "rehearse the kinds of these ranks only; repeatable. Default: all kinds.")
    report: Path | None = option(None, "for a page with every table.", metavar="FILE.html")


@command()
def rehearse(
    plan: PlanArgument,
    options: RehearsalOptions,
    script: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT ARGS", help="Your own script, as under apply; stopped after two steps."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Let every kind of rank of a plan go through a step as `apply` runs it, without devices: what it holds at its fullest
    moment, what it sends, and what of that the plan did not predict.

    Exit code 1 where a rank does not run.
    """
    from ..planner import rehearse as run
    from .show.rehearsal import page, tables

    given = TrainingPlan.load(plan)
    with progress_bar("rehearsing", quiet=json) as bar:
        rehearsal = run(
            given, ranks=options.rank, script=tuple(script or ()), plan_path=str(plan.resolve()),
            progress=lambda done, total: bar.set(done / total, f"{done} of {total} kinds of ranks"),
        )  # fmt: skip
    if options.report is not None:
        write_atomically(options.report, page(rehearsal))
        typer.echo(f"wrote {options.report}", err=True)
    if json:
        typer.echo(rehearsal.model_dump_json(indent=2))
    else:
        show(*tables(rehearsal))
    if not rehearsal.runs:
        raise typer.Exit(1)
    typer.echo(f"next: meshwright explain {plan}, and on the cluster meshwright apply {plan}", err=True)
