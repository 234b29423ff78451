"""What became of every size: the front of time and money, and the certificate of the cheapest (planner/cheapest.py)."""

from __future__ import annotations

from collections.abc import Sequence

from ..schema import CostSummary, Plan, SizeTried
from .sizes import HOUR_S, Size, SizesRequest, search_size


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


def summary_of(found: Plan, best: Size, sizes: Sequence[Size], *, floor: float, tokens: float | None) -> CostSummary:
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
        sizes=tuple(_tried(size, tokens_per_step) for size in sizes),
    )


def _tried(size: Size, tokens_per_step: int) -> SizeTried:
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
