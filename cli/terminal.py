"""Talk to the terminal: answers and tables on standard output; progress, errors with their exit codes and Ctrl-C next to it.

A `Table` is laid out for the width it is printed at, and no character of a cell is lost: words that find no room next to the
figures stand below them, and figures that find none side by side follow below, with the first column again.
Rich is imported where something is drawn: a command that draws nothing starts without it.
"""

from __future__ import annotations

import errno
import json
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import BaseModel

from ..schema.base import shown
from ..schema.errors import ConfigError, MeshwrightError, SolverLimitError, printable
from ..schema.units import format_count, format_percent, format_seconds
from .interrupt import INTERRUPTED, interruptible
from .markup import plain, styled

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.progress import Progress, TaskID
    from rich.text import Text

    from ..planner.request import Deadline
    from ..schema import Certificate, ClusterSpec, ModelSpec, Plan

BAR_WIDTH = 20
EXTRAS = {"torch": "run", "safetensors": "run"}
"""Packages that planning does without, and the extra that brings them."""
GAP = 2
INDENT = 4
MIN_WORDS = 36
"""Columns that words next to figures need; with less they stand below."""
MAX_NAME = 12
"""Letters of a column's name that is not broken into lines."""


@contextmanager
def exit_on_error(*, as_json: bool = False) -> Iterator[None]:
    """Turn an error of ours into a message on stderr and its exit code, Ctrl-C into exit code 130; with ``as_json`` also into an
    object on stdout, as any failure.
    """
    try:
        with interruptible():
            yield
    except MeshwrightError as error:
        raise exit_with(error, as_json=as_json) from None
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        lacking = ConfigError(
            f"this needs {error.name}, which is not installed", help=f"pip install 'meshwright[{extra}]'"
        )
        raise exit_with(lacking, as_json=as_json) from None
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise exit_with(ConfigError(f"no file has so long a name: {shown(error.filename)}"), as_json=as_json) from None
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        if as_json:
            _echo_failure("KeyboardInterrupt", "interrupted", exit_code=INTERRUPTED)
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:  # a bug of ours: Python shows where
        if as_json and not isinstance(error, typer.Exit | typer.Abort):
            _echo_failure(type(error).__name__, str(error), exit_code=1)
        raise


def exit_with(error: MeshwrightError, *, as_json: bool) -> typer.Exit:
    """Say an error, on stderr and with ``as_json`` on stdout as well; return what ends the command with its exit code."""
    typer.secho("error: ", err=True, fg=typer.colors.RED, bold=True, nl=False)
    typer.echo(str(error), err=True)
    if as_json:
        _echo_failure(
            type(error).__name__, error.message, details=error.details, help=error.help, exit_code=error.exit_code
        )
    return typer.Exit(error.exit_code)


def _echo_failure(kind: str, message: str, *, exit_code: int, **more: object) -> None:
    fields = {"type": kind, "message": message, "details": (), "help": None} | more | {"exit_code": exit_code}
    typer.echo(json.dumps({"error": fields}))


def _say_version(show_version: bool) -> None:
    if show_version:
        from importlib.metadata import version

        typer.echo(f"meshwright {version('meshwright')}")
        raise typer.Exit


def begin(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say the version and end.")
    ] = False,
) -> None:
    """Plan how to spread the training of a large model over a cluster, see why, and run the plan."""


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
    from rich.text import Text

    with Console(stderr=True).status(Text(text)):
        yield


@contextmanager
def search_progress(*, quiet: bool) -> Iterator[Callable[[int, float | None, float], None] | None]:
    """Show a bar with incumbent, bound and gap while layouts are expanded; None when quiet."""
    if quiet:
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("enumerating layouts", total=None)

        def update(evaluated: int, incumbent_s: float | None, bound_s: float) -> None:
            if incumbent_s is None:
                text = f"none that fits yet, bound {format_seconds(bound_s)}"
            else:
                gap = max(0.0, 1 - bound_s / incumbent_s)
                text = f"best {format_seconds(incumbent_s)}, bound {format_seconds(bound_s)}, gap {format_percent(gap)}"
            progress.update(task, description=f"{evaluated} layouts evaluated, {text}")

        yield update


@dataclass
class Bar:
    """A progress bar on stderr that makes room for what is printed while it runs; nothing where it is quiet."""

    progress: Progress | None
    task: TaskID | None

    def set(self, done: float, text: str) -> None:
        """Fill it so far, and say what was done last."""
        if self.progress is not None and self.task is not None:
            self.progress.update(self.task, completed=done, description=text)

    def show(self, *renderables: RenderableType) -> None:
        """Print on stdout."""
        if not renderables:
            return
        if self.progress is not None:
            self.progress.stop()
        show(*renderables)
        if self.progress is not None:
            self.progress.start()


