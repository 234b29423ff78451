"""ClusterSpec: groups of identical nodes and the link levels that join their devices, innermost first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Self

from pydantic import Field, model_validator

from .base import Frozen, NonNegativeFloat, NonNegativeInt
from .cluster_files import error_in, read_cluster
from .devices import MAX_DEVICES, MIN_BANDWIDTH, Device, LinkLevel, NodeGroup, PeakFlops, joined_levels, require_nesting
from .errors import ConfigError
from .profile import Calibration, Profile
from .units import GIB

DEFAULT_RESERVED_BYTES = int(2.5 * GIB)
"""Memory of an accelerator that a plan may not use: CUDA context, NCCL channels, cuBLAS workspace and allocator fragmentation.

Sources: context and NCCL buffers take 1-2 GiB of nvidia-smi memory on A100/H100; reserved/allocated was 1.03-1.09 on 43
measured B200 runs (SimuMax, Apache-2.0).
"""


class ClusterSpec(Frozen):
    """The machine a plan is for.

    Attributes:
        levels: link levels, innermost first; the last one joins every device.
        reserved_bytes: memory of each device that a plan may not use.
        bandwidth_matrix: measured node x node bandwidth, bytes/s, where there is one: what one device of a node gets to its
            counterpart on another while the other devices of the node send as well. The diagonal is not read.
        profile: the measurements this spec was made from, where there are any.
        calibration: what measured runs on it say about the model's rates (`validation.table_calibration.calibrate`).
    """

    name: str = Field(min_length=1)
    groups: tuple[NodeGroup, ...] = Field(min_length=1)
    levels: tuple[LinkLevel, ...] = Field(min_length=1)
    reserved_bytes: NonNegativeInt = DEFAULT_RESERVED_BYTES
    bandwidth_matrix: tuple[tuple[NonNegativeFloat, ...], ...] | None = None
    profile: Profile | None = None
    calibration: Calibration = Calibration()

    @model_validator(mode="after")
    def _levels_nest(self) -> Self:
        require_nesting(self.levels, self.num_devices, "the cluster")
        if self.num_devices > MAX_DEVICES:
            raise ValueError(f"{self.num_devices} devices are more than the {MAX_DEVICES} that make sense")
        if len(self.groups) == 1 and self.groups[0].levels:
            raise ValueError("the links of the only group are those of the cluster: give them as its levels")
        smallest = min(group.device.memory_bytes for group in self.groups)
        if self.reserved_bytes >= smallest:
            raise ValueError(f"reserved_bytes {self.reserved_bytes} leaves nothing of the {smallest} bytes of a device")
        return self

    @model_validator(mode="after")
    def _matrix_joins_all_nodes(self) -> Self:
        matrix, size = self.bandwidth_matrix or (), self.num_nodes
        if matrix and (len(matrix) != size or any(len(row) != size for row in matrix)):
            raise ValueError(f"bandwidth_matrix must be {size} x {size} (nodes)")
        for i, row in enumerate(matrix):
            slow = [j for j, rate in enumerate(row) if i != j and rate < MIN_BANDWIDTH]
            if slow:
                raise ValueError(
                    f"bandwidth_matrix[{i}][{slow[0]}] is {row[slow[0]]:g} bytes/s: every two nodes must reach each other"
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
        """Device pools: nodes that are alike in devices and links, as clusters; none where all nodes are alike."""
        return cluster_parts(self)

    @property
    def is_mixed(self) -> bool:
        """True where nodes differ in their devices or links."""
        return bool(self.parts)

    @cached_property
    def weakest_device(self) -> Device:
        """Minimum of memory, bandwidth and peak over all groups: what a layout that treats all ranks alike may count on."""
        devices = [group.device for group in self.groups]
        peaks: dict[str, float | None] = {}
        for dtype in PeakFlops.model_fields:
            rates = [getattr(device.peak_flops_per_s, dtype) for device in devices]
            peaks[dtype] = None if None in rates else min(rates)
        slowest = min(
            devices, key=lambda d: d.peak_flops_per_s.bf16 or d.peak_flops_per_s.fp16 or d.peak_flops_per_s.fp32 or 0
        )
        return slowest.replace(
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

    @property
    def scaleup_domain(self) -> int:
        """Devices joined by the innermost link."""
        return self.levels[0].domain_size

    @property
    def price_per_hour(self) -> float | None:
        """USD per hour of the whole cluster; None unless every device has a price."""
        prices = [group.device.price_per_hour for group in self.groups]
        if any(price is None for price in prices):
            return None
        return sum(group.num_devices * (price or 0) for group, price in zip(self.groups, prices, strict=True))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what a user types for CLUSTER: ``64xH100-SXM-80GB``, ``8x8xH100-SXM-80GB/ib400``, a TOML file, or ``local``.

        Raises:
            ConfigError: the text is none of these, or what it names cannot be read.
        """
        made, source = read_cluster(text)
        if isinstance(made, ClusterSpec):
            return cls(**{name: getattr(made, name) for name in cls.model_fields})
        if not isinstance(made, dict):
            raise ConfigError(f"{source} returned a {type(made).__name__}, not a ClusterSpec")
        try:
            return cls(**made)
        except ConfigError as error:
            raise (error_in(source, error) if source else error) from None


