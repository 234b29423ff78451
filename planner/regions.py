"""Plans over regions that may train by themselves between sums: which of them, the layout in each, and what crosses them.

Sets
    i            islands: the device pools of a cluster whose groups stand in regions, each with a link to every other one
    k            islands together: every choice of some of them
Data
    R[i]         sequences a second that no layout of island i exceeds: the batch over the bound of its own search
    STEP[i, l]   seconds of an inner step of layout l on island i with its share of the batch
    MORE[k]      what the exchange around the ring of k adds to a step (solvers/islands.py)
Objective
    (O)  min over k and l of max_i STEP[i, l] + MORE[k]
Constraints
    (C1) memory: a layout fits every island; anchor and momentum, 8 bytes a parameter, fit its hosts
    (C3) batch:  shares of islands of unlike size end together (`deal`)
Bound
    (B)  batch / sum over k of R[i], and what the ring adds to such a step: a larger batch takes no longer for a sequence
    (B2) the same once a choice is planned, with what each island takes for its share at least (solvers/islands.py)

All islands run the same replica, as often as their devices hold it, so that ranks at the same place hold the same part of the
parameters: the layout is searched for the largest number of nodes that divides all islands (of unlike devices for the weakest), by
`plan` as for any cluster. One search (solvers/branch_and_bound.py): a node is a choice under (B) without its ring, then with it,
then it is planned. A choice of one island is an ordinary plan of it.

What sums up gradients each step, replicas over all regions or a pipeline through them, is an ordinary plan of the mixed cluster
(device_groups.py). It is looked at where islands leave more than MIN_GAIN to gain over (B), or sum up nearly each step anyway.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ..schema import (
    Certificate,
    ClusterSpec,
    ConfigError,
    InfeasibleError,
    LeftOut,
    SolverLimitError,
    TrainingPlan,
)
from ..schema.cluster import ClusterPart
from ..schema.device_groups import part_label
from ..schema.local_updates import SyncLimits
from ..schema.offers import with_nodes
from ..schema.units import format_seconds
from ..solvers.branch_and_bound import Leaf, Node, Search, Step, Stop
from ..solvers.islands import slowest_bound_s, solve
from .device_groups import notes_on_left_out
from .explain.infeasible import explain_infeasible
from .islands import Joined, exchange_instance, join, on_islands, require_host_memory
from .request import PlanRequest
from .search import REL_GAP, SearchResult, search
from .space import build_space

PlanOne = Callable[..., TrainingPlan]
PlanOnPools = Callable[..., tuple[TrainingPlan | None, SearchResult]]

MIN_GAIN = 0.02
"""Share of the step that islands leave to gain, from which plans that sum up each step are looked at as well."""

FEW_STEPS = 4
"""Inner steps between sums, up to which a sum each step may be as fast."""

MAX_ISLANDS_IN_EVERY_CHOICE = 10
"""Of more islands these choices are tried: the fastest ones, and all but one."""


class IslandProblem:
    """The choices of islands as one problem: a node is a choice, ``is_close`` once its bound has the ring in it."""

    def __init__(self, request: PlanRequest, limits: SyncLimits, plan_one: PlanOne) -> None:
        self.request, self.limits, self.parts, self.plan_one = request, limits, request.cluster.parts, plan_one
        self.rates = _rates(request, self.parts)
        self.cells: dict[object, TrainingPlan | None] = {}
        self.shortest_s: dict[tuple[ClusterSpec, int], float] = {}
        self.errors: list[ConfigError | InfeasibleError] = []
        self.has_plan = False

    @property
    def choices(self) -> list[tuple[int, ...]]:
        """Choices of islands that hold the model."""
        usable = [i for i, rate in enumerate(self.rates) if rate > 0]
        if len(usable) <= MAX_ISLANDS_IN_EVERY_CHOICE:
            return [used for n in range(len(usable)) for used in itertools.combinations(usable, n + 1)]
        by_rate = sorted(usable, key=lambda i: -self.rates[i])
        fastest = [tuple(sorted(by_rate[: n + 1])) for n in range(len(usable))]
        return list(dict.fromkeys([*fastest, *itertools.combinations(usable, len(usable) - 1)]))

    def bound_s(self, used: Sequence[int]) -> float:
        """Return (B) without the ring."""
        return self.request.workload.global_batch_size / sum(self.rates[i] for i in used)

    def close_bound_s(self, used: tuple[int, ...]) -> float:
        """Return (B)."""
        shortest_s = self.bound_s(used)
        nodes = min(self.parts[i].cluster.num_nodes for i in used)
        return max(
            shortest_s, solve(exchange_instance(self.request, self.limits, used, [shortest_s] * len(used), nodes)).bound
        )

    def roots(self) -> Step[tuple[tuple[int, ...], bool], Joined]:
        """Return the choices, each with the bound of its islands."""
        return Step([Node(self.bound_s(used), (used, len(used) == 1), used) for used in self.choices])

    def expand(
        self, node: Node[tuple[tuple[int, ...], bool]], incumbent: float
    ) -> Step[tuple[tuple[int, ...], bool], Joined]:
        """Raise the bound of a choice by what its ring adds, or plan it."""
        used, is_close = node.state
        if not is_close:
            return Step([replace(node.raised(self.close_bound_s(used)), state=(used, True))])
        try:
            joined = self.joined(used)
        except (ConfigError, InfeasibleError) as error:
            self.errors.append(error)
            return Step(evaluated=1)
        except SolverLimitError:
            if not self.has_plan:
                raise
            return Step([node])  # the deadline that ended it ends the search, which has an answer
        if joined is None:
            return Step(evaluated=1)
        self.has_plan = True
        return Step(
            (), [Leaf(joined.step_s, joined, max(node.bound, self._bound_of_shares(joined)), used)], evaluated=1
        )

    def _bound_of_shares(self, joined: Joined) -> float:
        """Return (B2) of a choice, and what the ring adds: each island searched with its share, or bounded as the cell was."""
        cell, batch = joined.cell, self.request.workload.global_batch_size
        if cell.search is None:
            return 0.0
        rates = [self.rates[i] for i in joined.used]
        shares = [math.ceil(batch * rate / sum(rates) - 1e-6) for rate in rates]
        self.shortest_s.setdefault((_alike(cell.cluster), cell.workload.global_batch_size), cell.search.bound_s)
        shortest_s = []
        for i, share in zip(joined.used, shares, strict=True):
            cluster = self.parts[i].cluster
            key = (_alike(cluster), share)
            if key not in self.shortest_s:
                self.shortest_s[key] = _shortest_s(self.request, cluster, share)
            shortest_s.append(self.shortest_s[key])
        slowest_s = slowest_bound_s(batch, rates, shares, shortest_s)
        if joined.instance is None:
            return slowest_s
        return solve(replace(joined.instance, step_s=np.full(len(rates), slowest_s))).bound

    def joined(self, used: tuple[int, ...]) -> Joined | None:
        """Plan a choice, with the shares of its islands (C3); None where an island does not fit.

        Raises:
            ConfigError, InfeasibleError: there is no layout for its replicas, or the hosts have no room (C1).
        """
        request, parts = self.request, [self.parts[i] for i in used]
        cell = self._cell(used)
        if cell is None:
            return None
        plans = on_islands(request, cell, [part.cluster for part in parts])
        if not all(plan.estimate.fits for plan in plans):
            return None
        if len(used) == 1:
            return Joined(used, cell, plans)
        for plan in plans:
            require_host_memory(plan)
        lanes = min(plan.layout.dp_replicate for plan in plans)
        each = cell.layout.world_size // cell.layout.dp_replicate
        nodes = max(1, lanes * each // max(part.cluster.largest_node for part in parts))
        steps_s = [plan.estimate.step_time_s for plan in plans]
        instance = exchange_instance(request, self.limits, used, steps_s, nodes)
        solution = solve(instance)
        if solution.choice is None:
            return None
        return Joined(used, cell, plans, instance, solution.choice, max(0.0, solution.bound - max(steps_s)), nodes)

    def _cell(self, used: tuple[int, ...]) -> TrainingPlan | None:
        """Return the plan of the nodes that every island has once or several times, with their part of the batch."""
        clusters = [self.parts[i].cluster for i in used]
        nodes = math.gcd(*(cluster.num_nodes for cluster in clusters))
        weakest = min(used, key=lambda i: self.rates[i] / self.parts[i].cluster.num_nodes)
        cluster = self.parts[weakest].cluster
        cluster = with_nodes(cluster, nodes)
        part = self.rates[weakest] / self.parts[weakest].cluster.num_nodes * cluster.num_nodes
        batch = math.ceil(self.request.workload.global_batch_size * part / sum(self.rates[i] for i in used) - 1e-6)
        key = (cluster.replace(name="-"), batch)
        if key not in self.cells:
            task = self.request.workload.replace(global_batch_size=batch)
            one = replace(self.request, cluster=cluster, task=task, local_updates=None, on_progress=None)
            self.cells[key] = self.plan_one(one, top=0 if len(used) > 1 else 4)
        return self.cells[key]


def _rates(request: PlanRequest, parts: Sequence[ClusterPart]) -> list[float]:
    """Return R [I]; 0 where no layout of an island may fit. Islands that differ in their name only are searched once."""
    known: dict[object, float] = {}
    rates = []
    for part in parts:
        key = _alike(part.cluster)
        if key not in known:
            devices = part.cluster.num_devices
            batch = -(-request.workload.global_batch_size // devices) * devices
            known[key] = batch / _shortest_s(request, part.cluster, batch)
        rates.append(known[key])
    return rates


def _alike(cluster: ClusterSpec) -> ClusterSpec:
    """Return what islands that are searched once have in common."""
    return cluster.replace(name="-", groups=(cluster.groups[0].replace(zone=""),))


def _shortest_s(request: PlanRequest, cluster: ClusterSpec, batch: int) -> float:
    """Return the seconds that no layout of an island takes less for a batch; infinite where none may fit."""
    task = request.workload.replace(global_batch_size=batch)
    one_island = replace(request, cluster=cluster, task=task, local_updates=None, on_progress=None)
    try:
        result = search(one_island, build_space(one_island))
    except ConfigError:
        return math.inf
    return result.bound_s if result.feasible or result.stopped_early else math.inf


def plan_regions(request: PlanRequest, *, top: int, plan_one: PlanOne, plan_on_pools: PlanOnPools) -> TrainingPlan:
    """Return the plan of the islands with the least (O), or of what sums up each step where that is faster.

    Args:
        plan_one: plans for one cluster; plan_on_pools: for all or some of the pools of a mixed one (plan.py).

    Raises:
        ConfigError, InfeasibleError: no plan fits.
        SolverLimitError: the deadline came before any plan.
    """
    assert request.local_updates is not None
    start, limits = time.perf_counter(), request.local_updates
    problem = IslandProblem(request, limits, plan_one)
    tree = Search(problem)
    answer = tree.run(Stop(rel_gap=REL_GAP, deadline=request.deadline), on_progress=request.on_progress)
    best = None if answer.best is None else answer.best.candidate
    if best is None and request.deadline.is_over:
        raise request.deadline.error("while islands were planned")
    if best is None or _may_sum_each_step(best, answer.bound):
        below_s = math.inf if best is None else best.step_s
        each_step_request = replace(request, local_updates=None)
        try:
            each_step, result = plan_on_pools(each_step_request, top=top, below_s=below_s, min_pools=2)
        except (ConfigError, SolverLimitError) as error:
            if best is None:
                raise (problem.errors[0] if problem.errors else error) from None
        else:
            if each_step is not None and each_step.estimate.step_time_s < below_s:
                return each_step
            if best is None:
                raise explain_infeasible(request, result)
    assert best is not None
    certificate = Certificate.proved(
        objective=best.fastest_s,
        bound=min(answer.bound, best.fastest_s),
        finished=answer.ended != "deadline",
        evaluated=answer.evaluated,
        pruned=max(0, len(problem.choices) - answer.evaluated),
        search_s=time.perf_counter() - start,
    )
    plan = best.cell if len(best.used) == 1 else join(request, best)
    left_out = _unused_pools(problem, best)
    notes = (*plan.notes, *notes_on_left_out(left_out, plan.estimate))
    return plan.replace(search=certificate, left_out=left_out, notes=notes, provenance=request.provenance())


def _may_sum_each_step(best: Joined, bound_s: float) -> bool:
    """Return whether a plan that sums up gradients each step may be as fast as islands."""
    is_nearly = len(best.used) > 1 and best.exchange.steps <= FEW_STEPS
    return is_nearly or best.fastest_s > bound_s * (1 + MIN_GAIN)


def _unused_pools(problem: IslandProblem, best: Joined) -> tuple[LeftOut, ...]:
    parts, answers = problem.parts, []
    for i in (i for i in range(len(parts)) if i not in best.used):
        wider = tuple(sorted((*best.used, i)))
        reason = "no layout fits there"
        if problem.rates[i] > 0:
            shortest_s = problem.close_bound_s(wider)
            reason = (
                f"with it a step takes {format_seconds(shortest_s)} at least, without it {format_seconds(best.step_s)}"
            )
        answers.append(
            LeftOut(
                devices=part_label(parts, i),
                zone=parts[i].cluster.groups[0].zone,
                reason=reason,
                num_devices=parts[i].cluster.num_devices,
                nodes=parts[i].nodes,
            )
        )
    return tuple(answers)
