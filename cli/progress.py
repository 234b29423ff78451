"""Progress bars on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def reading_cluster(text: str) -> Iterator[None]:
    """A spinner while a cluster is described, which takes some seconds where it has to be measured."""
    from rich.console import Console

    with Console(stderr=True).status(f"cluster {text}: a machine is measured once, in about ten seconds"):
        yield


@contextmanager
def search_progress(*, quiet: bool) -> Iterator[Callable[[int, float | None, float], None] | None]:
    """A bar with incumbent, bound and gap while layouts are expanded; None when quiet."""
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
                found = f"none that fits yet, bound {format_seconds(bound_s)}"
            else:
                gap = max(0.0, 1 - bound_s / incumbent_s)
                found = f"best {format_seconds(incumbent_s)}, bound {format_seconds(bound_s)}, gap {100 * gap:.1f} %"
            progress.update(task, description=f"{evaluated} layouts evaluated, {found}")

        yield update


@contextmanager
def searching_again(*, quiet: bool) -> Iterator[None]:
    """A spinner while a plan's space is searched again with changed clusters."""
    if quiet:
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status("searching again with more of each resource"):
        yield
