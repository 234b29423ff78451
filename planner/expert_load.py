"""Measured loads of experts in a plan: what their imbalance costs each degree of expert parallelism, and where experts stand.

For every ep that the experts divide by, they are placed on ep ranks without replicas (solvers/experts.py). The mean over
the layers of the fullest rank's load over the average is what a layer's experts and its exchange of tokens take longer
(cost_models/experts.py), so that the search weighs ep, etp and the placement against one another.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..schema import ClusterSpec, ConfigError, ModelSpec, Plan, Workload
from ..schema.model import Block, MoE
from ..schema.plan import LayerSlots
from ..solvers.expert_instance import FloatArray, as_loads
from ..solvers.experts import ExpertPlacement, place_experts


def loads_of_model(model: ModelSpec, load: Any) -> FloatArray:
    """Loads [D, L, E] that belong to a model's blocks with experts; those of one layer stand for all.

    Raises:
        ConfigError: a model without experts, or loads of another number of layers or experts.
    """
    loads = as_loads(load)
    num_experts = {moe.num_experts for moe in experts_of(model)}
    num_layers = len(experts_of(model))
    if len(num_experts) != 1:
        raise ConfigError(
            f"{model.name} has no experts" if not num_experts else f"{model.name}: experts differ by layer"
        )
    if loads.shape[2] != min(num_experts) or loads.shape[1] not in (1, num_layers):
        raise ConfigError(
            f"expert loads of {loads.shape[1]} layers x {loads.shape[2]} experts; {model.name} has {num_layers} layers with "
            f"{min(num_experts)} experts"
        )
    return np.asarray(np.broadcast_to(loads, (len(loads), num_layers, loads.shape[2])))


def experts_of(model: ModelSpec) -> list[MoE]:
    """The parts with experts of its blocks, in order."""
    return [layer.mlp for layer in model.iter_layers() if isinstance(layer, Block) and isinstance(layer.mlp, MoE)]


def with_imbalance(model: ModelSpec, cluster: ClusterSpec, workload: Workload, load: Any) -> Workload:
    """The workload with the imbalance of every ep up to the cluster's size.

    Raises:
        ConfigError: as `loads_of_model`.
    """
    loads = loads_of_model(model, load)
    degrees = [ep for ep in range(2, cluster.num_devices + 1) if loads.shape[2] % ep == 0]
    ratios = tuple((ep, float(placed_on(loads, ep).balance.mean())) for ep in degrees)
    return workload.replace(expert_imbalance=ratios)


def placed_on(loads: FloatArray, ep: int) -> ExpertPlacement:
    """Where the experts of every layer go on ``ep`` ranks."""
    return place_experts(None, scenarios=loads, num_gpus=ep, num_slots=loads.shape[2])


def with_experts_placed(plan: Plan, load: Any) -> Plan:
    """The plan with the slots of every layer's experts; as it is where ep is 1."""
    ep = plan.layout.ep
    if ep == 1:
        return plan
    placement = placed_on(loads_of_model(plan.model, load), ep)
    slots = tuple(
        LayerSlots(experts=tuple(experts), shares=tuple(shares))
        for experts, shares in zip(placement.physical_to_logical.tolist(), placement.share.tolist(), strict=True)
    )
    note = (
        f"experts placed by their measured loads: the fullest of {ep} ranks has {placement.balance.mean():.3f} times the mean, "
        f"no placement less than {placement.lower_bound.mean():.3f}"
    )
    return plan.replace(expert_slots=slots, notes=(*plan.notes, note))
