"""Correct the model by a few measured runs of a cluster: physically named ratios with priors, and how much they help.

The seconds of a run are a sum of terms, each inversely proportional to one ratio theta_j (schema/profile.py), and of what no
ratio touches:

    t(theta) = t0 * (1 - sum_j w_j + sum_j w_j / theta_j),   w_j = share of the term at theta = 1

(shares by halving each rate in turn; where two terms hide behind one another the shares change, so they are taken again at the
solution). The ratios minimise

    sum_i rho((log t_i(theta) - log measured_i) / NOISE)  +  log theta' C^-1 log theta

with rho linear in its tails, so that one odd run does not decide, and C the covariance of PRIORS and COMMON_PRIOR. What like runs
were off by besides is a factor on all rates (likeness.py), solved for with them. Runs left out in turn say how far to follow both:
entirely, half, or not at all.
Memory: activations and a constant, by ridge regression with the same kind of priors.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..schema import Calibration, ClusterSpec, ConfigError, ModelSpec, TrainingEstimate, Workload
from ..schema.profile import MAX_RATIO
from ..schema.units import GIB, BoolArray, FloatArray, IntArray
from .likeness import SCALES, covariance, features
from .predict import RunInputs, estimate_runs, run_inputs, with_calibrations
from .rows import RunRow, read_runs
from .score import memory_kind
from .stalls import stalled

PRIORS = {
    "products": 0.1, "fp8_products": 0.15, "fp4_products": 0.15, "attention": 0.25, "elementwise": 0.25,
    "host": 0.7, "scale_up": 0.4, "scale_out": 0.7,
}  # fmt: skip
"""Standard deviation of the logarithm of each ratio over clusters: kernels of one device differ little between software stacks
(4-7 % for products, twice that between recipes of scaling to fp8, more for attention and elementwise), hosts and networks a lot."""

PRECISIONS = {"fp8_products": "fp8", "fp4_products": "nvfp4"}
"""Of the runs that a ratio is about; others say nothing of it."""

KERNELS, COMMON_PRIOR = ("products", "attention", "elementwise"), 0.15
"""All kernels of a device share its clock, which power limits and cooling move by tens of percent."""

NOISE = 0.10
"""Where errors stop counting as noise: what the model leaves out differs by that from run to run."""

ACTIVATIONS_PRIOR, OVERHEAD_PRIOR_BYTES, MEMORY_NOISE = 0.2, 2 * GIB, 0.02

MEAN_TO_DEVIATION = 1.25
"""Standard deviation over mean absolute deviation of a normal distribution, sqrt(pi / 2)."""

TRUST = (0.0, 0.5, 1.0)
"""How far the ratios may be followed; runs left out in turn decide."""

MAX_FOLDS = 12

SHARE_STEP = 0.5
"""Rates are halved to find the seconds that depend on them: what then comes out of hiding counts too."""


@dataclass(frozen=True)
class MeasuredRun:
    """A run and what was measured: seconds of a step, allocated (or reserved) peak of the fullest device."""

    inputs: RunInputs
    step_time_s: float | None
    allocated_bytes: float | None
    reserved_bytes: float | None

    @property
    def device(self) -> str:
        """Return the name of the slowest device."""
        return self.inputs.cluster.weakest_device.name


RATES = ("products", "attention", "elementwise", "host", "scale_up", "scale_out")
"""Ratios that a factor on the time of a step divides."""


@dataclass(frozen=True, eq=False)
class DeviceCalibration:
    """What runs on one device say.

    Attributes:
        ratios: for runs unlike any of them.
        points: where the runs stand [Q, F]; weights: of the covariance with them [Q].
    """

    ratios: Calibration
    points: FloatArray
    weights: FloatArray

    def of(self, model: ModelSpec, workload: Workload, cluster: ClusterSpec) -> Calibration:
        """Return the calibration for a model and workload on a cluster of the device."""
        if not len(self.weights):
            return self.ratios
        where = features(model, workload, cluster.num_devices)[None]
        slower = math.exp(float(covariance(where, self.points)[0] @ self.weights))
        rates = {name: getattr(self.ratios, name) / slower for name in RATES}
        return self.ratios.replace(**{name: min(max(rate, 1 / MAX_RATIO), MAX_RATIO) for name, rate in rates.items()})

    def of_run(self, inputs: RunInputs) -> Calibration:
        """Return the calibration for a row."""
        return self.of(inputs.model, inputs.workload, inputs.cluster)


def calibration_from_table(path: str | Path, cluster: ClusterSpec, model: ModelSpec, workload: Workload) -> Calibration:
    """Return the calibration that a table of runs gives for a model and workload on a cluster: its runs on the same device.

    Raises:
        ConfigError: the table is not one, or has no usable run on this device.
    """
    device, calibrations = cluster.weakest_device.name, calibrate_by_device(read_runs(path))
    if device not in calibrations:
        known = ", ".join(sorted(calibrations)) or "no device at all"
        raise ConfigError(f"{path} has no usable measured run on {device}", details=(f"it has runs on {known}",))
    return calibrations[device].of(model, workload, cluster)


def calibrate_by_device(rows: Sequence[RunRow]) -> dict[str, DeviceCalibration]:
    """Return a calibration for each device with a usable measured run, by the device's name."""
    by_device: dict[str, list[MeasuredRun]] = defaultdict(list)
    for run in measured_runs(rows):
        by_device[run.device].append(run)
    return {device: calibrate(runs) for device, runs in by_device.items()}


