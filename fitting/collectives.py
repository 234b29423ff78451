"""Fit collective_curves.json: seconds of collectives inside a node against size, by link, operation and number of devices.

Data: operators/comm_nccl_intranode.parquet (columns system, op_name, num_gpus, message_bytes, latency in ms; sizes are full
buffers), and of PCI Express with peer-to-peer the fractions of SimuMax's A100 PCIe host (operators/simumax/a100_pcie.json). Scores
are the errors on sizes that were not fitted (every second one), on types that were not fitted (an entire family at a time), and of
PCI Express on hosts that were not fitted.
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
    "l40s": System("pcie-isolated", 31.5e9, "ada"),
}

ISOLATED, PEERS, HOST = "pcie-isolated", "pcie", "pcie-host"
"""Curves of PCI Express: devices kept apart, as measured; with peer-to-peer; GeForce, through host memory."""

HOST_EFFICIENCY = {2: 0.55, 4: 0.31, 8: 0.15}
"""Between the two hosts without peer-to-peer whose rates are known, which differ by a factor of three: L40S (0.17 on four devices,
0.05 on eight, the measured curve) and RTX 5090 on two Xeon 8480 (35 and 28 of 63 GB/s: github.com/NVIDIA/nccl issue 1639); two as
four of the latter. What decides is the memory's bandwidth and how the host's NUMA domains are cut (NVIDIA/nccl-tests issue 74)."""

PUBLISHED = {("all_reduce", 2): 38.6, ("all_reduce", 8): 24.7, ("all_gather", 8): 23.3, ("reduce_scatter", 8): 23.3}
"""Bus bandwidth (GB/s of 63) on RTX PRO 6000 over PCIe 5, two sockets: ai-dynamo/aiconfigurator. Scored, not fitted."""

SWITCHED = "nvlink-switch"
"""The curve of a switched link that nobody measured: geometric means over the families."""

OPS: Mapping[str, Op] = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "alltoall": "all_to_all",
}  # fmt: skip
_OUT = Path(__file__).parents[1] / "cost_models/hardware/collective_curves.json"
_SOURCE = (
    "fitted to comm_nccl_intranode (ai-dynamo/aiconfigurator @ 095f58a, Apache-2.0): one node, half precision, 512 B to 512 MB, "
    "NCCL 2.23 to 2.29, median over versions; all-reduce on eight Hopper or Blackwell devices includes NVLS as NCCL enables it; "
    "pcie: an A100 PCIe host (MooreThreads/SimuMax @ 4dcaae5, Apache-2.0), pcie-host: fitting/collectives.py, HOST_EFFICIENCY"
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
        if system.link != ISOLATED and system.family != without and (system.link, op, group) in shapes:
            members.setdefault(system.family, []).append(shapes[system.link, op, group])
    return [mean_curve(curves) for curves in members.values()]


def pcie_curves(data: Path, shapes: Mapping[Curve, CurveParameters]) -> dict[Curve, CurveParameters]:
    """Return the curves of PCI Express with peer-to-peer and through host memory.

    Their latencies are those of the measured curve, which small messages share, their ramp that of two devices; eight devices
    are on two sockets.
    """
    host = json.loads((data / "operators" / "simumax" / "a100_pcie.json").read_text(encoding="utf-8"))["networks"]
    curves = {}
    for name, op in OPS.items():
        ramp_s = shapes[ISOLATED, op, 2].ramp_s
        for group in (2, 4, 8):
            link, measured = host[f"intra_node_pcie_{group}x"], shapes[ISOLATED, op, group]
            fraction = link["op"]["all2all" if name == "alltoall" else name]["efficient_factor"]
            of_line = fraction * link["bandwidth"]["gbps"] * 1e9 / SYSTEMS["l40s"].bytes_per_s
            for curve, efficiency in ((PEERS, of_line), (HOST, HOST_EFFICIENCY[group])):
                curves[curve, op, group] = CurveParameters(measured.latency_s, efficiency, ramp_s)
    return curves


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
    families = {system.link: system.family for system in SYSTEMS.values() if system.link != ISOLATED}
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


def _pcie_score(data: Path, points: Mapping[Curve, Points]) -> list[str]:
    """Return the errors of PCI Express with peer-to-peer on hosts that were not fitted."""
    curves = pcie_curves(data, {curve: fit_shape(of_curve) for curve, of_curve in points.items()})
    lines = ["PCI Express with peer-to-peer on other hosts, error %"]
    size, line = 512e6, 63e9
    for (op, group), rate in PUBLISHED.items():
        moved = (2 if op == "all_reduce" else 1) * size * (group - 1) / group
        seconds = shape_s(np.array([moved / line]), curves[PEERS, OPS[op], group])[0]
        lines.append(f"  RTX PRO 6000, {op} {group} {100 * (seconds * rate * 1e9 / moved - 1):+6.1f}")
    for op in OPS.values():
        pair = points[ISOLATED, op, 2]
        error = percent_error(shape_s(pair.x, curves[PEERS, op, 2]), pair.seconds)
        lines.append(f"  L40S, {op} 2, all sizes {error:6.1f}")
    return lines


def document(points: Mapping[Curve, Points], pcie: Mapping[Curve, CurveParameters]) -> dict[str, Any]:
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
    for (link, op, group), curve in pcie.items():
        links.setdefault(link, {}).setdefault(op, {})[str(group)] = _as_json(curve)
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
        pcie = pcie_curves(options.data, {curve: fit_shape(of_curve) for curve, of_curve in points.items()})
        text = json.dumps(document(points, pcie), indent=1) + "\n"
        one_line_lists = re.sub(r"\[[-\d.,e\s]+\]", lambda match: " ".join(match[0].split()), text)
        _OUT.write_text(one_line_lists, encoding="utf-8")
    scores = (_size_score(points), _family_score(points), _pcie_score(options.data, points)) if options.score else ()
    return "".join(f"{line}\n" for score in scores for line in score)
