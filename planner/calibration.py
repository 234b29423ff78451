"""A few measured runs of one's own cluster correct the model: physically named ratios with priors.

The seconds of a run are a sum of parts, each inversely proportional to one ratio theta_j (schema/calibration.py), and of what no
ratio touches:

    t(theta) = t0 * (1 - sum_j w_j + sum_j w_j / theta_j),   w_j = share of the part at theta = 1

(shares by doubling each rate in turn; where two parts hide behind one another the shares change, so they are taken again at the
solution). The ratios minimise

    sum_i rho((log t_i(theta) - log measured_i) / NOISE)  +  sum_j (log theta_j / PRIORS[j])^2

with rho linear in its tails, so that one odd run does not decide. Runs left out in turn say whether that helps: if it does
not, the ratios stay one. Memory: activations and a constant, by ridge regression with the same kind of priors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..schema import Calibration, ClusterSpec, ConfigError, Estimate
from ..schema.units import GIB
from .validation import RunInputs, RunRow, Skip, read_runs, run_inputs
from .validation.predict import estimate_runs
from .validation.score import memory_kind

FloatArray = NDArray[np.float64]

PRIORS = {"products": 0.15, "attention": 0.3, "elementwise": 0.3, "host": 0.7, "scale_up": 0.4, "scale_out": 0.7}
"""Standard deviation of the logarithm of each ratio over clusters: kernels of one device differ little between software stacks
(4-7 % for products, more for attention and elementwise), hosts and networks a lot."""

NOISE = 0.10
"""Spread of repeated runs and of what the model leaves out: repeats differ by 1-5 % on managed clusters, more on others."""

ACTIVATIONS_PRIOR, OVERHEAD_PRIOR_BYTES, MEMORY_NOISE = 0.2, 2 * GIB, 0.02

MEAN_TO_DEVIATION = 1.25
"""Standard deviation over mean absolute deviation of a normal distribution, sqrt(pi / 2)."""

FOLDS = 5
SHARE_STEP = 2.0
"""Rates are doubled to find the seconds that depend on them."""


@dataclass(frozen=True)
class MeasuredRun:
    """A run and what was measured: seconds of a step, allocated (or reserved) peak of the fullest device."""

    inputs: RunInputs
    step_time_s: float | None
    allocated_bytes: float | None
    reserved_bytes: float | None


def calibration_from_file(path: str | Path, cluster: ClusterSpec) -> Calibration:
    """The calibration that a table of runs gives for a cluster: its runs on the same device.

    Raises:
        ConfigError: the table is not one, or has no usable run on this device.
    """
    device = cluster.weakest_device.name
    found = calibrations_from_rows(read_runs(path))
    if device not in found:
        known = ", ".join(sorted(found)) or "no device at all"
        raise ConfigError(f"{path} has no usable measured run on {device}", details=(f"it has runs on {known}",))
    return found[device]


def calibrations_from_rows(rows: Sequence[RunRow]) -> dict[str, Calibration]:
    """A calibration for each device with a usable measured run, by the device's name."""
    runs: dict[str, list[MeasuredRun]] = {}
    for run in measured_runs(rows):
        runs.setdefault(run.inputs.cluster.weakest_device.name, []).append(run)
    return {device: calibrate(members) for device, members in runs.items()}


def measured_runs(rows: Sequence[RunRow]) -> list[MeasuredRun]:
    """Rows that can be predicted and have a time or a memory, without those that a table itself does not trust."""
    found = []
    for row in rows:
        inputs = run_inputs(row)
        if isinstance(inputs, Skip) or not row.is_scored or row.status != "ok":
            continue
        memory = None if row.peak_mem_gib is None else row.peak_mem_gib * GIB
        is_allocated = memory_kind(row.mem_kind) == "allocated"
        if row.measured_s is not None or memory is not None:
            found.append(
                MeasuredRun(inputs, row.measured_s, memory if is_allocated else None, None if is_allocated else memory)
            )
    return found


def calibrate(runs: Sequence[MeasuredRun]) -> Calibration:
    """The ratios that a few runs on one kind of device give; all one where they do not help on runs left out."""
    timed = [run for run in runs if run.step_time_s is not None]
    memory = _memory_ratios(runs)
    shares = _Shares.of(timed, Calibration())
    timed = [timed[idx] for idx in shares.known]
    if not timed:
        return Calibration().replace(**memory, num_runs=len(runs))
    target = np.log([run.step_time_s or np.nan for run in timed])
    before, after = _left_out(shares, target)
    helps = len(timed) == 1 or bool(np.sum(_loss(after)) < np.sum(_loss(before)))
    ratios = _solve(shares, target) if helps else {}
    if helps:  # once more at the solution: what hid behind something else may not do so any longer
        ratios = _solve(_Shares.of(timed, Calibration().replace(**ratios)), target, start=ratios)
    residuals = after if helps else before
    found = Calibration().replace(**ratios, **memory, num_runs=len(runs))
    if len(timed) == 1:
        return found
    return found.replace(
        spread=max(MEAN_TO_DEVIATION * float(np.mean(np.abs(residuals))), 1e-6),
        error_before=float(np.mean(np.abs(np.expm1(before)))),
        error_after=float(np.mean(np.abs(np.expm1(residuals)))),
    )


