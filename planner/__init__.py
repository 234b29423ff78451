"""Model + cluster + workload -> Plan."""

from .planning import default_precision, estimate, plan

__all__ = ["default_precision", "estimate", "plan"]
