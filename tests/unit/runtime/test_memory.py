import mmap
from pathlib import Path

import pytest
import torch
from meshwright.runtime.training import memory
from meshwright.runtime.training.memory import MemoryMeter
from meshwright.schema.units import MIB

CPU = torch.device("cpu")
SLACK = 8 * MIB  # what else the process allocates meanwhile, and whole pages


def allocate_and_free(size: int) -> None:
    """Pages of their own: a tensor may stand in memory that the C library kept from an earlier one."""
    with mmap.mmap(-1, size) as pages:
        for first in range(0, size, mmap.PAGESIZE):
            pages[first] = 1


def test_peak_is_what_was_allocated_even_after_it_is_freed() -> None:
    meter = MemoryMeter(CPU)
    allocate_and_free(100 * MIB)
    assert abs(meter.peak_allocated_bytes() - 100 * MIB) < SLACK


def test_what_was_there_before_does_not_count() -> None:
    before = torch.ones(100 * MIB, dtype=torch.uint8)
    meter = MemoryMeter(CPU)
    assert meter.peak_allocated_bytes() < SLACK
    assert before.numel() == 100 * MIB


def test_pause_leaves_out_what_happens_meanwhile() -> None:
    meter = MemoryMeter(CPU)
    if meter.source != "resident-growth":
        pytest.skip("this system does not let a process reset its high-water mark")
    allocate_and_free(40 * MIB)
    meter.pause()
    allocate_and_free(200 * MIB)
    meter.resume()
    assert abs(meter.peak_allocated_bytes() - 40 * MIB) < SLACK


def test_lifetime_peak_stands_in_where_the_mark_cannot_be_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "reset_peak", lambda: False)
    meter = MemoryMeter(CPU)
    allocate_and_free(100 * MIB)
    assert meter.source == "lifetime-resident-growth"
    assert meter.peak_allocated_bytes() > 100 * MIB - SLACK
    assert meter.peak_reserved_bytes() == meter.peak_allocated_bytes()


def test_pages_of_files_are_no_memory_of_the_process(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(64 * MIB))
    meter = MemoryMeter(CPU)
    with (tmp_path / "data").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == 0
        assert meter.peak_reserved_bytes() < SLACK
