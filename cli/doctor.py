"""`meshwright doctor`: what is installed, what this machine has, what will not work and why."""

from __future__ import annotations

import typer

from .errors import exit_on_error
from .inputs import JsonOption

SIGNS = {"ok": "[green]ok[/]", "limited": "[yellow]limited[/]", "broken": "[red]broken[/]"}


def doctor(json: JsonOption = False) -> None:
    """Look at this installation and machine: packages, solvers, devices, backends, links, and what will not work and why.

    Exit code 1 where something is broken; what is merely limited is 0.
    """
    with exit_on_error():
        from rich import box
        from rich.markup import escape
        from rich.table import Table

        from ..profilers.doctor import examine
        from .tables import show

        findings = examine()
        if json:
            typer.echo("[" + ",\n".join(finding.model_dump_json() for finding in findings) + "]")
        else:
            table = Table("", "", "found", "means", box=box.SIMPLE)
            for finding in findings:
                means = finding.means + (f"; {finding.help}" if finding.help and finding.status != "ok" else "")
                table.add_row(finding.subject, SIGNS[finding.status], escape(finding.found), escape(means))
            show(table)
        if any(finding.status == "broken" for finding in findings):
            raise typer.Exit(1)
