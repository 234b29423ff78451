"""Synthesised pipeline schedules: brute force, proved optima, published schedules at equal memory, bounds and errors."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.cost_models.pipeline import orders
from meshwright.cost_models.pipeline.orders import Action, Order, Pipeline
from meshwright.cost_models.pipeline.simulation import peak_bytes, simulate
from meshwright.schema.errors import ConfigError, InfeasibleError
from meshwright.solvers.backend import Status
from meshwright.solvers.pipeline.improve import solve, split_backward, synthesise
from meshwright.solvers.pipeline.schedule import (
    Length,
    PipelineInstance,
    best_greedy,
    check,
    length_s,
    lower_bound_s,
    named_orders,
)
from pipelines import equal, pipeline, random_pipeline

SHARED = Path(__file__).resolve().parents[4] / "shared/data/schedules"


def sequences(num_micro_batches: int, stages: tuple[int, ...]) -> Iterator[tuple[Action, ...]]:
    """Every sequence of one rank with each stage's passes in order of micro-batch and F before B before W."""

    def extend(done: dict[tuple[int, str], int], row: tuple[Action, ...]) -> Iterator[tuple[Action, ...]]:
        if len(row) == 3 * num_micro_batches * len(stages):
            yield row
        for s, (kind, before) in itertools.product(stages, (("F", None), ("B", "F"), ("W", "B"))):
            i = done.get((s, kind), 0)
            if i < (num_micro_batches if before is None else done.get((s, before), 0)):
                yield from extend({**done, (s, kind): i + 1}, (*row, Action(s, kind, i)))  # type: ignore[arg-type]

    return extend({}, ())


def brute_force(instance: PipelineInstance) -> float:
    """Least length over every order that runs and fits; infinite without one."""
    costs = instance.pipeline
    rows = []
    for rank in range(costs.num_ranks):
        fitting = []
        for row in sequences(costs.num_microbatches, costs.stages_of(rank)):
            alone: Order = tuple(row if r == rank else () for r in range(costs.num_ranks))
            if peak_bytes(costs, alone)[rank] <= instance.cap_bytes[rank]:
                fitting.append(row)
        rows.append(fitting)
    best = np.inf
    for order in itertools.product(*rows):
        try:
            best = min(best, length_s(simulate(costs, order), instance.length))
        except ConfigError:
            continue  # deadlock
    return float(best)


