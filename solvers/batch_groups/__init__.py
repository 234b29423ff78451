"""Batches of sequences of unequal lengths: the functions for users; the problem is stated in instance.py."""

from __future__ import annotations

from .bound import lower_bound_s
from .instance import BatchGroup, BatchInstance, BatchProblem, BatchSchedule, check_batch
from .pipelined import PackInstance
from .schedule import batch_bound_s, instance_under, schedule_batch

__all__ = [
    "BatchGroup",
    "BatchInstance",
    "BatchProblem",
    "BatchSchedule",
    "PackInstance",
    "batch_bound_s",
    "check_batch",
    "instance_under",
    "lower_bound_s",
    "schedule_batch",
]
