"""Chunked cuts against all cuts; memory; the check."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from meshwright.schema.schedules import placement
from meshwright.solvers.backend import Status
from meshwright.solvers.stages.splits import ChunkSplitInstance, boundaries_from_blocks, check_chunks, solve_chunks


def instance(seed: int, style: str = "loop", cap_bytes: float = np.inf) -> ChunkSplitInstance:
    """Equal blocks between an embedding and a head of any size; a rank requires a byte for each layer."""
    rng = np.random.default_rng(seed)
    num_ranks, chunks = int(rng.integers(2, 4)), 2
    blocks = int(rng.integers(num_ranks * chunks, 4 * num_ranks * chunks))
    busy = np.concatenate([[rng.uniform(0, 0.5)], np.ones(blocks), [rng.uniform(0, 3)]])
    is_block = np.array([False, *[True] * blocks, False])
    ranks = placement(num_ranks, chunks, style)
    on_rank = np.array(ranks)[:, None] == np.arange(num_ranks)
    return ChunkSplitInstance(busy, is_block, ranks, lambda ends: np.diff(ends, axis=1) @ on_rank, cap_bytes)


def all_cuts(given: ChunkSplitInstance) -> list[tuple[int, ...]]:
    blocks, ranks, chunks = int(given.is_block.sum()), given.num_ranks, given.num_chunks
    counts = [n for n in itertools.product(range(chunks, blocks + 1), repeat=ranks) if sum(n) == blocks]
    return [tuple(int(end) for end in row) for row in boundaries_from_blocks(given, np.array(counts))]


@pytest.mark.parametrize("style", ["loop", "wave"])
@pytest.mark.parametrize("seed", range(25))
def test_cut_is_the_best_of_all(seed: int, style: str) -> None:
    given = instance(seed, style)
    found = solve_chunks(given)
    assert found.status is Status.FEASIBLE
    assert check_chunks(given, found.choice) == pytest.approx(found.objective)
    assert found.objective == pytest.approx(min(check_chunks(given, cut) for cut in all_cuts(given)))


@pytest.mark.parametrize("seed", range(10))
def test_memory_decides_where_it_must(seed: int) -> None:
    free = instance(seed)
    layers = len(free.busy_s)
    tight = instance(seed, cap_bytes=-(-layers // free.num_ranks))
    found = solve_chunks(tight)
    assert found.status is Status.FEASIBLE
    check_chunks(tight, found.choice)
    assert solve_chunks(instance(seed, cap_bytes=layers // free.num_ranks - 1)).status is Status.INFEASIBLE


def test_too_few_blocks_have_no_cut() -> None:
    given = instance(0)
    few = ChunkSplitInstance(given.busy_s[:4], given.is_block[:4], given.rank_of_stage, given.required_bytes)
    assert solve_chunks(few).status is Status.INFEASIBLE


@pytest.mark.parametrize(
    ("boundaries", "cap_bytes", "label"),
    [((0, 5, 3, 6, 10), 6, "C1"), ((0, 2, 4, 6, 10), 5, "C2"), ((0, 5, 6, 7, 10), 6, "C3")],
)
def test_check_names_what_is_broken(boundaries: tuple[int, ...], cap_bytes: float, label: str) -> None:
    is_block = np.array([False, *[True] * 8, False])
    given = ChunkSplitInstance(np.ones(10), is_block, (0, 1, 0, 1), lambda _: np.array([[6.0, 6.0]]), cap_bytes)
    with pytest.raises(ValueError, match=label):
        check_chunks(given, boundaries)
