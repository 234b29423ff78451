"""What the machine achieves: rates of one device, and of the host next to it.

A device has the peaks of its data sheet times measured efficiencies (its own fit where it has one) and the calibration. The host
dispatches operators (`waiting_s`), copies over its links and updates in its memory: a rank moves its shard over its link, but all
ranks of a node together get no more than the host's side of one and a half links, and share its memory and storage:

    update_s = shard * ((g + b) / link + ranks_per_node * max(u / host_bandwidth, 2 * s / storage))

with g bytes of a gradient that goes down (0 where gradients leave beside the backward pass, `data.leaving_s`), b of a parameter
that comes back (0 where parameters stay there), u of traffic of the optimizer, and s of fp32 parameter and states, read and
written while the next ones are updated, only where they lie on storage.
Source: ZeRO-Offload, arXiv:2101.06840; ZeRO-Infinity, arXiv:2104.07857 (storage).
"""

from __future__ import annotations

from functools import cache, lru_cache
from statistics import geometric_mean
from typing import Literal, NamedTuple

import numpy as np

from ...schema import Device, Workload
from ...schema.cluster import GemmFit
from ...schema.errors import ConfigError
from ...schema.profile import MatmulPoint
from ...schema.task import Precision
from ...schema.units import FloatArray
from ..coefficients import Coefficients, Scenario, packaged_coefficients
from ..learned.calibration import corrected_by
from ..learned.kernels import (
    PROCESSORS,
    AttentionDevice,
    EnergyLimit,
    GemmDevice,
    GemmRates,
    ResidualModel,
    kernel_name,
    known_coefficients,
    known_devices,
    predict,
)
from ..measured import MeasuredRates, rates_of_profile
from .compute import AttentionRates, DeviceRates, GroupedGemm

_PEAKS: dict[Precision, Literal["fp32", "tf32", "fp16", "bf16", "fp8", "fp4"]] = {
    "bf16-mixed": "bf16", "fp16-mixed": "fp16", "bf16": "bf16", "fp8": "fp8", "nvfp4": "fp4", "tf32": "tf32", "fp32": "fp32",
}  # fmt: skip


_INLINE_DATA = 15 / 16
"""Of a memory that has its error correction within it: data. Source: nvidia-smi, 46,068 of 49,152 MiB on L40S."""

_LARGE = np.array([4096.0, 8192.0])
"""Rows, columns and depth of products that no launch and no tail slows."""


@lru_cache(maxsize=64)
def measured_rates(scenario: Scenario) -> MeasuredRates:
    """Return what the cluster's profile says of rates."""
    profile = scenario.cluster.profile
    return MeasuredRates() if profile is None else rates_of_profile(profile, scenario)


