"""What faults leave of a plan's speed: checkpoints, spare units, plans for what remains. Formulas: cost_models/goodput.py.

A unit is a node, or a device where the cluster is one node. Three policies are compared:

    wait       a lost unit that no spare replaces stops the job until it is repaired
    fall back  the job restarts from its last checkpoint on what remains, under a plan for that (`apply --replan`), and again when a
               unit is back
    spares     units that stand by: the job runs as planned while no more are lost
"""

from __future__ import annotations

from ..cost_models.goodput import best_interval_s, continuing_goodput, lost_units, restart_goodput
from ..schema import ClusterSpec, ConfigError, InfeasibleError, TrainingPlan
from ..schema.goodput import Fallback, Faults, GoodputReport
from ..schema.layout import parse_assignments
from .plan import plan as make_plan
from .request import OffloadRequest
from .variants import resized

RETAINED_FIELDS = frozenset({"recompute", "sequence_parallel", "micro_batch_size", "offload_fraction"})
"""Of the layout's fields that the plan had to keep: those that do not say how many devices share something."""


def plan_on(plan: TrainingPlan, cluster: ClusterSpec) -> TrainingPlan:
    """Return the plan for the same model and workload on other machines, with what the first one had fixed where that fits.

    Raises:
        InfeasibleError, ConfigError: nothing fits there.
    """
    given = parse_assignments(plan.provenance.fixed) if plan.provenance is not None else {}
    fixed = {name: value for name, value in given.items() if name in RETAINED_FIELDS}
    offload = OffloadRequest.from_plan(plan)
    try:
        return make_plan(plan.model, cluster, plan.workload, fixed=fixed, runnable=True, offload=offload)
    except (InfeasibleError, ConfigError):
        if not fixed:
            raise
        return make_plan(plan.model, cluster, plan.workload, runnable=True, offload=offload)


def num_units(cluster: ClusterSpec) -> int:
    """Return the units that are lost one at a time."""
    return cluster.num_nodes if cluster.num_nodes > 1 else cluster.num_devices


def fallbacks(plan: TrainingPlan, tolerated: int) -> tuple[tuple[TrainingPlan, ...], str]:
    """Return the plans for 1 to ``tolerated`` lost units, as far as there are any, and why there are no more.

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
            plans.append(plan_on(plan, resized(plan.cluster, units - lost)))
        except (InfeasibleError, ConfigError) as error:
            return tuple(plans), f"with {lost} lost nothing fits: {error.message}"
    return tuple(plans), ""


def expected_goodput(plan: TrainingPlan, faults: Faults) -> GoodputReport:
    """Return the interval between checkpoints and the goodput of a plan under faults, by policy.

    Raises:
        ConfigError: what is tolerated does not suit the cluster.
    """
    cluster, step_s = plan.cluster, plan.estimate.step_time_s
    units, devices = num_units(cluster), cluster.num_devices
    device_mtbf_s = faults.mtbf_hours_per_device * 3600
    unit_mtbf_s, mtbf_s = device_mtbf_s / (devices / units), device_mtbf_s / devices
    interval_s = best_interval_s(mtbf_s=mtbf_s, save_s=faults.save_s)

    def restarting(**changes: float) -> float:
        values = {"mtbf_s": mtbf_s, "save_s": faults.save_s, "restart_s": faults.restart_s} | changes
        best_s = best_interval_s(mtbf_s=values["mtbf_s"], save_s=values["save_s"])
        return restart_goodput(best_s, **values)

    goodput = restarting()
    repair_s = faults.repair_hours * 3600
    shares = lost_units(
        units=units, unit_mtbf_s=unit_mtbf_s, repair_s=repair_s, tolerated=min(units, faults.spares + 20)
    )
    plans, reason = fallbacks(plan, faults.tolerate)
    rates = [1.0] * (faults.spares + 1) + [step_s / entry.estimate.step_time_s for entry in plans]
    restart_s = faults.restart_s + (interval_s + faults.save_s) / 2
    falling_back = continuing_goodput(
        rates,
        units=units + faults.spares,
        unit_mtbf_s=unit_mtbf_s,
        repair_s=repair_s,
        lost_s=[restart_s] * len(rates),
        move_s=[0.0] * (faults.spares + 1) + [faults.restart_s + faults.save_s] * len(plans),
        beyond_s=restart_s + repair_s / max(len(rates) - 1, 1),
        copies=faults.save_s / (interval_s + faults.save_s),
    )
    return GoodputReport(
        faults=faults,
        num_units=units,
        mtbf_s=mtbf_s,
        step_s=step_s,
        interval_s=interval_s,
        interval_steps=max(round(interval_s / step_s), 1),
        goodput=goodput,
        tokens_per_day=plan.estimate.tokens_per_s * goodput * 86_400,
        second_of_save=restarting(save_s=max(faults.save_s - 1, faults.save_s / 2)) - goodput,
        second_of_restart=restarting(restart_s=max(faults.restart_s - 1, 0.0)) - goodput,
        tenth_of_faults=restarting(mtbf_s=mtbf_s / 0.9) - goodput,
        waiting=goodput * float(shares[: faults.spares + 1].sum()),
        falling_back=falling_back if plans or faults.spares else None,
        fallbacks=tuple(
            Fallback(
                lost=lost,
                num_devices=entry.cluster.num_devices - entry.num_idle_devices,
                layout=str(entry.layout),
                step_s=entry.estimate.step_time_s,
                share_of_time=float(shares[lost + faults.spares]),
            )
            for lost, entry in enumerate(plans, start=1)
        ),
        not_tolerated=reason,
    )
