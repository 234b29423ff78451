"""The cheapest of many sizes: which offers, and how many nodes of them, train a model for the least money.

Sets
    k            sizes: every number of nodes of every offer, and mixtures of offers (mixtures.py)
Data
    PRICE[k]     USD per second of the whole size, of spot nodes over the part of the time whose progress stays (`goodput`)
    T[k]         seconds of the fastest step of a size that fits (planner.search), with a bound T[k] >= BOUND[k]
    TOKENS       tokens of a step, the same for every size
    FLOOR        tokens per second that must be reached; a deadline for a number of tokens is one
Variable
    k            the size that is rented
Objective
    (O)  min  PRICE[k] T[k] / TOKENS          USD per token, or another of OBJECTIVES of the fastest layout of a size
Constraints
    (C1) floor: TOKENS / T[k] >= FLOOR
    (C2) memory: some layout of the size fits

Method: a size has a bound on its step, and with it on (O): first perfect scaling of the best micro-batch (variants.py), once its
turn comes the least over its space. Sizes are searched in the order of these bounds, each only for what is faster than the floor
and cheaper than the incumbent, until no bound is below the incumbent: what was not searched cannot be cheaper.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Unpack

import numpy as np

from ..cost_models.hardware.machine import peak_flops_per_s
from ..cost_models.stage.step import energy_j, has_power_limits, step_flops_per_token
from ..schema import (
    ConfigError,
    InfeasibleError,
    ModelSpec,
    Offer,
    SolverLimitError,
    TrainingPlan,
    Workload,
)
from ..schema.limits import MAX_SIZES
from ..schema.offers import CostSummary, SizeTried
from ..schema.training_plan import TimeBreakdown
from ..schema.units import counted
from ..solvers.branch_and_bound import Leaf, Node, Search, Step, Stop
from .mixtures import Mixtures
from .pareto import beats
from .plan import plan_training
from .request import PlanRequest, RequestOptions
from .search import REL_GAP, search
from .sizes import HOUR_S, OBJECTIVES, TIME_OVER, Objective, Size, bound_size, goodput
from .space import build_space
from .tasks.offload import plan_schedule, require_schedulable, search_offload
from .tasks.training import WORTH_MOVING, add_synthesised_orders, plan_layout
from .variants import perfect_scaling_s

SHARE_OF_BOUNDS = 0.5
"""Part of a time limit after which no further size is bounded, so that those that are can be searched."""

MAX_MIX = 3
"""Offers in a mixture."""

FLOOR_ROUNDING = 1e-9
"""Of a floor that is a rate some plan has: its step time comes back with another last digit."""


def cheapest(
    model: ModelSpec,
    offers: Sequence[Offer],
    workload: Workload,
    *,
    min_tokens_per_s: float = 0.0,
    tokens: float | None = None,
    deadline_s: float | None = None,
    objective: str = "cost",
    front: bool = False,
    mix: int = 1,
    top: int = 4,
    **options: Unpack[RequestOptions],
) -> TrainingPlan:
    """Return the plan of the cheapest size that reaches the floor, with `TrainingPlan.cost` as its certificate.

    Args:
        offers: what can be rented; the batch is the same on every size.
        min_tokens_per_s: floor (C1).
        tokens: length of the run; with a deadline, it raises the floor to tokens / deadline.
        deadline_s: seconds within which the run must end.
        objective: what is minimised, one of OBJECTIVES.
        front: also find every size that no other one beats in both time and money.
        mix: how many offers may be rented together, 1 to MAX_MIX.
        top, options: as for `planner.plan`; time is limited for all sizes together, and sizes with nodes of several kinds have no
            offload schedules.

    Raises:
        ConfigError: no size has any layout, or a deadline without tokens.
        InfeasibleError: no size fits, or none reaches the floor; names the best that was found.
        SolverLimitError: the time limit came before any size was searched.
    """
    start = time.perf_counter()
    if objective not in OBJECTIVES:
        raise ConfigError(f"unknown objective {objective!r}", help=f"use one of {', '.join(OBJECTIVES)}")
    if deadline_s is not None and tokens is None:
        raise ConfigError("a deadline needs the number of tokens to train", help="add --tokens, e.g. --tokens 1e12")
    floor = max(min_tokens_per_s, tokens / deadline_s if tokens and deadline_s else 0.0)
    slowest_s = workload.tokens_per_step / floor * (1 + FLOOR_ROUNDING) if floor > 0 else math.inf
    if not (mix == 1 or (2 <= mix <= MAX_MIX and objective == "cost" and len(offers) > 1)):
        raise ConfigError(
            f"mix {mix} with {counted(len(offers), 'offer')} for the objective {objective}: it is for the cost of several offers, "
            f"and 1 to {MAX_MIX}",
            help="leave out --mix, or give --offers with two offers or more",
        )
    request = PlanRequest.create(model, offers[0].with_size(offers[0].sizes[0]), workload, **options)
    request.require_one_batch("the cheapest of several sizes")
    if request.offload is not None:
        require_schedulable(request)
    sizes = enumerate_sizes(offers, request, slowest_s, OBJECTIVES[objective])
    mixtures = None if mix == 1 else Mixtures(offers, sizes, mix, slowest_s)
    for size in sizes:
        if size.peak_s > size.slowest_s:
            size.close("too slow", "even at the peak rate of every device")
        elif size.fair_s > size.slowest_s:
            size.close("too slow", "even at the rate of the best micro-batch of every device")
    open_sizes = [size for size in sizes if size.outcome == "not examined"]
    best = _search_sizes(open_sizes, OBJECTIVES[objective], rel_gap=REL_GAP, mixtures=mixtures)
    sizes += [] if mixtures is None else mixtures.opened
    if best is None:
        raise _none_reaches(sizes, floor)
    if front:
        mark_front(sizes, OBJECTIVES[objective])
    best.close("chosen")
    plan = _plan_of_size(best, sizes, OBJECTIVES[objective], top, mixtures)
    cost = summarise_cost(plan, best, sizes, objective, floor=floor, tokens=tokens, mixtures=mixtures)
    return plan.replace(cost=cost.replace(search_s=time.perf_counter() - start, mix=mix))


def enumerate_sizes(
    offers: Sequence[Offer], request: PlanRequest, slowest_s: float, objective: Objective
) -> list[Size]:
    """Return every size of every offer, with the seconds that a step takes where every device works at its peak rate."""
    workload = request.workload
    if (count := sum(len(offer.sizes) for offer in offers)) > MAX_SIZES:
        raise ConfigError(
            f"the offers have {count:,} sizes: at most {MAX_SIZES:,} are compared",
            help="offer a part of them (min_nodes, num_nodes)",
        )
    flops = step_flops_per_token(request.model, workload) * workload.tokens_per_step
    sizes: list[Size] = []
    for offer in offers:
        parts = goodput(np.array(offer.sizes) * offer.losses_per_node_day)
        fair_s = 0.0
        for num_nodes, part in zip(offer.sizes, parts.tolist(), strict=True):
            cluster = offer.with_size(num_nodes)
            objective.bound(0.0, 0.0, cluster)  # says what a device lacks: a price, a power limit
            rate = sum(g.num_devices * peak_flops_per_s(g.device, workload.precision) for g in cluster.groups)
            on_size = replace(request, cluster=cluster)
            fair_s = fair_s * (num_nodes - 1) / num_nodes or perfect_scaling_s(on_size)  # nodes of an offer are alike
            size = Size(
                len(sizes), offer.name, on_size, slowest_s * part, peak_s=flops / rate, fair_s=fair_s, goodput=part
            )
            sizes.append(size)
    return sizes


class _SizeProblem:
    """The sizes as a problem of solvers/branch_and_bound.py: a node is a size with the bound of its step, opened by a search, or
    all mixtures that wait.

    The results of searches are large: only that of the best size is retained.
    """

    def __init__(self, sizes: Iterable[Size], objective: Objective, mixtures: Mixtures | None) -> None:
        self._sizes, self._objective, self._mixtures = list(sizes), objective, mixtures
        self._best: Size | None = None

    def roots(self) -> Step[Size | Mixtures, Size]:
        waiting = [] if self._mixtures is None else [self._block(self._mixtures)]
        return Step([*(self._node(size) for size in self._sizes), *waiting])

    def _node(self, size: Size) -> Node[Size | Mixtures]:
        return Node(size.bound(self._objective), size, size.idx)

    def _block(self, mixtures: Mixtures) -> Node[Size | Mixtures]:
        return Node(mixtures.bound, mixtures, math.inf)

    def expand(self, node: Node[Size | Mixtures], incumbent: float) -> Step[Size | Mixtures, Size]:
        if isinstance(node.state, Mixtures):
            made = node.state.open(incumbent)
            rest = [self._block(node.state)] if math.isfinite(node.state.bound) else []
            return Step([*rest, *([] if made is None else [self._node(made)])])
        size = node.state
        mixtures = self._mixtures if size.bound_s is None and math.isfinite(incumbent) else None
        if mixtures is not None and (mixtures.raise_size(size) or node.bound < size.bound(self._objective)):
            return Step([self._node(size)])
        if size.bound_s is None:
            deadline = size.request.deadline
            if math.isinf(incumbent) and deadline.remaining_s <= (1 - SHARE_OF_BOUNDS) * deadline.limit_s:
                size.reason = TIME_OVER
                return Step()
            bound_size(size)
            if size.bound_s is None or size.outcome != "not examined":
                return Step()
            if math.isfinite(incumbent):  # else it is searched at once: bounds need something to be compared with
                return Step([self._node(size)])
        limit = incumbent * (1 - size.min_gain)
        if size.bound(self._objective) >= limit:
            size.close("dearer", "by its bound")
            return Step()
        limit_s = min(size.slowest_s, size.longest_s(self._objective, limit))
        if not search_size(size, limit_s) or size.estimate is None:
            return Step()
        value = size.value(self._objective)
        is_best = size.reaches_floor and value < incumbent
        if loser := self._best if is_best else size:
            loser.close("dearer" if loser.reaches_floor else "too slow")
            loser.result = None
        if is_best:
            self._best, size.outcome = size, "chosen"
        return Step((), [Leaf(value, size)] if size.reaches_floor else [])


def _search_sizes(
    sizes: Sequence[Size], objective: Objective, *, rel_gap: float, mixtures: Mixtures | None = None
) -> Size | None:
    """Minimise (O), or another objective, over sizes and mixtures; None where none reaches the floor."""
    tree = Search(_SizeProblem(sizes, objective, mixtures))
    answer = tree.run(Stop(rel_gap=rel_gap))
    for node in tree.open_nodes:
        if isinstance(node.state, Size):
            node.state.close("dearer", "by its bound")
    return None if answer.best is None else answer.best.candidate


def search_size(size: Size, limit_s: float) -> bool:
    """Find the fastest layout of a size that fits (C2) and beats ``limit_s``; False, and why, where there is none."""
    fits = _search_plain(size, limit_s)
    return (size.has_schedules and _search_schedules(size, limit_s, size.step_time_s if fits else None)) or fits


def _search_plain(size: Size, limit_s: float) -> bool:
    just_above = limit_s * (1 + 2 * REL_GAP)
    try:
        result = search(size.request, build_space(size.request), worse_than_s=just_above)
    except SolverLimitError:
        size.reason = TIME_OVER
        return False
    size.bound_s = max(size.min_s, min(result.bound_s, just_above))
    size.is_stopped = result.stopped_early
    if result.feasible:
        size.estimate, size.result = result.feasible[0].estimate, result
        return True
    if result.stopped_early:
        size.reason = TIME_OVER
    elif math.isinf(result.bound_s):
        size.close("does not fit", "in no layout")
    else:
        size.close("too slow" if limit_s == size.slowest_s else "dearer", "no layout that fits is faster")
    return False


def _search_schedules(size: Size, limit_s: float, plain_s: float | None) -> bool:
    """Do it among offload schedules, for what is faster than the ``plain_s`` that the size takes without one."""
    known_s = limit_s * (1 + 2 * REL_GAP) if plain_s is None else plain_s
    try:
        result = search_offload(size.request, worse_than_s=known_s)
    except (ConfigError, InfeasibleError):
        return False
    except SolverLimitError:
        size.is_stopped = True
        return False
    if result is None:
        if plain_s is None and size.outcome == "does not fit":
            reason = "nothing fits without an offload schedule, and none is faster"
            size.close("too slow" if limit_s == size.slowest_s else "dearer", reason)
        return False
    size.bound_s = min(size.min_s, result.certificate.bound_s)
    size.is_stopped |= result.certificate.status == "stopped"
    if result.estimate.step_time_s >= known_s * (1 - WORTH_MOVING):
        return False
    size.offloaded, size.estimate = result, result.estimate
    return True


def mark_front(sizes: Sequence[Size], objective: Objective) -> None:
    """Search every size that may be neither slower nor dearer than each other one, and mark those that are not."""

    def is_beaten(values: tuple[float, float]) -> bool:
        known = [(s.estimate.step_time_s, s.value(objective)) for s in sizes if s.estimate is not None]
        return any(beats(other, values) for other in known)

    def may_be(size: Size) -> bool:
        is_open = size.outcome in ("not examined", "dearer") and size.estimate is None
        return is_open and not is_beaten((size.min_s, size.bound(objective)))

    for size in sorted(sizes, key=lambda size: (size.min_s, size.idx)):
        if may_be(size) and size.bound_s is None:
            bound_size(size)
        if may_be(size) and size.bound_s is not None:
            search_size(size, size.slowest_s)
            size.result = None
    for size in sizes:
        if size.estimate is not None and size.reaches_floor:
            beaten = is_beaten((size.estimate.step_time_s, size.value(objective)))
            size.close(*(("dearer", "and slower than another") if beaten else ("on the front", "")))


def _plan_of_size(
    best: Size, sizes: Sequence[Size], objective: Objective, top: int, mixtures: Mixtures | None
) -> TrainingPlan:
    """Build the plan of the size that was chosen, with its runner-ups.

    No simpler layout is worth more than the next size, or than what closed mixtures leave of their part of the gap.
    """
    request, result = best.request, best.result
    if result is not None:
        result.add_runner_ups(top, request.deadline)
    if best.offloaded is not None:
        return plan_schedule(request, best.offloaded, result, top=top)
    assert result is not None
    if "schedule" not in request.fixed:
        add_synthesised_orders(result, request.deadline)
    others = (size for size in sizes if size is not best and size.outcome in ("dearer", "on the front"))
    next_best = min((other.value(objective) for other in others if other.estimate), default=math.inf)
    if mixtures is not None:
        next_best = min(next_best, mixtures.bound_of_all / (1 - mixtures.min_gain))
    slowest_s = min(best.slowest_s, best.longest_s(objective, next_best))
    return plan_layout(request, result, top=top, slowest_s=slowest_s)


def _none_reaches(sizes: Sequence[Size], floor: float) -> Exception:
    """Return why no size is left: a time limit, memory, or the floor with the fastest that was found."""
    if any(size.outcome == "not examined" for size in sizes):
        return SolverLimitError(
            "the time limit came before any size that fits and reaches the floor", help="raise --time-limit-s"
        )
    too_slow = [size for size in sizes if size.outcome == "too slow"]
    for size in too_slow:
        size.slowest_s, size.outcome = math.inf, "not examined"
    fastest = _search_sizes(too_slow, OBJECTIVES["throughput"], rel_gap=0.0)
    if fastest is None or fastest.step_time_s is None:
        requests = (size.request for size in sizes)
        largest = max(requests, key=lambda request: request.cluster.num_devices * request.cluster.memory_budget_bytes)
        try:
            plan_training(largest)
        except (ConfigError, InfeasibleError, SolverLimitError) as error:
            return error
        raise AssertionError("a size fits that no search found")
    rate, cluster = fastest.request.workload.tokens_per_step / fastest.step_time_s, fastest.request.cluster
    devices = f"{counted(cluster.num_nodes, 'node')} of {fastest.offer} ({counted(cluster.num_devices, 'device')})"
    less = f"{math.floor(rate):,} tokens/s or less (a deadline {floor / rate:.3g} times as long)"
    return InfeasibleError(
        f"no size of the offers reaches {floor:,.0f} tokens/s with {fastest.request.model.name}",
        details=(f"the fastest is {devices}: {rate:,.0f} tokens/s, {100 * rate / floor:.1f} % of it   [floor (C1)]",),
        help=f"ask for {less}, or offer more nodes",
    )


def summarise_cost(
    plan: TrainingPlan,
    best: Size,
    sizes: Sequence[Size],
    name: str,
    *,
    floor: float,
    tokens: float | None,
    mixtures: Mixtures | None = None,
) -> CostSummary:
    """Return the certificate: what the plan costs, and the least that any size that reaches the floor may."""
    objective, cluster, tokens_per_step = OBJECTIVES[name], best.request.cluster, plan.workload.tokens_per_step
    value = objective.value(plan.estimate, cluster) / best.goodput
    reach = (size for size in sizes if size.outcome in ("chosen", "on the front", "dearer", "not examined"))
    waiting = [] if mixtures is None else [mixtures.bound_of_all]
    bound = min([value, *waiting, *(size.bound(objective) for size in reach)])
    gap = (value - bound) / value
    hours = None if tokens is None else tokens / tokens_per_step * plan.estimate.step_time_s / best.goodput / HOUR_S
    is_complete = not any(size.is_stopped or size.outcome == "not examined" for size in sizes)
    is_complete &= mixtures is None or not mixtures.is_stopped
    price, usd = cluster.price_per_hour, best.usd(plan.estimate.step_time_s)
    return CostSummary(
        objective=name,
        offer=best.offer,
        num_nodes=cluster.num_nodes,
        price_per_hour=price,
        usd_per_step=usd,
        usd_per_million_tokens=usd and 1e6 * usd / tokens_per_step,
        usd_per_billion_tokens=usd and 1e9 * usd / tokens_per_step,
        min_tokens_per_s=floor,
        tokens=tokens,
        hours=hours,
        total=hours and price and hours * price,
        status=CostSummary.status_of(finished=is_complete, gap=gap),
        bound_usd_per_million_tokens=1e6 * bound / tokens_per_step if name == "cost" else None,
        joules_per_token=_joules_per_token(plan.estimate.breakdown_s, best),
        bound_joules_per_token=bound / tokens_per_step if name == "energy" else None,
        gap=gap,
        search_s=0.0,
        sizes=tuple(_size_tried(size, tokens_per_step) for size in sizes),
        goodput=best.goodput,
        num_mixtures=0 if mixtures is None else mixtures.num_mixtures,
    )


def _joules_per_token(breakdown_s: TimeBreakdown, size: Size) -> float | None:
    cluster = size.request.cluster
    return (
        energy_j(breakdown_s, cluster) / size.goodput / size.request.workload.tokens_per_step
        if has_power_limits(cluster)
        else None
    )


def _size_tried(size: Size, tokens_per_step: int) -> SizeTried:
    known_s, cluster = size.step_time_s or size.bound_s, size.request.cluster
    usd = None if known_s is None else size.usd(known_s)
    return SizeTried(
        offer=size.offer,
        num_nodes=cluster.num_nodes,
        num_devices=cluster.num_devices,
        price_per_hour=cluster.price_per_hour,
        outcome=size.outcome,
        reason=size.reason,
        layouts=size.layouts,
        bound_s=size.bound_s,
        step_time_s=size.step_time_s,
        usd_per_million_tokens=usd and 1e6 * usd / tokens_per_step,
        joules_per_token=None if size.estimate is None else _joules_per_token(size.estimate.breakdown_s, size),
        is_bound=size.step_time_s is None and size.bound_s is not None,
        host_bytes=0 if size.offloaded is None else size.offloaded.schedule.host_bytes,
    )
