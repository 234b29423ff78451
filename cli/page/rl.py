"""The page of a post-training plan: the tables that `plan-rl` shows, and the calls of a step by pool as an SVG."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...schema.units import format_bytes, format_seconds
from ..show.rl import rl_tables
from ..terminal import cluster_title
from .serving import table_rows

if TYPE_CHECKING:
    from ...schema.rl_plan import RlPlan

WIDTH, ROW, INSET, TOP = 760, 34, 120, 24


def rl_page_data(plan: RlPlan) -> dict[str, Any]:
    """Return what the template is filled with."""
    return {
        "title": f"{plan.model.name}, {plan.post_training.algorithm} on {cluster_title(plan.cluster)}",
        "model": plan.model.name,
        "cluster": f"{plan.post_training.algorithm} on {cluster_title(plan.cluster)}",
        "headline": format_seconds(plan.estimate.step_time_s),
        "summary": plan.summary,
        "steps": step_figure(plan),
        "tables": [table_rows(table) for table in rl_tables(plan)],
    }


def step_figure(plan: RlPlan) -> dict[str, Any]:
    """Return the calls and moves of a step as boxes of a view box, a row for each pool."""
    scale = (WIDTH - INSET) / plan.waiting_s
    boxes = [
        (call.pool, call.start_s, call.seconds, call.name.replace("_", " "), call.name.split("_")[0], "")
        for call in plan.calls
    ]
    boxes += [
        (move.pool, move.start_s, move.seconds, move.what, "move", format_bytes(move.size_bytes)) for move in plan.moves
    ]
    return {
        "size": (WIDTH, TOP + ROW * len(plan.pools) + 20, INSET, TOP, ROW),
        "pools": [f"{pool.num_devices}: {', '.join(pool.roles)}" for pool in plan.pools],
        "boxes": [
            {
                "x": round(INSET + start_s * scale, 1),
                "y": TOP + ROW * pool + 4,
                "width": round(max(seconds * scale, 0.5), 1),
                "name": name if seconds * scale > 7 * len(name) else "",
                "kind": kind,
                "words": f"{name}: {format_seconds(seconds)}{', ' + more if more else ''}",
            }
            for pool, start_s, seconds, name, kind, more in boxes
        ],
        "end": format_seconds(plan.waiting_s),
    }
