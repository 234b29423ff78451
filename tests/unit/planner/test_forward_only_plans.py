"""Plans without a backward pass: what they cost, and that the search finds the best of them."""

from __future__ import annotations

import numpy as np
import pytest
from meshwright.cost_models.stage.bounds import memory_bounds, uniform_time_bounds
from meshwright.planner import expand, plan, search
from meshwright.planner.request import OffloadRequest, PlanRequest
from meshwright.planner.space import build_space
from meshwright.schema import ConfigError, Layout, Workload
from meshwright.schema.layout_rules import require_valid
from meshwright.schema.task import parse_training
from plans import cpu_cluster, tiny_model

WORKLOAD = Workload(seq_len=64, global_batch_size=8, precision="fp32", **parse_training("zeroth-order"))


def test_the_plan_is_the_best_of_all_layouts_and_none_has_gradients() -> None:
    model, cluster = tiny_model(num_blocks=4), cpu_cluster(4)
    space = build_space(PlanRequest(model, cluster, WORKLOAD, runnable=True))
    found = search.search(PlanRequest(model, cluster, WORKLOAD), space)
    everything = [expand.expand(found.costs, idx).estimate for idx in range(len(space.batch))]
    assert len(everything) > 10
    assert found.feasible[0].estimate.step_time_s == pytest.approx(min(e.step_time_s for e in everything), rel=0.01)
    bound_s, bound_bytes = uniform_time_bounds(found.costs), memory_bounds(found.costs)
    for estimate, seconds, size in zip(everything, bound_s, bound_bytes, strict=True):
        memory = estimate.memory_bytes
        assert (memory.gradients, memory.optimizer, memory.activations) == (0, 0, 0)
        assert seconds <= estimate.step_time_s * (1 + 1e-9)
        assert size <= estimate.peak_allocated_bytes + 16
    assert np.all(space.batch.pp == 1)
    assert not np.any(space.batch.recompute)


def test_two_forward_passes_take_less_time_and_memory_than_forward_and_backward() -> None:
    model, cluster = tiny_model(num_blocks=4), cpu_cluster(2)
    for fixed in ({"dp_replicate": 2}, {"dp_shard": 2, "zero_stage": 3}, {"tp": 2}):
        without, with_backward = (
            expand.expand(found.costs, 0).estimate
            for workload in (WORKLOAD, WORKLOAD.replace(passes="backward"))
            if (
                space := build_space(
                    PlanRequest(model, cluster, workload, fixed | {"recompute": "none"}, runnable=True)
                )
            )
            if (found := search.search(PlanRequest(model, cluster, workload), space))
        )
        assert without.breakdown_s.compute < with_backward.breakdown_s.compute
        assert without.peak_allocated_bytes < with_backward.peak_allocated_bytes


def test_what_it_does_not_go_with_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="zeroth-order training is our runtime's"):
        WORKLOAD.replace(engine="megatron")
    with pytest.raises(ConfigError, match="could be offloaded"):
        plan(tiny_model(num_blocks=4), cpu_cluster(1), WORKLOAD, offload=OffloadRequest(host_memory_bytes=2**30))
    with pytest.raises(ConfigError, match="zeroth_order"):
        require_valid(
            tiny_model(num_blocks=4), WORKLOAD, Layout(pp=2, micro_batch_size=2), world_size=2, scaleup_domain=2
        )
