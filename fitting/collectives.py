"""Fit the collective curves: ``python -m meshwright.fitting.collectives DATA [--score] [--write]``.

DATA is the folder that holds operators/comm_nccl_intranode.parquet (columns system, op_name, num_gpus, message_bytes,
latency in ms; sizes are full buffers). Needs pandas with pyarrow. ``--score`` prints the error on sizes that were not
fitted (every second one) and on types that were not fitted (a whole family at a time); ``--write`` replaces
collective_curves.json with parameters of all sizes.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from ..cost_models.hardware.collective_curves import KNOT_STEP, CurveParameters, Op, curve_s, knots, shape_s, tabulated
from ..schema.arrays import FloatArray
from .command import run_command

SYSTEMS: Mapping[str, tuple[str, float, str]] = {
    "a100_sxm": ("nvlink3", 300e9, "ampere"),
    "h100_sxm": ("nvlink4", 450e9, "hopper"),
    "b200_sxm": ("nvlink5", 900e9, "blackwell"),
    "gb200": ("nvlink5-nvl72", 900e9, "blackwell"),
    "l40s": ("pcie4", 31.5e9, "ada"),
}
"""System of the table -> link, line rate (bytes/s) and family."""

SWITCHED = "nvlink-switch"
"""The curve of a switched link that nobody measured: geometric means over the families."""

OPS: Mapping[str, Op] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}
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
        """Every second size, from ``start``."""
        return Points(self.x[start::2], self.seconds[start::2], self.size[start::2])


def read_points(data: Path) -> dict[Curve, Points]:
    """The table as curves, median over library versions."""
    import pandas as pd

    table = pd.read_parquet(data / "operators" / "comm_nccl_intranode.parquet")
    keys = ["system", "op_name", "num_gpus", "message_bytes"]
    medians = table[table.system.isin(list(SYSTEMS))].groupby(keys).latency.median().reset_index()
    points = {}
    for (system, op, group), rows in medians.groupby(keys[:3]):
        link, rate, _ = SYSTEMS[system]
        size = rows.message_bytes.to_numpy(dtype=np.float64)
        passes = 2 if op == "all_reduce" else 1
        x = passes * size * (group - 1) / group / rate
        points[link, OPS[op], int(group)] = Points(x, rows.latency.to_numpy(dtype=np.float64) * 1e-3, size)
    return points


def fit_shape(points: Points) -> CurveParameters:
    """Latency, efficiency and ramp by robust least squares of log seconds."""

    def misfit(logs: FloatArray) -> FloatArray:
        return np.log(shape_s(points.x, CurveParameters(*np.exp(logs))) / points.seconds)

    starts = [np.log([points.seconds[0], 0.8, ramp]) for ramp in (1e-6, 2e-5, 3e-4)]
    fits = [least_squares(misfit, start, loss="soft_l1", f_scale=0.1) for start in starts]
    return _parameters(min(fits, key=lambda fit: float(fit.cost)).x)


def fit_curve(points: Points) -> CurveParameters:
    """The shape, and least squares of its residual at knots that begin with the smallest message."""
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
    """Geometric means of the shapes; the residuals, which sit at each type's own protocol switches, are left out."""
    return _parameters(np.log([curve[:3] for curve in curves]).mean(axis=0))


def _parameters(logs: FloatArray) -> CurveParameters:
    latency, efficiency, ramp = np.exp(logs)
    return CurveParameters(float(latency), float(efficiency), float(ramp))


def predicted_s(parameters: CurveParameters, group: int, x: FloatArray) -> FloatArray:
    """What the shipped lookup gives for one curve."""
    curves = tabulated({group: parameters, 2 * group: parameters})
    latency, transfer = curve_s(curves, np.full(x.shape, group), x)
    return latency + transfer


def by_family(shapes: Mapping[Curve, CurveParameters], op: Op, group: int, without: str) -> list[CurveParameters]:
    """One mean shape for each switched family but ``without``."""
    found: dict[str, list[CurveParameters]] = {}
    for link, _, family in SYSTEMS.values():
        if link != "pcie4" and family != without and (link, op, group) in shapes:
            found.setdefault(family, []).append(shapes[link, op, group])
    return [mean_curve(members) for members in found.values()]


