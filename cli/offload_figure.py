"""The figure of an offload schedule in a plan's report: what each layer does with its activations, states and parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..schema.model import Block
from ..schema.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from ..schema import OffloadSchedule, Plan

STAYS, RECOMPUTED, MOVES, STREAMED, AWAY = range(5)
COLOURS = ("#999999", "#56B4E9", "#E69F00", "#009E73", "#0072B2")
"""Okabe and Ito's palette: on the device, made again, to the host and back, streamed, on the host."""

ROWS = ("activations", "optimizer states", "parameters")


def offload_of_layers(plan: Plan, schedule: OffloadSchedule) -> tuple[Figure, str]:
    """A column a layer; and what moves, what it costs and what more of a resource is worth, to say below it."""
    from plotly.graph_objects import Figure, Heatmap

    layers = range(plan.model.num_layers)
    cells = [[_cell(plan, schedule, row, idx) for idx in layers] for row in ROWS]
    last = len(COLOURS) - 1
    scale = [[(k + end) / (last + 1), colour] for k, colour in enumerate(COLOURS) for end in (0, 1)]
    figure = Figure(
        Heatmap(
            z=[[colour for colour, _ in row] for row in cells],
            text=[[text for _, text in row] for row in cells],
            x=list(layers),
            y=list(ROWS),
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
    return figure, _below(schedule)


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


def _below(schedule: OffloadSchedule) -> str:
    worth = schedule.worth
    both = worth.to_host_s_per_gb_per_s + worth.to_device_s_per_gb_per_s
    drives = f", {format_bytes(schedule.storage_bytes)} of its drives" if schedule.storage_bytes else ""
    return (
        f"Grey stays on the device, light blue is made again, orange and green travel, dark blue lives on the host. "
        f"{format_bytes(schedule.host_bytes)} of each node's host memory{drives}; "
        f"{format_bytes(schedule.to_host_bytes)} down and {format_bytes(schedule.to_device_bytes)} up a step and rank, "
        f"{schedule.prefetch_layers} blocks ahead. No schedule of this layout takes less than "
        f"{format_seconds(schedule.bound_s)} (gap {100 * schedule.gap:.2g} %). At the margin a step is shorter by "
        f"{format_seconds(worth.device_s_per_gib)} with 1 GiB more of each device, "
        f"{format_seconds(worth.host_s_per_gib)} with 1 GiB more of the host for each rank, {format_seconds(both)} with 1 GB/s "
        f"more both ways."
    )
