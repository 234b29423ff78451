"""Which matrix products are worth measuring on a device: those the learned model is least sure of, given the others.

Before a device is measured, log(seconds) of its products differ from the prediction by what its coefficients may be off and by a
Gaussian process (`correction.py`); how much of both points leave open depends on where they are and not on their times.
Measuring i takes ``cov(j, i)^2 / (var(i) + noise^2)`` from the variance of every j; the next point is the one that takes most from
all candidates together. (The point of largest variance itself lies on the edge of what is asked for: 30 such points left more
variance in the mean than 30 random ones.)

Shapes outside of the range that the residual was trained on start with a larger variance: there it only follows the roofline.
"""

from __future__ import annotations

import numpy as np

from ..layouts import FloatArray
from .correction import SHIPPED, Kernel, covariance
from .gemm import GemmRates, coefficient_slopes, features, model, roofline_s
from .trees import ResidualModel

NUM_CANDIDATES = 1000

_OUTSIDE = 0.5
"""Of the prior's deviation, for each range's width that a feature lies beyond the trained range."""


def candidates(rates: GemmRates, *, seed: int, most_s: float, most_bytes: float) -> tuple[FloatArray, ...]:
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


def most_informative(
    m: FloatArray,
    n: FloatArray,
    k: FloatArray,
    rates: GemmRates,
    count: int,
    *,
    residual: ResidualModel | None = None,
    kernel: Kernel = SHIPPED,
) -> list[int]:
    """Positions of up to ``count`` shapes, each the one that takes most variance from all after those before it.

    ``residual``, ``kernel``: in place of the shipped ones.
    """
    own, sheet, trained = rates.coefficients, rates.hardware, residual or model()
    columns = features(m, n, k, own, sheet, element_bytes=rates.element_bytes, software=rates.software)
    deviation = 1.0 + _OUTSIDE * _beyond_trained(columns, trained)
    prior = covariance(columns, trained.log_residual(columns), kernel) * np.outer(deviation, deviation)
    slopes = coefficient_slopes(m, n, k, rates)
    return greedy(prior + slopes @ slopes.T, kernel.noise, count)


def greedy(covariance: FloatArray, noise: float, count: int) -> list[int]:
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
