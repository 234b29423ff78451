"""Draw the figures of a plan's report, one function each: data and layout of plotly figures; colours follow the page's theme."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...planner.timeline import timeline
from ...schema.errors import ConfigError
from ...schema.layers import Block
from ...schema.trace import NAMES, OFFLOAD_STREAMS
from ...schema.units import GIB, format_bytes, format_seconds
from .plan import TIME_TITLES

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from ...schema import OffloadSchedule, Plan
    from ...schema.trace import Slice

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
"""Okabe and Ito's palette, which colour-blind readers tell apart (jfly.uni-koeln.de/color)."""

MAX_SLICES = 12_000
"""Passes drawn; a browser keeps up with this many."""

MAX_NODES = 256
"""Nodes drawn in the rank map."""


def step_timeline(plan: Plan) -> tuple[Figure, str]:
    """Draw who runs which pass when, one row a rank of the pipeline; and say what stands below it.

    Raises:
        ConfigError: the step of the plan has no timeline.
    """
    from plotly.graph_objects import Bar, Figure

    slices = timeline(plan).slices
    shown = sorted(slices, key=lambda piece: piece.start_s)[:MAX_SLICES]
    figure = Figure()
    for colour, kind in zip(COLOURS * 2, dict.fromkeys(piece.kind for piece in shown), strict=False):
        pieces = [piece for piece in shown if piece.kind == kind]
        figure.add_trace(
            Bar(
                orientation="h",
                name=NAMES.get(kind, kind),
                y=[_row(piece) for piece in pieces],
                base=[piece.start_s for piece in pieces],
                x=[piece.seconds for piece in pieces],
                customdata=[[_pass_title(piece)] for piece in pieces],
                hovertemplate="%{y}: %{customdata[0]}<br>%{base:.4g} s, for %{x:.3g} s",
                marker={"color": colour, "line": {"width": 0.3, "color": "rgba(128,128,128,0.6)"}},
            )
        )
    figure.update_layout(
        barmode="overlay",
        xaxis={"title": "seconds", "rangeslider": {"visible": False}},
        yaxis={"autorange": "reversed"},
        height=max(260, 28 * len({_row(piece) for piece in shown}) + 140),
        dragmode="zoom",
    )
    is_cut = len(shown) < len(slices)
    return figure, f"The first {len(shown)} of {len(slices)} passes are drawn." if is_cut else ""


def _row(piece: Slice) -> str:
    """Return the row of a pass: one a rank, and one more for what works alongside it."""
    return piece.stream if piece.stream in OFFLOAD_STREAMS else f"rank {piece.rank}"


def _pass_title(piece: Slice) -> str:
    if piece.micro_batch < 0:
        return piece.kind
    layer = f", layer {piece.layer}" if piece.layer >= 0 else ""
    return f"stage {piece.stage}, micro-batch {piece.micro_batch}{layer}"


def memory_of_stages(plan: Plan) -> tuple[Figure, str]:
    """Draw the allocated peak of one device of each stage and its budget; and say what stands below it."""
    from plotly.graph_objects import Bar, Figure, Scatter

    costs, stages = plan.estimate, plan.estimate.stages
    names = [f"stage {s}" + (f" ({stage.device})" if stage.device else "") for s, stage in enumerate(stages)]
    figure = Figure()
    for colour, term in zip(COLOURS, type(costs.memory_bytes).model_fields, strict=False):
        sizes = [getattr(stage.memory_bytes, term) / GIB for stage in stages]
        if any(sizes):
            hover = "%{x}: %{y:.2f} GiB " + term
            figure.add_trace(Bar(x=names, y=sizes, name=term, marker={"color": colour}, hovertemplate=hover))
    limit = costs.budget_bytes / GIB
    figure.add_trace(
        Scatter(
            x=names,
            y=[limit] * len(names),
            mode="lines+markers",
            name="budget",
            line={"color": "#D55E00", "dash": "dash"},
        )
    )
    figure.update_layout(barmode="stack", yaxis={"title": "GiB"}, height=380)
    ratio = (costs.required_bytes or costs.peak_reserved_bytes) / max(costs.peak_allocated_bytes, 1)
    return figure, (
        f"Allocated peaks; what a device is asked for with the allocator's slack and the margin is {ratio:.2f} times that."
    )


