"""What stages have memory for: no split of a mixed layout has a shorter slowest stage than the bound, and memory raises it."""

from __future__ import annotations

import numpy as np
import pytest
from meshwright.cost_models.stage import memory
from meshwright.cost_models.stage.bounds import (
    budget_bytes,
    lower_bound_slowest_s,
    memory_bounds,
    slowest_stage_s,
    uniform_time_bounds,
)
from meshwright.cost_models.stage.table import CostTable
from meshwright.planner.expand import expand, expand_fitting
from meshwright.planner.request import PlanRequest
from meshwright.planner.space import build_space
from meshwright.schema import ClusterSpec, Workload
from meshwright.schema.layout_table import MIXED
from small_spaces import shortened


def mixed_costs(engine: str, memory_ratio: float) -> CostTable:
    """Mixed layouts of sixteen blocks over eight stages, on devices with a part of their memory."""
    spec, cluster = shortened("llama-3.2-1b", 16), ClusterSpec.parse("2x4xA100-SXM-40GB/ib200")
    group = cluster.groups[0]
    device = group.device.replace(memory_bytes=int(group.device.memory_bytes * memory_ratio))
    cluster = cluster.replace(groups=(group.replace(device=device),))
    workload = Workload(seq_len=16384, global_batch_size=32, engine=engine)
    batch = build_space(PlanRequest(spec, cluster, workload, {"cp": 1, "tp": 1, "pp": 8, "micro_batch_size": 1})).batch
    rows = np.flatnonzero(batch.recompute == MIXED)
    return CostTable.from_layouts(spec, workload, cluster, batch.select(rows))


@pytest.mark.parametrize("engine", ["fsdp2", "megatron"])
def test_no_stages_of_a_mixed_layout_are_shorter_than_the_bound(engine: str) -> None:
    fitting, before_s = 0, np.array([np.inf])
    for memory_ratio in (0.3, 0.6, 0.8, 1.2, 20.0):
        costs = mixed_costs(engine, memory_ratio)
        plain_s = slowest_stage_s(costs)
        least_s, bound_s = lower_bound_slowest_s(costs, plain_s), uniform_time_bounds(costs)
        assert np.all((plain_s <= least_s) & (least_s <= before_s))  # more memory is never slower
        before_s = least_s
        for idx in range(len(costs.layouts)):
            estimate = expand(costs, idx).estimate
            if not estimate.fits:
                continue
            slowest = max(stage.forward_s + stage.backward_s for stage in estimate.stages)
            assert least_s[idx] <= slowest * (1 + 1e-9), (memory_ratio, idx)
            assert bound_s[idx] <= estimate.step_time_s * (1 + 1e-9), (memory_ratio, idx)
            fitting += 1
    assert fitting > 1


def test_memory_of_one_mixed_stage_is_bounded_as_its_best_options_need_it() -> None:
    spec, workload = shortened("llama-3.2-1b", 4), Workload(seq_len=16384, global_batch_size=64)
    cluster = ClusterSpec.parse("2xA100-SXM-40GB")
    batch = build_space(PlanRequest(spec, cluster, workload, {"cp": 1, "tp": 1, "pp": 1})).batch
    costs = CostTable.from_layouts(spec, workload, cluster, batch.select(np.flatnonzero(batch.recompute == MIXED)))
    may_fit = memory.lower_bound_required_bytes(memory_bounds(costs), costs.scenario) <= budget_bytes(costs)
    fits = [expand_fitting(costs, idx) is not None for idx in range(len(costs.layouts))]
    assert any(fits)
    assert not all(fits)
    assert may_fit.tolist() == fits
