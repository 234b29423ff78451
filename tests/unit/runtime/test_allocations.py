"""Bytes of tensors on a CPU."""

from __future__ import annotations

import torch
from meshwright.runtime.training.memory import AllocationCount, MemoryMeter, _peak_bytes

BLOCK = 2**20
"""fp32 elements: 4 MiB."""


def test_peak_is_of_what_was_there_at_once() -> None:
    count = AllocationCount()
    first, second = torch.empty(BLOCK), torch.empty(2 * BLOCK)
    del first
    third = torch.empty(BLOCK)
    count.stop()
    assert count.peak_bytes == 3 * 4 * BLOCK
    assert len(second) + len(third) == 3 * BLOCK


def test_what_ends_unseen_counts_until_its_address_is_given_out_again() -> None:
    seen = [(0, 1, 40), (1, 2, 20), (2, 1, 30), (3, 2, -20), (4, 3, 10)]
    assert _peak_bytes(seen) == 60
    assert _peak_bytes(seen[1:]) == 50


def test_meter_keeps_what_was_counted() -> None:
    meter = MemoryMeter(torch.device("cpu"), count=True)
    tensor = torch.ones(BLOCK)
    meter.stop_counting()
    assert meter.peak_allocated_bytes() == 4 * BLOCK
    later = torch.ones(4 * BLOCK)
    assert meter.peak_allocated_bytes() == 4 * BLOCK < 4 * (len(later) + len(tensor))
