"""Cuts of chunks by their replay, against every split of small pipelines."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.cost_models.pipeline.replay import PipelineShape
from meshwright.schema.units import BoolArray, IntArray
from meshwright.solvers.stages import chunk_cuts
from meshwright.solvers.stages.chunk_cuts import best_cut, steps_s
from meshwright.solvers.stages.split_bound import SplitBoundInstance
from test_split_bound import DEFINED, all_times, random_case

IN_CHUNKS = [shape for shape in DEFINED if shape.num_model_chunks > 1]


def all_fit(sizes: IntArray) -> BoolArray:
    return np.ones(len(sizes), dtype=bool)


def even_start(instance: SplitBoundInstance) -> IntArray:
    of_rank = np.full(instance.shape.pp, instance.num_blocks // instance.shape.pp)
    of_rank[: instance.num_blocks % instance.shape.pp] += 1
    chunks = instance.shape.num_model_chunks
    sizes = np.zeros(instance.shape.num_stages, dtype=np.int64)
    for rank, stages in enumerate(instance.stages_of_rank):
        sizes[stages] = of_rank[rank] // chunks + (np.arange(chunks) < of_rank[rank] % chunks)
    return sizes


@settings(max_examples=60, deadline=None)
@given(shape=st.sampled_from(IN_CHUNKS), seed=st.integers(0, 10**6), num_kinds=st.integers(1, 3))
def test_no_split_is_below_the_bound_and_the_cut_takes_what_it_says(
    shape: PipelineShape, seed: int, num_kinds: int
) -> None:
    instance = random_case(shape, seed, num_kinds=num_kinds)
    times = all_times(instance)
    assert steps_s(instance, np.array(list(times))) == pytest.approx(list(times.values()))
    found = best_cut(instance, [even_start(instance)], all_fit, below_s=math.inf)
    assert found is not None
    assert found.seconds == pytest.approx(times[tuple(found.sizes.tolist())])
    assert found.seconds <= times[tuple(even_start(instance).tolist())] * (1 + 1e-9)
    assert found.bound_s <= min(times.values()) * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(shape=st.sampled_from(IN_CHUNKS), seed=st.integers(0, 10**6))
def test_moves_of_single_blocks_are_never_slower_than_their_start(shape: PipelineShape, seed: int) -> None:
    instance = random_case(shape, seed, num_kinds=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_cuts, "MAX_PLACEMENTS", 0)
        found = best_cut(instance, [even_start(instance)], all_fit, below_s=math.inf)
    times = all_times(instance)
    assert found is not None and found.bound_s == 0
    assert found.seconds == pytest.approx(times[tuple(found.sizes.tolist())])
    assert found.seconds <= times[tuple(even_start(instance).tolist())] * (1 + 1e-9)


def test_with_a_multiple_less_two_all_placements_are_seen() -> None:
    """The two stages that lack a block are where a replay says, not where the first chunks come first."""
    shape = PipelineShape(schedule="zb-h1", pp=3, num_model_chunks=2, num_microbatches=6)
    instance = SplitBoundInstance(
        shape,
        np.tile([[1.0], [1.0], [1.0]], 10),
        np.zeros(10, dtype=np.int64),
        np.array([[0.9, 0, 0, 0, 0, 0.9], [0.9, 0, 0, 0, 0, 0.9], [0.0] * 6]),
        np.zeros((1, 10)),
        np.zeros((1, 6)),
        np.zeros(1),
    )
    found = best_cut(instance, [even_start(instance)], all_fit, below_s=math.inf)
    times = all_times(instance)
    assert found is not None
    assert found.seconds == pytest.approx(min(times.values()))
    assert found.seconds < times[tuple(even_start(instance).tolist())]
    assert found.bound_s == pytest.approx(found.seconds, rel=0.1)


def test_cuts_beyond_memory_are_not_taken() -> None:
    instance = random_case(IN_CHUNKS[0], 5, num_kinds=1)
    start = even_start(instance)
    found = best_cut(instance, [start], lambda sizes: np.all(sizes == start, axis=1), below_s=math.inf)
    assert found is not None and found.sizes.tolist() == start.tolist()
    assert best_cut(instance, [start], lambda sizes: np.zeros(len(sizes), dtype=bool), below_s=math.inf) is None
