"""Sizes of a cluster that can be rented: what is known of each, its bound and its search (cheapest.py chooses among them)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..cost_models.coefficients import peak_flops_per_s
from ..cost_models.step import step_flops_per_token
from ..schema import ClusterSpec, ConfigError, ModelSpec, Offer, SolverLimitError, Workload
from ..schema.cost_summary import Outcome
from .deadline import Deadline
from .frontier import Frontier
from .offload_request import OffloadRequest
from .pool import Pool
from .search import REL_GAP, OnProgress, SearchResult, search
from .space import Space, build_space

if TYPE_CHECKING:
    from .offload import Offloaded

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
    offloaded: Offloaded | None = field(default=None, repr=False)

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


def sizes_of(offers: Sequence[Offer], model: ModelSpec, workload: Workload) -> list[Size]:
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
        from .offload_sizes import bound_of_schedules  # its solver is not needed without

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
    from .offload_sizes import search_schedules  # its solver is not needed without

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
