"""The named schedules: published bubble rates and memory, and equality with the orders torch itself runs."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from meshwright.cost_models.pipeline import orders
from meshwright.cost_models.pipeline.orders import Action, Order
from meshwright.cost_models.pipeline.simulation import peak_bytes, simulate
from meshwright.schema.errors import ConfigError, InfeasibleError
from meshwright.solvers.pipeline.greedy import EVENT_RULES, greedy_order, refill_weight_passes
from meshwright.solvers.pipeline.waves import WAVE_RULES, wave_order
from pipelines import equal, pipeline, published_cases, published_pipeline, random_pipeline

NAMED = {"1F1B": orders.one_f_one_b, "ZB-H1": orders.zb_h1, "ZB-H2": orders.zb_h2}


@pytest.mark.parametrize(("row", "name", "rate"), published_cases(*NAMED))
def test_named_schedule_has_the_published_bubble_rate(row: tuple[float, ...], name: str, rate: float) -> None:
    order = NAMED[name](int(row[0]), int(row[1]))
    assert round(simulate(published_pipeline(row), order).bubble_fraction, 4) == rate


@pytest.mark.parametrize(
    ("row", "name", "rate"),
    [case for case in published_cases("ZB-1p", "ZB-2p") if case[0][1] <= 64],  # type: ignore[index]
)
def test_wave_greedy_has_the_published_bubble_rate_at_one_and_two_times_the_memory(
    row: tuple[float, ...], name: str, rate: float
) -> None:
    """Up to 64 micro-batches; the larger ones are in benchmarks/pipeline_schedules.py."""
    costs = published_pipeline(row)
    caps = [2.0 * row[0] * (1 if name == "ZB-1p" else 2)] * int(row[0])
    made = [wave_order(costs, caps, rule) for rule in WAVE_RULES]
    assert round(min(simulate(costs, order).bubble_fraction for order in made), 4) == rate
    assert all(np.all(peak_bytes(costs, order) <= caps) for order in made)


@pytest.mark.parametrize(
    ("make", "chunks", "style", "span", "makespan", "peak"),
    [
        # F = B = W on 8 ranks, 24 micro-batches, memory in half micro-batches of one rank; torch 2.13 and sail-sg/zero-bubble.
        (orders.zb_v, 2, "wave", 72.0, 75.5, 16.0),
        (orders.dualpipe_v, 2, "wave", 75.5, 75.5, 17.0),
        (orders.v_min, 2, "wave", 85.5, 85.5, 7.0),
        (orders.zb_h1, 1, "loop", 79.0, 79.0, 16.0),
        (orders.zb_h2, 1, "loop", 72.0, 79.0, 30.0),
        (lambda p, m: orders.one_f_one_b(p, m, 2), 2, "loop", 82.5, 82.5, 23.0),
        (lambda p, m: orders.zb_h1(p, m, 2), 2, "loop", 75.5, 75.5, 16.0),
        (lambda p, m: orders.gpipe(p, m, 2), 2, "loop", 82.5, 82.5, 48.0),
    ],
)
def test_equal_passes_take_the_recorded_time_and_memory(make, chunks, style, span, makespan, peak) -> None:
    timeline = simulate(equal(8, 24, chunks=chunks, style=style), make(8, 24))
    assert (timeline.span_s, timeline.makespan_s, max(timeline.peak_bytes)) == (span, makespan, peak)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 16])
def test_v_half_and_v_min_hold_about_a_half_and_a_third_of_1f1b(ranks: int) -> None:
    costs = equal(ranks, 3 * ranks, chunks=2, style="wave")
    for make, share in ((orders.v_half, 1 / 2), (orders.v_min, 1 / 3)):
        peak = peak_bytes(costs, make(ranks, 3 * ranks))
        assert max(peak) <= share * 2 * ranks + 2
        assert max(peak) - min(peak) <= 1


def from_torch(kind: str, ranks: int, micro_batches: int) -> Order:
    """The order of a torch schedule class, its pairs written one after the other."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    rounds = max(1, micro_batches // ranks)
    stub = SimpleNamespace(
        pp_group_size=ranks, _n_microbatches=micro_batches, num_stages=2 * ranks, n_local_stages=2, _stages=[0, 1],
        number_of_rounds=rounds, microbatches_per_round=micro_batches // rounds,
    )  # fmt: skip
    letters = {"F": "F", "I": "B", "W": "W", "B": "BW"}
    rows = []
    for rank in range(ranks):
        actions = getattr(schedules, kind)._calculate_single_rank_operations(stub, rank)
        parts = [part for action in actions if action is not None for part in (action.sub_actions or (action,))]
        rows.append(
            tuple((part.stage_index, letters[part.computation_type.value], part.microbatch_index) for part in parts)
        )
    return tuple(rows)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [2, 3, 5])
