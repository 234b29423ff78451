"""What a user lets leave the devices.

Request: what was asked of `plan`, so that it can be asked again with something changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..cost_models.hardware.host import HostRates, host_rates
from ..schema import ClusterSpec, ConfigError, ModelSpec, OffloadLimits, Plan, Workload
from ..schema.engine_rules import VERSION_RULES
from ..schema.layout import parse_assignments
from ..schema.runnable import broken_rules, problem_facts, require_our_engine, why_not_runnable
from .deadline import Deadline
from .search import OnProgress, SearchResult, search
from .space import Space, build_space
from .tasks.training import add_synthesised_orders

OffloadKinds = Literal["none", "auto", "activations", "optimizer", "params"]


def split_offload_request(
    fixed: Mapping[str, Any], offload: OffloadRequest | None
) -> tuple[dict[str, Any], OffloadRequest | None]:
    """Fields to keep without ``offload=scheduled``, which asks for schedules as a request does; None: no schedules."""
    if fixed.get("offload") != "scheduled":
        return dict(fixed), None if offload is None or offload.kinds == "none" else offload
    return {name: value for name, value in fixed.items() if name != "offload"}, offload or OffloadRequest()


def require_schedulable(workload: Workload, fixed: Mapping[str, Any]) -> None:
    """Refuse what no offload schedule is planned for.

    Raises:
        ConfigError: another engine, training without a backward pass, or a pipeline.
    """
    if not workload.engine_facts.is_own_runtime:
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

    kinds: OffloadKinds = "auto"
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
    def allowed(self) -> OffloadLimits | None:
        """As a plan says it; None: nothing."""
        if self.kinds == "none":
            return None
        return OffloadLimits(
            kinds=self.kinds,
            host_memory_bytes=self.host_memory_bytes,
            storage_path=self.storage_path,
            storage_bytes=self.storage_bytes,
        )

    def rates(self, workload: Workload, cluster: ClusterSpec) -> HostRates:
        """Of one rank."""
        return host_rates(workload, cluster, memory_bytes=self.host_memory_bytes)


@dataclass(frozen=True)
class PlanRequest:
    """Inputs of a search; ``fixed``, ``runnable`` and ``offload`` as in `planner.plan`. ``space`` and ``search`` are of layouts
    without an offload schedule; planner/tasks/offload.py searches those with one.
    """

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    fixed: Mapping[str, Any] = field(default_factory=dict)
    runnable: bool = False
    offload: OffloadRequest | None = None

    @classmethod
    def of(cls, plan: Plan) -> PlanRequest:
        """What a plan answers; of a plan that does not say its space, the smallest one that has its layout."""
        runnable = plan.provenance.space == "runnable"
        if plan.provenance.space is None:
            problem = problem_facts(
                plan.model,
                plan.workload,
                world_size=plan.cluster.num_devices,
                scaleup_domain=plan.cluster.scaleup_domain,
            )
            broken = broken_rules(plan.layout, problem, VERSION_RULES)
            runnable = is_runnable(plan.model, plan.workload, None) and not broken
        fixed = parse_assignments(plan.provenance.fixed)
        if fixed.get("offload") == "scheduled":
            del fixed["offload"]
        return cls(plan.model, plan.cluster, plan.workload, fixed, runnable, OffloadRequest.of(plan))

    def space(self, deadline: Deadline) -> Space:
        """The layouts to choose from.

        Raises:
            ConfigError: there are none; the message names the rules.
            SolverLimitError: the deadline came first.
        """
        return build_space(
            self.model, self.workload, self.cluster, self.fixed, runnable=self.runnable, deadline=deadline
        )

    def search(
        self,
        deadline: Deadline,
        *,
        space: Space | None = None,
        worse_than_s: float = math.inf,
        on_progress: OnProgress | None = None,
    ) -> SearchResult:
        """Expand the layouts best first, as far as they may be faster than ``worse_than_s``; raises like `space`."""
        result = search(
            self.model,
            self.workload,
            self.cluster,
            space or self.space(deadline),
            time_limit_s=deadline.limit_s,
            worse_than_s=worse_than_s,
            deadline=deadline,
            on_progress=on_progress,
        )
        return result if "schedule" in self.fixed else add_synthesised_orders(result, deadline)


def is_runnable(model: ModelSpec, workload: Workload, runnable: bool | None) -> bool:
    """Whether only what `apply` executes is searched: as asked for, and unless asked where it trains the model."""
    if runnable is None:
        return workload.engine_facts.is_own_runtime and not why_not_runnable(model, workload)
    if runnable:
        require_our_engine(workload)
    return runnable
