"""Draw the figures of a plan's report as plotly.js takes them; their colours follow the page's theme.

One function each: it returns (figure, text below it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...planner.timeline import timeline
from ...schema.errors import ConfigError
from ...schema.trace import NAMES, OFFLOAD_STREAMS
from ...schema.units import GIB, format_bytes, format_seconds
from .plan import TIME_TITLES

if TYPE_CHECKING:
    from ...schema import OffloadSchedule, TrainingPlan
    from ...schema.trace import Slice

Figure = dict[str, Any]
"""``data``: a list of traces; ``layout``."""

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
"""Okabe and Ito's palette, which colour-blind readers tell apart (jfly.uni-koeln.de/color)."""

BUDGET_LINE = {"color": "#D55E00", "dash": "dash"}

MAX_SLICES = 12_000
"""Passes drawn; a browser keeps up with this many."""

MAX_NODES = 256
"""Nodes drawn in the rank map."""


def figures(plan: TrainingPlan) -> list[tuple[str, Figure | None, str]]:
    """Return (title, figure, text below) of everything that the plan has."""
    try:
        passes: tuple[Figure | None, str] = step_timeline(plan)
    except ConfigError as error:
        passes = None, error.message
    drawn = [("Where the step goes", *step_waterfall(plan)), ("The step, pass by pass", *passes)]
    drawn.append(("Memory of each stage", *memory_of_stages(plan)))
    if plan.offload is not None:
        drawn.append(("What leaves the device, layer by layer", *offload_of_layers(plan, plan.offload)))
    drawn.append(("Time and memory", *time_and_memory(plan)))
    drawn.append(("Which device runs which rank", *rank_map(plan)))
    if plan.expert_slots:
        drawn.append(("Copies of experts", *expert_copies(plan)))
    return drawn


def step_waterfall(plan: TrainingPlan) -> tuple[Figure, str]:
    """Draw what each cause adds, from the time that only the FLOPs would take to the step."""
    terms, total = plan.estimate.breakdown_s, plan.estimate.step_time_s
    ideal = plan.estimate.mfu * total
    steps = [("ideal compute", ideal), ("efficiency", terms.compute - ideal)]
    others = ("recompute", "tp", "cp", "ep", "pp", "dp", "bubble", "optimizer", "offload")
    steps += [(TIME_TITLES[name], getattr(terms, name)) for name in others if getattr(terms, name) > 0]
    colours = {"increasing": COLOURS[1], "decreasing": COLOURS[2], "totals": COLOURS[0]}
    trace = {
        "type": "waterfall",
        "x": [*(name for name, _ in steps), "step"],
        "y": [*(seconds for _, seconds in steps), 0],
        "measure": ["absolute", *["relative"] * (len(steps) - 1), "total"],
        "text": [*(f"{100 * seconds / total:.1f} %" for _, seconds in steps), f"{total:.4g} s"],
        "textposition": "outside",
        "cliponaxis": False,
        "hovertemplate": "%{x}: %{delta:.4g} s<extra></extra>",
        **{name: {"marker": {"color": colour}} for name, colour in colours.items()},
    }
    return _figure(trace, yaxis={"title": {"text": "seconds"}}, height=400, showlegend=False), ""


def step_timeline(plan: TrainingPlan) -> tuple[Figure, str]:
    """Draw who runs which pass when: a row a rank of the pipeline, and one for each stream that works alongside it.

    Raises:
        ConfigError: the step of the plan has no timeline.
    """
    slices = timeline(plan).slices
    shown = sorted(slices, key=lambda piece: piece.start_s)[:MAX_SLICES]
    rows = [piece.stream if piece.stream in OFFLOAD_STREAMS else f"rank {piece.rank}" for piece in shown]
    traces = []
    for colour, kind in zip(COLOURS * 2, dict.fromkeys(piece.kind for piece in shown), strict=False):
        pieces = [(row, piece) for row, piece in zip(rows, shown, strict=True) if piece.kind == kind]
        trace = {
            "type": "bar",
            "orientation": "h",
            "name": NAMES.get(kind, kind),
            "y": [row for row, _ in pieces],
            "base": [piece.start_s for _, piece in pieces],
            "x": [piece.seconds for _, piece in pieces],
            "customdata": [[_pass_title(piece)] for _, piece in pieces],
            "hovertemplate": "%{y}: %{customdata[0]}<br>%{base:.4g} s, for %{x:.3g} s",
            "marker": {"color": colour, "line": {"width": 0.3, "color": "rgba(128,128,128,0.6)"}},
        }
        traces.append(trace)
    axes = {"xaxis": {"title": {"text": "seconds"}}, "yaxis": {"autorange": "reversed"}}
    height = max(260, 28 * len(set(rows)) + 140)
    text = f"The first {len(shown)} of {len(slices)} passes are drawn." if len(shown) < len(slices) else ""
    return _figure(*traces, barmode="overlay", **axes, height=height, dragmode="zoom"), text


