"""Show answers on the terminal: plans, explanations, profiles, experts and scores as tables, a plan as a page."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import typer
from pydantic import BaseModel
from rich import box
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ...schema.units import format_count, format_seconds

if TYPE_CHECKING:
    from ...schema import Certificate, ClusterSpec, ModelSpec, Plan

BAR_WIDTH = 20
PIPE_WIDTH = 140


def show(renderable: RenderableType) -> None:
    """Print on stdout; a pipe or a narrow terminal still gets full columns."""
    console = Console(soft_wrap=False)
    console = console if console.is_terminal else Console(width=max(console.width, PIPE_WIDTH))
    console.print(renderable)


def show_answer(document: BaseModel, *tables: RenderableType, as_json: bool) -> None:
    """Print an answer on stdout: as JSON, or its tables."""
    if as_json:
        typer.echo(document.model_dump_json(indent=2))
    else:
        for table in tables:
            show(table)


def headed_table(
    title: str, *columns: str, text: Collection[str] = ("",), bold: bool = True, wraps: bool = False
) -> Table:
    """Return an empty table with a line of column names, right-aligned but for those in ``text``."""
    style = Text(title, style="bold" if bold else "") if title else None
    table = Table(title=style, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for idx, name in enumerate(columns):
        is_text = name in text
        no_wrap = idx == 0 or not (is_text or wraps)
        table.add_column(name, justify="left" if is_text else "right", no_wrap=no_wrap, overflow="fold")
    return table


def figures_table(title: str, num_figures: int = 2, *, has_text: bool = True) -> Table:
    """Return an empty table of rows: what it is, some figures, and words about them."""
    table = Table(
        title=Text(title, style="bold"), title_justify="left", show_header=False, box=box.SIMPLE, pad_edge=False
    )
    table.add_column(min_width=26, overflow="fold")
    for _ in range(num_figures):
        table.add_column(justify="right", no_wrap=True)
    if has_text:
        table.add_column(overflow="fold")
    return table


def cluster_title(cluster: ClusterSpec) -> str:
    """Return devices and links in a line."""
    groups = ", ".join(f"{group.num_devices} x {group.device.name}" for group in cluster.groups)
    links = " + ".join(level.link.name for level in cluster.levels) if cluster.num_devices > 1 else ""
    return f"{groups} ({links})" if links else groups


def model_title(model: ModelSpec, cluster: ClusterSpec) -> str:
    """Return model, size, devices and links in a line."""
    return f"{model.name} ({format_count(model.num_params)}) on {cluster_title(cluster)}"


def add_search(table: Table, search: Certificate, effort: str, remark: str = "") -> None:
    """Add what a search proved, and what it took."""
    table.add_section()
    took = f"{effort}, {format_seconds(search.search_s)}{remark}"
    table.add_row("[bold]search", search.status, f"gap {100 * search.gap:.2g} %", took)


def add_notes(table: Table, plan: Plan) -> None:
    """Add the notes of a plan of any task."""
    if plan.notes:
        table.add_section()
    for note in plan.notes:
        table.add_row("[bold]note", "", "", escape(note))


def bar(share: float) -> str:
    """Return a bar of BAR_WIDTH for all."""
    return "[cyan]" + "#" * max(0, min(BAR_WIDTH, round(BAR_WIDTH * share))) + "[/]"


def list_table(*columns: str, text: Collection[str] = ()) -> Table:
    """Return an empty table without lines for a long list: a name, and right-aligned figures but for those in ``text``."""
    table = Table(*columns, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "left" if column.header in text else "right"
    return table
