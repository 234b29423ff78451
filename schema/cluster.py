"""ClusterSpec: groups of identical nodes and the link levels that join their devices, innermost first."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from .base import Count, Frozen, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, located
from .catalogue import find_device
from .cluster_files import device_fields, link_fields, read_cluster
from .errors import ConfigError
from .limits import MAX_DEVICES
from .profile import Calibration, CollectivePoint, Profile
from .regions import RegionLink
from .units import GIB, MIB

Dtype = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
Vendor = Literal["nvidia", "amd", "cpu", "google", "intel", "aws", "other"]

_CONTEXT_BYTES, _CHANNEL_BYTES, _CHANNEL_BYTES_PER_S, _CHANNELS = GIB // 2, 85 * MIB, 12.5e9, (2, 24)
"""A context is 0.4 to 0.6 GiB on A100 and H100. NCCL: NCCL_BUFFSIZE is 4 MiB, about 10 with the other protocols, for each of two
neighbours in four communicators; 24 channels on A100's 300 GB/s, 2 over PCIe (its documentation and log)."""

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
        why_not_run: why our runtime and the files for other engines do not drive these devices; empty where they do.
    """

    collectives: Literal["nccl", "gloo"]
    is_host: bool
    has_streams: bool
    fuses_norms: bool
    why_not_run: str = ""


_CUDA = DeviceBackend(collectives="nccl", is_host=False, has_streams=True, fuses_norms=True)
_CPU = DeviceBackend(collectives="gloo", is_host=True, has_streams=False, fuses_norms=False)
BACKENDS: dict[Vendor, DeviceBackend] = {
    "nvidia": _CUDA,
    "amd": _CUDA,
    "cpu": _CPU,
    "google": replace(_CUDA, why_not_run="torch drives TPUs through torch_xla"),
    "intel": replace(_CUDA, why_not_run="torch drives Gaudi through Intel's own build of it"),
    "aws": replace(_CUDA, why_not_run="torch drives Trainium through torch_neuronx"),
    "other": _CUDA,
}
"""AMD's torch answers to the names of CUDA and NCCL; what others would need is taken to cost the same."""


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
        power_limit_w, power_limit_ratio: watts of the data sheet's board (None: unknown), and what of them the machine allows.
        die: silicon, where an architecture has several; max_clock_ratio: unlimited clock of products over the data sheet's.
        inline_ecc: error correction lies in the memory itself, and takes part of its rate.
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
    power_limit_w: PositiveFloat | None = None
    die: str = ""
    max_clock_ratio: PositiveFloat = 1.0
    inline_ecc: bool = False
    gemm: GemmFit | None = None
    price_per_hour: PositiveFloat | None = None
    source: str = ""

    @property
    def backend(self) -> DeviceBackend:
        """How its vendor's software drives it."""
        return BACKENDS[self.vendor]

    @classmethod
    def named(cls, name: str) -> Self:
        """Return a device of the catalogue, named by its name or an alias.

        Raises:
            ConfigError: there is no such device.
        """
        return cls(**device_fields(*find_device(name)))


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
        group_bandwidth_bytes_per_s: what one group gets from a node at most: a flow of a virtual network is slower than its node.
        ramp_s: pipeline fill of a collective: b bytes of line rate W add ``sqrt(ramp_s * b / W)``.
        ring_step_s: what each crossing between nodes adds to a ring of long messages; None: ``latency_s``.
        mesh_peers: of devices joined in pairs without a switch, how many peers all links of one reach together: n devices use
            ``(n - 1) / mesh_peers`` of the rate.
        curve: name of the measured curves (collective_curves.json) that stand in for efficiencies and latencies.
        measured: collectives measured on this very link; where there are some, they are interpolated.
    """

    name: str
    kind: Literal["scale-up", "scale-out", "wan"]
    title: str = ""
    bandwidth_bytes_per_s: float = Field(ge=MIN_BANDWIDTH, le=1e15)
    latency_s: NonNegativeFloat
    efficiency: LinkEfficiency
    collective_latency_s: CollectiveLatency
    shared_by: Literal["device", "host", "node"] = "device"
    group_bandwidth_bytes_per_s: PositiveFloat | None = None
    ramp_s: NonNegativeFloat = 0.0
    ring_step_s: NonNegativeFloat | None = None
    mesh_peers: PositiveFloat | None = None
    curve: str = ""
    measured: tuple[CollectivePoint, ...] = ()
    source: str = ""

    @classmethod
    def named(cls, name: str) -> Self:
        """Return a link of the catalogue.

        Raises:
            ConfigError: there is no such link.
        """
        return cls(**link_fields(name))


class LinkLevel(Frozen):
    """All devices of one domain reach each other over ``link``; domains nest."""

    link: Link
    domain_size: Count


def default_reserved_bytes(levels: Sequence[LinkLevel]) -> int:
    """Return the memory of an accelerator that a plan may not use: its context, and the buffers of collectives."""
    fastest = levels[0].link.bandwidth_bytes_per_s if levels and levels[-1].domain_size > 1 else 0.0
    channels = min(max(fastest / _CHANNEL_BYTES_PER_S, _CHANNELS[0]), _CHANNELS[1]) if fastest else 0
    return _CONTEXT_BYTES + int(channels * _CHANNEL_BYTES)


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


class ZoneLink(Frozen):
    """All devices of these zones reach each other over ``link``."""

    zones: tuple[str, ...] = Field(min_length=2)
    link: Link


class NodeGroup(Frozen):
    """``num_nodes`` identical nodes.

    Attributes:
        host_bandwidth_bytes_per_s: at which a node's processors read weights; host_flops_per_s: of their products with them.
            None: as usual for hosts with such links.
        zone: where they stand, a name of the user's; groups of different zones are never alike.
        levels: links among the devices of this group, innermost first, where they are not those of the cluster; the last one joins
            them all. Only in a cluster of several groups.
        profile: measurements of this kind of node, where every kind of a mixed cluster has its own.
    """

    device: Device
    num_nodes: Count
    devices_per_node: Count
    host_memory_bytes: PositiveInt | None = None
    host_link_bytes_per_s: PositiveFloat | None = None
    storage_bytes_per_s: PositiveFloat | None = None
    host_bandwidth_bytes_per_s: PositiveFloat | None = None
    host_flops_per_s: PositiveFloat | None = None
    levels: tuple[LinkLevel, ...] = ()
    zone: str = ""
    profile: Profile | None = Field(default=None, repr=False)

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


class ClusterSpec(Frozen):
    """The machine a plan is for.

    Attributes:
        levels: link levels, innermost first; the last one joins every device.
        zone_links: what joins some of the zones, where that is more than what joins all.
        region_links: between zones that are regions, each pair in both directions (schema/regions.py).
        reserved_bytes: memory of each device that a plan may not use; unset: context and buffers of collectives.
        bandwidth_matrix: measured node x node bandwidth, bytes/s: what one device of a node (row) gets to its counterpart on
            another while the other devices of the node send as well. The diagonal is not read.
        any_node_order: for bounds: groups get what no order of the nodes exceeds, not what the listed one gives them.
        profile: the measurements this spec was made from, where there are any; of a mixed cluster those of its slowest kind.
        calibration: what measured runs on it say about the model's rates (`validation.table_calibration.calibrate`).
    """

    name: str = Field(min_length=1)
    groups: tuple[NodeGroup, ...] = Field(min_length=1)
    levels: tuple[LinkLevel, ...] = Field(min_length=1)
    reserved_bytes: NonNegativeInt = Field(default_factory=lambda data: default_reserved_bytes(data.get("levels", ())))
    bandwidth_matrix: tuple[tuple[NonNegativeFloat, ...], ...] | None = None
    any_node_order: bool = Field(default=False, exclude=True, repr=False)
    zone_links: tuple[ZoneLink, ...] = ()
    region_links: tuple[RegionLink, ...] = Field(default=(), exclude_if=lambda value: not value)
    profile: Profile | None = None
    calibration: Calibration = Calibration()

    @model_validator(mode="after")
    def _levels_nest(self) -> Self:
        if self.num_devices > MAX_DEVICES:
            raise ValueError(f"{self.num_devices} devices are more than the {MAX_DEVICES} that make sense")
        require_nesting(self.levels, self.num_devices, "the cluster")
        if len(self.groups) == 1 and self.groups[0].levels:
            raise ValueError("the links of the only group are those of the cluster: give them as its levels")
        if unknown := {zone for join in self.zone_links for zone in join.zones} - {group.zone for group in self.groups}:
            raise ValueError(f"zone_links name {', '.join(sorted(unknown))}, in which no group stands")
        smallest = min(group.device.memory_bytes for group in self.groups)
        if self.reserved_bytes >= smallest:
            raise ValueError(f"reserved_bytes {self.reserved_bytes} leaves nothing of the {smallest} bytes of a device")
        return self

    @model_validator(mode="after")
    def _matrix_joins_all_nodes(self) -> Self:
        if (matrix := self.bandwidth_matrix) is None:
            return self
        size = self.num_nodes
        if {len(matrix), *map(len, matrix)} != {size}:
            raise ValueError(f"bandwidth_matrix must be {size} x {size} (nodes)")
        for i, j in itertools.permutations(range(len(matrix)), 2):
            if matrix[i][j] < MIN_BANDWIDTH:
                raise ValueError(
                    f"bandwidth_matrix[{i}][{j}] is {matrix[i][j]:g} bytes/s: every two nodes must reach each other"
                )
        return self

    @property
    def num_devices(self) -> int:
        """Devices of all groups."""
        return sum(group.num_devices for group in self.groups)

    @property
    def num_nodes(self) -> int:
        """Nodes of all groups."""
        return sum(group.num_nodes for group in self.groups)

    @property
    def node_sizes(self) -> tuple[int, ...]:
        """Devices of every node, in order."""
        return tuple(group.devices_per_node for group in self.groups for _ in range(group.num_nodes))

    @property
    def largest_node(self) -> int:
        """Devices of the largest node: as many may share what a node has once."""
        return max(group.devices_per_node for group in self.groups)

    @cached_property
    def parts(self) -> tuple[ClusterPart, ...]:
        """Device pools in the order of the groups: nodes alike in devices and links; none where all nodes are alike."""
        kinds: list[list[int]] = []
        for i, group in enumerate(self.groups):
            if not (alike := [kind for kind in kinds if _are_alike(self.groups[kind[0]], group)]):
                kinds += (alike := [[]])
            alike[0].append(i)
        if len(kinds) == 1:
            return ()
        first = [0, *itertools.accumulate(group.num_nodes for group in self.groups)]
        parts = []
        for k, kind in enumerate(kinds):
            nodes = tuple(node for i in kind for node in range(first[i], first[i + 1]))
            group = max((self.groups[i] for i in kind), key=lambda group: len(group.levels))
            joined = group.replace(num_nodes=len(nodes), levels=(), profile=None)
            profile = group.profile or self.profile
            cluster = self.replace(
                name=f"{self.name}[{k}]",
                groups=(joined,),
                levels=joined_levels(group.levels or self.levels, joined.num_devices),
                bandwidth_matrix=self.bandwidths_of(nodes),
                zone_links=(),
                region_links=(),
                profile=profile,
                calibration=self.calibration if group.profile is None else group.profile.calibration,
            )
            parts.append(ClusterPart(cluster, tuple(kind), nodes))
        return tuple(parts)

    def bandwidths_of(self, nodes: Sequence[int]) -> tuple[tuple[float, ...], ...] | None:
        """Return the rows and columns of the bandwidth matrix of some nodes."""
        matrix = self.bandwidth_matrix
        return None if matrix is None else tuple(tuple(matrix[i][j] for j in nodes) for i in nodes)

    @property
    def is_mixed(self) -> bool:
        """True where nodes differ in their devices or links."""
        return bool(self.parts)

    @property
    def why_not_driven(self) -> tuple[str, ...]:
        """Return of each kind of device why nothing of ours drives it; empty where all are driven."""
        backends = {group.device.name: group.device.backend for group in self.groups}
        return tuple(f"{name}: {backend.why_not_run}" for name, backend in backends.items() if backend.why_not_run)

    @property
    def is_nvidia(self) -> bool:
        """True where every device is NVIDIA's."""
        return all(group.device.vendor == "nvidia" for group in self.groups)

    @cached_property
    def weakest_device(self) -> Device:
        """Minimum of memory, bandwidth and peak over all groups: what a layout that treats all ranks alike may count on."""
        devices = [group.device for group in self.groups]
        rates = {dtype: [getattr(d.peak_flops_per_s, dtype) for d in devices] for dtype in PeakFlops.model_fields}
        peaks = {dtype: None if None in of_dtype else min(of_dtype) for dtype, of_dtype in rates.items()}
        return min(devices, key=product_rate).replace(
            peak_flops_per_s=PeakFlops(**peaks),
            memory_bytes=min(d.memory_bytes for d in devices),
            memory_bandwidth_bytes_per_s=min(d.memory_bandwidth_bytes_per_s for d in devices),
        )

    @property
    def memory_budget_bytes(self) -> int:
        """Bytes of each device that a plan may use."""
        return self.weakest_device.memory_bytes - self.reserved_bytes

    def with_budget(self, budget_bytes: int) -> ClusterSpec:
        """Return the cluster where a plan may use only so much of each device."""
        return self.replace(reserved_bytes=self.memory_budget_bytes + self.reserved_bytes - budget_bytes)

    def with_headroom(self, fraction: float) -> ClusterSpec:
        """Return the cluster where a plan leaves so much of each device's memory free beyond what is reserved.

        Raises:
            ConfigError: nothing would be left.
        """
        return self.replace(reserved_bytes=self.reserved_bytes + int(fraction * self.weakest_device.memory_bytes))

    @property
    def scaleup_domain(self) -> int:
        """Devices joined by the innermost link."""
        return self.levels[0].domain_size

    @property
    def price_per_hour(self) -> float | None:
        """USD per hour of the whole cluster; None unless every device has a price."""
        prices = [(group.num_devices, group.device.price_per_hour) for group in self.groups]
        return None if any(price is None for _, price in prices) else sum(n * (price or 0) for n, price in prices)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what a user types for CLUSTER: ``64xH100-SXM-80GB``, ``8x8xH100-SXM-80GB/ib400``, a TOML file, or ``local``.

        Raises:
            ConfigError: the text is none of these, or what it names cannot be read.
        """
        made, source = read_cluster(text)
        if isinstance(made, cls):
            return made
        if not isinstance(made, dict):
            raise ConfigError(f"{source} returned a {type(made).__name__}, not a ClusterSpec")
        with located(source):
            return cls(**made)


class ClusterPart(NamedTuple):
    """A device pool: nodes that are alike, as a cluster; which groups and nodes of the mixed cluster they are."""

    cluster: ClusterSpec
    groups: tuple[int, ...]
    nodes: tuple[int, ...]

    @property
    def device(self) -> str:
        """Name of its device."""
        return self.cluster.groups[0].device.name


def product_rate(device: Device) -> float:
    """Return the rate of products in 16 bits, or in what a device has of them, by which kinds are slower or faster."""
    return device.peak_flops_per_s.bf16 or device.peak_flops_per_s.fp16 or device.peak_flops_per_s.fp32 or 0.0


def _are_alike(one: NodeGroup, other: NodeGroup) -> bool:
    """Return whether nodes differ only in their number and price; a few nodes may lack the outer links of many."""
    links = zip(one.levels, other.levels, strict=False)
    same_links = bool(one.levels) == bool(other.levels) and all(a.link == b.link for a, b in links)
    first, second = (
        group.replace(num_nodes=1, levels=(), device=group.device.replace(price_per_hour=None))
        for group in (one, other)
    )
    return same_links and first == second
