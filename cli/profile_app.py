"""`meshwright profile`: show, compare and join what was measured on machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .errors import exit_on_error
from .inputs import JsonOption
from .profile import measure

profile_app = typer.Typer(
    help="Measure this machine, or show, compare and join measurements.", invoke_without_command=True
)
profile_app.callback()(measure)

File = Annotated[Path, typer.Argument(metavar="FILE", help="A profile.", show_default=False)]


@profile_app.command()
def show(profile: File, *, json: JsonOption = False) -> None:
    """What a profile holds, where it was measured, and whether it may be used here."""
    with exit_on_error():
        from ..profilers.files.summary import summary
        from ..profilers.files.trusted import foreign
        from ..schema import Profile
        from .profile_file_tables import summary_table
        from .tables import show as show_table

        loaded = Profile.load(profile)
        problems = foreign(loaded)
        if json:
            typer.echo(loaded.model_dump_json(indent=2))
        else:
            show_table(summary_table(loaded, summary(loaded)))
        for problem in problems:
            typer.echo(f"not of this machine: {problem}", err=True)
        then = "" if problems else f"next: meshwright plan MODEL --profile {profile} ..."
        typer.echo(then or "next: meshwright profile measures this machine", err=True)


@profile_app.command()
def diff(first: File, second: File, *, json: JsonOption = False) -> None:
    """What differs between two profiles: machines, rates, and the times of points that both measured."""
    with exit_on_error():
        from json import dumps

        from ..profilers.files.summary import compare
        from ..schema import Profile
        from .profile_file_tables import difference_table
        from .tables import show as show_table

        found = compare(Profile.load(first), Profile.load(second))
        if json:
            typer.echo(dumps(found, indent=2))
        else:
            show_table(difference_table(found))


@profile_app.command()
def merge(
    profiles: Annotated[list[Path], typer.Argument(metavar="FILE FILE ...", help="Profiles of one machine.")],
    *,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the joined profile is written.")],
    json: JsonOption = False,
) -> None:
    """Join profiles of one machine: every point of any, of points measured twice the median."""
    with exit_on_error():
        from ..profilers.files.merge import merged
        from ..profilers.files.summary import summary
        from ..schema import Profile
        from .profile_file_tables import summary_table
        from .tables import show as show_table

        joined = merged([Profile.load(path) for path in profiles])
        joined.save(out)
        if json:
            typer.echo(joined.model_dump_json(indent=2))
        else:
            show_table(summary_table(joined, summary(joined)))
        typer.echo(f"wrote {out}; next: meshwright plan MODEL --profile {out} ...", err=True)
