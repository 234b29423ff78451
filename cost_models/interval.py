"""How far a prediction may be off: nominal 90 % intervals whose width depends on what the time is made of.

    log(measured / predicted) is above -sum_k low_k s_k and below sum_k high_k s_k in all but 5 % of runs each,

with s the shares of the step time: kernels, tensor-parallel, data-parallel and pipeline communication, bubbles. Kernels are known
better than networks that others share. The coefficients are quantile regressions on published runs, every source with the
same weight [fitted: python -m meshwright.planner.validation.fit_intervals RUNS.csv]. A calibrated cluster uses the
spread that its own runs showed.
"""

from __future__ import annotations

import math
from typing import Literal

from ..schema import ClusterSpec, Workload
from ..schema.plan import Interval, TimeBreakdown
from .coefficients import coefficients, is_measured

Side = Literal["low", "high"]
SIDES: tuple[Side, ...] = ("low", "high")

TAIL = 1.645
"""Standard deviations of a normal distribution beyond which 5 % lie on one side."""

MIN_LOG_WIDTH = 0.03
"""Repeats of one run differ by 1-5 % on managed clusters (MLPerf submissions of one configuration)."""


def time_shares(parts: TimeBreakdown) -> dict[str, float]:
    """Shares of a step time, summing to one; keys as in coefficients.toml."""
    total = parts.total
    kernels = parts.compute + parts.recompute + parts.optimizer + parts.offload
    return {
        "kernels": kernels / total,
        "tp": parts.tp / total,
        "dp": parts.dp / total,
        "pp": parts.pp / total,
        "bubble": parts.bubble / total,
    }


def time_interval(parts: TimeBreakdown, workload: Workload, cluster: ClusterSpec) -> Interval:
    """The interval of a step time on a cluster; it always holds the prediction."""
    low, high = (_log_width(parts, workload, cluster, side) for side in SIDES)
    return Interval(low=parts.total * math.exp(-low), high=parts.total * math.exp(high))


def _log_width(parts: TimeBreakdown, workload: Workload, cluster: ClusterSpec, side: Side) -> float:
    c, device, calibration = coefficients()["interval"], cluster.weakest_device, cluster.calibration
    if device.vendor == "cpu":
        return abs(math.log(float(c["time_cpu"][side == "high"])))
    widths = c["time"][workload.engine if workload.engine in c["time"] else "others"]
    width: float = sum(widths[side][name] * share for name, share in time_shares(parts).items())
    if not is_measured(device):
        width *= c["time"]["unmeasured_device"]
    if calibration.spread is not None:
        # The model's own width counts as much as a few runs; the runs' spread was found with as many as there were.
        weight = calibration.num_runs / (calibration.num_runs + c["time"]["prior_runs"])
        width = weight * TAIL * calibration.spread + (1 - weight) * width
    return max(width, MIN_LOG_WIDTH)
