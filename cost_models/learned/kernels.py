"""Seconds of matrix products and of fused attention on an accelerator: a physical model times a learned residual.

**Product** [m,k] x [k,n], a roofline with soft corners:

    t = (t0 + (c^p + b^p)^(1/p)) * exp(r(x))
    c = F / (P e_c) * (1 + a / waves)          F = 2 m n k; waves = m n / (128 * 128 * SMs): the last wave is not full
    b = B h / (W e_m)                          B = bytes of the three matrices once; h <= 1: what the cache holds is cheaper
    h = phi + (1 - phi) min(1, 3 B / L2)       phi = 0.1

t0, e_c, e_m, p, a belong to the device (fitted; the median of the known ones for a device that is only a data sheet); r is an
ensemble of trees on dimensionless features, clipped to the trained range. The fit is fitting/gemm.py, the artefact gemm.npz.

**Attention**, five physical terms per kernel:

    seconds = (launch + F/P (product + softmax * 64/d) + tail * S * 4*B*L*d / P + traffic * bytes / W) * exp(residual)

F FLOPs (2.5 times the forward's in the backward pass), P peak, d head width, S processors of the device, L most tokens a query
attends to, B = 128 queries a thread block, W memory bandwidth. ``product`` is the inverse of what the matrix units reach,
``softmax`` the exponentials next to them (their number does not grow with d), ``tail`` the last thread blocks of a launch that
find the other processors idle. A kernel is a generation of code on a generation of hardware (`kernel_name`). Coefficients,
residual and scores: attention.npz, written by fitting/attention.py. One device's kernels without a table take the median of all.

**Residual**, regression trees as plain arrays, applied with numpy alone: thresholds are kept once per feature and sorted, so that a
value is looked up once and every split compares two small integers; all trees are walked together, one level at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from hashlib import blake2b
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...schema.units import FloatArray

_CHUNK_ELEMENTS = 1 << 20  # rows * trees walked at once: bounds memory, stays in cache
_TABLE_ROWS = 64
"""Matrices of so many rows are tables: the same come again for every part of a device, whose residual is the entire one's."""

MAX_TABLES = 256
"""Tables that are remembered."""


