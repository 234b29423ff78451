"""Which layout is taken: a plain one that may be as fast, with memory to spare; the fastest where it is credibly faster."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from meshwright.cost_models.stage.interval import KINDS, differences, margin, probability_above, ratio_sd
from meshwright.cost_models.stage.table import CostTable
from meshwright.planner import plan
from meshwright.planner.choice import NUM_COARSE, complexity, is_near_tie, lacks_headroom, near_ties, plainest
from meshwright.planner.expand import expand_fitting
from meshwright.planner.request import PlanRequest
from meshwright.planner.space import build_space
from meshwright.schema import ClusterSpec, ConfigError, Layout, ModelSpec, TrainingPlan, Workload
from meshwright.schema.layout_table import LayoutTable

MODEL, CLUSTER = ModelSpec.named("llama-2-7b"), ClusterSpec.parse("8xA100-SXM-80GB")
WORKLOAD = Workload(seq_len=4096, global_batch_size=32)


@cache
def made(prefer: str = "plain", headroom: float = 0.0) -> TrainingPlan:
    return plan(MODEL, CLUSTER.with_headroom(headroom), WORKLOAD, prefer=prefer, runnable=True)


def table(*layouts: Layout) -> LayoutTable:
    return LayoutTable.from_layouts(layouts, 64)


PLAIN = Layout(dp_shard=8, zero_stage=2)
OTHER = Layout(cp=4, tp=2, micro_batch_size=8)


def test_the_more_differs_the_less_is_known_of_the_ratio() -> None:
    layouts = table(PLAIN, PLAIN.replace(micro_batch_size=2), PLAIN.replace(micro_batch_size=4), OTHER)
    sd = ratio_sd(layouts, 0)
    assert list(sd) == sorted(set(sd))
    assert ratio_sd(layouts, 3)[0] == sd[3]
    only_noise = dict.fromkeys(KINDS, 0.0) | {"noise": 0.07}
    assert ratio_sd(layouts, 0, only_noise) == pytest.approx(np.full(4, 0.07))
    assert differences(layouts, 0)[2, KINDS.index("micro_batch")] == 2  # doublings


@pytest.mark.parametrize("probability", [0.5, 0.6, 0.8, 0.95])
def test_margin_is_what_the_probability_needs(probability: float) -> None:
    needed = float(margin(np.array([0.1]), probability)[0])
    assert probability_above(needed, 0.1) == pytest.approx(probability)
    assert probability_above(-needed, 0.1) == pytest.approx(1 - probability)


def test_seven_percent_do_not_buy_four_context_ranks() -> None:
    layouts, no = table(PLAIN, OTHER), np.zeros(2, dtype=bool)
    assert plainest(layouts, np.array([1.05, 1.0]), no, probability=0.667) == 0
    assert plainest(layouts, np.array([1.3, 1.0]), no, probability=0.667) == 1
    assert plainest(layouts, np.array([1.0, 1.05]), no, probability=0.667) == 0


def test_within_the_same_axes_the_fastest_is_taken_and_the_simplest_of_what_is_alike() -> None:
    layouts, no = table(*(Layout(pp=pp, dp_shard=8, zero_stage=1) for pp in (2, 4))), np.zeros(2, dtype=bool)
    assert plainest(layouts, np.array([1.01, 1.0]), no, probability=0.667) == 1
    assert plainest(layouts, np.array([1.0005, 1.0]), no, probability=0.667) == 0


def test_headroom_decides_between_layouts_of_as_many_axes_only() -> None:
    with_recompute = PLAIN.replace(recompute="full")
    layouts, seconds = table(PLAIN, with_recompute, OTHER), np.array([1.0, 1.01, 1.0])
    for lacks, taken in (([False] * 3, 0), ([True, False, False], 1), ([True, True, False], 0)):
        assert plainest(layouts, seconds, np.array(lacks), probability=0.667) == taken


@pytest.mark.long
def test_nothing_that_fits_and_may_be_as_fast_has_fewer_axes() -> None:
    fixed = {"schedule": "1f1b", "num_model_chunks": 1, "cp": 1}
    found = plan(MODEL, CLUSTER, WORKLOAD, fixed=fixed, runnable=True)
    request = PlanRequest(MODEL, CLUSTER, WORKLOAD, fixed, runnable=True)
    space = build_space(request)
    costs = CostTable.from_layouts(MODEL, WORKLOAD, CLUSTER, space.batch)
    candidates = [c for idx in range(len(space.batch)) if (c := expand_fitting(costs, idx)) is not None]
    layouts = LayoutTable.from_layouts([c.layout(space.batch) for c in candidates], WORKLOAD.global_batch_size)
    near = near_ties(layouts, np.array([c.step_time_s for c in candidates]), 0.667)
    fewest = min(tuple(row[:NUM_COARSE]) for row in complexity(layouts.select(near)))
    chosen = LayoutTable.from_layouts([found.layout], WORKLOAD.global_batch_size)
    assert tuple(complexity(chosen)[0][:NUM_COARSE]) == fewest
    spare = [
        c for c, is_near, row in zip(candidates, near, complexity(layouts), strict=True)
        if is_near and tuple(row[:NUM_COARSE]) == fewest and not lacks_headroom(request, c)
    ]  # fmt: skip
    required = found.estimate.required_bytes
    assert not spare or required <= found.estimate.budget_bytes - 0.05 * CLUSTER.weakest_device.memory_bytes


def test_both_are_told_and_the_certificate_is_about_predicted_time() -> None:
    taken, fastest = made(), made("fastest")
    assert fastest.fastest is None
    assert fastest.estimate.step_time_s == pytest.approx(fastest.search.objective_s)
    assert taken.search.objective_s == pytest.approx(fastest.search.objective_s)
    assert taken.fastest is not None
    assert taken.fastest.step_time_s == pytest.approx(fastest.estimate.step_time_s)
    assert taken.fastest.layout == fastest.layout
    assert taken.price_of_simplicity == pytest.approx(taken.estimate.step_time_s / fastest.estimate.step_time_s - 1)
    assert any("fastest layout found" in note for note in taken.notes)
    request = PlanRequest.from_plan(taken)
    assert is_near_tie(request, taken.layout, taken.estimate.step_time_s, fastest.layout, fastest.estimate.step_time_s)
    assert PlanRequest.from_plan(fastest).prefer == "fastest"


def test_headroom_is_a_limit() -> None:
    device = CLUSTER.weakest_device.memory_bytes
    for fraction in (0.05, 0.4):
        found = made(headroom=fraction)
        assert found.estimate.required_bytes <= (1 - fraction) * device - CLUSTER.reserved_bytes + 1
    assert made(headroom=0.4).search.objective_s >= made().search.objective_s
    with pytest.raises(ConfigError, match="leaves nothing"):
        CLUSTER.with_headroom(0.99)
