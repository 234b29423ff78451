"""What a step is worth on a cluster (objectives), and what is known of one size of an offer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..cost_models.stage.step import min_energy_j, step_energy_j
from ..schema import ClusterSpec, ConfigError, TrainingEstimate
from ..schema.offers import Outcome
from .request import PlanRequest
from .search import SearchResult
from .tasks.offload import OffloadResult

HOUR_S = 3600.0


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
    """One number of nodes of one offer, and what is known of it; ``idx`` counts sizes in the order of the offers.

    Attributes:
        request: what is asked on this size; ``slowest_s`` is its longest step that reaches the floor.
        peak_s: seconds of a step where every device works at its peak rate.
        bound_s: no step is faster; None until it is worked out.
        estimate: of the fastest layout or schedule.
        result, offloaded: answers of searches without and with an offload schedule.
    """

    idx: int
    offer: str
    request: PlanRequest
    slowest_s: float
    peak_s: float
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
        return self.peak_s if self.bound_s is None else self.bound_s

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
        return objective.value(self.estimate, self.request.cluster)

    def bound(self, objective: Objective) -> float:
        """Return what no step of this size is below, as far as is known."""
        return objective.bound(self.min_s, self.peak_s, self.request.cluster)

    def longest_s(self, objective: Objective, value: float) -> float:
        """Return the seconds from which on a step cannot be worth less than ``value``."""
        fixed, with_a_second = (objective.bound(step_s, self.peak_s, self.request.cluster) for step_s in (0.0, 1.0))
        return (value - fixed) / (with_a_second - fixed)

    def usd(self, step_time_s: float) -> float | None:
        """Return the USD of a step of so many seconds; None where the devices have no price."""
        price = self.request.cluster.price_per_hour
        return None if price is None else price / HOUR_S * step_time_s

    def close(self, outcome: Outcome, reason: str = "") -> None:
        """Say what became of it."""
        self.outcome, self.reason = outcome, reason
