"""The default coefficients, read once from coefficients.toml (which holds their sources)."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from ..schema import Device, Workload
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
        gemm_flops_per_s: large matrix products; vector_flops_per_s: products that cannot use the matrix units.
        attention_forward_flops_per_s, attention_backward_flops_per_s: fused attention, causal FLOPs counted once.
        gemm_bytes_per_s, elementwise_bytes_per_s: memory-bound matrix products and everything else.
        streaming_bytes_per_s: single kernels that read and write one large tensor.
        launch_s: floor of one matrix product; kernel_s: floor of one elementwise kernel.
    """

    gemm_flops_per_s: float
    attention_forward_flops_per_s: float
    attention_backward_flops_per_s: float
    gemm_bytes_per_s: float
    elementwise_bytes_per_s: float
    streaming_bytes_per_s: float
    launch_s: float
    kernel_s: float
    vector_flops_per_s: float


class HostCosts(NamedTuple):
    """Seconds the host needs, by the workload's engine.

    Attributes:
        operator_s: dispatch of one operator.
        collective_s: one tensor-parallel collective.
        fsdp_unit_s: one fully sharded layer, forward plus backward.
        overlap_norm: p of (device^p + host^p)^(1/p), the seconds of a pass.
        adds: the host's time adds to the device's (they are the same cores) instead of hiding behind it.
    """

    operator_s: float
    collective_s: float
    fsdp_unit_s: float
    overlap_norm: float
    adds: bool


def host_costs(device: Device, workload: Workload) -> HostCosts:
    """Host overheads of the workload's engine."""
    shared = coefficients()["host"]
    c = shared[workload.engine]
    return HostCosts(
        c["operator_s"], c["collective_s"], c["fsdp_unit_s"], shared["overlap_norm"], adds=device.vendor == "cpu"
    )


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


def device_rates(device: Device, workload: Workload) -> DeviceRates:
    """Peaks of the data sheet times measured efficiencies (the device's own fit where there is one)."""
    c, fit = coefficients(), _gemm_fit(device)
    peak, is_fp8 = peak_flops_per_s(device, workload.precision), workload.precision == "fp8"
    forward, backward = _attention_flops_per_s(device, workload)
    # A CPU's peak and bandwidth are measured on this very code path, so only a data sheet is scaled.
    is_cpu = device.vendor == "cpu"
    return DeviceRates(
        gemm_flops_per_s=peak
        * fit.compute_efficiency
        * _sustained(device)
        * (c["fp8"]["gemm_efficiency_ratio"] if is_fp8 else 1.0),
        attention_forward_flops_per_s=forward,
        attention_backward_flops_per_s=backward,
        gemm_bytes_per_s=device.memory_bandwidth_bytes_per_s * fit.memory_efficiency,
        elementwise_bytes_per_s=device.memory_bandwidth_bytes_per_s
        * (1.0 if is_cpu else _elementwise_efficiency(workload)),
        streaming_bytes_per_s=device.memory_bandwidth_bytes_per_s
        * (1.0 if is_cpu else c["elementwise"]["streaming_efficiency"]),
        launch_s=fit.launch_s,
        kernel_s=0.0 if is_cpu else c["elementwise"]["kernel_s"],
        vector_flops_per_s=_vector_flops_per_s(device),
    )


def _elementwise_efficiency(workload: Workload) -> float:
    """Of the data-sheet bandwidth: Megatron fuses bias, dropout and residual and keeps to 16 bit, torch's operators do not."""
    c = coefficients()["elementwise"]
    return float(c["memory_efficiency" if workload.engine == "fsdp2" else "fused_efficiency"])


def _vector_flops_per_s(device: Device) -> float:
    """Rate of products outside the matrix units: they accumulate in fp32 whatever the operands are. Without limit where unknown."""
    peak = device.peak_flops_per_s.fp32
    if peak is None or device.vendor == "cpu":
        return float("inf")
    return float(peak) * float(coefficients()["attention"]["misaligned_efficiency"])


def _gemm_fit(device: Device) -> GemmFit:
    return device.gemm or GemmFit(**coefficients()["gemm"])


def _sustained(device: Device) -> float:
    return float(coefficients()["sustained"].get(device.architecture, 1.0))


def _attention_flops_per_s(device: Device, workload: Workload) -> tuple[float, float]:
    """Forward and backward rate of fused attention; fp8 training runs it in bf16."""
    peak = peak_flops_per_s(device, "bf16-mixed" if workload.precision == "fp8" else workload.precision)
    if device.vendor == "cpu":
        rate = peak * _gemm_fit(device).compute_efficiency
        return rate, rate
    c, slowed = coefficients()["attention"], peak * _sustained(device)
    if device.architecture in ("hopper", "blackwell") and workload.engine != "megatron":
        return peak * c["fa2_on_newer_forward"], peak * c["fa2_on_newer_backward"]
    return slowed * c["forward_efficiency"], slowed * c["backward_efficiency"]
