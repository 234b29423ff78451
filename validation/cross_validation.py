"""What calibration is worth: a few runs of a source correct the model, its other runs are scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..schema import Calibration, Estimate
from . import RunRow
from .calibration import FloatArray, MeasuredRun, calibrate, estimates_at, measured_runs


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
