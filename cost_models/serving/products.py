"""Seconds of matrix products of a serving engine: weights of any type, few rows or many, single or of experts.

A product reads its weights with their scales, and runs at the peak of the type that both operands have. Weights of a type for which
the device has no units are dequantised on the way to those of 16 bits: their bytes are fewer, their FLOPs no faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...schema import ClusterSpec
from ...schema.cluster import Device
from ...schema.serving import BYTES_OF, WeightDtype
from ...schema.task import Precision
from ...schema.units import FloatArray
from ..coefficients import Coefficients
from ..hardware.compute import DeviceRates
from ..hardware.machine import gemm_rates
from ..learned.kernels import GemmRates, gemm_seconds

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
        faster: peak of a type over that of 16 bits, for the types that the device has units for.
    """

    plain: GemmRates | None
    rates: DeviceRates
    element_bytes: float
    faster: dict[str, float]

    @classmethod
    def of(cls, cluster: ClusterSpec, rates: DeviceRates, weights: WeightDtype, coefficients: Coefficients) -> Products:
        """Return the products of the cluster's weakest device."""
        device, precision = cluster.weakest_device, plain_precision(cluster.weakest_device, weights)
        element_bytes = 4.0 if precision == "fp32" else 2.0
        if device.backend.is_host:
            return cls(None, rates, element_bytes, {})
        plain = gemm_rates(device, precision, cluster.calibration.products, (), coefficients)
        peak = plain.hardware.peak_flops_per_s
        faster = {
            name: found / peak
            for name, unit in _UNITS.items()
            if (found := getattr(device.peak_flops_per_s, unit)) is not None
        }
        return cls(plain, rates, element_bytes, faster)

    def seconds(self, rows: FloatArray, n: FloatArray, k: FloatArray, dtype: WeightDtype) -> FloatArray:
        """Return the seconds [N] of [rows, k] x [k, n] with weights of ``dtype``."""
        rows = np.maximum(rows, 1.0)
        if self.plain is None:
            flops = 2.0 * rows * n * k / self.rates.gemm_flops_per_s
            traffic = self.element_bytes * rows * (n + k) + BYTES_OF[dtype] * n * k
            return np.asarray(self.rates.launch_s + np.maximum(flops, traffic / self.rates.gemm_bytes_per_s))
        ratio = self.faster.get(dtype, 1.0)
        rates = self.plain
        if ratio != 1.0:
            peak = rates.hardware.peak_flops_per_s * ratio
            rates = rates._replace(hardware=rates.hardware._replace(peak_flops_per_s=peak))
        if BYTES_OF[dtype] != self.element_bytes:
            rates = rates._replace(element_bytes=BYTES_OF[dtype])
        return gemm_seconds(rows, n, k, rates)

    def grouped(
        self, rows: FloatArray, n: FloatArray, k: FloatArray, matrices: FloatArray, dtype: WeightDtype
    ) -> FloatArray:
        """Return the seconds [N] of one product for each of ``matrices`` experts that are reached, ``rows`` of all together."""
        together = self.seconds(rows, n, k, dtype)
        traffic = self.element_bytes * rows * (n + k) + BYTES_OF[dtype] * matrices * n * k
        grouped = self.rates.grouped["forward"]
        return np.asarray(grouped.ratio * np.maximum(together, traffic / self.rates.gemm_bytes_per_s))
