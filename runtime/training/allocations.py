"""Bytes of tensors on a CPU, exactly: torch's profiler notes each one that is made or freed, where torch itself keeps no count.

Their sum is what `torch.cuda.memory_allocated` says on a GPU. A tensor's end is noted only where its beginning was, so
that counting begins before the model is there. It slows code down: not for steps whose time counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from operator import itemgetter
from typing import Any

import torch


class AllocationCount:
    """Counts from its making until `stop`. Final.

    Attributes:
        peak_bytes: most that was there at once; 0 before `stop`.
    """

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
    """When, where and by how many bytes memory was given out, or taken back (negative), in order."""
    found, waiting = [], deque(events)
    while waiting:
        event = waiting.popleft()
        if event.tag.name == "Allocation":
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        waiting.extend(event.children)
    return sorted(found, key=itemgetter(0))


def _peak_bytes(changes: Iterable[tuple[int, int, int]]) -> int:
    """Most bytes at once. What a thread of a backend's takes back is not noted: an address given out again was free."""
    sizes: dict[int, int] = {}
    present = peak = 0
    for _, address, size in changes:
        present -= sizes.pop(address, 0)
        if size > 0:
            sizes[address] = size
            present += size
            peak = max(peak, present)
    return peak
