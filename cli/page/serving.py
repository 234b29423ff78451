"""The page of a serving plan: the tables that `plan` and `explain` show, and the front of one user against one device as an SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...schema.units import counted
from ..show.serving import explanation_tables, serving_tables
from ..terminal import Table, cluster_title

if TYPE_CHECKING:
    from ...planner.explain.serving import ServingExplanation
    from ...schema.serving_plan import ServingFrontPoint, ServingPlan

WIDTH, HEIGHT = 560, 300
INSET, RIGHT, TOP, BOTTOM = 56, 12, 10, 34


def serving_page_data(plan: ServingPlan, explanation: ServingExplanation | None = None) -> dict[str, Any]:
    """Return what the template is filled with."""
    tables = list(serving_tables(plan))
    if explanation is not None:
        tables[1:1] = explanation_tables(plan, explanation)
    return {
        "title": f"{plan.model.name} served on {cluster_title(plan.cluster)}",
        "model": plan.model.name,
        "cluster": f"served on {cluster_title(plan.cluster)}",
        "headline": counted(plan.num_devices, "device"),
        "summary": plan.summary,
        "front": front_figure(plan),
        "tables": [table_rows(table) for table in tables],
    }


def table_rows(table: Table) -> dict[str, Any]:
    """Return a table of the show layer as a template draws it: text of cells without their markup."""
    sections = [[[cell.plain for cell in cells] for cells, _ in rows] for rows in table.sections if rows]
    return {
        "title": table.title,
        "columns": table.columns if any(table.columns) else (),
        "is_text": [
            idx in table.text_columns or (table.words and idx == len(table.columns) - 1)
            for idx in range(len(table.columns))
        ],
        "sections": sections,
    }


def front_figure(plan: ServingPlan) -> dict[str, Any] | None:
    """Return the front and the plan as points of a view box, logarithmic both ways; None without a front."""
    if not plan.front:
        return None
    chosen = plan.estimate.tokens_per_s_per_user, plan.estimate.tokens_per_s_per_device
    pairs = [(point.tokens_per_s_per_user, point.tokens_per_s_per_device) for point in plan.front]
    (low_x, high_x), (low, high) = (_range([pair[axis] for pair in (*pairs, chosen)]) for axis in (0, 1))

    def position(pair: tuple[float, float]) -> dict[str, float]:
        x, y = math.log(pair[0] / low_x) / math.log(high_x / low_x), math.log(pair[1] / low) / math.log(high / low)
        return {
            "x": round(INSET + x * (WIDTH - INSET - RIGHT), 1),
            "y": round(HEIGHT - BOTTOM - y * (HEIGHT - TOP - BOTTOM), 1),
        }

    return {
        "size": (WIDTH, HEIGHT, INSET, RIGHT, TOP, BOTTOM),
        "points": [
            position(pair) | {"words": _words(point), "mode": point.mode}
            for pair, point in zip(pairs, plan.front, strict=True)
        ],
        "plan": position(chosen) | {"words": f"the plan: {chosen[0]:.4g} a user, {chosen[1]:.4g} a device"},
        "x_ticks": [(position((value, low))["x"], f"{value:g}") for value in _ticks(low_x, high_x)],
        "y_ticks": [(position((low_x, value))["y"], f"{value:g}") for value in _ticks(low, high)],
    }


def _words(point: ServingFrontPoint) -> str:
    return f"{point.tokens_per_s_per_user:.4g} a user, {point.tokens_per_s_per_device:.4g} a device: {point.pools}"


def _range(values: Sequence[float]) -> tuple[float, float]:
    return min(values) / 1.15, max(values) * 1.15


def _ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten between two values."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [value for e in exponents for step in (1, 2, 5) if low <= (value := step * 10.0**e) <= high]
