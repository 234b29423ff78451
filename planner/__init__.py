"""Model + cluster + workload -> Plan."""

from .explain import explain
from .planning import default_precision, estimate, not_executed, plan

__all__ = ["default_precision", "estimate", "explain", "not_executed", "plan"]
