"""The order of a plan's pipeline: which stages each rank has, and which passes it runs in which sequence.

Orders of named schedules are made for the plan's numbers (cost_models/pipeline/orders.py); a synthesised one comes with the plan.
"""

from __future__ import annotations

from ..cost_models.pipeline.orders import order_of_schedule, planned_order, to_torch_csv
from ..cost_models.pipeline.simulation import Order, Pipeline, simulate
from ..schema.errors import ConfigError
from ..schema.plan import Plan


def pipeline_order(plan: Plan) -> Order:
    """Return the passes of each rank of a pipeline, in its order."""
    order, layout = planned_order(plan), plan.layout
    if order is None:
        order = order_of_schedule(layout.schedule, layout.pp, plan.num_microbatches, layout.num_model_chunks)
    simulate(_unit_pipeline(plan), order)
    last = len(plan.stages) - 1
    turns = [action.micro_batch for row in order for action in row if (action.stage, action.kind) == (last, "F")]
    if turns != sorted(turns):
        raise ConfigError(f"the plan's pipeline_order takes the micro-batches of the last stage in the order {turns}")
    return order


def torch_table(plan: Plan) -> str:
    """Return `pipeline_order` as a table that torch loads."""
    return to_torch_csv(pipeline_order(plan))


def _unit_pipeline(plan: Plan) -> Pipeline:
    """Return passes of a second each: what `simulate` needs to tell whether an order is complete and ends."""
    stages = len(plan.stages)
    ones, zeros = (1.0,) * stages, (0.0,) * stages
    return Pipeline(
        num_microbatches=plan.num_microbatches,
        rank_of_stage=plan.rank_of_stage,
        forward_s=ones,
        backward_s=ones,
        weight_s=ones,
        transfer_s=zeros[1:],
        held_bytes=ones,
        backward_freed_bytes=zeros,
        weight_freed_bytes=ones,
    )
