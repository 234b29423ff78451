"""Placements of experts as tables, JSON and a picture."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.table import Table

from ...schema.base import write_atomically
from ...schema.errors import ConfigError
from ...solvers.experts.balance import eplb_placement
from ...solvers.experts.instance import uniform_shares, utilisation
from ...solvers.experts.placement import Evaluation, ExpertPlacement, TraceEvaluation, place_experts

_CELL = 9
_GAP = 24


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def placement_table(found: ExpertPlacement) -> Table:
    """A row for each layer and one for their mean."""
    num_slots = found.physical_to_logical.shape[1]
    table = _table("layer", "max / mean", "lower bound", "gap", "most replicas", "moves", "off-node tokens")
    table.title = (
        f"{len(found.balance)} layers x {found.num_experts} experts in {num_slots} slots of {found.num_gpus} GPUs, "
        f"{found.split} shares, {found.solve_s:.2f} s"
    )
    for layer, balance in enumerate(found.balance):
        table.add_row(
            str(layer),
            f"{balance:.4f}",
            f"{found.lower_bound[layer]:.4f}",
            f"{100 * found.gap[layer]:.2f} %",
            str(found.replica_count[layer].max()),
            str(found.moves[layer]),
            f"{found.off_node_tokens[layer]:,.0f}",
        )
    table.add_section()
    table.add_row(
        "mean",
        f"{found.balance.mean():.4f}",
        f"{found.lower_bound.mean():.4f}",
        f"{100 * found.gap.mean():.2f} %",
        str(found.replica_count.max()),
        f"{found.moves.mean():.1f}",
        f"{found.off_node_tokens.mean():,.0f}",
    )
    return table


def placement_json(found: ExpertPlacement) -> str:
    """Every field."""
    fields = {name: getattr(found, name) for name in found.__dataclass_fields__}
    return json.dumps({name: _plain(value) for name, value in fields.items()})


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def evaluation_json(result: Evaluation, visits: TraceEvaluation | None) -> str:
    """Every field of both."""
    fields = {name: _plain(getattr(result, name)) for name in result.__dataclass_fields__}
    if visits is not None:
        fields["trace"] = {name: _plain(getattr(visits, name)) for name in visits.__dataclass_fields__}
    return json.dumps(fields)


def evaluation_table(result: Evaluation, visits: TraceEvaluation | None) -> Table:
    """A row for each workload and layer."""
    columns = ("nodes of a token", "node load of the tokens") if visits is not None else ()
    table = _table("workload", "layer", "max / mean", "with best shares", "lower bound", "node max / mean", *columns)
    for d, layer in np.ndindex(result.balance.shape):
        values = [result.balance, result.weighted_balance, result.lower_bound, result.node_balance]
        row = [f"{value[d, layer]:.4f}" for value in values]
        if visits is not None:
            row += [f"{visits.visits_per_token[layer]:.3f}", f"{visits.node_balance[layer]:.4f}"]
        table.add_row(str(d), str(layer), *row)
    return table


def comparison(name: str, load: NDArray[np.float64], *, num_gpus: int, num_slots: int | None) -> dict[str, Any]:
    """Ours and EPLB's algorithm on the same loads: balance over the bound, mean and worst layer, and seconds."""
    num_experts = load.shape[2]
    slots = num_slots or -(-(num_experts * 9 // 8) // num_gpus) * num_gpus
    ours = place_experts(None, scenarios=load, num_gpus=num_gpus, num_slots=slots)
    start = time.perf_counter()
    theirs = eplb_placement(load.sum(axis=0), num_slots=slots, num_gpus=num_gpus)
    eplb_s = time.perf_counter() - start
    used = utilisation(ours._instance(load), theirs, uniform_shares(theirs, num_experts)).max(axis=(0, 2))
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
    """A row for each case."""
    table = _table(
        "loads", "slots", "GPUs", "lower bound", "ours / bound", "worst layer", "s", "EPLB / bound", "worst layer", "s"
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


def save_heat_map(path: Path, found: ExpertPlacement, before: ExpertPlacement | None) -> None:
    """GPU load over the mean, layers down and GPUs across: before (experts in order where there was no placement), and
    after.
    """
    after = found.gpu_load / found.gpu_load.mean(axis=1, keepdims=True)
    old = _load_before(found, before)
    width = _GAP * 3 + 2 * _CELL * found.num_gpus
    height = _GAP * 2 + _CELL * len(after)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-size="11">']
    for column, (title, used) in enumerate((("before", old), ("after", after))):
        left = _GAP + column * (_GAP + _CELL * found.num_gpus)
        parts.append(f'<text x="{left}" y="16">{title}: up to {used.max():.2f} x the mean</text>')
        for layer, gpu in np.ndindex(used.shape):
            x, y = left + gpu * _CELL, _GAP + layer * _CELL
            parts.append(
                f'<rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" fill="{_colour(used[layer, gpu])}">'
                f"<title>layer {layer}, GPU {gpu}: {used[layer, gpu]:.3f}</title></rect>"
            )
    write_atomically(path, "\n".join([*parts, "</svg>", ""]))


def _load_before(found: ExpertPlacement, before: ExpertPlacement | None) -> NDArray[np.float64]:
    """Load over the mean [L, G] with the experts in order and no replicas, or where the previous placement had them."""
    if before is not None:
        used = before.evaluate(found.expert_load).gpu_load[0]
    else:
        pieces = np.array_split(np.arange(found.num_experts), found.num_gpus)
        used = np.stack([found.expert_load[:, piece].sum(axis=1) for piece in pieces], axis=1)
    return np.asarray(used / used.mean(axis=1, keepdims=True))


def _colour(used: float) -> str:
    """White at the mean, red above it, blue below."""
    part = min(abs(used - 1.0), 1.0)
    faded = round(255 * (1 - part))
    return f"rgb(255,{faded},{faded})" if used >= 1 else f"rgb({faded},{faded},255)"
