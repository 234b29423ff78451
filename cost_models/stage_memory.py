"""What a pipeline stage holds under one layout, and the bytes of its device at the fullest moment of the schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..schema.layout import SCHEDULES
from . import memory
from .layouts import FloatArray, IntArray, LayoutBatch
from .pipeline_replay import Shape, held, in_flight
from .space_costs import SpaceCosts
from .stage_contents import StageContents, StepShape
from .vocabulary import MORE_IN_FLIGHT


def with_vocabulary(costs: SpaceCosts, contents: StageContents, at: int | slice = slice(None)) -> StageContents:
    """Contents of stages that have a share of the vocabulary each, under layouts ``at`` that split it."""
    share = costs.vocabulary
    if share is None:
        return contents
    is_split = costs.batch.vocabulary[at] == 1
    largest = np.maximum(share.embedding.num_params, share.head.num_params)[at]
    return replace(
        contents,
        params=contents.params + share.total("num_params")[at],
        trained=contents.trained + share.total("num_trained")[at],
        frozen_bytes=contents.frozen_bytes + share.total("frozen_bytes")[at],
        root_params=np.where(is_split, largest, contents.root_params),
        working_bytes=np.maximum(contents.working_bytes, share.head.working_bytes[at]) + share.held_bytes[at],
        logits=np.where(is_split, share.logits[at], contents.logits),
    )


def more_in_flight(costs: SpaceCosts, in_flight: Any, at: int | slice = slice(None)) -> Any:
    """Micro-batches in flight where the barrier of a split vocabulary keeps one more."""
    b = costs.batch
    more = np.minimum(b.num_microbatches[at], in_flight + MORE_IN_FLIGHT)
    return np.where(b.vocabulary[at] == 1, more, in_flight)


def stage_memory_parts(
    costs: SpaceCosts, idx: int, contents: StageContents, stage_idx: IntArray
) -> dict[str, FloatArray]:
    """Memory parts of stages ``stage_idx`` of layout ``idx``; the chunks of a rank count as one stage, equal to each other."""
    return memory.stage_memory(contents, _stage_shape(costs, idx, stage_idx), costs.workload, costs.cluster)


def _stage_shape(costs: SpaceCosts, idx: int, stage_idx: IntArray) -> StepShape:
    b = costs.batch
    if shape_of(costs, idx).splits_backward:
        flight = in_flight(shape_of(costs, idx))[stage_idx]
    else:
        flight = memory.in_flight(
            b.schedule[idx], b.num_microbatches[idx], b.pp[idx], stage_idx, b.num_model_chunks[idx]
        )
    flight = more_in_flight(costs, flight, idx)
    num_neighbours = (stage_idx > 0).astype(np.int64) + (stage_idx < b.pp[idx] - 1)
    return step_shape(b, flight, num_neighbours=num_neighbours, at=idx)


def kept_room_bytes(
    costs: SpaceCosts, idx: int, contents: StageContents, stage_idx: IntArray, *, cap_bytes: float
) -> FloatArray:
    """Activations that stages ``stage_idx`` of layout ``idx`` may keep for each micro-batch, bytes; negative where none fit."""
    shape = _stage_shape(costs, idx, stage_idx)
    room = memory.kept_room_bytes(contents, shape, costs.workload, costs.cluster, cap_bytes=cap_bytes)
    without = replace(contents, activation_bytes=np.zeros_like(contents.params))
    parts = memory.stage_memory(without, shape, costs.workload, costs.cluster)
    required = memory.required_bytes(memory.total_bytes(parts), parts["parameters"], costs.workload, costs.cluster)
    return np.asarray(np.where(required <= cap_bytes, room, -np.inf))


def rank_memory_parts(
    costs: SpaceCosts, idx: int, contents: StageContents
) -> tuple[StageContents, dict[str, FloatArray]]:
    """Contents and memory parts of each rank [..., pp] of layout ``idx``, given those of its stages [..., S], chunks included.

    Activations are those of the fullest moment of the schedule (pipeline_replay.held).
    """
    shape = shape_of(costs, idx)
    ranks = np.array(shape.rank_of_stage)
    activations = np.asarray(contents.activation_bytes)
    peak = np.stack(
        [(activations[..., ranks == r] @ counts.T).max(axis=-1) for r, counts in enumerate(held(shape))], axis=-1
    )
    whole = _of_ranks(costs, idx, contents)
    kept = whole.activation_bytes
    flight = np.divide(peak, kept, out=np.zeros_like(peak), where=kept > 0)
    step = step_shape(costs.batch, flight, num_neighbours=_neighbours_of_ranks(costs, shape), at=idx)
    return whole, memory.stage_memory(whole, step, costs.workload, costs.cluster)


def rank_room_bytes(costs: SpaceCosts, idx: int, contents: StageContents, *, cap_bytes: float) -> FloatArray:
    """Activations that each rank [..., pp] of layout ``idx`` may hold at once, given the contents of its stages [..., S]."""
    shape = shape_of(costs, idx)
    whole, once = _of_ranks(costs, idx, contents), np.ones(shape.pp)
    step = step_shape(costs.batch, once, num_neighbours=_neighbours_of_ranks(costs, shape), at=idx)
    return np.asarray(memory.kept_room_bytes(whole, step, costs.workload, costs.cluster, cap_bytes=cap_bytes))


def _of_ranks(costs: SpaceCosts, idx: int, contents: StageContents) -> StageContents:
    """Contents of each rank [..., pp] given those of its stages [..., S]."""
    shape = shape_of(costs, idx)
    on_rank = np.array(shape.rank_of_stage)[:, None] == np.arange(shape.pp)

    def summed(values: FloatArray) -> FloatArray:
        return np.asarray(values @ on_rank)

    return StageContents(
        params=summed(contents.params),
        trained=summed(contents.trained),
        expert_params=summed(contents.expert_params),
        block_trained=contents.block_trained,
        frozen_bytes=summed(contents.frozen_bytes),
        root_params=np.minimum(summed(contents.root_params), costs.root_params[idx]),
        block_params=contents.block_params,
        activation_bytes=summed(np.asarray(contents.activation_bytes)),
        working_bytes=contents.working_bytes,
        logits=summed(contents.logits),
        boundary_bytes=contents.boundary_bytes,
    )


def _neighbours_of_ranks(costs: SpaceCosts, shape: Shape) -> IntArray:
    """Stages that each rank [pp] receives from; torch's stages have receive buffers of their own."""
    stages = np.arange(shape.num_stages)
    neighbours = (stages > 0).astype(np.int64) + (stages < shape.num_stages - 1)
    if costs.workload.engine == "fsdp2":
        return np.bincount(np.array(shape.rank_of_stage), neighbours, shape.pp).astype(np.int64)
    return neighbours[: shape.pp]


