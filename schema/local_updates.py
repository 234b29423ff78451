"""Islands that train by themselves and sum up what they learned now and then: what a plan says of it, the plan of one island."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from .base import Count, CountOrNone, Frozen, NonNegativeFloat, PositiveFloat
from .shares import even_shares

if TYPE_CHECKING:
    from .cluster import ClusterSpec
    from .training_plan import TrainingEstimate, TrainingPlan

WireBits = Literal[32, 16, 8]
"""Of a number on the wire: fp32, fp16, or int8."""

ROW = 1024
"""Numbers in a row of int8, which has a scale of its own in fp32."""

MAX_STEPS = 1000


def wire_bytes(num_params: float, bits: WireBits) -> float:
    """Return the bytes of some parameters on the wire."""
    return num_params * (bits / 8 + (4 / ROW if bits == 8 else 0.0))


class SyncLimits(Frozen):
    """How far islands may go by themselves: inner steps between sums of the same parameters, and steps that a sum may be late."""

    max_local_steps: Annotated[Count, Field(le=MAX_STEPS)] = 64
    max_delay_steps: Annotated[CountOrNone, Field(le=MAX_STEPS)] = 0


class Island(Frozen):
    """A region of the plan's cluster.

    Attributes:
        replicas: of the plan's dp_replicate, those in it.
        sequences: of each global batch.
        step_s: of an inner step.
    """

    region: str
    replicas: Count
    sequences: Count
    step_s: PositiveFloat


class LocalUpdates(Frozen):
    """Local updates (DiLoCo) of islands: inner steps on shares of the batch, and sums of what changed meanwhile.

    Attributes:
        islands: in the order of the cluster's device pools.
        ring: indices of islands, each sending to the next one and the last to the first.
        steps: inner steps between two sums of the same parameters.
        fragments: parts of the parameters that take turns, one every steps / fragments.
        bits: of a number on the wire; 8: with an fp32 scale for each row (solvers/islands.py).
        delay_steps: inner steps after which a sum that has begun is taken over.
        exchange_s: of one fragment around the ring; waited_s: for all of them in ``steps`` steps, in which nothing is trained.
        sent_bytes: of each island in ``steps`` steps; usd: for what all islands send in them.
        node_pairs: between two islands, which carry an exchange together.
        limits: within which they were chosen.
    """

    islands: tuple[Island, ...] = Field(min_length=2)
    ring: tuple[CountOrNone, ...]
    steps: Count
    fragments: Count = 1
    bits: WireBits = 32
    delay_steps: CountOrNone = 0
    exchange_s: NonNegativeFloat
    waited_s: NonNegativeFloat
    sent_bytes: NonNegativeFloat
    usd: NonNegativeFloat = 0.0
    node_pairs: Count = 1
    limits: SyncLimits = SyncLimits()

    @model_validator(mode="after")
    def _suits_itself(self) -> Self:
        if sorted(self.ring) != list(range(len(self.islands))):
            raise ValueError(f"the ring {self.ring} is no order of {len(self.islands)} islands   [reach (C4)]")
        if self.steps % self.fragments or self.delay_steps >= self.steps // self.fragments:
            raise ValueError(
                f"sums every {self.steps} steps with {self.fragments} fragments and a delay of {self.delay_steps}: fragments must "
                "divide the steps, and a sum must be over when the next one begins   [steps (C2)]"
            )
        return self


def why_islands_do_not_suit(plan: TrainingPlan, updates: LocalUpdates) -> str:
    """Return what of a plan its islands contradict; empty where they suit it."""
    layout, islands, parts = plan.layout, updates.islands, plan.cluster.parts
    if len(parts) != len(islands):
        return f"{len(islands)} islands on {len(parts)} device pools"
    if (replicas := sum(island.replicas for island in islands)) != layout.dp_replicate:
        return f"the islands have {replicas} replicas, dp_replicate is {layout.dp_replicate}"
    if (sequences := sum(island.sequences for island in islands)) != plan.workload.global_batch_size:
        return f"the islands take {sequences} sequences of {plan.workload.global_batch_size}   [batch (C3)]"
    each = layout.world_size // layout.dp_replicate
    for island, part in zip(islands, parts, strict=True):
        if island.replicas * each != part.cluster.num_devices:
            return f"{island.replicas} replicas of {each} devices on the {part.cluster.num_devices} devices of {island.region}"
    return "an offload schedule is of one island" if plan.offload is not None else ""


def devices_of_islands(cluster: ClusterSpec) -> tuple[tuple[int, ...], ...]:
    """Return the devices of each device pool of a cluster, in their order."""
    sizes = cluster.node_sizes
    first = [0, *accumulate(sizes)]
    return tuple(tuple(first[n] + i for n in part.nodes for i in range(sizes[n])) for part in cluster.parts)


def plan_of_island(plan: TrainingPlan, idx: int) -> TrainingPlan:
    """Return the plan of one island by itself: its nodes, its replicas and its part of each batch."""
    updates = plan.local_updates
    assert updates is not None
    island, cluster = updates.islands[idx], plan.cluster.parts[idx].cluster
    layout = plan.layout.replace(dp_replicate=island.replicas)
    first = sum(other.replicas for other in updates.islands[:idx]) * layout.dp_shard
    shares = plan.batch_shares[first : first + layout.dp]
    device = {d: i for i, d in enumerate(devices_of_islands(plan.cluster)[idx])}
    rank_map = tuple(device[d] for d in plan.rank_map if d in device)
    return plan.replace(
        cluster=cluster,
        workload=plan.workload.replace(global_batch_size=island.sequences),
        layout=layout,
        rank_map=rank_map,
        shares=() if shares == even_shares(layout, island.sequences) else shares,
        estimate=with_exchange(
            plan.estimate,
            waited_s=0.0,
            tokens_per_step=plan.workload.tokens_per_step * island.sequences / plan.workload.global_batch_size,
            num_devices=cluster.num_devices,
            mfu=plan.estimate.mfu,
        ),
        local_updates=None,
        left_out=(),
        requested=None,
        fallbacks=(),
        fastest=None,
        alternatives=(),
    )


def slowest_island(plan: TrainingPlan) -> TrainingPlan:
    """Return the plan of the island that the others wait for, with the seconds of its inner steps only."""
    updates = plan.local_updates
    assert updates is not None
    idx = max(range(len(updates.islands)), key=lambda i: updates.islands[i].step_s)
    island = plan_of_island(plan, idx)
    return island.replace(
        estimate=with_exchange(
            island.estimate, waited_s=updates.islands[idx].step_s - island.estimate.step_time_s,
            tokens_per_step=island.workload.tokens_per_step, num_devices=island.cluster.num_devices, mfu=island.estimate.mfu,
        )
    )  # fmt: skip


def with_exchange(
    estimate: TrainingEstimate, *, waited_s: float, tokens_per_step: float, num_devices: int, mfu: float
) -> TrainingEstimate:
    """Return the estimate of an island's step as that of the step of all islands: with its part of what is waited for sums."""
    step_s = estimate.step_time_s + waited_s
    low, high = (bound + waited_s for bound in (estimate.step_time_interval_s.low, estimate.step_time_interval_s.high))
    rate = tokens_per_step / step_s
    return estimate.replace(
        step_time_s=step_s,
        step_time_interval_s=estimate.step_time_interval_s.replace(low=low, high=high),
        tokens_per_s=rate,
        tokens_per_s_per_device=rate / num_devices,
        mfu=mfu,
        breakdown_s=estimate.breakdown_s.replace(dp=max(0.0, estimate.breakdown_s.dp + waited_s)),
    )


