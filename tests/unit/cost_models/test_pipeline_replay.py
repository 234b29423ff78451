"""Replays equal the event simulation, extrapolated ones too; what ranks hold is counted; bounds hold for random splits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.cost_models.pipeline.in_flight import (
    BACKWARD,
    INPUT,
    _moments,
    holdings,
    in_flight,
    in_flight_of_stage,
    min_in_flight,
    min_summed_in_flight,
)
from meshwright.cost_models.pipeline.orders import Pipeline
from meshwright.cost_models.pipeline.replay import (
    PipelineShape,
    PipelineWork,
    as_rows,
    ends_s,
    lower_bound_s,
    makespan_s,
    order_of,
    pipelined_s,
    program,
    rows_of,
)
from meshwright.cost_models.pipeline.replays import makespans_s
from meshwright.cost_models.pipeline.simulation import peak_bytes, simulate
from meshwright.schema import ConfigError
from meshwright.schema.schedules import OVER_A_V, SCHEDULE_NAMES

NAMED = [name for name in SCHEDULE_NAMES if name != "synthesised"]

V_NAMES = tuple(schedule.name for schedule in OVER_A_V)


@st.composite
def shapes(draw: st.DrawFn, max_rounds: int = 8) -> PipelineShape:
    schedule = draw(st.sampled_from(NAMED))
    pp = draw(st.integers(2, 6))
    chunks = 2 if schedule in V_NAMES else 1 if schedule == "zb-h2" else draw(st.integers(1, 3))
    in_rounds = chunks > 1 and schedule not in V_NAMES
    m = draw(st.integers(1, max_rounds)) * pp if in_rounds else draw(st.integers(1, max_rounds * pp))
    return PipelineShape(schedule=schedule, pp=pp, num_model_chunks=chunks, num_microbatches=m)


def stage_times(shape: PipelineShape, seed: int, spread: float) -> tuple[np.ndarray, ...]:
    """F, B and W of each stage, equal but for `spread`."""
    rng = np.random.default_rng(seed)
    return tuple(rng.uniform(0.5, 2) + spread * rng.random(shape.num_stages) for _ in range(3))


def simulated(shape: PipelineShape, times: tuple[np.ndarray, ...], held_bytes: np.ndarray | None = None) -> Pipeline:
    size = shape.num_stages
    kept = np.ones(size) if held_bytes is None else held_bytes
    return Pipeline(
        num_microbatches=shape.num_microbatches,
        rank_of_stage=shape.rank_of_stage,
        forward_s=tuple(times[0]),
        backward_s=tuple(times[1]),
        weight_s=tuple(times[2]),
        transfer_s=(0.0,) * (size - 1),
        held_bytes=tuple(kept),
        backward_freed_bytes=(0.0,) * size,
        weight_freed_bytes=tuple(kept),
    )


@settings(max_examples=150, deadline=None)
@given(shapes(), st.integers(0, 2**16), st.sampled_from([0.0, 0.01, 1.0]))
def test_replay_equals_the_simulation(shape: PipelineShape, seed: int, spread: float) -> None:
    times = stage_times(shape, seed, spread)
    expected = simulate(simulated(shape, times), order_of(shape)).makespan_s
    assert makespan_s(shape, *times) == pytest.approx(expected, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(shape=shapes(max_rounds=40), seed=st.integers(0, 10**6), spread=st.sampled_from([0.0, 0.1, 2.0]))
def test_many_cuts_at_once_are_replayed_as_one_by_one(shape: PipelineShape, seed: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    seconds = 1 + spread * rng.uniform(0, 1, (3, shape.num_stages, 5))
    one_by_one = [makespan_s(shape, *seconds[:, :, cut]) for cut in range(5)]
    assert makespans_s(shape, seconds) == pytest.approx(one_by_one, rel=1e-9)


@pytest.mark.parametrize("schedule", NAMED)
@pytest.mark.parametrize("slow", [0, 1, 3])
def test_many_micro_batches_extrapolate_exactly(schedule: str, slow: int) -> None:
    """One slow stage, as the head or the embedding makes it, and far more micro-batches than it takes to become periodic."""
    chunks = 2 if schedule in V_NAMES else 1
    shape = PipelineShape(schedule=schedule, pp=4, num_model_chunks=chunks, num_microbatches=204)
    times = stage_times(shape, 5, 0.0)
    times[0][slow] *= 1.3
    assert makespan_s(shape, *times) == pytest.approx(max(ends_s(program(shape), *times)), rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(shapes())
def test_rows_are_those_of_the_order(shape: PipelineShape) -> None:
    for row, expected in zip(rows_of(shape), as_rows(order_of(shape)), strict=True):
        assert np.array_equal(row, expected)


@pytest.mark.parametrize(("pp", "m", "chunks"), [(2, 8, 1), (4, 12, 1), (4, 12, 3), (8, 16, 2)])
def test_equal_stages_have_the_closed_form(pp: int, m: int, chunks: int) -> None:
    stage_s = np.full(pp * chunks, 3.0 / chunks)
    shape = PipelineShape(schedule="1f1b", pp=pp, num_model_chunks=chunks, num_microbatches=m)
    assert makespan_s(shape, stage_s / 3, stage_s / 3, stage_s / 3) == pytest.approx(
        pipelined_s(np.full(pp, 3.0), m, chunks)
    )


def test_zero_bubble_schedules_have_the_published_bubbles() -> None:
    """Equal F, B and W: (pp - 1)(f + b - w) under ZB-H1 (arXiv:2401.10241), half of it over a V (arXiv:2405.15362)."""
    unit = np.ones(8)
    one = PipelineShape(schedule="zb-h1", pp=8, num_model_chunks=1, num_microbatches=32)
    assert makespan_s(one, unit, unit, unit) == pytest.approx(3 * 32 + 7)
    half = np.full(16, 0.5)
    folded = PipelineShape(schedule="zb-v", pp=8, num_model_chunks=2, num_microbatches=32)
    assert makespan_s(folded, half, half, half) == pytest.approx(3 * 32 + 3.5)


@settings(max_examples=60, deadline=None)
@given(shapes(max_rounds=6), st.integers(0, 2**16))
def test_what_ranks_hold_is_what_the_order_holds(shape: PipelineShape, seed: int) -> None:
    """More micro-batches than are counted hold no more; only the first stage has nothing pending."""
    rng = np.random.default_rng(seed)
    kept, pending = rng.uniform(1, 3, shape.num_stages), rng.uniform(0.1, 2, shape.num_stages)
    pending[0] = 0
    pipeline = replace(
        simulated(shape, stage_times(shape, 0, 0), kept),
        backward_freed_bytes=tuple(-pending),
        weight_freed_bytes=tuple(kept + pending),
    )
    expected = peak_bytes(pipeline, order_of(shape))
    ranks, of_shape = np.array(shape.rank_of_stage), holdings(shape)
    for rank in range(shape.pp):
        held = of_shape.stored[rank] @ kept[ranks == rank] + of_shape.pending[rank] @ pending[ranks == rank]
        assert held.max() == pytest.approx(expected[rank])


@settings(max_examples=60, deadline=None)
@given(shapes(max_rounds=6))
def test_gradients_add_up_from_the_first_backward_pass_of_a_chunk_to_its_last(shape: PipelineShape) -> None:
    of_shape = holdings(shape)
    assert not np.any(of_shape.summed & of_shape.reduced)
    for rank, row in enumerate(order_of(shape)):
        made = {action.stage // shape.pp for action in row if action.kind in ("BW", "W")}
        states = [of_shape.summed[rank].max(axis=0), of_shape.summed[rank].min(axis=0)]
        assert made == set(np.flatnonzero(states[0]))
        is_first = (of_shape.moment[rank] == BACKWARD) | (of_shape.moment[rank] == INPUT)
        assert shape.num_model_chunks == 1 or shape.num_microbatches == 1 or is_first.any()


@settings(max_examples=60, deadline=None)
@given(shapes(max_rounds=6), st.data())
def test_the_fullest_of_all_moments_is_among_those_held(shape: PipelineShape, data: st.DataObject) -> None:
    """However many bytes a micro-batch or a gradient of each chunk takes; what is reduced may free more than it takes."""
    v, held = shape.num_model_chunks, holdings(shape)
    states, rank, moment, chunk = _moments(rows_of(shape), shape)
    sizes = np.array(data.draw(st.lists(st.integers(0, 9), min_size=4 * v, max_size=4 * v)))
    sizes[3 * v :] -= 4
    of_held = np.concatenate([held.stored, held.pending, held.summed, held.reduced], axis=-1) @ sizes
    for group in {*zip(rank.tolist(), moment.tolist(), chunk.tolist(), strict=True)}:
        of_all = (states @ sizes)[(rank == group[0]) & (moment == group[1]) & (chunk == group[2])]
        at = (held.moment[group[0]] == group[1]) & (held.chunk[group[0]] == group[2])
        assert of_held[group[0]][at].max() == of_all.max()


@settings(max_examples=60, deadline=None)
@given(shapes(max_rounds=6))
def test_every_rank_holds_the_fewest_at_least(shape: PipelineShape) -> None:
    of_shape = (SCHEDULE_NAMES.index(shape.schedule), shape.num_microbatches, shape.pp, shape.num_model_chunks)
    assert min_in_flight(*of_shape) <= in_flight(shape).min() + 1e-9
    holding, beside = holdings(shape), float(min_summed_in_flight(*of_shape))
    if beside >= 0:
        all_sum = holding.summed.all(axis=2)
        assert beside <= np.where(all_sum, holding.stored.mean(axis=2), -1).max(axis=1).min() + 1e-9


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_closed_form_of_micro_batches_in_flight_is_that_of_the_order(chunks: int) -> None:
    shape = PipelineShape(schedule="1f1b", pp=4, num_model_chunks=chunks, num_microbatches=16)
    assert in_flight_of_stage(1, 16, 4, np.arange(4), chunks).tolist() == pytest.approx(in_flight(shape).tolist())


def test_schedules_hold_what_they_are_named_for() -> None:
    """In units of 1F1B's first rank: ZB-H1 and ZBV one, ZB-H2 two, V-half a half and V-min a third, but for a few passes."""
    most = {
        name: in_flight(
            PipelineShape(schedule=name, pp=12, num_model_chunks=1 + (name in V_NAMES), num_microbatches=96)
        ).max()
        for name in NAMED
    }
    assert most["1f1b"] == 12
    assert most["zb-h1"] == most["zb-v"] == 12
    assert most["zb-h2"] == 23
    assert 6 <= most["v-half"] <= 8
    assert 4 <= most["v-min"] <= 5
    assert most["gpipe"] == 96