@dataclass(frozen=True, eq=False)
class ResidualModel:
    """log_residual(x) = baseline + sum over trees of the leaf that clip(x, low, high) falls into.

    A split sends x to the left where x <= threshold. The file is a numpy archive without pickled objects, written by
    fitting/estimator.py.

    Attributes:
        features: names of the columns, in order; low, high: trained range of each [d].
        thresholds: sorted split points of all features, one after the other; ``offsets`` [d + 1] cuts them.
        feature, split, left, right, value: nodes of all trees; ``split`` counts within the feature's thresholds and a leaf
            is a child of itself, so that walking further does no harm.
        roots: first node of each tree; depth: longest path.
        provenance: what the model was fitted on, by which command, how it scored, and coefficients of the physical model.
    """

    features: tuple[str, ...]
    low: FloatArray
    high: FloatArray
    thresholds: FloatArray
    offsets: NDArray[np.int64]
    feature: NDArray[np.uint8]
    split: NDArray[np.uint16]
    left: NDArray[np.int64]
    right: NDArray[np.int64]
    value: NDArray[np.float32]
    roots: NDArray[np.int64]
    depth: int
    baseline: float
    provenance: Mapping[str, Any]
    tables: dict[bytes, FloatArray] = field(default_factory=dict, repr=False)

    @classmethod
    def read(cls, path: Path) -> ResidualModel:
        """Read a file that can hold numbers and text only."""
        with np.load(path, allow_pickle=False) as stored:
            header = json.loads(stored["header"].tobytes())
            roots = stored["roots"].astype(np.int64)
            first = np.repeat(roots, np.diff([*roots, len(stored["left"])]))
            names = ("low", "high", "thresholds", "offsets", "feature", "split", "value")
            arrays = {name: stored[name] for name in names}
            left, right = stored["left"] + first, stored["right"] + first
        return cls(**header | {"features": tuple(header["features"])}, **arrays, roots=roots, left=left, right=right)

    def log_residual(self, features: Mapping[str, FloatArray]) -> FloatArray:
        """Return the logarithm of measured over roofline seconds [N] for named feature columns [N] (others are ignored)."""
        columns = [np.asarray(features[name], dtype=np.float64) for name in self.features]
        return self.predict(np.stack(np.broadcast_arrays(*columns), axis=1))

    def predict(self, x: FloatArray) -> FloatArray:
        """Return the log-residual of a matrix [N, d] whose columns are ``features`` in order."""
        if len(x) < _TABLE_ROWS:
            return self._predict(x)
        key = blake2b(np.ascontiguousarray(x).tobytes(), digest_size=16).digest()
        if key not in self.tables:
            if len(self.tables) >= MAX_TABLES:
                self.tables.clear()
            self.tables[key] = self._predict(x)
        return self.tables[key]

    def _predict(self, x: FloatArray) -> FloatArray:
        clipped = np.clip(x, self.low, self.high)
        tables = np.split(self.thresholds, self.offsets[1:-1])
        # How many thresholds of its feature lie below each value [N, d].
        ranks = np.stack([np.searchsorted(table, clipped[:, idx]) for idx, table in enumerate(tables)], axis=1)
        step = max(1, _CHUNK_ELEMENTS // len(self.roots))
        chunks = [self._walk(ranks[start : start + step]) for start in range(0, len(ranks), step)]
        return self.baseline + (np.concatenate(chunks) if chunks else np.zeros(0))

    def _walk(self, ranks: NDArray[np.int64]) -> FloatArray:
        num_rows, width = ranks.shape
        node = np.broadcast_to(self.roots, (num_rows, len(self.roots)))
        base = (np.arange(num_rows) * width)[:, None]
        flat = ranks.ravel()
        for _ in range(self.depth):
            goes_left = flat.take(base + self.feature.take(node)) <= self.split.take(node)
            node = np.where(goes_left, self.left.take(node), self.right.take(node))
        return np.asarray(self.value.take(node).sum(axis=1, dtype=np.float64))


@cache
def shipped_model(name: Literal["gemm", "attention", "decode_attention", "experts"]) -> ResidualModel:
    """Return a shipped residual, read once."""
    with as_file(files(__package__).joinpath(f"{name}.npz")) as path:
        return ResidualModel.read(path)


# Products

MAX_KNOWN = 1 << 16
"""Shapes that are remembered for one set of rates."""

Pass = Literal["forward", "input_gradient", "weight_gradient"]

_TILE = 128

_CACHED_COST = 0.1
"""Of a byte from cache over one from memory; with _CACHE_PARTS the value that carries best to unseen devices."""

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
    """The data sheet: dense FLOP/s, bytes/s, streaming multiprocessors and bytes of second-level cache.

    ``kernels_of``: multiprocessors of the device that its kernels were written for, where that is another one (0: its own).
    """

    peak_flops_per_s: float
    memory_bandwidth_bytes_per_s: float
    num_processors: int
    cache_bytes: float
    kernels_of: int = 0


class EnergyLimit(NamedTuple):
    """The rate that the board's watts feed, and how sharply it takes over: t = (at full clock^q + energy^q)^(1/q)."""

    flops_per_s: float
    sharpness: float

    def combined(self, flops_per_s: float) -> float:
        """Return the rate of products that reach ``flops_per_s`` at full clock."""
        return float((flops_per_s**-self.sharpness + self.flops_per_s**-self.sharpness) ** (-1 / self.sharpness))


class GemmRates(NamedTuple):
    """A device ready to be asked.

    Attributes:
        software: column of the software build and format that stands for training (SOFTWARE of fitting/gemm.py).
        element_bytes: of an operand.
        sustained_ratio: arithmetic rate over hours of training over that of a short benchmark.
        correction: of points measured on this device, where there are any.
        reference: what the residual takes the device for; None: for its data sheet. It was learned on real devices: one that
            differs from the reference in its rates alone keeps that one's residual, and is faster for every shape where they are.
        energy: what the watts of a board allow that was not measured; None: the coefficients hold it. Processors that wait draw
            little, so that the others' clocks rise: a product that fills the last wave badly loses less where watts are short.
        has_residual: the learned one counts, which was learned of products on matrix units.
    """

    coefficients: GemmCoefficients
    hardware: GemmDevice
    software: float = 0.0
    element_bytes: float = 2.0
    sustained_ratio: float = 1.0
    correction: Callable[[Mapping[str, FloatArray], FloatArray], FloatArray] | None = None
    reference: GemmDevice | None = None
    energy: EnergyLimit | None = None
    has_residual: bool = True


def known_coefficients(device: str, architecture: str) -> tuple[GemmCoefficients, float]:
    """Return coefficients for a device and its software column.

    A device without measurements takes its architecture's, an unknown architecture the median of all.
    """
    fits = shipped_model("gemm").provenance["rooflines"]["bf16"]
    values = fits["devices"].get(device) or fits["architectures"].get(architecture) or fits["median"]
    return GemmCoefficients(*values), float(fits["software"])


def known_devices() -> tuple[str, ...]:
    """Return the names of the devices whose products the model was fitted on."""
    return tuple(shipped_model("gemm").provenance["rooflines"]["bf16"]["devices"])


def gemm_seconds(
    m: FloatArray, n: FloatArray, k: FloatArray, rates: GemmRates, *, which: Pass = "forward"
) -> FloatArray:
    """Return the seconds [N] of the products [m,k] x [k,n] of a pass; ``m, n, k`` [N] are always those of the forward product.

    Equal shapes are evaluated once. dgrad is [m,n] x [n,k], wgrad [k,m] x [m,n]; measured (SimuMax, A100 and B200) the first
    runs as fast as a forward product of its shape, the second ``weight_gradient_ratio`` longer (transposed operands, fp32 sums).
    """
    shapes = np.broadcast_arrays(*(np.asarray(size, dtype=np.float64) for size in (m, n, k)))
    order = {"forward": (0, 1, 2), "input_gradient": (0, 2, 1), "weight_gradient": (2, 1, 0)}[which]
    seconds = _known_shapes(rates).seconds(*(np.ascontiguousarray(shapes[idx]).ravel() for idx in order))
    ratio = float(shipped_model("gemm").provenance["weight_gradient_ratio"]) if which == "weight_gradient" else 1.0
    return np.asarray(ratio * seconds.reshape(shapes[0].shape))


class _KnownShapes:
    """Shapes that were evaluated under some rates, by a 64-bit mix of their sizes: searches over many sizes of a cluster meet the
    same ones again and again.

    Among thousands of shapes two mixes agree with a probability of 1e-12.
    """

    def __init__(self, rates: GemmRates) -> None:
        self._rates = rates
        self._known: tuple[NDArray[np.uint64], FloatArray] = (np.zeros(0, dtype=np.uint64), np.zeros(0))

    def seconds(self, m: FloatArray, n: FloatArray, k: FloatArray) -> FloatArray:
        """Return the seconds [N] of forward products, those of new shapes after evaluating each of them once."""
        mix = np.zeros(m.size, dtype=np.uint64)
        for size, factor in ((m, 0x9E3779B97F4A7C15), (n, 0xC2B2AE3D27D4EB4F), (k, 0x165667B19E3779F9)):
            mix = (mix ^ size.view(np.uint64)) * np.uint64(factor)
            mix ^= mix >> np.uint64(29)
        mixes, known_s = self._known
        idx = np.searchsorted(mixes, mix)
        is_new = np.ones(mix.size, dtype=bool)
        inside = np.flatnonzero(idx < len(mixes))
        is_new[inside] = mixes[idx[inside]] != mix[inside]
        if is_new.any():
            new, first = np.unique(mix[is_new], return_index=True)
            rows = np.flatnonzero(is_new)[first]
            new_s = predict(m[rows], n[rows], k[rows], self._rates)
            before = np.searchsorted(mixes, new)
            mixes, known_s = np.insert(mixes, before, new), np.insert(known_s, before, new_s)
            idx = np.searchsorted(mixes, mix)
            self._known = (mixes, known_s) if len(mixes) <= MAX_KNOWN else (mixes[:0], known_s[:0])
        return np.asarray(known_s[idx])


@lru_cache(maxsize=1 << 10)
def _known_shapes(rates: GemmRates) -> _KnownShapes:
    return _KnownShapes(rates)


def predict(
    m: FloatArray, n: FloatArray, k: FloatArray, rates: GemmRates, *, residual: ResidualModel | None = None
) -> FloatArray:
    """Return the seconds [N] of forward products, every row evaluated; ``residual`` in place of the shipped one."""
    fit = rates.coefficients
    slowed = fit._replace(compute_efficiency=fit.compute_efficiency * rates.sustained_ratio)
    seconds = roofline_s(m, n, k, rates._replace(coefficients=slowed))
    if rates.has_residual:
        columns = features(m, n, k, rates._replace(hardware=rates.reference or rates.hardware))
        log_residual = (residual or shipped_model("gemm")).log_residual(columns)
        if rates.correction is not None:
            log_residual = log_residual + rates.correction(columns, log_residual)
        seconds = seconds * np.exp(log_residual)
    if rates.energy is None:
        return seconds
    fed_s = 2.0 * m * n * k / (rates.energy.flops_per_s * rates.sustained_ratio)
    return np.asarray((seconds**rates.energy.sharpness + fed_s**rates.energy.sharpness) ** (1 / rates.energy.sharpness))


def roofline_s(m: FloatArray, n: FloatArray, k: FloatArray, rates: GemmRates) -> FloatArray:
    """Return t0 + (c^p + b^p)^(1/p) [N]; neither residual nor ``sustained_ratio``."""
    fit = rates.coefficients
    compute, traffic = _roofline_terms_s(m, n, k, rates)
    longer, shorter = np.maximum(compute, traffic), np.minimum(compute, traffic)
    corner = (1 + (shorter / longer) ** fit.sharpness) ** (1 / fit.sharpness)
    return np.asarray(fit.launch_s + longer * corner)


def _roofline_terms_s(m: FloatArray, n: FloatArray, k: FloatArray, rates: GemmRates) -> tuple[FloatArray, FloatArray]:
    """Return the seconds of arithmetic (c) and of traffic (b) [N]."""
    fit, hardware = rates.coefficients, rates.hardware
    waves = m * n / (_TILE * _TILE * hardware.num_processors)
    traffic = rates.element_bytes * (m * n + m * k + n * k)
    missed = _CACHED_COST + (1 - _CACHED_COST) * np.minimum(1.0, _CACHE_PARTS * traffic / hardware.cache_bytes)
    compute = 2.0 * m * n * k / (hardware.peak_flops_per_s * fit.compute_efficiency) * (1 + fit.tail_waves / waves)
    return compute, traffic * missed / (hardware.memory_bandwidth_bytes_per_s * fit.memory_efficiency)


def features(m: FloatArray, n: FloatArray, k: FloatArray, rates: GemmRates) -> dict[str, FloatArray]:
    """Return dimensionless columns [N]: logarithms are to base two.

    compute, memory: c and b over t0; balance: c over b; waves_*: output tiles of a size over SMs, fill_*: how full the last
    wave is; row_fill, column_fill: useful part of the tiles of 128; depth: k in steps of 64; aspect: m over n; cache,
    panel_cache: all operands, and the smaller input panel, over the cache; processors, ridge: of the device.
    """
    launch_s, hardware, element_bytes = rates.coefficients.launch_s, rates.hardware, rates.element_bytes
    compute, traffic = _roofline_terms_s(m, n, k, rates)
    traffic_bytes = element_bytes * (m * n + m * k + n * k)
    columns = {
        "compute": np.log2(compute / launch_s),
        "memory": np.log2(traffic / launch_s),
        "balance": np.log2(compute / traffic),
        "row_fill": m / (np.ceil(m / _TILE) * _TILE),
        "column_fill": n / (np.ceil(n / _TILE) * _TILE),
        "depth": np.log2(k / 64),
        "aspect": np.log2(m / n),
        "cache": np.log2(traffic_bytes / hardware.cache_bytes),
        "panel_cache": np.log2(element_bytes * np.minimum(m, n) * k / hardware.cache_bytes),
        "processors": np.full(m.shape, float(hardware.kernels_of or hardware.num_processors)),
        "ridge": np.full(m.shape, np.log2(hardware.peak_flops_per_s / hardware.memory_bandwidth_bytes_per_s)),
        "software": np.full(m.shape, rates.software),
    }
    for rows, width in ((128, 128), (128, 256), (256, 128), (64, 64)):
        waves = np.ceil(m / rows) * np.ceil(n / width) / hardware.num_processors
        columns[f"waves_{rows}x{width}"] = np.log2(waves)
        columns[f"fill_{rows}x{width}"] = waves / np.ceil(waves)
    return columns


# Attention

TERMS = ("launch_s", "product", "softmax", "tail", "traffic")

_QUERIES_A_BLOCK = 128
_REFERENCE_WIDTH = 64

PROCESSORS = {
    "volta": 80, "turing": 68, "ampere": 108, "ada": 142, "hopper": 132, "blackwell": 148, "cdna2": 110, "cdna3": 304, "cdna4": 256,
}  # fmt: skip
"""Streaming multiprocessors (compute units) of the largest part of each architecture. Source: data sheets."""


class AttentionShape(NamedTuple):
    """Calls of one kernel; every entry broadcasts to [N].

    Attributes:
        rows: sequences times query heads; group: query heads of one key/value head.
        seq_len: queries of a sequence; context: keys a query sees on average; longest: at most.
        width: mean of query/key and value head width.
        element_bytes: of one element.
    """

    rows: FloatArray
    group: FloatArray
    seq_len: FloatArray
    context: FloatArray
    longest: FloatArray
    width: FloatArray
    element_bytes: FloatArray


class AttentionDevice(NamedTuple):
    """The device side: FLOP/s of the peak, bytes/s of its memory, number of processors. Floats or arrays [N]."""

    peak_flops_per_s: FloatArray | float
    bytes_per_s: FloatArray | float
    processors: FloatArray | float


def kernel_name(architecture: str, *, uses_hopper_attention: bool) -> str:
    """Return the name of the kernel that runs on an architecture.

    On Hopper Transformer Engine takes FlashAttention-3 or cuDNN; torch and others take FlashAttention-2, which does not use its
    matrix instructions (``uses_hopper_attention``). On Blackwell all of them take cuDNN or its like (torch ranks it first there).
    """
    if architecture == "hopper":
        return "hopper" if uses_hopper_attention else "hopper_fa2"
    return architecture if architecture in ("ampere", "ada", "blackwell") else "other"


def attention_terms(name: str, *, backward: bool) -> FloatArray:
    """Return the coefficients [5] of a kernel's TERMS in one pass."""
    passes = shipped_model("attention").provenance["kernels"][name]
    return np.asarray(passes["backward" if backward else "forward"], dtype=np.float64)


def term_columns(shape: AttentionShape, silicon: AttentionDevice, *, backward: bool) -> FloatArray:
    """Return what the coefficients multiply [N, 5], in seconds (the launch in units of one)."""
    passes = 2.5 if backward else 1.0
    product = 4 * passes * shape.rows * shape.seq_len * shape.context * shape.width / silicon.peak_flops_per_s
    longest_block = 4 * passes * _QUERIES_A_BLOCK * shape.longest * shape.width / silicon.peak_flops_per_s
    # q, k, v and output once; the backward pass adds gradients and reads twice.
    attended = 2 * shape.element_bytes * shape.rows * shape.seq_len * shape.width * (1 + 1 / shape.group)
    columns = (
        np.ones_like(product),
        product,
        product * _REFERENCE_WIDTH / shape.width,
        longest_block * silicon.processors,
        attended * (2.0 if backward else 1.0) / silicon.bytes_per_s,
    )
    return np.stack(np.broadcast_arrays(*columns), axis=-1)


def residual_features(
    shape: AttentionShape, silicon: AttentionDevice, columns: FloatArray, terms: FloatArray
) -> dict[str, FloatArray]:
    """Return the features of the residual [N]: sizes, waves of thread blocks, and the share of each term in the roofline."""
    weighted = columns * terms
    share = weighted / weighted.sum(axis=-1, keepdims=True)
    blocks = shape.rows * shape.seq_len / _QUERIES_A_BLOCK
    return {
        "log_seq_len": np.log2(shape.seq_len),
        "log_rows": np.log2(shape.rows),
        "width": np.asarray(shape.width, dtype=np.float64),
        "log_group": np.log2(shape.group),
        "log_waves": np.log2(blocks / silicon.processors),
        "launch_share": share[..., 0],
        "tail_share": share[..., 3],
        "traffic_share": share[..., 4],
    }


def attention_seconds(
    name: str,
    shape: AttentionShape,
    silicon: AttentionDevice,
    *,
    backward: bool,
    arithmetic_ratio: float = 1.0,
    reference: AttentionDevice | None = None,
) -> FloatArray:
    """Return the seconds [N] of kernel ``name``; the residual, learned on forward passes, applies to them alone.

    ``arithmetic_ratio`` slows what is not traffic: kernels of an earlier generation move the same bytes. The residual takes the
    device for ``reference`` (unset: for what it is), so that it does not change with a device's rates alone.
    """
    columns = term_columns(shape, silicon, backward=backward)
    slower = np.array([1.0, arithmetic_ratio, arithmetic_ratio, arithmetic_ratio, 1.0])
    terms = attention_terms(name, backward=backward) * slower
    roofline = columns @ terms
    if backward:
        return np.asarray(roofline, dtype=np.float64)
    if reference is not None:
        silicon, columns = reference, term_columns(shape, reference, backward=False)
    features = residual_features(shape, silicon, columns, terms)
    return np.asarray(roofline * np.exp(shipped_model("attention").log_residual(features)), dtype=np.float64)