def measured_runs(rows: Sequence[RunRow]) -> list[MeasuredRun]:
    """Return rows that can be predicted and have a time or a memory, without those of low quality and those that stalled."""
    runs = []
    for row, has_stalled in zip(rows, stalled(rows), strict=True):
        inputs = run_inputs(row)
        if isinstance(inputs, str) or not row.is_scored or row.status != "ok" or has_stalled:
            continue
        memory = None if row.peak_mem_gib is None else row.peak_mem_gib * GIB
        peaks = (memory, None) if memory_kind(row.mem_kind) == "allocated" else (None, memory)
        if inputs.measured_s is not None or memory is not None:
            runs.append(MeasuredRun(inputs, inputs.measured_s, *peaks))
    return runs


def calibrate(runs: Sequence[MeasuredRun]) -> DeviceCalibration:
    """Return what a few runs on one kind of device say, as far as it helps on runs left out in turn."""
    timed = [run for run in runs if run.step_time_s is not None]
    fields = {**memory_ratios(runs), "num_runs": len(runs)}
    shares = _Shares.measure(timed, np.zeros(len(PRIORS)))
    timed = [timed[idx] for idx in shares.run_idx]
    if not timed:
        return DeviceCalibration(Calibration().replace(**fields), shares.points, np.zeros(0))
    target = np.log([run.step_time_s or np.nan for run in timed])
    solution = _solve(shares, target)
    if len(timed) == 1:
        return solution.calibration(fields)
    errors = _left_out_errors(shares, target)
    trust = int(np.argmin(np.sum(_loss(errors), axis=1)))
    fields |= left_out_scores(errors[0], errors[trust])
    # Once more at the solution: what hid behind something else may not do so any longer.
    again = _Shares.measure(timed, TRUST[trust] * solution.log_ratios)
    return _solve(again, target).times(TRUST[trust]).calibration(fields)


def left_out_scores(
    log_errors_before: Sequence[float] | FloatArray, log_errors_after: Sequence[float] | FloatArray
) -> dict[str, float]:
    """Return the fields of Calibration about runs left out in turn, from logs of predicted over measured seconds."""
    return {
        "spread": max(MEAN_TO_DEVIATION * float(np.mean(np.abs(log_errors_after))), 1e-6),
        "error_before": float(np.mean(np.abs(np.expm1(log_errors_before)))),
        "error_after": float(np.mean(np.abs(np.expm1(log_errors_after)))),
    }


