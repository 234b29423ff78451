"""`meshwright report`: a plan as a page to look at, and its step as a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .errors import exit_on_error

if TYPE_CHECKING:
    from ..schema import Plan

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


def write_report(plan: Plan, html: Path | None, trace: Path | None) -> None:
    """Write what is asked for, each file whole or not at all.

    Raises:
        ConfigError: a file cannot be written, plotly is missing, or the step of the plan has no timeline.
    """
    from ..planner.timeline import timeline
    from ..schema.base import write_atomically
    from ..schema.trace import chrome_trace

    if html is not None:
        from .report_page import page

        write_atomically(html, page(plan))
        typer.echo(f"wrote {html}", err=True)
    if trace is not None:
        write_atomically(trace, json.dumps(chrome_trace(plan, timeline(plan))))
        typer.echo(f"wrote {trace}; open it in ui.perfetto.dev", err=True)
