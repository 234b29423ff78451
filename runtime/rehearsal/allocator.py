"""torch's caching allocator, replayed over a sequence of allocations: what a GPU reports as reserved.

Rules (c10/cuda/CUDACachingAllocator.cpp, torch 2.13, default settings): sizes are rounded up to 512 bytes. Up to 1 MiB come from
segments of 2 MiB; beyond from segments of 20 MiB where they are below 10 MiB, else of their size rounded up to 2 MiB. A free block
that is large enough is taken, the smallest of them, and split where more than 512 bytes of a small or 1 MiB of a large one remain.
Free neighbours join. A stream takes back only what it allocated itself. Where the device is full, segments that are entirely free
are given back to it first.

With expandable segments a pool is one range of addresses that grows at its end, by pages of 2 MiB (small) or 20 MiB.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

_ROUND = 512
_SMALL = 1 << 20
_SMALL_SEGMENT = 2 << 20
_LARGE_SEGMENT = 20 << 20
_MIN_LARGE = 10 << 20
_SEGMENT_ROUND = 2 << 20


@dataclass(eq=False, slots=True)
class _Block:
    address: int
    size: int
    pool: _Pool
    segment: int
    is_free: bool = False
    before: _Block | None = None
    after: _Block | None = None


@dataclass(eq=False, slots=True)
class _Pool:
    is_small: bool
    free: list[tuple[int, int]] = field(default_factory=list)  # size and address, sorted
    last: _Block | None = None  # of an expandable segment

    def take_smallest(self, size: int) -> int | None:
        """Return the address of the smallest free block of at least so many bytes, no longer free."""
        idx = bisect_left(self.free, (size, 0))
        return self.free.pop(idx)[1] if idx < len(self.free) else None

    def remove(self, block: _Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]


class CachingAllocator:
    """A GPU's memory. ``capacity`` bytes are all it has; ``expandable``: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."""

    def __init__(self, *, capacity: int | None = None, expandable: bool = False) -> None:
        self.reserved = self.peak_reserved = self.allocated = self.peak_allocated = 0
        self._capacity, self._expandable = capacity, expandable
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._blocks: dict[int, _Block] = {}
        self._next = 0

    def allocate(self, num_bytes: int, stream: int = 0) -> int:
        """Return the address of a block."""
        size = max(_ROUND, -(-num_bytes // _ROUND) * _ROUND)
        pool = self._pools.setdefault((stream, size <= _SMALL), _Pool(size <= _SMALL))
        address = pool.take_smallest(size)
        block = self._blocks[address] if address is not None else self._grown(pool, size)
        block.is_free = False
        remaining = block.size - size
        if remaining >= _ROUND if pool.is_small or self._expandable else remaining > _SMALL:
            rest = _Block(block.address + size, remaining, pool, block.segment, True, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.size, block.after = size, rest
            if pool.last is block:
                pool.last = rest
            self._blocks[rest.address] = rest
            insort(pool.free, (rest.size, rest.address))
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block.address

    def free(self, address: int) -> None:
        """Take a block back, joined with free neighbours."""
        block = self._blocks[address]
        pool = block.pool
        self.allocated -= block.size
        if (after := block.after) is not None and after.is_free:
            pool.remove(after)
            self._absorb(block, after)
        if (before := block.before) is not None and before.is_free:
            pool.remove(before)
            self._absorb(before, block)
            block = before
        block.is_free = True
        insort(pool.free, (block.size, block.address))

    def _absorb(self, block: _Block, after: _Block) -> None:
        block.size += after.size
        block.after = after.after
        if after.after is not None:
            after.after.before = block
        if block.pool.last is after:
            block.pool.last = block
        del self._blocks[after.address]

    def _grown(self, pool: _Pool, size: int) -> _Block:
        """Return a block of memory that was not reserved before."""
        if self._expandable:
            return self._expanded(pool, size)
        if size <= _SMALL:
            segment = _SMALL_SEGMENT
        elif size < _MIN_LARGE:
            segment = _LARGE_SEGMENT
        else:
            segment = -(-size // _SEGMENT_ROUND) * _SEGMENT_ROUND
        if self._capacity is not None and self.reserved + segment > self._capacity:
            self._give_back()
        self._reserve(segment)
        block = _Block(self._next, segment, pool, segment)
        self._next += segment
        self._blocks[block.address] = block
        return block

    def _expanded(self, pool: _Pool, size: int) -> _Block:
        page, tail = _SMALL_SEGMENT if pool.is_small else _LARGE_SEGMENT, pool.last
        if tail is None:
            tail = _Block(self._next, 0, pool, 0)
            self._next += 1 << 50  # addresses cost nothing
        elif tail.is_free:
            pool.remove(tail)
        else:
            rest = _Block(tail.address + tail.size, 0, pool, 0, before=tail)
            tail.after, tail = rest, rest
        added = -(-(size - tail.size) // page) * page
        self._reserve(added)
        tail.size += added
        self._blocks[tail.address], pool.last = tail, tail
        return tail

    def _reserve(self, num_bytes: int) -> None:
        self.reserved += num_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _give_back(self) -> None:
        """Give segments without a used byte back to the device."""
        for block in [one for one in self._blocks.values() if one.is_free and one.size == one.segment]:
            block.pool.remove(block)
            del self._blocks[block.address]
            self.reserved -= block.size


def replay(
    events: Sequence[int],
    num_bytes: Sequence[int],
    streams: dict[int, int],
    *,
    capacity: int | None = None,
    expandable: bool = False,
) -> CachingAllocator:
    """Return the allocator after entries began (their index) and ended (its complement), each on its stream (0 where unnamed)."""
    allocator, addresses = CachingAllocator(capacity=capacity, expandable=expandable), dict[int, int]()
    for event in events:
        if event >= 0:
            addresses[event] = allocator.allocate(num_bytes[event], streams.get(event, 0))
        else:
            allocator.free(addresses.pop(~event))
    return allocator
