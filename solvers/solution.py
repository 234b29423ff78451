"""Status and Solution: what every solver answers with.

A file with a problem has an instance (frozen, prepared, validated), `solve` and `check`:

    solve(instance, *, time_limit_s, rel_gap, seed) -> Solution       of the three keywords those that its method has a use for
    check(instance, choice) -> float                                  the objective of `Solution.choice`, from the definition alone

`check` knows nothing of the method and raises ValueError with the label of the constraint that a choice breaks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

Choice = TypeVar("Choice")


class Status(StrEnum):
    """optimal: proved; feasible: an answer without proof; infeasible: proved that there is none; unknown: neither."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"

    @property
    def has_answer(self) -> bool:
        """True where there is a choice."""
        return self in (Status.OPTIMAL, Status.FEASIBLE)


@dataclass(frozen=True, kw_only=True)
class Solution(Generic[Choice]):
    """An answer to an instance.

    Attributes:
        choice: values of the variables, in the form that the problem's `check` takes; None without an answer.
        objective: in the unit of the problem's (O); infinite without an answer.
        bound: no choice has a lower objective; -inf where the method gives none.
        solve_s: wall-clock seconds.
        backend: method or solver that made the choice.
    """

    status: Status
    choice: Choice | None
    objective: float = math.inf
    bound: float = -math.inf
    solve_s: float = 0.0
    backend: str = ""

    @property
    def gap(self) -> float:
        """1 - bound / objective, at least 0; infinite without an answer. Objectives of this folder are positive."""
        if not math.isfinite(self.objective):
            return math.inf
        return max(0.0, 1.0 - self.bound / self.objective) if self.objective else 0.0
