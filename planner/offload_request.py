"""What a user lets leave the devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..cost_models.host_links import HostRates, host_rates
from ..schema import ClusterSpec, ConfigError, OffloadAllowed, Plan, Workload

Kinds = Literal["none", "auto", "activations", "optimizer", "params"]


def asked_for(fixed: Mapping[str, Any], offload: OffloadRequest | None) -> tuple[dict[str, Any], OffloadRequest | None]:
    """Fields to keep without ``offload=scheduled``, which asks for schedules as a request does; None: no schedules."""
    if fixed.get("offload") != "scheduled":
        return dict(fixed), None if offload is None or offload.kinds == "none" else offload
    return {name: value for name, value in fixed.items() if name != "offload"}, offload or OffloadRequest()


def require_schedulable(workload: Workload, fixed: Mapping[str, Any]) -> None:
    """Refuse what no offload schedule is planned for.

    Raises:
        ConfigError: another engine, training without a backward pass, or a pipeline.
    """
    if workload.engine != "fsdp2":
        raise ConfigError(
            f"offload schedules are planned for fsdp2, not for {workload.engine}",
            help="fix its own switches instead: --space full --fix offload=optimizer",
        )
    if not workload.has_backward:
        raise ConfigError(
            "zeroth-order training has no gradients, states or activations that could be offloaded",
            help="plan without --offload",
        )
    if fixed.get("pp", 1) != 1:
        raise ConfigError(f"offload schedules have one pipeline stage; pp={fixed['pp']} is fixed", help="do not fix pp")


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

    @classmethod
    def of(cls, plan: Plan) -> OffloadRequest | None:
        """What a plan's search was let move; of a plan that does not say so, everything within what its schedule was given."""
        allowed, schedule = plan.provenance.offload, plan.offload
        if allowed is not None:
            return cls(**allowed.model_dump())
        if schedule is None:
            return None
        return cls(
            host_memory_bytes=schedule.host_budget_bytes,
            storage_path=schedule.storage_path,
            storage_bytes=float(schedule.storage_bytes),
        )

    @property
    def allowed(self) -> OffloadAllowed | None:
        """As a plan says it; None: nothing."""
        if self.kinds == "none":
            return None
        return OffloadAllowed(
            kinds=self.kinds,
            host_memory_bytes=self.host_memory_bytes,
            storage_path=self.storage_path,
            storage_bytes=self.storage_bytes,
        )

    def rates(self, workload: Workload, cluster: ClusterSpec) -> HostRates:
        """Of one rank."""
        return host_rates(workload, cluster, memory_bytes=self.host_memory_bytes)