@lru_cache(maxsize=64)
def device_rates(scenario: Scenario) -> DeviceRates:
    """Return the rates of the weakest device of the scenario's cluster under its workload."""
    workload, cluster, c = scenario.workload, scenario.cluster, scenario.coefficients
    device, ratio = cluster.weakest_device, cluster.calibration
    is_host, is_fp8 = device.backend.is_host, workload.precision == "fp8"
    measured = measured_rates(scenario)
    points = cluster.profile.matmuls if cluster.profile is not None else ()
    of_format = {"fp8": ratio.fp8_products, "fp4": ratio.fp4_products}
    products = ratio.products * of_format.get(_dtype(device, workload.precision), 1.0)
    gemm = None if is_host else gemm_rates(device, workload.precision, products, points, c)
    on_host = device.gemm or GemmFit(**{name: c["gemm"][name] for name in GemmFit.model_fields})
    fit = on_host if gemm is None else gemm.coefficients
    slowed = products if gemm is None else gemm.sustained_ratio
    peak = peak_flops_per_s(device, workload.precision) if gemm is None else gemm.hardware.peak_flops_per_s
    large = peak * fit.compute_efficiency
    large = large if gemm is None or gemm.energy is None else gemm.energy.combined(large)
    # A CPU's peak and bandwidth are measured on this very code path, so only a data sheet is scaled.
    line = device.memory_bandwidth_bytes_per_s
    elementwise = measured.elementwise_bytes_per_s or line * (1.0 if is_host else c["elementwise"]["memory_efficiency"])
    update = line * (1.0 if is_host else c["optimizer"]["memory_efficiency"])
    if is_host and measured.host_update_bytes_per_s is not None:
        update = measured.host_update_bytes_per_s / cluster.largest_node
    # Products outside the matrix units accumulate in fp32 whatever the operands.
    in_fp32 = None if is_host else device.peak_flops_per_s.fp32
    vector_flops_per_s = float("inf") if in_fp32 is None else in_fp32 * c["attention"]["misaligned_efficiency"]
    grouped = {
        name: GroupedGemm(c["grouped_gemm"][f"{name}_expert_s"], c["grouped_gemm"][f"{name}_ratio"])
        for name in ("forward", "dgrad", "wgrad")
    }
    return DeviceRates(
        gemm=gemm,
        full_gemm=gemm_rates(device, "bf16-mixed", ratio.products, points, c) if is_fp8 else gemm,
        gemm_flops_per_s=large * slowed,
        quantize_bytes=_quantize_bytes(workload, c) if is_fp8 else 0.0,
        quantizes_weights=workload.engine_facts.uses_fully_shard,
        expert_by_expert=not workload.engine_facts.groups_expert_products,  # Transformer Engine's GroupedLinear loops over streams
        grouped=grouped,
        attention=None if is_host else _attention_rates(scenario),
        gemm_bytes_per_s=line * fit.memory_efficiency,
        elementwise_bytes_per_s=elementwise * ratio.elementwise,
        unpack_s=_unpack_s(workload, device, elementwise * ratio.elementwise, c["elementwise"]["nf4_flops"]),
        launch_s=fit.launch_s,
        kernel_s=0.0 if is_host else c["elementwise"]["kernel_s"],
        update_bytes_per_s=float(update),
        vector_flops_per_s=vector_flops_per_s * slowed,
        compute_bytes=workload.compute_bytes,
    )


def _quantize_bytes(workload: Workload, coefficients: Coefficients) -> float:
    """Return the traffic of casting one element of an input of an fp8 product, by how its scale is found."""
    c = coefficients["fp8"]
    if workload.fp8_scaling == "row":
        return float(c["row_bytes"])
    return float(c["dynamic_bytes" if workload.engine_facts.uses_fully_shard else "quantize_bytes"])


def _unpack_s(workload: Workload, device: Device, bytes_per_s: float, flops: float) -> float:
    """Return the seconds of writing one frozen 4-bit weight out in the compute dtype.

    The kernel that plain code calls (bitsandbytes) finds each value by branches, ``flops`` of the fp32 peak, which take longer than
    its traffic where a device has little arithmetic for its bandwidth.
    """
    frozen_bytes = 0.0 if workload.adapters is None else workload.adapters.frozen_bytes
    traffic_s = (frozen_bytes + workload.compute_bytes) / bytes_per_s
    in_fp32 = device.peak_flops_per_s.fp32
    return traffic_s if workload.code != "eager" or in_fp32 is None else max(traffic_s, flops / in_fp32)


def peak_flops_per_s(device: Device, precision: Precision) -> float:
    """Return the dense peak of the device for a precision, FLOP/s: tf32 (which torch allows, not orders) is fp32 without units.

    Raises:
        ConfigError: the device has no unit for this precision.
    """
    if dtype := _dtype(device, precision):
        return float(getattr(device.peak_flops_per_s, dtype))
    available = " or ".join(
        name for name, dtype in _PEAKS.items() if getattr(device.peak_flops_per_s, dtype) is not None
    )
    raise ConfigError(
        f"{device.name} has no {precision} rate", help=f"use --precision {available}" if available else None
    )


