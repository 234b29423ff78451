"""A few measured runs of one's own cluster correct the model: physically named ratios with priors.

The seconds of a run are a sum of parts, each inversely proportional to one ratio theta_j (schema/profile.py), and of what no
ratio touches:

    t(theta) = t0 * (1 - sum_j w_j + sum_j w_j / theta_j),   w_j = share of the part at theta = 1

(shares by halving each rate in turn; where two parts hide behind one another the shares change, so they are taken again at the
solution). The ratios minimise

    sum_i rho((log t_i(theta) - log measured_i) / NOISE)  +  log theta' C^-1 log theta

with rho linear in its tails, so that one odd run does not decide, and C the covariance of PRIORS and COMMON_PRIOR. Runs left out
in turn say how far to follow the ratios: wholly, half, or not at all.
Memory: activations and a constant, by ridge regression with the same kind of priors.

What calibration is worth: a few runs of a source correct the model, its other runs are scored.
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
from . import RunInputs, RunRow, Skip, read_runs, run_inputs
from .predict import estimate_runs
from .score import memory_kind

FloatArray = NDArray[np.float64]


PRIORS = {"products": 0.1, "attention": 0.25, "elementwise": 0.25, "host": 0.7, "scale_up": 0.4, "scale_out": 0.7}
"""Standard deviation of the logarithm of each ratio over clusters: kernels of one device differ little between software stacks
(4-7 % for products, more for attention and elementwise), hosts and networks a lot."""


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


def calibration_from_table(path: str | Path, cluster: ClusterSpec) -> Calibration:
    """The calibration that a table of runs gives for a cluster: its runs on the same device.

    Raises:
        ConfigError: the table is not one, or has no usable run on this device.
    """
    device = cluster.weakest_device.name
    found = calibrate_by_device(read_runs(path))
    if device not in found:
        known = ", ".join(sorted(found)) or "no device at all"
        raise ConfigError(f"{path} has no usable measured run on {device}", details=(f"it has runs on {known}",))
    return found[device]


def calibrate_by_device(rows: Sequence[RunRow]) -> dict[str, Calibration]:
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
    """The ratios that a few runs on one kind of device give, as far as they help on runs left out in turn."""
    timed = [run for run in runs if run.step_time_s is not None]
    memory = memory_ratios(runs)
    shares = _Shares.of(timed, np.zeros(len(PRIORS)))
    timed = [timed[idx] for idx in shares.known]
    if not timed:
        return Calibration().replace(**memory, num_runs=len(runs))
    target = np.log([run.step_time_s or np.nan for run in timed])
    if len(timed) == 1:
        return _calibration(_solve(shares, target)).replace(**memory, num_runs=len(runs))
    left_out = _left_out(shares, target)
    trust = int(np.argmin(np.sum(_loss(left_out), axis=1)))
    log_ratios = TRUST[trust] * _solve(shares, target)
    # Once more at the solution: what hid behind something else may not do so any longer.
    log_ratios = TRUST[trust] * _solve(_Shares.of(timed, log_ratios), target)
    return _calibration(log_ratios).replace(
        **memory,
        num_runs=len(runs),
        spread=max(MEAN_TO_DEVIATION * float(np.mean(np.abs(left_out[trust]))), 1e-6),
        error_before=float(np.mean(np.abs(np.expm1(left_out[0])))),
        error_after=float(np.mean(np.abs(np.expm1(left_out[trust])))),
    )


def _calibration(log_ratios: FloatArray) -> Calibration:
    return Calibration().replace(**dict(zip(PRIORS, np.exp(log_ratios).tolist(), strict=True)))


@dataclass(frozen=True)
class _Shares:
    """Log seconds [n] of runs at log ratios ``at`` [p], and the share [n, p] of them that each ratio divides."""

    at: FloatArray
    log_seconds: FloatArray
    shares: FloatArray
    known: tuple[int, ...]

    @classmethod
    def of(cls, runs: Sequence[MeasuredRun], at: FloatArray) -> _Shares:
        seconds = _seconds(runs, _calibration(at))
        known = tuple(int(idx) for idx in np.flatnonzero(np.isfinite(seconds)))
        columns = []
        for step in np.eye(len(PRIORS)) * np.log(SHARE_STEP):
            faster = _seconds(runs, _calibration(at + step))
            columns.append((1 - faster / seconds) / (1 - 1 / SHARE_STEP))
        shares = np.clip(np.stack(columns, axis=1), 0.0, 1.0)[list(known)]
        return cls(at, np.log(seconds[list(known)]), shares, known)

    def take(self, idxs: NDArray[Any]) -> _Shares:
        return _Shares(self.at, self.log_seconds[idxs], self.shares[idxs], self.known)

    def predict(self, log_ratios: FloatArray) -> FloatArray:
        """Log seconds at other ratios."""
        factor = 1 + self.shares @ np.expm1(self.at - log_ratios)
        return np.asarray(self.log_seconds + np.log(np.maximum(factor, 0.05)), dtype=np.float64)


def estimates_at(runs: Sequence[MeasuredRun], calibration: Calibration) -> list[Estimate | str]:
    """An estimate of each run on its cluster with ``calibration``, or why there is none."""
    clusters = {id(run.inputs.cluster): run.inputs.cluster for run in runs}
    calibrated = {key: cluster.replace(calibration=calibration) for key, cluster in clusters.items()}
    return estimate_runs([replace(run.inputs, cluster=calibrated[id(run.inputs.cluster)]) for run in runs])


def _seconds(runs: Sequence[MeasuredRun], calibration: Calibration) -> FloatArray:
    return np.array([e.step_time_s if isinstance(e, Estimate) else np.nan for e in estimates_at(runs, calibration)])


def _solve(shares: _Shares, target: FloatArray) -> FloatArray:
    """The log ratios with the best fit under their priors."""
    from scipy.optimize import least_squares

    is_kernel = np.array([name in KERNELS for name in PRIORS], dtype=np.float64)
    covariance = np.diag(np.square(list(PRIORS.values()))) + COMMON_PRIOR**2 * np.outer(is_kernel, is_kernel)
    root = np.linalg.cholesky(covariance)

    def residuals(standardised: FloatArray) -> FloatArray:
        misfit = shares.predict(root @ standardised) - target
        return np.concatenate([np.sign(misfit) * np.sqrt(2 * _loss(misfit)), standardised])

    start = np.linalg.solve(root, shares.at)
    return np.asarray(root @ least_squares(residuals, start, bounds=(-5, 5)).x, dtype=np.float64)


def _loss(residuals: FloatArray) -> FloatArray:
    """Quadratic below NOISE, linear beyond (pseudo-Huber)."""
    return np.asarray(np.sqrt(1 + (residuals / NOISE) ** 2) - 1, dtype=np.float64)


def _left_out(shares: _Shares, target: FloatArray) -> FloatArray:
    """Log predicted over measured [len(TRUST), n] of each run with the ratios of the other folds, trusted more or less."""
    found = np.tile(shares.log_seconds - target, (len(TRUST), 1))
    folds = np.arange(len(target)) % min(MAX_FOLDS, len(target))
    for fold in np.unique(folds):
        inside = folds == fold
        log_ratios = _solve(shares.take(~inside), target[~inside])
        for row, trust in enumerate(TRUST):
            found[row, inside] = shares.take(inside).predict(trust * log_ratios) - target[inside]
    return found


def memory_ratios(runs: Sequence[MeasuredRun]) -> dict[str, float]:
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


@dataclass(frozen=True)
class CalibrationScore:
    """Errors on the runs of one source and device that a draw of calibration runs left, mean over draws.

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
    """For each source: calibrate its most frequent device with ``num_runs`` random runs, score the others; several times.

    Sources with fewer than twice as many measured runs are left out. The draws are the same every time.
    """
    by_source: dict[str, list[MeasuredRun]] = {}
    for row in rows:
        by_source.setdefault(row.source_set, []).extend(run for run in measured_runs([row]) if run.step_time_s)
    found = {}
    for source, runs in by_source.items():
        if not runs:  # no times, or all of them calibrate already
            continue
        devices = [run.inputs.cluster.weakest_device.name for run in runs]
        device = max(sorted(set(devices)), key=devices.count)
        members = [run for run, name in zip(runs, devices, strict=True) if name == device]
        if len(members) >= 2 * num_runs:
            found[source] = _cross_validate(device, members, num_runs, draws)
    return found


