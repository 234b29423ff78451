"""`meshwright explain`: what binds a plan, what more of each resource is worth, and why another layout was not chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .errors import INTERRUPTED, exit_on_error
from .inputs import JsonOption


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
        from .explain_tables import explanation_tables
        from .interrupt import stopping_on_interrupt
        from .progress import searching_again
        from .tables import show

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
