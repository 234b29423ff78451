"""The bound of a replayed split against every split of small pipelines, under each schedule, with chunks, kinds and memory."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.cost_models.pipeline.replay import PipelineShape, makespan_s
from meshwright.schema.errors import ConfigError
from meshwright.schema.schedules import ScheduleName
from meshwright.solvers.stages.split_bound import SplitBoundInstance, lower_bound_s

SHAPES = [
    PipelineShape(schedule=schedule, pp=pp, num_model_chunks=chunks, num_microbatches=m)
    for schedule in get_args(ScheduleName)
    for pp, chunks, m in (
        (2, 1, 2),
        (3, 1, 3),
        (3, 1, 5),
        (2, 1, 30),
        (2, 2, 2),
        (2, 2, 6),
        (3, 2, 3),
        (2, 3, 4),
        (2, 2, 40),
    )
]


def is_defined(shape: PipelineShape) -> bool:
    try:
        makespan_s(shape, *np.ones((3, shape.num_stages)))
    except ConfigError:
        return False
    return True


DEFINED = [shape for shape in SHAPES if is_defined(shape)]


def random_case(shape: PipelineShape, seed: int, *, num_kinds: int) -> SplitBoundInstance:
    """Blocks of a few kinds in runs, an embedding and a head, and what ranks add once."""
    rng = np.random.default_rng(seed)
    num_blocks = shape.num_stages + int(rng.integers(0, 4))
    kind = np.minimum(np.sort(rng.integers(0, num_kinds, num_blocks)), num_kinds - 1)
    kind = np.unique(kind, return_inverse=True)[1]
    seconds, once = rng.uniform(0.1, 2, (3, num_kinds)), rng.uniform(0, 1, (2, num_kinds))
    fixed = np.zeros((3, shape.num_stages))
    fixed[:2] = rng.uniform(0, 0.2)
    fixed[:, 0] += rng.uniform(0, 1, 3)
    fixed[:, -1] += rng.uniform(0, 2, 3)
    once_fixed = np.zeros((2, shape.num_stages))
    once_fixed[:, [0, -1]] = rng.uniform(0, 1, (2, 2))
    fits = rng.random((shape.pp, num_blocks + 1, num_blocks + 1)) < 0.9 if shape.num_model_chunks == 1 else None
    return SplitBoundInstance(shape, seconds[:, kind], kind, fixed, once[:, kind], once_fixed, np.zeros(2), fits)


def all_times(instance: SplitBoundInstance) -> dict[tuple[int, ...], float]:
    """(O) of every split within the constraints, by the blocks of its stages."""
    shape, n = instance.shape, instance.num_blocks
    ranks = np.array(shape.rank_of_stage)
    found = {}
    for inner in itertools.combinations(range(1, n), shape.num_stages - 1):
        ends = np.array([0, *inner, n])
        of_rank = [np.diff(ends)[ranks == r] for r in range(shape.pp)]
        if any(np.ptp(sizes) > 1 for sizes in of_rank):
            continue
        if instance.fits is not None and not all(instance.fits[s, ends[s], ends[s + 1]] for s in range(shape.pp)):
            continue
        seconds = instance.fixed_s + np.add.reduceat(instance.seconds, ends[:-1], axis=1)
        once = instance.once_fixed_s + np.add.reduceat(instance.once_s, ends[:-1], axis=1)
        added = sum(np.bincount(ranks, values).max() for values in once)
        found[tuple(int(size) for size in np.diff(ends))] = makespan_s(shape, *seconds) + float(added)
    return found


@settings(max_examples=150, deadline=None)
@given(
    shape=st.sampled_from(DEFINED), seed=st.integers(0, 10**6), num_kinds=st.integers(1, 3), slack=st.floats(0.8, 3.0)
)
def test_no_split_is_below_the_bound(shape: PipelineShape, seed: int, num_kinds: int, slack: float) -> None:
    instance = random_case(shape, seed, num_kinds=num_kinds)
    fastest = min(all_times(instance).values(), default=np.inf)
    below_s = slack * fastest if np.isfinite(fastest) else 100.0
    found = lower_bound_s(instance, below_s=below_s)
    assert found.bound_s <= max(fastest, below_s * (fastest >= below_s)) * (1 + 1e-9)
    assert found.bound_s <= below_s
    assert not found.sizes or sum(found.sizes) == instance.num_blocks


@pytest.mark.parametrize("shape", [shape for shape in DEFINED if shape.schedule == "1f1b"])
def test_equal_stages_under_1f1b_are_exact(shape: PipelineShape) -> None:
    size = 2 * shape.num_stages
    instance = SplitBoundInstance(
        shape,
        np.tile([[1.0], [1.5], [0.5]], size),
        np.zeros(size, dtype=np.int64),
        np.zeros((3, shape.num_stages)),
        np.zeros((1, size)),
        np.zeros((1, shape.num_stages)),
        np.zeros(1),
    )
    step_s = makespan_s(shape, *np.tile([[2.0], [3.0], [1.0]], shape.num_stages))
    assert lower_bound_s(instance, below_s=2 * step_s).bound_s == pytest.approx(step_s)
    assert lower_bound_s(instance, below_s=0.9 * step_s).bound_s == 0.9 * step_s


def test_what_does_not_fit_is_no_split() -> None:
    shape = PipelineShape(schedule="1f1b", pp=2, num_model_chunks=1, num_microbatches=4)
    free = replace(random_case(shape, 3, num_kinds=1), fits=None)
    fastest = min(all_times(free).values())
    nothing = np.zeros((2, free.num_blocks + 1, free.num_blocks + 1), dtype=bool)
    none = replace(free, fits=nothing)
    assert lower_bound_s(free, below_s=10 * fastest).bound_s <= fastest * (1 + 1e-9)
    assert lower_bound_s(none, below_s=10 * fastest).bound_s == 10 * fastest


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), m=st.integers(2, 6))
def test_no_choice_of_options_is_below_the_bound(seed: int, m: int) -> None:
    shape = PipelineShape(schedule="1f1b", pp=2, num_model_chunks=1, num_microbatches=m)
    either = [random_case(shape, seed + n, num_kinds=1) for n in (0, 1)]
    n = min(instance.num_blocks for instance in either)
    seconds, once = (np.stack([getattr(c, name)[:, :n] for c in either]) for name in ("seconds", "once_s"))
    choices = tuple(zip(seconds, once, strict=True))
    base = replace(either[0], kind_of_block=np.zeros(n, dtype=np.int64), fits=None)
    times = []
    for chosen in itertools.product((0, 1), repeat=n):
        at = np.arange(n), np.array(chosen)
        one = replace(base, seconds=seconds[at[1], :, at[0]].T, once_s=once[at[1], :, at[0]].T)
        times += all_times(one).values()
    least = replace(base, seconds=seconds.min(axis=0), once_s=once.min(axis=0))
    free, bound = (
        lower_bound_s(case, below_s=2 * min(times)).bound_s for case in (least, replace(least, choices=choices))
    )
    assert free <= bound <= min(times) * (1 + 1e-9)
