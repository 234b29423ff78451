"""Objectives: what a step of so many seconds is worth on a cluster, the lower the better.

An objective only grows with the seconds of a step, so a lower bound on seconds is one on the objective, and one search serves all
of them (solvers/branch_and_bound.py). A new objective is one entry here and a choice of ``--objective``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from ..schema import ClusterSpec, ConfigError

HOUR_S = 3600.0

Item = TypeVar("Item")


@dataclass(frozen=True)
class Objective:
    """Something to minimise: ``value`` of (seconds of a step, cluster), in ``unit``."""

    name: str
    unit: str
    value: Callable[[float, ClusterSpec], float]

    def step_time_s(self, value: float, cluster: ClusterSpec) -> float:
        """Return the seconds of a step that have this value; objectives are proportional to them."""
        return value / self.value(1.0, cluster)


def price_per_hour(cluster: ClusterSpec) -> float:
    """Return the USD that a cluster costs in an hour.

    Raises:
        ConfigError: it has no price.
    """
    if cluster.price_per_hour is None:
        raise ConfigError(f"offer {cluster.name} has no price", help="state price_per_device_hour (USD)")
    return cluster.price_per_hour


STEP_TIME = Objective("step time", "s", lambda step_s, cluster: step_s)
MONEY = Objective("money", "USD", lambda step_s, cluster: price_per_hour(cluster) / HOUR_S * step_s)


def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Compare the values of two answers under two objectives: no worse in both, and better in one."""
    return one[0] <= other[0] and one[1] <= other[1] and one != other


def pareto_front(items: Iterable[Item], values: Callable[[Item], tuple[float, float]]) -> list[Item]:
    """Return the items that no other one beats, in their order."""
    listed = [(item, values(item)) for item in items]
    return [item for item, value in listed if not any(beats(other, value) for _, other in listed)]
