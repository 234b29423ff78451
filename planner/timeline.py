"""The step of a plan as the cost model sees it: which rank of a pipeline runs which pass when, and what follows the last one.

The passes are those that the estimate is made of (cost_models/step.py; for stages on parts of a mixed cluster mixed_step.py),
replayed in the order of the plan's schedule (cost_models/pipeline_simulation.py), so the last slice ends when the estimate says the
step does.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..cost_models.layouts import RECOMPUTES, FloatArray, LayoutBatch
from ..cost_models.mixed_step import passes_on_parts, transfer_of_stages
from ..cost_models.option_costs import OptionCosts
from ..cost_models.pipeline_replay import Shape, order_of
from ..cost_models.pipeline_simulation import Order, Pipeline, Timeline, simulate
from ..cost_models.space_costs import SpaceCosts
from ..cost_models.stage_memory import shape_of
from ..cost_models.step import Passes, apart, pass_seconds
from ..schema import Plan
from ..schema.cluster_parts import label_of
from ..schema.trace import COPIED, COPIES, DATA_PARALLEL, OPTIMIZER, SPLIT_VOCABULARY, Slice, StepTimeline, Stream
from ..solvers.pipeline_csv import planned_order
from .mixed import in_order_of_parts
from .worth import as_placed


def timeline(plan: Plan) -> StepTimeline:
    """Replay the step of a plan.

    Raises:
        ConfigError: its schedule has no order for these numbers.
    """
    if plan.offload is not None:
        from .offload_timeline import offload_timeline  # its solver is not needed without

        return offload_timeline(plan)
    costs = costs_of(plan)
    shape = replace(shape_of(costs, 0), order=planned_order(plan))
    order = order_of(shape)
    passes, each_way_s = _passes(plan, costs, shape)
    times = simulate(_pipeline(shape, passes, each_way_s), order)
    slices = [*_passes_of(times, order), *_once(plan, shape.pp, times.makespan_s, _copied_s(shape, passes))]
    size = plan.layout.stage_ranks
    ranks = tuple(range(r * size, (r + 1) * size) for r in range(shape.pp))
    return StepTimeline(tuple(slices), ranks, max(s.start_s + s.seconds for s in slices))


def costs_of(plan: Plan) -> SpaceCosts:
    """Costs of the plan's layout (row 0), each layer with the recompute that its stage gives it."""
    batch = LayoutBatch.of([plan.layout], plan.workload.global_batch_size)
    cluster = plan.cluster if _is_on_parts(plan) else as_placed(plan, plan.cluster)
    costs = SpaceCosts.of(plan.model, plan.workload, cluster, batch)
    if plan.layout.recompute != "mixed":
        return costs
    options = [RECOMPUTES.index(stage.recompute_of(idx)) for stage in plan.stages for idx in stage.layer_idxs]
    return OptionCosts.of(costs).assigned(0, options)


def _is_on_parts(plan: Plan) -> bool:
    """Whether each stage lies on one part of a mixed cluster and is costed as such."""
    return bool(plan.cluster.parts) and all(stage.device for stage in plan.estimate.stages)


def _passes(plan: Plan, costs: SpaceCosts, shape: Shape) -> tuple[Passes, FloatArray]:
    """Seconds of one micro-batch in each stage, and of its transfers one way [S]."""
    first = np.array([stage.first_layer_idx for stage in plan.stages])
    last = first + np.array([stage.num_layers for stage in plan.stages])
    if not _is_on_parts(plan):
        each_way = float(costs.transfer_s[0]) / shape.num_model_chunks if shape.pp > 1 else 0.0
        return pass_seconds(costs, 0, first, last), np.full(shape.num_stages, each_way)
    parts = plan.cluster.parts
    part_of_label = {label_of(parts, g): g for g in range(len(parts))}
    part_of_stage = np.array([part_of_label[stage.device] for stage in plan.estimate.stages])
    placed = in_order_of_parts(costs, tuple(dict.fromkeys(part_of_stage.tolist())))
    passes = passes_on_parts(placed, 0, (*first, int(last[-1])), part_of_stage)
    return passes, transfer_of_stages(placed, 0, part_of_stage) / 2


def _pipeline(shape: Shape, passes: Passes, each_way_s: FloatArray) -> Pipeline:
    """Both ranks wait for a transfer, so it is part of the passes (`cost_models.step.step_s`)."""
    stages = range(shape.num_stages)
    ones = tuple(1.0 for _ in stages)
    return Pipeline(
        num_microbatches=shape.num_microbatches,
        rank_of_stage=shape.rank_of_stage,
        forward_s=tuple(float(passes.forward[s] + each_way_s[s]) for s in stages),
        backward_s=tuple(float(passes.backward[s] - passes.weight[s] + each_way_s[s]) for s in stages),
        weight_s=tuple(float(passes.weight[s]) for s in stages),
        transfer_s=(0.0,) * (shape.num_stages - 1),
        held_bytes=ones,
        backward_freed_bytes=(0.0,) * shape.num_stages,
        weight_freed_bytes=ones,
    )


def _passes_of(times: Timeline, order: Order) -> list[Slice]:
    begin = min(float(start[0]) for start in times.start_s)
    return [
        Slice(rank, "compute", action.kind, float(start) - begin, float(end - start), action.stage, action.micro_batch)
        for rank, row in enumerate(order)
        for action, start, end in zip(row, times.start_s[rank], times.end_s[rank], strict=True)
    ]


def _copied_s(shape: Shape, passes: Passes) -> float:
    """Seconds of copies and sums of parameters and gradients on the rank that waits the longest for data parallelism."""

    def on_ranks(seconds: FloatArray) -> FloatArray:
        return np.asarray(np.bincount(shape.rank_of_stage, seconds, shape.pp), dtype=np.float64)

    return apart(on_ranks(passes.copied), on_ranks(passes.exposed))[0]


def _once(plan: Plan, pp: int, end_s: float, copied_s: float) -> list[Slice]:
    """What the estimate adds to the passes: copies of parameters and gradients, communication over data that nothing hides, and the
    update.
    """
    parts, is_split = plan.estimate.breakdown_s, plan.layout.vocabulary == "split"
    of_vocabulary = parts.total - end_s - copied_s - parts.dp - parts.optimizer - parts.offload
    slices: list[Slice] = []
    once: list[tuple[Stream, str, float]] = [
        ("communication", SPLIT_VOCABULARY, of_vocabulary if is_split else 0.0),
        ("compute", COPIED, copied_s),
        ("communication", DATA_PARALLEL, parts.dp),
        ("communication", COPIES, parts.offload),
        ("optimizer", OPTIMIZER, parts.optimizer),
    ]
    for stream, name, seconds in once:
        if seconds > 0:
            slices += [Slice(rank, stream, name, end_s, seconds) for rank in range(pp)]
            end_s += seconds
    return slices