def gemm_rates(
    device: Device,
    precision: Precision,
    calibration: float = 1.0,
    points: tuple[MatmulPoint, ...] = (),
    coefficients: Coefficients | None = None,
) -> GemmRates:
    """Return the rates of matrix products on an accelerator: data sheet, what is known of its kind, ``points`` measured on it."""
    # Measured fp8 products include the cast of their inputs (11 to 16 bytes an element); training's cast is counted apart.
    coefficients = coefficients or packaged_coefficients()
    fitted, software = known_coefficients(device.name, device.architecture)
    fitted = fitted._replace(memory_efficiency=fitted.memory_efficiency * memory_ratio(device))
    products: Precision = "bf16-mixed" if precision == "fp8" else precision
    dtype = _dtype(device, products)
    is_measured_here = any(point.dtype == dtype for point in points)
    if device.gemm is not None and not is_measured_here:
        fitted = fitted._replace(**device.gemm.model_dump(exclude={"source"}))
    ratio = coefficients[precision]["gemm_efficiency_ratio"] if precision == "nvfp4" else 1.0
    if precision == "fp8":
        # The bf16 product of the same shape with arithmetic that much faster, so that its residual stays in the trained range.
        ratio = peak_flops_per_s(device, "fp8") / peak_flops_per_s(device, "bf16-mixed")
        ratio *= coefficients["fp8"]["gemm_efficiency_ratio"]
    element_bytes = {"nvfp4": 0.5, "fp32": 4.0, "tf32": 4.0}.get(precision, 2.0)
    known = None if is_measured_here else _reference(device, products)
    reference = None if known is None else gemm_device(known, products, coefficients)
    sheet = gemm_device(device, products, coefficients)
    rates = GemmRates(fitted, sheet, software, element_bytes, reference=reference)
    board = device  # the one whose clock the coefficients hold
    if is_measured_here:
        rates = corrected_by(points, dtype, rates)
    elif dtype == "fp32":
        from .vector_products import on_vector_units

        rates = on_vector_units(rates, device, board_w(device), coefficients)
        return rates._replace(sustained_ratio=calibration)
    elif device.name in known_devices():
        board = _catalogued(device.name) or device
    elif device.gemm is None:
        rates = on_board(rates, device, coefficients)
    return rates._replace(sustained_ratio=_sustained(device, board, coefficients, dtype) * calibration * ratio)


def memory_ratio(device: Device) -> float:
    """Return what a device reads of its data sheet's rate over what the measured devices of its architecture do.

    Error correction within the memory reads 1/16 more. 1 of a device that was measured.
    """
    boards = _boards(device.architecture, "bf16")
    if device.name in known_devices() or device.architecture not in {board.architecture for board in boards}:
        return 1.0
    return float(_data_part(device) / geometric_mean(map(_data_part, boards)))


def _data_part(device: Device) -> float:
    return _INLINE_DATA if device.inline_ecc else 1.0


def board_w(device: Device) -> float | None:
    """Return the watts that the board may draw on its machine; None where unknown."""
    return None if device.power_limit_w is None else device.power_limit_w * device.power_limit_ratio


def product_clock(
    device: Device, coefficients: Coefficients, dtype: str = "", *, over_hours: bool = False
) -> float | None:
    """Return the clock of large products over that of the data sheet: (m^-q + (P / (j W))^q)^(-1/q); None where watts are unknown.

    m is the highest clock, P the peak (dense 16-bit, or fp4), W the board's watts, j what the silicon makes of a joule (FLOP).
    Training for hours leaves less of W than a benchmark: chips are hot, memory and links at work.
    """
    c, peaks = coefficients["clocks"], device.peak_flops_per_s
    per_joule = c["flops_per_joule"].get(device.die or device.architecture)
    peak, watts = peaks.bf16 or peaks.fp16, board_w(device)
    if dtype == "fp4" and peaks.fp4 is not None and peak is not None:
        peak = peaks.fp4 / c["fp4_gain"]
    if per_joule is None or peak is None or watts is None:
        return None
    hours = coefficients["sustained"]
    part = hours.get(device.architecture, hours["other"]) if over_hours else 1.0
    q = c["sharpness"]
    return float((device.max_clock_ratio**-q + (peak / (per_joule * watts * part)) ** q) ** (-1 / q))


def on_board(
    rates: GemmRates, device: Device, coefficients: Coefficients, residual: ResidualModel | None = None
) -> GemmRates:
    """Return rates with which large products reach their part of the peak at the device's clock, not at another board's."""
    c, silicon, clock = coefficients["clocks"], device.die or device.architecture, product_clock(device, coefficients)
    watts = board_w(device)
    if clock is None or watts is None or rates.reference is None:
        return rates
    best = c["large_efficiency"].get(silicon, c["large_efficiency"]["other"])
    seconds = predict(_LARGE, _LARGE, _LARGE, rates._replace(hardware=rates.reference), residual=residual)
    reached = geometric_mean(2.0 * _LARGE**3 / seconds / rates.reference.peak_flops_per_s)
    peak = rates.hardware.peak_flops_per_s * device.max_clock_ratio * best / reached
    of_16_bits = device.peak_flops_per_s.bf16 or device.peak_flops_per_s.fp16 or rates.hardware.peak_flops_per_s
    fed = best * c["flops_per_joule"][silicon] * watts * rates.hardware.peak_flops_per_s / of_16_bits
    energy = EnergyLimit(fed, c["sharpness"])
    return rates._replace(hardware=rates.hardware._replace(peak_flops_per_s=peak), energy=energy)


