"""Layers of a plan that run entire micro-batches though its layout says ``tp_halves``: those that take less so.

The costs choose for each kind of layer under its stage's degrees, devices and recompute (cost_models/layer/overlap.py); the plan
says what they chose, because the runtime knows no costs.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..cost_models.stage.table import CostTable
from ..schema import TrainingPlan
from ..schema.device_groups import part_label
from ..schema.layout_table import LayoutTable


def with_modes(plan: TrainingPlan) -> TrainingPlan:
    """Return the plan with its ``unhalved_layers``."""
    return plan.replace(unhalved_layers=tuple(_unhalved_layers(plan))) if plan.layout.tp_halves else plan


def _unhalved_layers(plan: TrainingPlan) -> Iterator[int]:
    cases = list(
        dict.fromkeys((s, stage.recompute_of(i)) for s, stage in enumerate(plan.stages) for i in stage.layer_idxs)
    )
    layouts = [plan.layout_of_stage(stage).replace(recompute=recompute) for stage, recompute in cases]
    table = LayoutTable.from_layouts(layouts, plan.workload.global_batch_size)
    costs = CostTable.from_layouts(plan.model, plan.workload, plan.cluster, table)
    labels = [part_label(plan.cluster.parts, g) for g in range(len(costs.device_pools))]
    for idx, stage in enumerate(plan.stages):
        device = plan.estimate.stages[idx % plan.layout.pp].device
        of_stage = costs.device_pools[labels.index(device)] if device in labels else costs
        for layer in filter(plan.is_by_halves, stage.layer_idxs):
            if not of_stage.per_layer("by_halves", cases.index((idx, stage.recompute_of(layer))))[layer]:
                yield layer