@pytest.mark.parametrize("length", ["makespan", "span"])
@pytest.mark.parametrize(("ranks", "micro_batches", "chunks"), [(2, 3, 1), (3, 2, 1), (2, 1, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_small_uneven_pipelines_reach_the_brute_force_optimum_and_prove_it(
    seed: int, ranks: int, micro_batches: int, chunks: int, length: Length
) -> None:
    costs = random_pipeline(seed, ranks=ranks, micro_batches=micro_batches, chunks=chunks)
    one = np.array([sum(costs.held_bytes[s] for s in costs.stages_of(rank)) for rank in range(ranks)])
    instance = PipelineInstance(costs, tuple(one * (1 + seed % 2) + seed // 2), length)
    solution = solve(instance, time_limit_s=20)
    best = brute_force(instance)
    assert solution.status is Status.OPTIMAL
    assert solution.objective == pytest.approx(best) == check(instance, solution.choice)
    assert solution.bound == pytest.approx(best)
    assert lower_bound_s(instance) <= best * (1 + 1e-12)


# Span at equal F, B, W memory of 2, 1, 1 a micro-batch; proved by CP-SAT elsewhere, the last two here by the bound alone.
# name, F, B, W, transfer, micro-batches on 4 ranks, cap in micro-batches, optimum
OPTIMA = (
    ("unit", 1, 1, 1, 0, 12, 4, 39),
    ("transfers, tight", 10, 10, 10, 1, 8, 4, 282),
    ("transfers", 10, 10, 10, 1, 8, 8, 242),
    ("5-6-4, tight", 5, 6, 4, 0, 12, 5, 193),
    ("5-6-4", 5, 6, 4, 0, 12, 7, 183),
    ("unit, 37", 1, 1, 1, 0, 12, 6, 37),
)


@pytest.mark.parametrize("case", OPTIMA, ids=lambda case: case[0])
def test_known_optimum_is_reached_within_its_memory(
    case: tuple[str, float, float, float, float, int, int, float],
) -> None:
    _, forward, backward, weight, transfer, micro_batches, cap, optimum = case
    costs = pipeline([forward] * 4, [backward] * 4, [weight] * 4, micro_batches=micro_batches, transfer=transfer)
    instance = PipelineInstance(costs, (2.0 * cap,) * 4, "span")
    solution = solve(instance, time_limit_s=60, rel_gap=0.05)
    if solution.objective > optimum:
        solution = solve(instance, time_limit_s=60)
    assert solution.objective == optimum
    assert solution.bound <= optimum
    assert np.all(peak_bytes(costs, solution.choice) <= 2 * cap)


# The profile of an uneven pipeline with its head on the last rank; sail-sg/zero-bubble-pipeline-parallelism, auto_schedule.py.
UNEVEN_F = (30715, 29233, 29106, 29078, 28850, 28919, 28924, 41678)
UNEVEN_B = (31308, 29344, 29357, 29455, 29217, 29384, 29354, 38731)
UNEVEN_W = (18746, 18789, 19062, 19367, 19455, 19967, 20096, 32833)
UNEVEN_HELD = (943, *(1240,) * 6, 1071)
UNEVEN_FREED = (533, *(688,) * 6, 588)
UNEVEN_BEST_OF_TORCH = 3729467.5  # ZBV, 9920 units of memory; the zero-bubble greedy needs 3831880 there


def uneven(chunks: int, style: str) -> Pipeline:
    return pipeline(
        UNEVEN_F, UNEVEN_B, UNEVEN_W, micro_batches=32, transfer=473, chunks=chunks, style=style,  # type: ignore[arg-type]
        held=UNEVEN_HELD, freed=UNEVEN_FREED,
    )  # fmt: skip


def test_uneven_profile_has_no_idle_second_on_its_slowest_rank() -> None:
    """A V that starts and ends on the slow rank keeps it busy from the first to the last second: nothing can be shorter."""
    placements = ((1, "loop"), (2, "loop"), (2, "wave"), (2, "wave_from_last"))
    instances = tuple(PipelineInstance(uneven(*placed), (9920.0,) * 8) for placed in placements)
    which, solution = synthesise(instances, time_limit_s=20)
    assert placements[which] == (2, "wave_from_last")
    assert solution.objective == 32 * (41678 + 38731 + 32833)
    assert solution.status is Status.OPTIMAL
    assert solution.objective < 0.972 * UNEVEN_BEST_OF_TORCH
    assert simulate(uneven(2, "wave"), orders.zb_v(8, 32)).makespan_s == UNEVEN_BEST_OF_TORCH


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("chunks", "style"), [(1, "loop"), (2, "loop"), (2, "wave")])
def test_never_worse_than_a_named_schedule_at_its_own_memory(seed: int, chunks: int, style: str) -> None:
    costs = random_pipeline(seed, ranks=4, micro_batches=8, chunks=chunks, style=style)  # type: ignore[arg-type]
    for make in named_orders(costs).values():
        timeline = simulate(costs, make())
        instance = PipelineInstance(costs, tuple(timeline.peak_bytes))
        found = best_greedy(instance)
        assert found is not None
        assert check(instance, found[1]) <= timeline.makespan_s


@pytest.mark.parametrize("seed", range(2))
def test_search_never_ends_above_its_start_and_keeps_the_cap(seed: int) -> None:
    costs = random_pipeline(seed, ranks=4, micro_batches=16, chunks=2, style="wave")
    caps = tuple(4 * sum(costs.held_bytes[s] for s in costs.stages_of(rank)) for rank in range(4))
    instance = PipelineInstance(costs, caps)
    start = best_greedy(instance)
    assert start is not None
    solution = solve(instance, time_limit_s=1.0)
    assert lower_bound_s(instance) <= solution.bound <= solution.objective <= check(instance, start[1])
    assert check(instance, solution.choice) == solution.objective


def test_same_seed_gives_the_same_order() -> None:
    costs = pipeline([10] * 4, [10] * 4, [10] * 4, micro_batches=8, transfer=1)
    instance = PipelineInstance(costs, (16.0,) * 4, "span")
    first, second = (solve(instance, time_limit_s=120, seed=7) for _ in range(2))
    assert first.choice == second.choice
    assert first.status is Status.OPTIMAL


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([(1, "loop"), (2, "loop"), (2, "wave"), (2, "wave_from_last"), (3, "wave")]),
    st.integers(1, 5),
    st.integers(1, 8),
    st.sampled_from(["makespan", "span"]),
    st.floats(1, 4),
)
def test_bound_holds_for_every_greedy_order_and_falls_with_memory(
    seed: int, placed: tuple[int, str], ranks: int, micro_batches: int, length: Length, factor: float
) -> None:
    chunks, style = placed
    costs = random_pipeline(seed, ranks=ranks, micro_batches=micro_batches, chunks=chunks, style=style)  # type: ignore[arg-type]
    caps = factor * np.array([sum(costs.held_bytes[s] for s in costs.stages_of(rank)) for rank in range(ranks)])
    instance, roomier = PipelineInstance(costs, tuple(caps), length), PipelineInstance(costs, tuple(1.5 * caps), length)
    found = best_greedy(instance)
    assert found is not None
    assert lower_bound_s(roomier) <= lower_bound_s(instance) <= check(instance, found[1]) * (1 + 1e-12)


def test_decimal_seconds_become_whole_ticks() -> None:
    costs = pipeline([0.018522] * 2, [0.018086] * 2, [0.009337] * 2, micro_batches=2, transfer=0.0006)
    instance = PipelineInstance(costs, (8.0, 8.0))
    ticks = [*instance.ticked.forward_s, *instance.ticked.transfer_s]
    assert [t * instance.unit_s for t in ticks] == pytest.approx([0.018522, 0.018522, 0.0006], rel=1e-12)
    assert all(t == int(t) for t in ticks)


def test_cap_below_one_micro_batch_is_infeasible() -> None:
    instance = PipelineInstance(equal(2, 3), (1.5, 4.0))
    assert solve(instance).status is Status.INFEASIBLE
    with pytest.raises(InfeasibleError, match=r"memory \(C3\)"):
        synthesise((instance,))


def test_check_names_the_rank_over_its_cap() -> None:
    with pytest.raises(ValueError, match=r"memory \(C3\): rank 0 holds 8"):
        check(PipelineInstance(equal(4, 6), (6.0,) * 4), orders.one_f_one_b(4, 6))


def test_caps_for_another_number_of_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 memory caps for 2 ranks"):
        PipelineInstance(equal(2, 2), (4.0,) * 3)


def test_splitting_backward_changes_neither_time_nor_sequence() -> None:
    costs, order = equal(4, 6), orders.one_f_one_b(4, 6)
    split = split_backward(order)
    assert all(action.kind != "BW" for actions in split for action in actions)
    assert simulate(costs, split).makespan_s <= simulate(costs, order).makespan_s


@pytest.mark.skipif(not SHARED.is_dir(), reason="the recorded schedules are not beside the repository")
def test_recorded_schedules_are_timed_as_recorded() -> None:
    """Every recorded order of the 13 cases with its span, makespan and memory; zero-bubble's and torch's."""
    recorded = json.loads((SHARED / "zero_bubble/zb_results.json").read_text())
    compared = 0
    for case in recorded.values():
        given, ranks = case["input"], case["input"]["p"]
        for name, result in case["results"].items():
            if not result.get("order"):
                continue
            chunks = result["v"]
            style = "wave" if name in ("zbv", "v_half", "v_min") else "loop"
            costs = pipeline(
                given["f"], given["b"], given["w"], micro_batches=given["m"], transfer=given["comm"], chunks=chunks, style=style,
                held=given["mem_f"], freed=[-x for x in given["mem_b"]],
            )  # fmt: skip
            order = tuple(tuple(_recorded(text) for text in row.split()) for row in result["order"])
            timeline = simulate(costs, order)
            assert len(order) == ranks
            assert timeline.span_s == pytest.approx(result["span"]), (given["name"], name)
            assert timeline.makespan_s == pytest.approx(result["makespan"]), (given["name"], name)
            assert max(timeline.peak_bytes) == pytest.approx(result["peak_mem"]), (given["name"], name)
            compared += 1
    assert compared >= 20


def _recorded(text: str) -> Action:
    """Such as BW3.5: kind, micro-batch, stage."""
    kind = text.rstrip("0123456789.")
    micro_batch, stage = text.removeprefix(kind).split(".")
    return Action(int(stage), kind, int(micro_batch))  # type: ignore[arg-type]
