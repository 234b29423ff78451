"""Measured loads of experts in a plan: the imbalance of each degree of expert parallelism, and the slots of the plan's experts.

For every ep that the experts divide by, they are placed on ep ranks without replicas (solvers/experts/placement.py). The mean over
the layers of the fullest rank's load over the average is what a layer's experts and its exchange of tokens take longer
(cost_models/layer/parallel.py), so that the search weighs ep, etp and the placement against one another.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..schema import ClusterSpec, ConfigError, ModelSpec, TrainingPlan, Workload
from ..schema.training_plan import LayerSlots
from ..schema.units import FloatArray
from ..solvers.experts.instance import validate_loads
from ..solvers.experts.placement import ExpertPlacement, place_experts


def loads_of_model(model: ModelSpec, load: Any) -> FloatArray:
    """Return loads [D, L, E] that belong to a model's blocks with experts; those of one layer stand for all."""
    loads = validate_loads(load)
    blocks = [layer.experts for layer in model.iter_layers() if layer.is_block and layer.experts]
    num_experts = {moe.num_experts for moe in blocks}
    if len(num_experts) != 1:
        raise ConfigError(
            f"{model.name} has no experts" if not num_experts else f"{model.name}: experts differ by layer"
        )
    if loads.shape[2] != min(num_experts) or loads.shape[1] not in (1, len(blocks)):
        raise ConfigError(
            f"expert loads of {loads.shape[1]} layers x {loads.shape[2]} experts; {model.name} has {len(blocks)} layers with "
            f"{min(num_experts)} experts"
        )
    return np.asarray(np.broadcast_to(loads, (len(loads), len(blocks), loads.shape[2])))


def with_imbalance(model: ModelSpec, cluster: ClusterSpec, workload: Workload, load: Any) -> Workload:
    """Return the workload with the imbalance of every ep up to the cluster's size."""
    loads = loads_of_model(model, load)
    degrees = [ep for ep in range(2, cluster.num_devices + 1) if loads.shape[2] % ep == 0]
    ratios = tuple((ep, float(_place_on_ranks(loads, ep).balance.mean())) for ep in degrees)
    return workload.replace(expert_imbalance=ratios)


def with_experts_placed(plan: TrainingPlan, load: Any) -> TrainingPlan:
    """Return the plan with the slots of every layer's experts; as it is where ep is 1."""
    ep = plan.layout.ep
    if ep == 1:
        return plan
    placement = _place_on_ranks(loads_of_model(plan.model, load), ep)
    slots = tuple(
        LayerSlots(experts=tuple(experts), shares=tuple(shares))
        for experts, shares in zip(placement.physical_to_logical.tolist(), placement.share.tolist(), strict=True)
    )
    note = (
        f"experts placed by their measured loads: the fullest of {ep} ranks has {placement.balance.mean():.3f} times the mean, "
        f"no placement less than {placement.lower_bound.mean():.3f}"
    )
    return plan.replace(expert_slots=slots, notes=(*plan.notes, note))


def _place_on_ranks(loads: FloatArray, ep: int) -> ExpertPlacement:
    return place_experts(None, scenarios=loads, num_gpus=ep, num_slots=loads.shape[2])
