"""Placement of the experts of a mixture-of-experts model: the functions for users; the problem is stated in instance.py."""

from __future__ import annotations

from .moves import Transfer
from .placement import (
    Evaluation,
    ExpertPlacement,
    TraceEvaluation,
    migrate,
    place_experts,
    rebalance_experts,
    split_shares,
)

__all__ = [
    "Evaluation",
    "ExpertPlacement",
    "TraceEvaluation",
    "Transfer",
    "migrate",
    "place_experts",
    "rebalance_experts",
    "split_shares",
]
