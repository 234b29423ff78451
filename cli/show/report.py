"""One self-contained page about a plan: figures as plotly.js takes them, and every assumption with its source. No network needed.

A figure is made by one function, which returns it with the text below it; colours of the frame follow the page's theme.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer

from ...planner.timeline import timeline
from ...schema.base import write_atomically
from ...schema.errors import ConfigError
from ...schema.trace import NAMES, OFFLOAD_STREAMS, chrome_trace
from ...schema.units import GIB, format_bytes, format_count, format_seconds
from ..terminal import cluster_title
from .plan import TIME_TITLES

if TYPE_CHECKING:
    from ...schema import OffloadSchedule, TrainingPlan
    from ...schema.trace import Slice

TEMPLATE = Path(__file__).with_name("report.html.j2")
"""The page; its data are those of `page_data`."""

Figure = dict[str, Any]
"""``data``: a list of traces; ``layout``."""

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
"""Okabe and Ito's palette, which colour-blind readers tell apart (jfly.uni-koeln.de/color)."""

BUDGET_LINE = {"color": "#D55E00", "dash": "dash"}
MAX_SLICES = 12_000
"""Passes drawn; a browser keeps up with this many."""

MAX_NODES = 256
"""Nodes drawn in the rank map."""


def write_report(plan: TrainingPlan, html: Path | None, trace: Path | None) -> None:
    """Write the page and the trace that are asked for, each file in full or not at all.

    Raises:
        ConfigError: a file cannot be written, plotly is missing, or the step of the plan has no timeline.
    """
    if html is not None:
        write_atomically(html, page(plan))
        typer.echo(f"wrote {html}", err=True)
    if trace is not None:
        write_atomically(trace, json.dumps(chrome_trace(plan, timeline(plan))))
        typer.echo(f"wrote {trace}; open it in ui.perfetto.dev", err=True)