def shape_of(costs: SpaceCosts, idx: int) -> Shape:
    """The schedule of layout ``idx`` and its numbers."""
    b = costs.batch
    return Shape(
        schedule=SCHEDULES[b.schedule[idx]],
        pp=int(b.pp[idx]),
        num_model_chunks=int(b.num_model_chunks[idx]),
        num_microbatches=int(b.num_microbatches[idx]),
        order=costs.order,
    )


def step_shape(
    batch: LayoutBatch, in_flight: IntArray | FloatArray, *, num_neighbours: IntArray, at: int | slice = slice(None)
) -> StepShape:
    """What memory.py looks at of the layouts ``at``, given the micro-batches in flight and the neighbours of a stage."""
    return StepShape(
        dp_replicate=batch.num_replicas[at],
        dp_shard=batch.num_shards[at],
        expert_shards=batch.expert_shards[at],
        gradient_shards=(batch.num_gradient_shards[at], batch.expert_gradient_shards[at]),
        optimizer_shards=(batch.num_optimizer_shards[at], batch.expert_optimizer_shards[at]),
        zero_stage=batch.zero_stage[at],
        is_replicated=batch.is_replicated[at],
        tp=batch.tp[at],
        num_microbatches=batch.num_microbatches[at],
        in_flight=in_flight,
        num_neighbours=num_neighbours,
        offload=batch.offload[at],
        offload_fraction=batch.offload_fraction[at],
    )


def contents_between(costs: SpaceCosts, idx: int, first: IntArray, last: IntArray) -> StageContents:
    """Contents of stages that hold layers ``first .. last - 1`` under layout ``idx``; arrays of any one shape."""

    def span(name: str) -> FloatArray:
        prefix = costs.prefix(name, idx)
        return np.asarray(prefix[last] - prefix[first])

    roots = np.concatenate([[0.0], np.cumsum(costs.per_layer("num_params", idx) * costs.is_root)])
    contents = StageContents(
        params=span("num_params"),
        trained=span("num_trained"),
        expert_params=span("expert_params"),
        block_trained=costs.block_trained[idx],
        frozen_bytes=span("frozen_bytes"),
        root_params=np.minimum(roots[last] - roots[first], costs.root_params[idx]),
        block_params=costs.block_params[idx],
        activation_bytes=span("activation_bytes"),
        working_bytes=_working_between(costs, idx, first, last),
        logits=np.where((first <= costs.head_idx) & (costs.head_idx < last), costs.logits[idx], 0.0),
        boundary_bytes=costs.boundary_bytes[idx],
    )
    return with_vocabulary(costs, contents, idx)


def _working_between(costs: SpaceCosts, idx: int, first: IntArray, last: IntArray) -> FloatArray:
    """Largest working set of a layer; where blocks recompute differently, under the options of those on the stage."""
    if costs.option_of_layer is None or costs.working_of_option is None:
        return np.asarray(costs.working_bytes[idx])
    largest = np.zeros(np.shape(first))
    for option, working in enumerate(costs.working_of_option):
        before = np.concatenate([[0], np.cumsum(costs.option_of_layer == option)])
        largest = np.maximum(largest, np.where(before[last] > before[first], working, 0.0))
    return largest
