from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from meshwright.runtime.serving.batch import Row, StepBatch, decode, encode
from meshwright.runtime.serving.blocks import BlockPool, extend_digests
from meshwright.runtime.serving.requests import Sampling


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(0, 5)), max_size=60), st.booleans())
def test_no_block_is_lost_or_given_twice(actions: list[tuple[int, int, int]], reuses: bool) -> None:
    """Readers come with a known start, write further blocks, and go in any order."""
    pool = BlockPool(8, 4, reuses_prefixes=reuses)
    readers: list[list[int]] = []
    for kind, count, which in actions:
        if kind == 0:
            names: list[bytes] = []
            extend_digests(names, [which] * (4 * count), 4)
            found = pool.find(names)
            taken = pool.take(count - len(found))
            if taken is None:
                pool.release(found)
                continue
            for block, name in zip(taken, names[len(found) :], strict=True):
                pool.name(block, name)
            readers.append(found + taken)
        elif kind == 1 and readers:
            pool.release(readers.pop(which % len(readers)))
        held = Counter(block for reader in readers for block in reader)
        assert pool.num_used == len(held)
        assert reuses or max(held.values(), default=1) == 1
    for reader in readers:
        pool.release(reader)
    taken = pool.take(8)
    assert taken is not None
    assert sorted(taken) == list(range(8))


def test_a_name_says_all_that_comes_before() -> None:
    first, second, other, rooted = [], [], [], []  # type: list[bytes], list[bytes], list[bytes], list[bytes]
    extend_digests(first, [1, 2, 3, 4, 5, 6, 7], 2)
    extend_digests(second, [1, 2, 3, 4], 2)
    extend_digests(second, [1, 2, 3, 4, 5, 6], 2)
    extend_digests(other, [9, 2, 3, 4, 5, 6], 2)
    extend_digests(rooted, [1, 2, 3, 4, 5, 6], 2, root=b"\1")
    assert first == second
    assert not {*first} & {*other}
    assert not {*first} & {*rooted}


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.floats(0, 10), st.integers(0, 2**63 - 1)), max_size=4)
    )
)
def test_batches_travel_unchanged(ranks: list[list[tuple[int, bool, float, int]]]) -> None:
    batches = [
        StepBatch(
            tuple(
                Row(
                    tuple(range(length)), length, (3, 1, 2)[:length],
                    Sampling(temperature=heat, top_k=length, top_p=0.3, seed=seed) if samples else None, length,
                )
                for length, samples, heat, seed in rows
            )
        )
        for rows in ranks
    ]  # fmt: skip
    assert decode(encode(batches)) == batches
