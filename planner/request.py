"""Request: what was asked of `plan`, so that it can be asked again with something changed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..schema import ClusterSpec, ModelSpec, Plan, Workload
from ..schema.engine_rules import VERSION_RULES
from ..schema.layout import parse_assignments
from ..schema.layout_facts import layout_facts
from ..schema.rules import broken_rules, require_our_engine
from ..schema.runnable import why_not_runnable
from .deadline import Deadline
from .finalists import with_orders
from .offload_request import OffloadRequest
from .search import OnProgress, SearchResult, search
from .space import Space, build_space


@dataclass(frozen=True)
class Request:
    """Inputs of a search; ``fixed``, ``runnable`` and ``offload`` as in `planner.plan`. ``space`` and ``search`` are of layouts
    without an offload schedule; planner/offload.py searches those with one.
    """

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    fixed: Mapping[str, Any] = field(default_factory=dict)
    runnable: bool = False
    offload: OffloadRequest | None = None

    @classmethod
    def of(cls, plan: Plan) -> Request:
        """What a plan answers; of a plan that does not say its space, the smallest one that has its layout."""
        runnable = plan.provenance.space == "runnable"
        if plan.provenance.space is None:
            facts = layout_facts(
                plan.model,
                plan.workload,
                plan.layout,
                world_size=plan.cluster.num_devices,
                scaleup_domain=plan.cluster.scaleup_domain,
            )
            runnable = is_runnable(plan.model, plan.workload, None) and not broken_rules(facts, VERSION_RULES)
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
        return result if "schedule" in self.fixed else with_orders(result, deadline)


def is_runnable(model: ModelSpec, workload: Workload, runnable: bool | None) -> bool:
    """Whether only what `apply` executes is searched: as asked for, and unless asked where it trains the model."""
    if runnable is None:
        return workload.engine == "fsdp2" and not why_not_runnable(model, workload)
    if runnable:
        require_our_engine(workload)
    return runnable
