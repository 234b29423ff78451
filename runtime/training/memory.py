"""Peak memory of this rank since a baseline.

CUDA: the caching allocator's own peaks, exact, and what plans predict.

CPU: torch counts nothing. Reserved is the highest resident set since the baseline less the one at the baseline, and less the
pages of files that came since: code that is run for the first time, some ten MiB, and mapped data
(profilers/measure/resident.py). The kernel stores that highest value (VmHWM) and resets it on a write to
``/proc/self/clear_refs``; where that is not allowed, the process's lifetime peak (``ru_maxrss``) stands in, an upper bound. What
the C allocator keeps counts as well. Allocated is the same, unless tensors are counted: torch's profiler notes each one that is
made or freed. A tensor's end is noted only where its beginning was, so that counting begins before the model exists; it slows
code down.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections import deque
from collections.abc import Iterable
from operator import itemgetter
from typing import Any, Literal

import psutil
import torch

from ...profilers.measure.resident import file_bytes, peak_bytes, reset_peak

MemorySource = Literal["cuda-allocator", "resident-growth", "lifetime-resident-growth"]


class MemoryMeter:
    """Highest memory of this process since the meter was made; make it after imports and before the model.

    With ``count`` tensors are counted on a CPU until `stop_counting`.
    """

    def __init__(self, device: torch.device, *, count: bool = False) -> None:
        self._device = device
        self._allocated = self._reserved = self._baseline = 0
        self._count: AllocationCount | None = None
        self.source: MemorySource = "cuda-allocator"
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        _load_libraries()
        gc.collect()
        self.source = "resident-growth" if reset_peak() else "lifetime-resident-growth"
        self._baseline = psutil.Process().memory_info().rss - file_bytes()
        self._count = AllocationCount() if count else None

    def stop_counting(self) -> None:
        """Stop counting: the allocated peak stays what was counted."""
        if self._count is not None:
            self._count.stop()

    def peak_allocated_bytes(self) -> int:
        """Return the highest allocation so far, bytes; on a CPU what was counted, or else the reservation."""
        self._read()
        return self._count.peak_bytes if self._count is not None and self._count.peak_bytes else self._allocated

    def peak_reserved_bytes(self) -> int:
        """Return the highest reservation of the caching allocator so far; on a CPU the growth of the resident set."""
        self._read()
        return self._reserved

    def pause(self) -> None:
        """Keep what was measured so far; what happens until `resume` does not count."""
        self._read()

    def resume(self) -> None:
        """Measure again from here."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            reset_peak()

    def _read(self) -> None:
        if self._device.type == "cuda":
            self._allocated = max(self._allocated, torch.cuda.max_memory_allocated(self._device))
            self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(self._device))
            return
        peak = peak_bytes() if self.source == "resident-growth" else _lifetime_peak_bytes()
        self._allocated = self._reserved = max(self._allocated, peak - file_bytes() - self._baseline)


def _load_libraries() -> None:
    """Do one tiny training step: it pages in the code and the buffers that every process has once, whatever its model."""
    with torch.random.fork_rng(devices=()):
        layer = torch.nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(layer.parameters())
        torch.nn.functional.cross_entropy(layer(torch.ones(64, 64)), torch.zeros(64, dtype=torch.int64)).backward()
        optimizer.step()


def _lifetime_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class AllocationCount:
    """Counts from its making until `stop`: ``peak_bytes`` is the most that was there at once, 0 before."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._profiler: torch.profiler.profile | None = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )
        self._profiler.start()

    def stop(self) -> None:
        """End counting, once."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        assert profiler.profiler is not None
        self.peak_bytes = _peak_bytes(_changes(profiler.profiler.kineto_results.experimental_event_tree()))


def _changes(events: Iterable[Any]) -> list[tuple[int, int, int]]:
    """Return when, where and by how many bytes memory was given out, or taken back (negative), in order."""
    changes, waiting = [], deque(events)
    while waiting:
        event = waiting.popleft()
        if event.tag.name == "Allocation":
            changes.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        waiting.extend(event.children)
    return sorted(changes, key=itemgetter(0))


def _peak_bytes(changes: Iterable[tuple[int, int, int]]) -> int:
    """Return the most bytes at once. What a backend's thread takes back is not noted: an address given out again was free."""
    sizes: dict[int, int] = {}
    present = peak = 0
    for _, address, size in changes:
        present -= sizes.pop(address, 0)
        if size > 0:
            sizes[address] = size
            present += size
            peak = max(peak, present)
    return peak
