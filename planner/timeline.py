"""The step of a plan as the cost model sees it: which rank of a pipeline runs which pass when, and what follows the last one.

The passes are those that the estimate is made of (cost_models/stage/step.py), replayed in the order of the plan's schedule
(cost_models/pipeline/simulation.py). Of a plan with an offload schedule they are those of each layer, with copies next to them, as
solvers/offload/simulation.py runs them: micro-batches repeat, communication over data that nothing hides follows the last one, and
then the update. Either way the last slice ends when the estimate says the step does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from ..cost_models.pipeline.orders import planned_order
from ..cost_models.pipeline.replay import PipelineShape, order_of
from ..cost_models.pipeline.simulation import simulate
from ..cost_models.stage.contents import pipeline_shape
from ..cost_models.stage.step import StagePasses, copies_and_collectives, pass_seconds, transfer_of_stages
from ..schema import TrainingPlan
from ..schema.trace import (
    COPIED,
    COPIES,
    DATA_PARALLEL,
    FILLING,
    OPTIMIZER,
    SPLIT_VOCABULARY,
    Slice,
    StepTimeline,
    Stream,
)
from ..schema.units import FloatArray
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
from .planned_stages import CostedStages, costed_stages
from .stage_choice import build_pipeline
from .tasks.offload_problem import PlanProblem, constant_s, problem_of_plan


def timeline(plan: TrainingPlan) -> StepTimeline:
    """Replay the step of a plan.

    Raises:
        ConfigError: its schedule has no order for these numbers.
    """
    if plan.offload is not None:
        return _offload_timeline(plan)
    stages = costed_stages(plan)
    shape = replace(pipeline_shape(stages.costs, 0), order=planned_order(plan))
    order = order_of(shape)
    passes, each_way_s = _passes(stages, shape)
    times = simulate(build_pipeline(shape, passes, each_way_s), order)
    begin_s = min(float(start[0]) for start in times.start_s)
    slices = [
        Slice(
            rank, "compute", action.kind, float(start) - begin_s, float(end - start), action.stage, action.micro_batch
        )
        for rank, row in enumerate(order)
        for action, start, end in zip(row, times.start_s[rank], times.end_s[rank], strict=True)
    ]
    slices += _after_passes(plan, shape, passes, times.makespan_s, filling_s=float(stages.costs.per_step.filling_s[0]))
    size = plan.layout.stage_ranks
    ranks = tuple(range(r * size, (r + 1) * size) for r in range(shape.pp))
    return StepTimeline(tuple(slices), ranks, max(s.start_s + s.seconds for s in slices))


def _passes(stages: CostedStages, shape: PipelineShape) -> tuple[StagePasses, FloatArray]:
    costs, pools = stages.costs, stages.pool_of_stage
    passes = pass_seconds(costs, 0, stages.boundaries, pools)
    if pools is not None:
        return passes, transfer_of_stages(costs, 0, pools) / 2
    each_way = float(costs.transfer_s[0]) / shape.num_model_chunks if shape.pp > 1 else 0.0
    return passes, np.full(shape.num_stages, each_way)


def _after_passes(
    plan: TrainingPlan, shape: PipelineShape, passes: StagePasses, end_s: float, *, filling_s: float
) -> list[Slice]:
    """Return what the estimate adds to the passes, of the rank that waits the longest for data parallelism."""

    def on_ranks(seconds: FloatArray) -> FloatArray:
        return np.asarray(np.bincount(shape.rank_of_stage, seconds, shape.pp), dtype=np.float64)

    terms = plan.estimate.breakdown_s
    copied_s = copies_and_collectives(on_ranks(passes.copied), on_ranks(passes.exposed))[0]
    rest_s = terms.total - end_s - filling_s - copied_s - terms.dp - terms.optimizer - terms.offload
    if plan.shares:  # the passes are those of the busiest ranks, copies those of the slowest device
        copied_s += rest_s
    added: tuple[tuple[Stream, str, float], ...] = (
        ("communication", SPLIT_VOCABULARY, rest_s if plan.layout.vocabulary == "split" else 0.0),
        ("communication", FILLING, filling_s),
        ("compute", COPIED, copied_s),
        ("communication", DATA_PARALLEL, terms.dp),
        ("communication", COPIES, terms.offload),
        ("optimizer", OPTIMIZER, terms.optimizer),
    )
    return _one_after_another(added, end_s, range(shape.pp))


def _one_after_another(added: Iterable[tuple[Stream, str, float]], begin_s: float, ranks: Iterable[int]) -> list[Slice]:
    slices: list[Slice] = []
    for stream, name, seconds in added:
        if seconds > 0:
            slices += [Slice(rank, stream, name, begin_s, seconds) for rank in ranks]
            begin_s += seconds
    return slices


_STREAMS: dict[int, tuple[Stream, str]] = {
    COMPUTE: ("compute", "update on the device"),
    TO_HOST: ("copies to the host", "gradients and states"),
    TO_DEVICE: ("copies to the device", "parameters and states"),
    HOST: ("host processors", "update by the host"),
    STORAGE: ("storage", "states on storage"),
}
"""Streams of solvers/offload/simulation.py, and what they do in the update."""


def _offload_timeline(plan: TrainingPlan) -> StepTimeline:
    """Return the jobs of a plan's schedule, which is the same on every rank."""
    problem = problem_of_plan(plan)
    jobs, indices = microbatch_jobs(problem.instance, problem.choice, problem.prefetch)
    start, end = run_jobs(jobs, problem.instance)
    passes = [
        Slice(0, _STREAMS[jobs[idx].stream][0], kind, float(start[idx]), float(end[idx] - start[idx]), 0, 0, layer)
        for idx, layer, kind in _job_names(indices, problem.choice)
        if end[idx] > start[idx]
    ]
    num_microbatches, microbatch_s = problem.instance.num_microbatches, float(end.max())
    starts = [(m, m * microbatch_s) for m in range(num_microbatches)]
    slices = [p._replace(start_s=start_s + p.start_s, micro_batch=m) for m, start_s in starts for p in passes]
    copied_s = float(problem.options.by_option[0].per_step.copied_s(0).sum())
    exposed_s = constant_s(problem.options, 0) - copied_s
    added: tuple[tuple[Stream, str, float], ...] = (
        ("compute", COPIED, copied_s),
        ("communication", DATA_PARALLEL, exposed_s),
    )
    slices += _one_after_another(added, num_microbatches * microbatch_s, [0])
    slices += _update(problem, num_microbatches * microbatch_s + max(copied_s, 0.0) + max(exposed_s, 0.0))
    step_s = max(piece.start_s + piece.seconds for piece in slices)
    return StepTimeline(tuple(slices), (range(plan.layout.world_size),), step_s)


