"""Pool: the layouts of a space whose turn may have come; groups of degrees wait outside, each under one bound for all its layouts.

A group's bound takes the least of every recompute option and no more than what holds under any order of passes,

    T >= m max(slowest stage, work / pp)

so no layout of the group is faster. Groups come in with increasing bounds; those whose bound is never reached are never made.
Of a mixed cluster, and where a batch is given, all layouts are in the pool from the start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np

from ..cost_models.layouts import MIXED, IntArray, LayoutBatch
from ..cost_models.mixed_step import quick_time_bounds
from ..cost_models.space_costs import SpaceCosts
from ..schema import ClusterSpec, ModelSpec, Workload
from ..schema.layout import SCHEDULES
from .rank_map import best_case
from .space import Space

MIN_GROWTH = 1 << 14
"""Layouts that come in together at least."""

GROWTH_FRACTION = 0.5
"""The same as a part of those that are in: what is copied then stays proportional to what is in."""

ANY_ORDER = SCHEDULES.index("synthesised")
"""The schedule whose bound holds under any order of passes."""


class Pool:
    """Layouts with their ``costs``, what their bounds are worked out from (``bounding``) and their ``places`` in the space [N].

    ``bound_s`` is what no layout outside is faster than, infinite once all are in.
    """

    def __init__(
        self,
        model: ModelSpec,
        workload: Workload,
        cluster: ClusterSpec,
        space: Space,
        *,
        checkpoint: Callable[[], None] = lambda: None,
    ) -> None:
        """Bound the groups and take in the most promising ones, or every layout where there are no groups."""

        def costed(batch: LayoutBatch) -> tuple[SpaceCosts, SpaceCosts]:
            costs = SpaceCosts.of(model, workload, cluster, batch, checkpoint=checkpoint)
            return costs, bounding_costs(costs)

        self._space = space
        self.bound_s = np.inf
        if space.groups is None or cluster.parts:
            self.costs, self.bounding = costed(space.batch)
            self.places: IntArray = np.arange(len(self.costs.batch))
            return
        recomputes = np.unique(space.groups.options["recompute"])
        recompute = int(recomputes[0]) if len(recomputes) == 1 else MIXED
        self._of_groups = costed(space.groups.relaxed(schedule=ANY_ORDER, recompute=recompute))
        bound_s = quick_time_bounds(self._of_groups[1])
        self._order = np.argsort(bound_s, kind="stable")
        self._waiting_s = bound_s[self._order]
        self._next = 0
        self.costs, self.bounding = (costs.select(np.zeros(0, dtype=np.int64)) for costs in self._of_groups)
        self.places = np.zeros(0, dtype=np.int64)
        self.grow()

    def __len__(self) -> int:
        return len(self.places)

    def grow(self) -> None:
        """Take in the next groups."""
        groups = self._space.groups
        assert groups is not None
        wanted = max(MIN_GROWTH, int(GROWTH_FRACTION * len(self)))
        sizes = np.cumsum(groups.count[self._order[self._next :]])
        some = self._order[self._next : self._next + int(np.searchsorted(sizes, wanted)) + 1]
        self._next += len(some)
        self.bound_s = float(self._waiting_s[self._next]) if self._next < len(self._order) else np.inf
        batch, of_group, places = groups.members(some)
        kept = np.flatnonzero(self._space.keeps(places))
        batch, of_group = batch.select(kept), of_group[kept]
        self.places = np.concatenate([self.places, places[kept]])
        same = self.costs is self.bounding
        self.costs = _joined(self.costs, self._of_groups[0], batch, of_group)
        self.bounding = self.costs if same else _joined(self.bounding, self._of_groups[1], batch, of_group)


def bounding_costs(costs: SpaceCosts) -> SpaceCosts:
    """What bounds are worked out from: the costs, or where links were measured those of the best placement there may be."""
    if costs.cluster.bandwidth_matrix is None:
        return costs
    fastest = best_case(costs.cluster, tied=costs.model.tie_embeddings)
    return SpaceCosts.of(costs.model, costs.workload, fastest, costs.batch)


def _joined(costs: SpaceCosts, of_groups: SpaceCosts, batch: LayoutBatch, of_group: IntArray) -> SpaceCosts:
    """The costs with further layouts, whose layers cost what those of their group do under their own recompute."""
    like = of_groups.like[of_group]
    if of_groups.batch.is_mixed:
        like = like + (batch.recompute - MIXED) * of_groups.cases_by_option
    columns = {
        f.name: np.concatenate([getattr(costs.batch, f.name), getattr(batch, f.name)]) for f in fields(LayoutBatch)
    }
    return replace(costs, batch=LayoutBatch(**columns), like=np.concatenate([costs.like, like]))
