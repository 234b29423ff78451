"""Islands that are planned together: one replica's layout on each of them, shares of the batch, and what they exchange.

cell        the nodes that every island has once or several times, and their plan
on_islands  the cell's replicas on every island, with shares of the batch that end together (C3)
Joined      what a step of all of them takes: the slowest island and its part of the exchange (O)
join        the plan of all of them: one layout whose replicas the islands share out
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..schema import ClusterSpec, ConfigError, InfeasibleError, TrainingPlan
from ..schema.device_groups import with_parts_only
from ..schema.local_updates import (
    Island,
    LocalUpdates,
    SyncLimits,
    devices_of_islands,
    joined_rank_map,
    wire_bytes,
    with_exchange,
)
from ..schema.shares import even_shares
from ..schema.units import format_bytes
from ..solvers.islands import Exchange, IslandsInstance, deal, ring_s
from .planned_stages import reestimate
from .request import PlanRequest

STATE_BYTES = 8
"""Of a parameter: the anchor and its momentum in fp32."""


ONE_ISLAND = Exchange((0,))


@dataclass(frozen=True)
class Joined:
    """Islands that are planned together: the plan of one replica's nodes, what each island makes of it, and their exchange.

    Attributes:
        used: indices into the parts of the cluster.
        cell: the plan of the nodes that each island has once or several times.
        plans: of each island, with its share of the batch.
        min_exchange_s: that the best exchange adds to a step, where a plainer one was taken.
        node_pairs: that carry an exchange between two islands.
    """

    used: tuple[int, ...]
    cell: TrainingPlan
    plans: tuple[TrainingPlan, ...]
    instance: IslandsInstance | None = None
    exchange: Exchange = ONE_ISLAND
    min_exchange_s: float = 0.0
    node_pairs: int = 1

    @property
    def slowest(self) -> TrainingPlan:
        """The island that the others wait for."""
        return max(self.plans, key=lambda plan: plan.estimate.step_time_s)

    @cached_property
    def exchange_s(self) -> float:
        """Seconds of one fragment around the ring."""
        return 0.0 if self.instance is None else ring_s(self.instance, self.exchange)

    @property
    def waited_s(self) -> float:
        """Seconds in all ``steps`` inner steps in which nothing is trained."""
        longest_s = self.slowest.estimate.step_time_s
        return self.exchange.fragments * max(0.0, self.exchange_s - self.exchange.delay * longest_s)

    @property
    def step_s(self) -> float:
        """(O)."""
        return self.slowest.estimate.step_time_s + self.waited_s / self.exchange.steps

    @property
    def fastest_s(self) -> float:
        """Seconds of a step with the fastest layout that was found and the best exchange, where plainer ones were taken."""
        assert self.cell.search is not None
        simple = self.cell.estimate.step_time_s / self.cell.search.objective_s
        return min(self.step_s, self.slowest.estimate.step_time_s / max(simple, 1.0) + self.min_exchange_s)


def exchange_instance(
    request: PlanRequest, limits: SyncLimits, used: Sequence[int], steps_s: Sequence[float], nodes: int
) -> IslandsInstance:
    """Return the exchange of some islands, with so many pairs of nodes between each two of them."""
    cluster = request.cluster
    zones = [cluster.parts[i].cluster.groups[0].zone for i in used]
    links = {(link.src, link.dst): link for link in cluster.region_links}
    rate, latency_s = np.zeros((len(used), len(used))), np.zeros((len(used), len(used)))
    for (a, src), (b, dst) in itertools.permutations(enumerate(zones), 2):
        link = links[src, dst]
        rate[a, b], latency_s[a, b] = nodes * link.bytes_per_s, link.round_trip_s / 2
    return IslandsInstance(
        step_s=np.array(steps_s, dtype=float), rate=rate, latency_s=latency_s, num_params=request.model.num_params,
        max_steps=limits.max_local_steps, max_delay=limits.max_delay_steps,
    )  # fmt: skip


def on_islands(request: PlanRequest, cell: TrainingPlan, clusters: Sequence[ClusterSpec]) -> tuple[TrainingPlan, ...]:
    """Return the plan of each island: as many of the cell's replicas as it has room for, with its share of the batch (C3)."""
    batch, layout = request.workload.global_batch_size, cell.layout
    grain = layout.micro_batch_size if layout.pp > 1 else 1
    times = [cluster.num_devices // cell.cluster.num_devices for cluster in clusters]
    if len({(cluster.groups[0].device, count) for cluster, count in zip(clusters, times, strict=True)}) == 1:
        each, more = divmod(batch // grain, len(clusters))
        shares = [grain * (each + (i < more)) for i in range(len(clusters))]
    else:
        ranks = [count * layout.dp for count in times]
        unit = [count * layout.micro_batch_size // grain for count in ranks]
        fixed_s, pass_s = [], []
        for cluster, count, size in zip(clusters, times, unit, strict=True):
            one, two = (_on_island(cell, cluster, count, k * size * grain).estimate.step_time_s for k in (4, 8))
            pass_s.append(max((two - one) / 4, 1e-9))
            fixed_s.append(max(one - 4 * pass_s[-1], 0.0))
        shares = [grain * share for share in deal(batch // grain, fixed_s, pass_s, unit, ranks)]
    return tuple(_on_island(cell, *island) for island in zip(clusters, times, shares, strict=True))


def _on_island(cell: TrainingPlan, cluster: ClusterSpec, times: int, batch: int) -> TrainingPlan:
    """Return the cell's plan on an island that holds it so many times."""
    layout = cell.layout.replace(dp_replicate=cell.layout.dp_replicate * times)
    if batch < layout.dp * (layout.micro_batch_size if layout.pp > 1 else 1):
        raise ConfigError(f"{batch} sequences on {layout.dp} data-parallel ranks of a region   [batch (C3)]")
    plan = cell.replace(
        cluster=cluster, workload=cell.workload.replace(global_batch_size=batch), layout=layout, shares=(), fastest=None,
        rank_map=tuple(range(cluster.num_devices)) if times > 1 else cell.rank_map,
    )  # fmt: skip
    return plan.replace(estimate=reestimate(plan, cluster))


def require_host_memory(plan: TrainingPlan) -> None:
    """Refuse hosts that have no room for anchor and momentum.

    Raises:
        InfeasibleError: they have not (C1).
    """
    layout, group = plan.layout, plan.cluster.groups[0]
    shards = layout.tp * layout.pp * (layout.dp_shard * layout.cp if layout.zero_stage else 1)
    needed = STATE_BYTES * plan.model.num_params / shards * group.devices_per_node
    if group.host_memory_bytes is not None and needed > group.host_memory_bytes:
        raise InfeasibleError(
            f"anchor and momentum of {plan.model.name} do not fit the hosts of {group.zone}",
            details=(f"{format_bytes(needed)} of {format_bytes(group.host_memory_bytes)}   [memory (C1)]",),
            help="--sync step needs none of it",
        )


def join(request: PlanRequest, joined: Joined) -> TrainingPlan:
    """Write the plan of several islands: one layout whose replicas they share out."""
    cell, plans, exchange = joined.cell, joined.plans, joined.exchange
    cluster = with_parts_only(request.cluster, joined.used)
    updates = describe(joined, cluster, request.local_updates or SyncLimits())
    layout = cell.layout.replace(dp_replicate=sum(plan.layout.dp_replicate for plan in plans))
    batch = request.workload.global_batch_size
    shares = tuple(share for plan in plans for share in plan.batch_shares)
    draft = cell.replace(estimate=joined.slowest.estimate)
    tokens = request.workload.tokens_per_step
    busy = sum(plan.workload.tokens_per_step / (plan.estimate.step_time_s * plan.estimate.mfu) for plan in plans)
    waited_s = joined.waited_s / exchange.steps
    return draft.replace(
        cluster=cluster,
        workload=request.workload,
        layout=layout,
        rank_map=joined_rank_map(
            tuple(plan.rank_map for plan in plans), devices_of_islands(cluster), layout.pp
        ),
        shares=() if shares == even_shares(layout, batch) else shares,
        estimate=with_exchange(
            joined.slowest.estimate, waited_s=waited_s, tokens_per_step=tokens, num_devices=cluster.num_devices,
            mfu=tokens / (joined.step_s * busy),
        ),
        local_updates=updates,
        alternatives=(),
        fastest=None,
        notes=(*cell.notes, note_on_updates(updates, joined)),
    )  # fmt: skip


def describe(joined: Joined, cluster: ClusterSpec, limits: SyncLimits) -> LocalUpdates:
    """Return the local updates of joined islands as a plan says them."""
    exchange, n = joined.exchange, len(joined.used)
    zones = [part.cluster.groups[0].zone for part in cluster.parts]
    sent = 2 * (n - 1) / n * wire_bytes(joined.cell.model.num_params, exchange.bits)
    price = {(link.src, link.dst): link.usd_per_gb for link in cluster.region_links}
    ring = [zones[i] for i in exchange.order]
    usd = sum(sent / 1e9 * price[edge] for edge in zip(ring, (*ring[1:], ring[0]), strict=True))
    return LocalUpdates(
        islands=tuple(
            Island(
                region=zone, replicas=plan.layout.dp_replicate, sequences=plan.workload.global_batch_size,
                step_s=plan.estimate.step_time_s,
            )
            for zone, plan in zip(zones, joined.plans, strict=True)
        ),
        ring=exchange.order, steps=exchange.steps, fragments=exchange.fragments, bits=exchange.bits,
        delay_steps=exchange.delay, exchange_s=joined.exchange_s, waited_s=joined.waited_s, sent_bytes=sent, usd=usd,
        node_pairs=joined.node_pairs, limits=limits,
    )  # fmt: skip


def note_on_updates(updates: LocalUpdates, joined: Joined) -> str:
    """Say what islands do, and what is not known of it."""
    islands = f"{len(updates.islands)} regions train by themselves and sum up what changed every {updates.steps} steps"
    if updates.steps == 1:
        islands = f"{len(updates.islands)} regions sum up what changed after each step"
    part = joined.waited_s / updates.steps / joined.step_s
    return (
        f"{islands}, {updates.bits} bits a number, {format_bytes(updates.sent_bytes)} from each region: {100 * part:.1f} % of the "
        "time; losses may differ from those of a sum each step (--sync step)"
    )
