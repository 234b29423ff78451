"""Filling a micro-batch under a deadline, slowest sequences first; groups that are alike are one entry with a count."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np

from ..tolerances import SUMMED
from .instance import BatchInstance


class Distinct:
    """Sequences that are alike as one entry with a count, slowest first."""

    def __init__(self, instance: BatchInstance) -> None:
        first, kinds, counts = instance.alike
        order = first[::-1]
        self.instance = instance
        self.members = len(order) - 1 - kinds
        self.counts: list[int] = counts[::-1].tolist()
        self.lengths: list[int] = instance.lengths[order].tolist()
        seconds = np.where(instance.allowed[order], instance.seconds[order], math.inf)
        self.seconds: list[list[float]] = seconds.tolist()
        self.fastest: list[float] = instance.fastest_s[order].tolist()
        self.work = instance.rank_seconds.min(axis=1)[order]
        self.shortest_s = instance.seconds.min(axis=0).tolist()
        self.shortest = min(self.lengths)
        # The least so far, ascending for bisection: before it comes down to a room nothing fits there.
        self._below_lengths = (-np.minimum.accumulate(instance.lengths[order])).tolist()
        self._below_seconds = (-np.minimum.accumulate(seconds, axis=0)).T.tolist()

    def first_that_fits(self, widest: list[tuple[float, int]], deadline: float, free: int) -> int:
        """Return an entry before which none fits into one of the widest rooms of each degree, or into a group of ``free`` ranks."""
        first = len(self.lengths)
        for k, (seconds, tokens) in enumerate(widest):
            if tokens > 0:
                place = bisect_left(self._below_lengths, -tokens, 0, first)
                first = min(first, bisect_left(self._below_seconds[k], -seconds, place, first))
            if self.instance.degrees[k] <= free:
                first = min(first, bisect_left(self._below_seconds[k], -deadline, 0, first))
        return first


Content = tuple[int, int, "Content"] | None
"""Sequences of a group, as a chain: (distinct length, how many, those before)."""


class _Room:
    """Open groups that are alike: what each has left of its deadline and its tokens, and what is in it."""

    __slots__ = ("content", "count", "seconds", "tokens")

    def __init__(self, seconds: float, tokens: int, count: int, content: Content) -> None:
        self.seconds, self.tokens, self.count, self.content = seconds, tokens, count, content


Filled = list[tuple[int, int, Content]]
"""Groups of a micro-batch: (index of the degree, how many, content)."""


def fill(
    d: Distinct, deadline: float, waiting: list[int], next_deadline: float, remaining: list[int]
) -> tuple[float, Filled] | None:
    """Fill a micro-batch with what is ``waiting``, less it; return its seconds and groups, None where a must does not fit.

    Args:
        remaining: those of ``waiting`` that are not 0, ascending.
    """
    i = d.instance
    deadline *= 1 + SUMMED
    free, degrees = i.num_ranks, range(len(i.degrees))
    rooms: list[list[_Room]] = [[] for _ in degrees]
    widest = [(-1.0, -1)] * len(i.degrees)  # most seconds and most tokens of any room
    closed: list[tuple[int, _Room]] = []
    shortest = d.shortest
    shortest_s, capacity = d.shortest_s, [i.tokens_per_rank * degree for degree in i.degrees]
    place = 0
    while place < len(remaining):
        idx = remaining[place]
        count, length, seconds = waiting[idx], d.lengths[idx], d.seconds[idx]
        for k in degrees:
            each = seconds[k]
            if each > widest[k][0] or length > widest[k][1]:
                continue
            waited, count = count, _into_rooms(rooms[k], idx, count, each, length)
            if count == waited:  # seconds are in one room, tokens in another one
                continue
            open_rooms = [room for room in rooms[k] if room.seconds >= shortest_s[k] and room.tokens >= shortest]
            if len(open_rooms) < len(rooms[k]):
                closed += [(k, room) for room in rooms[k] if room.seconds < shortest_s[k] or room.tokens < shortest]
                rooms[k] = open_rooms
            widest[k] = _widest(rooms[k])
            if not count:
                break
        while count:
            k = next((k for k in degrees if seconds[k] <= deadline), -1)
            if k < 0 or i.degrees[k] > free:
                break
            size = capacity[k]
            fit = min(count, int(deadline / seconds[k]), size // length)
            new = min(free // i.degrees[k], count // fit)
            rooms[k].append(_Room(deadline - fit * seconds[k], size - fit * length, new, (idx, fit, None)))
            widest[k] = _widest(rooms[k])
            free, count = free - new * i.degrees[k], count - new * fit
        waiting[idx] = count
        if not count:
            place += 1
            continue
        if d.fastest[idx] > next_deadline:
            return None
        following = bisect_left(remaining, d.first_that_fits(widest, deadline, free), place + 1)
        if place + 1 < following and d.fastest[remaining[place + 1]] > next_deadline:
            return None
        place = following
    closed += [(k, room) for k in degrees for room in rooms[k]]
    unused = min((room.seconds for _, room in closed), default=deadline)
    return deadline - unused, [(k, room.count, room.content) for k, room in closed]


def _widest(rooms: list[_Room]) -> tuple[float, int]:
    seconds, tokens = -1.0, -1
    for room in rooms:
        seconds, tokens = max(seconds, room.seconds), max(tokens, room.tokens)
    return seconds, tokens


def _into_rooms(rooms: list[_Room], idx: int, count: int, each: float, length: int) -> int:
    """Put sequences that are alike into open groups, first fit; return those that are left."""
    for room in list(rooms):
        if room.seconds < each or room.tokens < length:
            continue
        fit = min(int(room.seconds / each), room.tokens // length)
        full = min(room.count, count // fit)
        rest = count - full * fit if full < room.count else 0
        before = room.seconds, room.tokens, room.content
        if full:
            if full < room.count:
                rooms.append(_Room(*before[:2], room.count - full, before[2]))
            room.count = full
            room.seconds, room.tokens, room.content = (
                before[0] - fit * each,
                before[1] - fit * length,
                (idx, fit, before[2]),
            )
            count -= full * fit
            if rest and full:
                room = rooms[-1]
        if rest:
            if room.count > 1:
                rooms.append(_Room(*before[:2], room.count - 1, before[2]))
                room.count = 1
            room.seconds, room.tokens, room.content = (
                before[0] - rest * each,
                before[1] - rest * length,
                (idx, rest, before[2]),
            )
            count = 0
        if not count:
            break
    return count


def entries(content: Content) -> Iterator[tuple[int, int]]:
    """Yield the sequences of a group: (distinct length, how many)."""
    while content is not None:
        yield content[0], content[1]
        content = content[2]
