"""Seconds of one matrix product [m,k] x [k,n] on an accelerator: a roofline with soft corners times a learned residual.

    t = (t0 + (c^p + b^p)^(1/p)) * exp(r(x))
    c = F / (P e_c) * (1 + a / waves)          F = 2 m n k; waves = m n / (128 * 128 * SMs): the last wave is not full
    b = B h / (W e_m)                          B = bytes of the three matrices once; h <= 1: what the cache holds is cheaper
    h = phi + (1 - phi) min(1, 3 B / L2)       phi = 0.1

t0, e_c, e_m, p, a belong to the device (fitted; the median of the known ones for a device that is only a data sheet); r is an
ensemble of trees on dimensionless features, clipped to the trained range. The fit is fitting/gemm.py, the artefact gemm.npz.

What products measured on one device add to the learned residual: a Gaussian process through them.

    log(measured / roofline) = T + f        f ~ GP(0, k),   T the shipped trees
    k(x, y) = a^2 M(|x - y|) + s^2 T(x) T(y) + o^2          M(d) = (1 + sqrt(3) d) exp(-sqrt(3) d)

Distances are over dimensionless features and T, each over its length. M (Matern 3/2) is what is alike in the neighbourhood of a
point, s what of the trees carries over to this device at all, o what is common to all shapes; each measured time has a noise
of its own. Lengths and deviations were fitted on devices that the trees had not seen (fitting/gemm.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from ...schema.arrays import FloatArray
from .trees import ResidualModel

Pass = Literal["forward", "input_gradient", "weight_gradient"]

_TILE = 128

_CACHED_COST = (
    0.1  # of a byte from cache over one from memory; with _CACHE_PARTS the value that carries best to unseen devices
)

_CACHE_PARTS = 3.0
"""Operands up to a third of the cache stay in it [fitted on families left out: python -m meshwright.fitting gemm DATA --score]."""


class GemmCoefficients(NamedTuple):
    """What a device adds to its data sheet.

    Attributes:
        launch_s: t0; compute_efficiency, memory_efficiency: e_c, e_m, of the peaks.
        sharpness: p of the soft maximum; tail_waves: a, waves' worth of time that the last wave and the filling cost.
    """

    launch_s: float
    compute_efficiency: float
    memory_efficiency: float
    sharpness: float
    tail_waves: float


class GemmDevice(NamedTuple):
    """The data sheet: dense FLOP/s, bytes/s, streaming multiprocessors and bytes of second-level cache."""

    peak_flops_per_s: float
    memory_bandwidth_bytes_per_s: float
    num_processors: int
    cache_bytes: float


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


class GemmRates(NamedTuple):
    """A device ready to be asked.

    Attributes:
        software: column of the software build and format that stands for training (SOFTWARE of fitting/gemm.py).
        element_bytes: of an operand.
        sustained_ratio: arithmetic rate over hours of training over that of a short benchmark.
        correction: of points measured on this device, where there are any.
        reference: what the residual takes the device for; None: for its data sheet. It was learned on real devices: one that
            differs from the reference in its rates alone keeps that one's residual, and is faster for every shape where they are.
    """

    coefficients: GemmCoefficients
    hardware: GemmDevice
    software: float = 0.0
    element_bytes: float = 2.0
    sustained_ratio: float = 1.0
    correction: Correction | None = None
    reference: GemmDevice | None = None


def model() -> ResidualModel:
    """Return the shipped residual; its provenance holds the coefficients of the devices it was fitted on."""
    return ResidualModel.load("gemm")


def known_coefficients(device: str, architecture: str) -> tuple[GemmCoefficients, float]:
    """Return coefficients for a device and its software column.

    A device without measurements takes its architecture's, an unknown architecture the median of all.
    """
    fits = model().provenance["rooflines"]["bf16"]
    values = fits["devices"].get(device) or fits["architectures"].get(architecture) or fits["median"]
    return GemmCoefficients(*values), float(fits["software"])


def known_devices() -> tuple[str, ...]:
    """Return the names of the devices whose products the model was fitted on."""
    return tuple(model().provenance["rooflines"]["bf16"]["devices"])


def is_known(device: str) -> bool:
    """Return whether the model was fitted on products of this device."""
    return device in known_devices()


def gemm_seconds(
    m: FloatArray, n: FloatArray, k: FloatArray, rates: GemmRates, *, which: Pass = "forward"
) -> FloatArray:
    """Return the seconds [N] of the products [m,k] x [k,n] of a pass; ``m, n, k`` [N] are always those of the forward product.

    Equal shapes are evaluated once. dgrad is [m,n] x [n,k], wgrad [k,m] x [m,n]; measured (SimuMax, A100 and B200) the first
    runs as fast as a forward product of its shape, the second ``weight_gradient_ratio`` longer (transposed operands, fp32 sums).
    """
    shapes = np.broadcast_arrays(*(np.asarray(size, dtype=np.float64) for size in (m, n, k)))
    first, inverse = _distinct(*shapes)
    order = {"forward": (0, 1, 2), "input_gradient": (0, 2, 1), "weight_gradient": (2, 1, 0)}[which]
    distinct = tuple(np.ascontiguousarray(size.ravel()[first]).tobytes() for size in (shapes[idx] for idx in order))
    seconds = _seconds(distinct[0], distinct[1], distinct[2], rates)
    ratio = float(model().provenance["weight_gradient_ratio"]) if which == "weight_gradient" else 1.0
    return np.asarray(ratio * seconds[inverse].reshape(shapes[0].shape))


def _distinct(m: FloatArray, n: FloatArray, k: FloatArray) -> tuple[Any, Any]:
    """Return the positions of the first of equal shapes, and which of them each shape is."""
    # One sort of a 64-bit mix instead of three: among thousands of shapes two mixes agree with a probability of 1e-12.
    mix = np.zeros(m.size, dtype=np.uint64)
    for size, factor in ((m, 0x9E3779B97F4A7C15), (n, 0xC2B2AE3D27D4EB4F), (k, 0x165667B19E3779F9)):
        mix = (mix ^ np.ascontiguousarray(size.ravel()).view(np.uint64)) * np.uint64(factor)
        mix ^= mix >> np.uint64(29)
    _, first, inverse = np.unique(mix, return_index=True, return_inverse=True)
    return first, inverse


@lru_cache(maxsize=1 << 14)
def _seconds(m: bytes, n: bytes, k: bytes, rates: GemmRates) -> FloatArray:
    rows, columns, depth = (np.frombuffer(size, dtype=np.float64) for size in (m, n, k))
    return predict(rows, columns, depth, rates)


def predict(
    m: FloatArray, n: FloatArray, k: FloatArray, rates: GemmRates, *, residual: ResidualModel | None = None
) -> FloatArray:
    """Return the seconds [N] of forward products, every row evaluated; ``residual`` in place of the shipped one."""
    fit, sheet, size = rates.coefficients, rates.hardware, rates.element_bytes
    columns = features(m, n, k, fit, rates.reference or sheet, element_bytes=size, software=rates.software)
    log_residual = (residual or model()).log_residual(columns)
    if rates.correction is not None:
        log_residual = log_residual + rates.correction(columns, log_residual)
    slowed = fit._replace(compute_efficiency=fit.compute_efficiency * rates.sustained_ratio)
    return roofline_s(m, n, k, slowed, sheet, size) * np.exp(log_residual)


def roofline_terms_s(
    m: FloatArray, n: FloatArray, k: FloatArray, fit: GemmCoefficients, hardware: GemmDevice, element_bytes: float = 2.0
) -> tuple[FloatArray, FloatArray]:
    """Return the seconds of arithmetic (c) and of traffic (b) [N]."""
    waves = m * n / (_TILE * _TILE * hardware.num_processors)
    traffic = element_bytes * (m * n + m * k + n * k)
    missed = _CACHED_COST + (1 - _CACHED_COST) * np.minimum(1.0, _CACHE_PARTS * traffic / hardware.cache_bytes)
    compute = 2.0 * m * n * k / (hardware.peak_flops_per_s * fit.compute_efficiency) * (1 + fit.tail_waves / waves)
    return compute, traffic * missed / (hardware.memory_bandwidth_bytes_per_s * fit.memory_efficiency)


def roofline_s(
    m: FloatArray, n: FloatArray, k: FloatArray, fit: GemmCoefficients, hardware: GemmDevice, element_bytes: float = 2.0
) -> FloatArray:
    """Return t0 + (c^p + b^p)^(1/p) [N]."""
    compute, traffic = roofline_terms_s(m, n, k, fit, hardware, element_bytes)
    longer, shorter = np.maximum(compute, traffic), np.minimum(compute, traffic)
    corner = (1 + (shorter / longer) ** fit.sharpness) ** (1 / fit.sharpness)
    return np.asarray(fit.launch_s + longer * corner)


def features(
    m: FloatArray,
    n: FloatArray,
    k: FloatArray,
    fit: GemmCoefficients,
    hardware: GemmDevice,
    *,
    element_bytes: float,
    software: float,
) -> dict[str, FloatArray]:
    """Return dimensionless columns [N]: logarithms are to base two.

    compute, memory: c and b over t0; balance: c over b; waves_*: output tiles of a size over SMs, fill_*: how full the last
    wave is; row_fill, column_fill: useful part of the tiles of 128; depth: k in steps of 64; aspect: m over n; cache,
    panel_cache: all operands, and the smaller input panel, over the cache; processors, ridge: of the device.
    """
    compute, traffic = roofline_terms_s(m, n, k, fit, hardware, element_bytes)
    traffic_bytes = element_bytes * (m * n + m * k + n * k)
    columns = {
        "compute": np.log2(compute / fit.launch_s),
        "memory": np.log2(traffic / fit.launch_s),
        "balance": np.log2(compute / traffic),
        "row_fill": m / (np.ceil(m / _TILE) * _TILE),
        "column_fill": n / (np.ceil(n / _TILE) * _TILE),
        "depth": np.log2(k / 64),
        "aspect": np.log2(m / n),
        "cache": np.log2(traffic_bytes / hardware.cache_bytes),
        "panel_cache": np.log2(element_bytes * np.minimum(m, n) * k / hardware.cache_bytes),
        "processors": np.full(m.shape, float(hardware.num_processors)),
        "ridge": np.full(m.shape, np.log2(hardware.peak_flops_per_s / hardware.memory_bandwidth_bytes_per_s)),
        "software": np.full(m.shape, software),
    }
    for rows, width in ((128, 128), (128, 256), (256, 128), (64, 64)):
        waves = np.ceil(m / rows) * np.ceil(n / width) / hardware.num_processors
        columns[f"waves_{rows}x{width}"] = np.log2(waves)
        columns[f"fill_{rows}x{width}"] = waves / np.ceil(waves)
    return columns


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


def whitening_of(columns: Mapping[str, FloatArray], learned: FloatArray, kernel: Covariance) -> FloatArray:
    """Return [P, P] W with W C W' = 1, C the covariance of measured times: it turns errors into independent ones of deviation 1."""
    noisy = covariance(columns, learned, kernel) + kernel.noise**2 * np.eye(len(learned))
    return np.asarray(np.linalg.inv(np.linalg.cholesky(noisy)))


def covariance(columns: Mapping[str, FloatArray], learned: FloatArray, kernel: Covariance) -> FloatArray:
    """Return the covariance of log-residuals between shapes, before any is measured on a device [N, N]."""
    return covariance_of(scaled(columns, learned, kernel.lengths), learned, kernel)


def covariance_of(x: FloatArray, learned: FloatArray, kernel: Covariance) -> FloatArray:
    """Return the covariance for features over their lengths [N, d]."""
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
