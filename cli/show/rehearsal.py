"""Show a rehearsal: a row for each kind of rank, its fullest moment by category, its collectives, and ranks that fail."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape as escape_html
from typing import TYPE_CHECKING

from ...schema.units import counted, format_bytes, format_count, format_seconds
from ..markup import plain
from ..terminal import Table, headed_table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...schema.rehearsal import Rehearsal, RehearsedKind


def tables(rehearsal: Rehearsal) -> Iterator[RenderableType]:
    """Yield what to print."""
    if rehearsal.kinds:
        yield _kinds(rehearsal)
        yield _moment(rehearsal.fullest)
        yield _messages(rehearsal.fullest)
    if rehearsal.time_parts:
        yield _times(rehearsal)
    for failure in rehearsal.failures:
        yield _failure(failure.message, failure.details)
    yield plain(verdict(rehearsal)) + "".join(f"\nnote: {plain(note)}" for note in rehearsal.notes)


def verdict(rehearsal: Rehearsal) -> str:
    """Return the answer in a line."""
    if not rehearsal.runs:
        kinds = counted(len(rehearsal.failures), "kind of rank", "kinds of ranks")
        return f"this plan does not run: {kinds} of {rehearsal.world_size} ranks failed"
    reserved = max(kind.peak_reserved_bytes for kind in rehearsal.kinds)
    fits = "fits" if rehearsal.fits else "does not fit"
    first = max(rehearsal.kinds, key=lambda kind: kind.initial_allocated_bytes - kind.peak_allocated_bytes)
    more = first.initial_allocated_bytes > first.peak_allocated_bytes
    initial = (
        f"; rank {first.rank} holds more before its first step: {format_bytes(first.initial_allocated_bytes)}"
        if more
        else ""
    )
    return (
        f"this plan runs on {counted(rehearsal.world_size, 'rank')}, and {fits}: the fullest reserves {format_bytes(reserved)} of "
        f"{format_bytes(rehearsal.budget_bytes)}{initial}"
    )


def _percent(ratio: float) -> str:
    return f"{100 * ratio:+.1f} %"


def _kinds(rehearsal: Rehearsal) -> Table:
    table = headed_table(
        f"{rehearsal.model} on {rehearsal.cluster}: {rehearsal.layout}",
        "stage", "ranks", "allocated", "reserved", "predicted", "off", "worst case", "fullest in",
        text=("fullest in",),
    )  # fmt: skip
    for kind in rehearsal.kinds:
        worst = "" if kind.worst_allocated_bytes is None else format_bytes(kind.worst_allocated_bytes)
        sizes = (kind.peak_allocated_bytes, kind.peak_reserved_bytes, kind.predicted_allocated_bytes)
        table.add_row(
            ", ".join(map(str, kind.stages)), str(len(kind.ranks)), *map(format_bytes, sizes), _percent(kind.off_ratio),
            worst, plain(kind.moment),
        )  # fmt: skip
    return table


def _rows(kind: RehearsedKind) -> Iterator[tuple[str, int, int | None]]:
    """Yield categories with their bytes and those predicted; what the plan calls temporary is two of them."""
    for name, size in kind.memory_bytes.items():
        if name == "communication":
            yield name, size, None
        elif name == "temporaries":
            yield f"{name} (predicted: with communication)", size, kind.predicted_memory_bytes.get("temporary", 0)
        else:
            yield name, size, kind.predicted_memory_bytes.get(name, 0)


def _moment(kind: RehearsedKind) -> Table:
    where = f"{kind.operator}{' in ' + kind.module if kind.module else ''}"
    table = headed_table(
        f"rank {kind.rank} at its fullest: {kind.moment}, {where}", "", "rehearsed", "predicted", text=("",)
    )
    for name, size, predicted in _rows(kind):
        table.add_row(name, format_bytes(size), "" if predicted is None else format_bytes(predicted))
    return table


def _messages(kind: RehearsedKind) -> Table:
    table = headed_table(
        f"rank {kind.rank}, one step: {format_count(kind.flops)} FLOPs; collectives",
        "axis", "", "count", "bytes", "predicted", text=("axis", ""), num_keys=2,
    )  # fmt: skip
    for one in kind.collectives:
        predicted = "" if one.predicted_bytes is None else format_bytes(one.predicted_bytes)
        table.add_row(one.axis, one.op, f"{one.count:,}", format_bytes(one.bytes), predicted)
    return table


def _time_rows(rehearsal: Rehearsal) -> Iterator[tuple[str, str, str, str]]:
    """Yield parts of the step, the longest first, with what the plan has more of each, as a part of the step."""
    laid_out, predicted, step_s = rehearsal.time_parts, rehearsal.predicted_time_parts, rehearsal.step_s
    names = {name for name, seconds in (laid_out | predicted).items() if seconds > 0}
    rows = [(name, laid_out.get(name, 0.0), predicted.get(name, 0.0)) for name in names]
    rows.sort(key=lambda row: -max(row[1:]))
    for name, one, other in (*rows, ("step", step_s, rehearsal.predicted_step_s)):
        yield name.replace("_", " "), format_seconds(one), format_seconds(other), _percent((other - one) / step_s)


def _times(rehearsal: Rehearsal) -> Table:
    table = headed_table("a step in time", "", "laid out", "predicted", "off, of the step", text=("",))
    for row in _time_rows(rehearsal):
        table.add_row(*row)
    return table


def _failure(message: str, details: tuple[str, ...]) -> str:
    return "\n".join(["[bold red]fails[/] " + plain(message), *(f"  {plain(detail)}" for detail in details)])


def page(rehearsal: Rehearsal) -> str:
    """Return a self-contained page with every kind of rank."""
    parts = [f"<h1>{escape_html(rehearsal.model)} rehearsed</h1><p>{escape_html(verdict(rehearsal))}</p>"]
    parts.append(f"<p>{escape_html(rehearsal.cluster)}: {escape_html(rehearsal.layout)}</p>")
    parts += [
        f"<h2>fails</h2><p>{escape_html(failure.message)}</p><ul>"
        + "".join(f"<li>{escape_html(detail)}</li>" for detail in failure.details)
        + "</ul>"
        for failure in rehearsal.failures
    ]
    for kind in rehearsal.kinds:
        parts.append(
            f"<h2>stage {', '.join(map(str, kind.stages))}: {len(kind.ranks)} ranks like rank {kind.rank}</h2>"
            f"<p>{format_bytes(kind.peak_allocated_bytes)} allocated, {format_bytes(kind.peak_reserved_bytes)} reserved; predicted "
            f"{format_bytes(kind.predicted_allocated_bytes)} ({_percent(kind.off_ratio)}). Fullest in "
            f"{escape_html(kind.moment)}: {escape_html(kind.operator)} {escape_html(kind.module)}</p>"
        )
        memory = [
            (name, format_bytes(size), "" if predicted is None else format_bytes(predicted))
            for name, size, predicted in _rows(kind)
        ]
        parts.append(_html_table(("", "rehearsed", "predicted"), memory))
        largest = [(one.category, one.operator, str(one.count), format_bytes(one.bytes)) for one in kind.largest]
        parts.append(_html_table(("largest", "operator", "count", "each"), largest))
        sent = [
            (one.axis, one.op, f"{one.count:,}", format_bytes(one.bytes),
             "" if one.predicted_bytes is None else format_bytes(one.predicted_bytes))
            for one in kind.collectives
        ]  # fmt: skip
        parts.append(_html_table(("axis", "collective", "count", "bytes", "predicted"), sent))
    if rehearsal.time_parts:
        parts.append(_html_table(("a step in time", "laid out", "predicted", "off"), list(_time_rows(rehearsal))))
    style = (
        "body{font:14px sans-serif;margin:2em}td,th{padding:2px 12px;text-align:right}td:first-child{text-align:left}"
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!doctype html><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{escape_html(rehearsal.model)} rehearsed</title><style>{style}</style>{''.join(parts)}\n"
    )


def _html_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [f"<tr>{''.join(f'<{cell}>{escape_html(text)}</{cell}>' for text in row)}</tr>" for cell, row in
             [("th", head), *(("td", row) for row in rows)]]  # fmt: skip
    return f"<table>{''.join(lines)}</table>"