def _calibration(log_ratios: FloatArray) -> Calibration:
    ratios = np.clip(np.exp(log_ratios), 1 / MAX_RATIO, MAX_RATIO)
    return Calibration().replace(**dict(zip(PRIORS, ratios.tolist(), strict=True)))


class _Solution(NamedTuple):
    """Log ratios [p], and the weights [q] of what like runs at ``points`` [q, F] were off by."""

    log_ratios: FloatArray
    points: FloatArray
    weights: FloatArray

    def times(self, trust: float) -> _Solution:
        return _Solution(trust * self.log_ratios, self.points, trust * self.weights)

    def calibration(self, fields: Mapping[str, float]) -> DeviceCalibration:
        return DeviceCalibration(_calibration(self.log_ratios).replace(**fields), self.points, self.weights)


@dataclass(frozen=True)
class _Shares:
    """Log seconds [n] of runs at log ratios [p], and the share [n, p] of them that each ratio divides.

    Attributes:
        points: where the runs stand in what does not depend on their layout [n, F].
        run_idx: of the runs that have an estimate, which are the rows.
    """

    log_ratios: FloatArray
    log_seconds: FloatArray
    shares: FloatArray
    points: FloatArray
    run_idx: IntArray

    @classmethod
    def measure(cls, runs: Sequence[MeasuredRun], log_ratios: FloatArray) -> _Shares:
        """Estimate the runs with each rate halved in turn."""
        seconds = _seconds(runs, _calibration(log_ratios))
        run_idx = np.flatnonzero(np.isfinite(seconds))
        columns = []
        precisions = {run.inputs.workload.precision for run in runs}
        for name, step in zip(PRIORS, np.eye(len(PRIORS)) * np.log(SHARE_STEP), strict=True):
            is_present = PRECISIONS.get(name, "") in ("", *precisions)
            changed_s = _seconds(runs, _calibration(log_ratios + step)) if is_present else seconds
            columns.append((1 - changed_s / seconds) / (1 - 1 / SHARE_STEP))
        shares = np.clip(np.stack(columns, axis=1), 0.0, 1.0)[run_idx]
        inputs = [runs[int(idx)].inputs for idx in run_idx]
        points = [features(run.model, run.workload, run.cluster.num_devices) for run in inputs]
        return cls(log_ratios, np.log(seconds[run_idx]), shares, np.array(points).reshape(-1, len(SCALES)), run_idx)

    def take(self, rows: BoolArray) -> _Shares:
        return _Shares(
            self.log_ratios, self.log_seconds[rows], self.shares[rows], self.points[rows], self.run_idx[rows]
        )

    def predict_with(self, solution: _Solution) -> FloatArray:
        """Return log seconds under a solution."""
        besides = covariance(self.points, solution.points) @ solution.weights
        return np.asarray(self.predict(solution.log_ratios) + besides)

    def predict(self, log_ratios: FloatArray) -> FloatArray:
        """Return log seconds at other ratios."""
        factor = 1 + self.shares @ np.expm1(self.log_ratios - log_ratios)
        return np.asarray(self.log_seconds + np.log(np.maximum(factor, 0.05)), dtype=np.float64)


def estimates_with(
    runs: Sequence[MeasuredRun], calibration: Calibration | DeviceCalibration
) -> list[TrainingEstimate | str]:
    """Return an estimate of each run on its cluster with ``calibration``, or why there is none."""
    of_run = calibration.of_run if isinstance(calibration, DeviceCalibration) else lambda _: calibration
    return estimate_runs(with_calibrations([run.inputs for run in runs], of_run))


def _seconds(runs: Sequence[MeasuredRun], calibration: Calibration) -> FloatArray:
    return np.array([np.nan if isinstance(e, str) else e.step_time_s for e in estimates_with(runs, calibration)])


