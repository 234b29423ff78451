"""The step of a plan as the cost model sees it: which rank of a pipeline runs which pass when, and what follows the last one.

The passes are those that the estimate is made of (cost_models/stage/step.py; for stages on parts of a mixed cluster mixed_step.py),
replayed in the order of the plan's schedule (cost_models/pipeline/simulation.py), so the last slice ends when the estimate says the
step does.

The step of a plan with an offload schedule as the simulation runs it: passes of each layer, and copies beside them.

The jobs are those of solvers/offload/simulation.py; micro-batches repeat, communication over data that nothing hides follows the
last one, and then the update. The last slice ends when the estimate says the step does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..cost_models.pipeline.orders import planned_order
from ..cost_models.pipeline.replay import PipelineShape, order_of
from ..cost_models.pipeline.simulation import Order, Pipeline, Timeline, simulate
from ..cost_models.stage.contents import pipeline_shape
from ..cost_models.stage.recompute import RecomputeCosts
from ..cost_models.stage.step import (
    StagePasses,
    copies_and_collectives,
    pass_seconds,
    transfer_of_stages,
)
from ..cost_models.stage.table import CostTable
from ..schema import Plan
from ..schema.arrays import FloatArray
from ..schema.cluster import part_label
from ..schema.layout_table import RECOMPUTES, LayoutTable
from ..schema.trace import COPIED, COPIES, DATA_PARALLEL, OPTIMIZER, SPLIT_VOCABULARY, Slice, StepTimeline, Stream
from ..solvers.offload.instance import OPTIONS, OffloadChoice
from ..solvers.offload.simulation import (
    COMPUTE,
    HOST,
    STORAGE,
    TO_DEVICE,
    TO_HOST,
    JobIndices,
    microbatch_jobs,
    run_jobs,
    update_jobs,
)
from .mixed_clusters import in_order_of_pools
from .rank_map import place_as_planned
from .tasks.offload_problem import PlanProblem, constant_s, problem_of_plan


def timeline(plan: Plan) -> StepTimeline:
    """Replay the step of a plan.

    Raises:
        ConfigError: its schedule has no order for these numbers.
    """
    if plan.offload is not None:
        return offload_timeline(plan)
    costs = costs_of(plan)
    shape = replace(pipeline_shape(costs, 0), order=planned_order(plan))
    order = order_of(shape)
    passes, each_way_s = _passes(plan, costs, shape)
    times = simulate(_pipeline(shape, passes, each_way_s), order)
    slices = [*_passes_of(times, order), *_once(plan, shape.pp, times.makespan_s, _copied_s(shape, passes))]
    size = plan.layout.stage_ranks
    ranks = tuple(range(r * size, (r + 1) * size) for r in range(shape.pp))
    return StepTimeline(tuple(slices), ranks, max(s.start_s + s.seconds for s in slices))


def costs_of(plan: Plan) -> CostTable:
    """Costs of the plan's layout (row 0), each layer with the recompute that its stage gives it."""
    batch = LayoutTable.from_layouts([plan.layout], plan.workload.global_batch_size)
    cluster = plan.cluster if _is_on_parts(plan) else place_as_planned(plan, plan.cluster)
    costs = CostTable.from_layouts(plan.model, plan.workload, cluster, batch)
    if plan.layout.recompute != "mixed":
        return costs
    options = [RECOMPUTES.index(stage.recompute_of(idx)) for stage in plan.stages for idx in stage.layer_idxs]
    return RecomputeCosts.from_table(costs).assigned(0, options)


def _is_on_parts(plan: Plan) -> bool:
    """Whether each stage lies on one part of a mixed cluster and is costed as such."""
    return bool(plan.cluster.parts) and all(stage.device for stage in plan.estimate.stages)


def _passes(plan: Plan, costs: CostTable, shape: PipelineShape) -> tuple[StagePasses, FloatArray]:
    """Seconds of one micro-batch in each stage, and of its transfers one way [S]."""
    first = np.array([stage.first_layer_idx for stage in plan.stages])
    boundaries = (*first.tolist(), int(first[-1]) + plan.stages[-1].num_layers)
    if not _is_on_parts(plan):
        each_way = float(costs.transfer_s[0]) / shape.num_model_chunks if shape.pp > 1 else 0.0
        return pass_seconds(costs, 0, boundaries), np.full(shape.num_stages, each_way)
    parts = plan.cluster.parts
    part_of_label = {part_label(parts, g): g for g in range(len(parts))}
    part_of_stage = np.array([part_of_label[stage.device] for stage in plan.estimate.stages])
    placed = in_order_of_pools(costs, tuple(dict.fromkeys(part_of_stage.tolist())))
    passes = pass_seconds(placed, 0, boundaries, part_of_stage)
    return passes, transfer_of_stages(placed, 0, part_of_stage) / 2


