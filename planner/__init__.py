"""Model + cluster + workload -> Plan."""

from .cheapest import cheapest
from .compare import compare
from .explain import explain
from .pareto_front import pareto
from .planning import default_precision, estimate, not_executed, plan

__all__ = ["cheapest", "compare", "default_precision", "estimate", "explain", "not_executed", "pareto", "plan"]
