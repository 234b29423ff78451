"""The stages of a plan as they are, costed again: on its cluster, or on another one that it may be moved to."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..cost_models.pipeline.orders import planned_order
from ..cost_models.stage.contents import RecomputeCosts
from ..cost_models.stage.replicas import busiest_replicas, estimate_on_replicas, has_unlike_replicas
from ..cost_models.stage.step import estimate_step
from ..cost_models.stage.table import CostTable
from ..schema import ClusterSpec, TrainingEstimate, TrainingPlan
from ..schema.device_groups import part_label
from ..schema.layout_table import RECOMPUTES, LayoutTable
from ..schema.units import IntArray
from .rank_map import in_order_of_pools, place_as_planned
from .request import PlanRequest
from .tasks.offload_problem import without_schedule


class CostedStages(NamedTuple):
    """The stages of a plan as `estimate_step` takes them.

    Attributes:
        costs: row 0 is the plan's layout, each layer with the recompute that its stage gives it.
        boundaries, pool_of_stage: as in `estimate_step`.
    """

    costs: CostTable
    boundaries: tuple[int, ...]
    pool_of_stage: IntArray | None


def costed_stages(plan: TrainingPlan, cluster: ClusterSpec | None = None) -> CostedStages:
    """Cost the layers of a plan again; where it has an offload schedule, as if everything stayed on the devices.

    Where data-parallel ranks of unlike speed have shares of their own, the costs are those of the ranks that are busy longest.

    Args:
        cluster: as many devices in nodes of the same kinds; None: the plan's.
    """
    stages = _stages_of(plan, cluster)
    counts = _micro_batches_of_pools(plan, stages)
    if not counts:
        return stages
    return stages._replace(costs=busiest_replicas(stages.costs, 0, counts))


def _stages_of(plan: TrainingPlan, cluster: ClusterSpec | None) -> CostedStages:
    cluster = cluster or plan.cluster
    parts = cluster.parts
    is_on_pools = bool(parts) and all(stage.device for stage in plan.estimate.stages)
    layout = plan.layout if plan.offload is None else without_schedule(plan.layout)
    batch = LayoutTable.from_layouts([layout], plan.workload.global_batch_size)
    placed = cluster if is_on_pools else place_as_planned(plan, cluster)
    costs = CostTable.from_layouts(plan.model, plan.workload, placed, batch)
    options = [RECOMPUTES.index(stage.recompute_of(idx)) for stage in plan.stages for idx in stage.layer_idxs]
    boundaries = (*(stage.first_layer_idx for stage in plan.stages), plan.staged_model.num_layers)
    if plan.degrees_by_stage:
        from .stage_degrees import costs_by_stage  # few plans have them

        of_stages = [plan.layout_of_stage(idx) for idx in range(len(plan.stages))]
        costs, pool_of_stage = costs_by_stage(plan.model, plan.workload, placed, of_stages, options)
        return CostedStages(costs, boundaries, pool_of_stage)
    if layout.recompute == "mixed":
        costs = RecomputeCosts(costs).assigned(0, options)
    if not is_on_pools:
        return CostedStages(costs, boundaries, None)
    pool_of_label = {part_label(parts, g): g for g in range(len(parts))}
    pool_of_stage = np.array([pool_of_label[stage.device] for stage in plan.estimate.stages])
    in_order = in_order_of_pools(costs, tuple(dict.fromkeys(pool_of_stage.tolist())))
    return CostedStages(in_order, boundaries, pool_of_stage)


def reestimate(plan: TrainingPlan, cluster: ClusterSpec) -> TrainingEstimate:
    """Return the estimate of a plan's stages, recompute and order of passes on a cluster: nothing is cut or ordered anew."""
    if plan.workload.lengths is not None:
        from .lengths import estimate_lengths

        return estimate_lengths(replace(PlanRequest.from_plan(plan), cluster=cluster), plan.layout, plan.stages)
    stages = _stages_of(plan, cluster)
    if counts := _micro_batches_of_pools(plan, stages):
        return estimate_on_replicas(stages.costs, 0, stages.boundaries, counts)
    return estimate_step(replace(stages.costs, order=planned_order(plan)), 0, stages.boundaries, stages.pool_of_stage)


def _micro_batches_of_pools(plan: TrainingPlan, stages: CostedStages) -> tuple[int, ...]:
    """Return the most micro-batches of a data-parallel rank on each device pool; none where all ranks count as the weakest."""
    parts, layout = stages.costs.cluster.parts, plan.layout
    if not (plan.shares and parts and has_unlike_replicas(stages.costs)[0]):
        return ()
    node_of_device = np.repeat(np.arange(plan.cluster.num_nodes), plan.cluster.node_sizes)
    node_of_rank = node_of_device[list(plan.rank_map)[:: layout.tp * layout.cp]]
    counts = -(-np.array(plan.shares) // layout.micro_batch_size)
    return tuple(int(counts[np.isin(node_of_rank, part.nodes)].max(initial=1)) for part in parts)
