"""Passes of a lost stage on its peers: verified, against bounds, and by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshwright.schema import InfeasibleError
from meshwright.solvers.pipeline.rerouting import ReroutingInstance, check, makespan_s, solve

seconds = st.floats(0.1, 3.0)


@given(
    stages=st.lists(st.tuples(seconds, seconds), min_size=1, max_size=4),
    counts=st.lists(st.integers(1, 6), min_size=2, max_size=3),
    data=st.data(),
)
def test_rerouted_passes_hold_the_constraints_and_take_no_less_than_the_busiest_device(
    stages: list[tuple[float, float]], counts: list[int], data: st.DataObject
) -> None:
    devices = [(d, s) for d in range(len(counts)) for s in range(len(stages))]
    lost = data.draw(st.sets(st.sampled_from(devices), max_size=2))
    forward, backward = zip(*stages, strict=True)
    held = tuple(range(len(stages), 0, -1))
    instance = ReroutingInstance(forward, backward, tuple(counts), held, frozenset(lost))
    if any({(d, s) for d in range(len(counts))} <= lost for s in range(len(stages))):
        with pytest.raises(InfeasibleError, match="every replica"):
            solve(instance)
        return
    passes = solve(instance)
    assert not check(instance, passes)
    alive = [sum((d, s) not in lost for d in range(len(counts))) for s in range(len(stages))]
    busiest = max(sum(counts) * sum(stage) / count for stage, count in zip(stages, alive, strict=True))
    assert makespan_s(passes) >= busiest - 1e-9


@pytest.mark.parametrize(("num_stages", "count"), [(1, 3), (2, 4), (4, 8)])
def test_without_a_loss_it_is_1f1b(num_stages: int, count: int) -> None:
    """(m + p - 1) times a forward and a backward pass."""
    passes = solve(
        ReroutingInstance((1.0,) * num_stages, (2.0,) * num_stages, (count, count), tuple(range(num_stages, 0, -1)))
    )
    assert makespan_s(passes) == pytest.approx(3 * (count + num_stages - 1))


def test_a_peer_of_the_last_stage_runs_twice_as_many() -> None:
    """pp 2 x dp 2 without the second stage of one: eight micro-batches behind one forward and before one backward pass."""
    instance = ReroutingInstance((1.0, 1.0), (2.0, 2.0), (4, 4), (2, 1), frozenset({(1, 1)}))
    assert makespan_s(solve(instance)) == pytest.approx(1 + 8 * 3 + 2)


def test_the_checker_sees_what_is_wrong() -> None:
    instance = ReroutingInstance((1.0, 1.0), (2.0, 2.0), (2, 2), (2, 1), frozenset({(1, 1)}))
    passes = solve(instance)
    assert any("(C1)" in text for text in check(instance, passes[1:]))
    whole = ReroutingInstance((1.0, 1.0), (2.0, 2.0), (2, 2), (2, 1))
    assert any("(C1)" in text for text in check(whole, passes))
