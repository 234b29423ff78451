"""The search equals expanding every layout, on hundreds of random small instances, and its bounds hold on each of them."""

from __future__ import annotations

from collections import Counter

import pytest
from meshwright.cost_models.stage.bounds import memory_bounds, quick_time_bounds, uniform_time_bounds
from meshwright.planner import expand, search
from meshwright.planner.request import PlanRequest
from small_spaces import random_instance
from tiers import seed_groups

NUM_INSTANCES, NUM_GROUPS = 208, 8

ROUNDING = 1e-9


@seed_groups(NUM_INSTANCES, NUM_GROUPS, num_long=3)
def test_search_equals_exhaustive_enumeration_on_random_instances(
    seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "REL_GAP", 0.0)
    monkeypatch.setattr("meshwright.planner.space.BLOCK", 3)  # many blocks, even of a few layouts
    solved = 0
    for seed in seeds:
        spec, workload, cluster, space = random_instance(seed)
        found = search.search(PlanRequest(spec, cluster, workload), space)
        costs = found.costs
        everything = [expand.expand(costs, idx) for idx in range(len(space.batch))]
        times = [c.estimate.step_time_s for c in everything if c.estimate.fits]
        assert bool(found.feasible) == bool(times), seed
        if times:
            solved += 1
            assert found.feasible[0].estimate.step_time_s == pytest.approx(min(times), rel=ROUNDING), seed
            assert found.bound_s <= min(times) * (1 + ROUNDING), seed
        bound_s, bound_bytes = uniform_time_bounds(costs), memory_bounds(costs)
        quick_s = quick_time_bounds(costs)
        for idx, candidate in enumerate(everything):
            assert quick_s[idx] <= bound_s[idx] * (1 + ROUNDING), seed
            # A bound may count the recompute without which a layout does not fit; of those that never do it says nothing.
            assert not candidate.estimate.fits or bound_s[idx] <= candidate.estimate.step_time_s * (1 + ROUNDING), seed
            assert candidate.bound_s <= candidate.estimate.step_time_s * (1 + ROUNDING), seed
            assert bound_bytes[idx] <= candidate.estimate.peak_allocated_bytes + 16, seed  # parts are whole bytes
    assert solved > len(seeds) / 4


def test_what_is_no_faster_than_asked_for_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "REL_GAP", 0.0)
    for seed in range(0, NUM_INSTANCES, 24):
        spec, workload, cluster, space = random_instance(seed)
        whole = search.search(PlanRequest(spec, cluster, workload), space)
        if not whole.feasible:
            continue
        best_s = whole.feasible[0].estimate.step_time_s
        for limit_s in (0.5 * best_s, 2.0 * best_s):
            part = search.search(PlanRequest(spec, cluster, workload), space, worse_than_s=limit_s)
            assert part.evaluated <= whole.evaluated, seed
            if limit_s > best_s:
                assert part.feasible[0].estimate == whole.feasible[0].estimate, seed
            else:
                assert min(part.bound_s, best_s) >= min(limit_s, whole.bound_s) * (1 - ROUNDING), seed


def test_instances_have_every_value_that_is_searched() -> None:
    """Of each field that the spaces of any engine vary, the instances hold several values: the test above covers new axes too."""
    seen: dict[str, Counter[float]] = {}
    varied: set[str] = set()
    for seed in range(0, NUM_INSTANCES, 6):
        batch = random_instance(seed)[3].batch
        for name, column in batch.columns.items():
            seen.setdefault(name, Counter()).update(column.tolist())
            if len(set(column.tolist())) > 1:
                varied.add(name)
    assert {
        "tp",
        "cp",
        "pp",
        "ep",
        "dp_shard",
        "zero_stage",
        "micro_batch_size",
        "num_model_chunks",
        "schedule",
    } <= varied
    assert all(len(seen[name]) >= 2 for name in varied)
