"""What a little more of each resource between regions is worth to a plan whose islands train by themselves.

Each change keeps the ring, the numbers on the wire and the layout, and is costed by (O) of solvers/islands.py; a region is left out
by planning the others anew.
"""

from __future__ import annotations

from dataclasses import replace

from ...schema import ConfigError, InfeasibleError, SolverLimitError, TrainingPlan
from ...schema.base import Frozen
from ...schema.units import counted
from ...solvers.islands import Exchange, step_s
from ..islands import exchange_instance
from ..plan import plan_as_requested
from ..regions import IslandProblem
from ..request import Deadline, PlanRequest

_GBIT = 1e9 / 8


class RegionValue(Frozen):
    """A change and what a step then takes; ``note``: why it cannot be, where it cannot."""

    change: str
    step_time_s: float | None = None
    note: str = ""


def region_values(plan: TrainingPlan, deadline: Deadline) -> tuple[RegionValue, ...]:
    """Return what 1 Gbit/s between each two regions of the ring, a step more between sums, and each region are worth."""
    updates = plan.local_updates
    assert updates is not None
    request = PlanRequest.from_plan(plan, deadline)
    exchange = Exchange(updates.ring, updates.steps, updates.fragments, updates.bits, updates.delay_steps)
    steps_s = [island.step_s for island in updates.islands]
    instance = exchange_instance(request, updates.limits, range(len(steps_s)), steps_s, updates.node_pairs)
    later = replace(exchange, steps=exchange.steps + exchange.fragments)
    values = [
        RegionValue(
            change=f"{counted(exchange.fragments, 'step')} more between sums", step_time_s=step_s(instance, later)
        ),
        RegionValue(change="no sums, so that each region trains a model of its own", step_time_s=max(steps_s)),
    ]
    zones = [island.region for island in updates.islands]
    edges = list(zip(updates.ring, (*updates.ring[1:], updates.ring[0]), strict=True))
    seconds = instance.edge_s(exchange.fragments, exchange.bits)
    slowest = max(edges, key=lambda edge: seconds[edge])
    for name, widened in (
        (f"{zones[slowest[0]]} to {zones[slowest[1]]}", [slowest]),
        ("every link of the ring", edges),
    ):
        rate = instance.rate.copy()
        for edge in widened:
            rate[edge] += updates.node_pairs * _GBIT
        values.append(
            RegionValue(
                change=f"1 Gbit/s more for a pair of nodes, {name}",
                step_time_s=step_s(replace(instance, rate=rate), exchange),
            )
        )
    return (*values, *(_without(request, zones, idx) for idx in range(len(zones)) if not deadline.is_over))


def _without(request: PlanRequest, zones: list[str], idx: int) -> RegionValue:
    change = f"without {zones[idx]}"
    assert request.local_updates is not None
    try:
        problem = IslandProblem(request, request.local_updates, plan_as_requested)
        joined = problem.joined(tuple(i for i in range(len(zones)) if i != idx))
    except (ConfigError, InfeasibleError, SolverLimitError) as error:
        return RegionValue(change=change, note=error.message)
    if joined is None:
        return RegionValue(change=change, note="no layout fits")
    return RegionValue(change=change, step_time_s=joined.step_s)
