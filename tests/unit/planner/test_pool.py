"""Groups of degrees: what is made of them is the space, their bounds hold, and a search that leaves most out loses nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from meshwright.cost_models.stage.bounds import quick_time_bounds, uniform_time_bounds
from meshwright.cost_models.stage.table import CostTable
from meshwright.planner import search
from meshwright.planner.request import PlanRequest
from meshwright.planner.space import Pool, Space, build_space
from meshwright.schema import ClusterSpec, Workload
from small_spaces import shortened

CASES = [
    ("fsdp2", "llama-3.2-1b", {}),
    ("fsdp2", "olmoe-1b-7b", {}),
    ("megatron", "deepseek-v2-lite", {}),
    ("deepspeed", "gpt2", {}),
    ("fsdp2", "llama-3.2-1b", {"recompute": "full"}),
    ("megatron", "llama-3.2-1b", {"offload": "optimizer", "vocabulary": "ends"}),
]
CLUSTER = ClusterSpec.parse("2x4xA100-SXM-40GB/ib200")


@pytest.fixture(autouse=True)
def in_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.planner.space.MIN_GROWTH", 20)
    monkeypatch.setattr("meshwright.planner.space.GROWTH_FRACTION", 0.1)
    monkeypatch.setattr("meshwright.planner.space.BLOCK", 64)
    monkeypatch.setattr(search, "NUM_SCOUTED", 1)


def instance(engine: str, model: str, fixed: dict) -> tuple[Pool, CostTable, Space]:
    """A pool with nothing but its first layouts in, the costs of the whole space at once, and the space."""
    spec, workload = shortened(model, 5), Workload(seq_len=512, global_batch_size=16, engine=engine)
    space = build_space(PlanRequest(spec, CLUSTER, workload, fixed))
    return (
        Pool(PlanRequest(spec, CLUSTER, workload), space),
        CostTable.from_layouts(spec, workload, CLUSTER, space.batch),
        space,
    )


@pytest.mark.parametrize(("engine", "model", "fixed"), CASES)
def test_layouts_that_come_in_step_by_step_are_those_of_the_space(engine: str, model: str, fixed: dict) -> None:
    some, whole, space = instance(engine, model, fixed)
    assert len(some) < len(space)
    steps = 0
    while np.isfinite(some.bound_s):
        entered, waiting_s = len(some), some.bound_s
        some.grow()
        steps += 1
        came = some.costs.select(np.arange(entered, len(some)))
        # No layout is faster than the bound under which its group waited.
        assert np.all(quick_time_bounds(came) >= waiting_s * (1 - 1e-9))
        assert some.bound_s >= waiting_s
    assert steps > 3
    assert np.array_equal(np.sort(some.positions), np.arange(len(space)))
    there = whole.select(some.positions)
    for name, column in there.layouts.columns.items():
        assert np.array_equal(some.costs.layouts.columns[name], column), name
    np.testing.assert_allclose(uniform_time_bounds(some.costs), uniform_time_bounds(there), rtol=1e-12)


@pytest.mark.parametrize(
    ("engine", "model", "fixed"), [(engine, model, {"micro_batch_size": 1}) for engine, model, _ in CASES[:4]]
)
def test_a_search_by_groups_finds_what_one_over_all_layouts_finds(engine: str, model: str, fixed: dict) -> None:
    _, whole, space = instance(engine, model, fixed)
    spec, workload = whole.model, whole.workload
    by_groups = search.search(PlanRequest(spec, CLUSTER, workload), space, runner_ups=2)
    at_once = search.search(PlanRequest(spec, CLUSTER, workload), Space(space.batch, {}), runner_ups=2)
    found, wanted = by_groups.certificate(), at_once.certificate()
    assert found.objective_s == pytest.approx(wanted.objective_s, rel=2 * search.REL_GAP)
    assert found.evaluated + found.pruned == len(space) == wanted.evaluated + wanted.pruned
    assert found.pruned_in_groups == len(space) - len(by_groups.problem.pool) > 0 == wanted.pruned_in_groups
    assert found.bound_s <= wanted.objective_s


def test_layouts_that_are_left_out_do_not_come_in() -> None:
    _, whole, space = instance(*CASES[0])
    left_out = np.arange(0, len(space), 3)
    fewer = replace(space, without=left_out)
    some = Pool(PlanRequest(whole.model, CLUSTER, whole.workload), fewer)
    while np.isfinite(some.bound_s):
        some.grow()
    kept = np.setdiff1d(np.arange(len(space)), left_out)
    assert np.array_equal(np.sort(some.positions), kept)
    assert len(fewer) == len(fewer.batch) == len(kept)
    assert len(replace(fewer, given=space.batch, groups=None).batch) == len(kept)
