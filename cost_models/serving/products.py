"""Seconds of matrix products of a serving engine: weights of any type, few rows or many, single or of experts.

A product reads its weights with their scales, and runs at the peak of the type that both operands have. Weights of a type for which
the device has no units are dequantised on the way to those of 16 bits: their bytes are fewer, their FLOPs no faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...schema import ClusterSpec
from ...schema.cluster import Device
from ...schema.serving import BYTES_OF, WeightDtype
from ...schema.task import Precision
from ...schema.units import FloatArray
from ..coefficients import Coefficients
from ..hardware.compute import DeviceRates
from ..hardware.machine import gemm_rates, memory_ratio, peak_flops_per_s
from ..learned.kernels import GemmRates, gemm_seconds
from ..learned.serving_kernels import ExpertShape, KernelDevice, experts_s
from .device_part import ENTIRE, DevicePart

_UNITS: dict[str, str] = {"fp8": "fp8", "nvfp4": "fp4", "mxfp4": "fp4"}
"""Matrix units that take weights of a type; types that are missing are dequantised to 16 bits."""


def plain_precision(device: Device, weights: WeightDtype) -> Precision:
    """Return the precision of what a device does not do in the weights' type."""
    if weights == "fp32":
        return "fp32"
    return "fp16-mixed" if weights == "fp16" or device.peak_flops_per_s.bf16 is None else "bf16-mixed"


@dataclass(frozen=True, eq=False)
class Products:
    """Products on one device.

    Attributes:
        plain: those in 16 bits (or fp32); rates: of the device.
        faster: peak of a type over that of 16 bits; reached: the part of that which products of many rows have.
        casts: types that inputs are cast to; peak_flops_per_s: of 16 bits.
        c: coefficients of section ``serving``.
        part: of the device that products have; ``rates`` are of it.
        memory_ratio: of the memory's rate that data have, over measured devices of its architecture.
        fuses_casts: to 8 bits, with the kernel before.
    """

    plain: GemmRates | None
    rates: DeviceRates
    element_bytes: float
    faster: dict[str, float]
    casts: frozenset[str]
    peak_flops_per_s: float
    c: Mapping[str, Any]
    reached: float = 1.0
    part: DevicePart = ENTIRE
    memory_ratio: float = 1.0
    fuses_casts: bool = False

    @classmethod
    def of(
        cls,
        cluster: ClusterSpec,
        rates: DeviceRates,
        weights: WeightDtype,
        coefficients: Coefficients,
        part: DevicePart = ENTIRE,
        *,
        fuses_casts: bool = False,
    ) -> Products:
        """Return the products of the cluster's weakest device, or of a part of it."""
        device, precision = cluster.weakest_device, plain_precision(cluster.weakest_device, weights)
        element_bytes = 4.0 if precision == "fp32" else 2.0
        if device.backend.is_host:
            return cls(None, rates, element_bytes, {}, frozenset(), 0.0, coefficients["serving"])
        plain = gemm_rates(device, precision, cluster.calibration.products, (), coefficients)
        peak = peak_flops_per_s(device, precision)
        faster = {
            name: rate / peak
            for name, unit in _UNITS.items()
            if (rate := getattr(device.peak_flops_per_s, unit)) is not None
        }
        casts = frozenset(faster)
        slower = coefficients["serving"]["dequantized_peak"].get(device.architecture, 1.0)
        faster |= {name: slower for name in ("int4", "int8", "mxfp4", "nvfp4", "fp8") if name not in faster}
        return cls(
            plain, rates, element_bytes, faster, casts, peak * cluster.calibration.products, coefficients["serving"],
            reached=coefficients["serving"]["narrow_peak"].get(device.architecture, 1.0), part=part,
            memory_ratio=memory_ratio(device), fuses_casts=fuses_casts,
        )  # fmt: skip

    def seconds(self, rows: FloatArray, n: FloatArray, k: FloatArray, dtype: WeightDtype) -> FloatArray:
        """Return the seconds [N] of [rows, k] x [k, n] with weights of ``dtype``, the cast of its input included."""
        rows = np.maximum(rows, 1.0)
        if self.plain is None:
            flops = 2.0 * rows * n * k / self.rates.gemm_flops_per_s
            traffic = self.element_bytes * rows * (n + k) + BYTES_OF[dtype] * n * k
            return np.asarray(self.rates.launch_s + np.maximum(flops, traffic / self.rates.gemm_bytes_per_s))
        ratio, rates = self.faster.get(dtype, 1.0) * (self.reached if dtype in self.casts else 1.0), self.plain
        if BYTES_OF[dtype] != self.element_bytes:
            fit, sheet = rates.coefficients, rates.hardware
            fit = fit._replace(memory_efficiency=fit.memory_efficiency * self.c["low_memory_ratio"])
            sheet = sheet._replace(peak_flops_per_s=sheet.peak_flops_per_s * ratio)
            rates = rates._replace(coefficients=fit, hardware=sheet, element_bytes=BYTES_OF[dtype])
        seconds = gemm_seconds(rows, n, k, self.part.gemm_rates(rates))
        if dtype not in self.casts or (self.fuses_casts and _UNITS[dtype] == "fp8"):
            return seconds
        return np.asarray(
            seconds
            + self.c["cast_s"][_UNITS[dtype]]
            + rows * k * self.c["cast_bytes"] / self.rates.elementwise_bytes_per_s
        )

    def experts(self, shape: ExpertShape, dtype: WeightDtype) -> FloatArray:
        """Return the seconds [N] of all experts of a rank, with sorting, activation and sum."""
        if self.plain is None:
            weights = (2 + shape.gated) * shape.hidden_dim * shape.ffn_dim
            flops = 2 * shape.rows * weights / self.rates.gemm_flops_per_s
            traffic = shape.reached * weights * BYTES_OF[dtype] / self.rates.gemm_bytes_per_s
            return np.asarray(3 * self.rates.launch_s + np.maximum(flops, traffic))
        is_dequantized = BYTES_OF[dtype] < self.element_bytes and dtype not in self.casts
        if is_dequantized:
            shape = shape._replace(weight_bytes=shape.weight_bytes / self.c["dequantized_rate"])
        return experts_s(shape, self.device(dtype), is_dequantized=is_dequantized)

    def device(self, dtype: WeightDtype | None = None) -> KernelDevice:
        """Return the data sheet with what calibration says, at the peak of ``dtype`` (None: of 16 bits)."""
        assert self.plain is not None
        sheet = self.plain.hardware
        peak = self.peak_flops_per_s * (self.faster.get(dtype, 1.0) if dtype else 1.0)
        return KernelDevice(
            sheet.memory_bandwidth_bytes_per_s, peak, sheet.num_processors, sheet.cache_bytes,
            bandwidth_part=self.part.bandwidth * self.memory_ratio, compute_part=self.part.compute,
        )  # fmt: skip