def step_waterfall(plan: Plan) -> Figure:
    """Draw what each cause adds, from the time that only the FLOPs would take to the step."""
    from plotly.graph_objects import Figure, Waterfall

    terms, total = plan.estimate.breakdown_s, plan.estimate.step_time_s
    ideal = plan.estimate.mfu * total
    steps = [("ideal compute", ideal), ("efficiency", terms.compute - ideal)]
    others = ("recompute", "tp", "cp", "ep", "pp", "dp", "bubble", "optimizer", "offload")
    steps += [(TIME_TITLES.get(name, name), getattr(terms, name)) for name in others if getattr(terms, name) > 0]
    figure = Figure(
        Waterfall(
            x=[name for name, _ in steps] + ["step"],
            y=[seconds for _, seconds in steps] + [0],
            measure=["absolute"] + ["relative"] * (len(steps) - 1) + ["total"],
            text=[f"{100 * seconds / total:.1f} %" for _, seconds in steps] + [f"{total:.4g} s"],
            textposition="outside",
            cliponaxis=False,
            increasing={"marker": {"color": COLOURS[1]}},
            decreasing={"marker": {"color": COLOURS[2]}},
            totals={"marker": {"color": COLOURS[0]}},
            hovertemplate="%{x}: %{delta:.4g} s<extra></extra>",
        )
    )
    figure.update_layout(yaxis={"title": "seconds"}, height=400, showlegend=False)
    return figure


def time_and_memory(plan: Plan) -> Figure:
    """Draw the plan, its runner-ups and, where it was requested, the front of layouts that no other beats in both."""
    from plotly.graph_objects import Figure, Scatter

    figure = Figure()
    if plan.pareto:
        figure.add_trace(
            _points(
                Scatter,
                "front",
                [(p.peak_reserved_bytes, p.step_time_s, str(p.layout)) for p in plan.pareto],
                0,
                "lines+markers",
            )
        )
    others = [(a.peak_reserved_bytes, a.step_time_s, f"{a.layout}<br>{a.reason}") for a in plan.alternatives]
    if others:
        figure.add_trace(_points(Scatter, "runner-ups", others, 1, "markers"))
    chosen = [(plan.estimate.peak_reserved_bytes, plan.estimate.step_time_s, str(plan.layout))]
    figure.add_trace(_points(Scatter, "plan", chosen, 5, "markers", size=14))
    figure.add_vline(
        x=plan.estimate.budget_bytes / GIB, line={"dash": "dash", "color": "#D55E00"}, annotation_text="budget"
    )
    figure.update_layout(
        xaxis={"title": "reserved peak of a device, GiB"}, yaxis={"title": "step, seconds"}, height=380
    )
    return figure


def _points(make: Any, name: str, points: list[tuple[int, float, str]], colour: int, mode: str, size: int = 9) -> Any:
    return make(
        x=[memory / GIB for memory, _, _ in points],
        y=[seconds for _, seconds, _ in points],
        text=[text for _, _, text in points],
        name=name,
        mode=mode,
        marker={"color": COLOURS[colour], "size": size},
        hovertemplate="%{text}<br>%{y:.4g} s, %{x:.1f} GiB<extra></extra>",
    )


def rank_map(plan: Plan) -> tuple[Figure, str]:
    """Draw which stage each device runs, a row for each node; and say what stands below it."""
    from plotly.graph_objects import Figure, Heatmap

    layout, sizes = plan.layout, plan.cluster.node_sizes[:MAX_NODES]
    rank_of_device = np.argsort(np.array(plan.rank_map))
    stages = np.full((len(sizes), max(sizes)), np.nan)
    texts = np.full(stages.shape, "", dtype=object)
    first = 0
    for node, size in enumerate(sizes):
        for column, rank in enumerate(rank_of_device[first : first + size].tolist()):
            stages[node, column] = rank // layout.stage_ranks
            texts[node, column] = _coordinates(rank, plan)
        first += size
    figure = Figure(
        Heatmap(
            z=stages,
            x=[f"device {i}" for i in range(stages.shape[1])],
            y=[f"node {i}" for i in range(len(sizes))],
            text=texts,
            hovertemplate="%{y}, %{x}<br>%{text}<extra></extra>",
            colorscale="Viridis",
            colorbar={"title": "stage", "tickformat": "d", "nticks": 8},
            xgap=2,
            ygap=2,
        )
    )
    figure.update_layout(yaxis={"autorange": "reversed"}, height=max(240, min(22 * len(sizes), 1400) + 120))
    num_nodes = plan.cluster.num_nodes
    return figure, f"The first {len(sizes)} of {num_nodes} nodes are drawn." if len(sizes) < num_nodes else ""


def _coordinates(rank: int, plan: Plan) -> str:
    """Return the position of a rank on each axis that is used, tp fastest."""
    words, quotient = [f"rank {rank}"], rank
    for axis in ("tp", "cp", "dp_shard", "dp_replicate", "pp"):
        degree = getattr(plan.layout, axis)
        if degree > 1:
            words.append(f"{axis} {quotient % degree}")
        quotient //= degree
    return ", ".join(words)


def expert_copies(plan: Plan) -> Figure:
    """Draw the copies of each expert of each layer with experts, where experts were placed by their loads."""
    from plotly.graph_objects import Figure, Heatmap

    copies = [np.bincount(slots.experts) for slots in plan.expert_slots]
    figure = Figure(
        Heatmap(
            z=np.stack(copies),
            colorscale="Viridis",
            colorbar={"title": "copies"},
            hovertemplate="layer %{y}, expert %{x}: %{z} copies<extra></extra>",
        )
    )
    figure.update_layout(xaxis={"title": "expert"}, yaxis={"title": "layer with experts"}, height=360)
    return figure


