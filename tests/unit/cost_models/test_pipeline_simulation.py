"""The replay of pipeline schedules: closed forms, a hand-worked case, memory, deadlocks, and laws on random pipelines."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.cost_models.pipeline import orders
from meshwright.cost_models.pipeline.orders import Action, Order
from meshwright.cost_models.pipeline.simulation import peak_bytes, simulate
from meshwright.schema.errors import ConfigError
from meshwright.schema.schedules import placement
from pipelines import equal, pipeline, random_pipeline


def parse(*rows: str) -> Order:
    """Rows such as "0F0 0BW0" as an order."""

    def action(text: str) -> Action:
        stage, rest = text[0], text[1:]
        kind = rest.rstrip("0123456789")
        return Action(int(stage), kind, int(rest.removeprefix(kind)))  # type: ignore[arg-type]

    return tuple(tuple(action(text) for text in row.split()) for row in rows)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 5), (2, 2), (4, 8), (8, 24)])
def test_equal_stages_take_the_closed_form(ranks: int, micro_batches: int) -> None:
    costs = equal(ranks, micro_batches)
    for order in (orders.gpipe(ranks, micro_batches), orders.one_f_one_b(ranks, micro_batches)):
        assert simulate(costs, order).makespan_s == (micro_batches + ranks - 1) * 3


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaving_divides_the_bubble_by_the_chunks(chunks: int) -> None:
    order = orders.one_f_one_b(4, 12, chunks)
    assert simulate(equal(4, 12, chunks=chunks), order).makespan_s == pytest.approx(36 + 9 / chunks)


def test_uneven_stages_with_transfers_by_hand() -> None:
    """F 0-2, transfer 1, F 3-7 and B 7-10 on the second rank, transfer, B 11-12 and W 12-15 on the first."""
    costs = pipeline([2, 4], [1, 3], [3, 5], micro_batches=1, transfer=1)
    timeline = simulate(costs, parse("0F0 0B0 0W0", "1F0 1B0 1W0"))
    assert [list(times) for times in timeline.start_s] == [[0, 11, 12], [3, 7, 10]]
    assert [list(times) for times in timeline.end_s] == [[2, 12, 15], [7, 10, 15]]
    assert (timeline.makespan_s, timeline.span_s, list(timeline.busy_s)) == (15, 15, [6, 12])
    assert timeline.bubble_fraction == pytest.approx(1 - 12 / 15)


def test_no_transfer_between_stages_of_one_rank() -> None:
    costs = dataclasses.replace(equal(2, 1, chunks=2, style="wave"), transfer_s=(10.0, 10.0, 10.0))
    forward_only = simulate(costs, parse("0F0 3F0 3BW0 0BW0", "1F0 2F0 2BW0 1BW0"))
    assert list(forward_only.start_s[1]) == [10.5, 11.0, 33.0, 34.0]


def test_span_is_shorter_than_makespan_where_ranks_end_in_turn() -> None:
    timeline = simulate(equal(4, 12), orders.zb_h2(4, 12))
    assert (timeline.span_s, timeline.makespan_s) == (36, 39)


@pytest.mark.parametrize(("make", "held"), [(orders.one_f_one_b, [8, 6, 4, 2]), (orders.gpipe, [24, 24, 24, 24])])
def test_peak_memory_counts_the_micro_batches_in_flight(make, held: list[int]) -> None:
    assert list(peak_bytes(equal(4, 12), make(4, 12))) == held


def test_split_backward_holds_the_weight_input_until_w() -> None:
    costs = pipeline([1], [1], [1], micro_batches=2, held=[5], freed=[2])
    assert list(peak_bytes(costs, parse("0F0 0B0 0F1 0B1 0W0 0W1"))) == [8]
    assert list(peak_bytes(costs, parse("0F0 0BW0 0F1 0BW1"))) == [5]


def test_deadlock_names_every_rank_and_what_it_waits_for() -> None:
    order = parse("0F0 0BW0 0F1 0BW1", "1F1 1F0 1BW0 1BW1")
    with pytest.raises(ConfigError) as caught:
        simulate(equal(2, 2), order)
    assert "2 of 2 ranks" in caught.value.message
    assert caught.value.details == ("rank 0 at 0BW0 waits for 1B0 of rank 1", "rank 1 at 1F1 waits for 0F1 of rank 0")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("0F0 0BW0",), "1 ranks"),
        (("0F0 0BW0 1F0", "1BW0"), "rank 0 cannot run 1F0"),
        (("0F0 0BW0", "1F0 1BW0 1F1"), "rank 1 cannot run 1F1"),
        (("0F0 0BW0 0W0", "1F0 1BW0"), "runs 0W0 twice"),
        (("0F0 0B0", "1F0 1BW0"), "5 of the 6 passes"),
    ],
)
def test_order_that_is_not_the_step_is_refused(rows: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(equal(2, 1), parse(*rows))


def test_columns_of_different_length_are_refused() -> None:
    with pytest.raises(ConfigError, match="columns"):
        dataclasses.replace(equal(2, 1), forward_s=(1.0,))


def test_rank_without_a_stage_is_refused() -> None:
    with pytest.raises(ConfigError, match="without a stage"):
        dataclasses.replace(equal(2, 1), rank_of_stage=(0, 2))


def test_memory_that_is_never_freed_is_refused() -> None:
    with pytest.raises(ConfigError, match="free what F holds"):
        dataclasses.replace(equal(2, 1), held_bytes=(3.0, 3.0))


def test_placements() -> None:
    assert placement(3, 2, "loop") == (0, 1, 2, 0, 1, 2)
    assert placement(3, 3, "wave") == (0, 1, 2, 2, 1, 0, 0, 1, 2)
    assert placement(3, 2, "wave_from_last") == (2, 1, 0, 0, 1, 2)


MAKERS = st.sampled_from([orders.gpipe, orders.one_f_one_b, orders.zb_h1, orders.zb_h2])


@settings(max_examples=40, deadline=None)
@given(MAKERS, st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 9))
def test_parts_sum_to_the_whole_and_nothing_beats_the_busiest_rank(
    make, seed: int, ranks: int, micro_batches: int
) -> None:
    costs = random_pipeline(seed, ranks=ranks, micro_batches=micro_batches)
    timeline = simulate(costs, make(ranks, micro_batches))
    assert np.allclose(timeline.busy_s, costs.work_s())
    assert timeline.makespan_s >= timeline.span_s >= np.max(costs.work_s())
    for start, end in zip(timeline.start_s, timeline.end_s, strict=True):
        assert np.all(start[1:] >= end[:-1])


@settings(max_examples=40, deadline=None)
@given(MAKERS, st.integers(0, 10**6), st.integers(0, 3), st.sampled_from(["forward_s", "backward_s", "weight_s"]))
def test_slower_pass_never_shortens_a_given_order(make, seed: int, stage: int, column: str) -> None:
    costs = random_pipeline(seed, ranks=4, micro_batches=6)
    times = list(getattr(costs, column))
    times[stage] += 3.0
    slower = dataclasses.replace(costs, **{column: tuple(times)})
    order = make(4, 6)
    assert simulate(slower, order).makespan_s >= simulate(costs, order).makespan_s
