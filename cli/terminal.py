"""Talk to the terminal: answers and tables on standard output; progress, errors with their exit codes and Ctrl-C next to it.

Rich is imported where something is drawn: a command that draws nothing starts without it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import typer
from pydantic import BaseModel

from ..schema.errors import ConfigError, MeshwrightError, SolverLimitError
from ..schema.units import format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from ..planner.request import Deadline
    from ..schema import Certificate, ClusterSpec, ModelSpec, Plan

INTERRUPTED = 130
BAR_WIDTH = 20
PIPE_WIDTH = 140
EXTRAS = {"torch": "run", "safetensors": "run"}
"""Packages that planning does without, and the extra that brings them."""


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Turn a MeshwrightError into a message on stderr and its exit code; Ctrl-C into exit code 130."""
    try:
        yield
    except MeshwrightError as error:
        typer.secho("error: ", err=True, fg=typer.colors.RED, bold=True, nl=False)
        typer.echo(str(error), err=True)
        raise typer.Exit(error.exit_code) from None
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        typer.secho("error: ", err=True, fg=typer.colors.RED, bold=True, nl=False)
        typer.echo(
            f"this needs {error.name}, which is not installed\n  help: pip install 'meshwright[{extra}]'", err=True
        )
        raise typer.Exit(ConfigError.exit_code) from None
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def stopping_on_interrupt(deadline: Deadline) -> Iterator[None]:
    """Let Ctrl-C stop ``deadline``; once more, or where there is no answer yet, it is a KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

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


def show(*renderables: RenderableType) -> None:
    """Print on stdout; a pipe or a narrow terminal still gets full columns."""
    from rich.console import Console

    console = Console(soft_wrap=False)
    console = console if console.is_terminal else Console(width=max(console.width, PIPE_WIDTH))
    for renderable in renderables:
        console.print(renderable)


def show_answer(document: BaseModel, *tables: RenderableType, as_json: bool) -> None:
    """Print an answer on stdout: as JSON, or its tables."""
    if as_json:
        typer.echo(document.model_dump_json(indent=2))
    else:
        show(*tables)


def headed_table(
    title: str, *columns: str, text: Collection[str] = ("",), bold: bool = True, wraps: bool = False
) -> Table:
    """Return an empty table with a line of column names, right-aligned but for those in ``text``."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    style = Text(title, style="bold" if bold else "") if title else None
    table = Table(title=style, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for idx, name in enumerate(columns):
        is_text = name in text
        no_wrap = idx == 0 or not (is_text or wraps)
        table.add_column(name, justify="left" if is_text else "right", no_wrap=no_wrap, overflow="fold")
    return table


def figures_table(title: str, num_figures: int = 2, *, has_text: bool = True) -> Table:
    """Return an empty table of rows: what it is, some figures, and words about them."""
    table = headed_table(title)
    table.show_header = False
    table.add_column(min_width=26, overflow="fold")
    for _ in range(num_figures):
        table.add_column(justify="right", no_wrap=True)
    if has_text:
        table.add_column(overflow="fold")
    return table


def list_table(*columns: str, text: Collection[str] = ()) -> Table:
    """Return an empty table without lines for a long list: a name, and right-aligned figures but for those in ``text``."""
    from rich.table import Table

    table = Table(*columns, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "left" if column.header in text else "right"
    return table


def model_title(model: ModelSpec, cluster: ClusterSpec) -> str:
    """Return model, size, devices and links in a line."""
    return f"{model.name} ({format_count(model.num_params)}) on {cluster_title(cluster)}"


def cluster_title(cluster: ClusterSpec) -> str:
    """Return devices and links in a line."""
    groups = ", ".join(f"{group.num_devices} x {group.device.name}" for group in cluster.groups)
    links = " + ".join(level.link.name for level in cluster.levels) if cluster.num_devices > 1 else ""
    return f"{groups} ({links})" if links else groups


def bar(share: float) -> str:
    """Return a bar of BAR_WIDTH for all."""
    return "[cyan]" + "#" * max(0, min(BAR_WIDTH, round(BAR_WIDTH * share))) + "[/]"


def add_search(table: Table, search: Certificate, effort: str, remark: str = "") -> None:
    """Add what a search proved, and what it took."""
    table.add_section()
    took = f"{effort}, {format_seconds(search.search_s)}{remark}"
    table.add_row("[bold]search", search.status, f"gap {100 * search.gap:.2g} %", took)


def add_notes(table: Table, plan: Plan) -> None:
    """Add the notes of a plan of any task."""
    from rich.markup import escape

    if plan.notes:
        table.add_section()
    for note in plan.notes:
        table.add_row("[bold]note", "", "", escape(note))
