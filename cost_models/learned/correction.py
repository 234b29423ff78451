"""What products measured on one device add to the learned residual: a Gaussian process through them.

    log(measured / roofline) = T + f        f ~ GP(0, k),   T the shipped trees
    k(x, y) = a^2 M(|x - y|) + s^2 T(x) T(y) + o^2          M(d) = (1 + sqrt(3) d) exp(-sqrt(3) d)

Distances are over dimensionless features and T, each over its length. M (Matern 3/2) is what is alike in the neighbourhood of a
point, s what of the trees carries over to this device at all, o what is common to all shapes; each measured time has a noise
of its own. Lengths and deviations were fitted on devices that the trees had not seen (fitting/gemm.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...schema.arrays import FloatArray

FEATURES = ("compute", "memory", "depth", "waves_128x128")
"""Of `gemm.features`; the answer of the trees comes after them."""


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
        """What is added to the log-residual ``learned`` [N] of the trees."""
        near = _matern(scaled(columns, learned, self.lengths), self.centres) @ self.weights
        return np.asarray(near + self.slope * learned + self.offset)


def correction_through(
    columns: Mapping[str, FloatArray], learned: FloatArray, left: FloatArray, kernel: Covariance
) -> Correction:
    """The correction that points with ``left`` [P] = log(measured / predicted) ask for."""
    noisy = covariance(columns, learned, kernel) + kernel.noise**2 * np.eye(len(left))
    weights = np.linalg.solve(noisy, left)
    return Correction(
        centres=scaled(columns, learned, kernel.lengths),
        weights=np.asarray(kernel.local**2 * weights),
        lengths=kernel.lengths,
        slope=float(kernel.of_trees**2 * (learned @ weights)),
        offset=float(kernel.common**2 * weights.sum()),
    )


def whitening_of(columns: Mapping[str, FloatArray], learned: FloatArray, kernel: Covariance) -> FloatArray:
    """[P, P] W with W C W' = 1, C the covariance of measured times: W turns errors into independent ones of deviation 1."""
    noisy = covariance(columns, learned, kernel) + kernel.noise**2 * np.eye(len(learned))
    return np.asarray(np.linalg.inv(np.linalg.cholesky(noisy)))


def covariance(columns: Mapping[str, FloatArray], learned: FloatArray, kernel: Covariance) -> FloatArray:
    """Of log-residuals between shapes, before any is measured on a device [N, N]."""
    return covariance_of(scaled(columns, learned, kernel.lengths), learned, kernel)


def covariance_of(x: FloatArray, learned: FloatArray, kernel: Covariance) -> FloatArray:
    """The same for features over their lengths [N, d]."""
    trees = kernel.of_trees**2 * np.outer(learned, learned)
    return np.asarray(kernel.local**2 * _matern(x, x) + trees + kernel.common**2)


def scaled(columns: Mapping[str, FloatArray], learned: FloatArray, lengths: tuple[float, ...]) -> FloatArray:
    """Features and T over their lengths [N, d]."""
    features = np.stack([*(columns[name] for name in FEATURES), learned], axis=1)
    return np.asarray(features / np.asarray(lengths), dtype=np.float64)


def _matern(a: FloatArray, b: FloatArray) -> FloatArray:
    squared = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None] - 2 * a @ b.T
    distance = np.sqrt(3 * np.maximum(squared, 0.0))
    return np.asarray((1 + distance) * np.exp(-distance))
