"""Products measured on one device: which are worth measuring, and the learned model corrected by them.

**Which.** Before a device is measured, log(seconds) of its products differ from the prediction by what its coefficients may be off
and by a Gaussian process; how much of both points leave open depends on where they are and not on their times.
Measuring i takes ``cov(j, i)^2 / (var(i) + noise^2)`` from the variance of every j; the next point is the one that takes most from
all candidates together. (The point of largest variance itself lies on the edge of the candidates: 30 such points left more
variance in the mean than 30 random ones.) Shapes outside of the range that the residual was trained on start with a larger
variance: there it only follows the roofline.

**Correction.** Robust non-linear least squares of a few coefficients, then a Gaussian process through the measured products:

    log(measured / roofline) = T + f        f ~ GP(0, k),   T the shipped trees
    k(x, y) = a^2 M(|x - y|) + s^2 T(x) T(y) + o^2          M(d) = (1 + sqrt(3) d) exp(-sqrt(3) d)

Distances are over dimensionless features and T, each over its length. M (Matern 3/2) is what is alike in the neighbourhood of a
point, s what of the trees carries over to this device at all, o what is common to all shapes; each measured time has a noise.
Lengths and deviations were fitted on devices that the trees had not seen (fitting/gemm.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ...schema.profile import MatmulPoint
from ...schema.units import FloatArray
from .kernels import (
    GemmCoefficients,
    GemmDevice,
    GemmRates,
    ResidualModel,
    features,
    known_coefficients,
    roofline_s,
    shipped_model,
)

NUM_CANDIDATES = 1000

_SPREAD = (0.4, 0.15, 0.15, 0.3, 0.5)
"""Of the logarithms of coefficients between families of devices."""

_ODD = 1.5
"""Deviations beyond which a point counts linearly: its kernel differs from those around it."""

_OUTSIDE = 0.5
"""Of the prior's deviation, for each range's width that a feature lies beyond the trained range."""


def candidate_shapes(rates: GemmRates, *, seed: int, max_s: float, max_bytes: float) -> tuple[FloatArray, ...]:
    """Return shapes m, n, k [N] as training has them, in limits of time and memory.

    Log-uniform multiples of 8: 64 to 65536 tokens, widths of 128 (a shard's) to 32768.
    """
    rng = np.random.default_rng(seed)
    low, high = np.log([[8], [16], [16]]), np.log([[8192], [4096], [4096]])
    octets = np.round(np.exp(rng.uniform(low, high, (3, 4 * NUM_CANDIDATES))))
    m, n, k = np.asarray(8.0 * octets, dtype=np.float64)
    num_bytes = rates.element_bytes * (m * n + m * k + n * k)
    fits = (roofline_s(m, n, k, rates) <= max_s) & (num_bytes <= max_bytes)
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

    Rates are the best measured so far, ``element_bytes`` those of an operand, ``max_s`` and ``max_bytes`` limits of one product.
    """
    coefficients, software = known_coefficients("", "")
    peak_flops_per_s = flops_per_s / coefficients.compute_efficiency
    hardware = GemmDevice(peak_flops_per_s, memory_bandwidth_bytes_per_s, num_processors, cache_bytes)
    rates = GemmRates(coefficients, hardware, software, element_bytes)
    m, n, k = candidate_shapes(rates, seed=0, max_s=max_s, max_bytes=max_bytes)
    chosen = most_informative_shapes(m, n, k, rates, count) if len(m) else []
    return [(int(m[i]), int(n[i]), int(k[i])) for i in chosen]


class Covariance(NamedTuple):
    """Prior of the correction; deviations are of natural logarithms.

    Attributes:
        lengths: over which residuals change, one for each of FEATURES and one for T.
        local: a; of_trees: s, of a factor on T; common: o; noise: of one measured time.
    """

    lengths: tuple[float, ...]
    local: float
    of_trees: float
    common: float
    noise: float


SHIPPED_COVARIANCE = Covariance(
    (3.72, 2.64, 2.49, 2.85, 0.371), local=0.123, of_trees=0.474, common=0.0688, noise=0.0592
)
"""[fitted: python -m meshwright.fitting correction DATA]"""


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
    """Return positions of up to ``count`` shapes, each the one that takes most variance from all after those before it.

    ``residual``, ``kernel``: in place of the shipped ones.
    """
    trained, columns = residual or shipped_model("gemm"), features(m, n, k, rates)
    deviation = 1.0 + _OUTSIDE * _beyond_trained(columns, trained)
    prior = covariance(columns, trained.log_residual(columns), kernel) * np.outer(deviation, deviation)
    slopes = _coefficient_slopes(m, n, k, rates)
    return greedy_choice(prior + slopes @ slopes.T, kernel.noise, count)


def greedy_choice(covariance: FloatArray, noise: float, count: int) -> list[int]:
    """Return positions that take most of the remaining variance, one by one, none twice.

    Args:
        covariance: [N, N] between the logarithms of the candidates' times before anything is measured.
        noise: deviation of one measurement.
    """
    remaining = covariance.copy()
    chosen: list[int] = []
    for _ in range(min(count, len(covariance))):
        gain = np.einsum("ji,ji->i", remaining, remaining) / (np.diag(remaining) + noise**2)
        gain[chosen] = -np.inf
        i = int(np.argmax(gain))
        factor = remaining[:, i] / np.sqrt(remaining[i, i] + noise**2)
        remaining -= np.outer(factor, factor)
        chosen.append(i)
    return chosen


def _beyond_trained(columns: dict[str, FloatArray], trained: ResidualModel) -> FloatArray:
    """Return how many widths of the trained range the farthest feature lies outside of it [N]."""
    farthest = np.zeros(len(next(iter(columns.values()))))
    for name, low, high in zip(trained.features, trained.low, trained.high, strict=True):
        if high > low and np.ptp(columns[name]) > 0:  # facts of the device are the same for all shapes
            outside = np.maximum(low - columns[name], columns[name] - high)
            farthest = np.maximum(farthest, np.maximum(outside, 0.0) / (high - low))
    return farthest


def soften_outliers(error: FloatArray, width: float) -> FloatArray:
    """Return residuals whose square grows linearly beyond ``width`` (pseudo-Huber), for least squares with outliers."""
    return np.asarray(np.sign(error) * np.sqrt(2 * width * (np.sqrt(error**2 + width**2) - width)))


def least_squares(
    misfit: Callable[[FloatArray], FloatArray], start: FloatArray | Sequence[float], num_steps: int = 40
) -> FloatArray:
    """Minimise by Levenberg-Marquardt with numerical derivatives: the few coefficients here need no more."""
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


@lru_cache(maxsize=64)
def corrected_by(points: tuple[MatmulPoint, ...], dtype: str, rates: GemmRates) -> GemmRates:
    """Return ``rates`` corrected by the points in ``dtype`` (`calibrate`); the same without any."""
    of_dtype = [point for point in points if point.dtype == dtype]
    if not of_dtype:
        return rates
    # Gradients of weights are as slow as forward products of their shape times a ratio.
    ratio = float(shipped_model("gemm").provenance["weight_gradient_ratio"])
    m, n, k = (np.array([getattr(p, name) for p in of_dtype], dtype=np.float64) for name in ("m", "n", "k"))
    seconds = [p.time_s / (ratio if p.which == "weight_gradient" else 1.0) for p in of_dtype]
    return calibrate(m, n, k, np.array(seconds, dtype=np.float64), rates)


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
    """Return rates corrected by products measured on the device: a handful moves the coefficients, tens the residual too.

    Maximum a posteriori: coefficients around ``rates.coefficients`` with the deviation they have between device families, points
    near each other counting as alike as the kernel says; then a Gaussian process through what remains. No points give ``rates``.

    Args:
        m, n, k, seconds: [P] measured forward products; best spread over sizes from launch-bound to compute-bound.
        residual, kernel: in place of the shipped ones.
    """
    if len(seconds) == 0:
        return rates
    rates = rates._replace(energy=None)  # measured times hold what the watts allow
    prior, fitted, residual = np.log(rates.coefficients), rates, residual or shipped_model("gemm")
    for _ in range(3):
        columns = features(m, n, k, fitted)
        learned = residual.log_residual(columns)
        # It turns errors into independent ones of deviation 1: W with W C W' = 1, C the covariance of measured times.
        noisy = covariance(columns, learned, kernel) + kernel.noise**2 * np.eye(len(learned))
        whitening = np.linalg.inv(np.linalg.cholesky(noisy))

        def misfit(z: FloatArray, learned: FloatArray = learned, whitening: FloatArray = whitening) -> FloatArray:
            error = np.log(roofline_s(m, n, k, _with_logs(rates, z)) / seconds) + learned
            return np.concatenate([soften_outliers(whitening @ error, _ODD), (z - prior) / _SPREAD])

        fitted = _with_logs(rates, least_squares(misfit, prior))
    columns = features(m, n, k, fitted)
    learned = residual.log_residual(columns)
    remaining = np.log(seconds / roofline_s(m, n, k, fitted)) - learned
    return fitted._replace(correction=correction_through(columns, learned, remaining, kernel))


def _with_logs(rates: GemmRates, logs: FloatArray) -> GemmRates:
    return rates._replace(coefficients=GemmCoefficients(*np.exp(logs).tolist()))


def _coefficient_slopes(m: FloatArray, n: FloatArray, k: FloatArray, rates: GemmRates) -> FloatArray:
    """Return by how much log(seconds) moves with one deviation of each coefficient between families [N, 5]."""
    prior, step = np.log(rates.coefficients), 1e-3
    moved = [roofline_s(m, n, k, _with_logs(rates, prior + step * e)) for e in np.diag(_SPREAD)]
    start = np.log(roofline_s(m, n, k, _with_logs(rates, prior)))
    return np.stack([(np.log(seconds) - start) / step for seconds in moved], axis=1)


FEATURES = ("compute", "memory", "depth", "waves_128x128")
"""Of `kernels.features`; the answer of the trees comes after them."""


@dataclass(frozen=True, eq=False)
class Correction:
    """The mean of the process given the points.

    Attributes:
        centres: of the points, over the lengths [P, d]; weights [P]; lengths [d].
        slope: added of T; offset: added to all.
    """

    centres: FloatArray
    weights: FloatArray
    lengths: tuple[float, ...]
    slope: float
    offset: float

    def __call__(self, columns: Mapping[str, FloatArray], learned: FloatArray) -> FloatArray:
        """Return what is added to the log-residual ``learned`` [N] of the trees."""
        near = _matern(scaled(columns, learned, self.lengths), self.centres) @ self.weights
        return np.asarray(near + self.slope * learned + self.offset)


def correction_through(
    columns: Mapping[str, FloatArray], learned: FloatArray, remaining: FloatArray, kernel: Covariance
) -> Correction:
    """Return the correction that points with ``remaining`` [P] = log(measured / predicted) ask for."""
    noisy = covariance(columns, learned, kernel) + kernel.noise**2 * np.eye(len(remaining))
    weights = np.linalg.solve(noisy, remaining)
    return Correction(
        centres=scaled(columns, learned, kernel.lengths),
        weights=np.asarray(kernel.local**2 * weights),
        lengths=kernel.lengths,
        slope=float(kernel.of_trees**2 * (learned @ weights)),
        offset=float(kernel.common**2 * weights.sum()),
    )


def covariance(columns: Mapping[str, FloatArray], learned: FloatArray, kernel: Covariance) -> FloatArray:
    """Return the covariance of log-residuals between shapes, before any is measured on a device [N, N]."""
    x = scaled(columns, learned, kernel.lengths)
    trees = kernel.of_trees**2 * np.outer(learned, learned)
    return np.asarray(kernel.local**2 * _matern(x, x) + trees + kernel.common**2)


def scaled(columns: Mapping[str, FloatArray], learned: FloatArray, lengths: tuple[float, ...]) -> FloatArray:
    """Return features and T over their lengths [N, d]."""
    features = np.stack([*(columns[name] for name in FEATURES), learned], axis=1)
    return np.asarray(features / np.asarray(lengths), dtype=np.float64)


def _matern(a: FloatArray, b: FloatArray) -> FloatArray:
    squared = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None] - 2 * a @ b.T
    distance = np.sqrt(3 * np.maximum(squared, 0.0))
    return np.asarray((1 + distance) * np.exp(-distance))
