from __future__ import annotations

from typing import Literal

from .base import Frozen, NonNegativeFloat, NonNegativeInt, PositiveFloat


class Certificate(Frozen):
    """How far from the best of the searched space the answer may be, within the cost model.

    Attributes:
        status: optimal: the whole space was bounded; feasible: a time limit stopped that.
        objective_s: step time of the fastest layout found.
        bound_s: no layout of the space, and no split of it into stages, is faster.
        gap: (objective - bound) / objective, what the search leaves open: another split of a layout, or another layout whose
            bound is below the objective, might be that much faster. The plan's own step may be longer than the objective, where a
            simpler layout was taken over the fastest one: `Plan.price_of_simplicity`.
        evaluated: layouts costed exactly; pruned: layouts that a bound or the memory excluded, of which pruned_in_groups with all
            others of the same degrees by one bound.
    """

    status: Literal["optimal", "feasible"]
    objective_s: PositiveFloat
    bound_s: PositiveFloat
    gap: NonNegativeFloat
    evaluated: NonNegativeInt
    pruned: NonNegativeInt
    pruned_in_groups: NonNegativeInt = 0
    search_s: NonNegativeFloat
