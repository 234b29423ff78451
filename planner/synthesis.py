"""Orders of passes made for one layout: its own stage times, and the memory that its devices have to spare.

Named schedules are made for passes of equal length and for one amount of memory. Where a rank holds the first and the last stage of
a V, an order made for the real passes and for all of a device's memory is shorter between the steps of memory of v-min, v-half and
zb-v (solvers/pipeline/greedy.py). A layout with the synthesised schedule has two chunks a rank over a V.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..cost_models.pipeline.replay import PENDING_GRADIENTS, PipelineShape
from ..cost_models.pipeline.simulation import Order, Pipeline
from ..cost_models.stage.contents import contents_between, pipeline_shape
from ..cost_models.stage.memory import rank_headroom_bytes
from ..cost_models.stage.step import StagePasses, estimate_step, pass_seconds
from ..cost_models.stage.table import CostTable
from ..schema import TrainingEstimate
from ..schema.schedules import GIVEN, SMALLEST_OVER_A_V
from ..schema.units import FloatArray
from ..solvers.pipeline.greedy import quick_order

SYNTHESISED = GIVEN.idx
LEANEST = SMALLEST_OVER_A_V.idx
"""Of the named schedules over a V the one that holds least."""


@dataclass(frozen=True)
class SynthesisedOrder:
    """An order for given stages, and the estimate with it; it fits."""

    order: Order
    estimate: TrainingEstimate


def synthesise(costs: CostTable, idx: int, boundaries: tuple[int, ...]) -> SynthesisedOrder | None:
    """Return the best order found for the stages of layout ``idx``, whatever its schedule; None where none is within memory."""
    row = with_schedule(costs.select(np.array([idx])), SYNTHESISED)
    headroom = activation_headroom_bytes(row, boundaries)
    order = quick_order(pipeline_of(row, boundaries), tuple(float(bytes_) for bytes_ in headroom))
    if order is None:
        return None
    estimate = estimate_step(replace(row, order=order), 0, boundaries)
    return SynthesisedOrder(order, estimate) if estimate.fits else None


def with_schedule(costs: CostTable, schedule: int) -> CostTable:
    """Return the same layouts with another schedule: nothing that one layer costs differs."""
    return costs.with_layouts(costs.layouts.replace(schedule=np.full_like(costs.layouts.schedule, schedule)))


def pipeline_of(costs: CostTable, boundaries: tuple[int, ...]) -> Pipeline:
    """Return the passes of a layout (row 0) as `estimate_step` replays them."""
    shape, first, last = pipeline_shape(costs, 0), np.array(boundaries[:-1]), np.array(boundaries[1:])
    each_way_s = np.full(len(first), float(costs.transfer_s[0]) / shape.num_model_chunks)
    retained = contents_between(costs, 0, first, last).activation_bytes
    return build_pipeline(shape, pass_seconds(costs, 0, boundaries), each_way_s, retained)


def build_pipeline(
    shape: PipelineShape, passes: StagePasses, each_way_s: FloatArray, retained_bytes: FloatArray | None = None
) -> Pipeline:
    """Return passes whose transfers are part of them, as both ranks wait for a transfer.

    Args:
        each_way_s: seconds of a transfer after each stage [S].
        retained_bytes: activations of a micro-batch in each stage [S]; None where only times are of interest.
    """
    retained = np.ones(shape.num_stages) if retained_bytes is None else retained_bytes

    def column(values: FloatArray) -> tuple[float, ...]:
        return tuple(float(value) for value in values)

    return Pipeline(
        num_microbatches=shape.num_microbatches,
        rank_of_stage=shape.rank_of_stage,
        forward_s=column(passes.forward + each_way_s),
        backward_s=column(passes.backward - passes.weight + each_way_s),
        weight_s=column(passes.weight),
        transfer_s=(0.0,) * (shape.num_stages - 1),
        held_bytes=column(retained),
        backward_freed_bytes=column(-PENDING_GRADIENTS * retained),
        weight_freed_bytes=column((1 + PENDING_GRADIENTS) * retained),
    )


def activation_headroom_bytes(costs: CostTable, boundaries: tuple[int, ...]) -> FloatArray:
    """Return the bytes of activations that each rank of a layout (row 0) may hold [pp]."""
    contents = contents_between(costs, 0, np.array(boundaries[:-1]), np.array(boundaries[1:]))
    return rank_headroom_bytes(costs, 0, contents, cap_bytes=costs.cluster.memory_budget_bytes)