def score(points: Mapping[Curve, Points]) -> list[str]:
    """Lines of a report: mean absolute relative error by link, on held-out sizes and on held-out families."""
    families = {link: family for link, _, family in SYSTEMS.values()}
    lines = ["held-out sizes (every second one), MAPE % by link, operation and number of devices"]
    errors: dict[str, list[float]] = {}
    for (link, op, group), all_points in points.items():
        train, test = all_points.every_second(0), all_points.every_second(1)
        error = _mape(predicted_s(fit_curve(train), group, test.x), test.seconds)
        errors.setdefault(link, []).append(error)
        lines.append(f"  {link:14s} {op:15s} {group} {error:6.1f}")
    lines += [f"  mean {link:14s} {np.mean(values):6.1f}" for link, values in errors.items()]
    values = [value for per_link in errors.values() for value in per_link]
    lines.append(f"  mean of all {np.mean(values):.1f}, at most 5 %: {sum(v <= 5 for v in values)} of {len(values)}")
    shapes = {curve: fit_shape(p) for curve, p in points.items()}
    lines.append(
        "held-out family, MAPE %: all sizes, the same with its own latency, and by size (below 1 MB, to 16 MB, above)"
    )
    for link in dict.fromkeys(link for link, _, _ in points if link != "pcie4"):
        rows = []
        for (other, op, group), p in points.items():
            if other != link:
                continue
            mean = mean_curve(by_family(shapes, op, group, families[link]))
            plain, own = shape_s(p.x, mean), shape_s(p.x, mean._replace(latency_s=float(p.seconds[0])))
            bands = [p.size < 1e6, (p.size >= 1e6) & (p.size < 16e6), p.size >= 16e6]
            rows.append(
                [_mape(plain, p.seconds), _mape(own, p.seconds), *(_mape(plain[b], p.seconds[b]) for b in bands)]
            )
        lines.append(f"  {link:14s} " + " ".join(f"{value:6.1f}" for value in np.mean(rows, axis=0)))
    return lines


def _mape(predicted: FloatArray, measured: FloatArray) -> float:
    return float(np.mean(np.abs(predicted / measured - 1))) * 100


def document(points: Mapping[Curve, Points]) -> dict[str, Any]:
    """What is shipped: every measured curve and the means of the switched families."""
    links: dict[str, dict[str, dict[str, Any]]] = {}
    shapes = {curve: fit_shape(p) for curve, p in points.items()}
    for (link, op, group), p in points.items():
        links.setdefault(link, {}).setdefault(op, {})[str(group)] = _written(fit_curve(p))
    for op in OPS.values():
        # Compute trays of a rack have four devices; beyond them the eight of the same die and switch stand in.
        links["nvlink5-nvl72"][op]["8"] = links["nvlink5"][op]["8"]
        means = {group: by_family(shapes, op, group, without="") for group in (2, 4, 8)}
        links.setdefault(SWITCHED, {})[op] = {str(n): _written(mean_curve(shape)) for n, shape in means.items()}
    return {
        "source": _SOURCE,
        "command": "python -m meshwright.fitting.collectives DATA --write",
        "links": links,
    }


def _written(parameters: CurveParameters) -> dict[str, Any]:
    return {
        "latency_us": round(parameters.latency_s * 1e6, 3),
        "efficiency": round(parameters.efficiency, 4),
        "ramp_us": round(parameters.ramp_s * 1e6, 4),
        "first_knot": round(parameters.first_knot, 3),
        "residual": [round(value, 3) for value in parameters.residual],
    }


def _report(options: Namespace) -> str:
    points = read_points(options.data)
    if options.write:
        _OUT.write_text(_flat_lists(json.dumps(document(points), indent=1)) + "\n", encoding="utf-8")
    return "\n".join(score(points)) + "\n" if options.score else ""


def main(arguments: list[str] | None = None) -> None:
    """Score or write."""
    parser = ArgumentParser(prog="python -m meshwright.fitting.collectives", description=__doc__)
    parser.add_argument("data", type=Path, help="folder that holds operators/ and measured_runs/")
    parser.add_argument("--score", action="store_true", help="errors on sizes and devices left out")
    parser.add_argument("--write", action="store_true", help="write collective_curves.json")
    run_command(parser, _report, arguments)


def _flat_lists(text: str) -> str:
    """Lists of numbers on one line."""
    import re

    return re.sub(r"\[[-\d.,e\s]+\]", lambda match: " ".join(match[0].split()), text)


if __name__ == "__main__":
    main()
