"""Errors on the terminal: `error: what`, the numbers, the cause, `help: the fix`; the exit code says whose fault it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from ..schema.errors import MeshwrightError

INTERRUPTED = 130


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Turn a MeshwrightError into a message on stderr and its exit code; Ctrl-C into exit code 130."""
    try:
        yield
    except MeshwrightError as error:
        typer.secho("error: ", err=True, fg=typer.colors.RED, bold=True, nl=False)
        typer.echo(str(error), err=True)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None
