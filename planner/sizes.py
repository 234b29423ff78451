"""Sizes of a cluster that can be rented: what is known of each, its bound and its search (cheapest.py chooses among them).

Offload schedules of the sizes that can be rented (planner/sizes.py): where nothing fits without one, or one is cheaper.

What became of every size: the front of time and money, and the certificate of the cheapest (planner/sizes.py).

The cheapest of many sizes: which offer, and how many nodes of it, trains a model for the least money.

Sets
    k            sizes: every number of nodes of every offer
Data
    PRICE[k]     USD per second of the whole size
    T[k]         seconds of the fastest step of a size that fits (planner.search), with a bound T[k] >= BOUND[k]
    TOKENS       tokens of a step, the same for every size
    FLOOR        tokens per second that must be reached; a deadline for a number of tokens is one
Variable
    k            the size that is rented
Objective
    (O)  min  PRICE[k] T[k] / TOKENS          USD per token
Constraints
    (C1) floor: TOKENS / T[k] >= FLOOR
    (C2) memory: some layout of the size fits

Method: every size gets a bound on its step (the least over its space), and with it on (O). Sizes are searched in the order of these
bounds, each only for what is faster than the floor and cheaper than the incumbent, until no bound is below the incumbent: what was
not searched cannot be cheaper. Sizes on which not even the devices' peak rates reach the floor are not bounded at all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..cost_models.hardware.device import peak_flops_per_s
from ..cost_models.stage.step import step_flops_per_token
from ..schema import (
    ClusterSpec,
    ConfigError,
    CostSummary,
    InfeasibleError,
    ModelSpec,
    Offer,
    Plan,
    SizeTried,
    SolverLimitError,
    Workload,
)
from ..schema.layout import check_fields
from ..schema.offers import Outcome
from .deadline import Deadline
from .plan import WORTH_MOVING, plan, plan_of, plan_of_offload
from .request import OffloadRequest, is_runnable, require_schedulable, split_offload_request
from .search import REL_GAP, Frontier, OnProgress, Pool, SearchResult, search
from .space import Space, build_space
from .tasks.offload import OffloadResult, OffloadSpace, search_offload
from .tasks.training import add_synthesised_orders

SHARE_OF_BOUNDS = 0.5
"""Part of a time limit after which no further size is bounded, so that those that are can be searched."""


HOUR_S = 3600.0


@dataclass
class Size:
    """One number of nodes of one offer, and what is known of it; ``place`` counts sizes in the order of the offers."""

    place: int
    offer: str
    cluster: ClusterSpec
    price_per_hour: float
    peak_s: float
    outcome: Outcome = "not examined"
    reason: str = ""
    layouts: int = 0
    bound_s: float | None = None
    step_time_s: float | None = None
    is_stopped: bool = False
    result: SearchResult | None = field(default=None, repr=False)
    offloaded: OffloadResult | None = field(default=None, repr=False)

    @property
    def least_s(self) -> float:
        """Seconds that no step of this size beats, as far as is known."""
        return self.peak_s if self.bound_s is None else self.bound_s

    def usd(self, step_time_s: float) -> float:
        """USD of a step of so many seconds."""
        return self.price_per_hour / HOUR_S * step_time_s


@dataclass(frozen=True)
class SizesRequest:
    """What is trained, the floor of (C1) as the slowest step allowed, and when to stop."""

    model: ModelSpec
    workload: Workload
    fixed: Mapping[str, Any]
    runnable: bool
    slowest_s: float
    top: int
    deadline: Deadline
    on_progress: OnProgress | None = field(default=None, repr=False)
    offload: OffloadRequest | None = None

    def space_of(self, size: Size) -> Space:
        """Layouts of a size."""
        return build_space(
            self.model, self.workload, size.cluster, self.fixed, runnable=self.runnable, deadline=self.deadline
        )


def enumerate_sizes(offers: Sequence[Offer], model: ModelSpec, workload: Workload) -> list[Size]:
    """Every size of every offer, with the seconds that a step takes where every device works at its peak rate."""
    flops = step_flops_per_token(model, workload)
    sizes: list[Size] = []
    for offer in offers:
        for num_nodes in offer.sizes:
            cluster = offer.of_size(num_nodes)
            rate = sum(
                group.num_devices * peak_flops_per_s(group.device, workload.precision) for group in cluster.groups
            )
            price = cluster.price_per_hour
            if price is None:
                raise ConfigError(f"offer {offer.name} has no price", help="state price_per_device_hour (USD)")
            peak_s = flops * workload.tokens_per_step / rate
            sizes.append(Size(len(sizes), offer.name, cluster, price, peak_s))
    return sizes


def bound_all(sizes: Sequence[Size], request: SizesRequest) -> None:
    """A bound on the fastest step of each size that the floor does not rule out at peak rates."""
    for size in sizes:
        if size.peak_s > request.slowest_s:
            size.outcome, size.reason = "too slow", "even at the peak rate of every device"
        elif request.deadline.left_s <= (1 - SHARE_OF_BOUNDS) * request.deadline.limit_s:
            size.reason = "the time limit came first"
        else:
            bound_size(size, request)


def bound_size(size: Size, request: SizesRequest) -> None:
    """The least of the bounds of all layouts of a size that may fit."""
    try:
        space = request.space_of(size)
        size.layouts = len(space)
        frontier = Frontier(Pool(request.model, request.workload, size.cluster, space))
    except ConfigError as error:
        size.outcome, size.reason = "no layout", (error.details or (error.message,))[0]
        return
    except SolverLimitError:
        size.reason = "the time limit came first"
        return
    while not frontier.is_ready and math.isfinite(frontier.bound_s):
        frontier.bound_block()
    bound_s = frontier.bound_s
    if _has_schedules(size, request):
        bound_s = min(bound_s, bound_of_schedules(size, request))
    if math.isinf(bound_s):
        size.outcome, size.reason = "does not fit", "in no layout"
        return
    size.bound_s = bound_s
    if size.bound_s > request.slowest_s:
        size.outcome, size.reason = "too slow", "by its bound"


def _has_schedules(size: Size, request: SizesRequest) -> bool:
    return request.offload is not None and not size.cluster.is_mixed


def search_size(size: Size, request: SizesRequest, limit_s: float) -> bool:
    """The fastest layout of a size that beats ``limit_s``; False, and why, where there is none."""
    is_found = _search_plain(size, request, limit_s)
    if not _has_schedules(size, request):
        return is_found

    return search_schedules(size, request, limit_s, plain_s=size.step_time_s if is_found else None)


def _search_plain(size: Size, request: SizesRequest, limit_s: float) -> bool:
    """The same among layouts without an offload schedule."""
    just_above = limit_s * (1 + 2 * REL_GAP)
    try:
        result = search(
            request.model,
            request.workload,
            size.cluster,
            request.space_of(size),
            time_limit_s=request.deadline.limit_s,
            worse_than_s=just_above,
            on_progress=request.on_progress,
            deadline=request.deadline,
        )
    except SolverLimitError:
        size.reason = "the time limit came first"
        return False
    size.bound_s = max(size.least_s, min(result.bound_s, just_above))
    size.is_stopped = result.stopped_early
    if result.fitting:
        size.step_time_s = result.fitting[0].estimate.step_time_s
        size.result = result
        return True
    if result.stopped_early:
        size.reason = "the time limit came first"
    elif math.isinf(result.bound_s):
        size.outcome, size.reason = "does not fit", "in no layout"
    else:
        size.outcome = "too slow" if limit_s == request.slowest_s else "dearer"
        size.reason = "no layout that fits is faster"
    return False


def bound_of_schedules(size: Size, request: SizesRequest) -> float:
    """Seconds that no schedule of a size beats: the work of its layouts, all of them at once."""
    assert request.offload is not None
    try:
        space = OffloadSpace(
            request.model,
            size.cluster,
            request.workload,
            request.fixed,
            request=request.offload,
            runnable=request.runnable,
            deadline=request.deadline,
        )
    except ConfigError:
        return math.inf
    except SolverLimitError:
        return 0.0
    return float(space.work_s().min(initial=math.inf))


def search_schedules(size: Size, request: SizesRequest, limit_s: float, *, plain_s: float | None) -> bool:
    """The fastest schedule of a size where it beats ``limit_s`` and what the size has without, which takes ``plain_s``."""
    bound_s, known_s = size.least_s, limit_s * (1 + 2 * REL_GAP) if plain_s is None else plain_s
    try:
        found = _search_schedules(size, request, known_s)
    except (ConfigError, InfeasibleError):
        return plain_s is not None
    except SolverLimitError:
        size.is_stopped = True
        return plain_s is not None
    if found is None:
        if plain_s is None and size.outcome == "does not fit":
            size.outcome = "too slow" if limit_s == request.slowest_s else "dearer"
            size.reason = "nothing fits without an offload schedule, and none is faster"
        return plain_s is not None
    size.bound_s = min(bound_s, found.certificate.bound_s)
    size.is_stopped |= found.certificate.status == "feasible"
    if found.estimate.step_time_s >= known_s * (1 - WORTH_MOVING):
        return plain_s is not None
    size.offloaded, size.step_time_s = found, found.estimate.step_time_s
    return True


def _search_schedules(size: Size, request: SizesRequest, worse_than_s: float) -> OffloadResult | None:
    assert request.offload is not None
    return search_offload(
        request.model,
        size.cluster,
        request.workload,
        request=request.offload,
        fixed=request.fixed,
        runnable=request.runnable,
        deadline=request.deadline,
        worse_than_s=worse_than_s,
    )


def mark_front(sizes: Sequence[Size], request: SizesRequest) -> None:
    """Search every size that may be neither slower nor dearer than each other one, and mark those that are not."""
    for size in sorted(sizes, key=lambda size: (size.least_s, size.place)):
        may_be = size.bound_s is not None and size.outcome in ("not examined", "dearer") and size.step_time_s is None
        if may_be and not any(_beats(other, size.least_s, size.usd(size.least_s)) for other in sizes):
            search_size(size, request, request.slowest_s)
            size.result = None
    for size in sizes:
        reaches = size.step_time_s is not None and size.step_time_s <= request.slowest_s
        if reaches and not any(_beats(other, size.step_time_s, size.usd(size.step_time_s or 0.0)) for other in sizes):
            size.outcome, size.reason = "on the front", ""
        elif reaches:
            size.outcome, size.reason = "dearer", "and slower than another"


def _beats(other: Size, step_time_s: float | None, usd: float) -> bool:
    """Whether a size that was searched is at least as fast and as cheap, and better in one of the two."""
    if other.step_time_s is None or step_time_s is None:
        return False
    time_s, price = other.step_time_s, other.usd(other.step_time_s)
    return time_s <= step_time_s and price <= usd and (time_s < step_time_s or price < usd)


def summarise_cost(
    found: Plan, best: Size, sizes: Sequence[Size], *, floor: float, tokens: float | None
) -> CostSummary:
    """The certificate: the price of the plan, and the least that any size that reaches the floor may cost."""
    per_step, tokens_per_step = best.usd(found.estimate.step_time_s), found.workload.tokens_per_step
    reach = [size for size in sizes if size.outcome in ("chosen", "on the front", "dearer", "not examined")]
    bound = min([per_step, *(size.usd(size.least_s) for size in reach)])
    hours = None if tokens is None else tokens / tokens_per_step * found.estimate.step_time_s / HOUR_S
    is_whole = not any(size.is_stopped or size.outcome == "not examined" for size in sizes)
    return CostSummary(
        offer=best.offer,
        num_nodes=best.cluster.num_nodes,
        price_per_hour=best.price_per_hour,
        usd_per_step=per_step,
        usd_per_million_tokens=1e6 * per_step / tokens_per_step,
        usd_per_billion_tokens=1e9 * per_step / tokens_per_step,
        min_tokens_per_s=floor,
        tokens=tokens,
        hours=hours,
        total=None if hours is None else hours * best.price_per_hour,
        status="optimal" if is_whole else "feasible",
        bound_usd_per_million_tokens=1e6 * bound / tokens_per_step,
        gap=(per_step - bound) / per_step,
        search_s=0.0,
        sizes=tuple(_size_tried(size, tokens_per_step) for size in sizes),
    )


def _size_tried(size: Size, tokens_per_step: int) -> SizeTried:
    """What became of a size, for the plan."""
    known_s = size.step_time_s or size.bound_s
    return SizeTried(
        offer=size.offer,
        num_nodes=size.cluster.num_nodes,
        num_devices=size.cluster.num_devices,
        price_per_hour=size.price_per_hour,
        outcome=size.outcome,
        reason=size.reason,
        layouts=size.layouts,
        bound_s=size.bound_s,
        step_time_s=size.step_time_s,
        usd_per_million_tokens=known_s and 1e6 * size.usd(known_s) / tokens_per_step,
        is_bound=size.step_time_s is None and size.bound_s is not None,
        host_bytes=0 if size.offloaded is None else size.offloaded.schedule.host_bytes,
    )


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
    front: bool = False,
    fixed: Mapping[str, Any] | None = None,
    runnable: bool | None = None,
    time_limit_s: float = 60.0,
    top: int = 4,
    on_progress: OnProgress | None = None,
    deadline: Deadline | None = None,
    offload: OffloadRequest | None = None,
) -> Plan:
    """The plan of the cheapest size that reaches the floor, with `Plan.cost` as its certificate.

    Args:
        model, workload: what to train and how; the batch is the same on every size.
        offers: what can be rented.
        min_tokens_per_s: floor (C1).
        tokens: length of the run; with a deadline, it raises the floor to tokens / deadline.
        deadline_s: seconds within which the run must end.
        front: also find every size that no other one beats in both time and money.
        fixed, runnable, time_limit_s, top, on_progress, deadline, offload: as for `planner.plan`; time is limited for all sizes
            together, and sizes with nodes of several kinds have no offload schedules.

    Raises:
        ConfigError: no size has any layout, or a deadline without tokens.
        InfeasibleError: no size fits, or none reaches the floor; names the best that was found.
        SolverLimitError: the time limit came before any size was searched.
    """
    started = time.perf_counter()
    if deadline_s is not None and tokens is None:
        raise ConfigError("a deadline needs the number of tokens to train", help="add --tokens, e.g. --tokens 1e12")
    floor = max(min_tokens_per_s, tokens / deadline_s if tokens and deadline_s else 0.0)
    kept, offload = split_offload_request(check_fields(fixed or {}), offload)
    if offload is not None:
        require_schedulable(workload, kept)
    request = SizesRequest(
        model=model,
        workload=workload,
        fixed=kept,
        runnable=is_runnable(model, workload, runnable),
        slowest_s=workload.tokens_per_step / floor * (1 + FLOOR_ROUNDING) if floor > 0 else math.inf,
        top=top,
        deadline=deadline or Deadline(time_limit_s),
        on_progress=on_progress,
        offload=offload,
    )
    sizes = enumerate_sizes(offers, model, workload)
    bound_all(sizes, request)
    best = _cheapest_size(sizes, request)
    if best is None:
        raise _none_reaches(sizes, request, floor)
    if front:
        mark_front(sizes, request)
    best.outcome, best.reason = "chosen", ""
    found = _plan_of_size(best, sizes, request)
    summary = summarise_cost(found, best, sizes, floor=floor, tokens=tokens)
    return found.replace(cost=summary.replace(search_s=time.perf_counter() - started))


def _plan_of_size(best: Size, sizes: Sequence[Size], request: SizesRequest) -> Plan:
    """The plan of the size that was chosen, with its runner-ups."""
    result, top = best.result, request.top
    if result is not None:
        result.add_runner_ups(top, request.deadline)
    if best.offloaded is not None and request.offload is not None:
        return plan_of_offload(
            best.offloaded,
            request.model,
            best.cluster,
            request.workload,
            request.fixed,
            request=request.offload,
            runnable=request.runnable,
            top=top,
            beside=result,
        )
    assert result is not None
    if "schedule" not in request.fixed:
        result = add_synthesised_orders(result, request.deadline)
    slowest_s = min(request.slowest_s, _next_dearer_s(best, sizes))
    return plan_of(result, request.fixed, runnable=request.runnable, top=top, slowest_s=slowest_s)


def _cheapest_size(sizes: Iterable[Size], request: SizesRequest) -> Size | None:
    """(O) over the sizes that were bounded, best first, each searched for what fits (C2); None where none reaches the floor."""
    best: Size | None = None
    least_usd = math.inf
    for size in sorted(_unanswered(sizes), key=lambda size: (size.usd(size.least_s), size.place)):
        if size.usd(size.least_s) >= least_usd * (1 - REL_GAP):
            size.outcome, size.reason = "dearer", "by its bound"
            continue
        limit_s = min(request.slowest_s, least_usd / size.usd(1.0))
        if not search_size(size, request, limit_s) or size.step_time_s is None:
            continue
        is_better = size.step_time_s <= request.slowest_s and size.usd(size.step_time_s) < least_usd
        loser = best if is_better else size
        if loser is not None:
            is_slow = (loser.step_time_s or 0.0) > request.slowest_s
            loser.outcome, loser.reason, loser.result = "too slow" if is_slow else "dearer", "", None
        if is_better:
            best, least_usd = size, size.usd(size.step_time_s)
            best.outcome = "chosen"
    return best


def _unanswered(sizes: Iterable[Size]) -> list[Size]:
    """Sizes that have a bound and no answer yet."""
    return [size for size in sizes if size.bound_s is not None and size.outcome == "not examined"]


def _next_dearer_s(best: Size, sizes: Iterable[Size]) -> float:
    """Step time beyond which the cheapest size is dearer than the next one: no simpler layout is worth that."""
    others = (size for size in sizes if size is not best and size.outcome in ("dearer", "on the front"))
    return min((s.usd(s.step_time_s) for s in others if s.step_time_s), default=math.inf) / best.usd(1.0)


def _none_reaches(sizes: Sequence[Size], request: SizesRequest, floor: float) -> Exception:
    """Why no size is left: a time limit, memory, or the floor with the fastest that was found."""
    if any(size.outcome == "not examined" for size in sizes):
        return SolverLimitError(
            "the time limit came before any size that fits and reaches the floor", help="raise --time-limit-s"
        )
    fastest = _fastest_size(sizes, request)
    if fastest is None or fastest.step_time_s is None:
        largest = max(sizes, key=lambda size: size.cluster.num_devices * size.cluster.memory_budget_bytes)
        try:
            plan(
                request.model,
                largest.cluster,
                request.workload,
                fixed=request.fixed,
                runnable=request.runnable,
                offload=request.offload,
            )
        except (ConfigError, InfeasibleError, SolverLimitError) as error:
            return error
        raise AssertionError("a size fits that no search found")
    rate = request.workload.tokens_per_step / fastest.step_time_s
    devices = f"{fastest.cluster.num_nodes} nodes of {fastest.offer} ({fastest.cluster.num_devices} devices)"
    return InfeasibleError(
        f"no size of the offers reaches {floor:,.0f} tokens/s with {request.model.name}",
        details=(f"the fastest is {devices}: {rate:,.0f} tokens/s, {100 * rate / floor:.1f} % of it   [floor (C1)]",),
        help=f"ask for {math.floor(rate):,} tokens/s or less (a deadline {floor / rate:.3g} times as long), or offer more nodes",
    )


def _fastest_size(sizes: Iterable[Size], request: SizesRequest) -> Size | None:
    """The size with the fastest step, whatever it costs; None where nothing fits."""
    best: Size | None = None
    least_s = math.inf
    unlimited = replace(request, slowest_s=math.inf)
    for size in sorted((s for s in sizes if s.outcome == "too slow"), key=lambda s: (s.least_s, s.place)):
        if size.bound_s is None:
            bound_size(size, unlimited)
        if size.bound_s is None or size.bound_s >= least_s or not search_size(size, unlimited, least_s):
            continue
        if size.step_time_s is not None and size.step_time_s < least_s:
            best, least_s = size, size.step_time_s
    return best