def page(plan: TrainingPlan) -> str:
    """Return the page as HTML.

    Raises:
        ConfigError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise ConfigError(
            "the report is drawn by plotly, which is not installed", help='pip install "meshwright[report]"'
        ) from None
    from jinja2 import Environment

    template = Environment(autoescape=True, keep_trailing_newline=True).from_string(TEMPLATE.read_text("utf-8"))
    return template.render(plotly=get_plotlyjs(), **page_data(plan))


def page_data(plan: TrainingPlan) -> dict[str, Any]:
    """Return what the template is filled with."""
    named = {f"figure-{number}": drawn for number, drawn in enumerate(figures(plan))}
    shown = {name: figure for name, (_, figure, _) in named.items() if figure is not None}
    return {
        "title": f"{plan.model.name} on {cluster_title(plan.cluster)}",
        "layout": str(plan.layout),
        "facts": list(_facts(plan)),
        "sections": [
            {"title": title, "id": name, "figure": name in shown, "text": text}
            for name, (title, _, text) in named.items()
        ],
        "assumptions": list(_assumptions(plan)),
        "figures": json.dumps(shown).replace("</", "<\\/"),  # a closing tag inside the data would end the script
    }


def _facts(plan: TrainingPlan) -> Iterator[tuple[str, str, str]]:
    """Yield the cards: what it is, its value, and what else there is to say."""
    costs, work = plan.estimate, plan.workload
    interval = costs.step_time_interval_s
    between = f"{format_seconds(interval.low)} to {format_seconds(interval.high)}"
    yield "step time", format_seconds(costs.step_time_s), between
    yield "throughput", f"{format_count(costs.tokens_per_s)} tokens/s", f"MFU {100 * costs.mfu:.1f} %"
    yield "reserved peak", format_bytes(costs.peak_reserved_bytes), f"budget {format_bytes(costs.budget_bytes)}"
    yield "model", format_count(plan.model.num_params), f"{plan.model.num_blocks} blocks"
    yield "batch", f"{work.global_batch_size} x {work.seq_len}", f"{plan.num_microbatches} micro-batches"
    if plan.offload is not None:
        down, up = format_bytes(plan.offload.to_host_bytes), format_bytes(plan.offload.to_device_bytes)
        yield "host memory a node", format_bytes(plan.offload.host_bytes), f"{down} down, {up} up a step"
    if (search := plan.search) is not None:
        effort = f"{search.status}, {search.evaluated} layouts costed, {search.pruned} pruned"
        yield "search", f"gap {100 * search.gap:.2f} %", effort


def _assumptions(plan: TrainingPlan) -> Iterator[tuple[str, str, str]]:
    """Yield what the figures rest on, and where it is from."""
    work, made = plan.workload, plan.provenance
    yield "model", plan.model.architecture, plan.model.source or "given by the user"
    for group in plan.cluster.groups:
        device = group.device
        peaks = device.peak_flops_per_s.model_dump().items()
        rates = ", ".join(f"{name} {value / 1e12:.4g} TFLOP/s" for name, value in peaks if value)
        memory = f"{format_bytes(device.memory_bytes)} at {device.memory_bandwidth_bytes_per_s / 1e9:.4g} GB/s"
        yield device.name, f"{rates}; {memory}", device.source or "given by the user"
    for level in plan.cluster.levels:
        link = level.link
        rate = f"{link.bandwidth_bytes_per_s / 1e9:.4g} GB/s, {1e6 * link.latency_s:.3g} us"
        yield link.name, f"{rate}, {level.domain_size} devices", link.source or "given by the user"
    yield "workload", f"{work.precision}, {work.optimizer}, for {work.engine}", "given by the user"
    yield from (("note", note, "") for note in plan.notes)
    yield "made by", f"Meshwright {made.meshwright}, {made.created}", f"inputs {made.inputs_sha256[:12]}"


def figures(plan: TrainingPlan) -> Iterator[tuple[str, Figure | None, str]]:
    """Yield (title, figure, text below) of everything that the plan has."""
    yield "Where the step goes", step_waterfall(plan), ""
    try:
        yield "The step, pass by pass", *step_timeline(plan)
    except ConfigError as error:
        yield "The step, pass by pass", None, error.message
    yield "Memory of each stage", *memory_of_stages(plan)
    if plan.offload is not None:
        yield "What leaves the device, layer by layer", *offload_of_layers(plan, plan.offload)
    yield "Time and memory", time_and_memory(plan), ""
    yield "Which device runs which rank", *rank_map(plan)
    if plan.expert_slots:
        yield "Copies of experts", expert_copies(plan), ""


def step_waterfall(plan: TrainingPlan) -> Figure:
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
    return _figure(trace, yaxis=_axis("seconds"), height=400, showlegend=False)


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
    axes = {"xaxis": _axis("seconds"), "yaxis": {"autorange": "reversed"}}
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
    return _figure(*traces, barmode="stack", yaxis=_axis("GiB"), height=380), (
        f"Allocated peaks; what a device is asked for with the allocator's slack and the margin is {ratio:.2f} times that."
    )


def time_and_memory(plan: TrainingPlan) -> Figure:
    """Draw the plan, its runner-ups and, where it was requested, the front of layouts that no other beats in both."""
    costs = plan.estimate
    margin = (costs.required_bytes or costs.peak_reserved_bytes) / costs.peak_reserved_bytes
    front = [(point.required_bytes / margin, point.step_time_s, str(point.layout)) for point in plan.pareto]
    others = [(o.peak_reserved_bytes, o.step_time_s, f"{o.layout}<br>{o.reason}") for o in plan.alternatives]
    chosen = [(costs.peak_reserved_bytes, costs.step_time_s, str(plan.layout))]
    traces = [
        {
            "type": "scatter",
            "x": [memory / GIB for memory, _, _ in points],
            "y": [seconds for _, seconds, _ in points],
            "text": [text for _, _, text in points],
            "name": name,
            "mode": mode,
            "marker": {"color": colour, "size": size},
            "hovertemplate": "%{text}<br>%{y:.4g} s, %{x:.1f} GiB<extra></extra>",
        }
        for name, points, colour, mode, size in (
            ("front", front, COLOURS[0], "lines+markers", 9),
            ("runner-ups", others, COLOURS[1], "markers", 9),
            ("plan", chosen, COLOURS[5], "markers", 14),
        )
        if points
    ]
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
    axes = {"xaxis": _axis("reserved peak of a device, GiB"), "yaxis": _axis("step, seconds")}
    return _figure(*traces, shapes=[line], annotations=[note], **axes, height=380)


def rank_map(plan: TrainingPlan) -> tuple[Figure, str]:
    """Draw which stage each device runs, a row for each node."""
    sizes, num_nodes = plan.cluster.node_sizes[:MAX_NODES], plan.cluster.num_nodes
    ranks = iter(np.argsort(np.array(plan.rank_map)).tolist())
    rows = [[next(ranks) for _ in range(size)] for size in sizes]
    trace = _heat_map(
        [[rank // plan.layout.stage_ranks for rank in row] for row in rows],
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


def expert_copies(plan: TrainingPlan) -> Figure:
    """Draw the copies of each expert of each layer with experts, where experts were placed by their loads."""
    copies = [np.bincount(slots.experts).tolist() for slots in plan.expert_slots]
    hover = "layer %{y}, expert %{x}: %{z} copies<extra></extra>"
    trace = _heat_map(copies, colorbar={"title": {"text": "copies"}}, hovertemplate=hover)
    return _figure(trace, xaxis=_axis("expert"), yaxis=_axis("layer with experts"), height=360)


def _heat_map(values: Sequence[Sequence[int]], **fields: Any) -> dict[str, Any]:
    return {"type": "heatmap", "z": values, "colorscale": "Viridis", **fields}


def _axis(title: str) -> dict[str, Any]:
    return {"title": {"text": title}}


def _figure(*traces: dict[str, Any], **layout: Any) -> Figure:
    return {"data": list(traces), "layout": layout}


STAYS, RECOMPUTED, MOVES, STREAMED, AWAY = range(5)
OFFLOAD_COLOURS = ("#999999", "#56B4E9", "#E69F00", "#009E73", "#0072B2")
"""On the device, made again, to the host and back, streamed, on the host."""


def offload_of_layers(plan: TrainingPlan, schedule: OffloadSchedule) -> tuple[Figure, str]:
    """Draw a column a layer; and say what moves, what it costs and what more of a resource would save."""
    layers, num_colours = list(range(plan.model.num_layers)), len(OFFLOAD_COLOURS)
    rows = list(zip(*(_positions(plan, schedule, idx) for idx in layers), strict=True))
    trace = _heat_map(
        [[colour for colour, _ in row] for row in rows],
        text=[[text for _, text in row] for row in rows],
        x=layers,
        y=["activations", "optimizer states", "parameters"],
        zmin=-0.5,
        zmax=num_colours - 0.5,
        colorscale=[[(k + end) / num_colours, colour] for k, colour in enumerate(OFFLOAD_COLOURS) for end in (0, 1)],
        showscale=False,
        hovertemplate="layer %{x}, %{y}: %{text}<extra></extra>",
        xgap=1,
        ygap=2,
    )
    values = schedule.worth
    link_s = values.to_host_s_per_gb_per_s + values.to_device_s_per_gb_per_s
    drives = f", {format_bytes(schedule.storage_bytes)} of its drives" if schedule.storage_bytes else ""
    return _figure(trace, xaxis=_axis("layer"), yaxis={"autorange": "reversed"}, height=260), (
        f"Grey stays on the device, light blue is made again, orange and green travel, dark blue lives on the host. "
        f"{format_bytes(schedule.host_bytes)} of each node's host memory{drives}; "
        f"{format_bytes(schedule.to_host_bytes)} down and {format_bytes(schedule.to_device_bytes)} up a step and rank, "
        f"{schedule.prefetch_layers} blocks ahead. No schedule of this layout takes less than "
        f"{format_seconds(schedule.bound_s)} (gap {100 * schedule.gap:.2g} %). At the margin a step is shorter by "
        f"{format_seconds(values.device_s_per_gib)} with 1 GiB more of each device, "
        f"{format_seconds(values.host_s_per_gib)} with 1 GiB more of the host for each rank, {format_seconds(link_s)} with 1 GB/s "
        f"more both ways."
    )


Cell = tuple[int, str]
"""Colour, and what is there."""


def _positions(plan: TrainingPlan, schedule: OffloadSchedule, idx: int) -> tuple[Cell, Cell, Cell]:
    """Return where the activations, optimizer states and parameters of a layer are."""
    activations = states = parameters = STAYS, "on the device"
    stage, drives = plan.stages[0], f", in {schedule.storage_path}" if idx in schedule.storage_optimizer_layers else ""
    if tuple(plan.model.iter_layers())[idx].is_block:
        if stage.offload_of(idx) == "activations":
            activations = MOVES, "to the host and back"
        elif stage.offload_of(idx) != "none":
            activations = MOVES, "made again from an input on the host"
        elif stage.recompute_of(idx) != "none":
            activations = RECOMPUTED, f"made again ({stage.recompute_of(idx)} recompute)"
    if idx in schedule.streamed_parameter_layers:
        states = parameters = AWAY, "on the host, which updates them"
    elif idx in schedule.host_optimizer_layers:
        states = AWAY, f"on the host, which updates them{drives}"
    elif idx in schedule.streamed_optimizer_layers:
        states = STREAMED, f"on the host, streamed to the device for the update{drives}"
    return activations, states, parameters