def _pipeline(shape: PipelineShape, passes: StagePasses, each_way_s: FloatArray) -> Pipeline:
    """Both ranks wait for a transfer, so it is part of the passes (`cost_models.stage.step.pipeline_s`)."""
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


def _copied_s(shape: PipelineShape, passes: StagePasses) -> float:
    """Seconds of copies and sums of parameters and gradients on the rank that waits the longest for data parallelism."""

    def on_ranks(seconds: FloatArray) -> FloatArray:
        return np.asarray(np.bincount(shape.rank_of_stage, seconds, shape.pp), dtype=np.float64)

    return copies_and_collectives(on_ranks(passes.copied), on_ranks(passes.exposed))[0]


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


_STREAMS: dict[int, Stream] = {
    COMPUTE: "compute",
    TO_HOST: "copies to the host",
    TO_DEVICE: "copies to the device",
    HOST: "host processors",
    STORAGE: "storage",
}


_UPDATES = {
    COMPUTE: "update on the device",
    TO_HOST: "gradients and states",
    TO_DEVICE: "parameters and states",
    HOST: "update by the host",
    STORAGE: "states on storage",
}


def offload_timeline(plan: Plan) -> StepTimeline:
    """The jobs of a plan's schedule, which is the same on every rank."""
    found = problem_of_plan(plan)
    passes, microbatch_s = _offload_passes(found)
    slices = [
        piece._replace(start_s=m * microbatch_s + piece.start_s, micro_batch=m)
        for m in range(found.instance.num_microbatches)
        for piece in passes
    ]
    end_s = found.instance.num_microbatches * microbatch_s
    copied_s = float(found.options.by_option[0].copied_s(0).sum())
    exposed_s = constant_s(found.options, 0) - copied_s
    once: tuple[tuple[Stream, str, float], ...] = (
        ("compute", COPIED, copied_s),
        ("communication", DATA_PARALLEL, exposed_s),
    )
    for stream, kind, seconds in once:
        if seconds > 0:
            slices.append(Slice(0, stream, kind, end_s, seconds))
            end_s += seconds
    slices += _offload_update(found, end_s)
    step_s = max(piece.start_s + piece.seconds for piece in slices)
    return StepTimeline(tuple(slices), (range(plan.layout.world_size),), step_s)


def _offload_passes(found: PlanProblem) -> tuple[list[Slice], float]:
    """Of the first micro-batch, and its seconds."""
    jobs, places = microbatch_jobs(found.instance, found.choice, found.prefetch)
    start, end = run_jobs(jobs, found.instance)
    slices = [
        Slice(0, _STREAMS[jobs[at].stream], kind, float(start[at]), float(end[at] - start[at]), 0, 0, layer)
        for at, layer, kind in _offload_job_names(places, found.choice)
        if end[at] > start[at]
    ]
    return slices, float(end.max())


def _offload_job_names(places: JobIndices, choice: OffloadChoice) -> Iterator[tuple[int, int, str]]:
    """Job, layer and kind of everything in a micro-batch."""
    for layer, (forward, backward) in enumerate(zip(places.forward, places.backward, strict=True)):
        yield forward, layer, "F"
        yield backward, layer, "BW"
    boundary = OPTIONS.index("boundary")
    moved = {layer: "block inputs" if choice.option[layer] == boundary else "activations" for layer in places.down}
    for layer, at in places.down.items():
        yield at, layer, moved[layer]
    gathered = {at: layer for layer, at, _ in places.gathered}
    for layer, at in places.up.items():
        if at not in gathered and layer in moved:
            yield at, layer, moved[layer]
    for at, layer in gathered.items():
        also = f" and {moved[layer]}" if places.up.get(layer) == at and layer in moved else ""
        yield at, layer, "parameters" + also
    for layer, at in places.reduced:
        yield at, layer, "gradients"


def _offload_update(found: PlanProblem, begin_s: float) -> Iterator[Slice]:
    """The update: pieces of layers in no layer's name."""
    jobs = update_jobs(found.instance, found.choice)
    start, end = run_jobs(jobs, found.instance)
    for job, first, last in zip(jobs, start, end, strict=True):
        if last > first:
            stream: Stream = "optimizer" if job.stream == COMPUTE else _STREAMS[job.stream]
            yield Slice(0, stream, _UPDATES[job.stream], begin_s + float(first), float(last - first))
