"""A plan's training on machines that come and go, replayed over a recording of how many there were, under each policy.

Units are nodes (devices of a single node); more than the plan has are not held. With n units there is the fastest plan for n or
fewer of them, RATE[n] tokens/s. A policy says when the job runs, and what a change takes:

    wait      runs with all units only; after a loss from the last checkpoint, RESTART seconds after all are there
    restart   on what is left, from the last checkpoint, at each loss; when a unit is back after a save (`apply --replan`)
    continue  a loss takes seconds (detection, new groups, states, work since the copies); when a unit is back as `restart`
    join      as `continue`, and units that are back are taken in at a step's end, all that wait at once (`apply` where its command
              is given there again)
    leave     as `join`, and units that are about to go say so NOTICE seconds before (SIGTERM): they hand over what they hold at a
              step's end, and the last ones save; only faults of devices, which nobody foresees, need copies and other checkpoints

Checkpoints are as often as Daly's interval makes best for the losses of the recording, under `continue` for those of all units at
once. Several units that are lost between two looks at a pool are lost one after the other: looks are minutes apart, a loss takes
seconds.

The store is on a machine that stays (`apply --store-only`).

    fraction = tokens / integral of RATE[n(t)]
    bound    = 1 - what is lost in RESTART seconds after each loss of so many units that nobody goes on; no policy keeps more
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..cost_models.goodput import MTBF_HOURS_PER_DEVICE, best_interval_s, copy_steps
from ..cost_models.hardware.streams import host_rates
from ..schema import InfeasibleError, TrainingPlan
from ..schema.errors import ConfigError
from ..schema.goodput import LOST, POLICIES, Lost, Policy, PolicyReplay, PoolReplay
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
    """Seconds that things take; ``notice_s``: before a unit goes; ``usd_per_unit_hour``: of a unit that is held."""

    save_s: float
    restart_s: float
    notice_s: float = 0.0
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


@dataclass(frozen=True)
class GoingOn:
    """What going on takes.

    Attributes:
        lost_s: from the loss of a unit until all is done again that it cut short.
        joined_s: to take units in at a step's end.
        copies: part of the time that copies for a peer take.
    """

    lost_s: float
    joined_s: float
    copies: float


def going_on(plan: TrainingPlan, mtbf_s: float) -> GoingOn:
    """Return what going on takes where a unit is lost every ``mtbf_s``.

    A copy stops the training while the states go to host memory. Then they go to the peer next to the step that follows: what takes
    longer than the step is waited for, and what the step itself exchanges meanwhile, of what it waits for, takes twice as long.
    """
    step_s, parts, group = plan.estimate.step_time_s, plan.estimate.breakdown_s, plan.cluster.groups[0]
    num_bytes = _STATE_BYTES * plan.model.num_params / plan.layout.world_size
    move_s = num_bytes / plan.cluster.levels[-1].link.bandwidth_bytes_per_s
    joined_s = DETECT_S + REBUILD_S + move_s
    if state_copies(plan) > 1:
        return GoingOn(joined_s + step_s / 2, joined_s, 0.0)
    exchanged_s = parts.tp + parts.cp + parts.ep + parts.dp + parts.pp
    if group.device.backend.is_host:
        copy_s = 2 * num_bytes / group.device.memory_bandwidth_bytes_per_s
    else:
        copy_s = num_bytes / host_rates(plan.workload, plan.cluster).link_bytes_per_s
    copy_s += max(move_s - step_s, 0.0) + min(move_s / step_s, 1.0) * exchanged_s
    every_s = step_s * copy_steps(copy_s=copy_s, step_s=step_s, mtbf_s=mtbf_s)
    return GoingOn(joined_s + min(move_s, step_s) + every_s / 2, joined_s, copy_s / (every_s + copy_s))


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
    restarted, due, before = 0.0, 0.0, False
    for start, end, n in spans:
        due = costs.restart_s if before and plan_for(n) is None else due
        if plan_for(n) is not None:
            restarted += min(due, end - start) * _rate(plan_for(n))
            due = max(due - (end - start), 0.0)
        before = plan_for(n) is not None
    return PoolReplay(
        pool=name, seconds=seconds, mean_units=unit_s / seconds, losses=losses, policies=policies,
        bound=1 - restarted / possible if possible else 0.0,
    )  # fmt: skip


def _replayed(
    policy: Policy,
    spans: Sequence[tuple[float, float, int]],
    plan_for: Callable[[int], TrainingPlan | None],
    units: int,
    possible: float,
    costs: Costs,
) -> PolicyReplay:
    is_live = policy in ("continue", "join", "leave")
    num_devices = max((each.cluster.num_devices for *_, n in spans if (each := plan_for(n)) is not None), default=1)
    hands_over, saves_last = _foreseen(policy, [runs for *_, n in spans if (runs := plan_for(n)) is not None], costs)
    seconds = spans[-1][1] - spans[0][0]
    device_mtbf_s = MTBF_HOURS_PER_DEVICE * 3600 / num_devices
    faults = sum(after[2] < before[2] and (not is_live or not after[2]) for before, after in pairwise(spans))
    faults_mtbf_s = device_mtbf_s if saves_last else seconds / max(faults, 1)
    interval_s = best_interval_s(mtbf_s=faults_mtbf_s, save_s=costs.save_s) if faults else seconds
    losses = sum(max(before[2] - after[2], 0) for before, after in pairwise(spans))
    mtbf_s = device_mtbf_s if hands_over else seconds / max(losses, 1)
    saving = costs.save_s / (interval_s + costs.save_s) if faults else 0.0
    gone: dict[Lost, float] = dict.fromkeys(LOST, 0.0)  # tokens
    due: list[tuple[Lost, float]] = []  # seconds without steps, oldest first
    tokens = running_s = unsaved = unsaved_s = made = 0.0
    before = 0  # the first start is no fault's
    for start, end, now in spans:
        runs = plan_for(now if policy != "wait" or now == units else 0)
        if now < before and is_live and runs is not None:
            takes = going_on(runs, mtbf_s)
            due.append(("losses", (before - now) * (takes.joined_s if hands_over else takes.lost_s)))
        elif now < before and saves_last:
            last = min(costs.save_s * _rate(plan_for(before)), made)
            tokens, gone["saves"] = tokens - last, gone["saves"] + last
            unsaved, unsaved_s, due = 0.0, 0.0, [("restarts", costs.restart_s)]
        elif now < before:
            tokens, gone["restarts"] = tokens - unsaved, gone["restarts"] + unsaved
            unsaved, unsaved_s, due = 0.0, 0.0, [("restarts", costs.restart_s)]
        elif now > before and before and runs is not None and policy in ("join", "leave"):
            due.append(("returns", going_on(runs, mtbf_s).joined_s))
        elif now > before and before and runs is not None and policy != "wait":
            due.append(("returns", costs.save_s + costs.restart_s))
        before = now
        if runs is None:
            gone["waiting"] += (end - start) * _rate(plan_for(now))
            continue
        useful_s = end - start
        for cause, away_s in _taken(due, useful_s):
            useful_s -= away_s
            gone[cause] += away_s * _rate(plan_for(now))
        copies = going_on(runs, mtbf_s).copies if is_live else 0.0
        made = useful_s * _rate(runs)
        gone["saves"], gone["copies"] = gone["saves"] + made * saving, gone["copies"] + made * (1 - saving) * copies
        made *= (1 - saving) * (1 - copies)
        tokens, running_s, unsaved_s = tokens + made, running_s + useful_s, unsaved_s + useful_s
        if unsaved_s >= interval_s:
            unsaved_s %= interval_s
            unsaved = unsaved_s * made / useful_s
        else:
            unsaved += made
    usd = None
    if costs.usd_per_unit_hour is not None:
        usd = costs.usd_per_unit_hour * sum((end - start) * n for start, end, n in spans) / 3600
    return PolicyReplay(
        policy=policy,
        fraction=tokens / possible if possible else 0.0,
        lost={cause: part / possible for cause, part in gone.items()} if possible else {},
        running_s=running_s,
        tokens=tokens,
        usd_per_million_tokens=usd / tokens * 1e6 if usd is not None and tokens else None,
    )


def _foreseen(policy: Policy, plans: Sequence[TrainingPlan], costs: Costs) -> tuple[bool, bool]:
    """Return whether the notice of a unit's end is long enough to hand over what it holds, and to save after the step."""
    step_s = max((each.estimate.step_time_s for each in plans), default=0.0)
    moved_s = max((going_on(each, 1.0).joined_s for each in plans), default=0.0)
    return tuple(policy == "leave" and costs.notice_s >= step_s + after_s for after_s in (moved_s, costs.save_s))  # type: ignore[return-value]


def _taken(due: list[tuple[Lost, float]], seconds: float) -> list[tuple[Lost, float]]:
    """Take what of the seconds that are due fits into a span of time, oldest first; what does not fit stays due."""
    taken: list[tuple[Lost, float]] = []
    while due and seconds > 0:
        cause, away_s = due.pop(0)
        taken.append((cause, min(away_s, seconds)))
        if away_s > seconds:
            due.insert(0, (cause, away_s - seconds))
        seconds -= taken[-1][1]
    return taken


def _rate(plan: TrainingPlan | None) -> float:
    return plan.estimate.tokens_per_s if plan is not None else 0.0