def _pass_title(piece: Slice) -> str:
    if piece.micro_batch < 0:
        return piece.kind
    layer = f", layer {piece.layer}" if piece.layer >= 0 else ""
    return f"stage {piece.stage}, micro-batch {piece.micro_batch}{layer}"


def memory_of_stages(plan: TrainingPlan) -> tuple[Figure, str]:
    """Draw the allocated peak of one device of each stage, and its budget."""
    costs, stages = plan.estimate, plan.estimate.stages
    names = [f"stage {s}" + (f" ({stage.device})" if stage.device else "") for s, stage in enumerate(stages)]
    traces: list[dict[str, Any]] = []
    for colour, term in zip(COLOURS, type(costs.memory_bytes).model_fields, strict=False):
        sizes = [getattr(stage.memory_bytes, term) / GIB for stage in stages]
        if any(sizes):
            hover = "%{x}: %{y:.2f} GiB " + term
            bar = {"type": "bar", "x": names, "y": sizes, "name": term, "hovertemplate": hover}
            traces.append(bar | {"marker": {"color": colour}})
    budget = {"type": "scatter", "mode": "lines+markers", "name": "budget", "line": BUDGET_LINE}
    traces.append(budget | {"x": names, "y": [costs.budget_bytes / GIB] * len(names)})
    ratio = (costs.required_bytes or costs.peak_reserved_bytes) / max(costs.peak_allocated_bytes, 1)
    return _figure(*traces, barmode="stack", yaxis={"title": {"text": "GiB"}}, height=380), (
        f"Allocated peaks; what a device is asked for with the allocator's slack and the margin is {ratio:.2f} times that."
    )


def time_and_memory(plan: TrainingPlan) -> tuple[Figure, str]:
    """Draw the plan, its runner-ups and, where it was requested, the front of layouts that no other beats in both."""
    costs = plan.estimate
    front = [(point.peak_reserved_bytes, point.step_time_s, str(point.layout)) for point in plan.pareto]
    others = [(o.peak_reserved_bytes, o.step_time_s, f"{o.layout}<br>{o.reason}") for o in plan.alternatives]
    chosen = [(costs.peak_reserved_bytes, costs.step_time_s, str(plan.layout))]
    limit = costs.budget_bytes / GIB
    line = {"type": "line", "x0": limit, "x1": limit, "y0": 0, "y1": 1, "yref": "paper", "line": BUDGET_LINE}
    note = {
        "text": "budget",
        "x": limit,
        "y": 1,
        "yref": "paper",
        "xanchor": "left",
        "yanchor": "top",
        "showarrow": False,
    }
    return _figure(
        *(_points("front", front, COLOURS[0], mode="lines+markers") if front else ()),
        *(_points("runner-ups", others, COLOURS[1]) if others else ()),
        *_points("plan", chosen, COLOURS[5], size=14),
        shapes=[line],
        annotations=[note],
        xaxis={"title": {"text": "reserved peak of a device, GiB"}},
        yaxis={"title": {"text": "step, seconds"}},
        height=380,
    ), ""


def _points(
    name: str, points: Sequence[tuple[int, float, str]], colour: str, *, mode: str = "markers", size: int = 9
) -> tuple[dict[str, Any]]:
    trace = {
        "type": "scatter",
        "x": [memory / GIB for memory, _, _ in points],
        "y": [seconds for _, seconds, _ in points],
        "text": [text for _, _, text in points],
        "name": name,
        "mode": mode,
        "marker": {"color": colour, "size": size},
        "hovertemplate": "%{text}<br>%{y:.4g} s, %{x:.1f} GiB<extra></extra>",
    }
    return (trace,)