def _solve(shares: _Shares, target: FloatArray) -> _Solution:
    """Return the log ratios, and what like runs were off by, with the best fit under their priors."""
    from scipy.optimize import least_squares

    is_kernel = np.array([name in KERNELS for name in PRIORS], dtype=np.float64)
    prior = np.diag(np.square(list(PRIORS.values()))) + COMMON_PRIOR**2 * np.outer(is_kernel, is_kernel)
    root, count = np.linalg.cholesky(prior), len(PRIORS)
    points, group = np.unique(shares.points, axis=0, return_inverse=True)
    group, alike = group.reshape(-1), covariance(points, points) + 1e-8 * np.eye(len(points))
    root_alike = np.linalg.cholesky(alike)

    def residuals(standardised: FloatArray) -> FloatArray:
        besides = (root_alike @ standardised[count:])[group]
        misfit = shares.predict(root @ standardised[:count]) + besides - target
        return np.concatenate([np.sign(misfit) * np.sqrt(2 * _loss(misfit)), standardised])

    start = np.concatenate([np.linalg.solve(root, shares.log_ratios), np.zeros(len(points))])
    best = least_squares(residuals, start, bounds=(-5, 5)).x
    limit = np.log(MAX_RATIO * SHARE_STEP)  # room for a step further
    weights = np.linalg.solve(root_alike.T, best[count:])
    return _Solution(np.clip(root @ best[:count], -limit, limit), points, weights)


def _loss(residuals: FloatArray) -> FloatArray:
    """Return rho: quadratic below NOISE, linear beyond (pseudo-Huber)."""
    return np.asarray(np.sqrt(1 + (residuals / NOISE) ** 2) - 1, dtype=np.float64)


def _left_out_errors(shares: _Shares, target: FloatArray) -> FloatArray:
    """Return log predicted over measured [len(TRUST), n] of each run with the ratios of the other folds, followed more or less."""
    errors = np.tile(shares.log_seconds - target, (len(TRUST), 1))
    folds = _folds(len(target))
    for fold in np.unique(folds):
        is_left_out = folds == fold
        solution = _solve(shares.take(~is_left_out), target[~is_left_out])
        for row, trust in enumerate(TRUST):
            predicted = shares.take(is_left_out).predict_with(solution.times(trust))
            errors[row, is_left_out] = predicted - target[is_left_out]
    return errors


def memory_ratios(runs: Sequence[MeasuredRun]) -> dict[str, float]:
    """Return memory's fields of Calibration: the ratio of the activations and constant overhead, followed as far as it helps.

    measured - predicted = (ratio - 1) * activations + overhead
    """
    with_memory = [run for run in runs if run.allocated_bytes or run.reserved_bytes]
    estimates = estimate_runs([run.inputs for run in with_memory])
    pairs = [(run, e) for run, e in zip(with_memory, estimates, strict=True) if isinstance(e, TrainingEstimate)]
    if not pairs:
        return {}
    allocated = np.array([float(e.peak_allocated_bytes) for _, e in pairs])
    reserved = np.array([e.peak_allocated_bytes if run.allocated_bytes else e.peak_reserved_bytes for run, e in pairs])
    measured = np.array([run.allocated_bytes or run.reserved_bytes for run, _ in pairs]) / (reserved / allocated)
    activations = np.array([float(e.memory_bytes.activations) for _, e in pairs])

    def solve(rows: BoolArray) -> tuple[float, float]:
        """Return the excess of the activations and the overhead."""
        noise = MEMORY_NOISE * measured[rows]
        slopes = np.stack([activations[rows], np.ones(int(rows.sum()))], axis=1) / noise[:, None]
        slopes = np.concatenate([slopes, np.diag([1 / ACTIVATIONS_PRIOR, 1 / OVERHEAD_PRIOR_BYTES])])
        target = np.concatenate([(measured - allocated)[rows] / noise, np.zeros(2)])
        excess, overhead = np.linalg.lstsq(slopes, target, rcond=None)[0]
        if overhead < 0:  # a device never holds less than what is counted: only the activations are corrected
            excess, overhead = np.linalg.lstsq(slopes[:, :1], target, rcond=None)[0][0], 0.0
        return float(np.clip(excess, -0.9, 9.0)), float(overhead)

    trust = 1.0
    if len(pairs) > 1:
        added, folds = np.zeros(len(pairs)), _folds(len(pairs))
        for fold in np.unique(folds):
            excess, overhead = solve(folds != fold)
            added[folds == fold] = excess * activations[folds == fold] + overhead
        errors = [np.mean(np.abs(np.log(np.maximum(allocated + k * added, 1.0) / measured))) for k in TRUST]
        trust = TRUST[int(np.argmin(errors))]
    excess, overhead = solve(np.ones(len(pairs), dtype=bool))
    return {"activations": 1 + trust * excess, "overhead_bytes": trust * overhead}


