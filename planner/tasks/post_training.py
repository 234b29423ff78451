"""Post-training: pools of copies of models, a layout for each call, by the one search over placements (solvers/pools.py).

book       costs of a copy on a size of pool, each worked out when it is needed (planner/post_training/costs.py)
incumbent  the best placement over the few largest sizes
needed     sizes whose calls, at the peak rate of their devices, may be part of a step within RUNNER_UPS of it; costs of all
           others stay infinite
answer     the placement with the shortest step over the needed sizes: exact, and so are runner-ups within RUNNER_UPS
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from ...schema import ConfigError, InfeasibleError
from ...schema.rl import CALLS, RlWorkload, Role
from ...schema.units import format_bytes
from ...solvers.branch_and_bound import Answer
from ...solvers.pools import Partition, PlacedPools, PoolsInstance, solve_pools
from ..post_training.costs import CopyCosts, CostBook, sizes_of
from ..request import PlanRequest

FIRST_SIZES = 3
"""Of the largest sizes, which give the first incumbent."""

RUNNER_UPS = 1.25
"""Runner-ups are proved up to so many times the shortest step; longer ones may miss a size that was excluded."""


@dataclass(frozen=True)
class PostTrainingSearch:
    """What a search leaves.

    Attributes:
        evaluated, skipped: pairs of a copy and a size that were costed, and that their bound excluded.
        search_s: wall-clock seconds.
    """

    book: CostBook
    instance: PoolsInstance
    answer: Answer[PlacedPools]
    evaluated: int
    skipped: int
    search_s: float

    @property
    def roles(self) -> tuple[Role, ...]:
        """Return the copies in the order of the instance."""
        return self.book.workload.roles

    def costs(self, copy: int, size_idx: int) -> CopyCosts:
        """Return the costs of a copy that was placed."""
        costs = self.book.costs(self.roles[copy], self.instance.sizes[size_idx])
        assert costs is not None
        return costs

    def best_of(self, partitions: Iterable[Partition], *, shares: bool | None = None) -> Answer[PlacedPools]:
        """Return the best placement of some partitions."""
        return solve_pools(replace(self.instance, shares=shares), chosen=list(partitions))


def search_post_training(request: PlanRequest, *, book: CostBook | None = None) -> PostTrainingSearch:
    """Return the placement with the shortest step, with its proof.

    Raises:
        ConfigError: the cluster's nodes are not alike, or a placement is asked for that there is not.
        InfeasibleError: a copy fits no pool, or no placement fits.
        SolverLimitError: the deadline came before costs were known.
    """
    assert isinstance(request.task, RlWorkload)
    workload = request.task
    book, start = book or CostBook(request, workload), time.perf_counter()
    sizes = sizes_of(request.cluster)
    if workload.placement == "split" and request.cluster.num_devices < 2:
        raise ConfigError("placement = split on one device", help="take placement = auto, or more devices")
    known: set[tuple[int, int]] = set()
    largest = range(max(len(sizes) - FIRST_SIZES, 0), len(sizes))
    incumbent = math.inf
    for idxs in (largest, range(len(sizes))):
        for copy, role in enumerate(workload.roles):
            for idx in idxs:
                if book.lower_bound_s(role, sizes[idx]) < RUNNER_UPS * incumbent:
                    known.add((copy, idx))
        instance = instance_of(book, sizes, known, below_s=RUNNER_UPS * incumbent)
        answer = solve_pools(instance, deadline=request.deadline)
        incumbent = answer.objective
    if answer.best is None:
        raise _infeasible(book, instance)
    skipped = len(sizes) * instance.num_copies - len(known)
    return PostTrainingSearch(book, instance, answer, len(known), skipped, time.perf_counter() - start)


def instance_of(
    book: CostBook, sizes: tuple[int, ...], known: set[tuple[int, int]], *, below_s: float = math.inf
) -> PoolsInstance:
    """Return the problem with the costs of these pairs of a copy and a size; all others are infinite, and calls from
    ``below_s`` on may be.
    """
    workload, cluster = book.workload, book.cluster
    roles, calls = workload.roles, workload.calls
    seconds, live = np.full((len(calls), len(sizes)), math.inf), np.full((len(calls), len(sizes)), math.inf)
    state, move = np.zeros((len(roles), len(sizes))), np.zeros((len(roles), len(sizes)))
    for copy, idx in sorted(known):
        costs = book.costs(roles[copy], sizes[idx], below_s=below_s)
        if costs is None:
            continue
        state[copy, idx], move[copy, idx] = costs.state_bytes, costs.move_s
        for q, call in enumerate(calls):
            if call in costs.seconds:
                seconds[q, idx], live[q, idx] = costs.seconds[call], costs.live_bytes[call]
    send = np.array([[book.send_s(sender, receiver) for receiver in sizes] for sender in sizes])
    return PoolsInstance(
        copy_of=tuple(roles.index(CALLS[call][0]) for call in calls),
        level_of=tuple(CALLS[call][1] for call in calls),
        sizes=sizes,
        seconds=seconds,
        live_bytes=live,
        state_bytes=state,
        move_s=move,
        send_s=send,
        budget_bytes=float(cluster.memory_budget_bytes),
        host_bytes=book.host_bytes,
        num_devices=cluster.num_devices,
        ahead=workload.staleness,
        fetches=workload.fetches,
        sender=roles.index("actor"),
        generator=roles.index("generator"),
        shares={"auto": None, "colocated": True, "split": False}[workload.placement],
    )


def _infeasible(book: CostBook, instance: PoolsInstance) -> InfeasibleError:
    """Return the error of a workload that no placement holds."""
    workload, cluster = book.workload, book.cluster
    name = workload.model_of("actor").name
    lacking = [
        f"{role}: {book.reasons.get(role, 'its calls fit no pool')}"
        for copy, role in enumerate(workload.roles)
        if not any(
            np.isfinite(instance.seconds[[q for q, owner in enumerate(instance.copy_of) if owner == copy], idx]).all()
            for idx in range(len(instance.sizes))
        )
    ]
    budget = format_bytes(instance.budget_bytes)
    details = lacking or [
        f"every copy fits by itself within {budget} a device; together they do not, of {workload.placement} placements"
    ]
    return InfeasibleError(
        f"no placement of {len(workload.roles)} copies fits {cluster.num_devices} x {cluster.weakest_device.name}   [memory (C2)]",
        details=tuple(details),
        help=f"use more devices, or a smaller model than {name}"
        + ("" if workload.placement == "auto" else "; or placement = auto"),
    )
