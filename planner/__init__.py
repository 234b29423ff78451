"""Model + cluster + workload -> Plan."""

from .cheapest import cheapest
from .explain.report import explain
from .explain.why_not import compare
from .pareto import pareto
from .plan import default_precision, estimate, not_executed, plan

__all__ = [
    "cheapest",
    "compare",
    "default_precision",
    "estimate",
    "explain",
    "not_executed",
    "pareto",
    "plan",
]
