"""The step pass by pass, as panels: while the pipeline fills, one period of its steady state, and from where it drains to the end.

A panel is cut out of the predicted timeline (planner/timeline.py). Where that is no longer than its panels, one has all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ...planner.timeline import timeline
from ...schema.trace import NAMES, OFFLOAD_STREAMS
from ...schema.units import format_seconds

if TYPE_CHECKING:
    from ...schema import TrainingPlan
    from ...schema.trace import Slice

MAX_ROWS = 32
"""Ranks of the pipeline that are drawn; of more, evenly many."""

MAX_PASSES = 6_000
"""Passes in a page; panels that have more are cut short."""

WIDTH = 10_000
"""Units of a panel's width."""

KINDS = {"F": "forward", "B": "input", "W": "weight", "BW": "backward"}
"""Classes of passes, which the style sheet colours; everything else is communication, an update or a copy."""


class Panel(NamedTuple):
    """A part of the step to be drawn."""

    title: str
    text: str
    begin_s: float
    end_s: float


def pipeline_panels(plan: TrainingPlan) -> dict[str, Any]:
    """Return the panels and the names of their rows.

    Raises:
        ConfigError: the step of the plan has no timeline.
    """
    steps = timeline(plan)
    rows = [piece.stream if piece.stream in OFFLOAD_STREAMS else piece.rank for piece in steps.slices]
    names: list[Any] = sorted({row for row in rows if isinstance(row, int)})
    if len(names) > MAX_ROWS:
        names = [names[round(k * (len(names) - 1) / (MAX_ROWS - 1))] for k in range(MAX_ROWS)]
    names += [row for row in OFFLOAD_STREAMS if row in rows]
    by_row: dict[Any, list[Slice]] = {name: [] for name in names}
    for row, piece in zip(rows, steps.slices, strict=True):
        if row in by_row:
            by_row[row].append(piece)
    for pieces in by_row.values():
        pieces.sort(key=lambda piece: piece.start_s)
    panels = _panels(plan, by_row[names[0]], steps.step_time_s)
    drawn = [_drawn(panel, list(by_row.values())) for panel in panels]
    kinds = [kind for panel in drawn for kind in panel["paths"]]
    return {
        "rows": [f"rank {name}" if isinstance(name, int) else name for name in names],
        "panels": drawn,
        "kinds": [kind for kind in (*KINDS.values(), "rest") if kind in kinds],
        "height": 10 * len(names),
        "script": [panel["slices"] for panel in drawn],
    }


def _panels(plan: TrainingPlan, first_rank: Sequence[Slice], end_s: float) -> list[Panel]:
    """Return what to draw, read off the passes of the first rank of the pipeline."""
    forward = [piece for piece in first_rank if piece.kind == "F" and piece.stream == "compute"]
    if (
        plan.layout.pp == 1
    ):  # under an offload schedule a micro-batch has a pass for each layer: it begins with the first
        firsts: dict[int, Slice] = {}
        for piece in forward:
            firsts.setdefault(piece.micro_batch, piece)
        forward = list(firsts.values())
    backward = [piece for piece in first_rank if piece.kind in ("B", "BW") and piece.stream == "compute"]
    everything = [Panel("the entire step", "", 0.0, end_s)]
    per_round = plan.layout.num_model_chunks * (plan.layout.pp if plan.layout.num_model_chunks > 1 else 1)
    if not backward or min(len(forward), len(backward)) <= 3 * per_round:
        return everything
    if plan.layout.pp == 1:
        begin_s, drain_s = forward[1].start_s, forward[-1].start_s
        count = plan.num_microbatches
        filling = []
    else:
        begin_s = backward[0].start_s + backward[0].seconds
        drain_s = forward[-1].start_s + forward[-1].seconds
        count = max(1, len(backward) // per_round)
        filling = [Panel("warm-up", "until the first micro-batch is back", 0.0, begin_s)]
    passes = backward if filling else forward
    middle = min(range(len(passes)), key=lambda k: abs(passes[k].start_s - (begin_s + drain_s) / 2))
    middle = min(middle, len(passes) - 1 - per_round)
    start_s = passes[middle].start_s
    period_s = passes[middle + per_round].start_s - start_s
    if period_s <= 0 or begin_s + period_s >= drain_s:
        return everything
    what = "one micro-batch" if per_round == 1 else f"{per_round // plan.layout.num_model_chunks} micro-batches"
    steady = Panel("one period", f"{what}, {count} times in a step", start_s, start_s + period_s)
    text = "the last passes, then data parallelism and the update" if filling else "the last micro-batch and the update"
    return [*filling, steady, Panel("cool-down" if filling else "the end", text, drain_s, end_s)]


def _drawn(panel: Panel, rows: Sequence[Sequence[Slice]]) -> dict[str, Any]:
    """Return paths by kind, and what each row runs as [left, width, words]."""
    scale = WIDTH / (panel.end_s - panel.begin_s)
    paths: dict[str, list[str]] = {}
    slices: list[list[tuple[int, int, str, str]]] = []
    remaining = MAX_PASSES
    for idx, row in enumerate(rows):
        of_row = []
        for piece in row:
            begin = max(0.0, (piece.start_s - panel.begin_s) * scale)
            end = min(float(WIDTH), (piece.start_s + piece.seconds - panel.begin_s) * scale)
            if end - begin < 1 or remaining <= 0:
                continue
            remaining -= 1
            x, width = round(begin), max(1, round(end) - round(begin))
            drawn = max(1, width - min(14, width // 5))
            kind = KINDS.get(piece.kind, "rest") if piece.stream == "compute" else "rest"
            y = 10 * idx + 1
            paths.setdefault(kind, []).append(f"M{x} {y}h{drawn}v8h-{drawn}z")
            of_row.append((x, width, _words(piece), format_seconds(piece.seconds)))
        slices.append(of_row)
    return {
        "title": panel.title,
        "text": panel.text,
        "seconds": panel.end_s - panel.begin_s,
        "begin": format_seconds(panel.begin_s) if panel.begin_s > 0 else "0 s",
        "end": format_seconds(panel.end_s),
        "paths": {kind: "".join(parts) for kind, parts in paths.items()},
        "slices": slices,
    }


def _words(piece: Slice) -> str:
    name = NAMES.get(piece.kind, piece.kind)
    if piece.micro_batch < 0:
        return name
    layer = f", layer {piece.layer}" if piece.layer >= 0 else ""
    return f"{name} of micro-batch {piece.micro_batch}, stage {piece.stage}{layer}"
