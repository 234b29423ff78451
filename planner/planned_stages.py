"""The stages of a plan as they are, costed again: on its cluster, or on another one that it may be moved to."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..cost_models.pipeline.orders import planned_order
from ..cost_models.stage.contents import RecomputeCosts
from ..cost_models.stage.step import estimate_step
from ..cost_models.stage.table import CostTable
from ..schema import ClusterSpec, TrainingEstimate, TrainingPlan
from ..schema.device_groups import part_label
from ..schema.layout_table import RECOMPUTES, LayoutTable
from ..schema.units import IntArray
from .rank_map import in_order_of_pools, place_as_planned
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

    Args:
        cluster: as many devices in nodes of the same kinds; None: the plan's.
    """
    cluster = cluster or plan.cluster
    parts = cluster.parts
    is_on_pools = bool(parts) and all(stage.device for stage in plan.estimate.stages)
    layout = plan.layout if plan.offload is None else without_schedule(plan.layout)
    batch = LayoutTable.from_layouts([layout], plan.workload.global_batch_size)
    placed = cluster if is_on_pools else place_as_planned(plan, cluster)
    costs = CostTable.from_layouts(plan.model, plan.workload, placed, batch)
    if layout.recompute == "mixed":
        options = [RECOMPUTES.index(stage.recompute_of(idx)) for stage in plan.stages for idx in stage.layer_idxs]
        costs = RecomputeCosts(costs).assigned(0, options)
    boundaries = (*(stage.first_layer_idx for stage in plan.stages), plan.staged_model.num_layers)
    if not is_on_pools:
        return CostedStages(costs, boundaries, None)
    pool_of_label = {part_label(parts, g): g for g in range(len(parts))}
    pool_of_stage = np.array([pool_of_label[stage.device] for stage in plan.estimate.stages])
    in_order = in_order_of_pools(costs, tuple(dict.fromkeys(pool_of_stage.tolist())))
    return CostedStages(in_order, boundaries, pool_of_stage)


def reestimate(plan: TrainingPlan, cluster: ClusterSpec) -> TrainingEstimate:
    """Return the estimate of a plan's stages, recompute and order of passes on a cluster: nothing is cut or ordered anew."""
    stages = costed_stages(plan, cluster)
    return estimate_step(replace(stages.costs, order=planned_order(plan)), 0, stages.boundaries, stages.pool_of_stage)