class ClusterPart(NamedTuple):
    """A device pool: nodes that are alike, as a cluster, and which groups and nodes of the mixed cluster they are."""

    cluster: ClusterSpec
    groups: tuple[int, ...]
    nodes: tuple[int, ...]

    @property
    def device(self) -> str:
        """Name of its device."""
        return self.cluster.groups[0].device.name


def part_label(parts: Sequence[ClusterPart], g: int) -> str:
    """Name a device pool: by its device, and where another pool has the same one by the link that joins its nodes too."""
    same = [part for part in parts if part.device == parts[g].device]
    return parts[g].device if len(same) == 1 else f"{parts[g].device}/{parts[g].cluster.levels[-1].link.name}"


def cluster_parts(cluster: ClusterSpec) -> tuple[ClusterPart, ...]:
    """Return the device pools of a cluster in the order in which it lists them; none where all nodes are alike."""
    kinds: list[list[int]] = []
    for i, group in enumerate(cluster.groups):
        alike = next((kind for kind in kinds if _are_alike(cluster.groups[kind[0]], group)), None)
        if alike is None:
            kinds.append([i])
        else:
            alike.append(i)
    if len(kinds) == 1:
        return ()
    first = [sum(group.num_nodes for group in cluster.groups[:i]) for i in range(len(cluster.groups))]
    parts = []
    for k, members in enumerate(kinds):
        nodes = tuple(first[i] + n for i in members for n in range(cluster.groups[i].num_nodes))
        parts.append(ClusterPart(_part_cluster(cluster, k, members, nodes), tuple(members), nodes))
    return tuple(parts)


def with_parts_in_order(cluster: ClusterSpec, parts: Sequence[ClusterPart]) -> ClusterSpec:
    """Return the cluster with its groups listed pool by pool, in the given order."""
    nodes = [n for part in parts for n in part.nodes]
    groups = tuple(cluster.groups[i] for part in parts for i in part.groups)
    return cluster.replace(groups=groups, bandwidth_matrix=_matrix_of_nodes(cluster.bandwidth_matrix, nodes))


def _are_alike(one: NodeGroup, other: NodeGroup) -> bool:
    """Return whether nodes differ only in their number; a few nodes may lack the outer links of many."""
    links = zip(one.levels, other.levels, strict=False)
    same_links = bool(one.levels) == bool(other.levels) and all(a.link == b.link for a, b in links)
    return same_links and one.replace(num_nodes=1, levels=()) == other.replace(num_nodes=1, levels=())


def _part_cluster(cluster: ClusterSpec, k: int, groups: Sequence[int], nodes: Sequence[int]) -> ClusterSpec:
    group = max((cluster.groups[i] for i in groups), key=lambda group: len(group.levels))
    members = group.replace(num_nodes=len(nodes), levels=())
    return cluster.replace(
        name=f"{cluster.name}[{k}]",
        groups=(members,),
        levels=joined_levels(group.levels or cluster.levels, members.num_devices),
        bandwidth_matrix=_matrix_of_nodes(cluster.bandwidth_matrix, nodes),
    )


def _matrix_of_nodes(
    matrix: tuple[tuple[float, ...], ...] | None, nodes: Sequence[int]
) -> tuple[tuple[float, ...], ...] | None:
    return None if matrix is None else tuple(tuple(matrix[i][j] for j in nodes) for i in nodes)
