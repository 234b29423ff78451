"""Correct a machine's profile by runs of `apply` on it: ratios by the terms of a step, folded into its rates.

A run has the seconds of its busiest rank by terms (runtime/training/step_clock.py), so each ratio is read where it acts. With p and
m the predicted and measured seconds of a term, over all runs that have it,

    kernels (products, attention, elementwise, and the host where it is the same cores)   exp(mean log(p / m)) of compute
    scale_up, scale_out                                                                    the same of communication

Ratios within a term keep their proportions: a step does not tell them apart. Memory: activations and a constant
(table_calibration.memory_ratios). Of all this, half, or nothing is followed, whichever predicts the runs best: with three runs or
more each run by the ratios of the others, so that a second estimate is never worse than the first on the runs themselves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..planner.planned_stages import reestimate
from ..schema import Calibration, ClusterSpec, ConfigError, TrainingEstimate, TrainingPlan
from ..schema.base import read_text, shown
from ..schema.profile import MAX_RATIO
from .predict import RunInputs
from .table_calibration import TRUST, MeasuredRun, left_out_scores, memory_ratios

MIN_RUNS_TO_LEAVE_OUT = 3

_MIN_SHARE = 0.02
"""Of the step; terms below it are noise."""


@dataclass(frozen=True)
class PlanRun:
    """A plan and what its run measured: seconds by term, of a step, and the peak of the fullest device."""

    plan: TrainingPlan
    terms_s: Mapping[str, float]
    step_time_s: float
    reserved_bytes: float


def read_run(plan: str | Path, metrics: str | Path) -> PlanRun:
    """Return a plan with the metrics that `apply` wrote of it.

    Raises:
        ConfigError: the metrics have no comparison at their end, or are of an older version without terms.
    """
    loaded, last = TrainingPlan.load(plan), _last_record(metrics)
    measured = last.get("measured")
    if not isinstance(measured, dict) or not isinstance(measured.get("parts_s"), dict) or not measured["parts_s"]:
        raise ConfigError(
            f"{metrics} does not end with a comparison of prediction and measurement",
            help="let `meshwright apply PLAN --metrics FILE` run to its end with this version",
        )
    tokens = math.prod(_number(metrics, last.get("predicted"), name) for name in ("tokens_per_s", "step_time_s"))
    if abs(tokens / loaded.workload.tokens_per_step - 1) > 1e-6:
        raise ConfigError(f"{metrics} is of another plan than {plan}: steps of {tokens:.0f} tokens")
    terms_s = {name: _number(metrics, measured["parts_s"], name, minimum=0.0) for name in measured["parts_s"]}
    step_s, peak = (_number(metrics, measured, name) for name in ("step_time_s", "peak_reserved_bytes"))
    for name in ("compute", "communication"):
        if name not in terms_s or (name == "compute" and not terms_s[name]):
            raise ConfigError(f"{metrics}: parts_s says nothing of {name}")
    return PlanRun(loaded, terms_s, step_s, peak)


def _number(metrics: str | Path, record: Any, name: str, *, minimum: float = 1e-12) -> float:
    """Return a number of a record, seconds or bytes."""
    value = record.get(name) if isinstance(record, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= 2**60:
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


def calibrate_from_runs(runs: Sequence[PlanRun], cluster: ClusterSpec) -> Calibration:
    """Return the calibration that runs on a cluster give; nothing of an earlier one stays.

    Raises:
        ConfigError: there is no run, or one is so far off that it measured something else.
    """
    if not runs:
        raise ConfigError("there is no run to calibrate with")
    cluster = cluster.replace(calibration=Calibration())
    before = [reestimate(run.plan, cluster) for run in runs]
    for run, first in zip(runs, before, strict=True):
        ratio = run.step_time_s / first.step_time_s
        if not 1 / MAX_RATIO < ratio < MAX_RATIO:
            raise ConfigError(f"a run took {ratio:.3g} times its predicted step: it is of another machine or plan")
    trust, errors_after = _choose_trust(runs, before, cluster)
    fields = _time_ratios(runs, before, cluster, trust) | _memory_ratios(runs, before, cluster)
    calibration = Calibration().replace(**fields, num_runs=len(runs))
    if len(runs) < MIN_RUNS_TO_LEAVE_OUT:
        return calibration
    return calibration.replace(**left_out_scores(_log_errors(runs, before), errors_after))


def _log_errors(runs: Sequence[PlanRun], estimates: Sequence[TrainingEstimate]) -> list[float]:
    """Return the log of predicted over measured step time of each run."""
    return [math.log(e.step_time_s / run.step_time_s) for run, e in zip(runs, estimates, strict=True)]


def _choose_trust(
    runs: Sequence[PlanRun], before: Sequence[TrainingEstimate], cluster: ClusterSpec
) -> tuple[float, list[float]]:
    """Return how far to follow the ratios, and the log errors of the runs under it."""
    best, best_errors = TRUST[0], _log_errors(runs, before)
    for trust in TRUST[1:]:
        after = []
        for idx, run in enumerate(runs):
            others = [i for i in range(len(runs)) if i != idx or len(runs) < MIN_RUNS_TO_LEAVE_OUT]
            ratios = _time_ratios([runs[i] for i in others], [before[i] for i in others], cluster, trust)
            after.append(reestimate(run.plan, cluster.replace(calibration=Calibration().replace(**ratios))))
        errors = _log_errors(runs, after)
        if np.mean(np.abs(errors)) <= np.mean(np.abs(best_errors)):
            best, best_errors = trust, errors
    return best, best_errors


def _time_ratios(
    runs: Sequence[PlanRun], before: Sequence[TrainingEstimate], cluster: ClusterSpec, trust: float
) -> dict[str, float]:
    """Return the ratios of kernels and links, fields of Calibration."""
    compute_logs: list[float] = []
    link_logs: list[float] = []
    for run, first in zip(runs, before, strict=True):
        terms = first.breakdown_s
        compute_logs.append(math.log((terms.compute + terms.recompute) / run.terms_s["compute"]))
        predicted, measured = terms.tp + terms.cp + terms.ep + terms.dp, run.terms_s["communication"]
        if min(predicted / first.step_time_s, measured / run.step_time_s) > _MIN_SHARE:
            link_logs.append(math.log(predicted / measured))
    kernels = ["products", "attention", "elementwise"]
    kernels += ["host"] if cluster.weakest_device.backend.is_host else []
    links = {"scale_up" if level.link.kind == "scale-up" else "scale_out" for level in cluster.levels}
    kernel_ratio, link_ratio = _ratio(compute_logs, trust), _ratio(link_logs, trust)
    return {**dict.fromkeys(kernels, kernel_ratio), **dict.fromkeys(sorted(links), link_ratio)}


def _ratio(logs: Sequence[float], trust: float) -> float:
    return float(np.clip(math.exp(trust * np.mean(logs)), 1 / MAX_RATIO, MAX_RATIO)) if logs else 1.0


def _memory_ratios(
    runs: Sequence[PlanRun], before: Sequence[TrainingEstimate], cluster: ClusterSpec
) -> dict[str, float]:
    """Return memory's fields of Calibration, if they predict the runs at least as well as none."""
    measured = []
    for run in runs:
        plan = run.plan
        if (
            plan.layout.recompute == "mixed" or plan.pipeline_order
        ):  # an order says what is in flight, and no layout has it
            continue
        cuts = (*(stage.first_layer_idx for stage in plan.stages), plan.model.num_layers)
        inputs = RunInputs(plan.model, cluster, plan.workload, plan.layout, balanced_stages=True, stage_cuts=cuts)
        measured.append(MeasuredRun(inputs, run.step_time_s, None, run.reserved_bytes))
    ratios = memory_ratios(measured)
    if not ratios:
        return {}
    calibrated = cluster.replace(calibration=Calibration().replace(**ratios))
    after = [reestimate(run.plan, calibrated) for run in runs]
    error_before, error_after = (
        np.mean([abs(math.log(e.peak_reserved_bytes / r.reserved_bytes)) for r, e in zip(runs, estimates, strict=True)])
        for estimates in (before, after)
    )
    return ratios if error_after <= error_before else {}