def _job_names(indices: JobIndices, choice: OffloadChoice) -> Iterator[tuple[int, int, str]]:
    for layer, (forward, backward) in enumerate(zip(indices.forward, indices.backward, strict=True)):
        yield forward, layer, "F"
        yield backward, layer, "BW"
    boundary = OPTIONS.index("boundary")
    moved = {layer: "block inputs" if choice.option[layer] == boundary else "activations" for layer in indices.down}
    for layer, idx in indices.down.items():
        yield idx, layer, moved[layer]
    gathered = {idx: layer for layer, idx, _ in indices.gathered}
    for layer, idx in indices.up.items():
        if idx not in gathered and layer in moved:
            yield idx, layer, moved[layer]
    for idx, layer in gathered.items():
        also = f" and {moved[layer]}" if indices.up.get(layer) == idx and layer in moved else ""
        yield idx, layer, "parameters" + also
    for layer, idx in indices.reduced:
        yield idx, layer, "gradients"


def _update(problem: PlanProblem, begin_s: float) -> Iterator[Slice]:
    """Yield the update: pieces of layers in no layer's name."""
    jobs = update_jobs(problem.instance, problem.choice)
    start, end = run_jobs(jobs, problem.instance)
    for job, first, last in zip(jobs, start, end, strict=True):
        if last > first:
            stream, text = _STREAMS[job.stream]
            stream = "optimizer" if job.stream == COMPUTE else stream
            yield Slice(0, stream, text, begin_s + float(first), float(last - first))
