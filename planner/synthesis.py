"""Orders of passes made for one layout: its own stage times, and the memory that its devices have left.

Named schedules are made for passes of equal length and for one amount of memory. Where a rank holds the first and the last stage of
a V, an order made for the real passes and for all of a device's memory is shorter between the steps of memory of v-min, v-half and
zb-v (solvers/pipeline/greedy.py). A layout with the synthesised schedule has two chunks a rank over a V.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..cost_models.pipeline.replay import PENDING_GRADIENTS
from ..cost_models.pipeline.simulation import Order, Pipeline
from ..cost_models.stage.contents import contents_between, pipeline_shape
from ..cost_models.stage.memory import rank_headroom_bytes
from ..cost_models.stage.step import estimate_step, pass_seconds
from ..cost_models.stage.table import CostTable
from ..schema import Estimate
from ..schema.arrays import FloatArray
from ..schema.schedules import GIVEN, SMALLEST_OVER_A_V
from ..solvers.pipeline.greedy import quick_order

SYNTHESISED = GIVEN.idx
LEANEST = SMALLEST_OVER_A_V.idx
"""Of the named schedules over a V the one that holds least."""


@dataclass(frozen=True)
class SynthesisedOrder:
    """An order for given stages, and the estimate with it; it fits."""

    order: Order
    estimate: Estimate


def synthesise(costs: CostTable, idx: int, boundaries: tuple[int, ...]) -> SynthesisedOrder | None:
    """The best order found for the stages of layout ``idx``, whatever its schedule; None where none is within memory."""
    row = with_schedule(costs.select(np.array([idx])), SYNTHESISED)
    pipeline = pipeline_of(row, boundaries)
    order = quick_order(pipeline, tuple(float(room) for room in activation_headroom_bytes(row, boundaries)))
    if order is None:
        return None
    estimate = estimate_step(replace(row, order=order), 0, boundaries)
    return SynthesisedOrder(order, estimate) if estimate.fits else None


def with_schedule(costs: CostTable, schedule: int) -> CostTable:
    """The same layouts with another schedule: nothing that one layer costs differs."""
    return costs.with_layouts(costs.layouts.replace(schedule=np.full_like(costs.layouts.schedule, schedule)))


def pipeline_of(costs: CostTable, boundaries: tuple[int, ...]) -> Pipeline:
    """The passes of a layout (row 0) as `estimate_step` replays them: transfers are part of the passes that they join."""
    first, last = np.array(boundaries[:-1]), np.array(boundaries[1:])
    shape, passes = pipeline_shape(costs, 0), pass_seconds(costs, 0, boundaries)
    each_way = float(costs.transfer_s[0]) / shape.num_model_chunks
    kept = contents_between(costs, 0, first, last).activation_bytes

    def column(values: FloatArray) -> tuple[float, ...]:
        return tuple(float(value) for value in values)

    return Pipeline(
        num_microbatches=shape.num_microbatches,
        rank_of_stage=shape.rank_of_stage,
        forward_s=column(passes.forward + each_way),
        backward_s=column(passes.backward - passes.weight + each_way),
        weight_s=column(passes.weight),
        transfer_s=(0.0,) * (len(first) - 1),
        held_bytes=column(kept),
        backward_freed_bytes=column(-PENDING_GRADIENTS * kept),
        weight_freed_bytes=column((1 + PENDING_GRADIENTS) * kept),
    )


def activation_headroom_bytes(costs: CostTable, boundaries: tuple[int, ...]) -> FloatArray:
    """Bytes of activations that each rank of a layout (row 0) may hold [pp]."""
    contents = contents_between(costs, 0, np.array(boundaries[:-1]), np.array(boundaries[1:]))
    return rank_headroom_bytes(costs, 0, contents, cap_bytes=costs.cluster.memory_budget_bytes)
