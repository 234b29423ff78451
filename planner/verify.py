"""Whether some layout of a request fits, and how fast it is at most, without searching all of its space.

Of the bounded layouts those with the least memory are expanded, and of those with room to spare the fastest by their bounds: a
layout that is found fits for certain, one that is not found may still exist.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..cost_models import memory
from ..cost_models.bounds import memory_bounds, time_bounds
from ..cost_models.layouts import LayoutBatch
from ..cost_models.mixed_step import budget_bytes
from ..cost_models.space_costs import SpaceCosts
from ..schema import ConfigError, Estimate, Layout
from .deadline import Deadline
from .expansion import Candidate, expand, expand_fitting
from .request import Request

TRIES = 6
"""Layouts expanded for each of the two orders."""

ROOM = 0.9
"""Bounds take stages as balanced; layouts below this part of the budget mostly fit with real ones."""

LEAN: dict[str, Any] = {"micro_batch_size": 1, "recompute": "full", "num_model_chunks": 1, "etp": 1}
"""What a layout with the least memory mostly has; where these are fixed, a space is some hundred times smaller."""


def estimate_of(request: Request, layout: Layout) -> Estimate:
    """What one layout of a request costs, whether it fits or not."""
    batch = LayoutBatch.of([layout], request.workload.global_batch_size)
    return expand(SpaceCosts.of(request.model, request.workload, request.cluster, batch), 0).estimate


@dataclass(frozen=True)
class Fit:
    """A layout that fits."""

    layout: Layout
    estimate: Estimate


def find_fit(request: Request, deadline: Deadline, *, lean: bool = False, first: bool = False) -> Fit | None:
    """A layout that fits, or None where none of those tried does.

    Args:
        lean: only among layouts that are `LEAN` in what is not fixed.
        first: the first that is found instead of the fastest of those tried.

    Raises:
        SolverLimitError: the deadline came first.
    """
    if lean:
        request = replace(request, fixed={**LEAN, **request.fixed})
    try:
        space = request.space(deadline)
    except ConfigError:
        return None

    def checkpoint() -> None:
        deadline.require("verifying a change")

    costs = SpaceCosts.of(request.model, request.workload, request.cluster, space.batch, checkpoint=checkpoint)
    least = memory.least_required_bytes(memory_bounds(costs), request.workload, request.cluster)
    budget = budget_bytes(costs)
    smallest = np.argsort(least, kind="stable")[:TRIES]
    roomy = np.flatnonzero(least <= ROOM * budget)
    fastest = roomy[np.argsort(time_bounds(costs.select(roomy)), kind="stable")[:TRIES]]
    rows = np.array(list(dict.fromkeys([*smallest[(least <= budget)[smallest]], *fastest])), dtype=np.int64)
    if not len(rows):
        return None
    some, found = costs.select(rows).compacted(), list[Candidate]()
    for idx in range(len(rows)):
        checkpoint()
        if (candidate := expand_fitting(some, idx)) is not None:
            found.append(candidate)
            if first:
                break
    if not found:
        return None
    best = min(found, key=lambda c: (c.estimate.step_time_s, rows[c.idx]))
    return Fit(best.layout(some.batch), best.estimate)
