"""The operators of a plan's blocks on the roofline of its device: FLOPs, bytes, and the seconds that the estimate gives them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..cost_models.hardware.machine import peak_flops_per_s
from ..cost_models.layer.operators import CostInputs
from ..cost_models.layer.parts import ideal_times, part_of
from ..cost_models.layer.passes import layer_passes
from ..schema import TrainingPlan
from .planned_stages import costed_stages


class OperatorPoint(NamedTuple):
    """One operator of a block on one rank, forward, for one micro-batch.

    Attributes:
        part: products, attention or memory_bound.
        flops: zero of what is bound by memory, whose arithmetic is not counted.
        num_bytes: read and written once each.
        num_layers: blocks of the model that have it.
    """

    name: str
    part: str
    num_layers: int
    seconds: float
    flops: float
    num_bytes: float


class Roofline(NamedTuple):
    """Operators, and the two limits of their device (of a mixed cluster the weakest)."""

    device: str
    peak_flops_per_s: float
    bytes_per_s: float
    points: tuple[OperatorPoint, ...]


def roofline(plan: TrainingPlan) -> Roofline:
    """Return the operators of the plan's most frequent block."""
    costs = costed_stages(plan).costs
    device, precision = costs.cluster.weakest_device, plan.workload.precision
    peak, bandwidth = peak_flops_per_s(device, precision), device.memory_bandwidth_bytes_per_s
    runs = [(run.layer, run.count) for run in plan.model.layers if run.layer.inner_block is not None]
    counts = {layer: sum(count for other, count in runs if other == layer) for layer, _ in runs}
    layer = max(counts, key=counts.__getitem__)
    layouts = costs.layouts.select(np.zeros(1, dtype=np.int64))
    inputs = CostInputs(
        hidden_dim=plan.model.hidden_dim,
        layouts=layouts.replace(recompute=np.zeros_like(layouts.recompute)),
        scenario=costs.scenario,
    )
    passes = layer_passes(layer, inputs)
    arithmetic, traffic = (ideal_times(passes.operators, inputs, limit) for limit in ("arithmetic", "traffic"))
    points = tuple(
        OperatorPoint(
            op.name,
            part_of(op),
            counts[layer],
            float(time.forward_s[0]),
            float(by_flops.forward_s[0]) * peak,
            float(by_bytes.forward_s[0]) * bandwidth,
        )
        for op, time, by_flops, by_bytes in zip(passes.operators, passes.times, arithmetic, traffic, strict=True)
        if time.forward_s[0] > 0
    )
    return Roofline(device.name, peak, bandwidth, points)
