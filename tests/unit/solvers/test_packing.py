"""Packing alone: every sequence once, within capacity, and even in tokens and in squares where that is possible."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.schema import ConfigError
from meshwright.solvers.batch_groups.packing import pack_evenly

CODE_FILES = Path(__file__).parents[3] / "../shared/data/variable_length/code_files.txt.gz"


@settings(max_examples=80, deadline=None)
@given(lengths=st.lists(st.integers(1, 500), min_size=1, max_size=120), room=st.integers(0, 2_000))
def test_packs_hold_every_sequence_once_within_capacity(lengths: list[int], room: int) -> None:
    capacity = max(lengths) + room
    packing = pack_evenly(lengths, capacity)
    assert sorted(idx for pack in packing.packs for idx in pack) == list(range(len(lengths)))
    assert packing.tokens == tuple(sum(lengths[idx] for idx in pack) for pack in packing.packs)
    assert packing.squares == tuple(sum(lengths[idx] ** 2 for idx in pack) for pack in packing.packs)
    assert 1 <= min(packing.tokens) <= max(packing.tokens) <= capacity
    assert packing.padding >= -1e-12
    assert packing.imbalance >= 1 - 1e-12


@pytest.mark.parametrize("count", [1_000, 4_000])
def test_many_sequences_leave_little_padding_and_even_squares(count: int) -> None:
    if CODE_FILES.exists():
        with gzip.open(CODE_FILES, "rt") as file:
            pool = np.array([int(line) for line in file])
    else:
        pool = np.random.default_rng(0).lognormal(7, 1.2, 20_000).astype(int) + 1
    lengths = np.minimum(np.random.default_rng(count).choice(pool, count), 8_192)
    packing = pack_evenly(lengths.tolist(), 32_768)
    assert packing.padding <= 0.001
    assert packing.imbalance <= 1.02
    assert len(packing.packs) == -(-int(lengths.sum()) // 32_768)


def test_extreme_sequences_are_packed() -> None:
    assert pack_evenly([1] * 1_000, 50).tokens == (50,) * 20
    alone = pack_evenly([900, *[10] * 40], 900)  # as long as all others together, and more
    assert sorted(alone.tokens) == [400, 900]
    assert pack_evenly([7], 7).packs == ((0,),)
    for wrong in ([], [3, 0], [-1]):
        with pytest.raises(ConfigError, match="at least one"):
            pack_evenly(wrong, 10)
    with pytest.raises(ConfigError, match="longest sequence has 11 tokens"):
        pack_evenly([4, 11], 10)