@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("ScheduleInterleaved1F1B", lambda p, m: orders.one_f_one_b(p, m, 2)),
        ("ScheduleInterleavedZeroBubble", lambda p, m: orders.zb_h1(p, m, 2)),
        ("ScheduleLoopedBFS", lambda p, m: orders.gpipe(p, m, 2)),
        ("ScheduleZBVZeroBubble", orders.zb_v),
        ("ScheduleDualPipeV", orders.dualpipe_v),
    ],
)
def test_order_is_the_one_torch_runs(kind: str, make, ranks: int, rounds: int) -> None:
    assert make(ranks, ranks * rounds) == from_torch(kind, ranks, ranks * rounds)


def test_zb_v_with_fewer_micro_batches_than_its_warm_up_is_the_one_torch_runs() -> None:
    assert orders.zb_v(4, 3) == from_torch("ScheduleZBVZeroBubble", 4, 3)


def test_numbers_a_schedule_does_not_exist_for_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 x 4 micro-batches"):
        orders.dualpipe_v(4, 7)
    with pytest.raises(ConfigError, match="equal rounds"):
        orders.one_f_one_b(4, 9, 2)


@pytest.mark.parametrize("seed", range(12))
def test_greedy_orders_run_and_keep_the_cap(seed: int) -> None:
    for chunks, style in ((1, "loop"), (2, "loop"), (2, "wave")):
        costs = random_pipeline(seed, ranks=4, micro_batches=7, chunks=chunks, style=style)  # type: ignore[arg-type]
        least = [sum(costs.held_bytes[s] for s in costs.stages_of(rank)) for rank in range(4)]
        for factor in (1, 2, 10):
            caps = [(factor + (seed + rank) % 3) * need for rank, need in enumerate(least)]
            made = [greedy_order(costs, caps, rule)[0] for rule in EVENT_RULES]
            if chunks == 1:
                made += [wave_order(costs, caps, rule) for rule in WAVE_RULES]
            for order in made:
                assert np.all(simulate(costs, order).peak_bytes <= np.array(caps) + 1e-9)


@pytest.mark.parametrize(("greedy", "rule"), [(greedy_order, EVENT_RULES[0]), (wave_order, WAVE_RULES[0])])
def test_cap_below_one_micro_batch_is_infeasible(greedy, rule) -> None:
    with pytest.raises(InfeasibleError, match="rank 1 cannot hold one micro-batch"):
        greedy(equal(2, 4), [2.0, 1.5], rule)


def passes_but_weight(actions: tuple[Action, ...]) -> list[tuple[int, str, int]]:
    return [(a.stage, a.kind[:1], a.micro_batch) for a in actions if a.kind != "W"]


def test_refilling_keeps_the_sequence_and_moves_weight_passes_into_waits() -> None:
    costs = pipeline([1, 3], [1, 3], [1, 3], micro_batches=6, held=[2, 2])
    given = orders.one_f_one_b(2, 6)
    found = refill_weight_passes(costs, [4.0, 4.0], given, 1.0)
    for row, old in zip(found, given, strict=True):
        assert passes_but_weight(row) == passes_but_weight(old)
    assert simulate(costs, found).makespan_s < simulate(costs, given).makespan_s
    with pytest.raises(InfeasibleError, match="more memory"):
        refill_weight_passes(costs, [2.0, 2.0], orders.gpipe(2, 6), 1.0)
