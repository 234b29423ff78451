"""Robust non-linear least squares of a few coefficients, with numpy alone: calibration happens where planning does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..layouts import FloatArray


def bent(error: FloatArray, width: float) -> FloatArray:
    """Residuals whose square grows linearly beyond ``width`` (pseudo-Huber), for least squares with outliers."""
    return np.asarray(np.sign(error) * np.sqrt(2 * width * (np.sqrt(error**2 + width**2) - width)))


def least_squares(
    misfit: Callable[[FloatArray], FloatArray], start: FloatArray | Sequence[float], num_steps: int = 40
) -> FloatArray:
    """Levenberg-Marquardt with numerical derivatives: the few coefficients here need no more."""
    z, damping = np.asarray(start, dtype=np.float64), 1e-2
    value = misfit(z)
    for _ in range(num_steps):
        slope = np.stack([(misfit(z + step) - value) / 1e-4 for step in 1e-4 * np.eye(len(z))], axis=1)
        curvature = slope.T @ slope
        move = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -slope.T @ value)
        trial = misfit(z + move)
        if trial @ trial < value @ value:
            done = np.abs(move).max() < 1e-5
            z, value, damping = z + move, trial, damping / 3
            if done:
                break
        else:
            damping *= 4
    return z
