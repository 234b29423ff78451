"""Model + cluster + workload -> Plan."""

from .planning import default_precision, estimate, not_executed, plan

__all__ = ["default_precision", "estimate", "not_executed", "plan"]