def _reference(device: Device, precision: Precision) -> Device | None:
    """Return what the learned residuals take a device for: the catalogue's of its name, else itself at usual rates.

    Not at its own: a residual that follows them may grow by more than higher rates save. Usual are those of the measured devices
    of its architecture, of all where none is measured; None where no measured device has a unit for the precision.
    """
    known, dtype = _catalogued(device.name), _dtype(device, precision)
    if known is not None and _dtype(known, precision) == dtype:
        return known
    if not (boards := _boards(device.architecture, dtype)):
        return None
    peak = geometric_mean(getattr(board.peak_flops_per_s, dtype) for board in boards)
    bandwidth = geometric_mean(board.memory_bandwidth_bytes_per_s for board in boards)
    peaks = device.peak_flops_per_s.replace(**{dtype: peak})
    return device.replace(peak_flops_per_s=peaks, memory_bandwidth_bytes_per_s=bandwidth)


@cache
def _boards(architecture: str, dtype: str) -> tuple[Device, ...]:
    """Return the measured devices of an architecture that have a unit for this format; of all where it has none."""
    devices = [device for name in known_devices() if (device := _catalogued(name)) is not None]
    able = [device for device in devices if getattr(device.peak_flops_per_s, dtype, None)]
    return tuple(device for device in able if device.architecture == architecture) or tuple(able)


@cache
def _catalogued(name: str) -> Device | None:
    try:
        return Device.named(name)
    except ConfigError:
        return None


def _dtype(device: Device, precision: Precision) -> str:
    name = _PEAKS[precision]
    if name == "tf32" and device.peak_flops_per_s.tf32 is None:
        name = "fp32"
    return name if getattr(device.peak_flops_per_s, name) is not None else ""


def is_measured(device: Device) -> bool:
    """Return whether matrix products were measured on this device or on its kind, not only on its architecture."""
    return device.gemm is not None or (not device.backend.is_host and device.name in known_devices())


@cache
def measured_architectures() -> frozenset[str]:
    """Return the architectures of the devices whose products were measured."""
    devices = (_catalogued(name) for name in known_devices())
    return frozenset(device.architecture for device in devices if device is not None)


def gemm_device(device: Device, precision: Precision, coefficients: Coefficients) -> GemmDevice:
    """Return what the learned model of matrix products knows of a device."""
    c = coefficients["gemm"]
    return GemmDevice(
        peak_flops_per_s(device, precision),
        device.memory_bandwidth_bytes_per_s,
        device.num_sms or c["num_sms"],
        float(device.cache_bytes or c["cache_bytes"]),
        c["kernels_of"].get(device.die, 0),
    )


def _sustained(device: Device, board: Device, coefficients: Coefficients, dtype: str = "") -> float:
    """Return arithmetic over hours over that of a benchmark on ``board``, whose products were in 16 bits."""
    clock, over_hours = product_clock(board, coefficients), product_clock(device, coefficients, dtype, over_hours=True)
    return over_hours / clock if clock and over_hours else coefficients["sustained"]["unknown"]


def _attention_clock(device: Device, coefficients: Coefficients) -> float:
    """Return the clock over hours over that of the boards on which attention was measured."""
    clock = product_clock(device, coefficients, over_hours=True)
    usual = geometric_mean(product_clock(board, coefficients) or 1.0 for board in _boards(device.architecture, "bf16"))
    return coefficients["sustained"]["unknown"] if clock is None else clock / usual