def with_sync_every(plan: TrainingPlan, steps: int) -> TrainingPlan:
    """Return the plan with sums after another number of inner steps; what is waited for each of them stays.

    Raises:
        ConfigError: its fragments do not divide them, or its delay is longer.
    """
    before = plan.local_updates
    assert before is not None
    updates = before.replace(steps=steps)
    more_s = before.waited_s * (1 / steps - 1 / before.steps)
    estimate, old_s = plan.estimate, plan.estimate.step_time_s
    return plan.replace(
        local_updates=updates,
        estimate=with_exchange(
            estimate, waited_s=more_s, tokens_per_step=estimate.tokens_per_s * old_s, num_devices=plan.cluster.num_devices,
            mfu=estimate.mfu * old_s / (old_s + more_s),
        ),
    )  # fmt: skip


def joined_rank_map(
    maps: tuple[tuple[int, ...], ...], devices: tuple[tuple[int, ...], ...], pp: int
) -> tuple[int, ...]:
    """Return the rank map of all islands, given the one of each and its devices: of each stage the ranks island by island."""
    rows = []
    for stage in range(pp):
        for rank_map, island in zip(maps, devices, strict=True):
            size = len(rank_map) // pp
            rows += [island[device] for device in rank_map[stage * size : (stage + 1) * size]]
    return tuple(rows)
