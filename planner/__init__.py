"""Model + cluster + workload -> Plan."""

from .cheapest import cheapest
from .explain.report import explain
from .explain.why_not import compare
from .pareto import pareto
from .plan import estimate, not_executed, plan, plan_rl
from .rehearse import rehearse
from .request import default_precision

__all__ = [
    "cheapest",
    "compare",
    "default_precision",
    "estimate",
    "explain",
    "not_executed",
    "pareto",
    "plan",
    "plan_rl",
    "rehearse",
]
