"""Status and Solution: what every solver answers with."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """optimal: proved; feasible: an answer without proof; infeasible: proved that there is none; unknown: neither."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"