@dataclass(frozen=True)
class _Shares:
    """Log seconds [n] of runs at given ratios and the share [n, p] of them that each ratio divides."""

    log_seconds: FloatArray
    shares: FloatArray
    known: tuple[int, ...]

    @classmethod
    def of(cls, runs: Sequence[MeasuredRun], at: Calibration) -> _Shares:
        seconds = _seconds(runs, at)
        known = tuple(int(idx) for idx in np.flatnonzero(np.isfinite(seconds)))
        columns = []
        for name in PRIORS:
            faster = _seconds(runs, at.model_copy(update={name: getattr(at, name) * SHARE_STEP}))
            columns.append((1 - faster / seconds) / (1 - 1 / SHARE_STEP))
        shares = np.clip(np.stack(columns, axis=1), 0.0, 1.0)[list(known)]
        return cls(np.log(seconds[list(known)]), shares, known)

    def take(self, idxs: NDArray[Any]) -> _Shares:
        return _Shares(self.log_seconds[idxs], self.shares[idxs], self.known)

    def predict(self, log_ratios: FloatArray) -> FloatArray:
        """Log seconds at ratios that are ``exp(log_ratios)`` times those the shares were taken at."""
        factor = 1 + self.shares @ np.expm1(-log_ratios)
        return np.asarray(self.log_seconds + np.log(np.maximum(factor, 0.05)), dtype=np.float64)


def estimates_at(runs: Sequence[MeasuredRun], calibration: Calibration) -> list[Estimate | str]:
    """An estimate of each run on its cluster with ``calibration``, or why there is none."""
    clusters = {id(run.inputs.cluster): run.inputs.cluster for run in runs}
    calibrated = {key: cluster.replace(calibration=calibration) for key, cluster in clusters.items()}
    return estimate_runs([replace(run.inputs, cluster=calibrated[id(run.inputs.cluster)]) for run in runs])


def _seconds(runs: Sequence[MeasuredRun], calibration: Calibration) -> FloatArray:
    return np.array([e.step_time_s if isinstance(e, Estimate) else np.nan for e in estimates_at(runs, calibration)])


def _solve(shares: _Shares, target: FloatArray, start: dict[str, float] | None = None) -> dict[str, float]:
    """The ratios with the best fit under their priors."""
    from scipy.optimize import least_squares

    sigmas = np.array(list(PRIORS.values()))
    offset = np.log([start[name] for name in PRIORS]) if start else np.zeros(len(PRIORS))

    def residuals(log_ratios: FloatArray) -> FloatArray:
        misfit = shares.predict(log_ratios - offset) - target
        return np.concatenate([np.sign(misfit) * np.sqrt(2 * _loss(misfit)), log_ratios / sigmas])

    found = least_squares(residuals, offset, bounds=(-2.5, 2.5))
    return dict(zip(PRIORS, np.exp(found.x).tolist(), strict=True))


def _loss(residuals: FloatArray) -> FloatArray:
    """Quadratic below NOISE, linear beyond (pseudo-Huber)."""
    return np.asarray(np.sqrt(1 + (residuals / NOISE) ** 2) - 1, dtype=np.float64)


def _left_out(shares: _Shares, target: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Log predicted over measured of each run, without ratios and with those of the other folds."""
    before = shares.log_seconds - target
    after = before.copy()
    folds = np.arange(len(target)) % min(FOLDS, max(len(target), 2))
    for fold in np.unique(folds):
        inside, outside = folds == fold, folds != fold
        if outside.any():
            ratios = _solve(shares.take(outside), target[outside])
            log_ratios = np.log([ratios[name] for name in PRIORS])
            after[inside] = shares.take(inside).predict(log_ratios) - target[inside]
    return before, after


def _memory_ratios(runs: Sequence[MeasuredRun]) -> dict[str, float]:
    """Ratio of the activations and constant overhead: measured - predicted = (ratio - 1) * activations + overhead."""
    with_memory = [run for run in runs if run.allocated_bytes or run.reserved_bytes]
    pairs = [
        (run, e)
        for run, e in zip(with_memory, estimate_runs([run.inputs for run in with_memory]), strict=True)
        if isinstance(e, Estimate)
    ]
    if not pairs:
        return {}
    slack = np.array(
        [1.0 if run.allocated_bytes else e.peak_reserved_bytes / e.peak_allocated_bytes for run, e in pairs]
    )
    measured = np.array([run.allocated_bytes or run.reserved_bytes for run, _ in pairs]) / slack
    activations = np.array([float(e.memory_bytes.activations) for _, e in pairs])
    missing = measured - np.array([float(e.peak_allocated_bytes) for _, e in pairs])
    noise = MEMORY_NOISE * measured
    rows = np.concatenate([np.stack([activations, np.ones(len(pairs))], axis=1) / noise[:, None], np.eye(2)])
    rows[-2:] = np.diag([1 / ACTIVATIONS_PRIOR, 1 / OVERHEAD_PRIOR_BYTES])
    ratio, overhead = np.linalg.lstsq(rows, np.concatenate([missing / noise, np.zeros(2)]), rcond=None)[0]
    if overhead < 0:  # a device never holds less than what is counted: the activations alone are corrected
        ratio, overhead = (
            np.linalg.lstsq(rows[:, :1], np.concatenate([missing / noise, np.zeros(2)]), rcond=None)[0][0],
            0.0,
        )
    return {"activations": float(np.clip(1 + ratio, 0.1, 10.0)), "overhead_bytes": float(overhead)}
