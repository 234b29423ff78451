"""What a step is worth on a cluster (objectives), and what is known of one size of an offer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..cost_models.goodput import RESTART_S, SAVE_S, best_interval_s, restart_goodput
from ..cost_models.stage.step import min_energy_j, step_energy_j
from ..schema import ClusterSpec, ConfigError, SolverLimitError, TrainingEstimate
from ..schema.offers import DAY_S, Outcome
from ..schema.units import FloatArray
from .request import PlanRequest
from .search import SearchResult
from .space import Frontier, Pool, build_space
from .tasks.offload import OffloadResult, OffloadSpace

HOUR_S = 3600.0

MIN_GOODPUT = 1e-9
"""Of a job that is interrupted faster than it restarts."""


TIME_OVER = "the time limit came first"


@dataclass(frozen=True)
class Objective:
    """What a step is worth on a cluster, the less the better.

    Attributes:
        value: of an estimated step.
        bound: what no step of so many seconds or more is below, where the second number is what devices at their peak rates take;
            linear in the first.
    """

    value: Callable[[TrainingEstimate, ClusterSpec], float]
    bound: Callable[[float, float, ClusterSpec], float]


def per_second(rate: Callable[[ClusterSpec], float]) -> Objective:
    """Return the objective of what is paid for as long as a step takes."""
    return Objective(
        lambda estimate, cluster: rate(cluster) * estimate.step_time_s,
        lambda step_s, peak_s, cluster: rate(cluster) * step_s,
    )


OBJECTIVES: dict[str, Objective] = {
    "throughput": per_second(lambda cluster: 1.0),
    "cost": per_second(lambda cluster: price_per_hour(cluster) / HOUR_S),
    "energy": Objective(step_energy_j, min_energy_j),
}
"""Seconds, USD, joules. A new objective is one entry."""


def price_per_hour(cluster: ClusterSpec) -> float:
    """Return the USD that a cluster costs in an hour.

    Raises:
        ConfigError: it has no price.
    """
    if cluster.price_per_hour is None:
        lacking = sorted({group.device.name for group in cluster.groups if group.device.price_per_hour is None})
        raise ConfigError(
            f"offer {cluster.name}: {', '.join(lacking)} has no price in the catalogue",
            help="state price_per_device_hour (USD) in the offers file (--offers)",
        )
    return cluster.price_per_hour


@dataclass
class Size:
    """One number of nodes of one offer, or of several, and what is known of it; ``idx`` counts sizes in the order of the offers.

    Attributes:
        request: what is asked on this size; ``slowest_s`` is its longest step that reaches the floor.
        peak_s, fair_s: seconds of a step where every device works at its peak rate, and at that of its best micro-batch.
        goodput: part of the time in which it makes progress that stays.
        min_gain: part of the objective that it must save to be looked at further.
        bound_s: no step is faster; None until it is worked out.
        estimate: of the fastest layout or schedule.
        result, offloaded: answers of searches without and with an offload schedule.
    """

    idx: int
    offer: str
    request: PlanRequest
    slowest_s: float
    peak_s: float
    fair_s: float = 0.0
    goodput: float = 1.0
    min_gain: float = 0.0
    outcome: Outcome = "not examined"
    reason: str = ""
    layouts: int = 0
    bound_s: float | None = None
    estimate: TrainingEstimate | None = None
    is_stopped: bool = False
    result: SearchResult | None = field(default=None, repr=False)
    offloaded: OffloadResult | None = field(default=None, repr=False)

    @property
    def step_time_s(self) -> float | None:
        """Seconds of its fastest step; None where none was searched, or none fits."""
        return None if self.estimate is None else self.estimate.step_time_s

    @property
    def min_s(self) -> float:
        """Seconds that no step of this size beats, as far as is known."""
        return max(self.peak_s, self.fair_s) if self.bound_s is None else self.bound_s

    @property
    def nodes(self) -> int:
        """Nodes of all kinds."""
        return self.request.cluster.num_nodes

    @property
    def has_schedules(self) -> bool:
        """Offload schedules are searched too."""
        return self.request.offload is not None and not self.request.cluster.is_mixed

    @property
    def reaches_floor(self) -> bool:
        """A layout was found that is fast enough."""
        return self.step_time_s is not None and self.step_time_s <= self.slowest_s

    def value(self, objective: Objective) -> float:
        """Return the objective of the fastest step that was found."""
        assert self.estimate is not None
        return objective.value(self.estimate, self.request.cluster) / self.goodput

    def bound(self, objective: Objective) -> float:
        """Return what no step of this size is below, as far as is known."""
        return objective.bound(self.min_s, self.peak_s, self.request.cluster) / self.goodput

    def longest_s(self, objective: Objective, value: float) -> float:
        """Return the seconds from which on a step cannot be worth less than ``value``."""
        fixed, with_a_second = (objective.bound(step_s, self.peak_s, self.request.cluster) for step_s in (0.0, 1.0))
        return (value * self.goodput - fixed) / (with_a_second - fixed)

    def usd(self, step_time_s: float) -> float | None:
        """Return the USD of a step of so many seconds that stays; None where the devices have no price."""
        price = self.request.cluster.price_per_hour
        return None if price is None else price / HOUR_S * step_time_s / self.goodput

    def close(self, outcome: Outcome, reason: str = "") -> None:
        """Say what became of it."""
        self.outcome, self.reason = outcome, reason


def goodput(losses_per_day: FloatArray) -> FloatArray:
    """Return the part of the time in which jobs that lose so many nodes a day make progress that stays: they restart from
    checkpoints, which are as often as that is best for (cost_models/goodput.py).
    """
    parts = np.ones(len(losses_per_day))
    for losses in np.unique(losses_per_day[losses_per_day > 0]):
        mtbf_s = DAY_S / float(losses)
        interval_s = best_interval_s(mtbf_s=mtbf_s, save_s=SAVE_S)
        part = restart_goodput(interval_s, mtbf_s=mtbf_s, save_s=SAVE_S, restart_s=RESTART_S)
        parts[losses_per_day == losses] = max(part, MIN_GOODPUT)
    return parts


def bound_size(size: Size) -> None:
    """Take the lowest of the bounds of all layouts of a size that may fit, with and without an offload schedule."""
    request = size.request
    try:
        space = build_space(request)
        size.layouts = len(space)
        frontier = Frontier(Pool(request, space))
        while not frontier.is_ready and math.isfinite(frontier.bound_s):
            frontier.bound_block()
        bound_s = min(frontier.bound_s, _bound_of_schedules(size) if size.has_schedules else math.inf)
    except ConfigError as error:
        size.close("no layout", (error.details or (error.message,))[0])
        return
    except SolverLimitError:
        size.reason = TIME_OVER
        return
    if math.isinf(bound_s):
        size.close("does not fit", "in no layout")
        return
    size.bound_s = bound_s
    if bound_s > size.slowest_s:
        size.close("too slow", "by its bound")


def _bound_of_schedules(size: Size) -> float:
    """Return seconds that no schedule of a size beats: the work of its layouts, all of them at once."""
    try:
        space = OffloadSpace(size.request)
    except ConfigError:
        return math.inf
    except SolverLimitError:
        return 0.0
    return float(space.work_s().min(initial=math.inf))
