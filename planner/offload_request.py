"""What a user lets leave the devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..cost_models.host_links import HostRates, host_rates
from ..schema import ClusterSpec, Workload

Kinds = Literal["none", "auto", "activations", "optimizer", "params"]


@dataclass(frozen=True, kw_only=True)
class OffloadRequest:
    """What may leave the devices, and for where.

    Attributes:
        kinds: auto: everything; none: nothing.
        host_memory_bytes: of one node; None: as the cluster says.
        storage_path, storage_bytes: a folder of each node's drives and what may be written there; None: no storage.
    """

    kinds: Kinds = "auto"
    host_memory_bytes: float | None = None
    storage_path: str | None = None
    storage_bytes: float = 0.0

    def rates(self, workload: Workload, cluster: ClusterSpec) -> HostRates:
        """Of one rank."""
        return host_rates(workload, cluster, memory_bytes=self.host_memory_bytes)
