"""What the answers of all solvers share: a choice that its check accepts, an objective that the check computes, a bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import offload_problems
import pytest
from meshwright.cost_models.pipeline.orders import Pipeline
from meshwright.schema.schedules import placement
from meshwright.solvers import rank_mapping
from meshwright.solvers.backend import Solution, Status
from meshwright.solvers.offload import schedule, simulation
from meshwright.solvers.pipeline import improve as pipeline_schedule
from meshwright.solvers.pipeline import schedule as greedy
from meshwright.solvers.stages import splits


def stages() -> tuple[Any, Solution[Any]]:
    given = splits.StageSplitInstance(np.array([1.0, 2.0, 3.0, 1.0, 1.0]), np.ones((2, 6, 6), dtype=bool))
    return given, splits.solve_stages(given)


def chunks() -> tuple[Any, Solution[Any]]:
    is_block = np.array([False, *[True] * 7, False])
    on_rank = np.array([0, 1, 0, 1])[:, None] == np.arange(2)
    given = splits.ChunkSplitInstance(
        np.ones(9), is_block, (0, 1, 0, 1), lambda ends: np.diff(ends, axis=1) @ on_rank, 6.0
    )
    return given, splits.solve_chunks(given)


def ranks() -> tuple[Any, Solution[Any]]:
    bandwidth = np.where(np.add.outer(np.arange(4), np.arange(4)) % 2 == 0, 10.0, 1.0)
    axis = rank_mapping.Axis(1.0, np.array([[0, 1], [2, 3]]))
    given = rank_mapping.RankMappingInstance(bandwidth, (axis,), np.zeros(4, dtype=np.int64), np.arange(4))
    return given, rank_mapping.solve(given)


def pipeline() -> tuple[Any, Solution[Any]]:
    costs = Pipeline(
        num_microbatches=4,
        rank_of_stage=placement(2, 1, "loop"),
        forward_s=(1.0, 2.0),
        backward_s=(1.0, 2.0),
        weight_s=(1.0, 1.0),
        transfer_s=(0.5,),
        held_bytes=(1.0, 1.0),
        backward_freed_bytes=(0.0, 0.0),
        weight_freed_bytes=(1.0, 1.0),
    )
    given = greedy.PipelineInstance(costs, (3.0, 3.0))
    return given, pipeline_schedule.solve(given, time_limit_s=0.0)


@pytest.mark.parametrize(
    ("case", "check"),
    [
        (stages, splits.check_stages),
        (chunks, splits.check_chunks),
        (ranks, rank_mapping.check),
        (pipeline, greedy.check),
    ],
)
def test_check_accepts_a_choice_and_computes_its_objective(
    case: Callable[[], tuple[Any, Solution[Any]]], check: Callable[[Any, Any], float]
) -> None:
    given, solution = case()
    assert solution.status.has_answer
    assert check(given, solution.choice) == pytest.approx(solution.objective, rel=1e-12)
    assert solution.bound <= solution.objective
    assert solution.backend and solution.solve_s >= 0
    assert solution.status is not Status.OPTIMAL or solution.gap == pytest.approx(0, abs=1e-9)


def test_a_simulated_offload_schedule_takes_no_less_than_its_program() -> None:
    problem = offload_problems.instance(4, seed=1, cap_share=0.5)
    solution = schedule.solve(problem)
    assert solution.choice is not None
    seconds = simulation.check(problem, solution.choice, prefetch=solution.prefetch)
    assert solution.bound <= solution.objective <= seconds * (1 + 1e-9)
    with pytest.raises(ValueError, match="C6"):
        simulation.check(offload_problems.instance(4, seed=1, cap_share=0.01), solution.choice)


def test_an_infeasible_instance_has_no_choice_and_an_infinite_gap() -> None:
    given = splits.StageSplitInstance(np.ones(2), np.zeros((2, 3, 3), dtype=bool))
    solution = splits.solve_stages(given)
    assert (solution.status, solution.choice, solution.gap) == (Status.INFEASIBLE, None, math.inf)
