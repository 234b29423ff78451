"""OptionCosts: mixed layouts under every recompute choice, and one of them with a choice for each of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..schema.model import Block, MTPHead
from .layouts import FloatArray
from .space_costs import SpaceCosts


@dataclass(frozen=True)
class OptionCosts:
    """Mixed layouts [N]: ``least`` has the least of the options in everything, ``under`` [O] each of RECOMPUTES for all blocks."""

    least: SpaceCosts
    under: tuple[SpaceCosts, ...]

    @classmethod
    def of(cls, costs: SpaceCosts) -> OptionCosts:
        """From costs of mixed layouts only."""
        return cls(costs, costs.by_option)

    @cached_property
    def has_choice(self) -> NDArray[np.bool_]:
        """Which kinds [K] hold a block and so have something to recompute."""
        return np.array([isinstance(kind, Block | MTPHead) for kind in self.least.kinds])

    def of_kinds(self, name: str, idx: int) -> FloatArray:
        """A LayerCost field of each kind under each option [K, O] of one layout."""
        values = [[getattr(cost, name)[idx] for cost in costs.by_kind] for costs in self.under]
        return np.array(values, dtype=np.float64).T

    def exposed_s(self, idx: int) -> FloatArray:
        """Exposed communication over data of each kind under each option [K, O] of one layout, once per step."""
        values = [[seconds[idx] for seconds in costs.dp_exposed_by_kind] for costs in self.under]
        return np.array(values, dtype=np.float64).T

    @cached_property
    def least_exposed_by_kind(self) -> tuple[FloatArray, ...]:
        """The least of the options for each kind [K] of [N]."""
        by_option = [costs.dp_exposed_by_kind for costs in self.under]
        return tuple(np.min([seconds[k] for seconds in by_option], axis=0) for k in range(len(self.least.kinds)))

    def working_bytes(self, idx: int) -> FloatArray:
        """Working set of a stage [O] whose blocks use the option."""
        return np.array([costs.working_bytes[idx] for costs in self.under])

    def assigned(self, idx: int, options: Sequence[int]) -> SpaceCosts:
        """One layout (row 0) whose layers [L] recompute as ``options`` says: a kind of its own for each kind and option."""
        row, num_kinds = np.array([idx]), len(self.least.kinds)
        chosen = np.asarray(options, dtype=np.int64)
        of_layer = self.least.kind_of_layer
        costs = replace(
            self.least.select(row),
            kinds=self.least.kinds * len(self.under),
            kind_of_layer=chosen * num_kinds + of_layer,
            inside=tuple(cost.at(costs.like[row]) for costs in self.under for cost in costs.inside),
            like=np.zeros(1, dtype=np.int64),
            option_of_layer=np.where(self.has_choice[of_layer], chosen, -1),
            working_of_option=self.working_bytes(idx),
        )
        # What was worked out for each option is that of the kinds.
        vars(costs)["by_kind"] = tuple(cost.at(row) for costs in self.under for cost in costs.by_kind)
        exposed = tuple(seconds[row] for costs in self.under for seconds in costs.dp_exposed_by_kind)
        vars(costs)["dp_exposed_by_kind"] = exposed
        return costs
