"""Seconds of kernels that serving engines run and training does not: decoding's attention, and all of a layer's experts at once.

Both are rooflines with a soft corner times a learned residual on dimensionless features (the form of kernels.py); the constants of
the rooflines are the same for every device, so that one that was never measured differs by its data sheet alone.

**Attention of b rows, each over t tokens of its cache**, H query heads on K key/value heads (docs/serving.md):

    seconds = (t0 + (m^p + c^p)^(1/p)) * exp(r(x))
    m = (b t kv + b H (dk + dv) e) / W          c = 2 b t H (dk + dv) / P

**Experts**: e' experts that are reached, r rows of all together, [D, F] each:

    m = (e' w parameters of an expert + r (2 D + 3 F) e) / W           c = 2 r parameters / P, rows of an expert in tiles of 16

Artefacts: decode_attention.npz, experts.npz, written by fitting/serving.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, get_args

import numpy as np

from ...schema.serving import KernelEngine
from ...schema.units import FloatArray
from .kernels import ResidualModel, shipped_model

ENGINES: tuple[KernelEngine, ...] = get_args(KernelEngine)
"""Their position is a feature of decoding's attention: SGLang has vLLM's kernels on Hopper and TensorRT-LLM's on Blackwell."""

_SHARPNESS = 3.0
_ATTENTION_LAUNCH_S, _EXPERTS_LAUNCH_S = 6e-6, 12e-6
_MEMORY_EFFICIENCY, _COMPUTE_EFFICIENCY = 0.85, 0.6
_TILE_ROWS = 16


class KernelDevice(NamedTuple):
    """The data sheet: bytes/s, dense FLOP/s of the operands' type, processors, bytes of cache. Floats or arrays [N].

    Attributes:
        bandwidth_part, compute_part: of both rates, what a kernel has that shares the device, or reads for error correction beside
            data; the residual is that of the entire rates.
    """

    bytes_per_s: FloatArray | float
    flops_per_s: FloatArray | float
    processors: FloatArray | float
    cache_bytes: FloatArray | float
    bandwidth_part: float = 1.0
    compute_part: float = 1.0


class DecodeShape(NamedTuple):
    """Calls of decoding's attention; every entry broadcasts to [N].

    Attributes:
        rows: b; tokens: t that a row attends to; heads, kv_heads: of the rank.
        key_dim, value_dim: widths that a query attends with; token_bytes: of one cached token, all kv heads.
        cache_element_bytes: of an element of the cache; latent: keys and values are one compressed vector.
        engine: whose kernels they are, as its position in ENGINES.
    """

    rows: FloatArray
    tokens: FloatArray
    heads: FloatArray
    kv_heads: FloatArray
    key_dim: FloatArray
    value_dim: FloatArray
    token_bytes: FloatArray
    cache_element_bytes: FloatArray
    latent: FloatArray
    engine: FloatArray


class ExpertShape(NamedTuple):
    """Calls of a layer's experts on one rank; every entry broadcasts to [N].

    Attributes:
        rows: that reach its experts, each as often as it does; tokens: that are brought to it, of which rows are made.
        reached: experts that have any; experts: on the rank.
        hidden_dim, ffn_dim: D, and F of what the rank has of each; gated: three matrices an expert, else two.
        weight_bytes: of an element with its scales.
        faster: peak of the operands' type over that of 16 bits; cutlass: 1 where the kernels are CUTLASS's, but for
            weights scaled by blocks.
    """

    rows: FloatArray
    tokens: FloatArray
    reached: FloatArray
    experts: FloatArray
    hidden_dim: FloatArray
    ffn_dim: FloatArray
    gated: FloatArray
    weight_bytes: FloatArray
    faster: FloatArray
    cutlass: FloatArray


def reached_fraction(rows: FloatArray, popularity_cv: float) -> FloatArray:
    """Return the share of experts that have any rows, where one has ``rows`` on average and popularity is gamma-distributed."""
    squared = popularity_cv**2
    return np.asarray(1 - (1 + squared * rows) ** (-1 / squared))


def decode_terms(shape: DecodeShape, device: KernelDevice) -> tuple[FloatArray, FloatArray]:
    """Return the seconds of traffic and of arithmetic [N] at the data sheet's rates."""
    width = shape.heads * (shape.key_dim + shape.value_dim)
    traffic = shape.rows * (shape.tokens * shape.token_bytes + 2 * width)
    return traffic / device.bytes_per_s, 2 * shape.rows * shape.tokens * width / device.flops_per_s


def expert_terms(shape: ExpertShape, device: KernelDevice) -> tuple[FloatArray, FloatArray]:
    """Return the seconds of traffic and of arithmetic [N] at the data sheet's rates."""
    of_expert = (2 + shape.gated) * shape.hidden_dim * shape.ffn_dim
    inner = shape.rows * (2 * shape.hidden_dim + 3 * shape.ffn_dim) + 2 * shape.tokens * shape.hidden_dim
    traffic = shape.reached * of_expert * shape.weight_bytes + 2 * inner
    tiled = shape.reached * np.ceil(np.maximum(shape.rows / shape.reached, 1) / _TILE_ROWS) * _TILE_ROWS
    return traffic / device.bytes_per_s, 2 * np.maximum(tiled, shape.rows) * of_expert / device.flops_per_s