def figures(plan: Plan) -> list[tuple[str, Figure | None, str]]:
    """Return (title, figure, text below) of everything that the plan has."""
    drawn: list[tuple[str, Figure | None, str]] = [("Where the step goes", step_waterfall(plan), "")]
    try:
        drawn.append(("The step, pass by pass", *step_timeline(plan)))
    except ConfigError as error:
        drawn.append(("The step, pass by pass", None, error.message))
    drawn.append(("Memory of each stage", *memory_of_stages(plan)))
    if plan.offload is not None:
        drawn.append(("What leaves the device, layer by layer", *offload_of_layers(plan, plan.offload)))
    drawn.append(("Time and memory", time_and_memory(plan), ""))
    drawn.append(("Which device runs which rank", *rank_map(plan)))
    if plan.expert_slots:
        drawn.append(("Copies of experts", expert_copies(plan), ""))
    return drawn


STAYS, RECOMPUTED, MOVES, STREAMED, AWAY = range(5)

OFFLOAD_COLOURS = ("#999999", "#56B4E9", "#E69F00", "#009E73", "#0072B2")
"""Okabe and Ito's palette: on the device, made again, to the host and back, streamed, on the host."""

OFFLOAD_ROWS = ("activations", "optimizer states", "parameters")


def offload_of_layers(plan: Plan, schedule: OffloadSchedule) -> tuple[Figure, str]:
    """Draw a column a layer; and say what moves, what it costs and what more of a resource would save."""
    from plotly.graph_objects import Figure, Heatmap

    layers = range(plan.model.num_layers)
    cells = [[_cell(plan, schedule, row, idx) for idx in layers] for row in OFFLOAD_ROWS]
    last = len(OFFLOAD_COLOURS) - 1
    scale = [[(k + end) / (last + 1), colour] for k, colour in enumerate(OFFLOAD_COLOURS) for end in (0, 1)]
    figure = Figure(
        Heatmap(
            z=[[colour for colour, _ in row] for row in cells],
            text=[[text for _, text in row] for row in cells],
            x=list(layers),
            y=list(OFFLOAD_ROWS),
            zmin=-0.5,
            zmax=last + 0.5,
            colorscale=scale,
            showscale=False,
            hovertemplate="layer %{x}, %{y}: %{text}<extra></extra>",
            xgap=1,
            ygap=2,
        )
    )
    figure.update_layout(xaxis={"title": "layer"}, yaxis={"autorange": "reversed"}, height=260)
    return figure, _offload_text(schedule)


def _cell(plan: Plan, schedule: OffloadSchedule, row: str, idx: int) -> tuple[int, str]:
    if row == "activations":
        return _activations(plan, idx)
    if idx in schedule.streamed_parameter_layers:
        return AWAY, "on the host, which updates them"
    if row == "parameters":
        return STAYS, "on the device"
    on_storage = f", in {schedule.storage_path}" if idx in schedule.storage_optimizer_layers else ""
    if idx in schedule.host_optimizer_layers:
        return AWAY, f"on the host, which updates them{on_storage}"
    if idx in schedule.streamed_optimizer_layers:
        return STREAMED, f"on the host, streamed to the device for the update{on_storage}"
    return STAYS, "on the device"


def _activations(plan: Plan, idx: int) -> tuple[int, str]:
    stage = plan.stages[0]
    if not isinstance(list(plan.model.iter_layers())[idx], Block):
        return STAYS, "on the device"
    offload, recompute = stage.offload_of(idx), stage.recompute_of(idx)
    if offload != "none":
        return MOVES, "to the host and back" if offload == "activations" else "made again from an input on the host"
    return (STAYS, "on the device") if recompute == "none" else (RECOMPUTED, f"made again ({recompute} recompute)")


def _offload_text(schedule: OffloadSchedule) -> str:
    values = schedule.worth
    link_s = values.to_host_s_per_gb_per_s + values.to_device_s_per_gb_per_s
    drives = f", {format_bytes(schedule.storage_bytes)} of its drives" if schedule.storage_bytes else ""
    return (
        f"Grey stays on the device, light blue is made again, orange and green travel, dark blue lives on the host. "
        f"{format_bytes(schedule.host_bytes)} of each node's host memory{drives}; "
        f"{format_bytes(schedule.to_host_bytes)} down and {format_bytes(schedule.to_device_bytes)} up a step and rank, "
        f"{schedule.prefetch_layers} blocks ahead. No schedule of this layout takes less than "
        f"{format_seconds(schedule.bound_s)} (gap {100 * schedule.gap:.2g} %). At the margin a step is shorter by "
        f"{format_seconds(values.device_s_per_gib)} with 1 GiB more of each device, "
        f"{format_seconds(values.host_s_per_gib)} with 1 GiB more of the host for each rank, {format_seconds(link_s)} with 1 GB/s "
        f"more both ways."
    )
