"""From the log of a rank to its peak: when it is, what is alive then, and what the allocator has reserved."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .allocator import replay
from .recorder import CATEGORIES, Category, Log


@dataclass(frozen=True)
class Peak:
    """The fullest moment of a rank's step.

    Attributes:
        initial_bytes: the most before it, while weights and optimizer states are made.
        by_category: bytes; they add up to ``allocated_bytes``.
        moment, operator, module: where in the step it is, what was allocated there, and in whose pass.
        reserved_bytes, expandable_bytes: the most that the caching allocator reserves, without and with expandable segments.
        largest: what takes most of it: category, operator that made it, bytes of each, how many.
    """

    allocated_bytes: int
    initial_bytes: int
    by_category: dict[Category, int]
    moment: str
    operator: str
    module: str
    reserved_bytes: int
    expandable_bytes: int
    largest: tuple[tuple[Category, str, int, int], ...]


def find_peak(log: Log, *, capacity: int | None = None) -> Peak:
    """Return the fullest moment of the step that is logged."""
    events, num_bytes = np.asarray(log.events), np.asarray(log.num_bytes)
    entries = np.where(events >= 0, events, ~events)
    present = np.cumsum(np.where(events >= 0, num_bytes[entries], -num_bytes[entries]))
    start = next((phase.start for phase in log.phase_list if phase.kind != "init"), 0)
    position = start + int(present[start:].argmax())
    begins, ends = np.zeros(len(num_bytes), dtype=np.int64), np.full(len(num_bytes), len(events))
    where, has_begun = np.arange(len(events)), events >= 0
    begins[entries[has_begun]] = where[has_begun]
    ends[entries[~has_begun]] = where[~has_begun]
    alive = np.flatnonzero((begins <= position) & (ends > position))
    by_category = dict.fromkeys(CATEGORIES, 0)
    groups: dict[tuple[Category, str, int], int] = {}
    for entry in alive.tolist():
        category, size = _category(log, entry, int(ends[entry])), int(num_bytes[entry])
        by_category[category] += size
        key = category, log.ops[entry], size
        groups[key] = groups.get(key, 0) + 1
    largest = sorted(((*key, count) for key, count in groups.items()), key=lambda row: -row[2] * row[3])
    last = int(entries[position])
    reserved, expandable = (
        replay(log.events, log.num_bytes, log.streams, capacity=capacity, expandable=on).peak_reserved
        for on in (False, True)
    )
    return Peak(
        allocated_bytes=int(present[position]), initial_bytes=int(present[:start].max(initial=0)), by_category=by_category,
        moment=log.phase_list[log.phases[last]].name, operator=log.ops[last], module=log.module_of(last),
        reserved_bytes=reserved, expandable_bytes=expandable, largest=tuple(largest[:12]),
    )  # fmt: skip


def _category(log: Log, entry: int, end: int) -> Category:
    """Return what an entry is: what it was said to be; else an activation where it outlives the forward pass that made it."""
    if (marked := log.marks.get(entry)) is not None:
        return marked
    phase = log.phase_list[log.phases[entry]]
    if phase.kind == "forward" and (phase.end < 0 or end >= phase.end):
        return "activations"
    return "communication" if entry in log.exchanged else "temporaries"
