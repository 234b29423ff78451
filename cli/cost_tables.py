"""Money and Pareto fronts as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..schema.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from ..schema import CostSummary, ParetoPoint, SizeTried

_STYLES = {"chosen": "[bold green]", "on the front": "[bold]", "dearer": "", "not examined": "[yellow]"}


def cost_table(cost: CostSummary, tokens_per_step: int) -> Table:
    """What is rented, what it costs, and every size that was tried."""
    table = _table(
        f"cheapest: {cost.num_nodes} nodes of {cost.offer}", ["", "nodes", "USD/h", "step", "tok/s", "USD/1e9 tok", ""]
    )
    for group in _grouped(cost.sizes):
        table.add_row(*_size_row(group, tokens_per_step))
    table.add_section()
    for title, value, note in _money_rows(cost):
        table.add_row(f"[bold]{title}", "", "", "", "", value, note)
    return table


def _money_rows(cost: CostSummary) -> Iterator[tuple[str, str, str]]:
    yield "rent", f"{cost.price_per_hour:,.2f}", "USD/h"
    yield "a step", f"{cost.usd_per_step:,.4g}", "USD"
    yield "1e9 tokens", f"{cost.usd_per_billion_tokens:,.2f}", "USD"
    if cost.total is not None and cost.tokens is not None and cost.hours is not None:
        yield "whole run", f"{cost.total:,.0f}", f"USD for {cost.tokens:.3g} tokens in {cost.hours:,.1f} h"
    note = f"gap {100 * cost.gap:.2g} %, {len(cost.sizes)} sizes in {format_seconds(cost.search_s)}"
    yield "search", cost.status, note


def _grouped(sizes: Sequence[SizeTried]) -> Iterator[list[SizeTried]]:
    """Sizes in order; runs of one offer that the bounds alone decided, for one reason, together."""
    group: list[SizeTried] = []
    for size in sizes:
        alike = group and (size.offer, size.outcome) == (group[0].offer, group[0].outcome)
        if group and not (alike and size.step_time_s is None and group[0].step_time_s is None):
            yield group
            group = []
        group.append(size)
    if group:
        yield group


def _size_row(group: Sequence[SizeTried], tokens_per_step: int) -> tuple[str, ...]:
    first, last = group[0], group[-1]
    style = _STYLES.get(first.outcome, "[dim]")
    verdict = f"{style}{first.outcome}{'[/]' if style else ''}"
    if len(group) > 1:
        least = min((size.usd_per_million_tokens for size in group if size.usd_per_million_tokens), default=None)
        usd = f">= {1000 * least:,.2f}" if least else ""
        return (
            escape(first.offer),
            f"{first.num_nodes}-{last.num_nodes}",
            "",
            "",
            "",
            usd,
            f"{verdict} {_reason(group)}",
        )
    known_s = first.step_time_s or first.bound_s
    sign = ">= " if first.is_bound else ""
    return (
        escape(first.offer),
        str(first.num_nodes),
        f"{first.price_per_hour:,.2f}",
        sign + format_seconds(known_s) if known_s else "",
        ("<= " if first.is_bound else "") + format_count(tokens_per_step / known_s) if known_s else "",
        sign + f"{1000 * first.usd_per_million_tokens:,.2f}" if first.usd_per_million_tokens else "",
        f"{verdict} {_reason(group)}" + _offloaded(first),
    )


def _offloaded(size: SizeTried) -> str:
    return f" with {format_bytes(size.host_bytes)} of host memory a node" if size.host_bytes else ""


def _reason(group: Sequence[SizeTried]) -> str:
    reasons = {size.reason for size in group}
    return escape(reasons.pop()) if len(reasons) == 1 else ""


def pareto_table(points: Sequence[ParetoPoint]) -> Table:
    """Layouts that no other one beats in both time and memory, fastest first; with the host memory that some offload to."""
    offloads = any(point.host_bytes for point in points)
    table = _table(
        "time against memory: each layout is the fastest that needs no more",
        ["step", "tok/s", "needs", *(["host"] if offloads else []), "gap", "layout"],
    )
    for point in points:
        gap = max(0.0, 1 - point.bound_s / point.step_time_s)
        table.add_row(
            format_seconds(point.step_time_s),
            format_count(point.tokens_per_s),
            format_bytes(point.required_bytes),
            *([format_bytes(point.host_bytes) if point.host_bytes else ""] if offloads else []),
            f"{100 * gap:.2g} %" if gap > 1e-9 else "0 %",
            str(point.layout),
        )
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE, pad_edge=False)
    for i, name in enumerate(columns):
        is_text = name in ("", "layout")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text or i == 0, overflow="fold")
    return table
