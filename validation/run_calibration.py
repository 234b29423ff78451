"""What runs of `apply` on a machine say about the model's rates there: ratios by the parts of a step, folded into its profile.

A run has the seconds of its busiest rank by parts (runtime/training/step_clock.py), so each ratio is read where it acts. With p and
m the predicted and measured seconds of a part, over all runs that have it,

    kernels (products, attention, elementwise, and the host where it is the same cores)   exp(mean log(p / m)) of compute
    scale_up, scale_out                                                                    the same of communication

Ratios within a part keep their proportions: a step does not tell them apart. Memory: activations and a constant
(calibration.memory_ratios). Of all this, half, or nothing is kept, whichever predicts the runs best: with three runs or more each
run by the ratios of the others, so that a second estimate is never worse than the first on the runs themselves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..cost_models.stage.step import estimate_step
from ..cost_models.stage.table import CostTable
from ..planner.plan import estimate as fresh_estimate
from ..schema import Calibration, ClusterSpec, ConfigError, Estimate, Plan
from ..schema.base import read_text, shown
from ..schema.layout_table import MIXED, LayoutTable
from ..solvers.pipeline.torch_csv import planned_order
from .inputs import RunInputs
from .table_calibration import MEAN_TO_DEVIATION, MeasuredRun, memory_ratios

TRUST = (0.0, 0.5, 1.0)
LEAST_TO_LEAVE_OUT = 3
LARGEST_RATIO = 15.0
"""Beyond it a run measured something else than its plan."""

_LEAST_SHARE = 0.02
"""Of the step; parts below it are noise."""


@dataclass(frozen=True)
class PlanRun:
    """A plan and what its run measured: seconds by part, of a step, and the peak of the fullest device."""

    plan: Plan
    parts_s: Mapping[str, float]
    step_time_s: float
    reserved_bytes: float


def read_run(plan: str | Path, metrics: str | Path) -> PlanRun:
    """A plan with the metrics that `apply` wrote of it.

    Raises:
        ConfigError: the metrics have no comparison at their end, or are of an older version without parts.
    """
    loaded = Plan.load(plan)
    last = _last_record(metrics)
    measured = last.get("measured")
    if not isinstance(measured, dict) or not isinstance(measured.get("parts_s"), dict) or not measured["parts_s"]:
        raise ConfigError(
            f"{metrics} does not end with a comparison of prediction and measurement",
            help="let `meshwright apply PLAN --metrics FILE` run to its end with this version",
        )
    predicted = math.prod(_number(metrics, last.get("predicted"), name) for name in ("tokens_per_s", "step_time_s"))
    if abs(predicted / loaded.workload.tokens_per_step - 1) > 1e-6:
        raise ConfigError(f"{metrics} is of another plan than {plan}: steps of {predicted:.0f} tokens")
    parts_s = measured["parts_s"]
    seconds = {name: _number(metrics, parts_s, name, least=0.0) for name in parts_s}
    step_s, peak = (_number(metrics, measured, name) for name in ("step_time_s", "peak_reserved_bytes"))
    for name in ("compute", "communication"):
        if name not in seconds or (name == "compute" and not seconds[name]):
            raise ConfigError(f"{metrics}: parts_s says nothing of {name}")
    return PlanRun(loaded, seconds, step_s, peak)


def _number(metrics: str | Path, record: Any, name: str, *, least: float = 1e-12) -> float:
    """A number of a record, seconds or bytes."""
    value = record.get(name) if isinstance(record, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= 2**60:
        raise ConfigError(f"{metrics}: {name} = {shown(value)} is no number that a run measures")
    return float(value)


def _last_record(metrics: str | Path) -> dict[str, Any]:
    lines = [line for line in read_text(metrics).splitlines() if line.strip()]
    try:
        last = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):  # a ValueError that is none of JSON's: an integer of thousands of digits
        last = None
    if not isinstance(last, dict):
        raise ConfigError(f"{metrics} holds no metrics of a run")
    return last


def reestimate(plan: Plan, cluster: ClusterSpec) -> Estimate:
    """The estimate of a plan's layout and stages on a cluster; where blocks recompute differently it chooses stages anew."""
    batch = LayoutTable.from_layouts([plan.layout], plan.workload.global_batch_size)
    if batch.recompute[0] == MIXED or cluster.parts:
        return fresh_estimate(plan.model, cluster, plan.workload, plan.layout)
    boundaries = [*(stage.first_layer_idx for stage in plan.stages), plan.model.num_layers]
    costs = replace(CostTable.from_layouts(plan.model, plan.workload, cluster, batch), order=planned_order(plan))
    return estimate_step(costs, 0, boundaries)


