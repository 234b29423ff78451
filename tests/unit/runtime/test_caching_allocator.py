"""torch's caching allocator, replayed: its rules by cases that can be worked out, and laws of any sequence."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from meshwright.runtime.rehearsal.allocator import CachingAllocator, replay

MIB = 2**20


def test_small_allocations_share_a_segment_of_two_mib() -> None:
    allocator = CachingAllocator()
    first, second = allocator.allocate(1), allocator.allocate(513)
    assert allocator.allocated == 512 + 1024
    assert second == first + 512
    assert allocator.reserved == 2 * MIB


def test_middle_sizes_share_twenty_mib_and_large_ones_are_rounded_to_two() -> None:
    allocator = CachingAllocator()
    allocator.allocate(3 * MIB)
    allocator.allocate(9 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.allocate(11 * MIB + 1)
    assert allocator.reserved == 32 * MIB


def test_a_large_block_is_split_only_where_more_than_one_mib_remains() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(20 * MIB))
    allocator.allocate(19 * MIB)
    assert allocator.allocated == 20 * MIB


def test_smallest_block_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    large, small = allocator.allocate(64 * MIB), allocator.allocate(32 * MIB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(30 * MIB) == small
    assert allocator.reserved == 96 * MIB


def test_streams_do_not_share_blocks() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(64 * MIB, stream=1))
    allocator.allocate(64 * MIB)
    assert allocator.reserved == 128 * MIB


def test_free_segments_are_given_back_where_the_device_is_full() -> None:
    allocator = CachingAllocator(capacity=100 * MIB)
    allocator.free(allocator.allocate(64 * MIB))
    allocator.allocate(80 * MIB)
    assert allocator.reserved == 80 * MIB


def test_expandable_segments_grow_at_their_end() -> None:
    allocator = CachingAllocator(expandable=True)
    kept, freed = allocator.allocate(40 * MIB), allocator.allocate(40 * MIB)
    allocator.free(freed)
    assert allocator.allocate(60 * MIB) == kept + 40 * MIB
    assert allocator.reserved == 100 * MIB


@given(st.lists(st.tuples(st.integers(1, 200 * MIB), st.integers(0, 40)), max_size=60), st.booleans())
def test_whatever_comes_and_goes_is_within_what_is_reserved(sizes: list[tuple[int, int]], expandable: bool) -> None:
    """Each entry ends so many entries after it began."""
    events: list[int] = []
    for idx in range(len(sizes)):
        events.append(idx)
        events += [~before for before in range(idx + 1) if before + sizes[before][1] == idx]
    num_bytes = [size for size, _ in sizes]
    allocator = replay(events, num_bytes, {}, expandable=expandable)
    present = peak = 0
    for event in events:
        present += num_bytes[event] if event >= 0 else -num_bytes[~event]
        peak = max(peak, present)
    assert peak <= allocator.peak_allocated <= allocator.peak_reserved
    for idx in {event for event in events if event >= 0} - {~event for event in events if event < 0}:
        events.append(~idx)
    emptied = replay(events, num_bytes, {}, expandable=expandable)
    assert emptied.allocated == 0
