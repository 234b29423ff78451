"""What one device achieves: peaks of the data sheet times measured efficiencies and the calibration."""

from __future__ import annotations

from functools import cache
from statistics import geometric_mean
from typing import Literal, NamedTuple

from ...schema import ClusterSpec, Device, Workload
from ...schema.catalogue import find_device
from ...schema.cluster_files import catalogue_device
from ...schema.devices import GemmFit
from ...schema.errors import ConfigError
from ...schema.profile import MatmulPoint
from ...schema.task import Precision
from ..coefficients import coefficients
from ..learned.attention import PROCESSORS, AttentionDevice, kernel_name
from ..learned.calibration import corrected_by
from ..learned.gemm import GemmDevice, GemmRates, is_known, known_coefficients, known_devices


class AttentionRates(NamedTuple):
    """Fused attention on one device.

    Attributes:
        kernel: whose coefficients (learned/attention.py).
        silicon: what the device has.
        arithmetic_ratio: what this generation's arithmetic takes over the kernel's.
        reference: what the learned residual takes the device for (`_reference`), and nothing of a calibration.
    """

    kernel: str
    silicon: AttentionDevice
    arithmetic_ratio: float
    reference: AttentionDevice


class DeviceRates(NamedTuple):
    """What one device achieves.

    Attributes:
        gemm: single matrix products; None where the plain roofline of the next figures is all there is (CPUs).
        full_gemm: the same for those that fp8 training keeps in bf16.
        gemm_flops_per_s: large matrix products; vector_flops_per_s: products that cannot use the matrix units.
        quantize_bytes: traffic of casting one element of an input to fp8; 0 where products take the inputs as they are.
        expert_by_expert: the engine launches a product for each expert instead of one for all.
        attention: fused attention; None where it runs at the rate of products (CPUs).
        gemm_bytes_per_s, elementwise_bytes_per_s: memory-bound matrix products and everything else.
        launch_s: floor of one matrix product; kernel_s: floor of one elementwise kernel.
        update_bytes_per_s: passes of the optimizer over parameters and states.
    """

    gemm: GemmRates | None
    full_gemm: GemmRates | None
    gemm_flops_per_s: float
    quantize_bytes: float
    expert_by_expert: bool
    attention: AttentionRates | None
    gemm_bytes_per_s: float
    elementwise_bytes_per_s: float
    launch_s: float
    kernel_s: float
    update_bytes_per_s: float
    vector_flops_per_s: float


_PEAKS: dict[Precision, tuple[Literal["fp32", "tf32", "fp16", "bf16", "fp8", "fp4"], ...]] = {
    "bf16-mixed": ("bf16",),
    "fp16-mixed": ("fp16",),
    "bf16": ("bf16",),
    "fp8": ("fp8",),
    "nvfp4": ("fp4",),
    "fp32": ("tf32", "fp32"),
}


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


def device_rates(cluster: ClusterSpec, workload: Workload) -> DeviceRates:
    """Peaks of the data sheet times measured efficiencies (the device's own fit where there is one) and the calibration."""
    from ..measured import elementwise_bytes_per_s

    c, device, ratio = coefficients(), cluster.weakest_device, cluster.calibration
    # A CPU's peak and bandwidth are measured on this very code path, so only a data sheet is scaled.
    is_cpu = device.backend.is_host
    is_fp8 = workload.precision == "fp8"
    points = cluster.profile.matmuls if cluster.profile is not None else ()
    gemm = None if is_cpu else gemm_rates(device, workload.precision, ratio.products, points)
    fit = _cpu_fit(device) if gemm is None else gemm.coefficients
    slowed = ratio.products if gemm is None else gemm.sustained_ratio
    elementwise = elementwise_bytes_per_s(cluster, workload)
    if elementwise is None:
        in_sheet = 1.0 if is_cpu else c["elementwise"]["memory_efficiency"]
        elementwise = device.memory_bandwidth_bytes_per_s * in_sheet
    return DeviceRates(
        gemm=gemm,
        full_gemm=gemm_rates(device, "bf16-mixed", ratio.products, points) if is_fp8 else gemm,
        gemm_flops_per_s=peak_flops_per_s(device, workload.precision) * fit.compute_efficiency * slowed,
        quantize_bytes=c["fp8"]["quantize_bytes"] if is_fp8 else 0.0,
        expert_by_expert=not workload.engine_facts.groups_expert_products,  # Transformer Engine's GroupedLinear loops over streams
        attention=None if is_cpu else _attention_rates(cluster, workload),
        gemm_bytes_per_s=device.memory_bandwidth_bytes_per_s * fit.memory_efficiency,
        elementwise_bytes_per_s=elementwise * ratio.elementwise,
        launch_s=fit.launch_s,
        kernel_s=0.0 if is_cpu else c["elementwise"]["kernel_s"],
        update_bytes_per_s=_update_bytes_per_s(cluster),
        vector_flops_per_s=_vector_flops_per_s(device) * slowed,
    )


