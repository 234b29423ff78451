"""Batches of sequences of unequal lengths: the functions for users; the problem is stated in instance.py."""

from __future__ import annotations

from .bound import lower_bound_s
from .instance import BatchGroup, BatchInstance, BatchSchedule, check_batch
from .schedule import schedule_batch

__all__ = ["BatchGroup", "BatchInstance", "BatchSchedule", "check_batch", "lower_bound_s", "schedule_batch"]
