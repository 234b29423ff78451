"""Show placements of experts as tables, JSON and a picture."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from ...schema.base import write_atomically
from ...schema.errors import ConfigError
from ...solvers.experts.balance import eplb_placement
from ...solvers.experts.instance import uniform_shares, utilisation
from ...solvers.experts.placement import Evaluation, ExpertPlacement, TraceEvaluation, place_experts
from ..terminal import headed_table

_CELL = 9
_GAP = 24


def placement_table(placement: ExpertPlacement) -> Table:
    """Show a row for each layer and one for their mean."""
    table = headed_table(
        f"{len(placement.balance)} layers x {placement.num_experts} experts in "
        f"{placement.physical_to_logical.shape[1]} slots of {placement.num_gpus} GPUs, {placement.split} shares, "
        f"{placement.solve_s:.2f} s",
        "layer", "max / mean", "lower bound", "gap", "most replicas", "moves", "off-node tokens", bold=False,
    )  # fmt: skip
    columns = (placement.balance, placement.lower_bound, 100 * placement.gap)
    forms = ("{:.4f}", "{:.4f}", "{:.2f} %")
    for layer in range(len(placement.balance)):
        table.add_row(
            str(layer),
            *(form.format(column[layer]) for form, column in zip(forms, columns, strict=True)),
            str(placement.replica_count[layer].max()),
            str(placement.moves[layer]),
            f"{placement.off_node_tokens[layer]:,.0f}",
        )
    table.add_section()
    table.add_row(
        "mean",
        *(form.format(column.mean()) for form, column in zip(forms, columns, strict=True)),
        str(placement.replica_count.max()),
        f"{placement.moves.mean():.1f}",
        f"{placement.off_node_tokens.mean():,.0f}",
    )
    return table


def placement_json(placement: ExpertPlacement) -> str:
    """Return every field."""
    return json.dumps(_plain_fields(placement))


def _plain_fields(document: Any) -> dict[str, Any]:
    fields = {name: getattr(document, name) for name in document.__dataclass_fields__}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in fields.items()}


def evaluation_json(result: Evaluation, visits: TraceEvaluation | None) -> str:
    """Return every field of both."""
    trace = {} if visits is None else {"trace": _plain_fields(visits)}
    return json.dumps(_plain_fields(result) | trace)


def evaluation_table(result: Evaluation, visits: TraceEvaluation | None) -> Table:
    """Show a row for each workload and layer."""
    columns = ("nodes of a token", "node load of the tokens") if visits is not None else ()
    measured = ("max / mean", "with best shares", "lower bound", "node max / mean")
    table = headed_table("", "workload", "layer", *measured, *columns)
    for d, layer in np.ndindex(result.balance.shape):
        values = [result.balance, result.weighted_balance, result.lower_bound, result.node_balance]
        row = [f"{value[d, layer]:.4f}" for value in values]
        if visits is not None:
            row += [f"{visits.visits_per_token[layer]:.3f}", f"{visits.node_balance[layer]:.4f}"]
        table.add_row(str(d), str(layer), *row)
    return table


def comparison(name: str, load: NDArray[np.float64], *, num_gpus: int, num_slots: int | None) -> dict[str, Any]:
    """Compare ours and EPLB's algorithm on the same loads: balance over the bound, mean and worst layer, and seconds."""
    num_experts = load.shape[2]
    slots = num_slots or -(-(num_experts * 9 // 8) // num_gpus) * num_gpus
    ours = place_experts(None, scenarios=load, num_gpus=num_gpus, num_slots=slots)
    start = time.perf_counter()
    theirs = eplb_placement(load.sum(axis=0), num_slots=slots, num_gpus=num_gpus)
    eplb_s = time.perf_counter() - start
    used = utilisation(ours.instance(load), theirs, uniform_shares(theirs, num_experts)).max(axis=(0, 2))
    return {
        "loads": name,
        "slots": slots,
        "gpus": num_gpus,
        "lower_bound": float(ours.lower_bound.mean()),
        "mean": float((ours.balance / ours.lower_bound).mean()),
        "worst": float((ours.balance / ours.lower_bound).max()),
        "solve_s": ours.solve_s,
        "eplb_mean": float((used / ours.lower_bound).mean()),
        "eplb_worst": float((used / ours.lower_bound).max()),
        "eplb_s": eplb_s,
    }


def comparison_table(rows: list[dict[str, Any]]) -> Table:
    """Show a row for each case."""
    table = headed_table(
        "",
        "loads",
        "slots",
        "GPUs",
        "lower bound",
        "ours / bound",
        "worst layer",
        "s",
        "EPLB / bound",
        "worst layer",
        "s",
    )
    for row in rows:
        values = [row["lower_bound"], row["mean"], row["worst"], row["solve_s"]]
        theirs = [row["eplb_mean"], row["eplb_worst"], row["eplb_s"]]
        table.add_row(row["loads"], str(row["slots"]), str(row["gpus"]), *(f"{value:.4f}" for value in values + theirs))
    return table


def require_svg(path: Path) -> None:
    """Raise unless the picture is an .svg."""
    if path.suffix != ".svg":
        raise ConfigError(f"{path}: the heat map is written as .svg")


def save_heat_map(path: Path, placement: ExpertPlacement, before: ExpertPlacement | None) -> None:
    """Draw GPU load over the mean, layers down, GPUs across: before (where there was no placement experts in order), and after."""
    after = placement.gpu_load / placement.gpu_load.mean(axis=1, keepdims=True)
    old = _load_before(placement, before)
    width = _GAP * 3 + 2 * _CELL * placement.num_gpus
    height = _GAP * 2 + _CELL * len(after)
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-size="11">']
    for column, (title, used) in enumerate((("before", old), ("after", after))):
        start = _GAP + column * (_GAP + _CELL * placement.num_gpus)
        lines.append(f'<text x="{start}" y="16">{title}: up to {used.max():.2f} x the mean</text>')
        for layer, gpu in np.ndindex(used.shape):
            x, y = start + gpu * _CELL, _GAP + layer * _CELL
            lines.append(
                f'<rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" fill="{_colour(used[layer, gpu])}">'
                f"<title>layer {layer}, GPU {gpu}: {used[layer, gpu]:.3f}</title></rect>"
            )
    write_atomically(path, "\n".join([*lines, "</svg>", ""]))


def _load_before(placement: ExpertPlacement, before: ExpertPlacement | None) -> NDArray[np.float64]:
    """Return load over the mean [L, G] with the experts in order and no replicas, or where the previous placement had them."""
    if before is not None:
        used = before.evaluate(placement.expert_load).gpu_load[0]
    else:
        pieces = np.array_split(np.arange(placement.num_experts), placement.num_gpus)
        used = np.stack([placement.expert_load[:, piece].sum(axis=1) for piece in pieces], axis=1)
    return np.asarray(used / used.mean(axis=1, keepdims=True))


def _colour(used: float) -> str:
    """Return white at the mean, red above it, blue below."""
    faded = round(255 * (1 - min(abs(used - 1.0), 1.0)))
    return f"rgb(255,{faded},{faded})" if used >= 1 else f"rgb({faded},{faded},255)"
