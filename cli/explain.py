"""`meshwright explain`, `report` and `compare`: look at a plan that was made."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .inputs import JsonOption
from .show.report import write_report
from .terminal import INTERRUPTED, exit_on_error


def explain(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json that `meshwright plan` wrote.")],
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
    with exit_on_error():
        from ..planner import explain as make_explanation
        from ..planner.deadline import Deadline
        from ..schema import Plan
        from ..schema.layout import parse_assignments
        from .show.explain import explanation_tables
        from .show.plan import show
        from .terminal import searching_again, stopping_on_interrupt

        wanted = parse_assignments(why_not)
        given = Plan.load(plan)
        deadline = Deadline(time_limit_s)
        with searching_again(quiet=json), stopping_on_interrupt(deadline):
            found = make_explanation(given, why_not=wanted, deadline=deadline)
        if json:
            typer.echo(found.model_dump_json(indent=2))
        else:
            for table in explanation_tables(given, found):
                show(table)
        if deadline.is_stopped:
            raise typer.Exit(INTERRUPTED)
        typer.echo(f"next: meshwright explain {plan} --why-not tp=2,... compares any other layout", err=True)


HtmlOption = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="FILE.html", help="A self-contained page: where the step goes, timeline, memory, rank map."
    ),
]


TraceOption = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE.json", help="The predicted step for chrome://tracing or ui.perfetto.dev."),
]


def report(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json that `meshwright plan` wrote.")],
    html: HtmlOption = None,
    trace: TraceOption = None,
) -> None:
    """Draw a plan: a page that opens in any browser without a network, and the predicted step as a trace."""
    with exit_on_error():
        from ..schema import Plan
        from ..schema.errors import ConfigError

        if html is None and trace is None:
            raise ConfigError("nothing to write", help="give --report report.html, --trace trace.json, or both")
        write_report(Plan.load(plan), html, trace)
