"""Fit collective_curves.json: seconds of collectives inside a node against size, by link, operation and number of devices.

Data: operators/comm_nccl_intranode.parquet (columns system, op_name, num_gpus, message_bytes, latency in ms; sizes are full
buffers). Scores are the errors on sizes that were not fitted (every second one) and on types that were not fitted (an entire
family at a time).
"""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from ..cost_models.hardware.collectives import KNOT_STEP, CurveParameters, Op, curve_s, knots, shape_s, tabulated
from ..schema.units import FloatArray
from .estimator import percent_error


class System(NamedTuple):
    """A system of the table: its link, line rate and family."""

    link: str
    bytes_per_s: float
    family: str


SYSTEMS: Mapping[str, System] = {
    "a100_sxm": System("nvlink3", 300e9, "ampere"),
    "h100_sxm": System("nvlink4", 450e9, "hopper"),
    "b200_sxm": System("nvlink5", 900e9, "blackwell"),
    "gb200": System("nvlink5-nvl72", 900e9, "blackwell"),
    "l40s": System("pcie4", 31.5e9, "ada"),
}

SWITCHED = "nvlink-switch"
"""The curve of a switched link that nobody measured: geometric means over the families."""

OPS: Mapping[str, Op] = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "alltoall": "all_to_all",
}  # fmt: skip
_OUT = Path(__file__).parents[1] / "cost_models/hardware/collective_curves.json"
_SOURCE = (
    "fitted to comm_nccl_intranode (ai-dynamo/aiconfigurator @ 095f58a, Apache-2.0): one node, half precision, 512 B to 512 MB, "
    "NCCL 2.23 to 2.29, median over the versions; all-reduce on eight Hopper or Blackwell devices includes NVLS as NCCL enables it"
)

Curve = tuple[str, Op, int]
"""Link, operation, number of devices."""


class Points(NamedTuple):
    """Measured points of one curve: seconds at line rate, seconds, full buffer (bytes)."""

    x: FloatArray
    seconds: FloatArray
    size: FloatArray

    def every_second(self, start: int) -> Points:
        """Return every second size, from ``start``."""
        return Points(*(column[start::2] for column in self))


def read_points(data: Path) -> dict[Curve, Points]:
    """Return the table as curves, median over library versions."""
    table = pd.read_parquet(data / "operators" / "comm_nccl_intranode.parquet")
    keys = ["system", "op_name", "num_gpus", "message_bytes"]
    medians = table[table.system.isin(list(SYSTEMS))].groupby(keys).latency.median().reset_index()
    points = {}
    for (name, op, group), rows in medians.groupby(keys[:3]):
        system, size = SYSTEMS[name], rows.message_bytes.to_numpy(dtype=np.float64)
        passes = 2 if op == "all_reduce" else 1
        x = passes * size * (group - 1) / group / system.bytes_per_s
        points[system.link, OPS[op], int(group)] = Points(x, rows.latency.to_numpy(dtype=np.float64) * 1e-3, size)
    return points


def fit_shape(points: Points) -> CurveParameters:
    """Return latency, efficiency and ramp by robust least squares of log seconds."""

    def misfit(logs: FloatArray) -> FloatArray:
        return np.log(shape_s(points.x, CurveParameters(*np.exp(logs))) / points.seconds)

    starts = [np.log([points.seconds[0], 0.8, ramp]) for ramp in (1e-6, 2e-5, 3e-4)]
    fits = [least_squares(misfit, start, loss="soft_l1", f_scale=0.1) for start in starts]
    return CurveParameters(*np.exp(min(fits, key=lambda fit: float(fit.cost)).x).tolist())


def fit_curve(points: Points) -> CurveParameters:
    """Return the shape, and least squares of its residual at knots that begin with the smallest message."""
    log_x = np.log2(points.x)
    num_knots = int(np.ceil((log_x[-1] - log_x[0]) / KNOT_STEP)) + 1
    shape = fit_shape(points)._replace(first_knot=float(log_x[0]), residual=(0.0,) * num_knots)
    hats = np.array([np.interp(log_x, knots(shape), row) for row in np.eye(num_knots)]).T
    target = np.log(points.seconds / shape_s(points.x, shape))
    # A trace of bending energy decides about a last knot beyond the largest message.
    bend = 1e-3 * np.diff(np.eye(num_knots), axis=0)
    solved = np.linalg.lstsq(np.vstack([hats, bend]), np.concatenate([target, np.zeros(num_knots - 1)]), rcond=None)[0]
    return shape._replace(residual=tuple(float(v) for v in solved))


def mean_curve(curves: Sequence[CurveParameters]) -> CurveParameters:
    """Return geometric means of the shapes; the residuals, which sit at each type's own protocol switches, are dropped."""
    return CurveParameters(*np.exp(np.log([curve[:3] for curve in curves]).mean(axis=0)).tolist())


