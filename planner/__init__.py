"""Model + cluster + workload -> Plan."""

from .explain.report import explain
from .explain.why_not import compare
from .pareto import pareto
from .plan import default_precision, estimate, not_executed, plan
from .sizes import cheapest

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
