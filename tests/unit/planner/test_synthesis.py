"""Orders of passes made for a layout: within its memory, as long as the plan says, shorter than the named ones."""

from itertools import pairwise

import numpy as np
import pytest
from meshwright.cost_models.pipeline.orders import from_torch_csv
from meshwright.cost_models.stage.bounds import memory_bounds, uniform_time_bounds
from meshwright.cost_models.stage.contents import pipeline_shape
from meshwright.cost_models.stage.table import CostTable
from meshwright.planner import plan
from meshwright.planner.plan import estimate
from meshwright.planner.stage_choice import order_instance
from meshwright.schema import ClusterSpec, ConfigError, InfeasibleError, ModelSpec, TrainingPlan, Workload
from meshwright.schema.layout_table import LayoutTable
from meshwright.schema.schedules import OVER_A_V
from meshwright.solvers.pipeline.schedule import PipelineInstance, check

SPEC, CLUSTER = ModelSpec.named("llama-3.1-70b"), ClusterSpec.parse("64xH100-SXM-80GB")
WORKLOAD = Workload(seq_len=8192, global_batch_size=128)
FIXED_TO_A_V = {"tp": 4, "cp": 2, "cp_ulysses": 1, "pp": 4, "dp_shard": 2, "num_model_chunks": 2, "micro_batch_size": 1}


@pytest.fixture(scope="module")
def ordered() -> TrainingPlan:
    """The budget is between what v-half and zb-v hold."""
    return plan(SPEC, CLUSTER, WORKLOAD, fixed={**FIXED_TO_A_V, "recompute": "none"}, runnable=True, prefer="fastest")


def test_an_order_is_proposed_where_it_is_faster_than_every_named_one(ordered: TrainingPlan) -> None:
    assert ordered.layout.schedule == "synthesised"
    named = []
    for schedule in (v.name for v in OVER_A_V):
        try:
            found = plan(SPEC, CLUSTER, WORKLOAD, fixed={**FIXED_TO_A_V, "schedule": schedule}, runnable=True)
        except InfeasibleError:
            continue
        assert not found.pipeline_order
        named.append(found.estimate.step_time_s)
    assert named
    assert ordered.estimate.step_time_s < 0.995 * min(named)


def test_the_order_is_as_long_as_the_plan_says_and_within_its_memory(ordered: TrainingPlan) -> None:
    batch = LayoutTable.from_layouts([ordered.layout], WORKLOAD.global_batch_size)
    costs = CostTable.from_layouts(SPEC, WORKLOAD, CLUSTER, batch)
    boundaries = (0, *(stage.first_layer_idx + stage.num_layers for stage in ordered.stages))
    instance = order_instance(costs, 0, boundaries)
    order = from_torch_csv("\n".join(ordered.pipeline_order))
    makespan_s = check(PipelineInstance(instance.pipeline, instance.headroom_bytes), order)
    parts = ordered.estimate.breakdown_s
    # Beside the passes: copies of the rank that has most of them.
    of_stage = [costs.per_step.copied_s(0)[first:end].sum() for first, end in pairwise(boundaries)]
    copied_s = np.bincount(pipeline_shape(costs, 0).rank_of_stage, of_stage).max()
    beside_s = parts.dp + parts.optimizer + copied_s
    assert makespan_s == pytest.approx(parts.total - beside_s, rel=1e-9)  # sums in another order
    assert instance.outside_s == pytest.approx(beside_s, rel=1e-9)
    assert instance.bound_s <= ordered.estimate.step_time_s * (1 + 1e-9)
    assert ordered.estimate.fits


def test_the_bound_of_a_named_v_holds_for_the_order_over_it(ordered: TrainingPlan) -> None:
    layouts = [ordered.layout.replace(schedule=schedule) for schedule in (*(v.name for v in OVER_A_V), "synthesised")]
    costs = CostTable.from_layouts(
        SPEC, WORKLOAD, CLUSTER, LayoutTable.from_layouts(layouts, WORKLOAD.global_batch_size)
    )
    seconds, bytes_ = uniform_time_bounds(costs), memory_bounds(costs)
    assert np.all(seconds <= ordered.estimate.step_time_s)
    assert bytes_.min() <= ordered.estimate.peak_allocated_bytes
    assert ordered.search is not None
    assert ordered.search.bound_s <= ordered.search.objective_s


def test_a_plan_with_an_order_is_written_read_and_estimated_again(ordered: TrainingPlan) -> None:
    assert TrainingPlan.model_validate_json(ordered.model_dump_json()) == ordered
    again = estimate(SPEC, CLUSTER, WORKLOAD, ordered.layout)
    assert again.step_time_s == pytest.approx(ordered.estimate.step_time_s, rel=1e-9)


def test_a_fixed_schedule_is_kept_and_the_synthesised_one_can_be_asked_for() -> None:
    found = plan(SPEC, CLUSTER, WORKLOAD, fixed={**FIXED_TO_A_V, "schedule": "synthesised"}, runnable=True)
    assert found.layout.schedule == "synthesised"
    assert len(found.pipeline_order) == 4


def test_no_order_is_made_without_a_v(ordered: TrainingPlan) -> None:
    one_stage = ordered.layout.replace(num_model_chunks=1)
    with pytest.raises(ConfigError, match="two model chunks"):
        estimate(SPEC, CLUSTER, WORKLOAD, one_stage)