def predicted_s(parameters: CurveParameters, group: int, x: FloatArray) -> FloatArray:
    """Return what the shipped lookup gives for one curve."""
    curves = tabulated({group: parameters, 2 * group: parameters})
    latency, transfer = curve_s(curves, np.full(x.shape, group), x)
    return latency + transfer


def family_means(
    shapes: Mapping[Curve, CurveParameters], op: Op, group: int, *, without: str = ""
) -> list[CurveParameters]:
    """Return one mean shape for each switched family but ``without``."""
    members: dict[str, list[CurveParameters]] = {}
    for system in SYSTEMS.values():
        if system.link != "pcie4" and system.family != without and (system.link, op, group) in shapes:
            members.setdefault(system.family, []).append(shapes[system.link, op, group])
    return [mean_curve(curves) for curves in members.values()]


def _size_score(points: Mapping[Curve, Points]) -> list[str]:
    """Return the errors on every second size by curve and link."""
    lines = ["held-out sizes (every second one), MAPE % by link, operation and number of devices"]
    errors: dict[str, list[float]] = {}
    for (link, op, group), all_points in points.items():
        train, test = all_points.every_second(0), all_points.every_second(1)
        error = percent_error(predicted_s(fit_curve(train), group, test.x), test.seconds)
        errors.setdefault(link, []).append(error)
        lines.append(f"  {link:14s} {op:15s} {group} {error:6.1f}")
    lines += [f"  mean {link:14s} {np.mean(values):6.1f}" for link, values in errors.items()]
    values = [value for per_link in errors.values() for value in per_link]
    lines.append(f"  mean of all {np.mean(values):.1f}, at most 5 %: {sum(v <= 5 for v in values)} of {len(values)}")
    return lines


def _family_score(points: Mapping[Curve, Points]) -> list[str]:
    """Return the errors on switched links whose family was left out."""
    families = {system.link: system.family for system in SYSTEMS.values() if system.link != "pcie4"}
    shapes = {curve: fit_shape(curve_points) for curve, curve_points in points.items()}
    errors: dict[str, list[list[float]]] = {}
    for (link, op, group), curve in points.items():
        if link not in families:
            continue
        mean = mean_curve(family_means(shapes, op, group, without=families[link]))
        predicted = shape_s(curve.x, mean)
        with_latency = shape_s(curve.x, mean._replace(latency_s=float(curve.seconds[0])))
        bands = [curve.size < 1e6, (curve.size >= 1e6) & (curve.size < 16e6), curve.size >= 16e6]
        row = [percent_error(predicted, curve.seconds), percent_error(with_latency, curve.seconds)]
        row += [percent_error(predicted[band], curve.seconds[band]) for band in bands]
        errors.setdefault(link, []).append(row)
    title = (
        "held-out family, MAPE %: all sizes, the same with its own latency, and by size (below 1 MB, to 16 MB, above)"
    )
    means = {link: np.mean(rows, axis=0) for link, rows in errors.items()}
    return [title, *(f"  {link:14s} " + " ".join(f"{value:6.1f}" for value in row) for link, row in means.items())]


def document(points: Mapping[Curve, Points]) -> dict[str, Any]:
    """Return what is shipped: every measured curve and the means of the switched families."""
    links: dict[str, dict[str, dict[str, Any]]] = {}
    shapes = {curve: fit_shape(curve_points) for curve, curve_points in points.items()}
    for (link, op, group), curve_points in points.items():
        links.setdefault(link, {}).setdefault(op, {})[str(group)] = _as_json(fit_curve(curve_points))
    for op in OPS.values():
        # Compute trays of a rack have four devices; beyond them the eight of the same die and switch stand in.
        links["nvlink5-nvl72"][op]["8"] = links["nvlink5"][op]["8"]
        means = {str(group): _as_json(mean_curve(family_means(shapes, op, group))) for group in (2, 4, 8)}
        links.setdefault(SWITCHED, {})[op] = means
    return {"source": _SOURCE, "command": "python -m meshwright.fitting collectives DATA --write", "links": links}


def _as_json(parameters: CurveParameters) -> dict[str, Any]:
    return {
        "latency_us": round(parameters.latency_s * 1e6, 3),
        "efficiency": round(parameters.efficiency, 4),
        "ramp_us": round(parameters.ramp_s * 1e6, 4),
        "first_knot": round(parameters.first_knot, 3),
        "residual": [round(value, 3) for value in parameters.residual],
    }


def report(options: Namespace) -> str:
    """Write the curves and return the scores, where requested."""
    points = read_points(options.data)
    if options.write:
        text = json.dumps(document(points), indent=1) + "\n"
        one_line_lists = re.sub(r"\[[-\d.,e\s]+\]", lambda match: " ".join(match[0].split()), text)
        _OUT.write_text(one_line_lists, encoding="utf-8")
    return "\n".join([*_size_score(points), *_family_score(points)]) + "\n" if options.score else ""