def _folds(count: int) -> IntArray:
    """Return which of the runs [count] are left out together."""
    return np.arange(count) % min(MAX_FOLDS, count)


@dataclass(frozen=True)
class CalibrationScore:
    """Errors on the runs of one source and device that a draw of calibration runs does not have, mean over draws.

    Attributes:
        mape_before, mape_after: without and with calibration; worst_after: of the worst draw.
        memory_before, memory_after: the same of allocated peaks; None where none was measured.
    """

    device: str
    draws: int
    rows: int
    mape_before: float
    mape_after: float
    worst_after: float
    bias_after: float
    memory_before: float | None
    memory_after: float | None


def cross_validate(rows: Sequence[RunRow], num_runs: int, *, draws: int = 5) -> dict[str, CalibrationScore]:
    """Calibrate each source's most frequent device with ``num_runs`` random runs and score its others; several times.

    Sources with fewer than twice as many measured runs are left out. The draws are the same every time.
    """
    by_source: dict[str, list[MeasuredRun]] = {}
    for source in dict.fromkeys(row.source_set for row in rows):
        members = measured_runs([row for row in rows if row.source_set == source])
        by_source[source] = [run for run in members if run.step_time_s]
    scores = {}
    for source, runs in by_source.items():
        if not runs:  # no times, or all of them calibrate already
            continue
        devices = [run.device for run in runs]
        device = max(sorted(set(devices)), key=devices.count)
        members = [run for run in runs if run.device == device]
        if len(members) >= 2 * num_runs:
            scores[source] = _cross_validate(device, members, num_runs, draws)
    return scores


def _cross_validate(device: str, runs: list[MeasuredRun], num_runs: int, draws: int) -> CalibrationScore:
    plain = _ratios(runs, Calibration())
    ratios = np.empty((draws, 2, len(runs) - num_runs, 2))  # draw; before and after; run; time and memory
    for draw in range(draws):
        order = np.random.default_rng(draw).permutation(len(runs))
        calibration = calibrate([runs[idx] for idx in order[:num_runs]])
        others = order[num_runs:]
        ratios[draw] = plain[others], _ratios([runs[idx] for idx in others], calibration)
    mape = np.ma.masked_invalid(np.abs(ratios - 1)).mean(axis=2)
    means = mape.mean(axis=0)
    memory_before, memory_after = (None if error is np.ma.masked else float(error) for error in means[:, 1])
    return CalibrationScore(
        device=device,
        draws=draws,
        rows=len(runs) - num_runs,
        mape_before=float(means[0, 0]),
        mape_after=float(means[1, 0]),
        worst_after=float(mape[:, 1, 0].max()),
        bias_after=float(np.expm1(np.mean(np.nanmean(np.log(ratios[:, 1, :, 0]), axis=1)))),
        memory_before=memory_before,
        memory_after=memory_after,
    )


def _ratios(runs: Sequence[MeasuredRun], calibration: Calibration | DeviceCalibration) -> FloatArray:
    """Return predicted over measured [n, 2] of step time and of memory; NaN where either is not known."""
    ratios = np.full((len(runs), 2), np.nan)
    for idx, (run, e) in enumerate(zip(runs, estimates_with(runs, calibration), strict=True)):
        if isinstance(e, TrainingEstimate):
            peak = e.peak_allocated_bytes if run.allocated_bytes else e.peak_reserved_bytes
            ratios[idx, 0] = e.step_time_s / (run.step_time_s or np.nan)
            ratios[idx, 1] = peak / (run.allocated_bytes or run.reserved_bytes or np.nan)
    return ratios
