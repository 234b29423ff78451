"""What faults leave of a plan's speed: checkpoints, spare units, plans for what remains. Formulas: cost_models/goodput.py.

A unit is a node, or a device where the cluster is one node. Policies that are compared:

    wait       a lost unit that no spare replaces stops the job until it is repaired
    fall back  the job restarts from its last checkpoint on what remains, under a plan for that (`apply --replan`), and again when a
               unit is back
    go on      the ranks that are left go on at once, under a plan for them (`apply --on-fault continue`)
    spares     units that stand by: the job runs as planned while no more are lost
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..cost_models.goodput import best_interval_s, continuing_goodput, lost_units, restart_goodput
from ..schema import InfeasibleError, TrainingPlan
from ..schema.goodput import Fallback, Faults, GoodputReport
from .fallbacks import check, fallbacks, num_units
from .request import Deadline
from .rerouting import break_even_s, rerouted_step_s, why_not_rerouted
from .spot import going_on


def expected_goodput(plan: TrainingPlan, faults: Faults, deadline: Deadline | None = None) -> GoodputReport:
    """Return the interval between checkpoints and the goodput of a plan under faults, by policy.

    Args:
        deadline: of the plans for what remains, all together.

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
    plans, reason = plan.fallbacks[: faults.tolerate], ""
    not_rerouted = why_not_rerouted(plan)
    if not plans:
        plans, reason = fallbacks(plan, faults.tolerate, deadline)
    rates = [1.0] * (faults.spares + 1) + [step_s / entry.estimate.step_time_s for entry in plans]
    tolerated = min(units + faults.spares, max(len(rates) - 1, faults.spares + 20))
    shares = lost_units(units=units + faults.spares, unit_mtbf_s=unit_mtbf_s, repair_s=repair_s, tolerated=tolerated)
    alive = continuing_goodput(
        rates,
        units=units + faults.spares,
        unit_mtbf_s=unit_mtbf_s,
        repair_s=repair_s,
        lost_s=[going_on(each, mtbf_s).lost_s for each in (*[plan] * (faults.spares + 1), *plans)],
        # A unit that is back is taken in at a step's end; a spare one stands by.
        move_s=[0.0] * (faults.spares + 1) + [going_on(each, mtbf_s).joined_s for each in (plan, *plans)[: len(plans)]],
        beyond_s=faults.restart_s + interval_s / 2 + repair_s / max(len(rates) - 1, 1),
        copies=going_on(plan, mtbf_s).copies,
    )
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
        going_on=alive if plans else None,
        fallbacks=tuple(
            Fallback(
                lost=lost,
                num_devices=entry.cluster.num_devices,
                layout=str(entry.layout),
                step_s=entry.estimate.step_time_s,
                share_of_time=float(shares[lost + faults.spares]),
                **(_rerouted(plan, entry, mtbf_s) if lost == 1 and not not_rerouted else {}),
            )
            for lost, entry in enumerate(plans, start=1)
        ),
        not_tolerated=reason,
        not_rerouted=not_rerouted,
    )


def _rerouted(plan: TrainingPlan, fallback: TrainingPlan, mtbf_s: float) -> dict[str, float | None]:
    """Return what re-routing the micro-batches of what is lost is worth next to a fallback."""
    step_s = rerouted_step_s(plan)
    if step_s is None:
        return {}
    up_to_s = break_even_s(
        rerouted_step_s=step_s,
        fallback_step_s=fallback.estimate.step_time_s,
        move_s=going_on(fallback, mtbf_s).joined_s,
    )
    return {"rerouted_step_s": step_s, "rerouted_up_to_s": None if math.isinf(up_to_s) else up_to_s}


def tolerant(plans: Sequence[TrainingPlan], faults: Faults, deadline: Deadline | None = None) -> TrainingPlan:
    """Return the plan, of several for the same, that makes most tokens under faults, with its fallbacks.

    Raises:
        InfeasibleError: there are not as many fallbacks as losses to tolerate.
        ConfigError: what is tolerated does not suit the cluster.
    """
    best: tuple[float, TrainingPlan] | None = None
    reason = ""
    for plan in plans:
        others, reason = fallbacks(plan, faults.tolerate, deadline)
        if reason:
            continue
        light = tuple(other.replace(alternatives=(), notes=()) for other in others)
        wrong = check(plan, light)
        assert not wrong, wrong
        chosen = plan.replace(fallbacks=light)
        report = expected_goodput(chosen, faults)
        goodput = report.waiting if report.going_on is None else report.going_on
        words = f"{goodput:.2%} of its tokens are made under a fault of a device every {faults.mtbf_hours_per_device:g} hours"
        rate = goodput * plan.estimate.tokens_per_s
        if best is None or rate > best[0]:
            best = rate, chosen.replace(notes=(*chosen.notes, words))
    if best is None:
        raise InfeasibleError(
            f"{faults.tolerate} lost units cannot be tolerated", details=(reason,), help="a smaller --tolerate"
        )
    return best[1]
