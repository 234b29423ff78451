"""Devices, links and groups of nodes: what a cluster is made of."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from .base import Count, Frozen, NonNegativeFloat, PositiveFloat, PositiveInt
from .profile import CollectivePoint

Dtype = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
Vendor = Literal["nvidia", "amd", "cpu", "other"]

MAX_DEVICES = 10_000_000
"""More than anybody has built by a factor of ten: a larger count is a typing error."""

MIN_BANDWIDTH = 1e3
"""Bytes/s; no link is slower, and a smaller number is a wrong unit or a pair of nodes that do not reach each other."""


@dataclass(frozen=True, kw_only=True)
class DeviceBackend:
    """How the software of a vendor drives its devices. A new vendor is a record in BACKENDS.

    Attributes:
        collectives: the torch.distributed backend that reaches the devices.
        is_host: its kernels run on the host's processors, in the host's memory: the host dispatches nothing ahead, copies between
            host and device are within one memory, and no context of a driver takes memory.
        has_streams: work may be queued on several streams that overlap.
        fuses_norms: a norm is one kernel.
    """

    collectives: Literal["nccl", "gloo"]
    is_host: bool
    has_streams: bool
    fuses_norms: bool


_CUDA = DeviceBackend(collectives="nccl", is_host=False, has_streams=True, fuses_norms=True)
_CPU = DeviceBackend(collectives="gloo", is_host=True, has_streams=False, fuses_norms=False)
BACKENDS: dict[Vendor, DeviceBackend] = {"nvidia": _CUDA, "amd": _CUDA, "cpu": _CPU, "other": _CUDA}
"""AMD's torch answers to the names of CUDA and NCCL."""


class PeakFlops(Frozen):
    """Dense peak rates of a device, FLOP/s; None where the device has no such unit."""

    fp32: PositiveFloat | None = None
    tf32: PositiveFloat | None = None
    fp16: PositiveFloat | None = None
    bf16: PositiveFloat | None = None
    fp8: PositiveFloat | None = None
    fp4: PositiveFloat | None = None


class GemmFit(Frozen):
    """Calibrated roofline of matrix products on one device: t = launch + max(F / (P * compute), B / (W * memory))."""

    launch_s: NonNegativeFloat
    compute_efficiency: float = Field(gt=0, le=1.5)
    memory_efficiency: float = Field(gt=0, le=1.5)
    source: str


class Device(Frozen):
    """One accelerator, or on a machine without one the share of the CPU that one rank gets.

    Attributes:
        memory_bytes: what the framework reports as total, not the decimal figure of the data sheet.
        num_sms: streaming multiprocessors (AMD: compute units); cache_bytes: second-level cache; None where unknown.
        power_limit_ratio: power limit over the one that the data sheet's rates are stated at.
        gemm: efficiencies measured on this machine; None where none were.
    """

    name: str
    vendor: Vendor
    architecture: str = ""
    memory_bytes: PositiveInt
    memory_bandwidth_bytes_per_s: PositiveFloat
    peak_flops_per_s: PeakFlops
    num_sms: PositiveInt | None = None
    cache_bytes: PositiveInt | None = None
    power_limit_ratio: PositiveFloat = 1.0
    gemm: GemmFit | None = None
    price_per_hour: PositiveFloat | None = None
    source: str = ""

    @property
    def backend(self) -> DeviceBackend:
        """How its vendor's software drives it."""
        return BACKENDS[self.vendor]


class LinkEfficiency(Frozen):
    """Achieved fraction of the line rate at large messages (bus bandwidth of nccl-tests over line rate)."""

    p2p: PositiveFloat
    all_reduce: PositiveFloat
    all_gather: PositiveFloat
    reduce_scatter: PositiveFloat
    all_to_all: PositiveFloat


class CollectiveLatency(Frozen):
    """Latency of a small collective over n devices: base + per_hop * log2(n), seconds."""

    base: NonNegativeFloat
    per_hop: NonNegativeFloat


class Link(Frozen):
    """One kind of link; bandwidth is unidirectional, per device or per whatever shares it.

    Attributes:
        latency_s: one small send and receive.
        ramp_s: pipeline fill of a collective: b bytes of line rate W add ``sqrt(ramp_s * b / W)``.
        ring_step_s: what each crossing between nodes adds to a ring of long messages; None: ``latency_s``.
        mesh_peers: of devices joined in pairs without a switch, how many peers all links of one reach together: n devices use
            ``(n - 1) / mesh_peers`` of the rate.
        curve: name of the measured curves (collective_curves.json) that stand in for efficiencies and latencies.
        measured: collectives measured on this very link; where there are some, they are interpolated.
    """

    name: str
    kind: Literal["scale-up", "scale-out"]
    title: str = ""
    bandwidth_bytes_per_s: float = Field(ge=MIN_BANDWIDTH, le=1e15)
    latency_s: NonNegativeFloat
    efficiency: LinkEfficiency
    collective_latency_s: CollectiveLatency
    shared_by: Literal["device", "host", "node"] = "device"
    ramp_s: NonNegativeFloat = 0.0
    ring_step_s: NonNegativeFloat | None = None
    mesh_peers: PositiveFloat | None = None
    curve: str = ""
    measured: tuple[CollectivePoint, ...] = ()
    source: str = ""


class LinkLevel(Frozen):
    """All devices of one domain reach each other over ``link``; domains nest."""

    link: Link
    domain_size: Count


def require_nesting(levels: tuple[LinkLevel, ...], num_devices: int, owner: str) -> None:
    """Require that domains consist of complete inner domains, and that the outermost one is all devices of the owner.

    Raises:
        ValueError: with the numbers.
    """
    sizes = [level.domain_size for level in levels]
    for inner, outer in itertools.pairwise(sizes):
        if outer <= inner or outer % inner:
            raise ValueError(f"link domains must nest: {outer} devices do not hold whole domains of {inner}")
    if sizes[-1] != num_devices:
        raise ValueError(f"the outermost link joins {sizes[-1]} devices, {owner} has {num_devices}")


def joined_levels(levels: Sequence[LinkLevel], num_devices: int) -> tuple[LinkLevel, ...]:
    """Return the link levels of ``num_devices`` devices with these links: complete inner domains, and what joins them all."""
    candidates = (level for level in levels[:-1] if level.domain_size < num_devices)
    inner = [level for level in candidates if num_devices % level.domain_size == 0]
    outer = next((level for level in levels if level.domain_size >= num_devices), levels[-1])
    return (*inner, outer.replace(domain_size=num_devices))


class NodeGroup(Frozen):
    """``num_nodes`` identical nodes.

    Attributes:
        levels: links among the devices of this group, innermost first, where they are not those of the cluster; the last one joins
            them all. Only in a cluster of several groups.
    """

    device: Device
    num_nodes: Count
    devices_per_node: Count
    host_memory_bytes: PositiveInt | None = None
    host_link_bytes_per_s: PositiveFloat | None = None
    storage_bytes_per_s: PositiveFloat | None = None
    levels: tuple[LinkLevel, ...] = ()

    @model_validator(mode="after")
    def _levels_nest(self) -> Self:
        if self.levels:
            require_nesting(self.levels, self.num_devices, "the group")
        return self

    @property
    def num_devices(self) -> int:
        """Devices of the group."""
        return self.num_nodes * self.devices_per_node

    def resized(self, num_nodes: int) -> Self:
        """Return the group with another number of nodes."""
        levels = joined_levels(self.levels, num_nodes * self.devices_per_node) if self.levels else ()
        return self.replace(num_nodes=num_nodes, levels=levels)