def _cross_validate(device: str, runs: list[MeasuredRun], num_runs: int, draws: int) -> CalibrationScore:
    before = _ratios(runs, Calibration())
    kept, after = [], []
    for draw in range(draws):
        chosen = np.random.default_rng(draw).permutation(len(runs))
        calibration = calibrate([runs[idx] for idx in chosen[:num_runs]])
        rest = chosen[num_runs:]
        kept.append(before[rest])
        after.append(_ratios([runs[idx] for idx in rest], calibration))
    errors = [[_mape(ratios[:, column]) for ratios in draw] for draw in (kept, after) for column in (0, 1)]
    times_before, memory_before, times_after, memory_after = ([e for e in column if e is not None] for column in errors)
    return CalibrationScore(
        device=device,
        draws=draws,
        rows=len(runs) - num_runs,
        mape_before=float(np.mean(times_before)),
        mape_after=float(np.mean(times_after)),
        worst_after=max(times_after),
        bias_after=float(np.expm1(np.mean([np.nanmean(np.log(ratios[:, 0])) for ratios in after]))),
        memory_before=float(np.mean(memory_before)) if memory_before else None,
        memory_after=float(np.mean(memory_after)) if memory_after else None,
    )


def _ratios(runs: Sequence[MeasuredRun], calibration: Calibration) -> FloatArray:
    """Predicted over measured [n, 2] of step time and of memory; NaN where either is not known."""
    found = np.full((len(runs), 2), np.nan)
    for idx, (run, e) in enumerate(zip(runs, estimates_at(runs, calibration), strict=True)):
        if isinstance(e, Estimate):
            found[idx, 0] = e.step_time_s / (run.step_time_s or np.nan)
            memory = run.allocated_bytes, run.reserved_bytes
            predicted = e.peak_allocated_bytes if memory[0] else e.peak_reserved_bytes
            found[idx, 1] = predicted / (memory[0] or memory[1] or np.nan)
    return found


def _mape(ratios: FloatArray) -> float | None:
    known = ratios[np.isfinite(ratios)]
    return float(np.mean(np.abs(known - 1))) if len(known) else None
