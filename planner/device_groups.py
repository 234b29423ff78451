"""Which device pools of a mixed cluster a plan uses: all of them, or some where the others would slow it down.

Sets
    k            device pools together: every choice of some of a cluster's pools (kinds of device, zones), all of them among these
Data
    N[g], MIN_S[g]   devices of a pool, and device-seconds of a sequence on it in the best micro-batch (variants.py), nothing sent
    T[k, l]      seconds of layout l on the cluster that the pools of k make (schema/device_groups.py), with its bounds
Objective
    (O)  min over k and l of T[k, l]
Constraints
    (C1) entire: a choice has all devices of its pools and no others
Bound
    (B)  T[k, l] >= sequences / sum over pools g of k of N[g] / MIN_S[g]           perfect scaling

One search (solvers/branch_and_bound.py): a node is a choice of pools under the bound of what waits on it, first (B), then that of
its own search over layouts (search.py). All share the incumbent, so that a choice is opened only where its bound is below the best
plan on any other one; one that is opened expands what it promises most of at once. Choices on which every layout costs the same
count once: zones that are alike in everything.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..schema import ClusterSpec, ConfigError, LeftOut, SolverLimitError, TrainingEstimate
from ..schema.device_groups import cost_key, part_label, with_parts_only
from ..schema.units import format_seconds
from ..solvers.branch_and_bound import Leaf, Node, Search, Step, Stop
from .expand import Candidate
from .request import PlanRequest
from .search import REL_GAP, LayoutProblem, SearchResult
from .space import build_space
from .tasks.training import add_synthesised_orders, why_slower
from .variants import min_device_s_of_pools

MAX_POOLS_IN_EVERY_CHOICE = 5
"""Of more pools these choices are tried: all of them and all but one, the fastest ones, and of every set of kinds those in all
zones, in all but one, in one, and in the zones of one link."""

FIRST_TRIES = 4
"""Steps of a search in which a choice that is opened looks for its first candidate."""

MAX_TRIES = 20
"""Layouts that are expanded to say what a plan would take with a pool that it leaves out."""


@dataclass
class PoolChoice:
    """Some pools of a cluster, and what is known of plans on them.

    Attributes:
        pools: indices into the parts of the whole cluster.
        request: what is asked, on the cluster that these pools make.
        min_s: seconds that no step is below (B).
        problem: its layouts, once its turn has come.
        candidates: layouts that were expanded and fit; ``evaluated``: those that were expanded.
        error: why there is no layout.
    """

    pools: tuple[int, ...]
    request: PlanRequest
    min_s: float = 0.0
    problem: LayoutProblem | None = None
    candidates: list[Candidate] = field(default_factory=list)
    evaluated: int = 0
    error: ConfigError | None = None

    @property
    def why_none(self) -> str:
        """Say why no layout was found."""
        if self.error is None:
            return "no layout with them was found that fits"
        return f"there is no layout with them: {(*self.error.details, self.error.message)[0]}"

    def open(self) -> LayoutProblem | None:
        """Enumerate its layouts; None where the rules leave none."""
        if self.problem is None and self.error is None:
            try:
                self.problem = LayoutProblem(self.request, build_space(self.request), worse_than_s=float("inf"))
            except ConfigError as error:
                self.error = error
        return self.problem


class _PoolProblem:
    """The choices as one problem: a node is a choice with the bound of what waits on it."""

    def __init__(self, choices: Sequence[PoolChoice]) -> None:
        self._choices = choices

    def roots(self) -> Step[int, tuple[int, Candidate]]:
        return Step([Node(choice.min_s, k, k) for k, choice in enumerate(self._choices)])

    def expand(self, node: Node[int], incumbent: float) -> Step[int, tuple[int, Candidate]]:
        k, choice = node.state, self._choices[node.state]
        is_new = choice.problem is None
        try:
            problem = choice.open()
        except SolverLimitError:
            if not any(other.candidates for other in self._choices):
                raise
            return Step([node])  # the deadline that ended it ends the search, which has an answer
        if problem is None:
            return Step()
        leaves, evaluated, effort, bound = [], 0, 0.0, node.bound
        for _ in range(FIRST_TRIES if is_new else 1):
            step = problem.expand(Node(bound, None), incumbent)
            leaves += [Leaf(leaf.objective, (k, leaf.candidate), leaf.bound, (k, leaf.key)) for leaf in step.leaves]
            evaluated, effort = evaluated + step.evaluated, effort + step.effort
            bound = max(bound, min((n.bound for n in step.nodes), default=math.inf))
            if leaves or math.isinf(bound):
                break
        choice.evaluated += evaluated
        choice.candidates += [leaf.candidate[1] for leaf in leaves]
        return Step([node.raised(bound)] if math.isfinite(bound) else [], leaves, evaluated, effort)


def pool_choices(request: PlanRequest) -> list[PoolChoice]:
    """Return the choices of entire pools (C1) that differ in some cost, that of all pools first."""
    cluster, parts = request.cluster, request.cluster.parts
    of_pools = zip(parts, min_device_s_of_pools(request), strict=True)
    rates = [part.cluster.num_devices / device_s for part, device_s in of_pools]
    chosen = list(dict.fromkeys(_chosen_pools(cluster, rates)))
    clusters = {pools: with_parts_only(cluster, pools) for pools in chosen}
    different = {cost_key(used): pools for pools, used in reversed(clusters.items())}
    batch_size = request.workload.global_batch_size
    return [
        PoolChoice(pools, replace(request, cluster=clusters[pools]), batch_size / sum(rates[g] for g in pools))
        for pools in sorted(different.values(), key=chosen.index)
    ]


def _chosen_pools(cluster: ClusterSpec, rates: Sequence[float]) -> Iterator[tuple[int, ...]]:
    idx = range(len(rates))
    if len(idx) <= MAX_POOLS_IN_EVERY_CHOICE:
        yield from (pools for n in reversed(idx) for pools in itertools.combinations(idx, n + 1))
        return
    yield tuple(idx)
    yield from itertools.combinations(idx, len(idx) - 1)
    by_rate = sorted(idx, key=lambda g: -rates[g])
    yield from (tuple(sorted(by_rate[:n])) for n in idx[1:])
    of_pool = [(part.device, part.cluster.groups[0].zone) for part in cluster.parts]
    kinds, zones = ({*names} for names in zip(*of_pool, strict=True))
    linked = [{*join.zones} for join in cluster.zone_links]
    for n in range(1, len(kinds) + 1):
        for used in itertools.combinations(sorted(kinds), n):
            for area in (
                zones,
                *linked,
                *(zones - {zone} for zone in sorted(zones)),
                *({zone} for zone in sorted(zones)),
            ):
                if pools := tuple(g for g in idx if of_pool[g][0] in used and of_pool[g][1] in area):
                    yield pools


def search_device_pools(
    request: PlanRequest, *, runner_ups: int, below_s: float = math.inf, min_pools: int = 1
) -> tuple[PlanRequest, SearchResult, tuple[LeftOut, ...]]:
    """Search the layouts on every choice of a mixed cluster's device pools for the least of (O).

    Args:
        below_s: a step that takes no less is of no use.
        min_pools: choices of fewer pools are known already.

    Returns:
        The request on the pools that are used, what the search found on them, and the pools that are not used.

    Raises:
        ConfigError: no choice has any layout; the message is that of all pools.
        SolverLimitError: the deadline came before every layout of a choice had a bound.
    """
    start, deadline, choices = time.perf_counter(), request.deadline, pool_choices(request)
    choices = [choice for choice in choices if len(choice.pools) >= min_pools]
    answer = Search(_PoolProblem(choices)).run(
        Stop(rel_gap=REL_GAP, below=below_s, deadline=deadline), on_progress=request.on_progress
    )
    if all(choice.open() is None for choice in choices[:1]) and answer.best is None:
        raise choices[0].error or AssertionError("no layout and no reason")
    best = choices[0 if answer.best is None else answer.best.candidate[0]]
    if best.open() is None and best.error is not None:
        raise best.error
    assert best.problem is not None
    for candidate in best.candidates:
        best.problem.take_scout(candidate.idx)
    result = SearchResult(
        best.problem,
        Search(best.problem),
        best.candidates,
        bound_s=answer.bound,
        stopped_early=answer.ended == "deadline",
        evaluated=best.evaluated,
    )
    result.add_runner_ups(runner_ups, deadline)
    if not deadline.is_over:
        result.nearest_misses = best.problem.nearest_misses(answer.objective)
    result.feasible.sort(key=lambda c: (c.estimate.step_time_s, c.idx))
    result.search_s = time.perf_counter() - start
    if "schedule" not in request.fixed:
        add_synthesised_orders(result, deadline)
    left_out = () if answer.best is None else _left_out(request, choices, best, result.feasible[0].estimate)
    return best.request, result, left_out


def _left_out(
    request: PlanRequest, choices: Sequence[PoolChoice], best: PoolChoice, chosen: TrainingEstimate
) -> tuple[LeftOut, ...]:
    """Return the pools that the best choice leaves out, with what a step takes if one of them is used too."""
    parts, by_cost = request.cluster.parts, {cost_key(choice.request.cluster): choice for choice in choices}
    answers = []
    for g in (g for g in range(len(parts)) if g not in best.pools):
        wider = with_parts_only(request.cluster, sorted({*best.pools, g}))
        choice = by_cost.get(cost_key(wider)) or PoolChoice((), replace(request, cluster=wider))
        with_it = _best_known(choice)
        reason = choice.why_none if with_it is None else why_slower(with_it, chosen)
        answers.append(
            LeftOut(
                devices=part_label(parts, g),
                zone=parts[g].cluster.groups[0].zone,
                num_devices=parts[g].cluster.num_devices,
                nodes=parts[g].nodes,
                step_time_s=None if with_it is None else with_it.step_time_s,
                reason=reason,
            )
        )
    return tuple(answers)


def _best_known(choice: PoolChoice) -> TrainingEstimate | None:
    """Return the best estimate on a choice, after a few expansions where there is none."""
    if not choice.candidates and (problem := choice.open()) is not None:
        stop = Stop(rel_gap=None, max_leaves=1, max_effort=MAX_TRIES, deadline=choice.request.deadline)
        choice.candidates += [leaf.candidate for leaf in Search(problem).run(stop).leaves]
    return min((c.estimate for c in choice.candidates), key=lambda estimate: estimate.step_time_s, default=None)


def notes_on_left_out(left_out: Sequence[LeftOut], chosen: TrainingEstimate) -> tuple[str, ...]:
    """Say which devices a plan leaves out, and what it would take with them."""
    return tuple(
        f"{pool.num_devices} x {pool.devices} are left out: "
        + (
            pool.reason
            if pool.step_time_s is None
            else f"with them a step takes {format_seconds(pool.step_time_s)} instead of "
            f"{format_seconds(chosen.step_time_s)} ({pool.reason})"
        )
        for pool in left_out
    )