def rank_map(plan: TrainingPlan) -> tuple[Figure, str]:
    """Draw which stage each device runs, a row for each node."""
    sizes, num_nodes = plan.cluster.node_sizes[:MAX_NODES], plan.cluster.num_nodes
    ranks = iter(np.argsort(np.array(plan.rank_map)).tolist())
    rows = [[next(ranks) for _ in range(size)] for size in sizes]
    stages = [[rank // plan.layout.stage_ranks for rank in row] for row in rows]
    trace = _heat_map(
        stages,
        x=[f"device {i}" for i in range(max(sizes))],
        y=[f"node {i}" for i in range(len(sizes))],
        text=[[_coordinates(rank, plan) for rank in row] for row in rows],
        hovertemplate="%{y}, %{x}<br>%{text}<extra></extra>",
        colorbar={"title": {"text": "stage"}, "tickformat": "d", "nticks": 8},
        xgap=2,
        ygap=2,
    )
    text = f"The first {len(sizes)} of {num_nodes} nodes are drawn." if len(sizes) < num_nodes else ""
    return _figure(trace, yaxis={"autorange": "reversed"}, height=max(240, min(22 * len(sizes), 1400) + 120)), text


def _coordinates(rank: int, plan: TrainingPlan) -> str:
    """Return the position of a rank on each axis that is used, tp fastest."""
    words, quotient = [f"rank {rank}"], rank
    for axis in ("tp", "cp", "dp_shard", "dp_replicate", "pp"):
        degree = getattr(plan.layout, axis)
        if degree > 1:
            words.append(f"{axis} {quotient % degree}")
        quotient //= degree
    return ", ".join(words)


def expert_copies(plan: TrainingPlan) -> tuple[Figure, str]:
    """Draw the copies of each expert of each layer with experts, where experts were placed by their loads."""
    copies = [np.bincount(slots.experts).tolist() for slots in plan.expert_slots]
    hover = "layer %{y}, expert %{x}: %{z} copies<extra></extra>"
    trace = _heat_map(copies, colorbar={"title": {"text": "copies"}}, hovertemplate=hover)
    return _figure(
        trace, xaxis={"title": {"text": "expert"}}, yaxis={"title": {"text": "layer with experts"}}, height=360
    ), ""


def _heat_map(values: Sequence[Sequence[int]], **fields: Any) -> dict[str, Any]:
    return {"type": "heatmap", "z": values, "colorscale": "Viridis", **fields}


def _figure(*traces: dict[str, Any], **layout: Any) -> Figure:
    return {"data": list(traces), "layout": layout}


STAYS, RECOMPUTED, MOVES, STREAMED, AWAY = range(5)
OFFLOAD_COLOURS = ("#999999", "#56B4E9", "#E69F00", "#009E73", "#0072B2")
"""On the device, made again, to the host and back, streamed, on the host."""

OFFLOAD_ROWS = ("activations", "optimizer states", "parameters")


def offload_of_layers(plan: TrainingPlan, schedule: OffloadSchedule) -> tuple[Figure, str]:
    """Draw a column a layer; and say what moves, what it costs and what more of a resource would save."""
    layers = list(range(plan.model.num_layers))
    cells = [
        [_activations(plan, idx) for idx in layers],
        [_states(schedule, idx) for idx in layers],
        [_parameters(schedule, idx) for idx in layers],
    ]
    num_colours = len(OFFLOAD_COLOURS)
    trace = _heat_map(
        [[colour for colour, _ in row] for row in cells],
        text=[[text for _, text in row] for row in cells],
        x=layers,
        y=OFFLOAD_ROWS,
        zmin=-0.5,
        zmax=num_colours - 0.5,
        colorscale=[[(k + end) / num_colours, colour] for k, colour in enumerate(OFFLOAD_COLOURS) for end in (0, 1)],
        showscale=False,
        hovertemplate="layer %{x}, %{y}: %{text}<extra></extra>",
        xgap=1,
        ygap=2,
    )
    figure = _figure(trace, xaxis={"title": {"text": "layer"}}, yaxis={"autorange": "reversed"}, height=260)
    values = schedule.worth
    link_s = values.to_host_s_per_gb_per_s + values.to_device_s_per_gb_per_s
    drives = f", {format_bytes(schedule.storage_bytes)} of its drives" if schedule.storage_bytes else ""
    return figure, (
        f"Grey stays on the device, light blue is made again, orange and green travel, dark blue lives on the host. "
        f"{format_bytes(schedule.host_bytes)} of each node's host memory{drives}; "
        f"{format_bytes(schedule.to_host_bytes)} down and {format_bytes(schedule.to_device_bytes)} up a step and rank, "
        f"{schedule.prefetch_layers} blocks ahead. No schedule of this layout takes less than "
        f"{format_seconds(schedule.bound_s)} (gap {100 * schedule.gap:.2g} %). At the margin a step is shorter by "
        f"{format_seconds(values.device_s_per_gib)} with 1 GiB more of each device, "
        f"{format_seconds(values.host_s_per_gib)} with 1 GiB more of the host for each rank, {format_seconds(link_s)} with 1 GB/s "
        f"more both ways."
    )


def _parameters(schedule: OffloadSchedule, idx: int) -> tuple[int, str]:
    if idx in schedule.streamed_parameter_layers:
        return AWAY, "on the host, which updates them"
    return STAYS, "on the device"


def _states(schedule: OffloadSchedule, idx: int) -> tuple[int, str]:
    drives = f", in {schedule.storage_path}" if idx in schedule.storage_optimizer_layers else ""
    if idx not in schedule.streamed_parameter_layers:
        if idx in schedule.host_optimizer_layers:
            return AWAY, f"on the host, which updates them{drives}"
        if idx in schedule.streamed_optimizer_layers:
            return STREAMED, f"on the host, streamed to the device for the update{drives}"
    return _parameters(schedule, idx)


def _activations(plan: TrainingPlan, idx: int) -> tuple[int, str]:
    stage = plan.stages[0]
    if not list(plan.model.iter_layers())[idx].is_block:
        return STAYS, "on the device"
    offload, recompute = stage.offload_of(idx), stage.recompute_of(idx)
    if offload != "none":
        return MOVES, "to the host and back" if offload == "activations" else "made again from an input on the host"
    return (STAYS, "on the device") if recompute == "none" else (RECOMPUTED, f"made again ({recompute} recompute)")
