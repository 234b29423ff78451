"""What an offload schedule does with each layer, and copies of experts, as strips of cells for the page's template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...schema.units import counted, format_bytes, format_seconds

if TYPE_CHECKING:
    from ...schema import OffloadSchedule, TrainingPlan

Cell = tuple[str, str]
"""Class of the style sheet, and what is there."""

LEGEND = {
    "stays": "on the device",
    "again": "made again",
    "moves": "to the host and back",
    "streams": "streamed for the update",
    "away": "lives on the host",
}


def offload_strips(plan: TrainingPlan, schedule: OffloadSchedule) -> dict[str, Any]:
    """Return a strip for activations, optimizer states and parameters, a cell a layer; and what moves, costs and would save."""
    layers = range(plan.model.num_layers)
    rows = list(zip(*(_positions(plan, schedule, idx) for idx in layers), strict=True))
    values = schedule.worth
    link_s = values.to_host_s_per_gb_per_s + values.to_device_s_per_gb_per_s
    drives = f", {format_bytes(schedule.storage_bytes)} of its drives" if schedule.storage_bytes else ""
    names = ("activations", "optimizer states", "parameters")
    return {
        "strips": [{"name": name, "cells": row} for name, row in zip(names, rows, strict=True)],
        "legend": [(kind, LEGEND[kind]) for kind in LEGEND if any(kind == cell for row in rows for cell, _ in row)],
        "text": (
            f"{format_bytes(schedule.host_bytes)} of each node's host memory{drives}; "
            f"{format_bytes(schedule.to_host_bytes)} down and {format_bytes(schedule.to_device_bytes)} up a step and rank, "
            f"{counted(schedule.prefetch_layers, 'block')} ahead. No schedule of this layout takes less than "
            f"{format_seconds(schedule.bound_s)} (gap {100 * schedule.gap:.2g} %). At the margin a step is shorter by "
            f"{format_seconds(max(0.0, values.device_s_per_gib))} with 1 GiB more of each device, "
            f"{format_seconds(max(0.0, values.host_s_per_gib))} with 1 GiB more of the host for each rank, "
            f"{format_seconds(max(0.0, link_s))} with 1 GB/s more both ways."
        ),
    }


def _positions(plan: TrainingPlan, schedule: OffloadSchedule, idx: int) -> tuple[Cell, Cell, Cell]:
    """Return where the activations, optimizer states and parameters of a layer are."""
    activations = states = parameters = "stays", "on the device"
    stage, drives = plan.stages[0], f", in {schedule.storage_path}" if idx in schedule.storage_optimizer_layers else ""
    if tuple(plan.model.iter_layers())[idx].is_block:
        if stage.offload_of(idx) == "activations":
            activations = "moves", "to the host and back"
        elif stage.offload_of(idx) != "none":
            activations = "moves", "made again from an input on the host"
        elif stage.recompute_of(idx) != "none":
            activations = "again", f"made again ({stage.recompute_of(idx)} recompute)"
    if idx in schedule.streamed_parameter_layers:
        states = parameters = "away", "on the host, which updates them"
    elif idx in schedule.host_optimizer_layers:
        states = "away", f"on the host, which updates them{drives}"
    elif idx in schedule.streamed_optimizer_layers:
        states = "streams", f"on the host, streamed to the device for the update{drives}"
    return activations, states, parameters


def expert_copies(plan: TrainingPlan) -> dict[str, Any]:
    """Return the copies of each expert of each layer with experts, where experts were placed by their loads, as paths by number."""
    copies = [np.bincount(slots.experts).tolist() for slots in plan.expert_slots]
    largest = max(map(max, copies))
    paths: dict[int, list[str]] = {}
    for y, row in enumerate(copies):
        for x, count in enumerate(row):
            paths.setdefault(count, []).append(f"M{x} {y}h.9v.9h-.9z")
    return {
        "layers": len(copies),
        "experts": max(map(len, copies)),
        "paths": [
            {"count": count, "opacity": 0.15 + 0.85 * (count - 1) / max(1, largest - 1), "d": "".join(cells)}
            for count, cells in sorted(paths.items())
        ],
    }
