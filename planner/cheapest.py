"""The cheapest of many sizes: which offer, and how many nodes of it, trains a model for the least money.

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
from dataclasses import replace
from typing import Any

from ..schema import ConfigError, InfeasibleError, ModelSpec, Offer, Plan, SolverLimitError, Workload
from ..schema.layout import check_fields
from .deadline import Deadline
from .finalists import with_orders
from .offload_request import OffloadRequest, asked_for, require_schedulable
from .planning import plan, plan_of, plan_of_offload
from .request import is_runnable
from .search import REL_GAP, OnProgress
from .size_front import mark_front, summary_of
from .sizes import Size, SizesRequest, bound_all, bound_size, search_size, sizes_of

ROUNDING = 1e-9
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
    kept, offload = asked_for(check_fields(fixed or {}), offload)
    if offload is not None:
        require_schedulable(workload, kept)
    request = SizesRequest(
        model=model,
        workload=workload,
        fixed=kept,
        runnable=is_runnable(model, workload, runnable),
        slowest_s=workload.tokens_per_step / floor * (1 + ROUNDING) if floor > 0 else math.inf,
        top=top,
        deadline=deadline or Deadline(time_limit_s),
        on_progress=on_progress,
        offload=offload,
    )
    sizes = sizes_of(offers, model, workload)
    bound_all(sizes, request)
    best = _cheapest_size(sizes, request)
    if best is None:
        raise _none_reaches(sizes, request, floor)
    if front:
        mark_front(sizes, request)
    best.outcome, best.reason = "chosen", ""
    found = _plan_of_size(best, sizes, request)
    summary = summary_of(found, best, sizes, floor=floor, tokens=tokens)
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
        result = with_orders(result, request.deadline)
    slowest_s = min(request.slowest_s, _next_s(best, sizes))
    return plan_of(result, request.fixed, runnable=request.runnable, top=top, slowest_s=slowest_s)


def _cheapest_size(sizes: Iterable[Size], request: SizesRequest) -> Size | None:
    """(O) over the sizes that were bounded, best first, each searched for what fits (C2); None where none reaches the floor."""
    best: Size | None = None
    least_usd = math.inf
    for size in sorted(_open(sizes), key=lambda size: (size.usd(size.least_s), size.place)):
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


def _open(sizes: Iterable[Size]) -> list[Size]:
    """Sizes that have a bound and no answer yet."""
    return [size for size in sizes if size.bound_s is not None and size.outcome == "not examined"]


def _next_s(best: Size, sizes: Iterable[Size]) -> float:
    """Step time beyond which the cheapest size is dearer than the next one: no simpler layout is worth that."""
    others = (size for size in sizes if size is not best and size.outcome in ("dearer", "on the front"))
    return min((s.usd(s.step_time_s) for s in others if s.step_time_s), default=math.inf) / best.usd(1.0)


def _none_reaches(sizes: Sequence[Size], request: SizesRequest, floor: float) -> Exception:
    """Why no size is left: a time limit, memory, or the floor with the fastest that was found."""
    if any(size.outcome == "not examined" for size in sizes):
        return SolverLimitError(
            "the time limit came before any size that fits and reaches the floor", help="raise --time-limit-s"
        )
    fastest = _fastest(sizes, request)
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


def _fastest(sizes: Iterable[Size], request: SizesRequest) -> Size | None:
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
