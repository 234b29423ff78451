"""The default coefficients, read once from coefficients.toml (which holds their sources)."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from ..schema import Device
from ..schema.cluster import GemmFit
from ..schema.errors import ConfigError
from ..schema.workload import Precision

_PEAKS: dict[Precision, tuple[Literal["fp32", "tf32", "fp16", "bf16", "fp8"], ...]] = {
    "bf16-mixed": ("bf16",),
    "fp16-mixed": ("fp16",),
    "fp8": ("fp8",),
    "fp32": ("tf32", "fp32"),
}


@cache
def coefficients() -> dict[str, dict[str, Any]]:
    """Section -> name -> value."""
    return tomllib.loads(files(__package__).joinpath("coefficients.toml").read_text(encoding="utf-8"))


class DeviceRates(NamedTuple):
    """What one device achieves.

    Attributes:
        gemm_flops_per_s: large matrix products.
        attention_forward_flops_per_s, attention_backward_flops_per_s: fused attention, causal FLOPs counted once.
        gemm_bytes_per_s, elementwise_bytes_per_s: memory-bound matrix products and everything else.
        launch_s: floor of one matrix product; kernel_s: floor of one elementwise kernel.
        host_operator_s: dispatch of one operator.
        host_adds: the host's time adds to the device's (they are the same cores) instead of hiding behind it.
    """

    peak_flops_per_s: float
    gemm_flops_per_s: float
    attention_forward_flops_per_s: float
    attention_backward_flops_per_s: float
    gemm_bytes_per_s: float
    elementwise_bytes_per_s: float
    launch_s: float
    kernel_s: float
    host_operator_s: float
    host_adds: bool


def peak_flops_per_s(device: Device, precision: Precision) -> float:
    """Dense peak of the device for a precision, FLOP/s (fp32 products run as tf32 where the device has it).

    Raises:
        ConfigError: the device has no unit for this precision.
    """
    for dtype in _PEAKS[precision]:
        peak = getattr(device.peak_flops_per_s, dtype)
        if peak is not None:
            return float(peak)
    available = [name for name, dtypes in _PEAKS.items() if any(getattr(device.peak_flops_per_s, d) for d in dtypes)]
    raise ConfigError(
        f"{device.name} has no {precision} rate",
        help=f"use --precision {' or '.join(available)}" if available else None,
    )


def device_rates(device: Device, precision: Precision) -> DeviceRates:
    """Peaks of the data sheet times measured efficiencies (the device's own fit where there is one)."""
    c = coefficients()
    fit = device.gemm or GemmFit(**c["gemm"])
    peak = peak_flops_per_s(device, precision)
    is_cpu = device.vendor == "cpu"
    # A CPU's peak and bandwidth are measured on this very code path, so only a GPU's data sheet is scaled.
    attention = fit.compute_efficiency if is_cpu else None
    return DeviceRates(
        peak_flops_per_s=peak,
        gemm_flops_per_s=peak * fit.compute_efficiency,
        attention_forward_flops_per_s=peak * (attention or c["attention"]["forward_efficiency"]),
        attention_backward_flops_per_s=peak * (attention or c["attention"]["backward_efficiency"]),
        gemm_bytes_per_s=device.memory_bandwidth_bytes_per_s * fit.memory_efficiency,
        elementwise_bytes_per_s=device.memory_bandwidth_bytes_per_s
        * (1.0 if is_cpu else c["elementwise"]["memory_efficiency"]),
        launch_s=fit.launch_s,
        kernel_s=0.0 if is_cpu else c["elementwise"]["kernel_s"],
        host_operator_s=c["host"]["operator_s"],
        host_adds=is_cpu,
    )
