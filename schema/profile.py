"""Profile: what was measured on a machine, where and with which software."""

from __future__ import annotations

import hashlib
from typing import Literal, Self

from pydantic import Field

from .base import Document, Frozen, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from .calibration import Calibration
from .profile_points import (
    AllocatorMemory,
    AttentionPoint,
    CollectiveOp,
    CollectivePoint,
    CpuAdamPoint,
    ElementwisePoint,
    GroupedMatmulPoint,
    HostCopyPoint,
    LayerMemory,
    LayerPoint,
    MatmulPoint,
    OverlapPoint,
    PairPoint,
    StepMemory,
    StoragePoint,
)

__all__ = ["CollectiveOp", "CollectivePoint", "Machine", "MatmulPoint", "Profile"]

PartName = Literal["compute", "memory", "layers", "links", "host", "storage", "overlap"]


class Machine(Frozen):
    """Identity of what was measured; a profile of another identity is refused.

    Attributes:
        num_devices: ranks of all nodes together; host_memory_bytes: of one node, the smallest.
    """

    device: str
    num_devices: PositiveInt
    host_memory_bytes: PositiveInt
    backend: Literal["nccl", "gloo"]
    torch: str
    python: str
    driver: str = ""
    num_nodes: PositiveInt = 1


class Provenance(Frozen):
    """Where and with what a profile was measured, beyond the identity of the machine.

    Attributes:
        hosts: names of the nodes, in the order of their ranks.
        nccl, cuda: versions; empty without them.
        clock_mhz, memory_clock_mhz, power_limit_w: of the first device under load; None where it does not say.
    """

    meshwright: str = ""
    hosts: tuple[str, ...] = ()
    nccl: str = ""
    cuda: str = ""
    clock_mhz: PositiveFloat | None = None
    memory_clock_mhz: PositiveFloat | None = None
    power_limit_w: PositiveFloat | None = None


class RankReport(Frozen):
    """What one rank measured by itself, to compare it with its peers.

    Attributes:
        node: position of its host in ``Provenance.hosts``.
        compute_ratio, memory_ratio, link_ratio: median over the points of its time over the median of all ranks; 1 where there
            is no such point.
    """

    rank: NonNegativeInt
    node: NonNegativeInt
    device: str
    compute_ratio: PositiveFloat = 1.0
    memory_ratio: PositiveFloat = 1.0
    link_ratio: PositiveFloat = 1.0


class Slow(Frozen):
    """A rank, node or link that is slower than its peers beyond their noise.

    Attributes:
        name: ``rank 3``, ``node gpu-17``, ``link gpu-17 - gpu-18``.
        what: was slow: compute, memory or link.
        ratio: its time over the median of its peers; ``noise``: what peers differ by.
    """

    kind: Literal["rank", "node", "link"]
    name: str
    what: Literal["compute", "memory", "link"]
    ratio: PositiveFloat
    noise: NonNegativeFloat


class PartRecord(Frozen):
    """One part of the measurement.

    Attributes:
        state: complete; shortened where its share of the budget ended it; skipped with the reason.
        reason: why it was shortened or skipped.
    """

    name: PartName
    state: Literal["complete", "shortened", "skipped"]
    duration_s: NonNegativeFloat
    num_points: NonNegativeInt
    reason: str = ""


class Profile(Document):
    """Measurements of one machine, or of all nodes of a job.

    Attributes:
        duration_s: from the start of the ranks to the last point; ``budget_s``: what it was allowed, None where nobody said.
        foreign_load_fraction: part of the cores that other work used when the measurement began; above some tenths the figures
            are too low.
        parts: what was measured in which time; empty in a profile that only describes ``--cluster local``.
        node_bandwidth_bytes_per_s: node x node: what one device of a node gets to its counterpart while the others send as well.
        slow: what the report names.
        calibration: what runs of `apply` on the machine say about the model's rates (`meshwright calibrate`).
        content_sha256: of everything else; empty in a profile of an older version, or in one that is not finished.
    """

    machine: Machine
    created: str
    duration_s: PositiveFloat
    budget_s: PositiveFloat | None = None
    foreign_load_fraction: float = Field(default=0.0, ge=0, le=1)
    provenance: Provenance = Provenance()
    parts: tuple[PartRecord, ...] = ()
    memory_bandwidth_bytes_per_s: PositiveFloat
    device_memory_bytes: PositiveInt
    matmuls: tuple[MatmulPoint, ...] = ()
    grouped_matmuls: tuple[GroupedMatmulPoint, ...] = ()
    attention: tuple[AttentionPoint, ...] = ()
    elementwise: tuple[ElementwisePoint, ...] = ()
    layers: tuple[LayerPoint, ...] = ()
    layer_memory: tuple[LayerMemory, ...] = ()
    step_memory: tuple[StepMemory, ...] = ()
    allocator: AllocatorMemory | None = None
    collectives: tuple[CollectivePoint, ...] = ()
    pairs: tuple[PairPoint, ...] = ()
    node_bandwidth_bytes_per_s: tuple[tuple[NonNegativeFloat, ...], ...] | None = None
    host_copies: tuple[HostCopyPoint, ...] = ()
    cpu_adam: tuple[CpuAdamPoint, ...] = ()
    storage: tuple[StoragePoint, ...] = ()
    overlaps: tuple[OverlapPoint, ...] = ()
    ranks: tuple[RankReport, ...] = ()
    slow: tuple[Slow, ...] = ()
    calibration: Calibration = Calibration()
    content_sha256: str = ""

    def computed_sha256(self) -> str:
        """Hash of everything but ``content_sha256``; fields at their defaults do not count, so that later ones change nothing."""
        content = self.model_dump_json(exclude={"content_sha256"}, exclude_defaults=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def sealed(self) -> Self:
        """The same with the hash of its content."""
        return self.replace(content_sha256=self.computed_sha256())

    @property
    def is_altered(self) -> bool:
        """Whether somebody changed it after it was sealed; a profile without a hash cannot tell."""
        return bool(self.content_sha256) and self.content_sha256 != self.computed_sha256()
