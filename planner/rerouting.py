"""Re-routing: a replica of a pipeline that lost a stage sends the stage's micro-batches to the same stage of its peers.

No states move, so that it begins after half a step and ends at once when the device is back; peers of the stage are busier. It is
planned next to the fallback that moves layers (fallbacks.py), by the passes of the plan's stages in the order of
`solvers.pipeline.rerouting`. `apply` does not run it: torch's pipelines send from a stage to one rank.
"""

from __future__ import annotations

from collections import defaultdict

from ..cost_models.stage.step import pass_seconds
from ..schema import TrainingPlan
from ..solvers.pipeline.rerouting import Device, ReroutingInstance, makespan_s, solve
from .fallbacks import num_units
from .planned_stages import costed_stages

SCHEDULES = ("1f1b", "gpipe")
MAX_PASSES = 200_000
"""Passes of a step of all replicas, beyond which no order is made; a tenth of a second for each 10,000."""


def why_not_rerouted(plan: TrainingPlan) -> str:
    """Return why the micro-batches of a lost stage cannot go to peers; empty where they can."""
    layout = plan.layout
    passes = 2 * layout.pp * sum(share // layout.micro_batch_size for share in plan.batch_shares)
    reasons = (
        (layout.pp == 1, "there is one stage"),
        (layout.dp_replicate == 1, "no other replica has its weights (dp_replicate=1)"),
        (layout.dp_shard > 1, "states are sharded within a replica (dp_shard > 1)"),
        (layout.num_model_chunks > 1, "a rank has several chunks of the model"),
        (layout.schedule not in SCHEDULES, f"schedule {layout.schedule}"),
        (layout.vocabulary != "ends", "the vocabulary is split over stages"),
        (plan.offload is not None, "an offload schedule"),
        (not layout.experts_follow_tp, "experts have axes of their own"),
        (len(plan.cluster.groups) > 1 or plan.degrees_by_stage, "stages differ in devices"),
        (passes > MAX_PASSES, f"{passes} passes of a step"),
    )
    return next((reason for is_so, reason in reasons if is_so), "")


def rerouted_step_s(plan: TrainingPlan) -> float | None:
    """Return the seconds of a step after the loss of any one unit, whichever is worst; None where a stage has no peer then.

    What a step has besides the passes is as before: a stage's gradients are summed over one rank fewer.
    """
    stages = costed_stages(plan)
    passes = pass_seconds(stages.costs, 0, stages.boundaries, stages.pool_of_stage)
    each_way_s = float(stages.costs.transfer_s[0])
    counts = tuple(share // plan.layout.micro_batch_size for share in plan.batch_shares)
    forward_s, backward_s = (tuple((seconds + each_way_s).tolist()) for seconds in (passes.forward, passes.backward))
    losses = lost_stages(plan)
    if any(len({d for d, s in lost if s == stage}) == len(counts) for lost in losses for _, stage in lost):
        return None
    before_s, *after_s = (
        makespan_s(solve(ReroutingInstance(forward_s, backward_s, counts, capacities(plan), lost)))
        for lost in (frozenset[Device](), *losses)
    )
    return plan.estimate.step_time_s + max(after_s) - before_s


def capacities(plan: TrainingPlan) -> tuple[int, ...]:
    """Return how many micro-batches a device of each stage may hold: those of 1F1B, and as many more as the budget has room for."""
    estimate, margin = plan.estimate, plan.estimate.required_bytes / plan.estimate.peak_allocated_bytes
    counts = list[int]()
    for s, stage in enumerate(estimate.stages):
        memory, in_flight = stage.memory_bytes, min(plan.layout.pp - s, plan.num_microbatches)
        free_bytes = estimate.budget_bytes - margin * memory.total
        counts.append(in_flight + max(int(free_bytes / (margin * max(memory.activations, 1) / in_flight)), 0))
    return tuple(counts)


def lost_stages(plan: TrainingPlan) -> list[frozenset[Device]]:
    """Return which stages of which replicas the loss of a unit takes, once for units that only differ in the replicas' numbers."""
    layout, size = plan.layout, plan.layout.world_size // num_units(plan.cluster)
    ranks = int(layout.stage_ranks)
    units = dict[tuple[tuple[int, ...], ...], frozenset[Device]]()
    for unit in range(0, layout.world_size, size):
        of_replica = defaultdict[int, set[int]](set)
        for device in range(unit, unit + size):
            place = plan.rank_map.index(device)
            of_replica[place % ranks * layout.dp_replicate // ranks].add(place // ranks)
        alike = tuple(sorted(tuple(sorted(stages)) for stages in of_replica.values()))
        units.setdefault(alike, frozenset((d, s) for d, stages in of_replica.items() for s in stages))
    return list(units.values())


def break_even_s(*, rerouted_step_s: float, fallback_step_s: float, move_s: float) -> float:
    """Return for how long an outage re-routing makes more steps than a fallback, whose states move ``move_s`` at both its ends."""
    gain = 1 - fallback_step_s / rerouted_step_s
    return 2 * move_s / gain if gain > 0 else float("inf")
