"""Greedy orders within any memory cap, also where an input pass leaves more behind than it frees."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.cost_models.pipeline.orders import Pipeline
from meshwright.cost_models.pipeline.simulation import peak_bytes
from meshwright.schema.errors import InfeasibleError
from meshwright.schema.schedules import placement
from meshwright.solvers.pipeline.greedy import QUICK_RULES, greedy_order, quick_order
from meshwright.solvers.pipeline.schedule import PipelineInstance, check, lower_bound_s


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Pipeline, tuple[float, ...]]:
    """Uneven passes over a V or a line; gradients that wait for the weight pass take up to as much as the activations."""
    ranks, chunks = draw(st.integers(2, 4)), draw(st.integers(1, 2))
    stages, seconds = ranks * chunks, st.integers(1, 9)
    columns = [[float(draw(seconds)) for _ in range(stages)] for _ in range(4)]
    pending = draw(st.sampled_from([0.0, 0.5, 1.0]))
    held = columns[3]
    pipeline = Pipeline(
        num_microbatches=draw(st.integers(1, 8)),
        rank_of_stage=placement(ranks, chunks, "wave"),
        forward_s=tuple(columns[0]),
        backward_s=tuple(columns[1]),
        weight_s=tuple(columns[2]),
        transfer_s=(1.0,) * (stages - 1),
        held_bytes=tuple(held),
        backward_freed_bytes=tuple(-pending * each for each in held),
        weight_freed_bytes=tuple((1 + pending) * each for each in held),
    )
    least = [sum(held[s] for s in pipeline.stages_of(r)) for r in range(ranks)]
    largest = [pending * max(held[s] for s in pipeline.stages_of(r)) for r in range(ranks)]
    room = draw(st.floats(0.5, 3.0))
    return pipeline, tuple(room * one + more for one, more in zip(least, largest, strict=True))


@settings(max_examples=60, deadline=None)
@given(pipelines())
def test_an_order_is_whole_and_within_its_caps(drawn: tuple[Pipeline, tuple[float, ...]]) -> None:
    pipeline, caps = drawn
    order = quick_order(pipeline, caps)
    if order is None:
        one = [sum(pipeline.held_bytes[s] for s in pipeline.stages_of(r)) for r in range(pipeline.num_ranks)]
        assert np.any(np.array(one) > 0.999 * np.array(caps) - 1e-6) or min(np.array(caps) / one) < 2
        return
    assert np.all(peak_bytes(pipeline, order) <= np.array(caps) * (1 + 1e-9) + 1e-6)
    instance = PipelineInstance(pipeline, tuple(cap + 1e-6 for cap in caps))
    assert check(instance, order) >= lower_bound_s(instance) * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(pipelines(), st.floats(0.5, 2.0))
def test_what_cannot_be_short_enough_is_given_up_and_nothing_else(
    drawn: tuple[Pipeline, tuple[float, ...]], slack: float
) -> None:
    pipeline, caps = drawn
    try:
        order, seconds = greedy_order(pipeline, caps, QUICK_RULES[0])
    except InfeasibleError:
        return
    within, within_s = greedy_order(pipeline, caps, QUICK_RULES[0], below_s=slack * seconds)
    assert within_s == (seconds if slack > 1 else np.inf)
    assert slack <= 1 or within == order
    unlimited, limited = (
        check(PipelineInstance(pipeline, tuple(cap + 1e-6 for cap in caps)), found)
        for found in (quick_order(pipeline, caps), quick_order(pipeline, caps, below_s=slack * seconds))
        if found is not None
    )
    assert limited >= min(unlimited, slack * seconds) * (1 - 1e-9)
    assert limited <= seconds * (1 + 1e-9)
