"""The roofline of a plan's block as an SVG: lines, points and ticks in units of its view box, logarithmic both ways."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ...planner.roofline import OperatorPoint, roofline
from ...schema.units import GB, TFLOP, format_seconds

if TYPE_CHECKING:
    from ...schema import TrainingPlan

WIDTH, HEIGHT = 560, 330
INSET, RIGHT, TOP, BOTTOM = 46, 8, 10, 34


def roofline_figure(plan: TrainingPlan) -> dict[str, Any]:
    """Return the figure and the table below it."""
    roof = roofline(plan)
    computing = [point for point in roof.points if point.flops > 0]
    ridge = roof.peak_flops_per_s / roof.bytes_per_s
    intensities = [point.flops / point.num_bytes for point in computing] or [ridge]
    x_low = min(ridge / 8, min(intensities) / 2)
    x_high = max(ridge * 8, max(intensities) * 2)
    rates = [point.flops / point.seconds for point in computing] or [roof.peak_flops_per_s]
    y_low, y_high = min(roof.bytes_per_s * x_low, min(rates)) / 1.5, roof.peak_flops_per_s * 1.6

    def x_of(intensity: float) -> float:
        share = math.log(intensity / x_low) / math.log(x_high / x_low)
        return round(INSET + share * (WIDTH - INSET - RIGHT), 1)

    def y_of(rate: float) -> float:
        share = math.log(rate / y_low) / math.log(y_high / y_low)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    peak, knee = y_of(roof.peak_flops_per_s), x_of(ridge)
    start = max(x_low, y_low / roof.bytes_per_s)
    return {
        "device": roof.device,
        "num_layers": roof.points[0].num_layers if roof.points else 0,
        "peak": f"{roof.peak_flops_per_s / TFLOP:.4g} TFLOP/s",
        "bandwidth": f"{roof.bytes_per_s / GB:.4g} GB/s",
        "line": f"M{x_of(start)} {y_of(roof.bytes_per_s * start)}L{knee} {peak}H{WIDTH - RIGHT}",
        "peak_y": peak,
        "knee_x": knee,
        "x_ticks": [(x_of(value), f"{value:g}") for value in _decades(x_low, x_high)],
        "y_ticks": [(y_of(value), f"{value / TFLOP:g}") for value in _decades(y_low, y_high)],
        "points": [
            {
                "x": x_of(point.flops / point.num_bytes),
                "y": y_of(point.flops / point.seconds),
                "number": number,
                "part": point.part,
                "words": f"{_name(point)}: {point.flops / point.seconds / TFLOP:.0f} TFLOP/s",
            }
            for number, point in enumerate(computing, 1)
        ],
        "table": [
            {
                "number": computing.index(point) + 1 if point in computing else "",
                "name": _name(point),
                "time": format_seconds(point.seconds),
                "share": f"{100 * point.seconds / sum(each.seconds for each in roof.points):.1f} %",
                "rate": f"{point.flops / point.seconds / TFLOP:.0f} TFLOP/s"
                if point.flops
                else f"{point.num_bytes / point.seconds / GB:,.0f} GB/s",
                "reached": f"{100 * _reached(point, roof.peak_flops_per_s, roof.bytes_per_s):.0f} %",
            }
            for point in sorted(roof.points, key=lambda point: -point.seconds)
        ],
        "size": (WIDTH, HEIGHT, INSET, RIGHT, TOP, BOTTOM),
    }


def _reached(point: OperatorPoint, peak: float, bytes_per_s: float) -> float:
    """Return the part of the roof above a point that it reaches."""
    return max(point.flops / peak, point.num_bytes / bytes_per_s) / point.seconds


def _name(point: OperatorPoint) -> str:
    return point.name.replace("_", " ")


def _decades(low: float, high: float) -> list[float]:
    return [10.0**k for k in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
