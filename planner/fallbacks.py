"""Plans for what is left of a cluster when nodes are lost, made before any is.

For f = 1..F lost units (nodes, or devices where the cluster is one node) the fastest layout of the units that are left:

    (O)  min step_s                    over the layouts of N - f units; a plan may leave devices idle
    (C1) batch:  the global batch is the same; data-parallel ranks may take unlike shares (schema/shares.py)
    (C2) memory: it fits on each device, as every plan does
    (C3) states: each part of the states is held by one that is left: by a replica, or as a copy of a step before in the memory of a
         peer on another unit
    (C4) order:  a step's sequences are those of the run without faults, because samples are counted, not ranks

`check` verifies a plan and its fallbacks without knowing how they were made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..schema import ClusterSpec, ConfigError, InfeasibleError, SolverLimitError, TrainingPlan
from ..schema.layout import parse_assignments
from ..schema.shares import state_copies
from .plan import plan as make_plan
from .request import Deadline, OffloadRequest
from .variants import resized

RETAINED_FIELDS = frozenset({"recompute", "sequence_parallel", "micro_batch_size", "offload_fraction"})
"""Of the layout's fields that the plan had to keep: those that do not say how many devices share something."""


def plan_on(plan: TrainingPlan, cluster: ClusterSpec, deadline: Deadline | None = None) -> TrainingPlan:
    """Return the plan for the same model and workload on other machines, with what the first one had fixed where that fits.

    Raises:
        InfeasibleError, ConfigError: nothing fits there.
        SolverLimitError: the deadline, of each search by itself where none is given, came first.
    """
    given = parse_assignments(plan.provenance.fixed) if plan.provenance is not None else {}
    fixed = {name: value for name, value in given.items() if name in RETAINED_FIELDS}
    offload = OffloadRequest.from_plan(plan)

    def planned(fixed: dict[str, Any]) -> TrainingPlan:
        return make_plan(
            plan.model, cluster, plan.workload, fixed=fixed, runnable=True, offload=offload, deadline=deadline
        )

    try:
        return planned(fixed)
    except (InfeasibleError, ConfigError):
        if not fixed:
            raise
        return planned({})


def num_units(cluster: ClusterSpec) -> int:
    """Return the units that are lost one at a time."""
    return cluster.num_nodes if cluster.num_nodes > 1 else cluster.num_devices


def fallbacks(
    plan: TrainingPlan, tolerated: int, deadline: Deadline | None = None
) -> tuple[tuple[TrainingPlan, ...], str]:
    """Return the plans (O) for 1 to ``tolerated`` lost units, as far as there are any, and why there are no more.

    Args:
        deadline: of all searches together; None: each has the usual limit.

    Raises:
        ConfigError: the units are not alike, or there are not so many.
    """
    units = num_units(plan.cluster)
    if tolerated and len(plan.cluster.groups) > 1:
        raise ConfigError("the nodes of the cluster differ: it is not known which is lost", help="leave out --tolerate")
    if tolerated >= units:
        raise ConfigError(f"--tolerate {tolerated} of {units} units leaves none", help=f"tolerate at most {units - 1}")
    plans: list[TrainingPlan] = []
    for lost in range(1, tolerated + 1):
        try:
            plans.append(plan_on(plan, resized(plan.cluster, units - lost), deadline))
        except SolverLimitError as error:
            return tuple(plans), f"with {lost} lost nothing was found in time: {error.message}"
        except (InfeasibleError, ConfigError) as error:
            return tuple(plans), f"with {lost} lost nothing fits: {error.message}"
    return tuple(plans), ""


def check(plan: TrainingPlan, plans: Sequence[TrainingPlan]) -> tuple[str, ...]:
    """Return what is wrong with fallbacks of a plan, for 1, 2, .. lost units: (C1), (C2), (C3), (C4); nothing where they hold."""
    wrong, units = [], num_units(plan.cluster)
    for lost, each in enumerate((plan, *plans)):
        name = f"{lost} lost: "
        num_units_now = units - lost
        num_idle = each.num_idle_devices if lost else 0  # what the plan itself leaves idle is no unit
        num_devices = each.cluster.num_devices + num_idle
        if num_devices != plan.cluster.num_devices // units * num_units_now:
            wrong.append(f"{name}{num_devices} devices, {num_units_now} units are left")
        if each.workload != plan.workload:
            wrong.append(f"{name}(C1), (C4) another batch or other sequences")
        if sum(each.batch_shares) != plan.workload.global_batch_size:
            wrong.append(f"{name}(C1) shares of {sum(each.batch_shares)} sequences")
        if not each.estimate.fits:
            wrong.append(f"{name}(C2) {each.estimate.required_bytes} of {each.estimate.budget_bytes} bytes")
        if num_units_now > 1 and state_copies(each) == 1 and num_units(each.cluster) == 1:
            wrong.append(f"{name}(C3) no peer for copies")
    return tuple(wrong)
