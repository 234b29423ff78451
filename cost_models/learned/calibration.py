"""Which matrix products are worth measuring on a device: those the learned model is least sure of, given the others.

Before a device is measured, log(seconds) of its products differ from the prediction by what its coefficients may be off and by a
Gaussian process (`correction.py`); how much of both points leave open depends on where they are and not on their times.
Measuring i takes ``cov(j, i)^2 / (var(i) + noise^2)`` from the variance of every j; the next point is the one that takes most from
all candidates together. (The point of largest variance itself lies on the edge of what is asked for: 30 such points left more
variance in the mean than 30 random ones.)

Shapes outside of the range that the residual was trained on start with a larger variance: there it only follows the roofline.

Robust non-linear least squares of a few coefficients, with numpy alone: calibration happens where planning does.

Products measured on a device as the learned model's own data for it: found once for each profile and dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...schema.arrays import FloatArray
from ...schema.profile import MatmulPoint
from .gemm import (
    SHIPPED_COVARIANCE,
    Covariance,
    GemmCoefficients,
    GemmDevice,
    GemmRates,
    correction_through,
    covariance,
    features,
    known_coefficients,
    model,
    roofline_s,
    whitening_of,
)
from .trees import ResidualModel

NUM_CANDIDATES = 1000


_OUTSIDE = 0.5
"""Of the prior's deviation, for each range's width that a feature lies beyond the trained range."""


def candidate_shapes(rates: GemmRates, *, seed: int, most_s: float, most_bytes: float) -> tuple[FloatArray, ...]:
    """Shapes m, n, k [N] as training has them, in limits of time and memory.

    Log-uniform multiples of 8: 64 to 65536 tokens, widths of 128 (a shard's) to 32768.
    """
    rng = np.random.default_rng(seed)
    least, most = np.log([[8], [16], [16]]), np.log([[8192], [4096], [4096]])
    octets = np.round(np.exp(rng.uniform(least, most, (3, 4 * NUM_CANDIDATES))))
    m, n, k = np.asarray(8.0 * octets, dtype=np.float64)
    num_bytes = rates.element_bytes * (m * n + m * k + n * k)
    seconds = roofline_s(m, n, k, rates.coefficients, rates.hardware, rates.element_bytes)
    fits = (seconds <= most_s) & (num_bytes <= most_bytes)
    return tuple(size[fits][:NUM_CANDIDATES] for size in (m, n, k))


def informative_shapes(
    *,
    flops_per_s: float,
    memory_bandwidth_bytes_per_s: float,
    num_processors: int,
    cache_bytes: float,
    element_bytes: float,
    count: int,
    max_s: float,
    max_bytes: float,
) -> list[tuple[int, int, int]]:
    """Return up to ``count`` products (m, n, k) that are worth measuring on a device nobody has measured, best first.

    Args:
        flops_per_s: best rate measured so far; memory_bandwidth_bytes_per_s: likewise.
        element_bytes: of an operand.
        max_s, max_bytes: limits of one product.
    """
    coefficients, software, _ = known_coefficients("", "")
    peak_flops_per_s = flops_per_s / coefficients.compute_efficiency
    hardware = GemmDevice(peak_flops_per_s, memory_bandwidth_bytes_per_s, num_processors, cache_bytes)
    rates = GemmRates(coefficients, hardware, software, element_bytes)
    m, n, k = candidate_shapes(rates, seed=0, most_s=max_s, most_bytes=max_bytes)
    chosen = most_informative_shapes(m, n, k, rates, count) if len(m) else []
    return [(int(m[i]), int(n[i]), int(k[i])) for i in chosen]


def most_informative_shapes(
    m: FloatArray,
    n: FloatArray,
    k: FloatArray,
    rates: GemmRates,
    count: int,
    *,
    residual: ResidualModel | None = None,
    kernel: Covariance = SHIPPED_COVARIANCE,
) -> list[int]:
    """Positions of up to ``count`` shapes, each the one that takes most variance from all after those before it.

    ``residual``, ``kernel``: in place of the shipped ones.
    """
    own, sheet, trained = rates.coefficients, rates.hardware, residual or model()
    columns = features(m, n, k, own, sheet, element_bytes=rates.element_bytes, software=rates.software)
    deviation = 1.0 + _OUTSIDE * _beyond_trained(columns, trained)
    prior = covariance(columns, trained.log_residual(columns), kernel) * np.outer(deviation, deviation)
    slopes = coefficient_slopes(m, n, k, rates)
    return greedy_choice(prior + slopes @ slopes.T, kernel.noise, count)


def greedy_choice(covariance: FloatArray, noise: float, count: int) -> list[int]:
    """Positions that take most of the variance that is left, one by one, none twice.

    Args:
        covariance: [N, N] between the logarithms of the candidates' times before anything is measured.
        noise: deviation of one measurement.
    """
    left = covariance.copy()
    chosen: list[int] = []
    for _ in range(min(count, len(covariance))):
        gain = np.einsum("ji,ji->i", left, left) / (np.diag(left) + noise**2)
        gain[chosen] = -np.inf
        i = int(np.argmax(gain))
        factor = left[:, i] / np.sqrt(left[i, i] + noise**2)
        left -= np.outer(factor, factor)
        chosen.append(i)
    return chosen


def _beyond_trained(columns: dict[str, FloatArray], trained: ResidualModel) -> FloatArray:
    """How many widths of the trained range the farthest feature lies outside of it [N]."""
    farthest = np.zeros(len(next(iter(columns.values()))))
    for name, low, high in zip(trained.features, trained.low, trained.high, strict=True):
        if high > low and np.ptp(columns[name]) > 0:  # facts of the device are the same for all shapes
            outside = np.maximum(low - columns[name], columns[name] - high)
            farthest = np.maximum(farthest, np.maximum(outside, 0.0) / (high - low))
    return farthest


def soften_outliers(error: FloatArray, width: float) -> FloatArray:
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


_corrected: dict[tuple[int, str, GemmRates], tuple[tuple[MatmulPoint, ...], GemmRates]] = {}


_MAX_ANSWERS = 64
"""Answers kept: one planning uses a profile or two in a dtype or two."""


def corrected_by(points: tuple[MatmulPoint, ...], dtype: str, rates: GemmRates) -> GemmRates:
    """``rates`` corrected by the points in ``dtype`` (`gemm.calibrate`); the same without any.

    A profile's points are told by being the same object: hashing hundreds of them takes longer than looking the answer up.
    """
    if not points:
        return rates
    key = (id(points), dtype, rates)
    if key not in _corrected:
        if len(_corrected) >= _MAX_ANSWERS:
            _corrected.clear()
        # Gradients of weights are as slow as forward products of their shape times a ratio of their own.
        ratio = float(model().provenance["weight_gradient_ratio"])
        mine = np.array(
            [
                (p.m, p.n, p.k, p.time_s / (ratio if p.which == "weight_gradient" else 1.0))
                for p in points
                if p.dtype == dtype
            ],
            dtype=np.float64,
        )
        # The points are kept with the answer, so that no other object gets their id.
        m, n, k, seconds = mine.reshape(-1, 4).T
        _corrected[key] = points, calibrate(m, n, k, seconds, rates) if len(mine) else rates
    return _corrected[key][1]


def calibrate(
    m: FloatArray,
    n: FloatArray,
    k: FloatArray,
    seconds: FloatArray,
    rates: GemmRates,
    *,
    residual: ResidualModel | None = None,
    kernel: Covariance = SHIPPED_COVARIANCE,
) -> GemmRates:
    """Rates corrected by products measured on the device itself: a handful moves the coefficients, tens the residual too.

    Maximum a posteriori: coefficients around ``rates.coefficients`` with the spread they have between device families, points
    near each other counting as alike as the kernel says; then a Gaussian process through what is left (`correction.py`). No
    points give ``rates`` back.

    Args:
        m, n, k, seconds: [P] measured forward products; best spread over sizes from launch-bound to compute-bound.
        residual, kernel: in place of the shipped ones.
    """
    if len(seconds) == 0:
        return rates
    prior, own, residual = np.log(rates.coefficients), rates.coefficients, residual or model()
    sheet, size = rates.hardware, rates.element_bytes
    for _ in range(3):
        columns = features(m, n, k, own, sheet, element_bytes=size, software=rates.software)
        learned = residual.log_residual(columns)
        whitening = whitening_of(columns, learned, kernel)

        def misfit(z: FloatArray, learned: FloatArray = learned, whitening: FloatArray = whitening) -> FloatArray:
            at = GemmCoefficients(*np.exp(z))
            error = np.log(roofline_s(m, n, k, at, sheet, size) / seconds) + learned
            return np.concatenate([soften_outliers(whitening @ error, _ODD), (z - prior) / _SPREAD])

        own = GemmCoefficients(*(float(value) for value in np.exp(least_squares(misfit, prior))))
    corrected = rates._replace(coefficients=own, correction=None)
    columns = features(m, n, k, own, sheet, element_bytes=size, software=rates.software)
    learned = residual.log_residual(columns)
    left = np.log(seconds / roofline_s(m, n, k, own, sheet, size)) - learned
    return corrected._replace(correction=correction_through(columns, learned, left, kernel))


def coefficient_slopes(m: FloatArray, n: FloatArray, k: FloatArray, rates: GemmRates) -> FloatArray:
    """By how much log(seconds) moves with one deviation of each coefficient between families [N, 5]."""
    prior, step = np.log(rates.coefficients), 1e-3

    def moved(z: FloatArray) -> FloatArray:
        return np.log(roofline_s(m, n, k, GemmCoefficients(*np.exp(z)), rates.hardware, rates.element_bytes))

    here = moved(prior)
    return np.stack([(moved(prior + step * e) - here) / step for e in np.diag(_SPREAD)], axis=1)


_SPREAD = (0.4, 0.15, 0.15, 0.3, 0.5)  # of the logarithms of coefficients between families


_ODD = 1.5  # deviations beyond which a point counts linearly: it runs on a kernel of its own
