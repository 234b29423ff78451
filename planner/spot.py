"""A plan's training on machines that come and go, replayed over a recording of how many there were, under each policy.

Units are nodes (devices of a single node); more than the plan has are not held. With n units there is the fastest plan for n or
fewer of them, RATE[n] tokens/s. A policy says when the job runs, and what a change takes:

    wait      runs with all units only; after a loss from the last checkpoint, RESTART seconds after all are there
    restart   on what is left, from the last checkpoint, at each loss; when a unit is back after a save (`apply --replan`)
    continue  a loss takes seconds (detection, new groups, states, work since the copies); when a unit is back as `restart`
    join      as `continue`, and a unit that is back is taken in at a step's end (`apply` where its command is given there again)

Checkpoints are as often as Daly's interval makes best for the losses of the recording, under `continue` for those of all units at
once. Several units that are lost between two looks at a pool are lost one after the other: looks are minutes apart, a loss takes
seconds.

    fraction = tokens / integral of RATE[n(t)]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..cost_models.goodput import best_interval_s, copy_steps
from ..schema import InfeasibleError, TrainingPlan
from ..schema.errors import ConfigError
from ..schema.goodput import POLICIES, Policy, PolicyReplay, PoolReplay
from ..schema.machines_file import Change
from ..schema.shares import state_copies
from .fallbacks import num_units, plan_on
from .request import Deadline
from .variants import resized

DETECT_S = 0.05
"""Between two looks of the launcher at its ranks (profilers/run/processes.py)."""

REBUILD_S = 1.0
"""[measured: benchmarks/faults.py, .3 to 1.3 s on four ranks of two busy cores]"""

_STATE_BYTES = 16
"""Of a parameter: its master copy in fp32, AdamW's two moments, and as much for what comes with them."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds that things take; ``usd_per_unit_hour``: of a unit that is held."""

    save_s: float
    restart_s: float
    usd_per_unit_hour: float | None = None


def plans_by_units(
    plan: TrainingPlan, sizes: Sequence[int], deadline: Deadline | None = None
) -> dict[int, TrainingPlan]:
    """Return the fastest plan for each number of units, or for fewer of them; sizes for which nothing fits are left out.

    Raises:
        SolverLimitError: the deadline, of all searches together, came first.
    """
    units = num_units(plan.cluster)
    plans = {units: plan} | {num_units(each.cluster): each for each in plan.fallbacks}
    for size in sizes:
        if 0 < size < units and size not in plans:
            try:
                plans[size] = plan_on(plan, resized(plan.cluster, size), deadline)
            except (InfeasibleError, ConfigError):
                continue
    best: dict[int, TrainingPlan] = {}
    for size in sorted(plans):
        before = best[max(best)] if best else plans[size]
        best[size] = min(before, plans[size], key=lambda each: each.estimate.step_time_s)
    return best


def going_on(plan: TrainingPlan, mtbf_s: float) -> tuple[float, float]:
    """Return the seconds from the loss of a unit to the first new step, under ``continue``, and the part of the time for copies."""
    step_s, link = plan.estimate.step_time_s, plan.cluster.levels[-1].link
    move_s = _STATE_BYTES * plan.model.num_params / plan.layout.world_size / link.bandwidth_bytes_per_s
    if state_copies(plan) > 1:
        return DETECT_S + REBUILD_S + move_s + step_s / 2, 0.0
    every_s = step_s * copy_steps(copy_s=move_s, step_s=step_s, mtbf_s=mtbf_s)
    return DETECT_S + REBUILD_S + move_s + every_s / 2, move_s / (every_s + move_s)


def replay_pool(
    plan: TrainingPlan, plans: Mapping[int, TrainingPlan], name: str, changes: Sequence[Change], costs: Costs
) -> PoolReplay:
    """Replay one recording under each policy.

    Args:
        plans: as `plans_by_units` returns them, for the sizes of the recording.
    """
    units = num_units(plan.cluster)
    spans = [(a.time_s, b.time_s, min(a.available, units)) for a, b in pairwise(changes)]

    def plan_for(available: int) -> TrainingPlan | None:
        sizes = [size for size in plans if size <= available]
        return plans[max(sizes)] if sizes else None

    possible = sum((end - start) * _rate(plan_for(n)) for start, end, n in spans)
    policies = tuple(_replayed(policy, spans, plan_for, units, possible, costs) for policy in POLICIES)
    seconds = spans[-1][1] - spans[0][0]
    unit_s = sum((end - start) * n for start, end, n in spans)
    losses = sum(max(before[2] - after[2], 0) for before, after in pairwise(spans))
    return PoolReplay(pool=name, seconds=seconds, mean_units=unit_s / seconds, losses=losses, policies=policies)


def _replayed(
    policy: Policy,
    spans: Sequence[tuple[float, float, int]],
    plan_for: Callable[[int], TrainingPlan | None],
    units: int,
    possible: float,
    costs: Costs,
) -> PolicyReplay:
    is_live = policy in ("continue", "join")
    seconds = spans[-1][1] - spans[0][0]
    faults = sum(after[2] < before[2] and (not is_live or not after[2]) for before, after in pairwise(spans))
    interval_s = best_interval_s(mtbf_s=seconds / max(faults, 1), save_s=costs.save_s) if faults else seconds
    losses = sum(max(before[2] - after[2], 0) for before, after in pairwise(spans))
    mtbf_s = seconds / max(losses, 1)
    saving = interval_s / (interval_s + costs.save_s) if faults else 1.0
    tokens = running_s = unsaved = unsaved_s = 0.0
    away_s, before = 0.0, 0  # the first start is no fault's
    for start, end, now in spans:
        runs = plan_for(now if policy != "wait" or now == units else 0)
        if now < before and is_live and runs is not None:
            away_s += (before - now) * going_on(runs, mtbf_s)[0]
        elif now < before:
            tokens, unsaved, unsaved_s, away_s = tokens - unsaved, 0.0, 0.0, costs.restart_s
        elif now > before and before and runs is not None and policy != "wait":
            away_s += (now - before) * going_on(runs, mtbf_s)[0] if policy == "join" else costs.save_s + costs.restart_s
        before = now
        if runs is None:
            continue
        useful_s = max(end - start - away_s, 0.0)
        away_s = max(away_s - (end - start), 0.0)
        rate = _rate(runs) * saving * (1 - (going_on(runs, mtbf_s)[1] if is_live else 0.0))
        tokens, running_s = tokens + useful_s * rate, running_s + useful_s
        unsaved_s += useful_s
        if unsaved_s >= interval_s:
            unsaved_s %= interval_s
            unsaved = unsaved_s * rate
        else:
            unsaved += useful_s * rate
    usd = None
    if costs.usd_per_unit_hour is not None:
        usd = costs.usd_per_unit_hour * sum((end - start) * n for start, end, n in spans) / 3600
    return PolicyReplay(
        policy=policy,
        fraction=tokens / possible if possible else 0.0,
        running_s=running_s,
        tokens=tokens,
        usd_per_million_tokens=usd / tokens * 1e6 if usd is not None and tokens else None,
    )


def _rate(plan: TrainingPlan | None) -> float:
    return plan.estimate.tokens_per_s if plan is not None else 0.0