@contextmanager
def progress_bar(text: str, *, quiet: bool = False) -> Iterator[Bar]:
    """Show a bar of what is done, from 0 to 1, with a text."""
    if quiet:
        yield Bar(None, None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        BarColumn(BAR_WIDTH),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    progress = Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with progress:
        yield Bar(progress, progress.add_task(text, total=1.0))


def show(*renderables: RenderableType) -> None:
    """Print on stdout, in a pipe as wide as COLUMNS says, without blanks at the ends of lines."""
    from rich.console import Console

    console = Console()
    for renderable in renderables:
        console.print(styled(renderable) if isinstance(renderable, str) else renderable, highlight=False)


def show_answer(document: BaseModel, *tables: RenderableType, as_json: bool) -> None:
    """Print an answer on stdout: as JSON, or its tables."""
    if as_json:
        typer.echo(document.model_dump_json(indent=2))
    else:
        show(*tables)


@dataclass
class Table:
    """Rows of what something is, some figures, and words about them; cells may have Rich's markup.

    Attributes:
        title: above it, broken where it is longer than a line.
        columns: their names; all empty: no heading.
        text_columns: columns that begin at the left; figures end at the right.
        words: the last column holds words, broken into lines; each line of a cell begins a new one.
        num_keys: columns that stand again in every part of a table whose figures do not fit side by side.
    """

    title: str
    columns: Sequence[str]
    text_columns: Collection[int] = (0,)
    words: bool = True
    num_keys: int = 1
    sections: list[list[tuple[tuple[Text, ...], float | None]]] = field(default_factory=lambda: [[]])

    def add_section(self) -> None:
        """Begin a new group of rows, after an empty line."""
        if self.sections[-1]:
            self.sections.append([])

    def add_row(self, *cells: str, share: float | None = None) -> None:
        """Add a row; with a share of a whole, a bar of it before the words where there is room."""
        assert len(cells) <= len(self.columns), cells
        cells = (*cells, *("",) * (len(self.columns) - len(cells)))
        self.sections[-1].append((tuple(map(styled, cells)), share))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the lines at the width of a console."""
        from rich.text import Text

        width, figures = options.max_width, self._figure_widths(options.max_width)
        if self.title:
            yield from (_stripped(line) for line in Text(printable(self.title), style="bold").wrap(console, width))
            yield Text()
        parts = list(self._parts(figures, width))
        for columns in parts:
            placed = _Placed(
                console, width, tuple((idx, figures[idx], idx in self.text_columns) for idx in columns if figures[idx])
            )
            is_last = columns is parts[-1]
            if any(self.columns):
                words = self.columns[-1] if self.words and is_last else ""
                yield from placed.heading([Text(name, style="bold") for name in self.columns], words)
            for section in self.sections:
                rows = [row for row in section if self._stands_in(columns, row[0], is_last=is_last)]
                for cells, share in rows:
                    yield from placed.row(cells, cells[-1] if self.words and is_last else Text(), share)
                if rows:
                    yield Text()

    def _stands_in(self, columns: Sequence[int], cells: Sequence[Text], *, is_last: bool) -> bool:
        """Return whether a row stands in a part of the table: where it has figures, in the last one for words or its name alone."""
        figures = cells[self.num_keys : len(cells) - self.words]
        words_or_name = (self.words and cells[-1].plain) or not any(cell.plain for cell in figures)
        return any(cells[idx].plain for idx in columns[self.num_keys :]) or (is_last and bool(words_or_name))

    def _figure_widths(self, width: int) -> list[int]:
        """Return the widths of all columns but that of words."""
        rows = [cells for section in self.sections for cells, _ in section]
        widths = []
        for idx in range(len(self.columns) - self.words):
            # a row without figures has its words right behind its first cell
            cells = [
                row[idx] for row in rows if idx or any(cell.plain for cell in row[1 : len(self.columns) - self.words])
            ]
            longest = max((cell.cell_len for cell in cells), default=0)
            name = self.columns[idx]
            unbroken = max(map(len, name.split()), default=0) if len(name) > MAX_NAME else len(name)
            widths.append(min(max(longest, unbroken), width // 2 if idx < self.num_keys else width // 2 - GAP))
        return widths

    def _parts(self, widths: Sequence[int], width: int) -> Iterator[list[int]]:
        """Yield the columns that stand side by side, the keys first."""
        keys = list(range(min(self.num_keys, len(widths))))
        used = of_keys = 1 + sum(widths[idx] + GAP for idx in keys) - GAP
        part = list(keys)
        for idx in range(len(keys), len(widths)):
            if len(part) > len(keys) and used + GAP + widths[idx] > width:
                yield part
                part, used = list(keys), of_keys
            part.append(idx)
            used += GAP + widths[idx]
        yield part


@dataclass(frozen=True)
class _Placed:
    """Columns of a table side by side: each with its index, its width, and whether it begins at the left."""

    console: Console
    width: int
    columns: tuple[tuple[int, int, bool], ...]

    def heading(self, names: Sequence[Text], words: str) -> Iterator[Text]:
        """Yield the names of the columns, broken into lines that end together."""
        from rich.text import Text

        cells = [names[idx].wrap(self.console, width) for idx, width, _ in self.columns]
        height = max(map(len, cells))
        cells = [[Text()] * (height - len(lines)) + list(lines) for lines in cells]
        yield from self._lines(
            cells, [Text()] * (height - 1) + [Text(words if len(words) <= self.room else "", style="bold")]
        )
        if words and len(words) > self.room:
            yield Text(" " * INDENT + words, style="bold")

    @property
    def room(self) -> int:
        """Return the columns of the screen that remain for words."""
        return self.width - 1 - sum(width + GAP for _, width, _ in self.columns)

    def row(self, cells: Sequence[Text], words: Text, share: float | None) -> Iterator[Text]:
        """Yield the lines of a row."""
        from rich.text import Text

        label, filled = cells[0], [n for n, (idx, _, _) in enumerate(self.columns) if idx and cells[idx].plain]
        if not filled and share is None and words.plain and label.cell_len < self.width // 2:
            yield from self._words_behind(label, words)
            return
        longest = max((text.cell_len for text in words.split()), default=0)
        up_to_last = replace(self, columns=self.columns[: filled[-1] + 1]) if filled else self
        if share is None and self.room < longest <= up_to_last.room:
            yield from up_to_last.row(cells, words, None)
            return
        bar = _bar(share) if share is not None and self.room >= BAR_WIDTH else ""
        fits_on_line = longest + len(bar) <= self.room or self.room >= MIN_WORDS
        words_on_line = self._wrapped(words if fits_on_line else Text(), self.room, before=bar)
        yield from self._lines([cells[idx].wrap(self.console, width) for idx, width, _ in self.columns], words_on_line)
        if not fits_on_line:
            indent = INDENT + len(label.plain) - len(label.plain.lstrip())
            for line in self._wrapped(words, self.width - indent):
                yield _stripped(Text.assemble(" " * indent, line))

    def _words_behind(self, label: Text, words: Text) -> Iterator[Text]:
        """Yield the lines of a row without figures."""
        from rich.text import Text

        used = 1 + label.cell_len + GAP
        for first, line in zip_longest((label,), self._wrapped(words, self.width - used), fillvalue=Text()):
            yield _stripped(Text.assemble(" ", _padded(first, used - 1), line))

    def _wrapped(self, words: Text, width: int, *, before: str = "") -> list[Text]:
        """Return the lines of words, each paragraph on lines of its own, the first one behind a bar."""
        from rich.text import Text

        first, *others = words.split()
        if before:
            first = Text.assemble((before, "cyan"), " " * bool(first.plain), first)
        return [line for text in (first, *others) if text.plain for line in text.wrap(self.console, width)]

    def _lines(self, cells: Sequence[Sequence[Text]], words: Sequence[Text]) -> Iterator[Text]:
        from rich.text import Text

        for *row, line in zip_longest(*cells, words, fillvalue=Text()):
            joined = Text(" ")
            for cell, (_, width, is_left_aligned) in zip(row, self.columns, strict=True):
                joined.append_text(_padded(_stripped(cell), width, is_left_aligned=is_left_aligned)).append(" " * GAP)
            yield _stripped(joined.append_text(line))


def _padded(text: Text, width: int, *, is_left_aligned: bool = True) -> Text:
    padded = text.copy()
    padded.align("left" if is_left_aligned else "right", max(width, text.cell_len))
    return padded


def _stripped(text: Text) -> Text:
    stripped = text.copy()
    stripped.rstrip()
    return stripped


def _bar(share: float) -> str:
    return "#" * max(0, min(BAR_WIDTH, round(BAR_WIDTH * share)))


def headed_table(title: str, *columns: str, text: Collection[str] = ("",), num_keys: int = 1) -> Table:
    """Return an empty table with a line of column names; figures but for those in ``text``, of which the last holds words."""
    text_columns = {idx for idx, name in enumerate(columns) if name in text}
    return Table(
        title,
        columns,
        text_columns=text_columns,
        words=len(columns) - 1 in text_columns and len(columns) > 1,
        num_keys=num_keys,
    )


def figures_table(title: str, num_figures: int = 2) -> Table:
    """Return an empty table of rows: what it is, some figures, and words about them."""
    return Table(title, ("",) * (num_figures + 2))


def model_title(model: ModelSpec, cluster: ClusterSpec) -> str:
    """Return model, size, devices and links in a line."""
    return f"{model.name} ({format_count(model.num_params)}) on {cluster_title(cluster)}"


def cluster_title(cluster: ClusterSpec) -> str:
    """Return devices and links in a line."""
    groups = ", ".join(f"{group.num_devices} x {group.device.name}" for group in cluster.groups)
    links = " + ".join(level.link.name for level in cluster.levels) if cluster.num_devices > 1 else ""
    return f"{groups} ({links})" if links else groups


def add_search(table: Table, search: Certificate, effort: str, remark: str = "") -> None:
    """Add what a search proved, and what it took."""
    table.add_section()
    table.add_row(
        "[bold]search", "", "", f"[bold]{search.verdict}[/]; {effort} in {format_seconds(search.search_s)}{remark}"
    )


def add_notes(table: Table, plan: Plan) -> None:
    """Add the notes of a plan of any task."""
    table.add_section()
    for note in plan.notes:
        table.add_row("[bold]note", "", "", plain(note))