def test_undefined_schedules_are_named() -> None:
    with pytest.raises(ConfigError, match="zb-h2 is not defined for 3 model chunks"):
        order_of(PipelineShape(schedule="zb-h2", pp=2, num_model_chunks=3, num_microbatches=8))


def test_a_synthesised_order_is_not_made_up() -> None:
    with pytest.raises(ConfigError, match="brings its order along"):
        order_of(PipelineShape(schedule="synthesised", pp=2, num_model_chunks=1, num_microbatches=8))


@st.composite
def splits(draw: st.DrawFn) -> tuple[PipelineShape, np.ndarray, np.ndarray, np.ndarray]:
    """A shape, seconds (F, B, W) of every stage, of its kinds of layers (block, first blocks, embedding, head), transfers."""
    shape = draw(shapes())
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    blocks = shape.num_model_chunks + rng.integers(0, 1 + draw(st.integers(0, 6)), shape.pp)
    block = rng.uniform(0.2, 1.2, 3)
    others = block * rng.uniform(0.1, 1.5)
    ends = np.stack([rng.uniform(0, 0.5, 3), rng.uniform(0, 3, 3) * draw(st.booleans())])
    kinds = np.stack([block, others, *ends])
    num_others = draw(st.integers(0, min(3, (blocks.sum() - 1) // 2)))
    ranks, chunk = np.array(shape.rank_of_stage), np.arange(shape.num_stages) // shape.pp
    sizes = blocks[ranks] // shape.num_model_chunks + (chunk < blocks[ranks] % shape.num_model_chunks)
    layers = np.repeat(kinds[[1, 0]], [num_others, blocks.sum() - num_others], axis=0)
    times = np.stack([part.sum(axis=0) for part in np.split(layers, np.cumsum(sizes)[:-1])])
    times[0] += ends[0]
    times[-1] += ends[1]
    return shape, times, kinds, np.array([num_others, blocks.sum(), rng.uniform(0, 0.2) * draw(st.booleans())])


@settings(max_examples=400, deadline=None)
@given(splits(), st.booleans())
def test_no_split_beats_the_bound(split: tuple[PipelineShape, np.ndarray, np.ndarray, np.ndarray], knows: bool) -> None:
    """Random uneven ranks, chunks of each as even as its blocks allow, other blocks, embedding and head at the ends."""
    shape, times, (block, others, embedding, head), (num_others, num_blocks, transfer_s) = split
    chunks, ranks = shape.num_model_chunks, np.array(shape.rank_of_stage)
    each_way = transfer_s / 2 / chunks
    found = makespan_s(shape, times[:, 0] + each_way, times[:, 1] + each_way, times[:, 2])
    busy = np.bincount(ranks, times.sum(axis=1))
    of_blocks = np.stack([block, others] if num_others else [block])
    deep = np.concatenate([of_blocks, head[None]] if head.sum() else [of_blocks])
    shares, work_s = deep / deep.sum(axis=1)[:, None], of_blocks.sum(axis=1)
    one = np.ones(1)
    work = PipelineWork(
        schedule=one.astype(int) * SCHEDULE_NAMES.index(shape.schedule),
        pp=shape.pp * one,
        num_model_chunks=chunks * one,
        num_microbatches=shape.num_microbatches * one,
        total_s=times.sum() * one,
        blocks_s=(times.sum() - embedding.sum() - head.sum()) * one,
        deep_s=(times.sum() - embedding.sum()) * one,
        slowest_s=(busy.max() if knows else 0.0) * one,
        num_blocks=num_blocks,
        block_s=work_s.min() * one,
        block_forward_s=of_blocks[:, 0].min() * one,
        transfer_s=transfer_s * one,
        total_forward_s=times[:, 0].sum() * one,
        num_other_blocks=num_others,
        main_s=block.sum() * one,
        main_forward_share=block[0] / block.sum() * one,
        block_share=work_s.min() / work_s.max() * one,
        block_forward_share=of_blocks[:, 0].min() / work_s.max() * one,
        path_share=(1 - shares[:, 2]).min() * one,
        forward_share=shares[:, 0].max() * one,
        weight_share=shares[:, 2].max() * one,
    )
    assert lower_bound_s(work)[0] <= found * (1 + 1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_bound_is_the_step_of_equal_stages(schedule: str) -> None:
    one = np.ones(1)
    third = one / 3
    work = PipelineWork(
        schedule=one.astype(int) * SCHEDULE_NAMES.index(schedule), pp=4 * one, num_model_chunks=one, num_microbatches=16 * one,
        total_s=12 * one, blocks_s=12 * one, deep_s=12 * one, slowest_s=3 * one, num_blocks=4, block_s=3 * one,
        block_forward_s=one, transfer_s=0 * one, num_other_blocks=0, main_forward_share=third,
        total_forward_s=4 * one, main_s=3 * one,
        block_share=one, block_forward_share=third, path_share=2 * third,
        forward_share=third, weight_share=third,
    )  # fmt: skip
    shape = PipelineShape(schedule=schedule, pp=4, num_model_chunks=1, num_microbatches=16)
    step = makespan_s(shape, *(np.ones(4),) * 3)
    assert lower_bound_s(work)[0] == pytest.approx(step)