def _attention_rates(scenario: Scenario) -> AttentionRates:
    workload, cluster = scenario.workload, scenario.cluster
    device = cluster.weakest_device
    precision: Precision = "bf16-mixed" if workload.precision in ("fp8", "nvfp4") else workload.precision
    c, generation = scenario.coefficients["attention"], workload.flash_generation
    on_hopper = generation != "2 only" and (workload.engine_facts.uses_hopper_attention or generation >= 3)
    kernel = kernel_name(device.architecture, uses_hopper_attention=on_hopper)

    def rates(device: Device, ratio: float) -> AttentionDevice:
        # FlashAttention-2 leaves so much of Hopper's matrix units idle that the power limit does not slow it.
        sustained = ratio * (1.0 if kernel == "hopper_fa2" else _attention_clock(device, scenario.coefficients))
        processors = device.num_sms or PROCESSORS.get(device.architecture, PROCESSORS["ampere"])
        peak = peak_flops_per_s(device, precision) * sustained
        return AttentionDevice(peak, device.memory_bandwidth_bytes_per_s, processors)

    reference = rates(_reference(device, precision) or device, 1.0)
    ratio = c["first_generation_ratio"] if generation == 1 else 1.0
    if generation == 4 and kernel == "blackwell":
        ratio = c["fourth_generation_ratio"]
    isolated = 1.0 if kernel == "hopper_fa2" else _sustained(device, device, scenario.coefficients)
    return AttentionRates(kernel, rates(device, cluster.calibration.attention), ratio, reference, isolated)


class HostCosts(NamedTuple):
    """Seconds the host needs, by the workload's engine.

    Attributes:
        operator_s, collective_s: dispatch of one operator, and of one tensor-parallel collective.
        fsdp_unit_s: one fully sharded layer, forward plus backward.
        routing_s: what a mixture of experts adds to a block, forward plus backward: routing, permutation, counts read back.
        graphed_routing_s: the same where a graph replays the router and what prepares the exchange; no less for an all-to-all,
            whose splits the host reads.
        overlap_norm: p of (device^p + host^p)^(1/p), the seconds of a pass.
        adds: the host's time adds to the device's (they are the same cores) instead of hiding behind it.
        pipelined_collective_s: on top of collective_s for each rank of its group, under a pipeline that spans nodes.
        spanning_collective_s: the same for a group that spans nodes.
        step_s: once a step, while the device waits: norms that are read back, scales of the loss, metrics.
    """

    operator_s: float
    collective_s: float
    fsdp_unit_s: float
    routing_s: float
    graphed_routing_s: float
    overlap_norm: float
    adds: bool
    pipelined_collective_s: float
    spanning_collective_s: float
    step_s: float


def has_own_host(scenario: Scenario) -> bool:
    """Return whether devices have processors of their own as hosts: no other processor's link is as fast as Grace's."""
    rates = [group.host_link_bytes_per_s or 0.0 for group in scenario.cluster.groups]
    return max(rates) > float(scenario.coefficients["offload"]["own_host_bytes_per_s"])


def host_costs(scenario: Scenario) -> HostCosts:
    """Return the host overheads of the workload's engine."""
    shared, speed = scenario.coefficients["host"], scenario.cluster.calibration.host
    c = shared[scenario.workload.calibration_engine]
    if has_own_host(scenario):
        speed = speed / shared["own_processor_ratio"]
    seconds = {name: c.get(name, 0.0) / speed for name in HostCosts._fields if name.endswith("_s")}
    if not scenario.workload.sends_tokens_once_per_node:
        seconds["graphed_routing_s"] = seconds["routing_s"]
    is_host = scenario.cluster.weakest_device.backend.is_host
    if scenario.workload.code == "eager" and not is_host:
        seconds["operator_s"] = max(seconds["operator_s"], shared["plain_operator_s"] / speed)
    norm = 1.0 if scenario.workload.blocking_launches else shared["overlap_norm"]
    return HostCosts(**seconds, overlap_norm=norm, adds=is_host)


def waiting_s(device_s: FloatArray, host_s: FloatArray, norm: float) -> FloatArray:
    """Return how much longer than the device's own work a pass takes: (device^p + host^p)^(1/p) - device.

    Were the host always far ahead it would be the larger of the two (p without limit). Where both are alike, the host is ahead
    of the long kernels and behind the short ones. A host that waits for every kernel is never ahead (p = 1).
    """
    return np.asarray((device_s**norm + host_s**norm) ** (1 / norm) - device_s)