def _roofline(launch_s: float, traffic_s: FloatArray, compute_s: FloatArray, device: KernelDevice) -> FloatArray:
    memory = traffic_s / (_MEMORY_EFFICIENCY * device.bandwidth_part)
    compute = compute_s / (_COMPUTE_EFFICIENCY * device.compute_part)
    return np.asarray(launch_s + (memory**_SHARPNESS + compute**_SHARPNESS) ** (1 / _SHARPNESS))


def decode_roofline_s(shape: DecodeShape, device: KernelDevice) -> FloatArray:
    """Return the seconds [N] without residual."""
    return _roofline(_ATTENTION_LAUNCH_S, *decode_terms(shape, device), device)


def expert_roofline_s(shape: ExpertShape, device: KernelDevice) -> FloatArray:
    """Return the seconds [N] without residual."""
    return _roofline(_EXPERTS_LAUNCH_S, *expert_terms(shape, device), device)


def decode_features(shape: DecodeShape, device: KernelDevice) -> dict[str, FloatArray]:
    """Return the features [N]: logarithms are to base two.

    memory: traffic's time over the launch; balance: arithmetic over traffic; waves: rows times key/value heads over processors;
    cache: traffic over the second-level cache.
    """
    traffic, compute = decode_terms(shape, device)
    columns: dict[str, FloatArray | float] = {
        "memory": np.log2(traffic / _ATTENTION_LAUNCH_S),
        "balance": np.log2(compute / traffic),
        "waves": np.log2(shape.rows * shape.kv_heads / device.processors),
        "tokens": np.log2(shape.tokens),
        "group": np.log2(shape.heads / shape.kv_heads),
        "key_dim": shape.key_dim,
        "cache": np.log2(traffic * device.bytes_per_s / device.cache_bytes),
        "cache_element_bytes": shape.cache_element_bytes,
        "latent": shape.latent,
        "engine": shape.engine,
        "processors": device.processors,
        "ridge": np.log2(device.flops_per_s / device.bytes_per_s),
    }
    return _broadcast(columns)


def expert_features(shape: ExpertShape, device: KernelDevice) -> dict[str, FloatArray]:
    """Return the features [N]: as of attention; rows: of an expert; tiles: of 128 columns of both products over processors."""
    traffic, compute = expert_terms(shape, device)
    columns: dict[str, FloatArray | float] = {
        "memory": np.log2(traffic / _EXPERTS_LAUNCH_S),
        "balance": np.log2(compute / traffic),
        "rows": np.log2(np.maximum(shape.rows / shape.reached, 1e-3)),
        "all_rows": np.log2(np.maximum(shape.rows, 1e-3)),
        "visits": np.log2(np.maximum(shape.rows / shape.tokens, 1e-3)),
        "reached": np.log2(shape.reached),
        "experts": np.log2(shape.experts),
        "ffn_dim": np.log2(shape.ffn_dim),
        "hidden_dim": np.log2(shape.hidden_dim),
        "tiles": np.log2(shape.reached * shape.ffn_dim / 128 / device.processors),
        "weight_bytes": shape.weight_bytes,
        "faster": shape.faster,
        "cutlass": shape.cutlass,
        "processors": device.processors,
        "ridge": np.log2(device.flops_per_s / shape.faster / device.bytes_per_s),
    }
    return _broadcast(columns)


def _broadcast(columns: Mapping[str, FloatArray | float]) -> dict[str, FloatArray]:
    arrays = np.broadcast_arrays(*(np.asarray(value, dtype=np.float64) for value in columns.values()))
    return dict(zip(columns, (array.ravel() for array in arrays), strict=True))


def decode_attention_s(shape: DecodeShape, device: KernelDevice, residual: ResidualModel | None = None) -> FloatArray:
    """Return the seconds of decoding's attention, of the shape of its sizes."""
    roofline = decode_roofline_s(shape, device)
    log = (residual or shipped_model("decode_attention")).log_residual(decode_features(shape, device))
    return np.asarray(roofline * np.exp(log).reshape(roofline.shape))


def experts_s(
    shape: ExpertShape, device: KernelDevice, residual: ResidualModel | None = None, *, is_dequantized: bool = False
) -> FloatArray:
    """Return the seconds of both products of all experts with what lies between them: sorting rows, activation, weighted sum.

    Weights that are dequantised have the residual of 16 bits, whose kernels take them.
    """
    roofline = expert_roofline_s(shape, device)
    kernel = shape._replace(weight_bytes=np.asarray(2.0), faster=np.asarray(1.0)) if is_dequantized else shape
    features = expert_features(kernel, device)
    log = (residual or shipped_model("experts")).log_residual(features)
    return np.asarray(roofline * np.exp(log).reshape(roofline.shape))
