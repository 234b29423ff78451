"""Talk to the terminal: errors with their exit codes, Ctrl-C during a search, progress on standard error."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import typer

from ..schema.errors import MeshwrightError

if TYPE_CHECKING:
    from ..planner.request import Deadline


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


@contextmanager
def stopping_on_interrupt(deadline: Deadline) -> Iterator[None]:
    """Let Ctrl-C stop ``deadline``; once more, or where there is no answer yet, it is a KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    from ..schema import SolverLimitError

    def stop(received: int, frame: FrameType | None) -> None:
        if deadline.is_stopped:
            raise KeyboardInterrupt
        deadline.stop()
        typer.echo("stopping with the best so far; Ctrl-C again to leave at once", err=True)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    except SolverLimitError as error:
        if deadline.is_stopped:
            typer.echo(str(error), err=True)
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def spinner(text: str, *, quiet: bool = False) -> Iterator[None]:
    """Show a spinner with a text on stderr while something goes on."""
    if quiet:
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


@contextmanager
def search_progress(*, quiet: bool) -> Iterator[Callable[[int, float | None, float], None] | None]:
    """Show a bar with incumbent, bound and gap while layouts are expanded; None when quiet."""
    if quiet:
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from ..schema.units import format_seconds

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("enumerating layouts", total=None)

        def update(evaluated: int, incumbent_s: float | None, bound_s: float) -> None:
            if incumbent_s is None:
                text = f"none that fits yet, bound {format_seconds(bound_s)}"
            else:
                gap = max(0.0, 1 - bound_s / incumbent_s)
                text = f"best {format_seconds(incumbent_s)}, bound {format_seconds(bound_s)}, gap {100 * gap:.1f} %"
            progress.update(task, description=f"{evaluated} layouts evaluated, {text}")

        yield update