def _update_bytes_per_s(cluster: ClusterSpec) -> float:
    """A device's traffic in an update; ranks that compute in host memory do as a profile's AdamW on the host."""
    from ..measured import measured_host_update_bytes_per_s

    device = cluster.weakest_device
    if not device.backend.is_host:
        return float(device.memory_bandwidth_bytes_per_s * coefficients()["optimizer"]["memory_efficiency"])
    measured = measured_host_update_bytes_per_s(cluster)
    return device.memory_bandwidth_bytes_per_s if measured is None else measured / cluster.largest_node


def _vector_flops_per_s(device: Device) -> float:
    """Rate of products outside the matrix units: they accumulate in fp32 whatever the operands are. Without limit where unknown."""
    peak = device.peak_flops_per_s.fp32
    if peak is None or device.backend.is_host:
        return float("inf")
    return float(peak) * float(coefficients()["attention"]["misaligned_efficiency"])


def gemm_rates(
    device: Device, precision: Precision, calibration: float = 1.0, points: tuple[MatmulPoint, ...] = ()
) -> GemmRates:
    """Matrix products of an accelerator: its data sheet, what is known of its kind, and ``points`` measured on it."""
    # Measured fp8 products hold the cast of their inputs (11 to 16 bytes an element); training's own is counted beside them.
    own, software, _ = known_coefficients(device.name, device.architecture)
    dtype = _dtype(device, "bf16-mixed" if precision == "fp8" else precision)
    if device.gemm is not None and not any(point.dtype == dtype for point in points):
        fit = device.gemm
        own = own._replace(
            launch_s=fit.launch_s, compute_efficiency=fit.compute_efficiency, memory_efficiency=fit.memory_efficiency
        )
    ratio = coefficients()[precision]["gemm_efficiency_ratio"] if precision == "nvfp4" else 1.0
    if precision == "fp8":
        # The bf16 product of the same shape with arithmetic that much faster, so that its residual stays in the trained range.
        ratio = peak_flops_per_s(device, "fp8") / peak_flops_per_s(device, "bf16-mixed")
        ratio *= coefficients()["fp8"]["gemm_efficiency_ratio"]
    element_bytes = {"nvfp4": 0.5, "fp32": 4.0}.get(precision, 2.0)
    products: Precision = "bf16-mixed" if precision == "fp8" else precision
    is_measured_here = any(point.dtype == dtype for point in points)
    like = None if is_measured_here else _reference(device, products)
    reference = None if like is None else gemm_hardware(like, products)
    sheet = gemm_hardware(device, products)
    rates = corrected_by(points, dtype, GemmRates(own, sheet, software, element_bytes, reference=reference))
    return rates._replace(sustained_ratio=_sustained(device) * calibration * ratio)


