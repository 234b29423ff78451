"""Measured loads of experts in a plan: the imbalance of each degree of expert parallelism, and the slots of the plan's experts.

For every ep that the experts divide by, they are placed on ep ranks without replicas (solvers/experts/placement.py), or stay in
order where our runtime would move more bytes for it than it saves. The mean over the layers of the fullest rank's load over the
average is what a layer's experts and its exchange of tokens take longer (cost_models/layer/parallel.py), so that the search weighs
ep, etp and the placement against one another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..schema import ClusterSpec, ConfigError, ModelSpec, TrainingPlan, Workload
from ..schema.stages import LayerSlots
from ..schema.units import MB, FloatArray
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
    ratios = tuple((ep, _stand_on_ranks(model, workload, loads, ep).ratio) for ep in degrees)
    return workload.replace(expert_imbalance=ratios)


def with_experts_placed(plan: TrainingPlan, load: Any) -> TrainingPlan:
    """Return the plan with the slots of every layer's experts; without where ep is 1 or experts stay in order."""
    ep = plan.layout.ep
    if ep == 1:
        return plan
    standing = _stand_on_ranks(plan.model, plan.workload, loads_of_model(plan.model, load), ep)
    placement, slots = standing.placement, tuple[LayerSlots, ...]()
    if standing.fetched_bytes >= standing.saved_bytes:
        note = (
            f"experts stay in order: the fullest of {ep} ranks has {standing.ratio:.3f} times the mean load; placed by their loads "
            f"{placement.balance.mean():.3f}, but weights of {standing.fetched_bytes / MB:.0f} MB a layer and micro-batch would "
            f"travel to save {standing.saved_bytes / MB:.0f} MB of tokens"
        )
    else:
        slots = tuple(
            LayerSlots(experts=tuple(experts), shares=tuple(shares))
            for experts, shares in zip(placement.physical_to_logical.tolist(), placement.share.tolist(), strict=True)
        )
        note = (
            f"experts placed by their measured loads: the fullest of {ep} ranks has {standing.ratio:.3f} times the mean, "
            f"no placement less than {placement.lower_bound.mean():.3f}"
        )
    return plan.replace(expert_slots=slots, notes=(*plan.notes, note))


@dataclass(frozen=True)
class _Standing:
    """A placement on ep ranks, the load of the fullest over the mean as experts stand, and bytes of a layer and micro-batch."""

    placement: ExpertPlacement
    ratio: float
    saved_bytes: float
    fetched_bytes: float


def _stand_on_ranks(model: ModelSpec, workload: Workload, loads: FloatArray, ep: int) -> _Standing:
    """Return how experts stand: placed, or in order where the runtime would move more weights than that saves of tokens.

    Our runtime stores experts in order. A rank fetches the weights of others that its slots hold in every forward pass, and sends
    their gradients back (runtime/models/experts.py); tokens travel to and fro, forward and backward. Counted for micro-batches of
    one sequence on the fullest rank. Other engines load experts where they are to stand.
    """
    placement = place_experts(None, scenarios=loads, num_gpus=ep, num_slots=loads.shape[2])
    placed = float(placement.balance.mean())
    if not workload.engine_facts.is_own_runtime:
        return _Standing(placement, placed, 1.0, 0.0)
    on_ranks = loads.reshape(*loads.shape[:2], ep, -1).sum(axis=3)
    in_order = float((on_ranks.max(axis=2) / on_ranks.mean(axis=2)).max(axis=0).mean())
    rank_of_expert = np.arange(loads.shape[2]) // (loads.shape[2] // ep)
    comes = rank_of_expert[placement.physical_to_logical] != rank_of_expert
    fetched = comes.reshape(len(comes), ep, -1).sum(axis=2).max(axis=1).mean()
    moe = next(layer.experts for layer in model.iter_layers() if layer.is_block and layer.experts)
    fetched_bytes = 2 * float(fetched) * moe.expert.num_params(model.hidden_dim) * workload.compute_bytes
    rows_bytes = workload.seq_len * moe.top_k * model.hidden_dim * workload.compute_bytes
    saved_bytes = 4 * (ep - 1) / ep * rows_bytes * (in_order - placed)
    return _Standing(placement, placed if saved_bytes > fetched_bytes else in_order, saved_bytes, fetched_bytes)