def calibrate_from_runs(runs: Sequence[PlanRun], cluster: ClusterSpec) -> Calibration:
    """The calibration that runs on a cluster give; nothing of an earlier one is kept.

    Raises:
        ConfigError: there is no run, or one is so far off that it measured something else.
    """
    if not runs:
        raise ConfigError("there is no run to calibrate with")
    plain = cluster.replace(calibration=Calibration())
    before = [reestimate(run.plan, plain) for run in runs]
    for run, estimate in zip(runs, before, strict=True):
        ratio = run.step_time_s / estimate.step_time_s
        if not 1 / LARGEST_RATIO < ratio < LARGEST_RATIO:
            raise ConfigError(f"a run took {ratio:.3g} times its predicted step: it is of another machine or plan")
    trust, left_out = _trusted(runs, before, plain)
    memory = _memory(runs, before, plain)
    found = Calibration().replace(**_ratios(runs, before, plain, trust), **memory, num_runs=len(runs))
    if len(runs) < LEAST_TO_LEAVE_OUT:
        return found
    errors = [_error(run, estimate) for run, estimate in zip(runs, before, strict=True)]
    return found.replace(
        spread=max(MEAN_TO_DEVIATION * float(np.mean(np.abs(left_out))), 1e-6),
        error_before=float(np.mean(np.abs(np.expm1(errors)))),
        error_after=float(np.mean(np.abs(np.expm1(left_out)))),
    )


def _error(run: PlanRun, estimate: Estimate) -> float:
    """Log of predicted over measured step time."""
    return math.log(estimate.step_time_s / run.step_time_s)


def _trusted(runs: Sequence[PlanRun], before: Sequence[Estimate], cluster: ClusterSpec) -> tuple[float, list[float]]:
    """How far to follow the ratios, and the log errors of the runs under it."""
    best: tuple[float, list[float]] = (0.0, [_error(run, e) for run, e in zip(runs, before, strict=True)])
    leave_out = len(runs) >= LEAST_TO_LEAVE_OUT
    for trust in TRUST[1:]:
        errors = []
        for idx, run in enumerate(runs):
            others = [at for at in range(len(runs)) if not (leave_out and at == idx)]
            ratios = _ratios([runs[at] for at in others], [before[at] for at in others], cluster, trust)
            changed = cluster.replace(calibration=Calibration().replace(**ratios))
            errors.append(_error(run, reestimate(run.plan, changed)))
        if np.mean(np.abs(errors)) <= np.mean(np.abs(best[1])):
            best = trust, errors
    return best


def _ratios(
    runs: Sequence[PlanRun], before: Sequence[Estimate], cluster: ClusterSpec, trust: float
) -> dict[str, float]:
    """Fields of Calibration."""
    compute: list[float] = []
    sent: list[float] = []
    for run, estimate in zip(runs, before, strict=True):
        parts = estimate.breakdown_s
        compute.append(math.log((parts.compute + parts.recompute) / run.parts_s["compute"]))
        predicted, measured = parts.tp + parts.cp + parts.ep + parts.dp, run.parts_s["communication"]
        if min(predicted / estimate.step_time_s, measured / run.step_time_s) > _LEAST_SHARE:
            sent.append(math.log(predicted / measured))
    names = ["products", "attention", "elementwise"]
    names += ["host"] if cluster.weakest_device.backend.is_host else []
    kernels, links = _ratio(compute, trust), _ratio(sent, trust)
    kinds = {"scale_up" if level.link.kind == "scale-up" else "scale_out" for level in cluster.levels}
    return {**dict.fromkeys(names, kernels), **dict.fromkeys(sorted(kinds), links)}


def _ratio(logs: Sequence[float], trust: float) -> float:
    return math.exp(trust * float(np.clip(np.mean(logs), -2.7, 2.7))) if logs else 1.0


def _memory(runs: Sequence[PlanRun], before: Sequence[Estimate], cluster: ClusterSpec) -> dict[str, float]:
    """Memory's fields of Calibration, if they predict the runs at least as well as none."""
    measured = [
        MeasuredRun(
            RunInputs(
                model=run.plan.model, cluster=cluster, workload=run.plan.workload, layout=run.plan.layout,
                balanced_stages=True,
                stage_cuts=(*(stage.first_layer_idx for stage in run.plan.stages), run.plan.model.num_layers),
            ),
            run.step_time_s,
            None,
            run.reserved_bytes,
        )
        for run in runs
        if LayoutTable.from_layouts([run.plan.layout], run.plan.workload.global_batch_size).recompute[0] != MIXED
        and not run.plan.pipeline_order  # which says what is in flight, and is no part of a layout
    ]  # fmt: skip
    found = memory_ratios(measured)
    if not found:
        return {}
    changed = cluster.replace(calibration=Calibration().replace(**found))
    after = [reestimate(run.plan, changed) for run in runs]
    errors = [
        np.mean(
            [abs(math.log(e.peak_reserved_bytes / run.reserved_bytes)) for run, e in zip(runs, estimates, strict=True)]
        )
        for estimates in (before, after)
    ]
    return found if errors[1] <= errors[0] else {}
