"""Combinations of degrees, each with the layouts that differ in sharding, schedule and recompute alone.

Most layouts of a large space differ in what no degree depends on: how states are sharded over the same ranks, in which order passes
run, what is recomputed. Such a group has one bound (planner/pool.py), and its layouts are made only where that is below the
incumbent. A layout's place in the space is its group's and its own within the group, whether it was made or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..cost_models.layouts import IntArray, LayoutBatch

Columns = dict[str, IntArray]


@dataclass(frozen=True)
class DegreeGroups:
    """Groups [G] of layouts: ``options`` [O] at ``first`` .. ``first + count - 1`` are those of a group.

    Attributes:
        degrees: columns [G] that all layouts of a group share.
        options: columns [O] of the others; groups with the same degrees but those of experts and exchanges share them.
        first, count: which options each group has [G], at least one.
        constants: columns of a batch that are the same in the whole space.
    """

    degrees: Columns
    options: Columns
    first: IntArray
    count: IntArray
    constants: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.first)

    @cached_property
    def start(self) -> IntArray:
        """Place in the space of the first layout of each group [G]."""
        return np.asarray(np.cumsum(self.count) - self.count)

    @property
    def num_layouts(self) -> int:
        """Layouts of all groups."""
        return int(self.count.sum())

    def members(self, groups: IntArray) -> tuple[LayoutBatch, IntArray, IntArray]:
        """All layouts of some groups, the group of each and its place in the space [M]."""
        count = self.count[groups]
        of_group = np.repeat(groups, count)
        within = np.arange(len(of_group)) - np.repeat(np.cumsum(count) - count, count)
        at = self.first[of_group] + within
        columns = {name: column[of_group] for name, column in self.degrees.items()}
        columns |= {name: column[at] for name, column in self.options.items()}
        return self._batch(columns), of_group, self.start[of_group] + within

    def relaxed(self, *, schedule: int, recompute: int) -> LayoutBatch:
        """A layout of each group [G] with this schedule and recompute, nothing sharded: what its degrees alone decide is right."""
        ones = np.ones(len(self), dtype=np.int64)
        chosen = {
            "dp_replicate": self._dp,
            **dict.fromkeys(("dp_shard", "gradient_shard", "optimizer_shard"), ones),
            "zero_stage": 0 * ones,
            "schedule": schedule * ones,
            "recompute": recompute * ones,
        }
        return self._batch(self.degrees | chosen)

    @property
    def _dp(self) -> IntArray:
        return self.options["dp_replicate"][self.first] * self.options["dp_shard"][self.first]

    def _batch(self, columns: Columns) -> LayoutBatch:
        size = len(columns["tp"])
        arrays: dict[str, Any] = columns | {name: np.full(size, value) for name, value in self.constants.items()}
        return LayoutBatch(**arrays)