def _reference(device: Device, precision: Precision) -> Device | None:
    """What the learned residuals take a device for: the catalogue's of its name, else itself at usual rates.

    Not at its own: a residual that follows them may grow by more than higher rates save. Usual are those of the measured devices
    of its architecture, of all where none is measured; None where no measured device has a unit for the precision.
    """
    known, dtype = _catalogued(device.name), _dtype(device, precision)
    if known is not None and _dtype(known, precision) == dtype:
        return known
    usual = _usual_rates(device.architecture, dtype)
    if usual is None:
        return None
    peaks = device.peak_flops_per_s.replace(**{dtype: usual[0]})
    return device.replace(peak_flops_per_s=peaks, memory_bandwidth_bytes_per_s=usual[1])


@cache
def _usual_rates(architecture: str, dtype: str) -> tuple[float, float] | None:
    """Geometric means of peak FLOP/s and bytes/s of the measured devices of an architecture that have a unit for ``dtype``."""
    measured = [device for name in known_devices() if (device := _catalogued(name)) is not None]
    able = [device for device in measured if getattr(device.peak_flops_per_s, dtype, None)]
    alike = [device for device in able if device.architecture == architecture] or able
    if not alike:
        return None
    peaks = [getattr(device.peak_flops_per_s, dtype) for device in alike]
    return geometric_mean(peaks), geometric_mean(device.memory_bandwidth_bytes_per_s for device in alike)


@cache
def _catalogued(name: str) -> Device | None:
    """The catalogue's device of this name; None where it has none."""
    try:
        return catalogue_device(*find_device(name))
    except ConfigError:
        return None


def _dtype(device: Device, precision: Precision) -> str:
    """Of the products of a precision on a device; empty where it has no unit for it."""
    return next((name for name in _PEAKS[precision] if getattr(device.peak_flops_per_s, name) is not None), "")


def is_measured(device: Device) -> bool:
    """Whether matrix products were measured on this device or on its kind, not only on its architecture."""
    return device.gemm is not None or (not device.backend.is_host and is_known(device.name))


def gemm_hardware(device: Device, precision: Precision) -> GemmDevice:
    """What the learned model of matrix products knows of a device."""
    c = coefficients()["gemm"]
    return GemmDevice(
        peak_flops_per_s(device, precision),
        device.memory_bandwidth_bytes_per_s,
        device.num_sms or c["num_sms"],
        float(device.cache_bytes or c["cache_bytes"]),
    )


def _cpu_fit(device: Device) -> GemmFit:
    c = coefficients()["gemm"]
    return device.gemm or GemmFit(**{name: c[name] for name in GemmFit.model_fields})


def _sustained(device: Device) -> float:
    """Arithmetic over hours over that of a short benchmark; clocks fall with a root of the power limit (f V^2, V rising with f)."""
    c = coefficients()["sustained"]
    return float(c.get(device.architecture, c["other"]) * device.power_limit_ratio ** c["power_exponent"])


def _attention_rates(cluster: ClusterSpec, workload: Workload) -> AttentionRates:
    """Kernel and device of fused attention; fp8 and nvfp4 training run it in bf16."""
    device, in_bf16 = cluster.weakest_device, workload.precision in ("fp8", "nvfp4")
    precision: Precision = "bf16-mixed" if in_bf16 else workload.precision
    c, kernel = coefficients()["attention"], kernel_name(device.architecture, workload.engine)

    # FlashAttention-2 leaves so much of Hopper's matrix units idle that the power limit does not slow it.
    def silicon(device: Device, ratio: float) -> AttentionDevice:
        sustained = ratio * (1.0 if kernel == "hopper_fa2" else _sustained(device))
        processors = device.num_sms or PROCESSORS.get(device.architecture, PROCESSORS["ampere"])
        return AttentionDevice(
            peak_flops_per_s(device, precision) * sustained, device.memory_bandwidth_bytes_per_s, processors
        )

    reference = silicon(_reference(device, precision) or device, 1.0)
    ratio = c["first_generation_ratio"] if workload.flash_generation == 1 else 1.0
    return AttentionRates(kernel, silicon(device, cluster.calibration.attention), ratio, reference)
